//! `verify`: does a subject compute a model right, and where does it first go wrong?

mod conclude;
mod logits;
mod pictures;
mod reference;
mod result;
mod run;
mod sites;

pub use logits::NEAR_TIE_SIGMAS;
pub use result::{
    FirstFailure, Flip, LogitsResult, PackageResult, Position, ReferenceResult, Span, WorstSite,
};

use crate::contract::Contract;
use crate::follow::View;
use crate::golden_gate;
use crate::judge::Verdict;
use crate::mutants::Selection;
use crate::subject::{Kernel, MutantSubject, Subject, SubjectError, SubjectSpec};
use crate::topk_gate;
use ::reference::Model;
use ::reference::models::Draft;
use conclude::conclude;
use golden::{Dump, TopK};
use reference::{reference_part, topk_part};
use run::{build, free_run, passes_of, run, run_of};
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
    let mut result = PackageResult {
        package: loaded.name.clone(),
        prompt: None,
        verdict: Verdict::Passed,
        reason: None,
        subject: match options.mutate {
            Some(selection) if selection.fault.is_some() => {
                format!("{} in {}", selection.mutant.name(), options.subject)
            }
            Some(selection) => format!("{} under {}", selection.mutant.name(), options.contract.name),
            None if kernel.is_some() => "kernel".to_string(),
            None => options.subject.to_string(),
        },
        contract: options.contract.name.clone(),
        reference: ReferenceResult::skipped(),
        logits: None,
        sites: Vec::new(),
        not_exposed: Vec::new(),
        spans: Vec::new(),
        unmatched: Vec::new(),
        problems: Vec::new(),
        notes: Vec::new(),
        first_failure: None,
        explanation: None,
        cost: None,
        limits: String::new(),
        repro,
        inherited: Vec::new(),
        positions: Vec::new(),
    };

    let mut dump = match (options.subject, options.mutate) {
        (SubjectSpec::Dump(spec), None) => {
            let opened = spec.open().map_err(|error| VerifyError::Subject(error.to_string()))?;
            Some(run_of(opened, prompt).map_err(VerifyError::Subject)?)
        }
        _ => None,
    };
    let topk = loaded.topk.as_ref().and_then(|topk| topk.runs.iter().find(|run| run.prompt == prompt));
    // The golden of a pair has passes of the draft only: the target goes its own steps.
    let of_model = golden.filter(|_| loaded.draft.is_none());
    let given = of_model.map(golden_gate::passes_of).or_else(|| topk.map(topk_gate::passes_of));
    let given = passes_of(given, dump.as_ref());
    let steps = dump.as_ref().map_or(options.steps, |dump| dump.run.steps);
    let (passes, logits) = free_run(loaded, prompt, given, steps).map_err(weights_at_fault)?;

    // A dump may have gone on from other ids than the golden: then the golden says nothing about this run.
    let topk = topk.filter(|run| topk_gate::passes_of(run).starts_with(&passes));
    let reference = || match topk {
        Some(run) => Ok(topk_part(loaded, run, &passes, &logits)),
        None => reference_part(loaded, golden),
    };

    let in_op = options.mutate.filter(|selection| selection.fault.is_none());
    let mut mutant = in_op.map(|s| MutantSubject::new(&loaded.model, options.contract, s));
    let mut other: Box<dyn Subject + '_>;
    let run = match &mut mutant {
        Some(subject) => run(subject, &passes),
        None => match build(loaded, options, kernel.take(), dump.take(), &passes) {
            Ok(subject) => {
                other = subject;
                run(&mut *other, &passes)
            }
            Err(error) => Err(error),
        },
    };
    let mut ran = match run {
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
    let in_draft = judge_draft(loaded, options, golden, &passes, &mut result).map_err(weights_at_fault)?;
    if let (Some(selection), Some(subject)) = (options.mutate, &mutant)
        && subject.applied().is_empty()
        && !in_draft
    {
        return Err(VerifyError::AppliesNowhere {
            mutant: selection.mutant.name(),
            package: loaded.name.clone(),
            at: selection.site.as_ref().map_or(String::new(), |site| format!(" at {site}")),
            needs: selection.mutant.needs,
        });
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
    conclude(loaded, prompt, options, ran.own.as_ref(), &mut result);
    if let Some(reason) = ran.remarks.crashed {
        (result.verdict, result.reason) = (result.verdict.max(Verdict::Crashed), Some(reason));
    }
    Ok(result)
}
