//! JSON: fields are added, never renamed.

use crate::judge::Verdict;
use crate::verify::PackageResult;
use serde::Serialize;

#[derive(Serialize)]
struct Report<'a> {
    schema: &'static str,
    verdict: Verdict,
    results: &'a [PackageResult],
}

/// `karat/verify/1`.
pub fn verify(results: &[PackageResult]) -> String {
    let verdict = results.iter().map(|result| result.verdict).max().unwrap_or(Verdict::Skipped);
    let report = Report { schema: "karat/verify/1", verdict, results };
    // Infinite scores become null, which JSON has a word for.
    serde_json::to_string_pretty(&report).expect("a report of strings and numbers") + "\n"
}
