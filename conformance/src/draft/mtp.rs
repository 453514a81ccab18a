//! A target with its own multi-token-prediction head as the draft.
//!
//! ```text
//! h_t                  the target's hidden state behind its final norm, of every committed row t
//! y_1 = head(h_{s-1}, x_s)       the anchor x_s at position s - 1, behind all rows (h_t, x_{t+1}) before it
//! y_{j+1} = head(y_j, d_j)       the head's own hidden state and proposal, one position on
//! d_j = argmax(y_j · W_headᵀ)    or drawn from it, at a temperature
//! ```
//!
//! The first proposal is what the head was trained for; each further one reads the head's own state. Rows that
//! were fed with it leave the head's cache before the target's next rows come.
//!
//! Source: the conventions of [`reference::models::Mtp`], and the chain of public serving code that runs it.

use super::host::{Draws, rows};
use super::walk::{Proposals, Speculate};
use super::{Filter, HostError, Seconds, draw, filtered};
use crate::golden_gate::argmax;
use ndarray::{Axis, Slice};
use reference::models::{Hybrid, HybridState, Mtp, MtpState};
use reference::{Model, Plain, Tensor};
use spec::Config;
use std::time::Instant;

/// Why a target has no prediction head that can draft.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum MtpError {
    /// Its family has none.
    #[error(
        "{family} has no multi-token-prediction head that is known; qwen3_next, qwen3_5 and qwen3_5_moe have"
    )]
    Family {
        /// The family.
        family: String,
    },
    /// Its checkpoint has none.
    #[error("the target has no tensors below mtp.: take a checkpoint that was published with its head")]
    Absent,
    /// It has several layers.
    #[error(
        "the prediction head has {layers} layers, one a depth; which rows the later ones have cached is not published, so only a head of one layer drafts"
    )]
    Layers {
        /// How many.
        layers: usize,
    },
}

/// A target and its prediction head in the middle of a text.
pub struct MtpHost<'a> {
    model: &'a Hybrid,
    head: Mtp<'a>,
    ops: Plain,
    target: HybridState<Tensor>,
    draft: MtpState<Tensor>,
    /// Hidden states of committed rows that the head has not seen, and the tokens that follow all but the last.
    new: Option<(Tensor, Vec<u32>)>,
    /// The last block, its hidden states, and the target before it.
    block: Option<(Vec<u32>, Tensor, HybridState<Tensor>)>,
    draws: Option<Draws<'a>>,
    /// Time spent so far.
    pub seconds: Seconds,
}

impl<'a> MtpHost<'a> {
    /// A model before its prompt.
    pub fn new(config: &Config, model: &'a Model) -> Result<Self, MtpError> {
        let Model::Hybrid(model) = model else {
            return Err(MtpError::Family { family: config.family().to_string() });
        };
        let head = model.mtp().ok_or(MtpError::Absent)?;
        let draft = head.fresh();
        if draft.layers.len() != 1 {
            return Err(MtpError::Layers { layers: draft.layers.len() });
        }
        Ok(Self {
            model,
            head,
            ops: Plain::default(),
            target: model.fresh(),
            draft,
            new: None,
            block: None,
            draws: None,
            seconds: Seconds::default(),
        })
    }

    /// Draws the proposals at `temperature`, with numbers in [0, 1) from `uniform`.
    pub fn drawing(mut self, temperature: f64, uniform: impl FnMut() -> f64 + 'a) -> Self {
        self.draws = Some(Draws { temperature, uniform: Box::new(uniform) });
        self
    }

    /// Feeds the target: its logits, and its hidden states.
    fn feed(&mut self, ids: &[u32]) -> Result<(Vec<Vec<f32>>, Tensor), HostError> {
        let started = Instant::now();
        let hidden = self.model.hidden(&mut self.ops, &mut self.target, ids);
        let logits = self.model.head(&mut self.ops, &hidden);
        self.ops.check()?;
        self.seconds.target += started.elapsed();
        Ok((rows(&logits), hidden))
    }

    /// The token that a row of the head's logits proposes.
    fn choose(&mut self, logits: &[f32], proposals: &mut Proposals) -> u32 {
        let id = match &mut self.draws {
            None => argmax(logits) as u32,
            Some(draws) => {
                let filter = Filter { temperature: draws.temperature, top_k: 0, top_p: 1.0 };
                let q = filtered(logits, filter);
                let id = draw(&q, (draws.uniform)());
                proposals.drawn_from.push(q);
                id
            }
        };
        proposals.ids.push(id);
        id
    }
}

fn part(x: &Tensor, rows: std::ops::Range<usize>) -> Tensor {
    x.slice_axis(Axis(0), Slice::from(rows)).to_owned().into_shared()
}

impl Speculate for MtpHost<'_> {
    type Error = HostError;

    fn prefill(&mut self, prompt: &[u32]) -> Result<Vec<f32>, HostError> {
        let (mut rows, hidden) = self.feed(prompt)?;
        self.new = Some((hidden, prompt[1..].to_vec()));
        Ok(rows.pop().unwrap_or_default())
    }

    fn propose(&mut self, anchor: u32, n: usize) -> Result<Proposals, HostError> {
        let started = Instant::now();
        let (hidden, mut ids) = self.new.take().expect("committed rows come before proposals");
        ids.push(anchor);
        let fed = self.draft.position + ids.len();
        let mut predicted = self.head.pass(&mut self.ops, &mut self.draft, 0, &hidden, &ids);
        self.ops.check()?;
        let mut proposals = Proposals::default();
        for depth in 1..=n {
            let last = rows(&predicted.logits).pop().unwrap_or_default();
            let id = self.choose(&last, &mut proposals);
            if depth < n {
                let held = predicted.hidden.shape()[0];
                let own = part(&predicted.hidden, held - 1..held);
                predicted = self.head.pass(&mut self.ops, &mut self.draft, depth, &own, &[id]);
                self.ops.check()?;
            }
        }
        self.head.truncate(&mut self.ops, &mut self.draft, fed);
        self.seconds.draft += started.elapsed();
        Ok(proposals)
    }

    fn verify(&mut self, block: &[u32]) -> Result<Vec<Vec<f32>>, HostError> {
        let before = self.target.clone();
        let (logits, hidden) = self.feed(block)?;
        self.block = Some((block.to_vec(), hidden, before));
        Ok(logits)
    }

    /// As for a block draft: recurrent state cannot be cut, so it comes back and the kept rows are fed again.
    fn commit(&mut self, rows: usize) -> Result<(), HostError> {
        let Some((block, hidden, before)) = self.block.take() else { return Ok(()) };
        self.new = Some((part(&hidden, 0..rows), block[1..rows].to_vec()));
        if rows < block.len() {
            let started = Instant::now();
            self.target = before;
            self.model.hidden(&mut self.ops, &mut self.target, &block[..rows]);
            self.ops.check()?;
            self.seconds.target += started.elapsed();
        }
        Ok(())
    }
}
