//! The plain reference of every op and model.
//!
//! Plain beats clever here: someone who checks a formula against a paper reads one file, top to
//! bottom. Values at sites are f32; every sum adds strictly left to right in f64; a result is
//! rounded to f32 once, at its site, and nowhere else. So the bits do not depend on threads,
//! optimisation level or processor.

#![forbid(unsafe_code)]

pub mod models;
pub mod ops;
mod plain;
pub mod products;
mod state;
mod sum;

pub use models::{Model, ModelState};
pub use ops::{Call, Ops, Tensor};
pub use plain::Plain;
pub use spec;
pub use state::State;
