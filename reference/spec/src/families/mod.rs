//! One module a model program: its config, read from `config.json`, and its weights.
//!
//! Families that differ in a flag share a module; see ARCHITECTURE.md for how to add one.

pub mod decoder;
pub mod draft;
pub mod gemma;
pub mod gemma4;
pub mod layered;
pub mod ple;
pub mod wrapped;

use crate::config::{ConfigError, ConfigReader};
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
    /// Pre-norm decoders: llama, mistral, qwen2, qwen3 and their relatives.
    Decoder(decoder::DecoderConfig),
    /// Four centred norms a layer: gemma2, gemma3.
    Gemma(gemma::GemmaConfig),
    /// Gemma 4: two widths of heads, per-layer embeddings, shared keys and values, experts.
    Gemma4(gemma4::Gemma4Config),
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
}

/// Every `model_type` that is understood.
pub const FAMILIES: &[Family] =
    &["llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "gemma4_text"];

impl Config {
    /// Reads a `config.json` object. Keys in `allowed` may be unknown.
    ///
    /// Of a multimodal config only `text_config` is read; its towers are named in
    /// [`Parsed::not_judged`].
    pub fn parse(map: &Map<String, Value>, allowed: &[String]) -> Result<Parsed, ConfigError> {
        let Some(text) = wrapped::text_config(map, allowed)? else {
            return Config::parse_text(map, "", allowed);
        };
        let mut parsed = Config::parse_text(&text.map, "text_config.", allowed)?;
        parsed.passed_over.extend(text.passed_over);
        parsed.not_judged = text.not_judged;
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
            "gemma4_text" => Config::Gemma4(gemma4::Gemma4Config::parse(family, r)?),
            _ => Config::Decoder(decoder::DecoderConfig::parse(family, r)?),
        };
        Ok(Parsed { config, passed_over: reader.finish(allowed)?, not_judged: Vec::new() })
    }

    /// The `model_type`.
    pub fn family(&self) -> Family {
        match self {
            Config::Decoder(config) => config.family,
            Config::Gemma(config) => config.family,
            Config::Gemma4(config) => config.family,
        }
    }

    /// Number of token ids.
    pub fn vocab_size(&self) -> usize {
        match self {
            Config::Decoder(config) => config.vocab_size,
            Config::Gemma(config) => config.vocab_size,
            Config::Gemma4(config) => config.vocab_size,
        }
    }

    /// Width of the residual stream.
    pub fn hidden_size(&self) -> usize {
        match self {
            Config::Decoder(config) => config.hidden_size,
            Config::Gemma(config) => config.hidden_size,
            Config::Gemma4(config) => config.hidden_size,
        }
    }

    /// Number of layers.
    pub fn num_hidden_layers(&self) -> usize {
        match self {
            Config::Decoder(config) => config.layers.len(),
            Config::Gemma(config) => config.layer_types.len(),
            Config::Gemma4(config) => config.layers.len(),
        }
    }

    /// Longest sequence the model allows.
    pub fn max_position_embeddings(&self) -> usize {
        match self {
            Config::Decoder(config) => config.max_position_embeddings,
            Config::Gemma(config) => config.max_position_embeddings,
            Config::Gemma4(config) => config.max_position_embeddings,
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
    /// See [`Config::Gemma`].
    Gemma(gemma::GemmaWeights),
    /// See [`Config::Gemma4`].
    Gemma4(gemma4::Gemma4Weights),
}

impl Weights {
    /// Takes every tensor that `config` asks for, and refuses any that is left over, unless it
    /// belongs to a tower of a multimodal package.
    pub fn load(config: &Config, tensors: &dyn Tensors) -> Result<Weights, LoadError> {
        let mut loader = Loader::new(tensors);
        let weights = match config {
            Config::Decoder(config) => Weights::Decoder(decoder::DecoderWeights::load(config, &mut loader)?),
            Config::Gemma(config) => Weights::Gemma(gemma::GemmaWeights::load(config, &mut loader)?),
            Config::Gemma4(config) => Weights::Gemma4(gemma4::Gemma4Weights::load(config, &mut loader)?),
        };
        loader.finish(wrapped::of_a_tower)?;
        Ok(weights)
    }

    /// Every matrix by name, for edits and inventories.
    pub fn matrices(&mut self) -> Vec<&mut Matrix> {
        match self {
            Weights::Decoder(weights) => weights.matrices(),
            Weights::Gemma(weights) => weights.matrices(),
            Weights::Gemma4(weights) => weights.matrices(),
        }
    }
}
