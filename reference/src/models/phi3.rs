//! phi3: a pre-norm decoder with fused projections.
//!
//! ```text
//! q ‖ k ‖ v = W_qkv · norm₁(x);        x ← x + O(attention(rope(q), rope(k), v))
//! gate ‖ up = W_gate_up · norm₂(x);    x ← x + down(act(gate) · up)
//! logits = norm_f(x) · W_headᵀ
//! ```
//!
//! Only the first `partial_rotary_factor` of a head turns; LongRoPE chooses its divisors by the length
//! that a pass reaches, so that a prompt beyond the original context is not the same in chunks.
//!
//! Source: arXiv 2404.14219.

use super::{DecoderState, KvCache, Tables};
use crate::ops::{Mask, Ops};
use spec::families::Linear;
use spec::families::decoder::DecoderConfig;
use spec::families::phi3::Phi3Weights;
use spec::site::At;

/// A phi3 model.
#[derive(Clone, Debug)]
pub struct Phi3 {
    /// Its config.
    pub config: DecoderConfig,
    /// Its weights.
    pub weights: Phi3Weights,
}

impl Phi3 {
    /// State before the first token.
    pub fn fresh<T>(&self) -> DecoderState<T> {
        DecoderState::empty(self.weights.layers.len())
    }

    /// Logits of every token of `ids`, `[tokens, vocab]`.
    pub fn pass<O: Ops + ?Sized>(
        &self,
        ops: &mut O,
        state: &mut DecoderState<O::Tensor>,
        ids: &[u32],
    ) -> O::Tensor {
        let (c, w, at) = (&self.config, &self.weights.ends, At::MODEL);
        let mut x = ops.embed(at.site("embed"), ids, &w.embed_tokens, 1.0);
        let rope = Tables::new(ops, ["rope.cos", "rope.sin"], &c.rope, state.position, ids.len());
        for (i, cache) in state.layers.iter_mut().enumerate() {
            x = self.layer(ops, i, &x, state.position, &rope, cache);
        }
        state.position += ids.len();
        let x = ops.rms_norm(at.site("final_norm"), &x, Some(&w.norm), c.hidden_size, c.rms_norm_eps);
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
        cache: &mut KvCache<O::Tensor>,
    ) -> O::Tensor {
        let (c, w, at) = (&self.config, &self.weights.layers[i], At::layer(i));
        let (hidden, inner, head_dim, eps) = (c.hidden_size, c.intermediate_size, c.head_dim, c.rms_norm_eps);
        let (q_end, k_end, v_end) = (c.q_width(), c.q_width() + c.kv_width(), c.q_width() + 2 * c.kv_width());

        let h = ops.rms_norm(at.site("attn_norm"), x, Some(&w.input_layernorm), hidden, eps);
        let qkv = ops.linear(at.site("qkv_proj"), &h, &w.qkv_proj);
        let q = ops.slice(at.site("q_proj"), &qkv, v_end, 0..q_end);
        let k = ops.slice(at.site("k_proj"), &qkv, v_end, q_end..k_end);
        let v = ops.slice(at.site("v_proj"), &qkv, v_end, k_end..v_end);
        let q = ops.rotate(at.site("q_rope"), &q, &rope.cos, &rope.sin, &c.rope);
        let k = ops.rotate(at.site("k_rope"), &k, &rope.cos, &rope.sin, &c.rope);
        ops.append(at, "k_cache", &mut cache.k, &k, head_dim);
        ops.append(at, "v_cache", &mut cache.v, &v, head_dim);
        let scores = ops.attn_scores(at.site("attn_scores"), &q, cache.k.get(), c.attention_scale(), None);
        let mask = Mask::causal(first, c.layers[i].window);
        let probs = ops.attn_probs(at.site("attn_probs"), &scores, mask, None);
        let ctx = ops.attn_ctx(at.site("attn_ctx"), &probs, cache.v.get());
        let branch = ops.linear(at.site("attn_out"), &ctx, &w.o_proj);
        let x = ops.residual(at.site("resid_mid"), x, &branch, 1.0);

        let h = ops.rms_norm(at.site("mlp_norm"), &x, Some(&w.post_attention_layernorm), hidden, eps);
        let gate_up = ops.linear(at.site("mlp_gate_up"), &h, &w.gate_up_proj);
        let gate = ops.slice(at.site("mlp_gate"), &gate_up, 2 * inner, 0..inner);
        let up = ops.slice(at.site("mlp_up"), &gate_up, 2 * inner, inner..2 * inner);
        let act = ops.gated_act(at.site("mlp_act"), &gate, &up, c.activation);
        let branch = ops.linear(at.site("mlp_out"), &act, &w.down_proj);
        ops.residual(at.site("out"), &x, &branch, 1.0)
    }
}
