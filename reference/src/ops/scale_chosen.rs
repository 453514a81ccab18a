//! A factor of each expert's own.

use super::{Tensor, expert, rows};
use ndarray::Array2;

/// The weights of chosen experts, each times the factor of its expert.
///
/// ```text
/// y[t, j] = weights[t, j] · scale[index[t, j]]
/// ```
///
/// `weights` and `index` are `[tokens, k]`, `scale` is `[experts]`. The weights were renormalised
/// before, and are not after.
///
/// Source: the Gemma 4 model code; no paper states the formula.
pub fn scale_chosen(weights: &Tensor, index: &Tensor, scale: &[f32]) -> Array2<f64> {
    let (weights, index) = (rows(weights), rows(index));
    assert_eq!(weights.dim(), index.dim(), "scale_chosen: weights against index");
    Array2::from_shape_fn(weights.dim(), |at| {
        f64::from(weights[at]) * f64::from(scale[expert(index[at], scale.len())])
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use ndarray::array;

    // Experts 2 and 0 were chosen: factors 100 and 1, not those of places 0 and 1.
    #[test]
    fn factors_belong_to_experts_and_not_to_places() {
        let weights = array![[0.25f32, 0.75]].into_dyn().into_shared();
        let index = array![[2.0f32, 0.0]].into_dyn().into_shared();
        assert_eq!(scale_chosen(&weights, &index, &[1.0, 10.0, 100.0]), array![[25.0, 0.75]]);
    }
}
