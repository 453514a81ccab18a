//! Goldens that Karat made itself: where they live, how they are made again, and how two sets differ.
//!
//! `golden/data/<fixture>/<run>` holds a dump whose manifest says all that is needed to make it again:
//! the subject (`producer`), the prompt, and the number of steps (one less than its greedy ids).

use crate::audit::audit;
use crate::cli::load::load;
use crate::cli::{CliError, repro};
use crate::contract::Contract;
use crate::dumping::{Run, write};
use crate::subject::SubjectSpec;
use crate::verify::VerifyError;
use golden::{Diff, DiffOptions, DiffVerdict, Dump};
use serde::Serialize;
use std::path::{Path, PathBuf};
use std::process::Command;
use tempfile::TempDir;

/// A dump or a directory of dumps on disk, perhaps one that was taken out of a revision.
pub struct Source {
    path: PathBuf,
    _kept: Option<TempDir>,
}

impl Source {
    /// Opens `DIR` or `git:REV:PATH`, which is read without a second checkout.
    pub fn open(text: &str) -> Result<Source, CliError> {
        match text.strip_prefix("git:") {
            None => Ok(Source { path: PathBuf::from(text), _kept: None }),
            Some(rest) => {
                let (revision, path) = rest.split_once(':').ok_or_else(|| {
                    CliError::Usage(format!(
                        "{text}: expected git:REVISION:PATH, for instance git:HEAD~1:golden/data"
                    ))
                })?;
                Self::of_revision(revision, path)
            }
        }
    }

    /// The files below `path` as they were at `revision`.
    pub fn of_revision(revision: &str, path: &str) -> Result<Source, CliError> {
        let dir = TempDir::new().map_err(|error| CliError::Io("a temporary directory".into(), error))?;
        let listed = git(&["ls-tree", "-r", "-z", "--name-only", "--full-tree", revision, "--", path])?;
        let names: Vec<&str> =
            std::str::from_utf8(&listed).unwrap_or("").split('\0').filter(|name| !name.is_empty()).collect();
        if names.is_empty() {
            return Err(CliError::Usage(format!("git:{revision}:{path}: no file there at that revision")));
        }
        for name in names {
            let bytes = git(&["show", &format!("{revision}:{name}")])?;
            let below = Path::new(name).strip_prefix(path).unwrap_or(Path::new(name));
            let target = dir.path().join(below);
            let parent = target.parent().unwrap_or(dir.path());
            std::fs::create_dir_all(parent)
                .and_then(|()| std::fs::write(&target, bytes))
                .map_err(|error| CliError::Io(target.display().to_string(), error))?;
        }
        Ok(Source { path: dir.path().to_path_buf(), _kept: Some(dir) })
    }

    /// The directory.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The dumps at or below it, by their relative names.
    pub fn dumps(&self) -> Result<Vec<String>, CliError> {
        Ok(golden::find_dumps(&self.path)?)
    }
}

fn git(args: &[&str]) -> Result<Vec<u8>, CliError> {
    let output = Command::new("git").args(args).output();
    let output = output.map_err(|error| CliError::Io("git".into(), error))?;
    if !output.status.success() {
        let reason = String::from_utf8_lossy(&output.stderr).trim().replace('\n', " ");
        return Err(CliError::Usage(format!("git {}: {reason}", args.join(" "))));
    }
    Ok(output.stdout)
}

/// One pair of dumps, compared.
#[derive(Serialize)]
pub struct Compared {
    /// The dump's name relative to the directories; empty where two dumps were named.
    pub dump: String,
    /// What changed.
    #[serde(flatten)]
    pub diff: Diff,
}

/// Two sets of dumps, compared.
pub struct Comparison {
    /// Pairs in both.
    pub pairs: Vec<Compared>,
    /// Dumps that are gone.
    pub only_old: Vec<String>,
    /// Dumps that are new.
    pub only_new: Vec<String>,
    /// Mistakes that the fixtures of the goldens would not notice, where they were asked for.
    pub survivors: Vec<Survivors>,
    /// The command that shows it again.
    pub repro: String,
}

/// What the audit of a golden's fixture leaves.
#[derive(Serialize)]
pub struct Survivors {
    /// The fixture.
    pub fixture: String,
    /// Mutants at sites that were tried.
    pub mutants: usize,
    /// Those that it does not notice, by name.
    pub survived: Vec<String>,
}

/// Audits the fixtures of a source's goldens, each once and on the golden's own prompt.
pub fn survivors(source: &Source) -> Result<Vec<Survivors>, CliError> {
    let contract = Contract::named("f32").expect("a built-in contract");
    let mut all: Vec<Survivors> = Vec::new();
    for name in source.dumps()? {
        let fixture = name.split('/').next().unwrap_or(&name);
        if all.iter().any(|known| known.fixture == fixture) {
            continue;
        }
        let manifest = Dump::open(source.path().join(&name))?.manifest().clone();
        let loaded = load(fixture, None, &[])?;
        let steps = manifest.greedy.len().saturating_sub(1);
        let found = audit(fixture, &loaded.model, &manifest.prompt, steps, &contract)
            .map_err(|source| VerifyError::Weights { package: fixture.to_string(), source })?;
        let mut survived: Vec<String> = found.survivors.into_iter().map(|survivor| survivor.mutant).collect();
        survived.dedup();
        all.push(Survivors { fixture: fixture.to_string(), mutants: found.mutants, survived });
    }
    Ok(all)
}

impl Comparison {
    /// The worst verdict; a dump that is gone is a change.
    pub fn verdict(&self) -> DiffVerdict {
        let gone = if self.only_old.is_empty() { DiffVerdict::Identical } else { DiffVerdict::Changed };
        self.pairs.iter().map(|pair| pair.diff.verdict).max().unwrap_or(gone).max(gone)
    }
}

/// Compares two dumps, or the dumps of equal names in two directories, or a dump with the only one in a directory.
pub fn compare(old: &Source, new: &Source, force: bool) -> Result<Comparison, CliError> {
    let options = DiffOptions { force, ..DiffOptions::default() };
    let (olds, news) = (old.dumps()?, new.dumps()?);
    if olds.is_empty() && news.is_empty() {
        return Err(CliError::Usage(format!("{}: no dump there", old.path().display())));
    }
    let pair = |old_name: &str, new_name: &str| -> Result<Compared, CliError> {
        let (old, new) = (Dump::open(old.path().join(old_name))?, Dump::open(new.path().join(new_name))?);
        old.verify_hashes()?;
        new.verify_hashes()?;
        let dump = if old_name.is_empty() { new_name } else { old_name };
        Ok(Compared { dump: dump.to_string(), diff: golden::diff(&old, &new, &options)? })
    };
    // A dump has no name beside itself; of a directory of them it is the other side of the only one.
    let one = |names: &[String]| names.len() == 1 && names[0].is_empty();
    if one(&olds) != one(&news) {
        let (single, several, names) = if one(&olds) { (old, new, &news) } else { (new, old, &olds) };
        if names.len() != 1 {
            return Err(CliError::Usage(format!(
                "{} is one dump, and {} holds {}: name the one to compare ({})",
                single.path().display(),
                several.path().display(),
                names.len(),
                names.join(", ")
            )));
        }
        let pairs = vec![pair(&olds[0], &news[0])?];
        return Ok(Comparison {
            pairs,
            only_old: vec![],
            only_new: vec![],
            survivors: vec![],
            repro: repro(),
        });
    }
    let mut pairs = Vec::new();
    for name in olds.iter().filter(|name| news.contains(name)) {
        pairs.push(pair(name, name)?);
    }
    let only = |a: &[String], b: &[String]| a.iter().filter(|name| !b.contains(name)).cloned().collect();
    let (only_old, only_new) = (only(&olds, &news), only(&news, &olds));
    Ok(Comparison { pairs, only_old, only_new, survivors: vec![], repro: repro() })
}

/// Makes the golden at `name` (`<fixture>/<run>`) again with this build, into `target`.
pub fn remake(source: &Source, name: &str, target: &Path, reason: Option<&str>) -> Result<(), CliError> {
    let dump = Dump::open(source.path().join(name))?;
    let manifest = dump.manifest();
    let subject: SubjectSpec = manifest.producer.trim_start_matches("karat ").parse()?;
    let fixture = name.split('/').next().unwrap_or(name);
    let loaded = load(fixture, None, &[])?;
    let model_hash = golden::model_hash(&fixtures::Package::open(fixture)?.files())?;
    let steps = manifest.greedy.len().saturating_sub(1);
    let run = Run { subject: &subject, prompt: &manifest.prompt, steps, sites: None, reason, sigma: true };
    write(&loaded, &model_hash, &run, target)?;
    Ok(())
}

/// Where the repository's own goldens are.
pub fn own_goldens() -> PathBuf {
    let here = PathBuf::from("golden/data");
    if here.is_dir() { here } else { Path::new(env!("CARGO_MANIFEST_DIR")).join("../golden/data") }
}
