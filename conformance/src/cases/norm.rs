//! Cases of norms.
//!
//! In structure cases row t holds ±2^(t mod 8), so its root mean square is a power of two and the result is
//! plus or minus the weight; weights count up from 1. There is no eps.

use super::Suite::{Rounding, Structure};
use super::{Dims, Line, Setting, Suite, With, fill, line, normal, tensor};
use fixtures::random::SplitMix64;
use reference::Call;
use spec::{Site, Vector};

pub(super) const CASES: &[Line] = &[
    line(
        "rms_norm/rows_differ",
        "one scale for all rows",
        Structure,
        &[("tokens", 16), ("width", 64), ("groups", 1)],
        rms,
    ),
    line(
        "rms_norm/tail_row",
        "rows behind the last full launch",
        Structure,
        &[("tokens", 17), ("width", 64), ("groups", 1)],
        rms,
    ),
    line(
        "rms_norm/odd_width",
        "a vector tail left unscaled",
        Structure,
        &[("tokens", 3), ("width", 61), ("groups", 1)],
        rms,
    ),
    line(
        "rms_norm/heads",
        "one scale for all heads",
        Structure,
        &[("tokens", 3), ("width", 10), ("groups", 6)],
        rms,
    ),
    line(
        "rms_norm/realistic",
        "a sum of squares in too few bits",
        Rounding,
        &[("tokens", 5), ("width", 192), ("groups", 1)],
        rms,
    ),
    line(
        "rms_norm/large_eps",
        "eps added outside the root",
        Rounding,
        &[("tokens", 3), ("width", 64), ("groups", 1)],
        large_eps,
    ),
    line(
        "rms_norm/no_weight",
        "a weight where there is none",
        Rounding,
        &[("tokens", 3), ("width", 24), ("groups", 2)],
        bare,
    ),
    line(
        "l2_norm/short_vectors",
        "a mean for the sum, or eps outside the root",
        Rounding,
        &[("tokens", 4), ("heads", 3), ("width", 16)],
        l2,
    ),
    line(
        "match_rms/realistic",
        "the rms of the other tensor",
        Rounding,
        &[("tokens", 3), ("width", 48)],
        matched,
    ),
];

fn rms(dims: &Dims, setting: Setting, random: &mut SplitMix64, with: &mut With) {
    norm(dims, setting, random, if setting.suite == Suite::Structure { 0.0 } else { 1e-6 }, true, with);
}

fn large_eps(dims: &Dims, setting: Setting, random: &mut SplitMix64, with: &mut With) {
    norm(dims, setting, random, 1e-2, true, with);
}

fn bare(dims: &Dims, setting: Setting, random: &mut SplitMix64, with: &mut With) {
    norm(dims, setting, random, 1e-6, false, with);
}

fn norm(dims: &Dims, setting: Setting, random: &mut SplitMix64, eps: f32, weighted: bool, with: &mut With) {
    let (tokens, width, groups) = (dims.get("tokens"), dims.get("width"), dims.get("groups"));
    let shape = [tokens, width * groups];
    let x = match setting.suite {
        Suite::Structure => tensor(&shape, |n| {
            let sign = if random.below(2) == 0 { 1.0 } else { -1.0 };
            sign * libm::exp2f((n / width % 8) as f32)
        }),
        Suite::Rounding => normal(&shape, 0.3, random),
    };
    let weight = match setting.suite {
        Suite::Structure => (1..=width).map(|i| i as f32).collect::<Vec<_>>(),
        Suite::Rounding => (0..width).map(|_| (0.3 + 2.7 * random.uniform()) as f32).collect(),
    };
    let weight = Vector::new("weight", weight);
    let weight = weighted.then_some(&weight);
    with(Site::layer(0, "attn_norm"), &Call::RmsNorm { x: &x, weight, width, eps });
}

fn l2(dims: &Dims, _: Setting, random: &mut SplitMix64, with: &mut With) {
    let (tokens, heads, width) = (dims.get("tokens"), dims.get("heads"), dims.get("width"));
    // Lengths from 1e-3 on: below, eps decides.
    let x = tensor(&[tokens, heads, width], |n| {
        (random.normal() * libm::exp2(f64::from((n / width % 12) as u32) - 10.0)) as f32
    });
    with(Site::layer(0, "gdn_q_unit"), &Call::L2Norm { x: &x, scale: 0.25 });
}

fn matched(dims: &Dims, setting: Setting, random: &mut SplitMix64, with: &mut With) {
    let shape = [dims.get("tokens"), dims.get("width")];
    let (x, like) = (fill(&shape, setting, random), normal(&shape, 5.0, random));
    with(Site::layer(0, "attn_norm"), &Call::MatchRms { x: &x, like: &like });
}
