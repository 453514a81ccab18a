//! Somebody else's values as a subject: dumps of other programs, whole, partial, wrong and broken.
//!
//! The values are those of the independent oracle, written under other names and in other containers.

use assert_cmd::Command;
use golden::Dump;
use serde_json::{Value, json};
use std::fs;
use std::path::{Path, PathBuf};
use tempfile::TempDir;

fn karat(args: &[&str]) -> (i32, String, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_karat")).args(args).env("NO_COLOR", "1").output().unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    (output.status.code().unwrap(), text(output.stdout), text(output.stderr))
}

/// Verifies llama with the dump at `path`: the exit code and the one result.
fn verify(path: &Path, more: &[&str]) -> (i32, Value) {
    let subject = format!("dump:{}", path.display());
    let args = [&["verify", "llama", "--subject", &subject, "--format", "json"], more].concat();
    let (code, out, error) = karat(&args);
    assert_eq!(error, "", "{args:?}");
    (code, serde_json::from_str::<Value>(&out).unwrap()["results"][0].take())
}

fn llama() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../fixtures/data/llama")
}

/// Shape and values of a tap of the oracle.
fn oracle(tap: &str) -> (Vec<usize>, Vec<f32>) {
    let dump = Dump::open(llama()).unwrap();
    let values = dump.f32(tap).unwrap().unwrap_or_else(|| panic!("the oracle has no {tap}"));
    (values.shape.to_vec(), values.to_vec())
}

fn bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|v| v.to_le_bytes()).collect()
}

/// Writes an array as numpy does.
fn save_npy(dir: &Path, name: &str, shape: &[usize], values: &[f32]) {
    let lengths: String = shape.iter().map(|n| format!("{n}, ")).collect();
    let header = format!("{{'descr': '<f4', 'fortran_order': False, 'shape': ({lengths}), }}\n");
    let length = (header.len() as u16).to_le_bytes();
    let file = [&b"\x93NUMPY\x01\x00"[..], &length, header.as_bytes(), &bytes(values)].concat();
    fs::create_dir_all(dir.join(name).parent().unwrap()).unwrap();
    fs::write(dir.join(format!("{name}.npy")), file).unwrap();
}

/// Writes a tap of the oracle under a module's name, with the batch axis that a forward hook sees.
fn hook(dir: &Path, tap: &str, module: &str) {
    let (shape, values) = oracle(tap);
    save_npy(dir, module, &[&[1], &shape[..]].concat(), &values);
}

fn site<'a>(result: &'a Value, name: &str) -> &'a Value {
    let sites = result["sites"].as_array().unwrap();
    sites.iter().find(|site| site["site"] == name).unwrap_or_else(|| panic!("{name} was not judged"))
}

fn failed(result: &Value) -> Vec<&str> {
    let sites = result["sites"].as_array().unwrap().iter();
    sites.filter(|site| site["verdict"] == "FAILED").map(|site| site["site"].as_str().unwrap()).collect()
}

#[test]
fn the_oracle_is_a_conformant_subject() {
    let (code, result) = verify(&llama(), &[]);
    assert_eq!((code, failed(&result)), (0, vec![]), "{}", result["reason"]);
    assert_eq!(result["logits"]["argmax_equal"], json!([23, 23]));
    assert!(result["sites"].as_array().unwrap().len() > 100);
    // The oracle has no scores: probabilities are judged from the keys on.
    assert!(result["not_exposed"].as_array().unwrap().contains(&json!("layers.0.attn_scores")));
    let spans = result["spans"].as_array().unwrap();
    let probabilities = spans.iter().find(|span| span["to"] == "prefill.layers.0.attn_probs").unwrap();
    assert_eq!(probabilities["from"], "prefill.layers.0.k_rope");
    assert_eq!(result["unmatched"], Value::Null);
}

#[test]
fn forward_hooks_of_a_framework_with_names_that_are_no_sites() {
    let dir = TempDir::new().unwrap();
    for layer in 0..3 {
        for (tap, module) in [
            ("attn_norm", "input_layernorm"),
            ("q_proj", "self_attn.q_proj"),
            ("attn_out", "self_attn.o_proj"),
            ("attn_out", "self_attn"),
            ("mlp_norm", "post_attention_layernorm"),
            ("mlp_out", "mlp.down_proj"),
        ] {
            hook(
                dir.path(),
                &format!("prefill.layers.{layer}.{tap}"),
                &format!("model.layers.{layer}.{module}"),
            );
        }
        hook(dir.path(), &format!("prefill.layers.{layer}.out"), &format!("model.layers.{layer}"));
    }
    hook(dir.path(), "prefill.logits", "lm_head");
    save_npy(dir.path(), "model.layers.0.mlp.act_fn", &[1], &[0.0]);
    fs::write(dir.path().join("README.md"), "hooks").unwrap();

    let (code, result) = verify(dir.path(), &[]);
    assert_eq!((code, failed(&result)), (0, vec![]), "{}", result["reason"]);
    assert_eq!(result["logits"]["argmax_equal"], json!([19, 19]));
    assert_eq!(result["unmatched"], json!(["README.md (no array)", "model.layers.0.mlp.act_fn"]));
    let spans = result["spans"].as_array().unwrap();
    assert!(spans.contains(&json!({"from": "prefill.layers.0.q_proj", "to": "prefill.layers.0.attn_out"})));
}

/// An engine whose second layer multiplies with the transposed query projection. Both are 32 x 32.
#[test]
fn a_transposed_projection_is_explained() {
    let dir = TempDir::new().unwrap();
    for tap in ["attn_norm", "q_proj", "k_proj", "v_proj", "out"] {
        hook(dir.path(), &format!("prefill.layers.0.{tap}"), &format!("prefill/layers.0.{tap}"));
    }
    hook(dir.path(), "prefill.layers.1.attn_norm", "prefill/layers.1.attn_norm");
    let package = fixtures::Package::open("llama").unwrap();
    let rows = package.tensors().rows("model.layers.1.self_attn.q_proj.weight").unwrap().unwrap();
    let weight = spec::Matrix::new("q", rows).to_values().unwrap();
    let (_, x) = oracle("prefill.layers.1.attn_norm");
    let mut wrong = vec![0f32; 19 * 32];
    for t in 0..19 {
        for o in 0..32 {
            // w[i, o] in place of w[o, i]
            wrong[t * 32 + o] = (0..32).fold(0.0, |sum, i| sum + x[t * 32 + i] * weight[i * 32 + o]);
        }
    }
    save_npy(dir.path(), "prefill/layers.1.q_proj", &[19, 32], &wrong);

    let (code, result) = verify(dir.path(), &[]);
    assert_eq!((code, failed(&result)), (1, vec!["prefill.layers.1.q_proj"]));
    assert_eq!(result["first_failure"]["site"], "prefill.layers.1.q_proj");
    assert_eq!(result["explanation"]["mutant"], "lin-transpose-square");
}

#[test]
fn tensors_of_llama_cpp() {
    let dir = TempDir::new().unwrap();
    for (tap, tensor) in [
        ("layers.0.q_rope", "Qcur-0"), // three axes: after the rotation
        ("layers.1.q_proj", "Qcur-1"), // two axes: before it
        ("layers.0.mlp_out", "ffn_out-0"),
        ("layers.2.out", "l_out-2"),
        ("logits", "result_output"),
    ] {
        let (shape, values) = oracle(&format!("prefill.{tap}"));
        save_npy(dir.path(), tensor, &shape, &values);
    }
    let (code, result) = verify(dir.path(), &[]);
    assert_eq!(code, 0, "{}", result["reason"]);
    let judged: Vec<&str> =
        result["sites"].as_array().unwrap().iter().map(|site| site["site"].as_str().unwrap()).collect();
    assert_eq!(
        judged,
        [
            "prefill.layers.0.q_rope",
            "prefill.layers.0.mlp_out",
            "prefill.layers.1.q_proj",
            "prefill.layers.2.out",
            "prefill.logits"
        ]
    );
}

/// One raw file a generated token, numbered in any way: the logits of the last position.
#[test]
fn logits_of_each_generated_token() {
    let dir = TempDir::new().unwrap();
    for (n, pass) in ["prefill", "step1", "step2", "step3", "step4"].iter().enumerate() {
        let (_, logits) = oracle(&format!("{pass}.logits"));
        fs::write(dir.path().join(format!("logits_{}.f32", n + 8)), bytes(&logits[logits.len() - 101..]))
            .unwrap();
    }
    let (code, result) = verify(dir.path(), &[]);
    assert_eq!(code, 0, "{}", result["reason"]);
    assert_eq!(result["logits"]["argmax_equal"], json!([5, 5]));
    assert_eq!(site(&result, "prefill.logits")["elements"], 101);
    assert_eq!(result["spans"][0], json!({"to": "prefill.logits"}));

    // A token further on than it was: the rows that are there are counted from the start of the pass.
    let mut logits = oracle("prefill.logits").1.split_off(18 * 101);
    logits[7] = f32::NAN;
    fs::write(dir.path().join("logits_8.f32"), bytes(&logits)).unwrap();
    let (code, result) = verify(dir.path(), &[]);
    assert_eq!(code, 1);
    assert_eq!(result["first_failure"]["site"], "prefill.logits");
    assert_eq!((&result["first_failure"]["row"], &result["first_failure"]["col"]), (&json!(18), &json!(7)));
}

#[test]
fn a_map_declares_names_axes_and_padding() {
    let dir = TempDir::new().unwrap();
    let (shape, q) = oracle("prefill.layers.0.q_rope");
    let (tokens, heads, width) = (shape[0], shape[1], shape[2]);
    let mut heads_first = vec![0f32; q.len()];
    for t in 0..tokens {
        for h in 0..heads {
            heads_first[(h * tokens + t) * width..][..width]
                .copy_from_slice(&q[(t * heads + h) * width..][..width]);
        }
    }
    save_npy(dir.path(), "attn_0/q", &[1, heads, tokens, width], &heads_first);
    // Query, key and value side by side, in a launch of 32 rows of which 19 are real.
    let parts = ["q_proj", "k_proj", "v_proj"].map(|p| oracle(&format!("prefill.layers.1.{p}")));
    let mut fused = vec![f32::NAN; 32 * 64];
    for t in 0..19 {
        let mut at = t * 64;
        for (shape, values) in &parts {
            fused[at..at + shape[1]].copy_from_slice(&values[t * shape[1]..][..shape[1]]);
            at += shape[1];
        }
    }
    save_npy(dir.path(), "attn_1/qkv", &[32, 64], &fused);
    let (shape, logits) = oracle("prefill.logits");
    save_npy(dir.path(), "y", &shape, &logits);
    save_npy(dir.path(), "y.weight", &[1], &[0.0]);
    let map = dir.path().join("map.json");
    let names = json!({
        "attn_{n}.q": {"tap": "layers.{n}.q_rope", "axes": ["batch", "heads", "tokens", "head_dim"]},
        "attn_{n}.qkv": {"taps": ["layers.{n}.q_proj", "layers.{n}.k_proj", "layers.{n}.v_proj"], "rows": [0, 19]},
        "y": "prefill.logits",
    });
    fs::write(&map, json!({"names": names, "ignore": ["*.weight"]}).to_string()).unwrap();
    let map_argument = ["--map", map.to_str().unwrap()];

    let (code, result) = verify(dir.path(), &map_argument);
    assert_eq!((code, failed(&result)), (0, vec![]), "{}", result["reason"]);
    assert_eq!(site(&result, "prefill.layers.1.k_proj")["elements"], 19 * 16);
    assert_eq!(site(&result, "prefill.layers.0.q_rope")["elements"], 19 * 32);
    assert_eq!(result["unmatched"], json!(["map.json (no array)"]));

    // Without its axes the query fits nothing; the rest of the report is kept.
    let names = json!({"attn_{n}.q": "layers.{n}.q_rope", "y": "logits"});
    fs::write(&map, json!({"names": names}).to_string()).unwrap();
    let (code, result) = verify(dir.path(), &map_argument);
    assert_eq!((code, result["logits"]["verdict"].as_str()), (3, Some("PASSED")));
    let problem = result["problems"][0].as_str().unwrap();
    assert_eq!(
        problem,
        "attn_0.q has shape [1, 4, 19, 8], but prefill takes layers.0.q_rope [19, 4, 8]; declare its axes with --map"
    );
}

/// int8 codes in blocks of 16 x 16 with one scale a row, and padding up to whole blocks.
#[test]
fn a_device_buffer_is_read_through_its_layout() {
    let dir = TempDir::new().unwrap();
    let (_, out) = oracle("prefill.layers.2.out");
    let (mut codes, mut scales) = (vec![0i8; 32 * 32], vec![0f32; 32]);
    for t in 0..19 {
        let row = &out[t * 32..][..32];
        scales[t] = row.iter().fold(0f32, |m, v| m.max(v.abs())) / 127.0;
        for (i, v) in row.iter().enumerate() {
            let block = t / 16 * 2 + i / 16;
            codes[block * 256 + t % 16 * 16 + i % 16] = (v / scales[t]).round() as i8;
        }
    }
    fs::write(dir.path().join("o.bin"), codes.iter().map(|&c| c as u8).collect::<Vec<u8>>()).unwrap();
    fs::write(dir.path().join("o_scales.f32"), bytes(&scales)).unwrap();
    let entry = json!({"tap": "layers.2.out", "dtype": "i8", "shape": [32, 32], "blocks": [[16, 16]],
                       "scales": "o_scales", "rows": [0, 19]});
    let map = dir.path().join("map.json");
    fs::write(&map, json!({"names": {"o": entry}}).to_string()).unwrap();
    let (_, result) = verify(dir.path(), &["--map", map.to_str().unwrap()]);
    // Eight bits are less than the f32 that the contract declares, but every value is where it belongs.
    let out_site = site(&result, "prefill.layers.2.out");
    let largest = out.iter().fold(0f32, |m, v| m.max(v.abs()));
    assert!(out_site["max_abs"].as_f64().unwrap() <= f64::from(largest) / 127.0 * 0.51, "{out_site}");
}

// Blocks of eight values: E is the exponent of the largest, m the value in units of 2^(E - 133). So a value is
// off by half a unit at most; values read without their exponents, or with those of other blocks, would not be.
#[test]
fn block_floating_point_is_read_through_its_layout() {
    let dir = TempDir::new().unwrap();
    let (_, out) = oracle("prefill.layers.2.out");
    let (mut mantissas, mut exponents, mut half_unit) = (Vec::new(), Vec::new(), 0f64);
    for block in out.chunks(8) {
        let largest = block.iter().fold(0f32, |m, v| m.max(v.abs()));
        let exponent = (largest.to_bits() >> 23) as u8;
        let unit = 2f64.powi(i32::from(exponent) - 133);
        mantissas
            .extend(block.iter().map(|v| (f64::from(*v) / unit).round().clamp(-127.0, 127.0) as i8 as u8));
        exponents.push(exponent);
        half_unit = half_unit.max(unit);
    }
    let map = dir.path().join("map.json");
    let read = |bytes: Vec<u8>, bfp: Value| {
        fs::write(dir.path().join("o.bin"), bytes).unwrap();
        let entry = json!({"tap": "layers.2.out", "bfp": bfp, "shape": [19, 32]});
        fs::write(&map, json!({"names": {"o": entry}}).to_string()).unwrap();
        let (_, result) = verify(dir.path(), &["--map", map.to_str().unwrap()]);
        site(&result, "prefill.layers.2.out")["max_abs"].as_f64().unwrap()
    };
    let blocks = mantissas.chunks(8).zip(&exponents);
    let inline: Vec<u8> = blocks.flat_map(|(m, &e)| [&[e], m].concat()).collect();
    assert!(read(inline, json!({})) <= half_unit);
    fs::write(dir.path().join("e.bin"), &exponents).unwrap();
    assert!(read(mantissas.clone(), json!({"exponents": "e"})) <= half_unit);
    exponents.rotate_left(1);
    fs::write(dir.path().join("e.bin"), &exponents).unwrap();
    assert!(read(mantissas, json!({"exponents": "e"})) > 4.0 * half_unit);
}

/// A recurrent state that a framework keeps as [heads, value, key]; as it lies it is no state of this model.
#[test]
fn a_transposed_state_is_declared() {
    let dir = TempDir::new().unwrap();
    let package = llama().with_file_name("qwen3_5");
    let dump = Dump::open(package).unwrap();
    let state = dump.f32("final.layers.0.recurrent_state").unwrap().unwrap();
    let [heads, keys, values] = state.shape[..] else { panic!("three axes") };
    let turned: Vec<f32> = (0..state.len())
        .map(|n| state[(n / keys / values * keys + n % keys) * values + n / keys % values])
        .collect();
    save_npy(dir.path(), "s", &[heads, values, keys], &turned);
    let steps = dump.pass_names().iter().filter(|pass| pass.starts_with("step")).count();
    let tap = format!("step{steps}.layers.0.gdn_state");
    let read = |entry: Value| {
        let map = dir.path().join("map.txt");
        fs::write(&map, json!({"names": {"s": entry}}).to_string()).unwrap();
        let subject = format!("dump:{}", dir.path().display());
        let more = ["--subject", &subject, "--map", map.to_str().unwrap(), "--format", "json"];
        let (_, out, error) = karat(&[&["verify", "qwen3_5"], &more[..]].concat());
        assert_eq!(error, "");
        serde_json::from_str::<Value>(&out).unwrap()["results"][0].take()
    };
    let told = read(json!({"tap": tap, "transpose": true}));
    assert_ne!(site(&told, &tap)["verdict"], "FAILED", "{told}");
    let told = read(json!({"tap": tap}));
    let problem = told["problems"][0].as_str().unwrap();
    assert!(problem.starts_with(&format!("s has shape [{heads}, {values}, {keys}]")), "{problem}");
}

/// A value that fits no shape and a name that fits no site are in every form of the report.
#[test]
fn every_form_shows_what_could_not_be_judged() {
    let dir = TempDir::new().unwrap();
    let (shape, logits) = oracle("prefill.logits");
    save_npy(dir.path(), "prefill.logits", &shape, &logits);
    save_npy(dir.path(), "prefill.layers.1.out", &[5, 5], &[1.0; 25]);
    save_npy(dir.path(), "mystery", &[3], &[1.0; 3]);
    let subject = format!("dump:{}", dir.path().display());
    for form in ["text", "json", "md", "junit", "sarif", "html"] {
        let (code, out, error) = karat(&["verify", "llama", "--subject", &subject, "--format", form]);
        assert_eq!((code, error.as_str()), (3, ""), "{form}");
        assert!(out.contains("mystery"), "{form}: {out}");
        assert!(out.contains("prefill.layers.1.out has shape [5, 5]"), "{form}: {out}");
    }
}

/// llama.cpp's base file for KL divergence: 16 bits a log-probability, the second half of the positions.
#[test]
fn a_base_file_is_judged_by_token() {
    let dir = TempDir::new().unwrap();
    let golden = Dump::open(llama()).unwrap();
    let prompt = golden.manifest().prompt.clone();
    let (_, logits) = oracle("prefill.logits");
    let mut file = b"_logits_".to_vec();
    // 19 tokens are fed; the twentieth is the one whose logits are not stored.
    for n in [20, 101, 1] {
        file.extend(i32::to_le_bytes(n));
    }
    prompt.iter().chain([&golden.manifest().greedy[0]]).for_each(|id| file.extend(id.to_le_bytes()));
    for row in logits.chunks_exact(101).skip(10) {
        let (low, high) = row.iter().fold((f32::MAX, f32::MIN), |(l, h), &v| (l.min(v), h.max(v)));
        let scale = (high - low) / 65535.0;
        file.extend(scale.to_le_bytes());
        file.extend(low.to_le_bytes());
        row.iter().for_each(|v| file.extend((((v - low) / scale).round() as u16).to_le_bytes()));
        file.extend([0, 0]);
    }
    let path = dir.path().join("base.dat");
    fs::write(&path, &file).unwrap();
    let (code, result) = verify(&path, &[]);
    assert_eq!(code, 0, "{}", result["reason"]);
    assert_eq!(result["logits"]["argmax_equal"], json!([9, 9]));
    assert_eq!(result["sites"], json!([]));
}

#[test]
fn without_logits_and_layer_outputs_nothing_is_decided() {
    let dir = TempDir::new().unwrap();
    hook(dir.path(), "prefill.layers.0.q_proj", "model.layers.0.self_attn.q_proj");
    let (code, result) = verify(dir.path(), &[]);
    assert_eq!(code, 3);
    assert_eq!(result["reason"], "the subject exposes neither logits nor layer outputs");
}

#[test]
fn two_arrays_for_one_tap_must_agree() {
    let dir = TempDir::new().unwrap();
    hook(dir.path(), "prefill.layers.0.attn_out", "model.layers.0.self_attn");
    hook(dir.path(), "prefill.layers.0.resid_mid", "model.layers.0.self_attn.o_proj");
    hook(dir.path(), "prefill.logits", "lm_head");
    let (code, result) = verify(dir.path(), &[]);
    assert_eq!(code, 3);
    assert_eq!(
        result["problems"],
        json!(["model.layers.0.self_attn and model.layers.0.self_attn.o_proj both stand for \
                prefill.layers.0.attn_out and differ; say which with --map"])
    );
}

#[test]
fn a_dump_of_our_own_and_one_that_lies() {
    let dir = TempDir::new().unwrap();
    let prompts = dir.path().join("prompts.txt");
    fs::write(&prompts, "3 1 4 1 5\n9 2 6 5 3 5\n").unwrap();
    let out = dir.path().join("dumps");
    let written = karat(&[
        "dump",
        "llama",
        "--prompt-ids",
        prompts.to_str().unwrap(),
        "--out",
        out.to_str().unwrap(),
        "--tokens",
        "2",
    ]);
    assert_eq!(written.0, 0, "{}", written.2);
    // Both prompts come from the dumps themselves.
    let subject = format!("dump:{}", out.display());
    let (code, report, _) = karat(&["verify", "llama", "--subject", &subject, "--format", "json"]);
    let report: Value = serde_json::from_str(&report).unwrap();
    assert_eq!((code, report["results"].as_array().unwrap().len()), (0, 2));
    assert_eq!(report["results"][1]["logits"]["argmax_equal"], json!([8, 8]));

    let manifest = out.join("1/manifest.json");
    let text = fs::read_to_string(&manifest).unwrap();
    fs::write(&manifest, text.replacen("\"shape\": [6, 32]", "\"shape\": [3, 64]", 1)).unwrap();
    let (code, report, error) = karat(&["verify", "llama", "--subject", &subject]);
    assert_eq!((code, report.as_str()), (2, ""));
    assert!(error.contains("expected F32 [3, 64] as in manifest.json, found F32 [6, 32]"), "{error}");
}

#[test]
fn calls_that_make_no_sense() {
    let dir = TempDir::new().unwrap();
    hook(dir.path(), "prefill.logits", "logits");
    let subject = format!("dump:{}", dir.path().display());
    let map = dir.path().join("map.txt");
    fs::write(&map, r#"{"names": {"logits": {"tap": "logits", "axis": []}}}"#).unwrap();
    for (args, says) in [
        (&["verify", "llama", "--subject", "dump:no/such/place"][..], "no/such/place"),
        (&["verify", "--subject", &subject], "need one package"),
        (&["verify", "llama", "--map", "x"], "--map needs --subject dump:DIR"),
        (
            &["verify", "llama", "--subject", &subject, "--map", map.to_str().unwrap()],
            "names: logits: unknown field `axis`",
        ),
        (&["verify", "llama", "--subject", "dump:"], "subject dump: is not known"),
    ] {
        let (code, out, error) = karat(args);
        assert_eq!((code, out.as_str(), error.lines().count()), (2, "", 1), "{args:?}: {error}");
        assert!(error.contains(says), "{args:?}: {error}");
    }
}
