//! Gemma 2 and Gemma 3: four centred norms a layer, sliding and full layers in turn.
//!
//! ```text
//! x ← x + n₂(O(attention(n₁(x))))
//! x ← x + n₄(mlp(n₃(x)))
//! logits = cap(norm_f(x) · W_headᵀ)
//! ```
//!
//! Checkpoints store every norm weight minus 1; they are brought to the one formula here.

use super::layered::{self, LayerType, RopeDefault};
use super::{Activation, Family, Linear};
use crate::config::{ConfigError, ConfigReader};
use crate::matrix::{Matrix, Vector};
use crate::rope::{Rope, Scaling};
use crate::tensors::{LoadError, Loader};
use serde_json::json;

/// Config of a Gemma 2 or Gemma 3 text model.
#[derive(Clone, Debug, PartialEq)]
pub struct GemmaConfig {
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
    /// Scores are multiplied by its inverse root.
    pub query_pre_attn_scalar: f64,
    /// Cap of the scores, before the mask.
    pub attn_logit_softcapping: Option<f64>,
    /// Cap of the logits.
    pub final_logit_softcapping: Option<f64>,
    /// Keys that a token of a sliding layer may attend to, itself included.
    pub sliding_window: usize,
    /// The type of every layer.
    pub layer_types: Vec<LayerType>,
    /// Rotary embedding of full layers; of all layers where `rope_local` is absent.
    pub rope: Rope,
    /// Rotary embedding of sliding layers, where they have one of their own (Gemma 3).
    pub rope_local: Option<Rope>,
    /// Whether q, k, v and o have a bias.
    pub attention_bias: bool,
    /// Whether q and k pass a norm over head_dim before rope (Gemma 3).
    pub qk_norm: bool,
    /// Activation of the gate.
    pub activation: Activation,
}

impl GemmaConfig {
    /// Width of all query heads together.
    pub fn q_width(&self) -> usize {
        self.num_attention_heads * self.head_dim
    }

    /// Width of all key (or value) heads together.
    pub fn kv_width(&self) -> usize {
        self.num_key_value_heads * self.head_dim
    }

    /// What scores are multiplied by: `query_pre_attn_scalar^-½`.
    pub fn attention_scale(&self) -> f64 {
        1.0 / self.query_pre_attn_scalar.sqrt()
    }

    /// What embedding rows are multiplied by: the f32 root of hidden.
    pub fn embed_scale(&self) -> f32 {
        (self.hidden_size as f64).sqrt() as f32
    }

    /// The window of layer `i`, where it has one.
    pub fn window(&self, i: usize) -> Option<usize> {
        (self.layer_types[i] == LayerType::Sliding).then_some(self.sliding_window)
    }

    /// Reads the config. Sizes that a published file leaves out are those of its class.
    pub fn parse(family: Family, r: &mut ConfigReader) -> Result<Self, ConfigError> {
        let gemma3 = family == "gemma3_text";
        let hidden_size = r.size("hidden_size")?;
        let num_attention_heads = layered::size_or(r, "num_attention_heads", 8)?;
        let num_key_value_heads = layered::kv_heads(r, "num_key_value_heads", num_attention_heads, 4)?;
        let head_dim = layered::size_or(r, "head_dim", 256)?;
        let max = layered::size_or(r, "max_position_embeddings", if gemma3 { 131_072 } else { 8192 })?;
        let tanh = [json!("gelu_pytorch_tanh")];
        r.only("hidden_activation", &tanh)?;
        r.only("hidden_act", &tanh)?;
        r.only("use_bidirectional_attention", &[json!(false)])?;
        r.inert(&["cache_implementation"]);
        let query_pre_attn_scalar = r.f64_opt("query_pre_attn_scalar")?.unwrap_or(256.0);
        if query_pre_attn_scalar <= 0.0 {
            return Err(r.wrong("query_pre_attn_scalar", "a positive number"));
        }
        let layers = r.count("num_hidden_layers")?;
        let layer_types = layered::layer_types(r, layers, if gemma3 { 6 } else { 2 })?;
        let (rope, rope_local) = if gemma3 {
            let default = |theta| RopeDefault { head_dim, theta, scaling: Scaling::Default };
            let (local, full) = layered::ropes(r, default(1e4), default(1e6), max)?;
            (full, Some(local))
        } else {
            (Rope::parse(r, head_dim)?, None)
        };
        let cap = |gemma2: f64| (!gemma3).then_some(gemma2);
        Ok(Self {
            family,
            vocab_size: layered::size_or(r, "vocab_size", if gemma3 { 262_208 } else { 256_000 })?,
            hidden_size,
            intermediate_size: r.size("intermediate_size")?,
            num_attention_heads,
            num_key_value_heads,
            head_dim,
            rms_norm_eps: r.eps("rms_norm_eps", 1e-6)?,
            max_position_embeddings: max,
            tie_word_embeddings: r.bool("tie_word_embeddings", true)?,
            query_pre_attn_scalar,
            attn_logit_softcapping: layered::softcap(r, "attn_logit_softcapping", cap(50.0))?,
            final_logit_softcapping: layered::softcap(r, "final_logit_softcapping", cap(30.0))?,
            sliding_window: layered::size_or(r, "sliding_window", 4096)?,
            layer_types,
            rope,
            rope_local,
            attention_bias: r.bool("attention_bias", false)?,
            qk_norm: gemma3,
            activation: Activation::GeluTanh,
        })
    }
}

/// Weights of a Gemma 2 or Gemma 3 text model. Norm weights have their 1 added.
#[derive(Clone, Debug)]
pub struct GemmaWeights {
    /// `[vocab, hidden]`
    pub embed_tokens: Matrix,
    /// The layers.
    pub layers: Vec<GemmaLayerWeights>,
    /// `[hidden]`
    pub norm: Vector,
    /// `[vocab, hidden]`; the unscaled embedding table where the model ties them.
    pub lm_head: Matrix,
}

/// Weights of one layer.
#[derive(Clone, Debug)]
pub struct GemmaLayerWeights {
    /// `[hidden]`: before attention.
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
}

impl GemmaWeights {
    /// Takes the tensors by their published names.
    pub fn load(c: &GemmaConfig, loader: &mut Loader) -> Result<Self, LoadError> {
        let embed_tokens = loader.matrix("model.embed_tokens.weight", c.vocab_size, c.hidden_size)?;
        let layers = (0..c.layer_types.len())
            .map(|i| GemmaLayerWeights::load(c, i, loader))
            .collect::<Result<_, _>>()?;
        let norm = loader.vector("model.norm.weight", c.hidden_size)?.plus_one();
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

impl GemmaLayerWeights {
    fn load(c: &GemmaConfig, i: usize, loader: &mut Loader) -> Result<Self, LoadError> {
        let name = |leaf: &str| format!("model.layers.{i}.{leaf}");
        let (q, kv, hidden, inner) = (c.q_width(), c.kv_width(), c.hidden_size, c.intermediate_size);
        let mut linear = |leaf: &str, out, inner, bias| Linear::load(loader, &name(leaf), out, inner, bias);
        let q_proj = linear("self_attn.q_proj", q, hidden, c.attention_bias)?;
        let k_proj = linear("self_attn.k_proj", kv, hidden, c.attention_bias)?;
        let v_proj = linear("self_attn.v_proj", kv, hidden, c.attention_bias)?;
        let o_proj = linear("self_attn.o_proj", hidden, q, c.attention_bias)?;
        let gate_proj = linear("mlp.gate_proj", inner, hidden, false)?;
        let up_proj = linear("mlp.up_proj", inner, hidden, false)?;
        let down_proj = linear("mlp.down_proj", hidden, inner, false)?;
        let mut norm = |leaf: &str, len| loader.vector(&name(leaf), len).map(|w| w.plus_one());
        Ok(Self {
            input_layernorm: norm("input_layernorm.weight", hidden)?,
            q_proj,
            k_proj,
            v_proj,
            q_norm: c.qk_norm.then(|| norm("self_attn.q_norm.weight", c.head_dim)).transpose()?,
            k_norm: c.qk_norm.then(|| norm("self_attn.k_norm.weight", c.head_dim)).transpose()?,
            o_proj,
            post_attention_layernorm: norm("post_attention_layernorm.weight", hidden)?,
            pre_feedforward_layernorm: norm("pre_feedforward_layernorm.weight", hidden)?,
            gate_proj,
            up_proj,
            down_proj,
            post_feedforward_layernorm: norm("post_feedforward_layernorm.weight", hidden)?,
        })
    }
}

#[cfg(test)]
mod tests {
    use crate::Config;
    use crate::families::layered::LayerType;
    use crate::rope::Scaling;
    use serde_json::{Value, json};

    fn parse(value: Value) -> super::GemmaConfig {
        match Config::parse(value.as_object().unwrap(), &[]).unwrap().config {
            Config::Gemma(config) => config,
            other => panic!("{other:?}"),
        }
    }

    // The published 4B file says no more of its text model than this; the class has the rest.
    #[test]
    fn a_published_wrapper_and_the_frameworks_spelling_mean_the_same() {
        let older = parse(json!({"model_type": "gemma3", "vision_config": {}, "text_config": {
            "model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240,
            "num_hidden_layers": 7, "sliding_window": 1024, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}}));
        let types = [
            "sliding_attention",
            "sliding_attention",
            "sliding_attention",
            "sliding_attention",
            "sliding_attention",
            "full_attention",
            "sliding_attention",
        ];
        let newer =
            parse(json!({"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240,
            "num_hidden_layers": 7, "sliding_window": 1024, "layer_types": types,
            "rope_parameters": {"sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}}}));
        assert_eq!(older, newer);
        assert_eq!(older.rope.scaling, Scaling::Linear { factor: 8.0 });
        assert_eq!((older.rope.theta, older.rope_local.as_ref().unwrap().theta), (1e6, 1e4));
        assert_eq!((older.head_dim, older.num_key_value_heads, older.window(5)), (256, 4, None));
    }

    #[test]
    fn a_cap_of_null_is_no_cap_and_an_absent_one_is_the_family_s() {
        let with = |key: &str, value: Value| {
            let mut map = json!({"model_type": "gemma2", "hidden_size": 8, "intermediate_size": 8,
                "num_hidden_layers": 2, "rope_theta": 1e4});
            map[key] = value;
            parse(map)
        };
        assert_eq!(with("head_dim", json!(4)).attn_logit_softcapping, Some(50.0));
        assert_eq!(with("attn_logit_softcapping", Value::Null).attn_logit_softcapping, None);
        assert_eq!(with("final_logit_softcapping", json!(9.0)).final_logit_softcapping, Some(9.0));
        assert_eq!(with("head_dim", json!(4)).layer_types, [LayerType::Sliding, LayerType::Full]);
    }
}
