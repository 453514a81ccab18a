//! The Python package's own tests, and the exporter where its frameworks are installed.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

fn here() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

/// Runs Python with the package on its path; nothing where there is no Python.
fn python(args: &[&str], dir: &Path) -> Option<Output> {
    let run = Command::new("python3")
        .args(args)
        .current_dir(dir)
        .env("KARAT", env!("CARGO_BIN_EXE_karat"))
        .env("PYTHONPATH", here().join("python"))
        .env("PYTHONDONTWRITEBYTECODE", "1")
        .output();
    if run.is_err() {
        eprintln!("python3 is not installed: not tested");
    }
    run.ok()
}

#[test]
fn the_packages_own_tests_pass() {
    if let Some(run) = python(&["-m", "unittest", "discover", "-s", "tests"], &here().join("python")) {
        assert!(run.status.success(), "{}", String::from_utf8_lossy(&run.stderr));
    }
}

/// Needs torch and transformers (golden/export/requirements.txt).
#[test]
fn an_exported_golden_is_reproduced() {
    let dir = tempfile::TempDir::new().unwrap();
    let installed = python(&["-c", "import torch, transformers, safetensors"], dir.path());
    if !installed.is_some_and(|run| run.status.success()) {
        eprintln!("torch and transformers are not installed: not tested");
        return;
    }
    let exporter = here().join("../golden/export/export_golden.py");
    let prompts = dir.path().join("prompts.txt");
    std::fs::write(&prompts, "3 1 4 1 5 9 2 6 5\n").unwrap();
    for package in ["llama", "qwen3", "gemma2", "olmo2"] {
        let model = here().join("../fixtures/data").join(package);
        let out = dir.path().join(package);
        let text = |path: &Path| path.to_str().unwrap().to_string();
        let (exporter, prompts, model, target) = (text(&exporter), text(&prompts), text(&model), text(&out));
        let args = [&exporter[..], &model, "--prompt-ids", &prompts, "--out", &target, "--tokens", "2"];
        let run = python(&args, dir.path()).unwrap();
        assert!(run.status.success(), "{package}: {}", String::from_utf8_lossy(&run.stderr));

        let golden = text(&out.join("0"));
        let verify = |more: &[&str]| {
            let run = Command::new(env!("CARGO_BIN_EXE_karat"))
                .args([&["verify", &model, "--format", "json"], more].concat())
                .output()
                .unwrap();
            let report: serde_json::Value = serde_json::from_slice(&run.stdout)
                .unwrap_or_else(|_| panic!("{package}: {}", String::from_utf8_lossy(&run.stderr)));
            (run.status.code(), report["results"][0].clone())
        };
        let (code, result) = verify(&["--golden", &golden, "--subject", "npu:f32"]);
        assert_eq!(code, Some(0), "{package}: {}", result["reference"]);
        assert_eq!(result["reference"]["verdict"], "PASSED", "{package}: {}", result["reference"]);
        assert_eq!(result["reference"]["argmax_equal"], serde_json::json!([11, 11]));
        let (code, result) = verify(&["--subject", &format!("dump:{golden}")]);
        assert_eq!((code, &result["unmatched"]), (Some(0), &serde_json::Value::Null), "{package}: {result}");
    }
}
