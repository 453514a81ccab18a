//! `check`: does a subject compute each op right, on every shape and value class?

mod forms;
mod host;
mod npu;
pub mod report;
pub mod vectors;

use crate::cases::{Case, Dims, Setting, Suite};
use crate::contract::Contract;
use crate::emulate::Emulate;
use crate::judge::{Budget, Mismatch, SiteResult, Verdict, judge};
use crate::mutants::explain::{Explanation, Hidden, explain, explain_attention};
use crate::mutants::{History, MutantOps};
use crate::subject::OneOp;
use crate::variance::{Bounded, Expected, Truth, expect};
use fixtures::random::SplitMix64;
use ndarray::ArrayD;
use reference::{Call, Ops, Plain, Tensor};
use serde::Serialize;
use spec::Site;

pub use npu::NpuOps;

/// What a subject makes of one op.
#[derive(Clone, Debug, PartialEq)]
pub enum Given {
    /// Its result.
    Values(Tensor),
    /// It has no such op.
    NotSupported,
    /// It stopped, and why.
    Stopped(String),
}

/// Something that computes single ops.
// There is one of them in a run, so the room that the largest takes costs nothing.
#[allow(clippy::large_enum_variant)]
pub enum OpSubject<'a> {
    /// The reference.
    Reference(Plain),
    /// An honest subject of a contract.
    Emulated(Emulate<'a>),
    /// The same, but for one mutant.
    Mutant(MutantOps<'a>),
    /// The NPU path.
    Npu(NpuOps),
    /// A command or a library.
    Outside(OneOp<'a>),
    /// A result that was brought back.
    Brought(vectors::Brought),
}

impl OpSubject<'_> {
    /// Before a case: forgets steps of an attention that a case before left behind.
    fn begin(&mut self) {
        match self {
            OpSubject::Npu(npu) => npu.begin(),
            OpSubject::Outside(kernel) => kernel.begin(),
            OpSubject::Brought(brought) => brought.begin(),
            OpSubject::Reference(_) | OpSubject::Emulated(_) | OpSubject::Mutant(_) => {}
        }
    }

    /// Why it has no answer to a call, where that is known.
    fn why_not(&self, call: &Call<Tensor>) -> Option<&'static str> {
        matches!(self, OpSubject::Npu(_)).then(|| host::why_not(call)).flatten()
    }

    /// Its result of a call.
    pub fn run(&mut self, at: Site, call: &Call<Tensor>) -> Given {
        match self {
            OpSubject::Reference(plain) => Given::Values(plain.value(call)),
            OpSubject::Emulated(honest) => Given::Values(honest.value(at, call)),
            OpSubject::Mutant(wrong) => Given::Values(wrong.run(at, call.clone())),
            OpSubject::Npu(npu) => npu.run(call),
            OpSubject::Brought(brought) => brought.run(call),
            OpSubject::Outside(kernel) => match kernel.run(at, call) {
                Ok(Some(value)) => Given::Values(value),
                Ok(None) => Given::NotSupported,
                Err(reason) => Given::Stopped(reason),
            },
        }
    }
}

/// The result of one case.
#[derive(Clone, Debug, Serialize)]
pub struct CaseResult {
    /// The case.
    pub case: &'static str,
    /// What it is meant to catch.
    pub catches: &'static str,
    /// Its regime.
    pub suite: Suite,
    /// Its sizes.
    pub dims: String,
    /// PASSED, DRIFT, NOT_SUPPORTED, FAILED or CRASHED.
    pub verdict: Verdict,
    /// How many values.
    pub elements: usize,
    /// How many of them are beyond their own limit.
    pub wrong: usize,
    /// Largest |z|; in a structure case infinite where anything differs.
    pub z_max: f64,
    /// Root mean square of z.
    pub z_rms: f64,
    /// Whether a drift is towards less precision.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub less_precise: bool,
    /// The first wrong value.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub first_wrong: Option<Mismatch>,
    /// What of the result is wrong, or why there is none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pattern: Option<String>,
    /// The smallest sizes at which it still fails.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub shrunk: Option<String>,
    /// What it computes instead.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub explanation: Option<Explanation>,
    /// The command that shows the smallest failure again.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub repro: Option<String>,
}

/// How cases are run.
pub struct Options<'a> {
    /// The contract that the subject is judged under.
    pub contract: &'a Contract,
    /// The seed of all inputs.
    pub seed: u64,
    /// The arguments that name subject and contract on the command line.
    pub arguments: String,
}

/// The budget of false alarms: the limits hold for a run of a million values in a hundred thousand groups.
const BUDGET: Budget = Budget { elements: 1_000_000, groups: 100_000 };

/// Runs a case; a failure is shrunk and explained.
pub fn check(case: &Case, subject: &mut OpSubject, options: &Options) -> CaseResult {
    let mut explanation = None;
    let first = run(case, &case.dims, subject, options, Some(&mut explanation));
    let mut result = CaseResult {
        case: case.name,
        catches: case.catches,
        suite: case.suite,
        dims: case.dims.to_string(),
        verdict: Verdict::NotSupported,
        elements: 0,
        wrong: 0,
        z_max: 0.0,
        z_rms: 0.0,
        less_precise: false,
        first_wrong: None,
        pattern: None,
        shrunk: None,
        explanation,
        repro: None,
    };
    match first {
        Outcome::NotSupported(why) => {
            result.pattern = Some(why.unwrap_or(NO_SUCH_OP).into());
        }
        Outcome::Stopped(reason) => {
            (result.verdict, result.pattern) = (Verdict::Crashed, Some(reason));
            result.repro = Some(repro(case, &case.dims, options));
        }
        Outcome::Judged(judged) => {
            result.less_precise = judged.less_precise();
            result.verdict = judged.verdict;
            (result.elements, result.wrong) = (judged.elements, judged.wrong);
            (result.z_max, result.z_rms) = (judged.z_max, judged.z_rms);
            (result.first_wrong, result.pattern) = (judged.first_wrong, judged.pattern);
            if result.verdict == Verdict::Failed {
                let smallest = shrink(&case.dims, |dims| {
                    let again = run(case, dims, subject, options, None);
                    matches!(again, Outcome::Judged(judged) if judged.verdict == Verdict::Failed)
                });
                result.repro = Some(repro(case, &smallest, options));
                result.shrunk = Some(smallest.to_string());
            }
        }
    }
    result
}

/// What is said of a case whose op a subject does not have.
const NO_SUCH_OP: &str = "the subject has no such op";

enum Outcome {
    Judged(Box<SiteResult>),
    NotSupported(Option<&'static str>),
    Stopped(String),
}

fn run(
    case: &Case,
    dims: &Dims,
    subject: &mut OpSubject,
    options: &Options,
    why: Option<&mut Option<Explanation>>,
) -> Outcome {
    let setting = Setting { suite: case.suite, product: options.contract.linear };
    let (mut outcome, mut why) = (Outcome::NotSupported(None), why);
    let mut inside = Inside::default();
    let mut hidden = None;
    subject.begin();
    (case.build)(dims, setting, &mut SplitMix64::new(options.seed), &mut |at, call| {
        let operands = inside.operands(call);
        let bounded = call.with(&operands);
        let expected = match case.suite {
            Suite::Structure => exact(call),
            Suite::Rounding => expect(at, &bounded, options.contract, Truth::Image).ok(),
        };
        let Some(expected) = expected else { return };
        let value = match subject.run(at, call) {
            Given::Values(value) => value,
            Given::NotSupported => {
                Hidden::note(&mut hidden, at, &bounded);
                if let Outcome::NotSupported(reason) = &mut outcome {
                    *reason = subject.why_not(call);
                }
                inside.add(&expected);
                return;
            }
            Given::Stopped(reason) => {
                outcome = Outcome::Stopped(reason);
                return;
            }
        };
        if value.shape() != expected.r.shape() {
            outcome =
                Outcome::Stopped(format!("gave {:?}, expected {:?}", value.shape(), expected.r.shape()));
            return;
        }
        let values: Vec<f32> = value.iter().copied().collect();
        let judged = judge(&at.to_string(), value.shape(), &values, &expected, &BUDGET);
        // Of several calls of a case the worst counts.
        match &outcome {
            Outcome::Stopped(_) => return,
            Outcome::Judged(before) if before.verdict >= judged.verdict => return,
            _ => {}
        }
        if judged.verdict == Verdict::Failed
            && let Some(why) = why.as_deref_mut()
        {
            let (contract, history) = (options.contract, &History::new());
            *why = match &hidden {
                Some(hidden) => explain_attention(hidden, at, &bounded, &value, contract, history),
                None => explain(at, &bounded, &value, contract, history),
            };
        }
        outcome = Outcome::Judged(Box::new(judged));
    });
    outcome
}

/// Results of calls that the subject does not answer, which later calls of the case read: a subject that joins them rounds
/// on the way, and may.
#[derive(Default)]
struct Inside(Vec<Bounded>);

impl Inside {
    fn add(&mut self, expected: &Expected) {
        let value = expected.r.mapv(|v| v as f32).into_shared();
        self.0.push(Bounded { value, variance: Some(expected.variance.clone().into_shared()) });
    }

    /// The operands of a call, of which some are such results, and the others exact.
    fn operands(&self, call: &Call<Tensor>) -> Vec<Bounded> {
        let operand = |x: &Tensor| {
            let known = self.0.iter().find(|bounded| bounded.value == *x);
            known.cloned().unwrap_or_else(|| Bounded::exact(x.clone()))
        };
        call.operands().into_iter().map(operand).collect()
    }
}

/// The exact result, from which nothing may differ.
fn exact(call: &Call<Tensor>) -> Option<Expected> {
    let r = reference::ops::evaluate(call).ok()?;
    let zero = ArrayD::zeros(r.raw_dim());
    Some(Expected { r, variance: zero.clone(), bound: zero, calibrated: false })
}

/// The smallest sizes that still fail, one size after the other until none can be made smaller.
fn shrink(dims: &Dims, mut fails: impl FnMut(&Dims) -> bool) -> Dims {
    let mut smallest = dims.clone();
    loop {
        let before = smallest.clone();
        for n in 0..smallest.0.len() {
            let size = smallest.0[n].1;
            for candidate in [1, size / 4, size / 2, size - size / 4, size - 1] {
                let mut smaller = smallest.clone();
                smaller.0[n].1 = candidate;
                if candidate >= 1 && candidate < smallest.0[n].1 && fails(&smaller) {
                    smallest = smaller;
                    break;
                }
            }
        }
        if smallest == before {
            return smallest;
        }
    }
}

fn repro(case: &Case, dims: &Dims, options: &Options) -> String {
    let seed = options.seed;
    format!("karat check --case {}:{dims} --seed {seed}{}", case.name, options.arguments)
}

#[cfg(test)]
mod tests {
    use super::*;

    // Fails from 17 rows and 3 inputs on, whatever else.
    #[test]
    fn shrinking_ends_at_the_edge() {
        let dims = Dims(vec![("tokens", 129), ("in", 40), ("out", 17)]);
        let smallest = shrink(&dims, |d| d.get("tokens") >= 17 && d.get("in") >= 3);
        assert_eq!(smallest.to_string(), "tokens=17,in=3,out=1");
    }
}
