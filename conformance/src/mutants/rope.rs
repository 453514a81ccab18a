//! Mistakes of rotary positions: pairs, positions, frequencies, direction.

use super::{Apply, Eval, History, Mutant};
use reference::{Call, Tensor};
use spec::rope::Scaling;
use spec::{Pairing, Rope, Site};

/// The catalogue's rotary mutants.
pub static MUTANTS: &[Mutant] = &[
    mutant(
        "rope-pairing",
        "",
        "pairs (2i, 2i+1) for (i, i + R/2), or the reverse",
        "a rotation",
        other_pairs,
    ),
    mutant("rope-position-offset", "", "positions start at 1", "a rotary table", from_one),
    mutant(
        "rope-position-source",
        "layer",
        "the angle uses the layer index for the position",
        "a rotation inside a layer",
        layer_for_position,
    ),
    mutant("rope-theta", "1e4", "θ is 10000", "another θ", theta_default),
    mutant("rope-theta", "half", "θ is half of what the config says", "a rotary table", theta_half),
    mutant("rope-scaling-ignored", "", "the frequencies are not scaled", "a scaled rope", unscaled),
    mutant("rope-direction", "", "rotation by the negative angle", "a rotation", backwards),
    mutant(
        "rope-partial-convention",
        "",
        "exponents divide by head_dim instead of the rotated width",
        "a rotary width below head_dim",
        partial_exponent,
    ),
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

/// The table of another rope.
fn with_rope(call: &Call<Tensor>, eval: &mut Eval, change: impl Fn(&Rope) -> Option<Rope>) -> Option<Tensor> {
    let Call::RopeTable { positions, rope, table } = *call else { return None };
    let rope = change(rope)?;
    Some(eval(&Call::RopeTable { positions, rope: &rope, table }))
}

fn other_pairs(call: &Call<Tensor>, _: Site, _: &History, eval: &mut Eval) -> Option<Tensor> {
    let Call::Rotate { x, cos, sin, rope } = *call else { return None };
    let pairing = match rope.pairing {
        Pairing::HalfSplit => Pairing::Interleaved,
        Pairing::Interleaved => Pairing::HalfSplit,
    };
    let mut y = eval(&Call::Rotate { x, cos, sin, rope: &Rope { pairing, ..rope.clone() } });
    if rope.pairing == Pairing::HalfSplit && rope.rotary_dim > 2 {
        // Interleaved pairs are written back where they came from by code that confuses the two.
        let half = rope.rotary_dim / 2;
        for head in y.as_slice_mut()?.chunks_exact_mut(rope.head_dim) {
            let turned: Vec<f32> = (0..rope.rotary_dim).map(|n| head[n / 2 + n % 2 * half]).collect();
            head[..rope.rotary_dim].copy_from_slice(&turned);
        }
    }
    Some(y)
}

fn from_one(call: &Call<Tensor>, _: Site, _: &History, eval: &mut Eval) -> Option<Tensor> {
    let Call::RopeTable { positions, rope, table } = *call else { return None };
    let positions: Vec<u32> = positions.iter().map(|p| p + 1).collect();
    Some(eval(&Call::RopeTable { positions: &positions, rope, table }))
}

fn layer_for_position(call: &Call<Tensor>, at: Site, _: &History, eval: &mut Eval) -> Option<Tensor> {
    use reference::ops::Table;
    let Call::Rotate { x, rope, cos, .. } = *call else { return None };
    let positions = vec![at.layer?; cos.shape()[0]];
    let mut table = |table| eval(&Call::RopeTable { positions: &positions, rope, table });
    let (cos, sin) = (table(Table::Cos), table(Table::Sin));
    Some(eval(&Call::Rotate { x, cos: &cos, sin: &sin, rope }))
}

fn theta_default(call: &Call<Tensor>, _: Site, _: &History, eval: &mut Eval) -> Option<Tensor> {
    with_rope(call, eval, |rope| (rope.theta != 1e4).then(|| Rope { theta: 1e4, ..rope.clone() }))
}

fn theta_half(call: &Call<Tensor>, _: Site, _: &History, eval: &mut Eval) -> Option<Tensor> {
    with_rope(call, eval, |rope| Some(Rope { theta: rope.theta / 2.0, ..rope.clone() }))
}

fn unscaled(call: &Call<Tensor>, _: Site, _: &History, eval: &mut Eval) -> Option<Tensor> {
    with_rope(call, eval, |rope| {
        (rope.scaling != Scaling::Default).then(|| Rope { scaling: Scaling::Default, ..rope.clone() })
    })
}

fn backwards(call: &Call<Tensor>, _: Site, _: &History, eval: &mut Eval) -> Option<Tensor> {
    let Call::Rotate { x, cos, sin, rope } = *call else { return None };
    let sin = sin.mapv(|s| -s).into_shared();
    Some(eval(&Call::Rotate { x, cos, sin: &sin, rope }))
}

fn partial_exponent(call: &Call<Tensor>, _: Site, _: &History, eval: &mut Eval) -> Option<Tensor> {
    // θ^(-2i/head_dim) over R dims is θ'^(-2i/R) with θ' = θ^(R/head_dim).
    with_rope(call, eval, |rope| {
        let share = rope.rotary_dim as f64 / rope.head_dim as f64;
        (share < 1.0).then(|| Rope { theta: libm::pow(rope.theta, share), ..rope.clone() })
    })
}
