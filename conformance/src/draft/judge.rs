//! A subject's draft passes, judged site by site like a model's.

use super::Pair;
use crate::contract::Contract;
use crate::edits::{Program, Wrong};
use crate::extract::FailedOp;
use crate::follow::{Follow, Imaged, PassTaps, View, budget};
use crate::judge::{SiteResult, Verdict};
use crate::mutants::explain::Explanation;
use crate::mutants::{MutantOps, Selection};
use crate::record::Record;
use crate::subject::{Collect, SubjectError};
use crate::variance::Bounded;
use device::{Engine, Fault, Lent, NpuDraft, Switches};
use ndarray::{Axis, Slice};
use reference::models::{Borrowed, Context, Tapped};
use reference::{Ops, Plain, Tensor};
use spec::{NonFinite, Site};
use std::sync::Arc;

/// Who runs the draft.
pub enum Runner<'a> {
    /// The reference itself.
    Reference,
    /// An honest subject of a contract, but for one mutant.
    Mutant(&'a Selection),
    /// An honest subject of a contract that runs another pair: one whose draft was edited.
    Edited(&'a Pair),
    /// The NPU path on an engine, wrong on purpose where a fault is given.
    Npu(Engine, Option<Arc<dyn Fault>>),
}

/// What came of the draft passes.
pub struct Judged {
    /// Every judged tap, in the order of the data flow.
    pub sites: Vec<SiteResult>,
    /// Why the first failure failed.
    pub explanation: Option<Explanation>,
    /// The sites at which the mutant has been applied.
    pub applied: Vec<Site>,
    /// Sites of the reference that the subject does not expose, each with the pass.
    pub not_exposed: Vec<String>,
    /// The first wrong site, with the taps of the passes up to it.
    pub wrong: Option<(Wrong, Vec<PassTaps>)>,
    /// The first failing op, where it was asked for.
    pub failed: Option<FailedOp>,
}

/// The taps of every pass, and the images behind products.
type Ran = (Vec<PassTaps>, Vec<Imaged>);

/// The target's part in a draft pass: text, tapped rows, table and head, from the reference.
#[derive(Clone)]
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

impl Ground {
    /// The tapped rows before `anchor` that a device which holds `held` has not seen: `[rows, taps, hidden]`.
    fn rows(&self, held: usize, anchor: usize) -> Vec<f32> {
        let row = |r: usize| self.taps.iter().flat_map(move |tap| tap.index_axis(Axis(0), r).to_owned());
        (held..anchor).flat_map(row).collect()
    }

    /// Every block on the device: its taps, and the images behind its products.
    fn on_device(
        &self,
        pair: &Pair,
        anchors: &[usize],
        engine: Engine,
        fault: Option<Arc<dyn Fault>>,
    ) -> Result<Ran, SubjectError> {
        let Borrowed { table, scale, head } = self.borrowed.clone();
        let (config, weights) = (&pair.draft.config, &pair.draft.weights);
        let lent = Lent { table, scale, head };
        let mut draft = NpuDraft::init_with_fault(config, weights, lent, engine, Switches::default(), fault)?;
        draft.set_window(pair.window);
        let mut all = Vec::new();
        for &anchor in anchors {
            let mut taps = Collect::default();
            let rows = self.rows(draft.position(), anchor);
            draft.pass(&rows, self.text[anchor], self.proposals, Some(&mut taps))?;
            all.push(taps.0);
        }
        let mut images = Vec::new();
        for &site in all.first().into_iter().flat_map(PassTaps::sites) {
            images.extend(draft.device_weights(site)?.map(|weights| Imaged { site, expert: None, weights }));
        }
        Ok((all, images))
    }
}

/// Runs a block behind each of `anchors`, rising positions of `text`, and judges every site that `judged`
/// lets through; with `extract` the first failing op is kept. Context rows are the reference's, so that the
/// draft answers for its own errors only.
pub fn judge(
    pair: &Pair,
    (text, anchors): (&[u32], &[usize]),
    runner: Runner,
    contract: &Contract,
    view: View,
    extract: bool,
    judged: &dyn Fn(&str) -> bool,
) -> Result<Judged, SubjectError> {
    let ground = Ground::of(pair, text)?;
    let (mut taps, mut images, mut applied) = (Vec::<PassTaps>::new(), Vec::new(), Vec::new());
    let mut state = pair.draft.fresh();
    match runner {
        Runner::Reference => {
            let mut record = Record::default();
            for &anchor in anchors {
                ground.pass(pair, &mut record, &mut state, anchor, |rows| rows);
                taps.push(record.take()?.into_iter().collect());
            }
        }
        Runner::Mutant(selection) => {
            let mut ops = MutantOps::new(contract, selection);
            for &anchor in anchors {
                ground.pass(pair, &mut ops, &mut state, anchor, |rows| rows);
                taps.push(ops.take()?.into_iter().collect());
            }
            applied.extend(&ops.applied);
        }
        Runner::Edited(edited) => taps = Program::blocks(edited, text, anchors)?.taps(contract)?,
        Runner::Npu(engine, fault) => (taps, images) = ground.on_device(pair, anchors, engine, fault)?,
    }
    let all = taps
        .iter()
        .enumerate()
        .flat_map(|(n, taps)| taps.shapes().filter(move |(site, _)| judged(&format!("pass{n}.{site}"))));
    let budget = budget(all);
    let mut result = Judged {
        sites: Vec::new(),
        explanation: None,
        applied,
        not_exposed: Vec::new(),
        wrong: None,
        failed: None,
    };
    let mut state = pair.draft.fresh::<Bounded>();
    for (n, (of_pass, &anchor)) in taps.iter().zip(anchors).enumerate() {
        let name = format!("pass{n}");
        let failed = result.sites.iter().any(|site| site.verdict == Verdict::Failed);
        let mut follow = Follow::new(contract, budget, view, &name, of_pass, judged, !failed);
        follow.images = if n == 0 { &images } else { &[] };
        follow.extract = extract;
        ground.pass(pair, &mut follow, &mut state, anchor, Bounded::exact);
        follow.check()?;
        result.sites.append(&mut follow.results);
        result.explanation = result.explanation.or(follow.explanation.take());
        result.failed = result.failed.or(follow.failed.take());
        if let Some(wrong) = follow.wrong.take() {
            result.wrong.get_or_insert_with(|| (wrong, taps[..=n].to_vec()));
        }
        if n == 0 {
            result.not_exposed = follow.not_exposed.iter().map(|site| format!("{name}.{site}")).collect();
        }
    }
    Ok(result)
}
