//! Decoders with experts: qwen3_moe, glm4_moe.
//!
//! ```text
//! x ← x + O(attention(norm₁(x)))
//! x ← x + Σ_chosen w_e · expert_e(norm₂(x)) + shared(norm₂(x))      experts on most layers
//! logits = norm_f(x) · W_headᵀ
//! ```
//!
//! Attention is that of the dense decoders. qwen3_moe weighs by softmax and has no shared expert;
//! glm4_moe weighs by sigmoid, chooses with a bias, and turns half of each head.
//!
//! Sources: arXiv 2505.09388 (qwen3_moe), 2508.06471 (glm4_moe).

use super::moe::feed_forward;
use super::{DecoderState, KvCache, Tables};
use crate::ops::{Mask, Ops};
use spec::families::Linear;
use spec::families::moe_decoder::{MoeDecoderConfig, MoeDecoderWeights};
use spec::site::At;

/// A decoder with experts.
#[derive(Clone, Debug)]
pub struct MoeDecoder {
    /// Its config.
    pub config: MoeDecoderConfig,
    /// Its weights.
    pub weights: MoeDecoderWeights,
}

impl MoeDecoder {
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
        let (c, w, at) = (&self.config.decoder, &self.weights.ends, At::MODEL);
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
        let (c, w, at) = (&self.config.decoder, &self.weights.layers[i], At::layer(i));
        let (hidden, head_dim, eps) = (c.hidden_size, c.head_dim, c.rms_norm_eps);

        let h = ops.rms_norm(at.site("attn_norm"), x, Some(&w.input_layernorm), hidden, eps);
        let mut q = ops.linear(at.site("q_proj"), &h, &w.attention.q_proj);
        let mut k = ops.linear(at.site("k_proj"), &h, &w.attention.k_proj);
        let v = ops.linear(at.site("v_proj"), &h, &w.attention.v_proj);
        if let (Some(q_norm), Some(k_norm)) = (&w.attention.q_norm, &w.attention.k_norm) {
            q = ops.rms_norm(at.site("q_norm"), &q, Some(q_norm), head_dim, eps);
            k = ops.rms_norm(at.site("k_norm"), &k, Some(k_norm), head_dim, eps);
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
        let x = ops.residual(at.site("resid_mid"), x, &branch, 1.0);

        let h = ops.rms_norm(at.site("mlp_norm"), &x, Some(&w.post_attention_layernorm), hidden, eps);
        let branch = feed_forward(ops, at, &h, &self.config.router, &w.mlp, c.activation);
        ops.residual(at.site("out"), &x, &branch, 1.0)
    }
}
