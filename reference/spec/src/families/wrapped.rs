//! The text side of multimodal checkpoints: a config inside a config, tensors beside towers.

use crate::config::{ConfigError, ConfigReader, KeyUse};
use serde_json::{Map, Value};

/// Keys of a wrapper that describe something other than the text model. None of them changes what
/// it computes for text tokens.
const BESIDE: &[&str] = &[
    "audio_ms_per_token",
    "audio_soft_tokens_per_image",
    "audio_token_id",
    "boa_token_id",
    "boa_token_index",
    "boi_token_id",
    "boi_token_index",
    "eoa_token_id",
    "eoa_token_index",
    "eoi_token_id",
    "eoi_token_index",
    "image_token_id",
    "image_token_index",
    "mm_tokens_per_image",
    "video_token_id",
    "vision_end_token_id",
    "vision_soft_tokens_per_image",
    "vision_start_token_id",
];

/// Keys of a MiniCPM-V config that describe its image side. They stand beside those of the text model.
const BESIDE_MINICPMV: &[&str] = &[
    "batch_vision_input",
    "drop_vision_last_layer",
    "image_size",
    "patch_size",
    "query_num",
    "slice_config",
    "slice_mode",
    "use_image_id",
    "version",
    "vision_batch_size",
    "vision_config",
];

/// The text model inside a MiniCPM-V, by the `version` of its config.
const MINICPMV: &[(f64, &str)] = &[(2.6, "qwen2"), (4.0, "llama"), (4.5, "qwen3")];

/// Towers by their config key and by how their tensors' names start.
const TOWERS: &[(&str, &[&str])] = &[
    (
        "vision_config",
        &["vision_tower.", "embed_vision.", "multi_modal_projector.", "visual.", "vpm.", "resampler."],
    ),
    ("audio_config", &["audio_tower.", "embed_audio."]),
];

/// A text config taken out of its wrapper.
pub struct Text {
    /// What stands before its keys in messages.
    pub path: &'static str,
    /// The text model's own keys, with `tie_word_embeddings` of the wrapper where they have none.
    pub map: Map<String, Value>,
    /// Keys of the wrapper that were passed over.
    pub passed_over: Vec<String>,
    /// Config keys of the towers, which are not judged.
    pub not_judged: Vec<String>,
    /// Every key of the wrapper with what became of it.
    pub keys: Vec<(String, KeyUse)>,
}

/// Takes a text model out of its wrapper, where there is one.
pub fn text_of(map: &Map<String, Value>, allowed: &[String]) -> Result<Option<Text>, ConfigError> {
    match map.get("model_type").and_then(Value::as_str) {
        Some("minicpmv") => minicpmv(map).map(Some),
        _ => text_config(map, allowed),
    }
}

/// MiniCPM-V: the text model's keys stand in the config itself, its tensors below `llm.`, and `version` says which
/// architecture it is.
fn minicpmv(map: &Map<String, Value>) -> Result<Text, ConfigError> {
    let mut r = ConfigReader::new(map, "");
    let version = r.get("version").cloned().unwrap_or_default();
    let number = version.as_f64().or_else(|| version.as_str()?.parse().ok());
    let Some((_, text)) = MINICPMV.iter().find(|(known, _)| Some(*known) == number) else {
        let known: Vec<String> =
            MINICPMV.iter().map(|(version, text)| format!("{version:.1} ({text})")).collect();
        return Err(r.wrong("version", &known.join(", ")));
    };
    let mut own = map.clone();
    own.retain(|key, _| !BESIDE_MINICPMV.contains(&key.as_str()));
    own.insert("model_type".into(), (*text).into());
    let beside = map.keys().filter(|key| BESIDE_MINICPMV.contains(&key.as_str()));
    Ok(Text {
        path: "",
        map: own,
        passed_over: Vec::new(),
        not_judged: map
            .contains_key("vision_config")
            .then(|| "vision_config".to_string())
            .into_iter()
            .collect(),
        keys: beside.map(|key| (key.clone(), KeyUse::Inert)).collect(),
    })
}

/// Unwraps `text_config`, where there is one.
fn text_config(map: &Map<String, Value>, allowed: &[String]) -> Result<Option<Text>, ConfigError> {
    let mut r = ConfigReader::new(map, "");
    let Some(text) = r.object("text_config")? else { return Ok(None) };
    let mut text = text.clone();
    if let Some(tie) = r.get("tie_word_embeddings") {
        text.entry("tie_word_embeddings").or_insert_with(|| tie.clone());
    }
    r.inert(&["model_type"]);
    r.inert(BESIDE);
    let mut not_judged = Vec::new();
    for (key, _) in TOWERS {
        if r.get(key).is_some() {
            not_judged.push(key.to_string());
        }
    }
    let keys = r.account(allowed);
    Ok(Some(Text { path: "text_config.", map: text, passed_over: r.finish(allowed)?, not_judged, keys }))
}

/// Whether a tensor belongs to a tower.
pub fn of_a_tower(tensor: &str) -> bool {
    let name = tensor.strip_prefix("model.").unwrap_or(tensor);
    TOWERS.iter().any(|(_, starts)| starts.iter().any(|start| name.starts_with(start)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn unwrap(value: Value) -> Result<Option<Text>, ConfigError> {
        text_of(value.as_object().unwrap(), &[])
    }

    #[test]
    fn the_version_of_a_minicpmv_says_which_text_model_it_is() {
        let config = |version: Value| {
            unwrap(json!({"model_type": "minicpmv", "version": version, "hidden_size": 8, "query_num": 64,
                "slice_config": {"max_slice_nums": 9}, "vision_config": {"patch_size": 14}}))
        };
        for (version, text) in [(json!(2.6), "qwen2"), (json!("4.5"), "qwen3"), (json!(4), "llama")] {
            let found = config(version).unwrap().unwrap();
            assert_eq!(Value::Object(found.map), json!({"model_type": text, "hidden_size": 8}));
            assert_eq!((found.path, found.not_judged), ("", vec!["vision_config".to_string()]));
        }
        let error = config(json!(2.5)).err().unwrap().to_string();
        assert!(error.contains("version") && error.contains("2.6 (qwen2)"), "{error}");
    }

    #[test]
    fn towers_are_named_and_the_tie_is_handed_down() {
        let text =
            unwrap(json!({"model_type": "gemma3", "vision_config": {"depth": 2}, "image_token_index": 7,
            "tie_word_embeddings": false, "text_config": {"hidden_size": 8}}));
        let text = text.unwrap().unwrap();
        assert_eq!(text.not_judged, ["vision_config"]);
        assert_eq!(Value::Object(text.map), json!({"hidden_size": 8, "tie_word_embeddings": false}));
        assert!(unwrap(json!({"hidden_size": 8})).unwrap().is_none());
    }

    #[test]
    fn a_wrapper_key_that_is_not_understood_is_refused() {
        let error = unwrap(json!({"text_config": {}, "fusion": 2})).err().unwrap();
        assert!(matches!(error, ConfigError::Unknown { ref key, .. } if key == "fusion"));
    }

    #[test]
    fn tensors_of_towers_by_prefix() {
        assert!(of_a_tower("model.vision_tower.blocks.0.w"));
        assert!(of_a_tower("multi_modal_projector.mm_input_projection_weight"));
        assert!(of_a_tower("vpm.encoder.layers.0.w") && of_a_tower("resampler.kv_proj.weight"));
        assert!(!of_a_tower("llm.model.layers.0.w"));
        assert!(!of_a_tower("model.layers.0.vision_tower.w"));
    }
}
