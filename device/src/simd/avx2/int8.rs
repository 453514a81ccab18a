//! int8 rows times int8 columns, four products a lane.

use std::arch::x86_64::*;
use std::ops::Range;

use super::{dot, load_bytes, load_f32, load_i32, repeat, store_f32, store_i32};
use crate::engine::Activations;
use crate::pack::{Int8Image, WIDE};
use crate::simd::rows;

/// Registers of eight outputs in a tile.
const LANES: usize = WIDE / 8;

/// Quads of the image that are walked for every row before the next: 16 KiB.
const DEPTH: usize = 32;

#[target_feature(enable = "avx2")]
pub(super) fn run(image: &Int8Image, a: &Activations, tiles: Range<usize>, y: &mut [f32]) {
    let outputs = y.as_chunks_mut::<8>().0.as_chunks_mut::<LANES>().0;
    let mut sums = vec![[[0i32; 8]; LANES]; a.rows];
    for (tile, outputs) in tiles.zip(outputs.chunks_mut(a.rows)) {
        sums.fill([[0; 8]; LANES]);
        let columns = image.tile(tile);
        for (step, w) in columns.chunks(DEPTH).enumerate() {
            let mut r = 0;
            while r < a.rows {
                r += match a.together(r) {
                    4.. => block::<4, 2>(w, step * DEPTH, a, r, &mut sums),
                    2.. => block::<2, 4>(w, step * DEPTH, a, r, &mut sums),
                    _ => block::<1, 8>(w, step * DEPTH, a, r, &mut sums),
                };
            }
        }
        let scale = image.tile_scale(tile).as_chunks::<8>().0;
        for (r, (sums, output)) in sums.iter().zip(outputs).enumerate() {
            for l in 0..LANES {
                let c = _mm256_cvtepi32_ps(load_i32(&sums[l]));
                let row_scaled = _mm256_mul_ps(c, _mm256_set1_ps(a.scale[r]));
                store_f32(_mm256_mul_ps(row_scaled, load_f32(&scale[l])), &mut output[l]);
            }
        }
    }
}

/// Adds the quads of `w`, which start with `first_quad`, to the sums of R rows, T registers of outputs at a time; returns R.
#[inline]
#[target_feature(enable = "avx2")]
fn block<const R: usize, const T: usize>(
    w: &[[[i8; 4]; WIDE]],
    first_quad: usize,
    a: &Activations,
    row: usize,
    sums: &mut [[[i32; 8]; LANES]],
) -> usize {
    let quads = a.codes.as_chunks::<4>().0;
    let (first_place, step) = (a.place(row, first_quad), a.grouped(row));
    for first in (0..LANES).step_by(T) {
        let mut acc = [[_mm256_setzero_si256(); T]; R];
        for r in 0..R {
            for t in 0..T {
                acc[r][t] = load_i32(&sums[row + r][first + t]);
            }
        }
        for (k, w) in w.iter().enumerate() {
            let lanes: &[[u8; 32]; LANES] = bytemuck::cast_ref(w);
            let quads: &[_; R] = rows(quads, first_place + k * step);
            for t in 0..T {
                let column = load_bytes(&lanes[first + t]);
                let magnitude = _mm256_abs_epi8(column);
                for r in 0..R {
                    acc[r][t] = dot(acc[r][t], magnitude, column, repeat(quads[r]));
                }
            }
        }
        for r in 0..R {
            for t in 0..T {
                store_i32(acc[r][t], &mut sums[row + r][first + t]);
            }
        }
    }
    R
}
