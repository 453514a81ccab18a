//! The clamped gated activation of gpt_oss.

use super::Tensor;
use ndarray::{ArrayD, Zip};

/// A swish gate with both operands clamped, and one added to the up half.
///
/// ```text
/// g = min(gate, limit)            u = max(-limit, min(up, limit))
/// y = (u + 1) · g · σ(alpha · g)  σ(x) = 1 / (1 + e^-x)
/// ```
///
/// Element by element; the gate is not clamped from below. Source: the gpt-oss model card and its
/// published reference code.
pub fn clamped_swiglu(gate: &Tensor, up: &Tensor, alpha: f64, limit: f64) -> ArrayD<f64> {
    assert_eq!(gate.shape(), up.shape(), "clamped_swiglu: shape of gate against shape of up");
    let mut y = ArrayD::zeros(gate.raw_dim());
    Zip::from(&mut y).and(gate).and(up).for_each(|y, &gate, &up| {
        // Comparisons, not min and max: a value that is not a number stays one.
        let gate = if f64::from(gate) > limit { limit } else { f64::from(gate) };
        let up = f64::from(up).clamp(-limit, limit);
        *y = (up + 1.0) * gate / (1.0 + libm::exp(-alpha * gate));
    });
    y
}

#[cfg(test)]
mod tests {
    use super::*;
    use approx::assert_relative_eq;
    use ndarray::array;

    fn at(gate: f32, up: f32) -> f64 {
        let one = |v: f32| array![[v]].into_dyn().into_shared();
        clamped_swiglu(&one(gate), &one(up), 2.0, 1.5)[[0, 0]]
    }

    // gate 1, up 0.5: 1.5 · 1 / (1 + e^-2) = 1.5 · 0.880797078 = 1.321195617
    #[test]
    fn inside_the_limits() {
        assert_relative_eq!(at(1.0, 0.5), 1.321_195_617, max_relative = 1e-9);
    }

    // gate 9 counts as 1.5: 1.5 / (1 + e^-3) = 1.428861190. up 9 makes 2.5 of it, up -9 makes -0.5.
    #[test]
    fn the_gate_is_cut_above_and_the_up_on_both_sides() {
        assert_relative_eq!(at(9.0, 9.0), 2.5 * 1.428_861_190, max_relative = 1e-9);
        assert_relative_eq!(at(9.0, -9.0), -0.5 * 1.428_861_190, max_relative = 1e-9);
        // gate -4 is not cut: -4 / (1 + e^8) = -0.00134140052. Cut at -1.5 it would be -0.0711389.
        assert_relative_eq!(at(-4.0, 0.0), -0.001_341_400_5, max_relative = 1e-7);
    }
}
