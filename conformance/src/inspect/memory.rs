//! What a run of a model holds: weights, and the state that grows with the sequence.

use spec::families::{hybrid, layered, lfm2};
use spec::{Config, Weights};

/// Bytes of a value of the state, which reference and built-in path keep in f32.
const STATE_BYTES: usize = 4;

/// Bytes that a run needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Memory {
    /// Weights as they are stored; mapped, so that only what is read takes memory.
    pub weights: usize,
    /// Int8 images of every matrix but the embedding: codes padded to 128 both ways, and a scale and a sum
    /// for each output.
    pub int8_images: usize,
    /// Positions of the longest sequence that the model allows.
    pub positions: usize,
    /// Keys and values of all layers at that length, in f32.
    pub kv_cache: usize,
    /// The same where sliding layers keep no more than their window.
    pub kv_cache_windowed: usize,
    /// State that does not grow: convolutions and recurrences, in f32.
    pub fixed_state: usize,
}

/// Values that one layer keeps.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Layer {
    /// For each position.
    per_position: usize,
    /// Positions that it can see, where they are limited.
    window: Option<usize>,
    /// Once.
    fixed: usize,
}

/// What the model of `config` needs with these weights.
pub fn memory(config: &Config, weights: &mut Weights) -> Memory {
    let (mut stored, mut images) = (0, 0);
    for matrix in weights.matrices() {
        let (out, inner) = (matrix.out(), matrix.inner());
        stored += out * matrix.row_bytes();
        if !matrix.name().contains("embed_tokens") {
            images += out.next_multiple_of(128) * (inner.next_multiple_of(128) + 8);
        }
    }
    let positions = config.max_position_embeddings();
    let layers = layers(config);
    let kept = |window: fn(&Layer) -> Option<usize>| -> usize {
        let of = |layer: &Layer| layer.per_position * positions.min(window(layer).unwrap_or(positions));
        layers.iter().map(of).sum::<usize>() * STATE_BYTES
    };
    Memory {
        weights: stored,
        int8_images: images,
        positions,
        kv_cache: kept(|_| None),
        kv_cache_windowed: kept(|layer| layer.window),
        fixed_state: layers.iter().map(|layer| layer.fixed).sum::<usize>() * STATE_BYTES,
    }
}

fn attention(kv_heads: usize, head_dim: usize, window: Option<usize>) -> Layer {
    Layer { per_position: 2 * kv_heads * head_dim, window, fixed: 0 }
}

fn layers(config: &Config) -> Vec<Layer> {
    match config {
        Config::Decoder(c) | Config::Phi3(c) | Config::Olmo2(c) => decoder(c),
        Config::MoeDecoder(c) => decoder(&c.decoder),
        Config::GptOss(c) => decoder(&c.decoder),
        Config::Gemma(c) => {
            let window = |kind: &layered::LayerType| match kind {
                layered::LayerType::Sliding => Some(c.sliding_window),
                layered::LayerType::Full => None,
            };
            let layer = |kind| attention(c.num_key_value_heads, c.head_dim, window(kind));
            c.layer_types.iter().map(layer).collect()
        }
        // Layers that read another layer's keys and values keep none.
        Config::Gemma4(c) => {
            let layer = |(i, l): (usize, &spec::families::gemma4::Gemma4LayerConfig)| match l.kv_source == i {
                true => attention(l.num_key_value_heads, l.head_dim, c.window(i)),
                false => Layer::default(),
            };
            c.layers.iter().enumerate().map(layer).collect()
        }
        Config::Gemma3n(c) => {
            let layer = |(i, l): (usize, &spec::families::gemma3n::Gemma3nLayerConfig)| match l.kv_source == i
            {
                true => attention(c.num_key_value_heads, c.head_dim, c.window(i)),
                false => Layer::default(),
            };
            c.layers.iter().enumerate().map(layer).collect()
        }
        // Keys and values of every head, as the built-in path keeps them, and the latents beside them.
        Config::Deepseek(c) => {
            let heads = c.num_attention_heads * (c.qk_head_dim() + c.v_head_dim);
            vec![Layer { per_position: heads + c.kv_lora_rank, ..Layer::default() }; c.sparse.len()]
        }
        Config::Hybrid(c) => {
            let delta = c.conv_channels() * (c.linear_conv_kernel_dim - 1)
                + c.linear_num_value_heads * c.linear_key_head_dim * c.linear_value_head_dim;
            let layer = |kind: &hybrid::LayerType| match kind {
                hybrid::LayerType::Full => attention(c.num_key_value_heads, c.head_dim, None),
                hybrid::LayerType::Linear => Layer { fixed: delta, ..Layer::default() },
            };
            c.layer_types.iter().map(layer).collect()
        }
        Config::Lfm2(c) => {
            let layer = |kind: &lfm2::LayerType| match kind {
                lfm2::LayerType::Full => attention(c.num_key_value_heads, c.head_dim, None),
                lfm2::LayerType::Conv => {
                    Layer { fixed: c.hidden_size * (c.conv_l_cache - 1), ..Layer::default() }
                }
            };
            c.layer_types.iter().map(layer).collect()
        }
    }
}

fn decoder(c: &spec::families::decoder::DecoderConfig) -> Vec<Layer> {
    c.layers.iter().map(|l| attention(c.num_key_value_heads, c.head_dim, l.window)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn config(value: serde_json::Value) -> Config {
        Config::parse(value.as_object().unwrap(), &[]).unwrap().config
    }

    // Two kv heads of 8, keys and values: 32 values a position in each of three layers.
    #[test]
    fn a_window_limits_what_a_layer_keeps() {
        let c = config(
            json!({"model_type": "mistral", "vocab_size": 10, "hidden_size": 32, "intermediate_size": 8,
            "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_act": "silu",
            "max_position_embeddings": 100, "rms_norm_eps": 1e-6, "sliding_window": 5, "rope_theta": 1e4}),
        );
        assert_eq!(layers(&c), [Layer { per_position: 32, window: Some(5), fixed: 0 }; 3]);
    }
}
