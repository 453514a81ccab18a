//! The NPU path: packed once, resident, launched in tiles, on a CPU.

pub mod engine;
pub mod pack;
pub mod round;
pub mod simd;
