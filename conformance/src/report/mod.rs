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

use crate::verify::PackageResult;

/// What stands beside the verdicts, a line each: notes, values that could not be used, and names that no site
/// was found for, at most `most` of the last two.
fn beside(result: &PackageResult, most: usize) -> Vec<String> {
    let mut lines: Vec<String> = result.notes.iter().map(|note| format!("note: {note}")).collect();
    lines.extend(result.problems.iter().take(most).map(|problem| format!("unusable: {problem}")));
    if result.problems.len() > most {
        lines.push(format!("and {} more that could not be used", result.problems.len() - most));
    }
    if !result.unmatched.is_empty() {
        let shown: Vec<&str> = result.unmatched.iter().take(most).map(String::as_str).collect();
        let more = result.unmatched.len() - shown.len();
        let rest = if more > 0 { format!(" and {more} more") } else { String::new() };
        lines.push(format!("unmatched names: {}{rest}", shown.join(", ")));
    }
    lines
}
