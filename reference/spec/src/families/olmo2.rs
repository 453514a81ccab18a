//! olmo2: a decoder with norms behind its branches and none before them.
//!
//! The config is that of the other decoders; the norms of q and k span the whole projected row.

use super::decoder::{AttentionWeights, DecoderConfig};
use super::{Ends, Mlp};
use crate::matrix::{Matrix, Vector};
use crate::tensors::{LoadError, Loader};

/// Weights of olmo2.
#[derive(Clone, Debug)]
pub struct Olmo2Weights {
    /// Embedding, final norm, head.
    pub ends: Ends,
    /// The layers.
    pub layers: Vec<Olmo2Layer>,
}

/// Weights of one layer.
#[derive(Clone, Debug)]
pub struct Olmo2Layer {
    /// Attention; `q_norm` is `[heads · head_dim]`, `k_norm` is `[kv_heads · head_dim]`.
    pub attention: AttentionWeights,
    /// `[hidden]`: the norm of the attention branch.
    pub post_attention_layernorm: Vector,
    /// The feed-forward.
    pub mlp: Mlp,
    /// `[hidden]`: the norm of the feed-forward branch.
    pub post_feedforward_layernorm: Vector,
}

impl Olmo2Weights {
    /// Takes the tensors by their published names.
    pub fn load(c: &DecoderConfig, loader: &mut Loader) -> Result<Self, LoadError> {
        let layer = |i: usize, loader: &mut Loader| {
            let name = |leaf: &str| format!("model.layers.{i}.{leaf}");
            let hidden = c.hidden_size;
            Ok(Olmo2Layer {
                attention: AttentionWeights::load(c, i, c.q_width(), c.kv_width(), loader)?,
                post_attention_layernorm: loader.vector(&name("post_attention_layernorm.weight"), hidden)?,
                mlp: Mlp::load(loader, &name("mlp"), hidden, c.intermediate_size, false)?,
                post_feedforward_layernorm: loader
                    .vector(&name("post_feedforward_layernorm.weight"), hidden)?,
            })
        };
        let layers = (0..c.layers.len()).map(|i| layer(i, loader)).collect::<Result<_, LoadError>>()?;
        Ok(Self { ends: Ends::load(loader, c.vocab_size, c.hidden_size, c.tie_word_embeddings)?, layers })
    }

    /// Every matrix.
    pub fn matrices(&mut self) -> Vec<&mut Matrix> {
        let layers =
            self.layers.iter_mut().flat_map(|l| l.attention.matrices().into_iter().chain(l.mlp.matrices()));
        [&mut self.ends.embed_tokens].into_iter().chain(layers).chain([&mut self.ends.lm_head]).collect()
    }
}
