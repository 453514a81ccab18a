//! What `karat verify` measures beside the verdict: further runs, a second subject, the layers' own errors, a
//! mutant site by site; known failures; a failing op as a case that stands alone.

use assert_cmd::Command;
use conformance::contract::Contract;
use conformance::judge::Verdict;
use conformance::mutants::Selection;
use conformance::subject::SubjectSpec;
use conformance::verify::{Loaded, Options, verify};
use device::{Engine, Fault, Key};
use fixtures::seeded;
use serde_json::{Value, json};
use spec::{Config, Weights};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use tempfile::TempDir;

fn karat(args: &[&str]) -> (i32, String, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_karat")).args(args).env("NO_COLOR", "1").output().unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    (output.status.code().unwrap(), text(output.stdout), text(output.stderr))
}

fn json(args: &[&str]) -> (i32, Value) {
    let (code, text, error) = karat(&[args, &["--format", "json"]].concat());
    (code, serde_json::from_str(&text).unwrap_or_else(|_| panic!("{text}{error}")))
}

const TRANSPOSED: &str = "lin-transpose-square@layers.1.q_proj";

/// Llama's square projections are q_proj and attn_out of three layers: six runs, each wrong at one site.
#[test]
fn a_mutant_without_a_site_is_made_at_one_site_at_a_time() {
    let (code, report) = json(&["verify", "llama", "--mutate", "lin-transpose-square"]);
    assert_eq!((code, &report["verdict"]), (1, &"FAILED".into()));
    let sites: Vec<&str> =
        report["mutation"]["sites"].as_array().unwrap().iter().map(|s| s["site"].as_str().unwrap()).collect();
    let expected = (0..3)
        .flat_map(|i| ["q_proj", "attn_out"].map(|leaf| format!("layers.{i}.{leaf}")))
        .collect::<Vec<_>>();
    assert_eq!(sites, expected);
    assert_eq!((&report["mutation"]["killed"], &report["mutation"]["survived"]), (&json!(6), &json!(0)));
    for (result, site) in report["results"].as_array().unwrap().iter().zip(&expected) {
        let wrong = result["sites"].as_array().unwrap().iter().filter(|s| s["verdict"] == "FAILED");
        assert!(wrong.clone().all(|s| s["site"].as_str().unwrap().ends_with(site.as_str())), "{site}");
        assert_eq!(wrong.count(), 5, "prefill and four steps of {site}");
        assert_eq!(result["repro"], format!("karat verify llama --mutate lin-transpose-square@{site}"));
    }
    let (_, text, _) = karat(&["verify", "llama", "--mutate", "lin-transpose-square@layers.*.q_proj"]);
    assert!(text.starts_with("lin-transpose-square: shown at 3 of 3 sites\n"), "{text}");
}

/// Scores of llama are far below 88, where exp leaves f32: nothing shows, exit code 3.
#[test]
fn a_mutant_that_survives_everywhere_is_inconclusive() {
    let (code, report) = json(&["verify", "llama", "--mutate", "attn-softmax-no-max"]);
    assert_eq!((code, &report["mutation"]["killed"]), (3, &json!(0)));
    assert!(report["mutation"]["survived"].as_u64().unwrap() >= 3);
}

#[test]
fn the_budget_names_the_layer_that_is_wrong() {
    let (_, report) = json(&["verify", "llama", "--mutate", TRANSPOSED, "--budget"]);
    let budget = &report["results"][0]["budget"];
    let parts = budget["parts"].as_array().unwrap();
    let sites: Vec<&str> = parts.iter().map(|part| part["site"].as_str().unwrap()).collect();
    assert_eq!(sites, ["embed", "layers.0.out", "layers.1.out", "layers.2.out", "logits"]);
    let shares: Vec<f64> = parts.iter().map(|part| part["share"].as_f64().unwrap()).collect();
    assert!((shares.iter().sum::<f64>() - 1.0).abs() < 1e-9, "{shares:?}");
    assert!(shares[2] > 0.95, "{shares:?}");
    // Honest int8: every layer has its part, and small errors add up.
    let (code, report) = json(&["verify", "llama", "--budget"]);
    let budget = &report["results"][0]["budget"];
    let closure = budget["closure"].as_f64().unwrap();
    assert_eq!(code, 0);
    assert!(closure > 0.0 && closure < 0.2, "{closure}");
    assert!(budget["parts"].as_array().unwrap().iter().all(|part| part["share"].as_f64().unwrap() < 0.9));
    let (_, text, _) = karat(&["verify", "llama", "--budget"]);
    assert!(text.contains("  budget     logit error") && text.contains("layers.2.out"), "{text}");
    // The reference against itself: no error, no shares.
    let (_, report) = json(&["verify", "llama", "--subject", "reference", "--budget"]);
    assert_eq!(report["results"][0]["budget"]["rms"], 0.0);
}

#[test]
fn a_baseline_names_the_first_site_that_got_worse() {
    let (code, report) = json(&["verify", "llama", "--mutate", TRANSPOSED, "--baseline", "npu"]);
    let baseline = &report["results"][0]["baseline"];
    assert_eq!((code, &baseline["verdict"]), (1, &"PASSED".into()));
    let worse = &baseline["first_worse"];
    assert_eq!(worse["site"], "prefill.layers.1.q_proj");
    assert_eq!((&worse["verdict"], &worse["baseline_verdict"]), (&"FAILED".into(), &"PASSED".into()));
    assert_eq!(baseline["worse"], 5);
    // The same subject twice: nothing is worse or better.
    let (code, report) = json(&["verify", "llama", "--baseline", "npu:int8"]);
    let baseline = &report["results"][0]["baseline"];
    assert_eq!((code, &baseline["worse"], &baseline["better"]), (0, &json!(0), &json!(0)));
    // Both are within what they declare; the size of the error says which is worse. 4-bit codes of w4a16
    // meet inputs in bf16, the reference rounds nothing: its first product is the first that is worse.
    let (code, report) = json(&["verify", "llama", "--subject", "npu:w4a16", "--baseline", "reference"]);
    let worse = &report["results"][0]["baseline"]["first_worse"];
    assert_eq!((code, &worse["verdict"]), (0, &"PASSED".into()), "{worse}");
    assert!(worse["rms_abs"].as_f64().unwrap() > worse["baseline_rms_abs"].as_f64().unwrap());
    let (code, _, error) = karat(&["verify", "llama", "--baseline", "gpu"]);
    assert_eq!(code, 2);
    assert!(error.contains("subject gpu is not known"), "{error}");
}

#[test]
fn an_honest_path_gives_the_same_bytes_again() {
    let (code, report) = json(&["verify", "llama", "--repeat", "3"]);
    let repeat = &report["results"][0]["repeat"];
    assert_eq!((code, &repeat["runs"], &repeat["changed"]), (0, &json!(3), &json!([])));
    assert!(repeat["taps"].as_u64().unwrap() > 200);
    let (code, _, error) = karat(&["verify", "llama", "--repeat", "0"]);
    assert_eq!((code, error.lines().count()), (2, 1), "{error}");
}

/// A launch that adds one unit in the last place to one value, in every other run: within every limit, and
/// not the same.
struct Flaky(usize);

static RUNS: AtomicUsize = AtomicUsize::new(0);

impl Fault for Flaky {
    fn launched(&self, key: Key, row: usize, _: usize, y: &mut [f32]) {
        if self.0 % 2 == 1 && row == 0 && key.layer == Some(1) {
            y[3] = f32::from_bits(y[3].to_bits() + 1);
        }
    }
}

/// A seeded model, loaded.
fn loaded_of(model: &seeded::Seeded) -> Loaded {
    let config = Config::parse(&model.config, &[]).unwrap().config;
    let weights = Weights::load(&config, model).unwrap();
    Loaded::new(&model.name, config, weights)
}

#[test]
fn bytes_that_change_between_runs_are_reported() {
    let model = seeded::heads_6_2(1);
    let loaded = loaded_of(&model);
    let contract = Contract::named("f32").unwrap();
    let subject = SubjectSpec::Npu(Engine::F32, Default::default());
    let mutant = Selection::parse("pack-tile-order").unwrap().mutant;
    let fault: fn() -> Arc<dyn Fault> = || Arc::new(Flaky(RUNS.fetch_add(1, Ordering::SeqCst)));
    let selection = Selection { mutant, site: None, fault: Some(fault), edit: None, in_loop: None };
    let options =
        Options { mutate: Some(&selection), repeat: 3, steps: 0, ..Options::new(&subject, &contract) };
    let result = verify(&loaded, &model.prompt, &options, String::new()).unwrap();
    assert_eq!((result.verdict, result.exit_code()), (Verdict::Mistrusted, 3));
    let repeat = result.repeat.unwrap();
    assert_eq!((repeat.runs, repeat.runs_changed), (3, 1));
    // Products of layer 1 change at their fourth column of the first row, and what is computed from them.
    let first = &repeat.changed[0];
    assert!(first.site.starts_with("prefill.layers.1."), "{}", first.site);
    assert_eq!((first.runs.clone(), first.first.row, first.first.col), (vec![2], 0, 3));
    assert!(result.reason.unwrap().contains("from run to run"));
}

// The NPU path gives the same bytes however a prompt is cut, in every kind of state: keys and values, convolutions,
// recurrent states.
#[test]
fn an_honest_path_does_not_see_the_cuts() {
    for package in ["llama", "qwen3_5"] {
        let (code, report) = json(&["verify", package, "--pieces"]);
        let pieces = report["results"][0]["pieces"].as_array().unwrap();
        let of = |key: &str| pieces.iter().map(|p| p[key].clone()).collect::<Vec<_>>();
        assert_eq!((code, of("tokens")), (0, vec![json!(1), json!(3), json!(7), json!(16)]), "{package}");
        assert_eq!(
            (of("changed"), of("verdict")),
            (vec![json!([]); 4], vec![json!("PASSED"); 4]),
            "{package}"
        );
        assert!(pieces.iter().all(|p| p["compared"].as_u64().unwrap() > 40), "{package}");
    }
    let (code, _, error) = karat(&["verify", "llama", "--pieces=0"]);
    assert!(code == 2 && error.contains("pieces of 1 token or more"), "{error}");
}

/// Rotates every row behind the first pass as if it stood one position earlier.
struct LateRotation;

impl Fault for LateRotation {
    fn position(&self, _: usize, row: usize, position: usize) -> usize {
        if position == row { position } else { position - 1 }
    }
}

// One pass over the whole prompt does not show the mistake; a prompt in pieces does.
#[test]
fn a_mistake_between_passes_shows_in_pieces() {
    let model = seeded::heads_6_2(1);
    let loaded = loaded_of(&model);
    let contract = Contract::named("f32").unwrap();
    let subject = SubjectSpec::Npu(Engine::F32, Default::default());
    let mutant = Selection::parse("pack-tile-order").unwrap().mutant;
    let fault: fn() -> Arc<dyn Fault> = || Arc::new(LateRotation);
    let selection = Selection { mutant, site: None, fault: Some(fault), edit: None, in_loop: None };
    let options = Options { mutate: Some(&selection), steps: 0, ..Options::new(&subject, &contract) };
    let whole = verify(&loaded, &model.prompt, &options, String::new()).unwrap();
    assert_ne!(whole.verdict, Verdict::Failed);
    let result = verify(&loaded, &model.prompt, &Options { pieces: &[3], ..options }, String::new()).unwrap();
    assert_eq!((result.verdict, result.pieces[0].verdict), (Verdict::Failed, Verdict::Failed));
    assert_eq!(result.first_failure.unwrap().site, "piece1.layers.0.q_rope");
    assert!(result.pieces[0].changed.contains(&"layers.0.q_rope".to_string()));
}

fn known(dir: &TempDir, entries: &Value) -> String {
    let file = dir.path().join("known.json");
    let text = json!({"schema": "karat/known-failures/1", "known": entries}).to_string();
    std::fs::write(&file, text).unwrap();
    file.display().to_string()
}

#[test]
fn known_failures_are_excused_until_their_day() {
    let dir = TempDir::new().unwrap();
    let entry =
        |site: &str, expires: &str| json!({"site": site, "reason": "the 8x8 design", "expires": expires});
    let run = |entries: Value| {
        json(&["verify", "llama", "--mutate", TRANSPOSED, "--known-failures", &known(&dir, &entries)])
    };
    let all = "llama/*.layers.1.q_proj";
    let tokens = || entry("llama/tokens", "2999-12-31");
    let (code, report) = run(json!([entry(all, "2999-12-31"), tokens()]));
    let outcome = &report["known_failures"];
    assert_eq!((code, outcome["known"].as_array().unwrap().len()), (0, 6), "{}", report["verdict"]);
    assert_eq!(outcome["new_failures"], json!([]));
    // Of five failing taps, and the tokens that they change, two are not known.
    let (code, report) = run(json!([entry("llama/step*.layers.1.q_proj", "2999-12-31")]));
    assert_eq!(code, 1);
    let new = json!(["llama/prefill.layers.1.q_proj", "llama/tokens"]);
    assert_eq!(report["known_failures"]["new_failures"], new);
    // A known failure that passes is listed, and fails nothing.
    let passing = entry("llama/prefill.logits", "2999-12-31");
    let (code, report) = run(json!([entry(all, "2999-12-31"), tokens(), passing]));
    assert_eq!(code, 0);
    assert_eq!(report["known_failures"]["new_passes"][0]["site"], "llama/prefill.logits");
    // An expired entry covers nothing, and fails even where nothing else does.
    let (code, report) = run(json!([entry(all, "2020-01-31")]));
    assert_eq!((code, report["known_failures"]["new_failures"].as_array().unwrap().len()), (1, 6));
    let file = known(&dir, &json!([entry("llama/*", "2020-01-31")]));
    let (code, text, _) = karat(&["verify", "llama", "--known-failures", &file]);
    assert_eq!(code, 1, "{text}");
    assert!(text.contains("expired: llama/*: the 8x8 design"), "{text}");
    let file = known(&dir, &json!([entry("llama/*", "next week")]));
    let (code, _, error) = karat(&["verify", "llama", "--known-failures", &file]);
    assert_eq!((code, error.lines().count()), (2, 1), "{error}");
    assert!(error.contains("expected a day as YYYY-MM-DD"), "{error}");
}

/// The values of a tensor in a safetensors file whose header names `name`.
fn tensor(file: &Path, name: &str) -> Vec<f64> {
    let bytes = std::fs::read(file).unwrap();
    let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let header: Value = serde_json::from_slice(&bytes[8..8 + length]).unwrap();
    let at = |n: usize| 8 + length + header[name]["data_offsets"][n].as_u64().unwrap() as usize;
    let data = &bytes[at(0)..at(1)];
    match header[name]["dtype"].as_str().unwrap() {
        "F64" => data.chunks(8).map(|c| f64::from_le_bytes(c.try_into().unwrap())).collect(),
        _ => data.chunks(4).map(|c| f64::from(f32::from_le_bytes(c.try_into().unwrap()))).collect(),
    }
}

fn exit(dir: &Path, program: &str, args: &[&str]) -> Option<i32> {
    let output = std::process::Command::new(program).args(args).current_dir(dir).output().ok()?;
    println!("{program} {args:?}: {}", String::from_utf8_lossy(&output.stdout));
    output.status.code()
}

/// A layer norm for an rms norm: as an extracted case it fails, the exact result passes, and so
/// does a kernel in C that is right.
#[test]
fn an_extracted_case_stands_alone() {
    let dir = TempDir::new().unwrap();
    let case = dir.path().join("case");
    let mutant = "norm-mean-subtracted@layers.1.attn_norm";
    let (code, report) = json(&["verify", "llama", "--mutate", mutant, "--extract", case.to_str().unwrap()]);
    assert_eq!(code, 1);
    assert!(report["extracted"].as_str().unwrap().starts_with("prefill.layers.1.attn_norm of llama"));
    let about: Value = serde_json::from_slice(&std::fs::read(case.join("case.json")).unwrap()).unwrap();
    assert_eq!(
        (&about["op"], &about["computes"]["mutant"]),
        (&"rms_norm".into(), &"norm-mean-subtracted".into())
    );
    assert_eq!(about["contract"], "int8");
    let exact = tensor(&case.join("expected.safetensors"), "r");
    let found = tensor(&case.join("expected.safetensors"), "subject");
    assert_eq!(about["output"]["shape"], json!([exact.len() / 32, 32]));
    assert!(exact.iter().zip(&found).any(|(r, y)| (r - y).abs() > 1e-3));
    let bytes: Vec<u8> = exact.iter().flat_map(|&r| (r as f32).to_le_bytes()).collect();
    std::fs::write(case.join("y.f32"), bytes).unwrap();
    std::fs::write(case.join("mine.c"), KERNEL).unwrap();
    if exit(&case, "python3", &["--version"]).is_some() {
        assert_eq!(exit(&case, "python3", &["check.py"]), Some(1));
        assert_eq!(exit(&case, "python3", &["check.py", "y.f32"]), Some(0));
        assert_eq!(exit(&case, "python3", &["check.py", "nothing.f32"]), Some(2));
    }
    if exit(&case, "cc", &["--version"]).is_some() {
        assert_eq!(exit(&case, "cc", &["-O1", "-Wall", "-Werror", "check.c", "-o", "check", "-lm"]), Some(0));
        assert_eq!(exit(&case, "./check", &[]), Some(1));
        assert_eq!(exit(&case, "./check", &["y.f32"]), Some(0));
        assert_eq!(exit(&case, "./check", &["case.json"]), Some(2));
        assert_eq!(
            exit(&case, "cc", &["-O1", "-DKERNEL=\"mine.c\"", "check.c", "-o", "mine", "-lm"]),
            Some(0)
        );
        assert_eq!(exit(&case, "./mine", &[]), Some(0));
    }
    // Of a clean run there is nothing to extract, and nothing is written.
    let none = dir.path().join("none");
    let (code, report) = json(&["verify", "llama", "--extract", none.to_str().unwrap()]);
    assert_eq!((code, none.exists()), (0, false));
    assert_eq!(report["extracted"], "no op failed: nothing was extracted");
}

const KERNEL: &str = r#"
void kernel(float *y)
{
    const long *shape;
    const float *x = input("x", &shape), *weight = input("weight", 0);
    long r, i;
    for (r = 0; r < shape[0]; r++) {
        double squares = 0.0;
        for (i = 0; i < shape[1]; i++) squares += (double)x[r * shape[1] + i] * x[r * shape[1] + i];
        for (i = 0; i < shape[1]; i++)
            y[r * shape[1] + i] = x[r * shape[1] + i] / sqrt(squares / shape[1] + number("eps")) * weight[i];
    }
}
"#;

/// A product goes with its weight, and the int8 limits with it.
#[test]
fn an_extracted_product_has_its_weight() {
    let dir = TempDir::new().unwrap();
    let case = dir.path().join("case");
    karat(&["verify", "llama", "--mutate", TRANSPOSED, "--extract", case.to_str().unwrap()]);
    let about: Value = serde_json::from_slice(&std::fs::read(case.join("case.json")).unwrap()).unwrap();
    assert_eq!((&about["op"], &about["inputs"]["w"]), (&"linear".into(), &json!([32, 32])));
    assert_eq!(tensor(&case.join("inputs.safetensors"), "w").len(), 32 * 32);
    if exit(&case, "python3", &["--version"]).is_some() {
        assert_eq!(exit(&case, "python3", &["check.py"]), Some(1));
    }
}

/// Llama's 4/2 heads and small scores hide two mistakes; without the flag nobody asks.
#[test]
fn a_strict_run_mistrusts_a_fixture_that_is_blind() {
    let (code, report) = json(&["verify", "llama", "--strict"]);
    assert_eq!((code, &report["verdict"]), (3, &"MISTRUSTED".into()));
    let reason = report["results"][0]["reason"].as_str().unwrap();
    assert!(reason.contains("attn-gqa-map:div-kv") && reason.contains("karat audit llama"), "{reason}");
    assert_eq!(karat(&["verify", "llama"]).0, 0);
}
