//! What a subject computes instead: every mutant replayed on the inputs of its first wrong site.
//!
//! A kernel that computes attention in one piece shows neither scores nor probabilities. Its context is
//! explained by mutants of all three steps: one of scores or probabilities is carried on to the context by the
//! honest steps behind it.

use super::{History, Mutant, all};
use crate::contract::Contract;
use crate::emulate::Emulate;
use crate::variance::{Bounded, Expected, Truth, expect};
use reference::ops::Mask;
use reference::{Call, Tensor};
use serde::Serialize;
use spec::{Site, Vector};
use std::rc::Rc;

/// A mutant and how well it reproduces the subject.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Candidate {
    /// `id` or `id:variant`.
    pub mutant: String,
    /// Root mean square of (subject - mutant) over the declared spread.
    pub z_rms: f64,
    /// What it computes.
    pub formula: &'static str,
}

/// The best candidates for a wrong site.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Explanation {
    /// The best, where it reproduces the subject within rounding.
    #[serde(flatten)]
    pub named: Option<Candidate>,
    /// Others that give the very same values here: this site cannot tell them apart.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub same_here: Vec<String>,
    /// The runner-up, or the best one where none explains the subject.
    pub next_best: Option<Candidate>,
}

impl Explanation {
    /// Whether the subject is named `mutant`, or named like one that this site cannot tell from it.
    pub fn names(&self, mutant: &str) -> bool {
        self.named.as_ref().is_some_and(|named| named.mutant == mutant)
            || self.same_here.iter().any(|same| same == mutant)
    }
}

/// Root mean square z up to which a mutant reproduces a subject.
pub const EXPLAINS: f64 = 3.0;

/// Replays every mutant that applies to `call` and ranks them by how well they give `subject`.
///
/// `history` holds what the subject computed before, for mutants that read another operand.
pub fn explain(
    at: Site,
    call: &Call<Bounded>,
    subject: &Tensor,
    contract: &Contract,
    history: &History,
) -> Option<Explanation> {
    let values: Vec<Tensor> = call.operands().iter().map(|o| o.value.clone()).collect();
    let bare: Vec<Bounded> = values.iter().cloned().map(Bounded::exact).collect();
    let spread = Rc::new(spread(at, &call.with(&bare), contract)?);
    let candidates = replayed(at, &call.with(&values), contract, history).into_iter();
    rank(candidates.map(|(mutant, value)| (mutant, value, spread.clone())).collect(), subject)
}

/// The two steps before the context of a kernel that computes attention in one piece.
#[derive(Clone)]
pub struct Hidden {
    /// The site of the scores.
    pub scores_at: Site,
    /// Queries.
    pub q: Bounded,
    /// Keys.
    pub k: Bounded,
    /// What scores are multiplied by.
    pub scale: f64,
    /// The cap on scores.
    pub softcap: Option<f64>,
    /// The site of the probabilities, and which keys a query sees with its sinks: nothing before that step.
    pub probs: Option<(Site, Mask, Option<Vector>)>,
}

impl Hidden {
    /// Takes in a step that a subject does not show.
    pub fn note(hidden: &mut Option<Hidden>, at: Site, call: &Call<Bounded>) {
        match call {
            Call::AttnScores { q, k, scale, softcap } => {
                let (q, k) = ((*q).clone(), (*k).clone());
                *hidden = Some(Hidden { scores_at: at, q, k, scale: *scale, softcap: *softcap, probs: None });
            }
            Call::AttnProbs { mask, sinks, .. } => {
                if let Some(hidden) = hidden {
                    hidden.probs = Some((at, *mask, sinks.cloned()));
                }
            }
            _ => {}
        }
    }
}

/// Explains the context of attention whose scores and probabilities a subject does not show.
///
/// A subject that is wrong in a hidden step rounds in the steps behind it, on its own wrong values: so every
/// candidate is measured by the variance that the rules of softmax and weighted sum give at *its* scores or
/// probabilities, and not at the honest ones.
pub fn explain_attention(
    hidden: &Hidden,
    at: Site,
    call: &Call<Bounded>,
    subject: &Tensor,
    contract: &Contract,
    history: &History,
) -> Option<Explanation> {
    let (Call::AttnCtx { probs: honest_probs, v }, Some((probs_at, mask, sinks))) = (call, &hidden.probs)
    else {
        return explain(at, call, subject, contract, history);
    };
    let values: Vec<Tensor> = call.operands().iter().map(|o| o.value.clone()).collect();
    let own = Rc::new(spread(at, call, contract)?);
    let direct = replayed(at, &call.with(&values), contract, history).into_iter();
    let mut candidates: Vec<(&'static Mutant, Tensor, Rc<Vec<f64>>)> =
        direct.map(|(mutant, value)| (mutant, value, own.clone())).collect();
    let mut honest = Emulate::new(contract);
    // What probabilities give, with its variance.
    let mut context = |probs: Bounded| {
        let value = honest.value(at, &Call::AttnCtx { probs: &probs.value, v: &v.value });
        let spread = spread(at, &Call::AttnCtx { probs: &probs, v }, contract)?;
        Some((probs.value, value, Rc::new(spread)))
    };
    let bounded =
        Call::AttnScores { q: &hidden.q, k: &hidden.k, scale: hidden.scale, softcap: hidden.softcap };
    let of_scores = expect(hidden.scores_at, &bounded, contract, Truth::Image).ok()?.variance.into_shared();
    let scores_call = Call::AttnScores {
        q: &hidden.q.value,
        k: &hidden.k.value,
        scale: hidden.scale,
        softcap: hidden.softcap,
    };
    for (mutant, scores) in replayed(hidden.scores_at, &scores_call, contract, history) {
        if scores.shape() != of_scores.shape() {
            continue;
        }
        let scores = Bounded { value: scores, variance: Some(of_scores.clone()) };
        let call = Call::AttnProbs { scores: &scores, mask: *mask, sinks: sinks.as_ref() };
        let Ok(probs) = expect(*probs_at, &call, contract, Truth::Image) else { continue };
        let value = probs.r.mapv(|p| p as f32).into_shared();
        let probs = Bounded { value, variance: Some(probs.variance.into_shared()) };
        let Some((probs, value, spread)) = context(probs) else { continue };
        candidates.push((mutant, value, spread.clone()));
        // A head that reads the wrong keys reads the wrong values too.
        let call = Call::AttnCtx { probs: &probs, v: &v.value };
        let both = replay(mutant, at, &call, contract, history);
        candidates.extend(both.map(|both| (mutant, both, spread)));
    }
    let mut honest = Emulate::new(contract);
    let scores = honest.value(hidden.scores_at, &scores_call);
    let probs_call = Call::AttnProbs { scores: &scores, mask: *mask, sinks: sinks.as_ref() };
    let relative = relative_variance(honest_probs);
    for (mutant, probs) in replayed(*probs_at, &probs_call, contract, history) {
        if probs.len() != hidden_len(&values) {
            continue;
        }
        let keys = probs.shape().last().copied().unwrap_or(1).max(1);
        let variance = probs.iter().enumerate().map(|(n, p)| f64::from(*p).powi(2) * relative[n / keys]);
        let variance =
            ndarray::ArrayD::from_shape_vec(probs.raw_dim(), variance.collect()).ok()?.into_shared();
        let Some((_, value, spread)) = context(Bounded { value: probs, variance: Some(variance) }) else {
            continue;
        };
        candidates.push((mutant, value, spread));
    }
    rank(candidates, subject)
}

/// The largest variance of a probability over its square, row by row of `[heads · tokens, keys]`: that of the
/// scores, which a wrong softmax passes on in the same proportion. Those that no f32 sum notices are left out.
fn relative_variance(probs: &Bounded) -> Vec<f64> {
    let keys = probs.value.shape().last().copied().unwrap_or(1).max(1);
    let values: Vec<f32> = probs.value.iter().copied().collect();
    let row = |(r, row): (usize, &[f32])| {
        let seen = row.iter().enumerate().filter(|(_, p)| **p > 1e-7);
        seen.map(|(j, p)| probs.variance_at(r * keys + j) / f64::from(*p).powi(2)).fold(0.0, f64::max)
    };
    values.chunks(keys).enumerate().map(row).collect()
}

/// Elements of the probabilities, the first operand of the context.
fn hidden_len(operands: &[Tensor]) -> usize {
    operands.first().map_or(0, |probs| probs.len())
}

/// The variance of an honest subject; an element that must be exact still gets the rounding of its own size.
fn spread(at: Site, call: &Call<Bounded>, contract: &Contract) -> Option<Vec<f64>> {
    expect(at, call, contract, Truth::Image).ok().map(|expected| floored(&expected))
}

/// The variance of every element, and no less than the rounding of its own size.
pub fn floored(expected: &Expected) -> Vec<f64> {
    let pairs = expected.variance.iter().zip(expected.r.iter());
    pairs.map(|(&v, &r)| v.max(crate::variance::rounding(r))).collect()
}

/// What every mutant that applies makes of a call.
fn replayed(
    at: Site,
    call: &Call<Tensor>,
    contract: &Contract,
    history: &History,
) -> Vec<(&'static Mutant, Tensor)> {
    all().filter_map(|mutant| Some((mutant, replay(mutant, at, call, contract, history)?))).collect()
}

/// Ranks what mutants give, each with its variance, by its distance from the subject.
fn rank(candidates: Vec<(&'static Mutant, Tensor, Rc<Vec<f64>>)>, subject: &Tensor) -> Option<Explanation> {
    let mut candidates: Vec<Candidate> = candidates
        .into_iter()
        .filter(|(_, value, _)| value.shape() == subject.shape())
        .map(|(mutant, value, spread)| Candidate {
            mutant: mutant.name(),
            z_rms: distance(subject, &value, &spread),
            formula: mutant.formula,
        })
        .collect();
    candidates.sort_by(|a, b| a.z_rms.total_cmp(&b.z_rms));
    // A mutant of several steps stands where it fits best.
    let mut seen = std::collections::BTreeSet::new();
    candidates.retain(|candidate| seen.insert(candidate.mutant.clone()));
    let mut candidates = candidates.into_iter().peekable();
    let best = candidates.next()?;
    if best.z_rms > EXPLAINS {
        return Some(Explanation { named: None, same_here: vec![], next_best: Some(best) });
    }
    let mut same_here = Vec::new();
    while let Some(same) = candidates.next_if(|other| other.z_rms == best.z_rms) {
        same_here.push(same.mutant);
    }
    Some(Explanation { named: Some(best), same_here, next_best: candidates.next() })
}

fn replay(
    mutant: &Mutant,
    at: Site,
    call: &Call<Tensor>,
    contract: &Contract,
    history: &History,
) -> Option<Tensor> {
    let mut honest = Emulate::new(contract);
    let value = (mutant.apply)(call, at, history, &mut |call| honest.value(at, call));
    honest.check().ok().and(value)
}

/// Root mean square of (subject - value) over the square root of `spread`; NaN equals NaN.
pub fn distance(subject: &Tensor, value: &Tensor, spread: &[f64]) -> f64 {
    let mut total = 0.0;
    for ((&s, &m), &v) in subject.iter().zip(value.iter()).zip(spread) {
        let difference = f64::from(s) - f64::from(m);
        let same = s == m || s.is_nan() && m.is_nan();
        total += if same { 0.0 } else { difference * difference / v };
    }
    let rms = (total / spread.len().max(1) as f64).sqrt();
    if rms.is_nan() { f64::INFINITY } else { rms }
}

#[cfg(test)]
mod tests {
    use super::*;
    use device::host::attention::Attention;
    use device::host::cache::KvCache;
    use fixtures::random::SplitMix64;
    use ndarray::IxDyn;

    fn normal(shape: &[usize], random: &mut SplitMix64) -> Tensor {
        let values = (0..shape.iter().product()).map(|_| random.normal() as f32).collect();
        Tensor::from_shape_vec(IxDyn(shape), values).unwrap()
    }

    /// The device's attention with six heads on two key heads, wrong in the map of heads: head h reads key head
    /// h mod 2. It is made by lending every head a key head of its own, `k[h mod 2]`, and knows no mutant.
    fn wrong_map(q: &Tensor, k: &Tensor, v: &Tensor, scale: f32) -> Tensor {
        let (tokens, dim) = (q.shape()[0], q.shape()[2]);
        let spread = |x: &Tensor| -> Vec<f32> {
            let (keys, width) = (x.shape()[0], x.shape()[2]);
            (0..keys * 6 * width).map(|n| x[[n / width / 6, n / width % 6 % 2, n % width]]).collect()
        };
        let mut cache = KvCache::new(6, dim, v.shape()[2]);
        cache.append(&spread(k), &spread(v));
        let attention = Attention { heads: 6, scale, window: None, softcap: None, sinks: None };
        let q: Vec<f32> = q.iter().copied().collect();
        let context = attention.run(&q, &cache, k.shape()[0] - tokens);
        Tensor::from_shape_vec(IxDyn(&[tokens, 6 * v.shape()[2]]), context).unwrap()
    }

    /// A fused kernel with a mistake in a hidden step is an honest device of the mistaken mathematics: it stays
    /// within one standard deviation of the mutant, flat scores or steep ones, and far from all others. (The
    /// spread of exp and of sums on the host is a limit, so an honest device is well within.)
    #[test]
    fn a_fused_mistake_is_within_the_spread_of_its_mutant() {
        let contract = Contract::named("f32").unwrap();
        let mut random = SplitMix64::new(21);
        for (scale, keys) in [(0.05f32, 40), (0.25, 40), (0.25, 7), (1.0, 100)] {
            let (q, k, v) = (
                normal(&[5, 6, 16], &mut random),
                normal(&[keys, 2, 16], &mut random),
                normal(&[keys, 2, 16], &mut random),
            );
            let subject = wrong_map(&q, &k, &v, scale);
            let [q, k, v] = [q, k, v].map(Bounded::exact);
            let (sites, mut hidden) = (["attn_scores", "attn_probs", "attn_ctx"], None);
            let [scores_at, probs_at, at] = sites.map(|name| Site::layer(0, name));
            let next = |at, call: &Call<Bounded>| {
                let expected = expect(at, call, &contract, Truth::Image).unwrap();
                let value = expected.r.mapv(|v| v as f32).into_shared();
                Bounded { value, variance: Some(expected.variance.into_shared()) }
            };
            let call = Call::AttnScores { q: &q, k: &k, scale: f64::from(scale), softcap: None };
            Hidden::note(&mut hidden, scores_at, &call);
            let scores = next(scores_at, &call);
            let mask = Mask { first: keys - 5, reach: reference::ops::Reach::Causal };
            let call = Call::AttnProbs { scores: &scores, mask, sinks: None };
            Hidden::note(&mut hidden, probs_at, &call);
            let probs = next(probs_at, &call);
            let call = Call::AttnCtx { probs: &probs, v: &v };
            let (hidden, history) = (hidden.unwrap(), History::new());
            let found = explain_attention(&hidden, at, &call, &subject, &contract, &history).unwrap();
            let named = found.named.expect("the map is found");
            println!("scale {scale}, {keys} keys: {} at rms z {:.3}", named.mutant, named.z_rms);
            assert_eq!(named.mutant, "attn-gqa-map:mod");
            assert!(named.z_rms < 1.0, "rms z {}", named.z_rms);
            let next = found.next_best.expect("other mutants apply").z_rms;
            assert!(next > 10.0 * EXPLAINS, "next best at {next}");
        }
    }
}
