//! gpt_oss: attention sinks, alternating windows, clamped experts.
//!
//! ```text
//! p = e^s / (Σ_seen e^s + e^sink)                                a sink a head
//! x ← x + O(p · v)
//! x ← x + Σ_chosen w_e · down_e((up + 1) · g · σ(alpha · g))       gate and up clamped
//! ```
//!
//! The chosen logits are softmaxed among themselves. Everything but the norms and the head has a bias.
//!
//! Source: arXiv 2508.10925.

use super::{DecoderState, KvCache, Tables};
use crate::ops::{Mask, Ops};
use spec::families::Linear;
use spec::families::gpt_oss::{GptOssConfig, GptOssWeights};
use spec::site::At;

/// A gpt_oss model.
#[derive(Clone, Debug)]
pub struct GptOss {
    /// Its config.
    pub config: GptOssConfig,
    /// Its weights.
    pub weights: GptOssWeights,
}

impl GptOss {
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
        let q = ops.linear(at.site("q_proj"), &h, &w.attention.q_proj);
        let k = ops.linear(at.site("k_proj"), &h, &w.attention.k_proj);
        let v = ops.linear(at.site("v_proj"), &h, &w.attention.v_proj);
        let q = ops.rotate(at.site("q_rope"), &q, &rope.cos, &rope.sin, &c.rope);
        let k = ops.rotate(at.site("k_rope"), &k, &rope.cos, &rope.sin, &c.rope);
        ops.append(at, "k_cache", &mut cache.k, &k, head_dim);
        ops.append(at, "v_cache", &mut cache.v, &v, head_dim);
        let scores = ops.attn_scores(at.site("attn_scores"), &q, cache.k.get(), c.attention_scale(), None);
        let mask = Mask::causal(first, c.layers[i].window);
        let probs = ops.attn_probs(at.site("attn_probs"), &scores, mask, Some(&w.sinks));
        let ctx = ops.attn_ctx(at.site("attn_ctx"), &probs, cache.v.get());
        let branch = ops.linear(at.site("attn_out"), &ctx, &w.attention.o_proj);
        let x = ops.residual(at.site("resid_mid"), x, &branch, 1.0);

        let h = ops.rms_norm(at.site("mlp_norm"), &x, Some(&w.post_attention_layernorm), hidden, eps);
        let router = &self.config.router;
        let logits = ops.linear(at.site("router_logits"), &h, &w.router);
        let index = ops.router_index(at.site("router_index"), &logits, router, None);
        let weights = ops.router_weights(at.site("router_weights"), &logits, &index, router);
        let gate = ops.expert_linear(at.site("expert_gate"), &h, &index, &w.experts.gate_proj);
        let up = ops.expert_linear(at.site("expert_up"), &h, &index, &w.experts.up_proj);
        let (alpha, limit) = (self.config.swiglu_alpha, self.config.swiglu_limit);
        let act = ops.clamped_swiglu(at.site("expert_act"), &gate, &up, alpha, limit);
        let y = ops.expert_linear(at.site("expert_down"), &act, &index, &w.experts.down_proj);
        let branch = ops.mixture(at.site("experts_out"), &y, &weights);
        ops.residual(at.site("out"), &x, &branch, 1.0)
    }
}
