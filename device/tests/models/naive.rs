//! A decoder in f64, whole sequence at once, every score in a table: nothing shared with the device.

use spec::families::Linear;
use spec::families::decoder::{DecoderConfig, DecoderWeights};
use spec::{Config, Matrix, Weights};

type Table = Vec<Vec<f64>>;

fn rows(m: &Matrix) -> Table {
    let values = m.to_values().unwrap();
    values.chunks(m.inner()).map(|row| row.iter().map(|v| f64::from(*v)).collect()).collect()
}

fn linear(x: &Table, w: &Linear) -> Table {
    let weight = rows(&w.weight);
    let bias = |o: usize| w.bias.as_ref().map_or(0.0, |b| f64::from(b[o]));
    x.iter()
        .map(|x| {
            let product = |w: &Vec<f64>| x.iter().zip(w).map(|(x, w)| x * w).sum::<f64>();
            weight.iter().enumerate().map(|(o, w)| product(w) + bias(o)).collect()
        })
        .collect()
}

fn norm(x: &[f64], w: &[f32], eps: f32) -> Vec<f64> {
    let mean = x.iter().map(|v| v * v).sum::<f64>() / x.len() as f64;
    x.iter().zip(w).map(|(v, w)| v / (mean + f64::from(eps)).sqrt() * f64::from(*w)).collect()
}

fn turn(head: &mut [f64], position: usize, theta: f64) {
    let half = head.len() / 2;
    for i in 0..half {
        let angle = position as f64 * theta.powf(-(2.0 * i as f64) / (2.0 * half as f64));
        let (a, b) = (head[i], head[i + half]);
        head[i] = a * angle.cos() - b * angle.sin();
        head[i + half] = b * angle.cos() + a * angle.sin();
    }
}

fn attention(c: &DecoderConfig, window: Option<usize>, q: &Table, k: &Table, v: &Table) -> Table {
    let dim = c.head_dim;
    let group = c.num_attention_heads / c.num_key_value_heads;
    let row = |t: usize| {
        (0..c.num_attention_heads).flat_map(move |h| {
            let at = h / group * dim;
            let seen = |s: usize| s <= t && window.is_none_or(|w| s + w > t);
            let scores: Vec<f64> = (0..q.len())
                .map(|s| match seen(s) {
                    true => {
                        (0..dim).map(|i| q[t][h * dim + i] * k[s][at + i]).sum::<f64>() / (dim as f64).sqrt()
                    }
                    false => f64::NEG_INFINITY,
                })
                .collect();
            let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let sum: f64 = scores.iter().map(|s| (s - max).exp()).sum();
            (0..dim)
                .map(move |i| (0..v.len()).map(|s| (scores[s] - max).exp() / sum * v[s][at + i]).sum())
                .collect::<Vec<f64>>()
        })
    };
    (0..q.len()).map(|t| row(t).collect()).collect()
}

/// Logits `[tokens, vocab]`.
pub fn logits(config: &Config, weights: &Weights, tokens: &[u32]) -> Table {
    let (Config::Decoder(c), Weights::Decoder(w)) = (config, weights) else { panic!("not a decoder") };
    forward(c, w, tokens)
}

fn forward(c: &DecoderConfig, w: &DecoderWeights, tokens: &[u32]) -> Table {
    let table = rows(&w.embed_tokens);
    let mut x: Table = tokens.iter().map(|t| table[*t as usize].clone()).collect();
    for (layer, w) in c.layers.iter().zip(&w.layers) {
        let h: Table = x.iter().map(|x| norm(x, &w.input_layernorm, c.rms_norm_eps)).collect();
        let (mut q, mut k, v) = (linear(&h, &w.q_proj), linear(&h, &w.k_proj), linear(&h, &w.v_proj));
        for t in 0..x.len() {
            for (heads, weight) in [(&mut q[t], &w.q_norm), (&mut k[t], &w.k_norm)] {
                for head in heads.chunks_mut(c.head_dim) {
                    if let Some(weight) = weight {
                        head.copy_from_slice(&norm(head, weight, c.rms_norm_eps));
                    }
                    turn(head, t, c.rope.theta);
                }
            }
        }
        add(&mut x, &linear(&attention(c, layer.window, &q, &k, &v), &w.o_proj));
        let h: Table = x.iter().map(|x| norm(x, &w.post_attention_layernorm, c.rms_norm_eps)).collect();
        let (gate, up) = (linear(&h, &w.gate_proj), linear(&h, &w.up_proj));
        let act: Table = gate
            .iter()
            .zip(&up)
            .map(|(g, u)| g.iter().zip(u).map(|(g, u)| g / (1.0 + (-g).exp()) * u).collect())
            .collect();
        add(&mut x, &linear(&act, &w.down_proj));
    }
    let h: Table = x.iter().map(|x| norm(x, &w.norm, c.rms_norm_eps)).collect();
    linear(&h, &Linear { weight: w.lm_head.clone(), bias: None })
}

fn add(x: &mut Table, branch: &Table) {
    for (x, b) in x.iter_mut().zip(branch) {
        x.iter_mut().zip(b).for_each(|(x, b)| *x += b);
    }
}
