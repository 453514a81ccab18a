//! Gemma 4 (text): two widths of heads, shared keys and values, per-layer embeddings.
//!
//! ```text
//! x = √hidden · E[id]
//! x ← x + n₂(O(attention(n₁(x))))
//! x ← x + n₄(mlp(n₃(x)))                         or n₄(n₆(mlp(n₃(x))) + n₈(experts(n₇(x))))
//! x ← x + n₅(W_proj(act(W_gate x) · ple_i))     where there are per-layer embeddings
//! x ← x · layer_scalar
//! logits = cap(norm_f(x) · W_headᵀ)
//! ```
//!
//! Scores have scale 1: q and k are normed per head, v without a weight. The last layers may attend with
//! queries of their own to the keys and values of an earlier layer of their type.

use super::moe::Routed;
use super::ple::{self, Inputs};
use super::{Program, Shape, State, blocks, saved};
use crate::DeviceError;
use crate::host::act::{add, scale};
use crate::host::attention::Attention;
use crate::host::cache::KvCache;
use crate::host::norm::{rms_norm, unit_norm};
use crate::host::rope::RopeTable;
use crate::host::router::softmax;
use crate::launcher::Source;
use crate::pass::Pass;
use crate::resident::{Group, Key, Role};
use spec::Matrix;
use spec::families::gemma4::{Gemma4Config, Gemma4MoeWeights, Gemma4Weights, KeyValueWeights};
use spec::families::layered::LayerType;

/// Config, weights and request state.
pub(crate) struct Gemma4 {
    c: Gemma4Config,
    w: Gemma4Weights,
    rope: RopeTable,
    rope_local: RopeTable,
    /// One a layer; those of layers that share another's stay empty.
    caches: Vec<KvCache>,
    inputs: Inputs,
    /// The experts of each layer that has them.
    routed: Vec<Option<Routed>>,
}

impl Gemma4 {
    pub fn new(c: &Gemma4Config, w: &Gemma4Weights) -> Result<Self, DeviceError> {
        for (i, layer) in c.layers.iter().enumerate() {
            blocks::check_heads(c.num_attention_heads, layer.num_key_value_heads, c.rope_of(i))?;
        }
        let cache = |i: usize| {
            let layer = &c.layers[i];
            KvCache::new(layer.num_key_value_heads, layer.head_dim, layer.head_dim)
        };
        let routed = w.layers.iter().map(|layer| match (&c.moe, &layer.moe) {
            (Some(c4), Some(w)) => {
                Routed::new(&c4.router, &w.router_proj, None, &w.experts, c.activation.into()).map(Some)
            }
            _ => Ok(None),
        });
        Ok(Self {
            routed: routed.collect::<Result<_, _>>()?,
            c: c.clone(),
            w: w.clone(),
            rope: RopeTable::new(&c.rope),
            rope_local: RopeTable::new(&c.rope_local),
            caches: (0..c.layers.len()).map(cache).collect(),
            inputs: Inputs::default(),
        })
    }

    /// `attn_norm` to `post_attn_norm`.
    fn attention(&mut self, i: usize, x: &[f32], pass: &mut Pass) -> Result<Vec<f32>, DeviceError> {
        let (c, w) = (&self.c, &self.w.layers[i]);
        let layer = &c.layers[i];
        let (heads, kv_heads, dim, eps) =
            (c.num_attention_heads, layer.num_key_value_heads, layer.head_dim, c.rms_norm_eps);
        let (turned_at, length) = (pass.rope_position(i), pass.length());
        let rope = match layer.layer_type {
            LayerType::Sliding => &mut self.rope_local,
            LayerType::Full => &mut self.rope,
        };

        let mut h = rms_norm(x, &w.input_layernorm, eps);
        pass.value("attn_norm", &[c.hidden_size], &mut h);
        let (q, kv) = match &w.kv {
            None => {
                let [q] = pass.parts(Role::Query, &h)?;
                (q, None)
            }
            Some(kv @ KeyValueWeights { v_proj: None, .. }) => {
                let [q, k] = pass.parts(Role::Qkv, &h)?;
                // Values are made of the raw keys.
                (q, Some((kv, k.clone(), k)))
            }
            Some(kv) => {
                let [q, k, v] = pass.parts(Role::Qkv, &h)?;
                (q, Some((kv, k, v)))
            }
        };
        let mut q = rms_norm(&q, &w.q_norm, eps);
        pass.value("q_norm", &[heads, dim], &mut q);
        rope.turn_in(&mut q, heads, turned_at, length);
        pass.value("q_rope", &[heads, dim], &mut q);
        if let Some((kv, k, v)) = kv {
            let mut k = rms_norm(&k, &kv.k_norm, eps);
            pass.value("k_norm", &[kv_heads, dim], &mut k);
            rope.turn_in(&mut k, kv_heads, turned_at, length);
            pass.value("k_rope", &[kv_heads, dim], &mut k);
            let mut v = unit_norm(&v, dim, eps);
            pass.value("v_norm", &[kv_heads, dim], &mut v);
            self.caches[i].append(&k, &v);
        }
        let attention = Attention { heads, scale: 1.0, window: c.window(i), softcap: None, sinks: None };
        let mut context = pass.attend(&attention, &q, &self.caches[layer.kv_source]);
        pass.value("attn_ctx", &[heads * dim], &mut context);
        let [out] = pass.parts(Role::AttentionOut, &context)?;
        let mut branch = rms_norm(&out, &w.post_attention_layernorm, eps);
        pass.value("post_attn_norm", &[c.hidden_size], &mut branch);
        Ok(branch)
    }

    /// `mlp_norm` to `post_mlp_norm`.
    fn feed_forward(&mut self, i: usize, x: &[f32], pass: &mut Pass) -> Result<Vec<f32>, DeviceError> {
        let (c, w) = (&self.c, &self.w.layers[i]);
        let mut h = rms_norm(x, &w.pre_feedforward_layernorm, c.rms_norm_eps);
        pass.value("mlp_norm", &[c.hidden_size], &mut h);
        let mut out = blocks::feed_forward(&h, c.layers[i].intermediate_size, c.activation, pass)?;
        if let (Some(moe), Some(routed)) = (&w.moe, &self.routed[i]) {
            out = Self::beside(&self.c, moe, routed, x, &out, pass)?;
        }
        let mut branch = rms_norm(&out, &w.post_feedforward_layernorm, c.rms_norm_eps);
        pass.value("post_mlp_norm", &[c.hidden_size], &mut branch);
        Ok(branch)
    }

    /// `post_mlp_norm_1` to `moe_out`: experts beside the dense feed-forward, whose output is `dense`.
    ///
    /// The router and the experts read the residual stream `x`, each through a norm of its own.
    fn beside(
        c: &Gemma4Config,
        w: &Gemma4MoeWeights,
        routed: &Routed,
        x: &[f32],
        dense: &[f32],
        pass: &mut Pass,
    ) -> Result<Vec<f32>, DeviceError> {
        let (hidden, eps) = ([c.hidden_size], c.rms_norm_eps);
        let mut sum = rms_norm(dense, &w.post_feedforward_layernorm_1, eps);
        pass.value("post_mlp_norm_1", &hidden, &mut sum);
        let mut h = rms_norm(x, &w.router_scale, eps);
        pass.value("router_norm", &hidden, &mut h);
        scale(&mut h, (c.hidden_size as f64).powf(-0.5) as f32);
        pass.value("router_in", &hidden, &mut h);
        let experts = routed.router.num_experts;
        let mut probs = routed.logits(&h, pass);
        softmax(&mut probs, experts);
        pass.value("router_probs", &[experts], &mut probs);
        let mut choice = routed.choose(&probs, "router_shares", pass);
        for (weight, &e) in choice.weights.iter_mut().zip(&choice.experts) {
            *weight *= w.per_expert_scale[e];
        }
        pass.value("router_weights", &[routed.router.num_experts_per_tok], &mut choice.weights);
        let mut h = rms_norm(x, &w.pre_feedforward_layernorm_2, eps);
        pass.value("moe_norm", &hidden, &mut h);
        let out = routed.run(&h, &choice, pass)?;
        let mut normed = rms_norm(&out, &w.post_feedforward_layernorm_2, eps);
        pass.value("post_moe_norm_2", &hidden, &mut normed);
        add(&mut sum, &normed);
        pass.value("moe_out", &hidden, &mut sum);
        Ok(sum)
    }
}

impl Program for Gemma4 {
    fn shape(&self) -> Shape {
        Shape {
            layers: self.c.layers.len(),
            hidden: self.c.hidden_size,
            width: self.c.hidden_size,
            vocab: self.c.vocab_size,
            max_positions: self.c.max_position_embeddings,
        }
    }

    fn sources(&self) -> Vec<(Key, Source)> {
        let mut sources = vec![blocks::head(&self.w.lm_head, self.changes_logits())];
        sources.extend(self.w.ple.iter().map(ple::context_image));
        for (i, w) in self.w.layers.iter().enumerate() {
            let q = ("q_proj", &w.q_proj);
            sources.push(match &w.kv {
                None => blocks::image(i, Role::Query, Group::Attention, &[q]),
                Some(kv) => {
                    let v = kv.v_proj.iter().map(|v| ("v_proj", v));
                    let parts: Vec<_> = [q, ("k_proj", &kv.k_proj)].into_iter().chain(v).collect();
                    blocks::image(i, Role::Qkv, Group::Attention, &parts)
                }
            });
            sources.push(blocks::image(i, Role::AttentionOut, Group::Attention, &[("attn_out", &w.o_proj)]));
            sources.extend(blocks::feed_forward_images(i, &w.gate_proj, &w.up_proj, &w.down_proj));
            sources.extend(w.ple.iter().flat_map(|w| ple::layer_images(i, w)));
            sources.extend(self.routed[i].iter().flat_map(|routed| routed.images(i)));
        }
        sources
    }

    fn table(&self) -> &Matrix {
        &self.w.embed_tokens
    }

    fn embed_scale(&self) -> f32 {
        self.c.embed_scale()
    }

    fn begin(&mut self, tokens: &[u32], rows: Vec<f32>, pass: &mut Pass) -> Result<Vec<f32>, DeviceError> {
        if let (Some(ple), Some(w)) = (&self.c.ple, &self.w.ple) {
            self.inputs = Inputs::new(ple, w, tokens, &rows, self.c.rms_norm_eps, pass)?;
        }
        Ok(rows)
    }

    fn layer(&mut self, i: usize, x: &mut [f32], pass: &mut Pass) -> Result<(), DeviceError> {
        let hidden = [self.c.hidden_size];
        let attention = self.attention(i, x, pass)?;
        add(x, &attention);
        pass.value("resid_mid", &hidden, x);
        let mlp = self.feed_forward(i, x, pass)?;
        add(x, &mlp);
        pass.value("resid_mlp", &hidden, x);
        let (c, w) = (&self.c, &self.w.layers[i]);
        if let (Some(ple), Some(w)) = (&c.ple, &w.ple) {
            let branch = self.inputs.branch(ple, i, x, w, c.activation, c.rms_norm_eps, pass)?;
            add(x, &branch);
            pass.value("resid_ple", &hidden, x);
        }
        scale(x, w.layer_scalar[0]);
        pass.value("out", &hidden, x);
        Ok(())
    }

    fn state_taps(&self, i: usize, pass: &mut Pass) {
        if self.c.layers[i].kv_source == i {
            blocks::cache_taps(&self.caches[i], pass);
        }
    }

    fn final_norm(&self, x: &[f32]) -> Vec<f32> {
        rms_norm(x, &self.w.norm, self.c.rms_norm_eps)
    }

    fn finish_logits(&self, logits: &mut [f32]) {
        blocks::cap_logits(logits, self.c.final_logit_softcapping);
    }

    fn changes_logits(&self) -> bool {
        self.c.final_logit_softcapping.is_some()
    }

    fn truncate(&mut self, positions: usize) {
        self.caches.iter_mut().for_each(|cache| cache.truncate(positions));
    }

    fn reserve(&mut self, positions: usize) {
        let layers = self.caches.iter_mut().zip(&self.c.layers).enumerate();
        layers.filter(|(i, (_, c))| c.kv_source == *i).for_each(|(_, (cache, _))| cache.reserve(positions));
    }

    fn save(&self) -> State {
        Box::new(self.caches.clone())
    }

    fn restore(&mut self, state: &State) {
        self.caches = saved(state);
    }
}
