//! The softmax of rows.

use super::{Tensor, rows};
use crate::sum::sum;
use ndarray::Array2;

/// Probabilities of a row of logits.
///
/// ```text
/// y[t, i] = e^(x[t,i] - m) / Σ_j e^(x[t,j] - m)      m the largest of the row
/// ```
///
/// `x` is `[tokens, n]`, the result is shaped like it.
pub fn softmax(x: &Tensor) -> Array2<f64> {
    let x = rows(x);
    let mut y = Array2::zeros(x.dim());
    for (mut y, x) in y.rows_mut().into_iter().zip(x.rows()) {
        let largest = x.iter().fold(f64::NEG_INFINITY, |m, &v| m.max(f64::from(v)));
        let total = sum(x.iter().map(|&v| libm::exp(f64::from(v) - largest)));
        for (y, &x) in y.iter_mut().zip(x) {
            *y = libm::exp(f64::from(x) - largest) / total;
        }
    }
    y
}

#[cfg(test)]
mod tests {
    use super::*;
    use approx::assert_relative_eq;
    use ndarray::array;

    // Logits ln 1, ln 3 over 4, and the same moved by 1000: 1/4 and 3/4 both times.
    #[test]
    fn rows_sum_to_one_however_large() {
        let x = array![[0.0f32, 3f32.ln()], [1000.0, 1000.0]].into_dyn().into_shared();
        let y = softmax(&x);
        assert_relative_eq!(y[[0, 0]], 0.25, max_relative = 1e-6);
        assert_relative_eq!(y[[0, 1]], 0.75, max_relative = 1e-6);
        assert_eq!(y.row(1), array![0.5, 0.5]);
    }
}
