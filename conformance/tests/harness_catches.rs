//! Subjects that are wrong on purpose: the harness names the site, and a fixture that cannot see a
//! mistake says so.

use conformance::contract::Contract;
use conformance::follow::View;
use conformance::judge::Verdict;
use conformance::mutants::{self, Selection};
use conformance::subject::SubjectSpec;
use conformance::verify::{Loaded, Options, PackageResult, VerifyError, verify};
use device::Engine;
use fixtures::seeded::{self, Seeded};
use fixtures::{Package, bundled};
use golden::Dump;
use reference::Model;
use spec::{Config, Tensors, Weights};

fn loaded(name: &str, config: &serde_json::Map<String, serde_json::Value>, tensors: &dyn Tensors) -> Loaded {
    let config = Config::parse(config, &[]).unwrap().config;
    let weights = Weights::load(&config, tensors).unwrap();
    let model = Model::new(config.clone(), weights.clone());
    Loaded { name: name.to_string(), config, weights, model, golden: None, topk: None, draft: None }
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
    let options = Options {
        subject: &SubjectSpec::Npu(contract.name.parse::<Engine>().unwrap()),
        contract: &contract,
        view: View::Own,
        mutate: selection.as_ref(),
        sites: None,
        steps: 2,
        pictures: false,
    };
    verify(package, prompt, &options, "karat verify".into())
}

fn failed(result: &PackageResult) -> Vec<&str> {
    let failed = result.sites.iter().filter(|site| site.verdict == Verdict::Failed);
    failed.map(|site| &*site.site).collect()
}

/// The issue's own example: exactly the taps of the mutated site fail, and nothing behind them.
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

/// Every mutant in the table turns at least one package red, at a site of its own, and is named first
/// (or another one is that gives the same values there).
#[test]
fn every_mutant_fails_somewhere_and_explains_itself() {
    let mut packages: Vec<(Loaded, Vec<u32>)> = vec![
        seeded_package(seeded::heads_6_2(1)),
        seeded_package(seeded::heads_8_2_windows(2)),
        seeded_package(seeded::square(3)),
    ];
    packages.extend(bundled().iter().filter(|name| name.as_str() != "examples").filter_map(|name| {
        Package::open(name)
            .ok()
            .filter(|p| !p.has_draft() && p.golden_json().is_some())
            .map(|_| bundled_package(name))
    }));
    let mut silent = Vec::new();
    let mut misnamed = Vec::new();
    for mutant in mutants::all() {
        let name = mutant.name();
        let seen = packages.iter().find_map(|package| {
            let result = run(package, "int8", Some(&name)).ok()?;
            (result.verdict == Verdict::Failed).then_some(result)
        });
        match seen {
            None => silent.push(name),
            Some(result) => {
                let named = result.explanation.and_then(|e| e.named);
                if named.as_ref().is_none_or(|named| named.mutant != name) {
                    misnamed.push((name, result.first_failure.map(|f| f.site), named));
                }
            }
        }
    }
    assert!(silent.is_empty(), "no package shows {silent:?}");
    let share = misnamed.len() as f64 / mutants::all().count() as f64;
    assert!(share <= 0.12, "{} mutants are not named first: {misnamed:#?}", misnamed.len());
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
    for engine in ["int8", "f32"] {
        let result = run(&wide, engine, None).unwrap();
        assert!(failed(&result).is_empty(), "{engine}: {:?}", failed(&result));
        let linear = ["_proj", "attn_out", "mlp_gate", "mlp_up", "mlp_out", "logits"];
        let sites = result.sites.iter().filter(|s| linear.iter().any(|l| s.site.ends_with(l)));
        let (mut elements, mut squares) = (0, 0.0);
        for site in sites {
            elements += site.elements;
            squares += site.z_rms.powi(2) * site.elements as f64;
        }
        let rms = (squares / elements as f64).sqrt();
        println!("{engine}: rms z {rms:.4} over {elements} elements");
        assert!(elements >= 100_000, "{engine}: {elements} elements");
        assert!((0.95..=1.1).contains(&rms), "{engine}: rms z {rms}");
    }
}
