//! One result, rendered in several forms.

pub mod json;
pub mod text;
