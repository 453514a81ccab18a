//! Mistakes of the attention core, its masks and its caches.

use super::{Apply, Eval, History, Mutant};
use ndarray::Axis;
use reference::ops::{Mask, Reach};
use reference::{Call, Tensor};
use spec::Site;

/// The catalogue's attention, mask and cache mutants.
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
        "kv-slot-off-by-one",
        "",
        "the first new row overwrites the last old one",
        "a cache that holds rows",
        slot_off_by_one,
    ),
    mutant("kv-chunk-lost", "", "rows of earlier passes are zero", "a cache that holds rows", history_lost),
];

const fn mutant(
    id: &'static str,
    variant: &'static str,
    formula: &'static str,
    needs: &'static str,
    apply: Apply,
) -> Mutant {
    Mutant { id, variant, formula, needs, apply }
}

/// Scores or context with the key head of every query head chosen by `map(h, heads, kv_heads)`.
fn with_head_map(
    call: &Call<Tensor>,
    eval: &mut Eval,
    map: fn(usize, usize, usize) -> usize,
) -> Option<Tensor> {
    let (heads, shared) = match call {
        Call::AttnScores { q, k, .. } => (q.shape()[1], k),
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

fn slot_off_by_one(call: &Call<Tensor>, _: Site, _: &History, eval: &mut Eval) -> Option<Tensor> {
    let Call::Append { cache: Some(cache), .. } = call else { return None };
    let old = cache.shape()[0];
    let mut y = eval(call);
    let first_new = y.index_axis(Axis(0), old).to_owned();
    y.index_axis_mut(Axis(0), old - 1).assign(&first_new);
    Some(y)
}

fn history_lost(call: &Call<Tensor>, _: Site, _: &History, eval: &mut Eval) -> Option<Tensor> {
    let Call::Append { cache: Some(cache), .. } = call else { return None };
    let old = cache.shape()[0];
    let mut y = eval(call);
    y.axis_iter_mut(Axis(0)).take(old).for_each(|mut row| row.fill(0.0));
    Some(y)
}
