//! Mistakes of routers and experts.

use super::{Eval, History, Mutant, flat, mutant, shaped};
use crate::contract::bf16;
use ndarray::Axis;
use reference::{Call, Tensor};
use spec::families::Linear;
use spec::families::moe::{Router, Scoring};
use spec::{Matrix, Site};

/// The catalogue's mutants of mixtures of experts.
pub static MUTANTS: &[Mutant] = &[
    mutant(
        "moe-softmax-after-topk",
        "",
        "softmax over the chosen logits only",
        "a softmax router over all experts",
        softmax_of_chosen,
    ),
    mutant(
        "moe-softmax-after-topk",
        "before",
        "softmax over all experts, then the choice",
        "a softmax router over the chosen",
        softmax_of_all,
    ),
    mutant(
        "moe-renorm",
        "",
        "renormalisation left out, or done where it should not be",
        "a router that has the choice",
        renormalised,
    ),
    mutant("moe-renorm", "logits", "the chosen logits themselves are the weights", "a router", raw_logits),
    mutant(
        "moe-bias-in-weights",
        "",
        "the bias of the choice also enters the weights",
        "a router with a bias for the choice",
        biased_weights,
    ),
    mutant(
        "moe-choice-bias-ignored",
        "",
        "the bias does not enter the choice",
        "a router with a bias for the choice",
        unbiased_choice,
    ),
    mutant("moe-score-function", "", "softmax for sigmoid, or sigmoid for softmax", "a router", other_score),
    mutant("moe-group-select", "ignored", "groups are ignored", "a router with groups", no_groups),
    mutant(
        "moe-group-select",
        "max",
        "a group's score is its largest and not the sum of two",
        "a router with groups",
        largest_of_group,
    ),
    mutant(
        "moe-row-mix",
        "",
        "weights are normalised across the tokens",
        "two tokens or more",
        across_tokens,
    ),
    mutant(
        "moe-router-truncated",
        "experts",
        "the last expert is never scored",
        "a token that the last expert gets",
        last_expert_unseen,
    ),
    mutant(
        "moe-router-truncated",
        "choices",
        "the last choice repeats the first",
        "two choices or more",
        one_choice_less,
    ),
    mutant(
        "moe-router-precision",
        "",
        "router logits are rounded to bf16 before they are used",
        "a router",
        rounded_logits,
    ),
    mutant(
        "moe-scaling-factor",
        "",
        "the routed scaling factor is left out",
        "a scaling factor other than 1",
        factor_missing,
    ),
    mutant(
        "moe-sorted-dispatch",
        "",
        "rows sorted by expert are not brought back",
        "two experts in use",
        sorted_rows,
    ),
    mutant(
        "moe-expert-down-transposed",
        "",
        "an expert's weight is read as [in, out]",
        "experts",
        expert_transposed,
    ),
    mutant(
        "pack-expert-slice",
        "next",
        "expert e reads the weights of expert e + 1",
        "two experts or more",
        next_expert,
    ),
    mutant(
        "pack-expert-slice",
        "innermost",
        "the expert axis is read as the innermost",
        "two experts or more",
        experts_innermost,
    ),
    mutant(
        "moe-gate-up-layout",
        "swapped",
        "experts take the gate rows for up",
        "experts",
        expert_gate_for_up,
    ),
    mutant(
        "moe-gate-up-layout",
        "interleaved",
        "rows of the fused gate and up are read as g0 u0 g1 u1",
        "experts",
        expert_interleaved,
    ),
];

fn weights_by(
    call: &Call<Tensor>,
    eval: &mut Eval,
    scoring: impl Fn(&Router) -> Option<Scoring>,
) -> Option<Tensor> {
    let Call::RouterWeights { logits, index, router } = *call else { return None };
    let changed = Router { scoring: scoring(router)?, ..*router };
    Some(eval(&Call::RouterWeights { logits, index, router: &changed }))
}

fn softmax_of_chosen(call: &Call<Tensor>, _: Site, _: &History, eval: &mut Eval) -> Option<Tensor> {
    weights_by(call, eval, |router| match router.scoring {
        Scoring::Softmax { .. } => Some(Scoring::SoftmaxOfChosen),
        _ => None,
    })
}

fn softmax_of_all(call: &Call<Tensor>, _: Site, _: &History, eval: &mut Eval) -> Option<Tensor> {
    weights_by(call, eval, |router| match router.scoring {
        Scoring::SoftmaxOfChosen => Some(Scoring::Softmax { norm_topk_prob: false }),
        _ => None,
    })
}

fn renormalised(call: &Call<Tensor>, _: Site, _: &History, eval: &mut Eval) -> Option<Tensor> {
    weights_by(call, eval, |router| match router.scoring {
        Scoring::Softmax { norm_topk_prob } => Some(Scoring::Softmax { norm_topk_prob: !norm_topk_prob }),
        Scoring::Sigmoid { n_group, topk_group, norm_topk_prob, routed_scaling_factor } => {
            let norm_topk_prob = !norm_topk_prob;
            Some(Scoring::Sigmoid { n_group, topk_group, norm_topk_prob, routed_scaling_factor })
        }
        Scoring::SoftmaxOfChosen | Scoring::Probabilities => None,
    })
}

fn raw_logits(call: &Call<Tensor>, _: Site, _: &History, _: &mut Eval) -> Option<Tensor> {
    let Call::RouterWeights { logits, index, .. } = *call else { return None };
    let (all, choices) = (logits.shape()[1], index.shape()[1]);
    let logits = flat(logits);
    let chosen = index.iter().enumerate().map(|(n, &e)| logits[n / choices * all + e as usize]);
    shaped(index, chosen.collect())
}

fn biased_weights(call: &Call<Tensor>, at: Site, history: &History, eval: &mut Eval) -> Option<Tensor> {
    let Call::RouterWeights { index, router, .. } = *call else { return None };
    let Scoring::Sigmoid { norm_topk_prob, routed_scaling_factor, .. } = router.scoring else { return None };
    let bias = history.choice_bias(at)?;
    // Scores alone, without norm and factor; then the bias, the norm and the factor.
    let plain =
        Scoring::Sigmoid { n_group: 1, topk_group: 1, norm_topk_prob: false, routed_scaling_factor: 1.0 };
    let scores = weights_by(call, eval, |_| Some(plain))?;
    let biased: Vec<f64> =
        scores.iter().zip(index).map(|(&s, &e)| f64::from(s) + f64::from(bias[e as usize])).collect();
    let choices = index.shape()[1];
    let total = |row: &[f64]| if norm_topk_prob { row.iter().sum::<f64>() + 1e-20 } else { 1.0 };
    let weights = biased.chunks_exact(choices).flat_map(|row| {
        let total = total(row);
        row.iter().map(move |b| (b / total * routed_scaling_factor) as f32)
    });
    shaped(index, weights.collect())
}

fn choice_by(
    call: &Call<Tensor>,
    eval: &mut Eval,
    change: impl Fn(&Router) -> Option<Scoring>,
) -> Option<Tensor> {
    let Call::RouterIndex { logits, router, bias } = *call else { return None };
    let changed = Router { scoring: change(router)?, ..*router };
    let honest = eval(call);
    let y = eval(&Call::RouterIndex { logits, router: &changed, bias });
    (y != honest).then_some(y)
}

fn unbiased_choice(call: &Call<Tensor>, _: Site, _: &History, eval: &mut Eval) -> Option<Tensor> {
    let Call::RouterIndex { logits, router, bias: Some(_) } = *call else { return None };
    Some(eval(&Call::RouterIndex { logits, router, bias: None }))
}

fn other_score(call: &Call<Tensor>, _: Site, _: &History, eval: &mut Eval) -> Option<Tensor> {
    weights_by(call, eval, |router| {
        Some(match router.scoring {
            Scoring::Probabilities => Scoring::Softmax { norm_topk_prob: true },
            Scoring::Sigmoid { norm_topk_prob, .. } => Scoring::Softmax { norm_topk_prob },
            Scoring::Softmax { norm_topk_prob } => {
                Scoring::Sigmoid { n_group: 1, topk_group: 1, norm_topk_prob, routed_scaling_factor: 1.0 }
            }
            Scoring::SoftmaxOfChosen => Scoring::Sigmoid {
                n_group: 1,
                topk_group: 1,
                norm_topk_prob: true,
                routed_scaling_factor: 1.0,
            },
        })
    })
}

fn no_groups(call: &Call<Tensor>, _: Site, _: &History, eval: &mut Eval) -> Option<Tensor> {
    choice_by(call, eval, |router| match router.scoring {
        Scoring::Sigmoid { n_group, topk_group, norm_topk_prob, routed_scaling_factor }
            if n_group > topk_group =>
        {
            Some(Scoring::Sigmoid { n_group: 1, topk_group: 1, norm_topk_prob, routed_scaling_factor })
        }
        _ => None,
    })
}

fn largest_of_group(call: &Call<Tensor>, _: Site, _: &History, eval: &mut Eval) -> Option<Tensor> {
    let Call::RouterIndex { logits, router, bias } = *call else { return None };
    let Scoring::Sigmoid { n_group, topk_group, .. } = router.scoring else { return None };
    if n_group <= topk_group {
        return None;
    }
    let (experts, choices) = (router.num_experts, router.num_experts_per_tok);
    let width = experts / n_group;
    let mut y = Vec::new();
    for row in flat(logits).chunks_exact(experts) {
        let score =
            |e: usize| 1.0 / (1.0 + libm::exp(-f64::from(row[e]))) + bias.map_or(0.0, |b| f64::from(b[e]));
        let best = |g: usize| (g * width..(g + 1) * width).map(score).fold(f64::NEG_INFINITY, f64::max);
        let mut groups: Vec<usize> = (0..n_group).collect();
        groups.sort_by(|&a, &b| best(b).total_cmp(&best(a)));
        let mut kept: Vec<usize> =
            groups[..topk_group].iter().flat_map(|g| g * width..(g + 1) * width).collect();
        kept.sort_by(|&a, &b| score(b).total_cmp(&score(a)).then(a.cmp(&b)));
        y.extend(kept[..choices].iter().map(|&e| e as f32));
    }
    let honest = eval(call);
    let y = shaped(&honest, y)?;
    (y != honest).then_some(y)
}

fn across_tokens(call: &Call<Tensor>, _: Site, _: &History, eval: &mut Eval) -> Option<Tensor> {
    let Call::RouterWeights { .. } = call else { return None };
    let honest = eval(call);
    let tokens = honest.shape()[0];
    if tokens < 2 {
        return None;
    }
    // Each choice's weights divided by their sum over the tokens.
    let sums = honest.sum_axis(Axis(0));
    Some((&honest / &sums).into_shared())
}

fn last_expert_unseen(call: &Call<Tensor>, _: Site, _: &History, eval: &mut Eval) -> Option<Tensor> {
    let Call::RouterIndex { logits, router, bias } = *call else { return None };
    let honest = eval(call);
    let last = router.num_experts - 1;
    if honest.iter().all(|&e| e as usize != last) || router.num_experts_per_tok > last {
        return None;
    }
    let mut unseen = logits.clone();
    unseen.index_axis_mut(Axis(1), last).fill(-1e30);
    Some(eval(&Call::RouterIndex { logits: &unseen, router, bias }))
}

fn one_choice_less(call: &Call<Tensor>, _: Site, _: &History, eval: &mut Eval) -> Option<Tensor> {
    let Call::RouterIndex { router, .. } = *call else { return None };
    let k = router.num_experts_per_tok;
    if k < 2 {
        return None;
    }
    let mut y = eval(call);
    let first = y.index_axis(Axis(1), 0).to_owned();
    y.index_axis_mut(Axis(1), k - 1).assign(&first);
    Some(y)
}

fn rounded_logits(call: &Call<Tensor>, _: Site, _: &History, eval: &mut Eval) -> Option<Tensor> {
    match *call {
        Call::RouterWeights { logits, index, router } => {
            let rounded = logits.mapv(bf16).into_shared();
            Some(eval(&Call::RouterWeights { logits: &rounded, index, router }))
        }
        _ => None,
    }
}

fn factor_missing(call: &Call<Tensor>, _: Site, _: &History, eval: &mut Eval) -> Option<Tensor> {
    weights_by(call, eval, |router| match router.scoring {
        Scoring::Sigmoid { n_group, topk_group, norm_topk_prob, routed_scaling_factor }
            if routed_scaling_factor != 1.0 =>
        {
            Some(Scoring::Sigmoid { n_group, topk_group, norm_topk_prob, routed_scaling_factor: 1.0 })
        }
        _ => None,
    })
}

fn sorted_rows(call: &Call<Tensor>, at: Site, _: &History, eval: &mut Eval) -> Option<Tensor> {
    let Call::ExpertLinear { index, .. } = *call else { return None };
    if at.name != "expert_down" {
        return None;
    }
    let (honest, ids) = (eval(call), flat(index));
    let mut order: Vec<usize> = (0..ids.len()).collect();
    order.sort_by_key(|&n| ids[n] as usize);
    let width = *honest.shape().last()?;
    let values = flat(&honest);
    let y = shaped(&honest, order.iter().flat_map(|n| values[n * width..][..width].to_vec()).collect())?;
    (y != honest).then_some(y)
}

/// The product with other experts: `weight(experts, e, row)` gives a row of expert `e`.
fn with_experts(
    call: &Call<Tensor>,
    eval: &mut Eval,
    weight: impl Fn(&[Vec<f32>], usize, usize) -> Vec<f32>,
) -> Option<Tensor> {
    let Call::ExpertLinear { x, index, experts } = *call else { return None };
    let (out, inner) = (experts[0].weight.out(), experts[0].weight.inner());
    let all = experts.iter().map(|e| e.weight.to_values().ok()).collect::<Option<Vec<_>>>()?;
    let changed: Vec<Linear> = (0..experts.len())
        .map(|e| {
            let values: Vec<f32> = (0..out).flat_map(|o| weight(&all, e, o)).collect();
            let weight = Matrix::from_values(experts[e].weight.name(), out, inner, values);
            Linear { weight, bias: experts[e].bias.clone() }
        })
        .collect();
    Some(eval(&Call::ExpertLinear { x, index, experts: &changed }))
}

fn expert_transposed(call: &Call<Tensor>, _: Site, _: &History, eval: &mut Eval) -> Option<Tensor> {
    let Call::ExpertLinear { experts, .. } = *call else { return None };
    let (out, inner) = (experts[0].weight.out(), experts[0].weight.inner());
    with_experts(call, eval, |all, e, o| (0..inner).map(|i| all[e][i * out + o]).collect())
}

fn next_expert(call: &Call<Tensor>, _: Site, _: &History, eval: &mut Eval) -> Option<Tensor> {
    let Call::ExpertLinear { x, index, experts } = *call else { return None };
    let mut experts = experts.to_vec();
    if experts.len() < 2 {
        return None;
    }
    experts.rotate_left(1);
    Some(eval(&Call::ExpertLinear { x, index, experts: &experts }))
}

fn experts_innermost(call: &Call<Tensor>, _: Site, _: &History, eval: &mut Eval) -> Option<Tensor> {
    let Call::ExpertLinear { experts, .. } = *call else { return None };
    let (count, size) = (experts.len(), experts[0].weight.out() * experts[0].weight.inner());
    let inner = experts[0].weight.inner();
    if count < 2 {
        return None;
    }
    // Element n of the flat stack [experts, out, in] read as [out, in, experts].
    with_experts(call, eval, |all, e, o| {
        let element = |i: usize| (o * inner + i) * count + e;
        (0..inner).map(|i| all[element(i) / size][element(i) % size]).collect()
    })
}

fn expert_gate_for_up(call: &Call<Tensor>, at: Site, history: &History, eval: &mut Eval) -> Option<Tensor> {
    let Call::ExpertLinear { x, index, .. } = *call else { return None };
    let gate = history.experts(at, "expert_gate").filter(|_| at.name == "expert_up")?;
    Some(eval(&Call::ExpertLinear { x, index, experts: gate }))
}

fn expert_interleaved(call: &Call<Tensor>, at: Site, history: &History, eval: &mut Eval) -> Option<Tensor> {
    let Call::ExpertLinear { experts, .. } = *call else { return None };
    let gate = history.experts(at, "expert_gate").filter(|_| at.name == "expert_up")?;
    let (out, inner) = (experts[0].weight.out(), experts[0].weight.inner());
    let gate = gate.iter().map(|e| e.weight.to_values().ok()).collect::<Option<Vec<_>>>()?;
    // Row r of up is row 2r + 1 of gate stacked on up.
    with_experts(call, eval, |up, e, o| {
        let row = 2 * o + 1;
        let (from, row) = if row < out { (&gate[e], row) } else { (&up[e], row - out) };
        from[row * inner..][..inner].to_vec()
    })
}
