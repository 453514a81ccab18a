//! Gemma 2 and Gemma 3: four norms a layer, sliding and full layers in turn.
//!
//! ```text
//! x = √hidden · E[id]
//! x ← x + n₂(O(attention(n₁(x))))
//! x ← x + n₄(mlp(n₃(x)))
//! logits = cap(norm_f(x) · W_headᵀ)
//! ```

use super::{Program, Shape, State, blocks, saved};
use crate::DeviceError;
use crate::host::act::add;
use crate::host::attention::Attention;
use crate::host::cache::KvCache;
use crate::host::norm::rms_norm;
use crate::host::rope::RopeTable;
use crate::launcher::Source;
use crate::pass::Pass;
use crate::resident::{Group, Key, Role};
use spec::Matrix;
use spec::families::gemma::{GemmaConfig, GemmaWeights};
use spec::families::layered::LayerType;

/// Config, weights and request state.
pub(crate) struct Gemma {
    c: GemmaConfig,
    w: GemmaWeights,
    rope: RopeTable,
    rope_local: Option<RopeTable>,
    caches: Vec<KvCache>,
}

impl Gemma {
    pub fn new(c: &GemmaConfig, w: &GemmaWeights) -> Result<Self, DeviceError> {
        for rope in [Some(&c.rope), c.rope_local.as_ref()].into_iter().flatten() {
            blocks::check_heads(c.num_attention_heads, c.num_key_value_heads, rope)?;
        }
        let cache = KvCache::new(c.num_key_value_heads, c.head_dim, c.head_dim);
        Ok(Self {
            c: c.clone(),
            w: w.clone(),
            rope: RopeTable::new(&c.rope),
            rope_local: c.rope_local.as_ref().map(RopeTable::new),
            caches: vec![cache; c.layer_types.len()],
        })
    }

    /// `attn_norm` to `post_attn_norm`.
    fn attention(&mut self, i: usize, x: &[f32], pass: &mut Pass) -> Result<Vec<f32>, DeviceError> {
        let (c, w) = (&self.c, &self.w.layers[i]);
        let (heads, kv_heads, dim) = (c.num_attention_heads, c.num_key_value_heads, c.head_dim);
        let (turned_at, length) = (pass.rope_position(i), pass.length());

        let mut h = rms_norm(x, &w.input_layernorm, c.rms_norm_eps);
        pass.value("attn_norm", &[c.hidden_size], &mut h);
        let [mut q, mut k, v] = pass.parts(Role::Qkv, &h)?;
        if let (Some(q_norm), Some(k_norm)) = (&w.q_norm, &w.k_norm) {
            q = rms_norm(&q, q_norm, c.rms_norm_eps);
            pass.value("q_norm", &[heads, dim], &mut q);
            k = rms_norm(&k, k_norm, c.rms_norm_eps);
            pass.value("k_norm", &[kv_heads, dim], &mut k);
        }
        let rope = match &mut self.rope_local {
            Some(local) if c.layer_types[i] == LayerType::Sliding => local,
            _ => &mut self.rope,
        };
        rope.turn_in(&mut q, heads, turned_at, length);
        pass.value("q_rope", &[heads, dim], &mut q);
        rope.turn_in(&mut k, kv_heads, turned_at, length);
        pass.value("k_rope", &[kv_heads, dim], &mut k);

        let cache = &mut self.caches[i];
        cache.append(&k, &v);
        let attention = Attention {
            heads,
            scale: c.attention_scale() as f32,
            window: c.window(i),
            softcap: c.attn_logit_softcapping.map(|cap| cap as f32),
            sinks: None,
        };
        let mut context = pass.attend(&attention, &q, cache);
        pass.value("attn_ctx", &[heads * dim], &mut context);
        let [out] = pass.parts(Role::AttentionOut, &context)?;
        let mut branch = rms_norm(&out, &w.post_attention_layernorm, c.rms_norm_eps);
        pass.value("post_attn_norm", &[c.hidden_size], &mut branch);
        Ok(branch)
    }

    /// `mlp_norm` to `post_mlp_norm`.
    fn feed_forward(&mut self, i: usize, x: &[f32], pass: &mut Pass) -> Result<Vec<f32>, DeviceError> {
        let (c, w) = (&self.c, &self.w.layers[i]);
        let mut h = rms_norm(x, &w.pre_feedforward_layernorm, c.rms_norm_eps);
        pass.value("mlp_norm", &[c.hidden_size], &mut h);
        let out = blocks::feed_forward(&h, c.intermediate_size, c.activation, pass)?;
        let mut branch = rms_norm(&out, &w.post_feedforward_layernorm, c.rms_norm_eps);
        pass.value("post_mlp_norm", &[c.hidden_size], &mut branch);
        Ok(branch)
    }
}

impl Program for Gemma {
    fn shape(&self) -> Shape {
        Shape {
            layers: self.c.layer_types.len(),
            hidden: self.c.hidden_size,
            width: self.c.hidden_size,
            vocab: self.c.vocab_size,
            max_positions: self.c.max_position_embeddings,
        }
    }

    fn sources(&self) -> Vec<(Key, Source)> {
        let mut sources = vec![blocks::head(&self.w.lm_head, self.changes_logits())];
        for (i, w) in self.w.layers.iter().enumerate() {
            let qkv = [("q_proj", &w.q_proj), ("k_proj", &w.k_proj), ("v_proj", &w.v_proj)];
            sources.push(blocks::image(i, Role::Qkv, Group::Attention, &qkv));
            sources.push(blocks::image(i, Role::AttentionOut, Group::Attention, &[("attn_out", &w.o_proj)]));
            sources.extend(blocks::feed_forward_images(i, &w.gate_proj, &w.up_proj, &w.down_proj));
        }
        sources
    }

    fn table(&self) -> &Matrix {
        &self.w.embed_tokens
    }

    fn embed_scale(&self) -> f32 {
        self.c.embed_scale()
    }

    fn layer(&mut self, i: usize, x: &mut [f32], pass: &mut Pass) -> Result<(), DeviceError> {
        let attention = self.attention(i, x, pass)?;
        add(x, &attention);
        pass.value("resid_mid", &[self.c.hidden_size], x);
        let mlp = self.feed_forward(i, x, pass)?;
        add(x, &mlp);
        pass.value("out", &[self.c.hidden_size], x);
        Ok(())
    }

    fn state_taps(&self, i: usize, pass: &mut Pass) {
        blocks::cache_taps(&self.caches[i], pass);
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
        self.caches.iter_mut().for_each(|cache| cache.reserve(positions));
    }

    fn save(&self) -> State {
        Box::new(self.caches.clone())
    }

    fn restore(&mut self, state: &State) {
        self.caches = saved(state);
    }
}
