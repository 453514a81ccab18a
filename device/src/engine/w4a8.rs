//! The `w4a8` engine: 4-bit weights times int8 activations, block by block.

use std::ops::Range;

use super::int8::quantise;
use super::launch::{Activations, LaunchError};
use crate::pack::{GROUP, Q4Image, TILE};

/// Fills `codes` (rows padded to 32 with zeros), `scale`, `sum` and `total`, in blocks of 32.
#[inline(always)]
pub(crate) fn prepare(
    inner: usize,
    x: &[f32],
    rows: usize,
    into: &mut Activations,
) -> Result<(), LaunchError> {
    let blocks = inner.div_ceil(GROUP);
    into.begin(rows, blocks);
    into.codes.resize(rows * blocks * GROUP, 0);
    for r in 0..rows {
        let row = &x[r * inner..(r + 1) * inner];
        for (b, values) in row.chunks(GROUP).enumerate() {
            let at = into.place(r, b);
            let codes = &mut into.codes[at * GROUP..][..values.len()];
            let (scale, sum) = quantise(values, codes).map_err(|place| LaunchError::NotFinite {
                row: r,
                column: b * GROUP + place,
                value: values[place],
            })?;
            into.scale[at] = scale;
            into.sum[at] = sum;
            into.total[at] = sum as f32;
        }
    }
    Ok(())
}

/// The definition.
///
/// ```text
/// block b of 32:  i1 = sum_k (q - offset) · a    i2 = sum_k a                       in i32, exact
/// acc = acc + s · (d · f32(i1) + m · f32(i2))    every operation rounded to f32, blocks left to right from 0
/// ```
///
/// with d, m, q of the weight's group and s, a of the activation's block. `y` is `[tile, row, 16]`.
#[inline(always)]
pub(crate) fn portable(image: &Q4Image, a: &Activations, tiles: Range<usize>, y: &mut [f32]) {
    let outputs = y.as_chunks_mut::<TILE>().0;
    for (tile, outputs) in tiles.zip(outputs.chunks_mut(a.rows)) {
        for o in 0..TILE {
            let output = tile * TILE + o;
            let offset = i32::from(image.offset(output));
            for (r, row) in outputs.iter_mut().enumerate() {
                let mut acc = 0.0;
                for b in 0..image.groups {
                    let at = a.place(r, b);
                    let codes = &a.codes[at * GROUP..][..GROUP];
                    let (d, m) = image.scale(output, b);
                    let (mut i1, mut i2) = (0, 0);
                    for k in 0..GROUP {
                        let q = i32::from(image.code(output, b * GROUP + k)) - offset;
                        i1 += q * i32::from(codes[k]);
                        i2 += i32::from(codes[k]);
                    }
                    acc += a.scale[at] * (d * i1 as f32 + m * i2 as f32);
                }
                row[o] = acc;
            }
        }
    }
}
