//! Cases of embeddings, activations, residuals and everything else that mixes no positions.
//!
//! Activations are exact where they are saturated: at 0, and from 64 on, where σ is 1 in f64 too.

use super::Suite::{Rounding, Structure};
use super::{Dims, Line, Setting, Suite, With, fill, line, normal, tensor, whole};
use fixtures::random::SplitMix64;
use reference::Call;
use spec::families::Activation;
use spec::{Matrix, Site};

pub(super) const CASES: &[Line] = &[
    line(
        "embed/rows",
        "the row of another id",
        Structure,
        &[("tokens", 9), ("vocab", 31), ("width", 20)],
        embed,
    ),
    line(
        "embed/scale",
        "the scale left out or applied twice",
        Structure,
        &[("tokens", 3), ("vocab", 11), ("width", 20)],
        embed_scaled,
    ),
    line("gated_act/saturated", "gate and up exchanged", Structure, &[("tokens", 3), ("width", 61)], silu),
    line(
        "gated_act/silu",
        "gelu for silu, an activation cut short",
        Rounding,
        &[("tokens", 5), ("width", 96)],
        silu,
    ),
    line(
        "gated_act/gelu",
        "the exact gelu for its tanh form",
        Rounding,
        &[("tokens", 5), ("width", 96)],
        gelu,
    ),
    line(
        "residual/sum",
        "the stream or the branch left out",
        Structure,
        &[("tokens", 5), ("width", 33)],
        residual,
    ),
    line(
        "residual/multiplier",
        "the multiplier left out or on the stream",
        Structure,
        &[("tokens", 5), ("width", 33)],
        residual_half,
    ),
    line(
        "residual/realistic",
        "a sum in too few bits",
        Rounding,
        &[("tokens", 5), ("width", 64)],
        residual_half,
    ),
    line(
        "scale/quarter",
        "the factor left out or inverted",
        Structure,
        &[("tokens", 3), ("width", 33)],
        scale,
    ),
    line(
        "slice/second_part",
        "the part before or behind",
        Structure,
        &[("tokens", 3), ("groups", 4), ("width", 10), ("part", 4)],
        slice,
    ),
    line(
        "concat/shared_head",
        "a shared head that reaches the first alone",
        Structure,
        &[("tokens", 3), ("heads", 3), ("width", 6), ("tail", 4)],
        concat,
    ),
    line("softcap/realistic", "the cap left out", Rounding, &[("tokens", 3), ("width", 64)], softcap),
    line(
        "sigmoid/realistic",
        "tails that vanish or overflow",
        Rounding,
        &[("tokens", 3), ("width", 64)],
        sigmoid,
    ),
    line("sigmoid_gate/realistic", "silu for σ", Rounding, &[("tokens", 3), ("width", 64)], sigmoid_gate),
];

fn embed(dims: &Dims, setting: Setting, random: &mut SplitMix64, with: &mut With) {
    embedded(dims, setting, random, 1.0, with);
}

fn embed_scaled(dims: &Dims, setting: Setting, random: &mut SplitMix64, with: &mut With) {
    embedded(dims, setting, random, 4.0, with);
}

fn embedded(dims: &Dims, _: Setting, random: &mut SplitMix64, scale: f32, with: &mut With) {
    let (vocab, width) = (dims.get("vocab"), dims.get("width"));
    let values = whole(&[vocab, width], 40, random).iter().copied().collect();
    let table = Matrix::from_values("table", vocab, width, values);
    // The first, the middle and the last id are among them.
    let ids: Vec<u32> = (0..dims.get("tokens")).map(|t| (t * (vocab / 2) % vocab.max(1)) as u32).collect();
    let ids: Vec<u32> =
        ids.iter().enumerate().map(|(t, &id)| if t == 1 { vocab as u32 - 1 } else { id }).collect();
    with(Site::model("embed"), &Call::Embed { ids: &ids, table: &table, scale });
}

fn silu(dims: &Dims, setting: Setting, random: &mut SplitMix64, with: &mut With) {
    gated(dims, setting, random, Activation::Silu, with);
}

fn gelu(dims: &Dims, setting: Setting, random: &mut SplitMix64, with: &mut With) {
    gated(dims, setting, random, Activation::GeluTanh, with);
}

fn gated(dims: &Dims, setting: Setting, random: &mut SplitMix64, activation: Activation, with: &mut With) {
    let shape = [dims.get("tokens"), dims.get("width")];
    let gate = match setting.suite {
        Suite::Structure => tensor(&shape, |n| [0.0, 64.0, 128.0, 256.0][n * 5 % 4]),
        // The grid from -6 to 6, where the forms of an activation differ, and far tails.
        Suite::Rounding => tensor(&shape, |n| match n % 16 {
            0 => [-100.0, -30.0, 30.0, 100.0][n / 16 % 4],
            _ => (12.0 * random.uniform() - 6.0) as f32,
        }),
    };
    let up = fill(&shape, setting, random);
    with(Site::layer(0, "mlp_act"), &Call::GatedAct { gate: &gate, up: &up, activation });
}

fn residual(dims: &Dims, setting: Setting, random: &mut SplitMix64, with: &mut With) {
    added(dims, setting, random, 1.0, with);
}

fn residual_half(dims: &Dims, setting: Setting, random: &mut SplitMix64, with: &mut With) {
    added(dims, setting, random, if setting.suite == Suite::Structure { 0.5 } else { 0.22 }, with);
}

fn added(dims: &Dims, setting: Setting, random: &mut SplitMix64, multiplier: f32, with: &mut With) {
    let shape = [dims.get("tokens"), dims.get("width")];
    let (x, branch) = (fill(&shape, setting, random), fill(&shape, setting, random));
    with(Site::layer(0, "resid_mid"), &Call::Residual { x: &x, branch: &branch, multiplier });
}

fn scale(dims: &Dims, setting: Setting, random: &mut SplitMix64, with: &mut With) {
    let x = fill(&[dims.get("tokens"), dims.get("width")], setting, random);
    with(Site::model("head_in"), &Call::Scale { x: &x, factor: 0.25 });
}

fn slice(dims: &Dims, setting: Setting, random: &mut SplitMix64, with: &mut With) {
    let (width, part) = (dims.get("width"), dims.get("part").min(dims.get("width")));
    let x = fill(&[dims.get("tokens"), dims.get("groups") * width], setting, random);
    let start = (width - part) / 2;
    with(Site::layer(0, "q_nope"), &Call::Slice { x: &x, width, start, end: start + part });
}

fn concat(dims: &Dims, setting: Setting, random: &mut SplitMix64, with: &mut With) {
    let tokens = dims.get("tokens");
    let a = fill(&[tokens, dims.get("heads"), dims.get("width")], setting, random);
    let b = fill(&[tokens, 1, dims.get("tail")], setting, random);
    with(Site::layer(0, "attn_k"), &Call::Concat { a: &a, b: &b });
}

fn softcap(dims: &Dims, _: Setting, random: &mut SplitMix64, with: &mut With) {
    let x = normal(&[dims.get("tokens"), dims.get("width")], 8.0, random);
    with(Site::model("logits"), &Call::Softcap { x: &x, cap: 30.0 });
}

fn sigmoid(dims: &Dims, _: Setting, random: &mut SplitMix64, with: &mut With) {
    let x = normal(&[dims.get("tokens"), dims.get("width")], 4.0, random);
    with(Site::layer(0, "gdn_beta"), &Call::Sigmoid { x: &x });
}

fn sigmoid_gate(dims: &Dims, setting: Setting, random: &mut SplitMix64, with: &mut With) {
    let shape = [dims.get("tokens"), dims.get("width")];
    let (x, gate) = (fill(&shape, setting, random), normal(&shape, 4.0, random));
    with(Site::layer(0, "attn_gated"), &Call::SigmoidGate { x: &x, gate: &gate });
}
