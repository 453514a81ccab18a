//! Hybrids of gated delta rule and gated softmax attention: qwen3_next, qwen3_5, qwen3_5_moe.
//!
//! ```text
//! x ← x + mixer(norm₁(x))
//! x ← x + ffn(norm₂(x))
//! logits = norm_f(x) · W_headᵀ
//! ```
//!
//! Delta rule: queries, keys and values pass one short convolution; queries and keys are brought to unit
//! length; the state is read and written token by token; what is read is normed, then gated.
//!
//! Softmax attention: the query projection carries a gate beside each head's query; per-head norm of q
//! and k; partial rope; the context is gated before its output projection.
//!
//! Experts: the chosen ones weighted by softmax, and a shared one behind a gate of its own.
//!
//! Sources: arXiv 2412.06464 (gated delta rule), arXiv 2505.06708 (gated attention), the Qwen3-Next and
//! Qwen3.5 releases.

use super::moe::routed_experts;
use super::{KvCache, Tables};
use crate::State;
use crate::ops::{Delta, Mask, Ops, Run};
use spec::families::hybrid::{
    AttentionWeights, DeltaProjections, DeltaWeights, FeedForward, HybridConfig, HybridWeights, LayerWeights,
    MixerWeights,
};
use spec::families::{Activation, Linear, Mlp};
use spec::site::At;

/// A hybrid.
#[derive(Clone, Debug)]
pub struct Hybrid {
    /// Its config.
    pub config: HybridConfig,
    /// Its weights.
    pub weights: HybridWeights,
}

/// What a hybrid carries from pass to pass.
#[derive(Clone, Debug)]
pub struct HybridState<T> {
    /// Number of tokens fed.
    pub position: usize,
    /// One entry a layer.
    pub layers: Vec<MixerState<T>>,
}

/// What the mixer of one layer carries along.
#[derive(Clone, Debug)]
pub enum MixerState<T> {
    /// Of the delta rule.
    Linear(DeltaState<T>),
    /// Of softmax attention.
    Full(KvCache<T>),
}

/// What the delta rule carries along: no more for a long text than for a short one.
#[derive(Clone, Debug)]
pub struct DeltaState<T> {
    /// The last rows before the convolution, `[channels, kernel]`.
    pub conv: State<T>,
    /// `[value_heads, key_dim, value_dim]`
    pub recurrent: State<T>,
}

impl Hybrid {
    /// State before the first token.
    pub fn fresh<T>(&self) -> HybridState<T> {
        let layers = self.weights.layers.iter().map(|layer| match layer.mixer {
            MixerWeights::Linear(_) => {
                MixerState::Linear(DeltaState { conv: State(None), recurrent: State(None) })
            }
            MixerWeights::Full(_) => MixerState::Full(KvCache::empty()),
        });
        HybridState { position: 0, layers: layers.collect() }
    }

    /// Logits of every token of `ids`, `[tokens, vocab]`.
    pub fn pass<O: Ops + ?Sized>(
        &self,
        ops: &mut O,
        state: &mut HybridState<O::Tensor>,
        ids: &[u32],
    ) -> O::Tensor {
        let hidden = self.hidden(ops, state, ids);
        self.head(ops, &hidden)
    }

    /// The hidden state of every token of `ids` behind the final norm, `[tokens, hidden]`: what the head
    /// reads, and what a multi-token-prediction head is fed with.
    pub fn hidden<O: Ops + ?Sized>(
        &self,
        ops: &mut O,
        state: &mut HybridState<O::Tensor>,
        ids: &[u32],
    ) -> O::Tensor {
        let (c, w, at) = (&self.config, &self.weights, At::MODEL);
        let mut x = ops.embed(at.site("embed"), ids, &w.embed_tokens, 1.0);
        let rope = Tables::new(ops, ["rope.cos", "rope.sin"], &c.rope, state.position, ids.len());
        for (i, mixer) in state.layers.iter_mut().enumerate() {
            x = self.layer(ops, i, &x, state.position, &rope, mixer);
        }
        state.position += ids.len();
        ops.rms_norm(at.site("final_norm"), &x, Some(&w.norm), c.hidden_size, c.rms_norm_eps)
    }

    /// Logits of normed hidden states.
    pub fn head<O: Ops + ?Sized>(&self, ops: &mut O, hidden: &O::Tensor) -> O::Tensor {
        let head = Linear { weight: self.weights.lm_head.clone(), bias: None };
        ops.linear(At::MODEL.site("logits"), hidden, &head)
    }

    /// Layer `i` alone: `x` is `[tokens, hidden]` and stands at positions `first..`.
    pub fn layer<O: Ops + ?Sized>(
        &self,
        ops: &mut O,
        i: usize,
        x: &O::Tensor,
        first: usize,
        rope: &Tables<O::Tensor>,
        state: &mut MixerState<O::Tensor>,
    ) -> O::Tensor {
        block(ops, At::layer(i), &self.config, &self.weights.layers[i], x, first, rope, state)
    }
}

/// One layer: a mixer, then a feed-forward.
pub(super) fn block<O: Ops + ?Sized>(
    ops: &mut O,
    at: At,
    c: &HybridConfig,
    w: &LayerWeights,
    x: &O::Tensor,
    first: usize,
    rope: &Tables<O::Tensor>,
    state: &mut MixerState<O::Tensor>,
) -> O::Tensor {
    let (hidden, eps) = (c.hidden_size, c.rms_norm_eps);
    let h = ops.rms_norm(at.site("attn_norm"), x, Some(&w.input_layernorm), hidden, eps);
    let branch = match (&w.mixer, state) {
        (MixerWeights::Linear(w), MixerState::Linear(state)) => delta_rule(ops, at, c, w, &h, state),
        (MixerWeights::Full(w), MixerState::Full(cache)) => {
            gated_attention(ops, at, c, w, &h, first, rope, cache)
        }
        _ => panic!("{at:?}: state of another mixer"),
    };
    let x = ops.residual(at.site("resid_mid"), x, &branch, 1.0);

    let h = ops.rms_norm(at.site("mlp_norm"), &x, Some(&w.post_attention_layernorm), hidden, eps);
    let branch = feed_forward(ops, at, c, &w.mlp, &h);
    ops.residual(at.site("out"), &x, &branch, 1.0)
}

/// The gated delta rule over `h`, `[tokens, hidden]`.
fn delta_rule<O: Ops + ?Sized>(
    ops: &mut O,
    at: At,
    c: &HybridConfig,
    w: &DeltaWeights,
    h: &O::Tensor,
    state: &mut DeltaState<O::Tensor>,
) -> O::Tensor {
    let Projected { qkv, z, b, a } = project(ops, at, c, w, h);

    let conv_out = ops.causal_conv(at.site("conv_out"), &qkv, &state.conv, &w.conv1d, Some(Activation::Silu));
    ops.conv_state(at, "conv_state", &mut state.conv, &qkv, w.conv1d.kernel);
    let (keys, values) = (c.linear_key_width(), c.linear_value_width());
    let (key_dim, value_dim) = (c.linear_key_head_dim, c.linear_value_head_dim);
    let q = ops.columns(at.site("gdn_q"), &conv_out, &[Run::one(0, keys)], Some(key_dim));
    let k = ops.columns(at.site("gdn_k"), &conv_out, &[Run::one(keys, keys)], Some(key_dim));
    let v = ops.columns(at.site("gdn_v"), &conv_out, &[Run::one(2 * keys, values)], Some(value_dim));
    let q = ops.l2_norm(at.site("gdn_q_unit"), &q, c.linear_scale());
    let k = ops.l2_norm(at.site("gdn_k_unit"), &k, 1.0);

    let g = ops.gdn_decay(at.site("gdn_g"), &a, &w.a_log, &w.dt_bias);
    let beta = ops.sigmoid(at.site("gdn_beta"), &b);
    let before = state.recurrent.0.take();
    let delta = Delta { q: &q, k: &k, v: &v, g: &g, beta: &beta, state: before.as_ref() };
    let core = ops.gdn_core(at.site("gdn_core"), delta);
    state.recurrent.0 = Some(ops.gdn_state(at.site("gdn_state"), delta));

    let z = ops.columns(at.site("gdn_z_heads"), &z, &[Run::one(0, values)], Some(value_dim));
    let normed = ops.rms_norm(at.site("gdn_core_norm"), &core, Some(&w.norm), value_dim, c.rms_norm_eps);
    let gated = ops.gated_act(at.site("gdn_norm"), &z, &normed, Activation::Silu);
    ops.linear(at.site("attn_out"), &gated, &w.out_proj)
}

/// What the delta rule projects its input to.
struct Projected<T> {
    /// `[tokens, q + k + v]`
    qkv: T,
    /// `[tokens, value_heads · value_dim]`
    z: T,
    /// `[tokens, value_heads]`
    b: T,
    /// `[tokens, value_heads]`
    a: T,
}

/// qwen3_5 projects to each part by itself; qwen3_next to two interleaved rows that are taken apart:
///
/// ```text
/// qkvz   q₀ k₀ v₀ v₁ z₀ z₁   q₁ k₁ v₂ v₃ z₂ z₃   …      two value heads a key head
/// ba     b₀ b₁ a₀ a₁         b₂ b₃ a₂ a₃         …
/// ```
fn project<O: Ops + ?Sized>(
    ops: &mut O,
    at: At,
    c: &HybridConfig,
    w: &DeltaWeights,
    h: &O::Tensor,
) -> Projected<O::Tensor> {
    match &w.in_proj {
        DeltaProjections::Separate { qkv, z, b, a } => {
            let qkv = ops.linear(at.site("gdn_qkv"), h, qkv);
            let z = ops.linear(at.site("gdn_z"), h, z);
            let b = ops.linear(at.site("gdn_b"), h, b);
            let a = ops.linear(at.site("gdn_a"), h, a);
            Projected { qkv, z, b, a }
        }
        DeltaProjections::Grouped { qkvz, ba } => {
            let qkvz = ops.linear(at.site("gdn_qkvz"), h, qkvz);
            let ba = ops.linear(at.site("gdn_ba"), h, ba);
            let (groups, key, share) = (c.linear_num_key_heads, c.linear_key_head_dim, c.linear_group());
            let value = share * c.linear_value_head_dim;
            let stride = 2 * key + 2 * value;
            let part = |start, width| Run { start, width, groups, stride };
            let (q, k, v) = (part(0, key), part(key, key), part(2 * key, value));
            let z = part(2 * key + value, value);
            let scalar = |start| Run { start, width: share, groups, stride: 2 * share };
            Projected {
                qkv: ops.columns(at.site("gdn_qkv"), &qkvz, &[q, k, v], None),
                z: ops.columns(at.site("gdn_z"), &qkvz, &[z], None),
                b: ops.columns(at.site("gdn_b"), &ba, &[scalar(0)], None),
                a: ops.columns(at.site("gdn_a"), &ba, &[scalar(share)], None),
            }
        }
    }
}

/// Softmax attention over `h`, `[tokens, hidden]`, with a gate on its context.
fn gated_attention<O: Ops + ?Sized>(
    ops: &mut O,
    at: At,
    c: &HybridConfig,
    w: &AttentionWeights,
    h: &O::Tensor,
    first: usize,
    rope: &Tables<O::Tensor>,
    cache: &mut KvCache<O::Tensor>,
) -> O::Tensor {
    let (head_dim, eps) = (c.head_dim, c.rms_norm_eps);
    let query_and_gate = ops.linear(at.site("q_proj"), h, &w.q_proj);
    let k = ops.linear(at.site("k_proj"), h, &w.k_proj);
    let v = ops.linear(at.site("v_proj"), h, &w.v_proj);
    // Head by head: its query, then its gate.
    let q = ops.slice(at.site("q_split"), &query_and_gate, 2 * head_dim, 0..head_dim);
    let gate = ops.slice(at.site("attn_gate"), &query_and_gate, 2 * head_dim, head_dim..2 * head_dim);
    let q = ops.rms_norm(at.site("q_norm"), &q, Some(&w.q_norm), head_dim, eps);
    let k = ops.rms_norm(at.site("k_norm"), &k, Some(&w.k_norm), head_dim, eps);
    let q = ops.rotate(at.site("q_rope"), &q, &rope.cos, &rope.sin, &c.rope);
    let k = ops.rotate(at.site("k_rope"), &k, &rope.cos, &rope.sin, &c.rope);
    ops.append(at, "k_cache", &mut cache.k, &k, head_dim);
    ops.append(at, "v_cache", &mut cache.v, &v, head_dim);
    let scores = ops.attn_scores(at.site("attn_scores"), &q, cache.k.get(), c.attention_scale(), None);
    let probs = ops.attn_probs(at.site("attn_probs"), &scores, Mask::causal(first, None), None);
    let ctx = ops.attn_ctx(at.site("attn_ctx"), &probs, cache.v.get());
    let gated = ops.sigmoid_gate(at.site("attn_gated"), &ctx, &gate);
    ops.linear(at.site("attn_out"), &gated, &w.o_proj)
}

/// A dense feed-forward, or experts with a shared one beside them:
///
/// ```text
/// y = Σ_chosen w_e · expert_e(h) + σ(gate · h) · shared(h)
/// ```
fn feed_forward<O: Ops + ?Sized>(
    ops: &mut O,
    at: At,
    c: &HybridConfig,
    w: &FeedForward,
    h: &O::Tensor,
) -> O::Tensor {
    match (w, &c.moe) {
        (FeedForward::Dense(w), _) => mlp(ops, at, ["mlp_gate", "mlp_up", "mlp_act", "mlp_out"], w, h),
        (FeedForward::Sparse { gate, experts, shared_expert, shared_expert_gate }, Some(moe)) => {
            let logits = ops.linear(at.site("router_logits"), h, gate);
            let index = ops.router_index(at.site("router_index"), &logits, &moe.router, None);
            let weights = ops.router_weights(at.site("router_weights"), &logits, &index, &moe.router);
            let routed = routed_experts(ops, at, h, &index, &weights, experts, Activation::Silu);
            let sites = ["shared_gate_proj", "shared_up", "shared_act", "shared_out"];
            let shared = mlp(ops, at, sites, shared_expert, h);
            let gate = ops.linear(at.site("shared_gate"), h, shared_expert_gate);
            let shared = ops.sigmoid_gate(at.site("shared_gated"), &shared, &gate);
            ops.residual(at.site("moe_out"), &routed, &shared, 1.0)
        }
        (FeedForward::Sparse { .. }, None) => panic!("{at:?}: experts without a router"),
    }
}

/// `down(silu(gate(h)) · up(h))` at the sites of gate, up, their product, and the result.
fn mlp<O: Ops + ?Sized>(ops: &mut O, at: At, sites: [&'static str; 4], w: &Mlp, h: &O::Tensor) -> O::Tensor {
    let gate = ops.linear(at.site(sites[0]), h, &w.gate_proj);
    let up = ops.linear(at.site(sites[1]), h, &w.up_proj);
    let act = ops.gated_act(at.site(sites[2]), &gate, &up, Activation::Silu);
    ops.linear(at.site(sites[3]), &act, &w.down_proj)
}
