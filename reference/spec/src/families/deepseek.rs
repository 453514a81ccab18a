//! deepseek_v3: multi-head latent attention, and experts chosen in groups.

use super::moe::Router;
use super::moe_decoder::{FeedForward, behind_dense};
use super::{Ends, Family, Linear, heads};
use crate::config::{ConfigError, ConfigReader};
use crate::matrix::{Matrix, Vector};
use crate::rope::{Pairing, Rope, Scaling, yarn_mscale};
use crate::tensors::{LoadError, Loader};
use serde_json::json;

/// ε of the norms of the latents: the norm class's default, whatever `rms_norm_eps` says.
pub const LATENT_EPS: f32 = 1e-6;

/// Config of deepseek_v3.
#[derive(Clone, Debug, PartialEq)]
pub struct DeepseekConfig {
    /// The `model_type`.
    pub family: Family,
    /// Number of token ids.
    pub vocab_size: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Width of the feed-forward of dense layers.
    pub intermediate_size: usize,
    /// Width of an expert.
    pub moe_intermediate_size: usize,
    /// Number of heads.
    pub num_attention_heads: usize,
    /// Width of the query latent; without one, queries are projected directly.
    pub q_lora_rank: Option<usize>,
    /// Width of the latent that keys and values are made of.
    pub kv_lora_rank: usize,
    /// The part of a query or key that does not turn.
    pub qk_nope_head_dim: usize,
    /// The part that turns; all heads share one such key.
    pub qk_rope_head_dim: usize,
    /// Width of a value.
    pub v_head_dim: usize,
    /// ε of the layers' norms.
    pub rms_norm_eps: f32,
    /// Longest sequence.
    pub max_position_embeddings: usize,
    /// Whether the embedding table is the head as well.
    pub tie_word_embeddings: bool,
    /// Whether the latent projections and o have a bias.
    pub attention_bias: bool,
    /// Rotary embedding of the turning part.
    pub rope: Rope,
    /// What scores are multiplied by besides `(d_nope + d_rope)^-½`: m² of a scaled rope.
    pub scale_correction: f64,
    /// How experts are chosen.
    pub router: Router,
    /// Shared experts, which every token passes.
    pub n_shared_experts: usize,
    /// Whether a layer has experts; the others are dense.
    pub sparse: Vec<bool>,
    /// Prediction layers behind the last, which change no logits: their tensors are not read.
    pub num_nextn_predict_layers: usize,
}

impl DeepseekConfig {
    /// Width of a query or key.
    pub fn qk_head_dim(&self) -> usize {
        self.qk_nope_head_dim + self.qk_rope_head_dim
    }

    /// What scores are multiplied by.
    pub fn attention_scale(&self) -> f64 {
        (self.qk_head_dim() as f64).powf(-0.5) * self.scale_correction
    }

    /// Reads the config.
    pub fn parse(family: Family, r: &mut ConfigReader) -> Result<Self, ConfigError> {
        let (num_attention_heads, kv_heads) = heads(r)?;
        if kv_heads != num_attention_heads {
            let expected = format!("num_attention_heads {num_attention_heads}: every head has its own key");
            return Err(r.wrong("num_key_value_heads", &expected));
        }
        r.only("hidden_act", &[json!("silu")])?;
        let count = r.count("num_hidden_layers")?;
        let qk_rope_head_dim = r.size("qk_rope_head_dim")?;
        let qk_nope_head_dim = r.size("qk_nope_head_dim")?;
        // Widths that the framework writes beside the parts they are made of.
        r.only("qk_head_dim", &[json!(qk_nope_head_dim + qk_rope_head_dim)])?;
        r.only("head_dim", &[json!(qk_rope_head_dim)])?;
        r.only("moe_layer_freq", &[json!(1)])?;
        r.inert(&["ep_size", "seq_aux", "aux_loss_alpha"]);
        let all_dim = mscale_all_dim(r)?;
        let mut rope = Rope::parse(r, qk_rope_head_dim)?;
        if r.bool("rope_interleave", true)? {
            rope.pairing = Pairing::Interleaved;
        }
        let scale_correction = match rope.scaling {
            Scaling::Yarn { factor, .. } => yarn_mscale(factor, all_dim).powi(2),
            _ => 1.0,
        };
        Ok(Self {
            family,
            vocab_size: r.size("vocab_size")?,
            hidden_size: r.size("hidden_size")?,
            intermediate_size: r.size("intermediate_size")?,
            moe_intermediate_size: r.size("moe_intermediate_size")?,
            num_attention_heads,
            q_lora_rank: r.usize_opt("q_lora_rank")?,
            kv_lora_rank: r.size("kv_lora_rank")?,
            qk_nope_head_dim,
            qk_rope_head_dim,
            v_head_dim: r.size("v_head_dim")?,
            rms_norm_eps: r.eps("rms_norm_eps", 1e-6)?,
            max_position_embeddings: r.size("max_position_embeddings")?,
            tie_word_embeddings: r.bool("tie_word_embeddings", false)?,
            attention_bias: r.bool("attention_bias", false)?,
            rope,
            scale_correction,
            router: Router::parse_sigmoid(r)?,
            n_shared_experts: r.usize_opt("n_shared_experts")?.unwrap_or(0),
            sparse: behind_dense(r, count)?,
            num_nextn_predict_layers: r.usize_opt("num_nextn_predict_layers")?.unwrap_or(0),
        })
    }
}

/// `mscale_all_dim` of the rope object, 0 where it has none: then the correction is 1.
fn mscale_all_dim(r: &mut ConfigReader) -> Result<f64, ConfigError> {
    for key in ["rope_parameters", "rope_scaling"] {
        if let Some(map) = r.object(key)? {
            return Ok(ConfigReader::new(map, &format!("{key}.")).f64_opt("mscale_all_dim")?.unwrap_or(0.0));
        }
    }
    Ok(0.0)
}

/// Weights of deepseek_v3.
#[derive(Clone, Debug)]
pub struct DeepseekWeights {
    /// Embedding, final norm, head.
    pub ends: Ends,
    /// The layers.
    pub layers: Vec<DeepseekLayer>,
}

/// Weights of one layer.
#[derive(Clone, Debug)]
pub struct DeepseekLayer {
    /// `[hidden]`
    pub input_layernorm: Vector,
    /// Queries.
    pub q: QueryWeights,
    /// `[kv_lora_rank + d_rope, hidden]`: the latent, then the shared key part that turns.
    pub kv_a_proj_with_mqa: Linear,
    /// `[kv_lora_rank]`
    pub kv_a_layernorm: Vector,
    /// `[heads · (d_nope + v_head_dim), kv_lora_rank]`: of every head the key rows, then the value rows.
    pub kv_b_proj: Linear,
    /// `[hidden, heads · v_head_dim]`
    pub o_proj: Linear,
    /// `[hidden]`: the norm before the feed-forward.
    pub post_attention_layernorm: Vector,
    /// The feed-forward.
    pub mlp: FeedForward,
}

/// How queries are made.
#[derive(Clone, Debug)]
pub enum QueryWeights {
    /// `[heads · (d_nope + d_rope), hidden]`
    Direct(Linear),
    /// Through a latent of their own.
    Latent {
        /// `[q_lora_rank, hidden]`
        q_a_proj: Linear,
        /// `[q_lora_rank]`
        q_a_layernorm: Vector,
        /// `[heads · (d_nope + d_rope), q_lora_rank]`
        q_b_proj: Linear,
    },
}

impl DeepseekWeights {
    /// Takes the tensors by their published names.
    pub fn load(c: &DeepseekConfig, loader: &mut Loader) -> Result<Self, LoadError> {
        loader.skip_layers(c.sparse.len(), c.num_nextn_predict_layers);
        let layers =
            (0..c.sparse.len()).map(|i| DeepseekLayer::load(c, i, loader)).collect::<Result<_, _>>()?;
        Ok(Self { ends: Ends::load(loader, c.vocab_size, c.hidden_size, c.tie_word_embeddings)?, layers })
    }

    /// Every matrix.
    pub fn matrices(&mut self) -> Vec<&mut Matrix> {
        let layers = self.layers.iter_mut().flat_map(|l| {
            let q = match &mut l.q {
                QueryWeights::Direct(q_proj) => vec![&mut q_proj.weight],
                QueryWeights::Latent { q_a_proj, q_b_proj, .. } => {
                    vec![&mut q_a_proj.weight, &mut q_b_proj.weight]
                }
            };
            let kv = [&mut l.kv_a_proj_with_mqa, &mut l.kv_b_proj, &mut l.o_proj].map(|l| &mut l.weight);
            q.into_iter().chain(kv).chain(l.mlp.matrices())
        });
        [&mut self.ends.embed_tokens].into_iter().chain(layers).chain([&mut self.ends.lm_head]).collect()
    }
}

impl DeepseekLayer {
    fn load(c: &DeepseekConfig, i: usize, loader: &mut Loader) -> Result<Self, LoadError> {
        let name = |leaf: &str| format!("model.layers.{i}.{leaf}");
        let attention = |leaf: &str| format!("model.layers.{i}.self_attn.{leaf}");
        loader.skip(&attention("rotary_emb.inv_freq"));
        let (heads, hidden, latent) = (c.num_attention_heads, c.hidden_size, c.kv_lora_rank);
        let (queries, bias) = (heads * c.qk_head_dim(), c.attention_bias);
        let q = match c.q_lora_rank {
            None => QueryWeights::Direct(Linear::load(loader, &attention("q_proj"), queries, hidden, false)?),
            Some(rank) => QueryWeights::Latent {
                q_a_proj: Linear::load(loader, &attention("q_a_proj"), rank, hidden, bias)?,
                q_a_layernorm: loader.vector(&attention("q_a_layernorm.weight"), rank)?,
                q_b_proj: Linear::load(loader, &attention("q_b_proj"), queries, rank, false)?,
            },
        };
        let kv_a = latent + c.qk_rope_head_dim;
        let kv_b = heads * (c.qk_nope_head_dim + c.v_head_dim);
        Ok(Self {
            input_layernorm: loader.vector(&name("input_layernorm.weight"), hidden)?,
            q,
            kv_a_proj_with_mqa: Linear::load(loader, &attention("kv_a_proj_with_mqa"), kv_a, hidden, bias)?,
            kv_a_layernorm: loader.vector(&attention("kv_a_layernorm.weight"), latent)?,
            kv_b_proj: Linear::load(loader, &attention("kv_b_proj"), kv_b, latent, false)?,
            o_proj: Linear::load(loader, &attention("o_proj"), hidden, heads * c.v_head_dim, bias)?,
            post_attention_layernorm: loader.vector(&name("post_attention_layernorm.weight"), hidden)?,
            mlp: FeedForward::load(
                loader,
                i,
                c.sparse[i],
                hidden,
                c.intermediate_size,
                &c.router,
                c.moe_intermediate_size,
                c.n_shared_experts,
            )?,
        })
    }
}
