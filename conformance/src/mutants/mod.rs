//! Deliberately wrong computations, each with a name and a formula.
//!
//! They serve twice: `--mutate` and the audit make a subject wrong on purpose, and `explain` replays
//! them at the first wrong site to say what a subject computes instead. Ids and statements are those
//! of the mutation catalogue.

mod attention;
mod cache;
mod delta;
pub mod device;
mod draft;
mod embedding;
mod equivalent;
pub mod explain;
mod feed_forward;
mod formats;
mod history;
mod latent;
mod launch;
mod linear;
mod moe;
mod norm;
mod rope;
mod select;

pub use equivalent::equivalent;
pub use history::History;
pub use select::{SelectError, Selection, matches, nearest};

use crate::contract::Contract;
use crate::emulate::Emulate;
use reference::{Call, Ops, Tensor};
use spec::{NonFinite, Site};

/// Evaluates a call in the subject's arithmetic.
pub type Eval<'e> = dyn FnMut(&Call<Tensor>) -> Tensor + 'e;

/// A wrong computation of one op.
///
/// Returns nothing where it does not apply: another op, or a case in which the mistake cannot be
/// made (no bias to drop, no square matrix to transpose).
pub type Apply = fn(&Call<Tensor>, Site, &History, &mut Eval) -> Option<Tensor>;

/// One variant of one mutant.
pub struct Mutant {
    /// The catalogue's id.
    pub id: &'static str,
    /// Which of several readings; empty where there is one.
    pub variant: &'static str,
    /// What it computes instead.
    pub formula: &'static str,
    /// What must hold for it to apply, for the message when it applies nowhere.
    pub needs: &'static str,
    /// The computation.
    pub apply: Apply,
}

impl Mutant {
    /// `id` or `id:variant`.
    pub fn name(&self) -> String {
        if self.variant.is_empty() { self.id.to_string() } else { format!("{}:{}", self.id, self.variant) }
    }
}

impl std::fmt::Debug for Mutant {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.name())
    }
}

/// A mutant of a table.
pub(crate) const fn mutant(
    id: &'static str,
    variant: &'static str,
    formula: &'static str,
    needs: &'static str,
    apply: Apply,
) -> Mutant {
    Mutant { id, variant, formula, needs, apply }
}

/// The mutants that are realised in an op, by family of mistakes.
pub const FAMILIES: &[(&str, &[Mutant])] = &[
    ("Matrix products", linear::MUTANTS),
    ("Rows of a launch and number formats", launch::MUTANTS),
    ("4-bit codes", formats::MUTANTS),
    ("Norms", norm::MUTANTS),
    ("Rotary positions", rope::MUTANTS),
    ("Attention and masks", attention::MUTANTS),
    ("Caches of keys and values", cache::MUTANTS),
    ("Feed-forward and residuals", feed_forward::MUTANTS),
    ("Embeddings, per-layer embeddings, head", embedding::MUTANTS),
    ("Mixtures of experts", moe::MUTANTS),
    ("Gated delta rule, convolutions and gates", delta::MUTANTS),
    ("Latent attention, parallel streams, sparse gates", latent::MUTANTS),
    ("Block drafts", draft::MUTANTS),
];

/// Every mutant that is realised in an op, family after family of mistakes.
pub fn all() -> impl Iterator<Item = &'static Mutant> {
    FAMILIES.iter().flat_map(|(_, mutants)| mutants.iter())
}

fn flat(x: &Tensor) -> Vec<f32> {
    x.iter().copied().collect()
}

/// A tensor of the shape of `like`, from values in storage order.
fn shaped(like: &Tensor, values: Vec<f32>) -> Option<Tensor> {
    Tensor::from_shape_vec(like.raw_dim(), values).ok()
}

/// An honest subject of a contract, but for one mutant at the selected sites.
pub struct MutantOps<'a> {
    honest: Emulate<'a>,
    selection: &'a Selection,
    history: History,
    /// The sites at which the mutant has been applied, in order.
    pub applied: Vec<Site>,
    /// The values of the pass, in the order of the data flow.
    pub taps: Vec<(Site, Tensor)>,
}

impl<'a> MutantOps<'a> {
    /// A subject that is wrong as `selection` says.
    pub fn new(contract: &'a Contract, selection: &'a Selection) -> Self {
        Self {
            honest: Emulate::new(contract),
            selection,
            history: History::new(),
            applied: vec![],
            taps: vec![],
        }
    }

    /// Forgets the values of the last pass and returns them.
    pub fn take(&mut self) -> Result<Vec<(Site, Tensor)>, NonFinite> {
        self.history.clear();
        let taps = std::mem::take(&mut self.taps);
        self.honest.check().map(|()| taps)
    }
}

impl Ops for MutantOps<'_> {
    type Tensor = Tensor;

    fn run(&mut self, at: Site, call: Call<'_, Tensor>) -> Tensor {
        let honest = &mut self.honest;
        let wrong = if self.selection.covers(at) {
            (self.selection.mutant.apply)(&call, at, &self.history, &mut |call| honest.value(at, call))
        } else {
            None
        };
        let value = match wrong {
            Some(value) => {
                self.applied.push(at);
                value
            }
            None => self.honest.value(at, &call),
        };
        self.history.note(at, &call, value.clone());
        self.taps.push((at, value.clone()));
        value
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_unique_and_formulas_are_written() {
        let names: Vec<String> = all().map(Mutant::name).collect();
        for (i, name) in names.iter().enumerate() {
            assert!(!names[i + 1..].contains(name), "{name} twice");
        }
        assert!(all().all(|m| !m.formula.is_empty() && !m.needs.is_empty()));
    }
}
