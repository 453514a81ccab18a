//! Opening packages and prompts.

use super::CliError;
use crate::contract::Contract;
use crate::edits::{Source, Sources};
use crate::goldens::own_goldens;
use crate::verify::Loaded;
use fixtures::Package;
use fixtures::random::SplitMix64;
use golden::{Dump, TopK};
use reference::Model;
use reference::models::Draft;
use spec::families::draft::{DraftConfig, DraftWeights};
use spec::{Config, Weights};
use std::path::Path;
use std::sync::Arc;

/// Opens a package and loads its model; `golden` overrides the package's own.
pub fn load(name: &str, golden: Option<&Path>, allowed: &[String]) -> Result<Loaded, CliError> {
    if let Some(model) = fixtures::seeded::named(name) {
        return seeded_model(name, model, golden);
    }
    if let Some((target, draft)) = fixtures::seeded::pair(name) {
        let mut loaded = seeded_model(name, target, golden)?;
        loaded.draft = seeded_draft(name)?;
        if let Some(sources) = &mut loaded.sources {
            let config = draft.config.clone();
            sources.draft = Some(Source { config, tensors: Arc::new(draft), allowed: vec![] });
        }
        return Ok(loaded);
    }
    let package = Package::open(name)?;
    let parsed = Config::parse(package.config(), allowed)
        .map_err(|source| CliError::Config { package: package.name().to_string(), source })?;
    let weights = Weights::load(&parsed.config, package.tensors())?;
    let topk = match golden {
        Some(path) if TopK::is_topk(path) => Some(TopK::open(path)?),
        Some(_) => None,
        None => real_golden(&package)?,
    };
    let golden = match golden {
        Some(path) if TopK::is_topk(path) => None,
        Some(path) => Some(Dump::open(path)?),
        None => package.golden_json().and_then(|file| file.parent().map(Dump::open)).transpose()?,
    };
    if let Some(golden) = &golden {
        check_golden(&package, golden)?;
        let (manifest, name) = (golden.manifest(), golden.path().display().to_string());
        let at_fault = |error: CliError| CliError::GoldenAtFault(error.to_string());
        let prompt = format!("{name}: the golden's prompt");
        check_ids(&manifest.prompt, &parsed.config, &prompt).map_err(at_fault)?;
        check_length(&manifest.prompt, &parsed.config, manifest.greedy.len(), &prompt).map_err(at_fault)?;
        let greedy = format!("{name}: the golden's greedy ids");
        check_ids(&manifest.greedy, &parsed.config, &greedy).map_err(at_fault)?;
    }
    let (draft, of_draft) = match package.has_draft() {
        true => {
            let dir = package.dir().display().to_string();
            let source = source(Package::pair(&dir)?.1, allowed);
            (Some(load_draft(&dir, allowed)?.1), Some(source))
        }
        false => (None, None),
    };
    let name = package.name().to_string();
    Ok(Loaded {
        draft,
        name,
        sources: Some(Sources { target: source(package, allowed), draft: of_draft }),
        model: Model::new(parsed.config.clone(), weights.clone()),
        config: parsed.config,
        weights,
        golden,
        topk,
    })
}

/// What a package holds before a model is made of it.
fn source(package: Package, allowed: &[String]) -> Source {
    let config = package.config().clone();
    Source { config, tensors: package.into_tensors(), allowed: allowed.to_vec() }
}

/// The draft of a seeded pair.
fn seeded_draft(name: &str) -> Result<Option<Draft>, CliError> {
    let Some((_, draft)) = fixtures::seeded::pair(name) else { return Ok(None) };
    let (config, _) = DraftConfig::parse(&draft.config, &[])
        .map_err(|source| CliError::Config { package: name.to_string(), source })?;
    let weights = DraftWeights::load(&config, &draft)?;
    Ok(Some(Draft { config, weights }))
}

/// Opens a draft: the folder itself, or the draft of a pair.
pub fn load_draft(name: &str, allowed: &[String]) -> Result<(String, Draft), CliError> {
    if let Some(draft) = seeded_draft(name)? {
        return Ok((name.to_string(), draft));
    }
    let package = Package::pair(name).map(|(_, draft)| draft).or_else(|_| Package::open(name))?;
    let called = if package.name() == "draft" { name } else { package.name() }.to_string();
    let parsed = DraftConfig::parse(package.config(), allowed);
    let (config, _) = parsed.map_err(|source| CliError::Config { package: called.clone(), source })?;
    let weights = DraftWeights::load(&config, package.tensors())?;
    Ok((called, Draft { config, weights }))
}

/// The repository's top-k golden of exactly this GGUF file, if there is one.
fn real_golden(package: &Package) -> Result<Option<TopK>, CliError> {
    let files = package.files();
    let [(_, file)] = &files[..] else { return Ok(None) };
    let Ok(entries) = std::fs::read_dir(own_goldens().join("real")) else { return Ok(None) };
    if file.extension().is_none_or(|extension| extension != "gguf") {
        return Ok(None);
    }
    let found = golden::sha256_file(file)?;
    for entry in entries.flatten().filter(|entry| TopK::is_topk(entry.path())) {
        let topk = TopK::open(entry.path())?;
        if topk.gguf_sha256 == found {
            return Ok(Some(topk));
        }
    }
    Ok(None)
}

/// A built-in contract by name, or the contract in a file.
pub fn contract(name: &str) -> Result<Contract, CliError> {
    if let Some(contract) = Contract::named(name) {
        return Ok(contract);
    }
    if !Path::new(name).is_file() {
        let known = Contract::NAMES.join(", ");
        if name == "exact" {
            return Err(CliError::Usage(format!(
                "the contract exact is for models of whole numbers, which verify runs; here there are {known}, and files"
            )));
        }
        return Err(CliError::Usage(format!("no contract is called {name}; there are {known}, and files")));
    }
    let text = std::fs::read_to_string(name).map_err(|error| CliError::Io(name.to_string(), error))?;
    Ok(Contract::parse(&text, name)?)
}

/// A seeded model, which is no directory and has no golden of its own.
fn seeded_model(
    name: &str,
    model: fixtures::seeded::Seeded,
    golden: Option<&Path>,
) -> Result<Loaded, CliError> {
    let config = Config::parse(&model.config, &[])
        .map_err(|source| CliError::Config { package: name.to_string(), source })?
        .config;
    let weights = Weights::load(&config, &model)?;
    let golden = golden.map(Dump::open).transpose()?;
    let source = Source { config: model.config.clone(), tensors: Arc::new(model), allowed: vec![] };
    let sources = Some(Sources { target: source, draft: None });
    Ok(Loaded { golden, sources, ..Loaded::new(name, config, weights) })
}

/// Refuses a golden that was made from other weights.
fn check_golden(package: &Package, golden: &Dump) -> Result<(), CliError> {
    let expected = golden.expected_files();
    for (file, path) in package.files() {
        let of_pair = || expected.get(&format!("target/{file}")).filter(|_| package.has_draft());
        let Some(expected) = expected.get(&file).or_else(of_pair) else { continue };
        let found = golden::sha256_file(&path)?;
        if found != *expected {
            let tensor_file = path.display().to_string();
            return Err(CliError::Golden(golden::DumpError::HashMismatch {
                path: tensor_file.into(),
                tensor: None,
                expected: expected.clone(),
                found,
            }));
        }
    }
    Ok(())
}

/// Refuses ids beyond the vocabulary, and sequences that are empty or too long.
pub fn check_ids(ids: &[u32], config: &Config, what: &str) -> Result<(), CliError> {
    let vocab = config.vocab_size();
    if let Some((n, id)) = ids.iter().enumerate().find(|(_, id)| **id as usize >= vocab) {
        return Err(CliError::Usage(format!(
            "{what}: id {id} at position {n} is outside the vocabulary of {vocab} ids"
        )));
    }
    Ok(())
}

/// The prompts of a file: one a line, token ids separated by spaces. Blank lines are passed over.
pub fn prompts(file: &Path, config: &Config, steps: usize) -> Result<Vec<Vec<u32>>, CliError> {
    let name = file.display().to_string();
    let text = std::fs::read_to_string(file).map_err(|error| CliError::Io(name.clone(), error))?;
    let mut prompts = Vec::new();
    for (n, line) in text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
        let what = format!("{name}, line {}", n + 1);
        let ids = line.split_whitespace().map(|word| {
            word.parse::<u32>().map_err(|_| CliError::Usage(format!("{what}: {word:?} is no token id")))
        });
        let ids = ids.collect::<Result<Vec<u32>, _>>()?;
        check_ids(&ids, config, &what)?;
        check_length(&ids, config, steps, &what)?;
        prompts.push(ids);
    }
    if prompts.is_empty() {
        return Err(CliError::Usage(format!(
            "{name} holds no prompt; expected token ids, one prompt a line"
        )));
    }
    Ok(prompts)
}

/// Refuses a prompt that does not fit the model together with its steps.
pub fn check_length(ids: &[u32], config: &Config, steps: usize, what: &str) -> Result<(), CliError> {
    let most = config.max_position_embeddings();
    if ids.is_empty() {
        return Err(CliError::Usage(format!("{what}: the prompt is empty; expected at least one token id")));
    }
    if ids.len() + steps > most {
        return Err(CliError::Usage(format!(
            "{what}: {} ids and {steps} steps are more than the {most} positions that the model allows",
            ids.len()
        )));
    }
    Ok(())
}

/// Seventeen ids, the same in every run: past one launch of 16 rows.
pub fn seeded_prompt(config: &Config) -> Vec<u32> {
    let mut random = SplitMix64::new(17);
    let length = 17.min(config.max_position_embeddings() / 2).max(1);
    (0..length).map(|_| random.below(config.vocab_size()) as u32).collect()
}
