//! The `bfp16` engine: block floating point on both sides, eight values a block.

use std::ops::Range;

use super::launch::{Activations, LaunchError};
use crate::pack::{BLOCK, Bfp16Image, TILE, to_block};
use crate::round::bf16;

/// Fills `codes` with mantissas (padded to 8 with zeros), and one `exponent` and `sum` per block.
///
/// An activation is rounded to bf16, then its block to eight mantissas with a shared exponent by the rule of
/// the weights:
///
/// ```text
/// E = biased exponent of the largest magnitude     m = clamp(RNE(bf16(x) / 2^(E-133)), -127, 127)
/// ```
#[inline(always)]
pub(crate) fn prepare(
    inner: usize,
    x: &[f32],
    rows: usize,
    into: &mut Activations,
) -> Result<(), LaunchError> {
    let blocks = inner.div_ceil(BLOCK);
    into.begin(rows, blocks * BLOCK, blocks);
    for r in 0..rows {
        let row = &x[r * inner..(r + 1) * inner];
        for (b, values) in row.chunks(BLOCK).enumerate() {
            let mut rounded = [0.0; BLOCK];
            for (rounded, &x) in rounded.iter_mut().zip(values) {
                *rounded = bf16(x);
            }
            if let Some(place) = rounded.iter().position(|v| !v.is_finite()) {
                return Err(LaunchError::NotFinite {
                    row: r,
                    column: b * BLOCK + place,
                    value: values[place],
                });
            }
            let (mantissas, exponent) = to_block(&rounded);
            into.codes[r * into.depth + b * BLOCK..][..BLOCK].copy_from_slice(&mantissas);
            into.exponent[r * blocks + b] = exponent;
            into.sum[r * blocks + b] = mantissas.iter().map(|&m| i32::from(m)).sum();
        }
    }
    Ok(())
}

/// i · 2^(EA+EW-266), rounded to f32 once.
#[inline(always)]
pub(crate) fn scaled(i: i32, ea: u8, ew: u8) -> f32 {
    (f64::from(i) * f64::from_bits((1023 - 266 + u64::from(ea) + u64::from(ew)) << 52)) as f32
}

/// The definition.
///
/// ```text
/// block b of 8:  i = sum_k ma[k] · mw[k]  in i32, exact
/// acc = acc + f32(i · 2^(EA+EW-266))      the scaled sum exact unless it leaves the range of f32, then rounded
///                                         once; each addition rounded to f32, blocks left to right from 0
/// ```
///
/// `y` is `[tile, row, 16]`.
#[inline(always)]
pub(crate) fn portable(image: &Bfp16Image, a: &Activations, tiles: Range<usize>, y: &mut [f32]) {
    let outputs = y.as_chunks_mut::<TILE>().0;
    for (tile, outputs) in tiles.zip(outputs.chunks_mut(a.rows)) {
        for (r, row) in outputs.iter_mut().enumerate() {
            let mantissas = a.codes[r * a.depth..(r + 1) * a.depth].as_chunks::<BLOCK>().0;
            let exponents = &a.exponent[r * a.blocks..(r + 1) * a.blocks];
            let mut acc = [0.0; TILE];
            for ((w, ew), (a, &ea)) in
                image.tile(tile).iter().zip(image.tile_exponents(tile)).zip(mantissas.iter().zip(exponents))
            {
                for o in 0..TILE {
                    let mut i = 0;
                    for k in 0..BLOCK {
                        i += i32::from(a[k]) * i32::from(w[k / 4][o][k % 4]);
                    }
                    acc[o] += scaled(i, ea, ew[o]);
                }
            }
            *row = acc;
        }
    }
}
