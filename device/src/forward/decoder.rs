//! Pre-norm decoders with grouped-query attention.
//!
//! ```text
//! x ← x + O(attention(norm₁(x)))
//! x ← x + down(act(gate) · up) of norm₂(x)
//! ```

use super::{Program, Shape, blocks};
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
use spec::families::decoder::{DecoderConfig, DecoderWeights};

/// Config, weights and request state of a decoder.
pub(crate) struct Decoder {
    c: DecoderConfig,
    w: DecoderWeights,
    rope: RopeTable,
    caches: Vec<KvCache>,
}

impl Decoder {
    pub fn new(c: &DecoderConfig, w: &DecoderWeights) -> Result<Self, DeviceError> {
        blocks::check_heads(c.num_attention_heads, c.num_key_value_heads, &c.rope)?;
        let cache = KvCache::new(c.num_key_value_heads, c.head_dim, c.head_dim);
        Ok(Self {
            c: c.clone(),
            w: w.clone(),
            rope: RopeTable::new(&c.rope),
            caches: vec![cache; c.layers.len()],
        })
    }

    /// `attn_norm` to `attn_out`.
    fn attention(&mut self, i: usize, x: &[f32], pass: &mut Pass) -> Result<Vec<f32>, DeviceError> {
        let (c, w) = (&self.c, &self.w.layers[i]);
        let (heads, kv_heads, dim) = (c.num_attention_heads, c.num_key_value_heads, c.head_dim);
        let turned_at = pass.rope_position(i);

        let mut h = rms_norm(x, &w.input_layernorm, c.rms_norm_eps);
        pass.value("attn_norm", &[c.hidden_size], &mut h);
        let [mut q, mut k, v] = pass.parts(Role::Qkv, &h)?;
        if let (Some(q_norm), Some(k_norm)) = (&w.q_norm, &w.k_norm) {
            q = rms_norm(&q, q_norm, c.rms_norm_eps);
            pass.value("q_norm", &[heads, dim], &mut q);
            k = rms_norm(&k, k_norm, c.rms_norm_eps);
            pass.value("k_norm", &[kv_heads, dim], &mut k);
        }
        self.rope.turn(&mut q, heads, turned_at);
        pass.value("q_rope", &[heads, dim], &mut q);
        self.rope.turn(&mut k, kv_heads, turned_at);
        pass.value("k_rope", &[kv_heads, dim], &mut k);

        let cache = &mut self.caches[i];
        cache.append(&k, &v);
        let attention = Attention {
            heads,
            scale: c.attention_scale() as f32,
            window: c.layers[i].window,
            softcap: None,
            sinks: None,
        };
        let mut context = attention.run(&q, cache, pass.position());
        pass.value("attn_ctx", &[heads * dim], &mut context);
        let [out] = pass.parts(Role::AttentionOut, &context)?;
        Ok(out)
    }

    /// `mlp_norm` to `mlp_out`.
    fn feed_forward(&mut self, i: usize, x: &[f32], pass: &mut Pass) -> Result<Vec<f32>, DeviceError> {
        let (c, w) = (&self.c, &self.w.layers[i]);
        let mut h = rms_norm(x, &w.post_attention_layernorm, c.rms_norm_eps);
        pass.value("mlp_norm", &[c.hidden_size], &mut h);
        blocks::feed_forward(&h, c.intermediate_size, c.activation, pass)
    }
}

impl Program for Decoder {
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

    fn truncate(&mut self, positions: usize) {
        self.caches.iter_mut().for_each(|cache| cache.truncate(positions));
    }

    fn reserve(&mut self, positions: usize) {
        self.caches.iter_mut().for_each(|cache| cache.reserve(positions));
    }
}
