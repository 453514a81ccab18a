//! Norms over rows.

use super::{GRAIN, dot};
use rayon::prelude::*;

/// `y[r, i] = x[r, i] / √(mean_i x[r, i]² + eps) · weight[i]`
///
/// `x` and the result are `[rows, weight.len()]`. Computed in f32; a row is divided by its root once
/// and multiplied after.
pub fn rms_norm(x: &[f32], weight: &[f32], eps: f32) -> Vec<f32> {
    let width = weight.len();
    let mut y = x.to_vec();
    let one = |row: &mut [f32]| {
        let scale = inverse_rms(row, eps);
        for (v, w) in row.iter_mut().zip(weight) {
            *v = (*v * scale) * w;
        }
    };
    if x.len() < GRAIN {
        y.chunks_exact_mut(width).for_each(one);
    } else {
        y.par_chunks_exact_mut(width).for_each(one);
    }
    y
}

/// `y[r, i] = x[r, i] / √(mean_i x[r, i]² + eps)` over rows of `width` values.
pub fn unit_norm(x: &[f32], width: usize, eps: f32) -> Vec<f32> {
    let mut y = x.to_vec();
    for row in y.chunks_exact_mut(width) {
        let scale = inverse_rms(row, eps);
        row.iter_mut().for_each(|v| *v *= scale);
    }
    y
}

/// `1 / √(mean x² + eps)`
#[inline]
pub fn inverse_rms(x: &[f32], eps: f32) -> f32 {
    1.0 / (dot(x, x) / x.len() as f32 + eps).sqrt()
}

#[cfg(test)]
mod tests {
    use super::*;

    // mean(1² + 7²) = 25 and mean(3² + 1²) = 5: each row has a root of its own, 5 and √5.
    #[test]
    fn rows_by_hand() {
        let y = rms_norm(&[1.0, 7.0, 3.0, 1.0], &[1.0, 10.0], 0.0);
        let root = 5.0f32.sqrt();
        for (found, expected) in y.iter().zip([0.2, 14.0, 3.0 / root, 10.0 / root]) {
            assert!((found - expected).abs() < 1e-6, "{found} against {expected}");
        }
    }

    // √(mean(3², 4²)) = 5/√2 for the first row, √(mean(0, 2²)) = √2 for the second.
    #[test]
    fn without_a_weight() {
        let y = unit_norm(&[3.0, 4.0, 0.0, 2.0], 2, 0.0);
        for (found, expected) in y.iter().zip([0.848_528_1, 1.131_370_8, 0.0, std::f32::consts::SQRT_2]) {
            assert!((found - expected).abs() < 1e-6, "{found} against {expected}");
        }
    }

    // mean 1 + eps 3 = 4, root 2; outside the root eps would give 1 / (1 + 3).
    #[test]
    fn eps_is_under_the_root() {
        assert_eq!(rms_norm(&[1.0, -1.0], &[1.0, 1.0], 3.0), [0.5, -0.5]);
    }
}
