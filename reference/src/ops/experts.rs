//! Linear layers of the chosen experts, and the mixture of what they give.

use super::{Tensor, linear, rows};
use crate::sum::sum;
use ndarray::{Array2, Array3, ArrayView3, Axis, Slice};
use spec::NonFinite;
use spec::families::Linear;

/// The expert that a value of a router index means.
pub(super) fn expert(id: f32, experts: usize) -> usize {
    assert!(id >= 0.0 && (id as usize) < experts && id.fract() == 0.0, "router index {id}: no such expert");
    id as usize
}

/// Applies to every token the linear layer of each expert that was chosen for it.
///
/// ```text
/// y[t, j, o] = Σ_i x[t, j, i] · W_e[o, i] + b_e[o]      e = index[t, j]
/// ```
///
/// `x` is `[tokens, k, in]`, a row for each choice, or `[tokens, in]`, one row for all of them; `index` is
/// `[tokens, k]`; the result `[tokens, k, out]`. An expert's weights are decoded once for all its tokens;
/// an expert that nobody chose is not read.
pub fn expert_linear(x: &Tensor, index: &Tensor, experts: &[Linear]) -> Result<Array3<f64>, NonFinite> {
    let (tokens, k) = rows(index).dim();
    assert_eq!(x.shape()[0], tokens, "expert_linear: tokens of x against tokens of index");
    assert!(x.ndim() == 2 || x.shape()[1] == k, "expert_linear: choices of x against choices of index");
    let flat = rows(x);
    let inner = if x.ndim() == 2 { flat.ncols() } else { flat.ncols() / k };
    let per_choice = if x.ndim() == 2 { 0 } else { inner };
    let index = rows(index).mapv(|id| expert(id, experts.len()));
    let mut y = Array3::zeros((tokens, k, experts[0].weight.out()));
    for (e, w) in experts.iter().enumerate() {
        let sent: Vec<(usize, usize)> =
            index.indexed_iter().filter(|(_, chosen)| **chosen == e).map(|(place, _)| place).collect();
        if sent.is_empty() {
            continue;
        }
        let mut x = Array2::zeros((sent.len(), inner));
        for (mut into, &(t, j)) in x.rows_mut().into_iter().zip(&sent) {
            let row = flat.slice_axis(Axis(1), Slice::from(j * per_choice..j * per_choice + inner));
            into.assign(&row.row(t));
        }
        for (from, &(t, j)) in linear(x.view(), w)?.rows().into_iter().zip(&sent) {
            y.index_axis_mut(Axis(0), t).row_mut(j).assign(&from);
        }
    }
    Ok(y)
}

/// The weighted sum of what a token's experts give.
///
/// ```text
/// m[t, i] = Σ_j weights[t, j] · y[t, j, i]
/// ```
///
/// `y` is `[tokens, k, hidden]`, `weights` `[tokens, k]`, the result `[tokens, hidden]`; the sum runs over
/// the choices in their order.
pub fn mixture(y: &Tensor, weights: &Tensor) -> Array2<f64> {
    let y: ArrayView3<f32> = y.view().into_dimensionality().expect("mixture: y has three axes");
    let weights = rows(weights);
    let (tokens, k, hidden) = y.dim();
    assert_eq!(weights.dim(), (tokens, k), "mixture: weights against choices");
    let mut m = Array2::zeros((tokens, hidden));
    for t in 0..tokens {
        let y = y.index_axis(Axis(0), t);
        for i in 0..hidden {
            m[[t, i]] = sum((0..k).map(|j| f64::from(weights[[t, j]]) * f64::from(y[[j, i]])));
        }
    }
    m
}

#[cfg(test)]
mod tests {
    use super::*;
    use ndarray::{Array, array};
    use proptest::prelude::*;
    use spec::{Matrix, Vector};

    fn tensor<D: ndarray::Dimension>(x: Array<f32, D>) -> Tensor {
        x.into_dyn().into_shared()
    }

    fn expert_of(values: Vec<f32>, inner: usize, bias: Option<Vec<f32>>) -> Linear {
        let weight = Matrix::from_values("w", values.len() / inner, inner, values);
        Linear { weight, bias: bias.map(|b| Vector::new("b", b)) }
    }

    // Expert 0 reads (1, 10), expert 1 (100, 1000) with a bias of 0.5. Token 0 goes to both, 1 first; token 1
    // to expert 0 twice. Every digit of an answer names the weight that it went through.
    #[test]
    fn every_choice_reads_its_own_expert() {
        let experts = [
            expert_of(vec![1.0, 10.0], 2, Some(vec![0.0])),
            expert_of(vec![100.0, 1000.0], 2, Some(vec![0.5])),
        ];
        let index = tensor(array![[1.0, 0.0], [0.0, 0.0]]);
        let one_row = tensor(array![[1.0, 2.0], [3.0, 4.0]]);
        let y = expert_linear(&one_row, &index, &experts).unwrap();
        assert_eq!(y, array![[[2100.5], [21.0]], [[43.0], [43.0]]]);
        let row_each = tensor(array![[[1.0, 2.0], [5.0, 6.0]], [[3.0, 4.0], [7.0, 8.0]]]);
        let y = expert_linear(&row_each, &index, &experts).unwrap();
        assert_eq!(y, array![[[2100.5], [65.0]], [[43.0], [87.0]]]);
    }

    // 0.5 · (1, 2) + 0.25 · (10, 20) = (3, 6)
    #[test]
    fn weights_belong_to_choices() {
        let y = tensor(array![[[1.0, 2.0], [10.0, 20.0]]]);
        assert_eq!(mixture(&y, &tensor(array![[0.5, 0.25]])), array![[3.0, 6.0]]);
    }

    proptest! {
        // With every expert chosen, in whatever order, the mixture is the dense one: each expert applied to
        // all tokens, weighted and added. Whole numbers, so that no order of adding rounds.
        #[test]
        fn all_experts_chosen_is_the_dense_mixture(
            w in prop::collection::vec(-5i8..6, 3 * 2 * 4), x in prop::collection::vec(-5i8..6, 2 * 4),
            weights in prop::collection::vec(-3i8..4, 2 * 3), turn in 0usize..3,
        ) {
            let experts: Vec<Linear> =
                w.chunks_exact(8).map(|w| expert_of(w.iter().map(|&v| f32::from(v)).collect(), 4, None)).collect();
            let x = Array::from_shape_vec((2, 4), x).unwrap().mapv(f32::from);
            let weight_of = Array::from_shape_vec((2, 3), weights).unwrap().mapv(f32::from);
            let index = Array::from_shape_fn((2, 3), |(t, j)| (j + t + turn) % 3);
            let chosen = Array::from_shape_fn((2, 3), |(t, j)| weight_of[[t, index[[t, j]]]]);
            let y = expert_linear(&tensor(x.clone()), &tensor(index.mapv(|e| e as f32)), &experts).unwrap();
            let mixed = mixture(&tensor(y.mapv(|v| v as f32)), &tensor(chosen));
            for t in 0..2 {
                for o in 0..2 {
                    let dense: f32 = (0..3)
                        .map(|e| weight_of[[t, e]] * (0..4).map(|i| x[[t, i]] * f32::from(w[8 * e + 4 * o + i])).sum::<f32>())
                        .sum();
                    prop_assert_eq!(mixed[[t, o]], f64::from(dense));
                }
            }
        }
    }
}
