//! SARIF 2.1.0, for code-scanning pages: one result a failing package.

use crate::judge::Verdict;
use crate::verify::PackageResult;
use serde_json::{Value, json};

/// The report of `verify`.
pub fn verify(results: &[PackageResult]) -> String {
    let entries: Vec<Value> = results
        .iter()
        .filter(|result| result.verdict != Verdict::Passed && result.verdict != Verdict::Skipped)
        .map(entry)
        .collect();
    let rules: Vec<Value> =
        ["NEAR_TIE", "DRIFT", "NOT_SUPPORTED", "MISTRUSTED", "FAILED", "CRASHED", "BROKEN"]
            .map(|id| json!({"id": id, "shortDescription": {"text": format!("karat verdict {id}")}}))
            .into();
    let driver = json!({"name": "karat", "version": env!("CARGO_PKG_VERSION"), "rules": rules});
    let report = json!({
        "$schema": "https://json.schemastore.org/sarif-2.1.0.json",
        "version": "2.1.0",
        "runs": [{"tool": {"driver": driver}, "results": entries}],
    });
    serde_json::to_string_pretty(&report).expect("names and numbers") + "\n"
}

fn entry(result: &PackageResult) -> Value {
    let first = result.first_failure.as_ref().map_or(String::new(), |f| format!(", first at {}", f.site));
    let computes = result.explanation.as_ref().and_then(|e| e.named.as_ref());
    let computes = computes.map_or(String::new(), |named| format!(": computes {}", named.formula));
    let as_if = result.as_if.as_ref().map_or(String::new(), |as_if| format!(": as if {}", as_if.says));
    let reason = result.reason.as_ref().map_or(String::new(), |reason| format!(" ({reason})"));
    let beside: String = super::beside(result, 3).iter().map(|line| format!("; {line}")).collect();
    let level = match result.exit_code() {
        0 => "note",
        3 => "warning",
        _ => "error",
    };
    json!({
        "ruleId": result.verdict.name(),
        "level": level,
        "message": {"text": format!(
            "{} on {}: {}{first}{computes}{as_if}{reason}{beside}. Again: {}",
            result.subject, result.package, result.verdict.name(), result.repro
        )},
        "locations": [{"logicalLocations": [{
            "fullyQualifiedName": result.first_failure.as_ref().map_or(&result.package, |f| &f.site),
            "kind": "module",
        }]}],
    })
}
