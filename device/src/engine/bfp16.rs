//! The `bfp16` engine: block floating point on both sides, eight values a block.

use std::ops::Range;

use super::launch::{Activations, LaunchError};
use crate::pack::{BLOCK, Bfp16Image, TILE, to_block};
use crate::round::bf16;

/// Fills `codes` with mantissas (rows padded to 8 with zeros), `exponent` and `bias`, in blocks of 8.
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
    into.begin(rows, blocks);
    into.codes.resize(rows * blocks * BLOCK, 0);
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
            let at = into.place(r, b);
            into.codes[at * BLOCK..][..BLOCK].copy_from_slice(&mantissas);
            into.exponent[at] = f32::from(exponent);
            into.bias[at] = -128 * mantissas.iter().map(|&m| i32::from(m)).sum::<i32>();
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
            let mut acc = [0.0; TILE];
            for (b, (w, ew)) in image.tile(tile).iter().zip(image.tile_exponents(tile)).enumerate() {
                let at = a.place(r, b);
                let mantissas = &a.codes[at * BLOCK..][..BLOCK];
                let ea = a.exponent[at] as u8;
                for o in 0..TILE {
                    let mut i = 0;
                    for k in 0..BLOCK {
                        i += i32::from(mantissas[k]) * i32::from(w[k / 4][o][k % 4]);
                    }
                    acc[o] += scaled(i, ea, ew[o]);
                }
            }
            *row = acc;
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::engine::Engine;
    use crate::engine::tests::{pack, product};

    // x = (1, 2.5/64): mantissas 64 and RNE(2.5) = 2. w = (1, 0.5): 64 and 32.
    // (64 · 64 + 2 · 32) · 2^-12 = 1.015625.
    #[test]
    fn a_block_by_hand() {
        let image = pack(Engine::Bfp16, &[&[1.0, 0.5]]);
        assert_eq!(product(&image, &[1.0, 2.5 / 64.0]), [1.015_625]);
    }

    // The second block has an exponent of its own: beside 1024 the value 2^-10 would vanish.
    // The first block loses it: 2^-10 / (1024/64) is far below half.
    #[test]
    fn blocks_of_eight_have_their_own_exponent() {
        let image = pack(Engine::Bfp16, &[&[0.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0]]);
        let small = 0.5f32.powi(10);
        let mut x = [1024.0, small, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, small];
        assert_eq!(product(&image, &x), [small]);
        x[0] = 0.0;
        assert_eq!(product(&image, &x), [2.0 * small]);
    }

    // 1 + 2^-8 is first rounded to bf16, 1; the block then holds it exactly. The weight is not rounded to bf16
    // first, but its mantissa has fewer bits: 127.5/64 goes to 128 and is held at 127.
    #[test]
    fn what_rounds_where() {
        let image = pack(Engine::Bfp16, &[&[127.5 / 64.0]]);
        assert_eq!(product(&image, &[1.0 + 1.0 / 256.0]), [127.0 / 64.0]);
    }

    // 2^-133 is subnormal, and 2^120 · 2^120 lies beyond f32.
    #[test]
    fn far_exponents() {
        let (small, large) = (0.5f32.powi(133), 2.0f32.powi(120));
        let image = pack(Engine::Bfp16, &[&[small]]);
        assert_eq!(product(&image, &[large]), [0.5f32.powi(13)]);
        let image = pack(Engine::Bfp16, &[&[large]]);
        assert_eq!(product(&image, &[large]), [f32::INFINITY]);
    }
}
