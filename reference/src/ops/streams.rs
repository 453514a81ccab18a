//! Parallel residual streams: `[streams, tokens, hidden]`.

use super::{Tensor, rows};
use crate::sum::sum;
use ndarray::{Array2, Array3, ArrayView3, Axis};

pub(super) fn streams(x: &Tensor) -> ArrayView3<'_, f32> {
    x.view().into_dimensionality().expect("streams: three axes")
}

/// One stream behind the other: `y[j] = parts[j]`, `[streams, tokens, hidden]`. Exact.
pub fn stack(parts: &[&Tensor]) -> Array3<f64> {
    let (tokens, hidden) = rows(parts[0]).dim();
    let mut y = Array3::zeros((parts.len(), tokens, hidden));
    for (mut y, part) in y.outer_iter_mut().zip(parts) {
        assert_eq!(rows(part).dim(), (tokens, hidden), "stack: shape of a stream against the first");
        y.assign(&rows(part).mapv(f64::from));
    }
    y
}

/// Stream `index` alone: `y = x[index]`, `[tokens, hidden]`. Exact.
pub fn stream(x: &Tensor, index: usize) -> Array2<f64> {
    streams(x).index_axis(Axis(0), index).mapv(f64::from)
}

/// The mean of all streams, added from stream 0 on.
///
/// ```text
/// y[t, i] = (Σ_j x[j, t, i]) / streams
/// ```
pub fn stream_mean(x: &Tensor) -> Array2<f64> {
    let x = streams(x);
    let (count, tokens, hidden) = x.dim();
    Array2::from_shape_fn((tokens, hidden), |(t, i)| {
        sum((0..count).map(|j| f64::from(x[[j, t, i]]))) / count as f64
    })
}

/// Adds a branch to every stream but stream 0.
///
/// ```text
/// y[0] = x[0];   y[j] = x[j] + branch      for j >= 1
/// ```
///
/// Stream 0 is left out whichever stream is the active one. `branch` is `[tokens, hidden]`.
pub fn add_to_streams(x: &Tensor, branch: &Tensor) -> Array3<f64> {
    let branch = rows(branch).mapv(f64::from);
    let mut y = streams(x).mapv(f64::from);
    assert_eq!(y.index_axis(Axis(0), 0).dim(), branch.dim(), "add_to_streams: branch against a stream");
    for mut stream in y.outer_iter_mut().skip(1) {
        stream += &branch;
    }
    y
}

#[cfg(test)]
mod tests {
    use super::*;
    use ndarray::array;

    #[test]
    fn streams_by_hand() {
        let (a, b) = (array![[1.0f32, 2.0]], array![[10.0f32, 40.0]]);
        let (a, b) = (a.into_dyn().into_shared(), b.into_dyn().into_shared());
        let y = stack(&[&a, &b]);
        assert_eq!(y, array![[[1.0, 2.0]], [[10.0, 40.0]]]);
        let y = y.mapv(|v| v as f32).into_dyn().into_shared();
        assert_eq!(stream(&y, 1), array![[10.0, 40.0]]);
        assert_eq!(stream_mean(&y), array![[5.5, 21.0]]);
        assert_eq!(add_to_streams(&y, &a), array![[[1.0, 2.0]], [[11.0, 42.0]]]);
    }
}
