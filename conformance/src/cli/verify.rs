//! `karat verify`.

use super::load::{check_ids, check_length, load, prompts, seeded_prompt};
use super::{CliError, Format, Outcome, repro};
use crate::contract::Contract;
use crate::cost::{CostPerToken, DeviceFile};
use crate::follow::View;
use crate::judge::Verdict;
use crate::mutants::Selection;
use crate::report;
use crate::subject::library::declared;
use crate::subject::{SubjectError, SubjectSpec};
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
    /// What is under test: npu, npu:int8, npu:f32, ..., reference, dump:DIR, cmd:"PROGRAM ARGS", lib:FILE.
    #[arg(long, value_name = "SPEC", default_value = "npu")]
    subject: String,
    /// The number formats to judge it under, instead of those that it declares: a name or a JSON file.
    #[arg(long, value_name = "NAME|FILE")]
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
    /// Seconds that a command or a library may take for one call.
    #[arg(long, value_name = "S")]
    timeout: Option<f64>,
    /// Print the counted cost of a token, layer by layer.
    #[arg(long)]
    cost: bool,
    /// With --cost: predict milliseconds a token on the device that this file describes (JSON).
    #[arg(long, value_name = "FILE", requires = "cost")]
    device: Option<PathBuf>,
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
    prepare(&mut subject, args)?;
    let contract = contract(&subject, args.contract.as_deref())?;
    let mutate = args.mutate.as_deref().map(Selection::parse).transpose()?;
    if mutate.is_some() && !matches!(subject, SubjectSpec::Npu(..)) {
        return Err(CliError::Usage(format!(
            "--mutate puts a wrong subject in the NPU path's place; it does not change {}",
            args.subject
        )));
    }
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
    let device = args.device.as_deref().map(DeviceFile::read).transpose()?;
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
            (None, None) => match &loaded.topk {
                Some(topk) => (topk.runs.iter().map(|run| run.prompt.clone()).collect(), false),
                None => {
                    let prompt = seeded_prompt(&loaded.config);
                    check_length(&prompt, &loaded.config, args.tokens, &loaded.name)?;
                    (vec![prompt], true)
                }
            },
        };
        for (n, prompt) in prompts.iter().enumerate() {
            let mut result = verify(&loaded, prompt, &options, repro())?;
            result.prompt = (prompts.len() > 1).then_some(n);
            if let Some(cost) = &mut result.cost {
                *cost = detailed(cost, args, &subject, device.as_ref())?;
            }
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

/// A cost as far as it was asked for: without its layers, or with them and a prediction.
fn detailed(
    cost: &CostPerToken,
    args: &Args,
    subject: &SubjectSpec,
    device: Option<&DeviceFile>,
) -> Result<CostPerToken, CliError> {
    let mut detail = cost.detail.clone().filter(|_| args.cost);
    if let (Some(detail), Some(device), SubjectSpec::Npu(engine, _)) = (&mut detail, device, subject) {
        let file = args.device.as_ref().map_or(String::new(), |path| path.display().to_string());
        detail.predicted = Some(device.predict(&file, *engine, detail)?);
    }
    Ok(CostPerToken { detail, ..cost.clone() })
}

/// Hands the arguments that belong to a subject to it.
fn prepare(subject: &mut SubjectSpec, args: &Args) -> Result<(), CliError> {
    match (&mut *subject, &args.map) {
        (SubjectSpec::Dump(dump), map) => dump.map.clone_from(map),
        (_, Some(_)) => return Err(CliError::Usage("--map needs --subject dump:DIR".into())),
        _ => {}
    }
    if let Some(seconds) = args.timeout {
        let limit = std::time::Duration::try_from_secs_f64(seconds).ok().filter(|limit| !limit.is_zero());
        let limit = limit
            .ok_or_else(|| CliError::Usage(format!("--timeout {seconds}: expected seconds, more than 0")))?;
        match subject {
            SubjectSpec::Command(command) => command.timeout = limit,
            SubjectSpec::Library(library) => library.timeout = limit,
            _ => return Err(CliError::Usage("--timeout needs --subject cmd:... or lib:...".into())),
        }
    }
    // A library that runs whole models loads the package itself.
    if let (SubjectSpec::Library(library), [package]) = (subject, &args.packages[..]) {
        library.package = Some(fixtures::Package::open(package)?.dir().to_path_buf());
    }
    Ok(())
}

/// The contract by name, from a file, or as the subject declares it.
fn contract(subject: &SubjectSpec, asked: Option<&str>) -> Result<Contract, CliError> {
    if let (SubjectSpec::Library(library), None) = (subject, asked) {
        let usage = |error: String| CliError::Usage(error);
        // A library that crashes while it is loaded is reported by the run.
        return match library.start() {
            Ok(plugin) => declared(plugin.info()).map_err(usage),
            Err(SubjectError::Unusable(reason)) => Err(usage(reason)),
            Err(_) => Ok(Contract::named("f32").expect("a built-in contract")),
        };
    }
    super::load::contract(asked.unwrap_or(subject.contract_name()))
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
pub fn bundled_models() -> Vec<String> {
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
