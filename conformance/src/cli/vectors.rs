//! `karat check --export` and `--from`.

use super::{CliError, Format, Outcome};
use crate::cases::Case;
use crate::check::report::Report;
use crate::check::vectors::{self, Vectors};
use crate::contract::Contract;
use crate::judge::Verdict;
use std::path::Path;

/// Writes cases to a new directory.
pub fn export(dir: &Path, cases: &[Case], contract: &Contract, seed: u64) -> Result<Outcome, CliError> {
    let exported = vectors::export(dir, cases, contract, seed)?;
    let to = dir.display();
    let mut report = format!("{} cases under {} in {to}\n", exported.written, contract.name);
    if !exported.passed_over.is_empty() {
        report += &format!("without a form in plain arrays: {}\n", exported.passed_over.join(", "));
    }
    report += &format!(
        "for each: read case.json and inputs.safetensors, leave outputs.safetensors, y.npy or y.f32 beside \
         them, as a cmd: subject does; then karat check --from {to}\n"
    );
    let code = if exported.written == 0 { 3 } else { 0 };
    Ok(Outcome { report, code })
}

/// Judges what was brought back; a case without a result leaves the whole inconclusive.
pub fn judge(dir: &Path, op: Option<&str>, case: Option<&str>, format: Format) -> Result<Outcome, CliError> {
    let vectors = Vectors::open(dir)?;
    let wanted = |name: &str| {
        case.is_none_or(|case| case == name) && op.is_none_or(|op| name.split('/').next() == Some(op))
    };
    let results = vectors.judge(wanted)?;
    if results.is_empty() {
        return Err(CliError::Usage(format!("{} has no such case; see its manifest.json", dir.display())));
    }
    let missing = vectors::missing(&results);
    let total = results.len();
    let lacking: Vec<&str> =
        results.iter().filter(|case| case.verdict == Verdict::NotSupported).map(|case| case.case).collect();
    let list = lacking.join(", ");
    let subject = format!("results in {}", dir.display());
    let mut report = Report::new(subject, vectors.contract().name.clone(), results);
    if missing > 0 {
        report.reason = Some(format!("{missing} of {total} cases came back without a result: {list}"));
        report.verdict = report.verdict.max(Verdict::Mistrusted);
    }
    let text = match format {
        Format::Json => report.json(),
        _ => report.text(),
    };
    Ok(Outcome { report: text, code: report.code() })
}
