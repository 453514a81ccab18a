//! Tiny seeded models, and the plainest possible forward to compare the device with.

#![allow(dead_code)]

pub mod naive;

use spec::families::decoder::{DecoderConfig, DecoderWeights, LayerConfig, LayerWeights, Scales};
use spec::families::{Activation, Linear};
use spec::{Config, Matrix, Pairing, Rope, Scaling, Site, Vector, Weights};

/// Numbers in -1..1 from a seed: xorshift64*, the upper 24 bits.
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Random {
        Random(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1)
    }

    pub fn next(&mut self) -> f32 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        let bits = self.0.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 40;
        bits as f32 / (1u32 << 23) as f32 - 1.0
    }

    pub fn values(&mut self, count: usize, size: f32) -> Vec<f32> {
        (0..count).map(|_| size * self.next()).collect()
    }

    /// A weight that keeps the size of what it multiplies.
    pub fn matrix(&mut self, name: &str, out: usize, inner: usize) -> Matrix {
        let size = (3.0 / inner as f32).sqrt();
        Matrix::from_values(name, out, inner, self.values(out * inner, size))
    }

    /// Values around `centre`.
    pub fn vector(&mut self, name: &str, len: usize, centre: f32, size: f32) -> Vector {
        Vector::new(name, self.values(len, size).into_iter().map(|v| centre + v).collect::<Vec<_>>())
    }

    pub fn linear(&mut self, name: &str, out: usize, inner: usize, bias: bool) -> Linear {
        let weight = self.matrix(name, out, inner);
        Linear { weight, bias: bias.then(|| self.vector(&format!("{name}.bias"), out, 0.0, 0.5)) }
    }

    pub fn tokens(&mut self, count: usize, vocab: usize) -> Vec<u32> {
        (0..count).map(|_| ((self.next() + 1.0) / 2.0 * vocab as f32) as u32 % vocab as u32).collect()
    }
}

/// What a test varies about the tiny decoder.
#[derive(Clone, Copy, Debug)]
pub struct Kind {
    pub seed: u64,
    pub qk_norm: bool,
    pub bias: bool,
    /// Window of the second layer; the first attends to everything.
    pub window: Option<usize>,
}

impl Kind {
    pub fn plain(seed: u64) -> Kind {
        Kind { seed, qk_norm: false, bias: false, window: None }
    }

    pub fn all(seed: u64) -> Kind {
        Kind { seed, qk_norm: true, bias: true, window: Some(5) }
    }
}

/// Two layers in which no two widths are alike: hidden 96, q 60, kv 20, ffn 160, vocabulary 131.
pub fn tiny(kind: Kind) -> (Config, Weights) {
    let (hidden, heads, kv_heads, dim, ffn, vocab) = (96, 6, 2, 10, 160, 131);
    let (q, kv) = (heads * dim, kv_heads * dim);
    let mut random = Random::new(kind.seed);
    let config = DecoderConfig {
        family: "qwen3",
        vocab_size: vocab,
        hidden_size: hidden,
        intermediate_size: ffn,
        num_attention_heads: heads,
        num_key_value_heads: kv_heads,
        head_dim: dim,
        rms_norm_eps: 1e-5,
        max_position_embeddings: 512,
        tie_word_embeddings: false,
        rope: Rope {
            theta: 100.0,
            head_dim: dim,
            rotary_dim: dim,
            pairing: Pairing::HalfSplit,
            scaling: Scaling::Default,
        },
        layers: vec![None, kind.window]
            .into_iter()
            .map(|window| LayerConfig { window, rope: true })
            .collect(),
        qkv_bias: kind.bias,
        o_bias: kind.bias,
        mlp_bias: kind.bias,
        qk_norm: kind.qk_norm,
        activation: Activation::Silu,
        scales: Scales::NONE,
    };
    let r = &mut random;
    let layers = (0..2)
        .map(|i| {
            let name = |leaf: &str| format!("layers.{i}.{leaf}");
            LayerWeights {
                input_layernorm: r.vector(&name("input_layernorm"), hidden, 1.0, 0.3),
                q_proj: r.linear(&name("q_proj"), q, hidden, kind.bias),
                k_proj: r.linear(&name("k_proj"), kv, hidden, kind.bias),
                v_proj: r.linear(&name("v_proj"), kv, hidden, kind.bias),
                q_norm: kind.qk_norm.then(|| r.vector(&name("q_norm"), dim, 1.0, 0.3)),
                k_norm: kind.qk_norm.then(|| r.vector(&name("k_norm"), dim, 1.0, 0.3)),
                o_proj: r.linear(&name("o_proj"), hidden, q, kind.bias),
                post_attention_layernorm: r.vector(&name("post_attention_layernorm"), hidden, 1.0, 0.3),
                gate_proj: r.linear(&name("gate_proj"), ffn, hidden, kind.bias),
                up_proj: r.linear(&name("up_proj"), ffn, hidden, kind.bias),
                down_proj: r.linear(&name("down_proj"), hidden, ffn, kind.bias),
            }
        })
        .collect();
    let weights = DecoderWeights {
        embed_tokens: r.matrix("embed_tokens", vocab, hidden),
        layers,
        norm: r.vector("norm", hidden, 1.0, 0.3),
        lm_head: r.matrix("lm_head", vocab, hidden),
    };
    (Config::Decoder(config), Weights::Decoder(weights))
}

/// The bits of a row of logits, so that -0 and 0 differ and a failure shows nothing else.
pub fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| v.to_bits()).collect()
}

/// Everything that a pass hands out, in order.
#[derive(Default)]
pub struct Recorded(pub Vec<(Site, Vec<usize>, Vec<f32>)>);

impl karat_device::TapSink for Recorded {
    fn tap(&mut self, site: Site, shape: &[usize], values: &[f32]) {
        assert_eq!(shape.iter().product::<usize>(), values.len(), "{site}: shape against values");
        self.0.push((site, shape.to_vec(), values.to_vec()));
    }
}

impl Recorded {
    pub fn get(&self, name: &str) -> &(Site, Vec<usize>, Vec<f32>) {
        self.0.iter().find(|(site, ..)| site.to_string() == name).unwrap_or_else(|| panic!("no tap {name}"))
    }
}
