//! Choosing experts, and weighing the chosen.

use super::{Tensor, rows};
use crate::sum::sum;
use ndarray::{Array2, ArrayView1};
use spec::families::moe::{Router, Scoring};
use std::cmp::Reverse;

/// The experts that every token is sent to, best first.
///
/// ```text
/// softmax:       c = logits                         (softmax keeps their order)
/// sigmoid:       c = σ(logits) + bias
///                a group's score is the sum of its two largest c; experts outside the topk_group
///                best groups are out
/// index[t]       = the num_experts_per_tok experts with the largest c
/// ```
///
/// `logits` is `[tokens, experts]`, the result `[tokens, k]` holds whole numbers. Of equal scores the
/// lower id wins. The order of a row carries no meaning.
///
/// Source: arXiv 2101.03961 (top-k routing), 2412.19437 section 2.1.2 (sigmoid, bias and groups).
pub fn router_index(logits: &Tensor, router: &Router, bias: Option<&[f32]>) -> Array2<f64> {
    let logits = rows(logits);
    assert_eq!(logits.ncols(), router.num_experts, "router_index: row length against experts");
    let mut index = Array2::zeros((logits.nrows(), router.num_experts_per_tok));
    for (logits, mut index) in logits.rows().into_iter().zip(index.rows_mut()) {
        let scores = choice_scores(logits, router, bias);
        for (slot, expert) in index.iter_mut().zip(largest(&scores, router.num_experts_per_tok)) {
            *slot = expert as f64;
        }
    }
    index
}

/// What a token's experts are chosen by.
fn choice_scores(logits: ArrayView1<f32>, router: &Router, bias: Option<&[f32]>) -> Vec<f64> {
    match router.scoring {
        Scoring::Softmax { .. } | Scoring::SoftmaxOfChosen | Scoring::Probabilities => {
            logits.iter().map(|&l| f64::from(l)).collect()
        }
        Scoring::Sigmoid { n_group, topk_group, .. } => {
            let biased = |(e, &l): (usize, &f32)| sigmoid(l) + bias.map_or(0.0, |b| f64::from(b[e]));
            let mut scores: Vec<f64> = logits.iter().enumerate().map(biased).collect();
            let width = scores.len() / n_group;
            let of_group = |group: &[f64]| sum(largest(group, 2).into_iter().map(|e| group[e]));
            let groups: Vec<f64> = scores.chunks_exact(width).map(of_group).collect();
            let kept = largest(&groups, topk_group);
            for (e, score) in scores.iter_mut().enumerate() {
                if !kept.contains(&(e / width)) {
                    *score = f64::NEG_INFINITY;
                }
            }
            scores
        }
    }
}

/// Where the `count` largest scores stand, largest first; of equal ones the lower place.
fn largest(scores: &[f64], count: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..scores.len()).collect();
    order.sort_by(|&a, &b| scores[b].total_cmp(&scores[a]).then(Reverse(b).cmp(&Reverse(a))));
    order.truncate(count);
    order
}

fn sigmoid(x: f32) -> f64 {
    1.0 / (1.0 + libm::exp(-f64::from(x)))
}

/// What the chosen experts' outputs are multiplied by.
///
/// ```text
/// softmax:            p = e^l[e] / Σ_all e^l;  divided by Σ_chosen p with norm_topk_prob
/// probabilities:      p[e] / Σ_chosen p, where `logits` are probabilities already
/// softmax of chosen:  e^l[e] / Σ_chosen e^l
/// sigmoid:            s = σ(l[e]), without the bias that chose it;
///                     divided by Σ_chosen s + 1e-20 with norm_topk_prob; times routed_scaling_factor
/// ```
///
/// `logits` is `[tokens, experts]`, `index` `[tokens, k]` as [`router_index`] gives it, the result
/// `[tokens, k]` in the same order.
pub fn router_weights(logits: &Tensor, index: &Tensor, router: &Router) -> Array2<f64> {
    let (logits, index) = (rows(logits), rows(index));
    assert_eq!(logits.nrows(), index.nrows(), "router_weights: tokens of logits against tokens of index");
    let mut weights = Array2::zeros(index.raw_dim());
    for ((logits, index), mut weights) in logits.rows().into_iter().zip(index.rows()).zip(weights.rows_mut())
    {
        for (weight, value) in weights.iter_mut().zip(row_weights(logits, index, router)) {
            *weight = value;
        }
    }
    weights
}

fn row_weights(logits: ArrayView1<f32>, index: ArrayView1<f32>, router: &Router) -> Vec<f64> {
    let chosen = || index.iter().map(|&e| logits[super::expert(e, logits.len())]);
    let largest =
        |all: &mut dyn Iterator<Item = f32>| all.fold(f64::NEG_INFINITY, |m, l| m.max(f64::from(l)));
    match router.scoring {
        Scoring::Softmax { norm_topk_prob } => {
            let m = largest(&mut logits.iter().copied());
            let all = sum(logits.iter().map(|&l| libm::exp(f64::from(l) - m)));
            let p: Vec<f64> = chosen().map(|l| libm::exp(f64::from(l) - m) / all).collect();
            let total = if norm_topk_prob { sum(p.iter().copied()) } else { 1.0 };
            p.into_iter().map(|p| p / total).collect()
        }
        Scoring::Probabilities => {
            let total = sum(chosen().map(f64::from));
            chosen().map(|p| f64::from(p) / total).collect()
        }
        Scoring::SoftmaxOfChosen => {
            let m = largest(&mut chosen());
            let total = sum(chosen().map(|l| libm::exp(f64::from(l) - m)));
            chosen().map(|l| libm::exp(f64::from(l) - m) / total).collect()
        }
        Scoring::Sigmoid { norm_topk_prob, routed_scaling_factor, .. } => {
            let total = if norm_topk_prob { sum(chosen().map(sigmoid)) + 1e-20 } else { 1.0 };
            chosen().map(|l| sigmoid(l) / total * routed_scaling_factor).collect()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use approx::assert_relative_eq;
    use ndarray::{Array, array};
    use proptest::prelude::*;

    fn tensor<D: ndarray::Dimension>(x: Array<f32, D>) -> Tensor {
        x.into_dyn().into_shared()
    }

    fn row(x: &Array2<f64>) -> &[f64] {
        x.as_slice().unwrap()
    }

    fn router(num_experts: usize, num_experts_per_tok: usize, scoring: Scoring) -> Router {
        Router { num_experts, num_experts_per_tok, scoring }
    }

    const GROUPED: Scoring =
        Scoring::Sigmoid { n_group: 2, topk_group: 1, norm_topk_prob: true, routed_scaling_factor: 3.0 };

    // Logits ln 1, ln 4, ln 2, ln 3: probabilities 0.1, 0.4, 0.2, 0.3. The two largest are experts 1 and 3,
    // 0.4 and 0.3, or 4/7 and 3/7 of their sum.
    #[test]
    fn softmax_before_and_after_the_choice() {
        let logits = tensor(array![[1f32.ln(), 4f32.ln(), 2f32.ln(), 3f32.ln()]]);
        let weights = |scoring| {
            let router = router(4, 2, scoring);
            let index = router_index(&logits, &router, None);
            assert_eq!(index, array![[1.0, 3.0]]);
            router_weights(&logits, &tensor(index.mapv(|v| v as f32)), &router)
        };
        let plain = weights(Scoring::Softmax { norm_topk_prob: false });
        assert_relative_eq!(row(&plain), &[0.4, 0.3][..], max_relative = 1e-6);
        let renormalised = weights(Scoring::Softmax { norm_topk_prob: true });
        assert_relative_eq!(row(&renormalised), &[4.0 / 7.0, 3.0 / 7.0][..], max_relative = 1e-6);
        let chosen = weights(Scoring::SoftmaxOfChosen);
        assert_relative_eq!(row(&chosen), row(&renormalised), max_relative = 1e-12);
    }

    // The router's output is probabilities already: 0.5 and 0.3 of their sum 0.8 are 5/8 and 3/8.
    #[test]
    fn probabilities_are_divided_by_those_of_the_chosen() {
        let probabilities = tensor(array![[0.3, 0.15, 0.5, 0.05]]);
        let router = router(4, 2, Scoring::Probabilities);
        let index = router_index(&probabilities, &router, None);
        assert_eq!(index, array![[2.0, 0.0]]);
        let weights = router_weights(&probabilities, &tensor(index.mapv(|v| v as f32)), &router);
        assert_relative_eq!(row(&weights), &[0.625, 0.375][..], max_relative = 1e-6);
    }

    // σ(0) = 1/2 and σ(ln 3) = 3/4, σ(-ln 3) = 1/4. Scores of choice, bias added:
    //   group 0: 3/4, 1/4 + 0.1           two largest: 1.1
    //   group 1: 1/2 + 0.2, 1/2           two largest: 1.2
    // Group 1 wins, though the best single expert is in group 0. Weights have no bias: 1/2 each, over
    // their sum, times 3.
    #[test]
    fn groups_compete_with_their_two_best_and_the_bias_only_chooses() {
        let logits = tensor(array![[3f32.ln(), -(3f32.ln()), 0.0, 0.0]]);
        let router = router(4, 2, GROUPED);
        let index = router_index(&logits, &router, Some(&[0.0, 0.1, 0.2, 0.0]));
        assert_eq!(index, array![[2.0, 3.0]]);
        let weights = router_weights(&logits, &tensor(index.mapv(|v| v as f32)), &router);
        assert_relative_eq!(row(&weights), &[1.5, 1.5][..], max_relative = 1e-6);
    }

    // σ(ln 3) = 3/4, σ(-ln 3) = 1/4, σ(0) = 1/2: experts 0 and 2, with 3/4 and 1/2 of their sum 5/4, times 3: 1.8 and 1.2.
    #[test]
    fn sigmoid_weights_are_shares() {
        let logits = tensor(array![[3f32.ln(), -(3f32.ln()), 0.0, -9.0]]);
        let scoring =
            Scoring::Sigmoid { n_group: 1, topk_group: 1, norm_topk_prob: true, routed_scaling_factor: 3.0 };
        let router = router(4, 2, scoring);
        let index = router_index(&logits, &router, None);
        assert_eq!(index, array![[0.0, 2.0]]);
        let weights = router_weights(&logits, &tensor(index.mapv(|v| v as f32)), &router);
        assert_relative_eq!(row(&weights), &[1.8, 1.2][..], max_relative = 1e-6);
    }

    #[test]
    fn of_equal_scores_the_lower_id_wins() {
        let router = router(4, 2, Scoring::SoftmaxOfChosen);
        assert_eq!(router_index(&tensor(array![[1.0, 2.0, 1.0, 1.0]]), &router, None), array![[1.0, 0.0]]);
    }

    proptest! {
        // Weights that are renormalised sum to the scaling factor, whichever experts were chosen.
        #[test]
        fn renormalised_weights_sum_up(logits in prop::collection::vec(-9.0f32..9.0, 8), k in 1usize..4) {
            let logits = tensor(Array::from_shape_vec((1, 8), logits).unwrap());
            for (scoring, total) in [(Scoring::Softmax { norm_topk_prob: true }, 1.0), (GROUPED, 3.0)] {
                let router = router(8, k, scoring);
                let index = router_index(&logits, &router, None);
                let mut ids: Vec<usize> = index.iter().map(|&e| e as usize).collect();
                ids.sort_unstable();
                ids.dedup();
                prop_assert_eq!(ids.len(), k);
                let weights = router_weights(&logits, &tensor(index.mapv(|v| v as f32)), &router);
                prop_assert!((weights.sum() - total).abs() < 1e-12);
            }
        }
    }
}
