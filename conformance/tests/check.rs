//! `karat check` and `karat probe` as scripts see them.

use assert_cmd::Command;
use serde_json::Value;

fn karat(args: &[&str]) -> (i32, String, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_karat")).args(args).env("NO_COLOR", "1").output().unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    (output.status.code().unwrap(), text(output.stdout), text(output.stderr))
}

fn json(args: &[&str]) -> (i32, Value) {
    let (code, text, error) = karat(&[args, &["--format", "json"]].concat());
    (code, serde_json::from_str(&text).unwrap_or_else(|_| panic!("{text}{error}")))
}

#[test]
fn honest_subjects_pass_every_case() {
    for subject in ["npu", "npu:f32", "npu:w4a8", "npu:w4a16", "npu:bfp16", "reference", "emulate:w4a16"] {
        let (code, report) = json(&["check", "--subject", subject]);
        let wrong: Vec<&Value> =
            report["cases"].as_array().unwrap().iter().filter(|c| c["verdict"] == "FAILED").collect();
        assert_eq!(code, 0, "{subject}: {wrong:#?}");
        // The path joins the steps of attention and has no table lookup, slices and decay by themselves.
        let most = if subject.starts_with("npu") { 60 } else { 75 };
        assert!(report["passed"].as_u64().unwrap() >= most, "{subject}: {}", report["passed"]);
    }
}

/// A mistake fails the case that is meant for it, at its smallest, with a name and a command.
#[test]
fn a_failure_is_shrunk_and_explained() {
    let (code, report) =
        json(&["check", "--op", "linear", "--suite", "structure", "--mutate", "rows-beyond-tile"]);
    assert_eq!((code, &report["verdict"]), (1, &"FAILED".into()));
    let cases = report["cases"].as_array().unwrap();
    let failed: Vec<&str> = cases
        .iter()
        .filter(|case| case["verdict"] == "FAILED")
        .map(|case| case["case"].as_str().unwrap())
        .collect();
    assert_eq!(failed, ["linear/row_17", "linear/row_33", "linear/row_129"]);
    let case = cases.iter().find(|case| case["case"] == "linear/row_17").unwrap();
    assert!(case["shrunk"].as_str().unwrap().starts_with("tokens=17,in="), "{}", case["shrunk"]);
    assert_eq!(case["explanation"]["mutant"], "rows-beyond-tile");
    let again: Vec<&str> = case["repro"].as_str().unwrap().split(' ').skip(1).collect();
    assert_eq!(karat(&again).0, 1, "{again:?}");
}

#[test]
fn mutants_of_other_ops_fail_their_cases() {
    for (mutant, case) in [
        ("norm-eps-outside-sqrt", "rms_norm/large_eps"),
        ("attn-gqa-map:mod", "attn_scores/grouped_heads"),
        ("attn-gqa-map:div-kv", "attn_scores/many_groups"),
        ("attn-gqa-map:mod", "attention/grouped_heads"),
        ("attn-gqa-map:div-kv", "attention/one_token"),
        ("mask-causal-off-by-one:next", "attention/grouped_heads"),
        ("mask-window-off-by-one:wide", "attention/window"),
        ("mask-window-off-by-one:narrow", "attention/window"),
        ("attn-sink", "attention/softcap_and_sinks"),
        ("mask-window-off-by-one:wide", "attn_probs/window"),
        ("mask-causal-off-by-one:next", "attn_probs/causal"),
        ("rope-pairing", "rotate/half_split"),
        ("mlp-gate-up-swap", "gated_act/saturated"),
        ("mlp-act-variant:erf", "gated_act/gelu"),
        ("gdn-conv-taps:reversed", "causal_conv/taps"),
        ("gdn-head-map", "gdn_core/one_hot_keys"),
        ("moe-group-select:max", "router_index/groups"),
    ] {
        let (code, report) = json(&["check", "--case", case, "--mutate", mutant]);
        assert_eq!((code, &report["verdict"]), (1, &"FAILED".into()), "{mutant} on {case}: {report}");
    }
}

#[test]
fn shapes_come_from_a_package() {
    let (code, report) = json(&["check", "--shapes-of", "llama"]);
    let cases = report["cases"].as_array().unwrap();
    assert_eq!((code, cases.len() % 2), (0, 0));
    assert!(cases.iter().any(|case| case["dims"].as_str().unwrap().contains("in=")));
}

#[test]
fn a_wrong_call_is_one_sentence() {
    for (args, says) in [
        (&["check", "--op", "lineer"][..], "nearest: linear"),
        (&["check", "--case", "linear/row17"], "nearest: linear/row_17"),
        (&["check", "--case", "linear/row_17:rows=3"], "expected tokens=N"),
        (&["check", "--op", "append", "--mutate", "lin-bias-dropped"], "applies to no case"),
        (&["probe", "--shape", "12"], "KxN"),
        (&["probe", "--shape", "40x24", "--mutate", "lin-transpose-square"], "does not apply to 40x24"),
    ] {
        let (code, out, error) = karat(args);
        assert_eq!((code, error.lines().count()), (2, 1), "{args:?}: {out}{error}");
        assert!(error.contains(says), "{args:?}: {error}");
    }
}

/// A subject with some of the ops is judged by those; where none could be judged nothing is known.
#[test]
fn what_is_not_supported_is_counted_and_named() {
    let (code, text, _) = karat(&["check", "--op", "slice"]);
    assert_eq!(code, 3, "the NPU path has no such op by itself");
    assert!(
        text.ends_with("NOT_SUPPORTED on npu under int8: 0 passed, 0 failed, 1 not supported\n"),
        "{text}"
    );
    let (code, report) = json(&["check"]);
    assert_eq!((code, &report["verdict"]), (0, &"PASSED".into()));
    let ops = report["not_supported_ops"].as_array().unwrap();
    assert!(ops.contains(&"attn_scores".into()) && !ops.contains(&"attention".into()), "{ops:?}");
    let (_, text, _) = karat(&["check"]);
    assert!(text.contains("not supported: ") && text.contains(" not supported\n"), "{text}");
}

#[test]
fn a_known_case_is_excused_until_its_day() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("known.json");
    let write = |case: &str, day: &str| {
        let entry = serde_json::json!({"case": case, "reason": "launches of 16 rows", "expires": day});
        let text = serde_json::json!({"schema": "karat/known-failures/1", "known": [entry]});
        std::fs::write(&file, text.to_string()).unwrap();
    };
    let path = file.to_str().unwrap();
    let run = || {
        let mutant = ["--suite", "structure", "--mutate", "rows-beyond-tile", "--known-failures", path];
        json(&[&["check", "--op", "linear"][..], &mutant].concat())
    };
    write("linear/row_*", "2999-12-31");
    let (code, report) = run();
    assert_eq!((code, &report["skipped"]), (0, &3.into()), "{report}");
    write("linear/row_17", "2999-12-31");
    let (code, report) = run();
    let new = report["known_failures"]["new_failures"].as_array().unwrap();
    assert_eq!((code, new.len()), (1, 2), "{report}");
    write("linear/tail_of_n", "2020-01-01");
    assert_eq!(json(&["check", "--op", "linear", "--known-failures", path]).0, 1);
}

#[test]
fn a_mutant_that_no_case_sees_is_mistrusted() {
    let (code, report) =
        json(&["check", "--case", "linear/one_row", "--mutate", "q-round-trunc:association"]);
    assert_eq!((code, &report["verdict"]), (3, &"MISTRUSTED".into()));
}

#[test]
fn a_contract_that_contradicts_itself_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("contract.json");
    let write = |accumulator: &str, output: &str| {
        let linear = format!(
            r#"{{"input": "bf16", "weight": "bf16", "accumulator": "{accumulator}", "tile": 64, "output": "{output}"}}"#
        );
        std::fs::write(&file, format!(r#"{{"name": "mine", "linear": {linear}, "host": {{"ulps": 4}}}}"#))
            .unwrap();
    };
    let path = file.to_str().unwrap();
    write("bf16", "f32");
    let (code, _, error) = karat(&["check", "--subject", "reference", "--contract", path]);
    assert_eq!(code, 2);
    assert!(error.contains("contradicts itself: a sum held in bf16"), "{error}");
    // An honest subject of the mended contract keeps it; the f32 path, which is more precise, drifts.
    write("bf16", "bf16");
    let emulated = format!("emulate:{path}");
    assert_eq!(json(&["check", "--op", "linear", "--subject", &emulated]).0, 0);
}

#[test]
fn every_engine_uses_every_weight_once() {
    for subject in ["npu", "npu:f32", "npu:w4a8", "npu:w4a16", "npu:bfp16"] {
        let (code, report) = json(&["probe", "--subject", subject, "--shape", "67x35"]);
        assert_eq!((code, &report["map"]["name"]), (0, &"identity".into()), "{subject}: {report}");
        assert_eq!(report["right"], 67 * 35);
    }
}

#[test]
fn a_probe_names_the_map_and_the_stride() {
    let (code, report) = json(&["probe", "--shape", "40x24", "--mutate", "lin-stride-reinterpret"]);
    assert_eq!((code, &report["map"]["name"]), (1, &"[out, in] read as [in, out]".into()));
    let detail = report["map"]["detail"].as_str().unwrap();
    assert!(detail.contains("outputs should step by 40, inputs by 1"), "{detail}");
    let (_, text, _) = karat(&["probe", "--shape", "40x24", "--mutate", "lin-k-tail:32"]);
    assert!(text.contains("identity with dead elements; inputs 32 to 39 are dead"), "{text}");
    assert!(text.contains("................................00000000"), "{text}");
}

#[test]
fn every_engine_shows_what_it_declares() {
    for subject in ["npu", "npu:f32", "npu:w4a8", "npu:w4a16", "npu:bfp16"] {
        let args = ["probe", "--subject", subject, "--shape", "40x24", "--infer-contract"];
        let (code, report) = json(&args);
        assert_eq!(
            (code, &report["contract"]["contradictions"]),
            (0, &serde_json::json!([])),
            "{subject}: {report}"
        );
    }
}

/// The int8 engine under the contract of blocks: other operands, another sum.
#[test]
fn a_wrong_declaration_is_contradicted() {
    let (code, report) = json(&["probe", "--subject", "npu", "--contract", "bfp16", "--infer-contract"]);
    assert_eq!((code, &report["verdict"]), (1, &"FAILED".into()));
    let found = &report["contract"]["contradictions"][0];
    assert_eq!(found["fact"], "input");
    assert_eq!(found["found"], "128 levels from 0 to the largest of a row");
    assert_eq!(found["declared"], "128 levels from 0 to the largest of 8 values");
}

#[test]
fn a_probe_draws_a_picture() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("map.svg");
    let args = ["probe", "--shape", "40x24", "--mutate", "lin-k-tail:32", "--svg", file.to_str().unwrap()];
    assert_eq!(karat(&args).0, 1);
    let svg = std::fs::read_to_string(file).unwrap();
    // 24 outputs by 40 inputs, one square each; 8 inputs of every output are dead, and black.
    assert_eq!((svg.matches("<rect").count(), svg.matches("#222222").count()), (24 * 40, 24 * 8));
    assert!(svg.starts_with("<svg xmlns=") && svg.trim_end().ends_with("</svg>"));
}

/// Far into a text, and after a thousand steps of a recurrence: without a prompt of that length.
#[test]
fn long_ranges_are_judged_from_a_start() {
    for (case, mutant) in [
        ("rope_table/far", "rope-position-offset:restart"),
        ("attn_probs/far_window:heads=1,tokens=1,before=9999", "mask-window-off-by-one:wide"),
        ("gdn_core/thousand_steps", "gdn-state-lost"),
    ] {
        let (code, report) = json(&["check", "--case", case, "--subject", "emulate:f32"]);
        assert_eq!((code, &report["verdict"]), (0, &"PASSED".into()), "{case}");
        let (code, report) = json(&["check", "--case", case, "--mutate", mutant]);
        assert_eq!((code, &report["verdict"]), (1, &"FAILED".into()), "{case} under {mutant}: {report}");
    }
}
