//! A pair against the golden of an independent implementation: target rows, every draft pass.

use super::Pair;
use crate::golden_gate::{GateError, GoldenGate, align, logits, ratio};
use crate::record::Record;
use golden::Dump;
use ndarray::{Axis, Slice};
use reference::Tensor;
use reference::models::{Context, Tapped};
use serde_json::Value;
use spec::Site;
use std::collections::BTreeMap;

/// Every value of the run, by pass and site.
type Taps = BTreeMap<(String, Site), Tensor>;

/// One draft pass as a golden tells it.
struct Told {
    anchor: usize,
    proposed: Vec<u32>,
    accepted: usize,
}

/// Runs target and draft over the golden's text and passes, free-running, and compares every tap,
/// proposal and accept count. Proposals count as [`GoldenGate::argmax_equal`].
pub fn compare(pair: &Pair, dump: &Dump) -> Result<GoldenGate, GateError> {
    let text = [&dump.manifest().prompt[..], &dump.manifest().greedy[..]].concat();
    let told = passes(dump, &text)?;
    let (taps, gate) = run(pair, &text, &told)?;
    compare_taps(gate, dump, &taps)
}

fn run(pair: &Pair, text: &[u32], told: &[Told]) -> Result<(Taps, GoldenGate), GateError> {
    let (mut ops, mut taps) = (Record::default(), BTreeMap::new());
    let (ids, layers) = (&pair.draft.config.target_layer_ids, pair.config.num_hidden_layers());
    let mut tapped = Tapped::new(&mut ops, ids, layers, pair.last_tap);
    pair.target.pass(&mut tapped, &mut pair.target.fresh(), text);
    let context = tapped.taps().expect("every tapped layer has run");
    let (mut borrowed, own) = tapped.borrowed(1.0).expect("a pass embeds tokens and ends in a head");
    borrowed.scale = pair.embedding_scale(own).value;
    let mut keep = |pass: String, values: Vec<(Site, Tensor)>| {
        taps.extend(values.into_iter().map(|(site, value)| ((pass.clone(), site), value)));
    };
    keep("target".into(), ops.take()?);
    let mut gate = GoldenGate::default();
    let mut state = pair.draft.fresh();
    for (n, pass) in told.iter().enumerate() {
        let rows = state.position..pass.anchor;
        let cut = |tap: &Tensor| tap.slice_axis(Axis(0), Slice::from(rows.clone())).to_owned().into_shared();
        let new: Vec<Tensor> = context.iter().map(cut).collect();
        let block = Context { taps: &new, rows: rows.len(), window: None };
        let anchor = text[pass.anchor];
        let output = pair.draft.pass(&mut ops, &mut state, &borrowed, block, anchor, pass.proposed.len());
        keep(format!("pass{n}"), ops.take()?);
        let proposed: Vec<u32> = output.proposals.iter().map(|&id| id as u32).collect();
        gate.argmax_equal.1 += proposed.len();
        gate.argmax_equal.0 += proposed.iter().zip(&pass.proposed).filter(|(a, b)| a == b).count();
        let known = &text[pass.anchor + 1..];
        let accepted = proposed.iter().zip(known).take_while(|(d, t)| d == t).count();
        if accepted != pass.accepted {
            let reason = format!("pass {n} accepts {} there, {accepted} in the reference", pass.accepted);
            return Err(GateError::Passes { reason });
        }
    }
    Ok((taps, gate))
}

fn compare_taps(mut gate: GoldenGate, dump: &Dump, taps: &Taps) -> Result<GoldenGate, GateError> {
    for info in dump.taps() {
        let (pass, site) = golden::split_tap(&info.name);
        let reference = Site::parse(site).and_then(|site| taps.get(&(pass.to_string(), site)));
        let Some(reference) = reference else {
            gate.unmatched.push(info.name.clone());
            continue;
        };
        let values = dump.f32(&info.name)?.expect("a tap that the dump lists");
        let golden = Tensor::from_shape_vec(values.shape, values.to_vec()).expect("a validated shape");
        let (golden, reference) = align(&info.name, golden, reference.clone())?;
        let noise = dump.noise(&info.name).map_or(0.0, |n| n.f64_diff.max(n.f32_diff));
        gate.sites.push(ratio(&info.name, &golden, &reference, noise));
        if info.name.ends_with(".logits") {
            gate.kl_max = gate.kl_max.max(logits(&golden, &reference).2);
        }
    }
    Ok(gate)
}

/// The text of a golden and the positions of its anchors.
pub fn text_and_anchors(dump: &Dump) -> Result<(Vec<u32>, Vec<usize>), GateError> {
    let text = [&dump.manifest().prompt[..], &dump.manifest().greedy[..]].concat();
    let anchors = passes(dump, &text)?.iter().map(|pass| pass.anchor).collect();
    Ok((text, anchors))
}

/// The draft passes of a golden; each must fit the text, and anchors must not go back.
fn passes(dump: &Dump, text: &[u32]) -> Result<Vec<Told>, GateError> {
    let wrong = |n: usize, what: &str| GateError::Passes { reason: format!("passes[{n}] has no {what}") };
    let Some(list) = dump.extra()["passes"].as_array() else {
        return Err(GateError::Passes { reason: "there is no list of passes".into() });
    };
    let number = |value: &Value| value.as_u64().and_then(|n| usize::try_from(n).ok());
    let mut before = 1;
    let one = |(n, pass): (usize, &Value)| {
        let anchor = number(&pass["anchor_pos"]).filter(|&anchor| anchor >= before && anchor < text.len());
        let anchor =
            anchor.ok_or_else(|| wrong(n, "anchor_pos inside the text and behind the pass before"))?;
        before = anchor + 1;
        let ids = pass["proposed"].as_array().filter(|ids| !ids.is_empty());
        let ids = ids.and_then(|ids| ids.iter().map(|id| u32::try_from(id.as_u64()?).ok()).collect());
        let proposed: Vec<u32> = ids.ok_or_else(|| wrong(n, "proposed token ids"))?;
        let accepted = number(&pass["accepted"]).ok_or_else(|| wrong(n, "accepted count"))?;
        Ok(Told { anchor, proposed, accepted })
    };
    list.iter().enumerate().map(one).collect()
}
