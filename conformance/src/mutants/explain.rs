//! What a subject computes instead: every mutant replayed on the inputs of its first wrong site.

use super::{History, Mutant, all};
use crate::contract::Contract;
use crate::emulate::Emulate;
use crate::variance::{Bounded, Truth, expect};
use reference::{Call, Tensor};
use serde::Serialize;
use spec::Site;

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
    let expected = expect(at, &call.with(&bare), contract, Truth::Image).ok()?;
    // An element that must be exact still gets the rounding of its own size.
    let spread: Vec<f64> = expected
        .variance
        .iter()
        .zip(expected.r.iter())
        .map(|(&v, &r)| v.max(crate::variance::rounding(r)))
        .collect();
    let call = call.with(&values);
    let mut candidates: Vec<Candidate> = all()
        .filter_map(|mutant| {
            let value = replay(mutant, at, &call, contract, history)?;
            (value.shape() == subject.shape()).then(|| Candidate {
                mutant: mutant.name(),
                z_rms: distance(subject, &value, &spread),
                formula: mutant.formula,
            })
        })
        .collect();
    candidates.sort_by(|a, b| a.z_rms.total_cmp(&b.z_rms));
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
