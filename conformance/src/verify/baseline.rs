//! Two subjects side by side: the first site that got worse.

use super::PackageResult;
use crate::judge::{SiteResult, Verdict};
use serde::Serialize;
use std::collections::BTreeMap;

/// A subject against another one that was there before.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Baseline {
    /// The other subject.
    pub subject: String,
    /// The contract that it was judged under.
    pub contract: String,
    /// Its verdict.
    pub verdict: Verdict,
    /// Sites that both show.
    pub compared: usize,
    /// Sites that got worse.
    pub worse: usize,
    /// Sites that got better.
    pub better: usize,
    /// The first of those that got worse, in the order of the data flow.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub first_worse: Option<Worse>,
}

/// A site that got worse.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Worse {
    /// The tap.
    pub site: String,
    /// Its verdict.
    pub verdict: Verdict,
    /// The other subject's.
    pub baseline_verdict: Verdict,
    /// Root mean square of its own error there.
    pub rms_abs: f64,
    /// The other subject's.
    pub baseline_rms_abs: f64,
}

/// How much larger the error of a site of `n` elements may be by chance.
///
/// Each rms of n independent errors spreads by 1/√(2n) of itself, their ratio by 1/√n; six of these, and a
/// tenth for what the model of independent errors leaves out, as in the limits of a single subject.
pub fn by_chance(n: usize) -> f64 {
    1.1 * (1.0 + 6.0 / (n.max(1) as f64).sqrt())
}

/// Whether the error of `a` is worse than that of `b`: by its verdict, else by its size.
fn worse(a: &SiteResult, b: &SiteResult) -> bool {
    let rank = |site: &SiteResult| match site.verdict {
        Verdict::Failed => 2,
        _ if site.less_precise() => 1,
        _ => 0,
    };
    let grown = a.rms_abs > by_chance(a.elements) * b.rms_abs || a.rms_abs.is_nan() && !b.rms_abs.is_nan();
    rank(a) > rank(b) || rank(a) == rank(b) && grown
}

impl Baseline {
    /// Compares a result with that of the subject before it, on the same package and prompt.
    pub fn new(result: &PackageResult, before: &PackageResult) -> Baseline {
        let old: BTreeMap<&str, &SiteResult> = before.sites.iter().map(|s| (&*s.site, s)).collect();
        let pairs: Vec<(&SiteResult, &SiteResult)> =
            result.sites.iter().filter_map(|new| Some((new, *old.get(&*new.site)?))).collect();
        let first = pairs.iter().find(|(new, old)| worse(new, old));
        Baseline {
            subject: before.subject.clone(),
            contract: before.contract.clone(),
            verdict: before.verdict,
            compared: pairs.len(),
            worse: pairs.iter().filter(|(new, old)| worse(new, old)).count(),
            better: pairs.iter().filter(|(new, old)| worse(old, new)).count(),
            first_worse: first.map(|(new, old)| Worse {
                site: new.site.clone(),
                verdict: new.verdict,
                baseline_verdict: old.verdict,
                rms_abs: new.rms_abs,
                baseline_rms_abs: old.rms_abs,
            }),
        }
    }
}
