//! Judging a subject against the reference, and the reference against goldens.

#![forbid(unsafe_code)]

pub mod ab;
pub mod audit;
pub mod cases;
pub mod check;
pub mod cli;
pub mod contract;
pub mod draft;
pub mod dumping;
pub mod emulate;
pub mod follow;
pub mod golden_gate;
pub mod goldens;
pub mod judge;
pub mod mutants;
pub mod passes;
pub mod probe;
pub mod record;
pub mod report;
pub mod subject;
pub mod topk_gate;
pub mod variance;
pub mod verify;
