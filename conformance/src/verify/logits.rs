//! The tokens that a subject chooses against the reference's.

use super::{Flip, Loaded, LogitsResult};
use crate::contract::Contract;
use crate::follow::PassTaps;
use crate::golden_gate::{argmax, kl};
use crate::judge::Verdict;
use crate::passes::Pass;
use crate::variance::{Bounded, Truth, Variance};
use spec::{NonFinite, Site};

/// Standard deviations of the logit difference within which a flip is a near tie.
pub const NEAR_TIE_SIGMAS: f64 = 4.0;

/// The subject's tokens against the reference's, in the passes whose logits it shows; `stored` is a variance
/// that comes from how they were stored. The other variances are computed only where a token flips.
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
