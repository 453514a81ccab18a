//! AVX2 kernels: eight outputs in one register.

mod bfp16;
mod int8;
mod strict;
mod w4a16;
mod w4a8;

use std::arch::x86_64::*;
use std::ops::Range;

use crate::engine::{Activations, LaunchError};
use crate::pack::{Image, ScaleFormat, Storage};

/// Whether this machine has every instruction that the functions of this module are compiled for.
pub(super) fn is_supported() -> bool {
    is_x86_feature_detected!("avx2") && is_x86_feature_detected!("f16c")
}

#[target_feature(enable = "avx2,f16c")]
pub(super) fn prepare(
    image: &Image,
    x: &[f32],
    rows: usize,
    into: &mut Activations,
) -> Result<(), LaunchError> {
    super::prepare_portable(image, x, rows, into)
}

#[target_feature(enable = "avx2,f16c")]
pub(super) fn run(image: &Image, x: &[f32], a: &Activations, tiles: Range<usize>, y: &mut [f32]) {
    match &image.storage {
        Storage::Strict(image) => strict::run(image, x, tiles, y),
        Storage::Int8(image) => int8::run(image, a, tiles, y),
        Storage::W4A8(image) => w4a8::run(image, a, tiles, y),
        Storage::W4A16(image) => w4a16::run(image, a, tiles, y),
        Storage::Bfp16(image) => bfp16::run(image, a, tiles, y),
    }
}

#[inline]
#[target_feature(enable = "avx2")]
fn load_f32(values: &[f32; 8]) -> __m256 {
    // SAFETY: the reference covers the 32 bytes that are read; no alignment is needed.
    unsafe { _mm256_loadu_ps(values.as_ptr()) }
}

#[inline]
#[target_feature(enable = "avx2")]
fn store_f32(values: __m256, into: &mut [f32; 8]) {
    // SAFETY: the reference covers the 32 bytes that are written; no alignment is needed.
    unsafe { _mm256_storeu_ps(into.as_mut_ptr(), values) }
}

#[inline]
#[target_feature(enable = "avx2")]
fn load_i32(values: &[i32; 8]) -> __m256i {
    // SAFETY: the reference covers the 32 bytes that are read; no alignment is needed.
    unsafe { _mm256_loadu_si256(values.as_ptr().cast()) }
}

#[inline]
#[target_feature(enable = "avx2")]
fn store_i32(values: __m256i, into: &mut [i32; 8]) {
    // SAFETY: the reference covers the 32 bytes that are written; no alignment is needed.
    unsafe { _mm256_storeu_si256(into.as_mut_ptr().cast(), values) }
}

#[inline]
#[target_feature(enable = "avx2")]
fn load_bytes(bytes: &[u8; 32]) -> __m256i {
    // SAFETY: the reference covers the 32 bytes that are read; no alignment is needed.
    unsafe { _mm256_loadu_si256(bytes.as_ptr().cast()) }
}

/// Four int8 codes, repeated in every lane.
#[inline]
#[target_feature(enable = "avx2")]
fn repeat(quad: [i8; 4]) -> __m256i {
    _mm256_set1_epi32(i32::from_ne_bytes(bytemuck::cast(quad)))
}

/// Adds the products of four int8 neighbours to each i32 lane; no byte is -128.
///
/// The instruction multiplies unsigned with signed bytes and saturates pairs in i16, so the sign of `w` moves
/// to `a`: a pair of products is then at most 2 · 127 · 127 = 32258.
#[inline]
#[target_feature(enable = "avx2")]
fn dot(acc: __m256i, magnitude: __m256i, w: __m256i, a: __m256i) -> __m256i {
    let pairs = _mm256_maddubs_epi16(magnitude, _mm256_sign_epi8(a, w));
    _mm256_add_epi32(acc, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)))
}

/// Sets the lanes of `half` (outputs 8·half ..) whose bit is set to all ones.
#[inline]
#[target_feature(enable = "avx2")]
fn lanes(bits: u16, half: usize) -> __m256i {
    let place = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    let bits = _mm256_set1_epi32(i32::from(bits >> (8 * half) & 0xFF));
    _mm256_cmpeq_epi32(_mm256_and_si256(bits, place), place)
}

/// Formats of stored scales, as constants that a kernel can be compiled for.
const F16: u8 = ScaleFormat::F16 as u8;
const BF16: u8 = ScaleFormat::Bf16 as u8;
const F32: u8 = ScaleFormat::F32 as u8;

/// Bytes of eight scales.
const fn plane(format: u8) -> usize {
    if format == F32 { 32 } else { 16 }
}

/// Eight scales in f32; `bytes` starts with them.
#[inline]
#[target_feature(enable = "avx2,f16c")]
fn scales<const FORMAT: u8>(bytes: &[u8]) -> __m256 {
    let bytes = &bytes[..plane(FORMAT)];
    // SAFETY: the slice was cut to the 32 or 16 bytes that are read; no alignment is needed.
    unsafe {
        match FORMAT {
            F32 => _mm256_loadu_ps(bytes.as_ptr().cast()),
            F16 => _mm256_cvtph_ps(_mm_loadu_si128(bytes.as_ptr().cast())),
            _ => {
                let halves = _mm_loadu_si128(bytes.as_ptr().cast());
                _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(halves)))
            }
        }
    }
}
