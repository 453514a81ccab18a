//! Why a fixture does not show a mistake, and the smallest change that would.

use crate::judge::SiteResult;
use crate::mutants::Mutant;
use reference::ops::Reach;
use reference::{Call, Tensor};

/// What hides a mutant that changes nothing at this op, where the fixture is at fault and not the model.
pub fn hidden(mutant: &Mutant, call: &Call<Tensor>, tokens: usize) -> Option<(String, String)> {
    reason(mutant, call, tokens).map(|(why, change)| (why, change.to_string()))
}

/// What hides a mutant that the judge passed.
pub fn unseen(
    mutant: &Mutant,
    call: &Call<Tensor>,
    tokens: usize,
    equal: bool,
    result: &SiteResult,
) -> (String, String) {
    if let Some((why, change)) = reason(mutant, call, tokens) {
        return (why, change.to_string());
    }
    if equal {
        let change = format!("data on which it matters: {}", mutant.needs);
        return ("gives the same bits on this data".to_string(), change);
    }
    // Whole numbers, so that sites that are equally close stand in one line.
    let why = match result.z_max {
        z if z < 1.0 => "differs by less than one standard deviation of the declared rounding",
        z if z < 3.0 => "differs by less than three standard deviations of the declared rounding",
        _ => "differs by less than the limit for the declared rounding",
    };
    let change = match mutant.id {
        "norm-eps-value" | "norm-eps-outside-sqrt" => "a norm whose rows have a mean square near eps",
        "attn-softmax-no-max" => "scores above 88, where exp leaves f32",
        "num-rounding-mode" | "num-low-accumulate" => "a longer sum, or a contract with more bits",
        id if id.starts_with("rope-") => "a prompt that reaches further positions",
        _ => "data on which the change is larger than the rounding, or a contract with more bits",
    };
    (why.to_string(), change.to_string())
}

/// The known ways in which a fixture is blind.
fn reason(mutant: &Mutant, call: &Call<Tensor>, tokens: usize) -> Option<(String, &'static str)> {
    let id = mutant.id;
    match call {
        Call::Linear { x, w } => match id {
            "lin-transpose-square" if w.weight.out() == w.weight.inner() && w.weight.out() > 1 => {
                let (n, values) = (w.weight.out(), w.weight.to_values().ok()?);
                let symmetric = (0..n).all(|o| (0..o).all(|i| values[o * n + i] == values[i * n + o]));
                symmetric.then(|| ("square and symmetric".into(), "asymmetric weights"))
            }
            "rows-first-only" | "rows-permuted" | "rows-stride" | "rows-shared-act-scale" if tokens == 1 => {
                Some(("one token".into(), "a prompt of two tokens"))
            }
            "rows-beyond-tile" if tokens <= 16 && x.shape()[0] == tokens => Some((
                format!("a prompt of {tokens} tokens fits one launch of 16 rows"),
                "a prompt of 17 tokens",
            )),
            _ => None,
        },
        Call::AttnScores { q, k, .. } => {
            let heads = q.len() / q.shape()[0].max(1) / k.shape()[2];
            head_map(mutant, heads, k.shape()[1])
        }
        Call::AttnCtx { probs, v } => head_map(mutant, probs.shape()[0], v.shape()[1]),
        Call::AttnProbs { mask, scores, .. } => match (id, mask.reach) {
            ("mask-window-missing" | "mask-window-off-by-one", Reach::Window(width))
                if scores.shape()[2] <= width =>
            {
                let keys = scores.shape()[2];
                let why = format!("the window of {width} is not shorter than the {keys} keys");
                Some((why, "a prompt three windows long"))
            }
            ("mask-causal-off-by-one", _) if tokens == 1 => {
                Some(("one token".into(), "a prompt of eight tokens"))
            }
            ("attn-partial-reduction", _) if mutant.variant == "sum" && scores.shape()[2] <= 16 => {
                Some((format!("{} keys", scores.shape()[2]), "a prompt of 17 tokens"))
            }
            ("attn-online-normalise", _) if scores.shape()[2] <= 8 => {
                Some((format!("{} keys", scores.shape()[2]), "a prompt of 17 tokens"))
            }
            _ => None,
        },
        Call::RopeTable { positions, .. } => {
            let start = positions.iter().all(|&p| p == 0);
            (start && ["rope-theta", "rope-scaling-ignored", "rope-partial-convention"].contains(&id))
                .then(|| ("position 0 alone".into(), "a prompt of eight tokens"))
        }
        Call::Scale { factor, .. } if *factor == 1.0 => {
            (id == "layer-scalar-branch").then(|| ("a scalar of 1".into(), "a scalar between 0.06 and 0.9"))
        }
        Call::Residual { .. } => None,
        _ => None,
    }
}

/// Head counts under which a wrong map of query heads to key heads is the right one.
fn head_map(mutant: &Mutant, heads: usize, kv_heads: usize) -> Option<(String, &'static str)> {
    if mutant.id != "attn-gqa-map" {
        return None;
    }
    let group = heads / kv_heads.max(1);
    let wrong =
        |h: usize| if mutant.variant == "mod" { h % kv_heads } else { (h / kv_heads).min(kv_heads - 1) };
    let same = (0..heads).all(|h| wrong(h) == h / group);
    let why = match (kv_heads, group) {
        _ if !same => return None,
        (_, 1) => "no grouped heads".to_string(),
        (1, _) => "one key head".to_string(),
        _ => format!("with {heads}/{kv_heads} heads both maps are the same"),
    };
    Some((why, "6/2 or 8/2 heads"))
}
