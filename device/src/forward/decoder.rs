//! Decoders with grouped-query attention: llama, mistral, qwen2, qwen3, smollm3, granite, minicpm, phi3,
//! olmo2, and with experts qwen3_moe, glm4_moe and gpt_oss.
//!
//! ```text
//! x₀ = m_embed · E[id]
//! x ← x + m_resid · after₁(O(attention(before₁(x))))
//! x ← x + m_resid · after₂(ffn(before₂(x)))
//! logits = (norm_f(x) / d_hidden) · W_headᵀ / d_logits
//! ```
//!
//! `before` are norms in all of them but olmo2, which has those of `after` instead. The multipliers and
//! divisors are 1 but in granite and minicpm.

use super::attention::{self, GroupedAttention, Inputs, Projections};
use super::feed_forward::FeedForward;
use super::moe::{ExpertActivation, Routed};
use super::{Program, Shape, State, blocks, saved};
use crate::DeviceError;
use crate::host::act::{add, add_scaled, scale};
use crate::host::norm::rms_norm;
use crate::launcher::Source;
use crate::pass::Pass;
use crate::resident::Key;
use spec::families::decoder::{AttentionWeights, DecoderConfig, DecoderWeights, LayerConfig};
use spec::families::gpt_oss::{GptOssConfig, GptOssWeights};
use spec::families::moe_decoder::{MoeDecoderConfig, MoeDecoderWeights};
use spec::families::olmo2::Olmo2Weights;
use spec::families::phi3::Phi3Weights;
use spec::families::{Ends, Linear, Mlp};
use spec::{Matrix, Vector};

/// Config, weights and request state of a decoder.
pub(crate) struct Decoder {
    c: DecoderConfig,
    ends: Ends,
    layers: Vec<Layer>,
    attention: GroupedAttention,
}

/// What a layer has beside its attention.
struct Layer {
    /// Norms of the rows that attention and feed-forward read.
    before: [Option<Vector>; 2],
    /// Norms of what they give.
    after: [Option<Vector>; 2],
    feed_forward: FeedForward,
}

impl Decoder {
    fn with(
        c: &DecoderConfig,
        ends: Ends,
        attention: Vec<Projections>,
        layers: Vec<Layer>,
    ) -> Result<Self, DeviceError> {
        let shape = attention::Shape {
            heads: c.num_attention_heads,
            kv_heads: c.num_key_value_heads,
            dim: c.head_dim,
            eps: c.rms_norm_eps,
            scale: c.attention_scale(),
        };
        let attention = GroupedAttention::new(shape, &c.rope, attention.into_iter().map(Some).collect())?;
        Ok(Self { c: c.clone(), ends, layers, attention })
    }

    pub fn new(c: &DecoderConfig, w: &DecoderWeights) -> Result<Self, DeviceError> {
        let attention = w.layers.iter().enumerate().map(|(i, w)| Projections {
            q_norm: w.q_norm.clone(),
            k_norm: w.k_norm.clone(),
            ..projections(c, i, Inputs::apart(&w.q_proj, &w.k_proj, &w.v_proj), &w.o_proj)
        });
        let layers = w.layers.iter().map(|w| Layer {
            before: [Some(w.input_layernorm.clone()), Some(w.post_attention_layernorm.clone())],
            after: [None, None],
            feed_forward: FeedForward::Dense(Mlp {
                gate_proj: w.gate_proj.clone(),
                up_proj: w.up_proj.clone(),
                down_proj: w.down_proj.clone(),
            }),
        });
        let (embed_tokens, norm, lm_head) = (w.embed_tokens.clone(), w.norm.clone(), w.lm_head.clone());
        Self::with(c, Ends { embed_tokens, norm, lm_head }, attention.collect(), layers.collect())
    }

    pub fn phi3(c: &DecoderConfig, w: &Phi3Weights) -> Result<Self, DeviceError> {
        let attention = w
            .layers
            .iter()
            .enumerate()
            .map(|(i, w)| projections(c, i, Inputs::Fused { qkv_proj: w.qkv_proj.clone() }, &w.o_proj));
        let layers = w.layers.iter().map(|w| Layer {
            before: [Some(w.input_layernorm.clone()), Some(w.post_attention_layernorm.clone())],
            after: [None, None],
            feed_forward: FeedForward::Fused {
                gate_up_proj: w.gate_up_proj.clone(),
                down_proj: w.down_proj.clone(),
            },
        });
        Self::with(c, w.ends.clone(), attention.collect(), layers.collect())
    }

    pub fn olmo2(c: &DecoderConfig, w: &Olmo2Weights) -> Result<Self, DeviceError> {
        let layers = w.layers.iter().map(|w| Layer {
            before: [None, None],
            after: [Some(w.post_attention_layernorm.clone()), Some(w.post_feedforward_layernorm.clone())],
            feed_forward: FeedForward::Dense(w.mlp.clone()),
        });
        let attention = w.layers.iter().enumerate().map(|(i, w)| apart(c, i, &w.attention));
        Self::with(c, w.ends.clone(), attention.collect(), layers.collect())
    }

    pub fn moe(c: &MoeDecoderConfig, w: &MoeDecoderWeights) -> Result<Self, DeviceError> {
        let layers = w.layers.iter().map(|w| {
            Ok(Layer {
                before: [Some(w.input_layernorm.clone()), Some(w.post_attention_layernorm.clone())],
                after: [None, None],
                feed_forward: FeedForward::new(&w.mlp, &c.router, c.decoder.activation)?,
            })
        });
        let layers = layers.collect::<Result<_, DeviceError>>()?;
        let attention = w.layers.iter().enumerate().map(|(i, w)| apart(&c.decoder, i, &w.attention));
        Self::with(&c.decoder, w.ends.clone(), attention.collect(), layers)
    }

    pub fn gpt_oss(c: &GptOssConfig, w: &GptOssWeights) -> Result<Self, DeviceError> {
        let activation =
            ExpertActivation::Clamped { alpha: c.swiglu_alpha as f32, limit: c.swiglu_limit as f32 };
        let layers = w.layers.iter().map(|w| {
            let routed = Routed::new(&c.router, &w.router, None, &w.experts, activation)?;
            Ok(Layer {
                before: [Some(w.input_layernorm.clone()), Some(w.post_attention_layernorm.clone())],
                after: [None, None],
                feed_forward: FeedForward::Experts { routed, shared: None },
            })
        });
        let layers = layers.collect::<Result<_, DeviceError>>()?;
        let attention = w
            .layers
            .iter()
            .enumerate()
            .map(|(i, w)| Projections { sinks: Some(w.sinks.clone()), ..apart(&c.decoder, i, &w.attention) });
        Self::with(&c.decoder, w.ends.clone(), attention.collect(), layers)
    }

    fn residual(&self, x: &mut [f32], branch: &[f32]) {
        match self.c.scales.residual_multiplier {
            1.0 => add(x, branch),
            multiplier => add_scaled(x, branch, multiplier),
        }
    }
}

/// The attention of layer `i`, without norms of q and k.
fn projections(c: &DecoderConfig, i: usize, inputs: Inputs, o_proj: &Linear) -> Projections {
    let LayerConfig { window, rope } = c.layers[i];
    Projections {
        inputs,
        q_norm: None,
        k_norm: None,
        o_proj: o_proj.clone(),
        window,
        turns: rope,
        sinks: None,
    }
}

fn apart(c: &DecoderConfig, i: usize, w: &AttentionWeights) -> Projections {
    Projections {
        q_norm: w.q_norm.clone(),
        k_norm: w.k_norm.clone(),
        ..projections(c, i, Inputs::apart(&w.q_proj, &w.k_proj, &w.v_proj), &w.o_proj)
    }
}

/// `x` itself, or its norm.
fn normed(
    x: &[f32],
    norm: &Option<Vector>,
    eps: f32,
    name: &'static str,
    pass: &mut Pass,
) -> Option<Vec<f32>> {
    norm.as_ref().map(|norm| {
        let mut h = rms_norm(x, norm, eps);
        pass.value(name, &[norm.len()], &mut h);
        h
    })
}

impl Program for Decoder {
    fn shape(&self) -> Shape {
        Shape {
            layers: self.layers.len(),
            hidden: self.c.hidden_size,
            width: self.c.hidden_size,
            vocab: self.c.vocab_size,
            max_positions: self.c.max_position_embeddings,
        }
    }

    fn sources(&self) -> Vec<(Key, Source)> {
        let mut sources = vec![blocks::head(&self.ends.lm_head, self.changes_logits())];
        for (i, layer) in self.layers.iter().enumerate() {
            sources.extend(self.attention.images(i));
            sources.extend(layer.feed_forward.images(i));
        }
        sources
    }

    fn table(&self) -> &Matrix {
        &self.ends.embed_tokens
    }

    fn begin(&mut self, _: &[u32], mut rows: Vec<f32>, pass: &mut Pass) -> Result<Vec<f32>, DeviceError> {
        if let Some(multiplier) = self.c.scales.embedding_multiplier {
            scale(&mut rows, multiplier);
            pass.value("embed_scaled", &[self.c.hidden_size], &mut rows);
        }
        Ok(rows)
    }

    fn feed_scale(&self) -> f32 {
        self.c.scales.embedding_multiplier.unwrap_or(1.0)
    }

    fn layer(&mut self, i: usize, x: &mut [f32], pass: &mut Pass) -> Result<(), DeviceError> {
        let (hidden, eps) = ([self.c.hidden_size], self.c.rms_norm_eps);
        let h = normed(x, &self.layers[i].before[0], eps, "attn_norm", pass);
        let mut branch = self.attention.run(i, h.as_deref().unwrap_or(x), pass)?;
        if let Some(normed) = normed(&branch, &self.layers[i].after[0], eps, "post_attn_norm", pass) {
            branch = normed;
        }
        self.residual(x, &branch);
        pass.value("resid_mid", &hidden, x);
        let layer = &self.layers[i];
        let h = normed(x, &layer.before[1], eps, "mlp_norm", pass);
        let mut branch = layer.feed_forward.run(h.as_deref().unwrap_or(x), self.c.activation, pass)?;
        if let Some(normed) = normed(&branch, &layer.after[1], eps, "post_mlp_norm", pass) {
            branch = normed;
        }
        self.residual(x, &branch);
        pass.value("out", &hidden, x);
        Ok(())
    }

    fn state_taps(&self, i: usize, pass: &mut Pass) {
        self.attention.taps(i, pass);
    }

    fn final_norm(&self, x: &[f32]) -> Vec<f32> {
        rms_norm(x, &self.ends.norm, self.c.rms_norm_eps)
    }

    fn head_in(&self, h: &mut [f32]) -> bool {
        if let Some(divisor) = self.c.scales.hidden_divisor {
            scale(h, (1.0 / f64::from(divisor)) as f32);
        }
        self.c.scales.hidden_divisor.is_some()
    }

    fn finish_logits(&self, logits: &mut [f32]) {
        if let Some(divisor) = self.c.scales.logits_scaling {
            logits.iter_mut().for_each(|z| *z /= divisor);
        }
    }

    fn changes_logits(&self) -> bool {
        self.c.scales.logits_scaling.is_some()
    }

    fn truncate(&mut self, positions: usize) {
        self.attention.truncate(positions);
    }

    fn reserve(&mut self, positions: usize) {
        self.attention.reserve(positions);
    }

    fn save(&self) -> State {
        Box::new(self.attention.caches.clone())
    }

    fn restore(&mut self, state: &State) {
        self.attention.caches = saved(state);
    }
}
