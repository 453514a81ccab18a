//! Faults of the harness itself: each test breaks what is compared in a way that a careless comparison would
//! not notice. The rows `har-*` of the catalogue name these tests.

use assert_cmd::Command;
use conformance::audit::{audit, catalogue};
use conformance::contract::Contract;
use conformance::follow::{Follow, PassTaps, View, budget};
use conformance::judge::{Budget, SiteResult, Verdict, judge};
use conformance::record::Record;
use conformance::subject::SubjectSpec;
use conformance::variance::Expected;
use conformance::verify::{Loaded, Options, verify};
use fixtures::seeded::{self, Seeded};
use fixtures::{Package, bundled};
use golden::{Dump, Origin};
use ndarray::{ArrayD, IxDyn};
use reference::{Model, Tensor};
use spec::{Config, LoadError, Rows, Site, Tensors, Weights};
use std::path::PathBuf;
use std::sync::Arc;

const BUDGET: Budget = Budget { elements: 10_000, groups: 1_000 };

/// Values with a spread of `sigma` around them.
fn expected(shape: &[usize], r: &[f64], sigma: f64) -> Expected {
    let filled = |v: f64| ArrayD::from_elem(IxDyn(shape), v);
    let r = ArrayD::from_shape_vec(IxDyn(shape), r.to_vec()).unwrap();
    Expected { r, variance: filled(sigma * sigma), bound: filled(8.0 * sigma), calibrated: false }
}

/// har-shared-oracle: what the reference is held to was computed by somebody else, and says by whom.
#[test]
fn a_golden_names_its_producer() {
    let mut seen = 0;
    for name in bundled() {
        let Some(package) = Package::open(&name).ok().filter(|p| p.golden_json().is_some()) else { continue };
        let dump = Dump::open(package.dir()).unwrap();
        let manifest = dump.manifest();
        assert_eq!(manifest.origin, Origin::IndependentOracle, "{name}");
        assert!(!manifest.producer.is_empty() && !manifest.producer.contains("karat"), "{name}");
        seen += 1;
    }
    assert!(seen >= 20, "{seen} goldens");
}

/// har-loose-metric: values that are all 5 % too large correlate perfectly.
#[test]
fn a_correlation_would_pass_what_the_judge_fails() {
    let r: Vec<f64> = (0..64).map(|n| f64::from(n * 37 % 64) - 31.0).collect();
    let subject: Vec<f32> = r.iter().map(|v| (1.05 * v) as f32).collect();
    let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
    let wide: Vec<f64> = subject.iter().map(|&v| f64::from(v)).collect();
    let cosine = dot(&r, &wide) / (dot(&r, &r) * dot(&wide, &wide)).sqrt();
    assert!(cosine > 0.999_999);
    let result = judge("out", &[4, 16], &subject, &expected(&[4, 16], &r, 0.01), &BUDGET);
    assert_eq!(result.verdict, Verdict::Failed);
}

/// har-position-zero: everything is right but the last element of the last row.
#[test]
fn the_last_element_is_compared() {
    let mut subject = vec![1.0f32; 33 * 40];
    subject[33 * 40 - 1] = 1.5;
    let result = judge("out", &[33, 40], &subject, &expected(&[33, 40], &[1.0; 33 * 40], 0.01), &BUDGET);
    let first = result.first_wrong.unwrap();
    assert_eq!((result.verdict, result.wrong, first.row, first.col), (Verdict::Failed, 1, 32, 39));
}

/// har-nan-equal: NaN for a number, a number for NaN, the other infinity, and no values at all.
#[test]
fn not_a_number_is_never_equal() {
    let (nan, inf) = (f32::NAN, f32::INFINITY);
    for (r, subject) in [(1.0, nan), (f64::NAN, 1.0), (f64::INFINITY, -inf), (1.0, inf), (f64::INFINITY, 1.0)]
    {
        let result = judge("out", &[1, 1], &[subject], &expected(&[1, 1], &[r], 1.0), &BUDGET);
        assert_eq!(result.verdict, Verdict::Failed, "{subject} for {r}");
    }
    let results = followed(|taps| {
        let empty = Tensor::from_shape_vec(IxDyn(&[0, 96]), vec![]).unwrap();
        taps.insert(Site::layer(1, "attn_out"), empty);
    });
    assert_eq!(failed(&results), ["prefill.layers.1.attn_out"]);
}

/// har-prefix-compare: one row or one column too many or too few.
#[test]
fn short_and_long_tensors_fail() {
    let reshaped = |rows: usize, columns: usize| {
        let results = followed(|taps| {
            let values = vec![0.0; rows * columns];
            let value = Tensor::from_shape_vec(IxDyn(&[rows, columns]), values).unwrap();
            taps.insert(Site::layer(1, "attn_out"), value);
        });
        results.into_iter().find(|site| site.site == "prefill.layers.1.attn_out").unwrap()
    };
    for (rows, columns) in [(9, 96), (8, 95), (8, 97), (1, 96 * 8)] {
        let result = reshaped(rows, columns);
        assert_eq!(result.verdict, Verdict::Failed, "{rows}x{columns}");
        assert_eq!(result.pattern.unwrap(), format!("shape [{rows}, {columns}], expected [8, 96]"));
    }
}

/// har-bound-scaled: a channel a thousand times smaller than the others is wrong by half of itself.
#[test]
fn a_quiet_channel_has_a_limit_of_its_own() {
    let contract = Contract::named("f32").unwrap();
    let size = |column: usize| if column == 5 { 1e-3 } else { 1.0 };
    let x = Tensor::from_shape_fn(IxDyn(&[3, 16]), |at| (size(at[1]) * (1.0 + at[0] as f64)) as f32);
    let half = x.mapv(|v| v / 2.0).into_shared();
    let operands = [x, half].map(conformance::variance::Bounded::exact);
    let call = reference::Call::Residual { x: &operands[0], branch: &operands[1], multiplier: 1.0 };
    let truth = conformance::variance::Truth::Image;
    let at = Site::layer(0, "resid_mid");
    let expected = conformance::variance::expect(at, &call, &contract, truth).unwrap();
    let mut subject: Vec<f32> = expected.r.iter().map(|&v| v as f32).collect();
    assert_eq!(judge("out", &[3, 16], &subject, &expected, &BUDGET).verdict, Verdict::Passed);
    subject[16 + 5] *= 0.999;
    let result = judge("out", &[3, 16], &subject, &expected, &BUDGET);
    assert_eq!((result.verdict, result.worst.row, result.worst.col), (Verdict::Failed, 1, 5));
}

/// The judged sites of a pass of eight tokens, where `change` has spoilt what an honest subject exposes.
fn followed(change: impl Fn(&mut PassTaps)) -> Vec<SiteResult> {
    let seeded = seeded::heads_6_2(1);
    let config = Config::parse(&seeded.config, &[]).unwrap().config;
    let model = Model::new(config.clone(), Weights::load(&config, &seeded).unwrap());
    let contract = Contract::named("f32").unwrap();
    let (mut record, mut state) = (Record::default(), model.fresh());
    model.pass(&mut record, &mut state, &seeded.prompt[..8]);
    let mut taps: PassTaps = record.take().unwrap().into_iter().collect();
    change(&mut taps);
    let budget = budget(taps.shapes());
    let mut follow = Follow::new(&contract, budget, View::Own, "prefill", &taps, &|_| true, false);
    model.pass(&mut follow, &mut model.fresh(), &seeded.prompt[..8]);
    follow.check().unwrap();
    follow.results
}

fn failed(results: &[SiteResult]) -> Vec<&str> {
    results.iter().filter(|site| site.verdict == Verdict::Failed).map(|site| &*site.site).collect()
}

/// har-state-not-compared: the cache that is left behind is wrong; the logits of this pass are not.
#[test]
fn a_wrong_cache_fails_although_logits_agree() {
    let results = followed(|taps| {
        let mut cache = taps.get(&Site::layer(2, "v_cache")).unwrap();
        cache[[7, 1, 3]] += 0.25;
        taps.insert(Site::layer(2, "v_cache"), cache);
    });
    let failed = failed(&results);
    assert_eq!(failed[0], "prefill.layers.2.v_cache");
    assert!(!failed.contains(&"prefill.logits"));
    assert_eq!(followed(|_| {}).iter().filter(|site| site.verdict == Verdict::Failed).count(), 0);
}

/// A model whose square weights equal their mirror.
struct Mirrored(Seeded);

struct MirroredRows(Arc<dyn Rows>);

impl Rows for MirroredRows {
    fn rows(&self) -> usize {
        self.0.rows()
    }

    fn inner(&self) -> usize {
        self.0.inner()
    }

    fn decode(&self, row: usize, into: &mut [f32]) {
        self.0.decode(row, into);
        let mut other = vec![0.0; into.len()];
        for (column, value) in into.iter_mut().enumerate().take(row) {
            self.0.decode(column, &mut other);
            *value = other[row];
        }
    }

    fn format(&self) -> &str {
        "F32"
    }

    fn row_bytes(&self) -> usize {
        self.0.row_bytes()
    }
}

impl Tensors for Mirrored {
    fn names(&self) -> Vec<String> {
        self.0.names()
    }

    fn shape(&self, name: &str) -> Option<Vec<usize>> {
        self.0.shape(name)
    }

    fn rows(&self, name: &str) -> Option<Result<Arc<dyn Rows>, LoadError>> {
        let square = self.shape(name)?.windows(2).any(|shape| shape[0] == shape[1]);
        self.0.rows(name).map(|rows| {
            rows.map(|rows| if square { Arc::new(MirroredRows(rows)) as Arc<dyn Rows> } else { rows })
        })
    }

    fn file(&self, name: &str) -> PathBuf {
        self.0.file(name)
    }
}

/// har-flat-fixture: symmetric weights, on which a transposed projection is the right one.
#[test]
fn flat_fixtures_are_mistrusted() {
    let mirrored = Mirrored(seeded::square(3));
    let config = Config::parse(&mirrored.0.config, &[]).unwrap().config;
    let weights = Weights::load(&config, &mirrored).unwrap();
    let model = Model::new(config.clone(), weights.clone());
    let contract = Contract::named("int8").unwrap();
    let prompt = mirrored.0.prompt.clone();

    let found = audit("mirrored", &model, &prompt, 1, &contract).unwrap();
    assert!(found.unseen().contains(&"lin-transpose-square"));
    let survivor = found.survivors.iter().find(|s| s.mutant == "lin-transpose-square").unwrap();
    assert_eq!(survivor.why, "square and symmetric");
    assert!(survivor.sites.contains(&"layers.1.q_proj".to_string()));

    let loaded = Loaded::new("mirrored", config, weights);
    let subject = SubjectSpec::Npu(device::Engine::Int8, Default::default());
    let options = Options { steps: 1, ..Options::new(&subject, &contract) };
    let result = verify(&loaded, &prompt, &options, "karat verify".into()).unwrap();
    assert_eq!(result.verdict, Verdict::Mistrusted);
    assert!(result.reason.unwrap().contains("symmetric"));
}

/// har-golden-overwritten: without its golden a package is judged without one, and nothing is written.
#[test]
fn a_missing_golden_is_not_made() {
    let dir = tempfile::tempdir().unwrap();
    let llama = Package::open("llama").unwrap();
    for file in ["config.json", "model.safetensors"] {
        std::fs::copy(llama.dir().join(file), dir.path().join(file)).unwrap();
    }
    let args = ["verify", dir.path().to_str().unwrap(), "--format", "json"];
    let output = Command::new(env!("CARGO_BIN_EXE_karat")).args(args).output().unwrap();
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(report["results"][0]["reference"]["verdict"], "SKIPPED");
    let mut left: Vec<_> = std::fs::read_dir(dir.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
    left.sort();
    assert_eq!(left, ["config.json", "model.safetensors"]);
}

/// The page names tests that exist.
#[test]
fn every_row_of_the_page_has_its_test() {
    let here = include_str!("harness_meta.rs");
    for (id, _, test) in catalogue::META {
        assert!(here.contains(&format!("fn {test}()")), "{test}");
        assert!(here.contains(&format!("/// {id}:")), "{id}");
    }
}
