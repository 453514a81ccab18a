//! The reference against a top-k golden of a real model: tokens and best logits of every step.

use crate::golden_gate::argmax;
use crate::passes::{Pass, teacher_forced};
use golden::TopKRun;

/// How far a logit may be from another float32 implementation on the same decoded weights.
///
/// Two implementations stay within 5e-5 of each other on the real goldens.
pub const LIMIT: f64 = 1e-4;

/// The passes that a golden run describes: the prompt, then its greedy ids but for the last.
pub fn passes_of(run: &TopKRun) -> Vec<Pass> {
    teacher_forced(&run.prompt, &run.greedy, run.steps.len().saturating_sub(1))
}

/// One golden run against the reference's logits.
#[derive(Clone, Debug, PartialEq)]
pub struct TopKGate {
    /// Steps whose best logit is the golden's, and steps.
    pub argmax_equal: (usize, usize),
    /// The pass with the largest difference, and the difference over [`LIMIT`].
    pub worst: (String, f64),
    /// Logits compared.
    pub compared: usize,
}

impl TopKGate {
    /// Whether every token and every logit is reproduced.
    pub fn passes(&self) -> bool {
        self.argmax_equal.0 == self.argmax_equal.1 && self.argmax_equal.1 > 0 && self.worst.1 <= 1.0
    }
}

/// Compares the last row of every pass. `logits` are the reference's, row after row of `vocab`.
pub fn compare(run: &TopKRun, passes: &[Pass], logits: &[Vec<f32>], vocab: usize) -> TopKGate {
    let mut gate = TopKGate { argmax_equal: (0, 0), worst: (String::new(), 0.0), compared: 0 };
    for ((pass, rows), step) in passes.iter().zip(logits).zip(&run.steps) {
        let last = &rows[rows.len() - vocab..];
        let golden_token = step.top.first().map(|(id, _)| *id as usize);
        gate.argmax_equal.1 += 1;
        gate.argmax_equal.0 += usize::from(Some(argmax(last)) == golden_token);
        let largest = last.iter().fold(f64::NEG_INFINITY, |m, &v| m.max(f64::from(v)));
        let sum: f64 = last.iter().map(|&v| (f64::from(v) - largest).exp()).sum();
        let found = step
            .top
            .iter()
            .map(|&(id, value)| (last.get(id as usize).map_or(f64::NAN, |&v| f64::from(v)), value));
        for (found, golden) in found.chain([(largest + sum.ln(), step.logsumexp)]) {
            let ratio = (found - golden).abs() / LIMIT;
            let ratio = if ratio.is_nan() { f64::INFINITY } else { ratio };
            gate.compared += 1;
            if ratio > gate.worst.1 {
                gate.worst = (format!("{}.logits", pass.name), ratio);
            }
        }
    }
    gate
}

#[cfg(test)]
mod tests {
    use super::*;
    use golden::TopKStep;

    fn run(top: Vec<(u32, f64)>, logsumexp: f64) -> TopKRun {
        let steps = vec![TopKStep { top, logsumexp }];
        TopKRun { prompt: vec![1], greedy: vec![1], steps, last_prompt_row: Default::default() }
    }

    // ln(e^0 + e^ln3) = ln 4 = 1.386294
    #[test]
    fn tokens_logits_and_their_sum_are_compared() {
        let passes = [Pass { name: "prefill".into(), ids: vec![1] }];
        let logits = [vec![0.0, 3f32.ln()]];
        let right = compare(&run(vec![(1, 1.098_612), (0, 0.0)], 1.386_294), &passes, &logits, 2);
        assert!(right.passes(), "{right:?}");
        assert_eq!(right.compared, 3);
        let shifted = compare(&run(vec![(1, 1.099_612), (0, 0.0)], 1.386_294), &passes, &logits, 2);
        assert!(!shifted.passes());
        let swapped = compare(&run(vec![(0, 0.0), (1, 1.098_612)], 1.386_294), &passes, &logits, 2);
        assert_eq!(swapped.argmax_equal, (0, 1));
    }
}
