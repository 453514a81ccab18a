use super::*;

/// The config of a published DFlash draft, in the newer spelling, cut to what a forward pass reads.
fn newer() -> Value {
    json!({
        "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "hidden_size": 64,
        "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 24, "rms_norm_eps": 1e-6, "vocab_size": 500,
        "max_position_embeddings": 4096, "hidden_act": "silu", "attention_bias": false,
        "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8,
        "use_sliding_window": true, "max_window_layers": 2, "num_target_layers": 12,
        "tie_word_embeddings": false, "rope_parameters": {"rope_type": "default", "rope_theta": 1e7},
        "dflash_config": {"target_layer_ids": [1, 9, 4], "mask_token_id": 499, "block_size": 8}
    })
}

fn with(edits: &[(&str, Value)]) -> Value {
    let mut config = newer();
    for (key, value) in edits {
        match key.strip_prefix("dflash_config.") {
            Some(leaf) => config["dflash_config"][leaf] = value.clone(),
            None => config[*key] = value.clone(),
        }
    }
    config
}

fn without(keys: &[&str]) -> Value {
    let mut config = newer();
    for key in keys {
        match key.strip_prefix("dflash_config.") {
            Some(leaf) => config["dflash_config"].as_object_mut().unwrap().remove(leaf),
            None => config.as_object_mut().unwrap().remove(*key),
        };
    }
    config
}

fn parse(config: &Value) -> Result<DraftConfig, ConfigError> {
    DraftConfig::parse(config.as_object().unwrap(), &[]).map(|(config, _)| config)
}

fn refusal(config: &Value) -> String {
    parse(config).unwrap_err().to_string()
}

#[test]
fn the_order_of_the_taps_is_kept() {
    let config = parse(&newer()).unwrap();
    assert_eq!(config.target_layer_ids, [1, 9, 4]);
    assert_eq!((config.block_size, config.mask_token_id), (8, 499));
    assert_eq!(config.q_width(), 96, "heads together are wider than the residual stream of 64");
}

#[test]
fn older_files_say_the_same_at_the_top() {
    let mut older = without(&["dflash_config", "rope_parameters"]);
    older["target_layer_ids"] = json!([1, 9, 4]);
    older["mask_token_id"] = json!(499);
    older["block_size"] = json!(8);
    older["rope_theta"] = json!(1e7);
    older["rope_scaling"] = Value::Null;
    assert_eq!(parse(&older), parse(&newer()));
    // Where both speak, the inner object wins.
    assert_eq!(parse(&with(&[("block_size", json!(16))])), parse(&newer()));
}

#[test]
fn a_block_is_sixteen_where_nothing_is_said() {
    assert_eq!(parse(&without(&["dflash_config.block_size"])).unwrap().block_size, 16);
}

/// Both layer types under every setting of `is_causal`: the table of the specification.
#[test]
fn who_sees_whom() {
    let layers = |edits: &[(&str, Value)]| parse(&with(edits)).unwrap().layers;
    use DraftReach::{All, Causal, TwoSided, Window};
    assert_eq!(layers(&[]), [Window(8), All]);
    assert_eq!(layers(&[("is_causal", Value::Null)]), [Window(8), All]);
    assert_eq!(layers(&[("is_causal", json!(true))]), [Window(8), Causal]);
    assert_eq!(layers(&[("is_causal", json!(false))]), [TwoSided(8), All]);
    assert_eq!(layers(&[("dflash_config.causal", json!(false))]), [TwoSided(8), All]);
    // The top level wins over the other spelling.
    let both = [("is_causal", json!(true)), ("dflash_config.causal", json!(false))];
    assert_eq!(layers(&both), [Window(8), Causal]);
    let full = without(&["layer_types", "sliding_window"]);
    assert_eq!(parse(&full).unwrap().layers, [All, All]);
}

/// transformers' class: |q - k| <= 8 is nearer than 9.
#[test]
fn muse_counts_the_window_on_both_sides_and_inclusive() {
    let mut config = with(&[("architectures", json!(["MuseGlimmerAssistantModel"]))]);
    config.as_object_mut().unwrap().remove("vocab_size");
    let config = parse(&config).unwrap();
    assert_eq!(config.layers, [DraftReach::TwoSided(9), DraftReach::All]);
    assert_eq!(config.vocab_size, None);
}

#[test]
fn pairing_is_never_the_targets() {
    let pairing = |key: &str, value: bool| parse(&with(&[(key, json!(value))])).unwrap().rope.pairing;
    assert_eq!(parse(&newer()).unwrap().rope.pairing, Pairing::HalfSplit);
    assert_eq!(pairing("is_neox_style", false), Pairing::Interleaved);
    assert_eq!(pairing("rope_is_neox_style", true), Pairing::HalfSplit);
    assert_eq!(pairing("rope_interleaved", true), Pairing::Interleaved);
    let both = with(&[("is_neox_style", json!(true)), ("rope_interleaved", json!(true))]);
    assert_eq!(
        refusal(&both),
        "config key rope_interleaved is true; supported: what the other keys of the pairing say"
    );
}

#[test]
fn a_missing_list_of_taps_is_not_guessed() {
    assert_eq!(
        refusal(&without(&["dflash_config.target_layer_ids"])),
        "config key target_layer_ids is missing; expected the tapped layers of the target, in the order of \
         fc's columns; no formula gives them, take the list from the training config"
    );
}

#[test]
fn a_leaked_rotary_factor_is_refused_wherever_it_stands() {
    let leaked = [
        with(&[("partial_rotary_factor", json!(0.25))]),
        with(&[("dflash_config.partial_rotary_factor", json!(0.25))]),
        with(&[("rope_parameters", json!({"rope_theta": 1e7, "partial_rotary_factor": 0.25}))]),
        with(&[("rope_scaling", json!({"type": "default", "partial_rotary_factor": 0.25}))]),
    ];
    for config in leaked {
        let error = refusal(&config);
        assert!(
            error.contains("partial_rotary_factor is 0.25; supported: 1 or nothing: a draft turns all"),
            "{error}"
        );
    }
    assert!(parse(&with(&[("partial_rotary_factor", json!(1.0))])).is_ok());
}

#[test]
fn relatives_are_named() {
    let class = |name: &str| refusal(&with(&[("architectures", json!([name]))]));
    assert_eq!(
        class("DFlashLagunaForCausalLM"),
        "config key architectures is [\"DFlashLagunaForCausalLM\"]; supported: one of DFlashDraftModel, \
         DFlash2DraftModel, MuseGlimmerAssistantModel (a Laguna draft norms every tap and gates its heads, \
         which is not implemented)"
    );
    assert!(class("DominoDraftModel").contains("sequential logits head"));
    assert!(class("LlamaForCausalLM").starts_with("config key architectures is"));
    assert!(refusal(&without(&["architectures"])).starts_with("config key architectures is missing"));
    for (key, value, why) in [
        ("gating", json!("per-head"), "Laguna"),
        ("projector_type", json!("markov"), "Domino"),
        ("speculators_model_type", json!("dflash"), "speculators"),
        ("dflash_config.use_swa", json!(true), "MiMo"),
        ("sample_from_anchor", json!(true), "one position further"),
        ("draft_vocab_size", json!(100), "reduced vocabulary"),
        ("quantization_config", json!({"bits": 4}), "dequantise"),
    ] {
        let error = refusal(&with(&[(key, value)]));
        assert!(error.contains(why) && error.contains("a draft without it"), "{error}");
    }
    assert!(parse(&with(&[("sample_from_anchor", json!(false))])).is_ok());
}

#[test]
fn values_that_cannot_be() {
    for (key, value, why) in [
        ("dflash_config.target_layer_ids", json!([1, 9, 1]), "every layer once"),
        ("dflash_config.target_layer_ids", json!([1, 12]), "ids below num_target_layers 12"),
        ("dflash_config.target_layer_ids", json!([-1, 3]), "a list of whole numbers"),
        ("dflash_config.target_layer_ids", json!([]), "1 to 4096 ids"),
        ("dflash_config.block_size", json!(1), "a number from 2"),
        ("dflash_config.mask_token_id", json!(-5), "not negative"),
        ("dflash_config.final_logit_softcapping", json!(-1.0), "a positive number"),
        ("eagle_aux_hidden_state_layer_ids", json!([1, 9, 4]), "target_layer_ids plus 1"),
        ("target_hidden_size", json!(128), "hidden_size 64"),
        ("num_key_value_heads", json!(3), "a divisor of num_attention_heads 4"),
        ("head_dim", json!(23), "an even number"),
        ("hidden_act", json!("gelu"), "\"silu\""),
        ("layer_types", json!(["full_attention"]), "one entry for each of the 2 layers"),
        (
            "layer_types",
            json!(["chunked_attention", "full_attention"]),
            "full_attention or sliding_attention",
        ),
        ("sliding_window", Value::Null, "as layer_types has sliding layers"),
        ("new_thing", json!(2), "is not understood"),
        ("dflash_config.new_thing", json!(2), "dflash_config.new_thing (= 2) is not understood"),
    ] {
        let error = refusal(&with(&[(key, value)]));
        assert!(error.contains(why), "{key}: {error}");
    }
    assert!(refusal(&without(&["dflash_config.mask_token_id"])).contains("mask_token_id is missing"));
    assert!(refusal(&without(&["rope_parameters"])).contains("rope_theta is missing"));
    assert!(parse(&with(&[("eagle_aux_hidden_state_layer_ids", json!([2, 10, 5]))])).is_ok());
}

#[test]
fn the_second_version_needs_its_four_sizes() {
    let sizes = [
        ("dflash_config.conv_kernel_size", json!(2)),
        ("dflash_config.conv_group_size", json!(16)),
        ("dflash_config.selector_rank", json!(4)),
        ("dflash_config.selector_top_k", json!(16)),
    ];
    let class = ("architectures", json!(["DFlash2DraftModel"]));
    let all: Vec<_> = sizes.iter().cloned().chain([class.clone()]).collect();
    let expected =
        Version2 { conv_kernel_size: 2, conv_group_size: 16, selector_rank: 4, selector_top_k: 16 };
    assert_eq!(parse(&with(&all)).unwrap().version2, Some(expected));
    for (n, (key, _)) in sizes.iter().enumerate() {
        let mut some = all.clone();
        some.remove(n);
        let leaf = key.trim_start_matches("dflash_config.");
        assert!(refusal(&with(&some)).contains(&format!("{leaf} is missing")), "{key}");
    }
    let group = [all.clone(), vec![("dflash_config.conv_group_size", json!(24))]].concat();
    assert!(refusal(&with(&group)).contains("a divisor of hidden_size 64"));
    // A second version under the first one's name has sizes that nobody reads.
    assert!(refusal(&with(&sizes)).contains("is not understood"));
}
