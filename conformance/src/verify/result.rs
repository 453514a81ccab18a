//! What verifying one package gives.

use super::{Baseline, LayerBudget, Options, Pieces, Repeat};
use crate::cost::CostPerToken;
use crate::draft::passes::LoopResult;
use crate::edits::AsIf;
use crate::extract::FailedOp;
use crate::judge::{Mismatch, SiteResult, Verdict};
use crate::mutants::explain::Explanation;
use crate::routing::Swap;
use serde::Serialize;

/// The reference against its golden.
#[derive(Clone, Debug, Serialize)]
pub struct ReferenceResult {
    /// PASSED, SKIPPED or BROKEN.
    pub verdict: Verdict,
    /// Where the golden is, or why there is none.
    pub golden: String,
    /// Equal and compared positions.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub argmax_equal: Option<(usize, usize)>,
    /// Largest KL(golden || reference) in nats.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kl_max: Option<f64>,
    /// The site nearest to its limit, or furthest beyond it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub worst: Option<WorstSite>,
    /// Number of taps compared.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub taps: Option<usize>,
    /// What is wrong, where the verdict is BROKEN.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
}

impl ReferenceResult {
    /// There is nothing to hold the reference to.
    pub(super) fn skipped() -> Self {
        Self {
            verdict: Verdict::Skipped,
            golden: "none for this prompt".into(),
            argmax_equal: None,
            kl_max: None,
            worst: None,
            taps: None,
            reason: None,
        }
    }
}

/// A site with its share of the limit.
#[derive(Clone, Debug, Serialize)]
pub struct WorstSite {
    /// The tap.
    pub site: String,
    /// |difference| over the limit.
    pub ratio: f64,
}

/// The subject's logits against the reference's.
#[derive(Clone, Debug, Serialize)]
pub struct LogitsResult {
    /// PASSED, NEAR_TIE or FAILED.
    pub verdict: Verdict,
    /// Positions with the same token (near ties included in neither), and positions.
    pub argmax_equal: (usize, usize),
    /// Flips where the margin is within four standard deviations of the difference.
    pub near_ties: usize,
    /// Largest KL(reference || subject) in nats.
    pub kl_max: f64,
    /// Every flip.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub flips: Vec<Flip>,
    /// Experts that the subject took for others within rounding, where tokens flip.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub swaps: Vec<Swap>,
}

/// A position whose largest logit is another one.
#[derive(Clone, Debug, Serialize)]
pub struct Flip {
    /// The pass.
    pub pass: String,
    /// Row of the pass.
    pub row: usize,
    /// The reference's token.
    pub expected: usize,
    /// The subject's token.
    pub found: usize,
    /// The reference's margin between the two.
    pub margin: f64,
    /// Margin over the standard deviation of the difference.
    pub sigmas: f64,
    /// Whether that is within four.
    pub near_tie: bool,
    /// Whether `sigmas` is of the reference that followed the subject's experts, see [`LogitsResult::swaps`].
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub rerouted: bool,
}

/// The first wrong site.
#[derive(Clone, Debug, Serialize)]
pub struct FirstFailure {
    /// The tap.
    pub site: String,
    /// The first wrong element, where single elements are wrong.
    #[serde(flatten)]
    pub element: Option<Mismatch>,
    /// What of the tensor is wrong.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pattern: Option<String>,
}

/// What was judged as one: everything behind `from` up to `to`.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Span {
    /// The last exposed site before, or nothing where it is the tokens.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub from: Option<String>,
    /// The judged site.
    pub to: String,
}

/// The result for one package and prompt.
#[derive(Clone, Debug, Serialize)]
pub struct PackageResult {
    /// The package.
    pub package: String,
    /// Which prompt of the file, where there is one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompt: Option<usize>,
    /// The worst of all parts.
    pub verdict: Verdict,
    /// In a sentence, where the verdict needs one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// The subject.
    pub subject: String,
    /// The contract it was judged under.
    pub contract: String,
    /// The reference part.
    pub reference: ReferenceResult,
    /// The logits part.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub logits: Option<LogitsResult>,
    /// Every judged tap, in the order of the data flow.
    pub sites: Vec<SiteResult>,
    /// Sites of the reference that the subject does not expose, without the pass.
    pub not_exposed: Vec<String>,
    /// Sites judged together with those before them that the subject does not expose.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub spans: Vec<Span>,
    /// What the subject showed and no site was found for.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub unmatched: Vec<String>,
    /// What the subject showed and could not be used.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub problems: Vec<String>,
    /// What else there is to know about the subject.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub notes: Vec<String>,
    /// The speculative loop of a pair on the NPU path.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub draft: Option<LoopResult>,
    /// The first wrong site.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub first_failure: Option<FirstFailure>,
    /// What it computes instead.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub explanation: Option<Explanation>,
    /// Which edit of the package the first wrong site agrees with.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub as_if: Option<AsIf>,
    /// Costs of a step.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cost: Option<CostPerToken>,
    /// What changed between runs, where the subject was run more than once.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub repeat: Option<Repeat>,
    /// What became of the prompt fed in pieces.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub pieces: Vec<Pieces>,
    /// The same sites of another subject.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub baseline: Option<Baseline>,
    /// What every layer's own error does to the logits.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub budget: Option<LayerBudget>,
    /// The site that the mutant was applied at, where it was applied at one site.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mutated: Option<String>,
    /// The first failing op, where it was asked for.
    #[serde(skip)]
    pub failed_op: Option<FailedOp>,
    /// Where the limits come from.
    pub limits: String,
    /// The command that shows it again.
    pub repro: String,
    /// Relative drift of every tap from the free-running reference, where pictures were asked for.
    #[serde(skip)]
    pub inherited: Vec<(String, f64)>,
    /// Every position's margin, where pictures were asked for.
    #[serde(skip)]
    pub positions: Vec<Position>,
}

/// The logits of one position.
#[derive(Clone, Debug, Serialize)]
pub struct Position {
    /// The pass.
    pub pass: String,
    /// Row of the pass.
    pub row: usize,
    /// The reference's margin between its two largest logits.
    pub margin: f64,
    /// KL(reference || subject) in nats.
    pub kl: f64,
    /// Whether the subject has the same token.
    pub equal: bool,
}

impl PackageResult {
    /// Takes what the reference was held to, and its verdict where that is worse.
    pub fn hold(&mut self, reference: ReferenceResult) {
        self.verdict = self.verdict.max(reference.verdict);
        if self.reason.is_none() {
            self.reason.clone_from(&reference.reason);
        }
        self.reference = reference;
    }

    /// Before anything is known.
    pub(super) fn blank(package: &str, subject: String, options: &Options, repro: String) -> Self {
        Self {
            package: package.to_string(),
            prompt: None,
            verdict: Verdict::Passed,
            reason: None,
            subject,
            contract: options.contract.name.clone(),
            reference: ReferenceResult::skipped(),
            logits: None,
            sites: Vec::new(),
            not_exposed: Vec::new(),
            spans: Vec::new(),
            draft: None,
            unmatched: Vec::new(),
            problems: Vec::new(),
            notes: Vec::new(),
            first_failure: None,
            explanation: None,
            as_if: None,
            cost: None,
            repeat: None,
            pieces: vec![],
            baseline: None,
            budget: None,
            mutated: None,
            failed_op: None,
            limits: String::new(),
            repro,
            inherited: Vec::new(),
            positions: Vec::new(),
        }
    }

    /// The verdict without the failures that are known: those of its parts that are left.
    ///
    /// What stopped the run, or could not be judged in it, stays.
    pub fn without_known_failures(&mut self) {
        if ![Verdict::Failed, Verdict::Drift].contains(&self.verdict) {
            return;
        }
        let parts = [self.reference.verdict]
            .into_iter()
            .chain(self.logits.iter().map(|logits| logits.verdict))
            .chain(self.sites.iter().map(|site| site.verdict))
            .chain((!self.problems.is_empty()).then_some(Verdict::Mistrusted));
        self.verdict = parts.max().unwrap_or(Verdict::Skipped);
        let known = |first: &FirstFailure| {
            self.sites.iter().any(|site| site.site == first.site && site.verdict == Verdict::Skipped)
        };
        if self.first_failure.as_ref().is_some_and(known) {
            let next = self.sites.iter().find(|site| site.verdict == Verdict::Failed);
            self.first_failure = next.map(|site| FirstFailure {
                site: site.site.clone(),
                element: site.first_wrong,
                pattern: site.pattern.clone(),
            });
            (self.explanation, self.as_if) = (None, None);
        }
    }

    /// The exit code of this result alone.
    pub fn exit_code(&self) -> u8 {
        let drifts = self.sites.iter().any(SiteResult::less_precise);
        match self.verdict {
            Verdict::Passed | Verdict::Skipped | Verdict::NearTie => 0,
            Verdict::Drift => u8::from(drifts),
            Verdict::Failed => 1,
            Verdict::NotSupported | Verdict::Mistrusted => 3,
            Verdict::Broken => 4,
            Verdict::Crashed => 5,
        }
    }
}
