//! Configs that are read wrongly: keys left at a default, dropped, or taken for their neighbours.

use super::{Edit, reads};
use serde_json::{Map, Value, json};

type Object = Map<String, Value>;

/// The edits of configs.
pub static EDITS: &[Edit] = &[
    reads("cfg-rope-theta", "1e4", "θ is left at 10000", THETA, |c, _| theta(c, 1e4)),
    reads("cfg-rope-theta", "5e5", "θ is left at 500000", THETA, |c, _| theta(c, 5e5)),
    reads("cfg-rope-theta", "1e6", "θ is left at 1000000", THETA, |c, _| theta(c, 1e6)),
    reads("cfg-rope-kinds", "", "full and sliding layers take each other's rope", KINDS, ropes_exchanged),
    reads("cfg-rope-scaling", "", "the scaling of positions is not read", SCALED, unscaled),
    reads("cfg-rope-factor", "", "the scaling factor is twice as large", SCALED, |c, _| {
        each_rope(c, |rope| twice(rope, "factor"))
    }),
    reads("cfg-rope-original", "", "the whole context is taken for that of pre-training", SCALED, |c, _| {
        let max = c.get("max_position_embeddings")?.clone();
        each_rope(c, |rope| put(rope, "original_max_position_embeddings", max.clone()))
    }),
    reads(
        "cfg-rope-truncate",
        "",
        "truncate of a yarn rope is the other truth value",
        "a yarn rope",
        |c, _| {
            each_rope(c, |rope| {
                let yarn = rope.get("rope_type").or(rope.get("type"))? == "yarn";
                let truncate = rope.get("truncate").and_then(Value::as_bool).unwrap_or(true);
                yarn.then(|| drop(rope.insert("truncate".into(), json!(!truncate))))
            })
        },
    ),
    reads(
        "cfg-rope-mscale",
        "",
        "mscale and mscale_all_dim are exchanged",
        "a yarn rope with both",
        |c, _| each_rope(c, |rope| exchange(rope, "mscale", "mscale_all_dim")),
    ),
    reads(
        "cfg-rope-interleave",
        "",
        "the pairing of rotary values is the other one",
        "such a key",
        |c, _| flip(c, "rope_interleave"),
    ),
    reads("cfg-partial-rotary", "whole", "the whole head is turned", PARTIAL, |c, _| partial(c, |_| 1.0)),
    reads("cfg-partial-rotary", "half", "half as much of a head is turned", PARTIAL, |c, _| {
        partial(c, |share| share / 2.0)
    }),
    reads("cfg-no-rope-layers", "inverted", "the list of turning layers is inverted", TURNS, |c, _| {
        list(c, "no_rope_layers", |_, turns| json!(1 - turns.as_u64().unwrap_or(0).min(1)))
    }),
    reads("cfg-no-rope-layers", "ignored", "every layer turns", TURNS, |c, _| {
        list(c, "no_rope_layers", |_, _| json!(1))
    }),
    reads("cfg-window", "off", "the window is not read", WINDOW, |c, _| number(c, "sliding_window", |_| 1e6)),
    reads("cfg-window", "half", "the window is half as wide", WINDOW, |c, _| {
        number(c, "sliding_window", |w| (w / 2.0).floor().max(1.0))
    }),
    reads("cfg-layer-types", "rotated", "layer i is of the kind of layer i + 1", TYPES, |c, _| {
        let types = c.get("layer_types")?.as_array()?.clone();
        list(c, "layer_types", |i, _| types[(i + 1) % types.len()].clone())
    }),
    reads("cfg-layer-types", "full", "every layer sees all keys", TYPES, |c, _| {
        list(c, "layer_types", |_, _| json!("full_attention"))
    }),
    reads(
        "cfg-heads",
        "",
        "half as many heads, twice as wide",
        "an even number of key heads",
        half_as_many_heads,
    ),
    reads("cfg-delta-heads", "", "half as many key heads of the recurrence, twice as wide", DELTA, |c, _| {
        halve(c, "linear_num_key_heads", "linear_key_head_dim")
    }),
    reads("cfg-eps", "1e-5", "ε of the norms is left at 1e-5", "another ε", |c, _| eps(c, 1e-5)),
    reads("cfg-eps", "1e-6", "ε of the norms is left at 1e-6", "another ε", |c, _| eps(c, 1e-6)),
    reads("cfg-factor-dropped", "embedding", "embedding_multiplier is not read", FACTOR, |c, _| {
        number(c, "embedding_multiplier", |_| 1.0)
    }),
    reads("cfg-factor-dropped", "residual", "residual_multiplier is not read", FACTOR, |c, _| {
        number(c, "residual_multiplier", |_| 1.0)
    }),
    reads("cfg-factor-dropped", "attention", "attention_multiplier is not read", FACTOR, |c, _| {
        let width = head_dim(c)?;
        number(c, "attention_multiplier", |_| 1.0 / width.sqrt())
    }),
    reads("cfg-factor-dropped", "logits", "logits_scaling is not read", FACTOR, |c, _| {
        number(c, "logits_scaling", |_| 1.0)
    }),
    reads("cfg-factor-dropped", "query", "query_pre_attn_scalar is taken for head_dim", FACTOR, |c, _| {
        let width = head_dim(c)?;
        number(c, "query_pre_attn_scalar", |_| width)
    }),
    reads("cfg-factor-dropped", "routed", "routed_scaling_factor is not read", FACTOR, |c, _| {
        number(c, "routed_scaling_factor", |_| 1.0)
    }),
    reads("cfg-softcap", "scores", "the cap of scores is not read", "capped scores", |c, _| {
        off(c, "attn_logit_softcapping")
    }),
    reads("cfg-softcap", "logits", "the cap of logits is not read", "capped logits", |c, _| {
        off(c, "final_logit_softcapping")
    }),
    reads("cfg-tied", "", "the head is the embedding table", "a head of its own", |c, _| {
        let untied = !c.get("tie_word_embeddings").and_then(Value::as_bool).unwrap_or(true);
        untied.then(|| drop(c.insert("tie_word_embeddings".into(), json!(true))))
    }),
    reads("cfg-experts-per-token", "more", "one expert more a token", EXPERTS, |c, _| chosen(c, 1.0)),
    reads("cfg-experts-per-token", "fewer", "one expert fewer a token", EXPERTS, |c, _| chosen(c, -1.0)),
    reads("cfg-norm-topk", "", "norm_topk_prob is the other truth value", EXPERTS, |c, _| {
        flip(c, "norm_topk_prob")
    }),
    reads("cfg-expert-groups", "", "groups of experts are not read", "groups of experts", |c, _| {
        let one = number(c, "n_group", |_| 1.0);
        number(c, "topk_group", |_| 1.0).or(one)
    }),
    reads("cfg-swiglu", "limit", "swiglu_limit is twice as large", "clamped experts", |c, _| {
        twice(c, "swiglu_limit")
    }),
    reads("cfg-swiglu", "alpha", "swiglu_alpha is 1", "clamped experts", |c, _| {
        number(c, "swiglu_alpha", |_| 1.0)
    }),
    reads("cfg-sparsity", "", "activation_sparsity_pattern is not read", "a sparse gate", |c, _| {
        list(c, "activation_sparsity_pattern", |_, _| json!(0.0))
    }),
    reads("cfg-altup", "", "the next of the parallel streams is the active one", "such streams", |c, _| {
        let streams = c.get("altup_num_inputs")?.as_f64()?;
        number(c, "altup_active_idx", |active| (active + 1.0) % streams)
    }),
    reads("spec-tap-off-by-one", "", "the outputs one layer above are tapped", TAPS, |c, t| {
        taps(c, t, |id, _, _| id + 1)
    }),
    reads("spec-tap-off-by-one", "below", "the outputs one layer below are tapped", TAPS, |c, t| {
        taps(c, t, |id, _, _| id - 1)
    }),
    reads("spec-tap-default-formula", "", "tapped layers are spread evenly over the target", TAPS, |c, t| {
        let count = target_layers(t)?;
        let last = count - 1;
        taps(c, t, move |_, i, of| last * i / (of - 1).max(1))
    }),
    reads("cfg-mask-token", "", "another token stands for those to be proposed", "a block draft", |c, t| {
        t?;
        number(c, "mask_token_id", |id| if id > 0.0 { id - 1.0 } else { 1.0 })
    }),
];

const THETA: &str = "a rope with another θ";
const KINDS: &str = "a rope each for full and sliding layers";
const SCALED: &str = "a scaled rope";
const PARTIAL: &str = "a rotary width below head_dim";
const TURNS: &str = "layers that turn and layers that do not";
const WINDOW: &str = "a window shorter than the prompt";
const TYPES: &str = "layers of two kinds";
const DELTA: &str = "an even number of key heads of the recurrence";
const FACTOR: &str = "a config with that factor";
const EXPERTS: &str = "routed experts";
const TAPS: &str = "a draft that taps layers of a target";

/// Writes a key that is there and holds something else.
fn put(map: &mut Object, key: &str, value: Value) -> Option<()> {
    let held = map.get_mut(key).filter(|held| !held.is_null() && **held != value)?;
    *held = value;
    Some(())
}

/// Changes a number that is there, in the spelling that it has: whole or not.
fn number(map: &mut Object, key: &str, change: impl Fn(f64) -> f64) -> Option<()> {
    let held = map.get(key)?;
    let changed = change(held.as_f64()?);
    let value = if held.is_u64() { json!(changed as u64) } else { json!(changed) };
    if held.as_f64() == value.as_f64() { None } else { put(map, key, value) }
}

fn twice(map: &mut Object, key: &str) -> Option<()> {
    number(map, key, |value| 2.0 * value)
}

fn flip(map: &mut Object, key: &str) -> Option<()> {
    let held = map.get(key)?.as_bool()?;
    put(map, key, json!(!held))
}

fn off(map: &mut Object, key: &str) -> Option<()> {
    put(map, key, Value::Null)
}

fn exchange(map: &mut Object, a: &str, b: &str) -> Option<()> {
    let (left, right) = (map.get(a)?.clone(), map.get(b)?.clone());
    put(map, a, right)?;
    put(map, b, left)
}

/// Changes every entry of a list; nothing where all stay.
fn list(map: &mut Object, key: &str, change: impl Fn(usize, &Value) -> Value) -> Option<()> {
    let held = map.get(key)?.as_array()?;
    let changed = held.iter().enumerate().map(|(i, value)| change(i, value)).collect();
    put(map, key, Value::Array(changed))
}

/// Changes every rope of a config, in either spelling; nothing where none changes.
fn each_rope(map: &mut Object, change: impl Fn(&mut Object) -> Option<()>) -> Option<()> {
    let mut changed = None;
    for key in ["rope_parameters", "rope_scaling"] {
        let Some(rope) = map.get_mut(key).and_then(Value::as_object_mut) else { continue };
        if rope.values().any(Value::is_object) {
            for kind in rope.values_mut().filter_map(Value::as_object_mut) {
                changed = change(kind).or(changed);
            }
        } else {
            changed = change(rope).or(changed);
        }
    }
    changed
}

fn theta(map: &mut Object, theta: f64) -> Option<()> {
    let nested = each_rope(map, |rope| number(rope, "rope_theta", |_| theta));
    number(map, "rope_theta", |_| theta).or(nested)
}

fn ropes_exchanged(map: &mut Object, _: Option<&Object>) -> Option<()> {
    let ropes = map.get_mut("rope_parameters")?.as_object_mut()?;
    exchange(ropes, "full_attention", "sliding_attention")
}

fn unscaled(map: &mut Object, _: Option<&Object>) -> Option<()> {
    each_rope(map, |rope| {
        let kind = rope.get("rope_type").or(rope.get("type"))?.as_str()?;
        // A proportional rope is a way to turn part of a head.
        if ["default", "mrope", "proportional"].contains(&kind) {
            return None;
        }
        rope.retain(|key, _| ["rope_theta", "partial_rotary_factor"].contains(&key.as_str()));
        rope.insert("rope_type".into(), json!("default"));
        Some(())
    })
}

fn partial(map: &mut Object, share: impl Fn(f64) -> f64) -> Option<()> {
    let nested = each_rope(map, |rope| number(rope, "partial_rotary_factor", &share));
    number(map, "partial_rotary_factor", &share).or(nested)
}

fn eps(map: &mut Object, eps: f64) -> Option<()> {
    number(map, "rms_norm_eps", |_| eps).or_else(|| number(map, "norm_eps", |_| eps))
}

/// Width of a head, where the config says it or leaves it to the hidden width.
fn head_dim(map: &Object) -> Option<f64> {
    let size = |key: &str| map.get(key).and_then(Value::as_f64);
    size("head_dim").or_else(|| Some(size("hidden_size")? / size("num_attention_heads")?))
}

fn halve(map: &mut Object, count: &str, width: &str) -> Option<()> {
    map.get(count)?.as_u64().filter(|n| n.is_multiple_of(2))?;
    number(map, count, |n| n / 2.0)?;
    twice(map, width)
}

fn half_as_many_heads(map: &mut Object, _: Option<&Object>) -> Option<()> {
    let even = |key: &str| Some(map.get(key)?.as_u64()?.is_multiple_of(2));
    if !(even("num_attention_heads")? && even("num_key_value_heads")?) {
        return None;
    }
    let width = head_dim(map)?;
    map.insert("head_dim".into(), json!(2 * width as u64));
    number(map, "num_attention_heads", |n| n / 2.0)?;
    number(map, "num_key_value_heads", |n| n / 2.0)
}

fn chosen(map: &mut Object, more: f64) -> Option<()> {
    let keys = ["num_experts_per_tok", "top_k_experts", "experts_per_token"];
    keys.into_iter().find_map(|key| number(map, key, |n| (n + more).max(1.0)))
}

/// Number of layers of the target.
fn target_layers(target: Option<&Object>) -> Option<i64> {
    let config = target?;
    let text = config.get("text_config").and_then(Value::as_object).unwrap_or(config);
    text.get("num_hidden_layers")?.as_i64()
}

/// Changes the tapped layers to `change(id, place, count)`, within those of the target.
fn taps(map: &mut Object, target: Option<&Object>, change: impl Fn(i64, i64, i64) -> i64) -> Option<()> {
    let last = target_layers(target)? - 1;
    let nested = map.get("dflash_config").and_then(|nested| nested.get("target_layer_ids")).is_some();
    let holder = if nested { map.get_mut("dflash_config")?.as_object_mut()? } else { map };
    let count = holder.get("target_layer_ids")?.as_array()?.len() as i64;
    list(holder, "target_layer_ids", |i, id| {
        json!(change(id.as_i64().unwrap_or(0), i as i64, count).clamp(0, last))
    })
}
