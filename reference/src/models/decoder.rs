//! Pre-norm decoders with grouped-query attention: llama, mistral, qwen2, qwen3, smollm3, granite and
//! minicpm.
//!
//! ```text
//! x₀ = m_embed · E[id]
//! x ← x + m_resid · O(attention(norm₁(x)))
//! x ← x + m_resid · down(act(gate(norm₂(x))) · up(norm₂(x)))
//! logits = (norm_f(x) / d_hidden) · W_headᵀ / d_logits
//! ```
//!
//! Attention: q, k, v projections; per-head norm of q and k in qwen3; rope, but not on every layer of
//! smollm3; keys and values join the cache; scores, probabilities, context. Multipliers and divisors are
//! 1 but in granite and minicpm; minicpm divides before the head, granite after it.
//!
//! Sources: arXiv 2302.13971 (llama), 2310.06825 (mistral), 2407.10671 (qwen2), 2505.09388 (qwen3),
//! 2404.06395 and 2506.07900 (minicpm); the model cards of SmolLM3 and Granite 3.

use super::{KvCache, Tables};
use crate::ops::{Mask, Ops};
use spec::families::Linear;
use spec::families::decoder::{DecoderConfig, DecoderWeights};
use spec::site::At;

/// A pre-norm decoder.
#[derive(Clone, Debug)]
pub struct Decoder {
    /// Its config.
    pub config: DecoderConfig,
    /// Its weights.
    pub weights: DecoderWeights,
}

/// Keys and values of every layer.
#[derive(Clone, Debug)]
pub struct DecoderState<T> {
    /// Number of tokens fed.
    pub position: usize,
    /// One entry a layer.
    pub layers: Vec<KvCache<T>>,
}

impl<T> DecoderState<T> {
    /// State of `layers` layers before the first token.
    pub fn empty(layers: usize) -> Self {
        DecoderState { position: 0, layers: (0..layers).map(|_| KvCache::empty()).collect() }
    }
}

impl Decoder {
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
        let (c, w, at) = (&self.config, &self.weights, At::MODEL);
        let mut x = ops.embed(at.site("embed"), ids, &w.embed_tokens, 1.0);
        if let Some(multiplier) = c.scales.embedding_multiplier {
            x = ops.scale(at.site("embed_scaled"), &x, f64::from(multiplier));
        }
        let rope = Tables::new(ops, ["rope.cos", "rope.sin"], &c.rope, state.position, ids.len());
        for (i, cache) in state.layers.iter_mut().enumerate() {
            x = self.layer(ops, i, &x, state.position, &rope, cache);
        }
        state.position += ids.len();
        let mut x = ops.rms_norm(at.site("final_norm"), &x, Some(&w.norm), c.hidden_size, c.rms_norm_eps);
        if let Some(divisor) = c.scales.hidden_divisor {
            x = ops.scale(at.site("head_in"), &x, 1.0 / f64::from(divisor));
        }
        let head = Linear { weight: w.lm_head.clone(), bias: None };
        match c.scales.logits_scaling {
            None => ops.linear(at.site("logits"), &x, &head),
            Some(divisor) => {
                let product = ops.linear(at.site("lm_head"), &x, &head);
                ops.scale(at.site("logits"), &product, 1.0 / f64::from(divisor))
            }
        }
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

        let h = ops.rms_norm(at.site("attn_norm"), x, Some(&w.input_layernorm), hidden, eps);
        let mut q = ops.linear(at.site("q_proj"), &h, &w.q_proj);
        let mut k = ops.linear(at.site("k_proj"), &h, &w.k_proj);
        let v = ops.linear(at.site("v_proj"), &h, &w.v_proj);
        if let (Some(q_norm), Some(k_norm)) = (&w.q_norm, &w.k_norm) {
            q = ops.rms_norm(at.site("q_norm"), &q, Some(q_norm), head_dim, eps);
            k = ops.rms_norm(at.site("k_norm"), &k, Some(k_norm), head_dim, eps);
        }
        if c.layers[i].rope {
            q = ops.rotate(at.site("q_rope"), &q, &rope.cos, &rope.sin, &c.rope);
            k = ops.rotate(at.site("k_rope"), &k, &rope.cos, &rope.sin, &c.rope);
        }
        ops.append(at, "k_cache", &mut cache.k, &k, head_dim);
        ops.append(at, "v_cache", &mut cache.v, &v, head_dim);
        let scores = ops.attn_scores(at.site("attn_scores"), &q, cache.k.get(), c.attention_scale(), None);
        let mask = Mask::causal(first, c.layers[i].window);
        let probs = ops.attn_probs(at.site("attn_probs"), &scores, mask, None);
        let ctx = ops.attn_ctx(at.site("attn_ctx"), &probs, cache.v.get());
        let branch = ops.linear(at.site("attn_out"), &ctx, &w.o_proj);
        let x = ops.residual(at.site("resid_mid"), x, &branch, c.scales.residual_multiplier);

        let h = ops.rms_norm(at.site("mlp_norm"), &x, Some(&w.post_attention_layernorm), hidden, eps);
        let gate = ops.linear(at.site("mlp_gate"), &h, &w.gate_proj);
        let up = ops.linear(at.site("mlp_up"), &h, &w.up_proj);
        let act = ops.gated_act(at.site("mlp_act"), &gate, &up, c.activation);
        let branch = ops.linear(at.site("mlp_out"), &act, &w.down_proj);
        ops.residual(at.site("out"), &x, &branch, c.scales.residual_multiplier)
    }
}
