//! The command line as scripts see it: exit codes, one sentence an error, nothing written.

use assert_cmd::Command;
use std::fs;
use std::path::{Path, PathBuf};
use tempfile::TempDir;

fn karat(args: &[&str]) -> (i32, String, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_karat")).args(args).env("NO_COLOR", "1").output().unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    (output.status.code().unwrap(), text(output.stdout), text(output.stderr))
}

fn bundled(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../fixtures/data").join(name)
}

/// A copy of a bundled package that a test may spoil.
fn copy(name: &str) -> TempDir {
    let dir = TempDir::new().unwrap();
    for entry in fs::read_dir(bundled(name)).unwrap() {
        let path = entry.unwrap().path();
        fs::copy(&path, dir.path().join(path.file_name().unwrap())).unwrap();
    }
    dir
}

/// Runs verify on a spoiled copy: the exit code, and the one sentence on standard error.
fn spoiled(name: &str, spoil: impl Fn(&Path)) -> (i32, String) {
    let dir = copy(name);
    spoil(dir.path());
    let (code, _, error) = karat(&["verify", dir.path().to_str().unwrap()]);
    let sentence = error.replace(dir.path().to_str().unwrap(), "DIR");
    assert_eq!(sentence.lines().count(), 1, "one sentence: {sentence}");
    (code, sentence)
}

fn replace(file: &Path, from: &str, to: &str) {
    let text = fs::read_to_string(file).unwrap();
    assert!(text.contains(from), "{from}");
    fs::write(file, text.replacen(from, to, 1)).unwrap();
}

#[test]
fn a_clean_package_is_conformant_and_reports_in_json() {
    let (code, out, error) = karat(&["verify", "llama", "--format", "json"]);
    assert_eq!((code, error.as_str()), (0, ""));
    let json: serde_json::Value = serde_json::from_str(&out).unwrap();
    assert_eq!(json["schema"], "karat/verify/1");
    let result = &json["results"][0];
    assert_eq!(result["reference"]["verdict"], "PASSED");
    assert_eq!(result["reference"]["argmax_equal"], serde_json::json!([23, 23]));
    assert!(result["reference"]["kl_max"].as_f64().unwrap() <= 1e-9);
    assert!(result["sites"].as_array().unwrap().len() > 200);
    assert_eq!(result["cost"]["dequantised_bytes_per_token"], 0);
}

#[test]
fn a_mutant_is_exit_code_1_with_place_and_values() {
    let (code, out, _) =
        karat(&["verify", "llama", "--mutate", "lin-transpose-square@layers.1.q_proj", "--format", "json"]);
    assert_eq!(code, 1);
    let json: serde_json::Value = serde_json::from_str(&out).unwrap();
    let failure = &json["results"][0]["first_failure"];
    assert_eq!(failure["site"], "prefill.layers.1.q_proj");
    assert!(failure["row"].is_u64() && failure["col"].is_u64());
    assert!(failure["expected"].is_f64() && failure["found"].is_f64());
    let repro = json["results"][0]["repro"].as_str().unwrap();
    assert_eq!(repro, "karat verify llama --mutate lin-transpose-square@layers.1.q_proj");
}

#[test]
fn calls_that_make_no_sense_are_exit_code_2() {
    for (args, says) in [
        (
            &["verify", "qwen3", "--mutate", "lin-transpose-square@layers.1.q_proj"][..],
            "needs a square projection",
        ),
        (&["verify", "llama", "--mutate", "lin-transpose"], "nearest: lin-transpose-square"),
        (&["verify", "llama", "--subject", "gpu"], "subject gpu is not known"),
        (
            &["verify", "llama", "--subject", "reference", "--mutate", "lin-transpose-square"],
            "does not change reference",
        ),
        (&["verify", "llama", "--contract", "int9"], "no contract is called int9"),
        (
            &["verify", "llama", "--sites", "prefill.layers.*.q_prj"],
            "no site that the subject exposes matches",
        ),
        (&["verify", "no-such-package"], "no-such-package"),
    ] {
        let (code, out, error) = karat(args);
        assert_eq!(code, 2, "{args:?}: {error}");
        assert!(error.contains(says), "{args:?}: {error}");
        assert_eq!(out, "");
    }
}

#[test]
fn packages_at_fault_are_exit_code_2() {
    let (code, error) = spoiled("llama", |dir| replace(&dir.join("config.json"), "\"silu\"", "\"relu\""));
    assert_eq!(code, 2);
    assert!(error.contains("config key hidden_act is \"relu\"; supported: \"silu\""), "{error}");

    let (code, error) = spoiled("llama", |dir| replace(&dir.join("config.json"), "\"llama3\"", "\"llama4\""));
    assert_eq!(code, 2);
    assert!(error.contains("rope_parameters.rope_type is \"llama4\""), "{error}");

    let (code, error) =
        spoiled("llama", |dir| replace(&dir.join("config.json"), "\"mlp_bias\": false", "\"mlp_twist\": 3"));
    assert_eq!(code, 2);
    assert!(error.contains("config key mlp_twist (= 3) is not understood"), "{error}");

    let (code, error) = spoiled("llama", |dir| {
        replace(&dir.join("config.json"), "\"intermediate_size\": 40", "\"intermediate_size\": 41");
    });
    assert_eq!(code, 2);
    assert!(error.contains("has shape [40, 32], but the config asks for [41, 32]"), "{error}");

    let (code, error) = spoiled("llama", |dir| {
        replace(&dir.join("config.json"), "\"rms_norm_eps\": 0.001", "\"rms_norm_eps\": -1")
    });
    assert_eq!(code, 2);
    assert!(
        error.contains("config key rms_norm_eps is -1; supported: a number from 0 to below 1"),
        "{error}"
    );

    let (code, error) = spoiled("qwen2", |dir| {
        replace(&dir.join("config.json"), "\"num_hidden_layers\": 3", "\"num_hidden_layers\": 2");
        replace(&dir.join("config.json"), "\"full_attention\",\n", "");
    });
    assert_eq!(code, 2);
    assert!(
        error.contains("the model does not use 12 tensors, first model.layers.2.input_layernorm.weight"),
        "{error}"
    );

    let (code, error) = spoiled("llama", |dir| fs::remove_file(dir.join("model.safetensors")).unwrap());
    assert_eq!(code, 2);
    assert!(error.contains("model.safetensors"), "{error}");

    let (code, error) = spoiled("llama", |dir| {
        let bytes = fs::read(dir.join("model.safetensors")).unwrap();
        fs::write(dir.join("model.safetensors"), &bytes[..bytes.len() - 8]).unwrap();
    });
    assert_eq!(code, 2);
    assert!(error.contains("model.safetensors"), "{error}");
}

#[test]
fn a_nan_weight_is_named_with_row_and_column() {
    let (code, error) = spoiled("llama", |dir| {
        fs::remove_file(dir.join("golden.json")).unwrap();
        fs::remove_file(dir.join("golden.safetensors")).unwrap();
        let file = dir.join("model.safetensors");
        let mut bytes = fs::read(&file).unwrap();
        // The tensor's bytes: behind 8 bytes of length and the header, at the offset that the header gives.
        let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        let header: serde_json::Value = serde_json::from_slice(&bytes[8..8 + length]).unwrap();
        let begin =
            header["model.layers.1.mlp.down_proj.weight"]["data_offsets"][0].as_u64().unwrap() as usize;
        // row 2, column 5 of [32, 40]
        let at = 8 + length + begin + 4 * (2 * 40 + 5);
        bytes[at..at + 4].copy_from_slice(&f32::NAN.to_le_bytes());
        fs::write(&file, bytes).unwrap();
    });
    assert_eq!(code, 2);
    assert!(
        error.contains(
            "model.layers.1.mlp.down_proj.weight holds NaN at row 2, column 5, but weights must be finite"
        ),
        "{error}"
    );
}

#[test]
fn goldens_at_fault_are_exit_code_4() {
    let dir = copy("llama");
    let file = dir.path().join("golden.safetensors");
    let mut bytes = fs::read(&file).unwrap();
    let last = bytes.len() - 1;
    bytes[last] ^= 1;
    fs::write(&file, bytes).unwrap();
    let (code, out, error) = karat(&["verify", dir.path().to_str().unwrap()]);
    assert_eq!(code, 4, "{out}{error}");
    assert!(out.contains("BROKEN") && out.contains("sha256"), "{out}");

    let (code, error) = spoiled("llama", |dir| {
        let file = dir.join("model.safetensors");
        let mut bytes = fs::read(&file).unwrap();
        let last = bytes.len() - 1;
        bytes[last] ^= 1;
        fs::write(&file, bytes).unwrap();
    });
    assert_eq!(code, 4, "{error}");
    assert!(error.contains("model.safetensors"), "{error}");
}

/// A golden that no run of this model can have made is at fault itself.
#[test]
fn impossible_prompts_of_goldens_are_exit_code_4() {
    let head = "\"prompt\": [\n  29,";
    for (with, says) in [
        ("\"prompt\": [\n  5029,".to_string(), "id 5029 at position 0 is outside the vocabulary of 101 ids"),
        (
            format!("\"prompt\": [{}", "7, ".repeat(600)) + "29,",
            "more than the 512 positions that the model allows",
        ),
    ] {
        let (code, error) = spoiled("llama", |dir| replace(&dir.join("golden.json"), head, &with));
        assert_eq!(code, 4, "{error}");
        assert!(error.contains(says), "{error}");
    }
}

#[test]
fn prompt_files_name_file_and_line() {
    let dir = TempDir::new().unwrap();
    let file = dir.path().join("prompts.txt");
    for (text, says) in [
        ("1 2 3\n4 x 6\n", "line 2: \"x\" is no token id"),
        ("1 2 101\n", "line 1: id 101 at position 2 is outside the vocabulary of 101 ids"),
        ("\n", "holds no prompt"),
        (&"1 ".repeat(600), "are more than the 512 positions that the model allows"),
    ] {
        fs::write(&file, text).unwrap();
        let (code, _, error) = karat(&["verify", "llama", "--prompt-ids", file.to_str().unwrap()]);
        assert_eq!(code, 2, "{error}");
        assert!(error.contains("prompts.txt") && error.contains(says), "{error}");
    }
}

#[test]
fn dump_writes_whole_or_not_at_all_and_verify_reads_it_back() {
    let dir = TempDir::new().unwrap();
    let (prompts, out) = (dir.path().join("prompts.txt"), dir.path().join("out"));
    fs::write(&prompts, "5 6 7 8 9\n10 11 12\n").unwrap();
    let (prompts, out_name) = (prompts.to_str().unwrap(), out.to_str().unwrap());
    let args = ["dump", "qwen2", "--prompt-ids", prompts, "--out", out_name, "--tokens", "2"];
    let (code, text, error) = karat(&args);
    assert_eq!(code, 0, "{error}");
    assert_eq!(text.lines().count(), 2);
    let first = out.join("0");
    let (code, text, error) = karat(&["verify", "qwen2", "--golden", first.to_str().unwrap()]);
    assert_eq!(code, 0, "{text}{error}");
    // A second run does not write over the first.
    let (code, _, error) = karat(&args);
    assert_ne!(code, 0, "{error}");
    assert!(first.join("manifest.json").is_file());
    // Of two dumps in a directory one must be named; the only one need not be.
    let one = first.to_str().unwrap();
    let (code, _, error) = karat(&["diff", out_name, one]);
    assert!(code == 2 && error.contains("holds 2: name the one to compare (0, 1)"), "{error}");
    fs::remove_dir_all(out.join("1")).unwrap();
    for sides in [[out_name, one], [one, out_name]] {
        let (code, text, error) = karat(&[&["diff"], &sides[..]].concat());
        assert!(code == 0 && text.starts_with("IDENTICAL"), "{text}{error}");
    }
}

#[test]
fn inspect_says_what_would_be_refused() {
    let (code, out, _) = karat(&["inspect", "llama"]);
    assert_eq!(code, 0);
    assert!(out.contains("the reference takes it") && out.contains("model.layers.0.self_attn.q_proj.weight"));
    let dir = copy("llama");
    replace(&dir.path().join("config.json"), "\"silu\"", "\"relu\"");
    let (code, out, _) = karat(&["inspect", dir.path().to_str().unwrap()]);
    assert_eq!(code, 2);
    assert!(out.contains("refused: config key hidden_act"), "{out}");
}

fn inspect_json(package: &str) -> (i32, serde_json::Value) {
    let (code, out, error) = karat(&["inspect", package, "--format", "json"]);
    (code, serde_json::from_str(&out).unwrap_or_else(|e| panic!("{e}: {out}{error}")))
}

/// Two unknown keys, both named; a value that is not finite, counted; keys with what became of them.
#[test]
fn inspect_lists_every_key_and_every_tensor_with_its_values() {
    let dir = copy("llama");
    replace(
        &dir.path().join("config.json"),
        "{",
        "{\"alpha_new\": 1, \"beta_new\": 2, \"gamma_off\": false,",
    );
    // The weights of the norm before the first layer begin with NaN.
    let file = dir.path().join("model.safetensors");
    let mut bytes = fs::read(&file).unwrap();
    let header = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let json: serde_json::Value = serde_json::from_slice(&bytes[8..8 + header]).unwrap();
    let entry = &json["model.layers.0.self_attn.q_proj.weight"];
    assert_eq!(entry["dtype"], "F32");
    let at = 8 + header + entry["data_offsets"][0].as_u64().unwrap() as usize;
    bytes[at..at + 4].copy_from_slice(&f32::NAN.to_le_bytes());
    bytes[at + 4..at + 8].copy_from_slice(&1234.5f32.to_le_bytes());
    fs::write(&file, bytes).unwrap();

    let (code, json) = inspect_json(dir.path().to_str().unwrap());
    assert_eq!((code, &json["schema"]), (2, &serde_json::json!("karat/inspect/1")));
    let refusals: Vec<_> = json["refusals"].as_array().unwrap().iter().map(|r| r.as_str().unwrap()).collect();
    assert!(
        refusals[0].starts_with("config key alpha_new") && refusals[1].starts_with("config key beta_new")
    );
    let fate = |key: &str| {
        let keys = json["config_keys"].as_array().unwrap();
        keys.iter().find(|line| line["key"] == key).unwrap()["use"].as_str().unwrap().to_string()
    };
    assert_eq!([fate("hidden_size"), fate("alpha_new"), fate("gamma_off")], ["read", "refused", "off"]);
    assert_eq!(json["passed_over"], serde_json::json!(["gamma_off"]));
    let tensors = json["tensors"].as_array().unwrap();
    let q = tensors.iter().find(|t| t["name"] == "model.layers.0.self_attn.q_proj.weight").unwrap();
    assert_eq!((&q["non_finite"], &q["max"]), (&serde_json::json!(1), &serde_json::json!(1234.5)));
    assert!(tensors.iter().all(|t| t["use"] == "read"));
    assert_eq!(json["tensors_read"].as_u64().unwrap() as usize, tensors.len());
}

/// The config of the bundled llama: 2 kv heads of 8 in 3 layers at 256 positions, 4 bytes a value, twice.
#[test]
fn inspect_says_what_a_run_needs() {
    let config: serde_json::Value =
        serde_json::from_slice(&fs::read(bundled("llama").join("config.json")).unwrap()).unwrap();
    let size = |key: &str| config[key].as_u64().unwrap();
    let (code, json) = inspect_json("llama");
    assert_eq!(code, 0);
    let kv = 2 * size("num_key_value_heads") * size("head_dim") * size("num_hidden_layers");
    assert_eq!(json["memory"]["kv_cache"].as_u64().unwrap(), 4 * kv * size("max_position_embeddings"));
    // Matrices are stored once, also where the head is tied to the embedding; the head has an image either way.
    for (package, tied) in [("llama", false), ("gemma2", true)] {
        let json = inspect_json(package).1;
        let tensors = json["tensors"].as_array().unwrap();
        let matrices = || tensors.iter().filter(|t| t["shape"].as_array().unwrap().len() == 2);
        let number = |value: &serde_json::Value| value.as_u64().unwrap();
        assert_eq!(number(&json["memory"]["weights"]), matrices().map(|t| number(&t["bytes"])).sum::<u64>());
        let image = |t: &serde_json::Value| {
            let side = |i: usize| number(&t["shape"][i]).next_multiple_of(128);
            side(0) * (side(1) + 8)
        };
        let table = |t: &&serde_json::Value| t["name"] == "model.embed_tokens.weight";
        let images: u64 = matrices().filter(|t| tied || !table(t)).map(image).sum();
        assert_eq!(number(&json["memory"]["int8_images"]), images, "{package}");
    }
}

/// Example files that no family makes sense of: listed first, then refused.
#[test]
fn inspect_lists_what_it_refuses() {
    let example = |name: &str| bundled("examples").join(name).display().to_string();
    let (code, json) = inspect_json(&example("tiny.gguf"));
    assert_eq!((code, &json["container"]), (2, &serde_json::json!("gguf")));
    assert!(json["refused"].as_str().unwrap().contains("llama.block_count"), "{}", json["refused"]);
    let tensors = json["tensors"].as_array().unwrap();
    // The norm of the example holds 1, 2, 3.
    let norm = tensors.iter().find(|t| t["name"] == "a.norm").unwrap();
    assert_eq!((&norm["min"], &norm["max"], &norm["bytes"]), (&1.0.into(), &3.0.into(), &12.into()));

    let (code, json) = inspect_json(&example("tiny.q4nx"));
    assert_eq!((code, &json["container"]), (2, &serde_json::json!("q4nx")));
    assert!(json["refused"].as_str().unwrap().contains("config"), "{}", json["refused"]);
    let tensors = json["tensors"].as_array().unwrap();
    let format = |name: &str| &tensors.iter().find(|t| t["name"] == name).unwrap()["format"];
    assert_eq!(format("model.layers.0.mlp.down_proj.weight"), "Q4NX_Q4_1");
    assert_eq!(format("lm_head.weight"), "Q4NX_Q8");

    // A pair shows both.
    let (code, json) = inspect_json("dflash");
    assert_eq!((code, &json["draft"]["family"]), (0, &serde_json::json!("MuseGlimmerAssistantModel")));
    assert!(json["draft"]["tensors"].as_array().unwrap().iter().all(|t| t["use"] == "read"));
}

/// A converted package computes the same: its logits are the bundled package's, to the byte.
#[test]
fn convert_keeps_the_model() {
    let dir = TempDir::new().unwrap();
    let prompts = dir.path().join("prompts.txt");
    fs::write(&prompts, "5 6 7 8 9\n").unwrap();
    let dump = |package: &str, name: &str| {
        let out = dir.path().join(name);
        let args =
            ["--prompt-ids", prompts.to_str().unwrap(), "--out", out.to_str().unwrap(), "--tokens", "1"];
        let (code, _, error) = karat(&[&["dump", package][..], &args].concat());
        assert_eq!(code, 0, "{error}");
        fs::read(out.join("0/taps.safetensors")).unwrap()
    };
    let original = dump("qwen2", "original");
    for container in ["gguf", "safetensors"] {
        let out = dir.path().join(container);
        let (code, text, error) =
            karat(&["convert", "qwen2", "--to", container, "--out", out.to_str().unwrap()]);
        assert_eq!(code, 0, "{error}");
        assert!(text.contains("tensors"), "{text}");
        assert!(dump(out.to_str().unwrap(), &format!("from-{container}")) == original, "{container}");
        let (code, _, error) =
            karat(&["convert", "qwen2", "--to", container, "--out", out.to_str().unwrap()]);
        assert_eq!(code, 2, "a second run does not write over the first: {error}");
    }
}

#[test]
fn two_arms_give_the_same_bytes_and_one_decodes_nothing() {
    let arms =
        ["ab", "llama", "--arm", "new=", "--arm", "old=reload=all", "--tokens", "3", "--format", "json"];
    let (code, out, error) = karat(&arms);
    assert_eq!(code, 0, "{error}");
    let json: serde_json::Value = serde_json::from_str(&out).unwrap();
    assert_eq!(json["byte_identical"][0], json["byte_identical"][1]);
    assert_eq!(json["runs"][0]["dequantised_bytes_per_token"], 0);
    assert!(json["runs"][1]["dequantised_bytes_per_token"].as_u64().unwrap() > 0);
    let (code, _, error) = karat(&["ab", "llama", "--arm", "a=", "--arm", "b=turbo=on"]);
    assert_eq!(code, 2);
    assert!(error.contains("turbo=on"), "{error}");
}
