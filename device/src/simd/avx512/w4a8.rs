//! 4-bit weights times int8 activations: up to sixteen rows meet one tile.

use std::arch::x86_64::*;
use std::ops::Range;

use super::{BF16, F16, F32, load_bytes, plane, repeat, scales, store_f32};
use crate::engine::Activations;
use crate::pack::{Q4Image, ScaleFormat, TILE};

#[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
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

#[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
fn walk<const FORMAT: u8, const MINS: bool>(
    image: &Q4Image,
    a: &Activations,
    tiles: Range<usize>,
    y: &mut [f32],
) {
    let outputs = y.as_chunks_mut::<TILE>().0;
    for (tile, outputs) in tiles.zip(outputs.chunks_mut(a.rows)) {
        let mut r = 0;
        while r < a.rows {
            r += match a.rows - r {
                16.. => block::<FORMAT, MINS, 16>(image, tile, a, r, outputs),
                8.. => block::<FORMAT, MINS, 8>(image, tile, a, r, outputs),
                4.. => block::<FORMAT, MINS, 4>(image, tile, a, r, outputs),
                2.. => block::<FORMAT, MINS, 2>(image, tile, a, r, outputs),
                _ => block::<FORMAT, MINS, 1>(image, tile, a, r, outputs),
            };
        }
    }
}

/// One tile for R rows; returns R.
///
/// The high nibbles are multiplied in place, as 16 · q, and their sum is shifted down once: it is a multiple
/// of 16. Without zeros the second term of the definition is +-0 and changes no sum.
#[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
fn block<const FORMAT: u8, const MINS: bool, const R: usize>(
    image: &Q4Image,
    tile: usize,
    a: &Activations,
    row: usize,
    outputs: &mut [[f32; TILE]],
) -> usize {
    let groups = image.groups;
    let codes: [_; R] = std::array::from_fn(|r| {
        &a.codes[(row + r) * a.depth..][..a.depth].as_chunks::<4>().0.as_chunks::<8>().0[..groups]
    });
    let scale: [_; R] = std::array::from_fn(|r| &a.scale[(row + r) * a.blocks..][..groups]);
    let sum: [_; R] = std::array::from_fn(|r| &a.sum[(row + r) * a.blocks..][..groups]);
    let symmetric = image.tile_symmetric(tile);
    let low = _mm512_set1_epi8(0x0F);
    let high = _mm512_set1_epi8(0xF0u8 as i8);
    let width = plane(FORMAT);
    let planes = image.tile_scales(tile).chunks_exact(if MINS { 2 * width } else { width });
    let mut acc = [_mm512_setzero_ps(); R];
    for (b, (bytes, planes)) in image.tile(tile).iter().zip(planes).enumerate() {
        let octets: &[[u8; 64]; 4] = bytemuck::cast_ref(bytes);
        let mut even = [_mm512_setzero_si512(); 4];
        let mut odd = [_mm512_setzero_si512(); 4];
        for j in 0..4 {
            let both = load_bytes(&octets[j]);
            even[j] = _mm512_and_si512(both, low);
            odd[j] = _mm512_and_si512(both, high);
        }
        let d = scales::<FORMAT>(planes);
        for r in 0..R {
            let a = &codes[r][b];
            let mut lower = _mm512_maskz_set1_epi32(symmetric, -8 * sum[r][b]);
            let mut upper = _mm512_setzero_si512();
            for j in 0..4 {
                lower = _mm512_dpbusd_epi32(lower, even[j], repeat(a[2 * j]));
                upper = _mm512_dpbusd_epi32(upper, odd[j], repeat(a[2 * j + 1]));
            }
            let i1 = _mm512_add_epi32(lower, _mm512_srai_epi32::<4>(upper));
            let mut term = _mm512_mul_ps(d, _mm512_cvtepi32_ps(i1));
            if MINS {
                let i2 = _mm512_cvtepi32_ps(_mm512_set1_epi32(sum[r][b]));
                term = _mm512_add_ps(term, _mm512_mul_ps(scales::<FORMAT>(&planes[width..]), i2));
            }
            acc[r] = _mm512_add_ps(acc[r], _mm512_mul_ps(_mm512_set1_ps(scale[r][b]), term));
        }
    }
    for r in 0..R {
        store_f32(acc[r], &mut outputs[row + r]);
    }
    R
}
