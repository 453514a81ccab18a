//! The passes of a run: a prompt, then greedy steps.

/// One pass: its name in tap names, and the tokens that it feeds.
#[derive(Clone, Debug, PartialEq)]
pub struct Pass {
    /// `prefill`, `step1`, ...
    pub name: String,
    /// The tokens.
    pub ids: Vec<u32>,
}

/// The prompt as `prefill`, then `stepN` feeding `greedy[N - 1]`, for `steps` steps or as many as
/// there are ids for.
pub fn teacher_forced(prompt: &[u32], greedy: &[u32], steps: usize) -> Vec<Pass> {
    let prefill = Pass { name: "prefill".into(), ids: prompt.to_vec() };
    let steps = greedy.iter().take(steps).enumerate();
    let steps = steps.map(|(n, &id)| Pass { name: format!("step{}", n + 1), ids: vec![id] });
    [prefill].into_iter().chain(steps).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn step_n_feeds_greedy_id_n_minus_one() {
        let passes = teacher_forced(&[5, 6], &[7, 8, 9], 2);
        let named: Vec<(&str, &[u32])> = passes.iter().map(|p| (&*p.name, &*p.ids)).collect();
        assert_eq!(named, [("prefill", &[5, 6][..]), ("step1", &[7]), ("step2", &[8])]);
    }
}
