//! Speed and memory of a whole model: tokens a second, one thread against all, and what was held at most.

use super::BenchError;
use super::figure::{PAIRS, seconds};
use super::machine;
use crate::ab::median;
use crate::golden_gate::argmax;
use crate::subject::SubjectSpec;
use crate::verify::Loaded;
use device::{Engine, Npu, Switches, TapSink};
use reference::{Call, Ops, Plain, Tensor};
use serde::{Deserialize, Serialize};
use spec::Site;
use std::collections::BTreeMap;

/// What is run.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Arm {
    /// The reference.
    Reference,
    /// The NPU path with an engine and its switches.
    Npu(Engine, Switches),
}

/// Tokens a second on a number of threads.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Speed {
    /// Threads.
    pub threads: usize,
    /// Of a prompt at once.
    pub prefill_tok_s: f64,
    /// Step by step behind it.
    pub decode_tok_s: f64,
}

/// What running a package gave; all of it is from one process of its own.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Run {
    /// `reference` or `npu:ENGINE`.
    pub subject: String,
    /// Tokens of the prompt.
    pub prompt: usize,
    /// Steps behind it.
    pub steps: usize,
    /// On one thread, and on all processors where there are several; the runs took turns.
    pub speeds: Vec<Speed>,
    /// Median ratio over interleaved pairs, all threads over one: prefill, decode.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub thread_gain: Option<[f64; 2]>,
    /// What a step costs far behind the prompt (S14).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub far: Option<Far>,
    /// Bytes held at most, mapped pages of the weight file included.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub peak_bytes: Option<u64>,
    /// Bytes held at the end that no file backs: for the reference its state and workspace, for the NPU path
    /// the images as well.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub private_bytes: Option<u64>,
    /// Bytes of the weight file, or of the packed images of the NPU path.
    pub weight_bytes: u64,
    /// Bytes of keys, values and recurrent state of the whole run.
    pub state_bytes: u64,
}

/// A step near the start against one far behind it, on one thread; medians of interleaved pairs.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Far {
    /// Positions of the two steps.
    pub positions: [usize; 2],
    /// Milliseconds of the two.
    pub step_ms: [f64; 2],
    /// Milliseconds of them in attention over cached keys.
    pub attention_ms: [f64; 2],
    /// What the far step takes longer and attention does not explain, over the near step.
    pub unexplained: f64,
}

impl Run {
    /// Memory over what must be held, weights and state: the peak of the reference, which maps its weights; of
    /// the NPU path, which packed its own, what no file backs.
    pub fn memory_ratio(&self) -> Option<f64> {
        let held = if self.subject == "reference" { self.peak_bytes } else { self.private_bytes };
        Some(held? as f64 / (self.weight_bytes + self.state_bytes) as f64)
    }
}

/// Counts the bytes of state behind every site that holds some.
#[derive(Default)]
struct Counting {
    plain: Plain,
    state: BTreeMap<Site, u64>,
}

/// The same of a device, which taps its state behind every layer.
#[derive(Default)]
struct CountingTaps(u64);

impl TapSink for CountingTaps {
    fn wants(&self, site: Site) -> bool {
        ["k_cache", "v_cache", "conv_state", "gdn_state"].contains(&site.name)
    }

    fn tap(&mut self, _: Site, _: &[usize], values: &[f32]) {
        self.0 += 4 * values.len() as u64;
    }
}

impl Ops for Counting {
    type Tensor = Tensor;

    fn run(&mut self, at: Site, call: Call<'_, Tensor>) -> Tensor {
        let holds = matches!(call, Call::Append { .. } | Call::ConvState { .. } | Call::GdnState(_));
        let value = self.plain.value(&call);
        if holds {
            self.state.insert(at, 4 * value.len() as u64);
        }
        value
    }
}

/// Runs a package in this process: an ignored round, then rounds on one thread and on all in turn.
pub fn run(
    loaded: &Loaded,
    arm: Arm,
    prompt: &[u32],
    steps: usize,
    rounds: usize,
    far: Option<usize>,
    weight_bytes: u64,
) -> Result<Run, BenchError> {
    let all = std::thread::available_parallelism().map_or(1, usize::from);
    let counts = if all > 1 { vec![1, all] } else { vec![1] };
    let pools = counts
        .iter()
        .map(|&threads| rayon::ThreadPoolBuilder::new().num_threads(threads).build())
        .collect::<Result<Vec<_>, _>>()
        .map_err(|error| BenchError::Usage(format!("threads: {error}")))?;
    let mut npu = match arm {
        Arm::Reference => None,
        Arm::Npu(engine, switches) => {
            let mut npu = Npu::init(&loaded.config, &loaded.weights, engine, switches)?;
            npu.warm_up()?;
            npu.extend_context(prompt.len() + steps)?;
            Some(npu)
        }
    };
    let mut state_bytes = 0;
    // Seconds [round][thread count] of the prompt and of a step.
    let mut times: Vec<Vec<[f64; 2]>> = Vec::new();
    for _ in 0..=rounds.max(1) {
        let mut round = Vec::new();
        for pool in &pools {
            let timed = pool.install(|| match &mut npu {
                Some(npu) => npu_round(npu, prompt, steps),
                None => reference_round(loaded, prompt, steps, &mut state_bytes),
            })?;
            round.push(timed);
        }
        times.push(round);
    }
    let times = &times[1..];
    let of = |at: usize, kind: usize| -> Vec<f64> { times.iter().map(|round| round[at][kind]).collect() };
    let speeds = counts.iter().enumerate().map(|(at, &threads)| Speed {
        threads,
        prefill_tok_s: prompt.len() as f64 / median(&of(at, 0)),
        decode_tok_s: 1.0 / median(&of(at, 1)),
    });
    let gain = |kind: usize| {
        median(&times.iter().map(|round| round[0][kind] / round[counts.len() - 1][kind]).collect::<Vec<_>>())
    };
    let (peak_bytes, private_bytes) = (machine::peak_bytes(), machine::private_bytes());
    let weight_bytes = npu.as_ref().map_or(weight_bytes, |npu| npu.resident().bytes() as u64);
    if let Some(npu) = &mut npu {
        npu.reset();
        let ids: Vec<u32> = prompt.iter().copied().chain((0..steps).map(|_| 0)).collect();
        let mut counting = CountingTaps::default();
        let (last, before) = ids.split_last().expect("a prompt has a token, and there is a step");
        npu.prefill(before)?;
        npu.step_batch_tapped(&[*last], &mut counting)?;
        state_bytes = counting.0;
    }
    // Its two states are held beside the one of the run, and do not count.
    let far = match (&mut npu, far) {
        (Some(npu), Some(far)) => Some(pools[0].install(|| far_step(npu, prompt, far, rounds))?),
        _ => None,
    };
    Ok(Run {
        subject: match arm {
            Arm::Reference => "reference".into(),
            Arm::Npu(engine, switches) => SubjectSpec::Npu(engine, switches).to_string(),
        },
        prompt: prompt.len(),
        steps,
        speeds: speeds.collect(),
        thread_gain: (counts.len() > 1 && times.len() >= PAIRS).then(|| [gain(0), gain(1)]),
        far,
        peak_bytes,
        private_bytes,
        weight_bytes,
        state_bytes,
    })
}

/// S14: the state behind `prompt`, and behind `far` tokens, is kept; the steps behind them take turns.
fn far_step(npu: &mut Npu, prompt: &[u32], far: usize, pairs: usize) -> Result<Far, BenchError> {
    let ids: Vec<u32> = prompt.iter().copied().cycle().take(far).collect();
    let mut behind = Vec::new();
    for ids in [prompt, &ids] {
        npu.reset();
        npu.prefill(ids)?;
        behind.push(npu.snapshot());
    }
    // Milliseconds [step, attention] of [near, far], and the difference of the pair that attention leaves.
    let mut all: Vec<[[f64; 2]; 2]> = Vec::new();
    for pair in 0..=pairs.max(PAIRS) {
        let mut found = [[0.0; 2]; 2];
        for at in if pair % 2 == 0 { [0, 1] } else { [1, 0] } {
            npu.restore(&behind[at])?;
            // Restored keys are a fresh copy; a step before the one that counts has touched them.
            npu.step(prompt[0])?;
            let mut result = Ok(Vec::new());
            let step = seconds(|| result = npu.step(prompt[0]));
            result?;
            let attention = npu.counters().total().attention_time.as_secs_f64();
            found[at] = [step * 1e3, attention * 1e3];
        }
        all.push(found);
    }
    let all = &all[1..];
    let of = |at: usize, kind: usize| median(&all.iter().map(|p| p[at][kind]).collect::<Vec<_>>());
    let unexplained = |[near, far]: &[[f64; 2]; 2]| ((far[0] - far[1]) - (near[0] - near[1])) / near[0];
    Ok(Far {
        positions: [prompt.len() + 1, far + 1],
        step_ms: [of(0, 0), of(1, 0)],
        attention_ms: [of(0, 1), of(1, 1)],
        unexplained: median(&all.iter().map(unexplained).collect::<Vec<_>>()),
    })
}

/// Seconds of the prompt, and the median of the steps.
fn npu_round(npu: &mut Npu, prompt: &[u32], steps: usize) -> Result<[f64; 2], BenchError> {
    npu.reset();
    let mut logits = Ok(Vec::new());
    let prefill = seconds(|| logits = npu.prefill(prompt));
    let mut logits = logits?;
    let mut times = Vec::new();
    for _ in 0..steps {
        let next = argmax(&logits) as u32;
        let mut step = Ok(Vec::new());
        times.push(seconds(|| step = npu.step(next)));
        logits = step?;
    }
    Ok([prefill, median(&times)])
}

fn reference_round(
    loaded: &Loaded,
    prompt: &[u32],
    steps: usize,
    state_bytes: &mut u64,
) -> Result<[f64; 2], BenchError> {
    let (mut ops, mut state) = (Counting::default(), loaded.model.fresh::<Tensor>());
    let vocab = loaded.config.vocab_size();
    let mut next = 0;
    let mut pass = |ids: &[u32]| {
        let time = seconds(|| {
            let logits = loaded.model.pass(&mut ops, &mut state, ids);
            let rows = logits.as_slice().expect("logits are stored in order");
            next = argmax(&rows[rows.len() - vocab..]) as u32;
        });
        (time, next)
    };
    let (prefill, mut next) = pass(prompt);
    let mut times = Vec::new();
    for _ in 0..steps {
        let (time, then) = pass(&[next]);
        times.push(time);
        next = then;
    }
    ops.plain.check()?;
    *state_bytes = ops.state.values().sum();
    Ok([prefill, median(&times)])
}

#[cfg(test)]
mod tests {
    use super::*;

    // heads-6-2: three layers, keys and values of 2 heads of 10, f32; 5 prompt tokens and 3 steps: 8 positions.
    #[test]
    fn state_is_counted() {
        let loaded = crate::cli::load::load("heads-6-2", None, &[]).unwrap();
        let run_of = |arm| run(&loaded, arm, &[1, 2, 3, 4, 5], 3, 1, None, 1000).unwrap();
        let npu = run_of(Arm::Npu(Engine::F32, Switches::default()));
        let run = run_of(Arm::Reference);
        assert_eq!([run.state_bytes, npu.state_bytes], [3 * 2 * 8 * 20 * 4; 2]);
        assert_eq!((run.prompt, run.steps, run.weight_bytes), (5, 3, 1000));
        assert!(run.speeds.iter().all(|speed| speed.prefill_tok_s > 0.0 && speed.decode_tok_s > 0.0));
    }

    // Of the two steps the far one reads forty keys, the near one six; what is told of them belongs to them.
    #[test]
    fn a_far_step_is_measured_beside_a_near_one() {
        let loaded = crate::cli::load::load("heads-6-2", None, &[]).unwrap();
        let arm = Arm::Npu(Engine::F32, Switches::default());
        let far = run(&loaded, arm, &[1, 2, 3, 4, 5], 1, 1, Some(40), 1000).unwrap().far.unwrap();
        assert_eq!(far.positions, [6, 41]);
        for at in 0..2 {
            assert!(0.0 < far.attention_ms[at] && far.attention_ms[at] < far.step_ms[at], "{far:?}");
        }
    }

    #[test]
    fn memory_is_held_against_weights_and_state() {
        let run = Run {
            subject: "reference".into(),
            prompt: 1,
            steps: 1,
            speeds: vec![],
            thread_gain: None,
            far: None,
            peak_bytes: Some(1150),
            private_bytes: Some(250),
            weight_bytes: 900,
            state_bytes: 100,
        };
        assert_eq!(run.memory_ratio(), Some(1.15));
        assert_eq!(Run { subject: "npu:int8".into(), ..run }.memory_ratio(), Some(0.25));
    }
}
