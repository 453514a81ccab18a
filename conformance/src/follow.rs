//! `Follow`: judge each site that a subject exposes, then go on from the subject's own value.
//!
//! So every site shows the error that the subject made there, and not what it inherited.

use crate::contract::{Contract, Product, decoded_image};
use crate::edits::Wrong;
use crate::extract::{FailedOp, described};
use crate::judge::{Budget, SiteResult, Verdict, judge, rows_and_columns};
use crate::mutants::History;
use crate::mutants::explain::{Explanation, Hidden, explain, explain_attention, floored};
use crate::routing;
use crate::variance::{Bounded, Expected, Truth, expect, poisoned};
use rayon::prelude::*;
use reference::{Call, Ops, Tensor};
use spec::families::Linear;
use spec::{NonFinite, Site};

/// Rows of an image that are compared at a time, so that no whole matrix is held decoded.
const IMAGE_ROWS: usize = 256;

pub use crate::taps::PassTaps;

/// A subject's own image of the weights behind a site.
pub struct Imaged {
    /// The site.
    pub site: Site,
    /// The routed expert that the weights are of.
    pub expert: Option<usize>,
    /// The weights, decoded from the image.
    pub weights: spec::Matrix,
}

/// Whether a site's error is its own or all that has come down to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum View {
    /// Continue from the subject's values.
    Own,
    /// Continue from the reference's values; the variance adds up.
    Cumulative,
}

/// Follows a subject through one pass.
pub struct Follow<'a> {
    contract: &'a Contract,
    budget: Budget,
    view: View,
    pass: &'a str,
    taps: &'a PassTaps,
    /// Which sites are judged; the others are only followed.
    judged: &'a dyn Fn(&str) -> bool,
    /// Whether a failure is still to be explained: only the first is.
    explain: bool,
    /// The subject's own images of the weights behind its linear sites, to be checked against the rule of
    /// the contract.
    pub images: &'a [Imaged],
    /// The judged sites, in the order of the data flow.
    pub results: Vec<SiteResult>,
    /// Sites of the reference that the subject does not expose.
    pub not_exposed: Vec<Site>,
    /// Judged sites behind sites that the subject does not expose, each with the last exposed site before
    /// it in the order of the data flow: what was judged is all that lies between the two.
    pub spans: Vec<(Site, Option<Site>)>,
    /// The last exposed site, and whether sites behind it were not exposed.
    gap: (Option<Site>, bool),
    /// The steps of attention before its context, where the subject shows none of them.
    hidden: Option<Hidden>,
    /// Whether the first failing op is to be kept with all that it was judged on.
    pub extract: bool,
    /// That op.
    pub failed: Option<FailedOp>,
    /// Why the first failure failed.
    pub explanation: Option<Explanation>,
    /// The first failure itself.
    pub wrong: Option<Wrong>,
    /// What the subject computed so far, or the reference where it does not show it.
    history: History,
    error: Option<NonFinite>,
}

impl<'a> Follow<'a> {
    /// Follows `taps` through the pass called `pass`.
    pub fn new(
        contract: &'a Contract,
        budget: Budget,
        view: View,
        pass: &'a str,
        taps: &'a PassTaps,
        judged: &'a dyn Fn(&str) -> bool,
        explain: bool,
    ) -> Self {
        let (results, not_exposed) = (Vec::new(), Vec::new());
        Self {
            contract,
            budget,
            view,
            pass,
            taps,
            judged,
            explain,
            images: &[],
            results,
            not_exposed,
            spans: Vec::new(),
            gap: (None, false),
            hidden: None,
            extract: false,
            failed: None,
            explanation: None,
            wrong: None,
            history: History::new(),
            error: None,
        }
    }

    /// The first weight found not to be finite.
    pub fn check(&mut self) -> Result<(), NonFinite> {
        self.error.take().map_or(Ok(()), Err)
    }

    /// Checks the subject's image of a weight value for value: it must be what the contract's rule makes
    /// of the package's weight.
    ///
    /// Where no format is declared there is no rule.
    fn compare_image(&mut self, at: Site, call: &Call<Bounded>) -> Result<(), NonFinite> {
        match call {
            _ if self.contract.linear == Product::Exact => Ok(()),
            Call::Linear { w, .. } => self.compare_one_image(at, None, w),
            Call::ExpertLinear { experts, .. } => {
                experts.iter().enumerate().try_for_each(|(n, w)| self.compare_one_image(at, Some(n), w))
            }
            _ => Ok(()),
        }
    }

    fn compare_one_image(&mut self, at: Site, expert: Option<usize>, w: &Linear) -> Result<(), NonFinite> {
        let of = |image: &&Imaged| image.site == at && image.expert == expert;
        let Some(Imaged { weights: image, .. }) = self.images.iter().find(of) else { return Ok(()) };
        let name = expert.map_or(format!("image.{at}"), |expert| format!("image.{at}.{expert}"));
        let (out, inner) = (w.weight.out(), w.weight.inner());
        let found = [image.out(), image.inner()];
        if found != [out, inner] {
            self.results.push(SiteResult::misshapen(&name, &found, &[out, inner]));
            return Ok(());
        }
        let product = self.contract.product_at(at);
        let starts: Vec<usize> = (0..out).step_by(IMAGE_ROWS).collect();
        let wrong = starts.into_par_iter().find_map_first(|start| {
            let rows = start..(start + IMAGE_ROWS).min(out);
            let rule = decoded_image(&w.weight.rows(rows.clone()), product);
            match rule.and_then(|rule| Ok((rule, image.rows(rows.clone()).to_values()?))) {
                Ok((rule, values)) if rule == values => None,
                other => Some(other.map(|(rule, values)| (start, rule, values))),
            }
        });
        let Some((start, rule, values)) = wrong.transpose()? else { return Ok(()) };
        let shape = [values.len() / inner.max(1), inner];
        let zero = ndarray::ArrayD::zeros(ndarray::IxDyn(&shape));
        let rule = rule.into_iter().map(f64::from).collect();
        let r = ndarray::ArrayD::from_shape_vec(ndarray::IxDyn(&shape), rule).expect("one value a weight");
        let expected = Expected { r, variance: zero.clone(), bound: zero, calibrated: false };
        let mut result = judge(&name, &shape, &values, &expected, &self.budget);
        result.worst.row += start;
        if let Some(first) = &mut result.first_wrong {
            first.row += start;
        }
        self.results.push(result);
        Ok(())
    }

    /// Keeps the steps of attention that the subject does not show.
    fn note_hidden(&mut self, at: Site, call: &Call<Bounded>) {
        if self.taps.contains(&at) {
            return;
        }
        Hidden::note(&mut self.hidden, at, call);
    }

    fn compare(&mut self, at: Site, call: &Call<Bounded>, subject: &Tensor, expected: &Expected) {
        let name = format!("{}.{at}", self.pass);
        if !(self.judged)(&name) {
            return;
        }
        if !fits(subject, expected) {
            self.results.push(SiteResult::misshapen(&name, subject.shape(), expected.r.shape()));
            return;
        }
        let choices = match call {
            Call::RouterIndex { .. } => {
                let reference = expected.r.mapv(|v| v as f32).into_shared();
                routing::compare(&name, call, &reference, subject)
            }
            _ => None,
        };
        let values: Vec<f32> = choices.as_ref().map_or(subject, |c| &c.aligned).iter().copied().collect();
        let mut result = match missing_rows(subject, expected) {
            0 => judge(&name, subject.shape(), &values, expected, &self.budget),
            missing => judge(&name, subject.shape(), &values, &expected.from_row(missing), &self.budget),
        };
        result.shift_rows(missing_rows(subject, expected));
        if let Some(swap) = choices.as_ref().and_then(|choices| choices.swaps.first())
            && result.verdict < Verdict::NearTie
        {
            result.verdict = Verdict::NearTie;
            result.pattern = Some(swap.to_string());
        }
        if let (before, true) = self.gap {
            self.spans.push((at, before));
        }
        if result.verdict == Verdict::Failed && self.explain {
            self.explain = false;
            let (contract, history) = (self.contract, &self.history);
            self.explanation = match &self.hidden {
                Some(hidden) => explain_attention(hidden, at, call, subject, contract, history),
                None => explain(at, call, subject, contract, history),
            };
            if missing_rows(subject, expected) == 0 {
                self.wrong = Some(Wrong {
                    at,
                    subject: subject.clone(),
                    honest: expected.r.mapv(|v| v as f32).into_shared(),
                    spread: floored(expected),
                });
            }
            if self.extract {
                self.failed = Some(FailedOp {
                    tap: name,
                    call: described(call, expected.r.shape()),
                    subject: continued(subject, expected.clone()).value,
                    expected: expected.clone(),
                    budget: self.budget,
                });
            }
        }
        self.results.push(result);
    }
}

impl Ops for Follow<'_> {
    type Tensor = Bounded;

    fn run(&mut self, at: Site, call: Call<'_, Bounded>) -> Bounded {
        if let Err(error) = self.compare_image(at, &call) {
            self.error.get_or_insert(error);
        }
        let expected = match expect(at, &call, self.contract, Truth::Image) {
            Ok(expected) => expected,
            Err(error) => {
                self.error.get_or_insert(error);
                return poisoned(&call);
            }
        };
        self.note_hidden(at, &call);
        let subject = self.taps.get(&at).map(|subject| with_axes_of(subject, expected.r.shape()));
        match &subject {
            Some(subject) => {
                self.compare(at, &call, subject, &expected);
                self.hidden = None;
                self.gap = (Some(at), false);
                if self.view == View::Own && fits(subject, &expected) {
                    let continued = continued(subject, expected);
                    self.history.note(at, &call, continued.value.clone());
                    return continued;
                }
            }
            None => {
                self.not_exposed.push(at);
                self.gap.1 = true;
            }
        }
        let mut value = expected.r.mapv(|v| v as f32).into_shared();
        // What comes behind a choice stands in its order.
        if let Some(choices) =
            subject.and_then(|subject| routing::compare(self.pass, &call, &value, &subject))
        {
            value = choices.followed;
        }
        self.history.note(at, &call, value.clone());
        let exact = expected.variance.iter().all(|&v| v == 0.0);
        Bounded { value, variance: (!exact).then(|| expected.variance.into_shared()) }
    }
}

/// The subject's value with the axes of the site: an axis of length 1 behind the first does not count. (A norm over a
/// model's only key head is `[tokens, 1, head_dim]` in one program and `[tokens, head_dim]` in another.)
fn with_axes_of(subject: Tensor, wanted: &[usize]) -> Tensor {
    let longer = |shape: &[usize]| shape.iter().skip(1).copied().filter(|n| *n != 1).collect::<Vec<_>>();
    let found = subject.shape();
    if found.len() == wanted.len() || found.is_empty() || wanted.is_empty() || longer(found) != longer(wanted)
    {
        return subject;
    }
    let shape: Vec<usize> = found[..1].iter().chain(&wanted[1..]).copied().collect();
    subject.to_shape(shape).expect("as many values").into_owned().into_shared()
}

/// Whether the subject's value has the shape of the site, or that of its last rows; never of none.
fn fits(subject: &Tensor, expected: &Expected) -> bool {
    let (found, wanted) = (subject.shape(), expected.r.shape());
    found.len() == wanted.len()
        && found.get(1..) == wanted.get(1..)
        && found.first() <= wanted.first()
        && (!subject.is_empty() || expected.r.is_empty())
}

/// How many of the first rows the subject does not show.
fn missing_rows(subject: &Tensor, expected: &Expected) -> usize {
    let rows = |shape: &[usize]| shape.first().copied().unwrap_or(0);
    rows(expected.r.shape()).saturating_sub(rows(subject.shape()))
}

/// What the next op reads: the subject's value, exactly; the reference's with its variance in rows that the
/// subject does not show.
fn continued(subject: &Tensor, expected: Expected) -> Bounded {
    let missing = missing_rows(subject, &expected);
    if missing == 0 {
        return Bounded::exact(subject.clone());
    }
    let shown = ndarray::Slice::from(missing..);
    let (mut value, mut variance) = (expected.r.mapv(|v| v as f32), expected.variance);
    value.slice_axis_mut(ndarray::Axis(0), shown).assign(subject);
    variance.slice_axis_mut(ndarray::Axis(0), shown).fill(0.0);
    Bounded { value: value.into_shared(), variance: Some(variance.into_shared()) }
}

/// How many tests a run over taps of these shapes makes.
pub fn budget<'t>(taps: impl IntoIterator<Item = (Site, &'t [usize])>) -> Budget {
    let mut budget = Budget { elements: 0, groups: 0 };
    for (site, shape) in taps {
        let (rows, columns) = rows_and_columns(site.name, shape);
        budget.elements += shape.iter().product::<usize>();
        budget.groups += 1 + rows + columns + rows.div_ceil(16) * columns.div_ceil(32);
    }
    budget
}
