//! What the reference, the containers and the device agree on: configs, weights and site names.
//!
//! Nothing here computes anything: no op, no model. The device depends on this crate and not on
//! `karat-reference`, so that it cannot call the code that judges it:
//!
//! ```compile_fail
//! use karat_reference::ops::rms_norm; // this crate, like the device, cannot name the ops
//! ```

pub mod config;
pub mod families;
pub mod matrix;
pub mod rope;
pub mod site;
pub mod tensors;

pub use config::{ConfigError, ConfigReader, KeyUse};
pub use families::{Config, Family, Weights};
pub use matrix::{Matrix, NonFinite, Rows, Vector};
pub use rope::{Pairing, Rope, Scaling};
pub use site::Site;
pub use tensors::{LoadError, Loader, Tensors};
