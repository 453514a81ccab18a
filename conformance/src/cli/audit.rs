//! `karat audit`.

use super::load::{contract, load, prompts, seeded_prompt};
use super::{CliError, Format, Outcome};
use crate::audit::{Audit, audit, audit_draft, catalogue, report};
use crate::contract::Contract;
use crate::draft::golden::text_and_anchors;
use crate::draft::{Pair, audit_loop};
use crate::edits::{audit_draft_edits, audit_edits};
use crate::passes::Pass;
use crate::subject::{NpuSubject, Subject};
use crate::verify::Loaded;
use fixtures::seeded;
use std::collections::BTreeSet;
use std::path::PathBuf;

/// Arguments of `audit`.
#[derive(clap::Args)]
pub struct Args {
    /// Package: a path or a bundled or seeded name; all of them where none is given.
    #[arg(value_name = "PACKAGE")]
    packages: Vec<String>,
    /// Prompts as token ids, one a line; a mutant counts as shown if one prompt shows it.
    #[arg(long, value_name = "FILE")]
    prompt_ids: Option<PathBuf>,
    /// The number formats to audit under.
    #[arg(long, value_name = "NAME|FILE", default_value = "int8")]
    contract: String,
    /// Greedy steps behind the prompt.
    #[arg(long, value_name = "N", default_value_t = 2)]
    tokens: usize,
    /// Pass over this unknown config key.
    #[arg(long, value_name = "KEY")]
    allow_unknown: Vec<String>,
    /// Print what can be seen of every op, by shape, format and layer, in the place of the survivors.
    #[arg(long)]
    coverage: bool,
    /// Print the catalogue of mutants, in Markdown, and audit nothing.
    #[arg(long)]
    catalogue: bool,
}

/// Runs the verb.
pub fn run(args: &Args, format: Format) -> Result<Outcome, CliError> {
    if args.catalogue {
        return Ok(Outcome { report: catalogue::markdown(), code: 0 });
    }
    let contract = contract(&args.contract)?;
    let mut packages = args.packages.clone();
    if packages.is_empty() {
        packages.extend(fixtures::bundled());
        packages.extend(seeded::NAMES.iter().chain(seeded::PAIRS).map(|name| name.to_string()));
    }
    if packages.len() > 1 && args.prompt_ids.is_some() {
        return Err(CliError::Usage("--prompt-ids needs one package; name it".into()));
    }
    let mut audits = Vec::new();
    for name in &packages {
        let loaded = load(name, None, &args.allow_unknown)?;
        let prompts = match (&args.prompt_ids, &loaded.golden) {
            (Some(file), _) => prompts(file, &loaded.config, args.tokens)?,
            (None, Some(golden)) => vec![golden.manifest().prompt.clone()],
            (None, None) => {
                let of_pair = || seeded::pair(name).map(|(target, _)| target);
                let seeded = seeded::named(name).or_else(of_pair);
                vec![seeded.map_or_else(|| seeded_prompt(&loaded.config), |s| s.prompt)]
            }
        };
        for prompt in prompts {
            let found = audit(&loaded.name, &loaded.model, &prompt, args.tokens, &contract);
            let mut found = found.map_err(|source| at_fault(&loaded, source))?;
            if let Some(sources) = &loaded.sources {
                let model = &loaded.model;
                let edits = audit_edits(&loaded.name, sources, model, &prompt, args.tokens, &contract);
                found.join(edits.map_err(|source| at_fault(&loaded, source))?);
            }
            if let Ok(engine) = contract.name.parse::<device::Engine>() {
                found.expose(&exposed(&loaded, &prompt, engine));
            }
            audits.push(found);
            if let Some(found) = draft(&loaded, &prompt, &contract)? {
                audits.push(found);
            }
        }
    }
    let text = match format {
        Format::Json => report::json(&audits),
        _ if args.coverage => report::coverage(&audits),
        _ => report::text(&audits),
    };
    Ok(Outcome { report: text, code: code(&audits) })
}

/// The audit of a pair's draft: blocks where the golden has them, else in the middle of the prompt and at its end.
fn draft(loaded: &Loaded, prompt: &[u32], contract: &Contract) -> Result<Option<Audit>, CliError> {
    let Some(draft) = &loaded.draft else { return Ok(None) };
    let pair = Pair::new(loaded.config.clone(), loaded.model.clone(), draft.clone());
    let pair = pair.map_err(|error| CliError::Usage(error.to_string()))?;
    let golden = loaded.golden.as_ref().filter(|golden| golden.manifest().prompt == prompt);
    let told = golden.and_then(|golden| text_and_anchors(golden).ok());
    let (text, anchors) = told.unwrap_or_else(|| {
        let mut anchors = vec![prompt.len() / 2, prompt.len() - 1];
        anchors.dedup();
        (prompt.to_vec(), anchors)
    });
    let name = format!("{} draft", loaded.name);
    let found = audit_draft(&name, &pair, &text, &anchors, contract);
    let mut found = found.map_err(|source| at_fault(loaded, source))?;
    if let Some(sources) = &loaded.sources {
        let edits = audit_draft_edits(&name, sources, &pair, (&text, &anchors), contract);
        found.join(edits.map_err(|source| at_fault(loaded, source))?);
    }
    let tokens = (text.len() - prompt.len().min(text.len())).max(8);
    let loops = audit_loop(&name, &pair, contract, prompt, tokens);
    found.join(loops.map_err(|error| CliError::Usage(format!("{name}: {error}")))?);
    Ok(Some(found))
}

fn at_fault(loaded: &Loaded, source: spec::NonFinite) -> crate::verify::VerifyError {
    crate::verify::VerifyError::Weights { package: loaded.name.clone(), source }
}

/// The sites that the NPU path shows of a prompt; none where it does not run the model.
fn exposed(loaded: &Loaded, prompt: &[u32], engine: device::Engine) -> BTreeSet<String> {
    let pass = Pass { name: "prefill".into(), ids: prompt.to_vec() };
    let path = NpuSubject::new(&loaded.config, &loaded.weights, engine, Default::default());
    let taps = path.and_then(|mut path| path.pass(&pass)).unwrap_or_default();
    taps.sites().map(ToString::to_string).collect()
}

/// 3 where a mutant that can be made is shown by none.
fn code(audits: &[Audit]) -> u8 {
    if report::unseen(audits).is_empty() { 0 } else { 3 }
}
