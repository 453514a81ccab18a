//! What must hold of whole programs: latent attention absorbed is latent attention expanded, a mixture of all
//! experts is a dense one, sharing layers read the right layer's keys, and a window as long as the text is none.
//!
//! Expected values are computed here, in f64 and by plain loops, from the taps that go in.

use conformance::record::Record;
use fixtures::Package;
use golden::Dump;
use reference::{Model, Tensor};
use serde_json::{Map, Value, json};
use spec::families::moe_decoder::FeedForward;
use spec::{Config, Site, Weights};
use std::collections::BTreeMap;

struct Run {
    config: Map<String, Value>,
    weights: Weights,
    taps: BTreeMap<Site, Tensor>,
}

/// The prefill of a bundled package, its config changed by `edit`.
fn run(name: &str, edit: impl Fn(&mut Map<String, Value>)) -> Run {
    let package = Package::open(name).unwrap();
    let mut config = package.config().clone();
    edit(&mut config);
    let parsed = Config::parse(&config, &[]).unwrap().config;
    let weights = Weights::load(&parsed, package.tensors()).unwrap();
    let prompt = Dump::open(package.dir()).unwrap().manifest().prompt.clone();
    let (mut ops, model) = (Record::default(), Model::new(parsed, weights.clone()));
    model.pass(&mut ops, &mut model.fresh(), &prompt);
    Run { config, weights, taps: ops.take().unwrap().into_iter().collect() }
}

impl Run {
    fn tap(&self, layer: usize, name: &'static str) -> &Tensor {
        self.taps.get(&Site::layer(layer, name)).unwrap_or_else(|| panic!("layer {layer} has no {name}"))
    }

    fn values(&self, layer: usize, name: &'static str) -> Vec<f64> {
        self.tap(layer, name).iter().map(|&v| f64::from(v)).collect()
    }

    fn number(&self, key: &str) -> usize {
        self.config[key].as_u64().unwrap() as usize
    }
}

fn f64s(values: Vec<f32>) -> Vec<f64> {
    values.into_iter().map(f64::from).collect()
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

fn softmax(scores: &[f64]) -> Vec<f64> {
    let largest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let powers: Vec<f64> = scores.iter().map(|s| (s - largest).exp()).collect();
    let total: f64 = powers.iter().sum();
    powers.into_iter().map(|p| p / total).collect()
}

/// Sites are rounded to f32 between the steps that are one here: a few units of that.
fn assert_close(name: &str, found: &[f64], expected: &[f64]) {
    assert_eq!(found.len(), expected.len(), "{name}");
    let largest = expected.iter().fold(0f64, |m, v| m.max(v.abs()));
    assert!(largest > 0.0, "{name}: something to compare");
    for (n, (f, e)) in found.iter().zip(expected).enumerate() {
        assert!((f - e).abs() <= 2e-6 * largest, "{name} [{n}]: {f} against {e}");
    }
}

/// Keys and values are never expanded: `q_absorbed = W_kᵀ q_nope` meets the latents, and the weighted latents
/// meet `W_v`.
#[test]
fn absorbed_latent_attention_is_expanded_latent_attention() {
    let run = run("deepseek_v3", |_| {});
    let Weights::Deepseek(weights) = &run.weights else { panic!("deepseek_v3 has latents") };
    let Config::Deepseek(config) = Config::parse(&run.config, &[]).unwrap().config else {
        panic!("as above")
    };
    let heads = run.number("num_attention_heads");
    let (nope, turned) = (run.number("qk_nope_head_dim"), run.number("qk_rope_head_dim"));
    let (value, rank) = (run.number("v_head_dim"), run.number("kv_lora_rank"));
    for (layer, w) in weights.layers.iter().enumerate() {
        let kv_b = f64s(w.kv_b_proj.weight.to_values().unwrap());
        let (latent, k_rope) = (run.values(layer, "latent_cache"), run.values(layer, "k_rope_cache"));
        let (q_nope, q_rope) = (run.values(layer, "q_nope"), run.values(layer, "q_rope"));
        let tokens = latent.len() / rank;
        let mut expected = Vec::new();
        for t in 0..tokens {
            for h in 0..heads {
                let row = |r: usize| &kv_b[(h * (nope + value) + r) * rank..][..rank];
                let q = &q_nope[(t * heads + h) * nope..][..nope];
                let absorbed: Vec<f64> =
                    (0..rank).map(|i| (0..nope).map(|d| row(d)[i] * q[d]).sum()).collect();
                let q_rope = &q_rope[(t * heads + h) * turned..][..turned];
                let score = |s: usize| {
                    let turned_part = dot(q_rope, &k_rope[s * turned..][..turned]);
                    config.attention_scale() * (dot(&absorbed, &latent[s * rank..][..rank]) + turned_part)
                };
                let p = softmax(&(0..=t).map(score).collect::<Vec<_>>());
                let mixed: Vec<f64> = (0..rank)
                    .map(|i| p.iter().enumerate().map(|(s, p)| p * latent[s * rank + i]).sum())
                    .collect();
                expected.extend((0..value).map(|d| dot(row(nope + d), &mixed)));
            }
        }
        assert_close(&format!("layers.{layer}.attn_ctx"), &run.values(layer, "attn_ctx"), &expected);
    }
}

/// `Σ_e softmax(router)[e] · down_e(silu(gate_e x) · up_e x)` over all experts, none left out.
#[test]
fn a_mixture_of_all_experts_is_dense() {
    let run = run("qwen3_moe", |config| {
        config.insert("num_experts_per_tok".into(), config["num_local_experts"].clone());
        config.insert("norm_topk_prob".into(), json!(false));
    });
    let Weights::MoeDecoder(weights) = &run.weights else { panic!("qwen3_moe has experts") };
    let hidden = run.number("hidden_size");
    let mut layers = 0;
    for (layer, w) in weights.layers.iter().enumerate() {
        let FeedForward::Sparse(moe) = &w.mlp else { continue };
        let x = run.values(layer, "mlp_norm");
        let logits = run.values(layer, "router_logits");
        let count = run.tap(layer, "router_logits").shape()[1];
        let times = |matrix: &spec::Matrix, x: &[f64]| -> Vec<f64> {
            f64s(matrix.to_values().unwrap()).chunks_exact(x.len()).map(|row| dot(row, x)).collect()
        };
        let mut expected = Vec::new();
        for (x, logits) in x.chunks_exact(hidden).zip(logits.chunks_exact(count)) {
            let mut y = vec![0.0; hidden];
            for (e, p) in softmax(logits).into_iter().enumerate() {
                let gate = times(&moe.experts.gate_proj[e].weight, x);
                let up = times(&moe.experts.up_proj[e].weight, x);
                let act: Vec<f64> = gate.iter().zip(&up).map(|(g, u)| g / (1.0 + (-g).exp()) * u).collect();
                let down = times(&moe.experts.down_proj[e].weight, &act);
                y.iter_mut().zip(down).for_each(|(y, down)| *y += p * down);
            }
            expected.extend(y);
        }
        assert_close(&format!("layers.{layer}.experts_out"), &run.values(layer, "experts_out"), &expected);
        layers += 1;
    }
    assert!(layers > 0);
}

/// A layer without a cache of its own scores against the keys of the last layer of its kind that has one.
#[test]
fn sharing_layers_read_the_last_layer_of_their_kind() {
    for name in ["gemma3n", "gemma4_e"] {
        let run = run(name, |_| {});
        let kinds: Vec<&str> =
            run.config["layer_types"].as_array().unwrap().iter().map(|kind| kind.as_str().unwrap()).collect();
        let own = kinds.len() - run.number("num_kv_shared_layers");
        assert!(own < kinds.len(), "{name} shares");
        for layer in own..kinds.len() {
            let donor = (0..own).rev().find(|n| kinds[*n] == kinds[layer]).unwrap();
            let (q, keys) = (run.tap(layer, "q_rope"), run.tap(donor, "k_cache"));
            let (tokens, heads, dim) = (q.shape()[0], q.shape()[1], q.shape()[2]);
            let (count, kv_heads) = (keys.shape()[0], keys.shape()[1]);
            let (q, k) = (run.values(layer, "q_rope"), run.values(donor, "k_cache"));
            let mut expected = Vec::new();
            for h in 0..heads {
                for t in 0..tokens {
                    let kv_head = h / (heads / kv_heads);
                    expected.extend((0..count).map(|s| {
                        dot(&q[(t * heads + h) * dim..][..dim], &k[(s * kv_heads + kv_head) * dim..][..dim])
                    }));
                }
            }
            let found = run.values(layer, "attn_scores");
            assert_close(&format!("{name} layers.{layer}.attn_scores"), &found, &expected);
            // The keys of another donor give other scores: the comparison could have failed.
            if let Some(other) =
                (0..own).find(|n| *n != donor && run.tap(*n, "k_cache").shape() == keys.shape())
            {
                assert_ne!(run.tap(other, "k_cache"), keys, "{name}: layers {other} and {donor} differ");
            }
        }
    }
}

/// And one shorter than the text is not.
#[test]
fn a_window_as_long_as_the_text_is_full_attention() {
    let logits = |window: Value| -> Vec<u32> {
        let run = run("mistral", |config| drop(config.insert("sliding_window".into(), window.clone())));
        run.taps[&Site::model("logits")].iter().map(|v| v.to_bits()).collect()
    };
    let tokens = run("mistral", |_| {}).taps[&Site::model("logits")].shape()[0];
    let full = logits(Value::Null);
    assert_eq!(logits(json!(tokens)), full);
    assert_ne!(logits(json!(tokens - 1)), full);
}
