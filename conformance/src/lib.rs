//! Judging a subject against the reference, and the reference against goldens.
//!
//! A kernel of your own, tested with the report that `karat verify` gives:
//!
//! ```
//! use conformance::{judge::Verdict, kernel, report};
//!
//! let result = kernel::check("llama", "rms_norm", "f32", |call| {
//!     let (x, weight) = (call.input("x").unwrap(), call.input("weight").unwrap());
//!     x.values.chunks(weight.values.len()).flat_map(|row| {
//!         let squares: f32 = row.iter().map(|v| v * v).sum();
//!         let scale = 1.0 / (squares / row.len() as f32 + call.number("eps") as f32).sqrt();
//!         row.iter().zip(&weight.values).map(move |(v, w)| v * scale * w)
//!     }).collect()
//! })?;
//! assert_eq!(result.verdict, Verdict::Passed, "{}", report::text::verify(std::slice::from_ref(&result), false));
//! # Ok::<(), conformance::cli::CliError>(())
//! ```

#![forbid(unsafe_code)]

pub mod ab;
pub mod audit;
pub mod bench;
pub mod cases;
pub mod check;
pub mod cli;
pub mod contract;
pub mod cost;
pub mod draft;
pub mod dumping;
pub mod edits;
pub mod emulate;
pub mod extract;
pub mod follow;
pub mod golden_gate;
pub mod goldens;
pub mod inspect;
pub mod judge;
pub mod kernel;
pub mod known;
pub mod mutants;
pub mod passes;
pub mod probe;
pub mod record;
pub mod report;
pub mod routing;
pub mod subject;
pub mod taps;
pub mod topk_gate;
pub mod variance;
pub mod verify;
