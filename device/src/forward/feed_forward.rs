//! The feed-forward of a layer: dense, stored fused, or a mixture of experts.

use super::blocks;
use super::moe::{Routed, Shared};
use crate::DeviceError;
use crate::launcher::Source;
use crate::pass::Pass;
use crate::resident::{Group, Key, Role};
use spec::families::hybrid::{self, HybridConfig};
use spec::families::moe::Router;
use spec::families::{Activation, Linear, Mlp, moe_decoder};

/// What follows the second norm of a layer.
#[allow(clippy::large_enum_variant)] // One a layer: a few hundred bytes beside its matrices.
pub(super) enum FeedForward {
    Dense(Mlp),
    /// Gate and up as one stored matrix.
    Fused {
        gate_up_proj: Linear,
        down_proj: Linear,
    },
    Experts {
        routed: Routed,
        shared: Option<Shared>,
    },
}

impl FeedForward {
    pub fn new(
        w: &moe_decoder::FeedForward,
        router: &Router,
        activation: Activation,
    ) -> Result<Self, DeviceError> {
        Ok(match w {
            moe_decoder::FeedForward::Dense(mlp) => FeedForward::Dense(mlp.clone()),
            moe_decoder::FeedForward::Sparse(w) => FeedForward::Experts {
                routed: Routed::new(
                    router,
                    &w.gate,
                    w.e_score_correction_bias.as_deref(),
                    &w.experts,
                    activation.into(),
                )?,
                shared: w
                    .shared_experts
                    .as_ref()
                    .map(|mlp| Shared::new(mlp, None, activation))
                    .transpose()?,
            },
        })
    }

    /// The feed-forward of a hybrid: its shared expert has a gate of its own.
    pub fn hybrid(c: &HybridConfig, w: &hybrid::FeedForward) -> Result<Self, DeviceError> {
        let activation = Activation::Silu;
        match (w, &c.moe) {
            (hybrid::FeedForward::Dense(mlp), _) => Ok(FeedForward::Dense(mlp.clone())),
            (hybrid::FeedForward::Sparse { gate, experts, shared_expert, shared_expert_gate }, Some(moe)) => {
                Ok(FeedForward::Experts {
                    routed: Routed::new(&moe.router, gate, None, experts, activation.into())?,
                    shared: Some(Shared::new(shared_expert, Some(&shared_expert_gate.weight), activation)?),
                })
            }
            _ => Err(DeviceError::Model { reason: "experts without a router in the config".into() }),
        }
    }

    pub fn images(&self, i: usize) -> Vec<(Key, Source)> {
        match self {
            FeedForward::Dense(mlp) => {
                blocks::feed_forward_images(i, &mlp.gate_proj, &mlp.up_proj, &mlp.down_proj).into()
            }
            FeedForward::Fused { gate_up_proj, down_proj } => vec![
                blocks::image(i, Role::GateUp, Group::FeedForward, &[("mlp_gate_up", gate_up_proj)]),
                blocks::image(i, Role::Down, Group::FeedForward, &[("mlp_out", down_proj)]),
            ],
            FeedForward::Experts { routed, shared } => routed
                .images(i)
                .into_iter()
                .chain(shared.iter().flat_map(|shared| shared.images(i)))
                .collect(),
        }
    }

    /// From the rows `h` to the branch: `mlp_out`, `experts_out` or `moe_out`.
    pub fn run(&self, h: &[f32], activation: Activation, pass: &mut Pass) -> Result<Vec<f32>, DeviceError> {
        match self {
            FeedForward::Dense(mlp) => blocks::feed_forward(h, mlp.gate_proj.weight.out(), activation, pass),
            FeedForward::Fused { gate_up_proj, .. } => {
                let inner = gate_up_proj.weight.out() / 2;
                let fused = pass.fused(Role::GateUp, h)?;
                pass.taps.columns("mlp_gate", &fused, 2 * inner, 0, inner);
                pass.taps.columns("mlp_up", &fused, 2 * inner, inner, inner);
                blocks::act_and_down(&fused, inner, activation, pass)
            }
            FeedForward::Experts { routed, shared } => {
                let logits = routed.logits(h, pass);
                let choice = routed.choose(&logits, "router_weights", pass);
                let mut sum = routed.run(h, &choice, pass)?;
                if let Some(shared) = shared {
                    shared.add(h, &mut sum, pass)?;
                    pass.value("moe_out", &[h.len() / pass.rows()], &mut sum);
                }
                Ok(sum)
            }
        }
    }
}
