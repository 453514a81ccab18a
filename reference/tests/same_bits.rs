//! The bits of a reference run do not depend on threads, optimisation level or processor.
//!
//! The hash below was written down once. CI runs this test in release and in debug builds and with
//! `-C target-cpu=native`, where a fused multiply-add or a wider vector would change it.

use karat_reference::{Call, Model, Ops, Plain, Tensor};
use ndarray::Array2;
use sha2::{Digest, Sha256};
use spec::{Config, LoadError, Matrix, Rows, Site, Tensors, Weights};
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

const EXPECTED: &str = "b586430a73b725b097cd9ff03d7e488c1c273569cf75ea14c06042ea979c07d5";

/// A qwen2 model of two layers whose weights are a plain function of tensor, row and column.
struct FormulaModel(BTreeMap<String, Vec<usize>>);

struct Formula {
    seed: u64,
    shape: [usize; 2],
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
    }

    fn format(&self) -> &str {
        "F32"
    }

    fn row_bytes(&self) -> usize {
        4 * self.shape[1]
    }
}

impl Tensors for FormulaModel {
    fn names(&self) -> Vec<String> {
        self.0.keys().cloned().collect()
    }

    fn shape(&self, name: &str) -> Option<Vec<usize>> {
        self.0.get(name).cloned()
    }

    fn rows(&self, name: &str) -> Option<Result<Arc<dyn Rows>, LoadError>> {
        let (at, shape) =
            self.0.iter().enumerate().find(|(_, (n, _))| *n == name).map(|(i, (_, s))| (i, s))?;
        let inner = *shape.last()?;
        let rows = shape.iter().product::<usize>() / inner;
        Some(Ok(Arc::new(Formula { seed: at as u64 + 1, shape: [rows, inner] })))
    }

    fn file(&self, _: &str) -> PathBuf {
        PathBuf::from("formula")
    }
}

fn model() -> Model {
    let config = serde_json::json!({
        "model_type": "qwen2", "vocab_size": 61, "hidden_size": 48, "intermediate_size": 72,
        "num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 2, "rms_norm_eps": 1e-6,
        "hidden_act": "silu", "max_position_embeddings": 64, "tie_word_embeddings": true,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    });
    let config = Config::parse(config.as_object().unwrap(), &[]).unwrap().config;
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
    let weights = Weights::load(&config, &FormulaModel(shapes)).unwrap();
    Model::new(config, weights)
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

fn hash() -> String {
    let model = model();
    let mut ops = Hash(Plain::default(), Sha256::new());
    let mut state = model.fresh();
    let prompt: Vec<u32> = (0..19).map(|n| n * 37 % 61).collect();
    model.pass(&mut ops, &mut state, &prompt);
    model.pass(&mut ops, &mut state, &[5]);
    ops.1.finalize().iter().map(|b| format!("{b:02x}")).collect()
}

#[test]
fn any_number_of_threads_gives_the_written_hash() {
    for threads in [1, 2, 5] {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        assert_eq!(pool.install(hash), EXPECTED, "on {threads} threads");
    }
}

/// The hash is not blind: one weight one unit in the last place away changes it.
#[test]
fn one_unit_in_the_last_place_shows() {
    let x = Array2::from_elem((1, 2), 1.0f32).into_dyn().into_shared();
    let product = |w: f32| {
        let weight = Matrix::from_values("w", 1, 2, vec![w, 1.0]);
        Plain::default().value(&Call::Linear { x: &x, w: &spec::families::Linear { weight, bias: None } })
    };
    assert_ne!(
        product(0.3)[[0, 0]].to_bits(),
        product(0.3f32.next_up().next_up()).iter().next().unwrap().to_bits()
    );
}
