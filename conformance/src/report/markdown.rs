//! Markdown for a pull request: one comment of at most sixty lines.

use crate::judge::{SiteResult, Verdict};
use crate::verify::PackageResult;
use std::fmt::Write;

/// Failing packages that are described one by one.
const DESCRIBED: usize = 3;

/// Packages whose further measurements are told.
const MEASURED: usize = 4;

/// Lines of the table.
const TABLE: usize = 24;

/// The report of `verify`.
pub fn verify(results: &[PackageResult]) -> String {
    let worst = results.iter().map(|result| result.verdict).max().unwrap_or(Verdict::Skipped);
    let passed = results.iter().filter(|result| result.exit_code() == 0).count();
    let mut text =
        format!("### Karat: {}\n\n{passed} of {} packages conformant.\n\n", worst.name(), results.len());
    text.push_str("| package | subject | verdict | reference | tokens | sites | first failure |\n|---|---|---|---|---|---|---|\n");
    let mut ordered: Vec<&PackageResult> = results.iter().collect();
    ordered.sort_by_key(|result| std::cmp::Reverse(result.verdict));
    for result in ordered.iter().take(TABLE) {
        let within = result.sites.iter().filter(|site| site.verdict == Verdict::Passed).count();
        let tokens = result.logits.as_ref().map_or(String::new(), |logits| {
            let ties = if logits.near_ties > 0 {
                format!(" (+{} near ties)", logits.near_ties)
            } else {
                String::new()
            };
            format!("{}/{}{ties}", logits.argmax_equal.0, logits.argmax_equal.1)
        });
        let _ = writeln!(
            text,
            "| {} | {} | {} | {} | {tokens} | {within}/{} | {} |",
            result.package,
            result.subject,
            result.verdict.name(),
            result.reference.verdict.name(),
            result.sites.len(),
            result.first_failure.as_ref().map_or(String::new(), |f| format!("`{}`", f.site)),
        );
    }
    if ordered.len() > TABLE {
        let _ = writeln!(text, "\n... and {} more packages, none worse.", ordered.len() - TABLE);
    }
    ordered.iter().take(MEASURED).for_each(|result| measured(&mut text, result));
    for result in ordered.iter().filter(|result| result.exit_code() != 0).take(DESCRIBED) {
        describe(&mut text, result);
    }
    text
}

/// What further runs, another subject and the layers' own errors say, a line each.
fn measured(text: &mut String, result: &PackageResult) {
    if let Some(repeat) = &result.repeat {
        let first = repeat.changed.first().map_or(String::new(), |c| format!(", first `{}`", c.site));
        let (changed, taps, runs) = (repeat.changed.len(), repeat.taps, repeat.runs);
        let _ = writeln!(text, "- {}: {changed} of {taps} taps change in {runs} runs{first}", result.package);
    }
    for pieces in &result.pieces {
        let (tokens, verdict) = (pieces.tokens, pieces.verdict.name());
        let (changed, compared) = (pieces.changed.len(), pieces.compared);
        let package = &result.package;
        let _ = writeln!(
            text,
            "- {package}: in pieces of {tokens} {verdict}, {changed} of {compared} sites have other bytes"
        );
    }
    if let Some(baseline) = &result.baseline {
        let first = baseline.first_worse.as_ref().map_or(String::new(), |w| format!(", first `{}`", w.site));
        let _ = writeln!(
            text,
            "- {}: {} of {} taps worse than {}{first}",
            result.package, baseline.worse, baseline.compared, baseline.subject
        );
    }
    if let Some(budget) = &result.budget
        && let Some(most) = budget.parts.iter().max_by(|a, b| a.share.total_cmp(&b.share))
    {
        let _ = writeln!(
            text,
            "- {}: {:.0} % of the logit error comes from `{}` (parts leave {:.1} % open)",
            result.package,
            100.0 * most.share,
            most.site,
            100.0 * budget.closure
        );
    }
}

fn describe(text: &mut String, result: &PackageResult) {
    let _ = writeln!(text, "\n**{}**", result.package);
    if let Some(reason) = &result.reason {
        let _ = writeln!(text, "- {reason}");
    }
    if let Some(walked) = result.draft.as_ref().filter(|walked| walked.verdict != Verdict::Passed) {
        let _ = writeln!(text, "- draft {}: {}", walked.verdict.name(), walked.summary());
    }
    for line in super::beside(result, 3) {
        let _ = writeln!(text, "- {line}");
    }
    if let Some(first) = &result.first_failure {
        let element = first.element.map_or(String::new(), |e| {
            format!(" [{}, {}]: expected {}, found {}", e.row, e.col, e.expected as f32, e.found as f32)
        });
        let pattern = first.pattern.as_ref().map_or(String::new(), |pattern| format!(" ({pattern})"));
        let _ = writeln!(text, "- first wrong: `{}`{element}{pattern}", first.site);
    }
    if let Some(named) = result.explanation.as_ref().and_then(|e| e.named.as_ref()) {
        let _ = writeln!(text, "- computes {} (`{}`, rms z {:.2})", named.formula, named.mutant, named.z_rms);
    }
    if let Some(as_if) = &result.as_if {
        let _ = writeln!(text, "- as if {} (`{}`, rms z {:.2})", as_if.says, as_if.edit, as_if.z_rms);
    }
    let mut sites: Vec<&SiteResult> = result.sites.iter().filter(|s| s.verdict != Verdict::Passed).collect();
    sites.sort_by(|a, b| b.z_rms.total_cmp(&a.z_rms));
    for site in sites.iter().take(5) {
        let _ = writeln!(
            text,
            "- `{}` {}: rms z {:.3}, max abs {:.1e}",
            site.site,
            site.verdict.name(),
            site.z_rms,
            site.max_abs
        );
    }
    let _ = writeln!(text, "- again: `{}`", result.repro);
}
