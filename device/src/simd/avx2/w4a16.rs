//! bf16 activations times 4-bit weights: a group of half a tile is decoded once, then meets every row.

use std::arch::x86_64::*;
use std::ops::Range;

use super::{BF16, lanes, load_bytes, load_f32, plane, scales, store_f32};
use crate::engine::Activations;
use crate::pack::{GROUP, Q4Image};
use crate::simd::rows;

#[target_feature(enable = "avx2,f16c")]
pub(super) fn run(image: &Q4Image, a: &Activations, tiles: Range<usize>, y: &mut [f32]) {
    let outputs = y.as_chunks_mut::<8>().0.as_chunks_mut::<2>().0;
    let values = a.values.as_chunks::<GROUP>().0;
    for (tile, outputs) in tiles.zip(outputs.chunks_mut(a.rows)) {
        outputs.fill([[0.0; 8]; 2]);
        let width = plane(BF16);
        let planes = image.tile_scales(tile).chunks_exact(if image.mins { 4 * width } else { 2 * width });
        for (b, (bytes, planes)) in image.tile(tile).iter().zip(planes).enumerate() {
            for h in 0..2 {
                let d = scales::<BF16>(&planes[h * width..]);
                let m =
                    if image.mins { scales::<BF16>(&planes[(2 + h) * width..]) } else { _mm256_setzero_ps() };
                let w = decode(bytes, h, d, m, image.tile_symmetric(tile));
                let mut r = 0;
                while r < a.rows {
                    r += match a.together(r) {
                        8.. => block::<8>(&w, rows(values, a.place(r, b)), r, h, outputs),
                        4.. => block::<4>(&w, rows(values, a.place(r, b)), r, h, outputs),
                        2.. => block::<2>(&w, rows(values, a.place(r, b)), r, h, outputs),
                        _ => block::<1>(&w, rows(values, a.place(r, b)), r, h, outputs),
                    };
                }
            }
        }
    }
}

/// bf16(d · (q - offset) + m) of the 32 columns of half a tile and one group.
///
/// The weights of a group are finite before they are rounded or infinite, never NaN, so the integer form of
/// the rounding needs no exception.
#[inline]
#[target_feature(enable = "avx2")]
fn decode(bytes: &[u8; 256], h: usize, d: __m256, m: __m256, symmetric: u16) -> [__m256; GROUP] {
    let octets: &[[[u8; 32]; 2]; 4] = bytemuck::cast_ref(bytes);
    let offset = _mm256_and_si256(lanes(symmetric, h), _mm256_set1_epi32(8));
    let nibble = _mm256_set1_epi32(15);
    let one = _mm256_set1_epi32(1);
    let half = _mm256_set1_epi32(0x7FFF);
    let kept = _mm256_set1_epi32(0xFFFF_0000u32 as i32);
    let mut w = [_mm256_setzero_ps(); GROUP];
    for j in 0..4 {
        let both = load_bytes(&octets[j][h]);
        for i in 0..8 {
            // Value i of the octet: byte i % 4 of the lane, high nibble from 4 on.
            let shift = _mm_cvtsi32_si128(i % 4 * 8 + i / 4 * 4);
            let q = _mm256_and_si256(_mm256_srl_epi32(both, shift), nibble);
            let q = _mm256_cvtepi32_ps(_mm256_sub_epi32(q, offset));
            let bits = _mm256_castps_si256(_mm256_add_ps(_mm256_mul_ps(d, q), m));
            let even = _mm256_and_si256(_mm256_srli_epi32::<16>(bits), one);
            let up = _mm256_add_epi32(_mm256_add_epi32(bits, half), even);
            w[j * 8 + i as usize] = _mm256_castsi256_ps(_mm256_and_si256(up, kept));
        }
    }
    w
}

/// Adds one tile of 32 products to the sums of R rows; returns R.
#[inline]
#[target_feature(enable = "avx2")]
fn block<const R: usize>(
    w: &[__m256; GROUP],
    a: &[[f32; GROUP]; R],
    row: usize,
    h: usize,
    sums: &mut [[[f32; 8]; 2]],
) -> usize {
    let mut t = [_mm256_setzero_ps(); R];
    for k in 0..GROUP {
        for r in 0..R {
            t[r] = _mm256_add_ps(t[r], _mm256_mul_ps(_mm256_set1_ps(a[r][k]), w[k]));
        }
    }
    for r in 0..R {
        let acc = load_f32(&sums[row + r][h]);
        store_f32(_mm256_add_ps(acc, t[r]), &mut sums[row + r][h]);
    }
    R
}
