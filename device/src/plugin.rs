//! Kernels from somebody else's library, through the C interface of `include/karat.h`.
//!
//! A library runs in a process of its own ([`serve`]), to which [`Plugin`] hands one call after another, its
//! values in shared memory: one that crashes, hangs or writes where it must not takes nothing with it.

mod abi;
mod call;
mod host;
mod library;
mod serve;
mod shared;
mod wire;

pub use abi::{ABI, Abi, Attention, ENTRY};
pub use call::{Input, OpCall};
pub use host::{Plugin, PluginError};
pub use serve::serve;
pub use wire::{Info, Reply, Tap};
