//! The `w4a8` engine: 4-bit weights times int8 activations, block by block.

use std::ops::Range;

use super::int8::quantise;
use super::launch::{Activations, LaunchError};
use crate::pack::{GROUP, Q4Image, TILE};

/// Fills `codes` (rows padded to 32 with zeros), `scale`, `bias` and `total`, in blocks of 32.
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
            into.bias[at] = -128 * sum;
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

#[cfg(test)]
mod tests {
    use crate::engine::Engine;
    use crate::engine::tests::{pack_codes, product};

    // x = (127, 2) has scale 1. w = 0.5 · (3, 5) - 1 = (0.5, 1.5); 127 · 0.5 + 2 · 1.5 = 66.5.
    #[test]
    fn scale_and_zero() {
        let image = pack_codes(Engine::W4A8, &[3, 5], 0.5, -1.0, false);
        assert_eq!(product(&image, &[127.0, 2.0]), [66.5]);
    }

    // Code 8 is zero: w = 0.5 · (-5, 7), so 127 · -2.5 + 2 · 3.5 = -310.5.
    #[test]
    fn symmetric_codes() {
        let image = pack_codes(Engine::W4A8, &[3, 15], 0.5, 0.0, true);
        assert_eq!(product(&image, &[127.0, 2.0]), [-310.5]);
    }

    // Each block has a scale of its own, 254/127 = 2 and 127/127 = 1.
    // Block 0: 2 · (15 · 127), block 1: 1 · (1 · 127 + 2 · 3).
    #[test]
    fn blocks_are_scaled_apart() {
        let mut codes = [0; 34];
        (codes[0], codes[32], codes[33]) = (15, 1, 2);
        let mut x = [0.0; 34];
        (x[0], x[32], x[33]) = (254.0, 127.0, 3.0);
        let image = pack_codes(Engine::W4A8, &codes, 1.0, 0.0, false);
        assert_eq!(product(&image, &x), [3810.0 + 133.0]);
    }

    // Blocks of 2^24, 1 and 1: from left to right each 1 is a tie and lost; reversed, they arrive as 2.
    // A block gives s · 127 with s = 2^24/127 or 1/127, which rounds to 2^24 and to 1.
    #[test]
    fn blocks_add_from_left_to_right() {
        let mut codes = [0; 96];
        (codes[0], codes[32], codes[64]) = (1, 1, 1);
        let mut x = [0.0; 96];
        (x[0], x[32], x[64]) = (16_777_216.0, 1.0, 1.0);
        let image = pack_codes(Engine::W4A8, &codes, 1.0, 0.0, false);
        assert_eq!(product(&image, &x), [16_777_216.0]);
        x.reverse();
        codes.reverse();
        let image = pack_codes(Engine::W4A8, &codes, 1.0, 0.0, false);
        assert_eq!(product(&image, &x), [16_777_218.0]);
    }
}
