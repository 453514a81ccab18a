//! Pre-norm decoders with grouped-query attention: llama, mistral, qwen2, qwen3.
//!
//! ```text
//! x ← x + O(attention(norm₁(x)))
//! x ← x + mlp(norm₂(x))
//! logits = norm_f(x) · W_headᵀ
//! ```

use super::{Activation, Family, Linear};
use crate::config::{ConfigError, ConfigReader};
use crate::matrix::{Matrix, Vector};
use crate::rope::Rope;
use crate::tensors::{LoadError, Loader};
use serde_json::json;

/// Config of a pre-norm decoder.
#[derive(Clone, Debug, PartialEq)]
pub struct DecoderConfig {
    /// The `model_type`.
    pub family: Family,
    /// Number of token ids.
    pub vocab_size: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Width of the feed-forward.
    pub intermediate_size: usize,
    /// Number of query heads.
    pub num_attention_heads: usize,
    /// Number of key and value heads; `num_attention_heads / num_key_value_heads` queries share one.
    pub num_key_value_heads: usize,
    /// Width of a head; need not be `hidden_size / num_attention_heads`.
    pub head_dim: usize,
    /// ε of every norm.
    pub rms_norm_eps: f32,
    /// Longest sequence.
    pub max_position_embeddings: usize,
    /// Whether the embedding table is the head as well.
    pub tie_word_embeddings: bool,
    /// Rotary embedding of every layer.
    pub rope: Rope,
    /// What differs between layers.
    pub layers: Vec<LayerConfig>,
    /// Whether q, k and v have a bias.
    pub qkv_bias: bool,
    /// Whether o has a bias.
    pub o_bias: bool,
    /// Whether gate, up and down have a bias.
    pub mlp_bias: bool,
    /// Whether q and k pass a norm over head_dim before rope.
    pub qk_norm: bool,
    /// Activation of the gate.
    pub activation: Activation,
}

/// What differs between the layers of one decoder.
#[derive(Clone, Debug, PartialEq)]
pub struct LayerConfig {
    /// Keys that a token may attend to, itself included; nothing means all before it.
    pub window: Option<usize>,
}

impl DecoderConfig {
    /// Width of all query heads together.
    pub fn q_width(&self) -> usize {
        self.num_attention_heads * self.head_dim
    }

    /// Width of all key (or value) heads together.
    pub fn kv_width(&self) -> usize {
        self.num_key_value_heads * self.head_dim
    }

    /// What scores are multiplied by: `head_dim^-½`.
    pub fn attention_scale(&self) -> f64 {
        (self.head_dim as f64).powf(-0.5)
    }

    /// Reads the config of one of the families above.
    pub fn parse(family: Family, r: &mut ConfigReader) -> Result<Self, ConfigError> {
        let hidden_size = r.size("hidden_size")?;
        let num_attention_heads = r.size("num_attention_heads")?;
        let num_key_value_heads = match r.usize_opt("num_key_value_heads")? {
            None => num_attention_heads,
            Some(n) if n > 0 && num_attention_heads % n == 0 => n,
            Some(_) => {
                let expected = format!("a divisor of num_attention_heads {num_attention_heads}");
                return Err(r.wrong("num_key_value_heads", &expected));
            }
        };
        let head_dim = match r.usize_opt("head_dim")? {
            Some(n) if n > 0 => n,
            Some(_) => return Err(r.wrong("head_dim", "a positive number")),
            None if hidden_size % num_attention_heads == 0 => hidden_size / num_attention_heads,
            None => return Err(r.wrong("head_dim", "a number, as hidden_size is no multiple of the heads")),
        };
        r.only("hidden_act", &[json!("silu")])?;
        let attention_bias = r.bool("attention_bias", false)?;
        let mlp_bias = r.bool("mlp_bias", false)?;
        let layers = windows(family, r)?.into_iter().map(|window| LayerConfig { window }).collect();
        Ok(Self {
            family,
            vocab_size: r.size("vocab_size")?,
            hidden_size,
            intermediate_size: r.size("intermediate_size")?,
            num_attention_heads,
            num_key_value_heads,
            head_dim,
            rms_norm_eps: r.f64_opt("rms_norm_eps")?.unwrap_or(1e-6) as f32,
            max_position_embeddings: r.size("max_position_embeddings")?,
            tie_word_embeddings: r.bool("tie_word_embeddings", false)?,
            rope: Rope::parse(r, head_dim)?,
            layers,
            qkv_bias: attention_bias || family == "qwen2",
            o_bias: attention_bias,
            mlp_bias,
            qk_norm: family == "qwen3",
            activation: Activation::Silu,
        })
    }
}

/// The window of every layer.
///
/// mistral: `sliding_window` on every layer. qwen2, qwen3: `layer_types` where given; else, with
/// `use_sliding_window`, the layers from `max_window_layers` on.
fn windows(family: Family, r: &mut ConfigReader) -> Result<Vec<Option<usize>>, ConfigError> {
    let count = r.size("num_hidden_layers")?;
    let window = r.usize_opt("sliding_window")?;
    if window == Some(0) {
        return Err(r.wrong("sliding_window", "a positive number or null"));
    }
    let switched_on = r.bool("use_sliding_window", family == "mistral")?;
    let first = r.usize_opt("max_window_layers")?.unwrap_or(0);
    if let Some(types) = r.strs("layer_types")? {
        if types.len() != count {
            return Err(r.wrong("layer_types", &format!("one entry for each of the {count} layers")));
        }
        return types
            .iter()
            .map(|kind| match (*kind, window) {
                ("full_attention", _) => Ok(None),
                ("sliding_attention", Some(window)) => Ok(Some(window)),
                ("sliding_attention", None) => {
                    Err(r.wrong("sliding_window", "a number, as layer_types has sliding layers"))
                }
                _ => Err(r.wrong("layer_types", "full_attention or sliding_attention")),
            })
            .collect();
    }
    let slides = |layer: usize| switched_on && (family == "mistral" || layer >= first);
    Ok((0..count).map(|layer| window.filter(|_| slides(layer))).collect())
}

/// Weights of a pre-norm decoder.
#[derive(Clone, Debug)]
pub struct DecoderWeights {
    /// `[vocab, hidden]`
    pub embed_tokens: Matrix,
    /// The layers.
    pub layers: Vec<LayerWeights>,
    /// `[hidden]`
    pub norm: Vector,
    /// `[vocab, hidden]`; the embedding table where the model ties them.
    pub lm_head: Matrix,
}

/// Weights of one layer.
#[derive(Clone, Debug)]
pub struct LayerWeights {
    /// `[hidden]`
    pub input_layernorm: Vector,
    /// `[heads · head_dim, hidden]`
    pub q_proj: Linear,
    /// `[kv_heads · head_dim, hidden]`
    pub k_proj: Linear,
    /// `[kv_heads · head_dim, hidden]`
    pub v_proj: Linear,
    /// `[head_dim]`, where the family has a q/k norm.
    pub q_norm: Option<Vector>,
    /// `[head_dim]`
    pub k_norm: Option<Vector>,
    /// `[hidden, heads · head_dim]`
    pub o_proj: Linear,
    /// `[hidden]`: the norm before the feed-forward.
    pub post_attention_layernorm: Vector,
    /// `[intermediate, hidden]`
    pub gate_proj: Linear,
    /// `[intermediate, hidden]`
    pub up_proj: Linear,
    /// `[hidden, intermediate]`
    pub down_proj: Linear,
}

impl DecoderWeights {
    /// Takes the tensors by their published names.
    pub fn load(c: &DecoderConfig, loader: &mut Loader) -> Result<Self, LoadError> {
        let embed_tokens = loader.matrix("model.embed_tokens.weight", c.vocab_size, c.hidden_size)?;
        let layers =
            (0..c.layers.len()).map(|i| LayerWeights::load(c, i, loader)).collect::<Result<_, _>>()?;
        let norm = loader.vector("model.norm.weight", c.hidden_size)?;
        let lm_head = if c.tie_word_embeddings {
            loader.skip("lm_head.weight");
            embed_tokens.clone()
        } else {
            loader.matrix("lm_head.weight", c.vocab_size, c.hidden_size)?
        };
        Ok(Self { embed_tokens, layers, norm, lm_head })
    }

    /// Every matrix.
    pub fn matrices(&mut self) -> Vec<&mut Matrix> {
        let layers = self.layers.iter_mut().flat_map(|l| {
            [
                &mut l.q_proj,
                &mut l.k_proj,
                &mut l.v_proj,
                &mut l.o_proj,
                &mut l.gate_proj,
                &mut l.up_proj,
                &mut l.down_proj,
            ]
            .map(|linear| &mut linear.weight)
        });
        [&mut self.embed_tokens].into_iter().chain(layers).chain([&mut self.lm_head]).collect()
    }
}

impl LayerWeights {
    fn load(c: &DecoderConfig, i: usize, loader: &mut Loader) -> Result<Self, LoadError> {
        let name = |leaf: &str| format!("model.layers.{i}.{leaf}");
        loader.skip(&name("self_attn.rotary_emb.inv_freq"));
        let (q, kv, hidden, inner) = (c.q_width(), c.kv_width(), c.hidden_size, c.intermediate_size);
        let mut linear = |leaf: &str, out, inner, bias| Linear::load(loader, &name(leaf), out, inner, bias);
        let q_proj = linear("self_attn.q_proj", q, hidden, c.qkv_bias)?;
        let k_proj = linear("self_attn.k_proj", kv, hidden, c.qkv_bias)?;
        let v_proj = linear("self_attn.v_proj", kv, hidden, c.qkv_bias)?;
        let o_proj = linear("self_attn.o_proj", hidden, q, c.o_bias)?;
        let gate_proj = linear("mlp.gate_proj", inner, hidden, c.mlp_bias)?;
        let up_proj = linear("mlp.up_proj", inner, hidden, c.mlp_bias)?;
        let down_proj = linear("mlp.down_proj", hidden, inner, c.mlp_bias)?;
        Ok(Self {
            input_layernorm: loader.vector(&name("input_layernorm.weight"), hidden)?,
            q_proj,
            k_proj,
            v_proj,
            q_norm: loader.vector_if(c.qk_norm, &name("self_attn.q_norm.weight"), c.head_dim)?,
            k_norm: loader.vector_if(c.qk_norm, &name("self_attn.k_norm.weight"), c.head_dim)?,
            o_proj,
            post_attention_layernorm: loader.vector(&name("post_attention_layernorm.weight"), hidden)?,
            gate_proj,
            up_proj,
            down_proj,
        })
    }
}
