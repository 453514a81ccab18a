//! The forms of a check.

use super::CaseResult;
use crate::judge::Verdict;
use serde::Serialize;
use std::fmt::Write;

/// A run of cases.
#[derive(Serialize)]
pub struct Report {
    schema: &'static str,
    /// The worst of all cases; NOT_SUPPORTED only where nothing could be run.
    pub verdict: Verdict,
    subject: String,
    contract: String,
    /// In a sentence, where the verdict needs one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    passed: usize,
    failed: usize,
    not_supported: usize,
    /// Every case.
    pub cases: Vec<CaseResult>,
}

impl Report {
    /// What the cases come to.
    pub fn new(subject: String, contract: String, cases: Vec<CaseResult>) -> Report {
        let count =
            |verdicts: &[Verdict]| cases.iter().filter(|case| verdicts.contains(&case.verdict)).count();
        let ran = cases.iter().filter(|case| case.verdict != Verdict::NotSupported);
        Report {
            schema: "karat/check/1",
            verdict: ran.map(|case| case.verdict).max().unwrap_or(Verdict::NotSupported),
            subject,
            contract,
            reason: None,
            passed: count(&[Verdict::Passed, Verdict::Drift]),
            failed: count(&[Verdict::Failed, Verdict::Crashed]),
            not_supported: count(&[Verdict::NotSupported]),
            cases,
        }
    }

    /// The exit code.
    pub fn code(&self) -> u8 {
        match self.verdict {
            Verdict::Failed => 1,
            Verdict::Drift => u8::from(self.cases.iter().any(|case| case.less_precise)),
            Verdict::NotSupported | Verdict::Mistrusted => 3,
            Verdict::Crashed => 5,
            _ => 0,
        }
    }

    /// As JSON, schema `karat/check/1`.
    pub fn json(&self) -> String {
        let mut text = serde_json::to_string(self).unwrap_or_default();
        text.push('\n');
        text
    }

    /// For a terminal.
    pub fn text(&self) -> String {
        let mut out = String::new();
        for case in &self.cases {
            match case.verdict {
                Verdict::Passed | Verdict::NotSupported => continue,
                Verdict::Failed => {
                    let _ = writeln!(
                        out,
                        "{} ({}): FAILED, {} of {} values",
                        case.case, case.dims, case.wrong, case.elements
                    );
                }
                verdict => drop(writeln!(out, "{} ({}): {}", case.case, case.dims, verdict.name())),
            }
            let _ = writeln!(out, "  meant   {}", case.catches);
            if let Some(first) = case.first_wrong {
                let (row, col) = (first.row, first.col);
                let _ = writeln!(
                    out,
                    "  first   y[{row},{col}]: reference {}, subject {}",
                    first.expected, first.found
                );
            }
            if let Some(pattern) = &case.pattern {
                let _ = writeln!(out, "  where   {pattern}");
            }
            if let Some(named) = case.explanation.as_ref().and_then(|e| e.named.as_ref()) {
                let _ = writeln!(
                    out,
                    "  looks   like {}: {} (z {:.2})",
                    named.mutant, named.formula, named.z_rms
                );
            }
            if let Some(shrunk) = &case.shrunk {
                let _ = writeln!(out, "  least   {shrunk}");
            }
            if let Some(repro) = &case.repro {
                let _ = writeln!(out, "  again   {repro}");
            }
        }
        let reason = self.reason.as_ref().map_or(String::new(), |reason| format!(": {reason}"));
        let _ = writeln!(
            out,
            "{} on {} under {}: {} passed, {} failed, {} not supported{reason}",
            self.verdict.name(),
            self.subject,
            self.contract,
            self.passed,
            self.failed,
            self.not_supported
        );
        out
    }
}
