//! A draft for any target, with seeded weights.

#[path = "../values/mod.rs"]
mod values;

use fixtures::random::SplitMix64;
use reference::models::Draft;
use serde_json::{Value, json};
use spec::families::draft::{DraftConfig, DraftWeights};
use spec::{LoadError, Rows, Tensors};
use std::path::PathBuf;
use std::sync::Arc;
use values::Values;

/// Weights that nobody trained, under the published names, for any target.
pub struct Noise {
    pub hidden: usize,
    pub vocab: usize,
    pub taps: usize,
    pub version: u8,
}

const SIZES: (usize, usize, usize, usize, usize) = (2, 4, 2, 6, 20);

impl Noise {
    pub fn config(&self, layers: usize, block: usize) -> Value {
        let (depth, heads, kv_heads, head_dim, inner) = SIZES;
        let taps: Vec<usize> = [layers - 1, 0, layers / 2].into_iter().take(self.taps).collect();
        let mut config = json!({
            "architectures": ["DFlashDraftModel"], "hidden_size": self.hidden, "intermediate_size": inner,
            "num_hidden_layers": depth, "num_attention_heads": heads, "num_key_value_heads": kv_heads,
            "head_dim": head_dim, "rms_norm_eps": 1e-6, "vocab_size": self.vocab,
            "max_position_embeddings": 128, "rope_theta": 1e4,
            "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 3,
            "dflash_config": {"target_layer_ids": taps, "mask_token_id": self.vocab - 1, "block_size": block}
        });
        if self.version == 2 {
            config["architectures"] = json!(["DFlash2DraftModel"]);
            let sizes = [
                ("conv_kernel_size", 2),
                ("conv_group_size", self.hidden / 4),
                ("selector_rank", 3),
                ("selector_top_k", 5),
            ];
            for (key, value) in sizes {
                config["dflash_config"][key] = json!(value);
            }
        }
        config
    }

    fn shapes(&self) -> Vec<(String, Vec<usize>)> {
        let (h, (depth, heads, kv_heads, d, inner)) = (self.hidden, SIZES);
        let mut all = vec![
            ("fc.weight".to_string(), vec![h, self.taps * h]),
            ("hidden_norm.weight".into(), vec![h]),
            ("norm.weight".into(), vec![h]),
        ];
        for i in 0..depth {
            let mut put =
                |leaf: &str, shape: &[usize]| all.push((format!("layers.{i}.{leaf}"), shape.to_vec()));
            put("input_layernorm.weight", &[h]);
            put("post_attention_layernorm.weight", &[h]);
            put("self_attn.q_proj.weight", &[heads * d, h]);
            put("self_attn.k_proj.weight", &[kv_heads * d, h]);
            put("self_attn.v_proj.weight", &[kv_heads * d, h]);
            put("self_attn.o_proj.weight", &[h, heads * d]);
            put("self_attn.q_norm.weight", &[d]);
            put("self_attn.k_norm.weight", &[d]);
            put("mlp.gate_proj.weight", &[inner, h]);
            put("mlp.up_proj.weight", &[inner, h]);
            put("mlp.down_proj.weight", &[h, inner]);
            if self.version == 2 {
                for conv in ["attention_conv", "mlp_conv"] {
                    put(&format!("{conv}.base_kernel"), &[2, 2, h]);
                    put(&format!("{conv}.kernel_projection.weight"), &[2 * 2 * 4, h]);
                }
            }
        }
        if self.version == 2 {
            all.push(("candidate_selector.predecessor_codebook".into(), vec![self.vocab, 3]));
            all.push(("candidate_selector.successor_codebook".into(), vec![self.vocab, 3]));
            all.push(("candidate_selector.hidden_projection.weight".into(), vec![3, h]));
        }
        all
    }

    /// The draft for a target of `layers` layers.
    pub fn draft(&self, layers: usize, block: usize) -> Draft {
        let config = self.config(layers, block);
        let (config, _) = DraftConfig::parse(config.as_object().unwrap(), &[]).unwrap();
        let weights = DraftWeights::load(&config, self).unwrap();
        Draft { config, weights }
    }
}

impl Tensors for Noise {
    fn names(&self) -> Vec<String> {
        self.shapes().into_iter().map(|(name, _)| name).collect()
    }
    fn shape(&self, name: &str) -> Option<Vec<usize>> {
        self.shapes().into_iter().find(|(n, _)| n == name).map(|(_, shape)| shape)
    }
    fn rows(&self, name: &str) -> Option<Result<Arc<dyn Rows>, LoadError>> {
        let shape = self.shape(name)?;
        let mut random = SplitMix64::new(name.bytes().fold(7u64, |x, b| x.wrapping_mul(31) + u64::from(b)));
        let norm = shape.len() == 1;
        let value = |r: &mut SplitMix64| if norm { 0.5 + r.uniform() } else { 0.4 * r.normal() };
        let values = (0..shape.iter().product()).map(|_| value(&mut random) as f32).collect();
        Some(Ok(Arc::new(Values(*shape.last()?, values))))
    }
    fn file(&self, _: &str) -> PathBuf {
        PathBuf::from("noise")
    }
}
