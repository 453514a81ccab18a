//! AVX-512 kernels: sixteen outputs in one register.

mod bfp16;
mod int8;
mod strict;
mod w4a16;
mod w4a8;

use std::arch::x86_64::*;
use std::ops::Range;

use super::prefetch;
use crate::engine::{Activations, LaunchError};
use crate::pack::{Image, ScaleFormat, Storage};

/// Whether this machine has every instruction that the functions of this module are compiled for.
pub(super) fn is_supported() -> bool {
    is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512dq")
        && is_x86_feature_detected!("avx512vl")
        && is_x86_feature_detected!("avx512vnni")
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
pub(super) fn prepare(
    image: &Image,
    x: &[f32],
    rows: usize,
    into: &mut Activations,
) -> Result<(), LaunchError> {
    super::prepare_portable(image, x, rows, into)?;
    if let Storage::Int8(_) = image.storage {
        into.biased.clear();
        into.biased.extend(into.codes.iter().map(|&code| code as u8 ^ 0x80));
    }
    Ok(())
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
pub(super) fn probe(lines: &[[u64; 8]]) -> u64 {
    let mut sums = [_mm512_setzero_si512(); 4];
    for (i, line) in lines.iter().enumerate() {
        prefetch(line, 4096);
        sums[i % 4] = _mm512_add_epi64(sums[i % 4], load_bytes(bytemuck::cast_ref(line)));
    }
    let sum = _mm512_add_epi64(_mm512_add_epi64(sums[0], sums[1]), _mm512_add_epi64(sums[2], sums[3]));
    _mm512_reduce_add_epi64(sum) as u64
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
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
#[target_feature(enable = "avx512f")]
fn load_f32(values: &[f32; 16]) -> __m512 {
    // SAFETY: the reference covers the 64 bytes that are read; no alignment is needed.
    unsafe { _mm512_loadu_ps(values.as_ptr()) }
}

#[inline]
#[target_feature(enable = "avx512f")]
fn store_f32(values: __m512, into: &mut [f32; 16]) {
    // SAFETY: the reference covers the 64 bytes that are written; no alignment is needed.
    unsafe { _mm512_storeu_ps(into.as_mut_ptr(), values) }
}

#[inline]
#[target_feature(enable = "avx512f")]
fn load_i32(values: &[i32; 16]) -> __m512i {
    // SAFETY: the reference covers the 64 bytes that are read; no alignment is needed.
    unsafe { _mm512_loadu_si512(values.as_ptr().cast()) }
}

#[inline]
#[target_feature(enable = "avx512f")]
fn store_i32(values: __m512i, into: &mut [i32; 16]) {
    // SAFETY: the reference covers the 64 bytes that are written; no alignment is needed.
    unsafe { _mm512_storeu_si512(into.as_mut_ptr().cast(), values) }
}

#[inline]
#[target_feature(enable = "avx512f")]
fn load_bytes(bytes: &[u8; 64]) -> __m512i {
    // SAFETY: the reference covers the 64 bytes that are read; no alignment is needed.
    unsafe { _mm512_loadu_si512(bytes.as_ptr().cast()) }
}

/// Four int8 codes, repeated in every lane.
#[inline]
#[target_feature(enable = "avx512f")]
fn repeat(quad: [i8; 4]) -> __m512i {
    _mm512_set1_epi32(i32::from_ne_bytes(bytemuck::cast(quad)))
}

/// Formats of stored scales, as constants that a kernel can be compiled for.
const F16: u8 = ScaleFormat::F16 as u8;
const BF16: u8 = ScaleFormat::Bf16 as u8;
const F32: u8 = ScaleFormat::F32 as u8;

/// Bytes of sixteen scales.
const fn plane(format: u8) -> usize {
    if format == F32 { 64 } else { 32 }
}

/// Sixteen scales in f32; `bytes` starts with them.
#[inline]
#[target_feature(enable = "avx512f")]
fn scales<const FORMAT: u8>(bytes: &[u8]) -> __m512 {
    let bytes = &bytes[..plane(FORMAT)];
    // SAFETY: the slice was cut to the 64 or 32 bytes that are read; no alignment is needed.
    unsafe {
        match FORMAT {
            F32 => _mm512_loadu_ps(bytes.as_ptr().cast()),
            F16 => _mm512_cvtph_ps(_mm256_loadu_si256(bytes.as_ptr().cast())),
            _ => {
                let halves = _mm256_loadu_si256(bytes.as_ptr().cast());
                _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(halves)))
            }
        }
    }
}
