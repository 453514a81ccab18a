//! The NPU path: packed once, resident, launched in tiles, on a CPU.
//!
//! Matrix products run on the device: weights are packed into images ([`pack`]), stay resident under
//! named keys ([`resident`]) and are launched on up to 16 or 128 rows ([`design`]) by one of the number
//! engines ([`engine`]). Everything else runs on the host side in f32 ([`host`]).
//!
//! [`plugin`] runs kernels of other people's libraries.
//!
//! [`Npu`] is the whole: `init`, `step`, `step_batch`, `rollback`, taps and counters.

pub mod counters;
pub mod design;
pub mod engine;
mod error;
mod fault;
mod forward;
pub mod host;
mod launcher;
mod npu;
pub mod pack;
mod pass;
pub mod plugin;
pub mod resident;
pub mod round;
pub mod simd;
mod switches;
mod taps;

pub use counters::{Cost, Counters, Launch};
pub use engine::Engine;
pub use error::DeviceError;
pub use fault::Fault;
pub use npu::{Npu, Snapshot};
pub use resident::{Group, Key, Role};
pub use switches::{Reload, Switches};
pub use taps::TapSink;
