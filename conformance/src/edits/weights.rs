//! Weights that are taken wrongly: from another tensor, in another order, without a converter's step undone.

use super::{Edit, Source, takes};

/// The edits of weights.
pub static EDITS: &[Edit] = &[
    takes(
        "wgt-layer",
        "",
        "layer i is given the weights of layer i + 1",
        "two layers of one shape",
        next_layer,
    ),
    takes(
        "wgt-exchanged",
        "gate-up",
        "gate and up projections are exchanged",
        "a gated feed-forward",
        |s, name| exchanged(s, name, &[("gate_proj", "up_proj"), (".w1.", ".w3.")]),
    ),
    takes(
        "wgt-exchanged",
        "k-v",
        "key and value projections are exchanged",
        "projections of one shape",
        |s, name| exchanged(s, name, &[("k_proj", "v_proj")]),
    ),
    takes(
        "wgt-exchanged",
        "qk-norms",
        "the norms of queries and keys are exchanged",
        "both of them",
        |s, name| exchanged(s, name, &[("q_norm", "k_norm"), ("q_layernorm", "k_layernorm")]),
    ),
    takes(
        "wgt-exchanged",
        "norms",
        "the two norms of a layer are exchanged",
        "two norms a layer",
        |s, name| {
            exchanged(
                s,
                name,
                &[("input_layernorm", "post_attention_layernorm"), ("operator_norm", "ffn_norm")],
            )
        },
    ),
    takes(
        "wgt-fused-order",
        "",
        "the halves of a fused projection are exchanged",
        "gate and up in one",
        |s, name| {
            let fused = name.contains("gate_up_proj.weight") || name.contains("in_proj_qkvz");
            let (_, mut values) = fused.then(|| s.values(name))??;
            let half = values.len() / 2;
            values.rotate_left(half);
            Some(values)
        },
    ),
    takes(
        "wgt-stored-transposed",
        "",
        "square projections are stored the other way round",
        "a square one",
        transposed,
    ),
    takes("wgt-row-offset", "", "row r of a projection is row r + 1", "projections", |s, name| {
        let (shape, mut values) = projection(s, name)?;
        values.rotate_left(shape[1]);
        Some(values)
    }),
    takes(
        "wgt-rope-permuted",
        "",
        "rows of queries and keys stand in a converter's order, pairs side by side",
        "projections of queries and keys",
        |s, name| permuted(s, name, &["q_proj", "k_proj"]),
    ),
    takes(
        "wgt-rope-permuted",
        "k",
        "rows of keys alone stand in a converter's order, pairs side by side",
        "projections of keys",
        |s, name| permuted(s, name, &["k_proj"]),
    ),
    takes(
        "wgt-norm-offset",
        "plus",
        "norm weights are 1 larger: a converter's step is not undone",
        NORM,
        |s, name| norm(s, name, |w| w + 1.0),
    ),
    takes(
        "wgt-norm-offset",
        "minus",
        "norm weights are 1 smaller: undone though never done",
        NORM,
        |s, name| norm(s, name, |w| w - 1.0),
    ),
    takes("wgt-missing", "norms", "norm weights are missing and taken for ones", NORM, |s, name| {
        norm(s, name, |_| 1.0)
    }),
    takes(
        "wgt-missing",
        "biases",
        "biases are missing and taken for zeros",
        "projections with biases",
        |s, name| {
            let (_, values) = bias(name).then(|| s.values(name))??;
            Some(vec![0.0; values.len()])
        },
    ),
    takes("wgt-expert-order", "", "experts stand in reverse", "routed experts", reversed_experts),
    takes("wgt-conv-reversed", "", "taps of convolutions stand in reverse", "convolutions", |s, name| {
        let (shape, mut values) = name.contains("conv").then(|| s.values(name))??;
        let [_, 1, kernel] = shape[..] else { return None };
        values.chunks_exact_mut(kernel).for_each(<[f32]>::reverse);
        Some(values)
    }),
    takes(
        "wgt-decay",
        "",
        "A_log holds A = -exp(A_log): a converter's step is not undone",
        "a recurrence",
        |s, name| {
            let (_, values) = name.ends_with("A_log").then(|| s.values(name))??;
            Some(values.into_iter().map(|a| -libm::expf(a)).collect())
        },
    ),
    takes(
        "wgt-group-scale",
        "",
        "a group of codes takes the scale of the one before",
        "4-bit codes",
        group_scales,
    ),
    takes(
        "wgt-group-scale",
        "zeros",
        "a group of codes takes the zero of the one before",
        "4-bit codes",
        group_zeros,
    ),
];

const NORM: &str = "norms with weights";

/// A projection's weight: two axes, and a name that says so.
fn projection(source: &Source, name: &str) -> Option<(Vec<usize>, Vec<f32>)> {
    let (shape, values) = name.ends_with("proj.weight").then(|| source.values(name))??;
    (shape.len() == 2).then_some((shape, values))
}

fn bias(name: &str) -> bool {
    name.ends_with("proj.bias") || name.ends_with("proj_bias")
}

fn norm(source: &Source, name: &str, change: impl Fn(f32) -> f32) -> Option<Vec<f32>> {
    let (shape, values) = name.ends_with("norm.weight").then(|| source.values(name))??;
    (shape.len() == 1).then(|| values.into_iter().map(change).collect())
}

/// The values of another tensor, where it has the shape of `name`.
fn instead(source: &Source, name: &str, other: &str) -> Option<Vec<f32>> {
    if source.tensors.shape(name)? != source.tensors.shape(other)? {
        return None;
    }
    source.values(other).map(|(_, values)| values)
}

fn exchanged(source: &Source, name: &str, pairs: &[(&str, &str)]) -> Option<Vec<f32>> {
    let partner = pairs.iter().find_map(|(a, b)| match (name.contains(a), name.contains(b)) {
        (true, false) => Some(name.replace(a, b)),
        (false, true) => Some(name.replace(b, a)),
        _ => None,
    })?;
    instead(source, name, &partner)
}

/// The number behind `part` in a name, with what stands before and behind it.
fn numbered<'n>(name: &'n str, part: &str) -> Option<(&'n str, usize, &'n str)> {
    let start = name.find(part)? + part.len();
    let (number, _) = name[start..].split_once('.')?;
    Some((&name[..start], number.parse().ok()?, &name[start + number.len()..]))
}

fn next_layer(source: &Source, name: &str) -> Option<Vec<f32>> {
    let (before, layer, behind) = numbered(name, "layers.")?;
    let of = |layer: usize| instead(source, name, &format!("{before}{layer}{behind}"));
    of(layer + 1).or_else(|| of(0))
}

fn reversed_experts(source: &Source, name: &str) -> Option<Vec<f32>> {
    if let Some((before, expert, behind)) = numbered(name, ".experts.") {
        let of = |expert: usize| format!("{before}{expert}{behind}");
        let count = (0..).take_while(|&expert| source.tensors.shape(&of(expert)).is_some()).count();
        return instead(source, name, &of(count.checked_sub(1 + expert)?));
    }
    let (shape, values) = name.contains(".experts.").then(|| source.values(name))??;
    let each = values.len() / shape.first().copied().filter(|&count| count > 0)?;
    Some(values.chunks_exact(each).rev().flatten().copied().collect())
}

fn transposed(source: &Source, name: &str) -> Option<Vec<f32>> {
    let (shape, values) = projection(source, name)?;
    let [out, inner] = shape[..] else { return None };
    let turned = |n: usize| values[n % inner * inner + n / inner];
    (out == inner).then(|| (0..values.len()).map(turned).collect())
}

fn permuted(source: &Source, name: &str, which: &[&str]) -> Option<Vec<f32>> {
    let which = which.iter().find(|which| name.ends_with(&format!("{which}.weight")))?;
    let (shape, values) = projection(source, name)?;
    let key = if *which == "k_proj" { "num_key_value_heads" } else { "num_attention_heads" };
    let heads = source.size(key).filter(|&heads| heads > 0 && shape[0].is_multiple_of(2 * heads))?;
    paired_rows(&values, heads, shape[1])
}

/// Rows of every head with halves `(i, i + d/2)` written side by side: `(2i, 2i + 1)`.
pub(super) fn paired_rows(values: &[f32], heads: usize, inner: usize) -> Option<Vec<f32>> {
    let width = values.len().checked_div(heads * inner)?;
    let row = |n: usize| {
        let (head, i) = (n / width, n % width);
        let from = head * width + i / 2 + i % 2 * (width / 2);
        &values[from * inner..][..inner]
    };
    Some((0..heads * width).flat_map(row).copied().collect())
}

fn group_scales(source: &Source, name: &str) -> Option<Vec<f32>> {
    of_codes(source, name, |numbers, group| {
        let before = group.saturating_sub(1);
        (numbers.scales[before], numbers.zeros[group])
    })
}

fn group_zeros(source: &Source, name: &str) -> Option<Vec<f32>> {
    of_codes(source, name, |numbers, group| {
        let before = group.saturating_sub(1);
        (numbers.scales[group], numbers.zeros[before])
    })
}

/// `scale · code + zero` with the numbers that `choose` gives for every group of 32.
fn of_codes(
    source: &Source,
    name: &str,
    choose: impl Fn(&spec::matrix::Codes4, usize) -> (f32, f32),
) -> Option<Vec<f32>> {
    let rows = source.tensors.rows(name)?.ok()?;
    let (mut numbers, mut values) = (spec::matrix::Codes4::default(), Vec::new());
    for r in 0..rows.rows() {
        if !rows.codes4(r, &mut numbers) {
            return None;
        }
        values.extend(numbers.codes.iter().enumerate().map(|(i, &code)| {
            let (scale, zero) = choose(&numbers, i / 32);
            scale * f32::from(code) + zero
        }));
    }
    Some(values)
}
