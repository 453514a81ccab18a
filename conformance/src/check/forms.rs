//! Calls as plain arrays, for vectors: those that kernels outside are asked for, attention as a whole, and single steps
//! that no interface has.
//!
//! | op | inputs | numbers |
//! |---|---|---|
//! | what [`plain_call`] lists, `attention` | | |
//! | `attn_scores` | q [tokens, heads, head_dim], k [keys, kv_heads, head_dim] | scale, softcap (0: none) |
//! | `attn_probs` | scores [heads, tokens, keys], sinks [heads]? | first (position of the first token), window (0: all keys before) |
//! | `attn_ctx` | probs [heads, tokens, keys], v [keys, kv_heads, value_dim] | |
//! | `rope_cos`, `rope_sin` | positions [tokens] | theta, rotary_dim |
//! | `append` | cache? , rows [tokens, ..] | width |
//! | `truncate` | cache | keep |
//! | `l2_norm` | x | scale |
//! | `match_rms` | x, like | |
//! | `slice` | x | width, start, end: of every `width` columns those from start to end |
//! | `concat` | a, b | |
//! | `sigmoid` | x | |
//! | `causal_conv` | u [tokens, channels], state?, weight [channels, kernel], b [channels]? | silu (1: applied to the result) |
//! | `conv_state` | u, state? | kernel |
//! | `gdn_decay` | a [tokens, heads], a_log [heads], dt_bias [heads] | |
//! | `gdn_state` | as `gated_delta_rule`; the state behind the last token | |
//! | `router_index` | logits [tokens, experts], bias [experts]? | chosen, and what the rule reads |
//! | `router_weights` | logits, index [tokens, chosen] | the same |
//! | `mixture` | y, weights | |
//!
//! The rule of a router is a number: 0 softmax over all experts, 1 softmax over the chosen ones, 2 probabilities, 3 sigmoid.
//!
//! [`plain_call`]: crate::subject::ops::plain_call

use crate::subject::ops::PlainForms;
use device::plugin::{Input, OpCall};
use reference::ops::{Reach, Table};
use reference::{Call, Tensor};
use spec::families::Activation;
use spec::families::moe::{Router, Scoring};
use spec::{Scaling, Vector};

/// The forms of the calls of one case, one after another.
#[derive(Default)]
pub(super) struct Forms(PlainForms);

impl Forms {
    /// The form of the next call; nothing where it has none.
    pub fn next(&mut self, call: &Call<Tensor>, output: &[usize]) -> Option<OpCall> {
        self.0.next(call, output).or_else(|| step(call, output))
    }
}

fn flag(set: bool) -> f64 {
    f64::from(u8::from(set))
}

fn step(call: &Call<Tensor>, output: &[usize]) -> Option<OpCall> {
    let mut op = call.op();
    let (inputs, numbers): (Vec<Option<Input>>, Vec<(&str, f64)>) = match *call {
        Call::AttnScores { q, k, scale, softcap } => {
            let numbers = vec![("scale", scale), ("softcap", softcap.unwrap_or(0.0))];
            (vec![tensor("q", q), tensor("k", k)], numbers)
        }
        Call::AttnProbs { scores, mask, sinks } => {
            let window = match mask.reach {
                Reach::Causal => 0,
                Reach::Window(width) => width,
                Reach::All | Reach::TwoSided(_) => return None,
            };
            let numbers = vec![("first", mask.first as f64), ("window", window as f64)];
            (vec![tensor("scores", scores), vector("sinks", sinks)], numbers)
        }
        Call::AttnCtx { probs, v } => (vec![tensor("probs", probs), tensor("v", v)], vec![]),
        Call::RopeTable { positions, rope, table } => {
            // Frequencies that are changed for long contexts take more numbers than a form has names for.
            (rope.scaling == Scaling::Default).then_some(())?;
            op = match table {
                Table::Cos => "rope_cos",
                Table::Sin => "rope_sin",
            };
            let values = positions.iter().map(|&position| position as f32).collect();
            let positions = Input { name: "positions".into(), shape: vec![positions.len()], values };
            (vec![Some(positions)], vec![("theta", rope.theta), ("rotary_dim", rope.rotary_dim as f64)])
        }
        Call::Append { ref cache, rows, width } => {
            let cache = cache.as_ref().and_then(|cache| tensor("cache", cache));
            (vec![cache, tensor("rows", rows)], vec![("width", width as f64)])
        }
        Call::Truncate { ref cache, keep } => (vec![tensor("cache", cache)], vec![("keep", keep as f64)]),
        Call::L2Norm { x, scale } => (vec![tensor("x", x)], vec![("scale", scale)]),
        Call::MatchRms { x, like } => (vec![tensor("x", x), tensor("like", like)], vec![]),
        Call::Slice { x, width, start, end } => {
            let numbers = vec![("width", width as f64), ("start", start as f64), ("end", end as f64)];
            (vec![tensor("x", x)], numbers)
        }
        Call::Concat { a, b } => (vec![tensor("a", a), tensor("b", b)], vec![]),
        Call::Sigmoid { x } => (vec![tensor("x", x)], vec![]),
        Call::CausalConv { u, state, conv, activation } => {
            let channels = conv.weight.len() / conv.kernel.max(1);
            let shape = vec![channels, conv.kernel];
            let weight = Input { name: "weight".into(), shape, values: conv.weight.to_vec() };
            let silu = match activation {
                None => false,
                Some(Activation::Silu) => true,
                Some(Activation::GeluTanh) => return None,
            };
            let state = state.and_then(|state| tensor("state", state));
            let inputs = vec![tensor("u", u), state, Some(weight), vector("b", conv.bias.as_ref())];
            (inputs, vec![("silu", flag(silu))])
        }
        Call::ConvState { u, state, kernel } => {
            let state = state.and_then(|state| tensor("state", state));
            (vec![tensor("u", u), state], vec![("kernel", kernel as f64)])
        }
        Call::GdnDecay { a, a_log, dt_bias } => {
            let inputs = vec![tensor("a", a), vector("a_log", Some(a_log)), vector("dt_bias", Some(dt_bias))];
            (inputs, vec![])
        }
        Call::GdnState(d) => {
            let state = d.state.and_then(|state| tensor("state", state));
            let named = [("q", d.q), ("k", d.k), ("v", d.v), ("g", d.g), ("beta", d.beta)];
            (named.into_iter().map(|(name, x)| tensor(name, x)).chain([state]).collect(), vec![])
        }
        Call::RouterIndex { logits, router, bias } => {
            (vec![tensor("logits", logits), vector("bias", bias)], rule(router))
        }
        Call::RouterWeights { logits, index, router } => {
            (vec![tensor("logits", logits), tensor("index", index)], rule(router))
        }
        Call::Mixture { y, weights } => (vec![tensor("y", y), tensor("weights", weights)], vec![]),
        _ => return None,
    };
    Some(OpCall {
        op: op.to_string(),
        inputs: inputs.into_iter().flatten().collect(),
        numbers: numbers.into_iter().map(|(name, value)| (name.to_string(), value)).collect(),
        output: output.to_vec(),
    })
}

/// How a router chooses and weighs.
fn rule(router: &Router) -> Vec<(&'static str, f64)> {
    let mut numbers = vec![("chosen", router.num_experts_per_tok as f64)];
    match router.scoring {
        Scoring::Softmax { norm_topk_prob } => {
            numbers.extend([("rule", 0.0), ("norm_topk_prob", flag(norm_topk_prob))]);
        }
        Scoring::SoftmaxOfChosen => numbers.push(("rule", 1.0)),
        Scoring::Probabilities => numbers.push(("rule", 2.0)),
        Scoring::Sigmoid { n_group, topk_group, norm_topk_prob, routed_scaling_factor } => {
            numbers.extend([
                ("rule", 3.0),
                ("n_group", n_group as f64),
                ("topk_group", topk_group as f64),
                ("norm_topk_prob", flag(norm_topk_prob)),
                ("routed_scaling_factor", routed_scaling_factor),
            ]);
        }
    }
    numbers
}

fn tensor(name: &str, x: &Tensor) -> Option<Input> {
    Some(Input { name: name.to_string(), shape: x.shape().to_vec(), values: x.iter().copied().collect() })
}

fn vector(name: &str, x: Option<&Vector>) -> Option<Input> {
    let x = x?;
    Some(Input { name: name.to_string(), shape: vec![x.len()], values: x.to_vec() })
}
