//! The `w4a16` engine: bf16 activations times 4-bit weights decoded to bf16.

use std::ops::Range;

use super::launch::{Activations, LaunchError};
use crate::pack::{GROUP, Q4Image, TILE};
use crate::round::bf16;

/// Fills `values`: bf16(x) widened to f32, padded to 32 with zeros.
#[inline(always)]
pub(crate) fn prepare(
    inner: usize,
    x: &[f32],
    rows: usize,
    into: &mut Activations,
) -> Result<(), LaunchError> {
    let blocks = inner.div_ceil(GROUP);
    into.begin(rows, blocks * GROUP, blocks);
    for r in 0..rows {
        let row = &x[r * inner..(r + 1) * inner];
        let values = &mut into.values[r * into.depth..][..inner];
        for (value, &x) in values.iter_mut().zip(row) {
            *value = bf16(x);
        }
        if let Some(column) = values.iter().position(|v| !v.is_finite()) {
            return Err(LaunchError::NotFinite { row: r, column, value: row[column] });
        }
    }
    Ok(())
}

/// The definition.
///
/// ```text
/// w = bf16(d · (q - offset) + m)    a = bf16(x)    d and m are bf16; product and sum are rounded to f32 first
/// t = ((0 + a[0]·w[0]) + a[1]·w[1]) + …            over a tile of 32, every operation rounded to f32
/// acc = acc + t                                    tiles left to right from 0
/// ```
///
/// A product of two bf16 is exact in f32 unless it is subnormal or overflows; then it is rounded like any other.
/// `y` is `[tile, row, 16]`.
#[inline(always)]
pub(crate) fn portable(image: &Q4Image, a: &Activations, tiles: Range<usize>, y: &mut [f32]) {
    let outputs = y.as_chunks_mut::<TILE>().0;
    for (tile, outputs) in tiles.zip(outputs.chunks_mut(a.rows)) {
        for (r, row) in outputs.iter_mut().enumerate() {
            let a = &a.values[r * a.depth..(r + 1) * a.depth];
            for o in 0..TILE {
                let mut acc = 0.0;
                for b in 0..image.groups {
                    let mut t = 0.0;
                    for i in b * GROUP..image.inner.min((b + 1) * GROUP) {
                        t += a[i] * bf16(image.value(tile * TILE + o, i));
                    }
                    acc += t;
                }
                row[o] = acc;
            }
        }
    }
}
