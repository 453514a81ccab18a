//! Gemma 4 (text): four plain norms a layer, two widths of heads, and, by size, per-layer embeddings
//! with shared keys and values (E), or experts beside the feed-forward (MoE).
//!
//! ```text
//! x ← x + n₂(O(attention(n₁(x))))
//! x ← x + n₄(mlp(n₃(x)))                         or with experts beside the mlp
//! x ← x + n₅(W_proj(gelu(W_gate x) · ple_i))     where there are per-layer embeddings
//! x ← x · layer_scalar
//! ```

use super::layered::{self, LayerType, RopeDefault};
use super::moe::{Experts, Router, Scoring};
use super::ple::{Ple, PleLayerWeights, PleWeights};
use super::{Activation, Family, Linear};
use crate::config::{ConfigError, ConfigReader};
use crate::matrix::{Matrix, Vector};
use crate::rope::{Rope, Scaling};
use crate::tensors::{LoadError, Loader};
use serde_json::json;

/// Config of a Gemma 4 text model.
#[derive(Clone, Debug, PartialEq)]
pub struct Gemma4Config {
    /// The `model_type`.
    pub family: Family,
    /// Number of token ids.
    pub vocab_size: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Number of query heads.
    pub num_attention_heads: usize,
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
    pub layers: Vec<Gemma4LayerConfig>,
    /// Rotary embedding of full layers.
    pub rope: Rope,
    /// Rotary embedding of sliding layers.
    pub rope_local: Rope,
    /// Whether q, k, v and o have a bias.
    pub attention_bias: bool,
    /// Per-layer embeddings, where the model has them.
    pub ple: Option<Ple>,
    /// Experts beside the feed-forward, where the model has them.
    pub moe: Option<Gemma4MoeConfig>,
    /// Activation of every gate.
    pub activation: Activation,
}

/// Experts beside the feed-forward of every layer.
#[derive(Clone, Debug, PartialEq)]
pub struct Gemma4MoeConfig {
    /// How experts are chosen: `num_experts`, `top_k_experts`.
    pub router: Router,
    /// Width of an expert.
    pub moe_intermediate_size: usize,
}

/// What differs between the layers of one model.
#[derive(Clone, Debug, PartialEq)]
pub struct Gemma4LayerConfig {
    /// What attention reaches.
    pub layer_type: LayerType,
    /// Width of a head: `head_dim`, or `global_head_dim` in full layers.
    pub head_dim: usize,
    /// Number of key and value heads.
    pub num_key_value_heads: usize,
    /// The layer whose keys and values are attended to: the layer itself, or an earlier one.
    pub kv_source: usize,
    /// Whether values are made of the raw key projection: there is no v_proj.
    pub k_eq_v: bool,
    /// Width of the feed-forward.
    pub intermediate_size: usize,
}

impl Gemma4Config {
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

    /// Reads the config, in the published spelling (`global_head_dim`, `num_global_key_value_heads`) or
    /// the framework's (`per_layer_config`). Sizes that a file leaves out are those of its class.
    pub fn parse(family: Family, r: &mut ConfigReader) -> Result<Self, ConfigError> {
        let hidden_size = r.size("hidden_size")?;
        let num_attention_heads = layered::size_or(r, "num_attention_heads", 8)?;
        let max = layered::size_or(r, "max_position_embeddings", 131_072)?;
        let vocab_size = layered::size_or(r, "vocab_size", 262_144)?;
        r.only("hidden_activation", &[json!("gelu_pytorch_tanh")])?;
        // "vision" lets image tokens see each other; text stays causal.
        r.only("use_bidirectional_attention", &[json!(false), json!("vision")])?;
        let layers = layers(r, num_attention_heads)?;
        let width = |kind: LayerType, default: usize| {
            layers.iter().find(|layer| layer.layer_type == kind).map_or(default, |layer| layer.head_dim)
        };
        let (rope_local, rope) = layered::ropes(
            r,
            RopeDefault { head_dim: width(LayerType::Sliding, 256), theta: 1e4, scaling: Scaling::Default },
            RopeDefault {
                head_dim: width(LayerType::Full, 512),
                theta: 1e6,
                scaling: Scaling::Proportional { rotating: width(LayerType::Full, 512) / 8, factor: 1.0 },
            },
            max,
        )?;
        Ok(Self {
            family,
            vocab_size,
            hidden_size,
            num_attention_heads,
            rms_norm_eps: r.eps("rms_norm_eps", 1e-6)?,
            max_position_embeddings: max,
            tie_word_embeddings: r.bool("tie_word_embeddings", true)?,
            final_logit_softcapping: layered::softcap(r, "final_logit_softcapping", None)?,
            sliding_window: layered::size_or(r, "sliding_window", 512)?,
            rope,
            rope_local,
            attention_bias: r.bool("attention_bias", false)?,
            ple: ple(r, layers.len(), vocab_size)?,
            moe: moe(r)?,
            layers,
            activation: Activation::GeluTanh,
        })
    }
}

/// Experts, where `enable_moe_block` is set.
fn moe(r: &mut ConfigReader) -> Result<Option<Gemma4MoeConfig>, ConfigError> {
    let enabled = r.bool("enable_moe_block", false)?;
    if !enabled {
        r.inert(&["num_experts", "top_k_experts", "moe_intermediate_size"]);
        return Ok(None);
    }
    let (num_experts, num_experts_per_tok) = (r.count("num_experts")?, r.size("top_k_experts")?);
    // Expert ids are values at a site: f32 holds whole numbers up to 2^24.
    if num_experts > 1 << 24 {
        return Err(r.wrong("num_experts", "a whole number from 1 to 16777216"));
    }
    if num_experts_per_tok > num_experts {
        return Err(r.wrong("top_k_experts", &format!("at most the {num_experts} experts")));
    }
    let router = Router { num_experts, num_experts_per_tok, scoring: Scoring::Probabilities };
    Ok(Some(Gemma4MoeConfig { router, moe_intermediate_size: r.size("moe_intermediate_size")? }))
}

/// Per-layer embeddings, where `hidden_size_per_layer_input` is not 0.
fn ple(r: &mut ConfigReader, layers: usize, vocab: usize) -> Result<Option<Ple>, ConfigError> {
    let width = r.usize("hidden_size_per_layer_input")?;
    let vocab_size = layered::size_or(r, "vocab_size_per_layer_input", 262_144)?;
    match width {
        0 => Ok(None),
        _ if vocab_size < vocab => {
            Err(r.wrong("vocab_size_per_layer_input", &format!("at least the vocab_size {vocab}")))
        }
        _ => Ok(Some(Ple { width, vocab_size, layers })),
    }
}

/// What differs between layers.
fn layers(r: &mut ConfigReader, heads: usize) -> Result<Vec<Gemma4LayerConfig>, ConfigError> {
    let count = r.count("num_hidden_layers")?;
    let mut types = layered::layer_types(r, count, 6)?;
    if r.present("layer_types") && types.last() == Some(&LayerType::Sliding) {
        return Err(r.wrong("layer_types", "a list whose last entry is full_attention"));
    }
    types[count - 1] = LayerType::Full;
    let head_dim = layered::size_or(r, "head_dim", 256)?;
    let global_head_dim = layered::size_or(r, "global_head_dim", 512)?;
    let k_eq_v = r.bool("attention_k_eq_v", false)?;
    let kv_heads =
        layered::kv_heads(r, "num_key_value_heads", heads, if heads.is_multiple_of(4) { 4 } else { heads })?;
    let global_kv_heads = layered::kv_heads(r, "num_global_key_value_heads", heads, kv_heads)?;
    let shared = r.usize_opt("num_kv_shared_layers")?.unwrap_or(0);
    let sources = layered::kv_sources(r, &types, shared)?;
    let inner = r.size("intermediate_size")?;
    let double_wide = r.bool("use_double_wide_mlp", false)?;
    let mut layers: Vec<Gemma4LayerConfig> = (0..count)
        .map(|i| {
            let full = types[i] == LayerType::Full;
            Gemma4LayerConfig {
                layer_type: types[i],
                head_dim: if full { global_head_dim } else { head_dim },
                num_key_value_heads: if full && k_eq_v { global_kv_heads } else { kv_heads },
                kv_source: sources[i],
                k_eq_v: k_eq_v && full,
                intermediate_size: if double_wide && sources[i] != i { 2 * inner } else { inner },
            }
        })
        .collect();
    overrides(r, heads, &mut layers)?;
    for (i, layer) in layers.iter().enumerate() {
        let same_type = layers.iter().find(|other| other.layer_type == layer.layer_type);
        let source = &layers[layer.kv_source];
        if same_type.is_some_and(|first| first.head_dim != layer.head_dim)
            || source.num_key_value_heads != layer.num_key_value_heads
        {
            let expected = format!("layer {i} like the other layers of its type");
            return Err(r.wrong("per_layer_config", &expected));
        }
    }
    Ok(layers)
}

/// The framework's spelling: `per_layer_config` names the layers that differ, by number.
fn overrides(
    r: &mut ConfigReader,
    heads: usize,
    layers: &mut [Gemma4LayerConfig],
) -> Result<(), ConfigError> {
    let Some(map) = r.object("per_layer_config")? else { return Ok(()) };
    for (number, changes) in map {
        let layer = number.parse().ok().and_then(|i: usize| layers.get_mut(i));
        let (Some(layer), Some(changes)) = (layer, changes.as_object()) else {
            return Err(r.wrong("per_layer_config", "objects under the numbers of layers"));
        };
        let mut changes = ConfigReader::new(changes, &format!("per_layer_config.{number}."));
        layer.head_dim = layered::size_or(&mut changes, "head_dim", layer.head_dim)?;
        layer.num_key_value_heads =
            layered::kv_heads(&mut changes, "num_key_value_heads", heads, layer.num_key_value_heads)?;
        changes.finish(&[])?;
    }
    Ok(())
}

/// Weights of a Gemma 4 text model.
#[derive(Clone, Debug)]
pub struct Gemma4Weights {
    /// `[vocab, hidden]`
    pub embed_tokens: Matrix,
    /// Per-layer embeddings.
    pub ple: Option<PleWeights>,
    /// The layers.
    pub layers: Vec<Gemma4LayerWeights>,
    /// `[hidden]`
    pub norm: Vector,
    /// `[vocab, hidden]`; the unscaled embedding table where the model ties them.
    pub lm_head: Matrix,
}

/// Weights of one layer.
#[derive(Clone, Debug)]
pub struct Gemma4LayerWeights {
    /// `[hidden]`: before attention.
    pub input_layernorm: Vector,
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
    /// Experts beside the feed-forward.
    pub moe: Option<Gemma4MoeWeights>,
    /// Per-layer embeddings.
    pub ple: Option<PleLayerWeights>,
    /// One number, which the whole layer output is multiplied by.
    pub layer_scalar: Vector,
}

/// The experts of one layer, their router, and the norms that only such a layer has.
#[derive(Clone, Debug)]
pub struct Gemma4MoeWeights {
    /// `[hidden]`: of what the dense feed-forward gives.
    pub post_feedforward_layernorm_1: Vector,
    /// `[hidden]`: the weight of the router's own norm.
    pub router_scale: Vector,
    /// `[experts, hidden]`
    pub router_proj: Linear,
    /// `[experts]`: what a chosen expert's weight is multiplied by.
    pub per_expert_scale: Vector,
    /// `[hidden]`: before the experts.
    pub pre_feedforward_layernorm_2: Vector,
    /// The experts.
    pub experts: Experts,
    /// `[hidden]`: of what the experts give.
    pub post_feedforward_layernorm_2: Vector,
}

impl Gemma4MoeWeights {
    fn load(c: &Gemma4MoeConfig, hidden: usize, i: usize, loader: &mut Loader) -> Result<Self, LoadError> {
        let name = |leaf: &str| format!("model.layers.{i}.{leaf}");
        let experts = c.router.num_experts;
        let mut norm = |leaf: &str| loader.vector(&name(leaf), hidden);
        Ok(Self {
            post_feedforward_layernorm_1: norm("post_feedforward_layernorm_1.weight")?,
            pre_feedforward_layernorm_2: norm("pre_feedforward_layernorm_2.weight")?,
            post_feedforward_layernorm_2: norm("post_feedforward_layernorm_2.weight")?,
            router_scale: norm("router.scale")?,
            router_proj: Linear::load(loader, &name("router.proj"), experts, hidden, false)?,
            per_expert_scale: loader.vector(&name("router.per_expert_scale"), experts)?,
            experts: Experts::load(loader, &name("experts"), experts, hidden, c.moe_intermediate_size)?,
        })
    }
}

/// What makes a layer's keys and values.
#[derive(Clone, Debug)]
pub struct KeyValueWeights {
    /// `[kv_heads · head_dim, hidden]`
    pub k_proj: Linear,
    /// `[head_dim]`
    pub k_norm: Vector,
    /// `[kv_heads · head_dim, hidden]`; absent where values are made of the raw keys.
    pub v_proj: Option<Linear>,
}

impl Gemma4Weights {
    /// Takes the tensors by their published names.
    pub fn load(c: &Gemma4Config, loader: &mut Loader) -> Result<Self, LoadError> {
        let embed_tokens = loader.matrix("model.embed_tokens.weight", c.vocab_size, c.hidden_size)?;
        let ple = c.ple.as_ref().map(|ple| PleWeights::load(ple, c.hidden_size, loader)).transpose()?;
        let layers =
            (0..c.layers.len()).map(|i| Gemma4LayerWeights::load(c, i, loader)).collect::<Result<_, _>>()?;
        let norm = loader.vector("model.norm.weight", c.hidden_size)?;
        let lm_head = if c.tie_word_embeddings {
            loader.skip("lm_head.weight");
            embed_tokens.clone()
        } else {
            loader.matrix("lm_head.weight", c.vocab_size, c.hidden_size)?
        };
        Ok(Self { embed_tokens, ple, layers, norm, lm_head })
    }

    /// Every matrix.
    pub fn matrices(&mut self) -> Vec<&mut Matrix> {
        let mut all = vec![&mut self.embed_tokens];
        all.extend(self.ple.iter_mut().flat_map(PleWeights::matrices));
        for l in &mut self.layers {
            all.extend([&mut l.q_proj.weight, &mut l.o_proj.weight]);
            if let Some(kv) = &mut l.kv {
                all.push(&mut kv.k_proj.weight);
                all.extend(kv.v_proj.iter_mut().map(|v| &mut v.weight));
            }
            all.extend([&mut l.gate_proj, &mut l.up_proj, &mut l.down_proj].map(|linear| &mut linear.weight));
            if let Some(moe) = &mut l.moe {
                all.push(&mut moe.router_proj.weight);
                all.extend(moe.experts.matrices());
            }
            all.extend(l.ple.iter_mut().flat_map(PleLayerWeights::matrices));
        }
        all.push(&mut self.lm_head);
        all
    }
}

impl Gemma4LayerWeights {
    fn load(c: &Gemma4Config, i: usize, loader: &mut Loader) -> Result<Self, LoadError> {
        let name = |leaf: &str| format!("model.layers.{i}.{leaf}");
        let layer = &c.layers[i];
        let (hidden, inner, d, bias) =
            (c.hidden_size, layer.intermediate_size, layer.head_dim, c.attention_bias);
        let (q, kv) = (c.num_attention_heads * d, layer.num_key_value_heads * d);
        let own = layer.kv_source == i;
        let kv = if own {
            let v = (!layer.k_eq_v)
                .then(|| Linear::load(loader, &name("self_attn.v_proj"), kv, hidden, bias))
                .transpose()?;
            Some(KeyValueWeights {
                k_proj: Linear::load(loader, &name("self_attn.k_proj"), kv, hidden, bias)?,
                k_norm: loader.vector(&name("self_attn.k_norm.weight"), d)?,
                v_proj: v,
            })
        } else {
            for leaf in ["k_proj.weight", "v_proj.weight", "k_norm.weight"] {
                loader.skip(&name(&format!("self_attn.{leaf}")));
            }
            None
        };
        let mut linear = |leaf: &str, out, inner, bias| Linear::load(loader, &name(leaf), out, inner, bias);
        let q_proj = linear("self_attn.q_proj", q, hidden, bias)?;
        let o_proj = linear("self_attn.o_proj", hidden, q, bias)?;
        let gate_proj = linear("mlp.gate_proj", inner, hidden, false)?;
        let up_proj = linear("mlp.up_proj", inner, hidden, false)?;
        let down_proj = linear("mlp.down_proj", hidden, inner, false)?;
        Ok(Self {
            input_layernorm: loader.vector(&name("input_layernorm.weight"), hidden)?,
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
            moe: c.moe.as_ref().map(|moe| Gemma4MoeWeights::load(moe, hidden, i, loader)).transpose()?,
            ple: c.ple.as_ref().map(|ple| PleLayerWeights::load(ple, hidden, i, loader)).transpose()?,
            layer_scalar: loader.vector(&name("layer_scalar"), 1)?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Config;
    use serde_json::Value;

    fn parse(changes: Value) -> Result<Gemma4Config, ConfigError> {
        let mut map = json!({"model_type": "gemma4_text", "hidden_size": 8, "intermediate_size": 12,
            "num_attention_heads": 4, "num_hidden_layers": 6, "num_key_value_heads": 2, "head_dim": 4,
            "hidden_size_per_layer_input": 0, "sliding_window": 3});
        for (key, value) in changes.as_object().unwrap() {
            map[key] = value.clone();
        }
        Config::parse(map.as_object().unwrap(), &[]).map(|parsed| match parsed.config {
            Config::Gemma4(config) => config,
            other => panic!("{other:?}"),
        })
    }

    #[test]
    fn the_published_spelling_and_the_framework_s_mean_the_same() {
        let published =
            json!({"global_head_dim": 16, "num_global_key_value_heads": 1, "attention_k_eq_v": true});
        let framework = json!({"attention_k_eq_v": true,
            "per_layer_config": {"5": {"head_dim": 16, "num_key_value_heads": 1}}});
        let published = parse(published).unwrap();
        assert_eq!(published, parse(framework).unwrap());
        let last = &published.layers[5];
        assert_eq!((last.head_dim, last.num_key_value_heads, last.k_eq_v), (16, 1, true));
        // A quarter of the 8 pairs of a full head turn.
        assert_eq!(published.rope.scaling, Scaling::Proportional { rotating: 2, factor: 1.0 });
        assert_eq!((published.rope.rotary_dim, published.rope_local.rotary_dim), (16, 4));
    }

    #[test]
    fn global_kv_heads_need_values_made_of_keys() {
        let c = parse(json!({"global_head_dim": 16, "num_global_key_value_heads": 1})).unwrap();
        assert_eq!(c.layers[5].num_key_value_heads, 2);
    }

    #[test]
    fn only_shared_layers_are_double_wide() {
        let types = [
            "sliding_attention",
            "full_attention",
            "sliding_attention",
            "full_attention",
            "sliding_attention",
            "full_attention",
        ];
        let c = parse(json!({"layer_types": types, "num_kv_shared_layers": 2, "use_double_wide_mlp": true}));
        let c = c.unwrap();
        let inner: Vec<usize> = c.layers.iter().map(|layer| layer.intermediate_size).collect();
        assert_eq!(inner, [12, 12, 12, 12, 24, 24]);
        let sources: Vec<usize> = c.layers.iter().map(|layer| layer.kv_source).collect();
        assert_eq!(sources, [0, 1, 2, 3, 2, 3]);
    }

    #[test]
    fn what_does_not_add_up_is_refused() {
        let refused = |changes: Value, key: &str| {
            let error = parse(changes).unwrap_err().to_string();
            assert!(error.starts_with(&format!("config key {key}")), "{error}");
        };
        refused(json!({"num_kv_shared_layers": 6}), "num_kv_shared_layers");
        refused(json!({"per_layer_config": {"9": {}}}), "per_layer_config");
        refused(json!({"per_layer_config": {"1": {"twist": 1}}}), "per_layer_config.1.twist");
        refused(json!({"per_layer_config": {"1": {"head_dim": 8}}}), "per_layer_config");
        refused(
            json!({"per_layer_config": {"1": {"num_key_value_heads": 3}}}),
            "per_layer_config.1.num_key_value_heads",
        );
        refused(
            json!({"hidden_size_per_layer_input": 2, "vocab_size_per_layer_input": 9}),
            "vocab_size_per_layer_input",
        );
        let moe = |k: usize| {
            json!({"enable_moe_block": true, "num_experts": 4, "top_k_experts": k,
            "moe_intermediate_size": 6})
        };
        assert_eq!(parse(moe(4)).unwrap().moe.unwrap().router.num_experts_per_tok, 4);
        refused(moe(5), "top_k_experts");
        refused(json!({"enable_moe_block": true}), "num_experts");
        refused(json!({"use_bidirectional_attention": true}), "use_bidirectional_attention");
        let types = vec!["sliding_attention"; 6];
        refused(json!({"layer_types": types}), "layer_types");
    }
}
