//! One module a model program: its config, read from `config.json`, and its weights.
//!
//! Families that differ in a flag share a module; see ARCHITECTURE.md for how to add one.

pub mod decoder;
pub mod deepseek;
pub mod draft;
pub mod gemma;
pub mod gemma3n;
pub mod gemma4;
pub mod gpt_oss;
pub mod hybrid;
pub mod layered;
pub mod lfm2;
pub mod moe;
pub mod moe_decoder;
pub mod olmo2;
pub mod phi3;
pub mod ple;
pub mod wrapped;

use crate::config::{ConfigError, ConfigReader, KeyUse};
use crate::matrix::{Matrix, Vector};
use crate::tensors::{LoadError, Loader, Tensors};
use serde_json::{Map, Value};

/// A family by its `model_type`, as the published configs spell it.
pub type Family = &'static str;

/// A weight `[out, in]` and its bias `[out]`: `y[r, o] = Σ_i x[r, i] · w[o, i] + b[o]`.
#[derive(Clone, Debug)]
pub struct Linear {
    /// The weight.
    pub weight: Matrix,
    /// The bias, where the model has one.
    pub bias: Option<Vector>,
}

impl Linear {
    /// Takes `{name}.weight` and, where `bias`, `{name}.bias`.
    pub fn load(
        loader: &mut Loader,
        name: &str,
        out: usize,
        inner: usize,
        bias: bool,
    ) -> Result<Linear, LoadError> {
        Ok(Linear {
            weight: loader.matrix(&format!("{name}.weight"), out, inner)?,
            bias: loader.vector_if(bias, &format!("{name}.bias"), out)?,
        })
    }
}

/// A causal depthwise convolution: one short filter a channel.
#[derive(Clone, Debug)]
pub struct Conv {
    /// Filters `[channels, kernel]`, row after row; the last tap of a row meets the current token.
    pub weight: Vector,
    /// `[channels]`, where the model has one.
    pub bias: Option<Vector>,
    /// Taps of a filter.
    pub kernel: usize,
}

impl Conv {
    /// Takes `{name}.weight`, stored as `[channels, 1, kernel]`, and, where `bias`, `{name}.bias`.
    pub fn load(
        loader: &mut Loader,
        name: &str,
        channels: usize,
        kernel: usize,
        bias: bool,
    ) -> Result<Conv, LoadError> {
        Ok(Conv {
            weight: loader.values(&format!("{name}.weight"), &[channels, 1, kernel])?,
            bias: loader.vector_if(bias, &format!("{name}.bias"), channels)?,
            kernel,
        })
    }

    /// Number of channels.
    pub fn channels(&self) -> usize {
        self.weight.len() / self.kernel
    }
}

/// A gated feed-forward: `down(act(gate(x)) · up(x))`.
#[derive(Clone, Debug)]
pub struct Mlp {
    /// `[intermediate, hidden]`
    pub gate_proj: Linear,
    /// `[intermediate, hidden]`
    pub up_proj: Linear,
    /// `[hidden, intermediate]`
    pub down_proj: Linear,
}

impl Mlp {
    /// Takes `{name}.gate_proj`, `{name}.up_proj` and `{name}.down_proj`.
    pub fn load(
        loader: &mut Loader,
        name: &str,
        hidden: usize,
        inner: usize,
        bias: bool,
    ) -> Result<Mlp, LoadError> {
        Ok(Mlp {
            gate_proj: Linear::load(loader, &format!("{name}.gate_proj"), inner, hidden, bias)?,
            up_proj: Linear::load(loader, &format!("{name}.up_proj"), inner, hidden, bias)?,
            down_proj: Linear::load(loader, &format!("{name}.down_proj"), hidden, inner, bias)?,
        })
    }

    /// Every matrix.
    pub fn matrices(&mut self) -> [&mut Matrix; 3] {
        [&mut self.gate_proj, &mut self.up_proj, &mut self.down_proj].map(|linear| &mut linear.weight)
    }
}

/// What stands before the first and behind the last layer.
#[derive(Clone, Debug)]
pub struct Ends {
    /// `[vocab, hidden]`
    pub embed_tokens: Matrix,
    /// `[hidden]`
    pub norm: Vector,
    /// `[vocab, hidden]`; the embedding table where the model ties them.
    pub lm_head: Matrix,
}

impl Ends {
    /// Takes `model.embed_tokens`, `model.norm` and, unless `tied`, `lm_head`.
    pub fn load(loader: &mut Loader, vocab: usize, hidden: usize, tied: bool) -> Result<Ends, LoadError> {
        let embed_tokens = loader.matrix("model.embed_tokens.weight", vocab, hidden)?;
        let norm = loader.vector("model.norm.weight", hidden)?;
        let lm_head = if tied {
            loader.skip("lm_head.weight");
            embed_tokens.clone()
        } else {
            loader.matrix("lm_head.weight", vocab, hidden)?
        };
        Ok(Ends { embed_tokens, norm, lm_head })
    }
}

/// `num_attention_heads`, and `num_key_value_heads` (as many where absent), which must divide them.
pub fn heads(r: &mut ConfigReader) -> Result<(usize, usize), ConfigError> {
    let heads = r.size("num_attention_heads")?;
    match r.usize_opt("num_key_value_heads")? {
        None => Ok((heads, heads)),
        Some(n) if n > 0 && heads % n == 0 => Ok((heads, n)),
        Some(_) => Err(r.wrong("num_key_value_heads", &format!("a divisor of num_attention_heads {heads}"))),
    }
}

/// The activation of a gated feed-forward.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activation {
    /// `x · σ(x)`
    Silu,
    /// `0.5 · x · (1 + tanh(√(2/π) · (x + 0.044715 · x³)))`
    GeluTanh,
}

impl Activation {
    /// Reads a config key; every family names the ones it may have.
    pub fn parse(reader: &mut ConfigReader, key: &str) -> Result<Activation, ConfigError> {
        match reader.str_opt(key)? {
            Some("silu" | "swish") => Ok(Activation::Silu),
            Some("gelu_pytorch_tanh" | "gelu_new") => Ok(Activation::GeluTanh),
            _ => Err(reader.wrong(key, "silu or gelu_pytorch_tanh")),
        }
    }
}

/// The config of a model of any family.
#[derive(Clone, Debug, PartialEq)]
pub enum Config {
    /// Pre-norm decoders: llama, mistral, qwen2, qwen3, smollm3, granite, minicpm.
    Decoder(decoder::DecoderConfig),
    /// phi3: fused projections.
    Phi3(decoder::DecoderConfig),
    /// olmo2: norms behind the branches.
    Olmo2(decoder::DecoderConfig),
    /// Decoders with experts: qwen3_moe, glm4_moe.
    MoeDecoder(moe_decoder::MoeDecoderConfig),
    /// deepseek_v3: latent attention.
    Deepseek(deepseek::DeepseekConfig),
    /// gpt_oss: attention sinks, clamped experts.
    GptOss(gpt_oss::GptOssConfig),
    /// Four centred norms a layer: gemma2, gemma3.
    Gemma(gemma::GemmaConfig),
    /// Gated delta rule and gated softmax attention: qwen3_next, qwen3_5, qwen3_5_moe.
    Hybrid(hybrid::HybridConfig),
    /// Gated short convolution and softmax attention: lfm2.
    Lfm2(lfm2::Lfm2Config),
    /// Gemma 4: two widths of heads, per-layer embeddings, shared keys and values, experts.
    Gemma4(gemma4::Gemma4Config),
    /// Gemma 3n: parallel streams, a low-rank branch, sparse gates.
    Gemma3n(gemma3n::Gemma3nConfig),
}

/// A config with the keys that were passed over (null, false, or allowed by name).
#[derive(Clone, Debug, PartialEq)]
pub struct Parsed {
    /// The config.
    pub config: Config,
    /// Keys that were known to change nothing, or that the user allowed.
    pub passed_over: Vec<String>,
    /// Parts of a multimodal package that are not judged, by their config key: `vision_config`.
    pub not_judged: Vec<String>,
    /// Every key of the config, of a wrapper first, with what became of it.
    pub keys: Vec<(String, KeyUse)>,
}

/// Every `model_type` that is understood.
pub const FAMILIES: &[Family] = &[
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "smollm3",
    "granite",
    "minicpm",
    "phi3",
    "olmo2",
    "qwen3_moe",
    "glm4_moe",
    "deepseek_v3",
    "gpt_oss",
    "gemma2",
    "gemma3_text",
    "gemma4_text",
    "qwen3_next",
    "gemma3n_text",
    "qwen3_5_text",
    "qwen3_5_moe_text",
    "lfm2",
];

impl Config {
    /// Reads a `config.json` object. Keys in `allowed` may be unknown.
    ///
    /// Of a multimodal config only `text_config` is read; its towers are named in
    /// [`Parsed::not_judged`].
    pub fn parse(map: &Map<String, Value>, allowed: &[String]) -> Result<Parsed, ConfigError> {
        let Some(text) = wrapped::text_of(map, allowed)? else {
            return Config::parse_text(map, "", allowed);
        };
        let mut parsed = Config::parse_text(&text.map, text.path, allowed)?;
        parsed.passed_over.extend(text.passed_over);
        parsed.not_judged = text.not_judged;
        parsed.keys.splice(0..0, text.keys);
        Ok(parsed)
    }

    fn parse_text(map: &Map<String, Value>, path: &str, allowed: &[String]) -> Result<Parsed, ConfigError> {
        let mut reader = ConfigReader::new(map, path);
        let model_type = reader.str_opt("model_type")?;
        let Some(family) = FAMILIES.iter().find(|family| Some(**family) == model_type) else {
            return Err(reader.wrong("model_type", &FAMILIES.join(", ")));
        };
        let r = &mut reader;
        let config = match *family {
            "gemma2" | "gemma3_text" => Config::Gemma(gemma::GemmaConfig::parse(family, r)?),
            "lfm2" => Config::Lfm2(lfm2::Lfm2Config::parse(family, r)?),
            "qwen3_next" | "qwen3_5_text" | "qwen3_5_moe_text" => {
                Config::Hybrid(hybrid::HybridConfig::parse(family, r)?)
            }
            "phi3" => Config::Phi3(decoder::DecoderConfig::parse(family, r)?),
            "olmo2" => Config::Olmo2(decoder::DecoderConfig::parse(family, r)?),
            "deepseek_v3" => Config::Deepseek(deepseek::DeepseekConfig::parse(family, r)?),
            "gpt_oss" => Config::GptOss(gpt_oss::GptOssConfig::parse(family, r)?),
            "qwen3_moe" | "glm4_moe" => Config::MoeDecoder(moe_decoder::MoeDecoderConfig::parse(family, r)?),
            "gemma4_text" => Config::Gemma4(gemma4::Gemma4Config::parse(family, r)?),
            "gemma3n_text" => Config::Gemma3n(gemma3n::Gemma3nConfig::parse(family, r)?),
            "llama" | "mistral" | "qwen2" | "qwen3" | "smollm3" | "granite" | "minicpm" => {
                Config::Decoder(decoder::DecoderConfig::parse(family, r)?)
            }
            _ => return Err(reader.wrong("model_type", &FAMILIES.join(", "))),
        };
        let keys = reader.account(allowed);
        Ok(Parsed { config, passed_over: reader.finish(allowed)?, not_judged: Vec::new(), keys })
    }

    /// The `model_type`.
    pub fn family(&self) -> Family {
        match self {
            Config::Decoder(config) | Config::Phi3(config) | Config::Olmo2(config) => config.family,
            Config::MoeDecoder(config) => config.decoder.family,
            Config::Deepseek(config) => config.family,
            Config::GptOss(config) => config.decoder.family,
            Config::Gemma(config) => config.family,
            Config::Hybrid(config) => config.family,
            Config::Lfm2(config) => config.family,
            Config::Gemma4(config) => config.family,
            Config::Gemma3n(config) => config.family,
        }
    }

    /// Number of token ids.
    pub fn vocab_size(&self) -> usize {
        match self {
            Config::Decoder(config) | Config::Phi3(config) | Config::Olmo2(config) => config.vocab_size,
            Config::MoeDecoder(config) => config.decoder.vocab_size,
            Config::Deepseek(config) => config.vocab_size,
            Config::GptOss(config) => config.decoder.vocab_size,
            Config::Gemma(config) => config.vocab_size,
            Config::Hybrid(config) => config.vocab_size,
            Config::Lfm2(config) => config.vocab_size,
            Config::Gemma4(config) => config.vocab_size,
            Config::Gemma3n(config) => config.vocab_size,
        }
    }

    /// Width of the residual stream.
    pub fn hidden_size(&self) -> usize {
        match self {
            Config::Decoder(config) | Config::Phi3(config) | Config::Olmo2(config) => config.hidden_size,
            Config::MoeDecoder(config) => config.decoder.hidden_size,
            Config::Deepseek(config) => config.hidden_size,
            Config::GptOss(config) => config.decoder.hidden_size,
            Config::Gemma(config) => config.hidden_size,
            Config::Hybrid(config) => config.hidden_size,
            Config::Lfm2(config) => config.hidden_size,
            Config::Gemma4(config) => config.hidden_size,
            Config::Gemma3n(config) => config.hidden_size,
        }
    }

    /// Number of layers.
    pub fn num_hidden_layers(&self) -> usize {
        match self {
            Config::Decoder(config) | Config::Phi3(config) | Config::Olmo2(config) => config.layers.len(),
            Config::MoeDecoder(config) => config.decoder.layers.len(),
            Config::Deepseek(config) => config.sparse.len(),
            Config::GptOss(config) => config.decoder.layers.len(),
            Config::Gemma(config) => config.layer_types.len(),
            Config::Hybrid(config) => config.layer_types.len(),
            Config::Lfm2(config) => config.layer_types.len(),
            Config::Gemma4(config) => config.layers.len(),
            Config::Gemma3n(config) => config.layers.len(),
        }
    }

    /// Longest sequence the model allows.
    pub fn max_position_embeddings(&self) -> usize {
        match self {
            Config::Decoder(config) | Config::Phi3(config) | Config::Olmo2(config) => {
                config.max_position_embeddings
            }
            Config::MoeDecoder(config) => config.decoder.max_position_embeddings,
            Config::Deepseek(config) => config.max_position_embeddings,
            Config::GptOss(config) => config.decoder.max_position_embeddings,
            Config::Gemma(config) => config.max_position_embeddings,
            Config::Hybrid(config) => config.max_position_embeddings,
            Config::Lfm2(config) => config.max_position_embeddings,
            Config::Gemma4(config) => config.max_position_embeddings,
            Config::Gemma3n(config) => config.max_position_embeddings,
        }
    }
}

/// The weights of a model of any family.
#[derive(Clone, Debug)]
// There is one of them in a run, so the room that the largest family takes costs nothing.
#[allow(clippy::large_enum_variant)]
pub enum Weights {
    /// See [`Config::Decoder`].
    Decoder(decoder::DecoderWeights),
    /// See [`Config::Phi3`].
    Phi3(phi3::Phi3Weights),
    /// See [`Config::Olmo2`].
    Olmo2(olmo2::Olmo2Weights),
    /// See [`Config::MoeDecoder`].
    MoeDecoder(moe_decoder::MoeDecoderWeights),
    /// See [`Config::Deepseek`].
    Deepseek(deepseek::DeepseekWeights),
    /// See [`Config::GptOss`].
    GptOss(gpt_oss::GptOssWeights),
    /// See [`Config::Gemma`].
    Gemma(gemma::GemmaWeights),
    /// See [`Config::Hybrid`].
    Hybrid(hybrid::HybridWeights),
    /// See [`Config::Lfm2`].
    Lfm2(lfm2::Lfm2Weights),
    /// See [`Config::Gemma4`].
    Gemma4(gemma4::Gemma4Weights),
    /// See [`Config::Gemma3n`].
    Gemma3n(gemma3n::Gemma3nWeights),
}

impl Weights {
    /// Takes every tensor that `config` asks for, and refuses any that is left over, unless it
    /// belongs to a tower of a multimodal package.
    pub fn load(config: &Config, tensors: &dyn Tensors) -> Result<Weights, LoadError> {
        let mut loader = Loader::new(tensors);
        let weights = match config {
            Config::Decoder(config) => Weights::Decoder(decoder::DecoderWeights::load(config, &mut loader)?),
            Config::Phi3(config) => Weights::Phi3(phi3::Phi3Weights::load(config, &mut loader)?),
            Config::Olmo2(config) => Weights::Olmo2(olmo2::Olmo2Weights::load(config, &mut loader)?),
            Config::Deepseek(config) => {
                Weights::Deepseek(deepseek::DeepseekWeights::load(config, &mut loader)?)
            }
            Config::GptOss(config) => Weights::GptOss(gpt_oss::GptOssWeights::load(config, &mut loader)?),
            Config::MoeDecoder(config) => {
                Weights::MoeDecoder(moe_decoder::MoeDecoderWeights::load(config, &mut loader)?)
            }
            Config::Gemma(config) => Weights::Gemma(gemma::GemmaWeights::load(config, &mut loader)?),
            Config::Hybrid(config) => Weights::Hybrid(hybrid::HybridWeights::load(config, &mut loader)?),
            Config::Lfm2(config) => Weights::Lfm2(lfm2::Lfm2Weights::load(config, &mut loader)?),
            Config::Gemma4(config) => Weights::Gemma4(gemma4::Gemma4Weights::load(config, &mut loader)?),
            Config::Gemma3n(config) => Weights::Gemma3n(gemma3n::Gemma3nWeights::load(config, &mut loader)?),
        };
        loader.finish(wrapped::of_a_tower)?;
        Ok(weights)
    }

    /// Every matrix by name, for edits and inventories.
    pub fn matrices(&mut self) -> Vec<&mut Matrix> {
        match self {
            Weights::Decoder(weights) => weights.matrices(),
            Weights::Phi3(weights) => weights.matrices(),
            Weights::Olmo2(weights) => weights.matrices(),
            Weights::MoeDecoder(weights) => weights.matrices(),
            Weights::Deepseek(weights) => weights.matrices(),
            Weights::GptOss(weights) => weights.matrices(),
            Weights::Gemma(weights) => weights.matrices(),
            Weights::Hybrid(weights) => weights.matrices(),
            Weights::Lfm2(weights) => weights.matrices(),
            Weights::Gemma4(weights) => weights.matrices(),
            Weights::Gemma3n(weights) => weights.matrices(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A family of the list that no program reads would be refused for its name.
    #[test]
    fn every_family_of_the_list_is_read() {
        for family in FAMILIES {
            let config = serde_json::json!({"model_type": family});
            let error = Config::parse(config.as_object().unwrap(), &[]).unwrap_err();
            assert!(!error.to_string().contains("model_type"), "{family}: {error}");
        }
        let config = serde_json::json!({"model_type": "gpt2"});
        let error = Config::parse(config.as_object().unwrap(), &[]).unwrap_err().to_string();
        assert!(error.contains("model_type") && error.contains("gpt2") && error.contains("llama"), "{error}");
    }
}
