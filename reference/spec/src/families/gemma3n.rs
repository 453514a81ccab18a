//! Gemma 3n (text): parallel streams (AltUp), a low-rank branch beside attention (Laurel), sparse gates,
//! per-layer embeddings, shared keys and values.

use super::gemma4::KeyValueWeights;
use super::layered::{self, LayerType, RopeDefault};
use super::ple::{Ple, PleLayerWeights, PleWeights};
use super::{Activation, Family, Linear};
use crate::config::{ConfigError, ConfigReader};
use crate::matrix::{Matrix, Vector};
use crate::rope::{Rope, Scaling};
use crate::tensors::{LoadError, Loader};
use serde_json::json;

/// Config of a Gemma 3n text model.
#[derive(Clone, Debug, PartialEq)]
pub struct Gemma3nConfig {
    /// The `model_type`.
    pub family: Family,
    /// Number of token ids.
    pub vocab_size: usize,
    /// Width of one stream.
    pub hidden_size: usize,
    /// Number of query heads.
    pub num_attention_heads: usize,
    /// Number of key and value heads.
    pub num_key_value_heads: usize,
    /// Width of a head.
    pub head_dim: usize,
    /// ε of every norm.
    pub rms_norm_eps: f32,
    /// Longest sequence.
    pub max_position_embeddings: usize,
    /// Whether the (unscaled) embedding table is the head as well.
    pub tie_word_embeddings: bool,
    /// Cap of the logits.
    pub final_logit_softcapping: Option<f64>,
    /// Keys that a token of a sliding layer may attend to, itself included.
    pub sliding_window: usize,
    /// What differs between layers.
    pub layers: Vec<Gemma3nLayerConfig>,
    /// Rotary embedding of full layers.
    pub rope: Rope,
    /// Rotary embedding of sliding layers.
    pub rope_local: Rope,
    /// Number of streams, 2 to 4.
    pub altup_num_inputs: usize,
    /// The stream that a layer computes with.
    pub altup_active_idx: usize,
    /// Whether the active stream is scaled before the per-layer branch.
    pub altup_correct_scale: bool,
    /// Inner width of the low-rank branch.
    pub laurel_rank: usize,
    /// Per-layer embeddings. Ids beyond the table read row 0.
    pub ple: Ple,
    /// Activation of every gate.
    pub activation: Activation,
}

/// What differs between the layers of one model.
#[derive(Clone, Debug, PartialEq)]
pub struct Gemma3nLayerConfig {
    /// What attention reaches.
    pub layer_type: LayerType,
    /// The layer whose keys and values are attended to: the layer itself, or an earlier one.
    pub kv_source: usize,
    /// Width of the feed-forward.
    pub intermediate_size: usize,
    /// The share of gates that is cut to 0, were they normally distributed; 0 cuts none.
    pub activation_sparsity: f64,
}

impl Gemma3nConfig {
    /// What embedding rows are multiplied by: the f32 root of hidden.
    pub fn embed_scale(&self) -> f32 {
        (self.hidden_size as f64).sqrt() as f32
    }

    /// The window of layer `i`, where it has one.
    pub fn window(&self, i: usize) -> Option<usize> {
        (self.layers[i].layer_type == LayerType::Sliding).then_some(self.sliding_window)
    }

    /// The rotary embedding of layer `i`.
    pub fn rope_of(&self, i: usize) -> &Rope {
        match self.layers[i].layer_type {
            LayerType::Sliding => &self.rope_local,
            LayerType::Full => &self.rope,
        }
    }

    /// Reads the config. Sizes that a file leaves out are those of its class.
    pub fn parse(family: Family, r: &mut ConfigReader) -> Result<Self, ConfigError> {
        let hidden_size = r.size("hidden_size")?;
        let num_attention_heads = layered::size_or(r, "num_attention_heads", 8)?;
        let num_key_value_heads = layered::kv_heads(r, "num_key_value_heads", num_attention_heads, 2)?;
        let head_dim = layered::size_or(r, "head_dim", 256)?;
        let max = layered::size_or(r, "max_position_embeddings", 32_768)?;
        r.only("hidden_activation", &[json!("gelu_pytorch_tanh")])?;
        r.only("attention_bias", &[json!(false)])?;
        // The clip holds weights in bounds during training, the multiplier is its step size.
        r.inert(&["altup_coef_clip", "altup_lr_multiplier"]);
        let layers = layers(r)?;
        let default = |theta| RopeDefault { head_dim, theta, scaling: Scaling::Default };
        let (rope_local, rope) = layered::ropes(r, default(1e4), default(1e6), max)?;
        let altup_num_inputs = layered::size_or(r, "altup_num_inputs", 4)?;
        if !(2..=4).contains(&altup_num_inputs) {
            return Err(r.wrong("altup_num_inputs", "2 to 4 streams"));
        }
        let altup_active_idx = r.usize_opt("altup_active_idx")?.unwrap_or(0);
        if altup_active_idx >= altup_num_inputs {
            return Err(r.wrong("altup_active_idx", &format!("one of {altup_num_inputs} streams")));
        }
        let ple = Ple {
            width: layered::size_or(r, "hidden_size_per_layer_input", 256)?,
            vocab_size: layered::size_or(r, "vocab_size_per_layer_input", 262_144)?,
            layers: layers.len(),
        };
        Ok(Self {
            family,
            vocab_size: layered::size_or(r, "vocab_size", 262_400)?,
            hidden_size,
            num_attention_heads,
            num_key_value_heads,
            head_dim,
            rms_norm_eps: r.eps("rms_norm_eps", 1e-6)?,
            max_position_embeddings: max,
            tie_word_embeddings: r.bool("tie_word_embeddings", true)?,
            final_logit_softcapping: layered::softcap(r, "final_logit_softcapping", Some(30.0))?,
            sliding_window: layered::size_or(r, "sliding_window", 512)?,
            layers,
            rope,
            rope_local,
            altup_num_inputs,
            altup_active_idx,
            altup_correct_scale: r.bool("altup_correct_scale", true)?,
            laurel_rank: layered::size_or(r, "laurel_rank", 64)?,
            ple,
            activation: Activation::GeluTanh,
        })
    }
}

/// What differs between layers.
fn layers(r: &mut ConfigReader) -> Result<Vec<Gemma3nLayerConfig>, ConfigError> {
    let count = r.count("num_hidden_layers")?;
    let types = layered::layer_types(r, count, 5)?;
    let shared = r.usize_opt("num_kv_shared_layers")?.unwrap_or(15);
    let sources = layered::kv_sources(r, &types, shared)?;
    let each = format!("one entry for each of the {count} layers");
    let inner = match r.get("intermediate_size") {
        Some(value) if value.is_array() => r.usizes("intermediate_size")?.unwrap_or_default(),
        _ => vec![r.size("intermediate_size")?; count],
    };
    if inner.len() != count || inner.contains(&0) {
        return Err(r.wrong("intermediate_size", &each));
    }
    let sparsity = r.f64s("activation_sparsity_pattern")?.unwrap_or_default();
    if sparsity.len() != count || sparsity.iter().any(|s| !(0.0..1.0).contains(s)) {
        return Err(r.wrong("activation_sparsity_pattern", &format!("{each}, from 0 to below 1")));
    }
    let layer = |i: usize| Gemma3nLayerConfig {
        layer_type: types[i],
        kv_source: sources[i],
        intermediate_size: inner[i],
        activation_sparsity: sparsity[i],
    };
    Ok((0..count).map(layer).collect())
}

/// Weights of a Gemma 3n text model.
#[derive(Clone, Debug)]
pub struct Gemma3nWeights {
    /// `[vocab, hidden]`
    pub embed_tokens: Matrix,
    /// Per-layer embeddings.
    pub ple: PleWeights,
    /// `[hidden, hidden]` each: what makes streams 1.. of the embedding.
    pub altup_projections: Vec<Linear>,
    /// `[hidden, hidden]` each: what brings streams 1.. back.
    pub altup_unembed_projections: Vec<Linear>,
    /// The layers.
    pub layers: Vec<Gemma3nLayerWeights>,
    /// `[hidden]`
    pub norm: Vector,
    /// `[vocab, hidden]`; the unscaled embedding table where the model ties them.
    pub lm_head: Matrix,
}

/// Weights of one layer.
#[derive(Clone, Debug)]
pub struct Gemma3nLayerWeights {
    /// The streams' coefficients.
    pub altup: AltupWeights,
    /// `[hidden]`: before attention and the low-rank branch.
    pub input_layernorm: Vector,
    /// `[laurel_rank, hidden]`
    pub laurel_left: Linear,
    /// `[hidden, laurel_rank]`
    pub laurel_right: Linear,
    /// `[hidden]`: of the low-rank branch.
    pub post_laurel_norm: Vector,
    /// `[heads · head_dim, hidden]`
    pub q_proj: Linear,
    /// `[head_dim]`
    pub q_norm: Vector,
    /// Keys and values, where the layer has its own.
    pub kv: Option<KeyValueWeights>,
    /// `[hidden, heads · head_dim]`
    pub o_proj: Linear,
    /// `[hidden]`: of the attention branch, before it joins the stream.
    pub post_attention_layernorm: Vector,
    /// `[hidden]`: before the feed-forward.
    pub pre_feedforward_layernorm: Vector,
    /// `[intermediate, hidden]`
    pub gate_proj: Linear,
    /// `[intermediate, hidden]`
    pub up_proj: Linear,
    /// `[hidden, intermediate]`
    pub down_proj: Linear,
    /// `[hidden]`: of the feed-forward branch, before it joins the stream.
    pub post_feedforward_layernorm: Vector,
    /// Per-layer embeddings.
    pub ple: PleLayerWeights,
}

/// What mixes the streams of one layer; N is the number of streams.
#[derive(Clone, Debug)]
pub struct AltupWeights {
    /// `[hidden]`
    pub router_norm: Vector,
    /// `[N, hidden]`
    pub modality_router: Linear,
    /// `[N · N, N]`: row `o · N + i` makes the share of stream i in the prediction of stream o.
    pub prediction_coefs: Linear,
    /// `[N, N]`
    pub correction_coefs: Linear,
    /// `[hidden]`, where the config has `altup_correct_scale`.
    pub correct_output_scale: Option<Vector>,
}

impl Gemma3nWeights {
    /// Takes the tensors by their published names.
    pub fn load(c: &Gemma3nConfig, loader: &mut Loader) -> Result<Self, LoadError> {
        let hidden = c.hidden_size;
        let embed_tokens = loader.matrix("model.embed_tokens.weight", c.vocab_size, hidden)?;
        let ple = PleWeights::load(&c.ple, hidden, loader)?;
        let mut streams = |leaf: &str| -> Result<Vec<Linear>, LoadError> {
            let others = 0..c.altup_num_inputs - 1;
            let name = |j| format!("model.{leaf}.{j}");
            others.map(|j| Linear::load(loader, &name(j), hidden, hidden, false)).collect()
        };
        let altup_projections = streams("altup_projections")?;
        let altup_unembed_projections = streams("altup_unembed_projections")?;
        let layers =
            (0..c.layers.len()).map(|i| Gemma3nLayerWeights::load(c, i, loader)).collect::<Result<_, _>>()?;
        let norm = loader.vector("model.norm.weight", hidden)?;
        let lm_head = if c.tie_word_embeddings {
            loader.skip("lm_head.weight");
            embed_tokens.clone()
        } else {
            loader.matrix("lm_head.weight", c.vocab_size, hidden)?
        };
        Ok(Self { embed_tokens, ple, altup_projections, altup_unembed_projections, layers, norm, lm_head })
    }

    /// Every matrix.
    pub fn matrices(&mut self) -> Vec<&mut Matrix> {
        let mut all = vec![&mut self.embed_tokens];
        all.extend(self.ple.matrices());
        let streams = self.altup_projections.iter_mut().chain(&mut self.altup_unembed_projections);
        all.extend(streams.map(|linear| &mut linear.weight));
        for l in &mut self.layers {
            let a = &mut l.altup;
            let altup = [&mut a.modality_router, &mut a.prediction_coefs, &mut a.correction_coefs];
            let laurel = [&mut l.laurel_left, &mut l.laurel_right, &mut l.q_proj, &mut l.o_proj];
            let kv = l.kv.iter_mut().flat_map(|kv| [&mut kv.k_proj].into_iter().chain(&mut kv.v_proj));
            let mlp = [&mut l.gate_proj, &mut l.up_proj, &mut l.down_proj];
            let linears = altup.into_iter().chain(laurel).chain(kv).chain(mlp);
            all.extend(linears.map(|linear| &mut linear.weight));
            all.extend(l.ple.matrices());
        }
        all.push(&mut self.lm_head);
        all
    }
}

impl Gemma3nLayerWeights {
    fn load(c: &Gemma3nConfig, i: usize, loader: &mut Loader) -> Result<Self, LoadError> {
        let name = |leaf: &str| format!("model.layers.{i}.{leaf}");
        let (hidden, d, n) = (c.hidden_size, c.head_dim, c.altup_num_inputs);
        let (q, kv, inner) =
            (c.num_attention_heads * d, c.num_key_value_heads * d, c.layers[i].intermediate_size);
        let mut linear = |leaf: &str, out, inner| Linear::load(loader, &name(leaf), out, inner, false);
        let modality_router = linear("altup.modality_router", n, hidden)?;
        let prediction_coefs = linear("altup.prediction_coefs", n * n, n)?;
        let correction_coefs = linear("altup.correction_coefs", n, n)?;
        let laurel_left = linear("laurel.linear_left", c.laurel_rank, hidden)?;
        let laurel_right = linear("laurel.linear_right", hidden, c.laurel_rank)?;
        let q_proj = linear("self_attn.q_proj", q, hidden)?;
        let o_proj = linear("self_attn.o_proj", hidden, q)?;
        let gate_proj = linear("mlp.gate_proj", inner, hidden)?;
        let up_proj = linear("mlp.up_proj", inner, hidden)?;
        let down_proj = linear("mlp.down_proj", hidden, inner)?;
        let kv = if c.layers[i].kv_source == i {
            Some(KeyValueWeights {
                k_proj: linear("self_attn.k_proj", kv, hidden)?,
                v_proj: Some(linear("self_attn.v_proj", kv, hidden)?),
                k_norm: loader.vector(&name("self_attn.k_norm.weight"), d)?,
            })
        } else {
            for leaf in ["k_proj.weight", "v_proj.weight", "k_norm.weight"] {
                loader.skip(&name(&format!("self_attn.{leaf}")));
            }
            None
        };
        let scale = name("altup.correct_output_scale");
        Ok(Self {
            altup: AltupWeights {
                router_norm: loader.vector(&name("altup.router_norm.weight"), hidden)?,
                modality_router,
                prediction_coefs,
                correction_coefs,
                correct_output_scale: loader.vector_if(c.altup_correct_scale, &scale, hidden)?,
            },
            input_layernorm: loader.vector(&name("input_layernorm.weight"), hidden)?,
            laurel_left,
            laurel_right,
            post_laurel_norm: loader.vector(&name("laurel.post_laurel_norm.weight"), hidden)?,
            q_proj,
            q_norm: loader.vector(&name("self_attn.q_norm.weight"), d)?,
            kv,
            o_proj,
            post_attention_layernorm: loader.vector(&name("post_attention_layernorm.weight"), hidden)?,
            pre_feedforward_layernorm: loader.vector(&name("pre_feedforward_layernorm.weight"), hidden)?,
            gate_proj,
            up_proj,
            down_proj,
            post_feedforward_layernorm: loader.vector(&name("post_feedforward_layernorm.weight"), hidden)?,
            ple: PleLayerWeights::load(&c.ple, hidden, i, loader)?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Config;
    use serde_json::Value;

    fn parse(changes: Value) -> Result<Gemma3nConfig, ConfigError> {
        let mut map = json!({"model_type": "gemma3n_text", "hidden_size": 8, "intermediate_size": 12,
            "num_hidden_layers": 5, "num_kv_shared_layers": 0,
            "activation_sparsity_pattern": [0.95, 0.0, 0.0, 0.0, 0.0]});
        for (key, value) in changes.as_object().unwrap() {
            map[key] = value.clone();
        }
        Config::parse(map.as_object().unwrap(), &[]).map(|parsed| match parsed.config {
            Config::Gemma3n(config) => config,
            other => panic!("{other:?}"),
        })
    }

    #[test]
    fn one_width_or_one_a_layer() {
        let one = parse(json!({})).unwrap();
        assert_eq!(one, parse(json!({"intermediate_size": [12, 12, 12, 12, 12]})).unwrap());
        assert_eq!(one.layers[4].layer_type, LayerType::Full);
        assert_eq!((one.layers[0].activation_sparsity, one.final_logit_softcapping), (0.95, Some(30.0)));
    }

    #[test]
    fn older_rope_keys_mean_the_same() {
        let older = parse(json!({"rope_theta": 5e5, "rope_local_base_freq": 2e4, "rope_scaling": null}));
        let newer = parse(json!({"rope_parameters": {"full_attention": {"rope_theta": 5e5},
            "sliding_attention": {"rope_theta": 2e4}}}));
        assert_eq!(older.unwrap(), newer.unwrap());
    }

    #[test]
    fn what_does_not_add_up_is_refused() {
        let refused = |changes: Value, key: &str| {
            let error = parse(changes).unwrap_err().to_string();
            assert!(error.starts_with(&format!("config key {key}")), "{error}");
        };
        refused(json!({"intermediate_size": [12, 12]}), "intermediate_size");
        refused(json!({"activation_sparsity_pattern": [0.5]}), "activation_sparsity_pattern");
        refused(
            json!({"activation_sparsity_pattern": [1.0, 0.0, 0.0, 0.0, 0.0]}),
            "activation_sparsity_pattern",
        );
        refused(json!({"altup_num_inputs": 5}), "altup_num_inputs");
        refused(json!({"altup_active_idx": 4}), "altup_active_idx");
        refused(json!({"num_kv_shared_layers": 5}), "num_kv_shared_layers");
        refused(json!({"num_key_value_heads": 3}), "num_key_value_heads");
    }
}
