//! `karat verify`.

use super::load::{check_ids, check_length, load, prompts, seeded_prompt};
use super::{CliError, Format, Outcome, repro};
use crate::contract::Contract;
use crate::follow::View;
use crate::judge::Verdict;
use crate::mutants::Selection;
use crate::report;
use crate::subject::SubjectSpec;
use crate::verify::{Loaded, Options, PackageResult, verify};
use indicatif::{ProgressBar, ProgressStyle};
use std::path::PathBuf;

/// Arguments of `verify`.
#[derive(clap::Args)]
pub struct Args {
    /// Packages: paths or bundled names; all bundled ones where none is given.
    #[arg(value_name = "PACKAGE")]
    packages: Vec<String>,
    /// A dump to hold the reference to, instead of the package's own.
    #[arg(long, value_name = "DUMP")]
    golden: Option<PathBuf>,
    /// What is under test: npu, npu:int8, npu:f32, ..., reference, dump:DIR.
    #[arg(long, value_name = "SPEC", default_value = "npu")]
    subject: String,
    /// The number formats to judge it under, instead of those that it declares.
    #[arg(long, value_name = "NAME")]
    contract: Option<String>,
    /// Prompts as token ids, one a line.
    #[arg(long, value_name = "FILE")]
    prompt_ids: Option<PathBuf>,
    /// Greedy steps behind the prompt, where no golden says how many.
    #[arg(long, value_name = "N", default_value_t = 4)]
    tokens: usize,
    /// Judge only taps that match: prefill.layers.*.q_proj.
    #[arg(long, value_name = "GLOB")]
    sites: Option<String>,
    /// Judge all error that has come down to a site, and not only its own.
    #[arg(long)]
    cumulative: bool,
    /// How the names and axes of a dump map to taps (JSON).
    #[arg(long, value_name = "FILE")]
    map: Option<PathBuf>,
    /// Print the counted cost of a token.
    #[arg(long)]
    cost: bool,
    /// Pass over this unknown config key.
    #[arg(long, value_name = "KEY")]
    allow_unknown: Vec<String>,
    /// Verify a subject that is wrong in the named way: ID[:VARIANT][@SITE].
    #[arg(long, value_name = "MUTANT")]
    mutate: Option<String>,
}

/// Runs the verb.
pub fn run(args: &Args, format: Format) -> Result<Outcome, CliError> {
    let mut subject: SubjectSpec = args.subject.parse()?;
    match (&mut subject, &args.map) {
        (SubjectSpec::Dump(dump), map) => dump.map.clone_from(map),
        (_, Some(_)) => return Err(CliError::Usage("--map needs --subject dump:DIR".into())),
        _ => {}
    }
    let contract_name = args.contract.as_deref().unwrap_or(subject.contract_name());
    let contract = Contract::named(contract_name).ok_or_else(|| {
        let known = Contract::NAMES.join(", ");
        CliError::Usage(format!("no contract is called {contract_name}; there are {known}"))
    })?;
    let mutate = args.mutate.as_deref().map(Selection::parse).transpose()?;
    let packages = if args.packages.is_empty() { bundled_models() } else { args.packages.clone() };
    let one_package =
        args.golden.is_some() || args.prompt_ids.is_some() || matches!(subject, SubjectSpec::Dump(_));
    if packages.len() > 1 && one_package {
        return Err(CliError::Usage("--golden, --prompt-ids and a dump need one package; name it".into()));
    }
    let options = Options {
        subject: &subject,
        contract: &contract,
        view: if args.cumulative { View::Cumulative } else { View::Own },
        mutate: mutate.as_ref(),
        sites: args.sites.as_deref(),
        steps: args.tokens,
        pictures: format == Format::Html,
    };
    let bar = progress(packages.len());
    let mut results = Vec::new();
    for name in &packages {
        bar.set_message(name.clone());
        let loaded = load(name, args.golden.as_deref(), &args.allow_unknown)?;
        let own = prompts_of(&subject, &loaded)?;
        let (prompts, seeded) = match (&args.prompt_ids, &loaded.golden) {
            (Some(file), _) => (prompts(file, &loaded.config, args.tokens)?, false),
            (None, _) if !own.is_empty() => (own, false),
            (None, Some(golden)) => (vec![golden.manifest().prompt.clone()], false),
            (None, None) => (vec![seeded_prompt(&loaded.config)], true),
        };
        for (n, prompt) in prompts.iter().enumerate() {
            let mut result = verify(&loaded, prompt, &options, repro())?;
            result.prompt = (prompts.len() > 1).then_some(n);
            if seeded && result.reason.is_none() {
                result.reason = Some(format!("no prompt and no golden: ran on the seeded ids {prompt:?}"));
            }
            results.push(result);
        }
        bar.inc(1);
    }
    bar.finish_and_clear();
    if let Some(glob) = &args.sites
        && results.iter().all(|result| result.sites.is_empty() && result.verdict < Verdict::NotSupported)
    {
        return Err(CliError::Verify(crate::verify::VerifyError::NoSite { glob: glob.clone() }));
    }
    let code = exit_code(&results);
    let report = match format {
        Format::Text => report::text::verify(&results, args.cost),
        Format::Json => report::json::verify(&results),
        Format::Md => report::markdown::verify(&results),
        Format::Junit => report::junit::verify(&results),
        Format::Sarif => report::sarif::verify(&results),
        Format::Html => report::html::verify(&results),
    };
    Ok(Outcome { report, code })
}

/// The prompts that a dump says it is of.
fn prompts_of(subject: &SubjectSpec, loaded: &Loaded) -> Result<Vec<Vec<u32>>, CliError> {
    let SubjectSpec::Dump(spec) = subject else { return Ok(vec![]) };
    let mut prompts = Vec::new();
    for dump in spec.open().map_err(|error| CliError::Usage(error.to_string()))? {
        check_ids(&dump.run.greedy, &loaded.config, "the dump's greedy ids")?;
        if let Some(prompt) = dump.run.prompt {
            check_ids(&prompt, &loaded.config, "the dump's prompt")?;
            check_length(&prompt, &loaded.config, dump.run.steps, "the dump's prompt")?;
            prompts.push(prompt);
        }
    }
    Ok(prompts)
}

/// The bundled packages that are one model each.
fn bundled_models() -> Vec<String> {
    let is_model = |name: &String| fixtures::Package::open(name).is_ok_and(|package| !package.has_draft());
    fixtures::bundled().into_iter().filter(is_model).collect()
}

/// The exit code of the worst result.
fn exit_code(results: &[PackageResult]) -> u8 {
    let rank = |code: &u8| match code {
        0 => 0,
        3 => 1,
        1 => 2,
        5 => 3,
        _ => 4,
    };
    results.iter().map(PackageResult::exit_code).max_by_key(rank).unwrap_or(0)
}

/// A bar on a terminal, nothing elsewhere.
fn progress(length: usize) -> ProgressBar {
    let style = ProgressStyle::with_template("{bar:24} {pos}/{len} {msg}");
    ProgressBar::new(length as u64).with_style(style.expect("a template of known keys"))
}
