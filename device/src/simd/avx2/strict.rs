//! Strict f32 sums: four rows meet sixteen outputs, or one row meets sixty-four.

use std::arch::x86_64::*;
use std::ops::Range;

use super::{load_f32, store_f32};
use crate::pack::{StrictImage, TILE};

/// Columns of a tile that are walked for every row before the next: 16 KiB.
const DEPTH: usize = 256;

#[target_feature(enable = "avx2")]
pub(super) fn run(image: &StrictImage, x: &[f32], tiles: Range<usize>, y: &mut [f32]) {
    let (inner, rows) = (image.inner, x.len() / image.inner);
    let sums = y.as_chunks_mut::<8>().0.as_chunks_mut::<2>().0;
    if rows == 1 {
        let mut tile = tiles.start;
        for sums in sums.chunks_mut(4) {
            if sums.len() == 4 {
                block::<4, 1>(std::array::from_fn(|t| image.tile(tile + t)), x, inner, 0, 0, 1, sums);
            } else {
                for (t, sums) in sums.iter_mut().enumerate() {
                    let sums = std::slice::from_mut(sums);
                    block::<1, 1>([image.tile(tile + t)], x, inner, 0, 0, 1, sums);
                }
            }
            tile += 4;
        }
        return;
    }
    for (tile, sums) in tiles.zip(sums.chunks_mut(rows)) {
        for start in (0..inner).step_by(DEPTH) {
            let w = [&image.tile(tile)[start..inner.min(start + DEPTH)]];
            let mut r = 0;
            while r < rows {
                r += match rows - r {
                    4.. => block::<1, 4>(w, x, inner, start, r, rows, sums),
                    2.. => block::<1, 2>(w, x, inner, start, r, rows, sums),
                    _ => block::<1, 1>(w, x, inner, start, r, rows, sums),
                };
            }
        }
    }
}

/// Adds the columns of `w` to the sums of R rows, `[T, rows]`; returns R.
#[inline]
#[target_feature(enable = "avx2")]
fn block<const T: usize, const R: usize>(
    w: [&[[f32; TILE]]; T],
    x: &[f32],
    inner: usize,
    start: usize,
    row: usize,
    rows: usize,
    sums: &mut [[[f32; 8]; 2]],
) -> usize {
    let count = w[0].len();
    let w = w.map(|w| &w[..count]);
    let x: [_; R] = std::array::from_fn(|r| &x[(row + r) * inner + start..][..count]);
    let mut acc = [[[_mm256_setzero_ps(); 2]; T]; R];
    for r in 0..R {
        for t in 0..T {
            for h in 0..2 {
                acc[r][t][h] = load_f32(&sums[t * rows + row + r][h]);
            }
        }
    }
    for k in 0..count {
        for t in 0..T {
            let column: &[[f32; 8]; 2] = bytemuck::cast_ref(&w[t][k]);
            let column = [load_f32(&column[0]), load_f32(&column[1])];
            for r in 0..R {
                let x = _mm256_set1_ps(x[r][k]);
                for h in 0..2 {
                    acc[r][t][h] = _mm256_add_ps(acc[r][t][h], _mm256_mul_ps(x, column[h]));
                }
            }
        }
    }
    for r in 0..R {
        for t in 0..T {
            for h in 0..2 {
                store_f32(acc[r][t][h], &mut sums[t * rows + row + r][h]);
            }
        }
    }
    R
}
