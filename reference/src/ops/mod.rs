//! The ops, and the seam: a model is a program over [`Ops`], and every op result has a site.
//!
//! Each op is a free function in a file of its own. It returns f64; [`crate::Plain`] rounds the
//! result to f32, once. [`Call`] is one op call as a value, so that it can be recorded, replayed,
//! mutated, bounded and counted without touching a model.

mod append;
mod attention;
mod block_conv;
mod embed;
mod gated_act;
mod join;
mod linear;
mod per_layer_input;
mod residual;
mod rms_norm;
mod rope;
mod scale;
mod selector;
mod softcap;
mod stack;

pub use append::{append, truncate};
pub use attention::{Mask, Reach, attn_ctx, attn_probs, attn_scores};
pub use block_conv::{Side, block_conv};
pub use embed::embed;
pub use gated_act::{activate, gated_act};
pub use join::join;
pub use linear::linear;
pub use per_layer_input::per_layer_input;
pub use residual::residual;
pub use rms_norm::rms_norm;
pub use rope::{inverse_frequencies, rope_table, rotate};
pub use scale::scale;
pub use selector::{candidates, path_scores, pick, step_scores};
pub use softcap::softcap;
pub use stack::{stack, tail};

use crate::State;
use ndarray::{ArcArray, ArrayD, IxDyn};
use spec::families::draft::{DraftConv, Selector};
use spec::families::{Activation, Linear};
use spec::site::At;
use spec::{Matrix, NonFinite, Rope, Site, Vector};

/// Values at a site: f32, axes as in the site registry; cheap to clone.
pub type Tensor = ArcArray<f32, IxDyn>;

/// A tensor as rows: its first axis, and all others flattened.
pub(crate) fn rows(x: &Tensor) -> ndarray::ArrayView2<'_, f32> {
    let first = x.shape()[0];
    let rest = x.len().checked_div(first).unwrap_or(0);
    x.view().into_shape_with_order((first, rest)).expect("tensors at sites are stored row after row")
}

/// Which of the two rotary tables.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Table {
    /// cos(position · inv_freq) · magnitude
    Cos,
    /// sin(position · inv_freq) · magnitude
    Sin,
}

/// One op call: everything that its result depends on.
///
/// `T` is a tensor of the interpretation that runs it. Shapes and formulas stand at the methods of
/// [`Ops`] and at the free functions; fields are named as there.
#[derive(Clone, Debug)]
#[allow(missing_docs)]
pub enum Call<'a, T> {
    /// See [`Ops::embed`].
    Embed { ids: &'a [u32], table: &'a Matrix, scale: f32 },
    /// See [`Ops::linear`].
    Linear { x: &'a T, w: &'a Linear },
    /// See [`Ops::rms_norm`].
    RmsNorm { x: &'a T, weight: Option<&'a Vector>, width: usize, eps: f32 },
    /// See [`Ops::rope_table`].
    RopeTable { positions: &'a [u32], rope: &'a Rope, table: Table },
    /// See [`Ops::rotate`].
    Rotate { x: &'a T, cos: &'a T, sin: &'a T, rope: &'a Rope },
    /// See [`Ops::append`].
    Append { cache: Option<T>, rows: &'a T, width: usize },
    /// See [`Ops::truncate`].
    Truncate { cache: T, keep: usize },
    /// See [`Ops::attn_scores`].
    AttnScores { q: &'a T, k: &'a T, scale: f64, softcap: Option<f64> },
    /// See [`Ops::attn_probs`].
    AttnProbs { scores: &'a T, mask: Mask, sinks: Option<&'a Vector> },
    /// See [`Ops::attn_ctx`].
    AttnCtx { probs: &'a T, v: &'a T },
    /// See [`Ops::gated_act`].
    GatedAct { gate: &'a T, up: &'a T, activation: Activation },
    /// See [`Ops::residual`].
    Residual { x: &'a T, branch: &'a T, multiplier: f32 },
    /// See [`Ops::join`].
    Join { parts: Vec<&'a T> },
    /// See [`Ops::softcap`].
    Softcap { x: &'a T, cap: f64 },
    /// See [`Ops::stack`].
    Stack { above: &'a T, below: &'a T },
    /// See [`Ops::tail`].
    Tail { x: &'a T, keep: usize },
    /// See [`Ops::block_conv`].
    BlockConv { x: &'a T, dynamic: &'a T, conv: &'a DraftConv, side: Side },
    /// See [`Ops::candidates`].
    Candidates { logits: &'a T, k: usize },
    /// See [`Ops::path_scores`].
    PathScores { logits: &'a T, candidates: &'a T, hidden: &'a T, selector: &'a Selector, anchor: u32 },
    /// See [`Ops::pick`].
    Pick { scores: &'a T, candidates: Option<&'a T> },
    /// See [`Ops::scale`].
    Scale { x: &'a T, factor: f64 },
    /// See [`Ops::per_layer_input`].
    PerLayerInput { token: &'a T, context: &'a T, layer: usize, width: usize },
}

impl<'a, T> Call<'a, T> {
    /// The op's name, as in the catalogue and the reports.
    pub fn op(&self) -> &'static str {
        match self {
            Call::Embed { .. } => "embed",
            Call::Linear { .. } => "linear",
            Call::RmsNorm { .. } => "rms_norm",
            Call::RopeTable { .. } => "rope_table",
            Call::Rotate { .. } => "rotate",
            Call::Append { .. } => "append",
            Call::Truncate { .. } => "truncate",
            Call::AttnScores { .. } => "attn_scores",
            Call::AttnProbs { .. } => "attn_probs",
            Call::AttnCtx { .. } => "attn_ctx",
            Call::GatedAct { .. } => "gated_act",
            Call::Residual { .. } => "residual",
            Call::Join { .. } => "join",
            Call::Softcap { .. } => "softcap",
            Call::Stack { .. } => "stack",
            Call::Tail { .. } => "tail",
            Call::BlockConv { .. } => "block_conv",
            Call::Candidates { .. } => "candidates",
            Call::PathScores { .. } => "path_scores",
            Call::Pick { .. } => "pick",
            Call::Scale { .. } => "scale",
            Call::PerLayerInput { .. } => "per_layer_input",
        }
    }

    /// The tensors that it reads, in the order of the formula.
    pub fn operands(&self) -> Vec<&T> {
        match self {
            Call::Embed { .. } | Call::RopeTable { .. } => vec![],
            Call::Linear { x, .. } | Call::RmsNorm { x, .. } => vec![x],
            Call::Rotate { x, cos, sin, .. } => vec![x, cos, sin],
            Call::Append { cache, rows, .. } => cache.iter().chain([*rows]).collect(),
            Call::Truncate { cache, .. } => vec![cache],
            Call::AttnScores { q, k, .. } => vec![q, k],
            Call::AttnProbs { scores, .. } => vec![scores],
            Call::AttnCtx { probs, v } => vec![probs, v],
            Call::GatedAct { gate, up, .. } => vec![gate, up],
            Call::Residual { x, branch, .. } => vec![x, branch],
            Call::Join { parts } => parts.clone(),
            Call::Stack { above, below } => vec![above, below],
            Call::Tail { x, .. } => vec![x],
            Call::BlockConv { x, dynamic, .. } => vec![x, dynamic],
            Call::Candidates { logits, .. } => vec![logits],
            Call::PathScores { logits, candidates, hidden, .. } => vec![logits, candidates, hidden],
            Call::Pick { scores, candidates } => [*scores].into_iter().chain(*candidates).collect(),
            Call::Softcap { x, .. } | Call::Scale { x, .. } => vec![x],
            Call::PerLayerInput { token, context, .. } => vec![token, context],
        }
    }

    /// The same call on the tensors of another interpretation. `operands` replace
    /// [`Call::operands`], in the same order.
    pub fn with<U: Clone>(&self, operands: &'a [U]) -> Call<'a, U> {
        let o = |i: usize| &operands[i];
        match *self {
            Call::Embed { ids, table, scale } => Call::Embed { ids, table, scale },
            Call::Linear { w, .. } => Call::Linear { x: o(0), w },
            Call::RmsNorm { weight, width, eps, .. } => Call::RmsNorm { x: o(0), weight, width, eps },
            Call::RopeTable { positions, rope, table } => Call::RopeTable { positions, rope, table },
            Call::Rotate { rope, .. } => Call::Rotate { x: o(0), cos: o(1), sin: o(2), rope },
            Call::Append { ref cache, width, .. } => match cache {
                Some(_) => Call::Append { cache: Some(o(0).clone()), rows: o(1), width },
                None => Call::Append { cache: None, rows: o(0), width },
            },
            Call::Truncate { keep, .. } => Call::Truncate { cache: o(0).clone(), keep },
            Call::AttnScores { scale, softcap, .. } => Call::AttnScores { q: o(0), k: o(1), scale, softcap },
            Call::AttnProbs { mask, sinks, .. } => Call::AttnProbs { scores: o(0), mask, sinks },
            Call::AttnCtx { .. } => Call::AttnCtx { probs: o(0), v: o(1) },
            Call::GatedAct { activation, .. } => Call::GatedAct { gate: o(0), up: o(1), activation },
            Call::Residual { multiplier, .. } => Call::Residual { x: o(0), branch: o(1), multiplier },
            Call::Join { .. } => Call::Join { parts: operands.iter().collect() },
            Call::Softcap { cap, .. } => Call::Softcap { x: o(0), cap },
            Call::Stack { .. } => Call::Stack { above: o(0), below: o(1) },
            Call::Tail { keep, .. } => Call::Tail { x: o(0), keep },
            Call::BlockConv { conv, side, .. } => Call::BlockConv { x: o(0), dynamic: o(1), conv, side },
            Call::Candidates { k, .. } => Call::Candidates { logits: o(0), k },
            Call::PathScores { selector, anchor, .. } => {
                Call::PathScores { logits: o(0), candidates: o(1), hidden: o(2), selector, anchor }
            }
            Call::Pick { candidates, .. } => {
                Call::Pick { scores: o(0), candidates: candidates.map(|_| o(1)) }
            }
            Call::Scale { factor, .. } => Call::Scale { x: o(0), factor },
            Call::PerLayerInput { layer, width, .. } => {
                Call::PerLayerInput { token: o(0), context: o(1), layer, width }
            }
        }
    }
}

/// The value of a call, in f64, not yet rounded. The only failure is a weight that is not finite.
pub fn evaluate(call: &Call<Tensor>) -> Result<ArrayD<f64>, NonFinite> {
    Ok(match call {
        Call::Embed { ids, table, scale } => embed(ids, table, *scale)?.into_dyn(),
        Call::Linear { x, w } => linear(rows(x), w)?.into_dyn(),
        Call::RmsNorm { x, weight, width, eps } => rms_norm(x, weight.map(|w| &w[..]), *width, *eps),
        Call::RopeTable { positions, rope, table } => rope_table(positions, rope, *table).into_dyn(),
        Call::Rotate { x, cos, sin, rope } => {
            rotate(x, rows(cos), rows(sin), rope.head_dim, rope.pairing).into_dyn()
        }
        Call::Append { cache, rows, width } => append(cache.as_ref(), rows, *width).into_dyn(),
        Call::Truncate { cache, keep } => truncate(cache, *keep),
        Call::AttnScores { q, k, scale, softcap } => attn_scores(q, k, *scale, *softcap).into_dyn(),
        Call::AttnProbs { scores, mask, sinks } => {
            attn_probs(scores, *mask, sinks.map(|s| &s[..])).into_dyn()
        }
        Call::AttnCtx { probs, v } => attn_ctx(probs, v).into_dyn(),
        Call::GatedAct { gate, up, activation } => gated_act(gate, up, *activation),
        Call::Residual { x, branch, multiplier } => residual(x, branch, *multiplier),
        Call::Join { parts } => join(parts).into_dyn(),
        Call::Softcap { x, cap } => softcap(x, *cap),
        Call::Stack { above, below } => stack(above, below).into_dyn(),
        Call::Tail { x, keep } => tail(x, *keep),
        Call::BlockConv { x, dynamic, conv, side } => block_conv(x, dynamic, conv, *side).into_dyn(),
        Call::Candidates { logits, k } => candidates(logits, *k).into_dyn(),
        Call::PathScores { logits, candidates, hidden, selector, anchor } => {
            path_scores(logits, candidates, hidden, selector, *anchor)?.into_dyn()
        }
        Call::Pick { scores, candidates } => pick(scores, *candidates).into_dyn(),
        Call::Scale { x, factor } => scale(x, *factor),
        Call::PerLayerInput { token, context, layer, width } => {
            per_layer_input(token, context, *layer, *width).into_dyn()
        }
    })
}

/// An interpretation of model programs: what to do at each op.
///
/// One method is required; it sees every op as a value. Each op is a provided method whose
/// documentation is the formula.
pub trait Ops {
    /// What stands for a tensor.
    type Tensor: Clone;

    /// The result of `call` at `at`. Everything else in this trait is written with it.
    fn run(&mut self, at: Site, call: Call<'_, Self::Tensor>) -> Self::Tensor;

    /// `y[t, i] = table[ids[t], i] · scale`; `table` is `[vocab, hidden]`, the result `[tokens, hidden]`.
    fn embed(&mut self, at: Site, ids: &[u32], table: &Matrix, scale: f32) -> Self::Tensor {
        self.run(at, Call::Embed { ids, table, scale })
    }

    /// `y[t, o] = Σ_i x[t, i] · w[o, i] + b[o]`; `x` is `[tokens, in]`, the result `[tokens, out]`.
    fn linear(&mut self, at: Site, x: &Self::Tensor, w: &Linear) -> Self::Tensor {
        self.run(at, Call::Linear { x, w })
    }

    /// `y = x / sqrt(mean(x²) + eps) · weight` over groups of `width` values of a row. The result is
    /// `[tokens, width]`, or `[tokens, groups, width]` where a row holds several groups or `x` has
    /// three axes. Without a weight the factor is 1.
    fn rms_norm(
        &mut self,
        at: Site,
        x: &Self::Tensor,
        weight: Option<&Vector>,
        width: usize,
        eps: f32,
    ) -> Self::Tensor {
        self.run(at, Call::RmsNorm { x, weight, width, eps })
    }

    /// `[tokens, rotary_dim]`: cosine or sine of `positions[t] · inv_freq[i]`, times the magnitude;
    /// the half of distinct values stands twice.
    fn rope_table(&mut self, at: Site, positions: &[u32], rope: &Rope, table: Table) -> Self::Tensor {
        self.run(at, Call::RopeTable { positions, rope, table })
    }

    /// Turns pairs of values of every head by the angle of its token; the result is
    /// `[tokens, heads, head_dim]`.
    fn rotate(
        &mut self,
        at: Site,
        x: &Self::Tensor,
        cos: &Self::Tensor,
        sin: &Self::Tensor,
        rope: &Rope,
    ) -> Self::Tensor {
        self.run(at, Call::Rotate { x, cos, sin, rope })
    }

    /// Adds `rows` behind what the cache holds, as `[keys, heads, width]`.
    fn append(
        &mut self,
        at: At,
        name: &'static str,
        cache: &mut State<Self::Tensor>,
        rows: &Self::Tensor,
        width: usize,
    ) {
        let before = cache.0.take();
        cache.0 = Some(self.run(at.site(name), Call::Append { cache: before, rows, width }));
    }

    /// Keeps the first `keep` rows of the cache: takes back rows of rejected tokens.
    fn truncate(&mut self, at: At, name: &'static str, cache: &mut State<Self::Tensor>, keep: usize) {
        if let Some(before) = cache.0.take() {
            cache.0 = Some(self.run(at.site(name), Call::Truncate { cache: before, keep }));
        }
    }

    /// `s[h, t, j] = scale · Σ_d q[t, h, d] · k[j, h / (heads / kv_heads), d]`, then
    /// `softcap · tanh(s / softcap)` where a cap is given; `[heads, tokens, keys]`, not yet masked.
    fn attn_scores(
        &mut self,
        at: Site,
        q: &Self::Tensor,
        k: &Self::Tensor,
        scale: f64,
        softcap: Option<f64>,
    ) -> Self::Tensor {
        self.run(at, Call::AttnScores { q, k, scale, softcap })
    }

    /// Softmax over the keys that `mask` lets a token see, 0 elsewhere; a sink is one more logit of a
    /// head that joins the denominator only.
    fn attn_probs(
        &mut self,
        at: Site,
        scores: &Self::Tensor,
        mask: Mask,
        sinks: Option<&Vector>,
    ) -> Self::Tensor {
        self.run(at, Call::AttnProbs { scores, mask, sinks })
    }

    /// `c[t, h·d + i] = Σ_j p[h, t, j] · v[j, h / (heads / kv_heads), i]`; `[tokens, heads·head_dim]`.
    fn attn_ctx(&mut self, at: Site, probs: &Self::Tensor, v: &Self::Tensor) -> Self::Tensor {
        self.run(at, Call::AttnCtx { probs, v })
    }

    /// `y = act(gate) · up`, element by element.
    fn gated_act(
        &mut self,
        at: Site,
        gate: &Self::Tensor,
        up: &Self::Tensor,
        activation: Activation,
    ) -> Self::Tensor {
        self.run(at, Call::GatedAct { gate, up, activation })
    }

    /// `y = x + multiplier · branch`, element by element.
    fn residual(
        &mut self,
        at: Site,
        x: &Self::Tensor,
        branch: &Self::Tensor,
        multiplier: f32,
    ) -> Self::Tensor {
        self.run(at, Call::Residual { x, branch, multiplier })
    }

    /// `y = cap · tanh(x / cap)`, element by element: logits bent into (-cap, cap).
    fn softcap(&mut self, at: Site, x: &Self::Tensor, cap: f64) -> Self::Tensor {
        self.run(at, Call::Softcap { x, cap })
    }

    /// `y[t, ·] = parts[0][t, ·] | parts[1][t, ·] | …`: rows joined into longer ones; `[tokens, Σ columns]`.
    fn join(&mut self, at: Site, parts: &[&Self::Tensor]) -> Self::Tensor {
        self.run(at, Call::Join { parts: parts.to_vec() })
    }

    /// `y = x · factor`, element by element.
    fn scale(&mut self, at: Site, x: &Self::Tensor, factor: f64) -> Self::Tensor {
        self.run(at, Call::Scale { x, factor })
    }

    /// The rows of `above`, then those of `below`; `[tokens, columns]`.
    fn stack(&mut self, at: Site, above: &Self::Tensor, below: &Self::Tensor) -> Self::Tensor {
        self.run(at, Call::Stack { above, below })
    }

    /// The last `keep` rows of `x`.
    fn tail(&mut self, at: Site, x: &Self::Tensor, keep: usize) -> Self::Tensor {
        self.run(at, Call::Tail { x, keep })
    }

    /// `y[t, c] = Σ_o (base[side, o, c] + dynamic[t, side, o, c / g]) · x[t - o, c]`, `x` being 0 above the
    /// block; `[rows, hidden]`.
    fn block_conv(
        &mut self,
        at: Site,
        x: &Self::Tensor,
        dynamic: &Self::Tensor,
        conv: &DraftConv,
        side: Side,
    ) -> Self::Tensor {
        self.run(at, Call::BlockConv { x, dynamic, conv, side })
    }

    /// The ids of the `k` largest logits of every row, largest first; `[tokens, k]`.
    fn candidates(&mut self, at: Site, logits: &Self::Tensor, k: usize) -> Self::Tensor {
        self.run(at, Call::Candidates { logits, k })
    }

    /// `z_j[c] + Σ_r A[d_{j-1}, r] · g_j[r] · S[c, r]` of every candidate along the greedy walk from
    /// `anchor`; `[tokens, k]`.
    fn path_scores(
        &mut self,
        at: Site,
        logits: &Self::Tensor,
        candidates: &Self::Tensor,
        hidden: &Self::Tensor,
        selector: &Selector,
        anchor: u32,
    ) -> Self::Tensor {
        self.run(at, Call::PathScores { logits, candidates, hidden, selector, anchor })
    }

    /// The id with the largest score of every row, the lowest of equal ones; `[tokens]`. Columns are ids,
    /// or those that `candidates` gives.
    fn pick(&mut self, at: Site, scores: &Self::Tensor, candidates: Option<&Self::Tensor>) -> Self::Tensor {
        self.run(at, Call::Pick { scores, candidates })
    }

    /// `y[t, i] = (context[t, layer, i] + token[t, layer · width + i]) / √2`; `[tokens, width]`.
    fn per_layer_input(
        &mut self,
        at: Site,
        token: &Self::Tensor,
        context: &Self::Tensor,
        layer: usize,
        width: usize,
    ) -> Self::Tensor {
        self.run(at, Call::PerLayerInput { token, context, layer, width })
    }
}
