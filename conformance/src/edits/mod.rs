//! Mistakes in what goes into a model: a config that is read wrongly, weights that are taken wrongly.
//!
//! An op mutant changes one op. An edit changes the package, and every op that reads the changed key or tensor
//! computes something else: `rope_theta` read as 10000, `gate_proj` and `up_proj` exchanged. The subject of
//! `--mutate` is then the edited model in the declared arithmetic, and a failing run is told which edit its
//! first wrong site agrees with.

mod as_if;
mod audit;
mod config;
mod program;
mod weights;

pub use as_if::{AsIf, Wrong};
pub use audit::{audit_draft_edits, audit_edits};
pub(crate) use program::Program;

use crate::draft::Pair;
use crate::mutants::{Eval, History, Mutant, mutant};
use reference::models::Draft;
use reference::{Call, Model, Tensor};
use serde_json::{Map, Value};
use spec::families::draft::{DraftConfig, DraftWeights};
use spec::matrix::Values;
use spec::{Config, LoadError, Rows, Site, Tensors, Weights};
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

/// A change of a config. The second map is the target's, where the first is a draft's. Nothing where there is
/// nothing to change.
type Reading = fn(&mut Map<String, Value>, Option<&Map<String, Value>>) -> Option<()>;

/// What a tensor holds instead; nothing where it is left alone.
type Taking = fn(&Source, &str) -> Option<Vec<f32>>;

/// An edit of the package.
pub struct Edit {
    /// Its entry in the catalogue.
    pub mutant: Mutant,
    change: Change,
}

enum Change {
    Config(Reading),
    Weights(Taking),
}

impl std::fmt::Debug for Edit {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.mutant.fmt(f)
    }
}

/// Every edit: of configs, then of weights.
pub fn all() -> impl Iterator<Item = &'static Edit> {
    config::EDITS.iter().chain(weights::EDITS)
}

const fn reads(
    id: &'static str,
    variant: &'static str,
    formula: &'static str,
    needs: &'static str,
    change: Reading,
) -> Edit {
    Edit { mutant: mutant(id, variant, formula, needs, nowhere), change: Change::Config(change) }
}

const fn takes(
    id: &'static str,
    variant: &'static str,
    formula: &'static str,
    needs: &'static str,
    change: Taking,
) -> Edit {
    Edit { mutant: mutant(id, variant, formula, needs, nowhere), change: Change::Weights(change) }
}

/// The op of a mutant that is made in no op.
pub(crate) fn nowhere(_: &Call<Tensor>, _: Site, _: &History, _: &mut Eval) -> Option<Tensor> {
    None
}

/// A package as it was before a model was made of it.
#[derive(Clone)]
pub struct Source {
    /// Its config.
    pub config: Map<String, Value>,
    /// Its tensors.
    pub tensors: Arc<dyn Tensors>,
    /// Unknown config keys that were let pass.
    pub allowed: Vec<String>,
}

/// The packages of a model and of the draft beside it.
#[derive(Clone)]
pub struct Sources {
    /// The model's.
    pub target: Source,
    /// The draft's.
    pub draft: Option<Source>,
}

/// A package after an edit.
pub struct Edited {
    /// The package.
    pub source: Source,
    /// What was changed: `rope_theta were 10000.0 and not 500000.0`.
    pub says: String,
}

/// Most weights of a package that is edited: every edit runs the whole model once more.
const MOST_WEIGHTS: usize = 1 << 24;

impl Source {
    /// The package after `edit`, where that changes anything. `target` is the config of a draft's target.
    pub fn edited(&self, edit: &Edit, target: Option<&Map<String, Value>>) -> Option<Edited> {
        match edit.change {
            Change::Config(change) => {
                let mut config = self.config.clone();
                match config.get_mut("text_config").and_then(Value::as_object_mut) {
                    Some(text) => change(text, target)?,
                    None => change(&mut config, target)?,
                }
                let mut different = Vec::new();
                differences("", &self.config, &config, &mut different);
                let says = different.join(" and ");
                (!says.is_empty()).then(|| Edited { source: Source { config, ..self.clone() }, says })
            }
            Change::Weights(change) => {
                let names = self.tensors.names();
                let mut changed = BTreeMap::new();
                for name in names {
                    if let Some(values) = change(self, &name)
                        && self.values(&name).is_some_and(|(_, before)| before != values)
                    {
                        let inner = self.tensors.shape(&name)?.last().copied()?;
                        changed.insert(name, Arc::new(Values::new(inner, values)));
                    }
                }
                if changed.is_empty() {
                    return None;
                }
                let tensors = Arc::new(Changed { inner: self.tensors.clone(), changed });
                let says = edit.mutant.formula.to_string();
                Some(Edited { source: Source { tensors, ..self.clone() }, says })
            }
        }
    }

    /// The model, where config and weights make one.
    pub fn model(&self) -> Option<(Config, Model)> {
        let config = Config::parse(&self.config, &self.allowed).ok()?.config;
        let weights = Weights::load(&config, &*self.tensors).ok()?;
        Some((config.clone(), Model::new(config, weights)))
    }

    /// The draft, where config and weights make one.
    pub fn draft(&self) -> Option<Draft> {
        let (config, _) = DraftConfig::parse(&self.config, &self.allowed).ok()?;
        let weights = DraftWeights::load(&config, &*self.tensors).ok()?;
        Some(Draft { config, weights })
    }

    /// Whether it is small enough to be run once an edit.
    fn is_small(&self) -> bool {
        let size = |name: &String| self.tensors.shape(name).map_or(0, |shape| shape.iter().product());
        self.tensors.names().iter().map(size).sum::<usize>() <= MOST_WEIGHTS
    }

    /// Shape and values of a tensor.
    fn values(&self, name: &str) -> Option<(Vec<usize>, Vec<f32>)> {
        let (shape, rows) = (self.tensors.shape(name)?, self.tensors.rows(name)?.ok()?);
        let mut values = vec![0.0; rows.rows() * rows.inner()];
        for (r, row) in values.chunks_exact_mut(rows.inner().max(1)).enumerate() {
            rows.decode(r, row);
        }
        Some((shape, values))
    }

    /// A size of the config, or of its text part.
    fn size(&self, key: &str) -> Option<usize> {
        let text = self.config.get("text_config").and_then(Value::as_object).unwrap_or(&self.config);
        text.get(key)?.as_u64().map(|n| n as usize)
    }
}

impl Sources {
    /// The model after `edit`; nothing where that changes nothing or makes no model.
    pub fn edited_model(&self, edit: &Edit) -> Option<(Config, Model, String)> {
        let edited = self.target.edited(edit, None)?;
        let (before, _) = self.target.model()?;
        let (config, model) = edited.source.model()?;
        // A key that was read as what it is by default changes nothing.
        let changes = matches!(edit.change, Change::Weights(_)) || config != before;
        changes.then_some((config, model, edited.says))
    }

    /// The pair with its draft after `edit`.
    pub fn edited_pair(&self, edit: &Edit, pair: &Pair) -> Option<(Pair, String)> {
        let edited = self.draft.as_ref()?.edited(edit, Some(&self.target.config))?;
        let draft = edited.source.draft()?;
        let changes = matches!(edit.change, Change::Weights(_)) || draft.config != pair.draft.config;
        // Ids of layers that the target lacks make no pair.
        let joined = Pair::new(pair.config.clone(), pair.target.clone(), draft).ok()?;
        let Pair { last_tap, window, scale, .. } = *pair;
        changes.then_some((Pair { last_tap, window, scale, ..joined }, edited.says))
    }
}

/// What differs between two configs, key by key.
fn differences(path: &str, before: &Map<String, Value>, after: &Map<String, Value>, into: &mut Vec<String>) {
    let keys: std::collections::BTreeSet<&String> = before.keys().chain(after.keys()).collect();
    for key in keys {
        let name = format!("{path}{key}");
        match (before.get(key), after.get(key)) {
            (Some(Value::Object(before)), Some(Value::Object(after))) => {
                differences(&format!("{name}."), before, after, into);
            }
            (before, after) if before != after => {
                let said = |value: Option<&Value>| value.map_or("absent".to_string(), Value::to_string);
                into.push(format!("{name} were {} and not {}", said(after), said(before)));
            }
            _ => {}
        }
    }
}

/// Tensors of which some hold other values.
struct Changed {
    inner: Arc<dyn Tensors>,
    changed: BTreeMap<String, Arc<Values>>,
}

impl Tensors for Changed {
    fn names(&self) -> Vec<String> {
        self.inner.names()
    }

    fn shape(&self, name: &str) -> Option<Vec<usize>> {
        self.inner.shape(name)
    }

    fn rows(&self, name: &str) -> Option<Result<Arc<dyn Rows>, LoadError>> {
        match self.changed.get(name) {
            Some(held) => Some(Ok(held.clone() as Arc<dyn Rows>)),
            None => self.inner.rows(name),
        }
    }

    fn file(&self, name: &str) -> PathBuf {
        self.inner.file(name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    /// What is told of an edit of a config.
    fn said(name: &str, config: Value) -> Option<String> {
        let edit = all().find(|edit| edit.mutant.name() == name).unwrap();
        let Value::Object(config) = config else { panic!() };
        let tensors = Arc::new(fixtures::seeded::square(3));
        Source { config, tensors, allowed: vec![] }.edited(edit, None).map(|edited| edited.says)
    }

    #[test]
    fn both_places_of_theta_are_found_and_one_that_says_so_already_is_left() {
        let newer = json!({"rope_parameters": {"rope_theta": 500.0, "rope_type": "default"}});
        let told = said("cfg-rope-theta:1e4", newer);
        assert_eq!(told.as_deref(), Some("rope_parameters.rope_theta were 10000.0 and not 500.0"));
        let older = said("cfg-rope-theta:1e4", json!({"rope_theta": 500.0}));
        assert_eq!(older.as_deref(), Some("rope_theta were 10000.0 and not 500.0"));
        assert_eq!(said("cfg-rope-theta:1e4", json!({"rope_theta": 10000.0})), None);
        let wrapped = said("cfg-rope-theta:1e4", json!({"text_config": {"rope_theta": 500.0}}));
        assert_eq!(wrapped.as_deref(), Some("text_config.rope_theta were 10000.0 and not 500.0"));
    }

    #[test]
    fn names_are_unique_and_not_those_of_op_mutants() {
        let ops = crate::mutants::all().map(Mutant::name);
        let device = crate::mutants::device::MUTANTS.iter().map(|m| m.mutant.name());
        let mut names: Vec<String> = all().map(|edit| edit.mutant.name()).chain(ops).chain(device).collect();
        let count = names.len();
        names.sort();
        names.dedup();
        assert_eq!(names.len(), count);
    }

    // Rows of a head of four, before: 0 1 2 3 (halves 0 1 and 2 3); a converter writes pairs: 0 2 1 3.
    #[test]
    fn a_converted_head_by_hand() {
        assert_eq!(weights::paired_rows(&[0.0, 1.0, 2.0, 3.0], 1, 1), Some(vec![0.0, 2.0, 1.0, 3.0]));
    }
}
