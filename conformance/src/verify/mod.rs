//! `verify`: does a subject compute a model right, and where does it first go wrong?

mod baseline;
mod budget;
mod conclude;
mod logits;
mod mutate;
mod pictures;
mod pieces;
mod reference;
mod repeat;
mod result;
mod run;
mod sites;
mod whole;

pub use baseline::{Baseline, Worse};
pub use budget::{LayerBudget, Part};
pub use logits::NEAR_TIE_SIGMAS;
pub use mutate::one_at_a_time;
pub use pieces::Pieces;
pub use repeat::{Changed, Repeat, Tile};
pub use result::{
    FirstFailure, Flip, LogitsResult, PackageResult, Position, ReferenceResult, Span, WorstSite,
};
pub use whole::whole_numbers;

use crate::contract::Contract;
use crate::draft::Pair;
use crate::edits::{Edit, Sources};
use crate::follow::View;
use crate::judge::Verdict;
use crate::mutants::Selection;
use crate::subject::{Kernel, SubjectError, SubjectSpec};
use crate::topk_gate;
use ::reference::Model;
use ::reference::models::Draft;
use conclude::conclude;
use golden::{Dump, TopK};
use reference::{reference_part, topk_part};
use run::{once, planned, run_of, topk_of};
use sites::{judge_draft, judge_sites};
use spec::{Config, NonFinite, Weights};

/// What to verify a package with.
pub struct Options<'a> {
    /// The subject.
    pub subject: &'a SubjectSpec,
    /// The contract it is judged under.
    pub contract: &'a Contract,
    /// Own or cumulative error.
    pub view: View,
    /// A mutant that takes the subject's place.
    pub mutate: Option<&'a Selection>,
    /// Glob over tap names; only these are judged.
    pub sites: Option<&'a str>,
    /// Greedy steps where the golden does not say.
    pub steps: usize,
    /// Whether to collect what only pictures need.
    pub pictures: bool,
    /// How often the subject is run; a dump and a kernel of this process are run once.
    pub repeat: usize,
    /// Tokens of the pieces in which the prompt is fed again, a run each.
    pub pieces: &'a [usize],
    /// Whether to measure what every layer's own error does to the logits.
    pub budget: bool,
    /// Whether to keep the first failing op with all that it was judged on.
    pub extract: bool,
}

impl<'a> Options<'a> {
    /// One run of a subject, judged by its own error at every site, with four steps.
    pub fn new(subject: &'a SubjectSpec, contract: &'a Contract) -> Self {
        Self {
            subject,
            contract,
            view: View::Own,
            mutate: None,
            sites: None,
            steps: 4,
            pictures: false,
            repeat: 1,
            pieces: &[],
            budget: false,
            extract: false,
        }
    }
}

/// A package, loaded.
pub struct Loaded {
    /// Its name.
    pub name: String,
    /// Its config.
    pub config: Config,
    /// Its weights.
    pub weights: Weights,
    /// The reference over it.
    pub model: Model,
    /// Its golden, where it has one.
    pub golden: Option<Dump>,
    /// Its top-k golden, where it is a real model that has one.
    pub topk: Option<TopK>,
    /// The draft beside it, where the package is a pair.
    pub draft: Option<Draft>,
    /// What it was made of, where a failure is to be told what it reads as if.
    pub sources: Option<Sources>,
}

impl Loaded {
    /// A model alone: without a golden, without a draft.
    pub fn new(name: &str, config: Config, weights: Weights) -> Loaded {
        Loaded {
            name: name.to_string(),
            model: Model::new(config.clone(), weights.clone()),
            config,
            weights,
            golden: None,
            topk: None,
            draft: None,
            sources: None,
        }
    }
}

/// Why a package cannot be verified at all.
#[derive(Debug, thiserror::Error)]
pub enum VerifyError {
    /// The mutant has nothing to change here.
    #[error("{mutant} applies to no site of {package}{at}: it needs {needs}")]
    AppliesNowhere {
        /// The mutant.
        mutant: String,
        /// The package.
        package: String,
        /// The glob of the selection, where there is one.
        at: String,
        /// What it needs.
        needs: &'static str,
    },
    /// A weight is not finite.
    #[error("{package}: {source}")]
    Weights {
        /// The package.
        package: String,
        /// Which.
        source: NonFinite,
    },
    /// What was named as a subject is none.
    #[error("{0}")]
    Subject(String),
    /// No tap matches the glob.
    #[error("no site that the subject exposes matches {glob}")]
    NoSite {
        /// The glob.
        glob: String,
    },
}

/// Verifies one package on one prompt.
pub fn verify(
    loaded: &Loaded,
    prompt: &[u32],
    options: &Options,
    repro: String,
) -> Result<PackageResult, VerifyError> {
    judged(loaded, prompt, options, None, repro)
}

/// The same with a kernel in the place of the model's ops that it has, whatever the subject of `options`.
pub fn verify_kernel(
    loaded: &Loaded,
    prompt: &[u32],
    options: &Options,
    kernel: Box<dyn Kernel + '_>,
    repro: String,
) -> Result<PackageResult, VerifyError> {
    judged(loaded, prompt, options, Some(kernel), repro)
}

fn judged(
    loaded: &Loaded,
    prompt: &[u32],
    options: &Options,
    mut kernel: Option<Box<dyn Kernel + '_>>,
    repro: String,
) -> Result<PackageResult, VerifyError> {
    let weights_at_fault = |source| VerifyError::Weights { package: loaded.name.clone(), source };
    let golden = loaded.golden.as_ref().filter(|golden| golden.manifest().prompt == prompt);
    let subject = match options.mutate {
        Some(selection) if selection.fault.is_some() => {
            format!("{} in {}", selection.mutant.name(), options.subject)
        }
        Some(selection) => format!("{} under {}", selection.mutant.name(), options.contract.name),
        None if kernel.is_some() => "kernel".to_string(),
        None => options.subject.to_string(),
    };
    let mut result = PackageResult::blank(&loaded.name, subject, options, repro);

    if let Some(selection) = options.mutate
        && (selection.edit.is_some_and(|edit| !can_be_edited(loaded, edit))
            || selection.in_loop.is_some() && loaded.draft.is_none())
    {
        return Err(applies_nowhere(loaded, selection));
    }
    let mut dump = match (options.subject, options.mutate) {
        (SubjectSpec::Dump(spec), None) => {
            let opened = spec.open().map_err(|error| VerifyError::Subject(error.to_string()))?;
            Some(run_of(opened, prompt).map_err(VerifyError::Subject)?)
        }
        _ => None,
    };
    let (passes, logits) = planned(loaded, prompt, options, dump.as_ref()).map_err(weights_at_fault)?;

    // A dump may have gone on from other ids than the golden: then the golden says nothing about this run.
    let topk = topk_of(loaded, prompt).filter(|run| topk_gate::passes_of(run).starts_with(&passes));
    let reference = || match topk {
        Some(run) => Ok(topk_part(loaded, run, &passes, &logits)),
        None => reference_part(loaded, golden),
    };

    let repeatable = kernel.is_none() && dump.is_none();
    let (mut ran, applied) = match once(loaded, options, kernel.take(), dump.take(), &passes) {
        Ok(ran) => ran,
        Err(error) => {
            result.verdict = match error {
                SubjectError::NotSupported(_) => Verdict::NotSupported,
                SubjectError::Stopped(_) => Verdict::Crashed,
                SubjectError::Weights(source) => return Err(weights_at_fault(source)),
                SubjectError::Unusable(reason) => return Err(VerifyError::Subject(reason)),
            };
            result.reason = Some(error.to_string());
            result.reference = reference().map_err(weights_at_fault)?;
            return Ok(result);
        }
    };
    result.cost = ran.cost.take();
    let remarks = &mut ran.remarks;
    result.unmatched = std::mem::take(&mut remarks.unmatched);
    result.problems = std::mem::take(&mut remarks.problems);
    result.notes = std::mem::take(&mut remarks.notes);
    judge_sites(loaded, options, &passes, &ran, &mut result).map_err(weights_at_fault)?;
    let in_draft = match judge_draft(loaded, options, golden, &passes, &mut result) {
        Ok(applied) => applied,
        Err(SubjectError::Weights(source)) => return Err(weights_at_fault(source)),
        Err(error) => {
            result.problems.push(format!("the draft: {error}"));
            false
        }
    };
    if let Some(selection) = options.mutate.filter(|selection| selection.in_op())
        && applied.is_empty()
        && !in_draft
    {
        return Err(applies_nowhere(loaded, selection));
    }
    result.reference = reference().map_err(weights_at_fault)?;
    result.logits = logits::judge_logits(
        loaded,
        options.contract,
        &passes,
        &ran.taps,
        &logits,
        ran.remarks.logit_variance,
    )
    .map_err(weights_at_fault)?;
    if options.pictures {
        result.inherited = pictures::inherited(loaded, &passes, &ran.taps).map_err(weights_at_fault)?;
        result.positions = pictures::positions(loaded, &passes, &ran.taps, &logits);
    }
    if options.budget {
        match budget::layers(loaded, &passes[0], &ran.taps[0]).map_err(weights_at_fault)? {
            Ok(budget) => result.budget = Some(budget),
            Err(why) => result.notes.push(format!("no budget of the layers: {why}")),
        }
    }
    result.problems.extend(ran.taps.iter().flat_map(|taps| taps.take_lost()));
    conclude(loaded, prompt, options, ran.own.as_ref(), &mut result);
    if let Some(reason) = ran.remarks.crashed.take() {
        (result.verdict, result.reason) = (result.verdict.max(Verdict::Crashed), Some(reason));
    }
    if options.repeat > 1 && repeatable && result.verdict < Verdict::Crashed {
        repeat::again(loaded, options, &passes, &ran, &mut result).map_err(weights_at_fault)?;
    }
    if repeatable && result.verdict < Verdict::Crashed {
        pieces::fed(loaded, options, &passes, &ran, &mut result).map_err(weights_at_fault)?;
    }
    Ok(result)
}

/// Whether an edit changes the model or the draft beside it.
fn can_be_edited(loaded: &Loaded, edit: &Edit) -> bool {
    let Some(sources) = &loaded.sources else { return false };
    let draft = || {
        let draft = loaded.draft.clone()?;
        let pair = Pair::new(loaded.config.clone(), loaded.model.clone(), draft).ok()?;
        sources.edited_pair(edit, &pair)
    };
    sources.edited_model(edit).is_some() || draft().is_some()
}

fn applies_nowhere(loaded: &Loaded, selection: &Selection) -> VerifyError {
    VerifyError::AppliesNowhere {
        mutant: selection.mutant.name(),
        package: loaded.name.clone(),
        at: selection.site.as_ref().map_or(String::new(), |site| format!(" at {site}")),
        needs: selection.mutant.needs,
    }
}
