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

#[cfg(test)]
mod tests {
    use crate::engine::Engine;
    use crate::engine::tests::{pack_codes, product};

    // w = 1 · 1 + 2^-8 is a tie of bf16 and goes to 1; x = 1 + 3·2^-8 is a tie and goes to 1 + 2^-6.
    #[test]
    fn both_sides_are_rounded_to_bf16() {
        let image = pack_codes(Engine::W4A16, &[1], 1.0, 1.0 / 256.0, false);
        assert_eq!(product(&image, &[1.0 + 3.0 / 256.0]), [1.0 + 1.0 / 64.0]);
        let mut row = [0.0];
        image.unpack_row(0, &mut row);
        assert_eq!(row, [1.0]);
    }

    // The scale 1 + 2^-8 is kept as bf16, 1; from f32 the weight 3 · (1 + 2^-8) would become 3 + 2^-6.
    #[test]
    fn scales_are_bf16() {
        let image = pack_codes(Engine::W4A16, &[3], 1.0 + 1.0 / 256.0, 0.0, false);
        assert_eq!(product(&image, &[1.0]), [3.0]);
    }

    // Values 2^24 | 1 1: the second tile is summed before it is added, so its 2 is kept.
    // One sum over all of K would lose each 1 by itself. In one tile they are lost.
    #[test]
    fn tiles_of_32_are_summed_apart() {
        let image = pack_codes(Engine::W4A16, &[9; 40], 1.0, 0.0, true);
        let mut x = [0.0; 40];
        (x[0], x[32], x[39]) = (16_777_216.0, 1.0, 1.0);
        assert_eq!(product(&image, &x), [16_777_218.0]);
        x.swap(32, 30);
        x.swap(39, 31);
        assert_eq!(product(&image, &x), [16_777_216.0]);
    }
}
