//! The gated activation of a feed-forward.

use super::Tensor;
use ndarray::{ArrayD, Zip};
use spec::families::Activation;

/// `act(x)` in f64.
///
/// ```text
/// silu:       x · σ(x),  σ(x) = 1 / (1 + e^-x)
/// gelu_tanh:  0.5 · x · (1 + tanh(√(2/π) · (x + 0.044715 · x³)))
/// ```
///
/// Source: arXiv 1702.03118 (silu); arXiv 1606.08415 (gelu and its tanh form).
pub fn activate(x: f64, activation: Activation) -> f64 {
    match activation {
        Activation::Silu => x / (1.0 + libm::exp(-x)),
        Activation::GeluTanh => {
            let inner = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x * x * x);
            0.5 * x * (1.0 + libm::tanh(inner))
        }
    }
}

/// `y = act(gate) · up`, element by element; the input of the down projection.
///
/// Source: arXiv 2002.05202.
pub fn gated_act(gate: &Tensor, up: &Tensor, activation: Activation) -> ArrayD<f64> {
    assert_eq!(gate.shape(), up.shape(), "gated_act: shape of gate against shape of up");
    let mut y = ArrayD::zeros(gate.raw_dim());
    Zip::from(&mut y).and(gate).and(up).for_each(|y, &gate, &up| {
        *y = activate(f64::from(gate), activation) * f64::from(up);
    });
    y
}

#[cfg(test)]
mod tests {
    use super::*;
    use approx::assert_relative_eq;
    use ndarray::array;

    // silu(2) = 2 / (1 + e^-2) = 2 / 1.135335283 = 1.761594156; times 3 = 5.284782468.
    // With gate and up exchanged: silu(3) · 2 = 5.715445.
    #[test]
    fn the_gate_is_activated_and_not_the_up() {
        let (gate, up) =
            (array![[2.0f32]].into_dyn().into_shared(), array![[3.0f32]].into_dyn().into_shared());
        assert_relative_eq!(
            gated_act(&gate, &up, Activation::Silu)[[0, 0]],
            5.284_782_468,
            max_relative = 1e-9
        );
    }

    // The tanh form at 2.7: inner = 0.7978845608 · (2.7 + 0.044715 · 19.683) = 2.8565267,
    // tanh = 0.9934166, so 0.5 · 2.7 · 1.9934166 = 2.6911124. The erf form gives 2.6906392.
    #[test]
    fn gelu_is_the_tanh_form() {
        assert_relative_eq!(activate(2.7, Activation::GeluTanh), 2.691_112_4, max_relative = 1e-7);
    }

    #[test]
    fn large_gates_stay_finite() {
        assert_eq!(activate(-800.0, Activation::Silu), 0.0);
        assert_eq!(activate(800.0, Activation::Silu), 800.0);
        assert_eq!(activate(-100.0, Activation::GeluTanh), 0.0);
    }
}
