//! `karat probe`.

use super::check::{OpSubjectArgs, subject};
use super::{CliError, Format, Outcome};
use crate::check::{Given, OpSubject};
use crate::judge::Verdict;
use crate::probe::report::Report;
use crate::probe::{infer, probe};
use std::path::PathBuf;

/// Arguments of `probe`.
#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    subject: OpSubjectArgs,
    /// The op.
    #[arg(long, value_name = "NAME", default_value = "linear")]
    op: String,
    /// Inputs and outputs.
    #[arg(long, value_name = "KxN", default_value = "96x64")]
    shape: String,
    /// Read the number formats and the order of sums back, and compare them with those that are declared.
    #[arg(long)]
    infer_contract: bool,
    /// Write the picture of the map to a file, as SVG.
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
}

/// Most elements of a weight that is probed: every input is a row of its own.
const MOST: usize = 1 << 20;

/// Runs the verb.
pub fn run(args: &Args, format: Format) -> Result<Outcome, CliError> {
    if args.op != "linear" {
        return Err(CliError::Usage(format!("op {} has no weights to probe; there is linear", args.op)));
    }
    let (inner, out) = shape(&args.shape)?;
    let chosen = args.subject.choose()?;
    let mut subject = subject(&chosen)?;
    let probed = match probe(&mut subject, inner, out) {
        Ok(probed) => probed,
        Err(Given::Stopped(reason)) => {
            let report = format!("{}: {reason}\n", Verdict::Crashed.name());
            return Ok(Outcome { report, code: 5 });
        }
        Err(_) => {
            let report = format!("{}: the subject has no matrix product\n", Verdict::NotSupported.name());
            return Ok(Outcome { report, code: 3 });
        }
    };
    if let (Some(selection), OpSubject::Mutant(wrong)) = (&chosen.selection, &subject)
        && wrong.applied.is_empty()
    {
        let (mutant, needs) = (selection.mutant.name(), selection.mutant.needs);
        return Err(CliError::Usage(format!("{mutant} does not apply to {inner}x{out}: it needs {needs}")));
    }
    let mut report = Report::new(chosen.name(), &probed);
    if args.infer_contract {
        let stopped = |given: Given| match given {
            Given::Stopped(reason) => format!("{}: {reason}\n", Verdict::Crashed.name()),
            _ => format!("{}: the subject refuses a product\n", Verdict::NotSupported.name()),
        };
        let declared = infer::declared(&chosen.contract).map_err(|given| CliError::Usage(stopped(given)))?;
        report = match infer::infer(&mut subject) {
            Ok(found) => report.with_contract(&chosen.contract.name, found, &declared),
            Err(given) => {
                let code = if matches!(given, Given::Stopped(_)) { 5 } else { 3 };
                return Ok(Outcome { report: stopped(given), code });
            }
        };
    }
    if let Some(file) = &args.svg {
        let written = std::fs::write(file, format!("{}\n", report.svg));
        written.map_err(|error| CliError::Io(file.display().to_string(), error))?;
    }
    let text = match format {
        Format::Json => report.json(),
        _ => report.text(),
    };
    Ok(Outcome { report: text, code: report.code() })
}

/// `KxN`
fn shape(text: &str) -> Result<(usize, usize), CliError> {
    let parsed = text.split_once('x').and_then(|(k, n)| Some((k.parse().ok()?, n.parse().ok()?)));
    let (inner, out): (usize, usize) = parsed.ok_or_else(|| {
        CliError::Usage(format!("shape {text:?}: expected inputs and outputs as KxN: 96x64"))
    })?;
    if inner == 0 || out == 0 || inner.saturating_mul(out) > MOST {
        return Err(CliError::Usage(format!("shape {text}: expected 1 to {MOST} elements")));
    }
    Ok((inner, out))
}
