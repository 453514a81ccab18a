//! deepseek_v3: multi-head latent attention, and experts chosen in groups.
//!
//! ```text
//! q = W_qb · norm(W_qa · h),   per head q_nope ‖ q_rope          (or W_q · h)
//! latent ‖ k_rope = W_kva · h; latent ← norm(latent)             one k_rope for all heads
//! k_nope ‖ v = W_kvb · latent, per head;   k = k_nope ‖ rope(k_rope);   q = q_nope ‖ rope(q_rope)
//! x ← x + O(attention(q, k, v));   x ← x + ffn(norm₂(x))
//! ```
//!
//! The cache holds normed latents and turned `k_rope`; keys and values are expanded from it in every
//! pass, so that they have sites. Devices may absorb W_kvb into query and output instead:
//! `q_nope · (W_k · latent) = (W_kᵀ · q_nope) · latent`, which the tests show to be the same.
//! Scores are scaled by `(d_nope + d_rope)^-½ · m²`, besides what YaRN does to the tables.
//!
//! Source: arXiv 2412.19437, section 2.1; 2405.04434 for the attention.

use super::Tables;
use super::moe::feed_forward;
use crate::State;
use crate::ops::{Mask, Ops};
use spec::families::deepseek::{DeepseekConfig, DeepseekWeights, LATENT_EPS, QueryWeights};
use spec::families::{Activation, Linear};
use spec::site::At;

/// A deepseek_v3 model.
#[derive(Clone, Debug)]
pub struct Deepseek {
    /// Its config.
    pub config: DeepseekConfig,
    /// Its weights.
    pub weights: DeepseekWeights,
}

/// Latents of every layer.
#[derive(Clone, Debug)]
pub struct DeepseekState<T> {
    /// Number of tokens fed.
    pub position: usize,
    /// One entry a layer.
    pub layers: Vec<LatentCache<T>>,
}

/// What one layer keeps of every token.
#[derive(Clone, Debug)]
pub struct LatentCache<T> {
    /// Normed latents, `[keys, 1, kv_lora_rank]`.
    pub latent: State<T>,
    /// The key part that turns, turned: `[keys, 1, d_rope]`.
    pub k_rope: State<T>,
}

impl Deepseek {
    /// State before the first token.
    pub fn fresh<T>(&self) -> DeepseekState<T> {
        let empty = |_| LatentCache { latent: State(None), k_rope: State(None) };
        DeepseekState { position: 0, layers: self.weights.layers.iter().map(empty).collect() }
    }

    /// Logits of every token of `ids`, `[tokens, vocab]`.
    pub fn pass<O: Ops + ?Sized>(
        &self,
        ops: &mut O,
        state: &mut DeepseekState<O::Tensor>,
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
        cache: &mut LatentCache<O::Tensor>,
    ) -> O::Tensor {
        let (c, w, at) = (&self.config, &self.weights.layers[i], At::layer(i));
        let (hidden, eps, latent) = (c.hidden_size, c.rms_norm_eps, c.kv_lora_rank);
        let (nope, turned, value) = (c.qk_nope_head_dim, c.qk_rope_head_dim, c.v_head_dim);
        let (qk, kv) = (nope + turned, nope + value);

        let h = ops.rms_norm(at.site("attn_norm"), x, Some(&w.input_layernorm), hidden, eps);
        let q = match &w.q {
            QueryWeights::Direct(q_proj) => ops.linear(at.site("q_proj"), &h, q_proj),
            QueryWeights::Latent { q_a_proj, q_a_layernorm, q_b_proj } => {
                let a = ops.linear(at.site("q_a"), &h, q_a_proj);
                let rank = q_a_layernorm.len();
                let a = ops.rms_norm(at.site("q_a_norm"), &a, Some(q_a_layernorm), rank, LATENT_EPS);
                ops.linear(at.site("q_b"), &a, q_b_proj)
            }
        };
        let q_nope = ops.slice(at.site("q_nope"), &q, qk, 0..nope);
        let q_rope = ops.slice(at.site("q_pe"), &q, qk, nope..qk);
        let q_rope = ops.rotate(at.site("q_rope"), &q_rope, &rope.cos, &rope.sin, &c.rope);
        let q = ops.concat(at.site("attn_q"), &q_nope, &q_rope);

        let kv_a = ops.linear(at.site("kv_a"), &h, &w.kv_a_proj_with_mqa);
        let new = ops.slice(at.site("kv_a_latent"), &kv_a, latent + turned, 0..latent);
        let norm = Some(&w.kv_a_layernorm);
        let new = ops.rms_norm(at.site("kv_a_norm"), &new, norm, latent, LATENT_EPS);
        let k_rope = ops.slice(at.site("k_pe"), &kv_a, latent + turned, latent..latent + turned);
        let k_rope = ops.rotate(at.site("k_rope"), &k_rope, &rope.cos, &rope.sin, &c.rope);
        ops.append(at, "latent_cache", &mut cache.latent, &new, latent);
        ops.append(at, "k_rope_cache", &mut cache.k_rope, &k_rope, turned);

        let kv_b = ops.linear(at.site("kv_b"), cache.latent.get(), &w.kv_b_proj);
        let k_nope = ops.slice(at.site("k_nope"), &kv_b, kv, 0..nope);
        let k = ops.concat(at.site("attn_k"), &k_nope, cache.k_rope.get());
        let v = ops.slice(at.site("attn_v"), &kv_b, kv, nope..kv);
        let scores = ops.attn_scores(at.site("attn_scores"), &q, &k, c.attention_scale(), None);
        let probs = ops.attn_probs(at.site("attn_probs"), &scores, Mask::causal(first, None), None);
        let ctx = ops.attn_ctx(at.site("attn_ctx"), &probs, &v);
        let branch = ops.linear(at.site("attn_out"), &ctx, &w.o_proj);
        let x = ops.residual(at.site("resid_mid"), x, &branch, 1.0);

        let h = ops.rms_norm(at.site("mlp_norm"), &x, Some(&w.post_attention_layernorm), hidden, eps);
        let branch = feed_forward(ops, at, &h, &c.router, &w.mlp, Activation::Silu);
        ops.residual(at.site("out"), &x, &branch, 1.0)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    proptest! {
        // One head over two tokens: a score through expanded keys is the score through the absorbed query,
        // and values expanded before or after the weighted sum are the same. Whole numbers: nothing rounds.
        #[test]
        fn absorbed_is_expanded(
            w_k in prop::collection::vec(-4i64..5, 3 * 2), w_v in prop::collection::vec(-4i64..5, 2 * 2),
            latents in prop::collection::vec(-4i64..5, 2 * 2), q in prop::collection::vec(-4i64..5, 3),
            p in prop::collection::vec(0i64..5, 2),
        ) {
            let times = |w: &[i64], x: &[i64]| -> Vec<i64> {
                w.chunks_exact(x.len()).map(|row| row.iter().zip(x).map(|(w, x)| w * x).sum()).collect()
            };
            let dot = |a: &[i64], b: &[i64]| -> i64 { a.iter().zip(b).map(|(a, b)| a * b).sum() };
            let absorbed: Vec<i64> = (0..2).map(|r| (0..3).map(|d| w_k[2 * d + r] * q[d]).sum()).collect();
            let (first, second) = latents.split_at(2);
            for latent in [first, second] {
                prop_assert_eq!(dot(&q, &times(&w_k, latent)), dot(&absorbed, latent));
            }
            let mixed: Vec<i64> = (0..2).map(|r| p[0] * first[r] + p[1] * second[r]).collect();
            let (a, b) = (times(&w_v, first), times(&w_v, second));
            let expanded: Vec<i64> = (0..2).map(|o| p[0] * a[o] + p[1] * b[o]).collect();
            prop_assert_eq!(times(&w_v, &mixed), expanded);
        }
    }
}
