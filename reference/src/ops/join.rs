//! Rows side by side.

use super::{Tensor, rows};
use ndarray::{Array2, Axis, concatenate};

/// The rows of `parts` joined into longer rows, first part first. Exact.
///
/// ```text
/// y[t, ·] = parts[0][t, ·] | parts[1][t, ·] | …
/// ```
///
/// Every part is `[tokens, columns]`, each with columns of its own; the result is `[tokens, Σ columns]`.
pub fn join(parts: &[&Tensor]) -> Array2<f64> {
    let parts: Vec<_> = parts.iter().map(|part| rows(part).mapv(f64::from)).collect();
    let views: Vec<_> = parts.iter().map(|part| part.view()).collect();
    let joined = concatenate(Axis(1), &views).expect("join: rows of every part against rows of the first");
    joined.as_standard_layout().into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use ndarray::array;

    #[test]
    fn the_first_part_comes_first() {
        let a = array![[1.0f32], [2.0]].into_dyn().into_shared();
        let b = array![[3.0f32, 4.0], [5.0, 6.0]].into_dyn().into_shared();
        assert_eq!(join(&[&a, &b]), array![[1.0, 3.0, 4.0], [2.0, 5.0, 6.0]]);
    }
}
