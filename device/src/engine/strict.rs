//! The `f32` engine: strict sums over decoded weights.

use std::ops::Range;

use super::launch::{Activations, LaunchError};
use crate::pack::{StrictImage, TILE};

/// Checks that every activation is finite; the kernels read `x` itself.
#[inline(always)]
pub(crate) fn prepare(
    inner: usize,
    x: &[f32],
    rows: usize,
    into: &mut Activations,
) -> Result<(), LaunchError> {
    into.begin(rows, 0);
    match x.iter().position(|x| !x.is_finite()) {
        Some(at) => Err(LaunchError::NotFinite { row: at / inner, column: at % inner, value: x[at] }),
        None => Ok(()),
    }
}

/// The definition.
///
/// ```text
/// y[r, o] = (((0 + x[r,0]·w[o,0]) + x[r,1]·w[o,1]) + …)      every product and every sum rounded to f32
/// ```
///
/// `x` is `[rows, inner]`, `y` is `[tile, row, 16]`. Sixteen sums run side by side; none of them is split.
#[inline(always)]
pub(crate) fn portable(image: &StrictImage, x: &[f32], tiles: Range<usize>, y: &mut [f32]) {
    let rows = x.len() / image.inner;
    let sums = y.as_chunks_mut::<TILE>().0;
    for (tile, sums) in tiles.zip(sums.chunks_mut(rows)) {
        for (x, sum) in x.chunks(image.inner).zip(sums) {
            let mut acc = [0.0; TILE];
            for (w, &x) in image.tile(tile).iter().zip(x) {
                for o in 0..TILE {
                    acc[o] += x * w[o];
                }
            }
            *sum = acc;
        }
    }
}
