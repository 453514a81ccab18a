//! lfm2: gated short convolutions, with attention in some layers.
//!
//! ```text
//! B | C | u = W_in h      c = conv(B · u)      mixer = W_out (C · c)
//! x ← x + mixer(norm₁(x))
//! x ← x + mlp(norm₂(x))
//! ```

use super::attention::{self, GroupedAttention, Inputs, Projections};
use super::{Program, Shape, State, blocks, saved};
use crate::DeviceError;
use crate::host::act::add;
use crate::host::conv::ConvState;
use crate::host::norm::rms_norm;
use crate::launcher::Source;
use crate::pass::Pass;
use crate::resident::{Group, Key, Role};
use spec::Matrix;
use spec::families::lfm2::{Lfm2Config, Lfm2Weights, MixerWeights};
use spec::families::{Activation, Conv};

/// Config, weights and request state.
pub(crate) struct Lfm2 {
    c: Lfm2Config,
    w: Lfm2Weights,
    attention: GroupedAttention,
    /// One a layer with a convolution.
    convs: Vec<Option<ConvState>>,
}

impl Lfm2 {
    pub fn new(c: &Lfm2Config, w: &Lfm2Weights) -> Result<Self, DeviceError> {
        let layers = w.layers.iter().map(|layer| match &layer.mixer {
            MixerWeights::Conv { .. } => None,
            MixerWeights::Full { q_proj, k_proj, v_proj, q_layernorm, k_layernorm, out_proj } => {
                Some(Projections {
                    inputs: Inputs::apart(q_proj, k_proj, v_proj),
                    q_norm: Some(q_layernorm.clone()),
                    k_norm: Some(k_layernorm.clone()),
                    o_proj: out_proj.clone(),
                    window: None,
                    turns: true,
                    sinks: None,
                })
            }
        });
        let shape = attention::Shape {
            heads: c.num_attention_heads,
            kv_heads: c.num_key_value_heads,
            dim: c.head_dim,
            eps: c.norm_eps,
            scale: c.attention_scale(),
        };
        let attention = GroupedAttention::new(shape, &c.rope, layers.collect())?;
        let convs = w.layers.iter().map(|layer| match &layer.mixer {
            MixerWeights::Conv { conv, .. } => Some(ConvState::new(conv.channels(), conv.kernel)),
            MixerWeights::Full { .. } => None,
        });
        Ok(Self { c: c.clone(), w: w.clone(), attention, convs: convs.collect() })
    }

    /// `conv_bcx` to `attn_out`.
    fn convolution(
        &mut self,
        i: usize,
        conv: &Conv,
        h: &[f32],
        pass: &mut Pass,
    ) -> Result<Vec<f32>, DeviceError> {
        let hidden = self.c.hidden_size;
        let [fused] = pass.parts(Role::ConvIn, h)?;
        let [mut gated, gate_out, values] =
            pass.cut(&fused, [("conv_b", hidden), ("conv_c", hidden), ("conv_x", hidden)]);
        gated.iter_mut().zip(&values).for_each(|(b, u)| *b *= u);
        pass.value("conv_in", &[hidden], &mut gated);
        let Some(state) = &mut self.convs[i] else { panic!("lfm2: layer {i} has no convolution") };
        state.open(pass.chunk.start == 0);
        let mut out = state.feed(&gated, &conv.weight, conv.bias.as_deref());
        pass.value("conv_out", &[hidden], &mut out);
        out.iter_mut().zip(&gate_out).for_each(|(y, c)| *y *= c);
        pass.value("conv_gated", &[hidden], &mut out);
        let [out] = pass.parts(Role::ConvOut, &out)?;
        Ok(out)
    }
}

impl Program for Lfm2 {
    fn shape(&self) -> Shape {
        Shape {
            layers: self.w.layers.len(),
            hidden: self.c.hidden_size,
            width: self.c.hidden_size,
            vocab: self.c.vocab_size,
            max_positions: self.c.max_position_embeddings,
        }
    }

    fn sources(&self) -> Vec<(Key, Source)> {
        let mut sources = vec![blocks::head(&self.w.lm_head, false)];
        for (i, w) in self.w.layers.iter().enumerate() {
            sources.extend(self.attention.images(i));
            if let MixerWeights::Conv { in_proj, out_proj, .. } = &w.mixer {
                sources.push(blocks::image(i, Role::ConvIn, Group::Attention, &[("conv_bcx", in_proj)]));
                sources.push(blocks::image(i, Role::ConvOut, Group::Attention, &[("attn_out", out_proj)]));
            }
            sources.extend(blocks::feed_forward_images(i, &w.w1, &w.w3, &w.w2));
        }
        sources
    }

    fn table(&self) -> &Matrix {
        &self.w.embed_tokens
    }

    fn layer(&mut self, i: usize, x: &mut [f32], pass: &mut Pass) -> Result<(), DeviceError> {
        let (hidden, eps) = ([self.c.hidden_size], self.c.norm_eps);
        let mut h = rms_norm(x, &self.w.layers[i].operator_norm, eps);
        pass.value("attn_norm", &hidden, &mut h);
        let mixer = match &self.w.layers[i].mixer {
            MixerWeights::Full { .. } => self.attention.run(i, &h, pass)?,
            MixerWeights::Conv { conv, .. } => {
                let conv = conv.clone();
                self.convolution(i, &conv, &h, pass)?
            }
        };
        add(x, &mixer);
        pass.value("resid_mid", &hidden, x);
        let w = &self.w.layers[i];
        let mut h = rms_norm(x, &w.ffn_norm, eps);
        pass.value("mlp_norm", &hidden, &mut h);
        let mlp = blocks::feed_forward(&h, self.c.intermediate_size, Activation::Silu, pass)?;
        add(x, &mlp);
        pass.value("out", &hidden, x);
        Ok(())
    }

    fn state_taps(&self, i: usize, pass: &mut Pass) {
        self.attention.taps(i, pass);
        if let Some(conv) = self.convs[i].as_ref().filter(|_| pass.taps.wants("conv_state")) {
            pass.taps.whole("conv_state", &[self.c.hidden_size, self.c.conv_l_cache], &conv.last());
        }
    }

    fn final_norm(&self, x: &[f32]) -> Vec<f32> {
        rms_norm(x, &self.w.embedding_norm, self.c.norm_eps)
    }

    fn oldest(&self, _: usize) -> usize {
        self.convs.iter().flatten().map(ConvState::base).max().unwrap_or(0)
    }

    fn truncate(&mut self, positions: usize) {
        self.attention.truncate(positions);
        self.convs.iter_mut().flatten().for_each(|conv| conv.truncate(positions));
    }

    fn reserve(&mut self, positions: usize) {
        self.attention.reserve(positions);
    }

    fn save(&self) -> State {
        Box::new((self.attention.caches.clone(), self.convs.clone()))
    }

    fn restore(&mut self, state: &State) {
        (self.attention.caches, self.convs) = saved(state);
    }
}
