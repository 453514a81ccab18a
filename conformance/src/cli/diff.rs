//! `karat diff`.

use super::{CliError, Format, Outcome};
use crate::goldens::{Comparison, Source, compare, own_goldens, remake, survivors};
use crate::report;
use golden::DiffVerdict;
use tempfile::TempDir;

/// Arguments of `diff`.
#[derive(clap::Args)]
pub struct Args {
    /// The older side: a dump, a directory of dumps, or git:REV:PATH.
    #[arg(value_name = "OLD", required_unless_present = "against")]
    old: Option<String>,
    /// The newer side.
    #[arg(value_name = "NEW", required_unless_present = "against")]
    new: Option<String>,
    /// Compare dumps of different models or prompts all the same.
    #[arg(long)]
    force: bool,
    /// Compare what this build computes with the goldens of a revision.
    #[arg(long, value_name = "REV", conflicts_with_all = ["old", "new"])]
    against: Option<String>,
}

/// Runs the verb: 0 where all is identical or equivalent, 1 where something changed.
pub fn run(args: &Args, format: Format) -> Result<Outcome, CliError> {
    let comparison = match (&args.against, &args.old, &args.new) {
        (Some(revision), ..) => against(revision, args.force)?,
        (None, Some(old), Some(new)) => compare(&Source::open(old)?, &Source::open(new)?, args.force)?,
        _ => return Err(CliError::Usage("expected two dumps, or --against REV".into())),
    };
    let report = match format {
        Format::Json => report::diff::json(&comparison),
        Format::Md => report::diff::markdown(&comparison),
        _ => report::diff::text(&comparison),
    };
    Ok(Outcome { report, code: u8::from(comparison.verdict() == DiffVerdict::Changed) })
}

/// Remakes the goldens of a revision with this build and compares.
fn against(revision: &str, force: bool) -> Result<Comparison, CliError> {
    let old = Source::of_revision(revision, "golden/data")?;
    let made = TempDir::new_in(std::env::temp_dir())
        .map_err(|error| CliError::Io(own_goldens().display().to_string(), error))?;
    for name in old.dumps()? {
        remake(&old, &name, &made.path().join(&name), None)?;
    }
    let mut comparison = compare(&old, &Source::open(&made.path().display().to_string())?, force)?;
    comparison.survivors = survivors(&old)?;
    Ok(comparison)
}
