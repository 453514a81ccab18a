//! Mistakes of a matrix product: layouts, strides, tails, rows of a launch.

use super::{Apply, Eval, History, Mutant};
use ndarray::Axis;
use reference::{Call, Tensor};
use spec::families::Linear;
use spec::{Matrix, Site};

/// The catalogue's linear and launch mutants.
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
        "rows-first-only",
        "copies",
        "every row of the launch is a copy of row 0",
        "two tokens or more",
        first_row_copied,
    ),
    mutant("rows-first-only", "zero", "rows from 1 on are zero", "two tokens or more", first_row_only),
    mutant("rows-beyond-tile", "", "rows from 16 on are zero", "more than 16 tokens", beyond_tile),
    mutant("rows-permuted", "", "neighbouring output rows are exchanged", "two tokens or more", permuted),
];

const fn mutant(
    id: &'static str,
    variant: &'static str,
    formula: &'static str,
    needs: &'static str,
    apply: Apply,
) -> Mutant {
    Mutant { id, variant, formula, needs, apply }
}

fn operands<'a>(call: &Call<'a, Tensor>) -> Option<(&'a Tensor, &'a Linear)> {
    match call {
        Call::Linear { x, w } => Some((x, w)),
        _ => None,
    }
}

/// The product with another weight of the same shape: `w'[o, i] = element(flat, o, i)`.
fn with_weight(
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
    let (x, w) = operands(call)?;
    w.bias.as_ref()?;
    Some(eval(&Call::Linear { x, w: &Linear { weight: w.weight.clone(), bias: None } }))
}

/// The product over the inputs that `keep` names.
fn with_inputs(call: &Call<Tensor>, eval: &mut Eval, keep: impl Fn(usize) -> f32) -> Option<Tensor> {
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

/// The honest product, then its rows changed.
fn with_rows(
    call: &Call<Tensor>,
    eval: &mut Eval,
    least: usize,
    change: impl Fn(&Tensor, &mut Tensor),
) -> Option<Tensor> {
    let (x, _) = operands(call)?;
    if x.shape()[0] < least {
        return None;
    }
    let honest = eval(call);
    let mut y = honest.clone();
    change(&honest, &mut y);
    Some(y)
}

fn first_row_copied(call: &Call<Tensor>, _: Site, _: &History, eval: &mut Eval) -> Option<Tensor> {
    with_rows(call, eval, 2, |honest, y| {
        for mut row in y.axis_iter_mut(Axis(0)) {
            row.assign(&honest.index_axis(Axis(0), 0));
        }
    })
}

fn first_row_only(call: &Call<Tensor>, _: Site, _: &History, eval: &mut Eval) -> Option<Tensor> {
    with_rows(call, eval, 2, |_, y| y.axis_iter_mut(Axis(0)).skip(1).for_each(|mut row| row.fill(0.0)))
}

fn beyond_tile(call: &Call<Tensor>, _: Site, _: &History, eval: &mut Eval) -> Option<Tensor> {
    with_rows(call, eval, 17, |_, y| y.axis_iter_mut(Axis(0)).skip(16).for_each(|mut row| row.fill(0.0)))
}

fn permuted(call: &Call<Tensor>, _: Site, _: &History, eval: &mut Eval) -> Option<Tensor> {
    with_rows(call, eval, 2, |honest, y| {
        let tokens = honest.shape()[0];
        for t in 0..tokens / 2 * 2 {
            y.index_axis_mut(Axis(0), t).assign(&honest.index_axis(Axis(0), t ^ 1));
        }
    })
}
