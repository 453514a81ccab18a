//! The parts of a program that a mixture of experts adds.

use crate::ops::Ops;
use spec::families::Activation;
use spec::families::moe::{Experts, Router};
use spec::families::moe_decoder::{FeedForward, SparseMoe};
use spec::site::At;

/// The routed experts of a block, at sites `expert_gate` to `experts_out`.
///
/// ```text
/// y[t] = Σ_j weights[t, j] · down_e(act(gate_e(x[t])) · up_e(x[t]))      e = index[t, j]
/// ```
pub fn routed_experts<O: Ops + ?Sized>(
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

/// A router, its experts, and the shared expert where there is one.
///
/// ```text
/// y = Σ_chosen w_e · expert_e(x) + shared(x)
/// ```
pub fn mixture_of_experts<O: Ops + ?Sized>(
    ops: &mut O,
    at: At,
    x: &O::Tensor,
    router: &Router,
    w: &SparseMoe,
    activation: Activation,
) -> O::Tensor {
    let logits = ops.linear(at.site("router_logits"), x, &w.gate);
    let bias = w.e_score_correction_bias.as_ref();
    let index = ops.router_index(at.site("router_index"), &logits, router, bias);
    let weights = ops.router_weights(at.site("router_weights"), &logits, &index, router);
    let routed = routed_experts(ops, at, x, &index, &weights, &w.experts, activation);
    let Some(shared) = &w.shared_experts else { return routed };
    let gate = ops.linear(at.site("shared_gate_proj"), x, &shared.gate_proj);
    let up = ops.linear(at.site("shared_up"), x, &shared.up_proj);
    let act = ops.gated_act(at.site("shared_act"), &gate, &up, activation);
    let shared = ops.linear(at.site("shared_out"), &act, &shared.down_proj);
    ops.residual(at.site("moe_out"), &routed, &shared, 1.0)
}

/// The feed-forward of a layer, dense or sparse.
pub fn feed_forward<O: Ops + ?Sized>(
    ops: &mut O,
    at: At,
    x: &O::Tensor,
    router: &Router,
    w: &FeedForward,
    activation: Activation,
) -> O::Tensor {
    match w {
        FeedForward::Sparse(moe) => mixture_of_experts(ops, at, x, router, moe, activation),
        FeedForward::Dense(mlp) => {
            let gate = ops.linear(at.site("mlp_gate"), x, &mlp.gate_proj);
            let up = ops.linear(at.site("mlp_up"), x, &mlp.up_proj);
            let act = ops.gated_act(at.site("mlp_act"), &gate, &up, activation);
            ops.linear(at.site("mlp_out"), &act, &mlp.down_proj)
        }
    }
}
