//! Subjects that are wrong on purpose: the harness names the site, and a fixture that cannot see a
//! mistake says so.

use conformance::contract::Contract;
use conformance::judge::Verdict;
use conformance::mutants::{self, Selection};
use conformance::subject::SubjectSpec;
use conformance::verify::{Loaded, Options, PackageResult, VerifyError, verify};
use device::Engine;
use fixtures::Package;
use fixtures::seeded::{self, Seeded};
use golden::Dump;
use spec::{Config, Tensors, Weights};

fn loaded(name: &str, config: &serde_json::Map<String, serde_json::Value>, tensors: &dyn Tensors) -> Loaded {
    let config = Config::parse(config, &[]).unwrap().config;
    let weights = Weights::load(&config, tensors).unwrap();
    Loaded::new(name, config, weights)
}

fn bundled_package(name: &str) -> (Loaded, Vec<u32>) {
    let package = Package::open(name).unwrap();
    let dump = Dump::open(package.dir()).unwrap();
    let prompt = dump.manifest().prompt.clone();
    (Loaded { golden: Some(dump), ..loaded(name, package.config(), package.tensors()) }, prompt)
}

fn seeded_package(model: Seeded) -> (Loaded, Vec<u32>) {
    (loaded(&model.name, &model.config, &model), model.prompt.clone())
}

fn run(
    (package, prompt): &(Loaded, Vec<u32>),
    contract: &str,
    mutate: Option<&str>,
) -> Result<PackageResult, VerifyError> {
    let contract = Contract::named(contract).unwrap();
    let selection = mutate.map(|m| Selection::parse(m).unwrap());
    let subject = SubjectSpec::Npu(contract.name.parse::<Engine>().unwrap(), Default::default());
    let options = Options { mutate: selection.as_ref(), steps: 2, ..Options::new(&subject, &contract) };
    verify(package, prompt, &options, "karat verify".into())
}

fn failed(result: &PackageResult) -> Vec<&str> {
    let failed = result.sites.iter().filter(|site| site.verdict == Verdict::Failed);
    failed.map(|site| &*site.site).collect()
}

/// Exactly the taps of the mutated site fail, and nothing behind them.
#[test]
fn a_transposed_projection_is_named_and_not_inherited() {
    let llama = bundled_package("llama");
    let result = run(&llama, "int8", Some("lin-transpose-square@layers.1.q_proj")).unwrap();
    let passes = ["prefill", "step1", "step2", "step3", "step4"];
    assert_eq!(failed(&result), passes.map(|pass| format!("{pass}.layers.1.q_proj")));
    assert_eq!(result.first_failure.as_ref().unwrap().site, "prefill.layers.1.q_proj");
    assert_eq!(result.explanation.unwrap().named.unwrap().mutant, "lin-transpose-square");
    assert_eq!(result.verdict, Verdict::Failed);
}

#[test]
fn where_no_projection_is_square_the_mutant_is_refused() {
    let qwen3 = bundled_package("qwen3");
    let error = run(&qwen3, "int8", Some("lin-transpose-square@layers.1.q_proj")).unwrap_err();
    assert_eq!(
        error.to_string(),
        "lin-transpose-square applies to no site of qwen3 at layers.1.q_proj: it needs a square projection"
    );
}

/// A subject that is wrong everywhere in one way fails, and the mistake is named (or one that gives the
/// same values there). The whole table is tried by the audit; here a few go through the whole harness.
#[test]
fn mutants_fail_and_explain_themselves() {
    let packages = [
        seeded_package(seeded::heads_8_2_windows(2)),
        bundled_package("gemma4_e"),
        bundled_package("qwen3_moe"),
        bundled_package("qwen3_next"),
        bundled_package("deepseek_v3"),
    ];
    let mut seen = 0;
    for mutant in mutants::all().step_by(23) {
        let name = mutant.name();
        let failing = packages.iter().find_map(|package| {
            let result = run(package, "int8", Some(&name)).ok()?;
            (result.verdict == Verdict::Failed).then_some(result)
        });
        let Some(result) = failing else { continue };
        seen += 1;
        let explanation = result.explanation.expect("a failing site is explained");
        assert!(explanation.names(&name), "{name}: {explanation:?}");
    }
    assert!(seen >= 6, "{seen} of the mutants showed");
}

#[test]
fn one_token_is_mistrusted() {
    let (package, _) = bundled_package("llama");
    let result = run(&(package, vec![3]), "int8", None).unwrap();
    assert_eq!(result.verdict, Verdict::Mistrusted);
    assert_eq!(result.exit_code(), 3);
}

/// Clean engines show the spread that their formats declare: rms z of all linear sites together.
#[test]
fn clean_engines_are_calibrated() {
    let wide = seeded_package(seeded::wide(4));
    for engine in Contract::NAMES {
        let result = run(&wide, engine, None).unwrap();
        assert!(failed(&result).is_empty(), "{engine}: {:?}", failed(&result));
        let linear = ["_proj", "attn_out", "mlp_gate", "mlp_up", "mlp_out", "logits"];
        let sites = result.sites.iter().filter(|s| linear.iter().any(|l| s.site.ends_with(l)));
        let (mut elements, mut squares) = (0, 0.0);
        for site in sites {
            elements += site.inexact;
            squares += site.z_rms.powi(2) * site.inexact as f64;
        }
        let rms = (squares / elements as f64).sqrt();
        println!("{engine}: rms z {rms:.4} over {elements} elements");
        // Sums of bfp16 blocks fit f32 on this model: nothing rounds. Wider data are in the variance's tests.
        if *engine == "bfp16" {
            continue;
        }
        assert!(elements >= 100_000, "{engine}: {elements} elements");
        assert!((0.95..=1.1).contains(&rms), "{engine}: rms z {rms}");
    }
}

/// Mistakes of the device itself turn a package red: at a site, or in an image, or by a refusal.
#[test]
fn device_mutants_are_caught() {
    let packages = [
        seeded_package(seeded::heads_6_2(1)),
        bundled_package("qwen3_moe"),
        bundled_package("gemma4_e"),
        seeded_package(seeded::heads_8_2_windows(2)),
    ];
    let mut missed = Vec::new();
    for device in mutants::device::MUTANTS {
        let name = device.mutant.name();
        let caught = packages.iter().find_map(|package| {
            let result = run(package, "int8", Some(&name)).unwrap();
            let refused = matches!(result.verdict, Verdict::NotSupported | Verdict::Crashed);
            (refused || !failed(&result).is_empty()).then(|| {
                let at = result.first_failure.map_or(String::new(), |first| first.site);
                format!("{name}: {} {at} {}", result.verdict.name(), result.reason.unwrap_or_default())
            })
        });
        match caught {
            Some(how) => println!("{how}"),
            None => missed.push(name),
        }
    }
    assert!(missed.len() * 20 <= mutants::device::MUTANTS.len(), "not caught: {missed:?}");
}
