//! Mistakes of embeddings, per-layer embeddings, scalars and the head's last steps.

use super::{Eval, History, Mutant, flat, mutant, shaped};
use crate::contract::bf16;
use reference::{Call, Tensor};
use spec::Site;

/// The catalogue's embedding, per-layer and head mutants.
pub static MUTANTS: &[Mutant] = &[
    mutant("emb-row-offset", "", "row id + 1 of the table", "an embedding", next_row),
    mutant("emb-scale-missing", "", "rows are not scaled", "a scaled embedding", unscaled_rows),
    mutant("emb-scale-twice", "", "the scale is applied twice", "a scaled embedding", scaled_twice),
    mutant(
        "emb-scale-rounding",
        "",
        "the scale is rounded to bf16",
        "a scale that bf16 does not hold",
        rounded_scale,
    ),
    mutant(
        "ple-scale-missing",
        "token",
        "rows of the per-layer table are not scaled",
        "per-layer embeddings",
        ple_rows_unscaled,
    ),
    mutant(
        "ple-scale-missing",
        "context",
        "the projection is not divided by √hidden",
        "per-layer embeddings",
        ple_context_unscaled,
    ),
    mutant(
        "ple-scale-missing",
        "norm",
        "the projection is not normed",
        "per-layer embeddings",
        ple_context_unnormed,
    ),
    mutant(
        "ple-scale-missing",
        "sum",
        "token and context are added without 1/√2",
        "per-layer embeddings",
        ple_sum_unscaled,
    ),
    mutant(
        "ple-wrong-slice",
        "next",
        "layer l receives the part of layer l + 1, the last that of the one before",
        "two layers with per-layer embeddings",
        ple_next_layer,
    ),
    mutant(
        "ple-wrong-slice",
        "transposed",
        "the token's row is read as [width, layers]",
        "two layers with per-layer embeddings",
        ple_transposed,
    ),
    mutant(
        "ple-branch-position",
        "",
        "the branch starts at the stream before the feed-forward",
        "per-layer embeddings",
        ple_too_early,
    ),
    mutant(
        "layer-scalar-branch",
        "missing",
        "the layer's scalar is left out",
        "a layer scalar other than 1",
        layer_scalar_missing,
    ),
    mutant(
        "layer-scalar-branch",
        "branch",
        "the scalar multiplies the last branch and not the stream",
        "a layer scalar other than 1",
        layer_scalar_on_branch,
    ),
    mutant("head-softcap-missing", "", "logits are not capped", "capped logits", uncapped_logits),
    mutant(
        "head-logit-scale",
        "missing",
        "the factor at the head is left out",
        "a factor at the head other than 1",
        head_unscaled,
    ),
    mutant(
        "head-logit-scale",
        "inverse",
        "the head divides where it should multiply, or the reverse",
        "a factor at the head other than 1",
        head_inverse,
    ),
];

fn next_row(call: &Call<Tensor>, _: Site, _: &History, eval: &mut Eval) -> Option<Tensor> {
    let Call::Embed { ids, table, scale } = *call else { return None };
    let ids: Vec<u32> = ids.iter().map(|id| (id + 1) % table.out() as u32).collect();
    Some(eval(&Call::Embed { ids: &ids, table, scale }))
}

/// An embedding under another scale: inside the op, or in the step behind it.
fn with_scale(call: &Call<Tensor>, at: Site, eval: &mut Eval, change: fn(f64) -> f64) -> Option<Tensor> {
    match *call {
        Call::Embed { ids, table, scale } if at.name == "embed" && scale != 1.0 => {
            let changed = change(f64::from(scale)) as f32;
            (changed != scale).then(|| eval(&Call::Embed { ids, table, scale: changed }))
        }
        Call::Scale { x, factor } if at.name == "embed_scaled" && factor != 1.0 => {
            let changed = change(factor);
            (changed != factor).then(|| eval(&Call::Scale { x, factor: changed }))
        }
        _ => None,
    }
}

fn unscaled_rows(call: &Call<Tensor>, at: Site, _: &History, eval: &mut Eval) -> Option<Tensor> {
    with_scale(call, at, eval, |_| 1.0)
}

fn scaled_twice(call: &Call<Tensor>, at: Site, _: &History, eval: &mut Eval) -> Option<Tensor> {
    with_scale(call, at, eval, |scale| scale * scale)
}

fn rounded_scale(call: &Call<Tensor>, at: Site, _: &History, eval: &mut Eval) -> Option<Tensor> {
    with_scale(call, at, eval, |scale| f64::from(bf16(scale as f32)))
}

fn ple_rows_unscaled(call: &Call<Tensor>, at: Site, _: &History, eval: &mut Eval) -> Option<Tensor> {
    match *call {
        Call::Embed { ids, table, scale } if at.name == "ple_token" && scale != 1.0 => {
            Some(eval(&Call::Embed { ids, table, scale: 1.0 }))
        }
        _ => None,
    }
}

fn ple_context_unscaled(call: &Call<Tensor>, at: Site, _: &History, _: &mut Eval) -> Option<Tensor> {
    let Call::Scale { x, .. } = *call else { return None };
    (at.name == "ple_ctx_scaled").then(|| x.clone())
}

fn ple_context_unnormed(call: &Call<Tensor>, at: Site, _: &History, eval: &mut Eval) -> Option<Tensor> {
    let Call::RmsNorm { x, .. } = *call else { return None };
    (at.name == "ple_ctx").then(|| shaped(&eval(call), flat(x)))?
}

fn ple_sum_unscaled(call: &Call<Tensor>, _: Site, _: &History, eval: &mut Eval) -> Option<Tensor> {
    let Call::PerLayerInput { .. } = call else { return None };
    Some(eval(call).mapv(|v| v * std::f32::consts::SQRT_2).into_shared())
}

fn ple_next_layer(call: &Call<Tensor>, _: Site, _: &History, eval: &mut Eval) -> Option<Tensor> {
    let Call::PerLayerInput { token, context, layer, width } = *call else { return None };
    let layers = context.shape()[1];
    let layer = if layer + 1 < layers { layer + 1 } else { layer.checked_sub(1)? };
    Some(eval(&Call::PerLayerInput { token, context, layer, width }))
}

fn ple_transposed(call: &Call<Tensor>, _: Site, _: &History, eval: &mut Eval) -> Option<Tensor> {
    let Call::PerLayerInput { token, context, layer, width } = *call else { return None };
    let layers = context.shape()[1];
    if layers < 2 {
        return None;
    }
    let before = flat(token);
    let row = layers * width;
    let read = |n: usize| before[n / row * row + n % width * layers + n % row / width];
    let token = shaped(token, (0..before.len()).map(read).collect())?;
    Some(eval(&Call::PerLayerInput { token: &token, context, layer, width }))
}

fn ple_too_early(call: &Call<Tensor>, at: Site, history: &History, eval: &mut Eval) -> Option<Tensor> {
    let Call::Linear { x, w } = *call else { return None };
    let early =
        history.value(at, "resid_mid").filter(|early| at.name == "ple_gate" && early.shape() == x.shape())?;
    Some(eval(&Call::Linear { x: early, w }))
}

/// The step that scales a layer's output.
fn layer_scalar<'a>(call: &Call<'a, Tensor>, at: Site) -> Option<(&'a Tensor, f64)> {
    match *call {
        Call::Scale { x, factor } if at.name == "out" && factor != 1.0 => Some((x, factor)),
        _ => None,
    }
}

fn layer_scalar_missing(call: &Call<Tensor>, at: Site, _: &History, _: &mut Eval) -> Option<Tensor> {
    layer_scalar(call, at).map(|(x, _)| x.clone())
}

fn layer_scalar_on_branch(call: &Call<Tensor>, at: Site, history: &History, _: &mut Eval) -> Option<Tensor> {
    let (x, factor) = layer_scalar(call, at)?;
    let last = ["ple_norm", "post_mlp_norm"].into_iter().find_map(|name| history.value(at, name))?;
    let values = x.iter().zip(last).map(|(&x, &b)| x - b + (f64::from(b) * factor) as f32);
    shaped(x, values.collect())
}

fn uncapped_logits(call: &Call<Tensor>, _: Site, _: &History, _: &mut Eval) -> Option<Tensor> {
    let Call::Softcap { x, .. } = *call else { return None };
    Some(x.clone())
}

fn with_head_factor(
    call: &Call<Tensor>,
    at: Site,
    eval: &mut Eval,
    change: fn(f64) -> f64,
) -> Option<Tensor> {
    match *call {
        Call::Scale { x, factor } if ["head_in", "logits"].contains(&at.name) && factor != 1.0 => {
            Some(eval(&Call::Scale { x, factor: change(factor) }))
        }
        _ => None,
    }
}

fn head_unscaled(call: &Call<Tensor>, at: Site, _: &History, eval: &mut Eval) -> Option<Tensor> {
    with_head_factor(call, at, eval, |_| 1.0)
}

fn head_inverse(call: &Call<Tensor>, at: Site, _: &History, eval: &mut Eval) -> Option<Tensor> {
    with_head_factor(call, at, eval, |factor| 1.0 / factor)
}
