//! Block floating point: eight products a lane, scaled by a power of two in f64.

use std::arch::x86_64::*;
use std::ops::Range;

use super::{dot, load_bytes, repeat, store_f32};
use crate::engine::Activations;
use crate::pack::Bfp16Image;
use crate::simd::rows;

#[target_feature(enable = "avx2")]
pub(super) fn run(image: &Bfp16Image, a: &Activations, tiles: Range<usize>, y: &mut [f32]) {
    let outputs = y.as_chunks_mut::<8>().0.as_chunks_mut::<2>().0;
    for (tile, outputs) in tiles.zip(outputs.chunks_mut(a.rows)) {
        let mut r = 0;
        while r < a.rows {
            r += match a.together(r) {
                4.. => block::<4>(image, tile, a, r, outputs),
                2.. => block::<2>(image, tile, a, r, outputs),
                _ => block::<1>(image, tile, a, r, outputs),
            };
        }
    }
}

/// i · 2^(ea + ew - 266), rounded to f32 once; `ew` holds ew + 1023 - 266 of four outputs.
#[inline]
#[target_feature(enable = "avx2")]
fn scaled(i: __m128i, ew: __m256i, ea: u8) -> __m128 {
    let e = _mm256_add_epi64(ew, _mm256_set1_epi64x(i64::from(ea)));
    let power = _mm256_castsi256_pd(_mm256_slli_epi64::<52>(e));
    _mm256_cvtpd_ps(_mm256_mul_pd(_mm256_cvtepi32_pd(i), power))
}

/// One tile for R rows; returns R.
#[target_feature(enable = "avx2")]
fn block<const R: usize>(
    image: &Bfp16Image,
    tile: usize,
    a: &Activations,
    row: usize,
    outputs: &mut [[[f32; 8]; 2]],
) -> usize {
    let (first, step) = (a.place(row, 0), a.grouped(row));
    let blocks = a.codes.as_chunks::<4>().0.as_chunks::<2>().0;
    let mut acc = [[_mm256_setzero_ps(); 2]; R];
    for (b, (quads, ew)) in image.tile(tile).iter().zip(image.tile_exponents(tile)).enumerate() {
        let at = first + b * step;
        let (mantissas, exponent): (&[_; R], &[_; R]) = (rows(blocks, at), rows(&a.exponent, at));
        let quads: &[[[u8; 32]; 2]; 2] = bytemuck::cast_ref(quads);
        let ew = ew.as_chunks::<4>().0;
        for h in 0..2 {
            let front = load_bytes(&quads[0][h]);
            let back = load_bytes(&quads[1][h]);
            let (ma, mb) = (_mm256_abs_epi8(front), _mm256_abs_epi8(back));
            let exponents = |quad: [u8; 4]| {
                let wide = _mm256_cvtepu8_epi64(_mm_cvtsi32_si128(i32::from_ne_bytes(quad)));
                _mm256_add_epi64(wide, _mm256_set1_epi64x(1023 - 266))
            };
            let (el, eh) = (exponents(ew[2 * h]), exponents(ew[2 * h + 1]));
            for r in 0..R {
                let [qa, qb] = mantissas[r];
                let mut i = dot(_mm256_setzero_si256(), ma, front, repeat(qa));
                i = dot(i, mb, back, repeat(qb));
                let low = scaled(_mm256_castsi256_si128(i), el, exponent[r] as u8);
                let high = scaled(_mm256_extracti128_si256::<1>(i), eh, exponent[r] as u8);
                acc[r][h] = _mm256_add_ps(acc[r][h], _mm256_set_m128(high, low));
            }
        }
    }
    for r in 0..R {
        for h in 0..2 {
            store_f32(acc[r][h], &mut outputs[row + r][h]);
        }
    }
    R
}
