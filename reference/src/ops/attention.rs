//! Attention in three ops, each with a site of its own: scores, probabilities, context.

use super::{Tensor, rows};
use crate::products;
use crate::sum::sum;
use ndarray::{Array2, Array3, ArrayView3, ArrayViewMut2, Axis};
use rayon::prelude::*;

/// How far back, or forward, a token may look.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reach {
    /// Every key up to and including the token's own.
    Causal,
    /// The last `W` keys, the token's own included: `k <= q` and `k > q - W`.
    Window(usize),
    /// Every key, later ones too: the rows of a draft's block see each other both ways.
    All,
    /// The keys nearer than `W`, before and behind: `|q - k| < W`.
    TwoSided(usize),
}

/// Which keys a token sees. Row t of the pass stands at position `first + t`; key j at position j.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mask {
    /// Position of the first token of the pass.
    pub first: usize,
    /// The rule.
    pub reach: Reach,
}

impl Mask {
    /// The rule of a layer: causal, or a window where it has one.
    pub fn causal(first: usize, window: Option<usize>) -> Mask {
        Mask { first, reach: window.map_or(Reach::Causal, Reach::Window) }
    }

    /// Whether row `t` of the pass sees key `j`.
    pub fn sees(&self, t: usize, j: usize) -> bool {
        let q = self.first + t;
        match self.reach {
            Reach::Causal => j <= q,
            Reach::Window(width) => j <= q && j + width > q,
            Reach::All => true,
            Reach::TwoSided(width) => j.abs_diff(q) < width,
        }
    }
}

fn heads(x: &Tensor) -> ArrayView3<'_, f32> {
    x.view().into_dimensionality().expect("attention: operands have three axes")
}

/// Scaled products of queries and keys, capped where the model caps them.
///
/// ```text
/// s[h, t, j] = scale · Σ_d q[t, h, d] · k[j, ⌊h / g⌋, d]      g = heads / kv_heads
/// s ← softcap · tanh(s / softcap)                              where there is a cap
/// ```
///
/// `q` is `[tokens, heads · head_dim]` in any shape, `k` is `[keys, kv_heads, head_dim]`, the result is
/// `[heads, tokens, keys]`. Consecutive query heads share a key head. The cap comes before the mask.
pub fn attn_scores(q: &Tensor, k: &Tensor, scale: f64, softcap: Option<f64>) -> Array3<f64> {
    let (q, k) = (rows(q), heads(k));
    let (keys, kv_heads, head_dim) = k.dim();
    let (tokens, all) = q.dim();
    assert_eq!(all % head_dim, 0, "attn_scores: row length of q against head_dim of k");
    let num_heads = all / head_dim;
    assert_eq!(num_heads % kv_heads, 0, "attn_scores: heads against kv_heads");
    let group = num_heads / kv_heads;
    let k = k.as_slice().expect("attn_scores: keys in order");
    let mut s = Array3::zeros((num_heads, tokens, keys));
    s.axis_iter_mut(Axis(0)).into_par_iter().enumerate().for_each(|(h, mut s)| {
        let k = &k[h / group * head_dim..];
        for (q, mut s) in q.rows().into_iter().zip(s.rows_mut()) {
            let q: Vec<f64> = q.iter().skip(h * head_dim).take(head_dim).map(|&q| f64::from(q)).collect();
            let scores = s.as_slice_mut().expect("attn_scores: rows in order");
            products::dots(&q, k, kv_heads * head_dim, scores);
            for score in scores {
                *score *= scale;
                *score = softcap.map_or(*score, |cap| cap * libm::tanh(*score / cap));
            }
        }
    });
    s
}

/// Softmax of the scores that the mask lets through; 0 where it does not.
///
/// ```text
/// p[h, t, j] = e^(s[h,t,j] - m) / (Σ_seen e^(s[h,t,j'] - m) + e^(sink[h] - m))
/// ```
///
/// `m` is the largest seen score (or the sink), `sinks` one logit a head that takes part in the
/// denominator only, so that rows may sum to less than 1. A row that sees nothing is all 0.
pub fn attn_probs(scores: &Tensor, mask: Mask, sinks: Option<&[f32]>) -> Array3<f64> {
    let scores = heads(scores);
    let (num_heads, tokens, keys) = scores.dim();
    if let Some(sinks) = sinks {
        assert_eq!(sinks.len(), num_heads, "attn_probs: sinks against heads");
    }
    let mut p = Array3::zeros((num_heads, tokens, keys));
    let of_head = |(h, mut p): (usize, ArrayViewMut2<f64>)| {
        let sink = sinks.map(|s| f64::from(s[h]));
        for t in 0..tokens {
            let seen = || (0..keys).filter(|&j| mask.sees(t, j));
            let score = |j: usize| f64::from(scores[[h, t, j]]);
            let largest = seen().map(score).chain(sink).fold(f64::NEG_INFINITY, f64::max);
            for j in seen() {
                p[[t, j]] = libm::exp(score(j) - largest);
            }
            let total = sum(seen().map(|j| p[[t, j]]).chain(sink.map(|s| libm::exp(s - largest))));
            for j in seen() {
                p[[t, j]] /= total;
            }
        }
    };
    // Few probabilities are faster made than a thread is woken.
    if scores.len() < 1 << 13 {
        p.axis_iter_mut(Axis(0)).enumerate().for_each(of_head);
    } else {
        p.axis_iter_mut(Axis(0)).into_par_iter().enumerate().for_each(of_head);
    }
    p
}

/// Values weighted by the probabilities.
///
/// ```text
/// c[t, h·d + i] = Σ_j p[h, t, j] · v[j, ⌊h / g⌋, i]
/// ```
///
/// `probs` is `[heads, tokens, keys]`, `v` is `[keys, kv_heads, d]`, the result `[tokens, heads · d]`.
pub fn attn_ctx(probs: &Tensor, v: &Tensor) -> Array2<f64> {
    let (num_heads, tokens, keys) = heads(probs).dim();
    let (values, kv_heads, dim) = heads(v).dim();
    assert_eq!(keys, values, "attn_ctx: keys of the probabilities against rows of v");
    assert_eq!(num_heads % kv_heads, 0, "attn_ctx: heads against kv_heads");
    let group = num_heads / kv_heads;
    let (probs, v) = (heads(probs), rows(v));
    let mut ctx = Array2::<f64>::zeros((tokens, num_heads * dim));
    ctx.axis_iter_mut(Axis(0)).into_par_iter().enumerate().for_each(|(t, mut ctx)| {
        let ctx = ctx.as_slice_mut().expect("attn_ctx: rows in order");
        for h in 0..num_heads {
            let ctx = &mut ctx[h * dim..][..dim];
            // For every i the sum still runs over j from 0 upwards.
            for j in 0..keys {
                let p = f64::from(probs[[h, t, j]]);
                let v = v.row(j);
                let v = &v.to_slice().expect("attn_ctx: rows in order")[h / group * dim..][..dim];
                products::add_scaled(ctx, p, v);
            }
        }
    });
    ctx
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

    // Four query heads over two key heads: heads 0 and 1 read key head 0 (value 1), heads 2 and 3 read
    // key head 1 (value 10). Taken by h mod 2 the scores would be 1, 20, 3, 40.
    #[test]
    fn consecutive_heads_share_a_key() {
        let q = tensor(array![[[1.0], [2.0], [3.0], [4.0]]]);
        let k = tensor(array![[[1.0], [10.0]]]);
        assert_eq!(attn_scores(&q, &k, 1.0, None).into_raw_vec_and_offset().0, [1.0, 2.0, 30.0, 40.0]);
        let p = tensor(array![[[1.0]], [[1.0]], [[1.0]], [[1.0]]]);
        let v = tensor(array![[[5.0], [7.0]]]);
        assert_eq!(attn_ctx(&p, &v), array![[5.0, 5.0, 7.0, 7.0]]);
    }

    // Two heads of two values, each with its own key head: 1·10 + 2·1 = 12 and 3·100 + 4·1 = 304, and the values
    // stand side by side.
    #[test]
    fn heads_stand_one_behind_the_other() {
        let p = tensor(array![[[1.0]], [[1.0]]]);
        let v = tensor(array![[[5.0, 6.0], [7.0, 8.0]]]);
        assert_eq!(attn_ctx(&p, &v), array![[5.0, 6.0, 7.0, 8.0]]);
        let (q, k) = (tensor(array![[[1.0, 2.0], [3.0, 4.0]]]), tensor(array![[[10.0, 1.0], [100.0, 1.0]]]));
        assert_eq!(attn_scores(&q, &k, 1.0, None), array![[[12.0]], [[304.0]]]);
    }

    // More keys than are multiplied side by side: key j is j, so q = 2 scores 2j.
    #[test]
    fn every_key_has_its_own_score() {
        let keys = Array::from_shape_fn((11, 1, 1), |(j, _, _)| j as f32);
        let scores = attn_scores(&tensor(array![[[2.0]]]), &tensor(keys), 1.0, None);
        assert_eq!(scores.into_raw_vec_and_offset().0, (0..11).map(|j| f64::from(2 * j)).collect::<Vec<_>>());
    }

    // 2 · tanh(6/2 / 2): the scale comes first, then 2·tanh(3/2) = 1.810296.
    #[test]
    fn scale_then_cap() {
        let (q, k) = (tensor(array![[[2.0]]]), tensor(array![[[3.0]]]));
        assert_relative_eq!(attn_scores(&q, &k, 0.5, Some(2.0))[[0, 0, 0]], 1.810_296_5, max_relative = 1e-6);
    }

    // Position 2 with a window of 2 sees keys 1 and 2: e^0 and e^ln3 of them make 1/4 and 3/4.
    #[test]
    fn a_window_counts_the_token_itself() {
        let scores = tensor(array![[[9.0, 0.0, 3f32.ln(), 8.0]]]);
        let mask = Mask { first: 2, reach: Reach::Window(2) };
        let p = attn_probs(&scores, mask, None);
        assert_eq!(p[[0, 0, 0]], 0.0);
        assert_relative_eq!(p[[0, 0, 1]], 0.25, max_relative = 1e-6);
        assert_relative_eq!(p[[0, 0, 2]], 0.75, max_relative = 1e-6);
        assert_eq!(p[[0, 0, 3]], 0.0);
    }

    // Position 2 of 0 to 4 with |q - k| < 2 sees keys 1, 2 and 3; with every key in reach, all five.
    #[test]
    fn both_ways() {
        let sees = |reach| (0..5).map(|j| Mask { first: 2, reach }.sees(0, j)).collect::<Vec<_>>();
        assert_eq!(sees(Reach::TwoSided(2)), [false, true, true, true, false]);
        assert_eq!(sees(Reach::All), [true; 5]);
    }

    // Keys e^0 + e^0 with a sink of e^ln2: 1/4 each, and the row sums to 1/2.
    #[test]
    fn a_sink_takes_its_share_and_is_dropped() {
        let scores = tensor(array![[[0.0, 0.0]]]);
        let p = attn_probs(&scores, Mask::causal(1, None), Some(&[2f32.ln()]));
        assert_relative_eq!(p[[0, 0, 0]], 0.25, max_relative = 1e-6);
        assert_relative_eq!(p.sum(), 0.5, max_relative = 1e-6);
    }

    // Without the largest score taken off, e^1000 would be infinite.
    #[test]
    fn large_scores_stay_finite() {
        let p = attn_probs(&tensor(array![[[1000.0, 1000.0]]]), Mask::causal(1, None), None);
        assert_eq!(p, array![[[0.5, 0.5]]]);
    }

    proptest! {
        // Sharing a key head is the same as repeating it for every query head of its group.
        #[test]
        fn grouped_heads_are_repeated_heads(
            q in prop::collection::vec(-2.0f32..2.0, 2 * 6 * 3),
            k in prop::collection::vec(-2.0f32..2.0, 4 * 2 * 3),
        ) {
            let q = tensor(Array::from_shape_vec((2, 6, 3), q).unwrap());
            let k = Array::from_shape_vec((4, 2, 3), k).unwrap();
            let repeated = Array::from_shape_fn((4, 6, 3), |(j, h, d)| k[[j, h / 3, d]]);
            let (k, repeated) = (tensor(k), tensor(repeated));
            prop_assert_eq!(attn_scores(&q, &k, 0.7, None), attn_scores(&q, &repeated, 0.7, None));
            let p = attn_probs(&tensor(attn_scores(&q, &k, 0.7, None).mapv(|v| v as f32)), Mask::causal(2, None), None);
            let p = tensor(p.mapv(|v| v as f32));
            prop_assert_eq!(attn_ctx(&p, &k), attn_ctx(&p, &repeated));
        }

        // A window at least as long as the sequence is full attention.
        #[test]
        fn a_long_window_is_full_attention(scores in prop::collection::vec(-5.0f32..5.0, 3 * 5), extra in 0usize..3) {
            let scores = tensor(Array::from_shape_vec((1, 3, 5), scores).unwrap());
            let full = attn_probs(&scores, Mask::causal(2, None), None);
            prop_assert_eq!(attn_probs(&scores, Mask::causal(2, Some(5 + extra)), None), full.clone());
            prop_assert_ne!(attn_probs(&scores, Mask::causal(2, Some(4)), None), full);
        }
    }
}
