//! The image of the `bfp16` engine: blocks of eight along the inner axis that share an exponent.

use super::{Buffer, TILE};
use crate::round::whole_to_i8;

/// Values that share an exponent.
pub(crate) const BLOCK: usize = 8;

/// Rounds one block to eight 8-bit mantissas and their shared exponent.
///
/// ```text
/// E = biased f32 exponent of the largest magnitude     m = clamp(RNE(x / 2^(E-133)), -127, 127)
/// ```
///
/// so that x is about m · 2^(E-133) = m · 2^(e-6) with e = E - 127, and the largest value has a magnitude of 64
/// to 127. E = 0 where every value is zero or subnormal. A block shorter than eight is filled up with zeros.
/// Every value of `block` is finite.
#[inline(always)]
pub(crate) fn to_block(block: &[f32]) -> ([i8; BLOCK], u8) {
    let largest = block.iter().fold(0, |most, x| most.max(x.to_bits() & 0x7FFF_FFFF));
    let exponent = (largest >> 23) as u8;
    // 2^(133-E) exceeds f32 where E < 6, hence two factors. A product with a power of two is exact unless it is
    // subnormal, and such a value rounds to 0 anyway.
    let power = 133 - i32::from(exponent);
    let units = [power.min(127), power - power.min(127)].map(|p| f32::from_bits(((127 + p) as u32) << 23));
    let mut mantissas = [0; BLOCK];
    for (m, &x) in mantissas.iter_mut().zip(block) {
        *m = whole_to_i8((x * units[0] * units[1]).round_ties_even().clamp(-127.0, 127.0));
    }
    (mantissas, exponent)
}

/// m · 2^(E-133), rounded to f32 once.
pub(crate) fn from_block(mantissa: i8, exponent: u8) -> f32 {
    (f64::from(mantissa) * f64::from_bits((1023 - 133 + u64::from(exponent)) << 52)) as f32
}

/// Mantissas and exponents of `out` rows, sixteen outputs a tile.
///
/// ```text
/// mantissas, per tile and block   output 0: m[0..4]   output 1: m[0..4]   …   output 0: m[4..8]   …
/// exponents, per tile and block   output 0, output 1, …
/// ```
///
/// The last tile and the last block are filled up with zeros.
pub(crate) struct Bfp16Image {
    pub blocks: usize,
    mantissas: Buffer,
    exponents: Buffer,
}

impl Bfp16Image {
    pub fn zeroed(out: usize, inner: usize) -> Bfp16Image {
        let (tiles, blocks) = (out.div_ceil(TILE), inner.div_ceil(BLOCK));
        Bfp16Image {
            blocks,
            mantissas: Buffer::zeroed(tiles * blocks * BLOCK * TILE),
            exponents: Buffer::zeroed(tiles * blocks * TILE),
        }
    }

    /// Index of the mantissa of w[o, i].
    pub fn position(&self, o: usize, i: usize) -> usize {
        let block = (o / TILE * self.blocks + i / BLOCK) * 2 + i % BLOCK / 4;
        block * 4 * TILE + o % TILE * 4 + i % 4
    }

    fn exponent_position(&self, o: usize, block: usize) -> usize {
        (o / TILE * self.blocks + block) * TILE + o % TILE
    }

    pub fn put_row(&mut self, o: usize, row: &[f32]) {
        for (b, block) in row.chunks(BLOCK).enumerate() {
            let (mantissas, exponent) = to_block(block);
            let at = self.exponent_position(o, b);
            self.exponents.as_mut_slice::<u8>()[at] = exponent;
            for (i, &m) in mantissas.iter().enumerate() {
                let at = self.position(o, b * BLOCK + i);
                self.mantissas.as_mut_slice::<i8>()[at] = m;
            }
        }
    }

    pub fn mantissa(&self, o: usize, i: usize) -> i8 {
        self.mantissas.as_slice::<i8>()[self.position(o, i)]
    }

    pub fn exponent(&self, o: usize, block: usize) -> u8 {
        self.exponents.as_slice::<u8>()[self.exponent_position(o, block)]
    }

    /// `[blocks, 2, 16, 4]`: the mantissas of one tile.
    pub fn tile(&self, tile: usize) -> &[[[[i8; 4]; TILE]; 2]] {
        let quads = self.mantissas.as_slice::<i8>().as_chunks::<4>().0;
        let blocks = quads.as_chunks::<TILE>().0.as_chunks::<2>().0;
        &blocks[tile * self.blocks..(tile + 1) * self.blocks]
    }

    /// `[blocks, 16]`: the exponents of one tile.
    pub fn tile_exponents(&self, tile: usize) -> &[[u8; TILE]] {
        &self.exponents.as_slice::<u8>().as_chunks().0[tile * self.blocks..(tile + 1) * self.blocks]
    }

    pub fn probe(&self) -> u64 {
        self.mantissas.probe().wrapping_add(self.exponents.probe())
    }

    pub fn bytes(&self) -> usize {
        self.mantissas.len() + self.exponents.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // Two blocks of eight: 256 mantissas a tile.
    #[test]
    fn positions_by_hand() {
        let image = Bfp16Image::zeroed(17, 9);
        assert_eq!(image.position(0, 1), 1);
        assert_eq!(image.position(1, 0), 4);
        assert_eq!(image.position(0, 4), 64);
        assert_eq!(image.position(0, 8), 128);
        assert_eq!(image.position(16, 0), 256);
    }

    // A published vector of the hardware format: exponent byte 7f, then the mantissas.
    #[test]
    fn a_published_block() {
        let x = [1.0, -1.0, 0.5, -0.5, 1.984_375, -0.007_812_5, 0.0, 0.000_000_953_674_3];
        let (mantissas, exponent) = to_block(&x);
        assert_eq!(exponent, 0x7F);
        assert_eq!(mantissas.map(|m| m as u8), [0x40, 0xC0, 0x20, 0xE0, 0x7F, 0x00, 0x00, 0x00]);
    }

    // The largest is 1, so the unit is 2^-6: 2.5 units go to 2, 3.5 to 4.
    // 511/256 · 64 = 127.75 rounds to 128, which the mantissa does not hold.
    #[test]
    fn ties_go_to_even_and_the_top_is_clamped() {
        let unit = 1.0 / 64.0;
        assert_eq!(to_block(&[1.0, 2.5 * unit, 3.5 * unit, -2.5 * unit]).0[..4], [64, 2, 4, -2]);
        assert_eq!(to_block(&[511.0 / 256.0, -511.0 / 256.0]).0[..2], [127, -127]);
    }

    // Subnormals are multiples of 2^-149; the unit of E = 0 is 2^-133 = 2^16 of them.
    #[test]
    fn subnormal_blocks() {
        let x = [f32::from_bits(5 << 16), f32::from_bits(1 << 15), -f32::from_bits(3 << 15)];
        let (mantissas, exponent) = to_block(&x);
        assert_eq!((exponent, &mantissas[..3]), (0, [5, 0, -2].as_slice()));
        assert_eq!(from_block(5, 0), x[0]);
    }

    #[test]
    fn mantissas_come_back() {
        for (out, inner) in [(1, 1), (3, 9), (17, 20), (33, 8)] {
            let mut image = Bfp16Image::zeroed(out, inner);
            // 64..=127 with one exponent in a block: nothing rounds.
            let w = |o: usize, i: usize| (64 + (o * 5 + i * 3) % 64) as f32 * ((1 + o + i / 8) as f32).exp2();
            for o in 0..out {
                image.put_row(o, &(0..inner).map(|i| w(o, i)).collect::<Vec<_>>());
            }
            for o in 0..out {
                for i in 0..inner {
                    assert_eq!(from_block(image.mantissa(o, i), image.exponent(o, i / 8)), w(o, i));
                }
            }
        }
    }
}
