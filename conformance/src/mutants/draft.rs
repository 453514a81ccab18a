//! Mistakes of block drafts: tapped rows, masks of a block, positions, the selector's walk.

use super::{Eval, History, Mutant, flat, mutant, shaped};
use reference::ops::{Mask, Reach, Side};
use reference::{Call, Tensor};
use spec::Site;

/// The catalogue's mutants of speculative decoding that are made in an op of a draft.
pub static MUTANTS: &[Mutant] = &[
    mutant("spec-tap-content", "", "one tapped layer stands for all", TAPS, repeated_tap),
    mutant("spec-tap-content", "order", "tapped layers are joined in reverse", TAPS, reversed_taps),
    mutant("spec-aux-norm-missing", "", "the fused taps are not normed", "a block draft", taps_not_normed),
    mutant(
        "spec-hidden-stage",
        "",
        "proposals are made from rows before the last norm",
        "a block draft",
        before_the_norm,
    ),
    mutant("spec-concat-order", "", "block rows stand before context rows", CONTEXT, block_first),
    mutant("spec-context-range", "", "the block does not see the row before it", CONTEXT, last_row_unseen),
    mutant("spec-draft-position", "", "queries of the block stand one position early", CONTEXT, one_early),
    mutant(
        "spec-draft-position",
        "restart",
        "queries of the block are turned like the first new context rows",
        CONTEXT,
        positions_from_zero,
    ),
    mutant("spec-draft-window-ignored", "", "a two-sided window is ignored", WINDOW, window_ignored),
    mutant("spec-window-causality", "", "a two-sided window is taken for one behind", WINDOW, window_behind),
    mutant("spec-block-mask", "", "rows of a block do not see later rows", BLOCK, causal_block),
    mutant("spec-block-mask", "context", "rows of a block see each other alone", CONTEXT, no_context),
    mutant(
        "spec-mask-embedding",
        "",
        "rows of the mask token are zero",
        "a block of two tokens or more",
        no_mask_token,
    ),
    mutant(
        "spec-mask-embedding",
        "anchor",
        "the anchor stands last in the block",
        "a block of two tokens or more",
        anchor_last,
    ),
    mutant(
        "spec-block-conv",
        "",
        "the kernels of the other side of a sublayer",
        "a draft with convolutions",
        other_side,
    ),
    mutant("spec-select-walk", "", "every row takes its best logit, whatever came before", SELECTOR, no_walk),
    mutant("spec-select-walk", "anchor", "the walk starts from token 0", SELECTOR, walk_from_zero),
    mutant(
        "spec-select-walk",
        "index",
        "the place among the candidates is taken for the id",
        SELECTOR,
        place_for_id,
    ),
];

const TAPS: &str = "a draft that taps two layers or more";
const CONTEXT: &str = "a block behind context rows";
const WINDOW: &str = "a draft with a two-sided window shorter than its rows";
const BLOCK: &str = "a block whose rows see each other";
const SELECTOR: &str = "a draft with a selector";

fn repeated_tap(call: &Call<Tensor>, at: Site, _: &History, eval: &mut Eval) -> Option<Tensor> {
    let Call::Join { parts } = call else { return None };
    (at.name == "ctx_in" && parts.len() > 1).then(|| eval(&Call::Join { parts: vec![parts[0]; parts.len()] }))
}

fn reversed_taps(call: &Call<Tensor>, at: Site, _: &History, eval: &mut Eval) -> Option<Tensor> {
    let Call::Join { parts } = call else { return None };
    let reversed = parts.iter().rev().copied().collect();
    (at.name == "ctx_in" && parts.len() > 1).then(|| eval(&Call::Join { parts: reversed }))
}

fn taps_not_normed(call: &Call<Tensor>, at: Site, _: &History, _: &mut Eval) -> Option<Tensor> {
    let Call::RmsNorm { x, .. } = call else { return None };
    (at.name == "ctx").then(|| (*x).clone())
}

fn before_the_norm(call: &Call<Tensor>, at: Site, history: &History, eval: &mut Eval) -> Option<Tensor> {
    let Call::Tail { x, keep } = call else { return None };
    if at.name != "proposal_rows" {
        return None;
    }
    let raw = history.below(Site { layer: Some(u32::MAX), name: at.name }, "out")?;
    (raw.shape() == x.shape()).then(|| eval(&Call::Tail { x: raw, keep: *keep }))
}

fn block_first(call: &Call<Tensor>, at: Site, _: &History, eval: &mut Eval) -> Option<Tensor> {
    let Call::StackRows { above, below } = call else { return None };
    (at.name == "kv_in").then(|| eval(&Call::StackRows { above: below, below: above }))
}

/// The mask of a draft's block with its scores, where there is context before it.
fn behind_context<'c>(call: &'c Call<Tensor>) -> Option<(&'c Tensor, Mask)> {
    let Call::AttnProbs { scores, mask, .. } = call else { return None };
    let (tokens, keys) = (scores.shape()[1], scores.shape()[2]);
    // In a model's own passes no token sees a later one.
    let of_block = matches!(mask.reach, Reach::All | Reach::TwoSided(_));
    (of_block && mask.first > 0 && keys == mask.first + tokens).then_some((scores, *mask))
}

/// Scores at which keys `unseen(j)` have no weight.
fn without(scores: &Tensor, unseen: impl Fn(usize) -> bool) -> Option<Tensor> {
    let keys = scores.shape()[2];
    let value = |(n, s): (usize, &f32)| if unseen(n % keys) { -1e30 } else { *s };
    shaped(scores, scores.iter().enumerate().map(value).collect())
}

fn last_row_unseen(call: &Call<Tensor>, _: Site, _: &History, eval: &mut Eval) -> Option<Tensor> {
    let (scores, mask) = behind_context(call)?;
    let scores = without(scores, |j| j + 1 == mask.first)?;
    Some(eval(&Call::AttnProbs { scores: &scores, mask, sinks: None }))
}

fn no_context(call: &Call<Tensor>, _: Site, _: &History, eval: &mut Eval) -> Option<Tensor> {
    let (scores, mask) = behind_context(call)?;
    let scores = without(scores, |j| j < mask.first)?;
    Some(eval(&Call::AttnProbs { scores: &scores, mask, sinks: None }))
}

fn causal_block(call: &Call<Tensor>, _: Site, _: &History, eval: &mut Eval) -> Option<Tensor> {
    let Call::AttnProbs { scores, mask, sinks } = call else { return None };
    let mask = Mask { reach: Reach::Causal, ..*mask };
    let sees_later = matches!(call, Call::AttnProbs { mask: Mask { reach: Reach::All, .. }, .. });
    (sees_later && scores.shape()[1] > 1).then(|| eval(&Call::AttnProbs { scores, mask, sinks: *sinks }))
}

fn window_ignored(call: &Call<Tensor>, _: Site, _: &History, eval: &mut Eval) -> Option<Tensor> {
    let Call::AttnProbs { scores, mask: Mask { first, reach: Reach::TwoSided(width) }, sinks } = call else {
        return None;
    };
    let mask = Mask { first: *first, reach: Reach::All };
    (*width < scores.shape()[2]).then(|| eval(&Call::AttnProbs { scores, mask, sinks: *sinks }))
}

fn window_behind(call: &Call<Tensor>, _: Site, _: &History, eval: &mut Eval) -> Option<Tensor> {
    let Call::AttnProbs { scores, mask: Mask { first, reach: Reach::TwoSided(width) }, sinks } = call else {
        return None;
    };
    let mask = Mask { first: *first, reach: Reach::Window(*width) };
    (scores.shape()[1] > 1).then(|| eval(&Call::AttnProbs { scores, mask, sinks: *sinks }))
}

fn one_early(call: &Call<Tensor>, at: Site, _: &History, _: &mut Eval) -> Option<Tensor> {
    table_rows(call, at, |rows, keep| (rows - keep).checked_sub(1))
}

fn positions_from_zero(call: &Call<Tensor>, at: Site, _: &History, _: &mut Eval) -> Option<Tensor> {
    table_rows(call, at, |rows, keep| (rows > keep).then_some(0))
}

/// The table of a block's queries, cut out from row `start(rows, keep)` on.
fn table_rows(
    call: &Call<Tensor>,
    at: Site,
    start: impl Fn(usize, usize) -> Option<usize>,
) -> Option<Tensor> {
    let Call::Tail { x, keep } = call else { return None };
    if !matches!(at.name, "rope.block.cos" | "rope.block.sin") {
        return None;
    }
    let (rows, width) = (x.shape()[0], x.shape()[1]);
    let start = start(rows, *keep)? * width;
    let values = flat(x)[start..start + keep * width].to_vec();
    Tensor::from_shape_vec(ndarray::IxDyn(&[*keep, width]), values).ok()
}

fn no_mask_token(call: &Call<Tensor>, at: Site, _: &History, eval: &mut Eval) -> Option<Tensor> {
    let Call::Embed { ids, .. } = call else { return None };
    if at.name != "noise" || ids.len() < 2 {
        return None;
    }
    let honest = eval(call);
    let width = honest.len() / ids.len();
    shaped(&honest, honest.iter().enumerate().map(|(n, v)| if n < width { *v } else { 0.0 }).collect())
}

fn anchor_last(call: &Call<Tensor>, at: Site, _: &History, eval: &mut Eval) -> Option<Tensor> {
    let Call::Embed { ids, table, scale } = *call else { return None };
    if at.name != "noise" || ids.len() < 2 {
        return None;
    }
    let mut turned = ids.to_vec();
    turned.rotate_left(1);
    Some(eval(&Call::Embed { ids: &turned, table, scale }))
}

fn other_side(call: &Call<Tensor>, _: Site, _: &History, eval: &mut Eval) -> Option<Tensor> {
    let Call::BlockConv { x, dynamic, conv, side } = *call else { return None };
    let side = if side == Side::Before { Side::Behind } else { Side::Before };
    Some(eval(&Call::BlockConv { x, dynamic, conv, side }))
}

fn no_walk(call: &Call<Tensor>, _: Site, _: &History, _: &mut Eval) -> Option<Tensor> {
    let Call::PathScores { logits, candidates, .. } = call else { return None };
    let vocab = logits.shape()[1];
    let k = candidates.shape()[1];
    let (z, ids) = (flat(logits), flat(candidates));
    let score = |n: usize| z.get(n / k * vocab + ids[n] as usize).copied();
    shaped(candidates, (0..ids.len()).map(score).collect::<Option<Vec<f32>>>()?)
}

fn walk_from_zero(call: &Call<Tensor>, _: Site, _: &History, eval: &mut Eval) -> Option<Tensor> {
    let Call::PathScores { logits, candidates, hidden, selector, anchor } = *call else { return None };
    (anchor != 0).then(|| eval(&Call::PathScores { logits, candidates, hidden, selector, anchor: 0 }))
}

fn place_for_id(call: &Call<Tensor>, _: Site, _: &History, eval: &mut Eval) -> Option<Tensor> {
    let Call::Pick { scores, candidates: Some(_) } = *call else { return None };
    Some(eval(&Call::Pick { scores, candidates: None }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use ndarray::array;
    use spec::families::Linear;
    use spec::families::draft::{DraftConv, Selector};
    use spec::{Matrix, Vector};

    /// What a mutant makes of a call, flat.
    fn made(name: &str, call: &Call<Tensor>) -> Vec<f32> {
        let mutant = MUTANTS.iter().find(|mutant| mutant.name() == name).unwrap();
        let mut plain = reference::Plain::default();
        let at = Site::model("path_scores");
        flat(&(mutant.apply)(call, at, &History::new(), &mut |call| plain.value(call)).unwrap())
    }

    // The walk of the reference's own example: scores (6.5, 14) and (72, 31), proposals 1 and 2. Without it the
    // scores are the logits of the candidates. Behind token 0, A[0] = (1, 0), row 0 gets 1·1·1 and 1·1·5 on top.
    #[test]
    fn walks_by_hand() {
        let matrix = |name, values: [f32; 8]| Matrix::from_values(name, 4, 2, values.to_vec());
        let weight = Matrix::from_values("hidden_projection", 2, 1, vec![0.0; 2]);
        let selector = Selector {
            predecessor: matrix("predecessor", [1.0, 0.0, 0.0, 1.0, 2.0, 0.0, 0.0, 0.0]),
            successor: matrix("successor", [0.0, 3.0, 5.0, 0.0, 0.0, 7.0, 1.0, 1.0]),
            hidden_projection: Linear { weight, bias: None },
        };
        let tensor = |x: ndarray::Array2<f32>| x.into_dyn().into_shared();
        let logits = tensor(array![[0.0, 4.0, 0.0, 4.5], [1.0, 0.0, 2.0, 0.0]]);
        let ids = tensor(array![[3.0, 1.0], [2.0, 0.0]]);
        let hidden = tensor(array![[1.0, 10.0], [1.0, 10.0]]);
        let (logits, candidates, hidden) = (&logits, &ids, &hidden);
        let call = Call::PathScores { logits, candidates, hidden, selector: &selector, anchor: 2 };
        assert_eq!(made("spec-select-walk", &call), [4.5, 4.0, 2.0, 1.0]);
        assert_eq!(made("spec-select-walk:anchor", &call), [5.5, 9.0, 72.0, 31.0]);
        let scores = tensor(array![[6.5, 14.0], [72.0, 31.0]]);
        let call = Call::Pick { scores: &scores, candidates: Some(&ids) };
        assert_eq!(made("spec-select-walk:index", &call), [1.0, 0.0]);
    }

    // One tap a side, 1 before and 2 behind the sublayer, nothing dynamic.
    #[test]
    fn kernels_of_the_other_side() {
        let weight = Matrix::from_values("kernel_projection", 2, 2, vec![0.0; 4]);
        let conv = DraftConv {
            base_kernel: Vector::new("base_kernel", vec![1.0, 1.0, 2.0, 2.0]),
            kernel_projection: Linear { weight, bias: None },
            kernel: 1,
            group: 2,
        };
        let x = array![[3.0f32, 5.0]].into_dyn().into_shared();
        let dynamic = array![[0.0f32, 0.0]].into_dyn().into_shared();
        let call = Call::BlockConv { x: &x, dynamic: &dynamic, conv: &conv, side: Side::Before };
        assert_eq!(made("spec-block-conv", &call), [6.0, 10.0]);
    }
}
