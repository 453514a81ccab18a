//! What the writer writes, the reader reads; what is half or changed is recognised.

use std::fs;
use std::path::{Path, PathBuf};

use karat_golden::{
    Dtype, Dump, DumpError, DumpWriter, MANIFEST_FILE, Manifest, Origin, Phase, Sigma, TAPS_FILE,
};
use proptest::prelude::*;

const NAMES: [&str; 3] = ["prefill.embed", "prefill.logits", "step1.logits"];

fn manifest() -> Manifest {
    let mut manifest = Manifest::new("tests", Origin::RegressionLock, vec![3, 1]);
    manifest.greedy = vec![2, 0];
    manifest.model_hash = Some("00ff".to_owned());
    manifest.contract = Some("f32".to_owned());
    manifest
}

/// Two prompt tokens and one step of a model with hidden 2 and a vocabulary of 3.
fn write(dir: &Path) {
    let mut writer = DumpWriter::create(dir, manifest()).unwrap();
    writer.tap("prefill.embed", &["tokens", "hidden"], &[2, 2], &[3.0, -4.0, 0.5, 0.0]).unwrap();
    writer.tap("prefill.logits", &["tokens", "vocab"], &[2, 3], &[0.0, 1.0, 0.5, 0.1, -1.0, 0.1]).unwrap();
    writer.tap("step1.logits", &["tokens", "vocab"], &[1, 3], &[-3.0, -2.0, -1.0]).unwrap();
    writer.finish().unwrap();
}

/// A fresh directory and the path of a dump in it.
fn scratch() -> (tempfile::TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let dump = dir.path().join("dump");
    (dir, dump)
}

fn open_error(path: &Path) -> DumpError {
    Dump::open(path).err().expect("this dump must be refused")
}

fn edit(path: &Path, from: &str, to: &str) {
    let text = fs::read_to_string(path).unwrap();
    assert!(text.contains(from), "{from} in {text}");
    fs::write(path, text.replacen(from, to, 1)).unwrap();
}

#[test]
fn reads_back_what_was_written() {
    let (_dir, path) = scratch();
    write(&path);
    let dump = Dump::open(&path).unwrap();
    dump.verify_hashes().unwrap();
    assert_eq!(dump.taps().map(|tap| tap.name.as_str()).collect::<Vec<_>>(), NAMES);
    assert_eq!(dump.pass_names(), ["prefill", "step1"]);
    assert_eq!(dump.manifest().prompt, [3, 1]);
    assert_eq!(dump.manifest().greedy, [2, 0]);
    assert_eq!(dump.manifest().model_hash.as_deref(), Some("00ff"));
    assert_eq!(dump.extra()["contract"], "f32");

    let embed = dump.f32("prefill.embed").unwrap().unwrap();
    assert_eq!(embed.shape, [2, 2]);
    assert_eq!(&embed[..], [3.0, -4.0, 0.5, 0.0]);
    assert!(dump.f32("prefill.layers.0.out").unwrap().is_none());

    // sqrt((9 + 16 + 0.25) / 4) = sqrt(6.3125) = 2.512469
    let tap = dump.tap("prefill.embed").unwrap();
    let summary = tap.summary.as_ref().unwrap();
    assert_eq!((tap.dtype, tap.axes.join(" ")), (Dtype::F32, "tokens hidden".to_owned()));
    assert_eq!((summary.rms, summary.min, summary.max), (2.51247, -4.0, 3.0));
    assert_eq!(summary.first, [3.0, -4.0, 0.5, 0.0]);
    assert!(summary.argmax.is_empty());
    // The second row has two largest values; the first of them counts.
    assert_eq!(dump.summary("prefill.logits").unwrap().unwrap().argmax, [1, 0]);
}

// Twelve megabytes: the file is put together in more than one piece. Value i is i, which f32 holds below 2^24.
#[test]
fn values_of_a_long_tap_stay_in_their_places() {
    let (_dir, path) = scratch();
    let values: Vec<f32> = (0..3 << 20).map(|i| i as f32).collect();
    let mut writer = DumpWriter::create(&path, manifest()).unwrap();
    writer.tap("prefill.logits", &["tokens", "vocab"], &[2, 3 << 19], &values).unwrap();
    writer.finish().unwrap();
    let dump = Dump::open(&path).unwrap();
    let read = dump.f32("prefill.logits").unwrap().unwrap();
    assert_eq!(read.len(), values.len());
    assert_eq!(read.iter().zip(&values).position(|(a, b)| a != b), None);
}

// The prompt has two tokens, so the first step feeds position 2.
#[test]
fn positions_follow_from_the_prompt() {
    let (_dir, path) = scratch();
    write(&path);
    let dump = Dump::open(&path).unwrap();
    let passes: Vec<_> =
        dump.manifest().passes.iter().map(|p| (p.name.as_str(), p.phase, p.positions)).collect();
    assert_eq!(passes, [("prefill", Phase::Prefill, [0, 2]), ("step1", Phase::Decode, [2, 3])]);
}

#[test]
fn the_manifest_reads_well_in_a_diff() {
    let (_dir, path) = scratch();
    write(&path);
    let text = fs::read_to_string(path.join(MANIFEST_FILE)).unwrap();
    // sha256 of the sixteen bytes 00004040 000080c0 0000003f 00000000, by coreutils.
    let expected = r#"{
"format": "karat-dump/1",
"producer": "tests",
"origin": "regression-lock",
"model_hash": "00ff",
"contract": "f32",
"prompt": [3, 1],
"greedy": [2, 0],
"passes": [
{"pass": "prefill", "phase": "prefill", "positions": [0, 2]},
{"pass": "step1", "phase": "decode", "positions": [2, 3]}
],
"taps": [
{"site": "prefill.embed", "axes": ["tokens", "hidden"], "shape": [2, 2], "dtype": "f32", "rms": 2.51247, "min": -4.0, "max": 3.0, "first": [3.0, -4.0, 0.5, 0.0], "sha256": "8647e2f470e2a8cbd987f69a244b3338abfa72e783a9374da9988bcc01cfa9d2"},
"#;
    assert!(text.starts_with(expected), "{text}");
    for name in NAMES {
        assert_eq!(text.lines().filter(|line| line.contains(&format!("\"site\": \"{name}\""))).count(), 1);
    }
    // 13 lines down to `"taps": [`, then one a tap, then the two closing brackets.
    assert_eq!(text.lines().count(), 13 + NAMES.len() + 2);
}

#[test]
fn the_same_values_give_the_same_bytes() {
    let (_dir, first) = scratch();
    let (_other, second) = scratch();
    write(&first);
    write(&second);
    for file in [MANIFEST_FILE, TAPS_FILE] {
        assert_eq!(fs::read(first.join(file)).unwrap(), fs::read(second.join(file)).unwrap());
    }
    // Nothing but the two files, so no directory of goldens collects anything else.
    assert_eq!(fs::read_dir(&first).unwrap().count(), 2);
}

#[test]
fn values_that_are_not_finite_keep_their_bits() {
    let (_dir, path) = scratch();
    let odd = [f32::from_bits(0x7fc0_1234), f32::INFINITY, f32::NEG_INFINITY, -0.0, f32::from_bits(1), 2.0];
    let mut writer = DumpWriter::create(&path, manifest()).unwrap();
    writer.tap("prefill.embed", &[], &[6], &odd).unwrap();
    writer.finish().unwrap();

    let dump = Dump::open(&path).unwrap();
    dump.verify_hashes().unwrap();
    let values = dump.f32("prefill.embed").unwrap().unwrap();
    let bits = |values: &[f32]| values.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
    assert_eq!(bits(&values), bits(&odd));
    // The finite ones are -0, the smallest subnormal and 2: sqrt(4 / 3) = 1.154701.
    let summary = dump.summary("prefill.embed").unwrap().unwrap();
    assert_eq!((summary.non_finite, summary.rms, summary.max), (3, 1.1547, 2.0));
}

#[test]
fn a_line_without_a_tensor() {
    let (_dir, path) = scratch();
    let mut writer = DumpWriter::create(&path, manifest()).unwrap();
    writer.tap_line("prefill.embed", &["tokens"], &[2], &[1.0, 2.0]).unwrap();
    writer.finish().unwrap();
    let dump = Dump::open(&path).unwrap();
    dump.verify_hashes().unwrap();
    assert!(dump.f32("prefill.embed").unwrap().is_none());
    assert!(!dump.tap("prefill.embed").unwrap().stored);
    assert_eq!(dump.summary("prefill.embed").unwrap().unwrap().max, 2.0);
}

#[test]
fn an_unfinished_writer_leaves_nothing() {
    let (dir, path) = scratch();
    let mut writer = DumpWriter::create(path.join("deep/down"), manifest()).unwrap();
    writer.tap("prefill.embed", &[], &[1], &[1.0]).unwrap();
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1, "it works in a directory of its own");
    drop(writer);
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
}

#[test]
fn an_existing_target_is_left_alone() {
    let (dir, path) = scratch();
    fs::create_dir(&path).unwrap();
    write(&path); // empty: allowed
    let error = DumpWriter::create(&path, manifest()).err().unwrap();
    assert!(matches!(&error, DumpError::TargetExists { .. }), "{error}");
    assert!(error.to_string().ends_with("dump exists and is not an empty directory; nothing was written"));
    Dump::open(&path).unwrap().verify_hashes().unwrap();

    let file = dir.path().join("file");
    fs::write(&file, "").unwrap();
    assert!(matches!(DumpWriter::create(&file, manifest()), Err(DumpError::TargetExists { .. })));
}

#[test]
fn a_tap_must_fit_its_shape() {
    let (_dir, path) = scratch();
    let mut writer = DumpWriter::create(&path, manifest()).unwrap();
    writer.tap("prefill.embed", &["tokens"], &[2], &[1.0, 2.0]).unwrap();
    let twice = writer.tap("prefill.embed", &["tokens"], &[2], &[1.0, 2.0]).unwrap_err();
    assert_eq!(twice.to_string(), "tap prefill.embed: was written before");
    let short = writer.tap("prefill.logits", &["tokens"], &[3], &[1.0, 2.0]).unwrap_err();
    assert_eq!(short.to_string(), "tap prefill.logits: shape [3] does not hold 2 values");
    let axes = writer.tap("prefill.logits", &["tokens"], &[1, 2], &[1.0, 2.0]).unwrap_err();
    assert_eq!(axes.to_string(), "tap prefill.logits: 1 axis names for 2 axes");
    // A refused tap leaves no trace in what is written.
    writer.finish().unwrap();
    assert_eq!(Dump::open(&path).unwrap().taps().len(), 1);
}

#[test]
fn a_flipped_bit_names_its_tensor() {
    let (_dir, path) = scratch();
    write(&path);
    let file = path.join(TAPS_FILE);
    let mut bytes = fs::read(&file).unwrap();
    let last = bytes.len() - 1;
    bytes[last] ^= 1;
    fs::write(&file, bytes).unwrap();
    let error = Dump::open(&path).unwrap().verify_hashes().unwrap_err();
    assert!(error.is_tampered());
    let DumpError::HashMismatch { tensor, .. } = &error else { panic!("{error}") };
    assert_eq!(tensor.as_deref(), Some("step1.logits"));
    assert!(error.to_string().contains("taps.safetensors: tensor step1.logits has sha256 "), "{error}");
}

#[test]
fn a_line_edited_by_hand_is_noticed() {
    let (_dir, path) = scratch();
    write(&path);
    edit(&path.join(MANIFEST_FILE), "\"rms\": 2.51247", "\"rms\": 2.5");
    let error = Dump::open(&path).unwrap().verify_hashes().unwrap_err();
    assert!(error.is_tampered());
    assert!(
        error.to_string().ends_with("prefill.embed: rms is 2.5 in the manifest, but 2.51247 in the tensor"),
        "{error}"
    );
}

#[test]
fn half_a_dump_is_recognised() {
    for (gone, left) in [(MANIFEST_FILE, TAPS_FILE), (TAPS_FILE, MANIFEST_FILE)] {
        let (_dir, path) = scratch();
        write(&path);
        fs::remove_file(path.join(gone)).unwrap();
        let error = open_error(&path);
        assert!(matches!(&error, DumpError::HalfWritten { .. }));
        let expected = format!("is a half-written dump: {left} is there, but {gone} is missing");
        assert!(error.to_string().ends_with(&expected), "{error}");
    }
    let (dir, path) = scratch();
    assert!(matches!(open_error(&path), DumpError::Io { .. }));
    assert!(matches!(open_error(dir.path()), DumpError::NotADump { .. }));
}

#[test]
fn a_truncated_file_says_what_is_missing() {
    let (_dir, path) = scratch();
    write(&path);
    let file = path.join(TAPS_FILE);
    let whole = fs::read(&file).unwrap();
    // 52 bytes of values: 16 + 24 + 12. Without the last the third tensor ends outside.
    let cases = [
        (
            whole.len() - 1,
            "tensor step1.logits ends at byte 52 of the data, but the file holds 51 bytes of data: it is truncated",
        ),
        (100, "but the file ends after 92 of them: it is truncated"),
        (3, "a safetensors file starts with 8 bytes of header length, but this one holds 3 bytes"),
        (0, "but this one holds 0 bytes"),
    ];
    for (len, expected) in cases {
        fs::write(&file, &whole[..len]).unwrap();
        let error = open_error(&path);
        assert!(matches!(error, DumpError::Container { .. }));
        assert!(error.to_string().contains(expected), "{len}: {error}");
    }
    let longer = [&whole[..], &[0]].concat();
    fs::write(&file, longer).unwrap();
    let error = open_error(&path).to_string();
    assert!(error.ends_with("the header describes 52 bytes of data, but the file holds 53"), "{error}");
}

#[test]
fn a_manifest_that_lies_is_refused() {
    let lies = [
        (
            "\"shape\": [2, 2]",
            "\"shape\": [1, 4]",
            "tensor prefill.embed: expected F32 [1, 4] as in manifest.json, found F32 [2, 2]",
        ),
        (
            "\"dtype\": \"f32\"",
            "\"dtype\": \"i32\"",
            "expected I32 [2, 2] as in manifest.json, found F32 [2, 2]",
        ),
        (
            "\"site\": \"prefill.embed\"",
            "\"site\": \"prefill.embedding\"",
            "tensor prefill.embedding: expected F32 [2, 2] as in manifest.json, found no such tensor",
        ),
        ("\"site\": \"prefill.embed\"", "\"site\": \"step1.logits\"", "site step1.logits is listed twice"),
        ("[2, 2], \"dtype\"", "[2], \"dtype\"", "site prefill.embed names 2 axes, but its shape has 1"),
        ("karat-dump/1", "karat-dump/9", "format is karat-dump/9, this build reads karat-dump/1"),
        ("\"prompt\": [3, 1]", "\"prompt\": [3, -1]", "invalid value: integer `-1`, expected u32"),
        ("\"producer\"", "\"maker\"", "missing field `producer`"),
        ("\"prompt\": [3, 1],", "\"prompt\": [3, 1]", "line 8, column"),
    ];
    for (from, to, expected) in lies {
        let (_dir, path) = scratch();
        write(&path);
        edit(&path.join(MANIFEST_FILE), from, to);
        let error = open_error(&path).to_string();
        assert!(error.contains(expected), "{from} -> {to}: {error}");
    }
}

#[test]
fn a_tensor_without_a_line_is_refused() {
    let (_dir, path) = scratch();
    write(&path);
    edit(&path.join(MANIFEST_FILE), "\"first\": [3.0, -4.0, 0.5, 0.0],", "\"first\": [], \"stored\": false,");
    let error = open_error(&path).to_string();
    assert!(error.ends_with("tensor prefill.embed: expected a line in manifest.json, found none"), "{error}");
}

// Other writers do not pad their headers, so the values may start anywhere.
#[test]
fn values_may_lie_at_any_byte() {
    let (_dir, path) = scratch();
    write(&path);
    let file = path.join(TAPS_FILE);
    let bytes = fs::read(&file).unwrap();
    let header = u64::from_le_bytes(*bytes.first_chunk().unwrap()) + 1;
    let (text, values) = bytes[8..].split_at(header as usize - 1);
    fs::write(&file, [&header.to_le_bytes(), text, b" ", values].concat()).unwrap();
    let dump = Dump::open(&path).unwrap();
    assert_eq!(&dump.f32("step1.logits").unwrap().unwrap()[..], [-3.0, -2.0, -1.0]);
}

proptest! {
    // Whatever happens to the header, opening and reading end in a value or in an error.
    #[test]
    fn a_mutated_header_never_panics(flips in prop::collection::vec((0usize..400, any::<u8>()), 1..6), cut in 0usize..500) {
        let (_dir, path) = scratch();
        write(&path);
        let file = path.join(TAPS_FILE);
        let mut bytes = fs::read(&file).unwrap();
        for (at, value) in flips {
            let at = at % bytes.len();
            bytes[at] = value;
        }
        bytes.truncate(bytes.len() - cut % 64);
        fs::write(&file, bytes).unwrap();
        if let Ok(dump) = Dump::open(&path) {
            for name in NAMES {
                // Opened means: every tensor is there in the shape that the manifest gives.
                prop_assert_eq!(dump.f32(name).unwrap().unwrap().len(), dump.tap(name).unwrap().elements());
            }
        }
    }

    #[test]
    fn a_mutated_manifest_never_panics(at in 0usize..2000, value in any::<u8>()) {
        let (_dir, path) = scratch();
        write(&path);
        let file = path.join(MANIFEST_FILE);
        let mut bytes = fs::read(&file).unwrap();
        let at = at % bytes.len();
        bytes[at] = value;
        fs::write(&file, bytes).unwrap();
        if let Ok(dump) = Dump::open(&path) {
            let _ = dump.verify_hashes();
        }
    }

    #[test]
    fn any_bits_survive(bits in prop::collection::vec(any::<u32>(), 0..3000)) {
        let (_dir, path) = scratch();
        let values: Vec<f32> = bits.iter().map(|&b| f32::from_bits(b)).collect();
        let mut writer = DumpWriter::create(&path, manifest()).unwrap();
        writer.tap("a", &["n"], &[values.len()], &values).unwrap();
        writer.finish().unwrap();
        let dump = Dump::open(&path).unwrap();
        dump.verify_hashes().unwrap();
        let read: Vec<u32> = dump.f32("a").unwrap().unwrap().iter().map(|v| v.to_bits()).collect();
        prop_assert_eq!(read, bits);
    }
}

// 0.3 and 0.4: sqrt((0.09 + 0.16) / 2) = 0.353553, to three digits.
#[test]
fn sigmas_are_kept_with_their_tap() {
    let (_dir, path) = scratch();
    let mut writer = DumpWriter::create(&path, manifest()).unwrap();
    writer.tap("prefill.embed", &[], &[2], &[1.0, 2.0]).unwrap();
    writer.sigma(Sigma::of([0.3, 0.4]));
    writer.tap("prefill.logits", &[], &[1, 2], &[1.0, 2.0]).unwrap();
    writer.finish().unwrap();
    let dump = Dump::open(&path).unwrap();
    dump.verify_hashes().unwrap();
    assert_eq!(dump.tap("prefill.embed").unwrap().sigma, Some(Sigma { rms: 0.354, max: 0.4 }));
    assert_eq!(dump.tap("prefill.logits").unwrap().sigma, None);
}
