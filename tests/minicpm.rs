//! minicpm by hand: there is no oracle for it, so every scale is followed through one token.

use conformance::record::Record;
use reference::{Model, Tensor};
use serde_json::{Map, Value, json};
use spec::families::Linear;
use spec::families::decoder::{DecoderWeights, LayerWeights};
use spec::{Config, ConfigError, Matrix, Site, Vector, Weights};

/// Four layers of which the last three give nothing, so that √num_hidden_layers is 2.
fn config() -> Map<String, Value> {
    let value = json!({
        "model_type": "minicpm", "vocab_size": 2, "hidden_size": 2, "intermediate_size": 1,
        "num_hidden_layers": 4, "num_attention_heads": 1, "num_key_value_heads": 1, "rms_norm_eps": 0.0,
        "hidden_act": "silu", "max_position_embeddings": 16, "tie_word_embeddings": false,
        "scale_emb": 2, "scale_depth": 3.0, "dim_model_base": 1,
        "rope_scaling": {"rope_type": "longrope", "short_factor": [2.0], "long_factor": [4.0],
            "original_max_position_embeddings": 8},
    });
    value.as_object().unwrap().clone()
}

fn model() -> Model {
    let matrix =
        |name: &str, inner: usize, v: &[f32]| Matrix::from_values(name, v.len() / inner, inner, v.to_vec());
    let linear = |name: &str, inner, v: &[f32]| Linear { weight: matrix(name, inner, v), bias: None };
    let ones = |name: &str| Vector::new(name, vec![1.0, 1.0]);
    let layer = |v: &[f32], o: &[f32]| LayerWeights {
        input_layernorm: ones("input_layernorm"),
        q_proj: linear("q", 2, &[1.0, 2.0, 3.0, 4.0]),
        k_proj: linear("k", 2, &[5.0, 6.0, 7.0, 8.0]),
        v_proj: linear("v", 2, v),
        q_norm: None,
        k_norm: None,
        o_proj: linear("o", 2, o),
        post_attention_layernorm: ones("post_attention_layernorm"),
        gate_proj: linear("gate", 2, &[0.0, 0.0]),
        up_proj: linear("up", 2, &[1.0, 1.0]),
        down_proj: linear("down", 1, &[1.0, 1.0]),
    };
    let still = || layer(&[0.0; 4], &[0.0; 4]);
    let weights = DecoderWeights {
        embed_tokens: matrix("embed", 2, &[9.0, 9.0, 1.5, 2.0]),
        layers: vec![layer(&[0.0, 1.0, 0.0, 0.0], &[0.0, 0.0, 1.0, 0.0]), still(), still(), still()],
        norm: ones("norm"),
        lm_head: matrix("head", 2, &[1.0, 10.0, 10.0, 1.0]),
    };
    Model::new(Config::parse(&config(), &[]).unwrap().config, Weights::Decoder(weights))
}

fn taps(tokens: usize) -> Vec<(Site, Tensor)> {
    let (mut ops, model) = (Record::default(), model());
    model.pass(&mut ops, &mut model.fresh(), &vec![1; tokens]);
    ops.take().unwrap()
}

fn assert_at(taps: &[(Site, Tensor)], site: &str, expected: &[f64]) {
    let (_, value) = taps.iter().find(|(at, _)| at.to_string() == site).unwrap();
    assert_eq!(value.len(), expected.len(), "{site}");
    for (value, expected) in value.iter().zip(expected) {
        assert!((f64::from(*value) - expected).abs() < 1e-5, "{site}: {value}, by hand {expected}");
    }
}

// x₀ = 2 · (1.5, 2) = (3, 4), of rms √12.5. The only token attends to itself, so the branch of layer 0 is
// O(V(norm(x₀))) = (0, 0.8√2); 3 / √4 of it joins: (3, 4 + 1.5 · 0.8√2) = (3, 5.697056). Over its rms
// 4.552826: (0.658931, 1.251323); hidden / dim_model_base = 2 halves it: (0.329466, 0.625661). The head
// gives 0.329466 + 6.256615 and 3.294657 + 0.625661.
#[test]
fn every_scale_by_hand() {
    let taps = taps(1);
    assert_at(&taps, "embed_scaled", &[3.0, 4.0]);
    assert_at(&taps, "layers.0.resid_mid", &[3.0, 5.697_056_3]);
    assert_at(&taps, "layers.3.out", &[3.0, 5.697_056_3]);
    assert_at(&taps, "head_in", &[0.329_465_7, 0.625_661_5]);
    assert_at(&taps, "logits", &[6.586_081_0, 3.920_318_6]);
}

// θ is 10000 where the config is silent, but one pair has θ^0 = 1. Frequencies are divided by the factor:
// position 1 turns by 1/2 while the pass fits 8 positions, position 8 by 8/4 in a pass of 9. Cosines carry
// √(1 + ln(16/8) / ln 8) = √(4/3).
#[test]
fn longrope_divides_and_scales() {
    let cosine = |tokens: usize, position: usize| {
        let taps = taps(tokens);
        let (_, table) = taps.iter().find(|(site, _)| site.name == "rope.cos").unwrap();
        f64::from(table[[position, 0]])
    };
    assert!((cosine(2, 1) - 1.013_345_1).abs() < 1e-6);
    assert!((cosine(9, 8) + 0.480_525_0).abs() < 1e-6);
}

// InfLLM's sparse attention is another computation for long prompts.
#[test]
fn sparse_attention_is_refused() {
    let mut map = config();
    map.insert("sparse_config".into(), json!({"kernel_size": 32}));
    let error = Config::parse(&map, &[]).unwrap_err();
    assert!(matches!(error, ConfigError::Value { ref key, .. } if key == "sparse_config"), "{error}");
}
