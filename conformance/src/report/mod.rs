//! One result, rendered in several forms.

mod beside;
pub mod diff;
pub mod html;
pub mod json;
pub mod junit;
pub mod markdown;
pub mod sarif;
pub mod text;

pub use beside::{Beside, MutatedSite, Mutation};
