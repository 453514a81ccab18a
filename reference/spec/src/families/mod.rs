//! One module a model program: its config, read from `config.json`, and its weights.
//!
//! Families that differ in a flag share a module; see ARCHITECTURE.md for how to add one.

pub mod decoder;

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
}

/// A config with the keys that were passed over (null, false, or allowed by name).
#[derive(Clone, Debug, PartialEq)]
pub struct Parsed {
    /// The config.
    pub config: Config,
    /// Keys that were known to change nothing, or that the user allowed.
    pub passed_over: Vec<String>,
}

/// Every `model_type` that is understood.
pub const FAMILIES: &[Family] = &["llama", "mistral", "qwen2", "qwen3"];

impl Config {
    /// Reads a `config.json` object. Keys in `allowed` may be unknown.
    pub fn parse(map: &Map<String, Value>, allowed: &[String]) -> Result<Parsed, ConfigError> {
        let mut reader = ConfigReader::new(map, "");
        let model_type = reader.str_opt("model_type")?;
        let Some(family) = FAMILIES.iter().find(|family| Some(**family) == model_type) else {
            return Err(reader.wrong("model_type", &FAMILIES.join(", ")));
        };
        let config = Config::Decoder(decoder::DecoderConfig::parse(family, &mut reader)?);
        Ok(Parsed { config, passed_over: reader.finish(allowed)? })
    }

    /// The `model_type`.
    pub fn family(&self) -> Family {
        match self {
            Config::Decoder(config) => config.family,
        }
    }

    /// Number of token ids.
    pub fn vocab_size(&self) -> usize {
        match self {
            Config::Decoder(config) => config.vocab_size,
        }
    }

    /// Width of the residual stream.
    pub fn hidden_size(&self) -> usize {
        match self {
            Config::Decoder(config) => config.hidden_size,
        }
    }

    /// Number of layers.
    pub fn num_hidden_layers(&self) -> usize {
        match self {
            Config::Decoder(config) => config.layers.len(),
        }
    }

    /// Longest sequence the model allows.
    pub fn max_position_embeddings(&self) -> usize {
        match self {
            Config::Decoder(config) => config.max_position_embeddings,
        }
    }
}

/// The weights of a model of any family.
#[derive(Clone, Debug)]
pub enum Weights {
    /// See [`Config::Decoder`].
    Decoder(decoder::DecoderWeights),
}

impl Weights {
    /// Takes every tensor that `config` asks for, and refuses any that is left over.
    pub fn load(config: &Config, tensors: &dyn Tensors) -> Result<Weights, LoadError> {
        let mut loader = Loader::new(tensors);
        let weights = match config {
            Config::Decoder(config) => Weights::Decoder(decoder::DecoderWeights::load(config, &mut loader)?),
        };
        loader.finish(|_| false)?;
        Ok(weights)
    }

    /// Every matrix by name, for edits and inventories.
    pub fn matrices(&mut self) -> Vec<&mut Matrix> {
        match self {
            Weights::Decoder(weights) => weights.matrices(),
        }
    }
}
