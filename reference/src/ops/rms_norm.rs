//! Root-mean-square normalisation.

use super::{Tensor, rows};
use crate::sum::sum;
use ndarray::{ArrayD, IxDyn};

/// Scales each group of `width` values to unit root mean square, then by `weight`.
///
/// ```text
/// y[t, g, i] = x[t, g, i] / sqrt(mean_i(x[t, g, i]²) + eps) · weight[i]
/// ```
///
/// `x` is `[tokens, groups · width]` in any shape; `weight` is `[width]` or absent (a factor of 1). The
/// result is `[tokens, width]` for one group of a flat row, else `[tokens, groups, width]`: one group
/// is a norm over the hidden row, several are per-head norms with one weight for all heads.
///
/// A checkpoint that stores `weight - 1` is converted when it is loaded, so there is one formula here
/// and none of the callers has to know. ε stands inside the root.
///
/// Source: arXiv 1910.07467, equation 4, with eps added under the root.
pub fn rms_norm(x: &Tensor, weight: Option<&[f32]>, width: usize, eps: f32) -> ArrayD<f64> {
    let flat = rows(x);
    let (tokens, all) = flat.dim();
    assert_eq!(all % width, 0, "rms_norm: row length against width");
    if let Some(weight) = weight {
        assert_eq!(weight.len(), width, "rms_norm: weight length against width");
    }
    let groups = all / width;
    let mut y = Vec::with_capacity(tokens * all);
    for row in flat.rows() {
        let row = row.to_slice().expect("rms_norm: rows are stored in order");
        for x in row.chunks_exact(width) {
            let squares = x.iter().map(|&v| f64::from(v) * f64::from(v));
            let rms = (sum(squares) / width as f64 + f64::from(eps)).sqrt();
            for i in 0..width {
                y.push(f64::from(x[i]) / rms * weight.map_or(1.0, |w| f64::from(w[i])));
            }
        }
    }
    let flat = groups == 1 && x.ndim() == 2;
    let shape = if flat { IxDyn(&[tokens, width]) } else { IxDyn(&[tokens, groups, width]) };
    ArrayD::from_shape_vec(shape, y).expect("rms_norm: one result a value")
}

#[cfg(test)]
mod tests {
    use super::*;
    use approx::assert_relative_eq;
    use ndarray::array;

    // 3² + 4² = 25, so mean 12.5 and rms 5/√2: the row becomes (0.6√2, 0.8√2).
    #[test]
    fn three_four_five() {
        let x = array![[3.0f32, 4.0]].into_dyn().into_shared();
        let y = rms_norm(&x, Some(&[1.0, 10.0]), 2, 0.0);
        assert_relative_eq!(y[[0, 0]], 0.848_528_137, max_relative = 1e-8);
        assert_relative_eq!(y[[0, 1]], 11.313_708_5, max_relative = 1e-8);
    }

    // The mean square is 12.5 and eps 3.5: sqrt(16) = 4 inside the root; outside it would be 3.5355 + 3.5.
    #[test]
    fn eps_stands_inside_the_root() {
        let x = array![[3.0f32, 4.0]].into_dyn().into_shared();
        assert_eq!(rms_norm(&x, None, 2, 3.5), array![[0.75, 1.0]].into_dyn());
    }

    // Two heads of different size: each is brought to unit rms by itself (±1), not by the row's 5.
    #[test]
    fn groups_have_a_scale_of_their_own() {
        let x = array![[1.0f32, -1.0, 7.0, 7.0]].into_dyn().into_shared();
        let y = rms_norm(&x, Some(&[2.0, 3.0]), 2, 0.0);
        assert_eq!(y, array![[[2.0, -3.0], [2.0, 3.0]]].into_dyn());
    }
}
