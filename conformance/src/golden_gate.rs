//! The reference against a golden: it is itself judged before it may judge.

use crate::passes::{Pass, teacher_forced};
use crate::record::Record;
use golden::{Dump, DumpError};
use reference::{Model, Tensor};
use spec::{NonFinite, Site};
use std::collections::BTreeMap;

/// How far the reference may be from an independent implementation at a site, free-running.
///
/// `2e-5 · largest + 1e-6`, or four times the larger noise that two independent implementations
/// showed there. Two float32 codes that add in different orders stay within 5e-6 of a site's largest
/// value on every bundled golden; a mistake moves logits by more than 1e-2.
pub fn limit(largest: f64, noise: f64) -> f64 {
    (2e-5 * largest + 1e-6).max(4.0 * noise)
}

/// One site of a golden against the reference.
#[derive(Clone, Debug, PartialEq)]
pub struct SiteRatio {
    /// The tap's name: `prefill.layers.0.q_proj`.
    pub tap: String,
    /// Largest |reference - golden| over its limit; at most 1 is within.
    pub ratio: f64,
    /// Largest |reference - golden|.
    pub max_abs: f64,
    /// Where it is: row and column of the site's flattened axes.
    pub at: (usize, usize),
    /// The golden's value there.
    pub golden: f64,
    /// The reference's value there.
    pub reference: f64,
}

/// The reference against one golden.
#[derive(Clone, Debug, Default)]
pub struct GoldenGate {
    /// Every tap of the golden that the reference has, in the order of the golden.
    pub sites: Vec<SiteRatio>,
    /// Taps of the golden without a site in the reference.
    pub unmatched: Vec<String>,
    /// Positions whose largest logit is at the golden's token, and positions in all.
    pub argmax_equal: (usize, usize),
    /// Largest KL(golden || reference) over positions, in nats.
    pub kl_max: f64,
}

impl GoldenGate {
    /// The site with the largest ratio.
    pub fn worst(&self) -> Option<&SiteRatio> {
        self.sites.iter().max_by(|a, b| a.ratio.total_cmp(&b.ratio))
    }

    /// Whether the reference reproduces the golden: every tap has a site and is within its limit, and
    /// every position has the golden's token.
    pub fn passes(&self) -> bool {
        self.unmatched.is_empty()
            && self.argmax_equal.0 == self.argmax_equal.1
            && self.argmax_equal.1 > 0
            && self.worst().is_some_and(|worst| worst.ratio <= 1.0)
    }
}

/// Why the comparison could not be made.
#[derive(Debug, thiserror::Error)]
pub enum GateError {
    /// The golden is not readable, or not what its hashes say.
    #[error(transparent)]
    Golden(#[from] DumpError),
    /// A weight is not finite.
    #[error(transparent)]
    Weights(#[from] NonFinite),
    /// The golden of a pair does not tell its draft passes, or counts others.
    #[error("the golden's draft passes: {reason}")]
    Passes {
        /// What is wrong.
        reason: String,
    },
    /// A tap has another shape than the reference's site.
    #[error("golden {tap} has shape {golden:?}, but the reference computes {reference:?} there")]
    Shape {
        /// The tap.
        tap: String,
        /// The golden's shape.
        golden: Vec<usize>,
        /// The reference's shape.
        reference: Vec<usize>,
    },
}

/// Runs the reference over the golden's prompt and ids, free-running, and compares every tap.
pub fn compare(model: &Model, dump: &Dump) -> Result<GoldenGate, GateError> {
    let manifest = dump.manifest();
    let passes = passes_of(dump);
    let taps = run(model, &passes)?;
    let mut gate = GoldenGate::default();
    for info in dump.taps() {
        let Some((golden, reference)) = pair(dump, &passes, &taps, &info.name)? else {
            gate.unmatched.push(info.name.clone());
            continue;
        };
        gate.sites.push(ratio(&info.name, &golden, &reference, noise(dump, &info.name)));
        if info.name.ends_with(".logits") {
            let (equal, all, kl) = logits(&golden, &reference);
            gate.argmax_equal.0 += equal;
            gate.argmax_equal.1 += all;
            gate.kl_max = gate.kl_max.max(kl);
        }
    }
    debug_assert!(!manifest.prompt.is_empty());
    Ok(gate)
}

/// How far taps of a run, by pass and site, are from the golden at one of its taps; nothing where the run has no
/// such tap.
pub fn compare_tap(
    dump: &Dump,
    passes: &[Pass],
    taps: &Taps,
    tap: &str,
) -> Result<Option<SiteRatio>, GateError> {
    let pair = pair(dump, passes, taps, tap)?;
    Ok(pair.map(|(golden, run)| ratio(tap, &golden, &run, noise(dump, tap))))
}

/// A tap of the golden and the value of a run there, in the same rows and order.
fn pair(dump: &Dump, passes: &[Pass], taps: &Taps, tap: &str) -> Result<Option<(Tensor, Tensor)>, GateError> {
    let (Some(run), Some(values)) = (site_value(taps, passes, tap), dump.f32(tap)?) else { return Ok(None) };
    let golden = Tensor::from_shape_vec(values.shape, values.to_vec()).expect("a validated shape");
    let (golden, run) = align(tap, golden, run)?;
    Ok(Some(match choices(tap, dump, taps, passes)? {
        Some((theirs, ours)) => (by_expert(&golden, &theirs), by_expert(&run, &ours)),
        None => (golden, run),
    }))
}

/// What two independent implementations differ by at a tap.
fn noise(dump: &Dump, tap: &str) -> f64 {
    dump.noise(tap).map_or(0.0, |n| n.f64_diff.max(n.f32_diff))
}

/// The passes that a golden's taps name.
pub fn passes_of(dump: &Dump) -> Vec<Pass> {
    let steps = dump.pass_names().iter().filter(|pass| pass.starts_with("step")).count();
    teacher_forced(&dump.manifest().prompt, &dump.manifest().greedy, steps)
}

/// Values of a run, by pass and site.
pub type Taps = BTreeMap<(String, Site), Tensor>;

/// Every value of the reference over these passes.
pub(crate) fn run(model: &Model, passes: &[Pass]) -> Result<Taps, NonFinite> {
    let (mut ops, mut state) = (Record::default(), model.fresh());
    let mut taps = Taps::new();
    for pass in passes {
        model.pass(&mut ops, &mut state, &pass.ids);
        taps.extend(ops.take()?.into_iter().map(|(site, value)| ((pass.name.clone(), site), value)));
    }
    Ok(taps)
}

/// The reference's value for a golden's tap. `final.*` is what the last pass left behind; the output of a
/// block of experts without a shared one is their sum, which an oracle may name twice.
fn site_value(taps: &Taps, passes: &[Pass], tap: &str) -> Option<Tensor> {
    let (pass, site) = golden::split_tap(tap);
    let (pass, site) = match (pass, site.rsplit_once('.')) {
        ("final", Some((layer, "recurrent_state"))) => (&*passes.last()?.name, format!("{layer}.gdn_state")),
        ("final", _) => (&*passes.last()?.name, site.to_string()),
        _ => (pass, site.to_string()),
    };
    let value = |site: &str| taps.get(&(pass.to_string(), Site::parse(site)?)).cloned();
    value(&site).or_else(|| value(&format!("{}.experts_out", site.strip_suffix(".moe_out")?)))
}

/// Brings golden and reference to the same rows and order.
///
/// - A sliding layer of the oracle keeps the last window rows of its cache only: its probabilities
///   cover the last keys, and the reference's must be 0 on the keys that it dropped.
/// - A norm over a model's only key head is `[tokens, 1, head_dim]` there, `[tokens, head_dim]` here: axes
///   of length 1 do not count.
/// - The reference's tables hold every rotary frequency twice, as they are applied; an oracle may hold it
///   once.
pub(crate) fn align(tap: &str, golden: Tensor, reference: Tensor) -> Result<(Tensor, Tensor), GateError> {
    use ndarray::{Axis, Slice};
    if golden.shape() == reference.shape() {
        return Ok((golden, reference));
    }
    let longer = |x: &Tensor| x.shape().iter().copied().filter(|&n| n != 1).collect::<Vec<_>>();
    if longer(&golden) == longer(&reference) {
        let shape = golden.raw_dim();
        let reference = reference.to_shape(shape).expect("as many values").into_owned().into_shared();
        return Ok((golden, reference));
    }
    let wrong = || GateError::Shape {
        tap: tap.to_string(),
        golden: golden.shape().to_vec(),
        reference: reference.shape().to_vec(),
    };
    let table = tap.ends_with(".cos") || tap.ends_with(".sin");
    if table && golden.ndim() == 2 && reference.shape() == [golden.shape()[0], 2 * golden.shape()[1]] {
        let reference = reference.slice_axis(Axis(1), Slice::from(..golden.shape()[1]));
        return Ok((golden, reference.as_standard_layout().into_owned().into_shared()));
    }
    if tap.ends_with(".attn_probs") && golden.ndim() == 3 && reference.ndim() == 3 {
        let (kept, all) = (golden.shape()[2], reference.shape()[2]);
        if kept <= all && golden.shape()[..2] == reference.shape()[..2] {
            let dropped = reference.slice_axis(Axis(2), Slice::from(..all - kept));
            if dropped.iter().all(|&p| p == 0.0) {
                let reference = reference.slice_axis(Axis(2), Slice::from(all - kept..));
                return Ok((golden, reference.as_standard_layout().into_owned().into_shared()));
            }
        }
    }
    Err(wrong())
}

/// The experts that golden and reference chose, where `tap` holds ids or weights of chosen experts.
///
/// The choices of a token have no order: ids are compared sorted, weights in the order of the ids.
fn choices(
    tap: &str,
    dump: &Dump,
    taps: &Taps,
    passes: &[Pass],
) -> Result<Option<(Tensor, Tensor)>, GateError> {
    let Some(prefix) = tap.strip_suffix("router_index").or(tap.strip_suffix("router_weights")) else {
        return Ok(None);
    };
    let index = format!("{prefix}router_index");
    let (Some(golden), Some(reference)) = (dump.f32(&index)?, site_value(taps, passes, &index)) else {
        return Ok(None);
    };
    let golden = Tensor::from_shape_vec(golden.shape, golden.to_vec()).expect("a validated shape");
    align(&index, golden, reference).map(Some)
}

/// Every row of `values` in the order of the ids in the same row of `index`.
fn by_expert(values: &Tensor, index: &Tensor) -> Tensor {
    let choices = index.shape().last().copied().unwrap_or(1).max(1);
    let mut sorted = values.clone();
    let rows = sorted.as_slice_mut().expect("row after row").chunks_exact_mut(choices);
    for (row, ids) in rows.zip(index.as_slice().expect("row after row").chunks_exact(choices)) {
        let mut pairs: Vec<(f32, f32)> = ids.iter().copied().zip(row.iter().copied()).collect();
        pairs.sort_by(|a, b| a.0.total_cmp(&b.0));
        row.iter_mut().zip(pairs).for_each(|(slot, (_, value))| *slot = value);
    }
    sorted
}

pub(crate) fn ratio(tap: &str, golden: &Tensor, reference: &Tensor, noise: f64) -> SiteRatio {
    let largest = golden.iter().fold(0f64, |m, &v| m.max(f64::from(v).abs()));
    let limit = limit(largest, noise);
    let columns = golden.len() / golden.shape()[0].max(1);
    let mut worst =
        SiteRatio { tap: tap.to_string(), ratio: 0.0, max_abs: 0.0, at: (0, 0), golden: 0.0, reference: 0.0 };
    for (n, (&g, &r)) in golden.iter().zip(reference.iter()).enumerate() {
        let (g, r) = (f64::from(g), f64::from(r));
        // Not a number on either side is as wrong as it gets; equal infinities are equal.
        let difference = if g == r { 0.0 } else { (g - r).abs() };
        let difference = if difference.is_nan() { f64::INFINITY } else { difference };
        if n == 0 || difference > worst.max_abs {
            worst.max_abs = difference;
            worst.ratio = difference / limit;
            worst.at = (n / columns.max(1), n % columns.max(1));
            (worst.golden, worst.reference) = (g, r);
        }
    }
    worst
}

/// Rows with equal argmax, rows, and the largest KL(golden || other) in nats.
pub fn logits(golden: &Tensor, other: &Tensor) -> (usize, usize, f64) {
    let (mut equal, mut kl_max) = (0, 0f64);
    let vocab = golden.shape()[1];
    let flat = |x: &Tensor| x.iter().copied().collect::<Vec<f32>>();
    let (golden, other) = (flat(golden), flat(other));
    let rows = golden.len() / vocab.max(1);
    for (g, o) in golden.chunks_exact(vocab).zip(other.chunks_exact(vocab)) {
        equal += usize::from(argmax(g) == argmax(o));
        kl_max = kl_max.max(kl(g, o));
    }
    (equal, rows, kl_max)
}

/// Index of the largest value; the lowest of equal ones.
pub fn argmax(row: &[f32]) -> usize {
    let mut best = 0;
    for (i, v) in row.iter().enumerate() {
        if *v > row[best] {
            best = i;
        }
    }
    best
}

/// KL(p || q) in nats of the softmaxes of two rows of logits.
///
/// ```text
/// Σ_i p_i · (ln p_i - ln q_i)
/// ```
pub fn kl(p: &[f32], q: &[f32]) -> f64 {
    let log_sum = |row: &[f32]| {
        let largest = row.iter().fold(f64::NEG_INFINITY, |m, &v| m.max(f64::from(v)));
        largest + row.iter().map(|&v| (f64::from(v) - largest).exp()).sum::<f64>().ln()
    };
    let (p_sum, q_sum) = (log_sum(p), log_sum(q));
    let terms = p.iter().zip(q).map(|(&p, &q)| {
        let (ln_p, ln_q) = (f64::from(p) - p_sum, f64::from(q) - q_sum);
        ln_p.exp() * (ln_p - ln_q)
    });
    terms.sum::<f64>().max(0.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    // p = (1/4, 3/4), q = (1/2, 1/2): 0.25·ln 0.5 + 0.75·ln 1.5 = 0.130812
    #[test]
    fn kl_by_hand() {
        assert!((kl(&[0.0, 3f32.ln()], &[7.0, 7.0]) - 0.130_812).abs() < 1e-6);
    }

    #[test]
    fn the_limit_follows_the_larger_noise() {
        assert_eq!(limit(10.0, 0.0), 2e-4 + 1e-6);
        assert_eq!(limit(10.0, 1e-4), 4e-4);
    }

    // Experts 5, 2 with weights 0.75, 0.25 are experts 2, 5 with weights 0.25, 0.75.
    #[test]
    fn chosen_experts_have_no_order() {
        let row = |v: [f32; 2]| Tensor::from_shape_vec(ndarray::IxDyn(&[1, 2]), v.to_vec()).unwrap();
        let index = row([5.0, 2.0]);
        assert_eq!(by_expert(&row([0.75, 0.25]), &index), row([0.25, 0.75]));
        assert_eq!(by_expert(&index, &index), row([2.0, 5.0]));
    }

    #[test]
    fn nan_is_never_within() {
        let g = Tensor::from_elem(ndarray::IxDyn(&[1, 2]), 1.0);
        let r = Tensor::from_shape_vec(ndarray::IxDyn(&[1, 2]), vec![1.0, f32::NAN]).unwrap();
        let ratio = ratio("prefill.out", &g, &r, 0.0);
        assert_eq!((ratio.ratio, ratio.at), (f64::INFINITY, (0, 1)));
    }
}
