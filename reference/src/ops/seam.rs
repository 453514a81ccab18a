//! The seam: what an interpretation of model programs is.

use super::{Call, Delta, Mask, Run, Side, Table};
use crate::State;
use spec::families::draft::{DraftConv, Selector};
use spec::families::moe::Router;
use spec::families::{Activation, Conv, Linear};
use spec::site::At;
use spec::{Matrix, Rope, Site, Vector};
use std::ops::Range;

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
