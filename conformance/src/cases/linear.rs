//! Cases of matrix products.
//!
//! Whole numbers stay whole because every format finds its full scale: the first two inputs of a row (of a
//! block of 32 in the 4-bit formats) are sentinels, 127 in the activations where the weight is 0 and the
//! largest code of the weights where the activation is 0.

use super::Suite::{Rounding, Structure};
use super::{Case, Dims, Line, Setting, With, line, tensor};
use crate::contract::Product;
use fixtures::random::SplitMix64;
use reference::Call;
use spec::families::Linear;
use spec::{Matrix, Site, Vector};

pub(super) const CASES: &[Line] = &[
    line(
        "linear/rows_of_w",
        "columns of w read for rows",
        Structure,
        &[("tokens", 3), ("in", 40), ("out", 56)],
        plain,
    ),
    line(
        "linear/square",
        "the transposed matrix, which has the same shape",
        Structure,
        &[("tokens", 3), ("in", 48), ("out", 48)],
        plain,
    ),
    line(
        "linear/one_row",
        "a path of its own for one row",
        Structure,
        &[("tokens", 1), ("in", 80), ("out", 33)],
        plain,
    ),
    line(
        "linear/tail_of_k",
        "the last inputs behind whole tiles",
        Structure,
        &[("tokens", 2), ("in", 67), ("out", 20)],
        plain,
    ),
    line(
        "linear/one_beyond_k",
        "a single input behind whole tiles",
        Structure,
        &[("tokens", 2), ("in", 65), ("out", 20)],
        plain,
    ),
    line(
        "linear/tail_of_n",
        "outputs behind whole tiles",
        Structure,
        &[("tokens", 2), ("in", 64), ("out", 131)],
        plain,
    ),
    line("linear/one_output", "a single output", Structure, &[("tokens", 2), ("in", 34), ("out", 1)], plain),
    line(
        "linear/row_17",
        "rows behind a launch of 16",
        Structure,
        &[("tokens", 17), ("in", 48), ("out", 24)],
        plain,
    ),
    line(
        "linear/row_33",
        "rows behind two launches of 16",
        Structure,
        &[("tokens", 33), ("in", 40), ("out", 24)],
        plain,
    ),
    line(
        "linear/row_129",
        "rows behind a launch of 128",
        Structure,
        &[("tokens", 129), ("in", 40), ("out", 17)],
        plain,
    ),
    line(
        "linear/bias",
        "a bias left out or added to another output",
        Structure,
        &[("tokens", 3), ("in", 40), ("out", 37)],
        biased,
    ),
    line(
        "linear/realistic",
        "formats and order of sums other than declared",
        Rounding,
        &[("tokens", 17), ("in", 192), ("out", 160)],
        plain,
    ),
    line(
        "linear/long_sum",
        "a sum held in too few bits",
        Rounding,
        &[("tokens", 4), ("in", 2048), ("out", 96)],
        plain,
    ),
    line(
        "linear/quiet_rows",
        "one scale for rows of different size",
        Rounding,
        &[("tokens", 16), ("in", 96), ("out", 64)],
        spread_rows,
    ),
    line(
        "linear/realistic_bias",
        "a bias rounded on the way",
        Rounding,
        &[("tokens", 5), ("in", 96), ("out", 64)],
        biased,
    ),
];

/// The cases of one shape: one for structure, one for rounding.
pub fn of_shape(inner: usize, out: usize) -> [Case; 2] {
    [("linear/shape", Structure), ("linear/shape_realistic", Rounding)].map(|(name, suite)| Case {
        name,
        catches: "a shape of the package",
        suite,
        dims: Dims(vec![("tokens", 3), ("in", inner), ("out", out)]),
        build: plain,
    })
}

fn plain(dims: &Dims, setting: Setting, random: &mut SplitMix64, with: &mut With) {
    product(dims, setting, random, false, |_| 1.0, with);
}

fn biased(dims: &Dims, setting: Setting, random: &mut SplitMix64, with: &mut With) {
    product(dims, setting, random, true, |_| 1.0, with);
}

fn spread_rows(dims: &Dims, setting: Setting, random: &mut SplitMix64, with: &mut With) {
    product(dims, setting, random, false, |t| libm::exp2(f64::from(t as u32 % 11) - 5.0), with);
}

fn product(
    dims: &Dims,
    setting: Setting,
    random: &mut SplitMix64,
    bias: bool,
    row_size: fn(usize) -> f64,
    with: &mut With,
) {
    let (tokens, inner, out) = (dims.get("tokens"), dims.get("in"), dims.get("out"));
    let (x, w) = match setting.suite {
        Structure => whole(tokens, inner, out, setting.product, random),
        Rounding => {
            let x = (0..tokens * inner).map(|n| (random.normal() * row_size(n / inner)) as f32).collect();
            let size = 1.0 / (inner as f64).sqrt();
            (x, (0..out * inner).map(|_| (random.normal() * size) as f32).collect())
        }
    };
    let x = tensor(&[tokens, inner], |n| x[n]);
    let bias =
        bias.then(|| Vector::new("bias", (0..out).map(|o| (o % 29) as f32 - 14.0).collect::<Vec<_>>()));
    let w = Linear { weight: Matrix::from_values("w", out, inner, w), bias };
    with(Site::layer(0, "mlp_out"), &Call::Linear { x: &x, w: &w });
}

/// Whole numbers that stay whole, activations and weights.
fn whole(
    tokens: usize,
    inner: usize,
    out: usize,
    product: Product,
    random: &mut SplitMix64,
) -> (Vec<f32>, Vec<f32>) {
    let four_bit = matches!(product, Product::W4A8 | Product::W4A16);
    // Where sentinels stand: at the start of the row, or of every block that has room for two.
    let place = |i: usize| if four_bit { i % 32 } else { i };
    let block = |i: usize| if four_bit { (inner - i / 32 * 32).min(32) } else { inner };
    let x = (0..tokens * inner).map(|n| match (place(n % inner), block(n % inner)) {
        (_, 1) => 127.0,
        (0, _) => 127.0,
        (1, _) => 0.0,
        _ => random.below(7) as f32 - 3.0,
    });
    let x: Vec<f32> = x.collect();
    let largest = if four_bit { 15.0 } else { 127.0 };
    let w = (0..out * inner).map(|n| match (place(n % inner), block(n % inner)) {
        // One input alone is its own full scale.
        (_, 1) if four_bit => 1.0 + random.below(9) as f32,
        (_, 1) => 127.0,
        (0, _) => 0.0,
        (1, _) => largest,
        _ if four_bit => random.below(16) as f32,
        _ => random.below(11) as f32 - 5.0,
    });
    (x, w.collect())
}
