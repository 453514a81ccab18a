//! phi3: a pre-norm decoder whose projections are stored fused.
//!
//! `qkv_proj` holds the rows of q, then k, then v; `gate_up_proj` those of gate, then up. The config is
//! that of the other decoders.

use super::decoder::DecoderConfig;
use super::{Ends, Linear};
use crate::matrix::{Matrix, Vector};
use crate::tensors::{LoadError, Loader};

/// Weights of phi3.
#[derive(Clone, Debug)]
pub struct Phi3Weights {
    /// Embedding, final norm, head.
    pub ends: Ends,
    /// The layers.
    pub layers: Vec<Phi3Layer>,
}

/// Weights of one layer.
#[derive(Clone, Debug)]
pub struct Phi3Layer {
    /// `[hidden]`
    pub input_layernorm: Vector,
    /// `[(heads + 2 · kv_heads) · head_dim, hidden]`: rows of q, then k, then v.
    pub qkv_proj: Linear,
    /// `[hidden, heads · head_dim]`
    pub o_proj: Linear,
    /// `[hidden]`: the norm before the feed-forward.
    pub post_attention_layernorm: Vector,
    /// `[2 · intermediate, hidden]`: rows of gate, then up.
    pub gate_up_proj: Linear,
    /// `[hidden, intermediate]`
    pub down_proj: Linear,
}

impl Phi3Weights {
    /// Takes the tensors by their published names.
    pub fn load(c: &DecoderConfig, loader: &mut Loader) -> Result<Self, LoadError> {
        let layers = (0..c.layers.len()).map(|i| Phi3Layer::load(c, i, loader)).collect::<Result<_, _>>()?;
        Ok(Self { ends: Ends::load(loader, c.vocab_size, c.hidden_size, c.tie_word_embeddings)?, layers })
    }

    /// Every matrix.
    pub fn matrices(&mut self) -> Vec<&mut Matrix> {
        let layers = self.layers.iter_mut().flat_map(|l| {
            [&mut l.qkv_proj, &mut l.o_proj, &mut l.gate_up_proj, &mut l.down_proj]
                .map(|linear| &mut linear.weight)
        });
        [&mut self.ends.embed_tokens].into_iter().chain(layers).chain([&mut self.ends.lm_head]).collect()
    }
}

impl Phi3Layer {
    fn load(c: &DecoderConfig, i: usize, loader: &mut Loader) -> Result<Self, LoadError> {
        let name = |leaf: &str| format!("model.layers.{i}.{leaf}");
        loader.skip(&name("self_attn.rotary_emb.inv_freq"));
        let (q, kv, hidden, inner) = (c.q_width(), c.kv_width(), c.hidden_size, c.intermediate_size);
        let mut linear = |leaf: &str, out, inner| Linear::load(loader, &name(leaf), out, inner, false);
        Ok(Self {
            qkv_proj: linear("self_attn.qkv_proj", q + 2 * kv, hidden)?,
            o_proj: linear("self_attn.o_proj", hidden, q)?,
            gate_up_proj: linear("mlp.gate_up_proj", 2 * inner, hidden)?,
            down_proj: linear("mlp.down_proj", hidden, inner)?,
            input_layernorm: loader.vector(&name("input_layernorm.weight"), hidden)?,
            post_attention_layernorm: loader.vector(&name("post_attention_layernorm.weight"), hidden)?,
        })
    }
}
