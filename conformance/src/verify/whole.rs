//! The reference against whole numbers that were computed beside it, in i64.

use super::{ReferenceResult, WorstSite};
use crate::golden_gate::{Taps, run};
use crate::judge::Verdict;
use crate::passes::{Pass, teacher_forced};
use fixtures::integers::Trace;
use reference::Model;
use spec::{NonFinite, Site};

/// Runs the reference over `ids`, the first `prompt` of them in one pass and the others one by one, and holds every
/// value of the trace of `ids` to equality.
pub fn whole_numbers(
    model: &Model,
    ids: &[u32],
    prompt: usize,
    trace: &Trace,
) -> Result<ReferenceResult, NonFinite> {
    let passes = teacher_forced(&ids[..prompt], &ids[prompt..], ids.len() - prompt);
    let taps = run(model, &passes)?;
    let wrong = first_wrong(&passes, &taps, trace);
    let worst = wrong.as_ref().map_or(("prefill.logits", 0.0), |(tap, _)| (tap, f64::INFINITY));
    Ok(ReferenceResult {
        verdict: if wrong.is_some() { Verdict::Broken } else { Verdict::Passed },
        golden: "whole numbers in i64".into(),
        argmax_equal: wrong.is_none().then_some((ids.len(), ids.len())),
        kl_max: wrong.is_none().then_some(0.0),
        worst: Some(WorstSite { site: worst.0.to_string(), ratio: worst.1 }),
        taps: Some(passes.len() * trace.sites.len()),
        reason: wrong
            .map(|(tap, difference)| format!("reference and whole numbers differ at {tap}: {difference}")),
    })
}

/// The first tap that is not what the trace says, and how.
fn first_wrong(passes: &[Pass], taps: &Taps, trace: &Trace) -> Option<(String, String)> {
    let mut first = 0;
    for pass in passes {
        for (name, rows) in &trace.sites {
            let expected = rows[first..first + pass.ids.len()].iter().flatten();
            let site = Site::parse(name).expect("the trace has sites of the registry");
            let difference = match taps.get(&(pass.name.clone(), site)) {
                None => Some("the reference does not compute it".to_string()),
                Some(found) if found.len() != expected.clone().count() => {
                    Some(format!("{:?} values", found.shape()))
                }
                Some(found) => found
                    .iter()
                    .zip(expected)
                    .enumerate()
                    .find(|(_, (a, b))| a != b)
                    .map(|(n, (found, expected))| format!("value {n} is {found} and not {expected}")),
            };
            if let Some(difference) = difference {
                return Some((format!("{}.{name}", pass.name), difference));
            }
        }
        first += pass.ids.len();
    }
    None
}
