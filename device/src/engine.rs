//! The number engines: what a launch multiplies, in which formats, and in which order it adds.
//!
//! Each engine has one file with the rule for its activations and its portable kernel. The portable kernel is
//! the definition: every other kernel gives the same bits.

pub(crate) mod bfp16;
pub(crate) mod int8;
mod launch;
pub(crate) mod strict;
pub(crate) mod w4a16;
pub(crate) mod w4a8;

use std::fmt;
use std::str::FromStr;

pub(crate) use launch::Activations;
pub use launch::{DECODE_ROWS, LaunchError, PREFILL_ROWS, Scratch};

/// A contract for matrix products on the device.
///
/// | engine | activations | weights | sum |
/// |---|---|---|---|
/// | `f32` | f32 | f32 | f32, strictly left to right, unfused |
/// | `int8` | int8, a scale per row | int8, a scale per output | i32, exact |
/// | `w4a8` | int8, a scale per 32 | 4-bit, scale and zero per 32 | i32 in a block, f32 over blocks |
/// | `w4a16` | bf16 | bf16 of 4-bit, bf16 scale and zero per 32 | f32, tiles of 32 |
/// | `bfp16` | blocks of 8 of bf16 | blocks of 8 | exact in a block, f32 over blocks |
///
/// Outputs are f32.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Engine {
    /// Host arithmetic on decoded weights.
    F32,
    /// 8-bit integers on both sides.
    Int8,
    /// 4-bit weights, 8-bit activations.
    W4A8,
    /// 4-bit weights, bf16 activations.
    W4A16,
    /// Block floating point on both sides.
    Bfp16,
}

impl Engine {
    /// Every engine, in the order of the table.
    pub const ALL: [Engine; 5] = [Engine::F32, Engine::Int8, Engine::W4A8, Engine::W4A16, Engine::Bfp16];

    /// The name of the engine in contracts and on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Engine::F32 => "f32",
            Engine::Int8 => "int8",
            Engine::W4A8 => "w4a8",
            Engine::W4A16 => "w4a16",
            Engine::Bfp16 => "bfp16",
        }
    }

    /// Whether weights are kept as 4-bit codes.
    pub fn is_four_bit(self) -> bool {
        matches!(self, Engine::W4A8 | Engine::W4A16)
    }
}

impl fmt::Display for Engine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// A name that no engine has.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("no engine is called {0:?}; there are f32, int8, w4a8, w4a16 and bfp16")]
pub struct UnknownEngine(pub String);

impl FromStr for Engine {
    type Err = UnknownEngine;

    fn from_str(name: &str) -> Result<Engine, UnknownEngine> {
        Engine::ALL.into_iter().find(|e| e.name() == name).ok_or_else(|| UnknownEngine(name.to_string()))
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::pack::{CodeRow, Image, PackError};
    use crate::simd::Kernel;

    /// The image of rows of weights.
    pub fn pack(engine: Engine, w: &[&[f32]]) -> Image {
        let image = Image::pack(engine, w.len(), w[0].len(), &mut |o, row: &mut [f32]| {
            row.copy_from_slice(w[o]);
            Ok::<_, PackError>(())
        });
        image.unwrap()
    }

    /// The image of one row of codes with one scale and zero for all groups.
    pub fn pack_codes(engine: Engine, codes: &[u8], d: f32, m: f32, symmetric: bool) -> Image {
        let image = Image::pack_codes(engine, 1, codes.len(), &mut |_, row: &mut CodeRow| {
            row.codes.copy_from_slice(codes);
            row.scale.fill(d);
            row.min.fill(m);
            row.symmetric = symmetric;
            Ok::<_, PackError>(())
        });
        image.unwrap()
    }

    /// The outputs of one row; every kernel of this machine must agree on them.
    pub fn product(image: &Image, x: &[f32]) -> Vec<f32> {
        let mut outputs: Vec<Vec<f32>> = Vec::new();
        for kernel in Kernel::ALL.into_iter().filter(|k| k.is_supported()) {
            let mut y = vec![f32::NAN; image.out()];
            let mut scratch = Scratch::new(kernel).unwrap();
            image.multiply(x, 1, &mut y, image.out(), &mut scratch).unwrap();
            outputs.push(y);
        }
        assert!(outputs.iter().all(|y| *y == outputs[0]), "kernels differ: {outputs:?}");
        outputs.swap_remove(0)
    }

    #[test]
    fn names_come_back() {
        for engine in Engine::ALL {
            assert_eq!(engine.name().parse(), Ok(engine));
        }
        assert_eq!("int4".parse::<Engine>(), Err(UnknownEngine("int4".into())));
    }

    // Row 0 of w: 1·127 + 10·1 = 137. Row 1: 2·1 + 127·10 = 1272. Transposed they would be 147 and 1271.
    // 127 in every row of w and of x keeps the integers exact in the formats that scale by the largest value: the
    // third column carries it for x, where w is 0.
    #[test]
    fn every_engine_reads_rows_of_w() {
        for engine in [Engine::F32, Engine::Int8] {
            let image = pack(engine, &[&[127.0, 1.0, 0.0], &[2.0, 127.0, 0.0]]);
            assert_eq!(product(&image, &[1.0, 10.0, 127.0]), [137.0, 1272.0], "{engine}");
        }
        // Codes 0 to 15 with scale 1 in 4 bits; mantissas of one block of eight hold all of these integers.
        for engine in [Engine::W4A8, Engine::W4A16, Engine::Bfp16] {
            let image = pack(engine, &[&[15.0, 1.0, 0.0], &[2.0, 15.0, 0.0]]);
            assert_eq!(product(&image, &[1.0, 10.0, 127.0]), [25.0, 152.0], "{engine}");
        }
    }
}
