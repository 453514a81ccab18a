//! The `w4a16` engine: bf16 activations times 4-bit weights decoded to bf16.

use std::ops::Range;

use super::launch::{Activations, LaunchError};
use crate::pack::{GROUP, Q4Image, TILE};
use crate::round::bf16;

/// Fills `values`: bf16(x) widened to f32, rows padded to 32 with zeros, in blocks of 32.
#[inline(always)]
pub(crate) fn prepare(
    inner: usize,
    x: &[f32],
    rows: usize,
    into: &mut Activations,
) -> Result<(), LaunchError> {
    let blocks = inner.div_ceil(GROUP);
    into.begin(rows, blocks);
    into.values.resize(rows * blocks * GROUP, 0.0);
    for r in 0..rows {
        let row = &x[r * inner..(r + 1) * inner];
        for (b, block) in row.chunks(GROUP).enumerate() {
            let at = into.place(r, b) * GROUP;
            let values = &mut into.values[at..at + block.len()];
            for (value, &x) in values.iter_mut().zip(block) {
                *value = bf16(x);
            }
            if let Some(place) = values.iter().position(|v| !v.is_finite()) {
                let column = b * GROUP + place;
                return Err(LaunchError::NotFinite { row: r, column, value: row[column] });
            }
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
            for o in 0..TILE {
                let mut acc = 0.0;
                for b in 0..image.groups {
                    let values = &a.values[a.place(r, b) * GROUP..];
                    let mut t = 0.0;
                    for i in b * GROUP..image.inner.min((b + 1) * GROUP) {
                        t += values[i - b * GROUP] * bf16(image.value(tile * TILE + o, i));
                    }
                    acc += t;
                }
                row[o] = acc;
            }
        }
    }
}
