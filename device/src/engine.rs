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
