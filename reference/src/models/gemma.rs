//! Gemma 2 and Gemma 3.
//!
//! ```text
//! x = √hidden · E[id]
//! x ← x + n₂(O(attention(n₁(x))))
//! x ← x + n₄(down(gelu(gate(n₃(x))) · up(n₃(x))))
//! logits = cap · tanh(norm_f(x) · Eᵀ / cap)
//! ```
//!
//! Norms are centred: checkpoints store the weight minus 1, and loading adds it. Gemma 2 caps scores
//! and logits; Gemma 3 has a per-head norm of q and k before rope instead, and sliding layers turn with
//! a base of their own.
//!
//! Sources: arXiv 2408.00118 (Gemma 2), 2503.19786 (Gemma 3).

use super::attention::{FULL, KvCache, SLIDING, Tables};
use crate::ops::{Mask, Ops};
use spec::families::Linear;
use spec::families::gemma::{GemmaConfig, GemmaWeights};
use spec::families::layered::LayerType;
use spec::site::At;

/// A Gemma 2 or Gemma 3 text model.
#[derive(Clone, Debug)]
pub struct Gemma {
    /// Its config.
    pub config: GemmaConfig,
    /// Its weights.
    pub weights: GemmaWeights,
}

/// Keys and values of every layer.
#[derive(Clone, Debug)]
pub struct GemmaState<T> {
    /// Number of tokens fed.
    pub position: usize,
    /// One entry a layer.
    pub layers: Vec<KvCache<T>>,
}

/// The rotary tables of full layers and of sliding ones; one table serves both in Gemma 2.
pub struct GemmaTables<T> {
    full: Tables<T>,
    sliding: Option<Tables<T>>,
}

impl Gemma {
    /// State before the first token.
    pub fn fresh<T>(&self) -> GemmaState<T> {
        GemmaState { position: 0, layers: self.weights.layers.iter().map(|_| KvCache::empty()).collect() }
    }

    /// Logits of every token of `ids`, `[tokens, vocab]`.
    pub fn pass<O: Ops + ?Sized>(
        &self,
        ops: &mut O,
        state: &mut GemmaState<O::Tensor>,
        ids: &[u32],
    ) -> O::Tensor {
        let (c, w, at) = (&self.config, &self.weights, At::MODEL);
        let mut x = ops.embed(at.site("embed"), ids, &w.embed_tokens, c.embed_scale());
        let rope = self.tables(ops, state.position, ids.len());
        for (i, cache) in state.layers.iter_mut().enumerate() {
            x = self.layer(ops, i, &x, state.position, &rope, cache);
        }
        state.position += ids.len();
        let x = ops.rms_norm(at.site("final_norm"), &x, Some(&w.norm), c.hidden_size, c.rms_norm_eps);
        let head = Linear { weight: w.lm_head.clone(), bias: None };
        match c.final_logit_softcapping {
            None => ops.linear(at.site("logits"), &x, &head),
            Some(cap) => {
                let uncapped = ops.linear(at.site("lm_head"), &x, &head);
                ops.softcap(at.site("logits"), &uncapped, cap)
            }
        }
    }

    /// The rotary tables of `tokens` positions from `first` on.
    pub fn tables<O: Ops + ?Sized>(
        &self,
        ops: &mut O,
        first: usize,
        tokens: usize,
    ) -> GemmaTables<O::Tensor> {
        let c = &self.config;
        match &c.rope_local {
            None => GemmaTables {
                full: Tables::new(ops, ["rope.cos", "rope.sin"], &c.rope, first, tokens),
                sliding: None,
            },
            Some(local) => GemmaTables {
                full: Tables::new(ops, FULL, &c.rope, first, tokens),
                sliding: Some(Tables::new(ops, SLIDING, local, first, tokens)),
            },
        }
    }

    /// Layer `i` alone: `x` is `[tokens, hidden]` and stands at positions `first..`.
    pub fn layer<O: Ops + ?Sized>(
        &self,
        ops: &mut O,
        i: usize,
        x: &O::Tensor,
        first: usize,
        rope: &GemmaTables<O::Tensor>,
        cache: &mut KvCache<O::Tensor>,
    ) -> O::Tensor {
        let (c, w, at) = (&self.config, &self.weights.layers[i], At::layer(i));
        let (hidden, head_dim, eps) = (c.hidden_size, c.head_dim, c.rms_norm_eps);
        let (params, tables) = match (c.layer_types[i], &c.rope_local, &rope.sliding) {
            (LayerType::Sliding, Some(params), Some(tables)) => (params, tables),
            _ => (&c.rope, &rope.full),
        };

        let h = ops.rms_norm(at.site("attn_norm"), x, Some(&w.input_layernorm), hidden, eps);
        let mut q = ops.linear(at.site("q_proj"), &h, &w.q_proj);
        let mut k = ops.linear(at.site("k_proj"), &h, &w.k_proj);
        let v = ops.linear(at.site("v_proj"), &h, &w.v_proj);
        if let (Some(q_norm), Some(k_norm)) = (&w.q_norm, &w.k_norm) {
            q = ops.rms_norm(at.site("q_norm"), &q, Some(q_norm), head_dim, eps);
            k = ops.rms_norm(at.site("k_norm"), &k, Some(k_norm), head_dim, eps);
        }
        let q = ops.rotate(at.site("q_rope"), &q, &tables.cos, &tables.sin, params);
        let k = ops.rotate(at.site("k_rope"), &k, &tables.cos, &tables.sin, params);
        ops.append(at, "k_cache", &mut cache.k, &k, head_dim);
        ops.append(at, "v_cache", &mut cache.v, &v, head_dim);
        let (scale, cap) = (c.attention_scale(), c.attn_logit_softcapping);
        let scores = ops.attn_scores(at.site("attn_scores"), &q, cache.k.get(), scale, cap);
        let probs = ops.attn_probs(at.site("attn_probs"), &scores, Mask::causal(first, c.window(i)), None);
        let ctx = ops.attn_ctx(at.site("attn_ctx"), &probs, cache.v.get());
        let branch = ops.linear(at.site("attn_out"), &ctx, &w.o_proj);
        let post = &w.post_attention_layernorm;
        let branch = ops.rms_norm(at.site("post_attn_norm"), &branch, Some(post), hidden, eps);
        let x = ops.residual(at.site("resid_mid"), x, &branch, 1.0);

        let h = ops.rms_norm(at.site("mlp_norm"), &x, Some(&w.pre_feedforward_layernorm), hidden, eps);
        let gate = ops.linear(at.site("mlp_gate"), &h, &w.gate_proj);
        let up = ops.linear(at.site("mlp_up"), &h, &w.up_proj);
        let act = ops.gated_act(at.site("mlp_act"), &gate, &up, c.activation);
        let branch = ops.linear(at.site("mlp_out"), &act, &w.down_proj);
        let post = &w.post_feedforward_layernorm;
        let branch = ops.rms_norm(at.site("post_mlp_norm"), &branch, Some(post), hidden, eps);
        ops.residual(at.site("out"), &x, &branch, 1.0)
    }
}
