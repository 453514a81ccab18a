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

/// Towers by their config key and by how their tensors' names start.
const TOWERS: &[(&str, &[&str])] = &[
    ("vision_config", &["vision_tower.", "embed_vision.", "multi_modal_projector.", "visual."]),
    ("audio_config", &["audio_tower.", "embed_audio."]),
];

/// A text config taken out of its wrapper.
pub struct Text {
    /// The text model's own keys, with `tie_word_embeddings` of the wrapper where they have none.
    pub map: Map<String, Value>,
    /// Keys of the wrapper that were passed over.
    pub passed_over: Vec<String>,
    /// Config keys of the towers, which are not judged.
    pub not_judged: Vec<String>,
    /// Every key of the wrapper with what became of it.
    pub keys: Vec<(String, KeyUse)>,
}

/// Unwraps `text_config`, where there is one.
pub fn text_config(map: &Map<String, Value>, allowed: &[String]) -> Result<Option<Text>, ConfigError> {
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
    Ok(Some(Text { map: text, passed_over: r.finish(allowed)?, not_judged, keys }))
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
        text_config(value.as_object().unwrap(), &[])
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
        assert!(!of_a_tower("model.layers.0.vision_tower.w"));
    }
}
