//! The same prompt in pieces: what a subject computes must not depend on how its rows are cut into passes.
//!
//! ```text
//! prefill(ids) = prefill(ids[..n]), prefill(ids[n..2n]), ...       n = 1 is step by step
//! ```
//!
//! Every way of feeding is a run of its own: all its sites are judged as those of the first run, with the state that
//! the pieces before have left, and its rows are held against those of the first run, byte by byte. Other bytes are told and
//! fail nothing, for a kernel of one row may add in another order than one of many; values beyond the contract fail.

use super::run::{Ran, once};
use super::sites::judge_sites;
use super::{Loaded, Options, PackageResult};
use crate::follow::PassTaps;
use crate::judge::Verdict;
use crate::passes::Pass;
use ndarray::Axis;
use reference::Tensor;
use serde::Serialize;
use spec::{NonFinite, Site};

/// One way of feeding the prompt.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Pieces {
    /// Tokens of a piece; the last may have fewer.
    pub tokens: usize,
    /// How many pieces that makes.
    pub pieces: usize,
    /// The worst verdict on a site of this run.
    pub verdict: Verdict,
    /// Sites of the prompt whose rows, or whose state behind the prompt, were held against those of the first run.
    pub compared: usize,
    /// Those of them that have other bytes, in the order of their names.
    pub changed: Vec<String>,
}

/// Feeds the prompt again in pieces of each size that cuts it.
pub(super) fn fed(
    loaded: &Loaded,
    options: &Options,
    passes: &[Pass],
    first: &Ran,
    result: &mut PackageResult,
) -> Result<(), NonFinite> {
    let prompt = &passes[0].ids;
    for &tokens in options.pieces.iter().filter(|&&tokens| tokens < prompt.len()) {
        let cut = prompt.chunks(tokens).enumerate();
        let cut: Vec<Pass> =
            cut.map(|(n, ids)| Pass { name: format!("piece{n}"), ids: ids.to_vec() }).collect();
        let pieces = cut.len();
        let all: Vec<Pass> = cut.into_iter().chain(passes[1..].iter().cloned()).collect();
        let ran = match once(loaded, options, None, None, &all) {
            Ok((ran, _)) => ran,
            Err(error) => {
                result.verdict = result.verdict.max(Verdict::Crashed);
                result.reason = Some(format!("fed in pieces of {tokens}: {error}"));
                return Ok(());
            }
        };
        let mut other = PackageResult::blank("", String::new(), options, String::new());
        judge_sites(loaded, options, &all, &ran, &mut other)?;
        let verdict = other.sites.iter().map(|site| site.verdict).max().unwrap_or(Verdict::Passed);
        let (compared, changed) = held_against(&first.taps[0], &ran.taps[..pieces]);
        result.pieces.push(Pieces { tokens, pieces, verdict, compared, changed });
        if verdict > result.verdict {
            result.verdict = verdict;
            result.reason = Some(format!("fed in pieces of {tokens} it is worse than at once"));
            (result.first_failure, result.explanation) = (other.first_failure, other.explanation);
            (result.sites, result.failed_op) = (other.sites, other.failed_op);
        }
    }
    Ok(())
}

/// How many sites of the prompt can be compared, and which differ.
fn held_against(whole: &PassTaps, pieces: &[PassTaps]) -> (usize, Vec<String>) {
    let (mut compared, mut changed) = (0, Vec::new());
    for site in whole.sites() {
        if let Some(same) = same_bytes(*site, whole, pieces) {
            compared += 1;
            if !same {
                changed.push(site.to_string());
            }
        }
    }
    (compared, changed)
}

/// Whether the rows of all pieces together, or else the state behind the last of them, are those of the whole; nothing
/// where neither has its shape: scores, whose rows grow with the keys.
fn same_bytes(site: Site, whole: &PassTaps, pieces: &[PassTaps]) -> Option<bool> {
    let whole = whole.get(&site)?;
    let parts: Vec<Tensor> = pieces.iter().map(|taps| taps.get(&site)).collect::<Option<_>>()?;
    let views: Vec<_> = parts.iter().map(|part| part.view()).collect();
    let rows = ndarray::concatenate(Axis(0), &views).ok().filter(|rows| rows.shape() == whole.shape());
    let found = match rows {
        Some(rows) => rows.into_shared(),
        None => parts.last().filter(|last| last.shape() == whole.shape())?.clone(),
    };
    Some(whole.iter().zip(&found).all(|(a, b)| a.to_bits() == b.to_bits()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use ndarray::{ArrayD, IxDyn};

    fn taps(site: Site, shape: &[usize], first: f32) -> PassTaps {
        let count = shape.iter().product::<usize>();
        let values = (0..count).map(|n| first + n as f32).collect();
        let mut taps = PassTaps::default();
        taps.insert(site, ArrayD::from_shape_vec(IxDyn(shape), values).unwrap().into_shared());
        taps
    }

    // Rows 0 1 2 of one column: as 0 1 and 2 they are the same rows, as 0 1 and 5 they are not.
    #[test]
    fn rows_of_pieces_follow_each_other() {
        let site = Site::model("embed");
        let whole = taps(site, &[3, 1], 0.0);
        let pieces = |last| [taps(site, &[2, 1], 0.0), taps(site, &[1, 1], last)];
        assert_eq!(held_against(&whole, &pieces(2.0)), (1, vec![]));
        assert_eq!(held_against(&whole, &pieces(5.0)), (1, vec!["embed".to_string()]));
    }

    // A cache holds 2 rows behind the first piece and 3 behind the second, which is what counts; scores of 2 and 3
    // keys are no rows of a whole.
    #[test]
    fn state_is_that_of_the_last_piece() {
        let cache = Site::layer(0, "k_cache");
        let whole = taps(cache, &[3, 1], 0.0);
        assert_eq!(
            held_against(&whole, &[taps(cache, &[2, 1], 0.0), taps(cache, &[3, 1], 0.0)]),
            (1, vec![])
        );
        let scores = Site::layer(0, "attn_scores");
        let pieces = [taps(scores, &[1, 2, 2], 0.0), taps(scores, &[1, 1, 3], 0.0)];
        assert_eq!(held_against(&taps(scores, &[1, 3, 3], 0.0), &pieces), (0, vec![]));
    }
}
