//! Gemma 4: dense (31B), E (E2B, E4B), MoE (26B-A4B).
//!
//! ```text
//! x = √hidden · E[id]
//! x ← x + n₂(O(attention(n₁(x))))
//! x ← x + n₄(down(gelu(gate(n₃(x))) · up(n₃(x))))
//! x ← x + n₄(n₁'(mlp(n₃(x))) + n₂'(Σ w_e · expert_e(n₃'(x))))     with experts
//! x ← x + n₅(W_proj(gelu(W_gate x) · ple_i))          with per-layer embeddings
//! x ← x · layer_scalar
//! logits = cap · tanh(norm_f(x) · Eᵀ / cap)
//! ```
//!
//! Norms are plain. Scores have scale 1: q and k are normed per head, v without a weight. Full layers
//! have wider heads, turn a quarter of their pairs, and in some models make v of the raw keys. The last
//! layers may attend to the keys and values of an earlier layer of their type.
//!
//! Source: the published model code; no paper states these formulas.

use super::attention::{FULL, KvCache, SLIDING, Tables};
use super::moe::routed_experts;
use super::ple::{PleInputs, ple_branch, ple_inputs};
use crate::ops::{Mask, Ops};
use spec::families::Linear;
use spec::families::gemma4::{Gemma4Config, Gemma4MoeConfig, Gemma4MoeWeights, Gemma4Weights};
use spec::families::layered::LayerType;
use spec::site::At;

/// A Gemma 4 text model.
#[derive(Clone, Debug)]
pub struct Gemma4 {
    /// Its config.
    pub config: Gemma4Config,
    /// Its weights.
    pub weights: Gemma4Weights,
}

/// Keys and values of every layer that has its own; the entries of others stay empty.
#[derive(Clone, Debug)]
pub struct Gemma4State<T> {
    /// Number of tokens fed.
    pub position: usize,
    /// One entry a layer.
    pub layers: Vec<KvCache<T>>,
}

/// What a pass gives to every layer beside the stream.
pub struct Gemma4Inputs<T> {
    /// Tables of full layers.
    pub full: Tables<T>,
    /// Tables of sliding layers.
    pub sliding: Tables<T>,
    /// Per-layer embeddings.
    pub ple: Option<PleInputs<T>>,
}

impl Gemma4 {
    /// State before the first token.
    pub fn fresh<T>(&self) -> Gemma4State<T> {
        Gemma4State { position: 0, layers: self.weights.layers.iter().map(|_| KvCache::empty()).collect() }
    }

    /// Logits of every token of `ids`, `[tokens, vocab]`.
    pub fn pass<O: Ops + ?Sized>(
        &self,
        ops: &mut O,
        state: &mut Gemma4State<O::Tensor>,
        ids: &[u32],
    ) -> O::Tensor {
        let (c, w, at) = (&self.config, &self.weights, At::MODEL);
        let mut x = ops.embed(at.site("embed"), ids, &w.embed_tokens, c.embed_scale());
        let inputs = self.inputs(ops, ids, &x, state.position);
        for i in 0..c.layers.len() {
            x = self.layer(ops, i, &x, state.position, &inputs, &mut state.layers);
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

    /// What all layers of a pass receive, from the ids and the scaled embedding rows.
    pub fn inputs<O: Ops + ?Sized>(
        &self,
        ops: &mut O,
        ids: &[u32],
        embedded: &O::Tensor,
        first: usize,
    ) -> Gemma4Inputs<O::Tensor> {
        let (c, tokens) = (&self.config, ids.len());
        let ple = match (&c.ple, &self.weights.ple) {
            (Some(ple), Some(weights)) => {
                Some(ple_inputs(ops, ids, embedded, c.hidden_size, ple, weights, c.rms_norm_eps))
            }
            _ => None,
        };
        let full = Tables::new(ops, FULL, &c.rope, first, tokens);
        let sliding = Tables::new(ops, SLIDING, &c.rope_local, first, tokens);
        Gemma4Inputs { full, sliding, ple }
    }

    /// Layer `i` alone: `x` is `[tokens, hidden]` and stands at positions `first..`; `caches` holds an
    /// entry for every layer up to `i`.
    pub fn layer<O: Ops + ?Sized>(
        &self,
        ops: &mut O,
        i: usize,
        x: &O::Tensor,
        first: usize,
        inputs: &Gemma4Inputs<O::Tensor>,
        caches: &mut [KvCache<O::Tensor>],
    ) -> O::Tensor {
        let (c, w, at) = (&self.config, &self.weights.layers[i], At::layer(i));
        let (hidden, eps) = (c.hidden_size, c.rms_norm_eps);

        let h = ops.rms_norm(at.site("attn_norm"), x, Some(&w.input_layernorm), hidden, eps);
        let branch = self.attention(ops, i, &h, first, inputs, caches);
        let post = &w.post_attention_layernorm;
        let branch = ops.rms_norm(at.site("post_attn_norm"), &branch, Some(post), hidden, eps);
        let x = ops.residual(at.site("resid_mid"), x, &branch, 1.0);

        let h = ops.rms_norm(at.site("mlp_norm"), &x, Some(&w.pre_feedforward_layernorm), hidden, eps);
        let gate = ops.linear(at.site("mlp_gate"), &h, &w.gate_proj);
        let up = ops.linear(at.site("mlp_up"), &h, &w.up_proj);
        let act = ops.gated_act(at.site("mlp_act"), &gate, &up, c.activation);
        let mut branch = ops.linear(at.site("mlp_out"), &act, &w.down_proj);
        if let (Some(moe), Some(weights)) = (&c.moe, &w.moe) {
            branch = self.experts(ops, at, &x, &branch, moe, weights);
        }
        let post = &w.post_feedforward_layernorm;
        let branch = ops.rms_norm(at.site("post_mlp_norm"), &branch, Some(post), hidden, eps);
        let mut x = ops.residual(at.site("resid_mlp"), &x, &branch, 1.0);

        if let (Some(ple), Some(inputs), Some(weights)) = (&c.ple, &inputs.ple, &w.ple) {
            let ple_in = ops.per_layer_input(at.site("ple_in"), &inputs.token, &inputs.context, i, ple.width);
            let branch = ple_branch(ops, at, &x, &ple_in, weights, c.activation, eps);
            x = ops.residual(at.site("resid_ple"), &x, &branch, 1.0);
        }
        ops.scale(at.site("out"), &x, f64::from(w.layer_scalar[0]))
    }

    /// The dense feed-forward's output and the experts', each normed, added.
    ///
    /// The router has a norm of its own and reads the residual stream, not the experts' normed input.
    fn experts<O: Ops + ?Sized>(
        &self,
        ops: &mut O,
        at: At,
        x: &O::Tensor,
        dense: &O::Tensor,
        moe: &Gemma4MoeConfig,
        w: &Gemma4MoeWeights,
    ) -> O::Tensor {
        let (hidden, eps) = (self.config.hidden_size, self.config.rms_norm_eps);
        let norm = Some(&w.post_feedforward_layernorm_1);
        let dense = ops.rms_norm(at.site("post_mlp_norm_1"), dense, norm, hidden, eps);

        let h = ops.rms_norm(at.site("router_norm"), x, Some(&w.router_scale), hidden, eps);
        let h = ops.scale(at.site("router_in"), &h, 1.0 / (hidden as f64).sqrt());
        let logits = ops.linear(at.site("router_logits"), &h, &w.router_proj);
        let probs = ops.softmax(at.site("router_probs"), &logits);
        let index = ops.router_index(at.site("router_index"), &probs, &moe.router, None);
        let shares = ops.router_weights(at.site("router_shares"), &probs, &index, &moe.router);
        let weights = ops.scale_chosen(at.site("router_weights"), &shares, &index, &w.per_expert_scale);

        let norm = Some(&w.pre_feedforward_layernorm_2);
        let h = ops.rms_norm(at.site("moe_norm"), x, norm, hidden, eps);
        let routed = routed_experts(ops, at, &h, &index, &weights, &w.experts, self.config.activation);
        let norm = Some(&w.post_feedforward_layernorm_2);
        let routed = ops.rms_norm(at.site("post_moe_norm_2"), &routed, norm, hidden, eps);
        ops.residual(at.site("moe_out"), &dense, &routed, 1.0)
    }

    /// Attention of layer `i` on normed rows, output projection included.
    fn attention<O: Ops + ?Sized>(
        &self,
        ops: &mut O,
        i: usize,
        h: &O::Tensor,
        first: usize,
        inputs: &Gemma4Inputs<O::Tensor>,
        caches: &mut [KvCache<O::Tensor>],
    ) -> O::Tensor {
        let (c, w, at) = (&self.config, &self.weights.layers[i], At::layer(i));
        let (layer, rope, eps) = (&c.layers[i], c.rope_of(i), c.rms_norm_eps);
        let head_dim = layer.head_dim;
        let tables = match layer.layer_type {
            LayerType::Sliding => &inputs.sliding,
            LayerType::Full => &inputs.full,
        };

        let q = ops.linear(at.site("q_proj"), h, &w.q_proj);
        let q = ops.rms_norm(at.site("q_norm"), &q, Some(&w.q_norm), head_dim, eps);
        let q = ops.rotate(at.site("q_rope"), &q, &tables.cos, &tables.sin, rope);
        if let Some(kv) = &w.kv {
            let raw = ops.linear(at.site("k_proj"), h, &kv.k_proj);
            let k = ops.rms_norm(at.site("k_norm"), &raw, Some(&kv.k_norm), head_dim, eps);
            let k = ops.rotate(at.site("k_rope"), &k, &tables.cos, &tables.sin, rope);
            let v = match &kv.v_proj {
                Some(v_proj) => ops.linear(at.site("v_proj"), h, v_proj),
                None => raw,
            };
            let v = ops.rms_norm(at.site("v_norm"), &v, None, head_dim, eps);
            ops.append(at, "k_cache", &mut caches[i].k, &k, head_dim);
            ops.append(at, "v_cache", &mut caches[i].v, &v, head_dim);
        }
        let cache = &caches[layer.kv_source];
        let scores = ops.attn_scores(at.site("attn_scores"), &q, cache.k.get(), 1.0, None);
        let probs = ops.attn_probs(at.site("attn_probs"), &scores, Mask::causal(first, c.window(i)), None);
        let ctx = ops.attn_ctx(at.site("attn_ctx"), &probs, cache.v.get());
        ops.linear(at.site("attn_out"), &ctx, &w.o_proj)
    }
}
