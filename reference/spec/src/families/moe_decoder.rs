//! Decoders whose feed-forward is a mixture of experts on most layers: qwen3_moe, glm4_moe.
//!
//! Attention is that of the dense decoders.

use super::decoder::{AttentionWeights, DecoderConfig};
use super::moe::{Experts, Router, Scoring};
use super::{Ends, Family, Linear, Mlp};
use crate::config::{ConfigError, ConfigReader};
use crate::matrix::{Matrix, Vector};
use crate::tensors::{LoadError, Loader};

/// Config of a decoder with experts.
#[derive(Clone, Debug, PartialEq)]
pub struct MoeDecoderConfig {
    /// Attention, norms, and the width of dense layers.
    pub decoder: DecoderConfig,
    /// How experts are chosen.
    pub router: Router,
    /// Width of an expert.
    pub moe_intermediate_size: usize,
    /// Shared experts, which every token passes: one feed-forward of as many times an expert's width.
    pub n_shared_experts: usize,
    /// Whether a layer has experts; the others are dense.
    pub sparse: Vec<bool>,
    /// Prediction layers behind the last, which change no logits: their tensors are not read.
    pub num_nextn_predict_layers: usize,
}

impl MoeDecoderConfig {
    /// Reads the config of one of the families above.
    pub fn parse(family: Family, r: &mut ConfigReader) -> Result<Self, ConfigError> {
        let decoder = DecoderConfig::parse(family, r)?;
        let count = decoder.layers.len();
        let (router, n_shared_experts, sparse) = if family == "glm4_moe" {
            (
                Router::parse_sigmoid(r)?,
                r.usize_opt("n_shared_experts")?.unwrap_or(0),
                behind_dense(r, count)?,
            )
        } else {
            let scoring = Scoring::Softmax { norm_topk_prob: r.bool("norm_topk_prob", false)? };
            (Router::parse(r, &["num_experts", "num_local_experts"], scoring)?, 0, every_step(r, count)?)
        };
        let moe_intermediate_size = r.size("moe_intermediate_size")?;
        let num_nextn_predict_layers = r.usize_opt("num_nextn_predict_layers")?.unwrap_or(0);
        Ok(Self {
            decoder,
            router,
            moe_intermediate_size,
            n_shared_experts,
            sparse,
            num_nextn_predict_layers,
        })
    }
}

/// deepseek_v3, glm4_moe: the first `first_k_dense_replace` layers are dense.
pub(super) fn behind_dense(r: &mut ConfigReader, count: usize) -> Result<Vec<bool>, ConfigError> {
    let dense = r.usize_opt("first_k_dense_replace")?.unwrap_or(0);
    Ok((0..count).map(|i| i >= dense).collect())
}

/// qwen3_moe, qwen3_next: every `decoder_sparse_step`-th layer, unless `mlp_only_layers` names it.
pub(super) fn every_step(r: &mut ConfigReader, count: usize) -> Result<Vec<bool>, ConfigError> {
    let step = r.usize_opt("decoder_sparse_step")?.unwrap_or(1);
    if step == 0 {
        return Err(r.wrong("decoder_sparse_step", "a positive number"));
    }
    let dense = r.usizes("mlp_only_layers")?.unwrap_or_default();
    Ok((0..count).map(|i| !dense.contains(&i) && (i + 1).is_multiple_of(step)).collect())
}

/// Weights of a decoder with experts.
#[derive(Clone, Debug)]
pub struct MoeDecoderWeights {
    /// Embedding, final norm, head.
    pub ends: Ends,
    /// The layers.
    pub layers: Vec<MoeLayer>,
}

/// Weights of one layer.
#[derive(Clone, Debug)]
pub struct MoeLayer {
    /// `[hidden]`
    pub input_layernorm: Vector,
    /// Attention.
    pub attention: AttentionWeights,
    /// `[hidden]`: the norm before the feed-forward.
    pub post_attention_layernorm: Vector,
    /// The feed-forward.
    pub mlp: FeedForward,
}

/// A dense feed-forward, or a mixture of experts.
#[derive(Clone, Debug)]
// One a layer, so the room of the larger kind costs nothing.
#[allow(clippy::large_enum_variant)]
pub enum FeedForward {
    /// One for all tokens.
    Dense(Mlp),
    /// Experts.
    Sparse(SparseMoe),
}

/// A router with its experts.
#[derive(Clone, Debug)]
pub struct SparseMoe {
    /// `[experts, hidden]`
    pub gate: Linear,
    /// `[experts]`: joins the scores for the choice only, where the family has it.
    pub e_score_correction_bias: Option<Vector>,
    /// The experts.
    pub experts: Experts,
    /// The shared expert, where the family has one.
    pub shared_experts: Option<Mlp>,
}

impl FeedForward {
    /// Takes `model.layers.{i}.mlp.*`: experts where `sparse`, else a feed-forward of width `dense`.
    pub fn load(
        loader: &mut Loader,
        i: usize,
        sparse: bool,
        hidden: usize,
        dense: usize,
        router: &Router,
        expert: usize,
        shared: usize,
    ) -> Result<Self, LoadError> {
        let name = |leaf: &str| format!("model.layers.{i}.mlp{leaf}");
        if !sparse {
            return Ok(FeedForward::Dense(Mlp::load(loader, &name(""), hidden, dense, false)?));
        }
        let count = router.num_experts;
        let biased = matches!(router.scoring, Scoring::Sigmoid { .. });
        let shared_experts = match shared {
            0 => None,
            n => Some(Mlp::load(loader, &name(".shared_experts"), hidden, n * expert, false)?),
        };
        Ok(FeedForward::Sparse(SparseMoe {
            gate: Linear::load(loader, &name(".gate"), count, hidden, false)?,
            e_score_correction_bias: loader.vector_if(
                biased,
                &name(".gate.e_score_correction_bias"),
                count,
            )?,
            experts: Experts::load(loader, &name(".experts"), count, hidden, expert)?,
            shared_experts,
        }))
    }

    /// Every matrix.
    pub fn matrices(&mut self) -> Vec<&mut Matrix> {
        match self {
            FeedForward::Dense(mlp) => mlp.matrices().into(),
            FeedForward::Sparse(moe) => {
                let shared = moe.shared_experts.iter_mut().flat_map(|mlp| mlp.matrices());
                [&mut moe.gate.weight].into_iter().chain(moe.experts.matrices()).chain(shared).collect()
            }
        }
    }
}

impl MoeDecoderWeights {
    /// Takes the tensors by their published names.
    pub fn load(c: &MoeDecoderConfig, loader: &mut Loader) -> Result<Self, LoadError> {
        let d = &c.decoder;
        let layer = |i: usize, loader: &mut Loader| {
            let name = |leaf: &str| format!("model.layers.{i}.{leaf}");
            Ok(MoeLayer {
                input_layernorm: loader.vector(&name("input_layernorm.weight"), d.hidden_size)?,
                attention: AttentionWeights::load(d, i, d.head_dim, d.head_dim, loader)?,
                post_attention_layernorm: loader
                    .vector(&name("post_attention_layernorm.weight"), d.hidden_size)?,
                mlp: FeedForward::load(
                    loader,
                    i,
                    c.sparse[i],
                    d.hidden_size,
                    d.intermediate_size,
                    &c.router,
                    c.moe_intermediate_size,
                    c.n_shared_experts,
                )?,
            })
        };
        loader.skip_layers(d.layers.len(), c.num_nextn_predict_layers);
        let layers = (0..d.layers.len()).map(|i| layer(i, loader)).collect::<Result<_, LoadError>>()?;
        Ok(Self { ends: Ends::load(loader, d.vocab_size, d.hidden_size, d.tie_word_embeddings)?, layers })
    }

    /// Every matrix.
    pub fn matrices(&mut self) -> Vec<&mut Matrix> {
        let layers =
            self.layers.iter_mut().flat_map(|l| l.attention.matrices().into_iter().chain(l.mlp.matrices()));
        [&mut self.ends.embed_tokens].into_iter().chain(layers).chain([&mut self.ends.lm_head]).collect()
    }
}
