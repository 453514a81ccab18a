//! Packed weight images: one matrix in the order in which an engine streams it.

mod bfp16;
mod buffer;
mod int8;
mod q4;
mod strict;

pub use q4::{CodeRow, GROUP};

pub(crate) use bfp16::{BLOCK, Bfp16Image, from_block, to_block};
pub(crate) use buffer::Buffer;
pub(crate) use int8::{Int8Image, WIDE};
pub(crate) use q4::{Q4Image, ScaleFormat};
pub(crate) use strict::StrictImage;

use crate::engine::Engine;
use crate::round::bf16;
use q4::Q4Builder;

/// Outputs in one tile of every image but that of `int8`.
pub(crate) const TILE: usize = 16;

/// Why a matrix cannot become a device image.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum PackError {
    /// A weight is NaN or infinite.
    #[error("weight [{row}, {column}] is {value}; every weight of a device image must be finite")]
    NotFinite {
        /// Output of the weight.
        row: usize,
        /// Place along the inner axis.
        column: usize,
        /// What stands there.
        value: f32,
    },
    /// A scale or zero is not finite, or leaves the format in which the engine keeps it.
    #[error("scale or zero of row {row}, group {group} is not finite in the format of the image")]
    Scale {
        /// Output of the group.
        row: usize,
        /// Which group of 32 along the inner axis.
        group: usize,
    },
    /// A code has more than four bits.
    #[error("code [{row}, {column}] is {code}; a 4-bit code is at most 15")]
    Code {
        /// Output of the code.
        row: usize,
        /// Place along the inner axis.
        column: usize,
        /// What stands there.
        code: u8,
    },
    /// Sums over the inner axis could leave i32.
    #[error("inner axis of {inner}: int8 sums are exact in i32 up to {longest}")]
    TooLong {
        /// Length of the inner axis.
        inner: usize,
        /// Longest axis whose sums fit.
        longest: usize,
    },
    /// The matrix has no rows or no columns.
    #[error("a matrix of {out}x{inner} holds no weights")]
    Empty {
        /// Rows asked for.
        out: usize,
        /// Columns asked for.
        inner: usize,
    },
}

/// What the image stores for one weight.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Stored {
    /// The int8 code, the 4-bit code less its offset, or the mantissa.
    pub code: i16,
    /// What the code is multiplied with: scale of the column, scale of the group, or 2^(E-133).
    pub scale: f32,
    /// What is added after that: the zero of the group, 0 where the format has none.
    pub min: f32,
}

/// Writes row `o` of a matrix in f32, so that a whole matrix is never held decoded.
pub type RowSource<'a, E> = dyn FnMut(usize, &mut [f32]) -> Result<(), E> + 'a;

/// Writes row `o` of a matrix as 4-bit codes.
pub type CodeSource<'a, E> = dyn FnMut(usize, &mut CodeRow) -> Result<(), E> + 'a;

/// A weight matrix `[out, inner]`, packed for one engine.
///
/// An image may hold several matrices on top of each other (q, k and v; gate and up): the launch then gives
/// their outputs side by side, and the caller splits the row.
pub struct Image {
    engine: Engine,
    out: usize,
    inner: usize,
    pub(crate) storage: Storage,
}

pub(crate) enum Storage {
    Strict(StrictImage),
    Int8(Int8Image),
    W4A8(Q4Image),
    W4A16(Q4Image),
    Bfp16(Bfp16Image),
}

impl Image {
    /// Packs `out` rows of `inner` weights; `rows(row, into)` writes one decoded row, in order, once each.
    ///
    /// What `rows` leaves untouched in `into` is zero. The 4-bit engines quantise the rows by the rule of
    /// Q4_1: per group of 32 values, in f32,
    ///
    /// ```text
    /// d = (max - min)/15     code = min(15, trunc((w - min) · (1/d) + 0.5))     1/0 := 0
    /// ```
    ///
    /// with d and min rounded to f16 afterwards (for `w4a16` then to bf16). A package that has 4-bit codes of
    /// its own goes through [`Image::pack_codes`].
    ///
    /// # Errors
    /// Those of `rows`; a [`PackError`] where a weight is not finite, a scale leaves its format, or `int8` sums
    /// could overflow.
    pub fn pack<E: From<PackError>>(
        engine: Engine,
        out: usize,
        inner: usize,
        rows: &mut RowSource<'_, E>,
    ) -> Result<Image, E> {
        if out == 0 || inner == 0 {
            return Err(PackError::Empty { out, inner }.into());
        }
        let mut row = vec![0.0; inner];
        let mut next = |o: usize, row: &mut [f32]| -> Result<(), E> {
            row.fill(0.0);
            rows(o, row)?;
            match row.iter().position(|w| !w.is_finite()) {
                Some(column) => Err(PackError::NotFinite { row: o, column, value: row[column] }.into()),
                None => Ok(()),
            }
        };
        let storage = match engine {
            Engine::F32 => {
                let mut image = StrictImage::zeroed(out, inner);
                for o in 0..out {
                    next(o, &mut row)?;
                    image.put_row(o, &row);
                }
                Storage::Strict(image)
            }
            Engine::Int8 => {
                let mut image = Int8Image::zeroed(out, inner)?;
                for o in 0..out {
                    next(o, &mut row)?;
                    image.put_row(o, &row);
                }
                Storage::Int8(image)
            }
            Engine::Bfp16 => {
                let mut image = Bfp16Image::zeroed(out, inner);
                for o in 0..out {
                    next(o, &mut row)?;
                    image.put_row(o, &row);
                }
                Storage::Bfp16(image)
            }
            Engine::W4A8 | Engine::W4A16 => {
                return Image::pack_codes(engine, out, inner, &mut |o, codes: &mut CodeRow| {
                    next(o, &mut row)?;
                    codes.quantise(&row);
                    Ok(())
                });
            }
        };
        Ok(Image { engine, out, inner, storage })
    }

    /// Packs 4-bit codes as a package stores them; `rows(row, into)` writes the codes of one row, in order.
    ///
    /// `into` comes with all codes, scales and zeros 0 and not symmetric. Rows of both kinds may share an
    /// image. `w4a8` keeps the scales exactly, `w4a16` rounds scales and zeros to bf16.
    ///
    /// # Errors
    /// Those of `rows`; a [`PackError`] where a code has more than four bits or a scale is not finite.
    ///
    /// # Panics
    /// If `engine` is not `w4a8` or `w4a16`.
    pub fn pack_codes<E: From<PackError>>(
        engine: Engine,
        out: usize,
        inner: usize,
        rows: &mut CodeSource<'_, E>,
    ) -> Result<Image, E> {
        assert!(engine.is_four_bit(), "pack_codes: {engine} does not hold 4-bit codes");
        if out == 0 || inner == 0 {
            return Err(PackError::Empty { out, inner }.into());
        }
        let mut builder = Q4Builder::new(out, inner, engine == Engine::W4A16);
        let mut row = CodeRow::new(inner);
        for o in 0..out {
            row.codes.fill(0);
            row.scale.fill(0.0);
            row.min.fill(0.0);
            row.symmetric = false;
            rows(o, &mut row)?;
            builder.put_row(o, &row)?;
        }
        let image = builder.finish();
        let storage = if engine == Engine::W4A8 { Storage::W4A8(image) } else { Storage::W4A16(image) };
        Ok(Image { engine, out, inner, storage })
    }

    /// The engine that the image is packed for.
    pub fn engine(&self) -> Engine {
        self.engine
    }

    /// Rows of the matrix: outputs of a launch.
    pub fn out(&self) -> usize {
        self.out
    }

    /// Columns of the matrix: values of an activation row.
    pub fn inner(&self) -> usize {
        self.inner
    }

    /// Bytes that one launch streams, padding and scales included.
    pub fn bytes(&self) -> usize {
        match &self.storage {
            Storage::Strict(image) => image.bytes(),
            Storage::Int8(image) => image.bytes(),
            Storage::W4A8(image) | Storage::W4A16(image) => image.bytes(),
            Storage::Bfp16(image) => image.bytes(),
        }
    }

    /// Adds up every 8 bytes of what a launch streams: the read rate that bounds a one-row product.
    pub fn probe(&self) -> u64 {
        match &self.storage {
            Storage::Strict(image) => image.probe(),
            Storage::Int8(image) => image.probe(),
            Storage::W4A8(image) | Storage::W4A16(image) => image.probe(),
            Storage::Bfp16(image) => image.probe(),
        }
    }

    /// The row of weights that the device multiplies with, decoded from the image to f32.
    ///
    /// ```text
    /// f32     w                           int8    code · sW[o]
    /// w4a8    d · (q - offset) + m        w4a16   bf16(d · (q - offset) + m)
    /// bfp16   m · 2^(E-133)
    /// ```
    ///
    /// Every operation is rounded to f32. This, not the package's weight, is the truth for a site's own error.
    ///
    /// # Panics
    /// If `into` does not hold `inner` values.
    pub fn unpack_row(&self, o: usize, into: &mut [f32]) {
        assert_eq!(into.len(), self.inner, "unpack_row: row length against inner axis");
        assert!(o < self.out, "unpack_row: row {o} of {}", self.out);
        for (i, w) in into.iter_mut().enumerate() {
            *w = match &self.storage {
                Storage::Strict(image) => image.get(o, i),
                Storage::Int8(image) => f32::from(image.code(o, i)) * image.scale(o),
                Storage::W4A8(image) => image.value(o, i),
                Storage::W4A16(image) => bf16(image.value(o, i)),
                Storage::Bfp16(image) => from_block(image.mantissa(o, i), image.exponent(o, i / BLOCK)),
            };
        }
    }

    /// Code and scales of w[o, i], so that an image can be checked code for code; `None` for `f32`.
    pub fn stored(&self, o: usize, i: usize) -> Option<Stored> {
        assert!(o < self.out && i < self.inner, "stored: [{o}, {i}] of {}x{}", self.out, self.inner);
        match &self.storage {
            Storage::Strict(_) => None,
            Storage::Int8(image) => {
                Some(Stored { code: image.code(o, i).into(), scale: image.scale(o), min: 0.0 })
            }
            Storage::W4A8(image) | Storage::W4A16(image) => {
                let (scale, min) = image.scale(o, i / GROUP);
                let code = i16::from(image.code(o, i)) - i16::from(image.offset(o));
                Some(Stored { code, scale, min })
            }
            Storage::Bfp16(image) => {
                let scale = from_block(1, image.exponent(o, i / BLOCK));
                Some(Stored { code: image.mantissa(o, i).into(), scale, min: 0.0 })
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::tests::{pack, pack_codes};

    fn unpacked(image: &Image, o: usize) -> Vec<f32> {
        let mut row = vec![f32::NAN; image.inner()];
        image.unpack_row(o, &mut row);
        row
    }

    // Integers that every format holds exactly: 127 or 15 in each row of 33 is the full scale, 0 the smallest
    // value of its group. Row 1 differs from row 0 in every place but those.
    #[test]
    fn what_is_exact_in_the_format_comes_back() {
        for (engine, most) in [(Engine::F32, 127.0), (Engine::Int8, 127.0), (Engine::Bfp16, 127.0)]
            .into_iter()
            .chain([(Engine::W4A8, 15.0), (Engine::W4A16, 15.0)])
        {
            let row = |start: usize| -> Vec<f32> {
                let inside = |i: usize| ((start + i) % 14 + 1) as f32;
                (0..33).map(|i| if i == 0 { most } else { f32::from(i != 1) * inside(i) }).collect()
            };
            let w = [row(0), row(5)];
            let image = pack(engine, &[&w[0], &w[1]]);
            // A group of one value has the scale 0 and is held by its zero.
            assert_eq!([unpacked(&image, 0), unpacked(&image, 1)], w, "{engine}");
        }
    }

    #[test]
    fn codes_and_scales_can_be_read() {
        // cmax 2: code of 1 is round(63.5) = 64.
        let image = pack(Engine::Int8, &[&[1.0, 0.0], &[1.0, -2.0]]);
        assert_eq!(image.stored(1, 0), Some(Stored { code: 64, scale: 2.0 / 127.0, min: 0.0 }));
        let image = pack_codes(Engine::W4A8, &[3, 15], 0.3, 0.7, false);
        assert_eq!(image.stored(0, 1), Some(Stored { code: 15, scale: 0.3, min: 0.7 }));
        let image = pack_codes(Engine::W4A8, &[3, 15], 0.25, 0.0, true);
        assert_eq!(image.stored(0, 0), Some(Stored { code: -5, scale: 0.25, min: 0.0 }));
        // The largest of the block is 4 = 64 · 2^-4.
        let image = pack(Engine::Bfp16, &[&[4.0, -1.0]]);
        assert_eq!(image.stored(0, 1), Some(Stored { code: -16, scale: 0.0625, min: 0.0 }));
        assert_eq!(pack(Engine::F32, &[&[4.0]]).stored(0, 0), None);
    }

    // 17 outputs of 40: tiles of 16, blocks of 32 or 8, int8 padded to 128 both ways.
    #[test]
    fn bytes_of_an_image() {
        let w = [0.5; 40];
        let bytes = |engine| pack(engine, &[&w[..]; 17]).bytes();
        assert_eq!(bytes(Engine::F32), 32 * 40 * 4);
        assert_eq!(bytes(Engine::Int8), 128 * 128 + 128 * (4 + 4));
        // Two groups of 32 a tile: codes, a 16-bit scale and zero for each output, and a bit for its kind.
        assert_eq!(bytes(Engine::W4A8), 2 * (2 * (256 + 16 * 4) + 2));
        assert_eq!(bytes(Engine::Bfp16), 32 * 40 + 32 * 5);
    }

    #[test]
    fn a_weight_that_is_not_finite_is_named() {
        for engine in Engine::ALL {
            let found = Image::pack(engine, 3, 40, &mut |o, row: &mut [f32]| {
                row[35] = if o == 1 { f32::INFINITY } else { 1.0 };
                Ok::<_, PackError>(())
            });
            let expected = PackError::NotFinite { row: 1, column: 35, value: f32::INFINITY };
            assert_eq!(found.err(), Some(expected), "{engine}");
        }
    }

    #[test]
    fn errors_of_the_source_and_empty_matrices() {
        let none = &mut |_, _: &mut [f32]| Ok::<_, PackError>(());
        let found = Image::pack(Engine::F32, 0, 3, none).err();
        assert_eq!(found, Some(PackError::Empty { out: 0, inner: 3 }));
        // 1e7/15 does not fit f16, the format of a Q4_1 scale.
        let found = Image::pack(Engine::W4A8, 1, 2, &mut |_, row: &mut [f32]| {
            row[1] = 1e7;
            Ok::<_, PackError>(())
        });
        assert_eq!(found.err(), Some(PackError::Scale { row: 0, group: 0 }));
    }
}
