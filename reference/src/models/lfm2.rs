//! Hybrids of gated short convolution and softmax attention: lfm2.
//!
//! ```text
//! x ← x + mixer(norm₁(x))
//! x ← x + w2(silu(w1(norm₂(x))) · w3(norm₂(x)))
//! logits = norm_f(x) · W_headᵀ
//!
//! short convolution:  B, C, u = W_in h;  out = W_out (C · conv(B · u))
//! ```
//!
//! The convolution has no activation. Attention norms q and k per head before rope.
//!
//! Source: the LFM2 release and its technical report, arXiv 2511.23404.

use super::{KvCache, Tables};
use crate::State;
use crate::ops::{Mask, Ops, Run};
use spec::families::lfm2::{Lfm2Config, Lfm2Weights, MixerWeights};
use spec::families::{Activation, Conv, Linear};
use spec::site::At;

/// An lfm2 model.
#[derive(Clone, Debug)]
pub struct Lfm2 {
    /// Its config.
    pub config: Lfm2Config,
    /// Its weights.
    pub weights: Lfm2Weights,
}

/// What an lfm2 model carries from pass to pass.
#[derive(Clone, Debug)]
pub struct Lfm2State<T> {
    /// Number of tokens fed.
    pub position: usize,
    /// One entry a layer.
    pub layers: Vec<Lfm2LayerState<T>>,
}

/// What the mixer of one layer carries along.
#[derive(Clone, Debug)]
pub enum Lfm2LayerState<T> {
    /// The last rows that the convolution read, `[hidden, kernel]`.
    Conv(State<T>),
    /// Keys and values.
    Full(KvCache<T>),
}

impl Lfm2 {
    /// State before the first token.
    pub fn fresh<T>(&self) -> Lfm2State<T> {
        let layers = self.weights.layers.iter().map(|layer| match layer.mixer {
            MixerWeights::Conv { .. } => Lfm2LayerState::Conv(State(None)),
            MixerWeights::Full { .. } => Lfm2LayerState::Full(KvCache::empty()),
        });
        Lfm2State { position: 0, layers: layers.collect() }
    }

    /// Logits of every token of `ids`, `[tokens, vocab]`.
    pub fn pass<O: Ops + ?Sized>(
        &self,
        ops: &mut O,
        state: &mut Lfm2State<O::Tensor>,
        ids: &[u32],
    ) -> O::Tensor {
        let (c, w, at) = (&self.config, &self.weights, At::MODEL);
        let mut x = ops.embed(at.site("embed"), ids, &w.embed_tokens, 1.0);
        let rope = Tables::new(ops, ["rope.cos", "rope.sin"], &c.rope, state.position, ids.len());
        for (i, mixer) in state.layers.iter_mut().enumerate() {
            x = self.layer(ops, i, &x, state.position, &rope, mixer);
        }
        state.position += ids.len();
        let x = ops.rms_norm(at.site("final_norm"), &x, Some(&w.embedding_norm), c.hidden_size, c.norm_eps);
        ops.linear(at.site("logits"), &x, &Linear { weight: w.lm_head.clone(), bias: None })
    }

    /// Layer `i` alone: `x` is `[tokens, hidden]` and stands at positions `first..`.
    pub fn layer<O: Ops + ?Sized>(
        &self,
        ops: &mut O,
        i: usize,
        x: &O::Tensor,
        first: usize,
        rope: &Tables<O::Tensor>,
        state: &mut Lfm2LayerState<O::Tensor>,
    ) -> O::Tensor {
        let (c, w, at) = (&self.config, &self.weights.layers[i], At::layer(i));
        let h = ops.rms_norm(at.site("attn_norm"), x, Some(&w.operator_norm), c.hidden_size, c.norm_eps);
        let branch = match (&w.mixer, state) {
            (MixerWeights::Conv { in_proj, conv, out_proj }, Lfm2LayerState::Conv(state)) => {
                let gated = short_conv(ops, at, c, in_proj, conv, &h, state);
                ops.linear(at.site("attn_out"), &gated, out_proj)
            }
            (MixerWeights::Full { out_proj, .. }, Lfm2LayerState::Full(cache)) => {
                let ctx = attention(ops, at, c, &w.mixer, &h, first, rope, cache);
                ops.linear(at.site("attn_out"), &ctx, out_proj)
            }
            _ => panic!("layer {i}: state of another mixer"),
        };
        let x = ops.residual(at.site("resid_mid"), x, &branch, 1.0);

        let h = ops.rms_norm(at.site("mlp_norm"), &x, Some(&w.ffn_norm), c.hidden_size, c.norm_eps);
        let gate = ops.linear(at.site("mlp_gate"), &h, &w.w1);
        let up = ops.linear(at.site("mlp_up"), &h, &w.w3);
        let act = ops.gated_act(at.site("mlp_act"), &gate, &up, Activation::Silu);
        let branch = ops.linear(at.site("mlp_out"), &act, &w.w2);
        ops.residual(at.site("out"), &x, &branch, 1.0)
    }
}

/// `C · conv(B · u)`, where the rows of `in_proj` are B, then C, then u.
fn short_conv<O: Ops + ?Sized>(
    ops: &mut O,
    at: At,
    c: &Lfm2Config,
    in_proj: &Linear,
    conv: &Conv,
    h: &O::Tensor,
    state: &mut State<O::Tensor>,
) -> O::Tensor {
    let hidden = c.hidden_size;
    let bcx = ops.linear(at.site("conv_bcx"), h, in_proj);
    let gate_in = ops.columns(at.site("conv_b"), &bcx, &[Run::one(0, hidden)], None);
    let gate_out = ops.columns(at.site("conv_c"), &bcx, &[Run::one(hidden, hidden)], None);
    let values = ops.columns(at.site("conv_x"), &bcx, &[Run::one(2 * hidden, hidden)], None);
    let u = ops.multiply(at.site("conv_in"), &gate_in, &values);
    let y = ops.causal_conv(at.site("conv_out"), &u, state, conv, None);
    ops.conv_state(at, "conv_state", state, &u, conv.kernel);
    ops.multiply(at.site("conv_gated"), &gate_out, &y)
}

/// The context of softmax attention over `h`, `[tokens, hidden]`.
fn attention<O: Ops + ?Sized>(
    ops: &mut O,
    at: At,
    c: &Lfm2Config,
    w: &MixerWeights,
    h: &O::Tensor,
    first: usize,
    rope: &Tables<O::Tensor>,
    cache: &mut KvCache<O::Tensor>,
) -> O::Tensor {
    let MixerWeights::Full { q_proj, k_proj, v_proj, q_layernorm, k_layernorm, .. } = w else {
        unreachable!("attention layers have attention weights")
    };
    let (head_dim, eps) = (c.head_dim, c.norm_eps);
    let q = ops.linear(at.site("q_proj"), h, q_proj);
    let k = ops.linear(at.site("k_proj"), h, k_proj);
    let v = ops.linear(at.site("v_proj"), h, v_proj);
    let q = ops.rms_norm(at.site("q_norm"), &q, Some(q_layernorm), head_dim, eps);
    let k = ops.rms_norm(at.site("k_norm"), &k, Some(k_layernorm), head_dim, eps);
    let q = ops.rotate(at.site("q_rope"), &q, &rope.cos, &rope.sin, &c.rope);
    let k = ops.rotate(at.site("k_rope"), &k, &rope.cos, &rope.sin, &c.rope);
    ops.append(at, "k_cache", &mut cache.k, &k, head_dim);
    ops.append(at, "v_cache", &mut cache.v, &v, head_dim);
    let scores = ops.attn_scores(at.site("attn_scores"), &q, cache.k.get(), c.attention_scale(), None);
    let probs = ops.attn_probs(at.site("attn_probs"), &scores, Mask::causal(first, None), None);
    ops.attn_ctx(at.site("attn_ctx"), &probs, cache.v.get())
}
