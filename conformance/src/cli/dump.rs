//! `karat dump`.

use super::load::{check_length, load, prompts};
use super::{CliError, Format, Outcome};
use crate::dumping::{Run, write};
use crate::subject::SubjectSpec;
use std::path::PathBuf;

/// Arguments of `dump`.
#[derive(clap::Args)]
pub struct Args {
    /// A path or a bundled name.
    package: String,
    /// Prompts as token ids, one a line.
    #[arg(long, value_name = "FILE")]
    prompt_ids: PathBuf,
    /// Where to write: one directory a prompt, `0/`, `1/`, ...
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
    /// Whose values.
    #[arg(long, value_name = "SPEC", default_value = "reference")]
    subject: String,
    /// Only taps that match.
    #[arg(long, value_name = "GLOB")]
    sites: Option<String>,
    /// Greedy steps behind the prompt.
    #[arg(long, value_name = "N", default_value_t = 4)]
    tokens: usize,
    /// Do not work out what rounding does at every site, by which a diff tells changes in sigmas: a dump in about a
    /// third of the time.
    #[arg(long)]
    no_sigma: bool,
    /// Pass over this unknown config key.
    #[arg(long, value_name = "KEY")]
    allow_unknown: Vec<String>,
}

/// Runs the verb.
pub fn run(args: &Args, format: Format) -> Result<Outcome, CliError> {
    let subject: SubjectSpec = args.subject.parse()?;
    let loaded = load(&args.package, None, &args.allow_unknown)?;
    let prompts = prompts(&args.prompt_ids, &loaded.config, args.tokens)?;
    let model_hash = golden::model_hash(&fixtures::Package::open(&args.package)?.files())?;
    let mut written = Vec::new();
    for (n, prompt) in prompts.iter().enumerate() {
        check_length(prompt, &loaded.config, args.tokens, "the prompt")?;
        let target = args.out.join(n.to_string());
        let sites = args.sites.as_deref();
        let run =
            Run { subject: &subject, prompt, steps: args.tokens, sites, reason: None, sigma: !args.no_sigma };
        let taps = write(&loaded, &model_hash, &run, &target)?;
        written.push((target.display().to_string(), taps));
    }
    let report = match format {
        Format::Json => {
            let dumps: Vec<_> =
                written.iter().map(|(dir, taps)| serde_json::json!({"dir": dir, "taps": taps})).collect();
            serde_json::json!({"schema": "karat/dump/1", "dumps": dumps}).to_string() + "\n"
        }
        _ => written.iter().map(|(dir, taps)| format!("{dir}: {taps} taps\n")).collect(),
    };
    Ok(Outcome { report, code: 0 })
}
