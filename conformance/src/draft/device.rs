//! A pair on the NPU path: target and draft on the device, verified in one pass, taken back by rollback.

use super::walk::{Proposals, Speculate};
use super::{HostError, Pair, Scale, Seconds};
use device::{Engine, Fault, Npu, NpuDraft, Switches, TapSink};
use reference::models::LastTap;
use spec::{Site, Weights};
use std::sync::Arc;
use std::time::Instant;

/// A pair on the device in the middle of a text.
pub struct NpuHost<'a> {
    pair: &'a Pair,
    target: Npu,
    draft: NpuDraft,
    scale: Scale,
    /// Committed rows that the draft has not seen, `[rows, taps, hidden]`.
    new: Vec<f32>,
    /// Position before the last block, and the block's tapped rows.
    block: Option<(usize, Vec<f32>)>,
    /// Time spent so far.
    pub seconds: Seconds,
}

/// Keeps the rows behind the final norm.
struct Normed(Vec<f32>);

impl TapSink for Normed {
    fn wants(&self, site: Site) -> bool {
        site == Site::model("final_norm")
    }

    fn tap(&mut self, _: Site, _: &[usize], values: &[f32]) {
        self.0 = values.to_vec();
    }
}

impl<'a> NpuHost<'a> {
    /// A pair before its prompt; `weights` are the target's.
    pub fn new(
        pair: &'a Pair,
        weights: &Weights,
        engine: Engine,
        fault: Option<Arc<dyn Fault>>,
    ) -> Result<NpuHost<'a>, HostError> {
        let switches = Switches::default();
        let mut target = Npu::init_with_fault(&pair.config, weights, engine, switches, fault.clone())?;
        target.set_layer_taps(&pair.draft.config.target_layer_ids)?;
        let scale = pair.embedding_scale(target.embedding_scale());
        let lent = target.lent(scale.value);
        let (config, of_draft) = (&pair.draft.config, &pair.draft.weights);
        let mut draft = NpuDraft::init_with_fault(config, of_draft, lent, engine, switches, fault)?;
        draft.set_window(pair.window);
        Ok(NpuHost { pair, target, draft, scale, new: Vec::new(), block: None, seconds: Seconds::default() })
    }

    /// The scale of the draft's embedding.
    pub fn scale(&self) -> Scale {
        self.scale
    }

    /// The target's own greedy text of `tokens` tokens behind `prompt`, one step at a time; the pair is
    /// before its prompt afterwards.
    pub fn greedy(&mut self, prompt: &[u32], tokens: usize) -> Result<Vec<u32>, HostError> {
        self.reset();
        let mut last = self.target.prefill(prompt)?;
        let mut text = vec![crate::golden_gate::argmax(&last) as u32];
        while text.len() < tokens {
            last = self.target.step(text[text.len() - 1])?;
            text.push(crate::golden_gate::argmax(&last) as u32);
        }
        self.reset();
        Ok(text)
    }

    fn reset(&mut self) {
        self.target.reset();
        self.draft.reset();
        self.new.clear();
        self.block = None;
    }

    /// Feeds the target in one pass: logits of every row, and the tapped rows.
    fn feed(&mut self, ids: &[u32]) -> Result<(Vec<Vec<f32>>, Vec<f32>), HostError> {
        let started = Instant::now();
        let pair = self.pair;
        let normed = pair.last_tap == LastTap::Normed && pair.taps_the_last_layer();
        let mut sink = Normed(Vec::new());
        let logits = match normed {
            true => self.target.step_batch_tapped(ids, &mut sink)?,
            false => self.target.step_batch(ids)?,
        };
        let mut taps = self.target.layer_taps().to_vec();
        if normed {
            let (hidden, layers) = (self.target.hidden_size(), &pair.draft.config.target_layer_ids);
            let last = layers.iter().position(|&layer| layer + 1 == self.target.layer_count());
            let last = last.expect("the last layer is tapped");
            let rows = taps.chunks_exact_mut(layers.len() * hidden).zip(sink.0.chunks_exact(hidden));
            rows.for_each(|(row, normed)| row[last * hidden..][..hidden].copy_from_slice(normed));
        }
        self.seconds.target += started.elapsed();
        Ok((logits.chunks_exact(self.target.vocab_size()).map(<[f32]>::to_vec).collect(), taps))
    }
}

impl Speculate for NpuHost<'_> {
    type Error = HostError;

    fn prefill(&mut self, prompt: &[u32]) -> Result<Vec<f32>, HostError> {
        let (mut rows, taps) = self.feed(prompt)?;
        self.new = taps;
        Ok(rows.pop().unwrap_or_default())
    }

    fn propose(&mut self, anchor: u32, n: usize) -> Result<Proposals, HostError> {
        let started = Instant::now();
        let block = self.draft.pass(&std::mem::take(&mut self.new), anchor, n, None)?;
        self.seconds.draft += started.elapsed();
        Ok(Proposals { ids: block.proposals, drawn_from: Vec::new() })
    }

    fn verify(&mut self, block: &[u32]) -> Result<Vec<Vec<f32>>, HostError> {
        let before = self.target.position();
        let (rows, taps) = self.feed(block)?;
        self.block = Some((before, taps));
        Ok(rows)
    }

    fn commit(&mut self, rows: usize) -> Result<(), HostError> {
        let Some((before, mut taps)) = self.block.take() else { return Ok(()) };
        let width = self.pair.draft.config.target_layer_ids.len() * self.target.hidden_size();
        taps.truncate(rows * width);
        self.new = taps;
        self.target.rollback(before + rows)?;
        Ok(())
    }
}
