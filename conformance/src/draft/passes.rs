//! The speculative loop of a subject: its text, and its passes against the reference's.
//!
//! Two things must hold. The text is the subject's own greedy text, token for token: one pass over a block
//! gives the bits of single steps, so no rounding excuses a difference. And the passes are the reference's,
//! up to the first token that either model chooses within four standard deviations of another one.
//! Of a target with experts, up to the first that another choice of experts gives.

use super::walk::{Greedy, Limits, Proposals, Speculate, Walk, walk};
use super::{Host, HostError, NpuHost, Pair, Pass, mistakes};
use crate::contract::Contract;
use crate::judge::Verdict;
use crate::variance::{Bounded, Expected, Truth, Variance};
use crate::verify::NEAR_TIE_SIGMAS;
use device::{Engine, Fault};
use ndarray::{Axis, Slice};
use reference::models::{Context, Tapped};
use reference::{Call, Ops, Plain, Tensor};
use serde::Serialize;
use spec::{Site, Weights};
use std::collections::BTreeMap;
use std::sync::Arc;

/// A subject's loop, judged.
#[derive(Clone, Debug, Serialize)]
pub struct LoopResult {
    /// PASSED, NEAR_TIE or FAILED.
    pub verdict: Verdict,
    /// Passes.
    pub passes: usize,
    /// Proposals that were checked.
    pub proposed: usize,
    /// Proposals that equal the target's own tokens, up to the first that does not; no bonus among them.
    pub accepted: usize,
    /// Tokens that the passes added.
    pub emitted: usize,
    /// `accepted` of every pass.
    pub accepted_each: Vec<usize>,
    /// The same in the reference's loop.
    pub reference_accepted_each: Vec<usize>,
    /// Whether the text is the subject's own greedy text.
    pub greedy_text: bool,
    /// Where it leaves the reference, or itself.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// Mistakes of the loop that give exactly this walk, where it failed.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub computes: Vec<String>,
    /// The first pass that differs from the reference's.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub first_wrong_pass: Option<usize>,
}

impl LoopResult {
    /// In a line.
    pub fn summary(&self) -> String {
        let own = if self.greedy_text { "the subject's own greedy text" } else { "not its greedy text" };
        let same = match self.accepted_each == self.reference_accepted_each {
            true => "as in the reference's loop",
            false => "not as in the reference's loop",
        };
        let reason = self.reason.as_ref().map_or(String::new(), |reason| format!(" · {reason}"));
        let computes = match &self.computes[..] {
            [] => String::new(),
            names => format!(" · walks as with {}", names.join(" or ")),
        };
        format!(
            "{} passes accepted {} of {} proposals, {same}; {} tokens, {own}{reason}{computes}",
            self.passes, self.accepted, self.proposed, self.emitted
        )
    }
}

/// A pair that remembers what was proposed.
pub(super) struct Remembering<'p, S> {
    pair: &'p mut S,
    proposed: Vec<Vec<u32>>,
}

impl<S: Speculate> Speculate for Remembering<'_, S> {
    type Error = S::Error;

    fn prefill(&mut self, prompt: &[u32]) -> Result<Vec<f32>, S::Error> {
        self.pair.prefill(prompt)
    }

    fn propose(&mut self, anchor: u32, n: usize) -> Result<Proposals, S::Error> {
        let proposals = self.pair.propose(anchor, n)?;
        self.proposed.push(proposals.ids.clone());
        Ok(proposals)
    }

    fn verify(&mut self, block: &[u32]) -> Result<Vec<Vec<f32>>, S::Error> {
        self.pair.verify(block)
    }

    fn commit(&mut self, rows: usize) -> Result<(), S::Error> {
        self.pair.commit(rows)
    }
}

/// A walk with its proposals.
struct Told {
    walk: Walk,
    proposed: Vec<Vec<u32>>,
}

impl Told {
    fn of<S: Speculate>(
        pair: &mut S,
        walking: impl FnOnce(&mut Remembering<S>) -> Result<Walk, S::Error>,
    ) -> Result<Told, S::Error> {
        let mut pair = Remembering { pair, proposed: Vec::new() };
        let walk = walking(&mut pair)?;
        Ok(Told { walk, proposed: pair.proposed })
    }

    fn accepted(&self) -> Vec<usize> {
        self.walk.passes.iter().map(|pass| pass.accepted).collect()
    }
}

/// The first choice in which two loops differ.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Differs {
    /// The target's token number `at` of the text; with its pass, but for the first token.
    Token { at: usize, pass: Option<usize> },
    /// Proposal `j` of a pass.
    Proposal { pass: usize, j: usize },
    /// What a pass counts, though its proposals and the text are the same.
    Count { pass: usize },
}

/// Walks two loops side by side. Up to the place that is found, both have the same text and anchors.
fn first_difference(subject: &Told, reference: &Told) -> Option<Differs> {
    let (own, other) = (&subject.walk.tokens, &reference.walk.tokens);
    if own.first() != other.first() {
        return Some(Differs::Token { at: 0, pass: None });
    }
    let mut at = 1;
    for (pass, (a, b)) in subject.walk.passes.iter().zip(&reference.walk.passes).enumerate() {
        let proposals = subject.proposed[pass].iter().zip(&reference.proposed[pass]);
        if let Some(j) = proposals.clone().position(|(a, b)| a != b) {
            return Some(Differs::Proposal { pass, j });
        }
        let emitted = a.emitted.max(b.emitted);
        if let Some(n) = (at..at + emitted).find(|&n| own.get(n) != other.get(n)) {
            return Some(Differs::Token { at: n, pass: Some(pass) });
        }
        // With the same proposals and the same text there is nothing left to count otherwise.
        if a != b {
            return Some(Differs::Count { pass });
        }
        at += emitted;
    }
    (own.len() != other.len()).then_some(Differs::Token { at, pass: None })
}

/// Runs a subject's loop and the reference's over one prompt and judges it.
#[allow(clippy::too_many_arguments)]
pub fn judge(
    pair: &Pair,
    weights: &Weights,
    engine: Engine,
    fault: Option<Arc<dyn Fault>>,
    contract: &Contract,
    prompt: &[u32],
    tokens: usize,
) -> Result<LoopResult, HostError> {
    let limits = Limits { tokens, block: pair.draft.config.block_size, stops: &[] };
    let mut npu = NpuHost::new(pair, weights, engine, fault)?;
    let own = npu.greedy(prompt, tokens)?;
    let walking = |npu: &mut Remembering<NpuHost>| walk(npu, &mut Greedy, prompt, limits);
    judged(pair, contract, prompt, limits, &own, &mut npu, &|| Host::new(pair), walking)
}

/// Judges the loop that `walking` makes of a subject's models against the subject's `own` greedy text and
/// the loop over `fresh` reference models.
pub(super) fn judged<S: Speculate<Error = HostError>, R: Speculate<Error = HostError>>(
    pair: &Pair,
    contract: &Contract,
    prompt: &[u32],
    limits: Limits,
    own: &[u32],
    models: &mut S,
    fresh: &dyn Fn() -> R,
    walking: impl FnOnce(&mut Remembering<S>) -> Result<Walk, HostError>,
) -> Result<LoopResult, HostError> {
    let subject = Told::of(models, walking)?;
    let reference = Told::of(&mut fresh(), |models| walk(models, &mut Greedy, prompt, limits))?;

    let (found, passes) = (&subject.walk.tokens, &subject.walk.passes);
    let shorter = found.len().min(own.len());
    let left = found.iter().zip(own).position(|(a, b)| a != b);
    let left = left.or((found.len() != own.len()).then_some(shorter));
    let differs = first_difference(&subject, &reference);
    let mut result = LoopResult {
        verdict: Verdict::Passed,
        passes: passes.len(),
        proposed: passes.iter().map(|pass| pass.proposed).sum(),
        accepted: passes.iter().map(|pass| pass.accepted).sum(),
        emitted: passes.iter().map(|pass| pass.emitted).sum(),
        accepted_each: subject.accepted(),
        reference_accepted_each: reference.accepted(),
        greedy_text: left.is_none(),
        reason: None,
        computes: Vec::new(),
        first_wrong_pass: differs.and_then(|differs| match differs {
            Differs::Token { pass, .. } => pass,
            Differs::Proposal { pass, .. } | Differs::Count { pass } => Some(pass),
        }),
    };
    if let Some(at) = left {
        let said = |text: &[u32]| text.get(at).map_or("its end".to_string(), u32::to_string);
        let reason = format!(
            "the loop's text leaves the subject's own greedy text at token {at}: {} for {}",
            said(found),
            said(own)
        );
        (result.verdict, result.reason) = (Verdict::Failed, Some(reason));
    } else if let Some(Differs::Count { pass }) = differs {
        let counts = |pass: &Pass| format!("{} accepted of {}", pass.accepted, pass.proposed);
        let reason = format!(
            "pass {pass} counts {}, though its proposals and the text give {}",
            counts(&passes[pass]),
            counts(&reference.walk.passes[pass])
        );
        (result.verdict, result.reason) = (Verdict::Failed, Some(reason));
    } else if let Some(differs) = differs {
        let (margin, sigma, what) = weigh(pair, contract, prompt, &subject, &reference, differs)?;
        let near = margin <= NEAR_TIE_SIGMAS * sigma;
        let (verdict, how) = match (near, chooses_experts(pair)) {
            (true, _) => (Verdict::NearTie, "a near tie"),
            // One expert taken for another moves logits by more than their own rounding.
            (false, true) => {
                (Verdict::NearTie, "as another choice of experts gives; the target's sites judge the choice")
            }
            (false, false) => (Verdict::Failed, "more than four standard deviations away"),
        };
        result.verdict = verdict;
        result.reason = Some(format!(
            "the loop leaves the reference's at {what}: margin {margin:.3e}, {:.1} sigmas, {how}",
            margin / sigma
        ));
    }
    if result.verdict == Verdict::Failed {
        let same = mistakes::same_walk(prompt, limits, &subject.walk, fresh)?;
        result.computes = same.iter().map(|made| made.mutant.name()).collect();
    }
    Ok(result)
}

/// Whether the target has routed experts.
fn chooses_experts(pair: &Pair) -> bool {
    struct Seen(Plain, bool);
    impl Ops for Seen {
        type Tensor = Tensor;

        fn run(&mut self, at: Site, call: Call<'_, Tensor>) -> Tensor {
            self.1 |= matches!(call, Call::RouterIndex { .. });
            self.0.run(at, call)
        }
    }
    let mut ops = Seen(Plain::default(), false);
    pair.target.pass(&mut ops, &mut pair.target.fresh(), &[0]);
    ops.1
}

/// The reference's margin between its choice and the subject's, and the standard deviation of an honest
/// subject's difference: target and draft together, from the tokens on.
fn weigh(
    pair: &Pair,
    contract: &Contract,
    prompt: &[u32],
    subject: &Told,
    reference: &Told,
    differs: Differs,
) -> Result<(f64, f64, String), HostError> {
    let mut text = prompt.to_vec();
    match differs {
        Differs::Token { at, pass } => {
            let what = match pass {
                Some(pass) => format!("token {at}, in pass {pass}"),
                None => format!("token {at}"),
            };
            let pick = |told: &Told| told.walk.tokens.get(at).map(|&id| id as usize);
            let (Some(found), Some(expected)) = (pick(subject), pick(reference)) else {
                return Ok((f64::INFINITY, 0.0, what));
            };
            text.extend(&subject.walk.tokens[..at]);
            let mut ops = Variance::new(contract, Truth::Package, |_, _| {});
            let logits = pair.target.pass(&mut ops, &mut pair.target.fresh(), &text);
            ops.check()?;
            let first = (text.len() - 1) * pair.config.vocab_size();
            let value = |id: usize| f64::from(logits.value.iter().nth(first + id).copied().unwrap_or(0.0));
            let variance = logits.variance_at(first + expected) + logits.variance_at(first + found);
            Ok((value(expected) - value(found), variance.sqrt(), what))
        }
        Differs::Count { pass } => Ok((f64::INFINITY, 0.0, format!("what pass {pass} counts"))),
        Differs::Proposal { pass, j } => {
            let what = format!("proposal {} of pass {pass}", j + 1);
            let (found, expected) = (subject.proposed[pass][j], reference.proposed[pass][j]);
            let anchor = subject.walk.passes[pass].anchor;
            text.extend(&subject.walk.tokens[..anchor + 1 - prompt.len()]);
            let proposals = reference.proposed[pass].len();
            let values = block_values(pair, contract, &text[..anchor], text[anchor], proposals)?;
            let (margin, sigma) = margin(&values, j, expected, found);
            Ok((margin, sigma, what))
        }
    }
}

/// What decides the proposals of a block, with the variance that target and draft give it.
fn block_values(
    pair: &Pair,
    contract: &Contract,
    context: &[u32],
    anchor: u32,
    proposals: usize,
) -> Result<BTreeMap<&'static str, Expected>, HostError> {
    let mut values = BTreeMap::new();
    let keep = |site: Site, expected: &Expected| {
        if site.layer.is_none() && ["logits", "candidates", "path_scores"].contains(&site.name) {
            values.insert(site.name, expected.clone());
        }
    };
    let mut ops = Variance::new(contract, Truth::Package, keep);
    let (ids, layers) = (&pair.draft.config.target_layer_ids, pair.config.num_hidden_layers());
    let mut tapped = Tapped::new(&mut ops, ids, layers, pair.last_tap);
    pair.target.pass(&mut tapped, &mut pair.target.fresh(), context);
    let taps: Vec<Bounded> = tapped.taps().expect("every tapped layer has run");
    let (mut borrowed, own) = tapped.borrowed(1.0).expect("a pass embeds tokens and ends in a head");
    borrowed.scale = pair.embedding_scale(own).value;
    let block = Context { taps: &taps, rows: context.len(), window: pair.window };
    pair.draft.pass(&mut ops, &mut pair.draft.fresh(), &borrowed, block, anchor, proposals);
    ops.check()?;
    drop(ops);
    Ok(values)
}

/// Margin and standard deviation between two tokens of proposal `j`: by the scores along the walk where both
/// are candidates, else by logits (of the last candidate, where the other is none).
fn margin(values: &BTreeMap<&'static str, Expected>, j: usize, expected: u32, found: u32) -> (f64, f64) {
    let row = |name: &str| -> Option<(Vec<f64>, Vec<f64>)> {
        let row = values.get(name)?;
        let cut = |x: &ndarray::ArrayD<f64>| {
            x.slice_axis(Axis(0), Slice::from(j..j + 1)).iter().copied().collect::<Vec<f64>>()
        };
        Some((cut(&row.r), cut(&row.variance)))
    };
    let between = |(r, variance): &(Vec<f64>, Vec<f64>), a: usize, b: usize| {
        (r[a] - r[b], (variance[a] + variance[b]).sqrt())
    };
    let Some(logits) = row("logits") else { return (f64::INFINITY, 0.0) };
    let (Some(ids), Some(scores)) = (row("candidates"), row("path_scores")) else {
        return between(&logits, expected as usize, found as usize);
    };
    let place = |id: u32| ids.0.iter().position(|&candidate| candidate as u32 == id);
    match (place(expected), place(found), ids.0.last()) {
        (Some(a), Some(b), _) => between(&scores, a, b),
        (_, _, Some(&last)) => between(&logits, last as usize, found as usize),
        _ => (f64::INFINITY, 0.0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told(tokens: &[u32], passes: &[(usize, &[u32])]) -> Told {
        let mut anchor = 9;
        let list = passes.iter().map(|&(accepted, proposed)| {
            let pass =
                Pass { anchor, proposed: proposed.len(), accepted, emitted: accepted + 1, bonus: true };
            anchor += accepted + 1;
            pass
        });
        let passes_of = list.collect();
        let proposed = passes.iter().map(|(_, ids)| ids.to_vec()).collect();
        Told { walk: Walk { tokens: tokens.to_vec(), passes: passes_of }, proposed }
    }

    // Text 1 | 2 3 9 | 4: the first pass proposes 2 3 7 and keeps two, the second 8 and keeps none.
    #[test]
    fn the_first_difference_is_the_first_choice_that_differs() {
        let reference = told(&[1, 2, 3, 9, 4], &[(2, &[2, 3, 7]), (0, &[8])]);
        let same = told(&[1, 2, 3, 9, 4], &[(2, &[2, 3, 7]), (0, &[8])]);
        assert_eq!(first_difference(&same, &reference), None);
        let first = told(&[5, 2, 3, 9, 4], &[(2, &[2, 3, 7]), (0, &[8])]);
        assert_eq!(first_difference(&first, &reference), Some(Differs::Token { at: 0, pass: None }));
        // Another proposal comes before the token that it leads to.
        let proposal = told(&[1, 2, 6, 9, 4], &[(1, &[2, 6, 7]), (0, &[8])]);
        assert_eq!(first_difference(&proposal, &reference), Some(Differs::Proposal { pass: 0, j: 1 }));
        let token = told(&[1, 2, 3, 5, 4], &[(2, &[2, 3, 7]), (0, &[8])]);
        assert_eq!(first_difference(&token, &reference), Some(Differs::Token { at: 3, pass: Some(0) }));
        // Nothing differs but that 7, which is not in the text, is counted as kept.
        let count = told(&[1, 2, 3, 9, 4], &[(3, &[2, 3, 7]), (0, &[8])]);
        assert_eq!(first_difference(&count, &reference), Some(Differs::Count { pass: 0 }));
    }
}
