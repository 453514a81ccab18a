//! What a subject computes instead: every mutant replayed on the inputs of its first wrong site.
//!
//! A kernel that computes attention in one piece shows neither scores nor probabilities. Its context is
//! explained by mutants of all three steps: one of scores or probabilities is carried on to the context by the
//! honest steps behind it.

use super::{History, Mutant, all};
use crate::contract::Contract;
use crate::emulate::Emulate;
use crate::variance::{Bounded, Truth, expect};
use reference::ops::Mask;
use reference::{Call, Tensor};
use serde::Serialize;
use spec::{Site, Vector};

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
    let spread = spread(at, &call.with(&bare), contract)?;
    rank(replayed(at, &call.with(&values), contract, history), subject, &spread)
}

/// The two steps before the context of a kernel that computes attention in one piece.
#[derive(Clone)]
pub struct Hidden {
    /// The site of the scores.
    pub scores_at: Site,
    /// Queries.
    pub q: Tensor,
    /// Keys.
    pub k: Tensor,
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
                let (q, k) = (q.value.clone(), k.value.clone());
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
/// `call` carries the variance of the hidden steps, so a mutant may differ from the subject by their rounding.
pub fn explain_attention(
    hidden: &Hidden,
    at: Site,
    call: &Call<Bounded>,
    subject: &Tensor,
    contract: &Contract,
    history: &History,
) -> Option<Explanation> {
    let (Call::AttnCtx { v, .. }, Some((probs_at, mask, sinks))) = (call, &hidden.probs) else {
        return explain(at, call, subject, contract, history);
    };
    let values: Vec<Tensor> = call.operands().iter().map(|o| o.value.clone()).collect();
    // The hidden steps' variance is that at the honest values; at a mutant's own it may be a few times as large.
    let spread: Vec<f64> = spread(at, call, contract)?.into_iter().map(|v| 4.0 * v).collect();
    let mut candidates = replayed(at, &call.with(&values), contract, history);
    let mut honest = Emulate::new(contract);
    let scores_call =
        Call::AttnScores { q: &hidden.q, k: &hidden.k, scale: hidden.scale, softcap: hidden.softcap };
    let probs_of = |scores: &Tensor, honest: &mut Emulate| {
        honest.value(*probs_at, &Call::AttnProbs { scores, mask: *mask, sinks: sinks.as_ref() })
    };
    let context =
        |probs: &Tensor, honest: &mut Emulate| honest.value(at, &Call::AttnCtx { probs, v: &v.value });
    for (mutant, scores) in replayed(hidden.scores_at, &scores_call, contract, history) {
        if scores.len() != hidden_len(&values) {
            continue;
        }
        let probs = probs_of(&scores, &mut honest);
        candidates.push((mutant, context(&probs, &mut honest)));
        // A head that reads the wrong keys reads the wrong values too.
        let call = Call::AttnCtx { probs: &probs, v: &v.value };
        candidates.extend(replay(mutant, at, &call, contract, history).map(|both| (mutant, both)));
    }
    let scores = honest.value(hidden.scores_at, &scores_call);
    let probs_call = Call::AttnProbs { scores: &scores, mask: *mask, sinks: sinks.as_ref() };
    for (mutant, probs) in replayed(*probs_at, &probs_call, contract, history) {
        if probs.len() == hidden_len(&values) {
            candidates.push((mutant, context(&probs, &mut honest)));
        }
    }
    rank(candidates, subject, &spread)
}

/// Elements of the probabilities, the first operand of the context.
fn hidden_len(operands: &[Tensor]) -> usize {
    operands.first().map_or(0, |probs| probs.len())
}

/// The variance of an honest subject; an element that must be exact still gets the rounding of its own size.
fn spread(at: Site, call: &Call<Bounded>, contract: &Contract) -> Option<Vec<f64>> {
    let expected = expect(at, call, contract, Truth::Image).ok()?;
    let pairs = expected.variance.iter().zip(expected.r.iter());
    Some(pairs.map(|(&v, &r)| v.max(crate::variance::rounding(r))).collect())
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

/// Ranks what mutants give by its distance from the subject.
fn rank(candidates: Vec<(&'static Mutant, Tensor)>, subject: &Tensor, spread: &[f64]) -> Option<Explanation> {
    let mut candidates: Vec<Candidate> = candidates
        .into_iter()
        .filter(|(_, value)| value.shape() == subject.shape())
        .map(|(mutant, value)| Candidate {
            mutant: mutant.name(),
            z_rms: distance(subject, &value, spread),
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

fn distance(subject: &Tensor, value: &Tensor, spread: &[f64]) -> f64 {
    let mut total = 0.0;
    for ((&s, &m), &v) in subject.iter().zip(value.iter()).zip(spread) {
        let difference = f64::from(s) - f64::from(m);
        let same = s == m || s.is_nan() && m.is_nan();
        total += if same { 0.0 } else { difference * difference / v };
    }
    let rms = (total / spread.len().max(1) as f64).sqrt();
    if rms.is_nan() { f64::INFINITY } else { rms }
}
