//! Which edits of a package its prompt would show.

use super::{Edit, Program, Sources, all};
use crate::audit::{Audit, Kill, NotApplicable, Survivor, plan};
use crate::contract::Contract;
use crate::draft::Pair;
use crate::follow::{PassTaps, budget};
use crate::judge::{Place, Verdict, judge};
use crate::variance::{Bounded, Truth, expect};
use rayon::prelude::*;
use reference::{Call, Model, Tensor};
use spec::{NonFinite, Site};

/// Tries every edit of a model on one prompt and `steps` greedy steps behind it.
///
/// The edited model runs in the declared arithmetic; the model itself judges it op by op on its own inputs, as
/// it judges any subject.
pub fn audit_edits(
    package: &str,
    sources: &Sources,
    model: &Model,
    prompt: &[u32],
    steps: usize,
    contract: &Contract,
) -> Result<Audit, NonFinite> {
    let (passes, _) = plan(model, prompt, steps)?;
    let honest = Program::Model(model, &passes);
    let tried = all().collect::<Vec<_>>().into_par_iter().map(|edit| {
        let Some((_, edited, _)) = sources.edited_model(edit) else { return Ok((edit, None)) };
        tried(&honest, &Program::Model(&edited, &passes), contract).map(|found| (edit, Some(found)))
    });
    Ok(collect(package, tried.collect::<Result<_, NonFinite>>()?))
}

/// The same of the draft of a pair, with blocks behind `anchors` of `text`.
pub fn audit_draft_edits(
    package: &str,
    sources: &Sources,
    pair: &Pair,
    (text, anchors): (&[u32], &[usize]),
    contract: &Contract,
) -> Result<Audit, NonFinite> {
    let honest = Program::blocks(pair, text, anchors)?;
    let tried = all().collect::<Vec<_>>().into_par_iter().map(|edit| {
        let Some((edited, _)) = sources.edited_pair(edit, pair) else { return Ok((edit, None)) };
        tried(&honest, &Program::blocks(&edited, text, anchors)?, contract).map(|found| (edit, Some(found)))
    });
    Ok(collect(package, tried.collect::<Result<_, NonFinite>>()?))
}

/// What became of an edit.
enum Found {
    Killed { pass: String, at: Site, place: Place },
    Blind { why: &'static str },
}

/// The first pass alone, and all of them where that shows nothing.
fn tried(honest: &Program, edited: &Program, contract: &Contract) -> Result<Found, NonFinite> {
    let all = honest.passes().len();
    let found = shown(&honest.first(1), &edited.first(1), contract)?;
    if all == 1 || matches!(found, Found::Killed { .. }) {
        return Ok(found);
    }
    shown(honest, edited, contract)
}

fn shown(honest: &Program, edited: &Program, contract: &Contract) -> Result<Found, NonFinite> {
    let (names, taps) = (honest.passes(), edited.taps(contract)?);
    let budget = budget(taps.iter().flat_map(PassTaps::shapes));
    let (mut killed, mut differs, mut error) = (None, false, None);
    let mut compare = |pass: usize, at: Site, call: &Call<Tensor>, value: &Tensor, tap: Option<&Tensor>| {
        let Some(tap) = tap.filter(|tap| killed.is_none() && *tap != value) else { return };
        differs = true;
        if tap.shape() != value.shape() {
            killed = Some((pass, at, Place { row: 0, col: 0 }));
            return;
        }
        let operands: Vec<Bounded> = call.operands().into_iter().cloned().map(Bounded::exact).collect();
        match expect(at, &call.with(&operands), contract, Truth::Image) {
            Ok(expected) => {
                let values: Vec<f32> = tap.iter().copied().collect();
                let name = format!("{}.{at}", names[pass]);
                let result = judge(&name, tap.shape(), &values, &expected, &budget);
                if result.verdict == Verdict::Failed || result.less_precise() {
                    let first = result.first_wrong.map(|wrong| Place { row: wrong.row, col: wrong.col });
                    killed = Some((pass, at, first.unwrap_or(result.worst)));
                }
            }
            Err(found) => drop(error.get_or_insert(found)),
        }
    };
    honest.beside(contract, &taps, &mut compare)?;
    if let Some(error) = error {
        return Err(error);
    }
    Ok(match killed {
        Some((pass, at, place)) => Found::Killed { pass: names[pass].clone(), at, place },
        None if differs => Found::Blind { why: "differs by less than the limit for the declared rounding" },
        None => Found::Blind { why: "gives the same bits on this prompt" },
    })
}

fn collect(package: &str, tried: Vec<(&Edit, Option<Found>)>) -> Audit {
    let mut audit = Audit { package: package.to_string(), ..Audit::default() };
    for (edit, found) in tried {
        let (package, mutant) = (package.to_string(), edit.mutant.name());
        audit.mutants += usize::from(found.is_some());
        match found {
            None => audit.not_applicable.push(NotApplicable { mutant, needs: edit.mutant.needs }),
            Some(Found::Killed { pass, at, place }) => {
                audit.killed += 1;
                let (site, verdict_site) = (at.to_string(), format!("{pass}.{at}"));
                audit.kills.push(Kill { package, mutant, site, verdict_site, at: place, explained: None });
            }
            Some(Found::Blind { why }) => audit.survivors.push(Survivor {
                package,
                mutant,
                sites: vec!["the package".into()],
                why: why.to_string(),
                change: format!("a prompt or data on which it matters: {}", edit.mutant.needs),
            }),
        }
    }
    audit
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::edits::Source;
    use fixtures::seeded;
    use std::sync::Arc;

    fn found(name: &str, prompt: usize) -> Audit {
        let seeded = seeded::named(name).unwrap();
        let (config, ids) = (seeded.config.clone(), seeded.prompt[..prompt].to_vec());
        let target = Source { config, tensors: Arc::new(seeded), allowed: vec![] };
        let (_, model) = target.model().unwrap();
        let contract = Contract::named("int8").unwrap();
        audit_edits(name, &Sources { target, draft: None }, &model, &ids, 0, &contract).unwrap()
    }

    // Windows of 8 in two of three layers: nine keys are needed to see that one is left out.
    #[test]
    fn a_short_prompt_hides_an_ignored_window() {
        let whys = |audit: &Audit| {
            let off = audit.survivors.iter().find(|s| s.mutant == "cfg-window:off");
            off.map(|survivor| survivor.why.clone())
        };
        let short = found("heads-8-2-windows", 8);
        assert_eq!(whys(&short).as_deref(), Some("gives the same bits on this prompt"));
        assert_eq!(whys(&found("heads-8-2-windows", 9)), None);
        let theta = short.kills.iter().find(|kill| kill.mutant == "cfg-rope-theta:1e4").unwrap();
        assert_eq!(theta.verdict_site, "prefill.rope.cos");
    }
}
