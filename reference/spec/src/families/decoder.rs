//! Pre-norm decoders with grouped-query attention: llama, mistral, qwen2, qwen3, smollm3, granite and
//! minicpm; phi3 and olmo2 share the config and have weights of their own.
//!
//! ```text
//! x₀ = m_embed · E[id]
//! x ← x + m_resid · O(attention(norm₁(x)))
//! x ← x + m_resid · mlp(norm₂(x))
//! logits = (norm_f(x) / d_hidden) · W_headᵀ / d_logits
//! ```
//!
//! All multipliers and divisors are 1 but in granite and minicpm.

use super::{Activation, Ends, Family, Linear, Mlp};
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
    /// Whether q and k pass a norm before rope: over head_dim, in olmo2 over the whole projected row.
    pub qk_norm: bool,
    /// Activation of the gate.
    pub activation: Activation,
    /// The multipliers of granite and minicpm; [`Scales::NONE`] for the others.
    pub scales: Scales,
}

/// What differs between the layers of one decoder.
#[derive(Clone, Debug, PartialEq)]
pub struct LayerConfig {
    /// Keys that a token may attend to, itself included; nothing means all before it.
    pub window: Option<usize>,
    /// Whether queries and keys turn; smollm3 has layers where they do not.
    pub rope: bool,
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

    /// What scores are multiplied by: `head_dim^-½`, unless the config says otherwise.
    pub fn attention_scale(&self) -> f64 {
        self.scales.attention_multiplier.unwrap_or((self.head_dim as f64).powf(-0.5))
    }

    /// Reads the config of one of the families above.
    pub fn parse(family: Family, r: &mut ConfigReader) -> Result<Self, ConfigError> {
        let hidden_size = r.size("hidden_size")?;
        let (num_attention_heads, num_key_value_heads) = super::heads(r)?;
        let head_dim = match r.usize_opt("head_dim")? {
            Some(n) if n > 0 => n,
            Some(_) => return Err(r.wrong("head_dim", "a positive number")),
            None if hidden_size % num_attention_heads == 0 => hidden_size / num_attention_heads,
            None => return Err(r.wrong("head_dim", "a number, as hidden_size is no multiple of the heads")),
        };
        r.only("hidden_act", &[json!("silu")])?;
        let attention_bias = r.bool("attention_bias", false)?;
        let mlp_bias = r.bool("mlp_bias", false)?;
        if family == "phi3" && (attention_bias || mlp_bias) {
            return Err(r.wrong(if attention_bias { "attention_bias" } else { "mlp_bias" }, "false"));
        }
        let layers = layers(family, r)?;
        let scales = Scales::parse(family, r, hidden_size, layers.len())?;
        let rope = match family {
            // MiniCPM's config leaves θ out where it is 10000.
            "minicpm" => Rope::parse_with_theta(r, head_dim, 10_000.0)?,
            "glm4_moe" => Rope::parse_with_partial(r, head_dim, 0.5)?,
            _ => Rope::parse(r, head_dim)?,
        };
        Ok(Self {
            family,
            vocab_size: r.size("vocab_size")?,
            hidden_size,
            intermediate_size: r.size("intermediate_size")?,
            num_attention_heads,
            num_key_value_heads,
            head_dim,
            rms_norm_eps: r.eps("rms_norm_eps", 1e-6)?,
            max_position_embeddings: r.size("max_position_embeddings")?,
            tie_word_embeddings: r.bool("tie_word_embeddings", family == "minicpm")?,
            rope,
            layers,
            qkv_bias: attention_bias || family == "qwen2",
            o_bias: attention_bias && family != "glm4_moe",
            mlp_bias,
            qk_norm: match family {
                "qwen3" | "qwen3_moe" | "olmo2" => true,
                "glm4_moe" => r.bool("use_qk_norm", false)?,
                _ => false,
            },
            activation: Activation::Silu,
            scales,
        })
    }
}

/// The multipliers and divisors that granite and minicpm put between the parts of a decoder.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Scales {
    /// What embedding rows are multiplied by (granite; `scale_emb` of minicpm).
    pub embedding_multiplier: Option<f32>,
    /// What each branch is multiplied by before it joins the stream (granite;
    /// `scale_depth / √num_hidden_layers` in minicpm).
    pub residual_multiplier: f32,
    /// What scores are multiplied by, where it is not `head_dim^-½` (granite).
    pub attention_multiplier: Option<f64>,
    /// What the head's product is divided by (granite).
    pub logits_scaling: Option<f32>,
    /// What the final norm is divided by before the head: `hidden_size / dim_model_base` in minicpm.
    pub hidden_divisor: Option<f32>,
}

impl Scales {
    /// No scale anywhere.
    pub const NONE: Scales = Scales {
        embedding_multiplier: None,
        residual_multiplier: 1.0,
        attention_multiplier: None,
        logits_scaling: None,
        hidden_divisor: None,
    };

    fn parse(
        family: Family,
        r: &mut ConfigReader,
        hidden: usize,
        layers: usize,
    ) -> Result<Self, ConfigError> {
        let mut scales = Scales::NONE;
        match family {
            "granite" => {
                scales.embedding_multiplier = r.f64_opt("embedding_multiplier")?.map(|v| v as f32);
                scales.residual_multiplier = r.f64_opt("residual_multiplier")?.unwrap_or(1.0) as f32;
                scales.attention_multiplier = Some(r.f64_opt("attention_multiplier")?.unwrap_or(1.0));
                scales.logits_scaling = positive(r, "logits_scaling")?;
            }
            "minicpm" => {
                scales.embedding_multiplier = r.f64_opt("scale_emb")?.map(|v| v as f32);
                let depth = r.f64_opt("scale_depth")?.unwrap_or(1.0);
                scales.residual_multiplier = (depth / (layers as f64).sqrt()) as f32;
                scales.hidden_divisor = positive(r, "dim_model_base")?.map(|base| hidden as f32 / base);
                // Sparse attention for long prompts is another computation: only its absence is understood.
                r.only("sparse_config", &[])?;
                r.inert(&["mup_denominator"]);
            }
            _ => {}
        }
        Ok(scales)
    }
}

/// A divisor, where it is given.
fn positive(r: &mut ConfigReader, key: &str) -> Result<Option<f32>, ConfigError> {
    match r.f64_opt(key)? {
        Some(value) if value <= 0.0 => Err(r.wrong(key, "a positive number")),
        value => Ok(value.map(|v| v as f32)),
    }
}

/// What differs between layers: the window, and in smollm3 whether they turn.
fn layers(family: Family, r: &mut ConfigReader) -> Result<Vec<LayerConfig>, ConfigError> {
    let windows = windows(family, r)?;
    let turns = match family {
        "smollm3" => turning(r, windows.len())?,
        _ => vec![true; windows.len()],
    };
    Ok(windows.into_iter().zip(turns).map(|(window, rope)| LayerConfig { window, rope }).collect())
}

/// smollm3: `no_rope_layers[i]` is 1 where rope *is* applied; without the list, every
/// `no_rope_layer_interval`-th layer goes without.
fn turning(r: &mut ConfigReader, count: usize) -> Result<Vec<bool>, ConfigError> {
    let interval = r.usize_opt("no_rope_layer_interval")?.unwrap_or(4);
    match r.usizes("no_rope_layers")? {
        Some(list) if list.len() == count && list.iter().all(|&v| v <= 1) => {
            Ok(list.into_iter().map(|v| v == 1).collect())
        }
        Some(_) => Err(r.wrong("no_rope_layers", &format!("a 0 or 1 for each of the {count} layers"))),
        None if interval == 0 => Err(r.wrong("no_rope_layer_interval", "a positive number")),
        None => Ok((0..count).map(|layer| !(layer + 1).is_multiple_of(interval)).collect()),
    }
}

/// The window of every layer.
///
/// mistral, phi3: `sliding_window` on every layer. The others: `layer_types` where given; else, with
/// `use_sliding_window`, the layers from `max_window_layers` on.
fn windows(family: Family, r: &mut ConfigReader) -> Result<Vec<Option<usize>>, ConfigError> {
    let count = r.count("num_hidden_layers")?;
    let window = r.usize_opt("sliding_window")?;
    if window == Some(0) {
        return Err(r.wrong("sliding_window", "a positive number or null"));
    }
    let everywhere = matches!(family, "mistral" | "phi3");
    let switched_on = r.bool("use_sliding_window", everywhere)?;
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
    let slides = |layer: usize| switched_on && (everywhere || layer >= first);
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
        let layers =
            (0..c.layers.len()).map(|i| LayerWeights::load(c, i, loader)).collect::<Result<_, _>>()?;
        let Ends { embed_tokens, norm, lm_head } =
            Ends::load(loader, c.vocab_size, c.hidden_size, c.tie_word_embeddings)?;
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
        let attention = AttentionWeights::load(c, i, c.head_dim, c.head_dim, loader)?;
        let mlp = Mlp::load(loader, &name("mlp"), c.hidden_size, c.intermediate_size, c.mlp_bias)?;
        Ok(Self {
            input_layernorm: loader.vector(&name("input_layernorm.weight"), c.hidden_size)?,
            q_proj: attention.q_proj,
            k_proj: attention.k_proj,
            v_proj: attention.v_proj,
            q_norm: attention.q_norm,
            k_norm: attention.k_norm,
            o_proj: attention.o_proj,
            post_attention_layernorm: loader
                .vector(&name("post_attention_layernorm.weight"), c.hidden_size)?,
            gate_proj: mlp.gate_proj,
            up_proj: mlp.up_proj,
            down_proj: mlp.down_proj,
        })
    }
}

/// Weights of one layer's attention, under the names that most families use.
#[derive(Clone, Debug)]
pub struct AttentionWeights {
    /// `[heads · head_dim, hidden]`
    pub q_proj: Linear,
    /// `[kv_heads · head_dim, hidden]`
    pub k_proj: Linear,
    /// `[kv_heads · head_dim, hidden]`
    pub v_proj: Linear,
    /// `[head_dim]`, or as long as the projected row in olmo2; where the family has a q/k norm.
    pub q_norm: Option<Vector>,
    /// As `q_norm`, for keys.
    pub k_norm: Option<Vector>,
    /// `[hidden, heads · head_dim]`
    pub o_proj: Linear,
}

impl AttentionWeights {
    /// Takes `model.layers.{i}.self_attn.*`; the norms are `q_norm` and `k_norm` long.
    pub fn load(
        c: &DecoderConfig,
        i: usize,
        q_norm: usize,
        k_norm: usize,
        loader: &mut Loader,
    ) -> Result<Self, LoadError> {
        let name = |leaf: &str| format!("model.layers.{i}.self_attn.{leaf}");
        loader.skip(&name("rotary_emb.inv_freq"));
        let (q, kv, hidden) = (c.q_width(), c.kv_width(), c.hidden_size);
        let mut linear = |leaf: &str, out, inner, bias| Linear::load(loader, &name(leaf), out, inner, bias);
        Ok(Self {
            q_proj: linear("q_proj", q, hidden, c.qkv_bias)?,
            k_proj: linear("k_proj", kv, hidden, c.qkv_bias)?,
            v_proj: linear("v_proj", kv, hidden, c.qkv_bias)?,
            o_proj: linear("o_proj", hidden, q, c.o_bias)?,
            q_norm: loader.vector_if(c.qk_norm, &name("q_norm.weight"), q_norm)?,
            k_norm: loader.vector_if(c.qk_norm, &name("k_norm.weight"), k_norm)?,
        })
    }

    /// Every matrix.
    pub fn matrices(&mut self) -> [&mut Matrix; 4] {
        [&mut self.q_proj, &mut self.k_proj, &mut self.v_proj, &mut self.o_proj].map(|l| &mut l.weight)
    }
}
