//! `karat accept`.

use super::{CliError, Format, Outcome};
use crate::goldens::{Source, compare, own_goldens, remake};
use crate::report;
use golden::{DiffVerdict, Dump};
use std::io::{BufRead, Write};
use std::path::Path;
use tempfile::TempDir;

/// How many goldens `--all` takes without `--bulk`.
const FEW: usize = 8;

/// Arguments of `accept`.
#[derive(clap::Args)]
pub struct Args {
    /// Accept every changed golden, for one reason.
    #[arg(long, requires = "reason")]
    all: bool,
    /// Why the new values are right.
    #[arg(long, value_name = "TEXT")]
    reason: Option<String>,
    /// Accept more than eight at once.
    #[arg(long)]
    bulk: bool,
}

/// Runs the verb: remakes every golden, shows what changed, and takes the new values with a reason.
pub fn run(args: &Args, _: Format) -> Result<Outcome, CliError> {
    let goldens = own_goldens();
    let old = Source::open(&goldens.display().to_string())?;
    let made = TempDir::new().map_err(|error| CliError::Io("a temporary directory".into(), error))?;
    for name in karat_made(&old)? {
        remake(&old, &name, &made.path().join(&name), None)?;
    }
    let new = Source::open(&made.path().display().to_string())?;
    let mut comparison = compare(&old, &new, true)?;
    comparison.pairs.retain(|pair| pair.diff.verdict != DiffVerdict::Identical);
    let changed = comparison.pairs.len();
    if changed == 0 {
        return Ok(Outcome { report: "every golden is byte-identical: nothing to accept\n".into(), code: 0 });
    }
    if args.all && changed > FEW && !args.bulk {
        return Err(CliError::Usage(format!(
            "{changed} goldens changed, more than {FEW}; look at them one by one, or add --bulk"
        )));
    }
    let mut accepted = 0;
    for pair in &comparison.pairs {
        let reason = if args.all { args.reason.clone() } else { ask(&report::diff::pair_text(pair))? };
        if let Some(reason) = reason.filter(|reason| !reason.trim().is_empty()) {
            accept(&old, &pair.dump, &goldens, reason.trim())?;
            accepted += 1;
        }
    }
    Ok(Outcome { report: format!("accepted {accepted} of {changed} changed goldens\n"), code: 0 })
}

/// Goldens that this program made; an oracle's are not ours to accept.
fn karat_made(source: &Source) -> Result<Vec<String>, CliError> {
    let mut names = Vec::new();
    for name in source.dumps()? {
        if Dump::open(source.path().join(&name))?.manifest().producer.starts_with("karat ") {
            names.push(name);
        }
    }
    Ok(names)
}

/// Shows a change and reads the reason to accept it; an empty line keeps the old values.
fn ask(change: &str) -> Result<Option<String>, CliError> {
    let io = |error| CliError::Io("standard input".into(), error);
    anstream::print!("{change}reason to accept (empty keeps the old values): ");
    std::io::stdout().flush().map_err(io)?;
    let mut line = String::new();
    let read = std::io::stdin().lock().read_line(&mut line).map_err(io)?;
    Ok((read > 0).then_some(line))
}

/// Puts the new dump in the old one's place: written beside it, then renamed.
fn accept(old: &Source, name: &str, goldens: &Path, reason: &str) -> Result<(), CliError> {
    let target = goldens.join(name);
    let io = |path: &Path| {
        let path = path.display().to_string();
        move |error| CliError::Io(path, error)
    };
    let (fresh, aside) = (target.with_extension("accepting"), target.with_extension("replaced"));
    remake(old, name, &fresh, Some(reason))?;
    std::fs::rename(&target, &aside).map_err(io(&target))?;
    std::fs::rename(&fresh, &target).map_err(io(&fresh))?;
    std::fs::remove_dir_all(&aside).map_err(io(&aside))
}
