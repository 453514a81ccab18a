//! Which passes are run, the subject that runs them, and what it showed.

use super::{Loaded, Options};
use crate::cost::CostPerToken;
use crate::follow::{Imaged, PassTaps};
use crate::golden_gate::{self, argmax};
use crate::passes::Pass;
use crate::subject::{
    DumpSubject, Kernel, MutantSubject, OpenedDump, OpsSubject, Remarks, Subject, SubjectError, SubjectSpec,
};
use crate::topk_gate;
use golden::TopKRun;
use reference::{Plain, Tensor};
use spec::{NonFinite, Site};
use std::collections::BTreeSet;

/// The top-k golden of this prompt.
pub(super) fn topk_of<'l>(loaded: &'l Loaded, prompt: &[u32]) -> Option<&'l TopKRun> {
    loaded.topk.as_ref()?.runs.iter().find(|run| run.prompt == prompt)
}

/// The passes of a run, and the reference's logits of each.
pub(super) fn planned(
    loaded: &Loaded,
    prompt: &[u32],
    options: &Options,
    dump: Option<&OpenedDump>,
) -> Result<(Vec<Pass>, Vec<Vec<f32>>), NonFinite> {
    let golden = loaded.golden.as_ref().filter(|golden| golden.manifest().prompt == prompt);
    // The golden of a pair has passes of the draft only: the target goes its own steps.
    let of_model = golden.filter(|_| loaded.draft.is_none());
    let topk = topk_of(loaded, prompt);
    let given = of_model.map(golden_gate::passes_of).or_else(|| topk.map(topk_gate::passes_of));
    let given = passes_of(given, dump);
    let steps = dump.map_or(options.steps, |dump| dump.run.steps);
    free_run(loaded, prompt, given, steps)
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

/// Of the runs of a dump, the one with this prompt, or that does not say its prompt.
pub(super) fn run_of(opened: Vec<OpenedDump>, prompt: &[u32]) -> Result<OpenedDump, String> {
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
        let SubjectSpec::Npu(engine, _) = options.subject else {
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

/// One run of a subject, and the sites at which the mutant of the options has been applied in it.
pub(super) fn once(
    loaded: &Loaded,
    options: &Options,
    kernel: Option<Box<dyn Kernel + '_>>,
    dump: Option<OpenedDump>,
    passes: &[Pass],
) -> Result<(Ran, Vec<Site>), SubjectError> {
    if let Some(selection) = options.mutate
        && let Some(edit) = selection.edit
    {
        let edited = loaded.sources.as_ref().and_then(|sources| sources.edited_model(edit));
        // An edit of the draft alone leaves the model as it is.
        let model = edited.as_ref().map_or(&loaded.model, |(_, model, _)| model);
        let mut subject = MutantSubject::new(model, options.contract, selection);
        return Ok((run(&mut subject, passes)?, vec![]));
    }
    match options.mutate.filter(|selection| selection.fault.is_none()) {
        Some(selection) => {
            let mut subject = MutantSubject::new(&loaded.model, options.contract, selection);
            let ran = run(&mut subject, passes)?;
            Ok((ran, subject.applied().to_vec()))
        }
        None => {
            let mut subject = build(loaded, options, kernel, dump, passes)?;
            Ok((run(&mut *subject, passes)?, vec![]))
        }
    }
}

/// What a subject gave.
pub(super) struct Ran {
    pub taps: Vec<PassTaps>,
    pub images: Vec<Imaged>,
    pub cost: Option<CostPerToken>,
    /// The taps that are the subject's own, where it says so.
    pub own: Option<BTreeSet<String>>,
    pub remarks: Remarks,
}

fn run(subject: &mut dyn Subject, passes: &[Pass]) -> Result<Ran, SubjectError> {
    let taps = passes.iter().map(|pass| subject.pass(pass)).collect::<Result<Vec<_>, _>>()?;
    let cost = subject.cost();
    let sites: Vec<Site> = taps.first().map_or(vec![], |taps| taps.sites().copied().collect());
    let images = sites.into_iter().flat_map(|site| images_of(subject, site)).collect();
    Ok(Ran { taps, images, cost, own: subject.own().cloned(), remarks: subject.remarks() })
}

/// The images behind a site: one, or one of every routed expert.
fn images_of(subject: &mut dyn Subject, site: Site) -> Vec<Imaged> {
    match subject.image(site) {
        Some(weights) => vec![Imaged { site, expert: None, weights }],
        None => {
            let expert = |n| Some(Imaged { site, expert: Some(n), weights: subject.expert_image(site, n)? });
            (0..).map_while(expert).collect()
        }
    }
}
