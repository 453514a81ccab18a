//! Hybrids of gated delta rule and gated softmax attention: qwen3_next, qwen3_5, qwen3_5_moe.
//!
//! ```text
//! x ← x + mixer(norm₁(x))          the delta rule, or every fourth layer softmax attention
//! x ← x + ffn(norm₂(x))
//! logits = norm_f(x) · W_headᵀ
//! ```
//!
//! Norm weights are stored as `weight - 1` and are brought to the one formula when they are loaded; the
//! norm inside the delta rule is stored as it is used.

use super::moe::{Experts, Router, Scoring};
use super::moe_decoder::every_step;
use super::{Conv, Family, Linear, Mlp};
use crate::config::{ConfigError, ConfigReader};
use crate::matrix::{Matrix, Vector};
use crate::rope::Rope;
use crate::tensors::{LoadError, Loader};
use serde_json::json;

/// Config of a hybrid.
#[derive(Clone, Debug, PartialEq)]
pub struct HybridConfig {
    /// The `model_type`.
    pub family: Family,
    /// Number of token ids.
    pub vocab_size: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Which mixer each layer has.
    pub layer_types: Vec<LayerType>,
    /// Number of query heads of softmax attention.
    pub num_attention_heads: usize,
    /// Number of its key and value heads.
    pub num_key_value_heads: usize,
    /// Width of its heads.
    pub head_dim: usize,
    /// Whether its projections have a bias.
    pub attention_bias: bool,
    /// Number of key (and query) heads of the delta rule.
    pub linear_num_key_heads: usize,
    /// Number of its value heads; `linear_num_value_heads / linear_num_key_heads` share a key.
    pub linear_num_value_heads: usize,
    /// Width of its keys and queries.
    pub linear_key_head_dim: usize,
    /// Width of its values.
    pub linear_value_head_dim: usize,
    /// Taps of the convolution before it.
    pub linear_conv_kernel_dim: usize,
    /// ε of every norm but the unit norm of the delta rule's queries and keys.
    pub rms_norm_eps: f32,
    /// Longest sequence.
    pub max_position_embeddings: usize,
    /// Whether the embedding table is the head as well.
    pub tie_word_embeddings: bool,
    /// Rotary embedding of softmax attention: partial.
    pub rope: Rope,
    /// Width of dense feed-forwards; 0 where every layer has experts.
    pub intermediate_size: usize,
    /// Whether a layer has experts; the others are dense.
    pub sparse: Vec<bool>,
    /// The experts, where there are any.
    pub moe: Option<HybridMoe>,
    /// Layers of the multi-token-prediction head, where the checkpoint has one.
    pub mtp_num_hidden_layers: usize,
}

/// Config of a mixture of experts with a gated shared expert.
#[derive(Clone, Debug, PartialEq)]
pub struct HybridMoe {
    /// How experts are chosen.
    pub router: Router,
    /// Width of an expert.
    pub moe_intermediate_size: usize,
    /// Width of the shared expert.
    pub shared_expert_intermediate_size: usize,
}

/// The mixer of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LayerType {
    /// `linear_attention`: the gated delta rule.
    Linear,
    /// `full_attention`: gated softmax attention.
    Full,
}

impl HybridConfig {
    /// Width of all queries of softmax attention together.
    pub fn q_width(&self) -> usize {
        self.num_attention_heads * self.head_dim
    }

    /// Width of its keys (or values) together.
    pub fn kv_width(&self) -> usize {
        self.num_key_value_heads * self.head_dim
    }

    /// What its scores are multiplied by: `head_dim^-½`.
    pub fn attention_scale(&self) -> f64 {
        (self.head_dim as f64).powf(-0.5)
    }

    /// What the delta rule's queries are multiplied by: `linear_key_head_dim^-½`.
    pub fn linear_scale(&self) -> f64 {
        (self.linear_key_head_dim as f64).powf(-0.5)
    }

    /// Width of all keys (or queries) of the delta rule together.
    pub fn linear_key_width(&self) -> usize {
        self.linear_num_key_heads * self.linear_key_head_dim
    }

    /// Width of all its values together.
    pub fn linear_value_width(&self) -> usize {
        self.linear_num_value_heads * self.linear_value_head_dim
    }

    /// Value heads that share a key head.
    pub fn linear_group(&self) -> usize {
        self.linear_num_value_heads / self.linear_num_key_heads
    }

    /// Channels of the convolution: q, k and v.
    pub fn conv_channels(&self) -> usize {
        2 * self.linear_key_width() + self.linear_value_width()
    }

    /// Reads the config of one of the families above.
    pub fn parse(family: Family, r: &mut ConfigReader) -> Result<Self, ConfigError> {
        let num_attention_heads = r.size("num_attention_heads")?;
        let num_key_value_heads =
            divisor(r, "num_key_value_heads", "num_attention_heads", num_attention_heads)?;
        let linear_num_value_heads = r.size("linear_num_value_heads")?;
        let linear_num_key_heads =
            divisor(r, "linear_num_key_heads", "linear_num_value_heads", linear_num_value_heads)?;
        let head_dim = r.size("head_dim")?;
        let layer_types = layer_types(r)?;
        let moe = if family == "qwen3_5_text" { None } else { Some(HybridMoe::parse(family, r)?) };
        let sparse = match moe {
            Some(_) => every_step(r, layer_types.len())?,
            None => {
                r.only("mlp_only_layers", &[json!([])])?;
                vec![false; layer_types.len()]
            }
        };
        let all_sparse = sparse.iter().all(|&sparse| sparse);
        let intermediate_size = match r.usize_opt("intermediate_size")? {
            None if all_sparse => 0,
            _ => r.size("intermediate_size")?,
        };
        r.only("hidden_act", &[json!("silu")])?;
        r.only("attn_output_gate", &[json!(true)])?;
        // The state of the reference is f32, as this says.
        r.only("mamba_ssm_dtype", &[json!("float32")])?;
        r.only("mtp_use_dedicated_embeddings", &[json!(false)])?;
        Ok(Self {
            family,
            vocab_size: r.size("vocab_size")?,
            hidden_size: r.size("hidden_size")?,
            layer_types,
            num_attention_heads,
            num_key_value_heads,
            head_dim,
            attention_bias: r.bool("attention_bias", false)?,
            linear_num_key_heads,
            linear_num_value_heads,
            linear_key_head_dim: r.size("linear_key_head_dim")?,
            linear_value_head_dim: r.size("linear_value_head_dim")?,
            linear_conv_kernel_dim: r.size("linear_conv_kernel_dim")?,
            rms_norm_eps: r.eps("rms_norm_eps", 1e-6)?,
            max_position_embeddings: r.size("max_position_embeddings")?,
            tie_word_embeddings: r.bool("tie_word_embeddings", false)?,
            rope: Rope::parse_with_partial(r, head_dim, 0.25)?,
            intermediate_size,
            sparse,
            moe,
            mtp_num_hidden_layers: match r.usize_opt("mtp_num_hidden_layers")? {
                None => 1,
                Some(n) if n <= 1 << 10 => n,
                Some(_) => return Err(r.wrong("mtp_num_hidden_layers", "at most 1024")),
            },
        })
    }
}

impl HybridMoe {
    /// qwen3_5_moe always renormalises; qwen3_next obeys `norm_topk_prob`.
    fn parse(family: Family, r: &mut ConfigReader) -> Result<Self, ConfigError> {
        let norm_topk_prob = match family {
            "qwen3_next" => r.bool("norm_topk_prob", true)?,
            _ => {
                r.only("norm_topk_prob", &[json!(true)])?;
                true
            }
        };
        Ok(Self {
            router: Router::parse(r, &["num_experts"], Scoring::Softmax { norm_topk_prob })?,
            moe_intermediate_size: r.size("moe_intermediate_size")?,
            shared_expert_intermediate_size: r.size("shared_expert_intermediate_size")?,
        })
    }
}

/// `key`, which must divide the value of `whole`.
fn divisor(r: &mut ConfigReader, key: &str, whole: &str, value: usize) -> Result<usize, ConfigError> {
    match r.size(key)? {
        n if value.is_multiple_of(n) => Ok(n),
        _ => Err(r.wrong(key, &format!("a divisor of {whole} {value}"))),
    }
}

/// `layer_types` where given; else every `full_attention_interval`-th layer is full.
fn layer_types(r: &mut ConfigReader) -> Result<Vec<LayerType>, ConfigError> {
    let count = r.count("num_hidden_layers")?;
    let interval = r.usize_opt("full_attention_interval")?.unwrap_or(4);
    let Some(types) = r.strs("layer_types")? else {
        if interval == 0 {
            return Err(r.wrong("full_attention_interval", "a positive number"));
        }
        let kind =
            |i: usize| if (i + 1).is_multiple_of(interval) { LayerType::Full } else { LayerType::Linear };
        return Ok((0..count).map(kind).collect());
    };
    if types.len() != count {
        return Err(r.wrong("layer_types", &format!("one entry for each of the {count} layers")));
    }
    let kind = |kind: &&str| match *kind {
        "linear_attention" => Ok(LayerType::Linear),
        "full_attention" => Ok(LayerType::Full),
        _ => Err(r.wrong("layer_types", "linear_attention or full_attention")),
    };
    types.iter().map(kind).collect()
}

/// Weights of a hybrid.
#[derive(Clone, Debug)]
pub struct HybridWeights {
    /// `[vocab, hidden]`
    pub embed_tokens: Matrix,
    /// The layers.
    pub layers: Vec<LayerWeights>,
    /// `[hidden]`, 1 added.
    pub norm: Vector,
    /// `[vocab, hidden]`; the embedding table where the model ties them.
    pub lm_head: Matrix,
    /// The multi-token-prediction head, where the checkpoint has one.
    pub mtp: Option<MtpWeights>,
}

/// Weights of the multi-token-prediction head. Embedding table and head are the model's own.
#[derive(Clone, Debug)]
pub struct MtpWeights {
    /// `[hidden]`, 1 added: norm of the token's embedding.
    pub pre_fc_norm_embedding: Vector,
    /// `[hidden]`, 1 added: norm of the hidden state.
    pub pre_fc_norm_hidden: Vector,
    /// `[hidden, 2 · hidden]`: reads the embedding, then the hidden state.
    pub fc: Linear,
    /// Layers with softmax attention, one for each depth of prediction.
    pub layers: Vec<LayerWeights>,
    /// `[hidden]`, 1 added: the norm before the model's head.
    pub norm: Vector,
}

/// Weights of one layer.
#[derive(Clone, Debug)]
pub struct LayerWeights {
    /// `[hidden]`, 1 added.
    pub input_layernorm: Vector,
    /// What mixes tokens.
    pub mixer: MixerWeights,
    /// `[hidden]`, 1 added: the norm before the feed-forward.
    pub post_attention_layernorm: Vector,
    /// The feed-forward.
    pub mlp: FeedForward,
}

/// Weights of a mixer.
#[derive(Clone, Debug)]
#[allow(clippy::large_enum_variant)] // One a layer: a few hundred bytes beside its matrices.
pub enum MixerWeights {
    /// `linear_attn`
    Linear(DeltaWeights),
    /// `self_attn`
    Full(AttentionWeights),
}

/// Weights of the gated delta rule.
#[derive(Clone, Debug)]
pub struct DeltaWeights {
    /// Queries, keys, values, gate and the two scalars of every value head.
    pub in_proj: DeltaProjections,
    /// `[q + k + v, kernel]`
    pub conv1d: Conv,
    /// `[value_heads]`: the decay's rate is e^A_log.
    pub a_log: Vector,
    /// `[value_heads]`
    pub dt_bias: Vector,
    /// `[value_dim]`, as it is used; one for all heads.
    pub norm: Vector,
    /// `[hidden, value_heads · value_dim]`
    pub out_proj: Linear,
}

/// The two layouts of the projections into the delta rule.
#[derive(Clone, Debug)]
#[allow(clippy::large_enum_variant)] // One a layer, and all of a model have the same variant.
pub enum DeltaProjections {
    /// qwen3_next: fused, and interleaved by key head.
    Grouped {
        /// For each key head: q, k, and the v and the z of its value heads.
        qkvz: Linear,
        /// For each key head: the b and the a of its value heads.
        ba: Linear,
    },
    /// qwen3_5: all q, all k, all v; the others by themselves.
    Separate {
        /// `[q + k + v, hidden]`
        qkv: Linear,
        /// `[value_heads · value_dim, hidden]`
        z: Linear,
        /// `[value_heads, hidden]`
        b: Linear,
        /// `[value_heads, hidden]`
        a: Linear,
    },
}

/// Weights of gated softmax attention.
#[derive(Clone, Debug)]
pub struct AttentionWeights {
    /// `[heads · 2 · head_dim, hidden]`: for each head its query rows, then its gate rows.
    pub q_proj: Linear,
    /// `[kv_heads · head_dim, hidden]`
    pub k_proj: Linear,
    /// `[kv_heads · head_dim, hidden]`
    pub v_proj: Linear,
    /// `[head_dim]`, 1 added.
    pub q_norm: Vector,
    /// `[head_dim]`, 1 added.
    pub k_norm: Vector,
    /// `[hidden, heads · head_dim]`
    pub o_proj: Linear,
}

/// A dense feed-forward, or experts beside a shared one.
#[derive(Clone, Debug)]
#[allow(clippy::large_enum_variant)] // One a layer: a few hundred bytes beside its matrices.
pub enum FeedForward {
    /// One for all tokens.
    Dense(Mlp),
    /// A router with its experts.
    Sparse {
        /// `[experts, hidden]`
        gate: Linear,
        /// The experts.
        experts: Experts,
        /// What every token passes as well.
        shared_expert: Mlp,
        /// `[1, hidden]`: how much of it a token takes, before the sigmoid.
        shared_expert_gate: Linear,
    },
}

impl HybridWeights {
    /// Takes the tensors by their published names.
    pub fn load(c: &HybridConfig, loader: &mut Loader) -> Result<Self, LoadError> {
        let embed_tokens = loader.matrix("model.embed_tokens.weight", c.vocab_size, c.hidden_size)?;
        let layers =
            c.layer_types.iter().enumerate().map(|(i, &kind)| {
                LayerWeights::load(c, kind, c.sparse[i], &format!("model.layers.{i}"), loader)
            });
        let layers = layers.collect::<Result<_, _>>()?;
        let norm = loader.vector("model.norm.weight", c.hidden_size)?.plus_one();
        let lm_head = if c.tie_word_embeddings {
            loader.skip("lm_head.weight");
            embed_tokens.clone()
        } else {
            loader.matrix("lm_head.weight", c.vocab_size, c.hidden_size)?
        };
        let mtp = if loader.has("mtp.fc.weight") { Some(MtpWeights::load(c, loader)?) } else { None };
        Ok(Self { embed_tokens, layers, norm, lm_head, mtp })
    }

    /// Every matrix.
    pub fn matrices(&mut self) -> Vec<&mut Matrix> {
        let layers = self.layers.iter_mut().flat_map(LayerWeights::matrices);
        let mtp = self.mtp.iter_mut().flat_map(|mtp| {
            [&mut mtp.fc.weight].into_iter().chain(mtp.layers.iter_mut().flat_map(LayerWeights::matrices))
        });
        [&mut self.embed_tokens].into_iter().chain(layers).chain([&mut self.lm_head]).chain(mtp).collect()
    }
}

impl MtpWeights {
    /// Takes the tensors below `mtp.`, which stand beside the model's whatever wraps it.
    fn load(c: &HybridConfig, loader: &mut Loader) -> Result<Self, LoadError> {
        let hidden = c.hidden_size;
        let layers = (0..c.mtp_num_hidden_layers.max(1)).map(|i| {
            LayerWeights::load(c, LayerType::Full, c.moe.is_some(), &format!("mtp.layers.{i}"), loader)
        });
        let layers = layers.collect::<Result<_, _>>()?;
        let mut norm = |leaf: &str| Ok(loader.vector(&format!("mtp.{leaf}.weight"), hidden)?.plus_one());
        Ok(Self {
            pre_fc_norm_embedding: norm("pre_fc_norm_embedding")?,
            pre_fc_norm_hidden: norm("pre_fc_norm_hidden")?,
            norm: norm("norm")?,
            fc: Linear::load(loader, "mtp.fc", hidden, 2 * hidden, false)?,
            layers,
        })
    }
}

impl LayerWeights {
    /// Takes the tensors below `name`.
    fn load(
        c: &HybridConfig,
        kind: LayerType,
        sparse: bool,
        name: &str,
        loader: &mut Loader,
    ) -> Result<Self, LoadError> {
        let mixer = match kind {
            LayerType::Linear => {
                MixerWeights::Linear(DeltaWeights::load(c, &format!("{name}.linear_attn"), loader)?)
            }
            LayerType::Full => {
                MixerWeights::Full(AttentionWeights::load(c, &format!("{name}.self_attn"), loader)?)
            }
        };
        let mut norm =
            |leaf: &str| Ok(loader.vector(&format!("{name}.{leaf}.weight"), c.hidden_size)?.plus_one());
        Ok(Self {
            input_layernorm: norm("input_layernorm")?,
            post_attention_layernorm: norm("post_attention_layernorm")?,
            mixer,
            mlp: FeedForward::load(c, sparse, &format!("{name}.mlp"), loader)?,
        })
    }

    fn matrices(&mut self) -> Vec<&mut Matrix> {
        let mixer = match &mut self.mixer {
            MixerWeights::Linear(w) => match &mut w.in_proj {
                DeltaProjections::Grouped { qkvz, ba } => vec![qkvz, ba, &mut w.out_proj],
                DeltaProjections::Separate { qkv, z, b, a } => vec![qkv, z, b, a, &mut w.out_proj],
            },
            MixerWeights::Full(w) => vec![&mut w.q_proj, &mut w.k_proj, &mut w.v_proj, &mut w.o_proj],
        };
        mixer.into_iter().map(|linear| &mut linear.weight).chain(self.mlp.matrices()).collect()
    }
}

impl DeltaWeights {
    fn load(c: &HybridConfig, name: &str, loader: &mut Loader) -> Result<Self, LoadError> {
        let (hidden, heads, values) = (c.hidden_size, c.linear_num_value_heads, c.linear_value_width());
        let mut linear =
            |leaf: &str, out, inner| Linear::load(loader, &format!("{name}.{leaf}"), out, inner, false);
        let in_proj = if c.family == "qwen3_next" {
            DeltaProjections::Grouped {
                qkvz: linear("in_proj_qkvz", c.conv_channels() + values, hidden)?,
                ba: linear("in_proj_ba", 2 * heads, hidden)?,
            }
        } else {
            DeltaProjections::Separate {
                qkv: linear("in_proj_qkv", c.conv_channels(), hidden)?,
                z: linear("in_proj_z", values, hidden)?,
                b: linear("in_proj_b", heads, hidden)?,
                a: linear("in_proj_a", heads, hidden)?,
            }
        };
        let out_proj = linear("out_proj", hidden, values)?;
        let conv1d = &format!("{name}.conv1d");
        Ok(Self {
            in_proj,
            conv1d: Conv::load(loader, conv1d, c.conv_channels(), c.linear_conv_kernel_dim, false)?,
            a_log: loader.vector(&format!("{name}.A_log"), heads)?,
            dt_bias: loader.vector(&format!("{name}.dt_bias"), heads)?,
            norm: loader.vector(&format!("{name}.norm.weight"), c.linear_value_head_dim)?,
            out_proj,
        })
    }
}

impl AttentionWeights {
    fn load(c: &HybridConfig, name: &str, loader: &mut Loader) -> Result<Self, LoadError> {
        let (q, kv, hidden) = (c.q_width(), c.kv_width(), c.hidden_size);
        let mut linear = |leaf: &str, out, inner| {
            Linear::load(loader, &format!("{name}.{leaf}"), out, inner, c.attention_bias)
        };
        let q_proj = linear("q_proj", 2 * q, hidden)?;
        let k_proj = linear("k_proj", kv, hidden)?;
        let v_proj = linear("v_proj", kv, hidden)?;
        let o_proj = linear("o_proj", hidden, q)?;
        Ok(Self {
            q_proj,
            k_proj,
            v_proj,
            q_norm: loader.vector(&format!("{name}.q_norm.weight"), c.head_dim)?.plus_one(),
            k_norm: loader.vector(&format!("{name}.k_norm.weight"), c.head_dim)?.plus_one(),
            o_proj,
        })
    }
}

impl FeedForward {
    fn load(c: &HybridConfig, sparse: bool, name: &str, loader: &mut Loader) -> Result<Self, LoadError> {
        let hidden = c.hidden_size;
        let (Some(moe), true) = (&c.moe, sparse) else {
            return Ok(FeedForward::Dense(Mlp::load(loader, name, hidden, c.intermediate_size, false)?));
        };
        let (count, shared) = (moe.router.num_experts, moe.shared_expert_intermediate_size);
        let (experts, one) = (format!("{name}.experts"), format!("{name}.shared_expert"));
        Ok(FeedForward::Sparse {
            gate: Linear::load(loader, &format!("{name}.gate"), count, hidden, false)?,
            experts: Experts::load(loader, &experts, count, hidden, moe.moe_intermediate_size)?,
            shared_expert: Mlp::load(loader, &one, hidden, shared, false)?,
            shared_expert_gate: Linear::load(loader, &format!("{one}_gate"), 1, hidden, false)?,
        })
    }

    fn matrices(&mut self) -> Vec<&mut Matrix> {
        match self {
            FeedForward::Dense(mlp) => mlp.matrices().into(),
            FeedForward::Sparse { gate, experts, shared_expert, shared_expert_gate } => {
                let around = [&mut gate.weight, &mut shared_expert_gate.weight];
                around.into_iter().chain(experts.matrices()).chain(shared_expert.matrices()).collect()
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Config;
    use crate::rope::Scaling;
    use serde_json::{Value, json};

    fn parse(value: &Value) -> Result<HybridConfig, ConfigError> {
        match Config::parse(value.as_object().unwrap(), &[])?.config {
            Config::Hybrid(config) => Ok(config),
            other => panic!("{other:?}"),
        }
    }

    /// The keys of a published checkpoint: a wrapper, and fewer sizes.
    fn published() -> Value {
        json!({
            "architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5",
            "image_token_id": 7, "video_token_id": 8, "vision_start_token_id": 5, "vision_end_token_id": 6,
            "tie_word_embeddings": false, "vision_config": {"depth": 2},
            "text_config": {
                "attention_bias": false, "attention_dropout": 0.0, "attn_output_gate": true, "dtype": "bfloat16",
                "full_attention_interval": 3, "head_dim": 16, "hidden_act": "silu", "hidden_size": 32,
                "intermediate_size": 36, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 8,
                "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_value_head_dim": 12,
                "mamba_ssm_dtype": "float32", "max_position_embeddings": 128, "model_type": "qwen3_5_text",
                "mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": false, "num_attention_heads": 4,
                "num_hidden_layers": 6, "num_key_value_heads": 2, "rms_norm_eps": 1e-6, "vocab_size": 97,
                "rope_parameters": {"mrope_interleaved": true, "mrope_section": [11, 11, 10],
                    "partial_rotary_factor": 0.25, "rope_theta": 1e7, "rope_type": "default"}
            }
        })
    }

    #[test]
    fn a_wrapped_config_with_an_interval() {
        let config = parse(&published()).unwrap();
        use LayerType::{Full, Linear};
        assert_eq!(config.layer_types, [Linear, Linear, Full, Linear, Linear, Full]);
        assert_eq!((config.rope.rotary_dim, &config.rope.scaling), (4, &Scaling::Default));
        assert!(!config.tie_word_embeddings);
        assert_eq!(config.mtp_num_hidden_layers, 1);
        // q and k of 2 · 8, v of 4 · 12
        assert_eq!((config.conv_channels(), config.linear_group()), (80, 2));
    }

    // The keys of Qwen3-Next-80B-A3B. Rotary width: a quarter of 256; channels: q and k of 16 · 128, v of 32 · 128.
    #[test]
    fn the_published_config_of_qwen3_next() {
        let config = parse(&json!({
            "architectures": ["Qwen3NextForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
            "bos_token_id": 151643, "decoder_sparse_step": 1, "eos_token_id": 151645, "full_attention_interval": 4,
            "head_dim": 256, "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02,
            "intermediate_size": 5120, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128,
            "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_value_head_dim": 128,
            "max_position_embeddings": 262144, "mlp_only_layers": [], "model_type": "qwen3_next",
            "moe_intermediate_size": 512, "norm_topk_prob": true, "num_attention_heads": 16, "num_experts": 512,
            "num_experts_per_tok": 10, "num_hidden_layers": 48, "num_key_value_heads": 2,
            "output_router_logits": false, "partial_rotary_factor": 0.25, "rms_norm_eps": 1e-6, "rope_scaling": null,
            "rope_theta": 10000000, "router_aux_loss_coef": 0.001, "shared_expert_intermediate_size": 512,
            "tie_word_embeddings": false, "torch_dtype": "bfloat16", "transformers_version": "4.57.0.dev0",
            "use_cache": true, "use_sliding_window": false, "vocab_size": 151936,
        }))
        .unwrap();
        assert_eq!(config.layer_types.iter().filter(|kind| **kind == LayerType::Full).count(), 12);
        assert_eq!(config.layer_types[3], LayerType::Full);
        assert_eq!((config.rope.rotary_dim, config.conv_channels(), config.linear_group()), (64, 8192, 2));
    }

    /// qwen3_5_moe as published: the wrapper of qwen3_5, experts in the place of the feed-forward.
    #[test]
    fn the_published_config_of_qwen3_5_moe() {
        let mut config = published();
        config["model_type"] = json!("qwen3_5_moe");
        config["architectures"] = json!(["Qwen3_5MoeForConditionalGeneration"]);
        let text = config["text_config"].as_object_mut().unwrap();
        text.remove("intermediate_size");
        text.extend(
            json!({"model_type": "qwen3_5_moe_text", "moe_intermediate_size": 24, "num_experts": 8,
                "num_experts_per_tok": 2, "shared_expert_intermediate_size": 24, "router_aux_loss_coef": 0.001,
                "output_router_logits": false})
            .as_object()
            .unwrap()
            .clone(),
        );
        let config = parse(&config).unwrap();
        assert_eq!(config.layer_types.len(), 6);
        assert_eq!((config.rope.rotary_dim, config.conv_channels()), (4, 80));
    }

    #[test]
    fn settings_that_change_the_mathematics_are_refused() {
        for (key, value) in [
            ("attn_output_gate", json!(false)),
            ("mamba_ssm_dtype", json!("bfloat16")),
            ("mtp_use_dedicated_embeddings", json!(true)),
            ("linear_num_key_heads", json!(3)),
            ("full_attention_interval", json!(0)),
            ("hidden_act", json!("gelu")),
        ] {
            let mut config = published();
            config["text_config"][key] = value;
            let error = parse(&config).unwrap_err().to_string();
            assert!(error.contains(key), "{key}: {error}");
        }
    }
}
