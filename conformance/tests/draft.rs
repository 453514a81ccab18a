//! `karat draft` as scripts see it: counts, exit codes, and sentences that say what to do.

use assert_cmd::Command;
use fixtures::Package;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use tempfile::TempDir;

/// The oracle's prompt and the accept counts that it found for it.
const PROMPT: &str = "74 33 17 37 72 4 14 43 81\n";

fn karat(arguments: &[&str]) -> (i32, String, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_karat")).args(arguments).output().unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    (output.status.code().unwrap(), text(output.stdout), text(output.stderr))
}

fn prompts(dir: &TempDir, text: &str) -> String {
    let file = dir.path().join("prompts.txt");
    std::fs::write(&file, text).unwrap();
    file.display().to_string()
}

fn draft(prompts: &str, more: &[&str]) -> (i32, String, String) {
    let base = ["draft", "--target", "dflash", "--draft", "dflash", "--prompt-ids", prompts];
    karat(&[&base, more].concat())
}

#[test]
fn counts_of_the_oracle() {
    let dir = TempDir::new().unwrap();
    let prompts = prompts(&dir, PROMPT);
    let (code, out, err) = draft(&prompts, &["--tokens", "19", "--format", "json"]);
    assert_eq!(code, 0, "{err}");
    let value: Value = serde_json::from_str(&out).unwrap();
    assert_eq!((value["schema"].as_str(), value["mode"].as_str()), (Some("karat/draft/1"), Some("walk")));
    let prompt = &value["prompts"][0];
    // The oracle's six full passes; the seventh asks for what is left behind position 23: three proposals.
    let counts = prompt["accepted_each"].as_array().unwrap();
    assert_eq!(counts[..6], [3, 3, 0, 0, 2, 0].map(Value::from));
    let sum = |key: &str| prompt[key].as_u64().unwrap();
    assert_eq!(sum("generated"), 19);
    assert_eq!(sum("emitted"), 18);
    assert_eq!(sum("passes") as usize, counts.len());
    assert_eq!(prompt["tokens"].as_array().unwrap()[..6], [14, 69, 58, 53, 10, 61].map(Value::from));
    let histogram = prompt["histogram"].as_array().unwrap();
    assert_eq!(histogram.iter().map(|n| n.as_u64().unwrap()).sum::<u64>(), sum("passes"));
    assert_eq!(value["total"]["accepted"], prompt["accepted"]);

    let (code, out, _) = draft(&prompts, &["--tokens", "19", "--all-positions", "--format", "json"]);
    let value: Value = serde_json::from_str(&out).unwrap();
    assert_eq!((code, value["mode"].as_str()), (0, Some("all_positions")));
    assert_eq!(value["prompts"][0]["passes"], json!(18));
}

#[test]
fn text_and_markdown_print_the_definition_beside_the_numbers() {
    let dir = TempDir::new().unwrap();
    let prompts = prompts(&dir, PROMPT);
    let (code, out, err) = draft(&prompts, &["--tokens", "6", "--window", "4"]);
    assert_eq!((code, err), (0, String::new()), "no progress bar where nobody watches");
    assert!(out.contains("(the bonus) is never counted") && out.contains("no speed result"), "{out}");
    assert!(out.contains("the draft sees the last 4 context rows only"), "{out}");
    let (code, out, _) = draft(&prompts, &["--tokens", "6", "--format", "md"]);
    assert!(code == 0 && out.starts_with("### Draft `dflash` for target `dflash`"), "{out}");
    assert!(out.lines().count() <= 60);
    let (code, _, err) = draft(&prompts, &["--format", "junit"]);
    assert_eq!((code, err.as_str()), (2, "karat: draft reports as text, json or md\n"));
}

#[test]
fn bad_calls_say_what_to_do() {
    let dir = TempDir::new().unwrap();
    let good = prompts(&dir, PROMPT);
    for (arguments, sentence) in [
        (&["--tokens", "1"][..], "--tokens 1 leaves nothing to propose; expected at least 2"),
        (&["--tokens", "500"], "more than the 128 positions that the model allows"),
        (&["--embedding-scale", "inf"], "--embedding-scale is no finite number"),
    ] {
        let (code, out, err) = draft(&good, arguments);
        assert!(code == 2 && out.is_empty() && err.contains(sentence), "{code}: {err}");
    }
    let bad = dir.path().join("bad.txt");
    std::fs::write(&bad, "1 2 3\n\n4 five 6\n").unwrap();
    let (code, _, err) = draft(&bad.display().to_string(), &[]);
    assert!(code == 2 && err.contains("bad.txt, line 3: \"five\" is no token id"), "{err}");
    std::fs::write(&bad, "1 2 97\n").unwrap();
    let (code, _, err) = draft(&bad.display().to_string(), &[]);
    assert!(code == 2 && err.contains("line 1") && err.contains("97"), "{err}");
    let no_pair = ["draft", "--target", "qwen3", "--draft", "dflash", "--prompt-ids", &good];
    let (code, _, err) = karat(&no_pair);
    assert!(
        code == 2 && err.contains("hidden width differs: not a pair; the draft has 32, the target 40"),
        "{err}"
    );
}

fn data(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../fixtures/data").join(name)
}

/// A copy of the oracle's draft with its config changed.
fn edited(dir: &TempDir, edit: impl FnOnce(&mut Value)) -> String {
    let (from, to) = (data("dflash/draft"), dir.path().join("edited"));
    std::fs::create_dir_all(&to).unwrap();
    std::fs::copy(from.join("model.safetensors"), to.join("model.safetensors")).unwrap();
    let mut config: Value =
        serde_json::from_slice(&std::fs::read(from.join("config.json")).unwrap()).unwrap();
    edit(&mut config);
    std::fs::write(to.join("config.json"), config.to_string()).unwrap();
    to.display().to_string()
}

#[test]
fn drafts_that_are_refused() {
    let dir = TempDir::new().unwrap();
    let good = prompts(&dir, PROMPT);
    type Edit = fn(&mut Value);
    let edits: [(Edit, &str); 7] = [
        (
            |c| drop(c.as_object_mut().unwrap().remove("target_layer_ids")),
            "target_layer_ids is missing; expected the tapped layers",
        ),
        (|c| c["partial_rotary_factor"] = json!(0.25), "a draft turns all of head_dim"),
        (|c| c["architectures"] = json!(["DFlashLagunaForCausalLM"]), "a Laguna draft norms every tap"),
        (|c| c["architectures"] = json!(["DominoDraftModel"]), "sequential logits head"),
        (|c| c["draft_vocab_size"] = json!(50), "a reduced vocabulary renumbers the logits"),
        (|c| c["mask_token_id"] = json!(97), "mask_token_id 97 is outside the target's table of 97 rows"),
        (
            |c| c["target_layer_ids"] = json!([0, 2, 5]),
            "target_layer_ids has 5, but the target has layers 0 to 4",
        ),
    ];
    for (edit, sentence) in edits {
        let draft = edited(&dir, edit);
        let (code, out, err) =
            karat(&["draft", "--target", "dflash", "--draft", &draft, "--prompt-ids", &good]);
        assert!(code == 2 && out.is_empty(), "{code}: {out}");
        assert!(err.contains(sentence) && err.lines().count() == 1, "{err}");
    }
    // Another count of taps than fc has columns for.
    let draft = edited(&dir, |c| c["target_layer_ids"] = json!([0, 2]));
    let (code, _, err) = karat(&["draft", "--target", "dflash", "--draft", &draft, "--prompt-ids", &good]);
    assert!(
        code == 2 && err.contains("encoder.fc.weight has shape [32, 96], but the config asks for [32, 64]"),
        "{err}"
    );
}

#[test]
fn the_tap_of_the_last_layer_is_printed() {
    let dir = TempDir::new().unwrap();
    let good = prompts(&dir, PROMPT);
    let draft = edited(&dir, |c| c["target_layer_ids"] = json!([0, 2, 4]));
    let run = |more: &[&str]| {
        let base = ["draft", "--target", "dflash", "--draft", &draft, "--prompt-ids", &good, "--tokens", "8"];
        let (code, out, err) = karat(&[&base, more].concat());
        assert_eq!(code, 0, "{err}");
        out
    };
    assert!(run(&[]).contains("the target's last layer is tapped, raw (--last-tap)"));
    assert!(
        run(&["--last-tap", "normed"]).contains("the target's last layer is tapped, normed (--last-tap)")
    );
}

#[test]
fn verify_holds_a_pair_to_its_golden() {
    for (name, blocks) in [("dflash", 6), ("dflash_muse", 5)] {
        let (code, out, err) = karat(&["verify", name, "--subject", "reference", "--format", "json"]);
        assert_eq!(code, 0, "{name}: {out}{err}");
        let value: Value = serde_json::from_str(&out).unwrap();
        let result = &value["results"][0];
        assert_eq!(result["reference"]["verdict"], "PASSED", "{name}");
        assert_eq!(
            result["reference"]["argmax_equal"],
            json!([3 * blocks, 3 * blocks]),
            "three proposals each"
        );
        let sites = result["sites"].as_array().unwrap();
        let last = format!("pass{}.proposals", blocks - 1);
        for site in ["prefill.layers.0.q_proj", "pass0.ctx_fc", "pass1.layers.1.attn_probs", &last] {
            let verdict = sites.iter().find(|s| s["site"] == site).map(|s| &s["verdict"]);
            // More precise than the contract says is no failure.
            assert!(verdict.is_some_and(|v| v == "PASSED" || v == "DRIFT"), "{name}: {site}: {verdict:?}");
        }
    }
}

#[test]
fn a_mutant_in_the_draft_is_named_there() {
    let mutate = "lin-transpose-square@layers.1.attn_out";
    let (code, out, _) =
        karat(&["verify", "dflash", "--mutate", mutate, "--sites", "pass*", "--format", "json"]);
    assert_eq!(code, 1, "{out}");
    let value: Value = serde_json::from_str(&out).unwrap();
    assert_eq!(value["results"][0]["first_failure"]["site"], "pass0.layers.1.attn_out");
}

/// The draft of a pair on every engine: its own sites, its proposals, and the loop that it walks.
#[test]
fn verify_judges_the_draft_on_the_device() {
    for (name, counts) in [("dflash", [3, 3, 0, 0, 2]), ("dflash_muse", [3, 3, 0, 2, 1])] {
        for engine in ["f32", "int8", "w4a8", "w4a16", "bfp16"] {
            let subject = format!("npu:{engine}");
            let (code, out, err) = karat(&["verify", name, "--subject", &subject, "--format", "json"]);
            assert_eq!(code, 0, "{name} on {engine}: {out}{err}");
            let value: Value = serde_json::from_str(&out).unwrap();
            let result = &value["results"][0];
            let sites = result["sites"].as_array().unwrap();
            for site in ["pass0.ctx_fc", "pass3.layers.1.k_proj", "pass1.final_norm", "pass4.proposals"] {
                let site = sites.iter().find(|s| s["site"] == site);
                assert!(site.is_some_and(|s| s["verdict"] == "PASSED"), "{name} on {engine}: {site:?}");
            }
            assert_eq!(result["draft"]["greedy_text"], true, "{name} on {engine}");
            // Full and 8-bit weights keep the oracle's counts; 4 bits choose other tokens, within their sigmas.
            if ["f32", "int8"].contains(&engine) {
                assert_eq!(
                    result["draft"]["accepted_each"].as_array().unwrap()[..5],
                    counts.map(Value::from)
                );
                assert_eq!(result["draft"]["verdict"], "PASSED");
            }
        }
    }
    let (code, out, _) = karat(&["verify", "dflash"]);
    assert!(code == 0 && out.contains("  draft      PASSED · 10 passes accepted 8 of 27 proposals"), "{out}");
}

/// A mistake of the device shows in the draft, though the target is not looked at.
#[test]
fn a_device_mutant_is_seen_in_the_draft() {
    let arguments =
        ["verify", "dflash", "--mutate", "cache-key-no-layer", "--sites", "pass*", "--format", "json"];
    let (code, out, _) = karat(&arguments);
    assert_eq!(code, 1, "{out}");
    let value: Value = serde_json::from_str(&out).unwrap();
    let first = value["results"][0]["first_failure"]["site"].as_str().unwrap();
    assert!(first.contains("layers.1."), "{first}: layer 1 is served the image of layer 0");
}

/// The loop around the oracle's pair with each mistake that can be made in it: seen, and named from its walk.
#[test]
fn mistakes_of_the_loop_are_seen_and_named() {
    for (mistake, said) in [
        ("spec-accept", "leaves the subject's own greedy text"),
        ("spec-accept:shifted", "counts 0 accepted of 3"),
        ("spec-accept:bonus", "pass 0 counts 4 accepted of 3, though its proposals and the text give 3"),
        ("spec-accept:matches", "the loop"),
        ("spec-accept:index", "the loop"),
        ("spec-rollback", "the loop"),
        ("spec-stop-token", "leaves the subject's own greedy text"),
    ] {
        let (code, out, err) = karat(&["verify", "dflash", "--mutate", mistake]);
        assert_eq!(code, 1, "{mistake}: {out}{err}");
        let line = out.lines().find(|line| line.starts_with("  draft ")).unwrap();
        assert!(line.contains("FAILED") && line.contains(said), "{mistake}: {line}");
        // The draft itself is honest: no site of it is blamed.
        let sites = out.lines().find_map(|line| line.strip_prefix("  sites      ")).unwrap();
        let mut counts = sites.split_whitespace().filter_map(|word| word.parse::<usize>().ok());
        assert!(counts.next() == counts.next() && !out.contains("no mutant explains"), "{mistake}: {out}");
        let named = line.split("walks as with ").nth(1).unwrap_or_else(|| panic!("{mistake}: {line}"));
        assert!(named.split(" or ").any(|name| name.trim() == mistake), "{mistake}: {line}");
    }
    let (code, _, err) = karat(&["verify", "llama", "--mutate", "spec-rollback"]);
    assert!(code == 2 && err.contains("it needs a pass that rejects"), "{code}: {err}");
}

/// A draft that walks: its choices have no spread of their own, and its path scores are those of the chosen ids.
#[test]
fn a_draft_that_selects_paths_is_judged_on_every_engine() {
    for engine in ["f32", "int8", "w4a8", "w4a16", "bfp16"] {
        let subject = format!("npu:{engine}");
        let (code, out, err) = karat(&["verify", "path-pair", "--subject", &subject, "--format", "json"]);
        assert_eq!(code, 0, "{engine}: {out}{err}");
        let value: Value = serde_json::from_str(&out).unwrap();
        let sites = value["results"][0]["sites"].as_array().unwrap();
        let judged = |name: &str| sites.iter().any(|site| site["site"].as_str().unwrap().ends_with(name));
        assert!(judged("path_scores") && judged("proposals"), "{engine}: no walk was judged");
    }
}

/// A wrong op of a draft is written as a case that stands alone, like one of a model.
#[test]
fn a_failing_op_of_a_draft_is_extracted() {
    let dir = TempDir::new().unwrap();
    let case = dir.path().join("case");
    let to = case.display().to_string();
    let (code, out, err) =
        karat(&["verify", "dflash", "--mutate", "spec-aux-norm-missing", "--extract", &to]);
    assert_eq!(code, 1, "{out}{err}");
    let json: Value =
        serde_json::from_str(&std::fs::read_to_string(case.join("case.json")).unwrap()).unwrap();
    assert_eq!((&json["op"], &json["tap"]), (&json!("rms_norm"), &json!("pass0.ctx")));
    // The mistake of the norm that comes last in a model is the same one here.
    assert_eq!(json["computes"]["mutant"], "norm-final-missing");
}

/// The walk's counts of one prompt, as JSON has them.
fn walked(arguments: &[&str]) -> Value {
    let (code, out, err) = karat(&[&["draft", "--format", "json"], arguments].concat());
    assert_eq!(code, 0, "{err}");
    let value: Value = serde_json::from_str(&out).unwrap();
    value["prompts"][0].clone()
}

/// The same weights in another container are the same target.
#[test]
fn a_target_in_gguf_and_its_draft_in_safetensors() {
    let dir = TempDir::new().unwrap();
    let good = prompts(&dir, PROMPT);
    let (from, to) = (data("dflash/target").display().to_string(), dir.path().join("gguf"));
    let to_text = to.display().to_string();
    let (code, _, err) = karat(&["convert", &from, "--to", "gguf", "--out", &to_text]);
    assert_eq!(code, 0, "{err}");
    let file = std::fs::read_dir(&to).unwrap().map(|entry| entry.unwrap().path());
    let file = file.into_iter().find(|path| path.extension().is_some_and(|e| e == "gguf")).unwrap();
    let target = file.display().to_string();
    let of = |target: &str| {
        walked(&["--target", target, "--draft", "dflash", "--prompt-ids", &good, "--tokens", "19"])
    };
    let gguf = of(&target);
    assert_eq!(gguf["accepted_each"].as_array().unwrap()[..6], [3, 3, 0, 0, 2, 0].map(Value::from));
    assert_eq!(gguf["tokens"], of("dflash")["tokens"]);
}

/// Towards temperature 0 drawing is choosing: the oracle's counts come back. At 1 the seed alone decides.
#[test]
fn drawn_texts() {
    let dir = TempDir::new().unwrap();
    let good = prompts(&dir, PROMPT);
    let at = |temperature: &str, seed: &str| {
        let sampling = ["--temperature", temperature, "--seed", seed];
        let pair = ["--target", "dflash", "--draft", "dflash", "--prompt-ids", &good, "--tokens", "19"];
        walked(&[&pair[..], &sampling].concat())
    };
    for seed in ["0", "1"] {
        let cold = at("1e-6", seed);
        assert_eq!(cold["accepted_each"].as_array().unwrap()[..6], [3, 3, 0, 0, 2, 0].map(Value::from));
        assert_eq!(cold["tokens"].as_array().unwrap()[..6], [14, 69, 58, 53, 10, 61].map(Value::from));
    }
    assert_eq!(at("1", "7"), at("1", "7"));
    assert_ne!(at("1", "7")["tokens"], at("1", "8")["tokens"]);

    let (code, out, err) = draft(&good, &["--tokens", "6", "--temperature", "0.7", "--seed", "3"]);
    assert!(code == 0 && out.contains("temperature 0.7, seed 3, rejection sampling"), "{out}{err}");
    for (more, sentence) in [
        (&["--temperature=-1"][..], "--temperature -1: expected 0 or a positive number"),
        (
            &["--temperature", "1", "--all-positions"],
            "--all-positions compares with the target's greedy text",
        ),
    ] {
        let (code, _, err) = draft(&good, more);
        assert!(code == 2 && err.contains(sentence), "{err}");
    }
}

/// `qwen3_5` with a prediction head, all of its layers silent, and an output matrix that gives id `i + 1`
/// behind id `i`. Of `[embedding | hidden state]` the head reads the half `reads`.
fn successor_model(dir: &Path, reads: usize) -> String {
    let package = Package::open("qwen3_5").unwrap();
    let tensors = package.tensors();
    let embed = "model.embed_tokens.weight";
    let source = |name: &str| match name.strip_prefix("mtp.") {
        None if name == "lm_head.weight" => embed.to_string(),
        None => name.to_string(),
        Some(rest) => match rest.strip_prefix("layers.0.") {
            Some(leaf) => format!("model.layers.3.{leaf}"),
            None => "model.norm.weight".into(),
        },
    };
    let mut names = tensors.names();
    let layer: Vec<String> =
        names.iter().filter_map(|n| n.strip_prefix("model.layers.3.")).map(String::from).collect();
    names.extend(layer.iter().map(|leaf| format!("mtp.layers.0.{leaf}")));
    let around = ["mtp.norm", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "lm_head"];
    names.extend(around.map(|name| format!("{name}.weight")));
    let (mut header, mut bytes) = (serde_json::Map::new(), Vec::new());
    for name in names {
        let rows = tensors.rows(&source(&name)).unwrap().unwrap();
        let (count, inner) = (rows.rows(), rows.inner());
        let mut shape = tensors.shape(&source(&name)).unwrap();
        let mut values = vec![0.0f32; count * inner];
        values.chunks_exact_mut(inner).enumerate().for_each(|(n, row)| rows.decode(n, row));
        if source(&name) == embed {
            // Rows of length 1: a row's product with itself is larger than with any other.
            for row in values.chunks_exact_mut(inner) {
                let length = row.iter().map(|v| v * v).sum::<f32>().sqrt();
                row.iter_mut().for_each(|v| *v /= length);
            }
        }
        match name.as_str() {
            "lm_head.weight" => values.rotate_right(inner),
            "mtp.fc.weight" => {
                let hidden = inner;
                shape = vec![hidden, 2 * hidden];
                let one = |at: usize| at % (2 * hidden) == reads * hidden + at / (2 * hidden);
                values = (0..2 * hidden * hidden).map(|at| f32::from(one(at))).collect();
            }
            name if ["o_proj.weight", "out_proj.weight", "down_proj.weight"]
                .iter()
                .any(|e| name.ends_with(e)) =>
            {
                values.fill(0.0);
            }
            // Stored less 1.
            name if name.contains("norm") => values.fill(0.0),
            _ => {}
        }
        let begin = bytes.len();
        bytes.extend(values.iter().flat_map(|v| v.to_le_bytes()));
        header.insert(name, json!({"dtype": "F32", "shape": shape, "data_offsets": [begin, bytes.len()]}));
    }
    let header = Value::Object(header).to_string();
    let file = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &bytes].concat();
    std::fs::write(dir.join("model.safetensors"), file).unwrap();
    let mut config = package.config().clone();
    config.insert("tie_word_embeddings".into(), false.into());
    std::fs::write(dir.join("config.json"), Value::Object(config).to_string()).unwrap();
    dir.display().to_string()
}

// Behind 3 comes 4, 5, ...: nineteen tokens. The head is fed the token that follows each hidden state, so what it
// reads of the embedding is one further than what it reads of the hidden state: from the former it proposes the
// target's own continuation (three a pass, two where the text ends), from the latter the anchor again and again.
#[test]
fn the_target_s_own_head_drafts() {
    let dir = TempDir::new().unwrap();
    let good = prompts(&dir, "90 11 3\n");
    let run = |target: &str| {
        walked(&["--target", target, "--draft", "mtp:3", "--prompt-ids", &good, "--tokens", "19"])
    };
    let text: Vec<u32> = (4..23).collect();
    let embedding = run(&successor_model(dir.path(), 0));
    assert_eq!(embedding["tokens"], json!(text));
    assert_eq!(embedding["accepted_each"], json!([3, 3, 3, 3, 2]));
    assert_eq!((&embedding["proposed"], &embedding["emitted"]), (&json!(14), &json!(18)));
    let hidden = run(&successor_model(dir.path(), 1));
    assert_eq!((&hidden["tokens"], &hidden["accepted"]), (&json!(text), &json!(0)));
    assert_eq!(hidden["passes"], json!(18));

    let target = dir.path().display().to_string();
    let head = |draft: &str, more: &[&str]| {
        let base = ["draft", "--target", &target, "--draft", draft, "--prompt-ids", &good, "--tokens", "6"];
        karat(&[&base, more].concat())
    };
    let (code, out, _) = head("mtp", &[]);
    assert!(
        code == 0
            && out.contains("block of 2: an anchor and 1 proposals")
            && out.contains("prediction head:"),
        "{out}"
    );
    let (code, out, _) = head("mtp:2", &["--temperature", "0.5", "--format", "json"]);
    let value: Value = serde_json::from_str(&out).unwrap();
    assert_eq!((code, &value["kind"], &value["sampling"]["temperature"]), (0, &json!("mtp"), &json!(0.5)));
    for (draft, more, sentence) in [
        ("mtp:0", &[][..], "expected mtp:N with 1 to 64 proposals"),
        ("mtp", &["--window", "3"], "--window is for block drafts"),
    ] {
        let (code, _, err) = head(draft, more);
        assert!(code == 2 && err.contains(sentence), "{err}");
    }
    for (target, sentence) in [
        ("qwen3_5", "the target has no tensors below mtp."),
        ("llama", "llama has no multi-token-prediction head that is known"),
    ] {
        let (code, _, err) = karat(&["draft", "--target", target, "--draft", "mtp", "--prompt-ids", &good]);
        assert!(code == 2 && err.contains(sentence), "{err}");
    }
}
