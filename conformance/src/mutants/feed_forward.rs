//! Mistakes of gated activations and residuals.

use super::{Eval, History, Mutant, mutant, shaped};
use reference::{Call, Tensor};
use spec::Site;
use spec::families::Activation;

/// The catalogue's feed-forward and residual mutants.
pub static MUTANTS: &[Mutant] = &[
    mutant("mlp-gate-up-swap", "", "act(up) · gate", "a gated activation", swapped),
    mutant(
        "mlp-act-variant",
        "other",
        "gelu for silu, or silu for gelu",
        "a gated activation",
        other_activation,
    ),
    mutant("mlp-act-variant", "identity", "the gate is not activated", "a gated activation", no_activation),
    mutant("residual-wrong", "missing", "the branch without the stream", "a residual", stream_missing),
    mutant("residual-wrong", "doubled", "the stream twice", "a residual", stream_doubled),
    mutant("residual-wrong", "dropped", "the stream without the branch", "a residual", branch_missing),
    mutant("res-multiplier", "", "the branch is not scaled", "a residual with a multiplier", unscaled_branch),
    mutant(
        "res-multiplier",
        "stream",
        "the multiplier scales the stream and not the branch",
        "a residual with a multiplier",
        scaled_stream,
    ),
    mutant(
        "residual-wrong",
        "normed",
        "the branch is added to the normed stream",
        "a residual behind a norm",
        normed_stream,
    ),
    mutant("mlp-act-variant", "erf", "the exact gelu, x/2 · (1 + erf(x/√2))", "a gelu", erf_gelu),
    mutant("mlp-act-variant", "quick", "x · σ(1.702 x)", "a gelu", quick_gelu),
    mutant(
        "mlp-act-range",
        "",
        "gates are clamped to ±4 before the activation",
        "a gate beyond 4",
        clamped_gate,
    ),
    mutant("mlp-special-form", "no-clamp", "gate and up are not clamped", "a clamped gate", unclamped),
    mutant(
        "mlp-special-form",
        "clamp-below",
        "the gate is clamped below too",
        "a clamped gate",
        clamped_below,
    ),
    mutant("mlp-special-form", "no-plus-one", "up · act(gate), without the 1", "a clamped gate", without_one),
    mutant("mlp-special-form", "alpha", "alpha is 1", "a clamped gate", plain_alpha),
];

fn swapped(call: &Call<Tensor>, _: Site, _: &History, eval: &mut Eval) -> Option<Tensor> {
    let Call::GatedAct { gate, up, activation } = *call else { return None };
    Some(eval(&Call::GatedAct { gate: up, up: gate, activation }))
}

fn other_activation(call: &Call<Tensor>, _: Site, _: &History, eval: &mut Eval) -> Option<Tensor> {
    let Call::GatedAct { gate, up, activation } = *call else { return None };
    let activation = match activation {
        Activation::Silu => Activation::GeluTanh,
        Activation::GeluTanh => Activation::Silu,
    };
    Some(eval(&Call::GatedAct { gate, up, activation }))
}

fn no_activation(call: &Call<Tensor>, _: Site, _: &History, _: &mut Eval) -> Option<Tensor> {
    let Call::GatedAct { gate, up, .. } = *call else { return None };
    Some((gate * up).into_shared())
}

fn stream_missing(call: &Call<Tensor>, _: Site, _: &History, _: &mut Eval) -> Option<Tensor> {
    let Call::Residual { branch, multiplier, .. } = *call else { return None };
    Some(branch.mapv(|b| multiplier * b).into_shared())
}

fn stream_doubled(call: &Call<Tensor>, _: Site, _: &History, eval: &mut Eval) -> Option<Tensor> {
    let Call::Residual { x, branch, multiplier } = *call else { return None };
    let twice = x.mapv(|x| 2.0 * x).into_shared();
    Some(eval(&Call::Residual { x: &twice, branch, multiplier }))
}

fn branch_missing(call: &Call<Tensor>, _: Site, _: &History, _: &mut Eval) -> Option<Tensor> {
    let Call::Residual { x, .. } = *call else { return None };
    Some(x.clone())
}

fn unscaled_branch(call: &Call<Tensor>, _: Site, _: &History, eval: &mut Eval) -> Option<Tensor> {
    match *call {
        Call::Residual { x, branch, multiplier } if multiplier != 1.0 => {
            Some(eval(&Call::Residual { x, branch, multiplier: 1.0 }))
        }
        _ => None,
    }
}

fn scaled_stream(call: &Call<Tensor>, _: Site, _: &History, eval: &mut Eval) -> Option<Tensor> {
    match *call {
        Call::Residual { x, branch, multiplier } if multiplier != 1.0 => {
            Some(eval(&Call::Residual { x: branch, branch: x, multiplier }))
        }
        _ => None,
    }
}

fn normed_stream(call: &Call<Tensor>, at: Site, history: &History, eval: &mut Eval) -> Option<Tensor> {
    let Call::Residual { x, branch, multiplier } = *call else { return None };
    let norm = match at.name {
        "resid_mid" => "attn_norm",
        "out" | "resid_mlp" => "mlp_norm",
        _ => return None,
    };
    let normed = history.value(at, norm).filter(|normed| normed.shape() == x.shape())?;
    Some(eval(&Call::Residual { x: normed, branch, multiplier }))
}

/// `act(gate) · up` with another activation, in f64.
fn activated(call: &Call<Tensor>, act: fn(f64) -> f64) -> Option<Tensor> {
    let Call::GatedAct { gate, up, activation: Activation::GeluTanh } = *call else { return None };
    let y = gate.iter().zip(up).map(|(&g, &u)| (act(f64::from(g)) * f64::from(u)) as f32);
    shaped(gate, y.collect())
}

fn erf_gelu(call: &Call<Tensor>, _: Site, _: &History, _: &mut Eval) -> Option<Tensor> {
    activated(call, |x| 0.5 * x * (1.0 + libm::erf(x / std::f64::consts::SQRT_2)))
}

fn quick_gelu(call: &Call<Tensor>, _: Site, _: &History, _: &mut Eval) -> Option<Tensor> {
    activated(call, |x| x / (1.0 + libm::exp(-1.702 * x)))
}

fn clamped_gate(call: &Call<Tensor>, _: Site, _: &History, eval: &mut Eval) -> Option<Tensor> {
    let Call::GatedAct { gate, up, activation } = *call else { return None };
    if gate.iter().all(|g| g.abs() <= 4.0) {
        return None;
    }
    let gate = gate.mapv(|g| g.clamp(-4.0, 4.0)).into_shared();
    Some(eval(&Call::GatedAct { gate: &gate, up, activation }))
}

fn clamped(call: &Call<Tensor>, form: fn(f64, f64, f64, f64) -> f64) -> Option<Tensor> {
    let Call::ClampedSwiglu { gate, up, alpha, limit } = *call else { return None };
    let y = gate.iter().zip(up).map(|(&g, &u)| form(f64::from(g), f64::from(u), alpha, limit) as f32);
    shaped(gate, y.collect())
}

fn swish(g: f64, alpha: f64) -> f64 {
    g / (1.0 + libm::exp(-alpha * g))
}

fn unclamped(call: &Call<Tensor>, _: Site, _: &History, _: &mut Eval) -> Option<Tensor> {
    clamped(call, |g, u, alpha, _| (u + 1.0) * swish(g, alpha))
}

fn clamped_below(call: &Call<Tensor>, _: Site, _: &History, _: &mut Eval) -> Option<Tensor> {
    clamped(call, |g, u, alpha, limit| (u.clamp(-limit, limit) + 1.0) * swish(g.clamp(-limit, limit), alpha))
}

fn without_one(call: &Call<Tensor>, _: Site, _: &History, _: &mut Eval) -> Option<Tensor> {
    clamped(call, |g, u, alpha, limit| u.clamp(-limit, limit) * swish(g.min(limit), alpha))
}

fn plain_alpha(call: &Call<Tensor>, _: Site, _: &History, _: &mut Eval) -> Option<Tensor> {
    clamped(call, |g, u, _, limit| (u.clamp(-limit, limit) + 1.0) * swish(g.min(limit), 1.0))
}
