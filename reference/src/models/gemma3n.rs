//! Gemma 3n: N parallel streams X₀ … X_{N-1}, of which a layer computes with one, X_a.
//!
//! ```text
//! X₀ = √hidden · E[id],  X_j = P_{j-1}(X₀) at the size of X₀
//! layer:  pred = predict(X),  A = pred_a,  u = n_in(A)
//!         laurel = u + n_l(R(L(u)))
//!         mid = (A + n_post(attention(u)) + laurel) / √2
//!         y = mid + n₄(down(gelu(sparse(gate(n₃(mid)))) · up(n₃(mid))))
//!         X = correct(pred, y)
//!         X_j ← X_j + ple(X_a · scale)  for j >= 1
//! X_j ← U_{j-1}(X_j) at the size of X₀;  logits = cap · tanh(norm_f(mean X) · Eᵀ / cap)
//! ```
//!
//! Norms are plain. Scores have scale 1; the last layers share keys and values, as in Gemma 4.
//!
//! Sources: arXiv 2301.13310 (alternating updates), 2411.07501 (Laurel); the published model code.

use super::attention::{FULL, KvCache, SLIDING, Tables};
use super::ple::{PleInputs, ple_branch, ple_inputs};
use crate::ops::{Mask, Ops};
use spec::families::Linear;
use spec::families::gemma3n::{Gemma3nConfig, Gemma3nWeights};
use spec::families::layered::LayerType;
use spec::site::At;
use std::f64::consts::FRAC_1_SQRT_2;

/// The sites of streams 1.. at the start: projected, then brought to the size of stream 0.
const START: [[&str; 2]; 3] =
    [["stream_1_proj", "stream_1"], ["stream_2_proj", "stream_2"], ["stream_3_proj", "stream_3"]];

/// The sites of streams 1.. at the end: taken out, projected back, brought to the size of stream 0.
const END: [[&str; 3]; 3] = [
    ["last_1", "unembed_1_proj", "unembed_1"],
    ["last_2", "unembed_2_proj", "unembed_2"],
    ["last_3", "unembed_3_proj", "unembed_3"],
];

/// The sites of a layer's stream coefficients, before and after it.
const PREDICT: [&str; 4] = ["altup_norm", "altup_in", "altup_router", "altup_modality"];
const CORRECT: [&str; 4] = ["altup_post_norm", "altup_post_in", "altup_post_router", "altup_post_modality"];

/// A Gemma 3n text model.
#[derive(Clone, Debug)]
pub struct Gemma3n {
    /// Its config.
    pub config: Gemma3nConfig,
    /// Its weights.
    pub weights: Gemma3nWeights,
}

/// Keys and values of every layer that has its own; the entries of others stay empty.
#[derive(Clone, Debug)]
pub struct Gemma3nState<T> {
    /// Number of tokens fed.
    pub position: usize,
    /// One entry a layer.
    pub layers: Vec<KvCache<T>>,
}

/// What a pass gives to every layer beside the streams.
pub struct Gemma3nInputs<T> {
    /// Tables of full layers.
    pub full: Tables<T>,
    /// Tables of sliding layers.
    pub sliding: Tables<T>,
    /// Per-layer embeddings.
    pub ple: PleInputs<T>,
}

impl Gemma3n {
    /// State before the first token.
    pub fn fresh<T>(&self) -> Gemma3nState<T> {
        Gemma3nState { position: 0, layers: self.weights.layers.iter().map(|_| KvCache::empty()).collect() }
    }

    /// Logits of every token of `ids`, `[tokens, vocab]`.
    pub fn pass<O: Ops + ?Sized>(
        &self,
        ops: &mut O,
        state: &mut Gemma3nState<O::Tensor>,
        ids: &[u32],
    ) -> O::Tensor {
        let (c, w, at) = (&self.config, &self.weights, At::MODEL);
        let first = ops.embed(at.site("embed"), ids, &w.embed_tokens, c.embed_scale());
        let inputs = self.inputs(ops, ids, &first, state.position);

        let mut streams = vec![first.clone()];
        for (projection, [projected, matched]) in w.altup_projections.iter().zip(START) {
            let stream = ops.linear(at.site(projected), &first, projection);
            streams.push(ops.match_rms(at.site(matched), &stream, &first));
        }
        let mut x = ops.stack(at.site("streams"), &streams.iter().collect::<Vec<_>>());
        for i in 0..c.layers.len() {
            x = self.layer(ops, i, &x, state.position, &inputs, &mut state.layers);
        }
        state.position += ids.len();

        let first = ops.stream(at.site("last_0"), &x, 0);
        let mut streams = vec![first.clone()];
        for (j, (projection, [last, projected, matched])) in
            w.altup_unembed_projections.iter().zip(END).enumerate()
        {
            let stream = ops.stream(at.site(last), &x, j + 1);
            let stream = ops.linear(at.site(projected), &stream, projection);
            streams.push(ops.match_rms(at.site(matched), &stream, &first));
        }
        let x = ops.stack(at.site("last_streams"), &streams.iter().collect::<Vec<_>>());
        let x = ops.stream_mean(at.site("stream_mean"), &x);
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

    /// What all layers of a pass receive, from the ids and the scaled embedding rows. Ids beyond the
    /// per-layer table read its row 0.
    pub fn inputs<O: Ops + ?Sized>(
        &self,
        ops: &mut O,
        ids: &[u32],
        embedded: &O::Tensor,
        first: usize,
    ) -> Gemma3nInputs<O::Tensor> {
        let (c, tokens) = (&self.config, ids.len());
        let held = |id: &u32| if (*id as usize) < c.ple.vocab_size { *id } else { 0 };
        let held: Vec<u32> = ids.iter().map(held).collect();
        let (hidden, eps) = (c.hidden_size, c.rms_norm_eps);
        let ple = ple_inputs(ops, &held, embedded, hidden, &c.ple, &self.weights.ple, eps);
        let full = Tables::new(ops, FULL, &c.rope, first, tokens);
        let sliding = Tables::new(ops, SLIDING, &c.rope_local, first, tokens);
        Gemma3nInputs { full, sliding, ple }
    }

    /// Layer `i` alone: `x` is `[streams, tokens, hidden]` and stands at positions `first..`; `caches`
    /// holds an entry for every layer up to `i`.
    pub fn layer<O: Ops + ?Sized>(
        &self,
        ops: &mut O,
        i: usize,
        x: &O::Tensor,
        first: usize,
        inputs: &Gemma3nInputs<O::Tensor>,
        caches: &mut [KvCache<O::Tensor>],
    ) -> O::Tensor {
        let (c, w, at) = (&self.config, &self.weights.layers[i], At::layer(i));
        let (hidden, eps, active) = (c.hidden_size, c.rms_norm_eps, c.altup_active_idx);

        let before = ops.stream(at.site("altup_active"), x, active);
        let modality = self.modality(ops, i, PREDICT, &before);
        let coefs = ops.linear(at.site("altup_coefs"), &modality, &w.altup.prediction_coefs);
        let predicted = ops.altup_predict(at.site("altup_pred"), x, &coefs);
        let x = ops.stream(at.site("altup_pred_active"), &predicted, active);

        let h = ops.rms_norm(at.site("attn_norm"), &x, Some(&w.input_layernorm), hidden, eps);
        let low = ops.linear(at.site("laurel_left"), &h, &w.laurel_left);
        let low = ops.linear(at.site("laurel_right"), &low, &w.laurel_right);
        let low = ops.rms_norm(at.site("laurel_norm"), &low, Some(&w.post_laurel_norm), hidden, eps);
        let laurel = ops.residual(at.site("laurel"), &h, &low, 1.0);

        let branch = self.attention(ops, i, &h, first, inputs, caches);
        let post = &w.post_attention_layernorm;
        let branch = ops.rms_norm(at.site("post_attn_norm"), &branch, Some(post), hidden, eps);
        let x = ops.residual(at.site("resid_attn"), &x, &branch, 1.0);
        let x = ops.residual(at.site("resid_laurel"), &x, &laurel, 1.0);
        let x = ops.scale(at.site("resid_mid"), &x, FRAC_1_SQRT_2);

        let h = ops.rms_norm(at.site("mlp_norm"), &x, Some(&w.pre_feedforward_layernorm), hidden, eps);
        let mut gate = ops.linear(at.site("mlp_gate"), &h, &w.gate_proj);
        let sparsity = c.layers[i].activation_sparsity;
        if sparsity > 0.0 {
            gate = ops.sparsify(at.site("mlp_gate_sparse"), &gate, sparsity);
        }
        let up = ops.linear(at.site("mlp_up"), &h, &w.up_proj);
        let act = ops.gated_act(at.site("mlp_act"), &gate, &up, c.activation);
        let branch = ops.linear(at.site("mlp_out"), &act, &w.down_proj);
        let post = &w.post_feedforward_layernorm;
        let branch = ops.rms_norm(at.site("post_mlp_norm"), &branch, Some(post), hidden, eps);
        let made = ops.residual(at.site("resid_mlp"), &x, &branch, 1.0);

        let modality = self.modality(ops, i, CORRECT, &made);
        let coefs = ops.linear(at.site("altup_post_coefs"), &modality, &w.altup.correction_coefs);
        let x = ops.altup_correct(at.site("altup_corrected"), &predicted, &made, &coefs, active);

        let mut row = ops.stream(at.site("altup_corrected_active"), &x, active);
        if let Some(scale) = &w.altup.correct_output_scale {
            row = ops.scale_columns(at.site("altup_corrected_scaled"), &row, scale);
        }
        let (token, context) = (&inputs.ple.token, &inputs.ple.context);
        let ple_in = ops.per_layer_input(at.site("ple_in"), token, context, i, c.ple.width);
        let branch = ple_branch(ops, at, &row, &ple_in, &w.ple, c.activation, eps);
        ops.add_to_streams(at.site("out"), &x, &branch)
    }

    /// `tanh(W_m · (rms(x) · w_r / hidden))`: N numbers a token.
    fn modality<O: Ops + ?Sized>(
        &self,
        ops: &mut O,
        i: usize,
        [norm, scaled, routed, squashed]: [&'static str; 4],
        x: &O::Tensor,
    ) -> O::Tensor {
        let (c, w, at) = (&self.config, &self.weights.layers[i].altup, At::layer(i));
        let h = ops.rms_norm(at.site(norm), x, Some(&w.router_norm), c.hidden_size, c.rms_norm_eps);
        let h = ops.scale(at.site(scaled), &h, 1.0 / c.hidden_size as f64);
        let h = ops.linear(at.site(routed), &h, &w.modality_router);
        // A cap of 1 is the hyperbolic tangent itself.
        ops.softcap(at.site(squashed), &h, 1.0)
    }

    /// Attention of layer `i` on normed rows, output projection included.
    fn attention<O: Ops + ?Sized>(
        &self,
        ops: &mut O,
        i: usize,
        h: &O::Tensor,
        first: usize,
        inputs: &Gemma3nInputs<O::Tensor>,
        caches: &mut [KvCache<O::Tensor>],
    ) -> O::Tensor {
        let (c, w, at) = (&self.config, &self.weights.layers[i], At::layer(i));
        let (layer, rope, head_dim, eps) = (&c.layers[i], c.rope_of(i), c.head_dim, c.rms_norm_eps);
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
