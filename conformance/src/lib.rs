//! Judging a subject against the reference, and the reference against goldens.

#![forbid(unsafe_code)]

pub mod golden_gate;
pub mod passes;
pub mod record;
