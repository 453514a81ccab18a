//! Reports as people and systems read them, for one passing, one failing, one near-tie and one mistrusted
//! run; and what changed between two dumps.

use std::path::{Path, PathBuf};
use std::process::Command;
use tempfile::TempDir;

fn karat(args: &[&str]) -> (i32, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_karat")).args(args).env("NO_COLOR", "1").output().unwrap();
    assert!(output.stderr.is_empty(), "{}", String::from_utf8_lossy(&output.stderr));
    (output.status.code().unwrap(), String::from_utf8(output.stdout).unwrap())
}

/// The four runs: arguments, and the exit code.
fn runs() -> [(&'static str, Vec<String>, i32); 4] {
    let words = |line: &str| line.split(' ').map(str::to_string).collect::<Vec<_>>();
    [
        ("passing", words("verify qwen2"), 0),
        ("failing", words("verify llama --mutate lin-transpose-square@layers.1.q_proj"), 1),
        ("near-tie", words("verify qwen3"), 0),
        ("mistrusted", words("verify llama --prompt-ids ONE --tokens 1"), 3),
    ]
}

/// Runs one of the four in a format. Scores differ in the last digits between processors' elementary
/// functions, so numbers are masked; words, names and layout are what a snapshot shows.
fn report(args: &[String], code: i32, format: &str) -> String {
    let dir = TempDir::new().unwrap();
    let one = dir.path().join("one-token.txt");
    std::fs::write(&one, "7\n").unwrap();
    let one = one.to_str().unwrap();
    let args: Vec<&str> = args.iter().map(|a| if a == "ONE" { one } else { a.as_str() }).collect();
    let (found, text) = karat(&[&args[..], &["--format", format]].concat());
    assert_eq!(found, code, "{text}");
    text.replace(one, "one-token.txt")
}

fn masked() -> insta::internals::SettingsBindDropGuard {
    let mut settings = insta::Settings::clone_current();
    settings.add_filter(r"[-+]?\d+\.\d+(e-?\d+)?", "[n]");
    settings.add_filter(r"\d+e-?\d+", "[n]");
    settings.add_filter(r"[0-9a-f]{64}", "[sha256]");
    settings.add_filter(r"(?m)^ +(prefill|step\d+)\.\S+ .*$", "  [site]");
    settings.add_filter(r"(?m)[ ]+$", "");
    settings.bind_to_scope()
}

#[test]
fn text_reports() {
    let _guard = masked();
    for (name, args, code) in runs() {
        insta::assert_snapshot!(format!("text-{name}"), report(&args, code, "text"));
    }
}

#[test]
fn markdown_reports_fit_a_comment() {
    let _guard = masked();
    for (name, args, code) in runs() {
        let text = report(&args, code, "md");
        assert!(text.lines().count() <= 60, "{} lines", text.lines().count());
        insta::assert_snapshot!(format!("md-{name}"), text);
    }
}

/// The JSON without its long list of sites: names and kinds of fields.
#[test]
fn json_fields() {
    let _guard = masked();
    for (name, args, code) in runs() {
        let mut json: serde_json::Value = serde_json::from_str(&report(&args, code, "json")).unwrap();
        let result = &mut json["results"][0];
        let sites = result["sites"].as_array().unwrap().clone();
        result["sites"] = serde_json::json!([sites.first()]);
        insta::assert_snapshot!(format!("json-{name}"), serde_json::to_string_pretty(&json).unwrap());
    }
}

#[test]
fn other_systems_get_xml_and_sarif() {
    let (_, args, code) = &runs()[1];
    let junit = report(args, *code, "junit");
    assert!(junit.starts_with("<?xml") && junit.trim_end().ends_with("</testsuites>"));
    // The verdict, the logits, and the site in the prefill and four steps.
    assert_eq!(junit.matches("<failure ").count(), 2 + 5);
    let sarif: serde_json::Value = serde_json::from_str(&report(args, *code, "sarif")).unwrap();
    assert_eq!(sarif["version"], "2.1.0");
    let result = &sarif["runs"][0]["results"][0];
    assert_eq!((result["ruleId"].as_str(), result["level"].as_str()), (Some("FAILED"), Some("error")));
    assert!(result["message"]["text"].as_str().unwrap().contains("prefill.layers.1.q_proj"));
}

/// One page, nothing fetched, and its data is what the pictures are drawn from.
#[test]
fn the_page_is_self_contained() {
    let (_, args, code) = &runs()[1];
    let html = report(args, *code, "html");
    for outside in ["http://", "https://", "src=", "@import", "url("] {
        let found = html.replace("http://www.w3.org/2000/svg", "").contains(outside);
        assert!(!found, "the page refers to something outside: {outside}");
    }
    let from = html.find("id=\"data\">").unwrap() + "id=\"data\">".len();
    let data: serde_json::Value =
        serde_json::from_str(&html[from..from + html[from..].find("</script>").unwrap()]).unwrap();
    let wrong = data[0]["sites"].as_array().unwrap().iter().find(|s| s["verdict"] == "FAILED").unwrap();
    assert_eq!(wrong["site"], "prefill.layers.1.q_proj");
    assert_eq!((wrong["heat"]["rows"].as_u64(), wrong["heat"]["cols"].as_u64()), (Some(19), Some(32)));
    let elements: u64 = wrong["histogram"].as_array().unwrap().iter().map(|c| c.as_u64().unwrap()).sum();
    assert_eq!(elements, 19 * 32);
    assert_eq!(data[0]["positions"].as_array().unwrap().len(), 23);
}

fn goldens() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../golden/data")
}

#[test]
fn a_dump_is_identical_to_itself_and_a_device_differs_first_at_a_product() {
    let path = |run: &str| goldens().join("qwen3").join(run).display().to_string();
    let (code, text) = karat(&["diff", &path("reference"), &path("reference")]);
    assert_eq!(code, 0);
    assert!(text.starts_with("IDENTICAL · byte-identical 136 of 136 taps in 1 dumps"), "{text}");
    let (code, text) = karat(&["diff", &path("reference"), &path("npu-int8"), "--format", "json"]);
    assert_eq!(code, 1);
    let json: serde_json::Value = serde_json::from_str(&text).unwrap();
    assert_eq!((json["schema"].as_str(), json["verdict"].as_str()), (Some("karat/diff/1"), Some("CHANGED")));
    assert_eq!(json["first_beyond_rounding"], "prefill.layers.0.q_proj");
}

#[test]
fn different_prompts_are_refused_unless_forced() {
    let path = |name: &str| goldens().join(name).join("reference").display().to_string();
    let args = ["diff", &path("llama"), &path("qwen3")];
    let output = Command::new(env!("CARGO_BIN_EXE_karat")).args(args).output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    let error = String::from_utf8(output.stderr).unwrap();
    assert!(error.contains("cannot be compared") && error.contains("--force"), "{error}");
}

/// This build reproduces the repository's own goldens of the reference, to the byte, on every machine.
#[test]
fn the_reference_goldens_are_reproduced() {
    for fixture in ["llama", "qwen3"] {
        let source = goldens().join(fixture).join("reference");
        let manifest: serde_json::Value =
            serde_json::from_slice(&std::fs::read(source.join("manifest.json")).unwrap()).unwrap();
        let ids: Vec<String> =
            manifest["prompt"].as_array().unwrap().iter().map(|id| id.to_string()).collect();
        let dir = TempDir::new().unwrap();
        let (prompts, out) = (dir.path().join("p.txt"), dir.path().join("out"));
        std::fs::write(&prompts, ids.join(" ")).unwrap();
        let (prompts, out_name) = (prompts.to_str().unwrap(), out.to_str().unwrap());
        karat(&["dump", fixture, "--prompt-ids", prompts, "--out", out_name, "--tokens", "1"]);
        let (code, text) = karat(&["diff", source.to_str().unwrap(), out.join("0").to_str().unwrap()]);
        assert_eq!(code, 0);
        assert!(text.starts_with("IDENTICAL"), "{text}");
    }
}
