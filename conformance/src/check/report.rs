//! The forms of a check.

use super::{CaseResult, NO_SUCH_OP};
use crate::judge::Verdict;
use crate::known::{self, Known, Places};
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
    /// Cases whose failure is known.
    skipped: usize,
    /// Ops of which no case could be run.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    not_supported_ops: Vec<&'static str>,
    /// What became of the known failures.
    #[serde(rename = "known_failures", skip_serializing_if = "Option::is_none")]
    known: Option<known::Outcome>,
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
            skipped: count(&[Verdict::Skipped]),
            not_supported_ops: without_cases(&cases),
            known: None,
            cases,
        }
    }

    /// Takes the failures that are known out of the verdict.
    pub fn excuse(self, known: &Known) -> Report {
        let Report { mut cases, subject, contract, reason, .. } = self;
        let fails = |case: &CaseResult| {
            [Verdict::Failed, Verdict::Crashed].contains(&case.verdict) || case.less_precise
        };
        let ran: Vec<(String, bool)> = cases
            .iter()
            .filter(|case| case.verdict != Verdict::NotSupported)
            .map(|case| (case.case.to_string(), fails(case)))
            .collect();
        let mut excused = Vec::new();
        let outcome = known.sort(Places::Cases, &ran, |n, entry| excused.push((n, entry.described())));
        for (n, why) in excused {
            for case in cases.iter_mut().filter(|case| case.case == ran[n].0) {
                (case.verdict, case.less_precise) = (Verdict::Skipped, false);
                case.pattern = Some(format!("known failure: {why}"));
            }
        }
        Report { reason, known: Some(outcome), ..Report::new(subject, contract, cases) }
    }

    /// The exit code.
    pub fn code(&self) -> u8 {
        let expired = self.known.as_ref().is_some_and(known::Outcome::fails);
        match self.verdict {
            Verdict::Passed | Verdict::Skipped | Verdict::NotSupported | Verdict::Drift if expired => 1,
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
                Verdict::Passed | Verdict::NotSupported | Verdict::Skipped => continue,
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
        if let Some(known) = &self.known {
            out.push_str(&known.text());
        }
        if !self.not_supported_ops.is_empty() {
            let _ = writeln!(out, "not supported: {}", self.not_supported_ops.join(", "));
        }
        for case in self.cases.iter().filter(|case| case.verdict == Verdict::NotSupported) {
            if let Some(why) = case.pattern.as_ref().filter(|why| *why != NO_SUCH_OP) {
                let _ = writeln!(out, "  {} ({}): {why}", case.case, case.dims);
            }
        }
        let skipped =
            if self.skipped > 0 { format!(", {} known failures", self.skipped) } else { String::new() };
        let reason = self.reason.as_ref().map_or(String::new(), |reason| format!(": {reason}"));
        let _ = writeln!(
            out,
            "{} on {} under {}: {} passed, {} failed, {} not supported{skipped}{reason}",
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

/// The ops of which every case was refused, in the order of the cases.
fn without_cases(cases: &[CaseResult]) -> Vec<&'static str> {
    let op = |case: &CaseResult| case.case.split('/').next().unwrap_or(case.case);
    let mut ops: Vec<&'static str> = Vec::new();
    for case in cases {
        let refused =
            || cases.iter().filter(|c| op(c) == op(case)).all(|c| c.verdict == Verdict::NotSupported);
        if !ops.contains(&op(case)) && refused() {
            ops.push(op(case));
        }
    }
    ops
}
