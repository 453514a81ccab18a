//! `verify`: does a subject compute a model right, and where does it first go wrong?

use crate::contract::Contract;
use crate::draft::judge::Runner;
use crate::draft::passes::LoopResult;
use crate::draft::{self, Pair};
use crate::follow::{Follow, PassTaps, View, budget};
use crate::golden_gate::{self, GateError, GoldenGate, argmax, kl};
use crate::judge::{Budget, Mismatch, SiteResult, Verdict};
use crate::mutants::Selection;
use crate::mutants::explain::Explanation;
use crate::passes::Pass;
use crate::record::Record;
use crate::subject::{
    CostPerToken, DumpSubject, Kernel, MutantSubject, OpenedDump, OpsSubject, Remarks, Subject, SubjectError,
    SubjectSpec,
};
use crate::topk_gate;
use crate::variance::{Bounded, Truth, Variance};
use golden::{Dump, TopK, TopKRun};
use reference::models::Draft;
use reference::{Model, Plain, Tensor};
use serde::Serialize;
use spec::{Config, NonFinite, Site, Weights};
use std::collections::BTreeSet;

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

/// The reference against its golden.
#[derive(Clone, Debug, Serialize)]
pub struct ReferenceResult {
    /// PASSED, SKIPPED or BROKEN.
    pub verdict: Verdict,
    /// Where the golden is, or why there is none.
    pub golden: String,
    /// Equal and compared positions.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub argmax_equal: Option<(usize, usize)>,
    /// Largest KL(golden || reference) in nats.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kl_max: Option<f64>,
    /// The site nearest to its limit, or furthest beyond it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub worst: Option<WorstSite>,
    /// Number of taps compared.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub taps: Option<usize>,
    /// What is wrong, where the verdict is BROKEN.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
}

impl ReferenceResult {
    /// There is nothing to hold the reference to.
    fn skipped() -> Self {
        Self {
            verdict: Verdict::Skipped,
            golden: "none for this prompt".into(),
            argmax_equal: None,
            kl_max: None,
            worst: None,
            taps: None,
            reason: None,
        }
    }
}

/// A site with its share of the limit.
#[derive(Clone, Debug, Serialize)]
pub struct WorstSite {
    /// The tap.
    pub site: String,
    /// |difference| over the limit.
    pub ratio: f64,
}

/// The subject's logits against the reference's.
#[derive(Clone, Debug, Serialize)]
pub struct LogitsResult {
    /// PASSED, NEAR_TIE or FAILED.
    pub verdict: Verdict,
    /// Positions with the same token (near ties included in neither), and positions.
    pub argmax_equal: (usize, usize),
    /// Flips where the margin is within four standard deviations of the difference.
    pub near_ties: usize,
    /// Largest KL(reference || subject) in nats.
    pub kl_max: f64,
    /// Every flip.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub flips: Vec<Flip>,
}

/// A position whose largest logit is another one.
#[derive(Clone, Debug, Serialize)]
pub struct Flip {
    /// The pass.
    pub pass: String,
    /// Row of the pass.
    pub row: usize,
    /// The reference's token.
    pub expected: usize,
    /// The subject's token.
    pub found: usize,
    /// The reference's margin between the two.
    pub margin: f64,
    /// Margin over the standard deviation of the difference.
    pub sigmas: f64,
    /// Whether that is within four.
    pub near_tie: bool,
}

/// The first wrong site.
#[derive(Clone, Debug, Serialize)]
pub struct FirstFailure {
    /// The tap.
    pub site: String,
    /// The first wrong element, where single elements are wrong.
    #[serde(flatten)]
    pub element: Option<Mismatch>,
    /// What of the tensor is wrong.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pattern: Option<String>,
}

/// What was judged as one: everything behind `from` up to `to`.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Span {
    /// The last exposed site before, or nothing where it is the tokens.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub from: Option<String>,
    /// The judged site.
    pub to: String,
}

/// The result for one package and prompt.
#[derive(Clone, Debug, Serialize)]
pub struct PackageResult {
    /// The package.
    pub package: String,
    /// Which prompt of the file, where there is one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompt: Option<usize>,
    /// The worst of all parts.
    pub verdict: Verdict,
    /// In a sentence, where the verdict needs one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// The subject.
    pub subject: String,
    /// The contract it was judged under.
    pub contract: String,
    /// The reference part.
    pub reference: ReferenceResult,
    /// The logits part.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub logits: Option<LogitsResult>,
    /// Every judged tap, in the order of the data flow.
    pub sites: Vec<SiteResult>,
    /// Sites of the reference that the subject does not expose, without the pass.
    pub not_exposed: Vec<String>,
    /// Sites judged together with those before them that the subject does not expose.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub spans: Vec<Span>,
    /// What the subject showed and no site was found for.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub unmatched: Vec<String>,
    /// What the subject showed and could not be used.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub problems: Vec<String>,
    /// What else there is to know about the subject.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub notes: Vec<String>,
    /// The speculative loop of a pair on the NPU path.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub draft: Option<LoopResult>,
    /// The first wrong site.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub first_failure: Option<FirstFailure>,
    /// What it computes instead.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub explanation: Option<Explanation>,
    /// Costs of a step.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cost: Option<CostPerToken>,
    /// Where the limits come from.
    pub limits: String,
    /// The command that shows it again.
    pub repro: String,
    /// Relative drift of every tap from the free-running reference, where pictures were asked for.
    #[serde(skip)]
    pub inherited: Vec<(String, f64)>,
    /// Every position's margin, where pictures were asked for.
    #[serde(skip)]
    pub positions: Vec<Position>,
}

/// The logits of one position.
#[derive(Clone, Debug, Serialize)]
pub struct Position {
    /// The pass.
    pub pass: String,
    /// Row of the pass.
    pub row: usize,
    /// The reference's margin between its two largest logits.
    pub margin: f64,
    /// KL(reference || subject) in nats.
    pub kl: f64,
    /// Whether the subject has the same token.
    pub equal: bool,
}

impl PackageResult {
    /// The exit code of this result alone.
    pub fn exit_code(&self) -> u8 {
        let drifts = self.sites.iter().any(SiteResult::less_precise);
        match self.verdict {
            Verdict::Passed | Verdict::Skipped | Verdict::NearTie => 0,
            Verdict::Drift => u8::from(drifts),
            Verdict::Failed => 1,
            Verdict::NotSupported | Verdict::Mistrusted => 3,
            Verdict::Broken => 4,
            Verdict::Crashed => 5,
        }
    }
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
        draft: None,
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
    result.cost = ran.cost;
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
    result.logits =
        judge_logits(loaded, options.contract, &passes, &ran.taps, &logits, ran.remarks.logit_variance)
            .map_err(weights_at_fault)?;
    if options.pictures {
        result.inherited = inherited(loaded, &passes, &ran.taps).map_err(weights_at_fault)?;
        result.positions = positions(loaded, &passes, &ran.taps, &logits);
    }
    conclude(loaded, prompt, options, ran.own.as_ref(), &mut result);
    if let Some(reason) = ran.remarks.crashed {
        (result.verdict, result.reason) = (result.verdict.max(Verdict::Crashed), Some(reason));
    }
    Ok(result)
}

/// Why a golden is at fault, or the gate's result.
///
/// The golden of a pair is made of draft passes: target and draft are held to it together.
fn reference_part(loaded: &Loaded, golden: Option<&Dump>) -> Result<ReferenceResult, NonFinite> {
    let skipped = ReferenceResult::skipped();
    let Some(dump) = golden else { return Ok(skipped) };
    let name = dump.path().file_name().map_or(String::new(), |name| name.to_string_lossy().into_owned());
    let broken = |reason: String| ReferenceResult {
        verdict: Verdict::Broken,
        golden: name.clone(),
        reason: Some(reason),
        ..skipped.clone()
    };
    if let Err(error) = dump.verify_hashes() {
        return Ok(broken(error.to_string()));
    }
    let gate = match &loaded.draft {
        None => golden_gate::compare(&loaded.model, dump),
        Some(draft) => match Pair::new(loaded.config.clone(), loaded.model.clone(), draft.clone()) {
            Ok(pair) => draft::golden::compare(&pair, dump),
            Err(error) => return Ok(broken(error.to_string())),
        },
    };
    match gate {
        Err(GateError::Weights(source)) => Err(source),
        Err(error) => Ok(broken(error.to_string())),
        Ok(gate) => Ok(ReferenceResult {
            verdict: if gate.passes() { Verdict::Passed } else { Verdict::Broken },
            golden: name.clone(),
            argmax_equal: Some(gate.argmax_equal),
            kl_max: Some(gate.kl_max),
            worst: gate.worst().map(|w| WorstSite { site: w.tap.clone(), ratio: w.ratio }),
            taps: Some(gate.sites.len()),
            reason: (!gate.passes()).then(|| gate_reason(&gate)),
        }),
    }
}

/// The reference against the tokens and best logits of a real model.
fn topk_part(loaded: &Loaded, run: &TopKRun, passes: &[Pass], logits: &[Vec<f32>]) -> ReferenceResult {
    let gate = topk_gate::compare(run, passes, logits, loaded.config.vocab_size());
    let reason = format!(
        "reference and golden differ: {} of {} tokens equal, logits at {} {:.1} times their limit of {}",
        gate.argmax_equal.0,
        gate.argmax_equal.1,
        gate.worst.0,
        gate.worst.1,
        topk_gate::LIMIT
    );
    ReferenceResult {
        verdict: if gate.passes() { Verdict::Passed } else { Verdict::Broken },
        golden: loaded.topk.as_ref().map_or(String::new(), |topk| topk.model.clone()),
        argmax_equal: Some(gate.argmax_equal),
        kl_max: None,
        reason: (!gate.passes()).then_some(reason),
        taps: Some(gate.compared),
        worst: Some(WorstSite { site: gate.worst.0, ratio: gate.worst.1 }),
    }
}

fn gate_reason(gate: &GoldenGate) -> String {
    if let Some(tap) = gate.unmatched.first() {
        return format!("the golden has {tap}, which the reference does not compute");
    }
    match gate.sites.iter().find(|site| site.ratio > 1.0) {
        Some(site) => format!(
            "reference and golden first differ at {} [{}, {}]: {} against {}, {:.1} times the limit",
            site.tap, site.at.0, site.at.1, site.reference, site.golden, site.ratio
        ),
        None => "reference and golden choose different tokens".to_string(),
    }
}

/// Runs the reference; the passes and the logits of each, row after row.
fn free_run(
    loaded: &Loaded,
    prompt: &[u32],
    given: Option<Vec<Pass>>,
    steps: usize,
) -> Result<(Vec<Pass>, Vec<Vec<f32>>), NonFinite> {
    let count = given.as_ref().map_or(steps + 1, Vec::len);
    let mut next = Pass { name: "prefill".into(), ids: prompt.to_vec() };
    let (mut passes, mut logits) = (Vec::new(), Vec::new());
    let (mut ops, mut state) = (Plain::default(), loaded.model.fresh::<Tensor>());
    for n in 0..count {
        let pass = match &given {
            Some(given) => given[n].clone(),
            None => next,
        };
        let rows: Vec<f32> = loaded.model.pass(&mut ops, &mut state, &pass.ids).iter().copied().collect();
        ops.check()?;
        let last = &rows[rows.len() - loaded.config.vocab_size()..];
        next = Pass { name: format!("step{}", n + 1), ids: vec![argmax(last) as u32] };
        logits.push(rows);
        passes.push(pass);
    }
    Ok((passes, logits))
}

/// The variance of every logit of every pass under the contract, judged with the package's weights.
fn logit_variances(
    loaded: &Loaded,
    contract: &Contract,
    passes: &[Pass],
) -> Result<Vec<Vec<f64>>, NonFinite> {
    let mut state = loaded.model.fresh::<Bounded>();
    let mut all = Vec::new();
    for pass in passes {
        let mut ops = Variance::new(contract, Truth::Package, |_, _| {});
        let logits = loaded.model.pass(&mut ops, &mut state, &pass.ids);
        ops.check()?;
        all.push((0..logits.value.len()).map(|n| logits.variance_at(n)).collect());
    }
    Ok(all)
}

/// Of the runs of a dump, the one with this prompt, or that does not say its prompt.
fn run_of(opened: Vec<OpenedDump>, prompt: &[u32]) -> Result<OpenedDump, String> {
    let prompts: Vec<String> = opened.iter().map(|dump| format!("{:?}", dump.run.prompt)).collect();
    let fits = |dump: &OpenedDump| dump.run.prompt.as_ref().is_none_or(|own| own == prompt);
    opened.into_iter().find(fits).ok_or_else(|| {
        format!(
            "the dump is of the prompt {}, not of {prompt:?}; give its ids with --prompt-ids",
            prompts.join(" or ")
        )
    })
}

/// The passes to run: those of a dump that is judged, else those that the golden gives, as many as the
/// dump has.
fn passes_of(given: Option<Vec<Pass>>, dump: Option<&OpenedDump>) -> Option<Vec<Pass>> {
    let Some(dump) = dump else { return given };
    dump.run.passes().or_else(|| {
        let mut passes = given?;
        (passes.len() > dump.run.steps).then(|| {
            passes.truncate(dump.run.steps + 1);
            passes
        })
    })
}

/// A subject over a loaded package.
fn build<'m>(
    loaded: &'m Loaded,
    options: &Options,
    kernel: Option<Box<dyn Kernel + 'm>>,
    dump: Option<OpenedDump>,
    passes: &[Pass],
) -> Result<Box<dyn Subject + 'm>, SubjectError> {
    if let Some(fault) = options.mutate.and_then(|selection| selection.fault) {
        let SubjectSpec::Npu(engine) = options.subject else {
            return Err(SubjectError::Unusable("a device mutant needs the NPU path: --subject npu".into()));
        };
        return Ok(Box::new(crate::subject::NpuSubject::with_fault(
            &loaded.config,
            &loaded.weights,
            *engine,
            fault(),
        )?));
    }
    match (kernel, dump) {
        (Some(kernel), _) => Ok(Box::new(OpsSubject::new(&loaded.model, kernel, options.sites))),
        (None, Some(dump)) => Ok(Box::new(DumpSubject::new(dump, &loaded.model, passes)?)),
        (None, None) => options.subject.build(&loaded.model, &loaded.config, &loaded.weights, options.sites),
    }
}

/// What a subject gave.
struct Ran {
    taps: Vec<PassTaps>,
    images: Vec<(Site, spec::Matrix)>,
    cost: Option<CostPerToken>,
    /// The taps that are the subject's own, where it says so.
    own: Option<BTreeSet<String>>,
    remarks: Remarks,
}

fn run(subject: &mut dyn Subject, passes: &[Pass]) -> Result<Ran, SubjectError> {
    let taps = passes.iter().map(|pass| subject.pass(pass)).collect::<Result<Vec<_>, _>>()?;
    let cost = subject.cost();
    let sites: Vec<Site> = taps.first().map_or(vec![], |taps| taps.keys().copied().collect());
    let images = sites.into_iter().filter_map(|site| Some((site, subject.image(site)?))).collect();
    Ok(Ran { taps, images, cost, own: subject.own().cloned(), remarks: subject.remarks() })
}

fn judge_sites(
    loaded: &Loaded,
    options: &Options,
    passes: &[Pass],
    ran: &Ran,
    result: &mut PackageResult,
) -> Result<(), NonFinite> {
    let own = |name: &str| match &ran.own {
        Some(own) => own.contains(name),
        None => !ran.remarks.tokens_only,
    };
    let judged =
        |name: &str| options.sites.is_none_or(|glob| crate::mutants::matches(glob, name)) && own(name);
    let all = passes.iter().zip(&ran.taps).flat_map(|(pass, taps)| {
        taps.iter().filter(|(site, _)| judged(&format!("{}.{site}", pass.name))).map(|(site, t)| (*site, t))
    });
    let budget: Budget = budget(all);
    result.limits = budget.derivation();
    let mut state = loaded.model.fresh::<Bounded>();
    for (n, (pass, taps)) in passes.iter().zip(&ran.taps).enumerate() {
        let images = if n == 0 { &ran.images[..] } else { &[] };
        let explain = result.explanation.is_none() && result.first_failure.is_none();
        let mut follow =
            Follow::new(options.contract, budget, options.view, &pass.name, taps, &judged, explain);
        follow.images = images;
        loaded.model.pass(&mut follow, &mut state, &pass.ids);
        follow.check()?;
        if result.first_failure.is_none()
            && let Some(wrong) = follow.results.iter().find(|site| site.verdict == Verdict::Failed)
        {
            result.first_failure = Some(FirstFailure {
                site: wrong.site.clone(),
                element: wrong.first_wrong,
                pattern: wrong.pattern.clone(),
            });
            result.explanation = follow.explanation.take();
        }
        if n == 0 {
            let filled_in = taps.keys().filter(|site| !own(&format!("{}.{site}", pass.name)));
            let not_exposed = follow.not_exposed.iter().chain(filled_in);
            result.not_exposed = not_exposed.map(Site::to_string).collect();
        }
        result.spans.extend(follow.spans.iter().map(|(to, from)| Span {
            from: from.as_ref().map(|site| format!("{}.{site}", pass.name)),
            to: format!("{}.{to}", pass.name),
        }));
        result.sites.append(&mut follow.results);
    }
    Ok(())
}

/// Judges the draft of a pair, where there is one; whether a mutant found a place in it.
///
/// Blocks stand where the golden has them, else behind the prompt and the steps. The NPU path also walks as a
/// speculative loop does.
fn judge_draft(
    loaded: &Loaded,
    options: &Options,
    golden: Option<&Dump>,
    passes: &[Pass],
    result: &mut PackageResult,
) -> Result<bool, SubjectError> {
    let Some(pair) = &loaded.draft else { return Ok(false) };
    let Ok(pair) = Pair::new(loaded.config.clone(), loaded.model.clone(), pair.clone()) else {
        // The reference part says why.
        return Ok(false);
    };
    let fault = options.mutate.and_then(|selection| selection.fault).map(|fault| fault());
    let runner = match (options.mutate, options.subject) {
        (Some(selection), _) if selection.fault.is_none() => Runner::Mutant(selection),
        (_, SubjectSpec::Npu(engine)) => Runner::Npu(*engine, fault.clone()),
        (None, SubjectSpec::Reference) => Runner::Reference,
        _ => {
            let reason = "the subject runs no drafts: the draft is held to its golden, the subject is judged on the target";
            result.reason = Some(reason.into());
            return Ok(false);
        }
    };
    let told = golden.and_then(|golden| draft::golden::text_and_anchors(golden).ok());
    let (text, anchors) = told.unwrap_or_else(|| {
        let text: Vec<u32> = passes.iter().flat_map(|pass| pass.ids.iter().copied()).collect();
        let anchors = (passes[0].ids.len()..text.len()).collect();
        (text, anchors)
    });
    let judged = |name: &str| options.sites.is_none_or(|glob| crate::mutants::matches(glob, name));
    let (contract, view) = (options.contract, options.view);
    if let Runner::Npu(engine, _) = runner
        && options.sites.is_none()
    {
        let prompt = &passes[0].ids;
        let tokens = (text.len() - prompt.len()).max(2);
        let judged = draft::passes::judge(&pair, &loaded.weights, engine, fault, contract, prompt, tokens);
        result.draft = Some(judged?);
    }
    let mut of_draft = draft::judge::judge(&pair, &text, &anchors, runner, contract, view, &judged)?;
    if result.first_failure.is_none()
        && let Some(wrong) = of_draft.sites.iter().find(|site| site.verdict == Verdict::Failed)
    {
        result.first_failure = Some(FirstFailure {
            site: wrong.site.clone(),
            element: wrong.first_wrong,
            pattern: wrong.pattern.clone(),
        });
        result.explanation = of_draft.explanation.take();
    }
    result.sites.append(&mut of_draft.sites);
    result.not_exposed.append(&mut of_draft.not_exposed);
    Ok(!of_draft.applied.is_empty())
}

/// Standard deviations of the logit difference within which a flip is a near tie.
pub const NEAR_TIE_SIGMAS: f64 = 4.0;

/// The subject's tokens against the reference's, in the passes whose logits it shows; `stored` is a variance
/// that comes from how they were stored. The other variances are computed only where a token flips.
fn judge_logits(
    loaded: &Loaded,
    contract: &Contract,
    passes: &[Pass],
    taps: &[PassTaps],
    reference: &[Vec<f32>],
    stored: f64,
) -> Result<Option<LogitsResult>, NonFinite> {
    let vocab = loaded.config.vocab_size();
    let (mut argmax_equal, mut kl_max, mut flips) = ((0, 0), 0f64, Vec::new());
    for (n, (taps, reference)) in taps.iter().zip(reference).enumerate() {
        let Some(subject) = taps.get(&Site::model("logits")) else { continue };
        let subject: Vec<f32> = subject.iter().copied().collect();
        // A subject may show the logits of the last rows of a pass only.
        let first = (reference.len() / vocab).saturating_sub(subject.len() / vocab);
        for (row, found) in subject.chunks_exact(vocab).enumerate() {
            let at = (first + row) * vocab;
            let expected = &reference[at..at + vocab];
            let finite = found.iter().all(|v| v.is_finite());
            let (e, f) = (argmax(expected), argmax(found));
            argmax_equal.1 += 1;
            kl_max = kl_max.max(kl(expected, found));
            if e == f && finite {
                argmax_equal.0 += 1;
            } else {
                let margin = f64::from(expected[e]) - f64::from(expected[f]);
                flips.push((n, first + row, e, f, margin, finite));
            }
        }
    }
    let variances = if flips.is_empty() { vec![] } else { logit_variances(loaded, contract, passes)? };
    let flips: Vec<Flip> = flips
        .into_iter()
        .map(|(n, row, expected, found, margin, finite)| {
            let variance =
                variances[n][row * vocab + expected] + variances[n][row * vocab + found] + 2.0 * stored;
            let sigmas = margin / variance.sqrt();
            let near_tie = finite && margin <= NEAR_TIE_SIGMAS * variance.sqrt();
            Flip { pass: passes[n].name.clone(), row, expected, found, margin, sigmas, near_tie }
        })
        .collect();
    let near_ties = flips.iter().filter(|flip| flip.near_tie).count();
    let verdict = match near_ties {
        _ if flips.is_empty() => Verdict::Passed,
        n if n == flips.len() => Verdict::NearTie,
        _ => Verdict::Failed,
    };
    Ok((argmax_equal.1 > 0).then_some(LogitsResult { verdict, argmax_equal, near_ties, kl_max, flips }))
}

/// `rms(subject - reference) / rms(reference)` at every tap, the reference running free.
fn inherited(loaded: &Loaded, passes: &[Pass], taps: &[PassTaps]) -> Result<Vec<(String, f64)>, NonFinite> {
    let (mut ops, mut state) = (Record::default(), loaded.model.fresh());
    let mut drift = Vec::new();
    for (pass, taps) in passes.iter().zip(taps) {
        loaded.model.pass(&mut ops, &mut state, &pass.ids);
        for (site, reference) in ops.take()? {
            let Some(subject) = taps.get(&site).filter(|subject| subject.len() == reference.len()) else {
                continue;
            };
            let square = |v: f64| v * v;
            let (mut off, mut size) = (0.0, 0.0);
            for (&s, &r) in subject.iter().zip(reference.iter()) {
                off += square(f64::from(s) - f64::from(r));
                size += square(f64::from(r));
            }
            drift.push((format!("{}.{site}", pass.name), (off / size.max(f64::MIN_POSITIVE)).sqrt()));
        }
    }
    Ok(drift)
}

/// Margin, KL and agreement of every position.
fn positions(loaded: &Loaded, passes: &[Pass], taps: &[PassTaps], reference: &[Vec<f32>]) -> Vec<Position> {
    let vocab = loaded.config.vocab_size();
    let mut all = Vec::new();
    for ((pass, taps), reference) in passes.iter().zip(taps).zip(reference) {
        let Some(subject) = taps.get(&Site::model("logits")) else { continue };
        let subject: Vec<f32> = subject.iter().copied().collect();
        let first = (reference.len() / vocab).saturating_sub(subject.len() / vocab);
        for (row, found) in subject.chunks_exact(vocab).enumerate() {
            let expected = &reference[(first + row) * vocab..][..vocab];
            let best = argmax(expected);
            let others = expected.iter().enumerate().filter(|(i, _)| *i != best).map(|(_, &v)| v);
            let second = others.fold(f32::NEG_INFINITY, f32::max);
            all.push(Position {
                pass: pass.name.clone(),
                row: first + row,
                margin: f64::from(expected[best]) - f64::from(second),
                kl: kl(expected, found),
                equal: best == argmax(found),
            });
        }
    }
    all
}

/// The verdict of the whole: the worst of its parts, or MISTRUSTED where the parts could not have failed.
///
/// A subject of single ops is judged by those that it computes: it need not expose outputs.
fn conclude(
    loaded: &Loaded,
    prompt: &[u32],
    options: &Options,
    own: Option<&BTreeSet<String>>,
    result: &mut PackageResult,
) {
    let parts = [result.reference.verdict]
        .into_iter()
        .filter(|v| *v != Verdict::Skipped)
        .chain(result.logits.iter().map(|logits| logits.verdict))
        .chain(result.draft.iter().map(|draft| draft.verdict))
        .chain(result.sites.iter().map(|site| site.verdict));
    result.verdict = parts.max().unwrap_or(Verdict::Skipped);
    let outputs = result.logits.is_some() || result.sites.iter().any(|site| site.site.ends_with(".out"));
    let mistrust = if let Some(first) = result.problems.first() {
        Some(match result.problems.len() {
            1 => format!("a part of the subject could not be judged: {first}"),
            n => format!("{n} parts of the subject could not be judged, first: {first}"),
        })
    } else if result.sites.is_empty() && options.sites.is_none() && result.logits.is_none() {
        Some("the subject exposes nothing that could be judged".to_string())
    } else if own.is_some_and(|own| own.is_empty()) {
        Some("the subject computes none of this model's ops".to_string())
    } else if !outputs && own.is_none() && options.sites.is_none() {
        Some("the subject exposes neither logits nor layer outputs".to_string())
    } else if let Some(selection) = options.mutate
        && result.verdict < Verdict::Failed
    {
        Some(format!("{} changes nothing that this fixture could see", selection.mutant.name()))
    } else if prompt.len() == 1 {
        Some("a prompt of one token cannot show mistakes about positions, masks or rows".to_string())
    } else {
        symmetric(&loaded.weights)
    };
    if let Some(reason) = mistrust
        && result.verdict < Verdict::Mistrusted
    {
        result.verdict = Verdict::Mistrusted;
        result.reason = Some(reason);
    }
    if result.reason.is_none() {
        result.reason = result.reference.reason.clone();
    }
}

/// Why the weights could not show a transposed projection: all square ones are symmetric.
fn symmetric(weights: &Weights) -> Option<String> {
    let mut weights = weights.clone();
    let square: Vec<spec::Matrix> = weights
        .matrices()
        .into_iter()
        .filter(|m| m.out() == m.inner() && m.out() > 1 && m.out() <= 1024)
        .map(|m| m.clone())
        .collect();
    let symmetric = |m: &spec::Matrix| {
        let n = m.out();
        let values = m.to_values().unwrap_or_default();
        values.len() == n * n && (0..n).all(|o| (0..o).all(|i| values[o * n + i] == values[i * n + o]))
    };
    (!square.is_empty() && square.iter().all(symmetric)).then(|| {
        format!("all {} square projections are symmetric: a transposed one could not be seen", square.len())
    })
}
