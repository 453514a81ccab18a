//! Judging every site that a subject exposes, of a model and of the draft beside it.

use super::run::Ran;
use super::{FirstFailure, Loaded, Options, PackageResult, Span};
use crate::draft::judge::Runner;
use crate::draft::{self, Pair};
use crate::edits::AsIf;
use crate::follow::{Follow, budget};
use crate::judge::{Budget, Verdict};
use crate::mutants::Selection;
use crate::passes::Pass;
use crate::subject::{SubjectError, SubjectSpec};
use crate::variance::Bounded;
use golden::Dump;
use spec::{NonFinite, Site};

pub(super) fn judge_sites(
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
    let all = passes
        .iter()
        .zip(&ran.taps)
        .flat_map(|(pass, taps)| taps.shapes().filter(|(site, _)| judged(&format!("{}.{site}", pass.name))));
    let budget: Budget = budget(all);
    result.limits = budget.derivation();
    let mut state = loaded.model.fresh::<Bounded>();
    for (n, (pass, taps)) in passes.iter().zip(&ran.taps).enumerate() {
        let images = if n == 0 { &ran.images[..] } else { &[] };
        let explain = result.explanation.is_none() && result.first_failure.is_none();
        let mut follow =
            Follow::new(options.contract, budget, options.view, &pass.name, taps, &judged, explain);
        follow.images = images;
        follow.extract = options.extract;
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
            // Of a subject that is known to be wrong in an op nobody asks what it was read as.
            if let (Some(sources), Some(wrong)) = (&loaded.sources, &follow.wrong)
                && options.mutate.is_none_or(|selection| !selection.in_op())
            {
                let (passes, taps) = (&passes[..=n], &ran.taps[..=n]);
                result.as_if = AsIf::of_model(sources, passes, taps, wrong, options.contract);
            }
            result.failed_op = follow.failed.take();
        }
        if n == 0 {
            let filled_in = taps.sites().filter(|site| !own(&format!("{}.{site}", pass.name)));
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

/// The text of a pair and the positions of its blocks: the golden's, else behind the prompt and the steps.
fn text_and_anchors(golden: Option<&Dump>, passes: &[Pass]) -> (Vec<u32>, Vec<usize>) {
    let told = golden.and_then(|golden| draft::golden::text_and_anchors(golden).ok());
    told.unwrap_or_else(|| {
        let text: Vec<u32> = passes.iter().flat_map(|pass| pass.ids.iter().copied()).collect();
        let anchors = (passes[0].ids.len()..text.len()).collect();
        (text, anchors)
    })
}

/// The sites of a pair's draft at which the mutant of the options can be made.
pub(super) fn draft_sites(
    loaded: &Loaded,
    prompt: &[u32],
    options: &Options,
    passes: &[Pass],
) -> Result<Vec<Site>, NonFinite> {
    let (Some(draft), Some(selection)) = (&loaded.draft, options.mutate) else { return Ok(vec![]) };
    let Ok(pair) = Pair::new(loaded.config.clone(), loaded.model.clone(), draft.clone()) else {
        return Ok(vec![]);
    };
    let golden = loaded.golden.as_ref().filter(|golden| golden.manifest().prompt == prompt);
    let (text, anchors) = text_and_anchors(golden, passes);
    let (contract, view, runner) = (options.contract, options.view, Runner::Mutant(selection));
    match draft::judge::judge(&pair, (&text, &anchors), runner, contract, view, false, &|_| false) {
        Ok(judged) => Ok(judged.applied),
        Err(SubjectError::Weights(source)) => Err(source),
        // What else stands against the draft is said where it is judged.
        Err(_) => Ok(vec![]),
    }
}

/// The pair after the edit of the options, where that is one of its draft and not of its target.
fn edited_draft(loaded: &Loaded, options: &Options, pair: &Pair) -> Option<Pair> {
    let (sources, edit) = (loaded.sources.as_ref()?, options.mutate?.edit?);
    match sources.edited_model(edit) {
        Some(_) => None,
        None => sources.edited_pair(edit, pair).map(|(pair, _)| pair),
    }
}

/// Judges the draft of a pair, where there is one; whether a mutant found a place in it.
///
/// Blocks stand where the golden has them, else behind the prompt and the steps. The NPU path also walks as a
/// speculative loop does.
pub(super) fn judge_draft(
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
    let edited = edited_draft(loaded, options, &pair);
    let runner = match (options.mutate, options.subject) {
        (Some(selection), _) if selection.in_op() => Runner::Mutant(selection),
        // The loop is at fault, or the target: the draft itself is honest.
        (Some(Selection { in_loop: Some(_), .. }), _) => Runner::Edited(&pair),
        (Some(selection), _) if selection.edit.is_some() => match &edited {
            Some(edited) => Runner::Edited(edited),
            None => Runner::Edited(&pair),
        },
        (_, SubjectSpec::Npu(engine, _)) => Runner::Npu(*engine, fault.clone()),
        (None, SubjectSpec::Reference) => Runner::Reference,
        _ => {
            let reason = "the subject runs no drafts: the draft is held to its golden, the subject is judged on the target";
            result.reason = Some(reason.into());
            return Ok(false);
        }
    };
    let (text, anchors) = text_and_anchors(golden, passes);
    let judged = |name: &str| options.sites.is_none_or(|glob| crate::mutants::matches(glob, name));
    let (contract, view) = (options.contract, options.view);
    let prompt = &passes[0].ids;
    let tokens = (text.len().saturating_sub(prompt.len())).max(2);
    if let Some(made) = options.mutate.and_then(|selection| selection.in_loop) {
        result.draft = Some(made.judge(&pair, contract, prompt, tokens)?);
    } else if let Runner::Npu(engine, _) = runner
        && options.sites.is_none()
    {
        let judged = draft::passes::judge(&pair, &loaded.weights, engine, fault, contract, prompt, tokens);
        result.draft = Some(judged?);
    }
    let mut of_draft =
        draft::judge::judge(&pair, (&text, &anchors), runner, contract, view, options.extract, &judged)?;
    if result.first_failure.is_none()
        && let Some(wrong) = of_draft.sites.iter().find(|site| site.verdict == Verdict::Failed)
    {
        result.first_failure = Some(FirstFailure {
            site: wrong.site.clone(),
            element: wrong.first_wrong,
            pattern: wrong.pattern.clone(),
        });
        result.explanation = of_draft.explanation.take();
        result.failed_op = of_draft.failed.take();
        if let (Some(sources), Some((wrong, taps))) = (&loaded.sources, &of_draft.wrong)
            && options.mutate.is_none_or(|selection| !selection.in_op())
        {
            let blocks = (&text[..], &anchors[..taps.len()]);
            result.as_if = AsIf::of_draft(sources, &pair, blocks, taps, wrong, contract);
        }
    }
    result.sites.append(&mut of_draft.sites);
    result.not_exposed.append(&mut of_draft.not_exposed);
    Ok(!of_draft.applied.is_empty())
}
