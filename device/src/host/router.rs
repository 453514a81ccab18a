//! Choosing experts, and weighing the chosen.

use super::math::{exp, sigmoid};
use super::{GRAIN, dot};
use rayon::prelude::*;
use spec::families::moe::{Router, Scoring};

/// `y[r, o] = Σ_i x[r, i] · w[o, i]` in f32, for the small products of the host side.
pub fn linear(x: &[f32], w: &[f32], inner: usize) -> Vec<f32> {
    let out = w.len() / inner;
    let mut y = vec![0.0; x.len() / inner * out];
    let one = |(y, x): (&mut [f32], &[f32])| {
        y.iter_mut().zip(w.chunks_exact(inner)).for_each(|(y, w)| *y = dot(x, w));
    };
    if x.len() * out < GRAIN * 16 {
        y.chunks_exact_mut(out).zip(x.chunks_exact(inner)).for_each(one);
    } else {
        y.par_chunks_exact_mut(out).zip(x.par_chunks_exact(inner)).for_each(one);
    }
    y
}

/// Ids and weights of the experts that one row is sent to, the best first; equal scores go to the lower id.
///
/// ```text
/// softmax             chosen by logit      e^l / Σ_all e^l, over the chosen ones' sum where renormalised
/// softmax of chosen   chosen by logit      e^l / Σ_chosen e^l
/// probabilities       chosen by value      the value over the chosen ones' sum
/// sigmoid             chosen by σ(l) + b   σ(l), over the chosen ones' sum + 1e-20 where renormalised,
///                     within the groups    times the scaling factor
///                     whose two best scores sum highest
/// ```
///
/// `logits` has one value an expert, and so has `b`. Sources: arXiv 2101.03961, arXiv 2412.19437 section 2.1.2.
pub fn route(logits: &[f32], b: Option<&[f32]>, router: &Router) -> (Vec<usize>, Vec<f32>) {
    let count = router.num_experts_per_tok;
    match router.scoring {
        Scoring::Softmax { norm_topk_prob } => {
            let chosen = best(logits, count);
            let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            let all: f32 = logits.iter().map(|l| exp(l - max)).sum();
            let mut weights: Vec<f32> = chosen.iter().map(|&e| exp(logits[e] - max) / all).collect();
            if norm_topk_prob {
                over_sum(&mut weights, 0.0);
            }
            (chosen, weights)
        }
        Scoring::SoftmaxOfChosen => {
            let chosen = best(logits, count);
            let max = logits[chosen[0]];
            let mut weights: Vec<f32> = chosen.iter().map(|&e| exp(logits[e] - max)).collect();
            over_sum(&mut weights, 0.0);
            (chosen, weights)
        }
        Scoring::Probabilities => {
            let chosen = best(logits, count);
            let mut weights: Vec<f32> = chosen.iter().map(|&e| logits[e]).collect();
            over_sum(&mut weights, 0.0);
            (chosen, weights)
        }
        Scoring::Sigmoid { n_group, topk_group, norm_topk_prob, routed_scaling_factor } => {
            let scores: Vec<f32> = logits.iter().map(|l| sigmoid(*l)).collect();
            let mut choice: Vec<f32> = match b {
                Some(b) => scores.iter().zip(b).map(|(s, b)| s + b).collect(),
                None => scores.clone(),
            };
            let width = choice.len() / n_group;
            let groups: Vec<f32> =
                choice.chunks_exact(width).map(|g| best(g, 2).iter().map(|&e| g[e]).sum()).collect();
            let open = best(&groups, topk_group);
            for (group, choice) in choice.chunks_exact_mut(width).enumerate() {
                if !open.contains(&group) {
                    choice.fill(f32::NEG_INFINITY);
                }
            }
            let chosen = best(&choice, count);
            let mut weights: Vec<f32> = chosen.iter().map(|&e| scores[e]).collect();
            if norm_topk_prob {
                over_sum(&mut weights, 1e-20);
            }
            weights.iter_mut().for_each(|w| *w *= routed_scaling_factor as f32);
            (chosen, weights)
        }
    }
}

/// `e^(l − max) / Σ e^(l − max)` over each row of `width` logits.
pub fn softmax(logits: &mut [f32], width: usize) {
    for row in logits.chunks_exact_mut(width) {
        let max = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        row.iter_mut().for_each(|l| *l = exp(*l - max));
        over_sum(row, 0.0);
    }
}

fn over_sum(weights: &mut [f32], tiny: f32) {
    let sum = weights.iter().sum::<f32>() + tiny;
    weights.iter_mut().for_each(|w| *w /= sum);
}

/// Where the `count` largest values stand, largest first; of equal ones the lower place.
fn best(values: &[f32], count: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..values.len()).collect();
    order.sort_by(|&a, &b| values[b].total_cmp(&values[a]).then(a.cmp(&b)));
    order.truncate(count);
    order
}

#[cfg(test)]
mod tests {
    use super::*;

    fn router(num_experts: usize, num_experts_per_tok: usize, scoring: Scoring) -> Router {
        Router { num_experts, num_experts_per_tok, scoring }
    }

    fn close(found: &[f32], expected: &[f32]) {
        assert_eq!(found.len(), expected.len());
        assert!(found.iter().zip(expected).all(|(f, e)| (f - e).abs() < 1e-6), "{found:?}");
    }

    // e^logits are 1, 2, 5, 2: the sum is 10. Experts 1 and 3 are equal, so 1 is chosen.
    #[test]
    fn softmax_by_hand() {
        let logits = [1.0f32, 2.0, 5.0, 2.0].map(f32::ln);
        let kept = Scoring::Softmax { norm_topk_prob: false };
        let (chosen, weights) = route(&logits, None, &router(4, 2, kept));
        assert_eq!(chosen, [2, 1]);
        close(&weights, &[0.5, 0.2]);
        let divided = Scoring::Softmax { norm_topk_prob: true };
        close(&route(&logits, None, &router(4, 2, divided)).1, &[5.0 / 7.0, 2.0 / 7.0]);
        close(&route(&logits, None, &router(4, 2, Scoring::SoftmaxOfChosen)).1, &[5.0 / 7.0, 2.0 / 7.0]);
        let mut all = logits;
        softmax(&mut all, 4);
        close(&all, &[0.1, 0.2, 0.5, 0.2]);
        close(&route(&all, None, &router(4, 2, Scoring::Probabilities)).1, &[5.0 / 7.0, 2.0 / 7.0]);
    }

    // σ of the logits: .5 .8 | .6 .4. The bias lifts expert 3 to 1.4, so its group (2.0) beats the first (1.3);
    // within it 3 is first. Weights have no bias: .4 and .6 of 1.0, times 2.5.
    #[test]
    fn the_bias_chooses_and_does_not_weigh() {
        let logit = |p: f32| (p / (1.0 - p)).ln();
        let logits = [0.5, 0.8, 0.6, 0.4].map(logit);
        let bias = [0.0, 0.0, 0.0, 1.0];
        let scoring =
            Scoring::Sigmoid { n_group: 2, topk_group: 1, norm_topk_prob: true, routed_scaling_factor: 2.5 };
        let (chosen, weights) = route(&logits, Some(&bias), &router(4, 2, scoring));
        assert_eq!(chosen, [3, 2]);
        close(&weights, &[1.0, 1.5]);
        // Without the bias the first group (1.3) beats the second (1.0).
        assert_eq!(route(&logits, None, &router(4, 2, scoring)).0, [1, 0]);
    }

    #[test]
    fn linear_reads_rows() {
        assert_eq!(linear(&[1.0, 10.0], &[1.0, 2.0, 3.0, 4.0], 2), [21.0, 43.0]);
    }
}
