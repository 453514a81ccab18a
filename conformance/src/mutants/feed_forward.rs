//! Mistakes of embeddings, gated activations and residuals.

use super::{Apply, Eval, History, Mutant};
use reference::{Call, Tensor};
use spec::Site;
use spec::families::Activation;

/// The catalogue's embedding, feed-forward and residual mutants.
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
    mutant("emb-row-offset", "", "row id + 1 of the table", "an embedding", next_row),
    mutant("emb-scale-missing", "", "rows are not scaled", "a scaled embedding", unscaled_rows),
    mutant("emb-scale-twice", "", "the scale is applied twice", "a scaled embedding", scaled_twice),
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

fn next_row(call: &Call<Tensor>, _: Site, _: &History, eval: &mut Eval) -> Option<Tensor> {
    let Call::Embed { ids, table, scale } = *call else { return None };
    let ids: Vec<u32> = ids.iter().map(|id| (id + 1) % table.out() as u32).collect();
    Some(eval(&Call::Embed { ids: &ids, table, scale }))
}

fn with_scale(call: &Call<Tensor>, eval: &mut Eval, change: fn(f32) -> f32) -> Option<Tensor> {
    match *call {
        Call::Embed { ids, table, scale } if scale != 1.0 => {
            Some(eval(&Call::Embed { ids, table, scale: change(scale) }))
        }
        _ => None,
    }
}

fn unscaled_rows(call: &Call<Tensor>, _: Site, _: &History, eval: &mut Eval) -> Option<Tensor> {
    with_scale(call, eval, |_| 1.0)
}

fn scaled_twice(call: &Call<Tensor>, _: Site, _: &History, eval: &mut Eval) -> Option<Tensor> {
    with_scale(call, eval, |scale| scale * scale)
}
