//! What is in a package, tensor by tensor and key by key, and everything that it would be refused for.

mod memory;
mod values;

pub use memory::{Memory, memory};
pub use values::{Span, span};

use fixtures::{Contents, Package, PackageError};
use spec::families::draft::{DraftConfig, DraftWeights};
use spec::families::wrapped::of_a_tower;
use spec::{Config, ConfigError, KeyUse, LoadError, Rows, Tensors, Weights};
use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};

/// What a model does with a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TensorUse {
    /// The model reads it.
    Read,
    /// It is known, and the model needs it not: a copy of a tied head, a prediction layer.
    NotNeeded,
    /// It belongs to a tower, which is not judged.
    Tower,
    /// Nothing reads it: the package is refused.
    LeftOver,
    /// The package was refused before anything was read.
    NotReached,
}

impl TensorUse {
    /// The word of reports.
    pub fn word(self) -> &'static str {
        match self {
            TensorUse::Read => "read",
            TensorUse::NotNeeded => "not needed",
            TensorUse::Tower => "tower, not judged",
            TensorUse::LeftOver => "left over",
            TensorUse::NotReached => "not reached",
        }
    }
}

/// One tensor.
#[derive(Clone, Debug)]
pub struct TensorLine {
    /// Its name: the checkpoint's, or the file's where no family makes sense of the file.
    pub name: String,
    /// Its logical shape, slowest axis first.
    pub shape: Vec<usize>,
    /// How its values are stored.
    pub format: String,
    /// Stored bytes.
    pub bytes: usize,
    /// The span of its values, where they were asked for and can be decoded.
    pub span: Option<Span>,
    /// What the model does with it.
    pub fate: TensorUse,
    /// Why its values cannot be decoded.
    pub refused: Option<String>,
}

/// One config key.
#[derive(Clone, Debug, PartialEq)]
pub struct KeyLine {
    /// Its name, with the object that it is in: `text_config.hidden_size`.
    pub key: String,
    /// `read`, `inert`, `off`, `allowed`, `container`, `unread` or `refused`.
    pub fate: &'static str,
    /// The reason in words.
    pub reason: String,
}

/// All that is known of a package without running it.
#[derive(Clone, Debug)]
pub struct Inspection {
    /// Its name.
    pub name: String,
    /// The container of the weights.
    pub container: &'static str,
    /// The weight files.
    pub files: Vec<String>,
    /// The family, where the config was understood.
    pub family: Option<&'static str>,
    /// The tensors.
    pub tensors: Vec<TensorLine>,
    /// The keys of the config.
    pub keys: Vec<KeyLine>,
    /// Keys that were passed over because they are null, false or allowed.
    pub passed_over: Vec<String>,
    /// Config keys of towers, which are not judged.
    pub not_judged: Vec<String>,
    /// What a run needs, where the model can be loaded.
    pub memory: Option<Memory>,
    /// Everything that the package is refused for, the first thing first.
    pub refusals: Vec<String>,
}

impl Inspection {
    /// Number of logical values.
    pub fn parameters(&self) -> usize {
        self.tensors.iter().map(|t| t.shape.iter().product::<usize>()).sum()
    }

    /// Stored bytes of all tensors.
    pub fn bytes(&self) -> usize {
        self.tensors.iter().map(|t| t.bytes).sum()
    }
}

/// Looks into a path or a bundled package; a pair gives its target and its draft.
///
/// `values` reads every weight for its span. A package that cannot be opened is listed as its files are,
/// with the refusal; the error is for what cannot even be listed.
pub fn inspect(name: &str, allowed: &[String], values: bool) -> Result<Vec<Inspection>, PackageError> {
    match Package::pair(name) {
        Ok((target, draft)) => {
            Ok(vec![model(&target, allowed, values), draft_model(&draft, allowed, values)])
        }
        Err(_) => match Package::open(name) {
            // A draft names its class; no target has one of these.
            Ok(package) if is_draft(&package) => Ok(vec![draft_model(&package, allowed, values)]),
            Ok(package) => Ok(vec![model(&package, allowed, values)]),
            Err(refusal) => match Contents::of(name) {
                Ok(contents) => Ok(vec![listing(contents, &refusal, values)]),
                Err(_) => Err(refusal),
            },
        },
    }
}

fn is_draft(package: &Package) -> bool {
    let known = spec::families::FAMILIES.iter();
    let model_type = package.config().get("model_type").and_then(|v| v.as_str());
    !known.clone().any(|family| Some(*family) == model_type)
        && DraftConfig::parse(package.config(), &[]).is_ok()
}

/// The files of a package that does not open.
fn listing(contents: Contents, refusal: &PackageError, values: bool) -> Inspection {
    let line = |tensor: fixtures::StoredTensor| TensorLine {
        span: tensor.rows.as_ref().ok().filter(|_| values).map(|rows| span(&**rows)),
        refused: tensor.rows.err(),
        name: tensor.name,
        shape: tensor.shape,
        format: tensor.format,
        bytes: tensor.bytes,
        fate: TensorUse::NotReached,
    };
    Inspection {
        name: contents.name,
        container: contents.container.name(),
        files: contents.files.iter().map(|file| file.display().to_string()).collect(),
        family: None,
        tensors: contents.tensors.into_iter().map(line).collect(),
        keys: Vec::new(),
        passed_over: Vec::new(),
        not_judged: Vec::new(),
        memory: None,
        refusals: vec![refusal.to_string()],
    }
}

/// What is said of a package before its config is looked at.
fn bare(package: &Package) -> Inspection {
    Inspection {
        name: package.name().to_string(),
        container: package.container().name(),
        files: package.files().into_iter().map(|(_, path)| path.display().to_string()).collect(),
        family: None,
        tensors: Vec::new(),
        keys: package.container_keys().iter().map(|(key, what)| container_key(key, what)).collect(),
        passed_over: Vec::new(),
        not_judged: Vec::new(),
        memory: None,
        refusals: Vec::new(),
    }
}

fn model(package: &Package, allowed: &[String], values: bool) -> Inspection {
    let mut this = bare(package);
    // Keys that are not understood are let through one after the other, so that all of them are named.
    let mut let_through = allowed.to_vec();
    let parsed = loop {
        match Config::parse(package.config(), &let_through) {
            Err(ConfigError::Unknown { key, found }) if !let_through.contains(&key) => {
                this.refusals.push(ConfigError::Unknown { key: key.clone(), found }.to_string());
                let_through.push(key);
            }
            other => break other,
        }
    };
    let watched = Watched::new(package.tensors());
    let mut loaded = Err(None);
    match &parsed {
        Err(error) => {
            this.refusals.push(error.to_string());
            let unknown = &let_through[allowed.len()..];
            this.keys.extend(unknown.iter().map(|key| key_line(key, KeyUse::Unknown)));
        }
        Ok(parsed) => {
            this.family = Some(parsed.config.family());
            this.passed_over = parsed
                .passed_over
                .iter()
                .filter(|key| !let_through[allowed.len()..].contains(key))
                .cloned()
                .collect();
            this.not_judged = parsed.not_judged.clone();
            this.keys.extend(parsed.keys.iter().map(|(key, fate)| match fate {
                KeyUse::Allowed if !allowed.contains(key) => key_line(key, KeyUse::Unknown),
                fate => key_line(key, *fate),
            }));
            loaded = Weights::load(&parsed.config, &watched).map_err(Some);
            match &mut loaded {
                Ok(weights) => this.memory = Some(memory(&parsed.config, weights)),
                Err(Some(error)) => this.refusals.push(error.to_string()),
                Err(None) => {}
            }
        }
    }
    let outcome = loaded.map(|_| ());
    this.tensors = lines(package, &watched, outcome.as_ref().map_err(Option::as_ref), values);
    this
}

fn draft_model(package: &Package, allowed: &[String], values: bool) -> Inspection {
    let mut this = bare(package);
    let watched = Watched::new(package.tensors());
    let mut outcome = Err(None);
    match DraftConfig::parse(package.config(), allowed) {
        Err(error) => this.refusals.push(error.to_string()),
        Ok((config, passed_over)) => {
            this.family = Some(config.architecture.class());
            this.keys.extend(package.config().keys().map(|key| {
                key_line(key, if passed_over.contains(key) { KeyUse::Off } else { KeyUse::Read })
            }));
            this.passed_over = passed_over;
            outcome = DraftWeights::load(&config, &watched).map(|_| ()).map_err(Some);
            if let Err(Some(error)) = &outcome {
                this.refusals.push(error.to_string());
            }
        }
    }
    this.tensors = lines(package, &watched, outcome.as_ref().map_err(Option::as_ref), values);
    this
}

/// A line for every tensor of a package that opened.
fn lines(
    package: &Package,
    watched: &Watched,
    outcome: Result<&(), Option<&LoadError>>,
    values: bool,
) -> Vec<TensorLine> {
    let taken = watched.taken();
    let fate = |name: &String| match outcome {
        _ if taken.contains(name) => TensorUse::Read,
        Err(Some(LoadError::LeftOver { tensors, .. })) if tensors.contains(name) => TensorUse::LeftOver,
        _ if of_a_tower(name) => TensorUse::Tower,
        Ok(()) | Err(Some(LoadError::LeftOver { .. })) => TensorUse::NotNeeded,
        Err(_) => TensorUse::NotReached,
    };
    let tensors = package.tensors();
    let line = |name: String| {
        let shape = tensors.shape(&name).unwrap_or_default();
        let rows = match tensors.rows(&name) {
            Some(rows) => rows.map_err(|error| error.to_string()),
            None => Err("it is absent".to_string()),
        };
        TensorLine {
            shape,
            format: rows.as_ref().map_or("refused".to_string(), |rows| rows.format().to_string()),
            bytes: rows.as_ref().map_or(0, |rows| rows.rows() * rows.row_bytes()),
            span: rows.as_ref().ok().filter(|_| values).map(|rows| span(&**rows)),
            fate: fate(&name),
            refused: rows.err(),
            name,
        }
    };
    tensors.names().into_iter().map(line).collect()
}

fn container_key(key: &str, what: &str) -> KeyLine {
    let (fate, reason) = match what {
        fixtures::UNREAD => ("unread", what.to_string()),
        _ => ("container", format!("the container reads it: {what}")),
    };
    KeyLine { key: key.to_string(), fate, reason }
}

fn key_line(key: &str, fate: KeyUse) -> KeyLine {
    let (fate, reason) = match fate {
        KeyUse::Read => ("read", "the family reads it"),
        KeyUse::Inert => ("inert", "it changes nothing that a forward pass computes"),
        KeyUse::Off => ("off", "not known, but null or false"),
        KeyUse::Allowed => ("allowed", "not known, allowed by name"),
        KeyUse::Unknown => ("refused", "not known; it may change the computation"),
    };
    KeyLine { key: key.to_string(), fate, reason: reason.to_string() }
}

/// Tensors that remember which of them were asked for their rows.
struct Watched<'a> {
    tensors: &'a dyn Tensors,
    taken: Mutex<BTreeSet<String>>,
}

impl<'a> Watched<'a> {
    fn new(tensors: &'a dyn Tensors) -> Self {
        Self { tensors, taken: Mutex::default() }
    }

    fn taken(&self) -> BTreeSet<String> {
        self.taken.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).clone()
    }
}

impl Tensors for Watched<'_> {
    fn names(&self) -> Vec<String> {
        self.tensors.names()
    }

    fn shape(&self, name: &str) -> Option<Vec<usize>> {
        self.tensors.shape(name)
    }

    fn rows(&self, name: &str) -> Option<Result<Arc<dyn Rows>, LoadError>> {
        self.taken.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).insert(name.to_string());
        self.tensors.rows(name)
    }

    fn file(&self, name: &str) -> PathBuf {
        self.tensors.file(name)
    }
}
