//! The reference against its golden.

use super::{Loaded, ReferenceResult, WorstSite};
use crate::draft::{self, Pair};
use crate::golden_gate::{self, GateError, GoldenGate};
use crate::judge::Verdict;
use crate::passes::Pass;
use crate::topk_gate;
use golden::{Dump, TopKRun};
use spec::NonFinite;

/// Why a golden is at fault, or the gate's result.
///
/// The golden of a pair is made of draft passes: target and draft are held to it together.
pub(super) fn reference_part(loaded: &Loaded, golden: Option<&Dump>) -> Result<ReferenceResult, NonFinite> {
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
pub(super) fn topk_part(
    loaded: &Loaded,
    run: &TopKRun,
    passes: &[Pass],
    logits: &[Vec<f32>],
) -> ReferenceResult {
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
