//! The gate of a feed-forward, and additions to the residual stream.

use super::GRAIN;
use super::math::{gelu_tanh, sigmoid, silu};
use super::wide::{kernel, wide};
use rayon::prelude::*;
use spec::families::Activation;

/// `y[r, i] = act(fused[r, i]) · fused[r, inner + i]`
///
/// `fused` is `[rows, 2 · inner]` with the gate's columns first; the result is `[rows, inner]`.
pub fn gate_times_up(fused: &[f32], inner: usize, activation: Activation) -> Vec<f32> {
    let mut y = vec![0.0; fused.len() / 2];
    let one = |(y, fused): (&mut [f32], &[f32])| {
        let (gate, up) = fused.split_at(inner);
        gated(kernel(), activation, gate, up, y);
    };
    if fused.len() < GRAIN {
        y.chunks_exact_mut(inner).zip(fused.chunks_exact(2 * inner)).for_each(one);
    } else {
        y.par_chunks_exact_mut(inner).zip(fused.par_chunks_exact(2 * inner)).for_each(one);
    }
    y
}

wide! {
    /// `y[i] = act(gate[i]) · up[i]`
    fn gated(activation: Activation, gate: &[f32], up: &[f32], y: &mut [f32]) {
        match activation {
            Activation::Silu => y.iter_mut().zip(gate).zip(up).for_each(|((y, g), u)| *y = silu(*g) * u),
            Activation::GeluTanh => {
                y.iter_mut().zip(gate).zip(up).for_each(|((y, g), u)| *y = gelu_tanh(*g) * u);
            }
        }
    }
}

/// `x[i] ← act(x[i]) · by[i]`
pub fn gate(x: &mut [f32], by: &[f32], activation: Activation) {
    debug_assert_eq!(x.len(), by.len(), "gate: lengths");
    match activation {
        Activation::Silu => x.iter_mut().zip(by).for_each(|(x, by)| *x = silu(*x) * by),
        Activation::GeluTanh => x.iter_mut().zip(by).for_each(|(x, by)| *x = gelu_tanh(*x) * by),
    }
}

/// `y = (u + 1) · g · σ(alpha · g)` with `g = min(gate, limit)` and `u` the up held within `±limit`.
///
/// `fused` is `[rows, 2 · inner]` with the gate's columns first; the result is `[rows, inner]`.
pub fn clamped_swiglu(fused: &[f32], inner: usize, alpha: f32, limit: f32) -> Vec<f32> {
    let mut y = Vec::with_capacity(fused.len() / 2);
    for row in fused.chunks_exact(2 * inner) {
        y.extend(row[..inner].iter().zip(&row[inner..]).map(|(gate, up)| {
            let gate = gate.min(limit);
            (up.clamp(-limit, limit) + 1.0) * (gate * sigmoid(alpha * gate))
        }));
    }
    y
}

/// `x[i] += branch[i]`
pub fn add(x: &mut [f32], branch: &[f32]) {
    debug_assert_eq!(x.len(), branch.len(), "add: lengths");
    x.iter_mut().zip(branch).for_each(|(x, b)| *x += b);
}

/// `x[i] += factor · branch[i]`
pub fn add_scaled(x: &mut [f32], branch: &[f32], factor: f32) {
    debug_assert_eq!(x.len(), branch.len(), "add_scaled: lengths");
    x.iter_mut().zip(branch).for_each(|(x, b)| *x += factor * b);
}

/// `x[i] *= factor`
pub fn scale(x: &mut [f32], factor: f32) {
    x.iter_mut().for_each(|x| *x *= factor);
}

#[cfg(test)]
mod tests {
    use super::*;

    // silu(1) = 0.731059, silu(2) = 1.761594: gates 1, 2 with ups 10, 100.
    #[test]
    fn the_gate_comes_first() {
        let y = gate_times_up(&[1.0, 2.0, 10.0, 100.0], 2, Activation::Silu);
        assert!((y[0] - 7.310_59).abs() < 1e-4 && (y[1] - 176.159_4).abs() < 1e-3, "{y:?}");
        // gelu_tanh(1) = 0.841192
        let y = gate_times_up(&[1.0, 3.0], 1, Activation::GeluTanh);
        assert!((y[0] - 2.523_576).abs() < 1e-5, "{y:?}");
    }

    // Gate 9 and up -9 are cut to 2 and -2: (-2 + 1) · 2 · σ(1 · 2) = -2 · 0.880797. Gate -3 is not cut:
    // (0.5 + 1) · -3 · σ(-3) = -4.5 · 0.047426.
    #[test]
    fn clamped_swiglu_by_hand() {
        let y = clamped_swiglu(&[9.0, -3.0, -9.0, 0.5], 2, 1.0, 2.0);
        assert!((y[0] + 1.761_594).abs() < 1e-5 && (y[1] + 0.213_416).abs() < 1e-5, "{y:?}");
    }
}
