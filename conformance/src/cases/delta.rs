//! Cases of short convolutions and of the gated delta rule.
//!
//! The rule is exact on whole numbers where nothing decays (g = 0), every correction is written in full
//! (β = 1), and keys are one-hot: the state then holds the values themselves.

use super::Suite::{Rounding, Structure};
use super::{Dims, Line, Setting, Suite, With, fill, line, normal, tensor, whole};
use fixtures::random::SplitMix64;
use reference::Call;
use reference::ops::Delta;
use spec::families::{Activation, Conv};
use spec::{Site, Vector};

pub(super) const CASES: &[Line] = &[
    line(
        "causal_conv/taps",
        "taps read backwards",
        Structure,
        &[("tokens", 7), ("channels", 12), ("kernel", 4)],
        conv,
    ),
    line(
        "causal_conv/silu",
        "no activation behind the filter",
        Rounding,
        &[("tokens", 7), ("channels", 24), ("kernel", 4)],
        conv_silu,
    ),
    line(
        "conv_state/short_pass",
        "a pass shorter than the filter",
        Structure,
        &[("tokens", 2), ("channels", 12), ("kernel", 4)],
        conv_state,
    ),
    line(
        "gdn_decay/realistic",
        "a_log for e^a_log, no softplus",
        Rounding,
        &[("tokens", 5), ("heads", 6)],
        decay,
    ),
    line(
        "gdn_core/one_hot_keys",
        "values of another head or token",
        Structure,
        &[("tokens", 5), ("key_heads", 2), ("share", 2), ("key_dim", 6), ("value_dim", 10)],
        core,
    ),
    line(
        "gdn_core/realistic",
        "order of decay, write and read",
        Rounding,
        &[("tokens", 9), ("key_heads", 2), ("share", 2), ("key_dim", 8), ("value_dim", 12)],
        core,
    ),
    line(
        "gdn_core/thousand_steps",
        "a state that loses what it holds for long",
        Rounding,
        &[("tokens", 1000), ("key_heads", 1), ("share", 2), ("key_dim", 8), ("value_dim", 6)],
        slow,
    ),
    line(
        "gdn_state/one_hot_keys",
        "the state of another head",
        Structure,
        &[("tokens", 5), ("key_heads", 2), ("share", 2), ("key_dim", 6), ("value_dim", 10)],
        state,
    ),
];

fn filters(channels: usize, kernel: usize, setting: Setting, random: &mut SplitMix64) -> Conv {
    let weight: Vec<f32> = match setting.suite {
        Suite::Structure => {
            (0..channels * kernel).map(|n| (n % kernel + 1) as f32 + (n / kernel % 3) as f32).collect()
        }
        Suite::Rounding => (0..channels * kernel).map(|_| random.normal() as f32).collect(),
    };
    Conv { weight: Vector::new("conv", weight), bias: None, kernel }
}

fn filtered(
    dims: &Dims,
    setting: Setting,
    random: &mut SplitMix64,
    act: Option<Activation>,
    with: &mut With,
) {
    let (channels, kernel) = (dims.get("channels"), dims.get("kernel"));
    let conv = filters(channels, kernel, setting, random);
    let u = fill(&[dims.get("tokens"), channels], setting, random);
    let before = fill(&[channels, kernel], setting, random);
    let call = Call::CausalConv { u: &u, state: Some(&before), conv: &conv, activation: act };
    with(Site::layer(0, "conv_out"), &call);
}

fn conv(dims: &Dims, setting: Setting, random: &mut SplitMix64, with: &mut With) {
    filtered(dims, setting, random, None, with);
}

fn conv_silu(dims: &Dims, setting: Setting, random: &mut SplitMix64, with: &mut With) {
    filtered(dims, setting, random, Some(Activation::Silu), with);
}

fn conv_state(dims: &Dims, setting: Setting, random: &mut SplitMix64, with: &mut With) {
    let (channels, kernel) = (dims.get("channels"), dims.get("kernel"));
    let u = fill(&[dims.get("tokens"), channels], setting, random);
    let before = fill(&[channels, kernel], setting, random);
    with(Site::layer(0, "conv_state"), &Call::ConvState { u: &u, state: Some(&before), kernel });
}

fn decay(dims: &Dims, _: Setting, random: &mut SplitMix64, with: &mut With) {
    let heads = dims.get("heads");
    let a = normal(&[dims.get("tokens"), heads], 3.0, random);
    let mut vector =
        |name: &str| Vector::new(name, (0..heads).map(|_| random.normal() as f32).collect::<Vec<_>>());
    let (a_log, dt_bias) = (vector("a_log"), vector("dt_bias"));
    with(Site::layer(0, "gdn_g"), &Call::GdnDecay { a: &a, a_log: &a_log, dt_bias: &dt_bias });
}

/// Decays of at most 0.2 % a step: after a thousand steps the first is still there.
fn slow(dims: &Dims, setting: Setting, random: &mut SplitMix64, with: &mut With) {
    rule(dims, setting, random, 0.002, |delta| with(Site::layer(0, "gdn_core"), &Call::GdnCore(delta)));
}

fn core(dims: &Dims, setting: Setting, random: &mut SplitMix64, with: &mut With) {
    rule(dims, setting, random, 2.0, |delta| with(Site::layer(0, "gdn_core"), &Call::GdnCore(delta)));
}

fn state(dims: &Dims, setting: Setting, random: &mut SplitMix64, with: &mut With) {
    rule(dims, setting, random, 2.0, |delta| with(Site::layer(0, "gdn_state"), &Call::GdnState(delta)));
}

fn rule(
    dims: &Dims,
    setting: Setting,
    random: &mut SplitMix64,
    decay: f64,
    with: impl FnOnce(Delta<reference::Tensor>),
) {
    let (tokens, key_heads) = (dims.get("tokens"), dims.get("key_heads"));
    let (heads, dk, dv) = (key_heads * dims.get("share"), dims.get("key_dim"), dims.get("value_dim"));
    let structure = setting.suite == Suite::Structure;
    let unit = 1.0 / (dk as f64).sqrt();
    let (q, k) = if structure {
        let one_hot = |step: usize| {
            tensor(&[tokens, key_heads, dk], |n| {
                let (t, h, i) = (n / dk / key_heads, n / dk % key_heads, n % dk);
                f32::from(i == (step * t + h) % dk)
            })
        };
        (one_hot(1), one_hot(2))
    } else {
        (normal(&[tokens, key_heads, dk], unit, random), normal(&[tokens, key_heads, dk], unit / 4.0, random))
    };
    let v = fill(&[tokens, heads, dv], setting, random);
    let g = tensor(&[tokens, heads], |_| if structure { 0.0 } else { (-decay * random.uniform()) as f32 });
    let beta = tensor(&[tokens, heads], |_| if structure { 1.0 } else { random.uniform() as f32 });
    let before =
        if structure { whole(&[heads, dk, dv], 5, random) } else { normal(&[heads, dk, dv], 1.0, random) };
    with(Delta { q: &q, k: &k, v: &v, g: &g, beta: &beta, state: Some(&before) });
}
