//! Strict f32 sums: four rows meet four tiles of sixteen outputs.

use std::arch::x86_64::*;
use std::ops::Range;

use super::{load_f32, store_f32};
use crate::pack::{StrictImage, TILE};
use crate::simd::prefetch;

/// Columns of the image that are walked for every row before the next: 4 tiles of them and of their successors fit
/// the first-level cache.
const DEPTH: usize = 64;

#[target_feature(enable = "avx512f")]
pub(super) fn run(image: &StrictImage, x: &[f32], tiles: Range<usize>, y: &mut [f32]) {
    let rows = x.len() / image.inner;
    let sums = y.as_chunks_mut::<TILE>().0;
    let mut tile = tiles.start;
    for sums in sums.chunks_mut(4 * rows) {
        if tile + 4 <= tiles.end {
            panel::<4>(image, x, tile, sums);
            tile += 4;
        } else {
            for sums in sums.chunks_mut(rows) {
                panel::<1>(image, x, tile, sums);
                tile += 1;
            }
        }
    }
}

/// T tiles for all rows; `sums` is `[T, rows]` and starts at zero.
#[target_feature(enable = "avx512f")]
fn panel<const T: usize>(image: &StrictImage, x: &[f32], tile: usize, sums: &mut [[f32; TILE]]) {
    let (inner, rows) = (image.inner, x.len() / image.inner);
    // A single row meets each weight once, and runs through without stopping to store.
    let depth = if rows <= 4 { inner } else { DEPTH };
    for start in (0..inner).step_by(depth) {
        let end = inner.min(start + depth);
        let w: [_; T] = std::array::from_fn(|t| &image.tile(tile + t)[start..end]);
        let mut r = 0;
        while r < rows {
            r += match rows - r {
                4.. => block::<T, 4>(w, x, inner, start, r, rows, sums),
                2.. => block::<T, 2>(w, x, inner, start, r, rows, sums),
                _ => block::<T, 1>(w, x, inner, start, r, rows, sums),
            };
        }
    }
}

/// Adds the columns of `w` to the sums of R rows; returns R.
#[inline]
#[target_feature(enable = "avx512f")]
fn block<const T: usize, const R: usize>(
    w: [&[[f32; TILE]]; T],
    x: &[f32],
    inner: usize,
    start: usize,
    row: usize,
    rows: usize,
    sums: &mut [[f32; TILE]],
) -> usize {
    let count = w[0].len();
    let w = w.map(|w| &w[..count]);
    let x: [_; R] = std::array::from_fn(|r| &x[(row + r) * inner + start..][..count]);
    let mut acc = [[_mm512_setzero_ps(); T]; R];
    for r in 0..R {
        for t in 0..T {
            acc[r][t] = load_f32(&sums[t * rows + row + r]);
        }
    }
    for k in 0..count {
        let mut column = [_mm512_setzero_ps(); T];
        for t in 0..T {
            if R > 1 {
                // The memory fetches the next columns while these meet their rows.
                prefetch(&w[t][k], DEPTH * 64);
            }
            column[t] = load_f32(&w[t][k]);
        }
        for r in 0..R {
            let x = _mm512_set1_ps(x[r][k]);
            for t in 0..T {
                acc[r][t] = _mm512_add_ps(acc[r][t], _mm512_mul_ps(x, column[t]));
            }
        }
    }
    for r in 0..R {
        for t in 0..T {
            store_f32(acc[r][t], &mut sums[t * rows + row + r]);
        }
    }
    R
}
