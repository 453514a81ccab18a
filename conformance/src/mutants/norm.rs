//! Mistakes of a root-mean-square norm.

use super::{Eval, History, Mutant, flat, mutant, shaped};
use reference::{Call, Tensor};
use spec::{Site, Vector};

/// The catalogue's norm mutants.
pub static MUTANTS: &[Mutant] = &[
    mutant("norm-eps-value", "1e-5", "eps is 1e-5", "a norm with another eps", eps_value::<0>),
    mutant("norm-eps-value", "1e-6", "eps is 1e-6", "a norm with another eps", eps_value::<1>),
    mutant("norm-eps-value", "1e-12", "eps is 1e-12", "a norm with another eps", eps_value::<2>),
    mutant("norm-eps-outside-sqrt", "", "x / (sqrt(mean x²) + eps) · w", "a norm", eps_outside),
    mutant(
        "norm-plus-one-missing",
        "",
        "x / rms · (w - 1): a stored weight that wants 1 added",
        "a norm with a weight",
        plus_one_missing,
    ),
    mutant(
        "norm-plus-one-extra",
        "",
        "x / rms · (1 + w) where w is final",
        "a norm with a weight",
        plus_one_extra,
    ),
    mutant("norm-mean-subtracted", "", "(x - mean x) / std: a layer norm", "a norm", mean_subtracted),
    mutant(
        "norm-wrong-divisor",
        "padded",
        "the mean is taken over a width padded to a multiple of 64",
        "a width that 64 does not divide",
        padded_mean,
    ),
    mutant("norm-wrong-divisor", "", "the sum of squares instead of their mean", "a norm", sum_for_mean),
    mutant("norm-qk-missing", "", "the norm is not applied", "a per-head norm", missing_per_head),
    mutant(
        "norm-qk-axis",
        "",
        "the rms is taken over all heads together",
        "a per-head norm over two heads or more",
        all_heads,
    ),
    mutant("norm-final-missing", "", "the norm is not applied", "a norm of the hidden row", missing_hidden),
    mutant(
        "norm-post-missing",
        "",
        "the norm behind a branch is not applied",
        "a norm behind a branch",
        missing_behind,
    ),
    mutant(
        "attn-v-norm-missing",
        "",
        "the norm of the values is not applied",
        "a norm of the values",
        missing_on_values,
    ),
    mutant("norm-qk-axis", "per-head", "each head is normed by itself", "a norm over all heads", each_head),
    mutant(
        "norm-qk-rope-order",
        "",
        "the rotation comes before the norm",
        "a rotation behind a norm",
        rotated_first,
    ),
    mutant(
        "norm-weights-swapped",
        "",
        "the weight of another norm of the layer",
        "two norms of one width in a layer",
        other_weight,
    ),
    mutant(
        "norm-precision-placement",
        "",
        "x / rms is rounded to bf16 before the weight",
        "a norm with a weight",
        rounded_before_weight,
    ),
    mutant("norm-weight-clipped", "", "weights are clipped to 1.5", "a weight above 1.5", clipped_weight),
];

const EPS: [f32; 3] = [1e-5, 1e-6, 1e-12];

fn eps_value<const WHICH: usize>(
    call: &Call<Tensor>,
    _: Site,
    _: &History,
    eval: &mut Eval,
) -> Option<Tensor> {
    match *call {
        Call::RmsNorm { x, weight, width, eps } if eps != EPS[WHICH] => {
            Some(eval(&Call::RmsNorm { x, weight, width, eps: EPS[WHICH] }))
        }
        _ => None,
    }
}

fn with_weight(call: &Call<Tensor>, eval: &mut Eval, change: impl Fn(f32) -> f32) -> Option<Tensor> {
    let Call::RmsNorm { x, weight: Some(weight), width, eps } = *call else { return None };
    let weight = Vector::new(&weight.name, weight.iter().map(|&w| change(w)).collect::<Vec<_>>());
    Some(eval(&Call::RmsNorm { x, weight: Some(&weight), width, eps }))
}

fn plus_one_missing(call: &Call<Tensor>, _: Site, _: &History, eval: &mut Eval) -> Option<Tensor> {
    with_weight(call, eval, |w| w - 1.0)
}

fn plus_one_extra(call: &Call<Tensor>, _: Site, _: &History, eval: &mut Eval) -> Option<Tensor> {
    with_weight(call, eval, |w| w + 1.0)
}

/// Each group of `width` values scaled by `1 / rms(group)` as given, then by the weight.
fn regrouped(
    call: &Call<Tensor>,
    eval: &mut Eval,
    scale: impl Fn(&[f32], f32, &mut [f32]),
) -> Option<Tensor> {
    let Call::RmsNorm { weight, width, eps, .. } = *call else { return None };
    let mut y = eval(call);
    let Call::RmsNorm { x, .. } = *call else { return None };
    let flat: Vec<f32> = x.iter().copied().collect();
    let into = y.as_slice_mut()?;
    for (x, y) in flat.chunks_exact(width).zip(into.chunks_exact_mut(width)) {
        scale(x, eps, y);
        if let Some(weight) = weight {
            y.iter_mut().zip(weight.iter()).for_each(|(y, w)| *y *= w);
        }
    }
    Some(y)
}

fn mean_square(x: &[f32]) -> f64 {
    x.iter().map(|&v| f64::from(v).powi(2)).sum::<f64>() / x.len() as f64
}

fn scaled(x: &[f32], factor: f64, y: &mut [f32]) {
    for (y, &x) in y.iter_mut().zip(x) {
        *y = (f64::from(x) * factor) as f32;
    }
}

fn eps_outside(call: &Call<Tensor>, _: Site, _: &History, eval: &mut Eval) -> Option<Tensor> {
    regrouped(call, eval, |x, eps, y| scaled(x, 1.0 / (mean_square(x).sqrt() + f64::from(eps)), y))
}

fn sum_for_mean(call: &Call<Tensor>, _: Site, _: &History, eval: &mut Eval) -> Option<Tensor> {
    regrouped(call, eval, |x, eps, y| {
        scaled(x, 1.0 / (mean_square(x) * x.len() as f64 + f64::from(eps)).sqrt(), y);
    })
}

fn mean_subtracted(call: &Call<Tensor>, _: Site, _: &History, eval: &mut Eval) -> Option<Tensor> {
    regrouped(call, eval, |x, eps, y| {
        let mean = (x.iter().map(|&v| f64::from(v)).sum::<f64>() / x.len() as f64) as f32;
        let centred: Vec<f32> = x.iter().map(|v| v - mean).collect();
        scaled(&centred, 1.0 / (mean_square(&centred) + f64::from(eps)).sqrt(), y);
    })
}

/// Whether the norm is over heads of a row and not over the row.
fn per_head(call: &Call<Tensor>) -> Option<bool> {
    let Call::RmsNorm { x, width, .. } = call else { return None };
    Some(x.len() / x.shape()[0].max(1) > *width || x.ndim() == 3)
}

fn not_applied(call: &Call<Tensor>, eval: &mut Eval) -> Option<Tensor> {
    let Call::RmsNorm { x, .. } = call else { return None };
    let y = eval(call);
    let values: Vec<f32> = x.iter().copied().collect();
    Tensor::from_shape_vec(y.raw_dim(), values).ok()
}

fn padded_mean(call: &Call<Tensor>, _: Site, _: &History, eval: &mut Eval) -> Option<Tensor> {
    let Call::RmsNorm { width, .. } = *call else { return None };
    if width.is_multiple_of(64) {
        return None;
    }
    let padded = width.next_multiple_of(64) as f64;
    regrouped(call, eval, |x, eps, y| {
        let mean = mean_square(x) * x.len() as f64 / padded;
        scaled(x, 1.0 / (mean + f64::from(eps)).sqrt(), y);
    })
}

fn missing_behind(call: &Call<Tensor>, at: Site, _: &History, eval: &mut Eval) -> Option<Tensor> {
    let behind = ["post_attn_norm", "post_mlp_norm", "ple_norm"].contains(&at.name);
    behind.then(|| not_applied(call, eval))?
}

fn missing_on_values(call: &Call<Tensor>, at: Site, _: &History, eval: &mut Eval) -> Option<Tensor> {
    (at.name == "v_norm").then(|| not_applied(call, eval))?
}

fn each_head(call: &Call<Tensor>, at: Site, history: &History, eval: &mut Eval) -> Option<Tensor> {
    let Call::RmsNorm { x, weight, width, eps } = *call else { return None };
    // The rotary table is as wide as the turning part of a head: a head where all of it turns.
    let head = history.outside("rope.cos")?.shape()[1];
    if !["q_norm", "k_norm"].contains(&at.name) || width <= head || !width.is_multiple_of(head) {
        return None;
    }
    let honest = eval(call);
    let unit = eval(&Call::RmsNorm { x, weight: None, width: head, eps });
    let weighted = unit.iter().enumerate().map(|(n, v)| v * weight.map_or(1.0, |w| w[n % width]));
    shaped(&honest, weighted.collect())
}

fn rotated_first(call: &Call<Tensor>, at: Site, history: &History, eval: &mut Eval) -> Option<Tensor> {
    let Call::Rotate { x, cos, sin, rope } = *call else { return None };
    let (raw, normed) = match at.name {
        "q_rope" => ("q_proj", "q_norm"),
        "k_rope" => ("k_proj", "k_norm"),
        _ => return None,
    };
    let norm = history.norm(at, normed)?;
    let raw = history.value(at, raw).filter(|raw| raw.len() == x.len())?;
    let turned = eval(&Call::Rotate { x: raw, cos, sin, rope });
    let y =
        eval(&Call::RmsNorm { x: &turned, weight: norm.weight.as_ref(), width: norm.width, eps: norm.eps });
    shaped(&eval(call), flat(&y))
}

fn other_weight(call: &Call<Tensor>, at: Site, history: &History, eval: &mut Eval) -> Option<Tensor> {
    let Call::RmsNorm { x, weight: Some(weight), width, eps } = *call else { return None };
    let others = history.norms(at).filter_map(|norm| norm.weight.as_ref());
    let other = others.filter(|w| w.len() == weight.len()).find(|w| w[..] != weight[..])?;
    Some(eval(&Call::RmsNorm { x, weight: Some(other), width, eps }))
}

fn rounded_before_weight(call: &Call<Tensor>, _: Site, _: &History, eval: &mut Eval) -> Option<Tensor> {
    let Call::RmsNorm { x, weight: Some(weight), width, eps } = *call else { return None };
    let unit = eval(&Call::RmsNorm { x, weight: None, width, eps });
    let values = unit.iter().enumerate().map(|(n, &v)| crate::contract::bf16(v) * weight[n % width]);
    shaped(&unit, values.collect())
}

fn clipped_weight(call: &Call<Tensor>, _: Site, _: &History, eval: &mut Eval) -> Option<Tensor> {
    let Call::RmsNorm { weight: Some(weight), .. } = *call else { return None };
    if weight.iter().all(|w| w.abs() <= 1.5) {
        return None;
    }
    with_weight(call, eval, |w| w.clamp(-1.5, 1.5))
}

fn missing_per_head(call: &Call<Tensor>, _: Site, _: &History, eval: &mut Eval) -> Option<Tensor> {
    per_head(call)?.then(|| not_applied(call, eval))?
}

fn missing_hidden(call: &Call<Tensor>, at: Site, _: &History, eval: &mut Eval) -> Option<Tensor> {
    if ["post_attn_norm", "post_mlp_norm", "ple_norm", "ple_ctx"].contains(&at.name) {
        return None;
    }
    (!per_head(call)?).then(|| not_applied(call, eval))?
}

fn all_heads(call: &Call<Tensor>, _: Site, _: &History, eval: &mut Eval) -> Option<Tensor> {
    let Call::RmsNorm { x, weight, width, eps } = *call else { return None };
    let row = x.len() / x.shape()[0].max(1);
    if row < 2 * width {
        return None;
    }
    let mut y = eval(call);
    let flat: Vec<f32> = x.iter().copied().collect();
    let into = y.as_slice_mut()?;
    for (x, y) in flat.chunks_exact(row).zip(into.chunks_exact_mut(row)) {
        scaled(x, 1.0 / (mean_square(x) + f64::from(eps)).sqrt(), y);
        if let Some(weight) = weight {
            y.iter_mut().enumerate().for_each(|(i, y)| *y *= weight[i % width]);
        }
    }
    Some(y)
}
