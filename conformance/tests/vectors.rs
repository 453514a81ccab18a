//! Vectors that leave, and results that come back: right ones, wrong ones, and none.

use assert_cmd::Command;
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
use tempfile::TempDir;

fn karat(args: &[&str]) -> (i32, String, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_karat")).args(args).env("NO_COLOR", "1").output().unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    (output.status.code().unwrap(), text(output.stdout), text(output.stderr))
}

fn read(file: PathBuf) -> Value {
    serde_json::from_slice(&fs::read(file).unwrap()).unwrap()
}

/// The exact results of a case, as an honest bench without rounding would give them.
fn expected(dir: &Path) -> Vec<f32> {
    let bytes = fs::read(dir.join("expected.safetensors")).unwrap();
    let (length, rest) = bytes.split_first_chunk::<8>().unwrap();
    let (header, data) = rest.split_at(u64::from_le_bytes(*length) as usize);
    let header: Value = serde_json::from_slice(header).unwrap();
    let place = |n: usize| header["r"]["data_offsets"][n].as_u64().unwrap() as usize;
    data[place(0)..place(1)].as_chunks::<8>().0.iter().map(|&w| f64::from_le_bytes(w) as f32).collect()
}

fn bring(dir: &Path, values: &[f32]) {
    let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
    fs::write(dir.join("y.f32"), bytes).unwrap();
}

/// An export of all cases, with exact results brought back; the directories of the cases by name.
fn exported(root: &TempDir) -> (String, Vec<(String, PathBuf)>) {
    let dir = root.path().join("vectors");
    let text = dir.display().to_string();
    let (code, out, err) = karat(&["check", "--subject", "reference", "--export", &text]);
    assert_eq!(code, 0, "{err}");
    assert!(!out.contains("without a form in plain arrays") && out.contains("karat check --from"), "{out}");
    let manifest = read(dir.join("manifest.json"));
    let cases: Vec<(String, PathBuf)> = manifest["cases"]
        .as_array()
        .unwrap()
        .iter()
        .map(|case| (case["case"].as_str().unwrap().into(), dir.join(case["dir"].as_str().unwrap())))
        .collect();
    assert_eq!(cases.len(), conformance::cases::all().len());
    for (_, case) in &cases {
        bring(case, &expected(case));
    }
    (text, cases)
}

fn judged(args: &[&str]) -> (i32, Value) {
    let (code, out, err) = karat(&[&["check", "--format", "json"], args].concat());
    (code, serde_json::from_str(&out).unwrap_or_else(|_| panic!("{out}{err}")))
}

fn find<'v>(report: &'v Value, case: &str) -> &'v Value {
    report["cases"].as_array().unwrap().iter().find(|c| c["case"] == case).unwrap()
}

#[test]
fn what_comes_back_right_passes_and_what_comes_back_transposed_does_not() {
    let root = TempDir::new().unwrap();
    let (dir, cases) = exported(&root);
    let (code, report) = judged(&["--from", &dir]);
    assert_eq!((code, &report["failed"], &report["not_supported"]), (0, &0.into(), &0.into()), "{report}");

    // [tokens, out] written as [out, tokens].
    let (name, case) = cases.iter().find(|(name, _)| name == "linear/row_17").unwrap();
    let shape = read(case.join("case.json"))["output"]["shape"].clone();
    let (rows, columns) = (shape[0].as_u64().unwrap() as usize, shape[1].as_u64().unwrap() as usize);
    let right = expected(case);
    let turned: Vec<f32> = (0..rows * columns).map(|n| right[n % rows * columns + n / rows]).collect();
    bring(case, &turned);
    let (code, report) = judged(&["--from", &dir]);
    assert_eq!((code, &report["verdict"], &report["failed"]), (1, &"FAILED".into(), &1.into()));
    let wrong = find(&report, name);
    assert_eq!((&wrong["verdict"], &wrong["first_wrong"]["row"]), (&"FAILED".into(), &0.into()));
    // The line that it prints shows it again, and only it.
    let again: Vec<&str> = wrong["repro"].as_str().unwrap().split(' ').skip(2).collect();
    let (code, report) = judged(&again);
    assert_eq!((code, report["cases"].as_array().unwrap().len()), (1, 1));
}

/// The queries' heads in another order: a kernel that takes the wrong key head for them.
#[test]
fn a_program_answers_the_vectors_of_attention() {
    let python = std::process::Command::new("python3").arg("--version").output();
    if !python.is_ok_and(|out| out.status.success()) {
        eprintln!("python3 is not installed: not tested");
        return;
    }
    let root = TempDir::new().unwrap();
    let (dir, cases) = exported(&root);
    let kernel = Path::new(env!("CARGO_MANIFEST_DIR")).join("../device/examples/python/kernel.py");
    let mut answered = 0;
    for (_, case) in cases.iter().filter(|(name, _)| name.starts_with("attention/")) {
        fs::remove_file(case.join("y.f32")).unwrap();
        let status = std::process::Command::new("python3").args([&kernel, case]).status().unwrap();
        assert!(status.success() && case.join("y.f32").is_file(), "{}", case.display());
        answered += 1;
    }
    let (code, report) = judged(&["--from", &dir]);
    assert_eq!((code, answered), (0, 7), "{report}");

    let (name, case) = cases.iter().find(|(name, _)| name == "attention/grouped_heads").unwrap();
    let shape = read(case.join("case.json"))["inputs"]["q"].clone();
    let [tokens, heads, width] = [0, 1, 2].map(|n| shape[n].as_u64().unwrap() as usize);
    let right = expected(case);
    let head = |t: usize, h: usize| &right[(t * heads + h) * width..][..width];
    let turned: Vec<f32> =
        (0..tokens).flat_map(|t| (0..heads).flat_map(move |h| head(t, heads - 1 - h))).copied().collect();
    bring(case, &turned);
    let (code, report) = judged(&["--from", &dir]);
    assert_eq!((code, &report["failed"]), (1, &1.into()));
    assert_eq!(find(&report, name)["verdict"], "FAILED");
}

#[test]
fn what_cannot_be_judged_is_said_by_name() {
    let root = TempDir::new().unwrap();
    let (dir, cases) = exported(&root);
    let at = |name: &str| cases.iter().find(|(n, _)| n == name).unwrap().1.clone();
    let (norm, linear) = (at("rms_norm/rows_differ"), at("linear/row_17"));

    fs::remove_file(norm.join("y.f32")).unwrap();
    let (code, report) = judged(&["--from", &dir]);
    assert_eq!((code, &report["verdict"]), (3, &"MISTRUSTED".into()));
    let reason = report["reason"].as_str().unwrap();
    assert!(reason.ends_with("cases came back without a result: rms_norm/rows_differ"), "{reason}");

    let mut values = expected(&norm);
    values[5] = f32::NAN;
    bring(&norm, &values);
    let right = expected(&linear);
    bring(&linear, &right[1..]);
    let (code, report) = judged(&["--from", &dir]);
    assert_eq!((code, &report["failed"]), (1, &2.into()));
    assert!(find(&report, "rms_norm/rows_differ")["first_wrong"]["found"].is_null(), "{report}");
    let pattern = find(&report, "linear/row_17")["pattern"].as_str().unwrap();
    assert!(pattern.starts_with("linear-row_17: its output has shape"), "{pattern}");
}

#[test]
fn vectors_that_are_not_what_was_exported_are_broken() {
    let root = TempDir::new().unwrap();
    let (dir, cases) = exported(&root);
    let (code, _, err) = karat(&["check", "--export", &dir]);
    assert!(code == 2 && err.contains("is not empty; vectors are written to a new directory"), "{err}");

    let file = Path::new(&dir).join("manifest.json");
    let honest = fs::read_to_string(&file).unwrap();
    let lie = |change: fn(&mut Value), sentence: &str| {
        let mut manifest: Value = serde_json::from_str(&honest).unwrap();
        change(&mut manifest);
        fs::write(&file, manifest.to_string()).unwrap();
        let (code, out, err) = karat(&["check", "--from", &dir]);
        assert!(code == 4 && out.is_empty() && err.contains(sentence), "{code}: {err}");
        fs::write(&file, &honest).unwrap();
    };
    lie(|m| m["cases"][0]["output"][0] = 999.into(), "is said to give");
    lie(|m| m["cases"][0]["dims"] = "tokens=0".into(), "no case of this build is");
    lie(|m| m["cases"][0]["dir"] = "../elsewhere".into(), "is no directory of a case");
    lie(|m| m["seed"] = 8.into(), "they are not the inputs that this build makes of its seed");
    lie(|m| m["schema"] = "karat/vectors/2".into(), "expected karat/vectors/1");

    let inputs = cases[0].1.join("inputs.safetensors");
    let mut bytes = fs::read(&inputs).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(&inputs, bytes).unwrap();
    let (code, _, err) = karat(&["check", "--from", &dir]);
    assert!(code == 4 && err.contains("inputs.safetensors: its sha256 is not the manifest's"), "{err}");
}
