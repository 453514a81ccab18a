//! A launch: activation rows are brought into the format of the engine once, then meet the whole image.

use std::ops::Range;

use rayon::prelude::*;

use crate::pack::{Image, Storage, TILE, WIDE};
use crate::simd::{self, Kernel, UnsupportedKernel};

/// Rows of a decode launch.
pub const DECODE_ROWS: usize = 16;

/// Rows of a prefill launch, and the most that one launch takes.
pub const PREFILL_ROWS: usize = 128;

/// Activation rows that stand together.
const GROUPED: usize = 16;

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
/// Rows are padded along the inner axis with zeros to whole blocks. Sixteen rows at a time stand together, block
/// by block, so that a kernel walks the blocks of all its rows in one stream:
///
/// ```text
/// rows 0..16    block 0 of row 0, block 0 of row 1, …   block 1 of row 0, …
/// rows 16..32   …                                       the last group holds the rows that are left
/// ```
///
/// Which fields are filled is said by the `prepare` of each engine.
#[derive(Default)]
pub(crate) struct Activations {
    pub rows: usize,
    /// Blocks in a row.
    pub blocks: usize,
    /// Per block its codes.
    pub codes: Vec<i8>,
    /// Per block its codes plus 128, where a kernel asks for them.
    pub biased: Vec<u8>,
    /// Per block its values.
    pub values: Vec<f32>,
    /// Per block.
    pub scale: Vec<f32>,
    /// Per block: -128 times the sum of the codes, what a bias of the other side by 128 adds, taken off.
    pub bias: Vec<i32>,
    /// Per block: the sum of the codes in f32, exactly.
    pub total: Vec<f32>,
    /// Per block: biased exponent, exactly.
    pub exponent: Vec<f32>,
}

impl Activations {
    /// Forgets every earlier launch and makes room for `rows` rows of `blocks` blocks.
    pub fn begin(&mut self, rows: usize, blocks: usize) {
        (self.rows, self.blocks) = (rows, blocks);
        self.codes.clear();
        self.biased.clear();
        self.values.clear();
        for field in [&mut self.scale, &mut self.total, &mut self.exponent] {
            field.clear();
            field.resize(rows * blocks, 0.0);
        }
        self.bias.clear();
        self.bias.resize(rows * blocks, 0);
    }

    /// Which block of the image above is block `b` of row `r`.
    #[inline(always)]
    pub fn place(&self, r: usize, b: usize) -> usize {
        let first = r / GROUPED * GROUPED;
        first * self.blocks + b * self.grouped(r) + r - first
    }

    /// How many rows stand together with row `r`: the distance of its blocks.
    #[inline(always)]
    pub fn grouped(&self, r: usize) -> usize {
        GROUPED.min(self.rows - r / GROUPED * GROUPED)
    }

    /// How many rows from row `r` on stand together.
    #[inline(always)]
    pub fn together(&self, r: usize) -> usize {
        self.grouped(r) - r % GROUPED
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::Engine;
    use crate::engine::tests::pack;

    #[test]
    fn a_value_that_is_not_finite_is_named() {
        for engine in Engine::ALL {
            for kernel in Kernel::ALL.into_iter().filter(|k| k.is_supported()) {
                let image = pack(engine, &[&[1.0; 40]]);
                let mut x = vec![1.0; 3 * 40];
                x[40 + 33] = f32::INFINITY;
                let mut y = [7.0; 3];
                let found = image.multiply(&x, 3, &mut y, 1, &mut Scratch::new(kernel).unwrap());
                let expected = LaunchError::NotFinite { row: 1, column: 33, value: f32::INFINITY };
                assert_eq!(found, Err(expected), "{engine}");
                assert_eq!(y, [7.0; 3], "{engine}: outputs of a refused launch");
            }
        }
    }

    // The largest f32 is finite, but bf16 rounds it to infinity.
    #[test]
    fn what_bf16_cannot_hold_is_named() {
        let refused = |engine| {
            let mut scratch = Scratch::new(Kernel::best()).unwrap();
            pack(engine, &[&[1.0]]).multiply(&[f32::MAX], 1, &mut [0.0], 1, &mut scratch).is_err()
        };
        assert_eq!(Engine::ALL.map(refused), [false, false, false, true, true]);
    }

    #[test]
    fn a_launch_has_128_rows() {
        let image = pack(Engine::F32, &[&[2.0]]);
        let mut scratch = Scratch::new(Kernel::best()).unwrap();
        let mut y = [0.0; 129];
        let found = image.multiply(&[1.0; 129], 129, &mut y, 1, &mut scratch);
        assert_eq!(found, Err(LaunchError::TooManyRows { rows: 129 }));
        image.multiply(&[1.0; 128], 128, &mut y, 1, &mut scratch).unwrap();
        assert_eq!((y[127], y[128]), (2.0, 0.0));
        image.multiply(&[], 0, &mut [], 1, &mut scratch).unwrap();
    }

    // Rows of y may be wider than the image: its neighbours in the row stay.
    #[test]
    fn outputs_between_out_and_ld_are_untouched() {
        let image = pack(Engine::F32, &[&[1.0, 0.0], &[0.0, 1.0]]);
        let mut scratch = Scratch::new(Kernel::best()).unwrap();
        let mut y = [9.0; 6];
        image.multiply(&[1.0, 2.0, 3.0, 4.0], 2, &mut y, 3, &mut scratch).unwrap();
        assert_eq!(y, [1.0, 2.0, 9.0, 3.0, 4.0, 9.0]);
    }
}
