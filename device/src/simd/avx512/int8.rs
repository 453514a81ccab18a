//! int8 rows times int8 columns with the four-way dot product, which wants one side unsigned.
//!
//! The activations are biased by 128 and 128 · sum_k B[k, n] is taken off again. Both steps wrap in i32 and
//! cancel exactly.

use std::arch::x86_64::*;
use std::ops::Range;

use super::{load_bytes, load_i32, store_f32, store_i32};
use crate::engine::Activations;
use crate::pack::{Int8Image, WIDE};
use crate::simd::{prefetch, rows};

/// Registers of sixteen outputs in a tile.
const LANES: usize = WIDE / 16;

/// Quads of the image that are walked for every row before the next: 16 KiB.
const DEPTH: usize = 32;

#[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
pub(super) fn run(image: &Int8Image, a: &Activations, tiles: Range<usize>, y: &mut [f32]) {
    let outputs = y.as_chunks_mut::<16>().0.as_chunks_mut::<LANES>().0;
    let mut sums = vec![[[0i32; 16]; LANES]; a.rows];
    for (tile, outputs) in tiles.zip(outputs.chunks_mut(a.rows)) {
        sums.fill([[0; 16]; LANES]);
        let columns = image.tile(tile);
        let depth = if a.rows <= 2 { columns.len() } else { DEPTH };
        for (step, w) in columns.chunks(depth).enumerate() {
            let mut r = 0;
            while r < a.rows {
                r += match a.together(r) {
                    8.. => block::<8, 2>(w, step * depth, a, r, &mut sums),
                    4.. => block::<4, 4>(w, step * depth, a, r, &mut sums),
                    2.. => block::<2, 8>(w, step * depth, a, r, &mut sums),
                    _ => block::<1, 8>(w, step * depth, a, r, &mut sums),
                };
            }
        }
        let scale = image.tile_scale(tile).as_chunks::<16>().0;
        let bias = image.tile_sum(tile).as_chunks::<16>().0;
        for (r, (sums, output)) in sums.iter().zip(outputs).enumerate() {
            for l in 0..LANES {
                let bias = _mm512_slli_epi32::<7>(load_i32(&bias[l]));
                let c = _mm512_cvtepi32_ps(_mm512_sub_epi32(load_i32(&sums[l]), bias));
                let row_scaled = _mm512_mul_ps(c, _mm512_set1_ps(a.scale[r]));
                store_f32(_mm512_mul_ps(row_scaled, super::load_f32(&scale[l])), &mut output[l]);
            }
        }
    }
}

/// Adds the quads of `w`, which start with `first_quad`, to the sums of R rows, T registers of outputs at a time; returns R.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
fn block<const R: usize, const T: usize>(
    w: &[[[i8; 4]; WIDE]],
    first_quad: usize,
    a: &Activations,
    row: usize,
    sums: &mut [[[i32; 16]; LANES]],
) -> usize {
    let quads = a.biased.as_chunks::<4>().0;
    let (first_place, step) = (a.place(row, first_quad), a.grouped(row));
    for first in (0..LANES).step_by(T) {
        let mut acc = [[_mm512_setzero_si512(); T]; R];
        for r in 0..R {
            for t in 0..T {
                acc[r][t] = load_i32(&sums[row + r][first + t]);
            }
        }
        for (k, w) in w.iter().enumerate() {
            let lanes: &[[u8; 64]; LANES] = bytemuck::cast_ref(w);
            let quads: &[_; R] = rows(quads, first_place + k * step);
            let mut column = [_mm512_setzero_si512(); T];
            for t in 0..T {
                if R > 2 {
                    // The memory fetches the next quads while these meet their rows.
                    prefetch(&lanes[first + t], DEPTH * WIDE * 4);
                }
                column[t] = load_bytes(&lanes[first + t]);
            }
            for r in 0..R {
                let quad = _mm512_set1_epi32(i32::from_ne_bytes(quads[r]));
                for t in 0..T {
                    acc[r][t] = _mm512_dpbusd_epi32(acc[r][t], quad, column[t]);
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
