//! How good a draft is for its target: the speculative loop, and counts that leave no doubt.
//!
//! Positions of a text of `P` prompt and `M` generated tokens are `0..end`, `end = P + M`. The first
//! generated token is the target's alone. Then, with the last token (the *anchor*) at position `s`:
//!
//! ```text
//! n = min(B, end - s) - 1                     proposals, of a block of B
//! d_1 … d_n                                    the draft's, from context rows 0 … s-1 and the anchor
//! t_0 … t_n                                    the target's own tokens behind [anchor, d_1, …, d_n]
//! a = length of the longest prefix with d_j = t_{j-1}
//! emitted: d_1 … d_a, t_a, cut at the end of the text and behind a stop token
//! ```
//!
//! Source: `dflash` 0.1.0, whose loop this reproduces token by token and count by count.

mod count;
mod device;
pub mod golden;
mod host;
pub mod judge;
mod mistakes;
mod mtp;
mod pair;
pub mod passes;
mod report;
mod sampling;
mod walk;

pub use count::{Pass, Ratios, Tally};
pub use device::NpuHost;
pub use host::{Host, HostError, Seconds};
pub use mistakes::{LoopMutant, MUTANTS, audit_loop};
pub use mtp::{MtpError, MtpHost};
pub use pair::{Pair, PairError, Scale, ScaleOrigin};
pub use report::{DEFINITIONS, Kind, Mode, Report, Sampling, Scored, json, markdown, text};
pub use sampling::{Filter, Matching, Rejection, draw, filtered, residual};
pub use walk::{Greedy, Limits, Proposals, Speculate, Verifier, Walk, every_position, walk};
