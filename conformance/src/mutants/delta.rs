//! Mistakes of the gated delta rule, its convolution and its gates.

use super::{Eval, History, Mutant, flat, mutant, shaped};
use crate::contract::bf16;
use reference::ops::{Delta, Run};
use reference::{Call, Tensor};
use spec::families::{Activation, Conv};
use spec::{Site, Vector};

/// The catalogue's mutants of linear attention, short convolutions and sigmoid gates.
pub static MUTANTS: &[Mutant] = &[
    mutant("gdn-decay-form", "raw", "a_log in the place of e^a_log", DECAY, decay_raw),
    mutant("gdn-decay-form", "sign", "the decay is e^-g", DECAY, decay_sign),
    mutant("gdn-decay-form", "decay", "the decay itself serves as its logarithm", DECAY, decay_for_log),
    mutant("gdn-softplus", "missing", "g = -e^a_log · (a + dt_bias)", DECAY, no_softplus),
    mutant("gdn-softplus", "twice", "softplus of softplus", DECAY, softplus_twice),
    mutant("gdn-softplus", "bias", "dt_bias is left out", DECAY, no_dt_bias),
    mutant("gdn-beta", "raw", "β without its sigmoid", "a write strength", beta_raw),
    mutant(
        "gdn-beta",
        "exchanged",
        "the projections of α and β are exchanged",
        "a write strength",
        beta_exchanged,
    ),
    mutant("gdn-beta", "key", "β scales the key and not the correction", RULE, beta_on_key),
    mutant("gdn-delta-missing", "", "v is written and not v - Sᵀk", RULE, no_correction),
    mutant("gdn-update-order", "decay-last", "the state is decayed after the write", RULE, decay_last),
    mutant(
        "gdn-update-order",
        "predict-first",
        "the prediction is made before the decay",
        RULE,
        predict_first,
    ),
    mutant("gdn-update-order", "read-first", "the state is read before the write", RULE, read_first),
    mutant(
        "gdn-state-transposed",
        "",
        "the carried state is read as [V, K]",
        "a carried state",
        state_transposed,
    ),
    mutant("gdn-state-lost", "", "every pass starts from zeros", "a carried state", state_lost),
    mutant(
        "gdn-state-head-alias",
        "",
        "all heads carry on from the state of head 0",
        "a carried state of two heads",
        state_of_head_0,
    ),
    mutant(
        "gdn-head-map",
        "",
        "value head j reads key head j mod key_heads",
        "value heads that share a key head",
        tiled_heads,
    ),
    mutant("num-state-bf16", "", "the state is rounded to bf16 after every token", RULE, state_bf16),
    mutant("gdn-l2norm-missing", "", "queries or keys are not normed", UNIT, not_normed),
    mutant("gdn-l2norm-missing", "mean", "the mean square in the place of the sum", UNIT, mean_normed),
    mutant("gdn-l2norm-missing", "eps", "x / max(|x|, eps)", UNIT, floor_normed),
    mutant(
        "gdn-query-scale-missing",
        "",
        "queries are not scaled by 1/√d_k",
        "a scaled unit norm",
        unit_unscaled,
    ),
    mutant(
        "gdn-conv-silu-missing",
        "",
        "no activation behind the convolution, or one where there is none",
        CONV,
        other_activation,
    ),
    mutant("gdn-conv-taps", "reversed", "the taps are read backwards", CONV, taps_reversed),
    mutant(
        "gdn-conv-taps",
        "transposed",
        "[channels, kernel] read as [kernel, channels]",
        CONV,
        taps_transposed,
    ),
    mutant(
        "gdn-conv-state",
        "lost",
        "every pass starts from zeros",
        "a carried convolution",
        conv_state_lost,
    ),
    mutant(
        "gdn-conv-state",
        "short",
        "the kept rows are one too old",
        "a convolution over two tokens or more",
        conv_state_old,
    ),
    mutant(
        "gdn-split-sizes",
        "flat",
        "parts that are interleaved per head are read side by side",
        "a fused row of interleaved parts",
        flat_parts,
    ),
    mutant(
        "gdn-split-sizes",
        "next",
        "a part is cut out one width too late, or too early at the end",
        "a part of a fused row",
        next_columns,
    ),
    mutant(
        "attn-gate-split",
        "",
        "query and gate are split flat and not per head",
        "a gated query projection",
        flat_gate,
    ),
    mutant("gdn-gated-norm-order", "", "the gate comes before the norm", "a gated norm", gate_first),
    mutant("gdn-gated-norm-order", "sigmoid", "σ(z) for silu(z)", "a gated norm", sigmoid_for_silu),
    mutant("attn-gate-missing", "", "the sigmoid gate is not applied", "a sigmoid gate", gate_missing),
    mutant("attn-gate-missing", "silu", "silu(gate) for σ(gate)", "a sigmoid gate", silu_gate),
];

const DECAY: &str = "a gated delta rule";
const RULE: &str = "a gated delta rule";
const UNIT: &str = "a unit norm";
const CONV: &str = "a short convolution";

fn decay<'a>(call: &Call<'a, Tensor>) -> Option<(&'a Tensor, &'a Vector, &'a Vector)> {
    match *call {
        Call::GdnDecay { a, a_log, dt_bias } => Some((a, a_log, dt_bias)),
        _ => None,
    }
}

fn decay_by(call: &Call<Tensor>, g: impl Fn(f64, f64) -> f64) -> Option<Tensor> {
    let (a, a_log, dt_bias) = decay(call)?;
    let heads = a_log.len();
    let value = |(n, &a): (usize, &f32)| {
        g(f64::from(a) + f64::from(dt_bias[n % heads]), f64::from(a_log[n % heads])) as f32
    };
    shaped(a, a.iter().enumerate().map(value).collect())
}

fn softplus(x: f64) -> f64 {
    x.max(0.0) + libm::log1p(libm::exp(-x.abs()))
}

fn decay_raw(call: &Call<Tensor>, _: Site, _: &History, _: &mut Eval) -> Option<Tensor> {
    decay_by(call, |x, a_log| a_log * softplus(x))
}

fn decay_sign(call: &Call<Tensor>, _: Site, _: &History, eval: &mut Eval) -> Option<Tensor> {
    decay(call).map(|_| eval(call).mapv(|g| -g).into_shared())
}

fn decay_for_log(call: &Call<Tensor>, _: Site, _: &History, eval: &mut Eval) -> Option<Tensor> {
    decay(call).map(|_| eval(call).mapv(libm::expf).into_shared())
}

fn no_softplus(call: &Call<Tensor>, _: Site, _: &History, _: &mut Eval) -> Option<Tensor> {
    decay_by(call, |x, a_log| -libm::exp(a_log) * x)
}

fn softplus_twice(call: &Call<Tensor>, _: Site, _: &History, _: &mut Eval) -> Option<Tensor> {
    decay_by(call, |x, a_log| -libm::exp(a_log) * softplus(softplus(x)))
}

fn no_dt_bias(call: &Call<Tensor>, _: Site, _: &History, eval: &mut Eval) -> Option<Tensor> {
    let (a, a_log, dt_bias) = decay(call)?;
    let zeros = Vector::new(&dt_bias.name, vec![0f32; dt_bias.len()]);
    Some(eval(&Call::GdnDecay { a, a_log, dt_bias: &zeros }))
}

fn beta_raw(call: &Call<Tensor>, _: Site, _: &History, _: &mut Eval) -> Option<Tensor> {
    let Call::Sigmoid { x } = *call else { return None };
    Some(x.clone())
}

fn beta_exchanged(call: &Call<Tensor>, at: Site, history: &History, eval: &mut Eval) -> Option<Tensor> {
    let Call::Sigmoid { x } = *call else { return None };
    let a = history.value(at, "gdn_a").filter(|a| a.shape() == x.shape())?;
    Some(eval(&Call::Sigmoid { x: a }))
}

/// How the recurrence is run; the default is the honest way.
#[derive(Clone, Copy, Default)]
struct Rule {
    no_correction: bool,
    decay_last: bool,
    predict_first: bool,
    read_first: bool,
    beta_on_key: bool,
    tiled: bool,
    bf16: bool,
}

/// The result of the core or of the state under another rule, in f64 with a state in f32 between tokens.
fn recurrence(call: &Call<Tensor>, eval: &mut Eval, rule: Rule) -> Option<Tensor> {
    let (d, state) = match call {
        Call::GdnCore(d) => (d, false),
        Call::GdnState(d) => (d, true),
        _ => return None,
    };
    let (tokens, key_heads, dk) = (d.k.shape()[0], d.k.shape()[1], d.k.shape()[2]);
    let (heads, dv) = (d.v.shape()[1], d.v.shape()[2]);
    let [q, k, v, g, beta] = [d.q, d.k, d.v, d.g, d.beta].map(flat);
    let start = d.state.map_or_else(|| vec![0f32; heads * dk * dv], flat);
    let mut core = vec![0f32; tokens * heads * dv];
    let mut end = start.clone();
    for h in 0..heads {
        let key_head = if rule.tiled { h % key_heads } else { h / (heads / key_heads) };
        let s = &mut end[h * dk * dv..][..dk * dv];
        for t in 0..tokens {
            let at = (t * key_heads + key_head) * dk;
            let (q, k) = (&q[at..][..dk], &k[at..][..dk]);
            let v = &v[(t * heads + h) * dv..][..dv];
            let keep = libm::exp(f64::from(g[t * heads + h]));
            let strength = f64::from(beta[t * heads + h]);
            let on_key = if rule.beta_on_key { strength } else { 1.0 };
            let strength = if rule.beta_on_key { 1.0 } else { strength };
            for j in 0..dv {
                let column = |s: &[f32], i: usize| f64::from(s[i * dv + j]);
                let read = |s: &[f32]| (0..dk).map(|i| column(s, i) * f64::from(q[i])).sum::<f64>();
                if rule.read_first {
                    core[(t * heads + h) * dv + j] = read(s) as f32;
                }
                let before = if rule.decay_last { 1.0 } else { keep };
                let seen = if rule.predict_first { 1.0 } else { before };
                let predicted: f64 = (0..dk).map(|i| seen * column(s, i) * f64::from(k[i]) * on_key).sum();
                let delta = strength * (f64::from(v[j]) - if rule.no_correction { 0.0 } else { predicted });
                for i in 0..dk {
                    let written = before * column(s, i) + f64::from(k[i]) * on_key * delta;
                    let written = if rule.decay_last { keep * written } else { written };
                    s[i * dv + j] = if rule.bf16 { bf16(written as f32) } else { written as f32 };
                }
                if !rule.read_first {
                    core[(t * heads + h) * dv + j] = read(s) as f32;
                }
            }
        }
    }
    let honest = eval(call);
    shaped(&honest, if state { end } else { core })
}

fn beta_on_key(call: &Call<Tensor>, _: Site, _: &History, eval: &mut Eval) -> Option<Tensor> {
    recurrence(call, eval, Rule { beta_on_key: true, ..Rule::default() })
}

fn no_correction(call: &Call<Tensor>, _: Site, _: &History, eval: &mut Eval) -> Option<Tensor> {
    recurrence(call, eval, Rule { no_correction: true, ..Rule::default() })
}

fn decay_last(call: &Call<Tensor>, _: Site, _: &History, eval: &mut Eval) -> Option<Tensor> {
    recurrence(call, eval, Rule { decay_last: true, ..Rule::default() })
}

fn predict_first(call: &Call<Tensor>, _: Site, _: &History, eval: &mut Eval) -> Option<Tensor> {
    recurrence(call, eval, Rule { predict_first: true, ..Rule::default() })
}

fn read_first(call: &Call<Tensor>, _: Site, _: &History, eval: &mut Eval) -> Option<Tensor> {
    matches!(call, Call::GdnCore(_))
        .then(|| recurrence(call, eval, Rule { read_first: true, ..Rule::default() }))?
}

fn tiled_heads(call: &Call<Tensor>, _: Site, _: &History, eval: &mut Eval) -> Option<Tensor> {
    let (Call::GdnCore(d) | Call::GdnState(d)) = call else { return None };
    let (heads, key_heads) = (d.v.shape()[1], d.k.shape()[1]);
    (heads > key_heads && key_heads > 1)
        .then(|| recurrence(call, eval, Rule { tiled: true, ..Rule::default() }))?
}

fn state_bf16(call: &Call<Tensor>, _: Site, _: &History, eval: &mut Eval) -> Option<Tensor> {
    recurrence(call, eval, Rule { bf16: true, ..Rule::default() })
}

/// The rule from another state.
fn from_state(
    call: &Call<Tensor>,
    eval: &mut Eval,
    change: impl Fn(&Tensor) -> Option<Option<Tensor>>,
) -> Option<Tensor> {
    let (Call::GdnCore(d) | Call::GdnState(d)) = call else { return None };
    let changed = change(d.state?)?;
    let delta = Delta { state: changed.as_ref(), ..*d };
    Some(match call {
        Call::GdnCore(_) => eval(&Call::GdnCore(delta)),
        _ => eval(&Call::GdnState(delta)),
    })
}

fn state_lost(call: &Call<Tensor>, _: Site, _: &History, eval: &mut Eval) -> Option<Tensor> {
    from_state(call, eval, |_| Some(None))
}

fn state_transposed(call: &Call<Tensor>, _: Site, _: &History, eval: &mut Eval) -> Option<Tensor> {
    from_state(call, eval, |state| {
        let (dk, dv) = (state.shape()[1], state.shape()[2]);
        let before = flat(state);
        let read = |n: usize| before[n / (dk * dv) * dk * dv + n % dv * dk + n / dv % dk];
        Some(Some(shaped(state, (0..before.len()).map(read).collect())?))
    })
}

fn state_of_head_0(call: &Call<Tensor>, _: Site, _: &History, eval: &mut Eval) -> Option<Tensor> {
    from_state(call, eval, |state| {
        let (heads, before) = (state.shape()[0], flat(state));
        let size = before.len() / heads;
        Some(Some(shaped(state, (0..before.len()).map(|n| before[n % size]).collect())?))
            .filter(|_| heads > 1)
    })
}

/// Every head's vector divided by `length(squares, dim)`, times the scale.
fn unit(call: &Call<Tensor>, length: impl Fn(f64, usize) -> f64) -> Option<Tensor> {
    let Call::L2Norm { x, scale } = *call else { return None };
    let dim = *x.shape().last()?;
    let before = flat(x);
    let values = before.chunks_exact(dim).flat_map(|x| {
        let squares: f64 = x.iter().map(|&v| f64::from(v).powi(2)).sum();
        let by = scale / length(squares, dim);
        x.iter().map(|&v| (f64::from(v) * by) as f32).collect::<Vec<_>>()
    });
    shaped(x, values.collect())
}

fn not_normed(call: &Call<Tensor>, _: Site, _: &History, _: &mut Eval) -> Option<Tensor> {
    unit(call, |_, _| 1.0)
}

fn mean_normed(call: &Call<Tensor>, _: Site, _: &History, _: &mut Eval) -> Option<Tensor> {
    unit(call, |squares, dim| (squares / dim as f64 + 1e-6).sqrt())
}

fn floor_normed(call: &Call<Tensor>, _: Site, _: &History, _: &mut Eval) -> Option<Tensor> {
    unit(call, |squares, _| squares.sqrt().max(1e-6))
}

fn unit_unscaled(call: &Call<Tensor>, _: Site, _: &History, eval: &mut Eval) -> Option<Tensor> {
    match *call {
        Call::L2Norm { x, scale } if scale != 1.0 => Some(eval(&Call::L2Norm { x, scale: 1.0 })),
        _ => None,
    }
}

fn other_activation(call: &Call<Tensor>, _: Site, _: &History, eval: &mut Eval) -> Option<Tensor> {
    let Call::CausalConv { u, state, conv, activation } = *call else { return None };
    let activation = if activation.is_some() { None } else { Some(Activation::Silu) };
    Some(eval(&Call::CausalConv { u, state, conv, activation }))
}

fn with_taps(
    call: &Call<Tensor>,
    eval: &mut Eval,
    tap: impl Fn(usize, usize, usize, usize) -> usize,
) -> Option<Tensor> {
    let Call::CausalConv { u, state, conv, activation } = *call else { return None };
    let (kernel, channels) = (conv.kernel, conv.weight.len() / conv.kernel);
    let weight: Vec<f32> =
        (0..channels * kernel).map(|n| conv.weight[tap(n / kernel, n % kernel, channels, kernel)]).collect();
    if weight[..] == conv.weight[..] {
        return None;
    }
    let conv = Conv { weight: Vector::new(&conv.weight.name, weight), bias: conv.bias.clone(), kernel };
    Some(eval(&Call::CausalConv { u, state, conv: &conv, activation }))
}

fn taps_reversed(call: &Call<Tensor>, _: Site, _: &History, eval: &mut Eval) -> Option<Tensor> {
    with_taps(call, eval, |c, j, _, kernel| c * kernel + kernel - 1 - j)
}

fn taps_transposed(call: &Call<Tensor>, _: Site, _: &History, eval: &mut Eval) -> Option<Tensor> {
    with_taps(call, eval, |c, j, channels, _| j * channels + c)
}

fn conv_state_lost(call: &Call<Tensor>, _: Site, _: &History, eval: &mut Eval) -> Option<Tensor> {
    match *call {
        Call::CausalConv { u, state: Some(_), conv, activation } => {
            Some(eval(&Call::CausalConv { u, state: None, conv, activation }))
        }
        Call::ConvState { u, state: Some(_), kernel } if u.shape()[0] < kernel => {
            Some(eval(&Call::ConvState { u, state: None, kernel }))
        }
        _ => None,
    }
}

fn conv_state_old(call: &Call<Tensor>, _: Site, _: &History, eval: &mut Eval) -> Option<Tensor> {
    let Call::ConvState { kernel, .. } = *call else { return None };
    let mut y = eval(call);
    for row in y.as_slice_mut()?.chunks_exact_mut(kernel) {
        row.copy_within(..kernel - 1, 1);
        row[0] = 0.0;
    }
    Some(y)
}

/// The same columns from other runs.
fn with_runs(
    call: &Call<Tensor>,
    eval: &mut Eval,
    change: impl Fn(&Run, usize) -> Option<Run>,
) -> Option<Tensor> {
    let Call::Columns { x, runs, width } = *call else { return None };
    let columns = x.len() / x.shape()[0].max(1);
    let changed = runs.iter().map(|run| change(run, columns)).collect::<Option<Vec<Run>>>()?;
    (changed != runs).then(|| eval(&Call::Columns { x, runs: &changed, width }))
}

fn side_by_side(run: &Run, _: usize) -> Option<Run> {
    (run.groups > 1 && run.stride > run.width)
        .then(|| Run::one(run.start * run.groups, run.width * run.groups))
}

fn flat_parts(call: &Call<Tensor>, _: Site, _: &History, eval: &mut Eval) -> Option<Tensor> {
    with_runs(call, eval, side_by_side)
}

fn flat_gate(call: &Call<Tensor>, at: Site, _: &History, eval: &mut Eval) -> Option<Tensor> {
    let Call::Slice { x, width, start, end } = *call else { return None };
    let row = x.len() / x.shape()[0].max(1);
    let groups = row / width;
    if !["q_split", "attn_gate"].contains(&at.name) || groups < 2 {
        return None;
    }
    let honest = eval(call);
    let flat_part = eval(&Call::Slice { x, width: row, start: start * groups, end: end * groups });
    shaped(&honest, flat(&flat_part))
}

fn next_columns(call: &Call<Tensor>, _: Site, _: &History, eval: &mut Eval) -> Option<Tensor> {
    with_runs(call, eval, |run, columns| {
        let last = run.start + (run.groups - 1) * run.stride + run.width;
        let start = match run.start {
            start if last + run.width <= columns => start + run.width,
            start => start.checked_sub(run.width)?,
        };
        Some(Run { start, ..*run })
    })
}

fn gate_first(call: &Call<Tensor>, at: Site, history: &History, eval: &mut Eval) -> Option<Tensor> {
    let Call::GatedAct { gate, activation, .. } = *call else { return None };
    let (core, norm) = (history.value(at, "gdn_core")?, history.norm(at, "gdn_core_norm")?);
    if at.name != "gdn_norm" || core.len() != gate.len() {
        return None;
    }
    let core = shaped(gate, flat(core))?;
    let gated = eval(&Call::GatedAct { gate, up: &core, activation });
    let y =
        eval(&Call::RmsNorm { x: &gated, weight: norm.weight.as_ref(), width: norm.width, eps: norm.eps });
    shaped(gate, flat(&y))
}

fn sigmoid_for_silu(call: &Call<Tensor>, at: Site, _: &History, _: &mut Eval) -> Option<Tensor> {
    let Call::GatedAct { gate, up, .. } = *call else { return None };
    let y = gate.iter().zip(up).map(|(&g, &u)| (f64::from(u) / (1.0 + libm::exp(-f64::from(g)))) as f32);
    (at.name == "gdn_norm").then(|| shaped(gate, y.collect()))?
}

fn gate_missing(call: &Call<Tensor>, _: Site, _: &History, _: &mut Eval) -> Option<Tensor> {
    let Call::SigmoidGate { x, .. } = *call else { return None };
    Some(x.clone())
}

fn silu_gate(call: &Call<Tensor>, _: Site, _: &History, eval: &mut Eval) -> Option<Tensor> {
    let Call::SigmoidGate { x, gate } = *call else { return None };
    // x · silu(g) = (x · σ(g)) · g, where g may be one value a row.
    let gated = eval(call);
    let row = x.len() / x.shape()[0].max(1);
    let (gates, width) = (flat(gate), gate.len() / gate.shape()[0].max(1));
    let factor = |n: usize| gates[n / row * width + if width == 1 { 0 } else { n % row }];
    shaped(x, gated.iter().enumerate().map(|(n, &y)| y * factor(n)).collect())
}
