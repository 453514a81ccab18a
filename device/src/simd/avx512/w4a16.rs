//! bf16 activations times 4-bit weights: a group of a tile is decoded once, then meets every row.

use std::arch::x86_64::*;
use std::ops::Range;

use super::{BF16, load_bytes, load_f32, plane, scales, store_f32};
use crate::engine::Activations;
use crate::pack::{GROUP, Q4Image, TILE};
use crate::simd::rows;

#[target_feature(enable = "avx512f,avx512bw")]
pub(super) fn run(image: &Q4Image, a: &Activations, tiles: Range<usize>, y: &mut [f32]) {
    let outputs = y.as_chunks_mut::<TILE>().0;
    let values = a.values.as_chunks::<GROUP>().0;
    for (tile, outputs) in tiles.zip(outputs.chunks_mut(a.rows)) {
        outputs.fill([0.0; TILE]);
        let width = plane(BF16);
        let planes = image.tile_scales(tile).chunks_exact(if image.mins { 2 * width } else { width });
        for (b, (bytes, planes)) in image.tile(tile).iter().zip(planes).enumerate() {
            let d = scales::<BF16>(planes);
            let m = if image.mins { scales::<BF16>(&planes[width..]) } else { _mm512_setzero_ps() };
            let w = decode(bytes, d, m, image.tile_symmetric(tile));
            let mut r = 0;
            while r < a.rows {
                r += match a.together(r) {
                    8.. => block::<8>(&w, rows(values, a.place(r, b)), r, outputs),
                    4.. => block::<4>(&w, rows(values, a.place(r, b)), r, outputs),
                    2.. => block::<2>(&w, rows(values, a.place(r, b)), r, outputs),
                    _ => block::<1>(&w, rows(values, a.place(r, b)), r, outputs),
                };
            }
        }
    }
}

/// bf16(d · (q - offset) + m) of the 32 columns of one tile and group.
///
/// The weights of a group are finite before they are rounded or infinite, never NaN, so the integer form of
/// the rounding needs no exception.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn decode(bytes: &[u8; 256], d: __m512, m: __m512, symmetric: u16) -> [__m512; GROUP] {
    let octets: &[[u8; 64]; 4] = bytemuck::cast_ref(bytes);
    let offset = _mm512_maskz_set1_epi32(symmetric, 8);
    let nibble = _mm512_set1_epi32(15);
    let one = _mm512_set1_epi32(1);
    let half = _mm512_set1_epi32(0x7FFF);
    let kept = _mm512_set1_epi32(0xFFFF_0000u32 as i32);
    let mut w = [_mm512_setzero_ps(); GROUP];
    for j in 0..4 {
        let both = load_bytes(&octets[j]);
        for i in 0..8 {
            // Value i of the octet: byte i % 4 of the lane, high nibble from 4 on.
            let shift = _mm_cvtsi32_si128(i % 4 * 8 + i / 4 * 4);
            let q = _mm512_and_si512(_mm512_srl_epi32(both, shift), nibble);
            let q = _mm512_cvtepi32_ps(_mm512_sub_epi32(q, offset));
            let bits = _mm512_castps_si512(_mm512_add_ps(_mm512_mul_ps(d, q), m));
            let even = _mm512_and_si512(_mm512_srli_epi32::<16>(bits), one);
            let up = _mm512_add_epi32(_mm512_add_epi32(bits, half), even);
            w[j * 8 + i as usize] = _mm512_castsi512_ps(_mm512_and_si512(up, kept));
        }
    }
    w
}

/// Adds one tile of 32 products to the sums of R rows; returns R.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn block<const R: usize>(
    w: &[__m512; GROUP],
    a: &[[f32; GROUP]; R],
    row: usize,
    sums: &mut [[f32; TILE]],
) -> usize {
    let mut t = [_mm512_setzero_ps(); R];
    for k in 0..GROUP {
        for r in 0..R {
            t[r] = _mm512_add_ps(t[r], _mm512_mul_ps(_mm512_set1_ps(a[r][k]), w[k]));
        }
    }
    for r in 0..R {
        let acc = load_f32(&sums[row + r]);
        store_f32(_mm512_add_ps(acc, t[r]), &mut sums[row + r]);
    }
    R
}
