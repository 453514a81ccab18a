//! A diff says what changed first, and which tokens it moved.

use std::path::{Path, PathBuf};

use karat_golden::diff::{DiffVerdict, FieldDiff, Place};
use karat_golden::{DiffError, DiffOptions, Dump, DumpWriter, Manifest, Origin, Sigma, diff};

/// A dump of two prompt tokens and a step, built from `values(site)`; written in an order that is not that
/// of the data flow between passes and layers.
struct Run {
    dir: tempfile::TempDir,
    manifest: Manifest,
    taps: Vec<(&'static str, Vec<usize>, Vec<f32>)>,
    /// The standard deviation of every element that rounding gives, where the dump says it.
    sigma: Option<f64>,
}

fn run() -> Run {
    let mut manifest = Manifest::new("tests", Origin::RegressionLock, vec![7, 1]);
    manifest.model_hash = Some("aa".to_owned());
    let taps = vec![
        ("step1.logits", vec![1, 3], vec![2.0, 1.0, 0.0]),
        ("prefill.logits", vec![2, 3], vec![0.0, 1.0, 0.5, 3.0, 2.0, 1.0]),
        ("prefill.layers.10.out", vec![2, 2], vec![1.0, 2.0, 3.0, 4.0]),
        ("prefill.layers.9.out", vec![2, 2], vec![5.0, 6.0, 7.0, 8.0]),
        ("prefill.layers.9.attn_norm", vec![2, 2], vec![0.5, 0.25, 0.125, 1.0]),
        ("prefill.embed", vec![2, 2], vec![1.0, -1.0, 2.0, -2.0]),
    ];
    Run { dir: tempfile::tempdir().unwrap(), manifest, taps, sigma: None }
}

impl Run {
    fn set(mut self, name: &str, at: usize, value: f32) -> Run {
        let tap = self.taps.iter_mut().find(|tap| tap.0 == name).unwrap();
        tap.2[at] = value;
        self
    }

    fn sigma(mut self, sigma: f64) -> Run {
        self.sigma = Some(sigma);
        self
    }

    fn without(mut self, name: &str) -> Run {
        self.taps.retain(|tap| tap.0 != name);
        self
    }

    fn open(&self) -> Dump {
        let path: PathBuf = self.dir.path().join("dump");
        if !path.exists() {
            let mut writer = DumpWriter::create(&path, self.manifest.clone()).unwrap();
            for (name, shape, values) in &self.taps {
                writer.tap(name, &[], shape, values).unwrap();
                self.sigma.into_iter().for_each(|sigma| writer.sigma(Sigma { rms: sigma, max: sigma }));
            }
            writer.finish().unwrap();
        }
        Dump::open(&path).unwrap()
    }
}

fn diff_of(old: &Run, new: &Run) -> karat_golden::Diff {
    diff(&old.open(), &new.open(), &DiffOptions::default()).unwrap()
}

#[test]
fn nothing_changed() {
    let d = diff_of(&run(), &run());
    assert_eq!(d.verdict, DiffVerdict::Identical);
    assert_eq!((d.byte_identical.as_str(), &d.first_changed), ("6/6", &None));
    assert!(d.flips.is_empty() && d.metadata.is_empty() && d.only_old.is_empty() && d.only_new.is_empty());
    let logits = d.logits.unwrap();
    assert_eq!((logits.argmax_equal, logits.kl_max, logits.top_k_agreement), ([3, 3], 0.0, 1.0));
}

#[test]
fn the_first_change_is_that_of_the_data_flow() {
    // Three sites changed; the manifest lists the earliest of them last.
    let new = run().set("step1.logits", 0, 2.5).set("prefill.layers.10.out", 1, 2.5).set(
        "prefill.layers.9.out",
        2,
        7.5,
    );
    let d = diff_of(&run(), &new);
    assert_eq!(d.verdict, DiffVerdict::Changed);
    assert_eq!(d.byte_identical, "3/6");
    assert_eq!(d.first_changed.as_deref(), Some("prefill.layers.9.out"));
    let order: Vec<&str> = d.sites.iter().map(|s| s.site.as_str()).collect();
    let expected = [
        "prefill.embed",
        "prefill.layers.9.out",
        "prefill.layers.9.attn_norm",
        "prefill.layers.10.out",
        "prefill.logits",
        "step1.logits",
    ];
    assert_eq!(order, expected, "inside a layer as the manifest has it");

    // |7 - 7.5| against 2e-5 · 8 + 1e-6 = 1.61e-4.
    let change = d.sites[1].change.as_ref().unwrap();
    assert_eq!(
        (change.max_abs, change.worst, change.first),
        (0.5, Some(Place { row: 1, col: 0 }), change.worst)
    );
    assert!((change.limit - 1.61e-4).abs() < 1e-12 && (change.ratio - 0.5 / 1.61e-4).abs() < 1e-6);
    assert!(d.flips.is_empty(), "no largest logit moved");
}

#[test]
fn rounding_is_equivalent() {
    let new = run().set("prefill.layers.10.out", 3, 4.0 + 4.0 * f32::EPSILON);
    let d = diff_of(&run(), &new);
    assert_eq!(d.verdict, DiffVerdict::Equivalent);
    assert_eq!(d.byte_identical, "5/6");
    assert_eq!(d.first_changed.as_deref(), Some("prefill.layers.10.out"));
    assert_eq!(d.first_beyond_rounding, None);
    // One unit in the last place of 4.
    assert_eq!(d.sites[3].change.as_ref().unwrap().ulp_histogram, [3, 1]);
}

#[test]
fn a_nan_is_never_rounding() {
    let d = diff_of(&run(), &run().set("prefill.embed", 0, f32::NAN));
    assert_eq!(d.verdict, DiffVerdict::Changed);
    assert_eq!(d.sites[0].change.as_ref().unwrap().non_finite, [0, 1]);
}

#[test]
fn flips_carry_position_and_margins() {
    // Prefill row 1, position 1: token 0 led by 1, now token 2 leads it by 0.5. The step feeds position 2.
    let new = run().set("prefill.logits", 5, 3.5).set("step1.logits", 1, 4.0);
    let d = diff_of(&run(), &new);
    let flips: Vec<_> = d
        .flips
        .iter()
        .map(|f| (f.position, f.old_token, f.new_token, f.margin, f.new_margin, f.near_tie))
        .collect();
    assert_eq!(flips, [(Some(1), 0, 2, 2.0, 0.5, false), (Some(2), 0, 1, 1.0, 2.0, false)]);
    let logits = d.logits.unwrap();
    assert_eq!(logits.argmax_equal, [1, 3]);
    assert_eq!(logits.kl_max_at, Some(("step1.logits".to_owned(), 0)));
    // p = softmax(2, 1, 0), q = softmax(2, 4, 0):
    // KL = p₁ (1 - 4) + ln(e² + e⁴ + 1) - ln(e² + e + 1), p₁ = e / (1 + e + e²) = 0.24472847.
    let kl = -3.0 * 0.244_728_47 + 4.142_931_63 - 2.407_605_96;
    assert!((logits.kl_max - kl).abs() < 1e-6, "{} against {kl}", logits.kl_max);
    assert_eq!(logits.top_k_agreement, 1.0, "five of three are all of them");
}

#[test]
fn a_flip_within_rounding_is_a_near_tie() {
    let close = |lead: f32| run().set("prefill.logits", 3, 2.0 + lead);
    let d = diff_of(&close(2e-5), &close(-2e-5));
    assert_eq!(d.verdict, DiffVerdict::Equivalent);
    assert_eq!((d.flips.len(), d.flips[0].near_tie), (1, true));
    assert_eq!(d.logits.unwrap().near_ties, 1);
}

/// An element is off by 0.05. Rounding with a deviation of 0.01 may do that between two runs (5 of at most 6.5 · √2
/// deviations; the rms over four elements is 2.5, of at most 1.1 · (1 + 6/√8) · √2 = 4.9), with one of 0.002 not.
#[test]
fn a_change_is_told_in_the_deviations_of_the_contract() {
    let off = |sigma: f64| {
        let new = run().set("prefill.layers.10.out", 2, 3.05);
        diff_of(&run().sigma(sigma), &new.sigma(sigma))
    };
    let within = off(0.01);
    assert_eq!(within.verdict, DiffVerdict::Equivalent);
    let change = within.sites.iter().find_map(|site| site.change.as_ref()).unwrap();
    assert!((change.sigmas.unwrap() - 5.0).abs() < 1e-4 && (change.sigmas_rms.unwrap() - 2.5).abs() < 1e-4);
    assert!(change.ratio > 1.0, "beyond the limit of f32 sums");
    assert_eq!(off(0.002).verdict, DiffVerdict::Changed);
    // Under another contract the old one's rounding says nothing.
    let mut other = run().set("prefill.layers.10.out", 2, 3.05);
    other.manifest.contract = Some("int8".to_owned());
    assert_eq!(diff_of(&run().sigma(0.01), &other).verdict, DiffVerdict::Changed);
}

#[test]
fn choices_of_experts_are_sets() {
    let with = |choices: [f32; 4]| {
        let mut run = run();
        run.taps.insert(0, ("prefill.layers.9.router_index", vec![2, 2], choices.to_vec()));
        run
    };
    let old = with([3.0, 1.0, 0.0, 2.0]);
    let turned = diff_of(&old, &with([1.0, 3.0, 0.0, 2.0]));
    assert_eq!((turned.verdict, &*turned.byte_identical), (DiffVerdict::Equivalent, "6/7"));
    // Row 1 and row 0 have each other's experts: a change, though the same numbers are there.
    assert_eq!(diff_of(&old, &with([0.0, 2.0, 3.0, 1.0])).verdict, DiffVerdict::Changed);
}

#[test]
fn sites_in_only_one() {
    let d = diff_of(&run(), &run().without("prefill.embed"));
    assert_eq!((d.only_old, d.verdict), (vec!["prefill.embed".to_owned()], DiffVerdict::Changed));
    // A new site changes nothing that was there.
    let d = diff_of(&run().without("prefill.embed"), &run());
    assert_eq!((d.only_new, d.verdict), (vec!["prefill.embed".to_owned()], DiffVerdict::Identical));
}

#[test]
fn another_shape() {
    let mut new = run();
    new.taps[5].1 = vec![4, 1];
    let d = diff_of(&run(), &new);
    assert_eq!(d.sites[0].verdict, DiffVerdict::Changed);
    assert_eq!(d.sites[0].note.as_deref(), Some("shape [2, 2] became [4, 1]"));
}

#[test]
fn other_models_and_prompts_are_refused() {
    let mut new = run();
    new.manifest.model_hash = Some("bb".to_owned());
    new.manifest.prompt = vec![7, 2];
    let error = diff(&run().open(), &new.open(), &DiffOptions::default()).unwrap_err();
    let DiffError::Incomparable { reasons, .. } = &error else { panic!("{error}") };
    assert_eq!(reasons, &["model hash aa against bb", "prompt [7, 1] against [7, 2]"]);
    assert!(error.to_string().contains("--force"));
    let forced =
        diff(&run().open(), &new.open(), &DiffOptions { force: true, ..DiffOptions::default() }).unwrap();
    assert_eq!(forced.verdict, DiffVerdict::Identical);
    let fields: Vec<&str> = forced.metadata.iter().map(|f| f.field).collect();
    assert_eq!(fields, ["model_hash", "prompt"]);
}

#[test]
fn other_producers_are_listed() {
    let mut new = run();
    new.manifest.contract = Some("int8".to_owned());
    let d = diff_of(&run(), &new);
    assert_eq!(d.metadata, [FieldDiff { field: "contract", old: None, new: Some("int8".to_owned()) }]);
}

#[test]
fn different_oracles_have_different_weights() {
    let open = |name: &str| {
        Dump::open(Path::new(env!("CARGO_MANIFEST_DIR")).join("../fixtures/data").join(name)).unwrap()
    };
    let error = diff(&open("llama"), &open("qwen3"), &DiffOptions::default()).unwrap_err().to_string();
    assert!(error.contains("model.safetensors with sha256 66211d39"), "{error}");
    let same = diff(&open("llama"), &open("llama"), &DiffOptions::default()).unwrap();
    assert_eq!((same.verdict, same.byte_identical.as_str()), (DiffVerdict::Identical, "121/121"));
}

#[test]
fn lines_without_values_are_judged_by_hash() {
    let lines = |value: f32| {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("dump");
        let mut writer =
            DumpWriter::create(&path, Manifest::new("tests", Origin::RegressionLock, vec![7])).unwrap();
        writer.tap_line("prefill.embed", &[], &[1], &[value]).unwrap();
        writer.finish().unwrap();
        (Dump::open(&path).unwrap(), dir)
    };
    let options = DiffOptions::default();
    let same = diff(&lines(1.0).0, &lines(1.0).0, &options).unwrap();
    assert_eq!(same.verdict, DiffVerdict::Identical);
    let other = diff(&lines(1.0).0, &lines(2.0).0, &options).unwrap();
    assert_eq!(other.verdict, DiffVerdict::Changed);
    assert!(other.sites[0].note.as_deref().unwrap().contains("only their hash"));
}

// The field names that scripts rely on.
#[test]
fn json() {
    let new = run().set("prefill.logits", 5, 3.5);
    let json = serde_json::to_value(diff_of(&run(), &new)).unwrap();
    assert_eq!(json["schema"], "karat/diff/1");
    assert_eq!(json["verdict"], "CHANGED");
    assert_eq!(json["byte_identical"], "5/6");
    assert_eq!(json["flips"][0]["position"], 1);
    assert_eq!(json["flips"][0]["margin"], 2.0);
    assert_eq!(json["flips"][0]["near_tie"], false);
    assert_eq!(json["sites"][4]["site"], "prefill.logits");
    assert_eq!(json["sites"][4]["worst"]["col"], 2);
    assert_eq!(json["sites"][0]["verdict"], "IDENTICAL");
    assert!(json["sites"][0].get("max_abs").is_none());
}
