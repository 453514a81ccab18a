//! olmo2: norms behind the branches, none before them.
//!
//! ```text
//! x ← x + norm_a(O(attention(x)))
//! x ← x + norm_b(down(act(gate(x)) · up(x)))
//! logits = norm_f(x) · W_headᵀ
//! ```
//!
//! q and k pass a norm over the whole projected row, before it is cut into heads.
//!
//! Source: arXiv 2501.00656.

use super::{DecoderState, KvCache, Tables};
use crate::ops::{Mask, Ops};
use spec::families::Linear;
use spec::families::decoder::DecoderConfig;
use spec::families::olmo2::Olmo2Weights;
use spec::site::At;

/// An olmo2 model.
#[derive(Clone, Debug)]
pub struct Olmo2 {
    /// Its config.
    pub config: DecoderConfig,
    /// Its weights.
    pub weights: Olmo2Weights,
}

impl Olmo2 {
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
        let (hidden, head_dim, eps) = (c.hidden_size, c.head_dim, c.rms_norm_eps);

        let mut q = ops.linear(at.site("q_proj"), x, &w.attention.q_proj);
        let mut k = ops.linear(at.site("k_proj"), x, &w.attention.k_proj);
        let v = ops.linear(at.site("v_proj"), x, &w.attention.v_proj);
        if let (Some(q_norm), Some(k_norm)) = (&w.attention.q_norm, &w.attention.k_norm) {
            q = ops.rms_norm(at.site("q_norm"), &q, Some(q_norm), c.q_width(), eps);
            k = ops.rms_norm(at.site("k_norm"), &k, Some(k_norm), c.kv_width(), eps);
        }
        let q = ops.rotate(at.site("q_rope"), &q, &rope.cos, &rope.sin, &c.rope);
        let k = ops.rotate(at.site("k_rope"), &k, &rope.cos, &rope.sin, &c.rope);
        ops.append(at, "k_cache", &mut cache.k, &k, head_dim);
        ops.append(at, "v_cache", &mut cache.v, &v, head_dim);
        let scores = ops.attn_scores(at.site("attn_scores"), &q, cache.k.get(), c.attention_scale(), None);
        let mask = Mask::causal(first, c.layers[i].window);
        let probs = ops.attn_probs(at.site("attn_probs"), &scores, mask, None);
        let ctx = ops.attn_ctx(at.site("attn_ctx"), &probs, cache.v.get());
        let branch = ops.linear(at.site("attn_out"), &ctx, &w.attention.o_proj);
        let norm = Some(&w.post_attention_layernorm);
        let branch = ops.rms_norm(at.site("post_attn_norm"), &branch, norm, hidden, eps);
        let x = ops.residual(at.site("resid_mid"), x, &branch, 1.0);

        let gate = ops.linear(at.site("mlp_gate"), &x, &w.mlp.gate_proj);
        let up = ops.linear(at.site("mlp_up"), &x, &w.mlp.up_proj);
        let act = ops.gated_act(at.site("mlp_act"), &gate, &up, c.activation);
        let branch = ops.linear(at.site("mlp_out"), &act, &w.mlp.down_proj);
        let norm = Some(&w.post_feedforward_layernorm);
        let branch = ops.rms_norm(at.site("post_mlp_norm"), &branch, norm, hidden, eps);
        ops.residual(at.site("out"), &x, &branch, 1.0)
    }
}
