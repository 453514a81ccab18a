//! `karat verify`.

use super::load::{check_ids, check_length, load, prompts, seeded_prompt};
use super::{CliError, Format, Outcome, repro};
use crate::audit::audit;
use crate::contract::Contract;
use crate::cost::{CostPerToken, DeviceFile};
use crate::extract::About;
use crate::follow::View;
use crate::judge::{SiteResult, Verdict};
use crate::known::{self, Day, Known, Places};
use crate::mutants::Selection;
use crate::report::{self, Beside, Mutation};
use crate::subject::library::declared;
use crate::subject::{SubjectError, SubjectSpec};
use crate::verify::{
    Baseline, Loaded, Options, PackageResult, VerifyError, one_at_a_time, verify, whole_numbers,
};
use indicatif::{ProgressBar, ProgressStyle};
use std::path::{Path, PathBuf};

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
    /// The number formats to judge it under, instead of those that it declares: a name, a TOML or JSON file, or
    /// `exact`: nothing may differ from the reference (the models integer-layer and integer-model are judged so
    /// anyway).
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
    /// A second subject, judged beside the first under the contract that it declares: the first site that got
    /// worse is named.
    #[arg(long, value_name = "SPEC")]
    baseline: Option<String>,
    /// Run the subject this often and report what changes between runs.
    #[arg(long, value_name = "N", default_value_t = 1)]
    repeat: usize,
    /// Feed the prompt again in pieces of so many tokens, 1, 3, 7 and 16 where none are named: every way is judged, and
    /// held against the prompt at once.
    #[arg(long, value_name = "N,N", value_delimiter = ',', num_args = 0..=1, require_equals = true)]
    #[arg(default_missing_values = ["1", "3", "7", "16"])]
    pieces: Vec<usize>,
    /// Put every layer's own error alone into the reference: its share of the final logit error.
    #[arg(long)]
    budget: bool,
    /// Write the first failing op with the subject's own inputs as a case that stands alone.
    #[arg(long, value_name = "DIR")]
    extract: Option<PathBuf>,
    /// Failures that are known, with reason and last day (JSON).
    #[arg(long, value_name = "FILE")]
    known_failures: Option<PathBuf>,
    /// Audit package and prompt as well: MISTRUSTED where a mistake that can be made would not be seen.
    #[arg(long)]
    strict: bool,
    /// Print the counted cost of a token, layer by layer.
    #[arg(long)]
    cost: bool,
    /// With --cost: predict milliseconds a token on the device that this file describes (JSON).
    #[arg(long, value_name = "FILE", requires = "cost")]
    device: Option<PathBuf>,
    /// Pass over this unknown config key.
    #[arg(long, value_name = "KEY")]
    allow_unknown: Vec<String>,
    /// Verify a subject that is wrong in the named way, ID[:VARIANT][@SITE], at one applicable site at a time.
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
    if args.repeat == 0 || args.repeat > 1 && matches!(subject, SubjectSpec::Dump(_)) {
        return Err(CliError::Usage(format!(
            "--repeat {}: expected a subject that can be run, and 1 run or more",
            args.repeat
        )));
    }
    if args.pieces.contains(&0) || !args.pieces.is_empty() && matches!(subject, SubjectSpec::Dump(_)) {
        return Err(CliError::Usage(format!(
            "--pieces {:?}: expected a subject that can be run, and pieces of 1 token or more",
            args.pieces
        )));
    }
    let packages = if args.packages.is_empty() { bundled_models() } else { args.packages.clone() };
    let one_package =
        args.golden.is_some() || args.prompt_ids.is_some() || matches!(subject, SubjectSpec::Dump(_));
    if packages.len() > 1 && one_package {
        return Err(CliError::Usage("--golden, --prompt-ids and a dump need one package; name it".into()));
    }
    let known = args.known_failures.as_deref().map(|file| Known::open(file, Day::today())).transpose()?;
    let baseline = baseline(args)?;
    let options = Options {
        view: if args.cumulative { View::Cumulative } else { View::Own },
        mutate: mutate.as_ref(),
        sites: args.sites.as_deref(),
        steps: args.tokens,
        pictures: format == Format::Html,
        repeat: args.repeat,
        pieces: &args.pieces,
        budget: args.budget,
        extract: args.extract.is_some(),
        ..Options::new(&subject, &contract)
    };
    let device = args.device.as_deref().map(DeviceFile::read).transpose()?;
    let mut nowhere = None;
    let bar = progress(packages.len());
    let mut results = Vec::new();
    for name in &packages {
        bar.set_message(name.clone());
        let loaded = load(name, args.golden.as_deref(), &args.allow_unknown)?;
        let own = prompts_of(&subject, &loaded)?;
        let whole = fixtures::integers::named(name);
        let (prompts, seeded) = match (&args.prompt_ids, &loaded.golden) {
            (Some(file), _) => (prompts(file, &loaded.config, args.tokens)?, false),
            (None, _) if !own.is_empty() => (own, false),
            (None, Some(golden)) => (vec![golden.manifest().prompt.clone()], false),
            (None, None) => match (&loaded.topk, &whole) {
                (Some(topk), _) => (topk.runs.iter().map(|run| run.prompt.clone()).collect(), false),
                (None, Some(model)) => {
                    check_length(&model.seeded.prompt, &loaded.config, args.tokens, &loaded.name)?;
                    (vec![model.seeded.prompt.clone()], false)
                }
                (None, None) => {
                    let prompt = seeded_prompt(&loaded.config);
                    check_length(&prompt, &loaded.config, args.tokens, &loaded.name)?;
                    (vec![prompt], true)
                }
            },
        };
        for (n, prompt) in prompts.iter().enumerate() {
            // A model of whole numbers is judged at zero wherever nothing rounds.
            let traced = whole.as_ref().filter(|_| args.contract.is_none());
            let traced = traced.map(|model| model.run(prompt, args.tokens));
            let zero = Contract::exact();
            let options = match &traced {
                Some(Ok(_)) => Options { contract: &zero, ..options },
                _ => Options { ..options },
            };
            let found = match one_at_a_time(&loaded, prompt, &options, |site| again(args, site)) {
                // Of several packages some need not have a place for a mutant.
                Err(error @ VerifyError::AppliesNowhere { .. }) if packages.len() > 1 => {
                    nowhere.get_or_insert(error);
                    continue;
                }
                found => found?,
            };
            for mut result in found {
                result.prompt = (prompts.len() > 1).then_some(n);
                if let Some(cost) = &mut result.cost {
                    *cost = detailed(cost, args, &subject, device.as_ref())?;
                }
                if seeded && result.reason.is_none() {
                    result.reason =
                        Some(format!("no prompt and no golden: ran on the seeded ids {prompt:?}"));
                }
                if let Some(Ok((ids, trace))) = &traced {
                    let held = whole_numbers(&loaded.model, ids, prompt.len(), trace);
                    result
                        .hold(held.map_err(|source| VerifyError::Weights { package: name.clone(), source })?);
                }
                if let Some(Err(why)) = &traced {
                    result
                        .notes
                        .push(format!("this prompt is judged by number formats and not at zero: {why}"));
                }
                if let Some((subject, contract)) = &baseline {
                    let options = Options { subject, contract, mutate: None, extract: false, ..options };
                    let before = verify(&loaded, prompt, &options, String::new())?;
                    result.baseline = Some(Baseline::new(&result, &before));
                }
                if args.strict && result.verdict < Verdict::Mistrusted {
                    audited(&loaded, prompt, &options, &mut result)?;
                }
                results.push(result);
            }
        }
        bar.inc(1);
    }
    bar.finish_and_clear();
    if let Some(glob) = &args.sites
        && results.iter().all(|result| result.sites.is_empty() && result.verdict < Verdict::NotSupported)
    {
        return Err(CliError::Verify(VerifyError::NoSite { glob: glob.clone() }));
    }
    if let (true, Some(error)) = (results.is_empty(), nowhere) {
        return Err(CliError::Verify(error));
    }
    let mut beside = Beside::default();
    if let Some(known) = &known {
        beside.known = Some(excuse(known, &mut results));
    }
    if let (Some(selection), true) = (&mutate, results.iter().any(|result| result.mutated.is_some())) {
        beside.mutation = Some(Mutation::new(selection.mutant.name(), &results));
    }
    if let Some(dir) = &args.extract {
        beside.extracted = Some(extract(dir, &contract, &results)?);
    }
    let expired = beside.known.as_ref().is_some_and(known::Outcome::fails);
    let code = exit_code(&results);
    let code = if expired && [0, 3].contains(&code) { 1 } else { code };
    let report = match format {
        Format::Text => beside.text(&results, args.cost),
        Format::Json => report::json::verify(&results, &beside),
        Format::Md => report::markdown::verify(&results) + &beside.markdown(),
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

/// The subject of `--baseline` and the contract that it declares.
fn baseline(args: &Args) -> Result<Option<(SubjectSpec, Contract)>, CliError> {
    let Some(text) = &args.baseline else { return Ok(None) };
    let mut subject: SubjectSpec = text.parse()?;
    if let SubjectSpec::Dump(dump) = &mut subject {
        dump.map.clone_from(&args.map);
    }
    if let (SubjectSpec::Library(library), [package]) = (&mut subject, &args.packages[..]) {
        library.package = Some(fixtures::Package::open(package)?.dir().to_path_buf());
    }
    let contract = contract(&subject, None)?;
    Ok(Some((subject, contract)))
}

/// The command line that shows the result again, with the site that the mutant was applied at.
fn again(args: &Args, site: Option<&str>) -> String {
    let (line, Some(mutant), Some(site)) = (repro(), &args.mutate, site) else { return repro() };
    let name = mutant.split('@').next().unwrap_or(mutant);
    let given = line.split(' ').find(|word| word.trim_matches('\'').ends_with(mutant.as_str()));
    given.map_or(line.clone(), |word| {
        let prefix = word.strip_prefix("--mutate=").map_or("", |_| "--mutate=");
        line.replacen(word, &format!("{prefix}{name}@{site}"), 1)
    })
}

/// MISTRUSTED where the fixture could not have shown a mistake that can be made in it.
fn audited(
    loaded: &Loaded,
    prompt: &[u32],
    options: &Options,
    result: &mut PackageResult,
) -> Result<(), CliError> {
    let found = audit(&loaded.name, &loaded.model, prompt, options.steps, options.contract);
    let found = found.map_err(|source| VerifyError::Weights { package: loaded.name.clone(), source })?;
    let unseen = found.unseen();
    if !unseen.is_empty() {
        result.verdict = Verdict::Mistrusted;
        result.reason = Some(format!(
            "{} mistakes that can be made here would not be seen: {}; karat audit {} says why",
            unseen.len(),
            unseen.join(", "),
            loaded.name
        ));
    }
    Ok(())
}

/// Takes the failures that are known out of the verdicts. The choice of tokens is a place of its own, `tokens`.
fn excuse(known: &Known, results: &mut [PackageResult]) -> known::Outcome {
    let fails = |site: &SiteResult| site.verdict == Verdict::Failed || site.less_precise();
    let (mut ran, mut places) = (Vec::new(), Vec::new());
    for (r, result) in results.iter().enumerate() {
        for (s, site) in result.sites.iter().enumerate() {
            ran.push((format!("{}/{}", result.package, site.site), fails(site)));
            places.push((r, Some(s)));
        }
        if let Some(logits) = &result.logits {
            ran.push((format!("{}/tokens", result.package), logits.verdict == Verdict::Failed));
            places.push((r, None));
        }
    }
    let outcome = known.sort(Places::Sites, &ran, |n, entry| {
        let (result, site) = (&mut results[places[n].0], places[n].1);
        match (site.map(|s| &mut result.sites[s]), &mut result.logits) {
            (Some(site), _) => {
                site.verdict = Verdict::Skipped;
                site.pattern = Some(format!("known failure: {}", entry.described()));
            }
            (None, Some(logits)) => logits.verdict = Verdict::Skipped,
            (None, None) => {}
        }
    });
    results.iter_mut().for_each(PackageResult::without_known_failures);
    outcome
}

/// Writes the first failing op of a run.
fn extract(dir: &Path, contract: &Contract, results: &[PackageResult]) -> Result<String, CliError> {
    let Some((result, failed)) = results.iter().find_map(|r| Some((r, r.failed_op.as_ref()?))) else {
        return Ok("no op failed: nothing was extracted".into());
    };
    let about = About { contract, explanation: result.explanation.as_ref(), repro: &result.repro };
    failed.write(dir, &about).map_err(|error| CliError::Io(dir.display().to_string(), error))?;
    Ok(format!(
        "{} of {} is in {}: python3 check.py there judges it",
        failed.tap,
        result.package,
        dir.display()
    ))
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
    if asked == Some("exact") {
        return Ok(Contract::exact());
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
