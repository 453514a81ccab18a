//! What every family keeps: the same bits however a request is cut, taken back, cached or threaded.

mod seeded;

use karat_device::{DeviceError, Engine, Key, Npu, Switches};
use seeded::{Recorded, bits, model, tokens};
use serde_json::{Value, json};
use std::collections::BTreeSet;

const VOCAB: usize = 131;

/// `base` with the keys of `changes`.
fn with(mut base: Value, changes: Value) -> Value {
    let map = base.as_object_mut().unwrap();
    changes.as_object().unwrap().iter().for_each(|(key, value)| drop(map.insert(key.clone(), value.clone())));
    base
}

/// No two widths alike: hidden 48, q 60, kv 20, feed-forward 80.
fn base(model_type: &str) -> Value {
    json!({"model_type": model_type, "vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 80,
        "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 10, "num_hidden_layers": 2,
        "max_position_embeddings": 400, "rms_norm_eps": 1e-5, "rope_theta": 100.0,
        "tie_word_embeddings": false})
}

/// One or two small configs of every family, by a name for messages.
fn families() -> Vec<(&'static str, Value)> {
    let sliding_full = ["sliding_attention", "full_attention"];
    let gemma = json!({"sliding_window": 5, "layer_types": sliding_full, "query_pre_attn_scalar": 13,
        "hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": true});
    let gemma4 = with(
        base("gemma4_text"),
        json!({"num_hidden_layers": 4, "sliding_window": 5, "global_head_dim": 16,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
            "hidden_activation": "gelu_pytorch_tanh", "hidden_size_per_layer_input": 0,
            "final_logit_softcapping": 11.0, "tie_word_embeddings": true, "rope_theta": null}),
    );
    let moe = json!({"num_experts_per_tok": 3, "moe_intermediate_size": 24, "norm_topk_prob": true});
    let hybrid = with(
        base("qwen3_5_text"),
        json!({"num_hidden_layers": 3, "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 7,
            "linear_value_head_dim": 9, "linear_conv_kernel_dim": 4}),
    );
    vec![
        ("llama", with(base("llama"), json!({"attention_bias": true, "mlp_bias": true}))),
        ("mistral", with(base("mistral"), json!({"sliding_window": 5}))),
        ("qwen3", base("qwen3")),
        ("smollm3", with(base("smollm3"), json!({"no_rope_layers": [1, 0]}))),
        (
            "granite",
            with(
                base("granite"),
                json!({"embedding_multiplier": 3.0, "residual_multiplier": 0.7, "attention_multiplier": 0.2,
                    "logits_scaling": 5.0}),
            ),
        ),
        (
            "minicpm",
            with(base("minicpm"), json!({"scale_emb": 2.0, "scale_depth": 1.1, "dim_model_base": 12})),
        ),
        ("phi3", with(base("phi3"), json!({"sliding_window": 7}))),
        ("olmo2", base("olmo2")),
        (
            "qwen3_moe",
            with(with(base("qwen3_moe"), moe.clone()), json!({"num_experts": 6, "mlp_only_layers": [1]})),
        ),
        (
            "glm4_moe",
            with(
                with(base("glm4_moe"), moe),
                json!({"n_routed_experts": 6, "n_group": 2, "topk_group": 1, "n_shared_experts": 1, "head_dim": 12,
                    "routed_scaling_factor": 1.7, "first_k_dense_replace": 1}),
            ),
        ),
        ("qwen3_5", hybrid.clone()),
        (
            "qwen3_next",
            with(
                hybrid,
                json!({"model_type": "qwen3_next", "num_experts": 5, "num_experts_per_tok": 2,
                    "moe_intermediate_size": 21, "shared_expert_intermediate_size": 33}),
            ),
        ),
        (
            "gpt_oss",
            with(
                base("gpt_oss"),
                json!({"num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 6,
                    "layer_types": ["sliding_attention", "full_attention"], "attention_bias": true}),
            ),
        ),
        (
            "deepseek_v3",
            with(
                with(base("deepseek_v3"), json!({"num_key_value_heads": 6, "head_dim": null})),
                json!({"q_lora_rank": 31, "kv_lora_rank": 23, "qk_nope_head_dim": 9, "qk_rope_head_dim": 4,
                    "v_head_dim": 7, "n_routed_experts": 6, "n_group": 2, "topk_group": 1,
                    "num_experts_per_tok": 3, "moe_intermediate_size": 24, "n_shared_experts": 1,
                    "first_k_dense_replace": 1}),
            ),
        ),
        (
            "lfm2",
            with(
                base("lfm2"),
                json!({"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"],
                    "head_dim": null, "rms_norm_eps": null, "conv_L_cache": 3, "block_auto_adjust_ff_dim": false}),
            ),
        ),
        ("gemma2", with(with(base("gemma2"), gemma.clone()), json!({"final_logit_softcapping": 9.0}))),
        ("gemma3", with(base("gemma3_text"), gemma)),
        (
            "gemma4 dense",
            with(gemma4.clone(), json!({"attention_k_eq_v": true, "num_global_key_value_heads": 1})),
        ),
        (
            "gemma3n",
            with(
                base("gemma3n_text"),
                json!({"num_hidden_layers": 4, "sliding_window": 5, "num_kv_shared_layers": 2,
                    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
                    "hidden_activation": "gelu_pytorch_tanh", "hidden_size_per_layer_input": 7,
                    "vocab_size_per_layer_input": 90, "altup_num_inputs": 3, "altup_active_idx": 1,
                    "laurel_rank": 11, "activation_sparsity_pattern": [0.8, 0.0, 0.5, 0.0],
                    "tie_word_embeddings": true}),
            ),
        ),
        (
            "gemma4 moe",
            with(
                gemma4.clone(),
                json!({"enable_moe_block": true, "num_experts": 5, "top_k_experts": 2,
                    "moe_intermediate_size": 21}),
            ),
        ),
        (
            "gemma4 e",
            with(
                gemma4,
                json!({"hidden_size_per_layer_input": 7, "vocab_size_per_layer_input": 140,
                    "num_kv_shared_layers": 2, "use_double_wide_mlp": true}),
            ),
        ),
    ]
}

fn npu(config: &Value, engine: Engine, switches: &str) -> Npu {
    let (config, weights) = model(config, 3);
    Npu::init(&config, &weights, engine, Switches::parse(switches).unwrap()).unwrap()
}

#[test]
fn every_cut_gives_the_same_bits() {
    let tokens = tokens(1, 150, VOCAB);
    for (name, config) in families() {
        for engine in [Engine::F32, Engine::Int8, Engine::W4A8] {
            let mut npu = npu(&config, engine, "");
            let whole = bits(&npu.step_batch(&tokens).unwrap());
            assert_ne!(whole[..VOCAB], whole[149 * VOCAB..], "{name}: rows differ");
            for cut in [1, 3, 7, 16, 17, 128] {
                npu.reset();
                let pieces: Vec<f32> =
                    tokens.chunks(cut).flat_map(|some| npu.step_batch(some).unwrap()).collect();
                assert!(bits(&pieces) == whole, "{name}, {engine}, cut into {cut}");
            }
        }
    }
}

#[test]
fn rollback_is_replay_and_reset_is_fresh() {
    let (prompt, draft, rest) = (tokens(2, 19, VOCAB), tokens(3, 16, VOCAB), tokens(4, 9, VOCAB));
    for (name, config) in families() {
        let mut npu = npu(&config, Engine::Int8, "");
        for kept in [0, 1, 5, 15, 16] {
            npu.reset();
            npu.step_batch(&prompt).unwrap();
            let rejected = npu.step_batch(&draft).unwrap();
            npu.rollback(19 + kept).unwrap();
            let after = bits(&npu.step_batch(&rest).unwrap());
            npu.reset();
            npu.step_batch(&[&prompt[..], &draft[..kept]].concat()).unwrap();
            assert!(bits(&npu.step_batch(&rest).unwrap()) == after, "{name}: {kept} rows kept");
            // The same draft again after it was taken back whole.
            npu.reset();
            npu.step_batch(&prompt).unwrap();
            npu.step_batch(&draft).unwrap();
            npu.rollback(19).unwrap();
            assert!(bits(&npu.step_batch(&draft).unwrap()) == bits(&rejected), "{name}: draft again");
        }
    }
}

/// A snapshot reaches back further than a rollback can, and over a reset.
#[test]
fn a_restored_snapshot_is_replay() {
    let (prompt, long, rest) = (tokens(2, 19, VOCAB), tokens(3, 150, VOCAB), tokens(4, 9, VOCAB));
    for (name, config) in families() {
        let mut npu = npu(&config, Engine::Int8, "");
        npu.step_batch(&prompt).unwrap();
        let snapshot = npu.snapshot();
        let expected = bits(&npu.step_batch(&rest).unwrap());
        // Two launches and single rows behind it, then another request.
        npu.step_batch(&long).unwrap();
        npu.step(5).unwrap();
        npu.restore(&snapshot).unwrap();
        assert_eq!(npu.position(), 19, "{name}");
        assert!(bits(&npu.step_batch(&rest).unwrap()) == expected, "{name}: after 151 more rows");
        npu.reset();
        npu.step_batch(&long).unwrap();
        npu.restore(&snapshot).unwrap();
        assert!(bits(&npu.step_batch(&rest).unwrap()) == expected, "{name}: after another request");
        npu.rollback(19).unwrap();
        assert!(bits(&npu.step_batch(&rest).unwrap()) == expected, "{name}: taken back once more");
    }
    let (mut one, other) = (npu(&families()[0].1, Engine::F32, ""), npu(&families()[0].1, Engine::F32, ""));
    assert_eq!(one.restore(&other.snapshot()), Err(DeviceError::Snapshot));
}

#[test]
fn one_row_at_a_time_can_be_taken_back_too() {
    let tokens = tokens(5, 12, VOCAB);
    for (name, config) in families() {
        let mut npu = npu(&config, Engine::F32, "");
        let mut expected = Vec::new();
        for token in &tokens {
            expected.push(bits(&npu.step(*token).unwrap()));
        }
        npu.reset();
        for (n, token) in tokens.iter().enumerate() {
            npu.step(77).unwrap();
            npu.rollback(n).unwrap();
            assert!(bits(&npu.step(*token).unwrap()) == expected[n], "{name}: row {n}");
        }
    }
}

#[test]
fn threads_switches_and_sinks_change_no_bit() {
    let tokens = tokens(6, 40, VOCAB);
    for (name, config) in families() {
        let expected = bits(&npu(&config, Engine::Int8, "").step_batch(&tokens).unwrap());
        for switches in
            ["reload=attn", "reload=ffn", "reload=ple", "reload=all,poison=on", "cache=off", "batch=off"]
        {
            let found = npu(&config, Engine::Int8, switches).step_batch(&tokens).unwrap();
            assert!(bits(&found) == expected, "{name}: {switches}");
        }
        for threads in [1, 2, 5] {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            let found = pool.install(|| npu(&config, Engine::Int8, "").step_batch(&tokens).unwrap());
            assert!(bits(&found) == expected, "{name}: {threads} threads");
        }
        let mut sink = Recorded::default();
        let found = npu(&config, Engine::Int8, "").step_batch_tapped(&tokens, &mut sink).unwrap();
        assert!(bits(&found) == expected, "{name}: with a sink");
        for (site, shape, values) in &sink.0 {
            assert!(values.iter().all(|v| v.is_finite()), "{name}: {site}");
            let streams = shape.len() > site.info().axes.len();
            assert!(streams || site.info().axes[0] != "tokens" || shape[0] == 40, "{name}: {site} {shape:?}");
        }
    }
}

// A later token changes no earlier row, and every earlier token reaches the last row.
#[test]
fn the_past_is_seen_and_the_future_is_not() {
    let tokens = tokens(7, 14, VOCAB);
    for (name, config) in families() {
        let mut npu = npu(&config, Engine::F32, "");
        let plain = npu.step_batch(&tokens).unwrap();
        let mut changed = tokens.clone();
        changed[9] = (changed[9] + 1) % VOCAB as u32;
        npu.reset();
        let other = npu.step_batch(&changed).unwrap();
        assert!(bits(&plain[..9 * VOCAB]) == bits(&other[..9 * VOCAB]), "{name}");
        (9..14)
            .for_each(|r| assert_ne!(plain[r * VOCAB..][..VOCAB], other[r * VOCAB..][..VOCAB], "{name} {r}"));
    }
}

#[test]
fn keys_are_injective_and_nothing_is_decoded_twice() {
    for (name, config) in families() {
        let mut npu = npu(&config, Engine::Int8, "");
        let designs = npu.designs();
        let names: BTreeSet<String> = designs.iter().map(|(key, _)| key.to_string()).collect();
        assert_eq!(names.len(), designs.len(), "{name}");
        npu.step_batch(&tokens(8, 20, VOCAB)).unwrap();
        assert_eq!(npu.resident().keys().len(), designs.len(), "{name}: all images are resident");
        let decoded: usize = designs.iter().map(|(_, design)| 4 * design.out * design.inner).sum();
        assert_eq!(npu.counters().total().dequantised_bytes, decoded as u64, "{name}: each once");
        for rows in [1, 16, 130] {
            npu.step_batch(&tokens(rows as u64, rows, VOCAB)).unwrap();
            let cost = npu.counters().total();
            assert_eq!((cost.dequantised_bytes, cost.packed_bytes), (0, 0), "{name}: {rows} rows");
            assert!(cost.row_bytes >= (rows * 48 * 4) as u64, "{name}: rows of the table are read");
        }
    }
}

/// I7 for models with too many keys for every subset: every key alone, every key but one, every group of
/// one layer, and 40 drawn subsets.
#[test]
fn subsets_of_resident_images_give_the_uncached_bits() {
    let tokens = tokens(9, 5, VOCAB);
    for (name, config) in families() {
        let expected = bits(&npu(&config, Engine::Int8, "cache=off").step_batch(&tokens).unwrap());
        let mut npu = npu(&config, Engine::Int8, "poison=on");
        npu.warm_up().unwrap();
        let keys = npu.resident().keys();
        let mut subsets: Vec<BTreeSet<Key>> = Vec::new();
        for (n, key) in keys.iter().enumerate() {
            subsets.push([*key].into());
            subsets.push(keys.iter().copied().filter(|other| other != key).collect());
            subsets.push(keys.iter().copied().filter(|other| other.layer == key.layer).collect());
            let drawn = |m: usize| (n * 2_654_435_761 + m * 40_503) >> 5 & 1 == 1;
            subsets.push(keys.iter().enumerate().filter(|(m, _)| drawn(*m)).map(|(_, key)| *key).collect());
        }
        for subset in subsets {
            npu.retain_resident(|key| subset.contains(key));
            npu.reset();
            assert!(bits(&npu.step_batch(&tokens).unwrap()) == expected, "{name}: {subset:?}");
        }
    }
}

#[test]
fn every_product_s_weights_can_be_read_back() {
    for (name, config) in families() {
        let mut exact = npu(&config, Engine::F32, "");
        let mut sink = Recorded::default();
        exact.step_batch_tapped(&tokens(10, 3, VOCAB), &mut sink).unwrap();
        let mut found = 0;
        for (site, shape, _) in &sink.0 {
            let Some(weights) = exact.device_weights(*site).unwrap() else { continue };
            assert_eq!(weights.out(), shape[1..].iter().product::<usize>(), "{name}: {site}");
            found += 1;
        }
        assert!(found >= 7, "{name}: {found} products are tapped");
    }
}
