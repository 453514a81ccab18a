//! Programs as subjects: complete ones in Python and C++, and all the ways in which a program can fail.

use assert_cmd::Command;
use serde_json::{Value, json};
use std::fs;
use std::path::{Path, PathBuf};
use tempfile::TempDir;

fn karat(args: &[&str]) -> (i32, String, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_karat")).args(args).env("NO_COLOR", "1").output().unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    (output.status.code().unwrap(), text(output.stdout), text(output.stderr))
}

fn verify(line: &str, sites: &str, more: &[&str]) -> (i32, Value) {
    let subject = format!("cmd:{line}");
    let args =
        [&["verify", "llama", "--subject", &subject, "--sites", sites, "--format", "json"], more].concat();
    let (code, out, error) = karat(&args);
    assert_eq!(error, "", "{args:?}");
    (code, serde_json::from_str::<Value>(&out).unwrap()["results"][0].take())
}

fn examples() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../device/examples")
}

fn sites(result: &Value) -> Vec<(&str, &str)> {
    let text =
        |site: &Value, field: &str| -> &'static str { site[field].as_str().unwrap().to_string().leak() };
    result["sites"]
        .as_array()
        .unwrap()
        .iter()
        .map(|site| (text(site, "site"), text(site, "verdict")))
        .collect()
}

/// Whether a tool is installed; a test says so where it is not.
fn has(tool: &str) -> bool {
    let found =
        std::process::Command::new(tool).arg("--version").output().is_ok_and(|out| out.status.success());
    if !found {
        eprintln!("{tool} is not installed: not tested");
    }
    found
}

/// A shell script that is run as `sh SCRIPT DIRECTORY`.
fn script(dir: &TempDir, body: &str) -> String {
    let file = dir.path().join("kernel.sh");
    fs::write(&file, body).unwrap();
    format!("sh {}", file.display())
}

#[test]
fn the_python_example_is_conformant() {
    if !has("python3") {
        return;
    }
    let kernel = examples().join("python/kernel.py");
    let (code, result) = verify(&format!("python3 '{}'", kernel.display()), "prefill.layers.0.*", &[]);
    assert_eq!(code, 0, "{result}");
    let names: Vec<&str> = sites(&result).iter().map(|(site, _)| *site).collect();
    let expected = [
        "attn_norm",
        "q_proj",
        "k_proj",
        "v_proj",
        "attn_ctx",
        "attn_out",
        "resid_mid",
        "mlp_norm",
        "mlp_gate",
        "mlp_up",
        "mlp_out",
        "out",
    ];
    assert_eq!(names, expected.map(|leaf| format!("prefill.layers.0.{leaf}")));
    assert_eq!(result["notes"], json!(["it does not compute gated_act, rope: the reference does"]));
}

#[test]
fn the_cpp_example_is_conformant_and_its_mistake_is_named() {
    if !has("c++") {
        return;
    }
    let dir = TempDir::new().unwrap();
    let build = |name: &str, flags: &[&str]| {
        let program = dir.path().join(name);
        let source = examples().join("cpp/kernel.cpp");
        let status = std::process::Command::new("c++")
            .args(["-O1", "-std=c++17", "-ffp-contract=off", "-o"])
            .args([&program, &source])
            .args(flags)
            .status();
        assert!(status.unwrap().success());
        program.display().to_string()
    };
    // 40 inputs of the down projection: 16 does not divide them.
    let (code, result) = verify(&build("kernel", &[]), "prefill.layers.1.mlp_out", &[]);
    assert_eq!((code, sites(&result)), (0, vec![("prefill.layers.1.mlp_out", "PASSED")]), "{result}");
    let (code, result) = verify(&build("forgets", &["-DFORGETS_TAIL"]), "prefill.layers.1.mlp_out", &[]);
    assert_eq!((code, sites(&result)), (1, vec![("prefill.layers.1.mlp_out", "FAILED")]));
    assert_eq!(result["explanation"]["mutant"], "lin-k-tail:16");
}

/// A crash takes the sites before it along, not the report.
#[test]
fn a_crash_is_reported_with_what_was_said() {
    let dir = TempDir::new().unwrap();
    let line = script(&dir, "echo 'out of tiles' >&2\nkill -SEGV $$\n");
    let (code, result) = verify(&line, "prefill.layers.0.q_proj", &[]);
    assert_eq!((code, result["verdict"].as_str()), (5, Some("CRASHED")));
    let reason = result["reason"].as_str().unwrap();
    assert!(reason.starts_with("linear at prefill.layers.0.q_proj: sh ended with signal: 11"), "{reason}");
    assert!(reason.ends_with(": out of tiles"), "{reason}");
    assert_eq!(result["reference"]["verdict"], "PASSED");

    let line = script(&dir, "exit 1\n");
    let (code, result) = verify(&line, "prefill.layers.0.q_proj", &[]);
    assert_eq!(code, 5);
    assert_eq!(result["reason"], "linear at prefill.layers.0.q_proj: sh ended with exit status: 1");
}

#[test]
fn a_program_that_hangs_is_ended_with_what_it_started() {
    let dir = TempDir::new().unwrap();
    let line = script(&dir, "sleep 600\n");
    let (code, result) = verify(&line, "prefill.layers.0.q_proj", &["--timeout", "0.5"]);
    assert_eq!(code, 5);
    assert_eq!(result["reason"], "linear at prefill.layers.0.q_proj: no answer within 0.5 s");
}

#[test]
fn outputs_that_cannot_be_used() {
    let dir = TempDir::new().unwrap();
    for (body, says) in [
        ("exit 0\n", "it wrote neither outputs.safetensors nor y.npy nor y.f32"),
        ("printf '\\0\\0\\0\\0' > \"$1/y.f32\"\n", "its output has shape [1], expected [19, 32]"),
        ("printf 'abc' > \"$1/y.f32\"\n", "y.f32: 3 bytes are not a whole number of f32"),
        (
            "printf 'abc' > \"$1/outputs.safetensors\"\n",
            "outputs.safetensors: a safetensors file starts with 8 bytes",
        ),
    ] {
        let (code, result) = verify(&script(&dir, body), "prefill.layers.0.q_proj", &[]);
        assert_eq!(code, 3, "{body}: {result}");
        let problem = result["problems"][0].as_str().unwrap();
        assert!(
            problem.starts_with("linear at prefill.layers.0.q_proj: ") && problem.contains(says),
            "{problem}"
        );
    }
}

#[test]
fn a_program_that_computes_nothing_decides_nothing() {
    let dir = TempDir::new().unwrap();
    let (code, result) = verify(&script(&dir, "exit 3\n"), "prefill.layers.0.q_proj", &[]);
    assert_eq!((code, result["reason"].as_str()), (3, Some("the subject computes none of this model's ops")));
    let (code, result) = verify("no-such-program-here", "prefill.layers.0.q_proj", &[]);
    assert_eq!(code, 5);
    assert!(result["reason"].as_str().unwrap().starts_with("no-such-program-here cannot be run: "));
    for (args, says) in [
        (&["verify", "llama", "--subject", "cmd:"][..], "subject cmd: is not known"),
        (&["verify", "llama", "--timeout", "2"], "--timeout needs"),
        (&["verify", "llama", "--subject", "cmd:x", "--timeout", "0"], "expected seconds, more than 0"),
    ] {
        let (code, _, error) = karat(args);
        assert!(code == 2 && error.contains(says), "{args:?}: {code} {error}");
    }
}
