//! The part of a program that a mixture of experts adds: what the chosen experts do.

use crate::ops::Ops;
use spec::families::Activation;
use spec::families::moe::Experts;
use spec::site::At;

/// The routed experts of a block, at sites `expert_gate` to `experts_out`.
///
/// ```text
/// y[t] = Σ_j weights[t, j] · down_e(act(gate_e(x[t])) · up_e(x[t]))      e = index[t, j]
/// ```
#[allow(dead_code)]
pub fn routed_experts<O: Ops>(
    ops: &mut O,
    at: At,
    x: &O::Tensor,
    index: &O::Tensor,
    weights: &O::Tensor,
    experts: &Experts,
    activation: Activation,
) -> O::Tensor {
    let gate = ops.expert_linear(at.site("expert_gate"), x, index, &experts.gate_proj);
    let up = ops.expert_linear(at.site("expert_up"), x, index, &experts.up_proj);
    let act = ops.gated_act(at.site("expert_act"), &gate, &up, activation);
    let y = ops.expert_linear(at.site("expert_down"), &act, index, &experts.down_proj);
    ops.mixture(at.site("experts_out"), &y, weights)
}
