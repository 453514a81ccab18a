//! Shared libraries as subjects: the C example, right and wrong in every way that it can be built.

#![cfg(target_os = "linux")]

use assert_cmd::Command;
use serde_json::{Value, json};
use std::path::Path;
use tempfile::TempDir;

fn karat(args: &[&str]) -> (i32, String, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_karat")).args(args).env("NO_COLOR", "1").output().unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    (output.status.code().unwrap(), text(output.stdout), text(output.stderr))
}

fn compiler() -> bool {
    let found =
        std::process::Command::new("cc").arg("--version").output().is_ok_and(|out| out.status.success());
    if !found {
        eprintln!("cc is not installed: not tested");
    }
    found
}

/// Builds a source to a library in `dir`.
fn build(dir: &TempDir, source: &Path, flags: &[&str]) -> String {
    let device = Path::new(env!("CARGO_MANIFEST_DIR")).join("../device");
    let stem = source.file_stem().unwrap().to_string_lossy();
    let library = dir.path().join(format!("lib{stem}{}.so", flags.concat()));
    let status = std::process::Command::new("cc")
        .args(["-O1", "-ffp-contract=off", "-shared", "-fPIC", "-I"])
        .arg(device.join("include"))
        .arg(source)
        .args(flags)
        .arg("-o")
        .arg(&library)
        .arg("-lm")
        .status();
    assert!(status.unwrap().success());
    format!("lib:{}", library.display())
}

fn example(dir: &TempDir, flags: &[&str]) -> String {
    build(dir, &Path::new(env!("CARGO_MANIFEST_DIR")).join("../device/examples/c/plugin.c"), flags)
}

fn verify(subject: &str, more: &[&str]) -> (i32, Value) {
    let args = [&["verify", "llama", "--subject", subject, "--format", "json"], more].concat();
    let (code, out, error) = karat(&args);
    assert_eq!(error, "", "{args:?}");
    (code, serde_json::from_str::<Value>(&out).unwrap()["results"][0].take())
}

fn failed(result: &Value) -> Vec<&str> {
    let sites = result["sites"].as_array().unwrap().iter();
    sites.filter(|site| site["verdict"] == "FAILED").map(|site| site["site"].as_str().unwrap()).collect()
}

#[test]
fn the_c_example_is_conformant() {
    if !compiler() {
        return;
    }
    let dir = TempDir::new().unwrap();
    let (code, result) = verify(&example(&dir, &[]), &[]);
    assert_eq!((code, failed(&result)), (0, vec![]), "{}", result["reason"]);
    assert_eq!(result["logits"]["argmax_equal"], json!([23, 23]));
    assert_eq!(result["contract"], "f32");
    let sites = result["sites"].as_array().unwrap();
    assert!(sites.iter().any(|site| site["site"] == "step4.layers.2.attn_ctx"));
    assert_eq!(result["notes"], json!(["it does not compute embed, gated_act, rope: the reference does"]));
}

#[test]
fn its_transposed_projection_is_explained() {
    if !compiler() {
        return;
    }
    let dir = TempDir::new().unwrap();
    let (code, result) = verify(&example(&dir, &["-DTRANSPOSED"]), &["--sites", "prefill.*"]);
    assert_eq!(code, 1);
    // Of llama's projections those of queries and of the context are square.
    let expected: Vec<String> = (0..3)
        .flat_map(|i| ["q_proj", "attn_out"].map(|leaf| format!("prefill.layers.{i}.{leaf}")))
        .collect();
    assert_eq!(failed(&result), expected);
    assert_eq!(result["first_failure"]["site"], "prefill.layers.0.q_proj");
    assert_eq!(result["explanation"]["mutant"], "lin-transpose-square");
}

#[test]
fn crashes_hangs_and_wild_writes_do_not_take_the_report() {
    if !compiler() {
        return;
    }
    let dir = TempDir::new().unwrap();
    for (flag, says) in [
        (
            "-DCRASHES",
            "linear at prefill.layers.0.q_proj: the library was stopped by signal 11 (segmentation fault): \
             about to read weights of 32 layers",
        ),
        ("-DHANGS", "linear at prefill.layers.0.q_proj: no answer within 1 s"),
        (
            "-DWILD",
            "rms_norm at prefill.layers.0.attn_norm: rms_norm wrote outside its output of 608 values: \
             0 before it, 1 behind it",
        ),
        ("-DMEDDLES", "rms_norm at prefill.layers.0.attn_norm: rms_norm wrote into its input x"),
    ] {
        let (code, result) = verify(&example(&dir, &[flag]), &["--timeout", "1"]);
        assert_eq!((code, result["reason"].as_str()), (5, Some(says)), "{flag}");
        assert_eq!(result["reference"]["verdict"], "PASSED", "{flag}");
    }
}

#[test]
fn libraries_that_are_none() {
    if !compiler() {
        return;
    }
    let dir = TempDir::new().unwrap();
    let source = |name: &str, text: &str| {
        let file = dir.path().join(name);
        std::fs::write(&file, text).unwrap();
        build(&dir, &file, &[])
    };
    let cases = [
        (example(&dir, &["-DOLD_ABI"]), "was built for interface version 8, this build has version 1"),
        (source("empty.c", "int nothing;\n"), "does not export karat_plugin_get; see karat.h"),
        (
            source(
                "null.c",
                "#include \"karat.h\"\nconst karat_plugin *karat_plugin_get(uint32_t abi) { return 0; }\n",
            ),
            "gave no table for interface version 1",
        ),
        (
            source(
                "contract.c",
                "#include \"karat.h\"\nstatic const karat_plugin t = {KARAT_ABI, sizeof t, \"mine\", \"int9\"};\n\
                 const karat_plugin *karat_plugin_get(uint32_t abi) { return &t; }\n",
            ),
            "the contract of mine is neither one of f32, int8",
        ),
        ("lib:no/such/library.so".to_string(), "no/such/library.so cannot be loaded"),
    ];
    for (subject, says) in cases {
        let (code, out, error) = karat(&["verify", "llama", "--subject", &subject]);
        assert_eq!((code, out.as_str(), error.lines().count()), (2, "", 1), "{subject}: {error}");
        assert!(error.contains(says), "{error}");
    }
}

/// A whole model in a library: here one that says the same for every token.
#[test]
fn a_model_of_its_own() {
    if !compiler() {
        return;
    }
    let dir = TempDir::new().unwrap();
    let file = dir.path().join("model.c");
    let text = r#"
        #include "karat.h"
        static void *load(const char *package) { return (void *)package; }
        static int32_t reset(void *model) { return KARAT_OK; }
        static int32_t step(void *m, const uint32_t *ids, uint64_t n, float *y, uint64_t vocab, karat_tap tap, void *c) {
            float embed[32] = {0};
            uint64_t shape[2] = {n, 32};
            for (uint64_t i = 0; i < n * vocab; i++) y[i] = i % vocab == 7;
            if (n == 1) tap(c, "embed", embed, shape, 2);
            tap(c, "layers.0.mystery", embed, shape + 1, 1);
            return KARAT_OK;
        }
        static const karat_plugin t = {.abi = KARAT_ABI, .size = sizeof t, .load = load, .reset = reset, .step_batch = step};
        const karat_plugin *karat_plugin_get(uint32_t abi) { return &t; }
    "#;
    std::fs::write(&file, text).unwrap();
    let (code, result) = verify(&build(&dir, &file, &["-w"]), &[]);
    assert_eq!(code, 1);
    assert_eq!(result["first_failure"]["site"], "prefill.logits");
    assert_eq!(result["unmatched"], json!(["layers.0.mystery"]));
    assert!(failed(&result).contains(&"step1.embed"));
    assert_eq!(result["logits"]["verdict"], "FAILED");
}

/// A model that adds up the ids that it is fed. Its sum is its state; with -DSECRET it also counts passes, which
/// it does not show.
const SUMMING: &str = r#"
    #include "karat.h"
    #include <string.h>
    static float sum, secret, sets;
    static void *load(const char *package) { return &sum; }
    static int32_t reset(void *m) { sum = secret = 0; return KARAT_OK; }
    static int32_t step(void *m, const uint32_t *ids, uint64_t n, float *y, uint64_t vocab, karat_tap tap, void *c) {
        uint64_t one = 1;
        for (uint64_t t = 0; t < n; t++) {
            sum += ids[t];
            for (uint64_t i = 0; i < vocab; i++) y[t * vocab + i] = sum;
        }
    #ifdef SECRET
        for (uint64_t i = 0; i < n * vocab; i++) y[i] += secret;
        secret++;
    #endif
        if (sets > 0) tap(c, "was_put_back", &sets, &one, 1);
        return KARAT_OK;
    }
    static int32_t get(void *m, karat_tap tap, void *c) {
        uint64_t one = 1;
        tap(c, "sum", &sum, &one, 1);
        return KARAT_OK;
    }
    static int32_t set(void *m, const char *site, const float *v, const uint64_t *shape, uint32_t rank) {
        if (strcmp(site, "sum") || rank != 1 || shape[0] != 1) return KARAT_FAILED;
        sum = *v;
        sets++;
        return KARAT_OK;
    }
    static const karat_plugin t = {.abi = KARAT_ABI, .size = sizeof t, .load = load, .reset = reset,
                                   .step_batch = step, .state_get = get, .state_set = set};
    const karat_plugin *karat_plugin_get(uint32_t abi) { return &t; }
"#;

// 3 + 4 = 7, then 7 + 5 = 12; with 7 put back into a model that forgot everything, 12 again. The secret counter
// adds 1 to the second pass, and is lost.
#[test]
fn the_state_of_a_model_is_read_and_put_back() {
    use device::plugin::{Plugin, Reply, Tap};
    if !compiler() {
        return;
    }
    let dir = TempDir::new().unwrap();
    let file = dir.path().join("summing.c");
    std::fs::write(&file, SUMMING).unwrap();
    for (flags, second, again) in [(&["-w"][..], 12.0, 12.0), (&["-w", "-DSECRET"], 13.0, 12.0)] {
        let library = build(&dir, &file, flags);
        let mut server = std::process::Command::new(env!("CARGO_BIN_EXE_karat"));
        server.args(["serve-plugin", library.strip_prefix("lib:").unwrap()]);
        let mut plugin = Plugin::start(server, std::time::Duration::from_secs(20)).unwrap();
        assert!(plugin.info().model && plugin.info().state);
        assert_eq!(plugin.load("nothing").unwrap(), Reply::Done);
        let last = |plugin: &mut Plugin, ids: &[u32]| {
            let Reply::Taps(taps) = plugin.step(ids, 2, "step").unwrap() else { panic!("no taps") };
            *taps.iter().find(|tap| tap.site == "logits").unwrap().values.last().unwrap()
        };
        assert_eq!(last(&mut plugin, &[3, 4]), 7.0);
        let Reply::Taps(state) = plugin.state().unwrap() else { panic!("no state") };
        assert_eq!(state, [Tap { site: "sum".into(), shape: vec![1], values: vec![7.0] }]);
        assert_eq!(last(&mut plugin, &[5]), second);
        assert_eq!(plugin.reset().unwrap(), Reply::Done);
        assert_eq!(plugin.set_state(&state[0]).unwrap(), Reply::Done);
        assert_eq!(last(&mut plugin, &[5]), again);
        let other = Tap { site: "sums".into(), ..state[0].clone() };
        assert_eq!(plugin.set_state(&other).unwrap(), Reply::Failed("state_set of sums returned 2".into()));
    }
    // And so does verify: every pass behind the first one sees that it was put back.
    let (_, result) = verify(&build(&dir, &file, &["-w"]), &[]);
    assert_eq!(result["unmatched"], json!(["was_put_back"]));
    let notes = result["notes"].to_string();
    assert!(notes.contains("its state was read behind every pass, and put back after a reset"), "{notes}");
}

/// Without one named package a whole model is not loaded, and the report says so.
#[test]
fn a_model_that_is_not_loaded_is_said() {
    if !compiler() {
        return;
    }
    let dir = TempDir::new().unwrap();
    let file = dir.path().join("summing.c");
    std::fs::write(&file, SUMMING).unwrap();
    let subject = build(&dir, &file, &["-w"]);
    let (code, out, error) = karat(&["verify", "llama", "qwen2", "--subject", &subject, "--format", "json"]);
    assert_eq!((code, error.as_str()), (3, ""), "{out}");
    let value: Value = serde_json::from_str(&out).unwrap();
    let notes = value["results"][1]["notes"].to_string();
    assert!(notes.contains("its whole model is loaded where one package is named"), "{notes}");
}
