//! 4-bit weights times int8 activations: up to sixteen rows meet one tile.

use std::arch::x86_64::*;
use std::ops::Range;

use super::{BF16, F16, F32, load_bytes, plane, repeat, scales, store_f32};
use crate::engine::Activations;
use crate::pack::{Q4Image, ScaleFormat, TILE};
use crate::simd::{prefetch, rows};

/// Whether no, every or some outputs of a tile are symmetric.
const PLAIN: u8 = 0;
const SYMMETRIC: u8 = 1;
const MIXED: u8 = 2;

/// Bytes between the codes that are read and those that are asked for.
const AHEAD: usize = 4096;

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
        match image.tile_symmetric(tile) {
            0 => rows_of_tile::<FORMAT, MINS, PLAIN>(image, tile, a, outputs),
            0xFFFF => rows_of_tile::<FORMAT, MINS, SYMMETRIC>(image, tile, a, outputs),
            _ => rows_of_tile::<FORMAT, MINS, MIXED>(image, tile, a, outputs),
        }
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
fn rows_of_tile<const FORMAT: u8, const MINS: bool, const KIND: u8>(
    image: &Q4Image,
    tile: usize,
    a: &Activations,
    outputs: &mut [[f32; TILE]],
) {
    let mut r = 0;
    while r < a.rows {
        r += match a.together(r) {
            16.. => block::<FORMAT, MINS, KIND, 16>(image, tile, a, r, outputs),
            8.. => block::<FORMAT, MINS, KIND, 8>(image, tile, a, r, outputs),
            4.. => block::<FORMAT, MINS, KIND, 4>(image, tile, a, r, outputs),
            2.. => block::<FORMAT, MINS, KIND, 2>(image, tile, a, r, outputs),
            _ => block::<FORMAT, MINS, KIND, 1>(image, tile, a, r, outputs),
        };
    }
}

/// One tile for R rows; returns R.
///
/// All nibbles are multiplied in the upper half of a byte, as 16 · q. The sum of a block is then 16 · i1, less than
/// 2^20: 16-bit scales are divided by 16 instead, which is exact in f32, and f32 scales meet the sum shifted down.
/// Without zeros the second term of the definition is +-0 and changes no sum.
#[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
fn block<const FORMAT: u8, const MINS: bool, const KIND: u8, const R: usize>(
    image: &Q4Image,
    tile: usize,
    a: &Activations,
    row: usize,
    outputs: &mut [[f32; TILE]],
) -> usize {
    let (first, step) = (a.place(row, 0), a.grouped(row));
    let blocks = a.codes.as_chunks::<4>().0.as_chunks::<8>().0;
    let symmetric = image.tile_symmetric(tile);
    let high = _mm512_set1_epi8(0xF0u8 as i8);
    let width = plane(FORMAT);
    let planes = image.tile_scales(tile).chunks_exact(if MINS { 2 * width } else { width });
    let mut acc = [_mm512_setzero_ps(); R];
    for (b, (bytes, planes)) in image.tile(tile).iter().zip(planes).enumerate() {
        let at = first + b * step;
        let codes: &[_; R] = rows(blocks, at);
        let (scale, bias, total): (&[_; R], &[_; R], &[_; R]) =
            (rows(&a.scale, at), rows(&a.bias, at), rows(&a.total, at));
        let octets: &[[u8; 64]; 4] = bytemuck::cast_ref(bytes);
        let mut even = [_mm512_setzero_si512(); 4];
        let mut odd = [_mm512_setzero_si512(); 4];
        for j in 0..4 {
            prefetch(&octets[j], AHEAD);
            let both = load_bytes(&octets[j]);
            even[j] = _mm512_and_si512(_mm512_slli_epi32::<4>(both), high);
            odd[j] = _mm512_and_si512(both, high);
        }
        prefetch(&planes[0], AHEAD / 4);
        let mut d = scales::<FORMAT>(planes);
        if FORMAT != F32 {
            d = _mm512_mul_ps(d, _mm512_set1_ps(1.0 / 16.0));
        }
        let m = if MINS { scales::<FORMAT>(&planes[width..]) } else { _mm512_setzero_ps() };
        for r in 0..R {
            let a = &codes[r];
            let mut i1 = match KIND {
                PLAIN => _mm512_setzero_si512(),
                SYMMETRIC => _mm512_set1_epi32(bias[r]),
                _ => _mm512_maskz_set1_epi32(symmetric, bias[r]),
            };
            for j in 0..4 {
                i1 = _mm512_dpbusd_epi32(i1, even[j], repeat(a[2 * j]));
                i1 = _mm512_dpbusd_epi32(i1, odd[j], repeat(a[2 * j + 1]));
            }
            if FORMAT == F32 {
                i1 = _mm512_srai_epi32::<4>(i1);
            }
            let mut term = _mm512_mul_ps(d, _mm512_cvtepi32_ps(i1));
            if MINS {
                let i2 = _mm512_set1_ps(total[r]);
                term = _mm512_add_ps(term, _mm512_mul_ps(m, i2));
            }
            acc[r] = _mm512_add_ps(acc[r], _mm512_mul_ps(_mm512_set1_ps(scale[r]), term));
        }
    }
    for r in 0..R {
        store_f32(acc[r], &mut outputs[row + r]);
    }
    R
}
