//! Per-layer embeddings: what every layer receives beside the residual stream, and the branch that it
//! makes of it.
//!
//! Source: the Gemma 3n and Gemma 4 model code; no paper states the formula.

use crate::ops::Ops;
use spec::families::Activation;
use spec::families::ple::{Ple, PleLayerWeights, PleWeights};
use spec::site::At;

/// Both halves of the per-layer inputs, for all layers at once. They depend on the tokens alone.
#[derive(Clone, Debug)]
pub struct PleInputs<T> {
    /// Scaled table rows, `[tokens, layers · width]`.
    pub token: T,
    /// The normed projection of the token's embedding, `[tokens, layers, width]`.
    pub context: T,
}

/// The inputs of all layers, from the ids and the scaled embedding rows `[tokens, hidden]`.
///
/// ```text
/// token   = √width · E_ple[id]
/// context = rms(W_ctx · embedded / √hidden) · w      for each layer's part
/// ```
pub fn ple_inputs<O: Ops + ?Sized>(
    ops: &mut O,
    ids: &[u32],
    embedded: &O::Tensor,
    hidden: usize,
    ple: &Ple,
    weights: &PleWeights,
    eps: f32,
) -> PleInputs<O::Tensor> {
    let (w, at) = (weights, At::MODEL);
    let token = ops.embed(at.site("ple_token"), ids, &w.embed_tokens_per_layer, ple.embed_scale());
    let projected = ops.linear(at.site("ple_ctx_proj"), embedded, &w.per_layer_model_projection);
    let factor = 1.0 / (hidden as f64).sqrt();
    let scaled = ops.scale(at.site("ple_ctx_scaled"), &projected, factor);
    let norm = Some(&w.per_layer_projection_norm);
    let context = ops.rms_norm(at.site("ple_ctx"), &scaled, norm, ple.width, eps);
    PleInputs { token, context }
}

/// The branch of one layer, from a row of the stream: `n(W_proj · (act(W_gate · x) · ple_in))`.
pub fn ple_branch<O: Ops + ?Sized>(
    ops: &mut O,
    at: At,
    x: &O::Tensor,
    ple_in: &O::Tensor,
    weights: &PleLayerWeights,
    activation: Activation,
    eps: f32,
) -> O::Tensor {
    let w = weights;
    let gate = ops.linear(at.site("ple_gate"), x, &w.per_layer_input_gate);
    let act = ops.gated_act(at.site("ple_act"), &gate, ple_in, activation);
    let branch = ops.linear(at.site("ple_proj"), &act, &w.per_layer_projection);
    let norm = &w.post_per_layer_input_norm;
    ops.rms_norm(at.site("ple_norm"), &branch, Some(norm), norm.len(), eps)
}
