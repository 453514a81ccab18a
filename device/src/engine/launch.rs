//! A launch: activation rows are brought into the format of the engine once, then meet the whole image.

use std::ops::Range;

use rayon::prelude::*;

use crate::pack::{Image, Storage, TILE, WIDE};
use crate::simd::{self, Kernel, UnsupportedKernel};

/// Rows of a decode launch.
pub const DECODE_ROWS: usize = 16;

/// Rows of a prefill launch, and the most that one launch takes.
pub const PREFILL_ROWS: usize = 128;

/// Why a launch was refused.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum LaunchError {
    /// An activation is NaN or infinite, or becomes infinite in the bf16 of the engine.
    #[error(
        "activation [{row}, {column}] is {value}, which the engine cannot represent; it needs finite values"
    )]
    NotFinite {
        /// Row of the launch.
        row: usize,
        /// Place along the inner axis.
        column: usize,
        /// What stands there.
        value: f32,
    },
    /// More rows than a launch has.
    #[error("{rows} rows in one launch, which holds {PREFILL_ROWS}; cut them into several launches")]
    TooManyRows {
        /// Rows asked for.
        rows: usize,
    },
}

/// Activation rows in the format of an engine.
///
/// Rows are padded along the inner axis with zeros to the block of the engine. Which fields are filled is said
/// by the `prepare` of each engine.
#[derive(Default)]
pub(crate) struct Activations {
    pub rows: usize,
    /// Length of a padded row.
    pub depth: usize,
    /// Blocks in a row.
    pub blocks: usize,
    /// `[rows, depth]`.
    pub codes: Vec<i8>,
    /// `[rows, depth]`: codes plus 128, where a kernel asks for them.
    pub biased: Vec<u8>,
    /// `[rows, depth]`.
    pub values: Vec<f32>,
    /// `[rows, blocks]`.
    pub scale: Vec<f32>,
    /// `[rows, blocks]`: sum of the codes of a block.
    pub sum: Vec<i32>,
    /// `[rows, blocks]`: biased exponent of a block.
    pub exponent: Vec<u8>,
}

impl Activations {
    /// Room for `rows` rows of `depth` in `blocks` blocks, everything zero: no value of an earlier launch is left.
    pub fn begin(&mut self, rows: usize, depth: usize, blocks: usize) {
        fn zero<T: Copy + Default>(values: &mut Vec<T>, count: usize) {
            values.clear();
            values.resize(count, T::default());
        }
        (self.rows, self.depth, self.blocks) = (rows, depth, blocks);
        zero(&mut self.codes, rows * depth);
        zero(&mut self.values, rows * depth);
        zero(&mut self.scale, rows * blocks);
        zero(&mut self.sum, rows * blocks);
        zero(&mut self.exponent, rows * blocks);
    }
}

/// Working memory of launches, and the kernel that they use. Holds nothing from one launch to the next.
pub struct Scratch {
    kernel: Kernel,
    activations: Activations,
    tiles: Vec<f32>,
}

impl Scratch {
    /// Empty working memory for launches with `kernel`, which this machine must support.
    pub fn new(kernel: Kernel) -> Result<Scratch, UnsupportedKernel> {
        if !kernel.is_supported() {
            return Err(UnsupportedKernel { kernel });
        }
        Ok(Scratch { kernel, activations: Activations::default(), tiles: Vec::new() })
    }

    /// The kernel that launches use.
    pub fn kernel(&self) -> Kernel {
        self.kernel
    }
}

impl Image {
    /// Multiplies activation rows with the image.
    ///
    /// ```text
    /// y[r·ld + o] = sum_i x[r, i] · w[o, i]
    /// ```
    ///
    /// in the arithmetic of the image's engine. `x` is `[rows, inner]`; `ld >= out` is the distance of two rows
    /// in `y`, whose values between `out` and `ld` stay untouched. The bits of a row depend neither on the
    /// other rows of the launch nor on the kernel.
    ///
    /// # Errors
    /// [`LaunchError`]; `y` is then unchanged.
    ///
    /// # Panics
    /// If `x` or `y` are too short.
    pub fn multiply(
        &self,
        x: &[f32],
        rows: usize,
        y: &mut [f32],
        ld: usize,
        scratch: &mut Scratch,
    ) -> Result<(), LaunchError> {
        self.prepare(x, rows, y, ld, scratch)?;
        let mut parts: Vec<&mut [f32]> =
            y.chunks_mut(ld).take(rows).map(|row| &mut row[..self.out()]).collect();
        let Scratch { kernel, activations, tiles } = scratch;
        self.run(*kernel, x, activations, 0..self.tiles(), tiles, &mut parts);
        Ok(())
    }

    /// [`Image::multiply`] with the outputs shared among the threads of the current rayon pool: the same bits.
    pub fn multiply_parallel(
        &self,
        x: &[f32],
        rows: usize,
        y: &mut [f32],
        ld: usize,
        scratch: &mut Scratch,
    ) -> Result<(), LaunchError> {
        // Below this many bytes times rows, waking a thread takes longer than the product.
        const WORTH_A_THREAD: usize = 1 << 17;
        let threads = rayon::current_num_threads();
        if threads == 1 || self.bytes() * rows < WORTH_A_THREAD {
            return self.multiply(x, rows, y, ld, scratch);
        }
        self.prepare(x, rows, y, ld, scratch)?;
        let share = self.tiles().div_ceil(threads * 8).next_multiple_of(4);
        let count = self.tiles().div_ceil(share);
        let mut parts: Vec<Vec<&mut [f32]>> = (0..count).map(|_| Vec::with_capacity(rows)).collect();
        for row in y.chunks_mut(ld).take(rows) {
            for (part, outputs) in row[..self.out()].chunks_mut(share * self.tile_width()).enumerate() {
                parts[part].push(outputs);
            }
        }
        let (kernel, activations) = (scratch.kernel, &scratch.activations);
        parts.into_par_iter().enumerate().for_each_init(Vec::new, |buffer, (part, mut rows)| {
            let tiles = part * share..self.tiles().min((part + 1) * share);
            self.run(kernel, x, activations, tiles, buffer, &mut rows);
        });
        Ok(())
    }

    /// Outputs in a tile of this image.
    fn tile_width(&self) -> usize {
        if matches!(self.storage, Storage::Int8(_)) { WIDE } else { TILE }
    }

    fn tiles(&self) -> usize {
        self.out().div_ceil(self.tile_width())
    }

    fn prepare(
        &self,
        x: &[f32],
        rows: usize,
        y: &[f32],
        ld: usize,
        scratch: &mut Scratch,
    ) -> Result<(), LaunchError> {
        if rows > PREFILL_ROWS {
            return Err(LaunchError::TooManyRows { rows });
        }
        assert_eq!(x.len(), rows * self.inner(), "multiply: values of x against rows x inner");
        assert!(ld >= self.out(), "multiply: row distance {ld} below {} outputs", self.out());
        assert!(rows == 0 || y.len() >= (rows - 1) * ld + self.out(), "multiply: y is too short");
        simd::prepare(scratch.kernel, self, x, rows, &mut scratch.activations)
    }

    /// Computes the outputs of `tiles`; `rows` holds their place in each row of y.
    ///
    /// A kernel writes whole tiles into a buffer of its own, so that outputs beyond the last real one have
    /// somewhere to go and cannot reach y.
    fn run(
        &self,
        kernel: Kernel,
        x: &[f32],
        activations: &Activations,
        tiles: Range<usize>,
        buffer: &mut Vec<f32>,
        rows: &mut [&mut [f32]],
    ) {
        // Values of the buffer that stay in the second-level cache.
        const CACHED: usize = 1 << 15;
        if rows.is_empty() {
            return;
        }
        let width = self.tile_width();
        let step = (CACHED / (rows.len() * width)).next_multiple_of(4);
        for start in tiles.clone().step_by(step) {
            let some = start..tiles.end.min(start + step);
            buffer.clear();
            buffer.resize(some.len() * rows.len() * width, 0.0);
            simd::run(kernel, self, x, activations, some.clone(), buffer);
            for (t, tile) in some.zip(buffer.chunks(rows.len() * width)) {
                let at = (t - tiles.start) * width;
                for (row, outputs) in rows.iter_mut().zip(tile.chunks(width)) {
                    let end = row.len().min(at + width);
                    row[at..end].copy_from_slice(&outputs[..end - at]);
                }
            }
        }
    }
}
