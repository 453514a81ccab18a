//! The bits of a reference run do not depend on threads, optimisation level or processor.
//!
//! The hashes below were written down once. CI runs this test in release and in debug builds and with
//! `-C target-cpu=native`, where a fused multiply-add or a wider vector would change them.

use karat_reference::{Call, Model, Ops, Plain, Tensor};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use spec::{Config, LoadError, Rows, Site, Tensors, Weights};
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

const QWEN2: &str = "b586430a73b725b097cd9ff03d7e488c1c273569cf75ea14c06042ea979c07d5";

const QWEN3_NEXT: &str = "867dee03193b546366f62036da6351175b8ebb5d20ebb3ad7d59f1ac862d9a85";

/// Tensors whose values are a plain function of tensor, row and column; of the tensor `nudged` the first
/// value is two units in the last place further up.
struct Formulas {
    shapes: BTreeMap<String, Vec<usize>>,
    nudged: Option<&'static str>,
}

struct Formula {
    seed: u64,
    shape: [usize; 2],
    nudged: bool,
}

impl Rows for Formula {
    fn rows(&self) -> usize {
        self.shape[0]
    }

    fn inner(&self) -> usize {
        self.shape[1]
    }

    fn decode(&self, row: usize, into: &mut [f32]) {
        for (i, v) in into.iter_mut().enumerate() {
            let n = self.seed * 7919 + (row * self.shape[1] + i) as u64;
            let mixed = n.wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_mul(n | 1);
            *v = ((mixed >> 40) as f32 / 8_388_608.0 - 1.0) * 0.4;
        }
        if self.nudged && row == 0 {
            into[0] = into[0].next_up().next_up();
        }
    }

    fn format(&self) -> &str {
        "F32"
    }

    fn row_bytes(&self) -> usize {
        4 * self.shape[1]
    }
}

impl Tensors for Formulas {
    fn names(&self) -> Vec<String> {
        self.shapes.keys().cloned().collect()
    }

    fn shape(&self, name: &str) -> Option<Vec<usize>> {
        self.shapes.get(name).cloned()
    }

    fn rows(&self, name: &str) -> Option<Result<Arc<dyn Rows>, LoadError>> {
        let (at, shape) =
            self.shapes.iter().enumerate().find(|(_, (n, _))| *n == name).map(|(i, (_, s))| (i, s))?;
        let inner = *shape.last()?;
        let rows = shape.iter().product::<usize>() / inner;
        let nudged = self.nudged == Some(name);
        Some(Ok(Arc::new(Formula { seed: at as u64 + 1, shape: [rows, inner], nudged })))
    }

    fn file(&self, _: &str) -> PathBuf {
        PathBuf::from("formula")
    }
}

fn model(config: Value, shapes: BTreeMap<String, Vec<usize>>, nudged: Option<&'static str>) -> Model {
    let config = Config::parse(config.as_object().unwrap(), &[]).unwrap().config;
    let weights = Weights::load(&config, &Formulas { shapes, nudged }).unwrap();
    Model::new(config, weights)
}

/// Two layers of attention and feed-forward, with biases.
fn qwen2(nudged: Option<&'static str>) -> Model {
    let config = json!({
        "model_type": "qwen2", "vocab_size": 61, "hidden_size": 48, "intermediate_size": 72,
        "num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 2, "rms_norm_eps": 1e-6,
        "hidden_act": "silu", "max_position_embeddings": 64, "tie_word_embeddings": true,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    });
    let mut shapes = BTreeMap::from([
        ("model.embed_tokens.weight".to_string(), vec![61, 48]),
        ("model.norm.weight".to_string(), vec![48]),
    ]);
    for i in 0..2 {
        for (leaf, shape) in [
            ("input_layernorm.weight", vec![48]),
            ("post_attention_layernorm.weight", vec![48]),
            ("self_attn.q_proj.weight", vec![48, 48]),
            ("self_attn.q_proj.bias", vec![48]),
            ("self_attn.k_proj.weight", vec![16, 48]),
            ("self_attn.k_proj.bias", vec![16]),
            ("self_attn.v_proj.weight", vec![16, 48]),
            ("self_attn.v_proj.bias", vec![16]),
            ("self_attn.o_proj.weight", vec![48, 48]),
            ("mlp.gate_proj.weight", vec![72, 48]),
            ("mlp.up_proj.weight", vec![72, 48]),
            ("mlp.down_proj.weight", vec![48, 72]),
        ] {
            shapes.insert(format!("model.layers.{i}.{leaf}"), shape);
        }
    }
    model(config, shapes, nudged)
}

/// A layer of the gated delta rule and one of gated attention, each with routed and shared experts.
fn qwen3_next(nudged: Option<&'static str>) -> Model {
    let config = json!({
        "model_type": "qwen3_next", "vocab_size": 61, "hidden_size": 48, "intermediate_size": 40,
        "num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"],
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "rms_norm_eps": 1e-6,
        "linear_conv_kernel_dim": 4, "linear_key_head_dim": 8, "linear_num_key_heads": 2,
        "linear_num_value_heads": 4, "linear_value_head_dim": 12, "decoder_sparse_step": 1,
        "mlp_only_layers": [], "moe_intermediate_size": 24, "norm_topk_prob": true, "num_experts": 5,
        "num_experts_per_tok": 2, "shared_expert_intermediate_size": 20, "hidden_act": "silu",
        "max_position_embeddings": 64, "tie_word_embeddings": false,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
    });
    let mut shapes = BTreeMap::from([
        ("lm_head.weight".to_string(), vec![61, 48]),
        ("model.embed_tokens.weight".to_string(), vec![61, 48]),
        ("model.norm.weight".to_string(), vec![48]),
    ]);
    for (leaf, shape) in [
        ("0.linear_attn.A_log", vec![4]),
        ("0.linear_attn.conv1d.weight", vec![80, 1, 4]),
        ("0.linear_attn.dt_bias", vec![4]),
        ("0.linear_attn.in_proj_ba.weight", vec![8, 48]),
        ("0.linear_attn.in_proj_qkvz.weight", vec![128, 48]),
        ("0.linear_attn.norm.weight", vec![12]),
        ("0.linear_attn.out_proj.weight", vec![48, 48]),
        ("1.self_attn.q_proj.weight", vec![128, 48]),
        ("1.self_attn.k_proj.weight", vec![32, 48]),
        ("1.self_attn.v_proj.weight", vec![32, 48]),
        ("1.self_attn.o_proj.weight", vec![48, 64]),
        ("1.self_attn.q_norm.weight", vec![16]),
        ("1.self_attn.k_norm.weight", vec![16]),
    ] {
        shapes.insert(format!("model.layers.{leaf}"), shape);
    }
    for layer in 0..2 {
        let mut add = |leaf: String, shape| shapes.insert(format!("model.layers.{layer}.{leaf}"), shape);
        add("input_layernorm.weight".into(), vec![48]);
        add("post_attention_layernorm.weight".into(), vec![48]);
        add("mlp.gate.weight".into(), vec![5, 48]);
        add("mlp.shared_expert_gate.weight".into(), vec![1, 48]);
        let experts = (0..5).map(|e| (format!("experts.{e}"), 24)).chain([("shared_expert".into(), 20)]);
        for (expert, inner) in experts {
            add(format!("mlp.{expert}.gate_proj.weight"), vec![inner, 48]);
            add(format!("mlp.{expert}.up_proj.weight"), vec![inner, 48]);
            add(format!("mlp.{expert}.down_proj.weight"), vec![48, inner]);
        }
    }
    model(config, shapes, nudged)
}

/// Hashes every site's bits as they are computed.
struct Hash(Plain, Sha256);

impl Ops for Hash {
    type Tensor = Tensor;

    fn run(&mut self, at: Site, call: Call<'_, Tensor>) -> Tensor {
        let value = self.0.value(&call);
        self.1.update(at.to_string());
        value.iter().for_each(|v| self.1.update(v.to_le_bytes()));
        value
    }
}

fn hash(model: &Model) -> String {
    let mut ops = Hash(Plain::default(), Sha256::new());
    let mut state = model.fresh();
    let prompt: Vec<u32> = (0..19).map(|n| n * 37 % 61).collect();
    model.pass(&mut ops, &mut state, &prompt);
    model.pass(&mut ops, &mut state, &[5]);
    ops.1.finalize().iter().map(|b| format!("{b:02x}")).collect()
}

#[test]
fn any_number_of_threads_gives_the_written_hash() {
    for (model, expected) in [(qwen2(None), QWEN2), (qwen3_next(None), QWEN3_NEXT)] {
        for threads in [1, 2, 5] {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            assert_eq!(pool.install(|| hash(&model)), expected, "on {threads} threads");
        }
    }
}

/// The hashes are not blind: one weight two units in the last place away changes them.
#[test]
fn two_units_in_the_last_place_show() {
    assert_ne!(hash(&qwen2(Some("model.layers.1.mlp.down_proj.weight"))), QWEN2);
    assert_ne!(hash(&qwen3_next(Some("model.layers.0.linear_attn.in_proj_qkvz.weight"))), QWEN3_NEXT);
}
