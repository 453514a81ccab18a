//! Giving a row the size of another.

use super::{Tensor, rows};
use crate::sum::sum;
use ndarray::Array2;

/// Scales each row of `x` to the root mean square of the same row of `like`.
///
/// ```text
/// y[t, i] = x[t, i] · sqrt(mean(like[t]²)) / sqrt(max(mean(x[t]²), 1e-5))
/// ```
///
/// Both are `[tokens, hidden]`. The floor stands inside the root and holds for `x` only.
///
/// Source: the Gemma 3n model code; no paper states the formula.
pub fn match_rms(x: &Tensor, like: &Tensor) -> Array2<f64> {
    let (x, like) = (rows(x), rows(like));
    assert_eq!(x.dim(), like.dim(), "match_rms: rows against the rows that they should match");
    let mut y = x.mapv(f64::from);
    for ((mut y, x), like) in y.rows_mut().into_iter().zip(x.rows()).zip(like.rows()) {
        let mean = |row: ndarray::ArrayView1<f32>| {
            sum(row.iter().map(|&v| f64::from(v) * f64::from(v))) / row.len() as f64
        };
        let (size, own) = (mean(like).sqrt(), mean(x).max(1e-5).sqrt());
        y.mapv_inplace(|v| v * size / own);
    }
    y
}

#[cfg(test)]
mod tests {
    use super::*;
    use approx::assert_relative_eq;
    use ndarray::array;

    // (3, 4) has mean square 12.5, (1, 7) has 25: the row grows by √2.
    #[test]
    fn grows_to_the_size_of_the_other() {
        let (x, like) = (array![[3.0f32, 4.0]].into_dyn().into_shared(), array![[1.0f32, 7.0]]);
        let y = match_rms(&x, &like.into_dyn().into_shared());
        assert_relative_eq!(y[[0, 0]], 4.242_640_687, max_relative = 1e-9);
        assert_relative_eq!(y[[0, 1]], 5.656_854_249, max_relative = 1e-9);
    }

    // A row of 0.001 has mean square 1e-6, below the floor of 1e-5: 0.001 · 2 / √1e-5 = 0.632456.
    #[test]
    fn tiny_rows_meet_the_floor() {
        let x = array![[0.001f32, -0.001]].into_dyn().into_shared();
        let y = match_rms(&x, &array![[2.0f32, 2.0]].into_dyn().into_shared());
        assert_relative_eq!(y[[0, 0]], 0.632_455_5, max_relative = 1e-6);
    }
}
