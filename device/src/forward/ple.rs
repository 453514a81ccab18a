//! Per-layer embeddings: a second, narrow embedding of every token for each layer.
//!
//! ```text
//! token = √P · E_ple[id]                                 [layers, P]
//! context = norm(W_ctx e / √hidden)                      [layers, P], a norm for each layer's part
//! ple_i = (context_i + token_i) / √2
//! branch = norm(W_proj(act(W_gate x) · ple_i))
//! ```
//!
//! `e` is the token's embedding as the first layer receives it.

use crate::DeviceError;
use crate::host::act::{gate, scale};
use crate::host::norm::rms_norm;
use crate::launcher::{Part, Source};
use crate::pass::Pass;
use crate::resident::{Group, Key, Role};
use rayon::prelude::*;
use spec::Site;
use spec::families::Activation;
use spec::families::ple::{Ple, PleLayerWeights, PleWeights};

/// What every layer of a pass receives, `[rows, layers, P]`.
#[derive(Clone, Debug, Default)]
pub(super) struct Inputs(Vec<f32>);

/// The image outside the layers.
pub(super) fn context_image(w: &PleWeights) -> (Key, Source) {
    let part = Part::new(Site::model("ple_ctx_proj"), &w.per_layer_model_projection);
    (Key::outside(Role::PerLayerContext), Source::new(Group::PerLayer, vec![part]))
}

/// The images of layer `i`.
pub(super) fn layer_images(i: usize, w: &PleLayerWeights) -> [(Key, Source); 2] {
    use super::blocks::image;
    [
        image(i, Role::PerLayerGate, Group::PerLayer, &[("ple_gate", &w.per_layer_input_gate)]),
        image(i, Role::PerLayerProject, Group::PerLayer, &[("ple_proj", &w.per_layer_projection)]),
    ]
}

impl Inputs {
    /// Computes the inputs of all layers from rows of the table (one a token) and embedded rows.
    ///
    /// Each row depends on its own token only, so this runs once a pass, outside the layers.
    pub fn new(
        ple: &Ple,
        w: &PleWeights,
        table_rows: &[u32],
        embedded: &[f32],
        eps: f32,
        pass: &mut Pass,
    ) -> Result<Inputs, DeviceError> {
        let all = ple.layers * ple.width;
        let hidden = embedded.len() / table_rows.len();
        let table = &w.embed_tokens_per_layer;
        let mut token = vec![0.0; table_rows.len() * all];
        token.par_chunks_exact_mut(all).zip(table_rows).try_for_each(|(row, &id)| {
            table.decode(id as usize, row)?;
            scale(row, ple.embed_scale());
            Ok::<(), DeviceError>(())
        })?;
        let cost = pass.launcher.counters.of(None);
        cost.row_bytes += (token.len() * 4) as u64;
        cost.package_bytes += (table.row_bytes() * table_rows.len()) as u64;
        pass.value("ple_token", &[all], &mut token);

        let [mut context] = pass.parts(Role::PerLayerContext, embedded)?;
        scale(&mut context, (hidden as f64).powf(-0.5) as f32);
        pass.value("ple_ctx_scaled", &[all], &mut context);
        let mut inputs = rms_norm(&context, &w.per_layer_projection_norm, eps);
        pass.value("ple_ctx", &[ple.layers, ple.width], &mut inputs);
        let half = std::f32::consts::FRAC_1_SQRT_2;
        inputs.iter_mut().zip(&token).for_each(|(context, token)| *context = (*context + token) * half);
        Ok(Inputs(inputs))
    }

    /// `ple_in` of layer `i` for the rows in hand, `[rows, P]`.
    fn of_layer(&self, ple: &Ple, i: usize, pass: &Pass) -> Vec<f32> {
        let all = ple.layers * ple.width;
        let rows = self.0.chunks_exact(all).skip(pass.chunk.start).take(pass.rows());
        rows.flat_map(|row| &row[i * ple.width..][..ple.width]).copied().collect()
    }

    /// The branch of layer `i`, `ple_in` to `ple_norm`: `x` is `[rows, hidden]`.
    pub fn branch(
        &self,
        ple: &Ple,
        i: usize,
        x: &[f32],
        w: &PleLayerWeights,
        activation: Activation,
        eps: f32,
        pass: &mut Pass,
    ) -> Result<Vec<f32>, DeviceError> {
        let mut input = self.of_layer(ple, i, pass);
        pass.value("ple_in", &[ple.width], &mut input);
        let [mut act] = pass.parts(Role::PerLayerGate, x)?;
        gate(&mut act, &input, activation);
        pass.value("ple_act", &[ple.width], &mut act);
        let [projected] = pass.parts(Role::PerLayerProject, &act)?;
        let mut branch = rms_norm(&projected, &w.post_per_layer_input_norm, eps);
        pass.value("ple_norm", &[w.post_per_layer_input_norm.len()], &mut branch);
        Ok(branch)
    }
}
