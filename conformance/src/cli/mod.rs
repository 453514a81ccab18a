//! The command line: one file a verb.

mod ab;
mod accept;
mod audit;
mod bench;
mod check;
mod convert;
mod diff;
mod draft;
mod dump;
mod error;
mod inspect;
pub mod load;
mod probe;
mod verify;

pub use error::CliError;

use clap::{Parser, Subcommand, ValueEnum};
use std::path::PathBuf;
use std::process::ExitCode;

/// Judges LLM inference kernels against a plain reference, layer by layer.
#[derive(Parser)]
#[command(name = "karat", version, about, disable_help_subcommand = true)]
struct Cli {
    #[command(subcommand)]
    verb: Verb,
    /// How to report.
    #[arg(long, global = true, value_enum, default_value = "text")]
    format: Format,
    /// Write the report to a file instead of standard output.
    #[arg(long, global = true, value_name = "FILE")]
    output: Option<PathBuf>,
}

/// The forms of a report.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Format {
    /// For a terminal.
    Text,
    /// For scripts; fields are added, never renamed.
    Json,
    /// Markdown for a pull request: at most sixty lines.
    Md,
    /// JUnit XML.
    Junit,
    /// SARIF 2.1.0.
    Sarif,
    /// One self-contained page with pictures.
    Html,
}

#[derive(Subcommand)]
enum Verb {
    /// Does this subject compute this model right, and where does it first go wrong?
    Verify(verify::Args),
    /// Does this subject compute each op right, on every shape and value class?
    Check(check::Args),
    /// Which weight element does the subject use for which output?
    Probe(probe::Args),
    /// Which mistakes could this fixture not see?
    Audit(audit::Args),
    /// Write the values of a run: prefill, then greedy steps.
    Dump(dump::Args),
    /// What is in this package; would it be refused, and why?
    Inspect(inspect::Args),
    /// What changed between two dumps, or two directories of dumps?
    Diff(diff::Args),
    /// Review changed goldens one by one, with a reason.
    Accept(accept::Args),
    /// How good is this draft model for this target?
    Draft(draft::Args),
    /// Write a package in another container.
    Convert(convert::Args),
    /// Do two arms give the same bytes, and which is cheaper?
    Ab(ab::Args),
    /// How fast are the reference, the NPU path and the comparer here, against the machine's own limits?
    Bench(bench::Args),
    /// Runs a library under test in this process, for the judge that started it.
    #[command(name = crate::subject::library::SERVE, hide = true)]
    ServePlugin {
        /// The library.
        library: PathBuf,
    },
}

/// What a verb has to say, and the exit code that goes with it.
pub struct Outcome {
    /// The report, in the format that was asked for.
    pub report: String,
    /// 0 conformant, 1 numeric failure, 3 inconclusive, 4 reference or golden broken, 5 crashed.
    pub code: u8,
}

/// Runs the command line of this process.
pub fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => {
            let _ = error.print();
            return ExitCode::from(if error.use_stderr() { 2 } else { 0 });
        }
    };
    let outcome = match &cli.verb {
        Verb::Verify(args) => verify::run(args, cli.format),
        Verb::Check(args) => check::run(args, cli.format),
        Verb::Probe(args) => probe::run(args, cli.format),
        Verb::Audit(args) => audit::run(args, cli.format),
        Verb::Dump(args) => dump::run(args, cli.format),
        Verb::Inspect(args) => inspect::run(args, cli.format),
        Verb::Diff(args) => diff::run(args, cli.format),
        Verb::Accept(args) => accept::run(args, cli.format),
        Verb::Draft(args) => draft::run(args, cli.format),
        Verb::Convert(args) => convert::run(args, cli.format),
        Verb::Ab(args) => ab::run(args, cli.format),
        Verb::Bench(args) => bench::run(args, cli.format),
        Verb::ServePlugin { library } => return ExitCode::from(device::plugin::serve(library)),
    };
    match outcome.and_then(|outcome| emit(&outcome.report, cli.output.as_deref()).map(|()| outcome.code)) {
        Ok(code) => ExitCode::from(code),
        Err(error) => {
            anstream::eprintln!("karat: {error}");
            ExitCode::from(error.code())
        }
    }
}

/// Prints a report, or writes it whole or not at all.
fn emit(report: &str, output: Option<&std::path::Path>) -> Result<(), CliError> {
    use std::io::Write;
    let Some(path) = output else {
        // A reader that has seen enough and closes the pipe is no error.
        let _ = anstream::stdout().write_all(report.as_bytes());
        return Ok(());
    };
    let partial = path.with_extension("partial");
    let write = || std::fs::write(&partial, report).and_then(|()| std::fs::rename(&partial, path));
    write().map_err(|error| CliError::Io(path.display().to_string(), error))
}

/// The arguments of this process as one line that runs the same again.
pub(crate) fn repro() -> String {
    let mut line = "karat".to_string();
    let mut skip = false;
    for argument in std::env::args().skip(1) {
        let drop_next = matches!(&*argument, "--format" | "--output");
        if !skip && !drop_next && !argument.starts_with("--format=") && !argument.starts_with("--output=") {
            line.push(' ');
            let plain = argument.chars().all(|c| c.is_ascii_alphanumeric() || "-_./@:=,".contains(c));
            line.push_str(&if plain { argument.clone() } else { format!("'{argument}'") });
        }
        skip = drop_next;
    }
    line
}
