//! The bundled oracle directories open, and their hashes hold.

use std::fs;
use std::path::{Path, PathBuf};

use karat_golden::{Dtype, Dump, DumpError, Origin, TapKey, TopK};
use proptest::prelude::*;

const FAMILIES: [&str; 4] = ["llama", "mistral", "qwen2", "qwen3"];

fn bundled(family: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../fixtures/data").join(family)
}

/// A copy of the golden of `family` that a test may damage.
fn copy(family: &str) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    for file in ["golden.json", "golden.safetensors", "noise.json"] {
        fs::copy(bundled(family).join(file), dir.path().join(file)).unwrap();
    }
    dir
}

#[test]
fn every_bundled_golden_is_whole() {
    for family in FAMILIES {
        let dump = Dump::open(bundled(family)).unwrap();
        dump.verify_hashes().unwrap();
        assert_eq!(dump.manifest().origin, Origin::IndependentOracle);
        assert_eq!(dump.extra()["family"], *family);
        assert_eq!(dump.pass_names(), ["prefill", "step1", "step2", "step3", "step4"], "{family}");
        for tap in dump.taps() {
            assert_eq!(dump.f32(&tap.name).unwrap().unwrap().len(), tap.elements());
            assert!(dump.noise(&tap.name).is_some(), "{family} {}", tap.name);
        }
    }
}

// The figures are those of the files, read off by eye.
#[test]
fn llama_as_its_golden_json_says() {
    let dump = Dump::open(bundled("llama")).unwrap();
    assert_eq!(dump.manifest().greedy, [39, 15, 30, 3, 55]);
    assert_eq!((dump.manifest().prompt.len(), dump.manifest().prompt[0]), (19, 29));
    let tap = dump.tap("prefill.layers.0.k_rope").unwrap();
    assert_eq!((tap.dtype, &tap.shape[..]), (Dtype::F32, &[19, 2, 8][..]));
    let noise = dump.noise("prefill.final_norm").unwrap();
    assert_eq!((noise.max_abs, noise.f64_diff, noise.f32_diff), (3.83, 1.7e-6, 3.1e-6));
    let files: Vec<(String, String)> = dump.expected_files().into_iter().collect();
    assert_eq!(files.len(), 1);
    assert_eq!(files[0].0, "model.safetensors");
    assert_eq!(files[0].1, karat_golden::sha256_file(&bundled("llama").join("model.safetensors")).unwrap());
    // The token chosen after the prompt is the first greedy one.
    assert_eq!(dump.summary("prefill.logits").unwrap().unwrap().argmax[18], 39);
    // noise.json gives the largest value to 3 digits.
    let embed = dump.summary("prefill.embed").unwrap().unwrap();
    assert!((embed.max.max(-embed.min) - 3.32).abs() < 0.005);
}

#[test]
fn taps_come_in_the_order_of_the_data_flow() {
    let dump = Dump::open(bundled("qwen3")).unwrap();
    let names: Vec<&str> = dump.taps().map(|tap| tap.name.as_str()).collect();
    assert!(names.is_sorted_by_key(|name| TapKey::of(name)));
    assert_eq!(names[0], "prefill.embed");
    let layer: Vec<&str> = names.iter().filter_map(|name| name.strip_prefix("prefill.layers.1.")).collect();
    let place = |part: &str| layer.iter().position(|p| *p == part).unwrap();
    assert!(place("q_proj") < place("q_norm") && place("q_norm") < place("q_rope"));
    assert!(place("attn_out") < place("resid_mid") && place("resid_mid") < place("mlp_gate"));
    assert_eq!((layer[0], layer[layer.len() - 1]), ("attn_norm", "out"));
}

#[test]
fn a_flipped_byte_names_file_and_tensor() {
    let dir = copy("llama");
    let file = dir.path().join("golden.safetensors");
    let mut bytes = fs::read(&file).unwrap();
    let last = bytes.len() - 1;
    bytes[last] ^= 0x40;
    fs::write(&file, bytes).unwrap();
    let error = Dump::open(dir.path()).unwrap().verify_hashes().unwrap_err();
    let DumpError::HashMismatch { path, tensor, .. } = &error else { panic!("{error}") };
    assert_eq!(path, &file);
    // The file stores its tensors by the alphabet, so the last one is:
    assert_eq!(tensor.as_deref(), Some("step4.logits"));
}

#[test]
fn a_changed_header_that_moves_no_tensor_is_noticed() {
    let dir = copy("llama");
    let json = dir.path().join("golden.json");
    let text = fs::read_to_string(&json).unwrap();
    fs::write(&json, text.replace("579920910d86", "579920910d87")).unwrap();
    let error = Dump::open(dir.path()).unwrap().verify_hashes().unwrap_err();
    assert!(matches!(&error, DumpError::HashMismatch { tensor: None, .. }), "{error}");
}

#[test]
fn a_missing_or_broken_half() {
    let dir = copy("qwen2");
    fs::remove_file(dir.path().join("golden.safetensors")).unwrap();
    let error = Dump::open(dir.path()).err().unwrap();
    assert!(
        matches!(&error, DumpError::HalfWritten { missing, .. } if missing == "golden.safetensors"),
        "{error}"
    );

    let dir = copy("qwen2");
    fs::write(dir.path().join("noise.json"), "{\"prefill.embed\": [1]}").unwrap();
    let error = Dump::open(dir.path()).err().unwrap();
    assert!(error.to_string().contains("noise.json: line 1, column"), "{error}");

    // noise.json may be absent: then nothing is known about noise.
    fs::remove_file(dir.path().join("noise.json")).unwrap();
    assert!(Dump::open(dir.path()).unwrap().noise("prefill.embed").is_none());
}

/// An oracle directory with one tensor of router indices.
fn with_indices(indices: [i32; 2]) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    let bytes: Vec<u8> = indices.iter().flat_map(|i| i.to_le_bytes()).collect();
    let name = "prefill.layers.0.router_index";
    let json = format!(
        r#"{{"format": "llm-oracle/1", "prompt": [1], "greedy": [], "files": {{}}, "passes": [{{"anchor": 7}}],
            "tensors": {{"{name}": ["int32", [1, 2], "{}"]}}}}"#,
        karat_golden::sha256_hex(&bytes)
    );
    fs::write(dir.path().join("golden.json"), json).unwrap();
    let header = format!(r#"{{"{name}":{{"dtype":"I32","shape":[1,2],"data_offsets":[0,8]}}}}"#);
    let file = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &bytes].concat();
    fs::write(dir.path().join("golden.safetensors"), file).unwrap();
    dir
}

#[test]
fn router_indices_become_f32() {
    let dir = with_indices([3, -1]);
    let dump = Dump::open(dir.path()).unwrap();
    dump.verify_hashes().unwrap();
    assert_eq!(&dump.f32("prefill.layers.0.router_index").unwrap().unwrap()[..], [3.0, -1.0]);
    assert_eq!(dump.extra()["passes"][0]["anchor"], 7);

    let dir = with_indices([3, (1 << 24) + 1]);
    let error = Dump::open(dir.path()).unwrap().f32("prefill.layers.0.router_index").unwrap_err();
    assert!(error.to_string().ends_with("which f32 holds exactly, found 16777217"), "{error}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    // Whatever happens to golden.json, opening and checking end in a value or in an error.
    #[test]
    fn a_mutated_golden_json_never_panics(at in any::<prop::sample::Index>(), value in any::<u8>()) {
        let dir = with_indices([3, -1]);
        let json = dir.path().join("golden.json");
        let mut text = fs::read(&json).unwrap();
        let at = at.index(text.len());
        text[at] = value;
        fs::write(&json, text).unwrap();
        if let Ok(dump) = Dump::open(dir.path()) {
            prop_assert_eq!(dump.taps().len(), 1);
            let _ = dump.verify_hashes();
        }
    }
}

/// A top-k golden with one step, best token 5.
fn topk(greedy: &str) -> String {
    format!(
        r#"{{"format": "llm-oracle-real/1", "model": "m", "package": "p", "gguf_sha256": "00", "compute": "float32",
            "transformers": "5", "config": {{}}, "runs": [{{"prompt": [1, 2], "greedy": {greedy},
            "steps": [{{"top": [[5, 1.5], [0, 0.5]], "logsumexp": 2.0}}],
            "last_prompt_row": {{"embed": {{"rms": 0.1, "head": [0.25]}}}}}}]}}"#
    )
}

#[test]
fn top_k_goldens() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("real.json");
    fs::write(&path, topk("[5]")).unwrap();
    assert!(TopK::is_topk(&path));
    let golden = TopK::open(&path).unwrap();
    assert_eq!(golden.runs[0].steps[0].top, [(5, 1.5), (0, 0.5)]);
    assert_eq!(golden.runs[0].last_prompt_row["embed"].head, [0.25]);

    fs::write(&path, topk("[5, 6]")).unwrap();
    assert!(TopK::open(&path).unwrap_err().to_string().ends_with("run 0 has 1 steps for 2 greedy ids"));
    fs::write(&path, topk("[0]")).unwrap();
    let error = TopK::open(&path).unwrap_err().to_string();
    assert!(error.ends_with("greedy id is 0, but the best logit is that of Some(5)"), "{error}");
    assert!(!TopK::is_topk(bundled("llama").join("golden.json")));
}
