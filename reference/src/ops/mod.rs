//! The ops, and the seam: a model is a program over [`Ops`], and every op result has a site.
//!
//! Each op is a free function in a file of its own. It returns f64; [`crate::Plain`] rounds the
//! result to f32, once. [`Call`] is one op call as a value, so that it can be recorded, replayed,
//! mutated, bounded and counted without touching a model.

mod altup;
mod append;
mod attention;
mod block_conv;
mod causal_conv;
mod clamped_swiglu;
mod columns;
mod embed;
mod experts;
mod gated_act;
mod gated_delta_rule;
mod gdn_decay;
mod join;
mod l2_norm;
mod linear;
mod match_rms;
mod multiply;
mod per_layer_input;
mod residual;
mod rms_norm;
mod rope;
mod router;
mod scale;
mod scale_chosen;
mod scale_columns;
mod selector;
mod sigmoid;
mod slice;
mod softcap;
mod softmax;
mod sparsify;
mod stack_rows;
mod streams;

pub use altup::{altup_correct, altup_predict};
pub use append::{append, truncate};
pub use attention::{Mask, Reach, attn_ctx, attn_probs, attn_scores};
pub use block_conv::{Side, block_conv};
pub use causal_conv::{causal_conv, conv_state};
pub use clamped_swiglu::clamped_swiglu;
pub use columns::{Run, columns};
pub use embed::embed;
use experts::expert;
pub use experts::{expert_linear, mixture};
pub use gated_act::{activate, gated_act};
pub use gated_delta_rule::{Delta, gated_delta_rule_chunked, gdn_core, gdn_state};
pub use gdn_decay::gdn_decay;
pub use join::join;
pub use l2_norm::{L2_EPS, l2_norm};
pub use linear::linear;
pub use match_rms::match_rms;
pub use multiply::multiply;
pub use per_layer_input::per_layer_input;
pub use residual::residual;
pub use rms_norm::rms_norm;
pub use rope::{inverse_frequencies, rope_table, rotate};
pub use router::{router_index, router_weights};
pub use scale::scale;
pub use scale_chosen::scale_chosen;
pub use scale_columns::scale_columns;
pub use selector::{candidates, path_scores, pick, step_scores};
pub use sigmoid::{sigmoid, sigmoid_gate};
pub use slice::{concat, slice};
pub use softcap::softcap;
pub use softmax::softmax;
pub use sparsify::sparsify;
pub use stack_rows::{stack_rows, tail};
pub use streams::{add_to_streams, stack, stream, stream_mean};

use crate::State;
use ndarray::{ArcArray, ArrayD, IxDyn};
use spec::families::draft::{DraftConv, Selector};
use spec::families::moe::Router;
use spec::families::{Activation, Conv, Linear};
use spec::site::At;
use spec::{Matrix, NonFinite, Rope, Site, Vector};
use std::ops::Range;

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
    /// See [`Ops::columns`].
    Columns { x: &'a T, runs: &'a [Run], width: Option<usize> },
    /// See [`Ops::join`].
    Join { parts: Vec<&'a T> },
    /// See [`Ops::multiply`].
    Multiply { a: &'a T, b: &'a T },
    /// See [`Ops::sigmoid`].
    Sigmoid { x: &'a T },
    /// See [`Ops::sigmoid_gate`].
    SigmoidGate { x: &'a T, gate: &'a T },
    /// See [`Ops::l2_norm`].
    L2Norm { x: &'a T, scale: f64 },
    /// See [`Ops::causal_conv`].
    CausalConv { u: &'a T, state: Option<&'a T>, conv: &'a Conv, activation: Option<Activation> },
    /// See [`Ops::conv_state`].
    ConvState { u: &'a T, state: Option<&'a T>, kernel: usize },
    /// See [`Ops::gdn_decay`].
    GdnDecay { a: &'a T, a_log: &'a Vector, dt_bias: &'a Vector },
    /// See [`Ops::gdn_core`].
    GdnCore(Delta<'a, T>),
    /// See [`Ops::gdn_state`].
    GdnState(Delta<'a, T>),
    /// See [`Ops::scale`].
    Scale { x: &'a T, factor: f64 },
    /// See [`Ops::slice`].
    Slice { x: &'a T, width: usize, start: usize, end: usize },
    /// See [`Ops::concat`].
    Concat { a: &'a T, b: &'a T },
    /// See [`Ops::router_index`].
    RouterIndex { logits: &'a T, router: &'a Router, bias: Option<&'a Vector> },
    /// See [`Ops::router_weights`].
    RouterWeights { logits: &'a T, index: &'a T, router: &'a Router },
    /// See [`Ops::expert_linear`].
    ExpertLinear { x: &'a T, index: &'a T, experts: &'a [Linear] },
    /// See [`Ops::mixture`].
    Mixture { y: &'a T, weights: &'a T },
    /// See [`Ops::clamped_swiglu`].
    ClampedSwiglu { gate: &'a T, up: &'a T, alpha: f64, limit: f64 },
    /// See [`Ops::softcap`].
    Softcap { x: &'a T, cap: f64 },
    /// See [`Ops::stack_rows`].
    StackRows { above: &'a T, below: &'a T },
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
    /// See [`Ops::per_layer_input`].
    PerLayerInput { token: &'a T, context: &'a T, layer: usize, width: usize },
    /// See [`Ops::stack`].
    Stack { parts: Vec<&'a T> },
    /// See [`Ops::stream`].
    Stream { x: &'a T, index: usize },
    /// See [`Ops::stream_mean`].
    StreamMean { x: &'a T },
    /// See [`Ops::add_to_streams`].
    AddToStreams { x: &'a T, branch: &'a T },
    /// See [`Ops::match_rms`].
    MatchRms { x: &'a T, like: &'a T },
    /// See [`Ops::altup_predict`].
    AltupPredict { x: &'a T, coefs: &'a T },
    /// See [`Ops::altup_correct`].
    AltupCorrect { pred: &'a T, made: &'a T, coefs: &'a T, active: usize },
    /// See [`Ops::sparsify`].
    Sparsify { x: &'a T, sparsity: f64 },
    /// See [`Ops::scale_columns`].
    ScaleColumns { x: &'a T, weight: &'a Vector },
    /// See [`Ops::softmax`].
    Softmax { x: &'a T },
    /// See [`Ops::scale_chosen`].
    ScaleChosen { weights: &'a T, index: &'a T, scale: &'a Vector },
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
            Call::Columns { .. } => "columns",
            Call::Join { .. } => "join",
            Call::Multiply { .. } => "multiply",
            Call::Sigmoid { .. } => "sigmoid",
            Call::SigmoidGate { .. } => "sigmoid_gate",
            Call::L2Norm { .. } => "l2_norm",
            Call::CausalConv { .. } => "causal_conv",
            Call::ConvState { .. } => "conv_state",
            Call::GdnDecay { .. } => "gdn_decay",
            Call::GdnCore(_) => "gdn_core",
            Call::GdnState(_) => "gdn_state",
            Call::Scale { .. } => "scale",
            Call::Slice { .. } => "slice",
            Call::Concat { .. } => "concat",
            Call::RouterIndex { .. } => "router_index",
            Call::RouterWeights { .. } => "router_weights",
            Call::ExpertLinear { .. } => "expert_linear",
            Call::Mixture { .. } => "mixture",
            Call::ClampedSwiglu { .. } => "clamped_swiglu",
            Call::Softcap { .. } => "softcap",
            Call::StackRows { .. } => "stack_rows",
            Call::Tail { .. } => "tail",
            Call::BlockConv { .. } => "block_conv",
            Call::Candidates { .. } => "candidates",
            Call::PathScores { .. } => "path_scores",
            Call::Pick { .. } => "pick",
            Call::PerLayerInput { .. } => "per_layer_input",
            Call::Stack { .. } => "stack",
            Call::Stream { .. } => "stream",
            Call::StreamMean { .. } => "stream_mean",
            Call::AddToStreams { .. } => "add_to_streams",
            Call::MatchRms { .. } => "match_rms",
            Call::AltupPredict { .. } => "altup_predict",
            Call::AltupCorrect { .. } => "altup_correct",
            Call::Sparsify { .. } => "sparsify",
            Call::ScaleColumns { .. } => "scale_columns",
            Call::Softmax { .. } => "softmax",
            Call::ScaleChosen { .. } => "scale_chosen",
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
            Call::Columns { x, .. } | Call::Sigmoid { x } | Call::L2Norm { x, .. } => vec![x],
            Call::Join { parts } => parts.clone(),
            Call::Multiply { a, b } => vec![a, b],
            Call::SigmoidGate { x, gate } => vec![x, gate],
            Call::CausalConv { u, state, .. } | Call::ConvState { u, state, .. } => {
                [*u].into_iter().chain(*state).collect()
            }
            Call::GdnDecay { a, .. } => vec![a],
            Call::GdnCore(delta) | Call::GdnState(delta) => delta.operands(),
            Call::Scale { x, .. } | Call::Slice { x, .. } => vec![x],
            Call::Concat { a, b } => vec![a, b],
            Call::RouterIndex { logits, .. } => vec![logits],
            Call::RouterWeights { logits, index, .. } => vec![logits, index],
            Call::ExpertLinear { x, index, .. } => vec![x, index],
            Call::Mixture { y, weights } => vec![y, weights],
            Call::ClampedSwiglu { gate, up, .. } => vec![gate, up],
            Call::Softcap { x, .. } => vec![x],
            Call::StackRows { above, below } => vec![above, below],
            Call::Tail { x, .. } => vec![x],
            Call::BlockConv { x, dynamic, .. } => vec![x, dynamic],
            Call::Candidates { logits, .. } => vec![logits],
            Call::PathScores { logits, candidates, hidden, .. } => vec![logits, candidates, hidden],
            Call::Pick { scores, candidates } => [*scores].into_iter().chain(*candidates).collect(),
            Call::PerLayerInput { token, context, .. } => vec![token, context],
            Call::Stack { parts } => parts.clone(),
            Call::Stream { x, .. } | Call::StreamMean { x } | Call::Sparsify { x, .. } => vec![x],
            Call::ScaleColumns { x, .. } => vec![x],
            Call::Softmax { x } => vec![x],
            Call::ScaleChosen { weights, index, .. } => vec![weights, index],
            Call::AddToStreams { x, branch } => vec![x, branch],
            Call::MatchRms { x, like } => vec![x, like],
            Call::AltupPredict { x, coefs } => vec![x, coefs],
            Call::AltupCorrect { pred, made, coefs, .. } => vec![pred, made, coefs],
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
            Call::Columns { runs, width, .. } => Call::Columns { x: o(0), runs, width },
            Call::Join { .. } => Call::Join { parts: operands.iter().collect() },
            Call::Multiply { .. } => Call::Multiply { a: o(0), b: o(1) },
            Call::Sigmoid { .. } => Call::Sigmoid { x: o(0) },
            Call::SigmoidGate { .. } => Call::SigmoidGate { x: o(0), gate: o(1) },
            Call::L2Norm { scale, .. } => Call::L2Norm { x: o(0), scale },
            Call::CausalConv { state, conv, activation, .. } => {
                Call::CausalConv { u: o(0), state: state.map(|_| o(1)), conv, activation }
            }
            Call::ConvState { state, kernel, .. } => {
                Call::ConvState { u: o(0), state: state.map(|_| o(1)), kernel }
            }
            Call::GdnDecay { a_log, dt_bias, .. } => Call::GdnDecay { a: o(0), a_log, dt_bias },
            Call::GdnCore(ref delta) => Call::GdnCore(delta.with(operands)),
            Call::GdnState(ref delta) => Call::GdnState(delta.with(operands)),
            Call::Scale { factor, .. } => Call::Scale { x: o(0), factor },
            Call::Slice { width, start, end, .. } => Call::Slice { x: o(0), width, start, end },
            Call::Concat { .. } => Call::Concat { a: o(0), b: o(1) },
            Call::RouterIndex { router, bias, .. } => Call::RouterIndex { logits: o(0), router, bias },
            Call::RouterWeights { router, .. } => Call::RouterWeights { logits: o(0), index: o(1), router },
            Call::ExpertLinear { experts, .. } => Call::ExpertLinear { x: o(0), index: o(1), experts },
            Call::Mixture { .. } => Call::Mixture { y: o(0), weights: o(1) },
            Call::ClampedSwiglu { alpha, limit, .. } => {
                Call::ClampedSwiglu { gate: o(0), up: o(1), alpha, limit }
            }
            Call::Softcap { cap, .. } => Call::Softcap { x: o(0), cap },
            Call::StackRows { .. } => Call::StackRows { above: o(0), below: o(1) },
            Call::Tail { keep, .. } => Call::Tail { x: o(0), keep },
            Call::BlockConv { conv, side, .. } => Call::BlockConv { x: o(0), dynamic: o(1), conv, side },
            Call::Candidates { k, .. } => Call::Candidates { logits: o(0), k },
            Call::PathScores { selector, anchor, .. } => {
                Call::PathScores { logits: o(0), candidates: o(1), hidden: o(2), selector, anchor }
            }
            Call::Pick { candidates, .. } => {
                Call::Pick { scores: o(0), candidates: candidates.map(|_| o(1)) }
            }
            Call::PerLayerInput { layer, width, .. } => {
                Call::PerLayerInput { token: o(0), context: o(1), layer, width }
            }
            Call::Stack { .. } => Call::Stack { parts: operands.iter().collect() },
            Call::Stream { index, .. } => Call::Stream { x: o(0), index },
            Call::StreamMean { .. } => Call::StreamMean { x: o(0) },
            Call::AddToStreams { .. } => Call::AddToStreams { x: o(0), branch: o(1) },
            Call::MatchRms { .. } => Call::MatchRms { x: o(0), like: o(1) },
            Call::AltupPredict { .. } => Call::AltupPredict { x: o(0), coefs: o(1) },
            Call::AltupCorrect { active, .. } => {
                Call::AltupCorrect { pred: o(0), made: o(1), coefs: o(2), active }
            }
            Call::Sparsify { sparsity, .. } => Call::Sparsify { x: o(0), sparsity },
            Call::ScaleColumns { weight, .. } => Call::ScaleColumns { x: o(0), weight },
            Call::Softmax { .. } => Call::Softmax { x: o(0) },
            Call::ScaleChosen { scale, .. } => Call::ScaleChosen { weights: o(0), index: o(1), scale },
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
        Call::Columns { x, runs, width } => columns(x, runs, *width),
        Call::Join { parts } => join(parts).into_dyn(),
        Call::Multiply { a, b } => multiply(a, b),
        Call::Sigmoid { x } => sigmoid(x),
        Call::SigmoidGate { x, gate } => sigmoid_gate(x, gate),
        Call::L2Norm { x, scale } => l2_norm(x, *scale).into_dyn(),
        Call::CausalConv { u, state, conv, activation } => {
            causal_conv(u, *state, conv, *activation).into_dyn()
        }
        Call::ConvState { u, state, kernel } => conv_state(u, *state, *kernel).into_dyn(),
        Call::GdnDecay { a, a_log, dt_bias } => gdn_decay(a, a_log, dt_bias).into_dyn(),
        Call::GdnCore(delta) => gdn_core(delta).into_dyn(),
        Call::GdnState(delta) => gdn_state(delta).into_dyn(),
        Call::Scale { x, factor } => scale(x, *factor),
        Call::Slice { x, width, start, end } => slice(x, *width, *start..*end),
        Call::Concat { a, b } => concat(a, b).into_dyn(),
        Call::RouterIndex { logits, router, bias } => {
            router_index(logits, router, bias.map(|b| &b[..])).into_dyn()
        }
        Call::RouterWeights { logits, index, router } => router_weights(logits, index, router).into_dyn(),
        Call::ExpertLinear { x, index, experts } => expert_linear(x, index, experts)?.into_dyn(),
        Call::Mixture { y, weights } => mixture(y, weights).into_dyn(),
        Call::ClampedSwiglu { gate, up, alpha, limit } => clamped_swiglu(gate, up, *alpha, *limit),
        Call::Softcap { x, cap } => softcap(x, *cap),
        Call::StackRows { above, below } => stack_rows(above, below).into_dyn(),
        Call::Tail { x, keep } => tail(x, *keep),
        Call::BlockConv { x, dynamic, conv, side } => block_conv(x, dynamic, conv, *side).into_dyn(),
        Call::Candidates { logits, k } => candidates(logits, *k).into_dyn(),
        Call::PathScores { logits, candidates, hidden, selector, anchor } => {
            path_scores(logits, candidates, hidden, selector, *anchor)?.into_dyn()
        }
        Call::Pick { scores, candidates } => pick(scores, *candidates).into_dyn(),
        Call::PerLayerInput { token, context, layer, width } => {
            per_layer_input(token, context, *layer, *width).into_dyn()
        }
        Call::Stack { parts } => stack(parts).into_dyn(),
        Call::Stream { x, index } => stream(x, *index).into_dyn(),
        Call::StreamMean { x } => stream_mean(x).into_dyn(),
        Call::AddToStreams { x, branch } => add_to_streams(x, branch).into_dyn(),
        Call::MatchRms { x, like } => match_rms(x, like).into_dyn(),
        Call::AltupPredict { x, coefs } => altup_predict(x, coefs).into_dyn(),
        Call::AltupCorrect { pred, made, coefs, active } => {
            altup_correct(pred, made, coefs, *active).into_dyn()
        }
        Call::Sparsify { x, sparsity } => sparsify(x, *sparsity).into_dyn(),
        Call::ScaleColumns { x, weight } => scale_columns(x, weight).into_dyn(),
        Call::Softmax { x } => softmax(x).into_dyn(),
        Call::ScaleChosen { weights, index, scale } => scale_chosen(weights, index, scale).into_dyn(),
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

    /// The columns of `runs`, one run after the other; `[tokens, n]`, or with a `width`
    /// `[tokens, n / width, width]`.
    fn columns(&mut self, at: Site, x: &Self::Tensor, runs: &[Run], width: Option<usize>) -> Self::Tensor {
        self.run(at, Call::Columns { x, runs, width })
    }

    /// `y[t, ·] = parts[0][t, ·] | parts[1][t, ·] | …`: rows side by side.
    fn join(&mut self, at: Site, parts: &[&Self::Tensor]) -> Self::Tensor {
        self.run(at, Call::Join { parts: parts.to_vec() })
    }

    /// `y = a · b`, element by element.
    fn multiply(&mut self, at: Site, a: &Self::Tensor, b: &Self::Tensor) -> Self::Tensor {
        self.run(at, Call::Multiply { a, b })
    }

    /// `y = σ(x) = 1 / (1 + e^-x)`, element by element.
    fn sigmoid(&mut self, at: Site, x: &Self::Tensor) -> Self::Tensor {
        self.run(at, Call::Sigmoid { x })
    }

    /// `y[t, i] = x[t, i] · σ(gate[t, i])`; the gate may hold one value for the whole row.
    fn sigmoid_gate(&mut self, at: Site, x: &Self::Tensor, gate: &Self::Tensor) -> Self::Tensor {
        self.run(at, Call::SigmoidGate { x, gate })
    }

    /// `y = x / sqrt(Σ x² + 1e-6) · scale` over the last axis of `[tokens, heads, dim]`.
    fn l2_norm(&mut self, at: Site, x: &Self::Tensor, scale: f64) -> Self::Tensor {
        self.run(at, Call::L2Norm { x, scale })
    }

    /// `y[t, c] = act(Σ_{j<K} w[c, j] · u[t - K + 1 + j, c] + b[c])`; `[tokens, channels]`. Rows before
    /// the pass come from the state, and are 0 before the start of the text.
    fn causal_conv(
        &mut self,
        at: Site,
        u: &Self::Tensor,
        state: &State<Self::Tensor>,
        conv: &Conv,
        activation: Option<Activation>,
    ) -> Self::Tensor {
        self.run(at, Call::CausalConv { u, state: state.0.as_ref(), conv, activation })
    }

    /// Replaces the state of a convolution by the last `kernel` rows that it has read, `[channels, kernel]`.
    fn conv_state(
        &mut self,
        at: At,
        name: &'static str,
        state: &mut State<Self::Tensor>,
        u: &Self::Tensor,
        kernel: usize,
    ) {
        let before = state.0.take();
        state.0 = Some(self.run(at.site(name), Call::ConvState { u, state: before.as_ref(), kernel }));
    }

    /// `g[t, h] = -e^a_log[h] · ln(1 + e^(a[t, h] + dt_bias[h]))`: the log decay.
    fn gdn_decay(&mut self, at: Site, a: &Self::Tensor, a_log: &Vector, dt_bias: &Vector) -> Self::Tensor {
        self.run(at, Call::GdnDecay { a, a_log, dt_bias })
    }

    /// Token by token and value head by value head: `S ← e^g · S; δ = β · (v - Sᵀ k); S ← S + k δᵀ;
    /// y = Sᵀ q`; the result y is `[tokens, value_heads, value_dim]`.
    fn gdn_core(&mut self, at: Site, delta: Delta<Self::Tensor>) -> Self::Tensor {
        self.run(at, Call::GdnCore(delta))
    }

    /// The state S after the last token of [`Ops::gdn_core`], `[value_heads, key_dim, value_dim]`.
    fn gdn_state(&mut self, at: Site, delta: Delta<Self::Tensor>) -> Self::Tensor {
        self.run(at, Call::GdnState(delta))
    }

    /// `y = x · factor`, element by element.
    fn scale(&mut self, at: Site, x: &Self::Tensor, factor: f64) -> Self::Tensor {
        self.run(at, Call::Scale { x, factor })
    }

    /// `y[t, g, i] = x[t, g · width + range.start + i]`: the values `range` of every group of `width`.
    /// The result is `[tokens, len]`, or `[tokens, groups, len]` where a row holds several groups or `x`
    /// has three axes.
    fn slice(&mut self, at: Site, x: &Self::Tensor, width: usize, range: Range<usize>) -> Self::Tensor {
        self.run(at, Call::Slice { x, width, start: range.start, end: range.end })
    }

    /// `y[t, h] = a[t, h] ‖ b[t, h]`, or `‖ b[t, 0]` where `b` has one head; three axes each.
    fn concat(&mut self, at: Site, a: &Self::Tensor, b: &Self::Tensor) -> Self::Tensor {
        self.run(at, Call::Concat { a, b })
    }

    /// The ids of the `num_experts_per_tok` experts with the largest scores, `[tokens, k]`; `bias` joins
    /// the scores for the choice only. `logits` is `[tokens, experts]`.
    fn router_index(
        &mut self,
        at: Site,
        logits: &Self::Tensor,
        router: &Router,
        bias: Option<&Vector>,
    ) -> Self::Tensor {
        self.run(at, Call::RouterIndex { logits, router, bias })
    }

    /// The weights of the chosen experts, `[tokens, k]` in the order of `index`: softmax or sigmoid of
    /// their logits, renormalised and scaled as the router says.
    fn router_weights(
        &mut self,
        at: Site,
        logits: &Self::Tensor,
        index: &Self::Tensor,
        router: &Router,
    ) -> Self::Tensor {
        self.run(at, Call::RouterWeights { logits, index, router })
    }

    /// `y[t, j, o] = Σ_i x[t, j, i] · W_e[o, i] + b_e[o]` with `e = index[t, j]`; `x` is `[tokens, k, in]`,
    /// or `[tokens, in]` where all choices read the same row; the result is `[tokens, k, out]`.
    fn expert_linear(
        &mut self,
        at: Site,
        x: &Self::Tensor,
        index: &Self::Tensor,
        experts: &[Linear],
    ) -> Self::Tensor {
        self.run(at, Call::ExpertLinear { x, index, experts })
    }

    /// `m[t, i] = Σ_j weights[t, j] · y[t, j, i]`; `[tokens, hidden]`.
    fn mixture(&mut self, at: Site, y: &Self::Tensor, weights: &Self::Tensor) -> Self::Tensor {
        self.run(at, Call::Mixture { y, weights })
    }

    /// `y = (clamp(up, ±limit) + 1) · g · σ(alpha · g)` with `g = min(gate, limit)`, element by element.
    fn clamped_swiglu(
        &mut self,
        at: Site,
        gate: &Self::Tensor,
        up: &Self::Tensor,
        alpha: f64,
        limit: f64,
    ) -> Self::Tensor {
        self.run(at, Call::ClampedSwiglu { gate, up, alpha, limit })
    }

    /// `y = cap · tanh(x / cap)`, element by element: logits bent into (-cap, cap).
    fn softcap(&mut self, at: Site, x: &Self::Tensor, cap: f64) -> Self::Tensor {
        self.run(at, Call::Softcap { x, cap })
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

    /// `y[j] = parts[j]`: streams of `[tokens, hidden]` as `[streams, tokens, hidden]`.
    fn stack(&mut self, at: Site, parts: &[&Self::Tensor]) -> Self::Tensor {
        self.run(at, Call::Stack { parts: parts.to_vec() })
    }

    /// `y = x[index]`: one of the streams, `[tokens, hidden]`.
    fn stream(&mut self, at: Site, x: &Self::Tensor, index: usize) -> Self::Tensor {
        self.run(at, Call::Stream { x, index })
    }

    /// `y = Σ_j x[j] / streams`; `[tokens, hidden]`.
    fn stream_mean(&mut self, at: Site, x: &Self::Tensor) -> Self::Tensor {
        self.run(at, Call::StreamMean { x })
    }

    /// `y[0] = x[0]`, `y[j] = x[j] + branch` for all other streams.
    fn add_to_streams(&mut self, at: Site, x: &Self::Tensor, branch: &Self::Tensor) -> Self::Tensor {
        self.run(at, Call::AddToStreams { x, branch })
    }

    /// `y[t] = x[t] · rms(like[t]) / sqrt(max(mean(x[t]²), 1e-5))`; `[tokens, hidden]`.
    fn match_rms(&mut self, at: Site, x: &Self::Tensor, like: &Self::Tensor) -> Self::Tensor {
        self.run(at, Call::MatchRms { x, like })
    }

    /// `y[o, t] = x[o, t] + Σ_s coefs[t, o · N + s] · x[s, t]`; `[streams, tokens, hidden]`.
    fn altup_predict(&mut self, at: Site, x: &Self::Tensor, coefs: &Self::Tensor) -> Self::Tensor {
        self.run(at, Call::AltupPredict { x, coefs })
    }

    /// `y[j, t] = pred[j, t] + (made[t] - pred[active, t]) · (1 + coefs[t, j])`.
    fn altup_correct(
        &mut self,
        at: Site,
        pred: &Self::Tensor,
        made: &Self::Tensor,
        coefs: &Self::Tensor,
        active: usize,
    ) -> Self::Tensor {
        self.run(at, Call::AltupCorrect { pred, made, coefs, active })
    }

    /// `y[t] = max(0, x[t] - (mean(x[t]) + std(x[t]) · Φ⁻¹(sparsity)))`, population std.
    fn sparsify(&mut self, at: Site, x: &Self::Tensor, sparsity: f64) -> Self::Tensor {
        self.run(at, Call::Sparsify { x, sparsity })
    }

    /// `y[t, i] = x[t, i] · weight[i]`.
    fn scale_columns(&mut self, at: Site, x: &Self::Tensor, weight: &Vector) -> Self::Tensor {
        self.run(at, Call::ScaleColumns { x, weight })
    }

    /// `y[t, i] = e^x[t, i] / Σ_j e^x[t, j]`, row by row.
    fn softmax(&mut self, at: Site, x: &Self::Tensor) -> Self::Tensor {
        self.run(at, Call::Softmax { x })
    }

    /// `y[t, j] = weights[t, j] · scale[index[t, j]]`: a factor of each expert's own.
    fn scale_chosen(
        &mut self,
        at: Site,
        weights: &Self::Tensor,
        index: &Self::Tensor,
        scale: &Vector,
    ) -> Self::Tensor {
        self.run(at, Call::ScaleChosen { weights, index, scale })
    }

    /// The rows of `above`, then those of `below`; `[tokens, columns]`.
    fn stack_rows(&mut self, at: Site, above: &Self::Tensor, below: &Self::Tensor) -> Self::Tensor {
        self.run(at, Call::StackRows { above, below })
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
}
