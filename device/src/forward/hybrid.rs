//! Hybrids of the gated delta rule and gated softmax attention: qwen3_next, qwen3_5, qwen3_5_moe.
//!
//! ```text
//! q | k | v = silu(conv(W h))      S ← e^γ S + k̂ (β (v − e^γ Sᵀk̂))ᵀ      core = Sᵀ q̂
//! mixer = W_out (norm(core) · silu(z))
//! x ← x + mixer(norm₁(x))          every fourth layer softmax attention with a gated context
//! x ← x + ffn(norm₂(x))
//! ```

use super::attention::{self, GroupedAttention, Inputs, Projections};
use super::feed_forward::FeedForward;
use super::{Program, Shape, State, blocks, saved};
use crate::DeviceError;
use crate::host::act::{add, gate};
use crate::host::conv::ConvState;
use crate::host::delta::{DeltaState, Heads, Writes, log_decay, unit_length};
use crate::host::math::{sigmoid, silu};
use crate::host::norm::rms_norm;
use crate::launcher::Source;
use crate::pass::Pass;
use crate::resident::{Group, Key, Role};
use spec::Matrix;
use spec::families::Activation;
use spec::families::hybrid::{DeltaProjections, DeltaWeights, HybridConfig, HybridWeights, MixerWeights};

/// Config, weights and request state.
pub(crate) struct Hybrid {
    c: HybridConfig,
    w: HybridWeights,
    attention: GroupedAttention,
    /// One a layer with a delta rule.
    states: Vec<Option<LinearState>>,
    feed_forwards: Vec<FeedForward>,
}

/// What a delta-rule layer remembers.
#[derive(Clone)]
struct LinearState {
    conv: ConvState,
    delta: DeltaState,
}

/// The projections of some rows, in the order all q, all k, all v.
struct Projected {
    qkv: Vec<f32>,
    z: Vec<f32>,
    b: Vec<f32>,
    a: Vec<f32>,
}

impl Hybrid {
    pub fn new(c: &HybridConfig, w: &HybridWeights) -> Result<Self, DeviceError> {
        let layers = w.layers.iter().map(|layer| match &layer.mixer {
            MixerWeights::Linear(_) => None,
            MixerWeights::Full(w) => Some(Projections {
                inputs: Inputs::Gated {
                    q_proj: w.q_proj.clone(),
                    k_proj: w.k_proj.clone(),
                    v_proj: w.v_proj.clone(),
                },
                q_norm: Some(w.q_norm.clone()),
                k_norm: Some(w.k_norm.clone()),
                o_proj: w.o_proj.clone(),
                window: None,
                turns: true,
                sinks: None,
            }),
        });
        let shape = attention::Shape {
            heads: c.num_attention_heads,
            kv_heads: c.num_key_value_heads,
            dim: c.head_dim,
            eps: c.rms_norm_eps,
            scale: c.attention_scale(),
        };
        let attention = GroupedAttention::new(shape, &c.rope, layers.collect())?;
        if !c.linear_num_value_heads.is_multiple_of(c.linear_num_key_heads) {
            let (keys, values) = (c.linear_num_key_heads, c.linear_num_value_heads);
            let reason = format!("{keys} key heads of the delta rule do not divide {values} value heads");
            return Err(DeviceError::Model { reason });
        }
        let heads = Heads {
            keys: c.linear_num_key_heads,
            values: c.linear_num_value_heads,
            key_dim: c.linear_key_head_dim,
            value_dim: c.linear_value_head_dim,
        };
        let states = w.layers.iter().map(|layer| match &layer.mixer {
            MixerWeights::Full(_) => None,
            MixerWeights::Linear(w) => Some(LinearState {
                conv: ConvState::new(w.conv1d.channels(), w.conv1d.kernel),
                delta: DeltaState::new(heads),
            }),
        });
        let feed_forwards = w.layers.iter().map(|layer| FeedForward::hybrid(c, &layer.mlp));
        let feed_forwards = feed_forwards.collect::<Result<_, _>>()?;
        Ok(Self { c: c.clone(), w: w.clone(), attention, states: states.collect(), feed_forwards })
    }

    /// `gdn_qkv`, `gdn_z`, `gdn_b` and `gdn_a`, out of either layout.
    fn project(
        c: &HybridConfig,
        w: &DeltaWeights,
        h: &[f32],
        pass: &mut Pass,
    ) -> Result<Projected, DeviceError> {
        let (channels, values, heads) = (c.conv_channels(), c.linear_value_width(), c.linear_num_value_heads);
        match &w.in_proj {
            DeltaProjections::Separate { .. } => {
                let [qkv, z, b, a] = pass.parts(Role::LinearIn, h)?;
                Ok(Projected { qkv, z, b, a })
            }
            DeltaProjections::Grouped { .. } => {
                let [qkvz, ba] = pass.parts(Role::LinearIn, h)?;
                // For each key head: q, k, then v and z of its value heads; b, then a of its value heads.
                let (groups, dk) = (c.linear_num_key_heads, c.linear_key_head_dim);
                let (dv, share) = (c.linear_group() * c.linear_value_head_dim, c.linear_group());
                let pick = |rows: &[f32], from: usize, width: usize| -> Vec<f32> {
                    rows.chunks_exact(rows.len() / groups)
                        .flat_map(|g| &g[from..from + width])
                        .copied()
                        .collect()
                };
                let mut p = Projected { qkv: vec![], z: vec![], b: vec![], a: vec![] };
                for row in qkvz.chunks_exact(channels + values) {
                    p.qkv.extend(pick(row, 0, dk));
                    p.qkv.extend(pick(row, dk, dk));
                    p.qkv.extend(pick(row, 2 * dk, dv));
                    p.z.extend(pick(row, 2 * dk + dv, dv));
                }
                for row in ba.chunks_exact(2 * heads) {
                    p.b.extend(pick(row, 0, share));
                    p.a.extend(pick(row, share, share));
                }
                pass.value("gdn_qkv", &[channels], &mut p.qkv);
                pass.value("gdn_z", &[values], &mut p.z);
                pass.value("gdn_b", &[heads], &mut p.b);
                pass.value("gdn_a", &[heads], &mut p.a);
                Ok(p)
            }
        }
    }

    /// From the projections to `attn_out`.
    fn delta_rule(
        c: &HybridConfig,
        w: &DeltaWeights,
        state: &mut LinearState,
        h: &[f32],
        pass: &mut Pass,
    ) -> Result<Vec<f32>, DeviceError> {
        let (key_heads, heads) = (c.linear_num_key_heads, c.linear_num_value_heads);
        let (key_dim, value_dim) = (c.linear_key_head_dim, c.linear_value_head_dim);
        let (keys, values, channels) = (c.linear_key_width(), c.linear_value_width(), c.conv_channels());
        let Projected { qkv, mut z, b, a } = Self::project(c, w, h, pass)?;

        let first = pass.chunk.start == 0;
        state.conv.open(first);
        let mut mixed = state.conv.feed(&qkv, &w.conv1d.weight, w.conv1d.bias.as_deref());
        mixed.iter_mut().for_each(|v| *v = silu(*v));
        pass.value("conv_out", &[channels], &mut mixed);
        let columns = |from: usize, width: usize| -> Vec<f32> {
            mixed.chunks_exact(channels).flat_map(|row| &row[from..from + width]).copied().collect()
        };
        let (mut q, mut k, mut v) = (columns(0, keys), columns(keys, keys), columns(2 * keys, values));
        pass.value("gdn_q", &[key_heads, key_dim], &mut q);
        pass.value("gdn_k", &[key_heads, key_dim], &mut k);
        pass.value("gdn_v", &[heads, value_dim], &mut v);
        unit_length(&mut q, key_dim, c.linear_scale() as f32);
        pass.value("gdn_q_unit", &[key_heads, key_dim], &mut q);
        unit_length(&mut k, key_dim, 1.0);
        pass.value("gdn_k_unit", &[key_heads, key_dim], &mut k);

        let mut g = log_decay(&a, &w.a_log, &w.dt_bias);
        pass.value("gdn_g", &[heads], &mut g);
        let mut beta: Vec<f32> = b.iter().map(|b| sigmoid(*b)).collect();
        pass.value("gdn_beta", &[heads], &mut beta);

        state.delta.open(first);
        let writes = Writes { k, v, g, beta };
        let mut core = match pass.launcher.switches.chunked_delta {
            true => state.delta.feed_chunked(&q, writes),
            false => state.delta.feed(&q, writes),
        };
        pass.value("gdn_core", &[heads, value_dim], &mut core);
        let mut normed = rms_norm(&core, &w.norm, c.rms_norm_eps);
        pass.value("gdn_z_heads", &[heads, value_dim], &mut z);
        pass.value("gdn_core_norm", &[heads, value_dim], &mut normed);
        gate(&mut z, &normed, Activation::Silu);
        pass.value("gdn_norm", &[heads, value_dim], &mut z);
        let [out] = pass.parts(Role::LinearOut, &z)?;
        Ok(out)
    }
}

impl Program for Hybrid {
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
        for (i, layer) in self.w.layers.iter().enumerate() {
            sources.extend(self.attention.images(i));
            if let MixerWeights::Linear(w) = &layer.mixer {
                let inputs = match &w.in_proj {
                    DeltaProjections::Grouped { qkvz, ba } => vec![("gdn_qkvz", qkvz), ("gdn_ba", ba)],
                    DeltaProjections::Separate { qkv, z, b, a } => {
                        vec![("gdn_qkv", qkv), ("gdn_z", z), ("gdn_b", b), ("gdn_a", a)]
                    }
                };
                sources.push(blocks::image(i, Role::LinearIn, Group::Attention, &inputs));
                sources.push(blocks::image(
                    i,
                    Role::LinearOut,
                    Group::Attention,
                    &[("attn_out", &w.out_proj)],
                ));
            }
            sources.extend(self.feed_forwards[i].images(i));
        }
        sources
    }

    fn table(&self) -> &Matrix {
        &self.w.embed_tokens
    }

    fn layer(&mut self, i: usize, x: &mut [f32], pass: &mut Pass) -> Result<(), DeviceError> {
        let (c, w) = (&self.c, &self.w.layers[i]);
        let (hidden, eps) = ([c.hidden_size], c.rms_norm_eps);
        let mut h = rms_norm(x, &w.input_layernorm, eps);
        pass.value("attn_norm", &hidden, &mut h);
        let mixer = match (&w.mixer, &mut self.states[i]) {
            (MixerWeights::Linear(w), Some(state)) => Self::delta_rule(c, w, state, &h, pass)?,
            _ => self.attention.run(i, &h, pass)?,
        };
        add(x, &mixer);
        pass.value("resid_mid", &hidden, x);
        let mut h = rms_norm(x, &w.post_attention_layernorm, eps);
        pass.value("mlp_norm", &hidden, &mut h);
        let mlp = self.feed_forwards[i].run(&h, Activation::Silu, pass)?;
        add(x, &mlp);
        pass.value("out", &hidden, x);
        Ok(())
    }

    fn state_taps(&self, i: usize, pass: &mut Pass) {
        self.attention.taps(i, pass);
        let Some(LinearState { conv, delta }) = &self.states[i] else { return };
        let c = &self.c;
        if pass.taps.wants("conv_state") {
            pass.taps.whole("conv_state", &[c.conv_channels(), c.linear_conv_kernel_dim], &conv.last());
        }
        let heads = [c.linear_num_value_heads, c.linear_key_head_dim, c.linear_value_head_dim];
        pass.taps.whole("gdn_state", &heads, delta.state());
    }

    fn final_norm(&self, x: &[f32]) -> Vec<f32> {
        rms_norm(x, &self.w.norm, self.c.rms_norm_eps)
    }

    fn oldest(&self, _: usize) -> usize {
        self.states.iter().flatten().map(|state| state.delta.base()).max().unwrap_or(0)
    }

    fn truncate(&mut self, positions: usize) {
        self.attention.truncate(positions);
        for LinearState { conv, delta } in self.states.iter_mut().flatten() {
            conv.truncate(positions);
            delta.truncate(positions);
        }
    }

    fn reserve(&mut self, positions: usize) {
        self.attention.reserve(positions);
    }

    fn save(&self) -> State {
        Box::new((self.attention.caches.clone(), self.states.clone()))
    }

    fn restore(&mut self, state: &State) {
        (self.attention.caches, self.states) = saved(state);
    }
}
