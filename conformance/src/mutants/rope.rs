//! Mistakes of rotary positions: pairs, positions, frequencies, direction.

use super::{Eval, History, Mutant, flat, mutant, shaped};
use reference::ops::Table;
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
    mutant(
        "rope-partial-convention",
        "rotated",
        "exponents divide by the rotated width instead of head_dim",
        "a proportional rope",
        proportional_exponent,
    ),
    mutant(
        "rope-partial-convention",
        "pairs",
        "value i is paired with i + head_dim/2",
        "a rotary width below head_dim",
        pairs_of_the_head,
    ),
    mutant(
        "rope-position-source",
        "head",
        "the angle uses the head index for the position",
        "a rotation of two heads or more",
        head_for_position,
    ),
    mutant(
        "rope-position-offset",
        "advanced",
        "positions are taken after the cache advanced",
        "a rotary table",
        after_the_pass,
    ),
    mutant(
        "rope-position-offset",
        "restart",
        "every pass starts at position 0",
        "a pass behind others",
        from_zero,
    ),
    mutant(
        "rope-local-global-mixed",
        "",
        "the table of the other kind of layer",
        "full and sliding layers with tables of one shape",
        other_table,
    ),
    mutant(
        "rope-yarn-magnitude",
        "",
        "cosine and sine without the magnitude",
        "a rope with a magnitude other than 1",
        without_magnitude,
    ),
    mutant(
        "rope-scaling-ignored",
        "no-blend",
        "frequencies between the two bands are divided and not blended",
        "a llama3 rope",
        without_blend,
    ),
    mutant(
        "rope-scaling-ignored",
        "truncate",
        "the ends of the yarn ramp are rounded where they should not be, or the reverse",
        "a yarn rope",
        other_truncation,
    ),
    mutant(
        "rope-longrope-choice",
        "",
        "the other of the two tables",
        "a rope with short and long factors",
        other_factors,
    ),
    mutant(
        "rope-kperm-heads",
        "",
        "the first half of a head is exchanged with the second",
        "a rotation",
        halves_exchanged,
    ),
];

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

fn proportional_exponent(call: &Call<Tensor>, _: Site, _: &History, eval: &mut Eval) -> Option<Tensor> {
    with_rope(call, eval, |rope| match rope.scaling {
        // θ^(-2i/rotated) is θ'^(-2i/head_dim) with θ' = θ^(head_dim/rotated).
        Scaling::Proportional { rotating, .. } if 2 * rotating < rope.head_dim => {
            let share = rope.head_dim as f64 / (2 * rotating) as f64;
            Some(Rope { theta: libm::pow(rope.theta, share), ..rope.clone() })
        }
        _ => None,
    })
}

fn pairs_of_the_head(call: &Call<Tensor>, _: Site, _: &History, eval: &mut Eval) -> Option<Tensor> {
    let Call::Rotate { x, cos, sin, rope } = *call else { return None };
    let (dim, half, pairs) = (rope.head_dim, rope.head_dim / 2, rope.rotary_dim / 2);
    if rope.rotary_dim >= dim || rope.pairing != Pairing::HalfSplit {
        return None;
    }
    let honest = eval(call);
    let mut y = honest.clone();
    let heads = honest.shape()[1];
    let (x, cos, sin) = (flat(x), flat(cos), flat(sin));
    for (n, head) in y.as_slice_mut()?.chunks_exact_mut(dim).enumerate() {
        let (x, t) = (&x[n * dim..][..dim], n / heads * rope.rotary_dim);
        head.copy_from_slice(x);
        for i in 0..pairs {
            let (c, s) = (cos[t + i], sin[t + i]);
            head[i] = x[i] * c - x[i + half] * s;
            head[i + half] = x[i + half] * c + x[i] * s;
        }
    }
    Some(y)
}

fn head_for_position(call: &Call<Tensor>, _: Site, _: &History, eval: &mut Eval) -> Option<Tensor> {
    let Call::Rotate { x, rope, .. } = *call else { return None };
    let honest = eval(call);
    let (tokens, heads) = (honest.shape()[0], honest.shape()[1]);
    if heads < 2 {
        return None;
    }
    // Heads take the place of tokens: turned as rows of one head each, row h at position h.
    let positions: Vec<u32> = (0..tokens * heads).map(|n| (n % heads) as u32).collect();
    let mut table = |table| eval(&Call::RopeTable { positions: &positions, rope, table });
    let (cos, sin) = (table(Table::Cos), table(Table::Sin));
    let rows = Tensor::from_shape_vec(ndarray::IxDyn(&[tokens * heads, rope.head_dim]), flat(x)).ok()?;
    shaped(&honest, flat(&eval(&Call::Rotate { x: &rows, cos: &cos, sin: &sin, rope })))
}

fn moved(call: &Call<Tensor>, eval: &mut Eval, change: impl Fn(u32, u32, u32) -> u32) -> Option<Tensor> {
    let Call::RopeTable { positions, rope, table } = *call else { return None };
    let (first, count) = (*positions.first()?, positions.len() as u32);
    let changed: Vec<u32> = positions.iter().map(|&p| change(p, first, count)).collect();
    (changed != positions).then(|| eval(&Call::RopeTable { positions: &changed, rope, table }))
}

fn after_the_pass(call: &Call<Tensor>, _: Site, _: &History, eval: &mut Eval) -> Option<Tensor> {
    moved(call, eval, |p, _, count| p + count)
}

fn from_zero(call: &Call<Tensor>, _: Site, _: &History, eval: &mut Eval) -> Option<Tensor> {
    moved(call, eval, |p, first, _| p - first)
}

fn other_table(call: &Call<Tensor>, _: Site, history: &History, eval: &mut Eval) -> Option<Tensor> {
    let Call::Rotate { x, cos, rope, .. } = *call else { return None };
    let pairs = [
        ("rope.full_attention.cos", "rope.full_attention.sin"),
        ("rope.sliding_attention.cos", "rope.sliding_attention.sin"),
    ];
    let others = pairs.iter().filter_map(|(c, s)| Some((history.outside(c)?, history.outside(s)?)));
    let (cos, sin) = others.into_iter().find(|(c, _)| c.shape() == cos.shape() && *c != cos)?;
    Some(eval(&Call::Rotate { x, cos, sin, rope }))
}

fn without_magnitude(call: &Call<Tensor>, _: Site, _: &History, eval: &mut Eval) -> Option<Tensor> {
    with_rope(call, eval, |rope| {
        let mut scaling = rope.scaling.clone();
        match &mut scaling {
            Scaling::Yarn { magnitude, .. } | Scaling::LongRope { magnitude, .. } if *magnitude != 1.0 => {
                *magnitude = 1.0;
            }
            _ => return None,
        }
        Some(Rope { scaling, ..rope.clone() })
    })
}

fn without_blend(call: &Call<Tensor>, _: Site, _: &History, eval: &mut Eval) -> Option<Tensor> {
    with_rope(call, eval, |rope| match rope.scaling {
        Scaling::Llama3 { factor, high_freq_factor, original_max_position_embeddings, .. } => {
            // Both bands end at the upper bound: what lay between them is divided.
            let scaling = Scaling::Llama3 {
                factor,
                low_freq_factor: high_freq_factor * (1.0 - 1e-9),
                high_freq_factor,
                original_max_position_embeddings,
            };
            Some(Rope { scaling, ..rope.clone() })
        }
        _ => None,
    })
}

fn other_truncation(call: &Call<Tensor>, _: Site, _: &History, eval: &mut Eval) -> Option<Tensor> {
    with_rope(call, eval, |rope| {
        let mut scaling = rope.scaling.clone();
        let Scaling::Yarn { truncate, .. } = &mut scaling else { return None };
        *truncate = !*truncate;
        Some(Rope { scaling, ..rope.clone() })
    })
}

fn other_factors(call: &Call<Tensor>, _: Site, _: &History, eval: &mut Eval) -> Option<Tensor> {
    with_rope(call, eval, |rope| {
        let mut scaling = rope.scaling.clone();
        let Scaling::LongRope { short_factor, long_factor, .. } = &mut scaling else { return None };
        std::mem::swap(short_factor, long_factor);
        Some(Rope { scaling, ..rope.clone() })
    })
}

fn halves_exchanged(call: &Call<Tensor>, _: Site, _: &History, eval: &mut Eval) -> Option<Tensor> {
    let Call::Rotate { rope, .. } = *call else { return None };
    let half = rope.rotary_dim / 2;
    let mut y = eval(call);
    for head in y.as_slice_mut()?.chunks_exact_mut(rope.head_dim) {
        head[..2 * half].rotate_left(half);
    }
    (half > 0).then_some(y)
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
