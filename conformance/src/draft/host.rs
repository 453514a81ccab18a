//! A pair on the host: the reference runs target and draft.

use super::walk::{Proposals, Speculate};
use super::{Pair, PairError, Scale, sampling};
use device::DeviceError;
use ndarray::{ArrayView2, Axis, Ix2, Slice};
use reference::models::{Borrowed, Context, DraftOutput, DraftState, Tapped};
use reference::{ModelState, Plain, Tensor};
use spec::NonFinite;
use std::time::{Duration, Instant};

/// Why a pair stopped.
#[derive(Debug, thiserror::Error)]
pub enum HostError {
    /// A weight is not finite.
    #[error(transparent)]
    Weights(#[from] NonFinite),
    /// Target and draft are no pair.
    #[error(transparent)]
    Pair(#[from] PairError),
    /// The device stopped.
    #[error(transparent)]
    Device(#[from] DeviceError),
}

/// Time spent on the host. The reference is written to be read, so this says nothing about speed.
#[derive(Clone, Copy, Debug, Default)]
pub struct Seconds {
    /// In target passes.
    pub target: Duration,
    /// In draft passes.
    pub draft: Duration,
}

/// How proposals are drawn, where they are not the best ones.
pub(super) struct Draws<'a> {
    pub temperature: f64,
    pub uniform: Box<dyn FnMut() -> f64 + 'a>,
}

/// A pair in the middle of a text.
pub struct Host<'a> {
    pair: &'a Pair,
    ops: Plain,
    target: ModelState<Tensor>,
    draft: DraftState<Tensor>,
    borrowed: Option<Borrowed>,
    scale: Option<Scale>,
    /// Committed rows that the draft has not seen, one tensor a tap.
    new: Vec<Tensor>,
    /// The last block, its tapped rows, and the target before it.
    block: Option<(Vec<u32>, Vec<Tensor>, ModelState<Tensor>)>,
    draws: Option<Draws<'a>>,
    /// Time spent so far.
    pub seconds: Seconds,
}

impl<'a> Host<'a> {
    /// A pair before its prompt.
    pub fn new(pair: &'a Pair) -> Self {
        Self {
            pair,
            ops: Plain::default(),
            target: pair.target.fresh(),
            draft: pair.draft.fresh(),
            borrowed: None,
            scale: None,
            new: Vec::new(),
            block: None,
            draws: None,
            seconds: Seconds::default(),
        }
    }

    /// Draws the proposals of a path selector at `temperature`, with numbers in [0, 1) from `uniform`.
    /// A draft without a selector proposes its best tokens all the same: its rows are marginals, and
    /// drawing them one by one is accepted less.
    pub fn drawing(mut self, temperature: f64, uniform: impl FnMut() -> f64 + 'a) -> Self {
        self.draws = Some(Draws { temperature, uniform: Box::new(uniform) });
        self
    }

    /// The scale of the draft's embedding; nothing before the prompt.
    pub fn scale(&self) -> Option<Scale> {
        self.scale
    }

    /// Feeds the target: its logits, and the tapped rows.
    fn feed(&mut self, ids: &[u32]) -> Result<(Tensor, Vec<Tensor>), HostError> {
        let started = Instant::now();
        let (pair, config) = (self.pair, &self.pair.draft.config);
        let layers = pair.config.num_hidden_layers();
        let mut ops = Tapped::new(&mut self.ops, &config.target_layer_ids, layers, pair.last_tap);
        let logits = pair.target.pass(&mut ops, &mut self.target, ids);
        let taps = ops.taps().expect("every tapped layer has run");
        if self.borrowed.is_none() {
            let (mut borrowed, own) = ops.borrowed(1.0).expect("a pass embeds tokens and ends in a head");
            let scale = pair.embedding_scale(own);
            borrowed.scale = scale.value;
            (self.borrowed, self.scale) = (Some(borrowed), Some(scale));
        }
        self.ops.check()?;
        self.seconds.target += started.elapsed();
        Ok((logits, taps))
    }

    /// The walk over candidates with every step drawn: ids and the distributions they came from.
    fn drawn(&mut self, output: &DraftOutput<Tensor>, anchor: u32) -> Result<Option<Proposals>, HostError> {
        let (Some(draws), Some(selector)) = (&mut self.draws, &self.pair.draft.weights.selector) else {
            return Ok(None);
        };
        let Some((ids, hidden)) = &output.candidates else { return Ok(None) };
        let two = |x: &'_ Tensor| x.clone().into_dimensionality::<Ix2>().expect("two axes");
        let (logits, ids, hidden) = (two(&output.logits), two(ids), two(hidden));
        let mut proposals = Proposals::default();
        let mut before = anchor;
        for j in 0..ids.nrows() {
            let scores =
                reference::ops::step_scores(logits.row(j), ids.row(j), hidden.row(j), selector, before)?;
            let small = sampling::softmax(&scores.to_vec(), draws.temperature);
            let mut q = vec![0.0; logits.ncols()];
            for (&id, &p) in ids.row(j).iter().zip(&small) {
                q[id as usize] = p;
            }
            before = sampling::draw(&q, (draws.uniform)());
            proposals.ids.push(before);
            proposals.drawn_from.push(q);
        }
        Ok(Some(proposals))
    }
}

fn first_rows(taps: &[Tensor], rows: usize) -> Vec<Tensor> {
    let cut = |tap: &Tensor| tap.slice_axis(Axis(0), Slice::from(..rows)).to_owned().into_shared();
    taps.iter().map(cut).collect()
}

/// The rows of a matrix, one by one.
pub(super) fn rows(logits: &Tensor) -> Vec<Vec<f32>> {
    let view: ArrayView2<f32> = logits.view().into_dimensionality().expect("logits have two axes");
    view.rows().into_iter().map(|row| row.to_vec()).collect()
}

impl Speculate for Host<'_> {
    type Error = HostError;

    fn prefill(&mut self, prompt: &[u32]) -> Result<Vec<f32>, HostError> {
        let (logits, taps) = self.feed(prompt)?;
        self.new = taps;
        Ok(rows(&logits).pop().unwrap_or_default())
    }

    fn propose(&mut self, anchor: u32, n: usize) -> Result<Proposals, HostError> {
        let started = Instant::now();
        let new = std::mem::take(&mut self.new);
        let rows = new.first().map_or(0, |tap| tap.shape()[0]);
        let borrowed = self.borrowed.as_ref().expect("a prompt comes before proposals");
        let context = Context { taps: &new, rows, window: self.pair.window };
        let draft = &self.pair.draft;
        let output = draft.pass(&mut self.ops, &mut self.draft, borrowed, context, anchor, n);
        self.ops.check()?;
        let proposals = match self.drawn(&output, anchor)? {
            Some(drawn) => drawn,
            None => Proposals {
                ids: output.proposals.iter().map(|&id| id as u32).collect(),
                drawn_from: Vec::new(),
            },
        };
        self.seconds.draft += started.elapsed();
        Ok(proposals)
    }

    fn verify(&mut self, block: &[u32]) -> Result<Vec<Vec<f32>>, HostError> {
        let before = self.target.clone();
        let (logits, taps) = self.feed(block)?;
        self.block = Some((block.to_vec(), taps, before));
        Ok(rows(&logits))
    }

    /// Caches could be cut, but recurrent state cannot: where rows are taken back, the state before the
    /// block comes back and the kept rows are fed again. That is right for every family, and the same
    /// bits, because a pass does not depend on how its tokens are portioned.
    fn commit(&mut self, rows: usize) -> Result<(), HostError> {
        let Some((block, taps, before)) = self.block.take() else { return Ok(()) };
        self.new = first_rows(&taps, rows);
        if rows < block.len() {
            let started = Instant::now();
            self.target = before;
            self.pair.target.pass(&mut self.ops, &mut self.target, &block[..rows]);
            self.ops.check()?;
            self.seconds.target += started.elapsed();
        }
        Ok(())
    }
}
