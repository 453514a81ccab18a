//! Where the final error comes from: every layer's own error, put alone into the reference.
//!
//! ```text
//! e_i = subject.out_i - layer_i(subject.out_{i-1})       what layer i adds, from the subject's own input
//! δ_i = logits(reference with e_i added to out_i) - logits(reference)
//! share_i = |δ_i|² / Σ_j |δ_j|²
//! closure = |Δ - Σ_j δ_j| / |Δ|,  Δ = logits(subject) - logits(reference)
//! ```
//!
//! The table and the head are parts like layers. The closure is 0 where errors add up linearly; near 1 the
//! shares say nothing, because what comes down is not the sum of what was put in: errors are large, or layers
//! hand on more than their output (shared keys and values, per-layer inputs).

use super::Loaded;
use crate::follow::PassTaps;
use crate::passes::Pass;
use reference::{Call, Ops, Plain, Tensor};
use serde::Serialize;
use spec::{NonFinite, Site};

/// The logit error of a pass, part by part.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct LayerBudget {
    /// The pass.
    pub pass: String,
    /// Root mean square of the logit error.
    pub rms: f64,
    /// How much of it the parts together leave open.
    pub closure: f64,
    /// Table, layers, head, in the order of the data flow.
    pub parts: Vec<Part>,
}

/// What one part's own error does to the logits.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Part {
    /// The site that its error was added at.
    pub site: String,
    /// Root mean square of its own error, at that site.
    pub own_rms: f64,
    /// Root mean square of the logit error that it alone makes.
    pub logit_rms: f64,
    /// Its share of the squares of all parts.
    pub share: f64,
}

/// The budget of a pass without passes before it, or why there is none.
pub(super) fn layers(
    loaded: &Loaded,
    pass: &Pass,
    taps: &PassTaps,
) -> Result<Result<LayerBudget, String>, NonFinite> {
    let logits = Site::model("logits");
    let mut along = Along { plain: Plain::default(), taps, errors: Vec::new() };
    let free = run(loaded, pass, &mut Plain::default());
    let shown = run(loaded, pass, &mut along);
    along.plain.check()?;
    if !along.errors.iter().any(|(site, _)| is_out(*site)) {
        return Ok(Err("the subject shows no layer outputs".into()));
    }
    if !along.errors.iter().any(|(site, _)| *site == logits) {
        return Ok(Err("the subject does not show the logits of every token".into()));
    }
    if along.errors.iter().any(|(_, error)| error.iter().any(|v| !v.is_finite())) {
        return Ok(Err("the subject's values are not finite".into()));
    }
    let total = difference(&shown, &free);
    let mut open = total.clone();
    let mut parts = Vec::new();
    for (site, error) in &along.errors {
        let mut inject = Inject { plain: Plain::default(), at: *site, error };
        let with = run(loaded, pass, &mut inject);
        let made = difference(&with, &free);
        open.iter_mut().zip(&made).for_each(|(open, made)| *open -= made);
        let own: Vec<f64> = error.iter().map(|&v| f64::from(v)).collect();
        parts.push(Part { site: site.to_string(), own_rms: rms(&own), logit_rms: rms(&made), share: 0.0 });
    }
    let squares: f64 = parts.iter().map(|part| part.logit_rms * part.logit_rms).sum();
    for part in &mut parts {
        part.share = if squares > 0.0 { part.logit_rms * part.logit_rms / squares } else { 0.0 };
    }
    let whole = rms(&total);
    let closure = if whole > 0.0 { rms(&open) / whole } else { 0.0 };
    Ok(Ok(LayerBudget { pass: pass.name.clone(), rms: whole, closure, parts }))
}

fn run(loaded: &Loaded, pass: &Pass, ops: &mut impl Ops<Tensor = Tensor>) -> Tensor {
    loaded.model.pass(ops, &mut loaded.model.fresh(), &pass.ids)
}

fn difference(a: &Tensor, b: &Tensor) -> Vec<f64> {
    a.iter().zip(b.iter()).map(|(&a, &b)| f64::from(a) - f64::from(b)).collect()
}

fn rms(values: &[f64]) -> f64 {
    (values.iter().map(|v| v * v).sum::<f64>() / values.len().max(1) as f64).sqrt()
}

fn is_out(at: Site) -> bool {
    at.layer.is_some() && at.name == "out"
}

/// The reference on the subject's own input of every part, and what the subject added to it.
struct Along<'a> {
    plain: Plain,
    taps: &'a PassTaps,
    errors: Vec<(Site, Tensor)>,
}

impl Ops for Along<'_> {
    type Tensor = Tensor;

    fn run(&mut self, at: Site, call: Call<'_, Tensor>) -> Tensor {
        let value = self.plain.value(&call);
        let boundary = is_out(at) || at.layer.is_none() && ["embed", "logits"].contains(&at.name);
        let shown = if boundary { self.taps.get(&at) } else { None };
        match shown.filter(|subject| subject.shape() == value.shape()) {
            Some(subject) => {
                self.errors.push((at, (&subject - &value).into_shared()));
                subject
            }
            None => value,
        }
    }
}

/// The reference with an error added at one site.
struct Inject<'a> {
    plain: Plain,
    at: Site,
    error: &'a Tensor,
}

impl Ops for Inject<'_> {
    type Tensor = Tensor;

    fn run(&mut self, at: Site, call: Call<'_, Tensor>) -> Tensor {
        let value = self.plain.value(&call);
        if at == self.at { (&value + self.error).into_shared() } else { value }
    }
}
