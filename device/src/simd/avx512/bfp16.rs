//! Block floating point: two four-way dot products a block, scaled by a power of two.
//!
//! The dot product wants one side unsigned: the weights are biased by 128, and 128 · sum(ma) is taken off.

use std::arch::x86_64::*;
use std::ops::Range;

use super::{load_bytes, repeat, store_f32};
use crate::engine::Activations;
use crate::pack::{Bfp16Image, TILE};
use crate::simd::{prefetch, rows};

/// Bytes between the mantissas that are read and those that are asked for.
const AHEAD: usize = 4096;

#[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
pub(super) fn run(image: &Bfp16Image, a: &Activations, tiles: Range<usize>, y: &mut [f32]) {
    let outputs = y.as_chunks_mut::<TILE>().0;
    for (tile, outputs) in tiles.zip(outputs.chunks_mut(a.rows)) {
        let mut r = 0;
        while r < a.rows {
            r += match a.together(r) {
                8.. => block::<8>(image, tile, a, r, outputs),
                4.. => block::<4>(image, tile, a, r, outputs),
                2.. => block::<2>(image, tile, a, r, outputs),
                _ => block::<1>(image, tile, a, r, outputs),
            };
        }
    }
}

/// One tile for R rows; returns R.
#[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
fn block<const R: usize>(
    image: &Bfp16Image,
    tile: usize,
    a: &Activations,
    row: usize,
    outputs: &mut [[f32; TILE]],
) -> usize {
    let (first, step) = (a.place(row, 0), a.grouped(row));
    let blocks = a.codes.as_chunks::<4>().0.as_chunks::<2>().0;
    let flip = _mm512_set1_epi8(i8::MIN);
    let mut acc = [_mm512_setzero_ps(); R];
    for (b, (quads, ew)) in image.tile(tile).iter().zip(image.tile_exponents(tile)).enumerate() {
        let at = first + b * step;
        let (mantissas, exponent): (&[_; R], &[_; R]) = (rows(blocks, at), rows(&a.exponent, at));
        let bias: &[_; R] = rows(&a.bias, at);
        let quads: &[[u8; 64]; 2] = bytemuck::cast_ref(quads);
        prefetch(&quads[0], AHEAD);
        prefetch(&quads[1], AHEAD);
        let front = _mm512_xor_si512(load_bytes(&quads[0]), flip);
        let back = _mm512_xor_si512(load_bytes(&quads[1]), flip);
        // SAFETY: the reference covers the 16 bytes that are read; no alignment is needed.
        let ew = unsafe { _mm_loadu_si128(ew.as_ptr().cast()) };
        let ew = _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(ew));
        let ew = _mm512_sub_ps(ew, _mm512_set1_ps(266.0));
        for r in 0..R {
            let [ma, mb] = mantissas[r];
            let mut i = _mm512_set1_epi32(bias[r]);
            i = _mm512_dpbusd_epi32(i, front, repeat(ma));
            i = _mm512_dpbusd_epi32(i, back, repeat(mb));
            let e = _mm512_add_ps(ew, _mm512_set1_ps(exponent[r]));
            // Rounds once, also where the result is subnormal.
            let term = _mm512_scalef_ps(_mm512_cvtepi32_ps(i), e);
            acc[r] = _mm512_add_ps(acc[r], term);
        }
    }
    for r in 0..R {
        store_f32(acc[r], &mut outputs[row + r]);
    }
    R
}
