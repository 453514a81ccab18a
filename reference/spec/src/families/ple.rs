//! Per-layer embeddings (Gemma 3n, Gemma 4 E): a second, narrow embedding of every token for each layer.

use super::Linear;
use crate::matrix::{Matrix, Vector};
use crate::tensors::{LoadError, Loader};

/// Sizes of per-layer embeddings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ple {
    /// Width of one layer's embedding: `hidden_size_per_layer_input`.
    pub width: usize,
    /// Number of token ids in the table: `vocab_size_per_layer_input`.
    pub vocab_size: usize,
    /// Number of layers; a row of the table is layer-major, `[layers, width]`.
    pub layers: usize,
}

impl Ple {
    /// What rows of the table are multiplied by: the f32 root of the width.
    pub fn embed_scale(&self) -> f32 {
        (self.width as f64).sqrt() as f32
    }
}

/// Weights outside the layers.
#[derive(Clone, Debug)]
pub struct PleWeights {
    /// `[vocab, layers · width]`
    pub embed_tokens_per_layer: Matrix,
    /// `[layers · width, hidden]`: of the token's own embedding.
    pub per_layer_model_projection: Linear,
    /// `[width]`: of each layer's part of that projection.
    pub per_layer_projection_norm: Vector,
}

impl PleWeights {
    /// Takes the tensors by their published names.
    pub fn load(ple: &Ple, hidden: usize, loader: &mut Loader) -> Result<Self, LoadError> {
        let all = ple.layers * ple.width;
        Ok(Self {
            embed_tokens_per_layer: loader.matrix(
                "model.embed_tokens_per_layer.weight",
                ple.vocab_size,
                all,
            )?,
            per_layer_model_projection: Linear::load(
                loader,
                "model.per_layer_model_projection",
                all,
                hidden,
                false,
            )?,
            per_layer_projection_norm: loader.vector("model.per_layer_projection_norm.weight", ple.width)?,
        })
    }

    /// Every matrix.
    pub fn matrices(&mut self) -> [&mut Matrix; 2] {
        [&mut self.embed_tokens_per_layer, &mut self.per_layer_model_projection.weight]
    }
}

/// Weights of one layer.
#[derive(Clone, Debug)]
pub struct PleLayerWeights {
    /// `[width, hidden]`
    pub per_layer_input_gate: Linear,
    /// `[hidden, width]`
    pub per_layer_projection: Linear,
    /// `[hidden]`: of the branch, before it joins the stream.
    pub post_per_layer_input_norm: Vector,
}

impl PleLayerWeights {
    /// Takes the tensors of layer `i` by their published names.
    pub fn load(ple: &Ple, hidden: usize, i: usize, loader: &mut Loader) -> Result<Self, LoadError> {
        let name = |leaf: &str| format!("model.layers.{i}.{leaf}");
        Ok(Self {
            per_layer_input_gate: Linear::load(
                loader,
                &name("per_layer_input_gate"),
                ple.width,
                hidden,
                false,
            )?,
            per_layer_projection: Linear::load(
                loader,
                &name("per_layer_projection"),
                hidden,
                ple.width,
                false,
            )?,
            post_per_layer_input_norm: loader.vector(&name("post_per_layer_input_norm.weight"), hidden)?,
        })
    }

    /// Every matrix.
    pub fn matrices(&mut self) -> [&mut Matrix; 2] {
        [&mut self.per_layer_input_gate.weight, &mut self.per_layer_projection.weight]
    }
}
