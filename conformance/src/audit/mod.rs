//! `audit`: which mistakes could a fixture not see?
//!
//! The honest subject runs once. At every op each mutant is computed on the op's own inputs and judged
//! against what an honest op gives there: following a subject judges each site's own error, so the verdict
//! is that of a whole run with the mutant at this one site.

mod blind;
pub mod catalogue;
mod coverage;
pub mod report;

pub use coverage::{Covered, Sight};

use crate::contract::Contract;
use crate::draft::Pair;
use crate::draft::judge::Ground;
use crate::emulate::Emulate;
use crate::follow::budget;
use crate::golden_gate::argmax;
use crate::judge::{Budget, Place, Verdict, judge};
use crate::mutants::explain::{Explanation, explain};
use crate::mutants::{History, Mutant, all, equivalent};
use crate::passes::Pass;
use crate::record::Record;
use crate::variance::{Bounded, Truth, expect};
use reference::{Call, Model, Ops, Tensor};
use serde::Serialize;
use spec::{NonFinite, Site};
use std::collections::{BTreeMap, BTreeSet};

/// A mutant at a site that the fixture shows.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Kill {
    /// The package.
    pub package: String,
    /// The mutant.
    pub mutant: String,
    /// Where it was applied, without the pass.
    pub site: String,
    /// The tap that fails.
    pub verdict_site: String,
    /// The first wrong element, or the one furthest off where only the spread is wrong.
    pub at: Place,
    /// Whether the diagnosis, which does not know the mutant, ranks it first. Asked once a mutant.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub explained: Option<bool>,
}

/// A mutant at sites where the fixture does not show it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Survivor {
    /// The package.
    pub package: String,
    /// The mutant.
    pub mutant: String,
    /// Where it was applied, without the pass.
    pub sites: Vec<String>,
    /// What hides it.
    pub why: String,
    /// The smallest change of the fixture that would show it.
    pub change: String,
}

/// A mutant at sites where it computes the same.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Same {
    /// The package.
    pub package: String,
    /// The mutant.
    pub mutant: String,
    /// Where, without the pass.
    pub sites: Vec<String>,
    /// Why it must.
    pub reason: String,
}

/// A mutant that can be made nowhere in the package.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct NotApplicable {
    /// The mutant.
    pub mutant: String,
    /// What it needs.
    pub needs: &'static str,
}

/// What the audit of one package found. A mutant counts once for every site at which it was applied.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Audit {
    /// The package.
    pub package: String,
    /// Mutants at sites.
    pub mutants: usize,
    /// Those that the fixture shows.
    pub killed: usize,
    /// Those that compute the same.
    pub equivalent: usize,
    /// Each that was shown.
    pub kills: Vec<Kill>,
    /// Each that was not.
    pub survivors: Vec<Survivor>,
    /// Each that computes the same.
    pub equivalents: Vec<Same>,
    /// Mutants that apply to no site.
    pub not_applicable: Vec<NotApplicable>,
    /// Every op by shape, format and layer: whether a mistake in it would be seen.
    pub coverage: Vec<Covered>,
}

impl Audit {
    /// How many mutants the diagnosis was asked to name, and how many it ranked first.
    pub fn explained(&self) -> (usize, usize) {
        let asked: Vec<bool> = self.kills.iter().filter_map(|kill| kill.explained).collect();
        (asked.len(), asked.iter().filter(|first| **first).count())
    }

    /// Takes in what another audit of the same package found.
    pub fn join(&mut self, other: Audit) {
        self.mutants += other.mutants;
        self.killed += other.killed;
        self.equivalent += other.equivalent;
        self.kills.extend(other.kills);
        self.survivors.extend(other.survivors);
        self.equivalents.extend(other.equivalents);
        self.not_applicable.extend(other.not_applicable);
        self.coverage.extend(other.coverage);
    }

    /// Mutants that the fixture shows at no site, though they can be made in it.
    pub fn unseen(&self) -> Vec<&str> {
        let mut unseen: Vec<&str> = self.survivors.iter().map(|s| &*s.mutant).collect();
        unseen.retain(|name| self.kills.iter().all(|kill| kill.mutant != *name));
        unseen.sort_unstable();
        unseen.dedup();
        unseen
    }
}

/// Audits a model on one prompt: the prompt in one pass, then `steps` greedy steps.
pub fn audit(
    package: &str,
    model: &Model,
    prompt: &[u32],
    steps: usize,
    contract: &Contract,
) -> Result<Audit, NonFinite> {
    let (passes, budget) = plan(model, prompt, steps)?;
    let mut ops = AuditOps::new(contract, budget, prompt.len());
    let mut state = model.fresh::<Tensor>();
    for pass in passes {
        ops.begin(pass.name);
        model.pass(&mut ops, &mut state, &pass.ids);
        ops.check()?;
    }
    Ok(ops.finish(package))
}

/// Audits the draft of a pair: a block behind each of `anchors`, rising positions of `text`.
///
/// Context rows are the reference's, as where a draft is judged.
pub fn audit_draft(
    package: &str,
    pair: &Pair,
    text: &[u32],
    anchors: &[usize],
    contract: &Contract,
) -> Result<Audit, NonFinite> {
    let ground = Ground::of(pair, text)?;
    let (mut record, mut state, mut taps) = (Record::default(), pair.draft.fresh(), Vec::new());
    for &anchor in anchors {
        ground.pass(pair, &mut record, &mut state, anchor, |rows| rows);
        taps.extend(record.take()?);
    }
    let budget = budget(taps.iter().map(|(site, tensor)| (*site, tensor.shape())));
    let mut ops = AuditOps::new(contract, budget, pair.draft.config.block_size);
    let mut state = pair.draft.fresh();
    for (n, &anchor) in anchors.iter().enumerate() {
        ops.begin(format!("pass{n}"));
        ground.pass(pair, &mut ops, &mut state, anchor, |rows| rows);
        ops.check()?;
    }
    Ok(ops.finish(package))
}

/// The passes of an honest run, and the number of tests that judging all of it makes.
pub(crate) fn plan(model: &Model, prompt: &[u32], steps: usize) -> Result<(Vec<Pass>, Budget), NonFinite> {
    let (mut ops, mut state) = (Record::default(), model.fresh::<Tensor>());
    let mut next = Pass { name: "prefill".into(), ids: prompt.to_vec() };
    let (mut passes, mut taps) = (Vec::new(), Vec::new());
    for n in 0..=steps {
        let logits = model.pass(&mut ops, &mut state, &next.ids);
        taps.extend(ops.take()?);
        let last: Vec<f32> =
            logits.outer_iter().next_back().map_or(vec![], |row| row.iter().copied().collect());
        let step = Pass { name: format!("step{}", n + 1), ids: vec![argmax(&last) as u32] };
        passes.push(std::mem::replace(&mut next, step));
    }
    Ok((passes, budget(taps.iter().map(|(site, tensor)| (*site, tensor.shape())))))
}

/// What became of a mutant at a site.
enum Found {
    Killed { tap: String, at: Place, explained: Option<bool> },
    Blind { why: String, change: String },
    Same { reason: &'static str },
}

struct AuditOps<'a> {
    honest: Emulate<'a>,
    contract: &'a Contract,
    budget: Budget,
    pass: String,
    tokens: usize,
    history: History,
    found: BTreeMap<(usize, Site), Found>,
    /// The op at each site.
    places: BTreeMap<Site, coverage::Placed>,
    /// Mutants whose diagnosis has been asked for.
    asked: BTreeSet<usize>,
    error: Option<NonFinite>,
}

impl<'a> AuditOps<'a> {
    fn new(contract: &'a Contract, budget: Budget, tokens: usize) -> Self {
        Self {
            honest: Emulate::new(contract),
            contract,
            budget,
            pass: String::new(),
            tokens,
            history: History::new(),
            found: BTreeMap::new(),
            places: BTreeMap::new(),
            asked: BTreeSet::new(),
            error: None,
        }
    }

    fn begin(&mut self, pass: String) {
        self.pass = pass;
        self.history.clear();
    }

    /// The first weight found not to be finite.
    fn check(&mut self) -> Result<(), NonFinite> {
        self.honest.check()?;
        self.error.take().map_or(Ok(()), Err)
    }

    fn finish(self, package: &str) -> Audit {
        let mut audit = collect(package, self.found);
        audit.coverage = coverage::table(package, &self.places, &audit);
        audit
    }

    /// Applies every mutant to this call and judges what it gives.
    fn try_all(&mut self, at: Site, call: &Call<Tensor>, honest: &Tensor) -> Result<(), NonFinite> {
        let operands: Vec<Bounded> = call.operands().into_iter().cloned().map(Bounded::exact).collect();
        let mut expected = None;
        for (n, mutant) in all().enumerate() {
            if let Some(Found::Killed { .. } | Found::Same { .. }) = self.found.get(&(n, at)) {
                continue;
            }
            let eval = &mut |call: &Call<Tensor>| self.honest.value(at, call);
            let Some(wrong) = (mutant.apply)(call, at, &self.history, eval) else {
                if let Some((why, change)) = blind::hidden(mutant, call, self.tokens) {
                    self.found.entry((n, at)).or_insert(Found::Blind { why, change });
                }
                continue;
            };
            if let Some(reason) = equivalent(mutant, call) {
                self.found.insert((n, at), Found::Same { reason });
                continue;
            }
            let expected = match &expected {
                Some(expected) => expected,
                None => expected.insert(expect(at, &call.with(&operands), self.contract, Truth::Image)?),
            };
            let tap = format!("{}.{at}", self.pass);
            if wrong.shape() != honest.shape() {
                self.found
                    .insert((n, at), Found::Killed { tap, at: Place { row: 0, col: 0 }, explained: None });
                continue;
            }
            let values: Vec<f32> = wrong.iter().copied().collect();
            let result = judge(&tap, wrong.shape(), &values, expected, &self.budget);
            let found = if result.verdict == Verdict::Failed || result.less_precise() {
                let place = result.first_wrong.map_or(result.worst, |m| Place { row: m.row, col: m.col });
                let ask = self.asked.insert(n);
                let bounded = call.with(&operands);
                let named = |e: Explanation| e.names(&mutant.name());
                let answer =
                    || explain(at, &bounded, &wrong, self.contract, &self.history).is_some_and(named);
                Found::Killed { tap, at: place, explained: ask.then(answer) }
            } else {
                let (why, change) = blind::unseen(mutant, call, self.tokens, wrong == *honest, &result);
                Found::Blind { why, change }
            };
            self.found.insert((n, at), found);
        }
        Ok(())
    }
}

impl Ops for AuditOps<'_> {
    type Tensor = Tensor;

    fn run(&mut self, at: Site, call: Call<'_, Tensor>) -> Tensor {
        let value = self.honest.value(at, &call);
        self.places.entry(at).or_insert_with(|| coverage::Placed::of(&call, &value));
        if self.error.is_none()
            && let Err(error) = self.try_all(at, &call, &value)
        {
            self.error = Some(error);
        }
        self.history.note(at, &call, value.clone());
        value
    }
}

fn collect(package: &str, found: BTreeMap<(usize, Site), Found>) -> Audit {
    let mutants: Vec<&Mutant> = all().collect();
    let mut audit = Audit { package: package.to_string(), mutants: found.len(), ..Audit::default() };
    let mut seen = vec![false; mutants.len()];
    for ((n, site), found) in found {
        seen[n] = true;
        let (package, mutant, site) = (package.to_string(), mutants[n].name(), site.to_string());
        match found {
            Found::Killed { tap, at, explained } => {
                audit.killed += 1;
                audit.kills.push(Kill { package, mutant, site, verdict_site: tap, at, explained });
            }
            Found::Blind { why, change } => {
                let same = |s: &&mut Survivor| s.mutant == mutant && s.why == why && s.change == change;
                match audit.survivors.iter_mut().find(same) {
                    Some(survivor) => survivor.sites.push(site),
                    None => {
                        audit.survivors.push(Survivor { package, mutant, sites: vec![site], why, change })
                    }
                }
            }
            Found::Same { reason } => {
                audit.equivalent += 1;
                match audit.equivalents.iter_mut().find(|s| s.mutant == mutant && s.reason == reason) {
                    Some(same) => same.sites.push(site),
                    None => {
                        let (sites, reason) = (vec![site], reason.to_string());
                        audit.equivalents.push(Same { package, mutant, sites, reason });
                    }
                }
            }
        }
    }
    let missing = mutants.iter().zip(seen).filter(|(_, seen)| !seen);
    audit.not_applicable =
        missing.map(|(mutant, _)| NotApplicable { mutant: mutant.name(), needs: mutant.needs }).collect();
    audit
}
