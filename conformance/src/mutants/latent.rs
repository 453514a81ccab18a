//! Mistakes of latent attention, of parallel streams, and of routers with norms of their own.

use super::{Eval, History, Mutant, flat, mutant, shaped};
use reference::{Call, Tensor};
use spec::Site;

/// The catalogue's mutants of latent attention, and those of Gemma 3n and Gemma 4's own parts.
pub static MUTANTS: &[Mutant] = &[
    mutant(
        "mla-mscale",
        "",
        "the scale is 1/√(nope + rope), without the square of the magnitude",
        LATENT,
        no_mscale,
    ),
    mutant("mla-scale-absorbed", "", "the scale is 1/√(lora + rope)", LATENT, absorbed_scale),
    mutant("mla-latent-norm-missing", "", "the latent is not normed", LATENT, latent_not_normed),
    mutant(
        "mla-latent-norm-missing",
        "wide",
        "the norm also runs over the part that turns",
        LATENT,
        wide_norm,
    ),
    mutant("mla-split-order", "", "the parts of a row stand in the other order", LATENT, other_order),
    mutant("mla-kpe-view", "", "the shared rotary key reaches the first head only", LATENT, first_head_only),
    mutant(
        "altup-coefs-transposed",
        "",
        "coefficient [s, o] for [o, s]",
        "parallel streams",
        coefs_transposed,
    ),
    mutant(
        "altup-correct-form",
        "",
        "the correction is scaled by c and not by 1 + c",
        "parallel streams",
        correction_without_one,
    ),
    mutant(
        "ple-branch-position",
        "streams",
        "the branch is added to every stream",
        "parallel streams",
        every_stream,
    ),
    mutant(
        "mlp-sparsity-std",
        "",
        "the deviation of a sample, divided by n - 1",
        "sparse gates",
        sample_deviation,
    ),
    mutant("mlp-sparsity-std", "missing", "gates are not cut", "sparse gates", not_cut),
    mutant(
        "moe-router-input",
        "",
        "the router's input is not divided by √hidden",
        "a router with a norm of its own",
        router_unscaled,
    ),
    mutant(
        "moe-router-input",
        "experts",
        "the router reads the experts' input",
        "a router with a norm of its own",
        experts_input,
    ),
    mutant(
        "moe-expert-scale",
        "missing",
        "the factor of each expert is left out",
        "experts with factors",
        factors_missing,
    ),
    mutant(
        "moe-expert-scale",
        "before",
        "the factors come before the norm of the weights",
        "experts with factors",
        factors_first,
    ),
];

const LATENT: &str = "latent attention";

fn scores_by(call: &Call<Tensor>, eval: &mut Eval, scale: impl Fn(f64) -> Option<f64>) -> Option<Tensor> {
    let Call::AttnScores { q, k, scale: honest, softcap } = *call else { return None };
    let scale = scale(k.shape()[2] as f64)?;
    ((scale / honest - 1.0).abs() > 1e-6).then(|| eval(&Call::AttnScores { q, k, scale, softcap }))
}

fn no_mscale(call: &Call<Tensor>, at: Site, history: &History, eval: &mut Eval) -> Option<Tensor> {
    history.value(at, "kv_b")?;
    scores_by(call, eval, |width| Some(1.0 / width.sqrt()))
}

fn absorbed_scale(call: &Call<Tensor>, at: Site, history: &History, eval: &mut Eval) -> Option<Tensor> {
    history.value(at, "kv_b")?;
    let wide = *history.value(at, "kv_a")?.shape().last()? as f64;
    scores_by(call, eval, |_| Some(1.0 / wide.sqrt()))
}

fn latent_not_normed(call: &Call<Tensor>, at: Site, _: &History, eval: &mut Eval) -> Option<Tensor> {
    let Call::RmsNorm { x, .. } = *call else { return None };
    ["q_a_norm", "kv_a_norm"].contains(&at.name).then(|| shaped(&eval(call), flat(x)))?
}

fn wide_norm(call: &Call<Tensor>, at: Site, history: &History, eval: &mut Eval) -> Option<Tensor> {
    let Call::RmsNorm { x, width, eps, .. } = *call else { return None };
    let wide = history.value(at, "kv_a").filter(|_| at.name == "kv_a_norm")?;
    let row = wide.len() / wide.shape()[0].max(1);
    let mean =
        |x: &[f32]| x.iter().map(|&v| f64::from(v).powi(2)).sum::<f64>() / x.len() as f64 + f64::from(eps);
    let (narrow, wide) = (flat(x), flat(wide));
    let ratios: Vec<f64> = narrow
        .chunks_exact(width)
        .zip(wide.chunks_exact(row))
        .map(|(narrow, wide)| (mean(narrow) / mean(wide)).sqrt())
        .collect();
    let honest = eval(call);
    let values = honest.iter().enumerate().map(|(n, &v)| (f64::from(v) * ratios[n / width]) as f32);
    shaped(&honest, values.collect())
}

fn other_order(call: &Call<Tensor>, _: Site, _: &History, eval: &mut Eval) -> Option<Tensor> {
    let Call::Slice { x, width, start, end } = *call else { return None };
    let mirrored = (width - end, width - start);
    (mirrored != (start, end)).then(|| eval(&Call::Slice { x, width, start: mirrored.0, end: mirrored.1 }))
}

fn first_head_only(call: &Call<Tensor>, _: Site, _: &History, eval: &mut Eval) -> Option<Tensor> {
    let Call::Concat { a, b } = *call else { return None };
    let (heads, before) = (a.shape()[1], a.shape()[2]);
    if heads < 2 || b.shape()[1] != 1 {
        return None;
    }
    let mut y = eval(call);
    let width = y.shape()[2];
    let values = y.iter_mut().enumerate();
    values
        .filter(|(n, _)| n % width >= before && !(n / width).is_multiple_of(heads))
        .for_each(|(_, v)| *v = 0.0);
    Some(y)
}

fn coefs_transposed(call: &Call<Tensor>, _: Site, _: &History, eval: &mut Eval) -> Option<Tensor> {
    let Call::AltupPredict { x, coefs } = *call else { return None };
    let streams = x.shape()[0];
    let (before, all) = (flat(coefs), streams * streams);
    let read = |n: usize| before[n / all * all + n % streams * streams + n % all / streams];
    let coefs = shaped(coefs, (0..before.len()).map(read).collect())?;
    Some(eval(&Call::AltupPredict { x, coefs: &coefs }))
}

fn correction_without_one(call: &Call<Tensor>, _: Site, _: &History, eval: &mut Eval) -> Option<Tensor> {
    let Call::AltupCorrect { pred, made, coefs, active } = *call else { return None };
    let coefs = coefs.mapv(|c| c - 1.0).into_shared();
    Some(eval(&Call::AltupCorrect { pred, made, coefs: &coefs, active }))
}

fn every_stream(call: &Call<Tensor>, _: Site, _: &History, eval: &mut Eval) -> Option<Tensor> {
    let Call::AddToStreams { x, branch } = *call else { return None };
    let mut y = eval(call);
    let mut first = y.index_axis_mut(ndarray::Axis(0), 0);
    first += branch;
    (x.shape()[0] > 1).then_some(y)
}

fn sample_deviation(call: &Call<Tensor>, _: Site, _: &History, eval: &mut Eval) -> Option<Tensor> {
    let Call::Sparsify { x, .. } = *call else { return None };
    let width = *x.shape().last()?;
    // Where a gate survived, x - y is the cut: mean + std · z. The sample's std is √(n / (n - 1)) as large.
    let honest = eval(call);
    let (x, y) = (flat(x), flat(&honest));
    let mut values = Vec::with_capacity(x.len());
    for (x, y) in x.chunks_exact(width).zip(y.chunks_exact(width)) {
        let kept = (0..width).find(|&i| y[i] > 0.0)?;
        let mean = x.iter().map(|&v| f64::from(v)).sum::<f64>() / width as f64;
        let cut = f64::from(x[kept]) - f64::from(y[kept]);
        let cut = mean + (cut - mean) * (width as f64 / (width as f64 - 1.0)).sqrt();
        values.extend(x.iter().map(|&v| (f64::from(v) - cut).max(0.0) as f32));
    }
    shaped(&honest, values)
}

fn not_cut(call: &Call<Tensor>, _: Site, _: &History, _: &mut Eval) -> Option<Tensor> {
    let Call::Sparsify { x, .. } = *call else { return None };
    Some(x.clone())
}

fn router_unscaled(call: &Call<Tensor>, at: Site, _: &History, _: &mut Eval) -> Option<Tensor> {
    let Call::Scale { x, .. } = *call else { return None };
    (at.name == "router_in").then(|| x.clone())
}

fn experts_input(call: &Call<Tensor>, at: Site, history: &History, eval: &mut Eval) -> Option<Tensor> {
    let Call::RmsNorm { x, weight, width, eps } = *call else { return None };
    let other = history.value(at, "mlp_norm").filter(|other| other.shape() == x.shape())?;
    (at.name == "router_norm").then(|| eval(&Call::RmsNorm { x: other, weight, width, eps }))
}

fn factors_missing(call: &Call<Tensor>, _: Site, _: &History, _: &mut Eval) -> Option<Tensor> {
    let Call::ScaleChosen { weights, .. } = *call else { return None };
    Some(weights.clone())
}

fn factors_first(call: &Call<Tensor>, _: Site, _: &History, eval: &mut Eval) -> Option<Tensor> {
    let Call::ScaleChosen { .. } = *call else { return None };
    let mut y = eval(call);
    for mut row in y.axis_iter_mut(ndarray::Axis(0)) {
        let total = row.sum();
        row /= total;
    }
    Some(y)
}
