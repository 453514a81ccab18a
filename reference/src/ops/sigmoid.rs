//! The logistic function: by itself, and as a gate.

use super::{Tensor, rows};
use ndarray::{ArrayD, Zip};

/// `y = σ(x) = 1 / (1 + e^-x)`, element by element.
pub fn sigmoid(x: &Tensor) -> ArrayD<f64> {
    x.mapv(|v| logistic(f64::from(v)))
}

/// `x` let through by a gate.
///
/// ```text
/// y[t, i] = x[t, i] · σ(gate[t, i])
/// ```
///
/// `gate` holds as many values a row as `x`, or one for the whole row: `[tokens, 1]`. The result is
/// shaped like `x`.
///
/// Source: arXiv 2505.06708 (gated attention); the shared expert of Qwen's mixtures.
pub fn sigmoid_gate(x: &Tensor, gate: &Tensor) -> ArrayD<f64> {
    let (values, gates) = (rows(x), rows(gate));
    assert_eq!(values.nrows(), gates.nrows(), "sigmoid_gate: rows of x against rows of the gate");
    let gates =
        gates.broadcast(values.dim()).expect("sigmoid_gate: row length of x against that of the gate");
    let mut y = ndarray::Array2::zeros(values.dim());
    Zip::from(&mut y).and(values).and(gates).for_each(|y, &x, &gate| {
        *y = f64::from(x) * logistic(f64::from(gate));
    });
    y.into_shape_with_order(x.raw_dim()).expect("sigmoid_gate: shaped like x")
}

fn logistic(x: f64) -> f64 {
    1.0 / (1.0 + libm::exp(-x))
}

#[cfg(test)]
mod tests {
    use super::*;
    use approx::assert_relative_eq;
    use ndarray::array;

    // e^-ln3 = 1/3, so σ(ln3) = 3/4; and σ(-x) = 1 - σ(x).
    #[test]
    fn three_quarters() {
        let y = sigmoid(&array![[3f32.ln(), -(3f32.ln())], [1000.0, -1000.0]].into_dyn().into_shared());
        assert_relative_eq!(y[[0, 0]], 0.75, max_relative = 1e-7);
        assert_relative_eq!(y[[0, 1]], 0.25, max_relative = 1e-7);
        assert_eq!((y[[1, 0]], y[[1, 1]]), (1.0, 0.0));
    }

    // σ(0) = 1/2 lets half through. Through silu the gate would be 0.
    #[test]
    fn a_gate_for_every_value_or_for_the_row() {
        let x = array![[2.0f32, 4.0], [6.0, 8.0]].into_dyn().into_shared();
        let each = array![[0.0f32, 1000.0], [-1000.0, 0.0]].into_dyn().into_shared();
        assert_eq!(sigmoid_gate(&x, &each), array![[1.0, 4.0], [0.0, 4.0]].into_dyn());
        let row = array![[0.0f32], [1000.0]].into_dyn().into_shared();
        assert_eq!(sigmoid_gate(&x, &row), array![[1.0, 2.0], [6.0, 8.0]].into_dyn());
    }
}
