//! Hybrids of gated short convolution and softmax attention: lfm2.
//!
//! ```text
//! x ← x + mixer(norm₁(x))          a short convolution, or attention with q/k norm
//! x ← x + mlp(norm₂(x))
//! logits = norm_f(x) · W_headᵀ
//! ```

use super::{Conv, Family, Linear};
use crate::config::{ConfigError, ConfigReader};
use crate::matrix::{Matrix, Vector};
use crate::rope::Rope;
use crate::tensors::{LoadError, Loader};
use serde_json::json;

/// Config of an lfm2 model.
#[derive(Clone, Debug, PartialEq)]
pub struct Lfm2Config {
    /// The `model_type`.
    pub family: Family,
    /// Number of token ids.
    pub vocab_size: usize,
    /// Width of the residual stream, and channels of the convolution.
    pub hidden_size: usize,
    /// Width of the feed-forward, adjusted where the config asks for it.
    pub intermediate_size: usize,
    /// Which mixer each layer has.
    pub layer_types: Vec<LayerType>,
    /// Number of query heads.
    pub num_attention_heads: usize,
    /// Number of key and value heads.
    pub num_key_value_heads: usize,
    /// Width of a head: `hidden_size / num_attention_heads`.
    pub head_dim: usize,
    /// Taps of the convolution.
    pub conv_l_cache: usize,
    /// Whether the convolution and its projections have a bias.
    pub conv_bias: bool,
    /// ε of every norm.
    pub norm_eps: f32,
    /// Longest sequence.
    pub max_position_embeddings: usize,
    /// Whether the embedding table is the head as well.
    pub tie_word_embeddings: bool,
    /// Rotary embedding of attention layers.
    pub rope: Rope,
}

/// The mixer of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LayerType {
    /// `conv`: a gated short convolution.
    Conv,
    /// `full_attention`
    Full,
}

impl Lfm2Config {
    /// What scores are multiplied by: `head_dim^-½`.
    pub fn attention_scale(&self) -> f64 {
        (self.head_dim as f64).powf(-0.5)
    }

    /// Reads the config. Published files spell some keys `block_…`.
    pub fn parse(family: Family, r: &mut ConfigReader) -> Result<Self, ConfigError> {
        let hidden_size = r.size("hidden_size")?;
        let (num_attention_heads, num_key_value_heads) = heads(r)?;
        if !hidden_size.is_multiple_of(num_attention_heads) {
            return Err(r.wrong("num_attention_heads", &format!("a divisor of hidden_size {hidden_size}")));
        }
        let head_dim = hidden_size / num_attention_heads;
        // Older files repeat widths that the program takes from hidden_size.
        for key in ["block_dim", "conv_dim", "conv_dim_out"] {
            r.only(key, &[json!(hidden_size)])?;
        }
        r.only("num_heads", &[json!(num_attention_heads)])?;
        r.only("block_use_swiglu", &[json!(true)])?;
        r.only("use_pos_enc", &[json!(true)])?;
        r.only("conv_use_xavier_init", &[json!(true), json!(false)])?;
        r.only("block_use_xavier_init", &[json!(true), json!(false)])?;
        let norm_eps = r.f64_opt("norm_eps")?.or(r.f64_opt("block_norm_eps")?).unwrap_or(1e-5);
        Ok(Self {
            family,
            vocab_size: r.size("vocab_size")?,
            hidden_size,
            intermediate_size: intermediate_size(r)?,
            layer_types: layer_types(r)?,
            num_attention_heads,
            num_key_value_heads,
            head_dim,
            conv_l_cache: if r.usize_opt("conv_L_cache")?.is_none() { 3 } else { r.size("conv_L_cache")? },
            conv_bias: r.bool("conv_bias", false)?,
            norm_eps: norm_eps as f32,
            max_position_embeddings: r.size("max_position_embeddings")?,
            tie_word_embeddings: match (r.get("tie_word_embeddings"), r.get("tie_embedding")) {
                (Some(_), _) => r.bool("tie_word_embeddings", true)?,
                (None, _) => r.bool("tie_embedding", true)?,
            },
            rope: Rope::parse(r, head_dim)?,
        })
    }
}

fn heads(r: &mut ConfigReader) -> Result<(usize, usize), ConfigError> {
    let heads = r.size("num_attention_heads")?;
    match r.size("num_key_value_heads")? {
        n if heads.is_multiple_of(n) => Ok((heads, n)),
        _ => Err(r.wrong("num_key_value_heads", &format!("a divisor of num_attention_heads {heads}"))),
    }
}

/// The width of the feed-forward.
///
/// With `block_auto_adjust_ff_dim` two thirds of it, times `block_ffn_dim_multiplier`, rounded up to a
/// multiple of `block_multiple_of`.
fn intermediate_size(r: &mut ConfigReader) -> Result<usize, ConfigError> {
    let given = match r.usize_opt("block_ff_dim")? {
        Some(_) => r.size("block_ff_dim")?,
        None => r.size("intermediate_size")?,
    };
    r.inert(&["intermediate_size"]);
    let adjust = r.bool("block_auto_adjust_ff_dim", true)?;
    let multiplier = r.f64_opt("block_ffn_dim_multiplier")?.unwrap_or(1.0);
    let multiple = r.usize_opt("block_multiple_of")?.unwrap_or(256);
    if !adjust {
        return Ok(given);
    }
    if multiple == 0 || multiple > 1 << 31 {
        return Err(r.wrong("block_multiple_of", "a whole number from 1 to 2147483648"));
    }
    let scaled = multiplier * (2 * given / 3) as f64;
    if !(1.0..=(1u64 << 31) as f64).contains(&scaled) {
        return Err(r.wrong("block_ffn_dim_multiplier", "a factor that gives a width from 1 to 2147483648"));
    }
    Ok((scaled as usize).next_multiple_of(multiple))
}

/// `layer_types`, or `full_attn_idxs` with convolutions elsewhere.
fn layer_types(r: &mut ConfigReader) -> Result<Vec<LayerType>, ConfigError> {
    let count = r.count("num_hidden_layers")?;
    let full = r.usizes("full_attn_idxs")?;
    let Some(types) = r.strs("layer_types")? else {
        let full = full.ok_or_else(|| r.wrong("layer_types", "a list of conv and full_attention"))?;
        if full.iter().any(|&i| i >= count) {
            return Err(r.wrong("full_attn_idxs", &format!("layers below {count}")));
        }
        let kind = |i: usize| if full.contains(&i) { LayerType::Full } else { LayerType::Conv };
        return Ok((0..count).map(kind).collect());
    };
    if types.len() != count {
        return Err(r.wrong("layer_types", &format!("one entry for each of the {count} layers")));
    }
    let kind = |kind: &&str| match *kind {
        "conv" => Ok(LayerType::Conv),
        "full_attention" => Ok(LayerType::Full),
        _ => Err(r.wrong("layer_types", "conv or full_attention")),
    };
    types.iter().map(kind).collect()
}

/// Weights of an lfm2 model.
#[derive(Clone, Debug)]
pub struct Lfm2Weights {
    /// `[vocab, hidden]`
    pub embed_tokens: Matrix,
    /// The layers.
    pub layers: Vec<LayerWeights>,
    /// `[hidden]`: the norm before the head, whatever its name says.
    pub embedding_norm: Vector,
    /// `[vocab, hidden]`; the embedding table where the model ties them.
    pub lm_head: Matrix,
}

/// Weights of one layer.
#[derive(Clone, Debug)]
pub struct LayerWeights {
    /// `[hidden]`: the norm before the mixer.
    pub operator_norm: Vector,
    /// What mixes tokens.
    pub mixer: MixerWeights,
    /// `[hidden]`: the norm before the feed-forward.
    pub ffn_norm: Vector,
    /// `[intermediate, hidden]`: the gate.
    pub w1: Linear,
    /// `[intermediate, hidden]`: up.
    pub w3: Linear,
    /// `[hidden, intermediate]`: down.
    pub w2: Linear,
}

/// Weights of a mixer.
#[derive(Clone, Debug)]
#[allow(clippy::large_enum_variant)] // One a layer: a few hundred bytes beside its matrices.
pub enum MixerWeights {
    /// `conv`
    Conv {
        /// `[3 · hidden, hidden]`: rows of B, then C, then x.
        in_proj: Linear,
        /// `[hidden, kernel]`
        conv: Conv,
        /// `[hidden, hidden]`
        out_proj: Linear,
    },
    /// `self_attn`
    Full {
        /// `[heads · head_dim, hidden]`
        q_proj: Linear,
        /// `[kv_heads · head_dim, hidden]`
        k_proj: Linear,
        /// `[kv_heads · head_dim, hidden]`
        v_proj: Linear,
        /// `[head_dim]`
        q_layernorm: Vector,
        /// `[head_dim]`
        k_layernorm: Vector,
        /// `[hidden, heads · head_dim]`
        out_proj: Linear,
    },
}

impl Lfm2Weights {
    /// Takes the tensors by their published names.
    pub fn load(c: &Lfm2Config, loader: &mut Loader) -> Result<Self, LoadError> {
        let embed_tokens = loader.matrix("model.embed_tokens.weight", c.vocab_size, c.hidden_size)?;
        let layers =
            c.layer_types.iter().enumerate().map(|(i, &kind)| LayerWeights::load(c, kind, i, loader));
        let layers = layers.collect::<Result<_, _>>()?;
        let embedding_norm = loader.vector("model.embedding_norm.weight", c.hidden_size)?;
        let lm_head = if c.tie_word_embeddings {
            loader.skip("lm_head.weight");
            embed_tokens.clone()
        } else {
            loader.matrix("lm_head.weight", c.vocab_size, c.hidden_size)?
        };
        Ok(Self { embed_tokens, layers, embedding_norm, lm_head })
    }

    /// Every matrix.
    pub fn matrices(&mut self) -> Vec<&mut Matrix> {
        let layers = self.layers.iter_mut().flat_map(|l| {
            let mixer = match &mut l.mixer {
                MixerWeights::Conv { in_proj, out_proj, .. } => vec![in_proj, out_proj],
                MixerWeights::Full { q_proj, k_proj, v_proj, out_proj, .. } => {
                    vec![q_proj, k_proj, v_proj, out_proj]
                }
            };
            mixer.into_iter().chain([&mut l.w1, &mut l.w3, &mut l.w2]).map(|linear| &mut linear.weight)
        });
        [&mut self.embed_tokens].into_iter().chain(layers).chain([&mut self.lm_head]).collect()
    }
}

impl LayerWeights {
    fn load(c: &Lfm2Config, kind: LayerType, i: usize, loader: &mut Loader) -> Result<Self, LoadError> {
        let name = |leaf: &str| format!("model.layers.{i}.{leaf}");
        let (hidden, inner, kv) = (c.hidden_size, c.intermediate_size, c.num_key_value_heads * c.head_dim);
        let mut linear = |leaf: &str, out, inner, bias| Linear::load(loader, &name(leaf), out, inner, bias);
        let (w1, w3) = (
            linear("feed_forward.w1", inner, hidden, false)?,
            linear("feed_forward.w3", inner, hidden, false)?,
        );
        let w2 = linear("feed_forward.w2", hidden, inner, false)?;
        let mixer = match kind {
            LayerType::Conv => MixerWeights::Conv {
                in_proj: linear("conv.in_proj", 3 * hidden, hidden, c.conv_bias)?,
                out_proj: linear("conv.out_proj", hidden, hidden, c.conv_bias)?,
                conv: Conv::load(loader, &name("conv.conv"), hidden, c.conv_l_cache, c.conv_bias)?,
            },
            LayerType::Full => MixerWeights::Full {
                q_proj: linear("self_attn.q_proj", hidden, hidden, false)?,
                k_proj: linear("self_attn.k_proj", kv, hidden, false)?,
                v_proj: linear("self_attn.v_proj", kv, hidden, false)?,
                out_proj: linear("self_attn.out_proj", hidden, hidden, false)?,
                q_layernorm: loader.vector(&name("self_attn.q_layernorm.weight"), c.head_dim)?,
                k_layernorm: loader.vector(&name("self_attn.k_layernorm.weight"), c.head_dim)?,
            },
        };
        Ok(Self {
            operator_norm: loader.vector(&name("operator_norm.weight"), hidden)?,
            mixer,
            ffn_norm: loader.vector(&name("ffn_norm.weight"), hidden)?,
            w1,
            w3,
            w2,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Config;
    use serde_json::Value;

    fn parse(value: &Value) -> Result<Lfm2Config, ConfigError> {
        match Config::parse(value.as_object().unwrap(), &[])?.config {
            Config::Lfm2(config) => Ok(config),
            other => panic!("{other:?}"),
        }
    }

    /// The older spelling of published files.
    fn published() -> Value {
        json!({
            "model_type": "lfm2", "block_auto_adjust_ff_dim": true, "block_dim": 32, "block_ff_dim": 100,
            "block_ffn_dim_multiplier": 1.0, "block_multiple_of": 16, "block_norm_eps": 1e-5,
            "block_use_swiglu": true, "block_use_xavier_init": true, "conv_L_cache": 3, "conv_bias": false,
            "conv_dim": 32, "conv_dim_out": 32, "conv_use_xavier_init": true, "full_attn_idxs": [2],
            "hidden_size": 32, "max_position_embeddings": 128, "norm_eps": 1e-5, "num_attention_heads": 4,
            "num_heads": 4, "num_hidden_layers": 4, "num_key_value_heads": 2, "rope_theta": 1e6,
            "tie_embedding": true, "use_pos_enc": true, "vocab_size": 97
        })
    }

    // Two thirds of 100 are 66 (rounded down), and the next multiple of 16 is 80.
    #[test]
    fn the_older_spelling() {
        use LayerType::{Conv, Full};
        let config = parse(&published()).unwrap();
        assert_eq!(config.layer_types, [Conv, Conv, Full, Conv]);
        assert_eq!(config.intermediate_size, 80);
        assert!(config.tie_word_embeddings);
        assert_eq!(config.head_dim, 8);
    }

    #[test]
    fn settings_that_do_not_fit_are_refused() {
        for (key, value) in [
            ("num_key_value_heads", json!(3)),
            ("num_attention_heads", json!(5)),
            ("conv_dim", json!(33)),
            ("full_attn_idxs", json!([4])),
            ("block_multiple_of", json!(0)),
            ("block_use_swiglu", json!(false)),
        ] {
            let mut config = published();
            config[key] = value;
            let error = parse(&config).unwrap_err().to_string();
            assert!(error.contains(key), "{key}: {error}");
        }
    }
}
