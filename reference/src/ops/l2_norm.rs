//! Vectors of unit length.

use super::Tensor;
use crate::sum::dot;
use ndarray::{Array3, ArrayView3, Axis};

/// Added to the sum of squares, whatever ε the model's other norms have.
pub const L2_EPS: f64 = 1e-6;

/// Scales every head's vector to length `scale`.
///
/// ```text
/// y[t, h, i] = x[t, h, i] / sqrt(Σ_i x[t, h, i]² + 1e-6) · scale
/// ```
///
/// `x` is `[tokens, heads, dim]`, the result likewise. This is a sum of squares and not a mean; ε stands
/// inside the root and is no floor, so that a short vector is shortened further.
///
/// Source: arXiv 2412.06464, section 3.4; ε as in the authors' kernels.
pub fn l2_norm(x: &Tensor, scale: f64) -> Array3<f64> {
    let x: ArrayView3<'_, f32> = x.view().into_dimensionality().expect("l2_norm: x has three axes");
    let (tokens, heads, dim) = x.dim();
    let mut y = Array3::zeros((tokens, heads, dim));
    for t in 0..tokens {
        for h in 0..heads {
            let x = x.index_axis(Axis(0), t);
            let x = x.index_axis(Axis(0), h);
            let length = (dot(x, x) + L2_EPS).sqrt();
            for i in 0..dim {
                y[[t, h, i]] = f64::from(x[i]) / length * scale;
            }
        }
    }
    y
}

#[cfg(test)]
mod tests {
    use super::*;
    use approx::assert_relative_eq;
    use ndarray::array;

    // 3² + 4² = 5²: (0.6, 0.8), times 10. Over the mean square it would be √2 times as long. The second
    // head is scaled by its own length.
    #[test]
    fn three_four_five() {
        let y = l2_norm(&array![[[3.0f32, 4.0], [0.0, 50.0]]].into_dyn().into_shared(), 10.0);
        assert_relative_eq!(y[[0, 0, 0]], 6.0, max_relative = 1e-7);
        assert_relative_eq!(y[[0, 0, 1]], 8.0, max_relative = 1e-7);
        assert_relative_eq!(y[[0, 1, 1]], 10.0, max_relative = 1e-9);
    }

    // A vector of length 1e-3: 1e-6 + 1e-6 under the root make it 1/√2 long. With ε as a floor of the
    // length it would be 1.
    #[test]
    fn eps_stands_inside_the_root() {
        let y = l2_norm(&array![[[1e-3f32, 0.0]]].into_dyn().into_shared(), 1.0);
        assert_relative_eq!(y[[0, 0, 0]], 0.5f64.sqrt(), max_relative = 1e-6);
    }
}
