//! Grouped-query attention: projections, norms, rotation, cache, context, output.

use super::blocks::{self, image};
use crate::DeviceError;
use crate::host::attention::Attention;
use crate::host::cache::KvCache;
use crate::host::math::sigmoid;
use crate::host::norm::rms_norm;
use crate::host::rope::RopeTable;
use crate::launcher::Source;
use crate::pass::Pass;
use crate::resident::{Group, Key, Role};
use spec::families::Linear;
use spec::{Rope, Vector};

/// What the attention layers of a model have in common.
#[derive(Clone, Debug)]
pub(super) struct Shape {
    pub heads: usize,
    pub kv_heads: usize,
    pub dim: usize,
    /// ε of the q and k norms.
    pub eps: f32,
    /// What scores are multiplied by.
    pub scale: f64,
}

/// One layer's attention.
#[derive(Clone, Debug)]
pub(super) struct Projections {
    pub inputs: Inputs,
    /// `[head_dim]`, or as long as the projected row where the norm spans it.
    pub q_norm: Option<Vector>,
    pub k_norm: Option<Vector>,
    pub o_proj: Linear,
    /// Keys that a row may attend to.
    pub window: Option<usize>,
    /// Whether queries and keys turn.
    pub turns: bool,
    /// One logit a head that joins the softmax without a value.
    pub sinks: Option<Vector>,
}

/// How a package stores q, k and v. The device fuses them either way.
#[derive(Clone, Debug)]
pub(super) enum Inputs {
    Apart {
        q_proj: Linear,
        k_proj: Linear,
        v_proj: Linear,
    },
    Fused {
        qkv_proj: Linear,
    },
    /// `q_proj` holds, for each head, its query rows and then the rows of a gate of the context.
    Gated {
        q_proj: Linear,
        k_proj: Linear,
        v_proj: Linear,
    },
}

impl Inputs {
    pub fn apart(q_proj: &Linear, k_proj: &Linear, v_proj: &Linear) -> Self {
        Inputs::Apart { q_proj: q_proj.clone(), k_proj: k_proj.clone(), v_proj: v_proj.clone() }
    }
}

/// The attention of a model, with a cache for each layer that has one.
#[derive(Clone, Debug)]
pub(super) struct GroupedAttention {
    shape: Shape,
    layers: Vec<Option<Projections>>,
    rope: RopeTable,
    pub caches: Vec<KvCache>,
}

impl GroupedAttention {
    /// Layers without attention of this kind are `None`.
    pub fn new(shape: Shape, rope: &Rope, layers: Vec<Option<Projections>>) -> Result<Self, DeviceError> {
        blocks::check_heads(shape.heads, shape.kv_heads, rope)?;
        let caches = vec![KvCache::new(shape.kv_heads, shape.dim, shape.dim); layers.len()];
        Ok(Self { shape, layers, rope: RopeTable::new(rope), caches })
    }

    pub fn images(&self, i: usize) -> Vec<(Key, Source)> {
        let Some(w) = &self.layers[i] else { return Vec::new() };
        let inputs = match &w.inputs {
            Inputs::Apart { q_proj, k_proj, v_proj } | Inputs::Gated { q_proj, k_proj, v_proj } => {
                let parts = [("q_proj", q_proj), ("k_proj", k_proj), ("v_proj", v_proj)];
                image(i, Role::Qkv, Group::Attention, &parts)
            }
            Inputs::Fused { qkv_proj } => image(i, Role::Qkv, Group::Attention, &[("qkv_proj", qkv_proj)]),
        };
        vec![inputs, image(i, Role::AttentionOut, Group::Attention, &[("attn_out", &w.o_proj)])]
    }

    /// From the rows `h` that the projections read to `attn_out`.
    pub fn run(&mut self, i: usize, h: &[f32], pass: &mut Pass) -> Result<Vec<f32>, DeviceError> {
        let Some(w) = &self.layers[i] else { panic!("attention: layer {i} has none") };
        let Shape { heads, kv_heads, dim, eps, scale } = self.shape;
        let mut gate = None;
        let [mut q, mut k, v] = match &w.inputs {
            Inputs::Apart { .. } => pass.parts(Role::Qkv, h)?,
            Inputs::Fused { .. } => {
                let [fused] = pass.parts(Role::Qkv, h)?;
                let kv = kv_heads * dim;
                pass.cut(&fused, [("q_proj", heads * dim), ("k_proj", kv), ("v_proj", kv)])
            }
            Inputs::Gated { .. } => {
                let [both, k, v] = pass.parts(Role::Qkv, h)?;
                let half = |which: usize| -> Vec<f32> {
                    both.chunks_exact(2 * dim).flat_map(|head| &head[which * dim..][..dim]).copied().collect()
                };
                let mut q = half(0);
                pass.value("q_split", &[heads, dim], &mut q);
                let mut logits = half(1);
                pass.value("attn_gate", &[heads, dim], &mut logits);
                gate = Some(logits);
                [q, k, v]
            }
        };
        if let (Some(q_norm), Some(k_norm)) = (&w.q_norm, &w.k_norm) {
            // A norm over the whole row is a site of rows, one over heads a site of heads.
            let axes = |heads: usize, norm: &Vector| match norm.len() == dim {
                true => vec![heads, dim],
                false => vec![norm.len()],
            };
            q = rms_norm(&q, q_norm, eps);
            pass.value("q_norm", &axes(heads, q_norm), &mut q);
            k = rms_norm(&k, k_norm, eps);
            pass.value("k_norm", &axes(kv_heads, k_norm), &mut k);
        }
        if w.turns {
            let (turned_at, length) = (pass.rope_position(i), pass.length());
            self.rope.turn_in(&mut q, heads, turned_at, length);
            pass.value("q_rope", &[heads, dim], &mut q);
            self.rope.turn_in(&mut k, kv_heads, turned_at, length);
            pass.value("k_rope", &[kv_heads, dim], &mut k);
        }
        let cache = &mut self.caches[i];
        cache.append(&k, &v);
        let attention = Attention {
            heads,
            scale: scale as f32,
            window: w.window,
            softcap: None,
            sinks: w.sinks.as_deref(),
        };
        let mut context = pass.attend(&attention, &q, cache);
        pass.value("attn_ctx", &[heads * dim], &mut context);
        if let Some(gate) = gate {
            context.iter_mut().zip(&gate).for_each(|(c, g)| *c *= sigmoid(*g));
            pass.value("attn_gated", &[heads * dim], &mut context);
        }
        let [out] = pass.parts(Role::AttentionOut, &context)?;
        Ok(out)
    }

    pub fn taps(&self, i: usize, pass: &mut Pass) {
        if self.layers[i].is_some() {
            blocks::cache_taps(&self.caches[i], pass);
        }
    }

    pub fn truncate(&mut self, positions: usize) {
        self.caches.iter_mut().for_each(|cache| cache.truncate(positions));
    }

    pub fn reserve(&mut self, positions: usize) {
        let caches = self.caches.iter_mut().zip(&self.layers).filter(|(_, layer)| layer.is_some());
        caches.for_each(|(cache, _)| cache.reserve(positions));
    }
}
