//! What several model programs have in common.

use crate::DeviceError;
use crate::host::act::gate_times_up;
use crate::host::cache::KvCache;
use crate::host::math::softcap;
use crate::launcher::{Part, Source};
use crate::pass::Pass;
use crate::resident::{Group, Key, Role};
use rayon::prelude::*;
use spec::families::{Activation, Linear};
use spec::{Matrix, Rope, Site};

/// The image of some projections of layer `i` that read the same rows, one below the other.
pub(super) fn image(i: usize, role: Role, group: Group, parts: &[(&'static str, &Linear)]) -> (Key, Source) {
    let parts = parts.iter().map(|(name, linear)| Part::new(Site::layer(i, name), linear)).collect();
    (Key::layer(i, role), Source::new(group, parts))
}

/// The images of a gated feed-forward.
pub(super) fn feed_forward_images(i: usize, gate: &Linear, up: &Linear, down: &Linear) -> [(Key, Source); 2] {
    [
        image(i, Role::GateUp, Group::FeedForward, &[("mlp_gate", gate), ("mlp_up", up)]),
        image(i, Role::Down, Group::FeedForward, &[("mlp_out", down)]),
    ]
}

/// `down(act(gate(h)) · up(h))`, from the normed rows to `mlp_out`.
pub(super) fn feed_forward(
    h: &[f32],
    inner: usize,
    activation: Activation,
    pass: &mut Pass,
) -> Result<Vec<f32>, DeviceError> {
    let fused = pass.fused(Role::GateUp, h)?;
    act_and_down(&fused, inner, activation, pass)
}

/// `mlp_act` and `mlp_out` of a fused product.
pub(super) fn act_and_down(
    fused: &[f32],
    inner: usize,
    activation: Activation,
    pass: &mut Pass,
) -> Result<Vec<f32>, DeviceError> {
    let mut act = gate_times_up(fused, inner, activation);
    pass.value("mlp_act", &[inner], &mut act);
    let [out] = pass.parts(Role::Down, &act)?;
    Ok(out)
}

/// The head as an image. Its product is the site `logits`, or `lm_head` where something follows.
pub(super) fn head(weights: &Matrix, changed: bool) -> (Key, Source) {
    let site = Site::model(if changed { "lm_head" } else { "logits" });
    let part = Part { site, matrix: weights.clone(), bias: None };
    (Key::outside(Role::Head), Source::new(Group::Outside, vec![part]))
}

/// `cap · tanh(z / cap)`, where there is a cap.
pub(super) fn cap_logits(logits: &mut [f32], cap: Option<f64>) {
    if let Some(cap) = cap {
        logits.par_iter_mut().with_min_len(4096).for_each(|z| *z = softcap(*z, cap as f32));
    }
}

/// Hands out a layer's keys and values, where wanted.
pub(super) fn cache_taps(cache: &KvCache, pass: &mut Pass) {
    if pass.taps.wants("k_cache") {
        pass.taps.rows("k_cache", &[cache.heads(), cache.key_dim()], &cache.keys());
    }
    if pass.taps.wants("v_cache") {
        pass.taps.rows("v_cache", &[cache.heads(), cache.value_dim()], &cache.values());
    }
}

/// Refuses heads that no group of queries divides evenly, and rotations wider than a head.
pub(super) fn check_heads(heads: usize, kv_heads: usize, rope: &Rope) -> Result<(), DeviceError> {
    let refuse = |reason| Err(DeviceError::Model { reason });
    if kv_heads == 0 || !heads.is_multiple_of(kv_heads) {
        return refuse(format!("{kv_heads} key heads do not divide {heads} query heads"));
    }
    if rope.rotary_dim > rope.head_dim || !rope.rotary_dim.is_multiple_of(2) {
        let Rope { rotary_dim, head_dim, .. } = rope;
        return refuse(format!("a rotation of {rotary_dim} values in a head of {head_dim}"));
    }
    Ok(())
}
