//! Cases of the attention core and its caches.
//!
//! Softmax is exact where it is saturated: one visible key is 1000 above the others, and keys that must be
//! masked stand higher still.

use super::Suite::{Rounding, Structure};
use super::{Dims, Line, Setting, Suite, With, fill, line, normal, tensor, whole};
use fixtures::random::SplitMix64;
use reference::ops::{Mask, Reach};
use reference::{Call, Plain};
use spec::{Site, Vector};

pub(super) const CASES: &[Line] = &[
    line(
        "attn_scores/grouped_heads",
        "h mod kv_heads for h div group",
        Structure,
        &[("tokens", 3), ("keys", 7), ("kv_heads", 2), ("group", 3), ("head_dim", 10)],
        scores,
    ),
    line(
        "attn_scores/many_groups",
        "h div kv_heads for h div group",
        Structure,
        &[("tokens", 2), ("keys", 5), ("kv_heads", 2), ("group", 4), ("head_dim", 12)],
        scores,
    ),
    line(
        "attn_scores/softcap",
        "the cap left out, or the scale behind it",
        Rounding,
        &[("tokens", 3), ("keys", 9), ("kv_heads", 2), ("group", 3), ("head_dim", 16)],
        capped,
    ),
    line(
        "attn_scores/realistic",
        "a dot product in too few bits",
        Rounding,
        &[("tokens", 5), ("keys", 40), ("kv_heads", 2), ("group", 3), ("head_dim", 64)],
        scores,
    ),
    line(
        "attn_probs/causal",
        "a token that sees the next, or not itself",
        Structure,
        &[("heads", 2), ("tokens", 9), ("before", 4)],
        causal,
    ),
    line(
        "attn_probs/window",
        "a window one too wide or too narrow",
        Structure,
        &[("heads", 2), ("tokens", 20), ("before", 3)],
        windowed,
    ),
    line(
        "attn_probs/realistic",
        "exp without the maximum, sums over padding",
        Rounding,
        &[("heads", 3), ("tokens", 11), ("before", 6)],
        causal,
    ),
    line(
        "attn_probs/sinks",
        "sinks left out of the denominator",
        Rounding,
        &[("heads", 3), ("tokens", 5), ("before", 2)],
        sinks,
    ),
    line(
        "attn_ctx/one_key_each",
        "values of another key or head",
        Structure,
        &[("tokens", 4), ("keys", 9), ("kv_heads", 2), ("group", 3), ("head_dim", 10)],
        context,
    ),
    line(
        "attn_ctx/realistic",
        "a weighted sum in too few bits",
        Rounding,
        &[("tokens", 4), ("keys", 40), ("kv_heads", 2), ("group", 3), ("head_dim", 32)],
        context,
    ),
    line(
        "attention/grouped_heads",
        "a key head of another group, a token that sees the next",
        Structure,
        &[("tokens", 6), ("before", 4), ("kv_heads", 2), ("group", 3), ("head_dim", 10)],
        attended,
    ),
    line(
        "attention/one_token",
        "a path of its own for one row",
        Structure,
        &[("tokens", 1), ("before", 40), ("kv_heads", 2), ("group", 4), ("head_dim", 12)],
        attended,
    ),
    line(
        "attention/many_keys",
        "keys behind the first block, or the last ones",
        Structure,
        &[("tokens", 3), ("before", 130), ("kv_heads", 2), ("group", 3), ("head_dim", 10)],
        attended,
    ),
    line(
        "attention/window",
        "a window one too wide or too narrow",
        Structure,
        &[("tokens", 20), ("before", 3), ("kv_heads", 2), ("group", 3), ("head_dim", 10)],
        attended_window,
    ),
    line(
        "attention/realistic",
        "a maximum that is not moved, a sum in too few bits",
        Rounding,
        &[("tokens", 9), ("before", 91), ("kv_heads", 2), ("group", 3), ("head_dim", 64)],
        attended,
    ),
    line(
        "attention/softcap_and_sinks",
        "sinks or the cap left out",
        Rounding,
        &[("tokens", 5), ("before", 30), ("kv_heads", 2), ("group", 3), ("head_dim", 32)],
        attended_capped,
    ),
    line(
        "append/behind",
        "rows one slot too early or too late",
        Structure,
        &[("tokens", 3), ("before", 5), ("heads", 2), ("head_dim", 6)],
        append,
    ),
    line(
        "truncate/keeps_the_first",
        "the last rows kept",
        Structure,
        &[("keep", 4), ("before", 9), ("heads", 2), ("head_dim", 6)],
        truncate,
    ),
];

fn scores(dims: &Dims, setting: Setting, random: &mut SplitMix64, with: &mut With) {
    scored(dims, setting, random, None, with);
}

fn capped(dims: &Dims, setting: Setting, random: &mut SplitMix64, with: &mut With) {
    scored(dims, setting, random, Some(5.0), with);
}

fn scored(dims: &Dims, setting: Setting, random: &mut SplitMix64, softcap: Option<f64>, with: &mut With) {
    let (kv_heads, dim) = (dims.get("kv_heads"), dims.get("head_dim"));
    let q = fill(&[dims.get("tokens"), kv_heads * dims.get("group"), dim], setting, random);
    let k = fill(&[dims.get("keys"), kv_heads, dim], setting, random);
    with(Site::layer(0, "attn_scores"), &Call::AttnScores { q: &q, k: &k, scale: 0.25, softcap });
}

fn causal(dims: &Dims, setting: Setting, random: &mut SplitMix64, with: &mut With) {
    masked(dims, setting, random, Reach::Causal, None, with);
}

fn windowed(dims: &Dims, setting: Setting, random: &mut SplitMix64, with: &mut With) {
    masked(dims, setting, random, Reach::Window(8), None, with);
}

fn sinks(dims: &Dims, setting: Setting, random: &mut SplitMix64, with: &mut With) {
    let values: Vec<f32> = (0..dims.get("heads")).map(|_| (2.0 * random.normal()) as f32).collect();
    masked(dims, setting, random, Reach::Causal, Some(Vector::new("sinks", values)), with);
}

fn masked(
    dims: &Dims,
    setting: Setting,
    random: &mut SplitMix64,
    reach: Reach,
    sinks: Option<Vector>,
    with: &mut With,
) {
    let (heads, tokens, before) = (dims.get("heads"), dims.get("tokens"), dims.get("before"));
    let (keys, mask) = (before + tokens, Mask { first: before, reach });
    let mut scores = normal(&[heads, tokens, keys], 2.0, random);
    if setting.suite == Suite::Structure {
        for h in 0..heads {
            for t in 0..tokens {
                let seen: Vec<usize> = (0..keys).filter(|&j| mask.sees(t, j)).collect();
                // The edges of what is seen take turns with what lies between.
                let picked = match (h + t) % 3 {
                    0 => seen[0],
                    1 => seen[seen.len() - 1],
                    _ => seen[random.below(seen.len())],
                };
                for j in 0..keys {
                    scores[[h, t, j]] = match j {
                        _ if !mask.sees(t, j) => 3000.0,
                        _ if j == picked => 1000.0,
                        _ => 0.0,
                    };
                }
            }
        }
    }
    with(Site::layer(0, "attn_probs"), &Call::AttnProbs { scores: &scores, mask, sinks: sinks.as_ref() });
}

fn context(dims: &Dims, setting: Setting, random: &mut SplitMix64, with: &mut With) {
    let (tokens, keys, kv_heads, dim) =
        (dims.get("tokens"), dims.get("keys"), dims.get("kv_heads"), dims.get("head_dim"));
    let heads = kv_heads * dims.get("group");
    let probs = match setting.suite {
        Suite::Structure => tensor(&[heads, tokens, keys], |n| {
            let (h, t, j) = (n / keys / tokens, n / keys % tokens, n % keys);
            f32::from(j == (3 * h + 2 * t + 1) % keys)
        }),
        Suite::Rounding => tensor(&[heads, tokens, keys], |_| (2.0 * random.uniform() / keys as f64) as f32),
    };
    let v = fill(&[keys, kv_heads, dim], setting, random);
    with(Site::layer(0, "attn_ctx"), &Call::AttnCtx { probs: &probs, v: &v });
}

fn attended(dims: &Dims, setting: Setting, random: &mut SplitMix64, with: &mut With) {
    joined(dims, setting, random, Reach::Causal, None, None, with);
}

fn attended_window(dims: &Dims, setting: Setting, random: &mut SplitMix64, with: &mut With) {
    joined(dims, setting, random, Reach::Window(8), None, None, with);
}

fn attended_capped(dims: &Dims, setting: Setting, random: &mut SplitMix64, with: &mut With) {
    let heads = dims.get("kv_heads") * dims.get("group");
    let values: Vec<f32> = (0..heads).map(|_| (2.0 * random.normal()) as f32).collect();
    let sinks = Vector::new("sinks", values);
    joined(dims, setting, random, Reach::Causal, Some(4.0), Some(&sinks), with);
}

/// Scores, probabilities and context, each on the exact result of the one before.
///
/// In a structure case every query reads one column of the keys, which holds the numbers from 0 to keys - 1 in
/// an order of its own for every key head and column, times ±1024: one visible key is that much above the
/// next, and which one it is tells heads, columns and the edge of the mask apart.
fn joined(
    dims: &Dims,
    setting: Setting,
    random: &mut SplitMix64,
    reach: Reach,
    softcap: Option<f64>,
    sinks: Option<&Vector>,
    with: &mut With,
) {
    let (tokens, before) = (dims.get("tokens"), dims.get("before"));
    let (kv_heads, dim) = (dims.get("kv_heads"), dims.get("head_dim"));
    let (heads, keys) = (kv_heads * dims.get("group"), before + tokens);
    let structure = setting.suite == Suite::Structure;
    let (q, k) = if structure {
        let mut k = tensor(&[keys, kv_heads, dim], |_| 0.0);
        for h in 0..kv_heads {
            for i in 0..dim {
                let mut order: Vec<usize> = (0..keys).collect();
                (1..keys).rev().for_each(|j| order.swap(j, random.below(j + 1)));
                (0..keys).for_each(|j| k[[j, h, i]] = order[j] as f32);
            }
        }
        let q = tensor(&[tokens, heads, dim], |n| {
            let (t, h, i) = (n / dim / heads, n / dim % heads, n % dim);
            let sign = if (t + h) % 2 == 0 { 4096.0 } else { -4096.0 };
            if i == (h + 2 * t) % dim { sign } else { 0.0 }
        });
        (q, k)
    } else {
        (normal(&[tokens, heads, dim], 1.0, random), normal(&[keys, kv_heads, dim], 1.0, random))
    };
    let v = fill(&[keys, kv_heads, dim], setting, random);
    let scale = if structure { 0.25 } else { 1.0 / (dim as f64).sqrt() };
    let mut plain = Plain::default();
    let call = Call::AttnScores { q: &q, k: &k, scale, softcap };
    with(Site::layer(0, "attn_scores"), &call);
    let scores = plain.value(&call);
    let call = Call::AttnProbs { scores: &scores, mask: Mask { first: before, reach }, sinks };
    with(Site::layer(0, "attn_probs"), &call);
    let probs = plain.value(&call);
    with(Site::layer(0, "attn_ctx"), &Call::AttnCtx { probs: &probs, v: &v });
}

fn append(dims: &Dims, _: Setting, random: &mut SplitMix64, with: &mut With) {
    let (heads, width) = (dims.get("heads"), dims.get("head_dim"));
    let cache = whole(&[dims.get("before"), heads, width], 9, random);
    let rows = whole(&[dims.get("tokens"), heads, width], 9, random);
    with(Site::layer(0, "k_cache"), &Call::Append { cache: Some(cache), rows: &rows, width });
}

fn truncate(dims: &Dims, _: Setting, random: &mut SplitMix64, with: &mut With) {
    let before = dims.get("before");
    let cache = whole(&[before, dims.get("heads"), dims.get("head_dim")], 9, random);
    with(Site::layer(0, "k_cache"), &Call::Truncate { cache, keep: dims.get("keep").min(before) });
}
