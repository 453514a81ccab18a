//! The image of the `int8` engine: int8 codes with one scale per output column.

use super::{Buffer, PackError};
use crate::round::int8_code;

/// Outputs in one tile of the image.
pub(crate) const WIDE: usize = 128;

/// Longest inner axis whose sums cannot leave i32: floor((2^31 - 1) / 127²).
pub(crate) const LONGEST: usize = 133_144;

/// Int8 codes of the transposed weights B[k, n] = W[n, k], both axes padded to multiples of 128 with zeros.
///
/// ```text
/// sW[n] = cmax/127 (1 where cmax < 1e-12)    code = clamp(round_half_away(w · (127/cmax)), -127, 127)
/// ```
///
/// with cmax the largest magnitude of column n. The image is cut into tiles of 64 x 128 (k x n); tiles go down k
/// first. Inside a tile four neighbours along k stand together, the operand of one four-way dot product:
///
/// ```text
/// tile 0   B[0..4, 0] B[0..4, 1] … B[0..4, 127]   B[4..8, 0] …   B[60..64, 127]
/// tile 1   B[64..68, 0] …
/// ```
pub(crate) struct Int8Image {
    /// KD: `inner` padded to 128.
    pub depth: usize,
    codes: Buffer,
    /// `[ND]`, 1 in the padding.
    scale: Vec<f32>,
    /// `[ND]`: sum of the codes of a column, for dot products that want the other side unsigned.
    sum: Vec<i32>,
}

impl Int8Image {
    pub fn zeroed(out: usize, inner: usize) -> Result<Int8Image, PackError> {
        if inner > LONGEST {
            return Err(PackError::TooLong { inner, longest: LONGEST });
        }
        let (width, depth) = (out.next_multiple_of(WIDE), inner.next_multiple_of(128));
        Ok(Int8Image {
            depth,
            codes: Buffer::zeroed(width * depth),
            scale: vec![1.0; width],
            sum: vec![0; width],
        })
    }

    /// Index of B[k, n] in the image; a bijection of KD x ND.
    pub fn position(&self, k: usize, n: usize) -> usize {
        let tile = n / WIDE * (self.depth / 64) + k / 64;
        tile * 64 * WIDE + (k % 64 / 4 * WIDE + n % WIDE) * 4 + k % 4
    }

    pub fn put_row(&mut self, n: usize, row: &[f32]) {
        let cmax = row.iter().fold(0.0f32, |most, w| most.max(w.abs()));
        let inverse = if cmax < 1e-12 { 1.0 } else { 127.0 / cmax };
        self.scale[n] = if cmax < 1e-12 { 1.0 } else { cmax / 127.0 };
        for (k, &w) in row.iter().enumerate() {
            let (at, code) = (self.position(k, n), int8_code(w * inverse));
            self.codes.as_mut_slice::<i8>()[at] = code;
            self.sum[n] += i32::from(code);
        }
    }

    pub fn code(&self, n: usize, k: usize) -> i8 {
        self.codes.as_slice::<i8>()[self.position(k, n)]
    }

    pub fn scale(&self, n: usize) -> f32 {
        self.scale[n]
    }

    /// `[KD/4, 128, 4]`: the codes of 128 outputs, four along k at a time.
    pub fn tile(&self, tile: usize) -> &[[[i8; 4]; WIDE]] {
        let quads = self.codes.as_slice::<i8>().as_chunks::<4>().0.as_chunks().0;
        &quads[tile * self.depth / 4..(tile + 1) * self.depth / 4]
    }

    /// The scales of the outputs of one tile.
    pub fn tile_scale(&self, tile: usize) -> &[f32; WIDE] {
        &self.scale.as_chunks().0[tile]
    }

    /// The sums of the codes of the outputs of one tile.
    pub fn tile_sum(&self, tile: usize) -> &[i32; WIDE] {
        &self.sum.as_chunks().0[tile]
    }

    pub fn probe(&self) -> u64 {
        self.codes.probe()
    }

    pub fn bytes(&self) -> usize {
        self.codes.len() + self.scale.len() * 4 + self.sum.len() * 4
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // 129 outputs of 65: KD = 128, so a row of tiles holds 2 · 64 · 128 codes.
    #[test]
    fn positions_by_hand() {
        let image = Int8Image::zeroed(129, 65).unwrap();
        assert_eq!(image.position(1, 0), 1);
        assert_eq!(image.position(0, 1), 4);
        assert_eq!(image.position(4, 0), 512);
        assert_eq!(image.position(64, 0), 8192);
        assert_eq!(image.position(0, 128), 16384);
    }

    #[test]
    fn every_place_is_used_once() {
        for (out, inner) in [(1, 1), (129, 65), (7, 300), (128, 64), (257, 129)] {
            let image = Int8Image::zeroed(out, inner).unwrap();
            let width = out.next_multiple_of(WIDE);
            let mut seen = vec![false; width * image.depth];
            for n in 0..width {
                for k in 0..image.depth {
                    assert!(!std::mem::replace(&mut seen[image.position(k, n)], true), "B[{k}, {n}]");
                }
            }
        }
    }

    // Column 0 holds 2 and -1: scale 2/127, codes 127 and round(-63.5) = -64 (half away from zero).
    // Column 1 is below 1e-12: scale 1, and 1e-13 · 1 rounds to 0.
    #[test]
    fn codes_by_hand() {
        let mut image = Int8Image::zeroed(2, 2).unwrap();
        image.put_row(0, &[2.0, -1.0]);
        image.put_row(1, &[1e-13, 0.0]);
        assert_eq!((image.code(0, 0), image.code(0, 1), image.scale(0)), (127, -64, 2.0 / 127.0));
        assert_eq!((image.code(1, 0), image.code(1, 1), image.scale(1)), (0, 0, 1.0));
    }

    #[test]
    fn padding_is_zero_and_nothing_is_lost() {
        for (out, inner) in [(1, 1), (3, 5), (129, 65), (130, 129)] {
            let mut image = Int8Image::zeroed(out, inner).unwrap();
            // Every row starts with the full scale, so that its other integers are their own codes.
            let w = |o: usize, i: usize| if i == 0 { 127.0 } else { ((o * 31 + i * 7) % 255) as f32 - 127.0 };
            for o in 0..out {
                image.put_row(o, &(0..inner).map(|i| w(o, i)).collect::<Vec<_>>());
            }
            for n in 0..out.next_multiple_of(WIDE) {
                for k in 0..image.depth {
                    let expected = if n < out && k < inner { w(n, k) } else { 0.0 };
                    assert_eq!(f32::from(image.code(n, k)), expected, "B[{k}, {n}] of {out}x{inner}");
                }
            }
        }
    }

    #[test]
    fn an_axis_that_could_overflow_is_refused() {
        assert!(Int8Image::zeroed(1, LONGEST).is_ok());
        assert!(matches!(Int8Image::zeroed(1, LONGEST + 1), Err(PackError::TooLong { .. })));
    }
}
