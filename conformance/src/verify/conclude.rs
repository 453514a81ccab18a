//! The verdict of the whole.

use super::{Loaded, Options, PackageResult};
use crate::judge::Verdict;
use spec::Weights;
use std::collections::BTreeSet;

/// The verdict of the whole: the worst of its parts, or MISTRUSTED where the parts could not have failed.
///
/// A subject of single ops is judged by those that it computes: it need not expose outputs.
pub(super) fn conclude(
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
