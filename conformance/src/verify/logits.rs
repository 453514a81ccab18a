//! The tokens that a subject chooses against the reference's.

use super::{Flip, Loaded, LogitsResult};
use crate::contract::Contract;
use crate::follow::PassTaps;
use crate::golden_gate::{argmax, kl};
use crate::judge::Verdict;
use crate::passes::Pass;
use crate::routing;
use spec::{NonFinite, Site};

/// Standard deviations of the logit difference within which a flip is a near tie.
pub const NEAR_TIE_SIGMAS: f64 = 4.0;

/// The subject's tokens against the reference's, in the passes whose logits it shows; `stored` is a variance
/// that comes from how they were stored. The other variances are computed only where a token flips, of the
/// reference that follows the subject's experts where the choice is within rounding.
pub(super) fn judge_logits(
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
    let routing::Logits { passes: judged, swaps } = match flips.is_empty() {
        true => routing::Logits::default(),
        false => routing::logits(&loaded.model, contract, passes, taps)?,
    };
    let judged_values: Vec<Vec<f32>> = judged.iter().map(|l| l.value.iter().copied().collect()).collect();
    let flips: Vec<Flip> = flips
        .into_iter()
        .map(|(n, row, expected, found, margin, finite)| {
            // The best token of the reference that followed the subject's experts; without swaps it is `expected`.
            let values = &judged_values[n][row * vocab..][..vocab];
            let best = argmax(values);
            let gap = f64::from(values[best]) - f64::from(values[found]);
            let variance = |token: usize| judged[n].variance_at(row * vocab + token);
            let spread = (variance(best) + variance(found) + 2.0 * stored).sqrt();
            let near_tie = finite && gap <= NEAR_TIE_SIGMAS * spread;
            let sigmas = if gap == 0.0 { 0.0 } else { gap / spread };
            let pass = passes[n].name.clone();
            let rerouted = !swaps.is_empty();
            Flip { pass, row, expected, found, margin, sigmas, near_tie, rerouted }
        })
        .collect();
    let near_ties = flips.iter().filter(|flip| flip.near_tie).count();
    let verdict = match near_ties {
        _ if flips.is_empty() => Verdict::Passed,
        n if n == flips.len() => Verdict::NearTie,
        _ => Verdict::Failed,
    };
    Ok((argmax_equal.1 > 0).then_some(LogitsResult {
        verdict,
        argmax_equal,
        near_ties,
        kl_max,
        flips,
        swaps,
    }))
}
