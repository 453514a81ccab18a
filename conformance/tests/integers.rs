//! Models of whole numbers: one result, to the last bit, from every engine, and a limit of zero.

use assert_cmd::Command;
use conformance::contract::Contract;
use conformance::judge::Verdict;
use conformance::mutants::Selection;
use conformance::passes::Pass;
use conformance::subject::SubjectSpec;
use conformance::verify::{Loaded, Options, PackageResult, verify, whole_numbers};
use fixtures::integers::{self, Trace};
use spec::{Config, Site, Weights};
use tempfile::TempDir;

const SUBJECTS: [&str; 6] = ["reference", "npu:f32", "npu:int8", "npu:w4a8", "npu:w4a16", "npu:bfp16"];

fn loaded(name: &str) -> (Loaded, integers::Integers) {
    let model = integers::named(name).unwrap();
    let config = Config::parse(&model.seeded.config, &[]).unwrap().config;
    let weights = Weights::load(&config, &model.seeded).unwrap();
    (Loaded::new(name, config, weights), model)
}

/// Every value of a subject against the trace; the sites that were compared.
fn compare(subject: &str, package: &Loaded, trace: &Trace, passes: &[Pass]) -> Vec<String> {
    let spec: SubjectSpec = subject.parse().unwrap();
    let mut running = spec.build(&package.model, &package.config, &package.weights, None).unwrap();
    let (mut compared, mut first) = (vec![], 0);
    for pass in passes {
        let taps = running.pass(pass).unwrap();
        for (name, rows) in &trace.sites {
            let Some(found) = taps.get(&Site::parse(name).unwrap()) else { continue };
            let expected = rows[first..first + pass.ids.len()].iter().flatten();
            assert_eq!(found.len(), expected.clone().count(), "{subject}: values at {}.{name}", pass.name);
            for (n, (found, expected)) in found.iter().zip(expected).enumerate() {
                assert!(
                    found == expected,
                    "{subject}, {}.{name} value {n}: {found}, not {expected}",
                    pass.name
                );
            }
            compared.push(name.clone());
        }
        first += pass.ids.len();
    }
    compared.sort();
    compared.dedup();
    compared
}

// A prompt of 25 tokens in one pass, then four tokens one by one, against whole numbers in i64.
#[test]
fn every_engine_gives_the_whole_numbers() {
    for name in integers::NAMES {
        let (package, model) = loaded(name);
        let prompt = &model.seeded.prompt;
        let (ids, trace) = model.run(prompt, 4).unwrap();
        let step = |n: usize| Pass { name: format!("step{}", n + 1), ids: vec![ids[prompt.len() + n]] };
        let prefill = Pass { name: "prefill".into(), ids: prompt.clone() };
        let passes: Vec<Pass> = std::iter::once(prefill).chain((0..4).map(step)).collect();
        for subject in SUBJECTS {
            let compared = compare(subject, &package, &trace, &passes);
            assert_eq!(compared.len(), trace.sites.len(), "{name} on {subject}: {compared:?}");
        }
    }
}

fn run(package: &Loaded, prompt: &[u32], subject: &str, mutant: Option<&str>) -> PackageResult {
    let subject: SubjectSpec = subject.parse().unwrap();
    let (contract, mutate) = (Contract::exact(), mutant.map(|mutant| Selection::parse(mutant).unwrap()));
    let options = Options { mutate: mutate.as_ref(), ..Options::new(&subject, &contract) };
    verify(package, prompt, &options, "karat verify".into()).unwrap()
}

#[test]
fn a_limit_of_zero_passes_every_engine() {
    for name in integers::NAMES {
        let (package, model) = loaded(name);
        for subject in SUBJECTS {
            let result = run(&package, &model.seeded.prompt, subject, None);
            let wrong: Vec<_> = result.sites.iter().filter(|s| s.verdict != Verdict::Passed).collect();
            assert!(wrong.is_empty(), "{name} on {subject}: {wrong:?}");
            assert_eq!(result.verdict, Verdict::Passed, "{name} on {subject}: {:?}", result.reason);
            assert!(result.sites.iter().all(|site| site.inexact == 0 && site.max_abs == 0.0));
        }
    }
}

// Mistakes about layout, heads, masks, tails and rows: each gives a value that is off by 1/2 or more (router
// weights are halves), which nothing excuses.
#[test]
fn a_limit_of_zero_fails_mistakes_of_structure() {
    for (name, mutants) in [
        ("integer-layer", &["lin-transpose-square", "mask-window-off-by-one:wide", "kv-slot-off-by-one"][..]),
        (
            "integer-experts",
            &[
                "moe-sorted-dispatch",
                "moe-router-truncated:choices",
                "moe-scaling-factor",
                "moe-gate-up-layout:swapped",
                "moe-expert-down-transposed",
            ],
        ),
        (
            "integer-model",
            &[
                "lin-stride-reinterpret",
                "lin-row-offset",
                "lin-k-tail:last",
                "lin-bias-dropped",
                "attn-gqa-map:mod",
                "attn-gqa-map:div-kv",
                "mask-causal-off-by-one:next",
                "mask-layer-pattern",
                "rows-beyond-tile",
                "rows-permuted",
            ],
        ),
    ] {
        let (package, model) = loaded(name);
        for mutant in mutants {
            let result = run(&package, &model.seeded.prompt, "npu", Some(mutant));
            assert_eq!(result.verdict, Verdict::Failed, "{name}, {mutant}: {:?}", result.reason);
            let first = result.first_failure.as_ref().and_then(|failure| failure.element).unwrap();
            assert!((first.expected - first.found).abs() >= 0.5, "{name}, {mutant}: {first:?}");
        }
    }
}

// One whole number of 2784 more at one site, and the reference is what is broken.
#[test]
fn the_reference_is_held_to_them_first() {
    let (package, model) = loaded("integer-layer");
    let prompt = &model.seeded.prompt;
    let (ids, mut trace) = model.run(prompt, 4).unwrap();
    let held = whole_numbers(&package.model, &ids, prompt.len(), &trace).unwrap();
    assert_eq!((held.verdict, held.argmax_equal), (Verdict::Passed, Some((29, 29))));
    let value = &mut trace.sites.get_mut("layers.0.out").unwrap()[26][7];
    *value += 1.0;
    let expected = format!("value 7 is {} and not {value}", *value - 1.0);
    let held = whole_numbers(&package.model, &ids, prompt.len(), &trace).unwrap();
    assert_eq!(held.verdict, Verdict::Broken);
    assert_eq!(
        held.reason.unwrap(),
        format!("reference and whole numbers differ at step2.layers.0.out: {expected}")
    );
}

fn karat(args: &[&str]) -> (i32, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_karat")).args(args).env("NO_COLOR", "1").output().unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    (output.status.code().unwrap(), text(output.stdout) + &text(output.stderr))
}

// By name the limit is zero without being asked for. A prompt that ties is judged by the formats, and it is said why.
#[test]
fn verify_judges_them_at_zero() {
    let (code, text) = karat(&["verify", "integer-model", "--subject", "npu:w4a8"]);
    assert!(code == 0 && text.contains("reference  PASSED · golden whole numbers in i64"), "{text}");
    let mutated = ["verify", "integer-model", "--mutate", "attn-gqa-map:mod@layers.1.attn_ctx"];
    let (code, text) = karat(&mutated);
    assert!(code == 1 && text.contains("FAILED"), "{text}");

    let dir = TempDir::new().unwrap();
    let prompt = dir.path().join("twice.txt");
    std::fs::write(&prompt, "120 120 120\n").unwrap();
    let (code, text) = karat(&["verify", "integer-layer", "--prompt-ids", prompt.to_str().unwrap()]);
    assert!(code == 0 && text.contains("scores two keys alike"), "{text}");
}

// As files for somebody else's program: every container holds the same whole numbers.
#[test]
fn they_can_be_written_to_disk() {
    let dir = TempDir::new().unwrap();
    let prompt = dir.path().join("prompt.txt");
    let ids: Vec<String> = integers::integer_layer().seeded.prompt.iter().map(u32::to_string).collect();
    std::fs::write(&prompt, ids.join(" ")).unwrap();
    for container in ["safetensors", "gguf"] {
        let out = dir.path().join(container);
        let written = karat(&["convert", "integer-layer", "--to", container, "--out", out.to_str().unwrap()]);
        assert!(written.0 == 0 && written.1.contains("[120, 12, 86"), "{}", written.1);
        let (out, prompt) = (out.to_str().unwrap(), prompt.to_str().unwrap());
        let (code, text) =
            karat(&["verify", out, "--contract", "exact", "--prompt-ids", prompt, "--subject", "npu:bfp16"]);
        assert!(code == 0 && text.contains("PASSED"), "{container}: {text}");
    }
}
