//! Mistakes of the attention core and its masks.

use super::{Eval, History, Mutant, mutant};
use ndarray::Axis;
use reference::ops::{Mask, Reach};
use reference::{Call, Tensor};
use spec::{Site, Vector};

/// The catalogue's attention and mask mutants.
pub static MUTANTS: &[Mutant] = &[
    mutant(
        "attn-gqa-map",
        "mod",
        "query head h reads key head h mod kv_heads",
        "two key heads, each shared",
        tiled_heads,
    ),
    mutant(
        "attn-gqa-map",
        "div-kv",
        "query head h reads key head ⌊h / kv_heads⌋",
        "a group size other than kv_heads",
        divided_heads,
    ),
    mutant("attn-scale-missing", "one", "scores are not scaled", "scaled scores", unscaled),
    mutant(
        "attn-scale-missing",
        "inverse",
        "scores are divided by the scale",
        "scaled scores",
        inverse_scale,
    ),
    mutant(
        "attn-scale-wrong-dim",
        "",
        "the scale is 1/head_dim instead of its root",
        "scores scaled by a root",
        squared_scale,
    ),
    mutant("attn-softcap-missing", "", "the cap on scores is not applied", "capped scores", uncapped),
    mutant("attn-sink", "", "sinks are left out of the denominator", "attention with sinks", no_sinks),
    mutant("mask-causal-off-by-one", "self", "a token does not see itself", "a causal mask", self_hidden),
    mutant(
        "mask-causal-off-by-one",
        "next",
        "a token sees the next one",
        "a causal mask over two tokens or more",
        next_seen,
    ),
    mutant(
        "mask-causal-topleft",
        "",
        "token t of a pass sees keys up to t, whatever came before",
        "a pass behind others",
        top_left,
    ),
    mutant(
        "mask-window-off-by-one",
        "wide",
        "the window is W + 1",
        "a window shorter than the sequence",
        window_wide,
    ),
    mutant("mask-window-off-by-one", "narrow", "the window is W - 1", "a window", window_narrow),
    mutant(
        "mask-window-missing",
        "",
        "the window is ignored",
        "a window shorter than the sequence",
        window_missing,
    ),
    mutant(
        "attn-scale-wrong-dim",
        "head-dim",
        "the scale is 1/√head_dim where the model says otherwise",
        "a scale other than 1/√head_dim",
        head_dim_scale,
    ),
    mutant(
        "attn-scale-wrong-dim",
        "hidden",
        "the scale is 1/√(hidden/heads)",
        "hidden/heads other than head_dim",
        hidden_scale,
    ),
    mutant(
        "attn-softcap-missing",
        "scale-after",
        "the scale is applied behind the cap",
        "capped scores",
        scale_after_cap,
    ),
    mutant(
        "attn-sink",
        "sigmoid",
        "a factor σ(-sink) in the place of the sink",
        "attention with sinks",
        sigmoid_sink,
    ),
    mutant(
        "attn-online-normalise",
        "",
        "the sum is not rescaled when the maximum of a block of 8 keys moves",
        "more than 8 keys, the largest score behind the first 8",
        not_rescaled,
    ),
    mutant(
        "attn-partial-reduction",
        "dot",
        "the dot product covers the first half of a head",
        "heads of two values or more",
        half_dot,
    ),
    mutant(
        "attn-partial-reduction",
        "sum",
        "the denominator covers the first 16 keys",
        "more than 16 keys",
        partial_sum,
    ),
    mutant(
        "attn-softmax-no-max",
        "",
        "exp(s) in f32 without the maximum taken off",
        "scores above 88",
        no_maximum,
    ),
    mutant(
        "mask-layer-pattern",
        "",
        "a full layer gets the window of the sliding ones",
        "full and sliding layers, and a window shorter than the sequence",
        window_everywhere,
    ),
    mutant("mask-pad-attended", "", "one unwritten key of zeros is attended to", "attention", padding_seen),
    mutant(
        "rope-nope-layers",
        "",
        "the query of a layer without positions is turned",
        "layers with and without positions",
        turned_without_positions,
    ),
];

/// Scores or context with the key head of every query head chosen by `map(h, heads, kv_heads)`.
fn with_head_map(
    call: &Call<Tensor>,
    eval: &mut Eval,
    map: fn(usize, usize, usize) -> usize,
) -> Option<Tensor> {
    let (heads, shared) = match call {
        Call::AttnScores { q, k, .. } => (q.len() / q.shape()[0].max(1) / k.shape()[2], k),
        Call::AttnCtx { probs, v } => (probs.shape()[0], v),
        _ => return None,
    };
    let kv_heads = shared.shape()[1];
    let group = heads / kv_heads;
    if kv_heads < 2 || (0..heads).all(|h| map(h, heads, kv_heads) == h / group) {
        return None;
    }
    let chosen: Vec<usize> = (0..heads).map(|h| map(h, heads, kv_heads).min(kv_heads - 1)).collect();
    let repeated = shared.select(Axis(1), &chosen).as_standard_layout().into_owned().into_shared();
    Some(match *call {
        Call::AttnScores { q, scale, softcap, .. } => {
            eval(&Call::AttnScores { q, k: &repeated, scale, softcap })
        }
        Call::AttnCtx { probs, .. } => eval(&Call::AttnCtx { probs, v: &repeated }),
        _ => return None,
    })
}

fn tiled_heads(call: &Call<Tensor>, _: Site, _: &History, eval: &mut Eval) -> Option<Tensor> {
    with_head_map(call, eval, |h, _, kv_heads| h % kv_heads)
}

fn divided_heads(call: &Call<Tensor>, _: Site, _: &History, eval: &mut Eval) -> Option<Tensor> {
    with_head_map(call, eval, |h, _, kv_heads| h / kv_heads)
}

fn with_scale(call: &Call<Tensor>, eval: &mut Eval, change: fn(f64) -> f64) -> Option<Tensor> {
    match *call {
        Call::AttnScores { q, k, scale, softcap } if change(scale) != scale => {
            Some(eval(&Call::AttnScores { q, k, scale: change(scale), softcap }))
        }
        _ => None,
    }
}

fn unscaled(call: &Call<Tensor>, _: Site, _: &History, eval: &mut Eval) -> Option<Tensor> {
    with_scale(call, eval, |_| 1.0)
}

fn inverse_scale(call: &Call<Tensor>, _: Site, _: &History, eval: &mut Eval) -> Option<Tensor> {
    with_scale(call, eval, |scale| 1.0 / scale)
}

fn squared_scale(call: &Call<Tensor>, _: Site, _: &History, eval: &mut Eval) -> Option<Tensor> {
    with_scale(call, eval, |scale| scale * scale)
}

fn uncapped(call: &Call<Tensor>, _: Site, _: &History, eval: &mut Eval) -> Option<Tensor> {
    match *call {
        Call::AttnScores { q, k, scale, softcap: Some(_) } => {
            Some(eval(&Call::AttnScores { q, k, scale, softcap: None }))
        }
        _ => None,
    }
}

fn no_sinks(call: &Call<Tensor>, _: Site, _: &History, eval: &mut Eval) -> Option<Tensor> {
    match *call {
        Call::AttnProbs { scores, mask, sinks: Some(_) } => {
            Some(eval(&Call::AttnProbs { scores, mask, sinks: None }))
        }
        _ => None,
    }
}

/// Probabilities under another mask, where it lets other keys through.
fn with_mask(call: &Call<Tensor>, eval: &mut Eval, change: impl Fn(Mask) -> Option<Mask>) -> Option<Tensor> {
    let Call::AttnProbs { scores, mask, sinks } = *call else { return None };
    let changed = change(mask)?;
    let (tokens, keys) = (scores.shape()[1], scores.shape()[2]);
    let differs = |t| (0..keys).any(|j| mask.sees(t, j) != changed.sees(t, j));
    if !(0..tokens).any(differs) {
        return None;
    }
    Some(eval(&Call::AttnProbs { scores, mask: changed, sinks }))
}

fn self_hidden(call: &Call<Tensor>, _: Site, _: &History, eval: &mut Eval) -> Option<Tensor> {
    // Position q - 1 sees what q sees but for q itself; position 0 then sees nothing at all.
    let Call::AttnProbs { scores, mask, sinks } = *call else { return None };
    let mut hidden = scores.clone();
    let (heads, tokens) = (scores.shape()[0], scores.shape()[1]);
    for h in 0..heads {
        for t in 0..tokens {
            if mask.first + t > 0 && mask.sees(t, mask.first + t) {
                hidden[[h, t, mask.first + t]] = -1e30;
            }
        }
    }
    (mask.first + tokens > 1).then(|| eval(&Call::AttnProbs { scores: &hidden, mask, sinks }))
}

fn next_seen(call: &Call<Tensor>, _: Site, _: &History, eval: &mut Eval) -> Option<Tensor> {
    with_mask(call, eval, |mask| {
        let reach = match mask.reach {
            Reach::Causal => Reach::Causal,
            Reach::Window(width) => Reach::Window(width + 1),
            // Rows that see each other both ways have no next key to peek at.
            Reach::All | Reach::TwoSided(_) => return None,
        };
        Some(Mask { first: mask.first + 1, reach })
    })
}

fn top_left(call: &Call<Tensor>, _: Site, _: &History, eval: &mut Eval) -> Option<Tensor> {
    with_mask(call, eval, |mask| Some(Mask { first: 0, ..mask }))
}

fn with_window(call: &Call<Tensor>, eval: &mut Eval, change: fn(usize) -> Option<Reach>) -> Option<Tensor> {
    with_mask(call, eval, |mask| match mask.reach {
        Reach::Window(width) => Some(Mask { reach: change(width)?, ..mask }),
        Reach::TwoSided(width) => {
            let reach = match change(width)? {
                Reach::Window(width) => Reach::TwoSided(width),
                _ => Reach::All,
            };
            Some(Mask { reach, ..mask })
        }
        Reach::Causal | Reach::All => None,
    })
}

fn window_wide(call: &Call<Tensor>, _: Site, _: &History, eval: &mut Eval) -> Option<Tensor> {
    with_window(call, eval, |width| Some(Reach::Window(width + 1)))
}

fn window_narrow(call: &Call<Tensor>, _: Site, _: &History, eval: &mut Eval) -> Option<Tensor> {
    with_window(call, eval, |width| (width > 1).then(|| Reach::Window(width - 1)))
}

fn window_missing(call: &Call<Tensor>, _: Site, _: &History, eval: &mut Eval) -> Option<Tensor> {
    with_window(call, eval, |_| Some(Reach::Causal))
}

fn another_scale(call: &Call<Tensor>, eval: &mut Eval, scale_of: impl Fn(f64) -> f64) -> Option<Tensor> {
    let Call::AttnScores { q, k, scale, softcap } = *call else { return None };
    let changed = scale_of(k.shape()[2] as f64);
    // Equal within rounding is the same scale.
    if (changed / scale - 1.0).abs() < 1e-6 {
        return None;
    }
    Some(eval(&Call::AttnScores { q, k, scale: changed, softcap }))
}

fn head_dim_scale(call: &Call<Tensor>, _: Site, _: &History, eval: &mut Eval) -> Option<Tensor> {
    another_scale(call, eval, |head_dim| 1.0 / head_dim.sqrt())
}

fn hidden_scale(call: &Call<Tensor>, at: Site, history: &History, eval: &mut Eval) -> Option<Tensor> {
    let Call::AttnScores { q, k, .. } = *call else { return None };
    let hidden = history.value(at, "attn_norm")?.shape()[1] as f64;
    let heads = (q.len() / q.shape()[0].max(1) / k.shape()[2]) as f64;
    another_scale(call, eval, |_| 1.0 / (hidden / heads).sqrt())
}

fn scale_after_cap(call: &Call<Tensor>, _: Site, _: &History, eval: &mut Eval) -> Option<Tensor> {
    let Call::AttnScores { q, k, scale, softcap: Some(cap) } = *call else { return None };
    let capped = eval(&Call::AttnScores { q, k, scale: 1.0, softcap: Some(cap) });
    Some(capped.mapv(|s| (f64::from(s) * scale) as f32).into_shared())
}

fn sigmoid_sink(call: &Call<Tensor>, _: Site, _: &History, eval: &mut Eval) -> Option<Tensor> {
    let Call::AttnProbs { scores, mask, sinks: Some(sinks) } = *call else { return None };
    let mut y = eval(&Call::AttnProbs { scores, mask, sinks: None });
    for (mut head, &sink) in y.axis_iter_mut(Axis(0)).zip(sinks.iter()) {
        head.mapv_inplace(|p| p / (1.0 + libm::expf(sink)));
    }
    Some(y)
}

/// Probabilities row by row: `weigh(scores of the keys that are seen)` gives what stands for them.
fn by_row(call: &Call<Tensor>, weigh: impl Fn(&[f64]) -> Vec<f64>) -> Option<Tensor> {
    let Call::AttnProbs { scores, mask, sinks: None } = *call else { return None };
    let (tokens, keys) = (scores.shape()[1], scores.shape()[2]);
    let mut y = Vec::with_capacity(scores.len());
    for (n, row) in scores.iter().copied().collect::<Vec<f32>>().chunks_exact(keys).enumerate() {
        let seen: Vec<usize> = (0..keys).filter(|&j| mask.sees(n % tokens, j)).collect();
        let weights = weigh(&seen.iter().map(|&j| f64::from(row[j])).collect::<Vec<_>>());
        let mut probs = vec![0f32; keys];
        seen.iter().zip(weights).for_each(|(&j, w)| probs[j] = w as f32);
        y.extend(probs);
    }
    super::shaped(scores, y)
}

fn largest(scores: &[f64]) -> f64 {
    scores.iter().copied().fold(f64::NEG_INFINITY, f64::max)
}

fn not_rescaled(call: &Call<Tensor>, _: Site, _: &History, eval: &mut Eval) -> Option<Tensor> {
    let y = by_row(call, |scores| {
        let running = |j: usize| largest(&scores[..((j / 8 + 1) * 8).min(scores.len())]);
        let terms: Vec<f64> = (0..scores.len()).map(|j| libm::exp(scores[j] - running(j))).collect();
        let total: f64 = terms.iter().sum();
        terms.into_iter().map(|t| t / total).collect()
    })?;
    let Call::AttnProbs { scores, .. } = *call else { return None };
    if scores.shape()[2] <= 8 {
        return None;
    }
    let honest = eval(call);
    let moved = y.iter().zip(&honest).any(|(a, b)| (a - b).abs() > 1e-3);
    moved.then_some(y)
}

fn half_dot(call: &Call<Tensor>, _: Site, _: &History, eval: &mut Eval) -> Option<Tensor> {
    let Call::AttnScores { q, k, scale, softcap } = *call else { return None };
    let dim = k.shape()[2];
    if dim < 2 {
        return None;
    }
    let mut half = k.clone();
    half.iter_mut().enumerate().filter(|(n, _)| n % dim >= dim / 2).for_each(|(_, k)| *k = 0.0);
    Some(eval(&Call::AttnScores { q, k: &half, scale, softcap }))
}

fn partial_sum(call: &Call<Tensor>, _: Site, _: &History, _: &mut Eval) -> Option<Tensor> {
    let Call::AttnProbs { scores, .. } = *call else { return None };
    if scores.shape()[2] <= 16 {
        return None;
    }
    by_row(call, |scores| {
        let most = largest(scores);
        let terms: Vec<f64> = scores.iter().map(|s| libm::exp(s - most)).collect();
        let total: f64 = terms.iter().take(16).sum();
        terms.into_iter().map(|t| t / total).collect()
    })
}

fn no_maximum(call: &Call<Tensor>, _: Site, _: &History, _: &mut Eval) -> Option<Tensor> {
    by_row(call, |scores| {
        let terms: Vec<f32> = scores.iter().map(|&s| libm::expf(s as f32)).collect();
        let total: f32 = terms.iter().sum();
        terms.into_iter().map(|t| f64::from(t / total)).collect()
    })
}

fn window_everywhere(call: &Call<Tensor>, _: Site, history: &History, eval: &mut Eval) -> Option<Tensor> {
    let width = history.masks().find_map(|mask| match mask.reach {
        Reach::Window(width) => Some(width),
        _ => None,
    })?;
    with_mask(call, eval, |mask| {
        (mask.reach == Reach::Causal).then_some(Mask { reach: Reach::Window(width), ..mask })
    })
}

fn padding_seen(call: &Call<Tensor>, _: Site, _: &History, eval: &mut Eval) -> Option<Tensor> {
    // A key of zeros has the score 0 and a value of zeros: one more term of the denominator.
    let Call::AttnProbs { scores, mask, sinks: None } = *call else { return None };
    let zeros = Vector::new("padding", vec![0f32; scores.shape()[0]]);
    Some(eval(&Call::AttnProbs { scores, mask, sinks: Some(&zeros) }))
}

fn turned_without_positions(
    call: &Call<Tensor>,
    at: Site,
    history: &History,
    eval: &mut Eval,
) -> Option<Tensor> {
    let Call::AttnScores { q, k, scale, softcap } = *call else { return None };
    if history.value(at, "q_rope").is_some() {
        return None;
    }
    let rope = history.any_rope().filter(|rope| rope.head_dim == k.shape()[2])?;
    let (cos, sin) = (history.outside("rope.cos")?, history.outside("rope.sin")?);
    let turned = eval(&Call::Rotate { x: q, cos, sin, rope });
    Some(eval(&Call::AttnScores { q: &turned, k, scale, softcap }))
}
