//! The image of the 4-bit engines: codes as the package stores them, scale and zero per group of 32.

use half::f16;

use super::{Buffer, PackError, TILE};
use crate::round::{bf16, bf16_bits};

/// Values along the inner axis that share a scale.
pub const GROUP: usize = 32;

/// The 4-bit codes of one weight row, as a source hands them over.
///
/// ```text
/// w[i] = scale[i/32] · (codes[i] - offset) + min[i/32]      offset = 8 if symmetric, else 0
/// ```
///
/// A symmetric format (Q4_0 and its like) leaves `min` at 0: its dot products then have no second term.
pub struct CodeRow {
    /// `[inner]`, each 0..=15.
    pub codes: Vec<u8>,
    /// `[ceil(inner / 32)]`.
    pub scale: Vec<f32>,
    /// `[ceil(inner / 32)]`.
    pub min: Vec<f32>,
    /// Whether code 8 stands for zero.
    pub symmetric: bool,
}

impl CodeRow {
    pub(super) fn new(inner: usize) -> CodeRow {
        let groups = inner.div_ceil(GROUP);
        CodeRow { codes: vec![0; inner], scale: vec![0.0; groups], min: vec![0.0; groups], symmetric: false }
    }

    /// Fills the row with the Q4_1 codes of `w`.
    ///
    /// Per group of 32 (the last may be shorter), all in f32:
    ///
    /// ```text
    /// d = (max - min)/15     code = min(15, trunc((w - min) · (1/d) + 0.5))     1/0 := 0
    /// ```
    ///
    /// d and min are rounded to f16 after the codes were computed.
    ///
    /// Source: ggml's reference quantiser of Q4_1.
    pub(super) fn quantise(&mut self, w: &[f32]) {
        self.symmetric = false;
        for (g, group) in w.chunks(GROUP).enumerate() {
            let min = group.iter().copied().fold(f32::MAX, f32::min);
            let max = group.iter().copied().fold(f32::MIN, f32::max);
            let d = (max - min) / 15.0;
            let inverse = if d == 0.0 { 0.0 } else { 1.0 / d };
            for (code, &w) in self.codes[g * GROUP..].iter_mut().zip(group) {
                *code = (((w - min) * inverse + 0.5) as u8).min(15);
            }
            self.scale[g] = f16::from_f32(d).to_f32();
            self.min[g] = f16::from_f32(min).to_f32();
        }
    }
}

/// How the scales of an image are stored: the narrowest format that holds every one of them exactly.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ScaleFormat {
    F16,
    Bf16,
    F32,
}

/// 4-bit codes of `out` rows, sixteen outputs a tile, groups of 32 along the inner axis.
///
/// The codes of one tile and group take 256 bytes. Four neighbours along the inner axis stand together, the
/// operand of one four-way dot product; the low nibbles hold one quad and the high nibbles the next:
///
/// ```text
/// byte 0..64      output 0: q[0] | q[4]<<4   q[1] | q[5]<<4   q[2] | q[6]<<4   q[3] | q[7]<<4   output 1: …
/// byte 64..128    the same for q[8] … q[15]; and so on up to q[31]
/// ```
///
/// Scales stand beside them in the same order, per tile and group: 16 scales, then 16 zeros unless every zero
/// of the image is 0. The last tile is filled up with outputs of scale 0; a group that reaches beyond the inner
/// axis is filled up with the code of offset, so that `code - offset` is 0 there.
pub(crate) struct Q4Image {
    pub inner: usize,
    pub groups: usize,
    codes: Buffer,
    scales: Buffer,
    pub format: ScaleFormat,
    pub mins: bool,
    /// Per tile, bit o is set where output o is symmetric.
    symmetric: Vec<u16>,
}

/// What a [`Q4Image`] is built from: codes in place, scales still in f32, because their format depends on all.
pub(super) struct Q4Builder {
    image: Q4Image,
    /// `[tile, group, 2, 16]`.
    scales: Vec<f32>,
    /// bf16 scales and zeros, rounded: the `w4a16` engine.
    narrow: bool,
}

impl Q4Builder {
    pub fn new(out: usize, inner: usize, narrow: bool) -> Q4Builder {
        let (tiles, groups) = (out.div_ceil(TILE), inner.div_ceil(GROUP));
        let image = Q4Image {
            inner,
            groups,
            codes: Buffer::zeroed(tiles * groups * 256),
            scales: Buffer::zeroed(0),
            format: ScaleFormat::F32,
            mins: false,
            symmetric: vec![0; tiles],
        };
        Q4Builder { image, scales: vec![0.0; tiles * groups * 2 * TILE], narrow }
    }

    pub fn put_row(&mut self, o: usize, row: &CodeRow) -> Result<(), PackError> {
        let image = &mut self.image;
        let inner = image.inner;
        if let Some(column) = row.codes.iter().position(|&code| code > 15) {
            return Err(PackError::Code { row: o, column, code: row.codes[column] });
        }
        image.symmetric[o / TILE] |= u16::from(row.symmetric) << (o % TILE);
        let offset = if row.symmetric { 8 } else { 0 };
        for i in 0..image.groups * GROUP {
            let code = if i < inner { row.codes[i] } else { offset };
            let (byte, shift) = image.position(o, i);
            image.codes.as_mut_slice::<u8>()[byte] |= code << shift;
        }
        for g in 0..image.groups {
            let at = ((o / TILE) * image.groups + g) * 2 * TILE + o % TILE;
            for (plane, value) in [row.scale[g], row.min[g]].into_iter().enumerate() {
                let value = if self.narrow { bf16(value) } else { value };
                if !value.is_finite() {
                    return Err(PackError::Scale { row: o, group: g });
                }
                self.scales[at + plane * TILE] = value;
            }
        }
        Ok(())
    }

    /// Chooses the scale format and writes the scales.
    pub fn finish(self) -> Q4Image {
        let Q4Builder { mut image, scales, .. } = self;
        let all = |holds: fn(f32) -> bool| scales.iter().all(|&s| holds(s));
        image.format = if all(|s| bf16(s).to_bits() == s.to_bits()) {
            ScaleFormat::Bf16
        } else if all(|s| f16::from_f32(s).to_f32().to_bits() == s.to_bits()) {
            ScaleFormat::F16
        } else {
            ScaleFormat::F32
        };
        image.mins = scales.chunks(2 * TILE).any(|group| group[TILE..].iter().any(|&m| m != 0.0));
        let planes = if image.mins { 2 } else { 1 };
        let kept = scales.chunks(2 * TILE).flat_map(|group| &group[..planes * TILE]);
        let count = scales.len() / 2 * planes;
        match image.format {
            ScaleFormat::F32 => {
                image.scales = Buffer::zeroed(count * 4);
                image.scales.as_mut_slice::<f32>().iter_mut().zip(kept).for_each(|(to, &s)| *to = s);
            }
            format => {
                let bits = |s: f32| match format {
                    ScaleFormat::Bf16 => bf16_bits(s),
                    _ => f16::from_f32(s).to_bits(),
                };
                image.scales = Buffer::zeroed(count * 2);
                image.scales.as_mut_slice::<u16>().iter_mut().zip(kept).for_each(|(to, &s)| *to = bits(s));
            }
        }
        image
    }
}

impl Q4Image {
    /// Byte and shift of the code of w[o, i].
    pub fn position(&self, o: usize, i: usize) -> (usize, u32) {
        let block = (o / TILE * self.groups + i / GROUP) * 256;
        let (octet, quad, place) = (i % GROUP / 8, i % 8 / 4, i % 4);
        (block + octet * 64 + o % TILE * 4 + place, 4 * quad as u32)
    }

    pub fn code(&self, o: usize, i: usize) -> u8 {
        let (byte, shift) = self.position(o, i);
        self.codes.as_slice::<u8>()[byte] >> shift & 15
    }

    /// 8 where output `o` is symmetric, else 0.
    pub fn offset(&self, o: usize) -> u8 {
        (self.symmetric[o / TILE] >> (o % TILE) & 1) as u8 * 8
    }

    /// Scale and zero of group `g` of output `o`.
    pub fn scale(&self, o: usize, g: usize) -> (f32, f32) {
        let planes = if self.mins { 2 } else { 1 };
        let at = (o / TILE * self.groups + g) * planes * TILE + o % TILE;
        let value = |at: usize| match self.format {
            ScaleFormat::F32 => self.scales.as_slice::<f32>()[at],
            ScaleFormat::F16 => f16::from_bits(self.scales.as_slice::<u16>()[at]).to_f32(),
            ScaleFormat::Bf16 => f32::from_bits(u32::from(self.scales.as_slice::<u16>()[at]) << 16),
        };
        (value(at), if self.mins { value(at + TILE) } else { 0.0 })
    }

    /// d · (q - offset) + m, each operation rounded to f32.
    pub fn value(&self, o: usize, i: usize) -> f32 {
        let (d, m) = self.scale(o, i / GROUP);
        let q = i32::from(self.code(o, i)) - i32::from(self.offset(o));
        d * q as f32 + m
    }

    /// `[groups, 256]`: the code bytes of one tile.
    pub fn tile(&self, tile: usize) -> &[[u8; 256]] {
        &self.codes.as_slice::<u8>().as_chunks().0[tile * self.groups..(tile + 1) * self.groups]
    }

    /// The scale bytes of one tile: per group 16 scales, then 16 zeros if [`Self::mins`].
    pub fn tile_scales(&self, tile: usize) -> &[u8] {
        let width = if self.format == ScaleFormat::F32 { 4 } else { 2 };
        let bytes = self.groups * TILE * width * if self.mins { 2 } else { 1 };
        &self.scales.as_slice::<u8>()[tile * bytes..(tile + 1) * bytes]
    }

    /// Bit o tells whether output o of the tile is symmetric.
    pub fn tile_symmetric(&self, tile: usize) -> u16 {
        self.symmetric[tile]
    }

    pub fn probe(&self) -> u64 {
        self.codes.probe().wrapping_add(self.scales.probe())
    }

    pub fn bytes(&self) -> usize {
        self.codes.len() + self.scales.len() + self.symmetric.len() * 2
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn build(out: usize, inner: usize, fill: impl Fn(usize, &mut CodeRow)) -> Q4Image {
        let mut builder = Q4Builder::new(out, inner, false);
        for o in 0..out {
            let mut row = CodeRow::new(inner);
            fill(o, &mut row);
            builder.put_row(o, &row).unwrap();
        }
        builder.finish()
    }

    // Two groups of 32: 512 bytes a tile. Value 4 shares the byte of value 0, value 8 opens the next 64 bytes.
    #[test]
    fn positions_by_hand() {
        let image = build(17, 40, |_, _| {});
        assert_eq!(image.position(0, 1), (1, 0));
        assert_eq!(image.position(0, 4), (0, 4));
        assert_eq!(image.position(1, 0), (4, 0));
        assert_eq!(image.position(0, 8), (64, 0));
        assert_eq!(image.position(0, 32), (256, 0));
        assert_eq!(image.position(16, 0), (512, 0));
    }

    #[test]
    fn codes_and_scales_come_back() {
        for (out, inner) in [(1, 1), (5, 33), (17, 64), (40, 95)] {
            let code = |o: usize, i: usize| ((o * 7 + i * 3) % 16) as u8;
            let image = build(out, inner, |o, row| {
                (0..inner).for_each(|i| row.codes[i] = code(o, i));
                row.scale.iter_mut().enumerate().for_each(|(g, d)| *d = (1 + o + 100 * g) as f32);
                row.min.iter_mut().enumerate().for_each(|(g, m)| *m = -((o + 10 * g) as f32));
                row.symmetric = o % 3 == 1;
            });
            for o in 0..out {
                for i in 0..inner {
                    assert_eq!(image.code(o, i), code(o, i));
                    let (d, m) = ((1 + o + 100 * (i / 32)) as f32, -((o + 10 * (i / 32)) as f32));
                    assert_eq!(image.scale(o, i / 32), (d, m));
                    let zero = if o % 3 == 1 { 8.0 } else { 0.0 };
                    assert_eq!(image.value(o, i), d * (f32::from(code(o, i)) - zero) + m);
                }
            }
        }
    }

    // 1/3 needs all of f32; 2^-20 + 2^-10 = 2^-20 · 1025 needs 11 bits and the subnormals of f16; 2^100 only fits bf16.
    #[test]
    fn scales_take_the_narrowest_exact_format() {
        let format = |d: f32| {
            let image = build(1, 32, |_, row| row.scale[0] = d);
            assert_eq!(image.scale(0, 0), (d, 0.0));
            image.format
        };
        assert_eq!(format(1.0 / 3.0), ScaleFormat::F32);
        assert_eq!(format(1025.0 * 0.5f32.powi(20)), ScaleFormat::F16);
        assert_eq!(format(2.0f32.powi(100)), ScaleFormat::Bf16);
    }

    // (7 - (-8))/15 = 1, so the codes are x + 8, halves up: -7.5 + 8 + 0.5 = 1.
    #[test]
    fn quantises_by_the_rule_of_q4_1() {
        let mut row = CodeRow::new(4);
        row.quantise(&[-8.0, 7.0, -7.5, 0.25]);
        assert_eq!((row.codes.as_slice(), row.scale[0], row.min[0]), ([0, 15, 1, 8].as_slice(), 1.0, -8.0));
        row.quantise(&[0.1, 0.1, 0.1, 0.1]);
        let tenth = f16::from_f32(0.1).to_f32();
        assert_eq!((row.codes.as_slice(), row.scale[0], row.min[0]), ([0; 4].as_slice(), 0.0, tenth));
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        let mut builder = Q4Builder::new(1, 2, false);
        let mut row = CodeRow::new(2);
        row.codes[1] = 16;
        assert!(matches!(builder.put_row(0, &row), Err(PackError::Code { row: 0, column: 1, code: 16 })));
        row.codes[1] = 0;
        row.min[0] = f32::NAN;
        assert!(matches!(builder.put_row(0, &row), Err(PackError::Scale { row: 0, group: 0 })));
    }
}
