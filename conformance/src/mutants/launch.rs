//! Mistakes of a launch: rows, activation scales, integer sums, rounding.

use super::linear::{operands, with_inputs};
use super::{Eval, History, Mutant, flat, mutant, shaped};
use crate::contract::{Product, bf16};
use crate::contract::{code, decoded_image};
use ndarray::Axis;
use reference::{Call, Tensor};
use spec::Site;

/// The catalogue's mutants of rows, quantised products and rounding.
pub static MUTANTS: &[Mutant] = &[
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
    mutant("rows-stride", "", "row r is read back from r · (out - 1)", "two tokens or more", stride),
    mutant(
        "rows-small-m-path",
        "",
        "a launch of one row leaves the first 16 inputs out",
        "a pass of one token, and more than 16 inputs",
        one_row_path,
    ),
    mutant(
        "rows-shared-act-scale",
        "",
        "one activation scale for all rows of the launch",
        "int8 rows, two tokens or more",
        shared_scale,
    ),
    mutant(
        "rows-pad-dirty",
        "",
        "a padding row with four times the largest value sets the activation scale of the launch",
        "int8 rows",
        dirty_scale,
    ),
    mutant(
        "q-scale-granularity",
        "",
        "one weight scale for the matrix instead of one an output",
        "int8 columns",
        matrix_scale,
    ),
    mutant(
        "q-acc-width",
        "",
        "the integer sum is kept in 16 bits",
        "int8 products whose sums leave 16 bits",
        narrow_sum,
    ),
    mutant(
        "q-act-clip",
        "",
        "activations are clipped at three times their rms",
        "an activation beyond that",
        clipped,
    ),
    mutant("q-round-trunc", "trunc", "activation codes are truncated", "int8 rows", truncated),
    mutant(
        "q-round-trunc",
        "association",
        "C · (sA · sW) instead of (C · sA) · sW",
        "int8 products",
        other_association,
    ),
    mutant(
        "num-low-accumulate",
        "bf16",
        "the running sum is rounded to bf16 every 32 inputs",
        "more than 32 inputs",
        bf16_sums,
    ),
    mutant(
        "num-rounding-mode",
        "bf16-floor",
        "the result is rounded to bf16 towards minus infinity",
        "a product",
        floored,
    ),
];

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

fn stride(call: &Call<Tensor>, _: Site, _: &History, eval: &mut Eval) -> Option<Tensor> {
    let (x, w) = operands(call)?;
    let out = w.weight.out();
    if x.shape()[0] < 2 || out < 2 {
        return None;
    }
    let honest = eval(call);
    let values = flat(&honest);
    shaped(&honest, (0..values.len()).map(|n| values[n / out * (out - 1) + n % out]).collect())
}

fn one_row_path(call: &Call<Tensor>, _: Site, _: &History, eval: &mut Eval) -> Option<Tensor> {
    let (x, w) = operands(call)?;
    if x.shape()[0] != 1 || w.weight.inner() <= 16 {
        return None;
    }
    with_inputs(call, eval, |i| if i < 16 { 0.0 } else { 1.0 })
}

/// How an int8 product is computed; the default is the honest way.
struct Int8Rules {
    /// Activation scales come from the largest value of the launch, times this.
    launch_wide: Option<f32>,
    /// Weight scales come from the largest value of the matrix.
    matrix_wide: bool,
    /// The code of an activation.
    code: fn(f32) -> i8,
    /// What becomes of the sum.
    keep: fn(i64) -> i64,
    /// Sum, activation scale, weight scale.
    join: fn(f32, f32, f32) -> f32,
}

const HONEST: Int8Rules = Int8Rules {
    launch_wide: None,
    matrix_wide: false,
    code,
    keep: |sum| sum,
    join: |sum, sa, sw| (sum * sa) * sw,
};

/// The product by other rules, where the subject computes it in int8 at all.
fn int8(call: &Call<Tensor>, eval: &mut Eval, rules: &Int8Rules) -> Option<Tensor> {
    let honest = eval(call);
    if by_rules(call, &honest, &HONEST)? != honest {
        return None;
    }
    by_rules(call, &honest, rules)
}

fn by_rules(call: &Call<Tensor>, like: &Tensor, rules: &Int8Rules) -> Option<Tensor> {
    let (x, w) = operands(call)?;
    let (tokens, inner, out) = (x.shape()[0], w.weight.inner(), w.weight.out());
    let (x, weights) = (flat(x), w.weight.to_values().ok()?);
    let largest = |values: &[f32]| values.iter().fold(0f32, |m, v| m.max(v.abs()));
    let (all_x, all_w) = (largest(&x), largest(&weights));
    let mut columns = Vec::with_capacity(out);
    for weights in weights.chunks_exact(inner) {
        let most = if rules.matrix_wide { all_w } else { largest(weights) };
        let (sw, inverse) = if most < 1e-12 { (1.0, 127.0) } else { (most / 127.0, 127.0 / most) };
        columns.push((sw, weights.iter().map(|w| code(w * inverse)).collect::<Vec<i8>>()));
    }
    let mut y = Vec::with_capacity(tokens * out);
    for x in x.chunks_exact(inner) {
        let most = rules.launch_wide.map_or_else(|| largest(x), |factor| factor * all_x);
        let sa = if most == 0.0 { 1.0 } else { most / 127.0 };
        let inverse = 1.0 / sa;
        let codes: Vec<i8> = x.iter().map(|x| (rules.code)(x * inverse)).collect();
        for (o, (sw, weights)) in columns.iter().enumerate() {
            let sum: i64 = codes.iter().zip(weights).map(|(&a, &w)| i64::from(a) * i64::from(w)).sum();
            let value = (rules.join)((rules.keep)(sum) as f32, sa, *sw);
            y.push(w.bias.as_ref().map_or(value, |b| value + b[o]));
        }
    }
    shaped(like, y)
}

fn shared_scale(call: &Call<Tensor>, _: Site, _: &History, eval: &mut Eval) -> Option<Tensor> {
    if operands(call)?.0.shape()[0] < 2 {
        return None;
    }
    int8(call, eval, &Int8Rules { launch_wide: Some(1.0), ..HONEST })
}

fn dirty_scale(call: &Call<Tensor>, _: Site, _: &History, eval: &mut Eval) -> Option<Tensor> {
    int8(call, eval, &Int8Rules { launch_wide: Some(4.0), ..HONEST })
}

fn matrix_scale(call: &Call<Tensor>, _: Site, _: &History, eval: &mut Eval) -> Option<Tensor> {
    int8(call, eval, &Int8Rules { matrix_wide: true, ..HONEST })
}

fn narrow_sum(call: &Call<Tensor>, _: Site, _: &History, eval: &mut Eval) -> Option<Tensor> {
    int8(call, eval, &Int8Rules { keep: |sum| i64::from(sum as i16), ..HONEST })
}

fn truncated(call: &Call<Tensor>, _: Site, _: &History, eval: &mut Eval) -> Option<Tensor> {
    int8(call, eval, &Int8Rules { code: |v| v.trunc().clamp(-127.0, 127.0) as i8, ..HONEST })
}

fn other_association(call: &Call<Tensor>, _: Site, _: &History, eval: &mut Eval) -> Option<Tensor> {
    int8(call, eval, &Int8Rules { join: |sum, sa, sw| sum * (sa * sw), ..HONEST })
}

fn clipped(call: &Call<Tensor>, _: Site, _: &History, eval: &mut Eval) -> Option<Tensor> {
    let (x, w) = operands(call)?;
    let mean = x.iter().map(|&v| f64::from(v).powi(2)).sum::<f64>() / x.len().max(1) as f64;
    let limit = 3.0 * mean.sqrt() as f32;
    if x.iter().all(|v| v.abs() <= limit) {
        return None;
    }
    let x = x.mapv(|v| v.clamp(-limit, limit)).into_shared();
    Some(eval(&Call::Linear { x: &x, w }))
}

/// `acc ← bf16(acc + Σ over 32 inputs)` on the weights as the subject holds them.
fn bf16_sums(call: &Call<Tensor>, _: Site, _: &History, eval: &mut Eval) -> Option<Tensor> {
    let (x, w) = operands(call)?;
    let (inner, out) = (w.weight.inner(), w.weight.out());
    if inner <= 32 {
        return None;
    }
    let honest = eval(call);
    let int8 = by_rules(call, &honest, &HONEST)? == honest;
    let weights = decoded_image(&w.weight, if int8 { Product::Int8 } else { Product::F32 }).ok()?;
    let x = flat(x);
    let mut y = Vec::with_capacity(honest.len());
    for x in x.chunks_exact(inner) {
        for o in 0..out {
            let tiles = x.chunks(32).zip(weights[o * inner..][..inner].chunks(32));
            let sum = tiles.fold(0f32, |acc, (x, w)| {
                let tile: f64 = x.iter().zip(w).map(|(&x, &w)| f64::from(x) * f64::from(w)).sum();
                bf16((f64::from(acc) + tile) as f32)
            });
            y.push(w.bias.as_ref().map_or(sum, |b| sum + b[o]));
        }
    }
    shaped(&honest, y)
}

fn floored(call: &Call<Tensor>, _: Site, _: &History, eval: &mut Eval) -> Option<Tensor> {
    operands(call)?;
    let honest = eval(call);
    // Cutting the bits off goes towards zero; a negative value that loses bits goes one step on.
    let floor = |v: f32| {
        let cut = f32::from_bits(v.to_bits() & 0xFFFF_0000);
        if v < cut { f32::from_bits(cut.to_bits() + 0x1_0000) } else { cut }
    };
    Some(honest.mapv(floor).into_shared())
}
