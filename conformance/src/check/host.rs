//! The host side of the NPU path, op by op.
//!
//! Attention is one op there: its scores and probabilities are taken in, and the context is its answer. What a case
//! asks of probabilities or of context alone is read off one-hot keys and values, where those are few.

use super::Given;
use device::host::attention::Attention;
use device::host::cache::KvCache;
use device::host::conv::ConvState;
use device::host::delta::{DeltaState, Heads, Writes, log_decay, unit_length};
use device::host::math::{sigmoid, silu, softcap};
use device::host::rope::RopeTable;
use device::host::{act, altup, norm, router};
use reference::ops::{Delta, Mask, Reach};
use reference::{Call, Tensor};
use spec::families::{Activation, Conv};
use spec::{Rope, Vector};

/// The ops of the host side, with what was taken in of an attention.
#[derive(Default)]
pub struct HostOps {
    scores: Option<Scores>,
    mask: Option<(Mask, Option<Vector>)>,
}

struct Scores {
    q: Tensor,
    k: Tensor,
    scale: f64,
    softcap: Option<f64>,
}

impl HostOps {
    /// The result of a call.
    pub fn run(&mut self, call: &Call<Tensor>) -> Given {
        match *call {
            Call::AttnScores { q, k, scale, softcap } => {
                self.scores = Some(Scores { q: q.clone(), k: k.clone(), scale, softcap });
                Given::NotSupported
            }
            Call::AttnProbs { scores, mask, sinks } if self.scores.is_none() => {
                probabilities(scores, mask, sinks)
            }
            Call::AttnProbs { mask, sinks, .. } => {
                self.mask = Some((mask, sinks.cloned()));
                Given::NotSupported
            }
            Call::AttnCtx { probs, v } => match (self.scores.take(), self.mask.take()) {
                (Some(scores), Some((mask, sinks))) => attention(&scores, mask, sinks.as_ref(), v),
                _ => context(probs, v),
            },
            _ => simple(call),
        }
    }
}

fn flat(x: &Tensor) -> Vec<f32> {
    x.iter().copied().collect()
}

pub(super) fn shaped(shape: &[usize], values: Vec<f32>) -> Given {
    match Tensor::from_shape_vec(ndarray::IxDyn(shape), values) {
        Ok(value) => Given::Values(value),
        Err(error) => Given::Stopped(error.to_string()),
    }
}

/// `x` changed in place.
fn changed(x: &Tensor, change: impl FnOnce(&mut [f32])) -> Given {
    let mut values = flat(x);
    change(&mut values);
    shaped(x.shape(), values)
}

fn simple(call: &Call<Tensor>) -> Given {
    match *call {
        Call::RmsNorm { x, weight, width, eps } => {
            let y = match weight {
                Some(weight) => norm::rms_norm(&flat(x), weight, eps),
                None => norm::unit_norm(&flat(x), width, eps),
            };
            let (tokens, groups) = (x.shape()[0], x.len() / x.shape()[0].max(1) / width);
            let shape =
                if groups > 1 || x.ndim() == 3 { vec![tokens, groups, width] } else { vec![tokens, width] };
            shaped(&shape, y)
        }
        Call::L2Norm { x, scale } => changed(x, |y| {
            let dim = x.shape().last().copied().unwrap_or(1);
            unit_length(y, dim, scale as f32);
        }),
        Call::MatchRms { x, like } => {
            changed(x, |y| altup::match_rms(y, &flat(like), like.len() / like.shape()[0].max(1)))
        }
        Call::RopeTable { positions, rope, table } => angles(positions, rope, table),
        Call::Rotate { x, cos, sin, rope } => {
            let pairs = rope.rotary_dim / 2;
            let turns = cos.outer_iter().zip(sin.outer_iter()).flat_map(|(cos, sin)| {
                let turns: Vec<(f32, f32)> = cos.iter().copied().zip(sin.iter().copied()).collect();
                turns.into_iter().take(pairs)
            });
            let mut table = RopeTable::of_turns(rope, turns.collect());
            let heads = x.len() / x.shape()[0].max(1) / rope.head_dim;
            changed(x, |y| table.turn(y, heads, 0))
        }
        Call::Append { ref cache, rows, width } => {
            let heads = rows.len() / rows.shape()[0].max(1) / width.max(1);
            let mut kept = KvCache::new(heads, width, width);
            for part in cache.iter().chain([rows]) {
                kept.append(&flat(part), &flat(part));
            }
            shaped(&[kept.len(), heads, width], kept.keys())
        }
        Call::Truncate { ref cache, keep } => {
            let [_, heads, width] = cache.shape()[..] else { return Given::NotSupported };
            let mut kept = KvCache::new(heads, width, width);
            kept.append(&flat(cache), &flat(cache));
            kept.truncate(keep);
            shaped(&[keep, heads, width], kept.values())
        }
        Call::GatedAct { gate, up, activation } => changed(gate, |y| act::gate(y, &flat(up), activation)),
        Call::Residual { x, branch, multiplier } => changed(x, |y| match multiplier {
            1.0 => act::add(y, &flat(branch)),
            factor => act::add_scaled(y, &flat(branch), factor),
        }),
        Call::Scale { x, factor } => changed(x, |y| act::scale(y, factor as f32)),
        Call::Softcap { x, cap } => changed(x, |y| y.iter_mut().for_each(|y| *y = softcap(*y, cap as f32))),
        Call::Sigmoid { x } => changed(x, |y| y.iter_mut().for_each(|y| *y = sigmoid(*y))),
        Call::SigmoidGate { x, gate } => {
            changed(x, |y| y.iter_mut().zip(gate.iter()).for_each(|(y, g)| *y *= sigmoid(*g)))
        }
        Call::RouterIndex { logits, router, bias } => {
            let rows = logits.outer_iter().flat_map(|row| {
                let row: Vec<f32> = row.iter().copied().collect();
                router::route(&row, bias.map(|bias| &bias[..]), router).0
            });
            let index = rows.map(|expert| expert as f32).collect();
            shaped(&[logits.shape()[0], router.num_experts_per_tok], index)
        }
        Call::RouterWeights { logits, index, router } => {
            let mut weights = Vec::new();
            for (row, asked) in logits.outer_iter().zip(index.outer_iter()) {
                let row: Vec<f32> = row.iter().copied().collect();
                let (chosen, own) = router::route(&row, None, router);
                for &expert in asked.iter() {
                    // The path weighs the experts that it chooses, and no others.
                    match chosen.iter().position(|&e| e as f32 == expert) {
                        Some(place) => weights.push(own[place]),
                        None => return Given::NotSupported,
                    }
                }
            }
            shaped(index.shape(), weights)
        }
        Call::Mixture { y, weights } => {
            let [tokens, choices, width] = y.shape()[..] else { return Given::NotSupported };
            let (y, weights) = (flat(y), flat(weights));
            let mut mixed = vec![0.0; tokens * width];
            for (n, (y, weight)) in y.chunks_exact(width).zip(weights).enumerate() {
                act::add_scaled(&mut mixed[n / choices * width..][..width], y, weight);
            }
            shaped(&[tokens, width], mixed)
        }
        Call::CausalConv { u, state, conv, activation } => {
            let mut before = convolution(conv.kernel, u, state);
            let mut y = before.feed(&flat(u), &conv.weight, conv.bias.as_ref().map(|b| &b[..]));
            if activation == Some(Activation::Silu) {
                y.iter_mut().for_each(|y| *y = silu(*y));
            }
            shaped(u.shape(), y)
        }
        Call::ConvState { u, state, kernel } => {
            let channels = u.len() / u.shape()[0].max(1);
            let ones = Vector::new("ones", vec![1.0; channels * kernel]);
            let conv = Conv { weight: ones, bias: None, kernel };
            let mut before = convolution(kernel, u, state);
            before.feed(&flat(u), &conv.weight, None);
            shaped(&[channels, kernel], before.last())
        }
        Call::GdnDecay { a, a_log, dt_bias } => shaped(a.shape(), log_decay(&flat(a), a_log, dt_bias)),
        Call::GdnCore(ref delta) => {
            let (core, _) = recurrence(delta);
            shaped(delta.v.shape(), core)
        }
        Call::GdnState(ref delta) => {
            let (_, state) = recurrence(delta);
            let [_, heads, value_dim] = delta.v.shape()[..] else { return Given::NotSupported };
            shaped(&[heads, delta.k.shape()[2], value_dim], state)
        }
        _ => Given::NotSupported,
    }
}

/// The path's table, read off vectors of (1, 0): each turns into its cosine and its sine.
fn angles(positions: &[u32], rope: &Rope, which: reference::ops::Table) -> Given {
    let (mut table, pairs) = (RopeTable::new(rope), rope.rotary_dim / 2);
    let mut values = Vec::new();
    for &position in positions {
        let mut head = vec![0.0; rope.head_dim];
        for pair in 0..pairs {
            let first = if rope.pairing == spec::Pairing::Interleaved { 2 * pair } else { pair };
            head[first] = 1.0;
        }
        table.turn(&mut head, 1, position as usize);
        let half = match which {
            reference::ops::Table::Cos => &head[..pairs],
            reference::ops::Table::Sin => &head[pairs..2 * pairs],
        };
        values.extend_from_slice(half);
        values.extend_from_slice(half);
    }
    shaped(&[positions.len(), 2 * pairs], values)
}

/// A convolution that has read `state`, `[channels, kernel]`, as its last rows.
fn convolution(kernel: usize, u: &Tensor, state: Option<&Tensor>) -> ConvState {
    let channels = u.len() / u.shape()[0].max(1);
    let mut conv = ConvState::new(channels, kernel);
    if let Some(state) = state {
        let state = flat(state);
        let rows: Vec<f32> =
            (0..kernel * channels).map(|n| state[n % channels * kernel + n / channels]).collect();
        conv.feed(&rows, &vec![0.0; channels * kernel], None);
    }
    conv
}

/// What the rule reads, and the state behind it. A state before it is written row by row: the key that is 1 at
/// i, with β = 1 and no decay, writes row i as it is.
fn recurrence(delta: &Delta<Tensor>) -> (Vec<f32>, Vec<f32>) {
    let (keys, key_dim) = (delta.k.shape()[1], delta.k.shape()[2]);
    let (values, value_dim) = (delta.v.shape()[1], delta.v.shape()[2]);
    let mut state = DeltaState::new(Heads { keys, values, key_dim, value_dim });
    if let Some(before) = delta.state {
        let before = flat(before);
        for i in 0..key_dim {
            let k = (0..keys * key_dim).map(|n| f32::from(n % key_dim == i)).collect();
            let row = |h: usize| before[(h * key_dim + i) * value_dim..][..value_dim].to_vec();
            let v = (0..values).flat_map(row).collect();
            let writes = Writes { k, v, g: vec![0.0; values], beta: vec![1.0; values] };
            state.feed(&vec![0.0; keys * key_dim], writes);
        }
    }
    let writes = Writes { k: flat(delta.k), v: flat(delta.v), g: flat(delta.g), beta: flat(delta.beta) };
    let core = state.feed(&flat(delta.q), writes);
    (core, state.state().to_vec())
}

/// Most keys of one-hot keys and values, whose number is the square.
const ONE_HOT: usize = 512;

/// One row a key, the same for every head: 1 at the key's own place.
fn one_hot(keys: usize, heads: usize) -> Vec<f32> {
    (0..keys * heads * keys).map(|n| f32::from(n / keys / heads == n % keys)).collect()
}

/// `[heads, tokens, keys]` as queries `[tokens, heads, keys]`, or back where heads and tokens are exchanged.
fn turned(x: &[f32], heads: usize, tokens: usize, keys: usize) -> Vec<f32> {
    let row = |n: usize| &x[(n % heads * tokens + n / heads) * keys..][..keys];
    (0..tokens * heads).flat_map(row).copied().collect()
}

/// Probabilities: a query that is a row of scores meets one-hot keys, and one-hot values give back what each key
/// weighs.
fn probabilities(scores: &Tensor, mask: Mask, sinks: Option<&Vector>) -> Given {
    let [heads, tokens, keys] = scores.shape()[..] else { return Given::NotSupported };
    let window = match mask.reach {
        Reach::Causal => None,
        Reach::Window(width) => Some(width),
        Reach::All | Reach::TwoSided(_) => return Given::NotSupported,
    };
    if keys > ONE_HOT {
        return Given::NotSupported;
    }
    let mut cache = KvCache::new(heads, keys, keys);
    let one_hot = one_hot(keys, heads);
    cache.append(&one_hot, &one_hot);
    let attention =
        Attention { heads, scale: 1.0, window, softcap: None, sinks: sinks.map(|sinks| &sinks[..]) };
    let read = attention.run(&turned(&flat(scores), heads, tokens, keys), &cache, mask.first);
    shaped(&[heads, tokens, keys], turned(&read, tokens, heads, keys))
}

/// The score that puts all weight on one key: e^-1000 is 0 in f32.
const CERTAIN: f32 = 1000.0;

/// Context of rows that put all weight on one key; of others no scores are known that give exactly them.
fn context(probs: &Tensor, v: &Tensor) -> Given {
    let ([heads, tokens, keys], [_, kv_heads, value_dim]) = (probs.shape(), v.shape()) else {
        return Given::NotSupported;
    };
    let (heads, tokens, keys) = (*heads, *tokens, *keys);
    let flat_probs = flat(probs);
    let certain = |row: &[f32]| {
        row.iter().filter(|&&p| p == 1.0).count() == 1 && row.iter().all(|&p| p == 0.0 || p == 1.0)
    };
    if keys == 0 || keys > ONE_HOT || !flat_probs.chunks_exact(keys).all(certain) {
        return Given::NotSupported;
    }
    let mut cache = KvCache::new(*kv_heads, keys, *value_dim);
    cache.append(&one_hot(keys, *kv_heads), &flat(v));
    let attention = Attention { heads, scale: CERTAIN, window: None, softcap: None, sinks: None };
    let read = attention.run_over(&turned(&flat_probs, heads, tokens, keys), &cache, |_| 0..keys);
    shaped(&[tokens, heads * value_dim], read)
}

/// Why the path has no answer to a call.
pub fn why_not(call: &Call<Tensor>) -> Option<&'static str> {
    Some(match call {
        Call::AttnScores { .. } => {
            "scores never leave the registers of attention; the attention cases judge them"
        }
        Call::AttnProbs { .. } => "read off one-hot keys and values, which are not made for so many keys",
        Call::AttnCtx { .. } => "weights that no softmax gives; the attention cases judge the weighted sum",
        Call::Embed { .. } => "rows of the table are decoded into the pass; verify judges them at their site",
        Call::Slice { .. } | Call::Concat { .. } => {
            "parts of fused rows are read in place; verify judges their sites"
        }
        _ => return None,
    })
}

/// Scores, probabilities and context at once.
fn attention(scores: &Scores, mask: Mask, sinks: Option<&Vector>, v: &Tensor) -> Given {
    let [_, kv_heads, key_dim] = scores.k.shape()[..] else { return Given::NotSupported };
    let window = match mask.reach {
        Reach::Causal => None,
        Reach::Window(width) => Some(width),
        Reach::All | Reach::TwoSided(_) => return Given::NotSupported,
    };
    let (tokens, value_dim) = (scores.q.shape()[0], v.shape()[2]);
    let heads = scores.q.len() / tokens.max(1) / key_dim.max(1);
    let mut cache = KvCache::new(kv_heads, key_dim, value_dim);
    cache.append(&flat(&scores.k), &flat(v));
    let attention = Attention {
        heads,
        scale: scores.scale as f32,
        window,
        softcap: scores.softcap.map(|cap| cap as f32),
        sinks: sinks.map(|sinks| &sinks[..]),
    };
    let context = attention.run(&flat(&scores.q), &cache, mask.first);
    shaped(&[tokens, heads * value_dim], context)
}
