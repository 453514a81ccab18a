//! The NPU path: packed once, resident, launched in tiles, on a CPU.
