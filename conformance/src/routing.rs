//! Routed experts: which choices are within a subject's right.
//!
//! The choice of experts jumps where two scores cross, and everything behind it jumps with it. So a choice
//! is compared as a set, and one that swaps experts whose scores lie within [`NEAR_TIE_SIGMAS`] standard
//! deviations of each other is a near tie, which the reference follows: what comes after is judged as if
//! it had chosen the same.

use crate::contract::Contract;
use crate::follow::PassTaps;
use crate::passes::Pass;
use crate::variance::{Bounded, Truth, expect, poisoned};
use crate::verify::NEAR_TIE_SIGMAS;
use reference::{Call, Model, Ops, Tensor};
use serde::Serialize;
use spec::families::moe::{Router, Scoring};
use spec::{NonFinite, Site};

/// One expert taken for another.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Swap {
    /// The choice: `prefill.layers.1.router_index`.
    pub site: String,
    /// The token's row in the pass.
    pub row: usize,
    /// The reference's expert.
    pub expected: usize,
    /// The subject's expert in its place.
    pub found: usize,
    /// The gap of the two scores over the standard deviation of their difference.
    pub sigmas: f64,
}

impl std::fmt::Display for Swap {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        let Swap { row, expected, found, sigmas, .. } = self;
        write!(f, "token {row} goes to expert {found} for {expected}, {sigmas:.1} sigma apart")
    }
}

/// What the scores of a pass say of a subject's choices.
pub struct Choices {
    /// The subject's choices with every expert that the reference chose too in the reference's place, and with
    /// the reference's row where the subject's is within its right.
    pub aligned: Tensor,
    /// What an op that reads the choices should read: the subject's row where it is within its right, the
    /// reference's row elsewhere.
    pub followed: Tensor,
    /// The swaps within rounding.
    pub swaps: Vec<Swap>,
}

/// Compares choices `[tokens, k]` of one site; nothing where `call` chooses no experts or shapes differ.
pub fn compare(at: &str, call: &Call<Bounded>, reference: &Tensor, subject: &Tensor) -> Option<Choices> {
    let Call::RouterIndex { logits, router, bias } = call else { return None };
    if reference.shape() != subject.shape() || reference.ndim() != 2 {
        return None;
    }
    let experts = router.num_experts;
    let scores: Vec<f32> = logits.value.iter().copied().collect();
    let (mut aligned, mut followed, mut swaps) = (reference.clone(), reference.clone(), Vec::new());
    for row in 0..reference.shape()[0] {
        let chosen =
            |of: &Tensor| -> Vec<f32> { of.index_axis(ndarray::Axis(0), row).iter().copied().collect() };
        let (wanted, found) = (chosen(reference), chosen(subject));
        let variance = |e: usize| logits.variance_at(row * experts + e);
        let table = Scores::new(&scores[row * experts..][..experts], variance, router, bias.map(|b| &b[..]));
        match table.swaps(&wanted, &found) {
            Some(of_row) if of_row.iter().all(|(_, _, sigmas)| *sigmas <= NEAR_TIE_SIGMAS) => {
                assign(&mut followed, row, &found);
                swaps.extend(of_row.into_iter().map(|(expected, found, sigmas)| Swap {
                    site: at.to_string(),
                    row,
                    expected,
                    found,
                    sigmas,
                }));
            }
            _ => assign(&mut aligned, row, &in_places_of(&wanted, &found)),
        }
    }
    Some(Choices { aligned, followed, swaps })
}

fn assign(tensor: &mut Tensor, row: usize, values: &[f32]) {
    for (into, value) in tensor.index_axis_mut(ndarray::Axis(0), row).iter_mut().zip(values) {
        *into = *value;
    }
}

/// `found` with what it shares with `wanted` in the same places.
fn in_places_of(wanted: &[f32], found: &[f32]) -> Vec<f32> {
    let mut rest: Vec<f32> = found.to_vec();
    let mut placed: Vec<Option<f32>> = Vec::new();
    for want in wanted {
        let at = rest.iter().position(|id| id == want);
        placed.push(at.map(|at| rest.remove(at)));
    }
    let mut rest = rest.into_iter();
    placed.into_iter().map(|id| id.or_else(|| rest.next()).expect("as many as were wanted")).collect()
}

/// What a token's experts are chosen by, with variances.
struct Scores {
    /// Score and its variance, expert by expert.
    expert: Vec<(f64, f64)>,
    /// Score and variance of every group of experts, and how many groups are kept.
    group: Vec<(f64, f64)>,
    kept: usize,
}

impl Scores {
    fn new(logits: &[f32], variance: impl Fn(usize) -> f64, router: &Router, bias: Option<&[f32]>) -> Scores {
        let Scoring::Sigmoid { n_group, topk_group, .. } = router.scoring else {
            let expert = logits.iter().enumerate().map(|(e, &l)| (f64::from(l), variance(e))).collect();
            return Scores { expert, group: vec![], kept: 0 };
        };
        let of = |(e, &l): (usize, &f32)| {
            let s = 1.0 / (1.0 + (-f64::from(l)).exp());
            (s + bias.map_or(0.0, |b| f64::from(b[e])), (s * (1.0 - s)).powi(2) * variance(e))
        };
        let expert: Vec<(f64, f64)> = logits.iter().enumerate().map(of).collect();
        let of_group = |group: &[(f64, f64)]| {
            let mut best = group.to_vec();
            best.sort_by(|a, b| b.0.total_cmp(&a.0));
            best.iter().take(2).fold((0.0, 0.0), |sum, one| (sum.0 + one.0, sum.1 + one.1))
        };
        let width = (expert.len() / n_group.max(1)).max(1);
        let group = expert.chunks(width).map(of_group).collect();
        Scores { expert, group, kept: topk_group }
    }

    /// The experts that differ, the weakest that left against the strongest that came, each with its gap in
    /// standard deviations; nothing where `found` are not as many different experts.
    fn swaps(&self, wanted: &[f32], found: &[f32]) -> Option<Vec<(usize, usize, f64)>> {
        let mut ids: Vec<usize> = found
            .iter()
            .map(|id| {
                (id.fract() == 0.0 && *id >= 0.0 && (*id as usize) < self.expert.len())
                    .then_some(*id as usize)
            })
            .collect::<Option<_>>()?;
        let wanted: Vec<usize> = wanted.iter().map(|id| *id as usize).collect();
        let mut left: Vec<usize> = wanted.iter().copied().filter(|id| !ids.contains(id)).collect();
        ids.sort_unstable();
        ids.dedup();
        let mut came: Vec<usize> = ids.iter().copied().filter(|id| !wanted.contains(id)).collect();
        if left.len() != came.len() {
            return None;
        }
        left.sort_by(|&a, &b| self.expert[a].0.total_cmp(&self.expert[b].0));
        came.sort_by(|&a, &b| self.expert[b].0.total_cmp(&self.expert[a].0));
        Some(left.into_iter().zip(came).map(|(out, new)| (out, new, self.gap(out, new))).collect())
    }

    /// By how many standard deviations `out` is ahead of `new`: as a group where its group is out.
    fn gap(&self, out: usize, new: usize) -> f64 {
        let sigmas = |a: (f64, f64), b: (f64, f64)| {
            let (gap, spread) = (a.0 - b.0, (a.1 + b.1).sqrt());
            // Equal scores without error have an order: the lower id.
            if spread > 0.0 { (gap / spread).max(0.0) } else { f64::INFINITY }
        };
        if self.group.is_empty() {
            return sigmas(self.expert[out], self.expert[new]);
        }
        let width = self.expert.len() / self.group.len();
        let mut order: Vec<usize> = (0..self.group.len()).collect();
        order.sort_by(|&a, &b| self.group[b].0.total_cmp(&self.group[a].0).then(a.cmp(&b)));
        let place = |expert: usize| order.iter().position(|&group| group == expert / width).unwrap_or(0);
        if place(new) < self.kept {
            return sigmas(self.expert[out], self.expert[new]);
        }
        let last_kept = order[self.kept.clamp(1, order.len()) - 1];
        sigmas(self.group[last_kept], self.group[new / width])
    }
}

/// The reference that chooses as a subject does wherever both choices are within rounding, with the
/// variance of every value under a contract; judged with the package's weights.
pub struct Rerouted<'a> {
    contract: &'a Contract,
    pass: &'a str,
    taps: &'a PassTaps,
    swaps: Vec<Swap>,
    error: Option<NonFinite>,
}

impl Ops for Rerouted<'_> {
    type Tensor = Bounded;

    fn run(&mut self, at: Site, call: Call<'_, Bounded>) -> Bounded {
        let expected = match expect(at, &call, self.contract, Truth::Package) {
            Ok(expected) => expected,
            Err(error) => {
                self.error.get_or_insert(error);
                return poisoned(&call);
            }
        };
        let mut value = expected.r.mapv(|v| v as f32).into_shared();
        if let Some(subject) = self.taps.get(&at)
            && let Some(choices) = compare(&format!("{}.{at}", self.pass), &call, &value, &subject)
        {
            value = choices.followed;
            self.swaps.extend(choices.swaps);
        }
        Bounded { value, variance: Some(expected.variance.into_shared()) }
    }
}

/// Logits with their variances, pass by pass, of the reference that follows a subject's choices, and every
/// swap that it followed.
#[derive(Default)]
pub struct Logits {
    /// `[rows, vocab]` of every pass.
    pub passes: Vec<Bounded>,
    /// The swaps.
    pub swaps: Vec<Swap>,
}

/// Runs the reference along a subject's choices.
pub fn logits(
    model: &Model,
    contract: &Contract,
    passes: &[Pass],
    taps: &[PassTaps],
) -> Result<Logits, NonFinite> {
    let mut state = model.fresh::<Bounded>();
    let mut all = Logits { passes: vec![], swaps: vec![] };
    for (pass, taps) in passes.iter().zip(taps) {
        let mut ops = Rerouted { contract, pass: &pass.name, taps, swaps: vec![], error: None };
        let logits = model.pass(&mut ops, &mut state, &pass.ids);
        ops.error.take().map_or(Ok(()), Err)?;
        all.passes.push(logits);
        all.swaps.append(&mut ops.swaps);
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::*;
    use ndarray::{ArcArray, IxDyn, array};

    fn tensor(rows: ndarray::Array2<f32>) -> Tensor {
        rows.into_dyn().into_shared()
    }

    /// Scores 4, 3, 2.9, 0 with a variance of 0.005 each: a difference has a standard deviation of 0.1.
    fn softmax(found: [f32; 2], variance: f64) -> Choices {
        let logits = Bounded {
            value: tensor(array![[4.0, 3.0, 2.9, 0.0]]),
            variance: Some(ArcArray::from_elem(IxDyn(&[1, 4]), variance)),
        };
        let router = Router { num_experts: 4, num_experts_per_tok: 2, scoring: Scoring::SoftmaxOfChosen };
        let call = Call::RouterIndex { logits: &logits, router: &router, bias: None };
        compare("site", &call, &tensor(array![[0.0, 1.0]]), &tensor(array![found])).unwrap()
    }

    #[test]
    fn the_order_of_a_choice_carries_no_meaning() {
        let choices = softmax([1.0, 0.0], 0.0);
        assert_eq!(choices.aligned, tensor(array![[0.0, 1.0]]));
        assert_eq!(
            choices.followed,
            tensor(array![[1.0, 0.0]]),
            "what comes behind stands in the subject's order"
        );
        assert!(choices.swaps.is_empty());
    }

    // Expert 2 for 1: a gap of 0.1, one standard deviation. Expert 3 for 1: a gap of 3, thirty of them.
    #[test]
    fn a_swap_is_right_within_the_gap_and_wrong_beyond() {
        let near = softmax([2.0, 0.0], 0.005);
        let swap = &near.swaps[0];
        assert_eq!((swap.expected, swap.found), (1, 2));
        assert!((swap.sigmas - 1.0).abs() < 1e-6, "{}", swap.sigmas);
        assert_eq!(near.aligned, tensor(array![[0.0, 1.0]]));
        assert_eq!(near.followed, tensor(array![[2.0, 0.0]]));

        let wrong = softmax([3.0, 0.0], 0.005);
        assert!(wrong.swaps.is_empty());
        assert_eq!(
            wrong.aligned,
            tensor(array![[0.0, 3.0]]),
            "the wrong expert stands in the place of the one it took"
        );
        assert_eq!(wrong.followed, tensor(array![[0.0, 1.0]]));
    }

    // Without error in the scores no swap is right, and neither is an expert twice or one that is none.
    #[test]
    fn what_no_rounding_explains_stays_wrong() {
        for found in [[0.0, 2.0], [0.0, 0.0], [0.0, 4.0], [0.0, 0.5]] {
            let choices = softmax(found, 0.0);
            assert!(choices.swaps.is_empty());
            assert_eq!(choices.followed, tensor(array![[0.0, 1.0]]), "{found:?}");
            assert_eq!(choices.aligned, tensor(array![found]), "{found:?}");
        }
    }

    // Two groups of two, one kept: σ(0) = 1/2 each, σ' = 1/4. Groups score 1 + 0.02 and 1; with a variance
    // of the logits of 0.0016 a score's is 0.0001 and a group's 0.0002, the difference of two groups' has
    // a standard deviation of 0.02: the other group is one of them away.
    #[test]
    fn a_group_is_swapped_as_a_whole() {
        let logits = Bounded {
            value: tensor(array![[0.0, 0.0, 0.0, 0.0]]),
            variance: Some(ArcArray::from_elem(IxDyn(&[1, 4]), 0.0016)),
        };
        let scoring =
            Scoring::Sigmoid { n_group: 2, topk_group: 1, norm_topk_prob: true, routed_scaling_factor: 1.0 };
        let router = Router { num_experts: 4, num_experts_per_tok: 2, scoring };
        let bias = spec::Vector { name: "bias".into(), values: vec![0.01, 0.01, 0.0, 0.0].into() };
        let call = Call::RouterIndex { logits: &logits, router: &router, bias: Some(&bias) };
        let choices =
            compare("site", &call, &tensor(array![[0.0, 1.0]]), &tensor(array![[2.0, 3.0]])).unwrap();
        assert_eq!(choices.swaps.len(), 2);
        for swap in &choices.swaps {
            assert!((swap.sigmas - 1.0).abs() < 1e-4, "{}", swap.sigmas);
        }
    }
}
