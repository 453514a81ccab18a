//! One op call as a value.

#[cfg(doc)]
use super::Ops;
use super::{Delta, Mask, Run, Side};
use spec::families::draft::{DraftConv, Selector};
use spec::families::moe::Router;
use spec::families::{Activation, Conv, Linear};
use spec::{Matrix, Rope, Vector};

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
