//! What honest f32 code gives for the gated delta rule, however it orders or chunks the recurrence.

use super::{Bounded, U};
use crate::contract::Host;
use ndarray::{ArrayD, ArrayView2};
use reference::Tensor;
use reference::ops::Delta;

/// Largest error of what the queries read, and of the state left behind.
///
/// One step is `S ← e^g (I - β k kᵀ) S + β k vᵀ` for the column of S that belongs to a value. Its matrix
/// stretches by at most `f = e^g · max(1, β|k|² - 1)`, so sizes `n` and errors `e` of a column follow
///
/// ```text
/// n ← f · n + β |k| |v|
/// e ← f · e + u · c · (n_before + n + β |k| |v|)      c = key_dim + 8 + 2 · ulps roundings a step
/// ```
///
/// and what a query reads is off by at most `|q| · (e + u · key_dim · n)`.
pub fn bounds(delta: &Delta<Bounded>, host: Host) -> (ArrayD<f64>, ArrayD<f64>) {
    let (tokens, key_heads, key_dim) = three(delta.k);
    let (_, heads, value_dim) = three(delta.v);
    let lengths = |x: &Bounded| length_of_rows(&x.value, tokens * key_heads, key_dim);
    let (q, k) = (lengths(delta.q), lengths(delta.k));
    let flat = |x: &Bounded| x.value.iter().map(|&v| f64::from(v)).collect::<Vec<f64>>();
    let (v, g, beta) = (flat(delta.v), flat(delta.g), flat(delta.beta));
    let before = delta.state.map(flat);
    let roundings = key_dim as f64 + 8.0 + 2.0 * host.ulps;

    let mut core = ArrayD::zeros(ndarray::IxDyn(&[tokens, heads, value_dim]));
    let mut state = ArrayD::zeros(ndarray::IxDyn(&[heads, key_dim, value_dim]));
    for h in 0..heads {
        for j in 0..value_dim {
            let column = before.as_ref().map(|s| (0..key_dim).map(|i| s[(h * key_dim + i) * value_dim + j]));
            let (mut size, mut error) = (column.map_or(0.0, |c| c.map(|s| s * s).sum::<f64>().sqrt()), 0.0);
            for t in 0..tokens {
                let key = t * key_heads + h / (heads / key_heads);
                let (decay, strength) = (g[t * heads + h].exp(), beta[t * heads + h]);
                let stretch = decay * (strength * k[key] * k[key] - 1.0).max(1.0);
                let written = strength * k[key] * v[(t * heads + h) * value_dim + j].abs();
                let grown = stretch * size + written;
                error = stretch * error + U * roundings * (size + grown + written);
                size = grown;
                core[[t, h, j]] = q[key] * (error + U * key_dim as f64 * size);
            }
            for i in 0..key_dim {
                state[[h, i, j]] = error;
            }
        }
    }
    (core, state)
}

fn three(x: &Bounded) -> (usize, usize, usize) {
    let shape = x.value.shape();
    (shape[0], shape[1], shape[2])
}

fn length_of_rows(x: &Tensor, rows: usize, width: usize) -> Vec<f64> {
    let rows: ArrayView2<f32> = x.view().into_shape_with_order((rows, width)).expect("stored in order");
    rows.rows()
        .into_iter()
        .map(|r| r.iter().map(|&v| f64::from(v) * f64::from(v)).sum::<f64>().sqrt())
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use ndarray::{Array, IxDyn};
    use reference::ops::{gated_delta_rule_chunked, gdn_core};

    // The recurrence holds its state in f32 between tokens, the chunked form in f64: both are honest, and
    // 40 tokens of slow decay apart they still differ by less than the bound, but not by nothing.
    #[test]
    fn two_honest_forms_stay_within_the_bound() {
        let mut random = fixtures::random::SplitMix64::new(7);
        let mut draw = |shape: &[usize], low: f64, high: f64| {
            let value = || (low + (high - low) * random.uniform()) as f32;
            let value = Array::from_shape_simple_fn(IxDyn(shape), value);
            Bounded::exact(value.into_shared())
        };
        let (q, k, v) =
            (draw(&[40, 2, 3], -0.5, 0.5), draw(&[40, 2, 3], -0.5, 0.5), draw(&[40, 4, 5], -2.0, 2.0));
        let (g, beta) = (draw(&[40, 4], -0.1, 0.0), draw(&[40, 4], 0.0, 1.0));
        let delta = Delta { q: &q, k: &k, v: &v, g: &g, beta: &beta, state: None };
        let values: Vec<Tensor> = delta.operands().into_iter().map(|o| o.value.clone()).collect();
        let plain = delta.with(&values);
        let (bound, _) = bounds(&delta, Host { ulps: 1.0 });
        let (chunked, step) = (gated_delta_rule_chunked(&plain, 16).0, gdn_core(&plain));
        let mut largest = 0f64;
        for ((chunked, step), bound) in chunked.iter().zip(&step).zip(&bound) {
            largest = largest.max((chunked - step).abs() / bound);
        }
        assert!(largest > 0.0 && largest < 1.0, "{largest}");
    }
}
