//! gpt_oss: attention sinks, alternating windows, and clamped experts with biases.

use super::decoder::{AttentionWeights, DecoderConfig};
use super::moe::{Experts, Router, Scoring};
use super::{Ends, Family, Linear};
use crate::config::{ConfigError, ConfigReader};
use crate::matrix::{Matrix, Vector};
use crate::tensors::{LoadError, Loader};

/// Config of gpt_oss.
#[derive(Clone, Debug, PartialEq)]
pub struct GptOssConfig {
    /// Attention and norms; `intermediate_size` is the width of an expert.
    pub decoder: DecoderConfig,
    /// How experts are chosen.
    pub router: Router,
    /// What the gate's logistic function is steepened by.
    pub swiglu_alpha: f64,
    /// Where gate and up are cut off.
    pub swiglu_limit: f64,
    /// Whether the config says that experts are stored as MXFP4.
    pub mxfp4: bool,
}

impl GptOssConfig {
    /// Reads the config.
    pub fn parse(family: Family, r: &mut ConfigReader) -> Result<Self, ConfigError> {
        let decoder = DecoderConfig::parse(family, r)?;
        // Files of both spellings: the same number under one name or the other.
        let other = r.usize_opt("experts_per_token")?;
        let router = Router::parse(r, &["num_local_experts", "num_experts"], Scoring::SoftmaxOfChosen)?;
        if other.is_some_and(|n| n != router.num_experts_per_tok) {
            return Err(r.wrong("experts_per_token", "the number of num_experts_per_tok"));
        }
        let swiglu_alpha = r.f64_opt("swiglu_alpha")?.unwrap_or(1.702);
        let swiglu_limit = r.f64_opt("swiglu_limit")?.unwrap_or(7.0);
        if swiglu_limit <= 0.0 {
            return Err(r.wrong("swiglu_limit", "a positive number"));
        }
        // How weights are stored shows in the tensors; only the formats that are known may be named.
        let quantization = r.object("quantization_config")?;
        if let Some(map) = quantization {
            let mut q = ConfigReader::new(map, "quantization_config.");
            if q.str_opt("quant_method")? != Some("mxfp4") {
                return Err(q.wrong("quant_method", "mxfp4"));
            }
            q.inert(&["modules_to_not_convert"]);
            q.finish(&[])?;
        }
        // The original context once more, beside the one of the rope object.
        r.inert(&["initial_context_length"]);
        Ok(Self { decoder, router, swiglu_alpha, swiglu_limit, mxfp4: quantization.is_some() })
    }
}

/// Weights of gpt_oss.
#[derive(Clone, Debug)]
pub struct GptOssWeights {
    /// Embedding, final norm, head.
    pub ends: Ends,
    /// The layers.
    pub layers: Vec<GptOssLayer>,
}

/// Weights of one layer.
#[derive(Clone, Debug)]
pub struct GptOssLayer {
    /// `[hidden]`
    pub input_layernorm: Vector,
    /// Attention.
    pub attention: AttentionWeights,
    /// `[heads]`: a logit of each head that joins the softmax's denominator.
    pub sinks: Vector,
    /// `[hidden]`: the norm before the experts.
    pub post_attention_layernorm: Vector,
    /// `[experts, hidden]`
    pub router: Linear,
    /// The experts, gate and up taken apart.
    pub experts: Experts,
}

impl GptOssWeights {
    /// Takes the tensors by their published names.
    pub fn load(c: &GptOssConfig, loader: &mut Loader) -> Result<Self, LoadError> {
        let d = &c.decoder;
        let layer = |i: usize, loader: &mut Loader| {
            let name = |leaf: &str| format!("model.layers.{i}.{leaf}");
            let (hidden, count) = (d.hidden_size, c.router.num_experts);
            Ok(GptOssLayer {
                input_layernorm: loader.vector(&name("input_layernorm.weight"), hidden)?,
                attention: AttentionWeights::load(d, i, d.head_dim, d.head_dim, loader)?,
                sinks: loader.vector(&name("self_attn.sinks"), d.num_attention_heads)?,
                post_attention_layernorm: loader.vector(&name("post_attention_layernorm.weight"), hidden)?,
                router: Linear::load(loader, &name("mlp.router"), count, hidden, true)?,
                experts: experts(c, loader, &name("mlp.experts"))?,
            })
        };
        let layers = (0..d.layers.len()).map(|i| layer(i, loader)).collect::<Result<_, LoadError>>()?;
        Ok(Self { ends: Ends::load(loader, d.vocab_size, d.hidden_size, d.tie_word_embeddings)?, layers })
    }

    /// Every matrix.
    pub fn matrices(&mut self) -> Vec<&mut Matrix> {
        let layers = self.layers.iter_mut().flat_map(|l| {
            let attention = l.attention.matrices().into_iter();
            attention.chain([&mut l.router.weight]).chain(l.experts.matrices())
        });
        [&mut self.ends.embed_tokens].into_iter().chain(layers).chain([&mut self.ends.lm_head]).collect()
    }
}

/// The experts, with a bias each.
///
/// Plain checkpoints store `[experts, in, out]`, meant for x · W; MXFP4 ones `[experts, out, in]` as
/// `…_blocks`. Either way gate and up alternate: output 2r is gate r, output 2r + 1 is up r.
fn experts(c: &GptOssConfig, loader: &mut Loader, name: &str) -> Result<Experts, LoadError> {
    let (count, hidden, inner) = (c.router.num_experts, c.decoder.hidden_size, c.decoder.intermediate_size);
    let mut stack = |leaf: &str, out: usize, inner: usize| -> Result<Vec<Linear>, LoadError> {
        let blocks = format!("{name}.{leaf}_blocks");
        let plain = format!("{name}.{leaf}");
        let weights: Vec<Matrix> = if loader.has(&blocks) || c.mxfp4 && !loader.has(&plain) {
            let all = loader.stack(&blocks, count, out, inner)?;
            (0..count).map(|e| all.rows(out * e..out * (e + 1))).collect()
        } else {
            let all = loader.stack(&plain, count, inner, out)?;
            (0..count).map(|e| all.transposed(inner * e..inner * (e + 1))).collect()
        };
        let bias = loader.values(&format!("{name}.{leaf}_bias"), &[count, out])?;
        let biases = bias.chunks_exact(out).map(|b| Vector::new(&bias.name, b));
        Ok(weights.into_iter().zip(biases).map(|(weight, b)| Linear { weight, bias: Some(b) }).collect())
    };
    let gate_up = stack("gate_up_proj", 2 * inner, hidden)?;
    let down_proj = stack("down_proj", hidden, inner)?;
    let every_other = |start: usize| {
        let half = |linear: &Linear| Linear {
            weight: linear.weight.every(start, 2),
            bias: linear.bias.as_ref().map(|b| {
                Vector::new(&b.name, b.iter().copied().skip(start).step_by(2).collect::<Vec<f32>>())
            }),
        };
        gate_up.iter().map(half).collect()
    };
    Ok(Experts { gate_proj: every_other(0), up_proj: every_other(1), down_proj })
}
