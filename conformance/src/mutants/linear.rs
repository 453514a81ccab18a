//! Mistakes of a matrix product: layouts, strides, tails, roles, inputs.

use super::{Eval, History, Mutant, mutant};
use ndarray::Axis;
use reference::{Call, Tensor};
use spec::families::Linear;
use spec::{Matrix, Site};

/// The catalogue's linear mutants, and those that read another weight or another input.
pub static MUTANTS: &[Mutant] = &[
    mutant("lin-transpose-square", "", "y = x·W instead of x·Wᵀ", "a square projection", transposed),
    mutant(
        "lin-stride-reinterpret",
        "",
        "w[o, i] read at i·out + o of the flat buffer",
        "a projection that is not square",
        reinterpreted,
    ),
    mutant("lin-row-offset", "", "row o starts at o instead of o·in", "two outputs or more", row_offset),
    mutant(
        "lin-wrong-k-dim",
        "",
        "only the first `out` inputs enter, rows at a stride of `out`",
        "more inputs than outputs",
        wrong_k,
    ),
    mutant("lin-bias-dropped", "", "y = x·Wᵀ without the bias", "a projection with a bias", bias_dropped),
    mutant(
        "lin-k-tail",
        "16",
        "the last K mod 16 inputs are dropped",
        "an input width that 16 does not divide",
        k_tail::<16>,
    ),
    mutant(
        "lin-k-tail",
        "32",
        "the last K mod 32 inputs are dropped",
        "an input width that 32 does not divide",
        k_tail::<32>,
    ),
    mutant("lin-k-tail", "last", "the last input is dropped", "two inputs or more", k_last),
    mutant(
        "lin-k-accumulate-overwrite",
        "last",
        "the result is the last tile of 16 inputs alone",
        "more than 16 inputs",
        last_tile,
    ),
    mutant(
        "lin-k-accumulate-overwrite",
        "first-twice",
        "the first tile of 16 inputs is counted twice",
        "more than 16 inputs",
        first_tile_twice,
    ),
    mutant(
        "lin-fused-qkv-layout",
        "halves",
        "the rows of a fused gate and up projection are taken for up and gate",
        "a fused gate and up projection",
        halves_exchanged,
    ),
    mutant(
        "lin-fused-qkv-layout",
        "interleaved",
        "rows of a fused gate and up projection are read as g0 u0 g1 u1",
        "a fused gate and up projection",
        interleaved,
    ),
    mutant(
        "lin-fused-qkv-layout",
        "next",
        "a part of a fused row is cut out one width too late, or too early at the end",
        "a part cut out of a wider row",
        next_part,
    ),
    mutant(
        "mlp-role-mixup",
        "gate",
        "the gate projection serves as the up projection",
        "separate gate and up projections",
        gate_for_up,
    ),
    mutant(
        "mlp-role-mixup",
        "key",
        "the key projection serves as the value projection",
        "key and value projections of one shape",
        key_for_value,
    ),
    mutant(
        "mlp-stale-input",
        "unnormed",
        "the feed-forward reads the stream and not its norm",
        "a feed-forward behind a norm",
        unnormed_input,
    ),
    mutant(
        "mlp-stale-input",
        "attention",
        "the feed-forward reads what attention read",
        "a feed-forward behind attention",
        attention_input,
    ),
    mutant("head-tied-wrong", "", "the embedding table serves as the head", "a head of its own", tied_head),
    mutant(
        "head-row-index",
        "",
        "row t of the logits is that of the token before",
        "two tokens or more",
        row_before,
    ),
];

pub(super) fn operands<'a>(call: &Call<'a, Tensor>) -> Option<(&'a Tensor, &'a Linear)> {
    match call {
        Call::Linear { x, w } => Some((x, w)),
        _ => None,
    }
}

/// The product with another weight of the same shape: `w'[o, i] = element(flat, o, i)`.
pub(super) fn with_weight(
    call: &Call<Tensor>,
    eval: &mut Eval,
    element: impl Fn(&[f32], usize, usize) -> f32,
) -> Option<Tensor> {
    let (x, w) = operands(call)?;
    let (out, inner) = (w.weight.out(), w.weight.inner());
    let flat = w.weight.to_values().ok()?;
    let values = (0..out * inner).map(|n| element(&flat, n / inner, n % inner)).collect();
    let w = Linear { weight: Matrix::from_values(w.weight.name(), out, inner, values), bias: w.bias.clone() };
    Some(eval(&Call::Linear { x, w: &w }))
}

fn shape(call: &Call<Tensor>) -> Option<(usize, usize)> {
    operands(call).map(|(_, w)| (w.weight.out(), w.weight.inner()))
}

fn transposed(call: &Call<Tensor>, _: Site, _: &History, eval: &mut Eval) -> Option<Tensor> {
    let (out, inner) = shape(call)?;
    if out != inner {
        return None;
    }
    with_weight(call, eval, |flat, o, i| flat[i * inner + o])
}

fn reinterpreted(call: &Call<Tensor>, _: Site, _: &History, eval: &mut Eval) -> Option<Tensor> {
    let (out, inner) = shape(call)?;
    if out == inner || out == 1 || inner == 1 {
        return None;
    }
    with_weight(call, eval, |flat, o, i| flat[i * out + o])
}

fn row_offset(call: &Call<Tensor>, _: Site, _: &History, eval: &mut Eval) -> Option<Tensor> {
    let (out, inner) = shape(call)?;
    if out < 2 || inner < 2 {
        return None;
    }
    with_weight(call, eval, |flat, o, i| flat[(o + i) % flat.len()])
}

fn wrong_k(call: &Call<Tensor>, _: Site, _: &History, eval: &mut Eval) -> Option<Tensor> {
    let (out, inner) = shape(call)?;
    if inner <= out {
        return None;
    }
    with_weight(call, eval, |flat, o, i| if i < out { flat[o * out + i] } else { 0.0 })
}

fn bias_dropped(call: &Call<Tensor>, _: Site, _: &History, eval: &mut Eval) -> Option<Tensor> {
    if let Call::ExpertLinear { x, index, experts } = *call {
        experts[0].bias.as_ref()?;
        let bare: Vec<Linear> =
            experts.iter().map(|e| Linear { weight: e.weight.clone(), bias: None }).collect();
        return Some(eval(&Call::ExpertLinear { x, index, experts: &bare }));
    }
    let (x, w) = operands(call)?;
    w.bias.as_ref()?;
    Some(eval(&Call::Linear { x, w: &Linear { weight: w.weight.clone(), bias: None } }))
}

/// The product over the inputs that `keep` names.
pub(super) fn with_inputs(
    call: &Call<Tensor>,
    eval: &mut Eval,
    keep: impl Fn(usize) -> f32,
) -> Option<Tensor> {
    let (x, w) = operands(call)?;
    let inner = w.weight.inner();
    let mut x = x.clone();
    x.iter_mut().enumerate().for_each(|(n, x)| *x *= keep(n % inner));
    Some(eval(&Call::Linear { x: &x, w }))
}

fn k_tail<const TILE: usize>(call: &Call<Tensor>, _: Site, _: &History, eval: &mut Eval) -> Option<Tensor> {
    let (_, inner) = shape(call)?;
    if inner % TILE == 0 || inner < TILE {
        return None;
    }
    with_inputs(call, eval, |i| if i < inner / TILE * TILE { 1.0 } else { 0.0 })
}

fn k_last(call: &Call<Tensor>, _: Site, _: &History, eval: &mut Eval) -> Option<Tensor> {
    let (_, inner) = shape(call)?;
    if inner < 2 {
        return None;
    }
    with_inputs(call, eval, |i| if i + 1 < inner { 1.0 } else { 0.0 })
}

fn last_tile(call: &Call<Tensor>, _: Site, _: &History, eval: &mut Eval) -> Option<Tensor> {
    let (_, inner) = shape(call)?;
    let last = (inner - 1) / 16 * 16;
    if last == 0 {
        return None;
    }
    with_inputs(call, eval, |i| if i >= last { 1.0 } else { 0.0 })
}

fn first_tile_twice(call: &Call<Tensor>, _: Site, _: &History, eval: &mut Eval) -> Option<Tensor> {
    let (_, inner) = shape(call)?;
    if inner <= 16 {
        return None;
    }
    with_inputs(call, eval, |i| if i < 16 { 2.0 } else { 1.0 })
}

/// The same product with the rows of the weight in another order.
fn reordered(call: &Call<Tensor>, eval: &mut Eval, order: impl Fn(usize) -> usize) -> Option<Tensor> {
    let (_, inner) = shape(call)?;
    with_weight(call, eval, |flat, o, i| flat[order(o) * inner + i])
}

fn fused(call: &Call<Tensor>, at: Site) -> Option<usize> {
    (at.name == "mlp_gate_up").then(|| shape(call).map(|(out, _)| out / 2))?
}

fn halves_exchanged(call: &Call<Tensor>, at: Site, _: &History, eval: &mut Eval) -> Option<Tensor> {
    let half = fused(call, at)?;
    reordered(call, eval, |o| (o + half) % (2 * half))
}

fn interleaved(call: &Call<Tensor>, at: Site, _: &History, eval: &mut Eval) -> Option<Tensor> {
    let half = fused(call, at)?;
    reordered(call, eval, |o| if o < half { 2 * o } else { 2 * (o - half) + 1 })
}

fn next_part(call: &Call<Tensor>, _: Site, _: &History, eval: &mut Eval) -> Option<Tensor> {
    let Call::Slice { x, width, start, end } = *call else { return None };
    let part = end - start;
    let start = match start {
        _ if end + part <= width => start + part,
        _ if start >= part => start - part,
        _ => return None,
    };
    Some(eval(&Call::Slice { x, width, start, end: start + part }))
}

/// The product with the weight of another product of the layer, where the shapes agree.
fn with_role(call: &Call<Tensor>, eval: &mut Eval, other: Option<&Linear>) -> Option<Tensor> {
    let (x, w) = operands(call)?;
    let other = other?;
    if (other.weight.out(), other.weight.inner()) != (w.weight.out(), w.weight.inner()) {
        return None;
    }
    Some(eval(&Call::Linear { x, w: other }))
}

fn gate_for_up(call: &Call<Tensor>, at: Site, history: &History, eval: &mut Eval) -> Option<Tensor> {
    let gate = match at.name {
        "mlp_up" => "mlp_gate",
        "shared_up" => "shared_gate_proj",
        _ => return None,
    };
    with_role(call, eval, history.weight(at, gate))
}

fn key_for_value(call: &Call<Tensor>, at: Site, history: &History, eval: &mut Eval) -> Option<Tensor> {
    (at.name == "v_proj").then(|| with_role(call, eval, history.weight(at, "k_proj")))?
}

/// A product of the feed-forward on another input of the same shape.
fn with_input(call: &Call<Tensor>, at: Site, eval: &mut Eval, other: Option<&Tensor>) -> Option<Tensor> {
    let (x, w) = operands(call)?;
    let entry = ["mlp_gate", "mlp_up", "mlp_gate_up"].contains(&at.name);
    let other = other.filter(|other| entry && other.shape() == x.shape() && *other != x)?;
    Some(eval(&Call::Linear { x: other, w }))
}

fn unnormed_input(call: &Call<Tensor>, at: Site, history: &History, eval: &mut Eval) -> Option<Tensor> {
    history.value(at, "mlp_norm")?;
    with_input(call, at, eval, history.value(at, "resid_mid"))
}

fn attention_input(call: &Call<Tensor>, at: Site, history: &History, eval: &mut Eval) -> Option<Tensor> {
    with_input(call, at, eval, history.value(at, "attn_norm"))
}

fn head(call: &Call<Tensor>, at: Site) -> bool {
    matches!(call, Call::Linear { .. }) && ["lm_head", "logits"].contains(&at.name)
}

fn tied_head(call: &Call<Tensor>, at: Site, history: &History, eval: &mut Eval) -> Option<Tensor> {
    let (x, w) = operands(call)?;
    let table = history.table()?;
    if !head(call, at) || (table.out(), table.inner()) != (w.weight.out(), w.weight.inner()) {
        return None;
    }
    if table.to_values().ok()? == w.weight.to_values().ok()? {
        return None;
    }
    Some(eval(&Call::Linear { x, w: &Linear { weight: table.clone(), bias: None } }))
}

fn row_before(call: &Call<Tensor>, at: Site, _: &History, eval: &mut Eval) -> Option<Tensor> {
    let (x, _) = operands(call)?;
    if !head(call, at) || x.shape()[0] < 2 {
        return None;
    }
    let honest = eval(call);
    let mut y = honest.clone();
    for t in 1..honest.shape()[0] {
        y.index_axis_mut(Axis(0), t).assign(&honest.index_axis(Axis(0), t - 1));
    }
    Some(y)
}
