//! What changed between two dumps, and where it changed first.

mod logits;

use std::collections::BTreeMap;

use serde::Serialize;

use crate::container::PIECE;
use crate::manifest::Sigma;
use crate::stats::{Comparer, Comparison};
use crate::{Dump, DumpError, Manifest, TapInfo, TapKey, split_tap};

pub use logits::{Flip, LogitsDiff};

/// Version of the JSON form of [`Diff`].
pub const SCHEMA: &str = "karat/diff/1";

/// How much may differ, and whether anything may be compared at all.
#[derive(Clone, Copy, Debug)]
pub struct DiffOptions {
    /// Compare dumps of different models or prompts as well.
    pub force: bool,
    /// A site is equivalent up to `relative · max |old| + absolute`, or within what the contract's rounding does to
    /// two honest runs where the old dump says so ([`Sigma`]).
    pub relative: f64,
    /// See `relative`.
    pub absolute: f64,
    /// How many of the best tokens are compared as sets.
    pub top_k: usize,
}

impl Default for DiffOptions {
    /// The limits leave room for any order of summation in f32.
    fn default() -> DiffOptions {
        DiffOptions { force: false, relative: 2e-5, absolute: 1e-6, top_k: 5 }
    }
}

/// Why there is no diff.
#[derive(Debug, thiserror::Error)]
pub enum DiffError {
    /// A value could not be read.
    #[error(transparent)]
    Dump(#[from] DumpError),
    /// The dumps are not of the same run.
    #[error("{old} and {new} cannot be compared: {}; --force compares them all the same", reasons.join("; "))]
    Incomparable {
        /// The older dump.
        old: String,
        /// The newer dump.
        new: String,
        /// What differs.
        reasons: Vec<String>,
    },
}

/// From best to worst.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "UPPERCASE")]
pub enum DiffVerdict {
    /// The same bytes.
    Identical,
    /// Within the limits of [`DiffOptions`].
    Equivalent,
    /// Beyond them, or gone.
    Changed,
}

/// What changed between two dumps.
#[derive(Clone, Debug, Serialize)]
pub struct Diff {
    /// [`SCHEMA`]
    pub schema: &'static str,
    /// The worst verdict of all sites; CHANGED as well if a site of the old dump is gone.
    pub verdict: DiffVerdict,
    /// `"47/48"`: sites with the same bytes, of those in both dumps.
    pub byte_identical: String,
    /// First site in the data flow whose bytes differ.
    pub first_changed: Option<String>,
    /// First site in the data flow that is CHANGED.
    pub first_beyond_rounding: Option<String>,
    /// Every site in both dumps, in the order of the data flow.
    pub sites: Vec<SiteDiff>,
    /// Positions where the largest logit moved to another token.
    pub flips: Vec<Flip>,
    /// Figures over all rows of logits; absent where neither dump stores any.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub logits: Option<LogitsDiff>,
    /// Sites of the old dump that the new one lacks.
    pub only_old: Vec<String>,
    /// Sites that are new.
    pub only_new: Vec<String>,
    /// What else differs between the manifests.
    pub metadata: Vec<FieldDiff>,
}

/// One field of the manifests that differs.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct FieldDiff {
    /// Name of the field.
    pub field: &'static str,
    /// In the old manifest; null if absent.
    pub old: Option<String>,
    /// In the new manifest.
    pub new: Option<String>,
}

/// One site in both dumps.
#[derive(Clone, Debug, Serialize)]
pub struct SiteDiff {
    /// The tap's name.
    pub site: String,
    /// Its own verdict.
    pub verdict: DiffVerdict,
    /// Number of values in the new dump.
    pub elements: usize,
    /// Why there are no figures although the site changed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub note: Option<String>,
    /// By how much it differs; absent where the bytes are equal.
    #[serde(flatten, skip_serializing_if = "Option::is_none")]
    pub change: Option<Change>,
}

/// By how much a site differs.
#[derive(Clone, Debug, Serialize)]
pub struct Change {
    /// `max |old - new|`
    pub max_abs: f64,
    /// `max |old - new| / max(|old|, |new|)`
    pub max_rel: f64,
    /// `sqrt(mean((old - new)²))`
    pub rms_diff: f64,
    /// Cosine of the angle between the two.
    pub cosine: f64,
    /// `max_abs` up to which the site is equivalent.
    pub limit: f64,
    /// `max_abs / limit`
    pub ratio: f64,
    /// `max_abs` over the largest standard deviation that rounding has at the site, where the old dump knows it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sigmas: Option<f64>,
    /// `rms_diff` over the root mean square of those standard deviations: √2 for two honest runs that round
    /// independently.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sigmas_rms: Option<f64>,
    /// First value that differs.
    pub first: Option<Place>,
    /// The value with the largest difference.
    pub worst: Option<Place>,
    /// See [`Comparison::ulp_histogram`]; zeros at the end are left out.
    pub ulp_histogram: Vec<u64>,
    /// How many values of the old and of the new tensor are NaN or infinite.
    pub non_finite: [u64; 2],
    /// They are so at the same places and in the same way.
    pub non_finite_equal: bool,
}

/// A value of a site, its axes flattened to [tokens, rest]; attention probabilities to [heads x tokens, keys].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Place {
    /// Row.
    pub row: usize,
    /// Column.
    pub col: usize,
}

/// Compares two dumps site by site, in windows, so that they may be larger than memory.
pub fn diff(old: &Dump, new: &Dump, options: &DiffOptions) -> Result<Diff, DiffError> {
    let shared: Vec<&TapInfo> =
        in_flow_order(new).into_iter().filter(|tap| old.tap(&tap.name).is_some()).collect();
    let mut reasons = differing_runs(old, new);
    if options.force {
        reasons.clear();
    }
    if shared.is_empty() {
        reasons.push("they have no site in common".to_owned());
    }
    if !reasons.is_empty() {
        let (old, new) = (old.path().display().to_string(), new.path().display().to_string());
        return Err(DiffError::Incomparable { old, new, reasons });
    }

    let mut sites = Vec::new();
    let mut logits = logits::Collector::new(options.top_k);
    for tap in shared {
        sites.push(site(old, new, tap, options, &mut logits)?);
    }
    let only = |a: &Dump, b: &Dump| -> Vec<String> {
        in_flow_order(a).into_iter().filter(|t| b.tap(&t.name).is_none()).map(|t| t.name.clone()).collect()
    };
    let (only_old, only_new) = (only(old, new), only(new, old));
    let first = |least| sites.iter().find(|s| s.verdict >= least).map(|s| s.site.clone());
    let gone = if only_old.is_empty() { DiffVerdict::Identical } else { DiffVerdict::Changed };
    let worst = sites.iter().map(|s| s.verdict).max().unwrap_or(gone);
    let identical = sites.iter().filter(|s| s.verdict == DiffVerdict::Identical).count();
    let (flips, logits) = logits.finish();
    Ok(Diff {
        schema: SCHEMA,
        verdict: worst.max(gone),
        byte_identical: format!("{identical}/{}", sites.len()),
        first_changed: first(DiffVerdict::Equivalent),
        first_beyond_rounding: first(DiffVerdict::Changed),
        sites,
        flips,
        logits,
        only_old,
        only_new,
        metadata: differing_fields(old.manifest(), new.manifest()),
    })
}

/// The taps by pass, stage and layer; inside a layer as the manifest has them.
fn in_flow_order(dump: &Dump) -> Vec<&TapInfo> {
    let mut taps: Vec<&TapInfo> = dump.taps().collect();
    taps.sort_by_key(|tap| TapKey::of(&tap.name));
    taps
}

fn site(
    old: &Dump,
    new: &Dump,
    tap: &TapInfo,
    options: &DiffOptions,
    logits: &mut logits::Collector,
) -> Result<SiteDiff, DumpError> {
    let name = &tap.name;
    let report = |verdict, note, change| SiteDiff {
        site: name.clone(),
        verdict,
        elements: tap.elements(),
        note,
        change,
    };
    let changed = |note: String| Ok(report(DiffVerdict::Changed, Some(note), None));
    let Some(before) = old.tap(name) else { return changed("not in the old dump".to_owned()) };
    if before.shape != tap.shape {
        return changed(format!("shape {:?} became {:?}", before.shape, tap.shape));
    }
    let (Some(a), Some(b)) = (old.f32(name)?, new.f32(name)?) else {
        return match before.sha256 == tap.sha256 {
            true => Ok(report(DiffVerdict::Identical, None, None)),
            false => changed("one of the dumps holds no values, only their hash, which changed".to_owned()),
        };
    };

    let mut comparer = Comparer::new();
    let width = tap.shape.last().copied().unwrap_or(1).max(1);
    let window = (PIECE / 4 / width).max(1) * width;
    let has_logits = split_tap(name).1 == "logits";
    let mut rows = Vec::new();
    for from in (0..a.len()).step_by(window) {
        let to = a.len().min(from + window);
        match (sets(name, width, &a[from..to]), sets(name, width, &b[from..to])) {
            (Some(a), Some(b)) => comparer.push(&a, &b),
            _ => comparer.push(&a[from..to], &b[from..to]),
        }
        if has_logits {
            rows.extend(logits.rows(&a[from..to], &b[from..to], width));
        }
        old.release(name, from, to);
        new.release(name, from, to);
    }
    let comparison = comparer.finish();
    let limit = limit(old, name, comparison.largest, options);
    let sigma = before.sigma.filter(|_| old.manifest().contract == new.manifest().contract);
    if has_logits {
        // The difference of two logits between two honest runs spreads by 2σ; four times that is a near tie.
        let four_sigmas = sigma.map_or(0.0, |sigma| 4.0 * sigma.max);
        logits.add(name, new.manifest(), rows, limit.max(four_sigmas));
    }
    if comparison.bytes_equal {
        return Ok(match before.sha256 == tap.sha256 {
            true => report(DiffVerdict::Identical, None, None),
            false => {
                report(DiffVerdict::Equivalent, Some("the same choices in another order".to_owned()), None)
            }
        });
    }
    let non_finite_equal = comparison.non_finite_equal;
    let change = change(tap, comparison, limit, sigma);
    let within = non_finite_equal && (change.ratio <= 1.0 || rounds_alike(&change, tap.elements()));
    let verdict = if within { DiffVerdict::Equivalent } else { DiffVerdict::Changed };
    Ok(report(verdict, None, Some(change)))
}

/// Whether two honest runs may differ so much: the difference of two has √2 times the deviation of one, its rms a tenth
/// more for the model and six of its own standard errors, its largest element 6.5 deviations (a chance of 10⁻¹⁰).
fn rounds_alike(change: &Change, elements: usize) -> bool {
    let (Some(largest), Some(rms)) = (change.sigmas, change.sigmas_rms) else { return false };
    let rms_limit = 1.1 * (1.0 + 6.0 / (2.0 * elements.max(1) as f64).sqrt());
    largest <= 6.5 * std::f64::consts::SQRT_2 && rms <= rms_limit * std::f64::consts::SQRT_2
}

/// The rows of whole numbers of a router's choices, each sorted: their order has no meaning.
fn sets(name: &str, width: usize, values: &[f32]) -> Option<Vec<f32>> {
    let is_index = split_tap(name).1.rsplit('.').next() == Some("router_index");
    is_index.then(|| {
        let mut sorted = values.to_vec();
        sorted.chunks_mut(width).for_each(|row| row.sort_by(f32::total_cmp));
        sorted
    })
}

/// `relative · max |old| + absolute`, or four times the noise that the old dump knows at this site.
fn limit(old: &Dump, name: &str, largest: f64, options: &DiffOptions) -> f64 {
    let noise = old.noise(name).map_or(0.0, |noise| noise.f64_diff.max(noise.f32_diff));
    (options.relative * largest + options.absolute).max(4.0 * noise)
}

fn change(tap: &TapInfo, c: Comparison, limit: f64, sigma: Option<Sigma>) -> Change {
    let per_row = match split_tap(&tap.name).1.ends_with("attn_probs") {
        true => tap.shape.last().copied().unwrap_or(1),
        false => tap.shape.iter().skip(1).product(),
    };
    let place = |at: usize| Place { row: at / per_row.max(1), col: at % per_row.max(1) };
    let used = c.ulp_histogram.iter().rposition(|&n| n > 0).map_or(0, |last| last + 1);
    Change {
        max_abs: c.max_abs,
        max_rel: c.max_rel,
        rms_diff: c.rms_diff,
        cosine: c.cosine,
        limit,
        ratio: c.max_abs / limit,
        sigmas: sigma.filter(|sigma| sigma.max > 0.0).map(|sigma| c.max_abs / sigma.max),
        sigmas_rms: sigma.filter(|sigma| sigma.rms > 0.0).map(|sigma| c.rms_diff / sigma.rms),
        first: c.first.map(place),
        worst: c.worst.map(place),
        ulp_histogram: c.ulp_histogram[..used].to_vec(),
        non_finite: c.non_finite,
        non_finite_equal: c.non_finite_equal,
    }
}

/// What makes two dumps runs of different things. What one of them does not record is not held against it.
fn differing_runs(old: &Dump, new: &Dump) -> Vec<String> {
    let mut reasons = Vec::new();
    if let (Some(a), Some(b)) = (&old.manifest().model_hash, &new.manifest().model_hash)
        && a != b
    {
        reasons.push(format!("model hash {a} against {b}"));
    }
    let files: BTreeMap<String, String> = new.expected_files();
    for (name, a) in old.expected_files() {
        if let Some(b) = files.get(&name).filter(|b| **b != a) {
            reasons.push(format!("{name} with sha256 {a} against {b}"));
        }
    }
    let (a, b) = (&old.manifest().prompt, &new.manifest().prompt);
    if a != b {
        reasons.push(format!("prompt {a:?} against {b:?}"));
    }
    reasons
}

fn differing_fields(old: &Manifest, new: &Manifest) -> Vec<FieldDiff> {
    let fields = |m: &Manifest| {
        [
            ("producer", Some(m.producer.clone())),
            ("origin", Some(format!("{:?}", m.origin))),
            ("model_hash", m.model_hash.clone()),
            ("contract", m.contract.clone()),
            ("rounding", m.rounding.clone()),
            ("notes", m.notes.clone()),
            ("reason", m.reason.clone()),
            ("prompt", Some(format!("{:?}", m.prompt))),
            ("greedy", Some(format!("{:?}", m.greedy))),
        ]
    };
    let pairs = fields(old).into_iter().zip(fields(new));
    let differing = pairs.filter(|((_, old), (_, new))| old != new);
    differing.map(|((field, old), (_, new))| FieldDiff { field, old, new }).collect()
}
