//! JSON: fields are added, never renamed.

use super::Beside;
use crate::judge::Verdict;
use crate::verify::PackageResult;
use serde::Serialize;

#[derive(Serialize)]
struct Report<'a> {
    schema: &'static str,
    verdict: Verdict,
    results: &'a [PackageResult],
    #[serde(flatten)]
    beside: &'a Beside,
}

/// `karat/verify/1`.
pub fn verify(results: &[PackageResult], beside: &Beside) -> String {
    let verdict = results.iter().map(|result| result.verdict).max().unwrap_or(Verdict::Skipped);
    let report = Report { schema: "karat/verify/1", verdict, results, beside };
    // Infinite scores become null, which JSON has a word for.
    serde_json::to_string_pretty(&report).expect("a report of strings and numbers") + "\n"
}
