//! One result, rendered in several forms.

pub mod diff;
pub mod html;
pub mod json;
pub mod junit;
pub mod markdown;
pub mod sarif;
pub mod text;
