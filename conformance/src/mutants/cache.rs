//! Mistakes of the caches of keys and values: slots, donors, what is stored.

use super::{Eval, History, Mutant, mutant};
use ndarray::Axis;
use reference::ops::Table;
use reference::{Call, Tensor};
use spec::Site;

/// The catalogue's cache mutants.
pub static MUTANTS: &[Mutant] = &[
    mutant(
        "kv-slot-off-by-one",
        "",
        "the first new row overwrites the last old one",
        "a cache that holds rows",
        slot_off_by_one,
    ),
    mutant("kv-chunk-lost", "", "rows of earlier passes are zero", "a cache that holds rows", history_lost),
    mutant(
        "kv-double-processed",
        "",
        "cached keys are turned again at every pass",
        "a cache of turned keys that holds rows",
        turned_again,
    ),
    mutant(
        "kv-layer-crossed",
        "layer",
        "the layer reads the keys or values of the layer below",
        "two layers with caches of one shape",
        layer_below,
    ),
    mutant(
        "kv-layer-crossed",
        "exchanged",
        "keys stand where values are read",
        "keys and values of one shape",
        keys_for_values,
    ),
    mutant(
        "kvshare-donor",
        "",
        "a sharing layer reads another layer's cache of the same shape",
        "a layer without a cache of its own, and two donors of one shape",
        other_donor,
    ),
    mutant(
        "attn-keqv-stage",
        "",
        "values are taken from the keys after norm and rotation",
        "values that share the key projection",
        late_values,
    ),
    mutant(
        "kv-advance",
        "",
        "the position advances by one token too few",
        "a pass behind others",
        advanced_too_little,
    ),
];

fn grown<'a>(call: &'a Call<Tensor>) -> Option<&'a Tensor> {
    match call {
        Call::Append { cache: Some(cache), .. } => Some(cache),
        _ => None,
    }
}

fn slot_off_by_one(call: &Call<Tensor>, _: Site, _: &History, eval: &mut Eval) -> Option<Tensor> {
    let old = grown(call)?.shape()[0];
    let mut y = eval(call);
    let first_new = y.index_axis(Axis(0), old).to_owned();
    y.index_axis_mut(Axis(0), old - 1).assign(&first_new);
    Some(y)
}

fn history_lost(call: &Call<Tensor>, _: Site, _: &History, eval: &mut Eval) -> Option<Tensor> {
    let old = grown(call)?.shape()[0];
    let mut y = eval(call);
    y.axis_iter_mut(Axis(0)).take(old).for_each(|mut row| row.fill(0.0));
    Some(y)
}

fn turned_again(call: &Call<Tensor>, at: Site, history: &History, eval: &mut Eval) -> Option<Tensor> {
    let cache = grown(call)?;
    let rope = history.rope(at, "k_rope").filter(|_| at.name == "k_cache")?;
    let old = cache.shape()[0];
    let positions: Vec<u32> = (0..old as u32).collect();
    let mut table = |table| eval(&Call::RopeTable { positions: &positions, rope, table });
    let (cos, sin) = (table(Table::Cos), table(Table::Sin));
    let turned = eval(&Call::Rotate { x: cache, cos: &cos, sin: &sin, rope });
    let mut y = eval(call);
    y.axis_iter_mut(Axis(0)).zip(turned.axis_iter(Axis(0))).for_each(|(mut row, turned)| row.assign(&turned));
    Some(y)
}

/// Scores or context on another tensor in the place of the cache.
fn with_cache(call: &Call<Tensor>, eval: &mut Eval, other: Option<&Tensor>) -> Option<Tensor> {
    let (Call::AttnScores { k: cache, .. } | Call::AttnCtx { v: cache, .. }) = *call else { return None };
    let other = other.filter(|other| other.shape() == cache.shape() && *other != cache)?;
    Some(match *call {
        Call::AttnScores { q, scale, softcap, .. } => eval(&Call::AttnScores { q, k: other, scale, softcap }),
        Call::AttnCtx { probs, .. } => eval(&Call::AttnCtx { probs, v: other }),
        _ => return None,
    })
}

fn cache_name(call: &Call<Tensor>) -> &'static str {
    if matches!(call, Call::AttnScores { .. }) { "k_cache" } else { "v_cache" }
}

fn layer_below(call: &Call<Tensor>, at: Site, history: &History, eval: &mut Eval) -> Option<Tensor> {
    history.value(at, cache_name(call))?;
    with_cache(call, eval, history.below(at, cache_name(call)))
}

fn keys_for_values(call: &Call<Tensor>, at: Site, history: &History, eval: &mut Eval) -> Option<Tensor> {
    matches!(call, Call::AttnCtx { .. }).then(|| with_cache(call, eval, history.value(at, "k_cache")))?
}

fn other_donor(call: &Call<Tensor>, at: Site, history: &History, eval: &mut Eval) -> Option<Tensor> {
    let (Call::AttnScores { k: cache, .. } | Call::AttnCtx { v: cache, .. }) = *call else { return None };
    if history.value(at, cache_name(call)).is_some() {
        return None;
    }
    let donors = history.all_below(at, cache_name(call));
    let other = donors.into_iter().rev().find(|donor| donor.shape() == cache.shape() && *donor != cache);
    with_cache(call, eval, other)
}

fn late_values(call: &Call<Tensor>, at: Site, history: &History, eval: &mut Eval) -> Option<Tensor> {
    let Call::RmsNorm { x, weight, width, eps } = *call else { return None };
    if at.name != "v_norm" || history.value(at, "k_proj") != Some(x) {
        return None;
    }
    let turned = history.value(at, "k_rope")?;
    Some(eval(&Call::RmsNorm { x: turned, weight, width, eps }))
}

fn advanced_too_little(call: &Call<Tensor>, _: Site, _: &History, eval: &mut Eval) -> Option<Tensor> {
    let Call::RopeTable { positions, rope, table } = *call else { return None };
    if positions.first().is_none_or(|&p| p == 0) {
        return None;
    }
    let positions: Vec<u32> = positions.iter().map(|p| p - 1).collect();
    Some(eval(&Call::RopeTable { positions: &positions, rope, table }))
}
