//! Two arms of one binary: do they give the same bytes, and which is cheaper?
//!
//! Arms differ by switches only. They run in the order A B B A, on the same prompts; first the gate (tokens
//! and every row of logits equal to the byte, A against A included), then the clocks: medians without the
//! first token, prefill and decode apart. An effect is claimed only where the arms separate: every run of
//! one is faster than every run of the other. Counters need no claim; they are exact.

use crate::golden_gate::argmax;
use device::{Counters, DeviceError, Engine, Npu, Switches};
use serde::Serialize;
use sha2::{Digest, Sha256};
use spec::{Config, Weights};
use std::time::Instant;

/// One arm.
#[derive(Clone, Debug, PartialEq)]
pub struct Arm {
    /// Its name.
    pub name: String,
    /// Its switches as given.
    pub switches: String,
}

/// What one run of an arm gave.
#[derive(Clone, Debug, Serialize)]
pub struct ArmRun {
    /// The arm.
    pub arm: String,
    /// sha256 over all tokens.
    pub tokens_sha256: String,
    /// sha256 of every row of logits, in order.
    #[serde(skip)]
    pub rows: Vec<[u8; 32]>,
    /// Milliseconds a prompt token.
    pub prefill_ms: f64,
    /// Median milliseconds a step, the first one left out.
    pub decode_ms: f64,
    /// f32 bytes that weights were decoded to in the last step.
    pub dequantised_bytes_per_token: u64,
    /// Image bytes streamed in the last step.
    pub streamed_bytes_per_token: u64,
    /// Bytes packed in the last step.
    pub packed_bytes_per_token: u64,
    /// Launches in the last step.
    pub launches_per_token: u64,
}

/// Two arms, compared.
#[derive(Clone, Debug, Serialize)]
pub struct Comparison {
    /// Rows of logits that are byte-equal to the first run's, and rows, over all runs.
    pub byte_identical: (usize, usize),
    /// Whether all runs gave the same tokens.
    pub tokens_equal: bool,
    /// All runs in the order they were made.
    pub runs: Vec<ArmRun>,
    /// Median over runs of B's decode time over A's; nothing is claimed unless `separated`.
    pub decode_ratio: f64,
    /// Every decode time of one arm is below every one of the other.
    pub separated: bool,
    /// Runnable processes a processor when the runs began and ended, where the system says.
    pub load: Option<(f64, f64)>,
}

/// Runs the arms in the given order (`ABBA`: letters name arms by position).
pub fn compare(
    config: &Config,
    weights: &Weights,
    engine: Engine,
    arms: &[(Arm, Switches)],
    order: &str,
    prompts: &[Vec<u32>],
    steps: usize,
) -> Result<Comparison, DeviceError> {
    let before = load();
    let mut runs = Vec::new();
    for letter in order.bytes() {
        let (arm, switches) = &arms[usize::from(letter - b'A')];
        runs.push(run(config, weights, engine, &arm.name, *switches, prompts, steps)?);
    }
    let first = runs[0].rows.clone();
    let equal = |run: &ArmRun| run.rows.iter().zip(&first).filter(|(a, b)| a == b).count();
    let times = |arm: &Arm| -> Vec<f64> {
        runs.iter().filter(|run| run.arm == arm.name).map(|run| run.decode_ms).collect()
    };
    let (a, b) = (times(&arms[0].0), times(&arms[1].0));
    let low = |v: &[f64]| v.iter().copied().fold(f64::INFINITY, f64::min);
    let high = |v: &[f64]| v.iter().copied().fold(0.0, f64::max);
    Ok(Comparison {
        byte_identical: (runs.iter().map(equal).sum(), runs.iter().map(|run| run.rows.len()).sum()),
        tokens_equal: runs.iter().all(|run| run.tokens_sha256 == runs[0].tokens_sha256),
        decode_ratio: median(&b) / median(&a),
        separated: high(&a) < low(&b) || high(&b) < low(&a),
        load: before.zip(load()),
        runs,
    })
}

fn run(
    config: &Config,
    weights: &Weights,
    engine: Engine,
    name: &str,
    switches: Switches,
    prompts: &[Vec<u32>],
    steps: usize,
) -> Result<ArmRun, DeviceError> {
    let mut npu = Npu::init(config, weights, engine, switches)?;
    npu.warm_up()?;
    let vocab = config.vocab_size();
    let (mut rows, mut tokens) = (Vec::new(), Sha256::new());
    let (mut prefill, mut decode) = (Vec::new(), Vec::new());
    let mut last = Counters::default();
    for prompt in prompts {
        npu.reset();
        let start = Instant::now();
        let mut logits = npu.step_batch(prompt)?;
        prefill.push(start.elapsed().as_secs_f64() * 1e3 / prompt.len() as f64);
        for step in 0..=steps {
            for row in logits.chunks_exact(vocab) {
                let mut hash = Sha256::new();
                row.iter().for_each(|v| hash.update(v.to_le_bytes()));
                rows.push(hash.finalize().into());
            }
            let next = argmax(&logits[logits.len() - vocab..]) as u32;
            tokens.update(next.to_le_bytes());
            if step == steps {
                break;
            }
            let start = Instant::now();
            logits = npu.step(next)?;
            if step > 0 {
                decode.push(start.elapsed().as_secs_f64() * 1e3);
            }
            last = npu.counters().clone();
        }
    }
    let total = last.total();
    Ok(ArmRun {
        arm: name.to_string(),
        tokens_sha256: tokens.finalize().iter().map(|b| format!("{b:02x}")).collect(),
        rows,
        prefill_ms: median(&prefill),
        decode_ms: median(&decode),
        dequantised_bytes_per_token: total.dequantised_bytes,
        streamed_bytes_per_token: total.streamed_bytes,
        packed_bytes_per_token: total.packed_bytes,
        launches_per_token: total.launches,
    })
}

/// The middle value; the mean of the two in the middle of an even number; NaN of none.
pub fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    match sorted.len() {
        0 => f64::NAN,
        n if n % 2 == 1 => sorted[n / 2],
        n => (sorted[n / 2 - 1] + sorted[n / 2]) / 2.0,
    }
}

/// The load of the last minute, where the system tells it.
fn load() -> Option<f64> {
    std::fs::read_to_string("/proc/loadavg").ok()?.split_whitespace().next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians() {
        assert_eq!(median(&[3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(&[4.0, 1.0, 2.0, 3.0]), 2.5);
        assert!(median(&[]).is_nan());
    }

    /// `reload=all` decodes every weight in every step and changes no bit.
    #[test]
    fn a_reread_costs_and_changes_nothing() {
        let model = fixtures::seeded::heads_6_2(7);
        let config = Config::parse(&model.config, &[]).unwrap().config;
        let weights = Weights::load(&config, &model).unwrap();
        let arm = |name: &str, switches: &str| {
            let arm = Arm { name: name.into(), switches: switches.into() };
            (arm, Switches::parse(switches).unwrap())
        };
        let arms = [arm("resident", ""), arm("reload", "reload=all")];
        let prompts = [model.prompt[..5].to_vec()];
        let c = compare(&config, &weights, Engine::Int8, &arms, "ABBA", &prompts, 3).unwrap();
        assert_eq!(c.byte_identical, (4 * 8, 4 * 8));
        assert!(c.tokens_equal);
        let [a, b] = [&c.runs[0], &c.runs[1]];
        assert_eq!(a.dequantised_bytes_per_token, 0);
        // Every weight of the model once, as f32: q, k, v, o, gate, up, down of three layers and the head.
        let layer = 96 * 60 + 2 * 96 * 20 + 60 * 96 + 3 * 96 * 161;
        assert_eq!(b.dequantised_bytes_per_token, 4 * (3 * layer + 131 * 96));
    }
}
