//! Alternating updates: a layer computes with one stream and corrects all of them.

use super::streams::streams;
use super::{Tensor, rows};
use crate::sum::sum;
use ndarray::Array3;

/// What every stream should be after the layer, guessed from all streams before it.
///
/// ```text
/// y[o, t, i] = x[o, t, i] + Σ_s coefs[t, o · N + s] · x[s, t, i]
/// ```
///
/// `x` is `[N, tokens, hidden]`, `coefs` `[tokens, N · N]`: row o of the N×N matrix makes stream o.
///
/// Source: arXiv 2301.13310, algorithm 1, with coefficients that depend on the token.
pub fn altup_predict(x: &Tensor, coefs: &Tensor) -> Array3<f64> {
    let (x, coefs) = (streams(x), rows(coefs));
    let n = x.dim().0;
    assert_eq!(coefs.dim(), (x.dim().1, n * n), "altup_predict: coefficients against tokens and streams");
    Array3::from_shape_fn(x.dim(), |(o, t, i)| {
        let mixed = (0..n).map(|s| f64::from(coefs[[t, o * n + s]]) * f64::from(x[[s, t, i]]));
        f64::from(x[[o, t, i]]) + sum(mixed)
    })
}

/// Moves every prediction by what the layer made of the active stream beyond its prediction.
///
/// ```text
/// y[j, t, i] = pred[j, t, i] + (made[t, i] - pred[active, t, i]) · (1 + coefs[t, j])
/// ```
///
/// `pred` is `[N, tokens, hidden]`, `made` `[tokens, hidden]`, `coefs` `[tokens, N]`.
pub fn altup_correct(pred: &Tensor, made: &Tensor, coefs: &Tensor, active: usize) -> Array3<f64> {
    let (pred, made, coefs) = (streams(pred), rows(made), rows(coefs));
    let (n, tokens, hidden) = pred.dim();
    assert_eq!(made.dim(), (tokens, hidden), "altup_correct: active stream against predictions");
    assert_eq!(coefs.dim(), (tokens, n), "altup_correct: coefficients against tokens and streams");
    Array3::from_shape_fn(pred.dim(), |(j, t, i)| {
        let innovation = f64::from(made[[t, i]]) - f64::from(pred[[active, t, i]]);
        f64::from(pred[[j, t, i]]) + innovation * (1.0 + f64::from(coefs[[t, j]]))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use ndarray::array;

    // Streams 1 and 10, C = [[2, 3], [5, 7]]: 1 + 2·1 + 3·10 = 33, 10 + 5·1 + 7·10 = 85.
    // Transposed: 1 + 2·1 + 5·10 = 53, 10 + 3·1 + 7·10 = 83.
    #[test]
    fn coefficients_are_read_by_rows() {
        let x = array![[[1.0f32]], [[10.0]]].into_dyn().into_shared();
        let coefs = array![[2.0f32, 3.0, 5.0, 7.0]].into_dyn().into_shared();
        assert_eq!(altup_predict(&x, &coefs), array![[[33.0]], [[85.0]]]);
    }

    // Active stream 1 was predicted 10 and became 14: everything moves by 4 · (1 + c).
    #[test]
    fn the_innovation_is_that_of_the_active_stream() {
        let pred = array![[[1.0f32]], [[10.0]]].into_dyn().into_shared();
        let made = array![[14.0f32]].into_dyn().into_shared();
        let coefs = array![[0.5f32, -0.25]].into_dyn().into_shared();
        assert_eq!(altup_correct(&pred, &made, &coefs, 1), array![[[7.0]], [[13.0]]]);
    }

    // With coefficients of 0 the active stream becomes exactly what the layer made.
    #[test]
    fn without_coefficients_the_active_stream_is_replaced() {
        let pred = array![[[1.5f32, -2.0]], [[10.0, 3.0]]].into_dyn().into_shared();
        let made = array![[7.0f32, 0.25]].into_dyn().into_shared();
        let coefs = array![[0.0f32, 0.0]].into_dyn().into_shared();
        let y = altup_correct(&pred, &made, &coefs, 0);
        assert_eq!(y, array![[[7.0, 0.25]], [[15.5, 5.25]]]);
    }
}
