//! Dumps on disk: format, manifest, importers, tensor statistics, diff.
//!
//! A *dump* holds the taps of one run. [`Dump::open`] reads Karat's own format and the directories of
//! the independent oracle alike, [`DumpWriter`] writes one whole or not at all, and [`TopK`] reads the
//! small goldens of real models, which hold the best logits of each step instead of taps.

#![deny(unsafe_code)] // but for the two calls in container.rs

mod container;
pub mod diff;
mod dump;
mod error;
mod find;
mod hash;
pub mod import;
mod manifest;
mod name;
mod oracle;
pub mod stats;
mod topk;
mod writer;

pub use diff::{
    Change, Diff, DiffError, DiffOptions, DiffVerdict, Flip, SCHEMA as DIFF_SCHEMA, SiteDiff, diff,
};
pub use dump::{Dump, Noise, TapValues};
pub use error::DumpError;
pub use find::{find_dumps, is_dump};
pub use hash::{model_hash, model_hash_of, sha256_file, sha256_hex};
pub use manifest::{
    Dtype, FORMAT, MANIFEST_FILE, Manifest, Origin, Pass, Phase, Sigma, TAPS_FILE, TapInfo, TapSummary,
};
pub use name::{TapKey, pass_rank, split_tap};
pub use topk::{TOPK_FORMAT, TopK, TopKRun, TopKStep, TopKTap};
pub use writer::DumpWriter;
