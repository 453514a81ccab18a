//! A subject's draft passes, judged site by site like a model's.

use super::Pair;
use crate::contract::Contract;
use crate::follow::{Follow, PassTaps, View, budget};
use crate::judge::{SiteResult, Verdict};
use crate::mutants::explain::Explanation;
use crate::mutants::{MutantOps, Selection};
use crate::record::Record;
use crate::variance::Bounded;
use ndarray::{Axis, Slice};
use reference::models::{Borrowed, Context, Tapped};
use reference::{Ops, Plain, Tensor};
use spec::{NonFinite, Site};

/// Who runs the draft.
pub enum Runner<'a> {
    /// The reference itself.
    Reference,
    /// An honest subject of a contract, but for one mutant.
    Mutant(&'a Selection),
}

/// What came of the draft passes.
pub struct Judged {
    /// Every judged tap, in the order of the data flow.
    pub sites: Vec<SiteResult>,
    /// Why the first failure failed.
    pub explanation: Option<Explanation>,
    /// The sites at which the mutant has been applied.
    pub applied: Vec<Site>,
}

/// The target's part in a draft pass: text, tapped rows, table and head, from the reference.
pub(crate) struct Ground {
    text: Vec<u32>,
    taps: Vec<Tensor>,
    borrowed: Borrowed,
    proposals: usize,
}

impl Ground {
    pub(crate) fn of(pair: &Pair, text: &[u32]) -> Result<Ground, NonFinite> {
        let mut plain = Plain::default();
        let (ids, layers) = (&pair.draft.config.target_layer_ids, pair.config.num_hidden_layers());
        let mut ops = Tapped::new(&mut plain, ids, layers, pair.last_tap);
        pair.target.pass(&mut ops, &mut pair.target.fresh(), text);
        let taps = ops.taps().expect("every tapped layer has run");
        let (mut borrowed, own) = ops.borrowed(1.0).expect("a pass embeds tokens and ends in a head");
        borrowed.scale = pair.embedding_scale(own).value;
        plain.check()?;
        let proposals = pair.draft.config.block_size - 1;
        Ok(Ground { text: text.to_vec(), taps, borrowed, proposals })
    }

    /// One pass at `anchor` of any interpretation whose state has seen the rows before `from`.
    pub(crate) fn pass<O: Ops>(
        &self,
        pair: &Pair,
        ops: &mut O,
        state: &mut reference::models::DraftState<O::Tensor>,
        anchor: usize,
        tensor: impl Fn(Tensor) -> O::Tensor,
    ) {
        let rows = state.position..anchor;
        let cut = |tap: &Tensor| {
            let rows = tap.slice_axis(Axis(0), Slice::from(rows.clone())).to_owned().into_shared();
            tensor(rows)
        };
        let new: Vec<O::Tensor> = self.taps.iter().map(cut).collect();
        let context = Context { taps: &new, rows: rows.len(), window: pair.window };
        pair.draft.pass(ops, state, &self.borrowed, context, self.text[anchor], self.proposals);
    }
}

/// Runs a block behind each of `anchors`, rising positions of `text`, and judges every site that `judged`
/// lets through. Context rows are the reference's, so that the draft answers for its own errors only.
pub fn judge(
    pair: &Pair,
    text: &[u32],
    anchors: &[usize],
    runner: Runner,
    contract: &Contract,
    view: View,
    judged: &dyn Fn(&str) -> bool,
) -> Result<Judged, NonFinite> {
    let ground = Ground::of(pair, text)?;
    let (mut record, mut state) = (Record::default(), pair.draft.fresh());
    let mut applied = Vec::new();
    let mut mutant = match runner {
        Runner::Reference => None,
        Runner::Mutant(selection) => Some(MutantOps::new(contract, selection)),
    };
    let mut taps: Vec<PassTaps> = Vec::new();
    for &anchor in anchors {
        let values = match &mut mutant {
            None => {
                ground.pass(pair, &mut record, &mut state, anchor, |rows| rows);
                record.take()?
            }
            Some(ops) => {
                ground.pass(pair, ops, &mut state, anchor, |rows| rows);
                ops.take()?
            }
        };
        taps.push(values.into_iter().collect());
    }
    if let Some(ops) = &mutant {
        applied.extend(&ops.applied);
    }
    let all = taps.iter().enumerate().flat_map(|(n, taps)| {
        taps.iter().filter(move |(site, _)| judged(&format!("pass{n}.{site}"))).map(|(site, t)| (*site, t))
    });
    let budget = budget(all);
    let mut result = Judged { sites: Vec::new(), explanation: None, applied };
    let mut state = pair.draft.fresh::<Bounded>();
    for (n, (taps, &anchor)) in taps.iter().zip(anchors).enumerate() {
        let name = format!("pass{n}");
        let failed = result.sites.iter().any(|site| site.verdict == Verdict::Failed);
        let mut follow = Follow::new(contract, budget, view, &name, taps, judged, !failed);
        ground.pass(pair, &mut follow, &mut state, anchor, Bounded::exact);
        follow.check()?;
        result.sites.append(&mut follow.results);
        result.explanation = result.explanation.or(follow.explanation.take());
    }
    Ok(result)
}
