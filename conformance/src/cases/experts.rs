//! Cases of routers and experts.

use super::Suite::{Rounding, Structure};
use super::{Dims, Line, Setting, Suite, With, fill, line, normal, tensor};
use fixtures::random::SplitMix64;
use reference::Call;
use spec::families::moe::{Router, Scoring};
use spec::{Site, Vector};

pub(super) const CASES: &[Line] = &[
    line(
        "router_index/last_expert",
        "the last expert never scored",
        Structure,
        &[("tokens", 9), ("experts", 8), ("choices", 3)],
        best,
    ),
    line(
        "router_index/groups",
        "groups ignored, or scored by their largest",
        Structure,
        &[("tokens", 9), ("experts", 12), ("choices", 3)],
        grouped,
    ),
    line(
        "router_weights/softmax",
        "softmax over the chosen only",
        Rounding,
        &[("tokens", 9), ("experts", 8), ("choices", 3)],
        softmax,
    ),
    line(
        "router_weights/sigmoid",
        "the factor or the norm left out",
        Rounding,
        &[("tokens", 9), ("experts", 8), ("choices", 3)],
        sigmoid,
    ),
    line(
        "mixture/halves",
        "weights of another choice",
        Structure,
        &[("tokens", 3), ("choices", 3), ("width", 20)],
        mixture,
    ),
    line(
        "mixture/realistic",
        "a weighted sum in too few bits",
        Rounding,
        &[("tokens", 3), ("choices", 3), ("width", 64)],
        mixture,
    ),
];

/// Distinct whole logits in another order for every token; the last expert leads every third.
fn logits(tokens: usize, experts: usize) -> reference::Tensor {
    tensor(&[tokens, experts], |n| {
        let (t, e) = (n / experts, n % experts);
        if t % 3 == 0 && e == experts - 1 {
            50.0
        } else {
            ((e * 5 + t * 3) % (experts + 1)) as f32 + e as f32 / 64.0
        }
    })
}

fn best(dims: &Dims, _: Setting, _: &mut SplitMix64, with: &mut With) {
    let experts = dims.get("experts");
    let logits = logits(dims.get("tokens"), experts);
    let scoring = Scoring::Softmax { norm_topk_prob: true };
    let router =
        Router { num_experts: experts, num_experts_per_tok: dims.get("choices").min(experts), scoring };
    with(Site::layer(0, "router_index"), &Call::RouterIndex { logits: &logits, router: &router, bias: None });
}

fn sigmoid_router(experts: usize, choices: usize, n_group: usize, topk_group: usize) -> Router {
    let scoring = Scoring::Sigmoid { n_group, topk_group, norm_topk_prob: true, routed_scaling_factor: 2.5 };
    Router { num_experts: experts, num_experts_per_tok: choices, scoring }
}

fn grouped(dims: &Dims, _: Setting, random: &mut SplitMix64, with: &mut With) {
    // Four groups of experts, of which two are in.
    let experts = dims.get("experts").next_multiple_of(4).max(8);
    let logits = normal(&[dims.get("tokens"), experts], 1.5, random);
    let bias = Vector::new("bias", (0..experts).map(|e| 0.3 - 0.05 * e as f32).collect::<Vec<_>>());
    let router = sigmoid_router(experts, dims.get("choices").min(experts / 2), 4, 2);
    with(
        Site::layer(0, "router_index"),
        &Call::RouterIndex { logits: &logits, router: &router, bias: Some(&bias) },
    );
}

fn weighed(dims: &Dims, random: &mut SplitMix64, router: &Router, with: &mut With) {
    let (tokens, choices) = (dims.get("tokens"), router.num_experts_per_tok);
    let logits = normal(&[tokens, router.num_experts], 1.0, random);
    // The chosen experts, the best last: weights belong to ids and not to ranks.
    let chosen = reference::ops::router_index(&logits, router, None);
    let index = tensor(&[tokens, choices], |n| chosen[[n / choices, choices - 1 - n % choices]] as f32);
    with(Site::layer(0, "router_weights"), &Call::RouterWeights { logits: &logits, index: &index, router });
}

fn softmax(dims: &Dims, _: Setting, random: &mut SplitMix64, with: &mut With) {
    let experts = dims.get("experts");
    let scoring = Scoring::Softmax { norm_topk_prob: false };
    let router =
        Router { num_experts: experts, num_experts_per_tok: dims.get("choices").min(experts), scoring };
    weighed(dims, random, &router, with);
}

fn sigmoid(dims: &Dims, _: Setting, random: &mut SplitMix64, with: &mut With) {
    let experts = dims.get("experts");
    weighed(dims, random, &sigmoid_router(experts, dims.get("choices").min(experts), 1, 1), with);
}

fn mixture(dims: &Dims, setting: Setting, random: &mut SplitMix64, with: &mut With) {
    let (tokens, choices) = (dims.get("tokens"), dims.get("choices"));
    let y = fill(&[tokens, choices, dims.get("width")], setting, random);
    let weights = tensor(&[tokens, choices], |n| match setting.suite {
        Suite::Structure => libm::exp2f(-((n % choices) as f32)),
        Suite::Rounding => random.uniform() as f32,
    });
    with(Site::layer(0, "experts_out"), &Call::Mixture { y: &y, weights: &weights });
}
