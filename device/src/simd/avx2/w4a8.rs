//! 4-bit weights times int8 activations: up to four rows meet eight outputs of a tile.

use std::arch::x86_64::*;
use std::ops::Range;

use super::{BF16, F16, F32, lanes, load_bytes, plane, repeat, scales, store_f32};
use crate::engine::Activations;
use crate::pack::{Q4Image, ScaleFormat};
use crate::simd::{prefetch, rows};

/// Bytes between the codes that are read and those that are asked for.
const AHEAD: usize = 4096;

#[target_feature(enable = "avx2,f16c")]
pub(super) fn run(image: &Q4Image, a: &Activations, tiles: Range<usize>, y: &mut [f32]) {
    match (image.format, image.mins) {
        (ScaleFormat::F16, false) => walk::<F16, false>(image, a, tiles, y),
        (ScaleFormat::F16, true) => walk::<F16, true>(image, a, tiles, y),
        (ScaleFormat::Bf16, false) => walk::<BF16, false>(image, a, tiles, y),
        (ScaleFormat::Bf16, true) => walk::<BF16, true>(image, a, tiles, y),
        (ScaleFormat::F32, false) => walk::<F32, false>(image, a, tiles, y),
        (ScaleFormat::F32, true) => walk::<F32, true>(image, a, tiles, y),
    }
}

#[target_feature(enable = "avx2,f16c")]
fn walk<const FORMAT: u8, const MINS: bool>(
    image: &Q4Image,
    a: &Activations,
    tiles: Range<usize>,
    y: &mut [f32],
) {
    let outputs = y.as_chunks_mut::<8>().0.as_chunks_mut::<2>().0;
    for (tile, outputs) in tiles.zip(outputs.chunks_mut(a.rows)) {
        let mut r = 0;
        while r < a.rows {
            r += match a.together(r) {
                4.. => block::<FORMAT, MINS, 4>(image, tile, a, r, outputs),
                2.. => block::<FORMAT, MINS, 2>(image, tile, a, r, outputs),
                _ => block::<FORMAT, MINS, 1>(image, tile, a, r, outputs),
            };
        }
    }
}

/// One tile for R rows; returns R.
///
/// The pairs of a block are summed in i16: 8 · 2 · 15 · 127 = 30480 fits. Without zeros the second term of the
/// definition is +-0 and changes no sum.
#[target_feature(enable = "avx2,f16c")]
fn block<const FORMAT: u8, const MINS: bool, const R: usize>(
    image: &Q4Image,
    tile: usize,
    a: &Activations,
    row: usize,
    outputs: &mut [[[f32; 8]; 2]],
) -> usize {
    let (first, step) = (a.place(row, 0), a.grouped(row));
    let blocks = a.codes.as_chunks::<4>().0.as_chunks::<8>().0;
    let symmetric = [lanes(image.tile_symmetric(tile), 0), lanes(image.tile_symmetric(tile), 1)];
    let nibble = _mm256_set1_epi8(15);
    let ones = _mm256_set1_epi16(1);
    let width = plane(FORMAT);
    let planes = image.tile_scales(tile).chunks_exact(if MINS { 4 * width } else { 2 * width });
    let mut acc = [[_mm256_setzero_ps(); 2]; R];
    for (b, (bytes, planes)) in image.tile(tile).iter().zip(planes).enumerate() {
        let at = first + b * step;
        let codes: &[_; R] = rows(blocks, at);
        let (scale, bias, total): (&[_; R], &[_; R], &[_; R]) =
            (rows(&a.scale, at), rows(&a.bias, at), rows(&a.total, at));
        let octets: &[[[u8; 32]; 2]; 4] = bytemuck::cast_ref(bytes);
        if R == 1 {
            octets.iter().for_each(|octet| prefetch(octet, AHEAD));
            prefetch(planes, AHEAD / 4);
        }
        for h in 0..2 {
            let mut pairs = [_mm256_setzero_si256(); R];
            for j in 0..4 {
                let both = load_bytes(&octets[j][h]);
                let even = _mm256_and_si256(both, nibble);
                let odd = _mm256_and_si256(_mm256_srli_epi16::<4>(both), nibble);
                for r in 0..R {
                    let a = &codes[r];
                    let low = _mm256_maddubs_epi16(even, repeat(a[2 * j]));
                    let high = _mm256_maddubs_epi16(odd, repeat(a[2 * j + 1]));
                    pairs[r] = _mm256_add_epi16(pairs[r], _mm256_add_epi16(low, high));
                }
            }
            let d = scales::<FORMAT>(&planes[h * width..]);
            for r in 0..R {
                let offset = _mm256_and_si256(symmetric[h], _mm256_set1_epi32(bias[r] / 16));
                let i1 = _mm256_add_epi32(_mm256_madd_epi16(pairs[r], ones), offset);
                let mut term = _mm256_mul_ps(d, _mm256_cvtepi32_ps(i1));
                if MINS {
                    let i2 = _mm256_set1_ps(total[r]);
                    term =
                        _mm256_add_ps(term, _mm256_mul_ps(scales::<FORMAT>(&planes[(2 + h) * width..]), i2));
                }
                acc[r][h] = _mm256_add_ps(acc[r][h], _mm256_mul_ps(_mm256_set1_ps(scale[r]), term));
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
