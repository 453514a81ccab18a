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
