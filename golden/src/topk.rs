//! Top-k goldens of real models: one JSON file, the best logits of every step instead of taps.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use serde::Deserialize;

use crate::DumpError;

/// Name and version of the format.
pub const TOPK_FORMAT: &str = "llm-oracle-real/1";

/// What an independent implementation computed for a model whose weights are not stored here.
#[derive(Clone, Debug, PartialEq, Deserialize)]
pub struct TopK {
    /// `llm-oracle-real/1`
    pub format: String,
    /// The model's name.
    pub model: String,
    /// Where the weights come from.
    pub package: String,
    /// sha256 of the GGUF file.
    pub gguf_sha256: String,
    /// What was computed in which format.
    pub compute: String,
    /// Version of the framework.
    pub transformers: String,
    /// The config as the framework saw it.
    pub config: serde_json::Value,
    /// One run per prompt.
    pub runs: Vec<TopKRun>,
}

/// One prompt: the step after it, then one step per greedy token fed.
#[derive(Clone, Debug, PartialEq, Deserialize)]
pub struct TopKRun {
    /// Token ids.
    pub prompt: Vec<u32>,
    /// Token ids chosen, one per step.
    pub greedy: Vec<u32>,
    /// Logits after the prompt (step 0), after `greedy[0]` (step 1), …
    pub steps: Vec<TopKStep>,
    /// Layer outputs and final norm at the last position of the prompt, by site.
    pub last_prompt_row: BTreeMap<String, TopKTap>,
}

/// The best logits of one step.
#[derive(Clone, Debug, PartialEq, Deserialize)]
pub struct TopKStep {
    /// (token id, logit), best first.
    pub top: Vec<(u32, f64)>,
    /// `ln Σ exp(logit)` over the whole vocabulary.
    pub logsumexp: f64,
}

/// One row of a tap in brief.
#[derive(Clone, Debug, PartialEq, Deserialize)]
pub struct TopKTap {
    /// `sqrt(mean(x²))` of the row.
    pub rms: f64,
    /// The first values of the row.
    pub head: Vec<f32>,
}

impl TopK {
    /// True if `path` is a file that says it is of this format.
    pub fn is_topk(path: impl AsRef<Path>) -> bool {
        let format =
            |text: Vec<u8>| serde_json::from_slice::<serde_json::Value>(&text).ok()?.get("format").cloned();
        let path = path.as_ref();
        path.is_file() && fs::read(path).ok().and_then(format).is_some_and(|f| f == TOPK_FORMAT)
    }

    /// Opens one file, and checks that each run has a step per greedy id, whose best token is that id.
    pub fn open(path: impl AsRef<Path>) -> Result<TopK, DumpError> {
        let path = path.as_ref();
        let text = fs::read(path).map_err(DumpError::io(path))?;
        let golden: TopK = serde_json::from_slice(&text).map_err(DumpError::json(path))?;
        let wrong = |reason: String| Err(DumpError::Manifest { path: path.to_owned(), reason });
        if golden.format != TOPK_FORMAT {
            return wrong(format!("format is {}, this build reads {TOPK_FORMAT}", golden.format));
        }
        for (i, run) in golden.runs.iter().enumerate() {
            if run.steps.len() != run.greedy.len() {
                let (steps, ids) = (run.steps.len(), run.greedy.len());
                return wrong(format!("run {i} has {steps} steps for {ids} greedy ids"));
            }
            for (n, (step, id)) in run.steps.iter().zip(&run.greedy).enumerate() {
                let best = step.top.first().map(|&(best, _)| best);
                if best != Some(*id) {
                    return wrong(format!(
                        "run {i}, step {n}: greedy id is {id}, but the best logit is that of {best:?}"
                    ));
                }
            }
        }
        Ok(golden)
    }
}
