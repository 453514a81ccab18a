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

#[cfg(test)]
mod tests {
    use crate::engine::Engine;
    use crate::engine::tests::{pack, product};

    // 2^24 + 1 is a tie and goes back to 2^24, twice. Adding the two ones first would give 2^24 + 2.
    #[test]
    fn adds_from_left_to_right() {
        let image = pack(Engine::F32, &[&[16_777_216.0, 1.0, 1.0], &[1.0, 1.0, 16_777_216.0]]);
        assert_eq!(product(&image, &[1.0, 1.0, 1.0]), [16_777_216.0, 16_777_218.0]);
    }

    // (1 + 2^-12)² = 1 + 2^-11 + 2^-24; the last term is half a unit of f32 and is rounded away before the sum.
    // A fused multiply-add would keep it and give 2^-24.
    #[test]
    fn rounds_the_product_before_it_adds() {
        let a = 1.0 + 0.5f32.powi(12);
        let image = pack(Engine::F32, &[&[-(1.0 + 0.5f32.powi(11)), a]]);
        assert_eq!(product(&image, &[1.0, a]), [0.0]);
    }
}
