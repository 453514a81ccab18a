//! From logits to proposals: the largest logit of every row, or a walk over candidates (DFlash 2).

use super::{Tensor, rows};
use crate::sum::sum;
use ndarray::{Array1, Array2, ArrayView1};
use spec::NonFinite;
use spec::families::draft::Selector;

/// The ids of the `k` largest logits of every row, largest first; of equal ones the lowest id first.
///
/// `logits` is `[tokens, vocab]`, the result `[tokens, k]` holds ids as numbers. Exact.
pub fn candidates(logits: &Tensor, k: usize) -> Array2<f64> {
    let logits = rows(logits);
    assert!(k <= logits.ncols(), "candidates: number of candidates against logits of a row");
    let mut ids = Array2::zeros((logits.nrows(), k));
    for (row, mut ids) in logits.rows().into_iter().zip(ids.rows_mut()) {
        let mut order: Vec<usize> = (0..row.len()).collect();
        order.sort_by(|&a, &b| row[b].total_cmp(&row[a]).then(a.cmp(&b)));
        for (id, &best) in ids.iter_mut().zip(&order) {
            *id = best as f64;
        }
    }
    ids
}

/// What every candidate of one row is worth behind the token `before`.
///
/// ```text
/// score[i] = z[id_i] + Σ_r A[before, r] · g[r] · S[id_i, r]
/// ```
///
/// `z` is the row's logits, `g` its projected hidden row, `A` and `S` the codebooks of predecessors and
/// successors. `z` is a raw logit, not a log-probability.
pub fn step_scores(
    z: ArrayView1<f32>,
    ids: ArrayView1<f32>,
    g: ArrayView1<f32>,
    selector: &Selector,
    before: u32,
) -> Result<Array1<f64>, NonFinite> {
    let rank = selector.predecessor.inner();
    assert_eq!(g.len(), rank, "path_scores: projected hidden row against the rank of the codebooks");
    let (mut a, mut s) = (vec![0.0; rank], vec![0.0; rank]);
    selector.predecessor.decode(before as usize, &mut a)?;
    let mut scores = Array1::zeros(ids.len());
    for (score, &id) in scores.iter_mut().zip(ids) {
        selector.successor.decode(id as usize, &mut s)?;
        let terms = (0..rank).map(|r| f64::from(a[r]) * f64::from(g[r]) * f64::from(s[r]));
        *score = f64::from(z[id as usize]) + sum(terms);
    }
    Ok(scores)
}

/// The scores along the walk that takes the best candidate of every row.
///
/// ```text
/// d_0 = anchor
/// score[j, i] = z_j[c_{j,i}] + Σ_r A[d_{j-1}, r] · g_j[r] · S[c_{j,i}, r]
/// d_j = c_{j,i} of the largest score; of equal ones the lowest id
/// ```
///
/// `logits` is `[tokens, vocab]`, `candidates` `[tokens, k]`, `hidden` `[tokens, rank]`, the result
/// `[tokens, k]`. Left to right and greedy: no row looks ahead.
///
/// Source: the DFlash authors' package 0.1.0.
pub fn path_scores(
    logits: &Tensor,
    candidates: &Tensor,
    hidden: &Tensor,
    selector: &Selector,
    anchor: u32,
) -> Result<Array2<f64>, NonFinite> {
    let (logits, candidates, hidden) = (rows(logits), rows(candidates), rows(hidden));
    let mut scores = Array2::zeros(candidates.raw_dim());
    let mut before = anchor;
    for j in 0..candidates.nrows() {
        let row = step_scores(logits.row(j), candidates.row(j), hidden.row(j), selector, before)?;
        // Compared as they are told: after the one rounding of a site.
        before = best(row.iter().map(|&score| score as f32), candidates.row(j).iter().map(|&id| id as u32));
        scores.row_mut(j).assign(&row);
    }
    Ok(scores)
}

/// The id with the largest score; of equal ones the lowest.
fn best(scores: impl Iterator<Item = f32>, ids: impl Iterator<Item = u32>) -> u32 {
    let mut best: Option<(f32, u32)> = None;
    for (score, id) in scores.zip(ids) {
        let better = best.is_none_or(|(top, lowest)| score > top || score == top && id < lowest);
        if better {
            best = Some((score, id));
        }
    }
    best.map_or(0, |(_, id)| id)
}

/// The token that every row proposes: the id with the largest score, of equal ones the lowest.
///
/// ```text
/// y[j] = argmax_i scores[j, i]                       or candidates[j, that i]
/// ```
///
/// `scores` is `[tokens, vocab]`, or `[tokens, k]` with the ids of its columns in `candidates`; the result
/// `[tokens]` holds ids as numbers. Exact.
pub fn pick(scores: &Tensor, candidates: Option<&Tensor>) -> Array1<f64> {
    let (scores, candidates) = (rows(scores), candidates.map(rows));
    let picked = scores.rows().into_iter().enumerate().map(|(j, row)| {
        let scores = row.iter().copied();
        f64::from(match &candidates {
            None => best(scores, 0..),
            Some(ids) => best(scores, ids.row(j).iter().map(|&id| id as u32)),
        })
    });
    picked.collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use ndarray::{Array, array};
    use spec::Matrix;
    use spec::families::Linear;

    fn tensor<D: ndarray::Dimension>(x: Array<f32, D>) -> Tensor {
        x.into_dyn().into_shared()
    }

    /// Codebooks of rank 2 over four tokens. `A` and `S` differ, so that swapping them shows.
    fn selector() -> Selector {
        let matrix = |name, values: [f32; 8]| Matrix::from_values(name, 4, 2, values.to_vec());
        let weight = Matrix::from_values("hidden_projection", 2, 1, vec![0.0; 2]);
        Selector {
            predecessor: matrix("predecessor", [1.0, 0.0, 0.0, 1.0, 2.0, 0.0, 0.0, 0.0]),
            successor: matrix("successor", [0.0, 3.0, 5.0, 0.0, 0.0, 7.0, 1.0, 1.0]),
            hidden_projection: Linear { weight, bias: None },
        }
    }

    #[test]
    fn largest_first_and_the_lowest_of_equal_ones() {
        let logits = tensor(array![[1.0, 4.0, 4.0, 2.0], [0.0, -1.0, -2.0, 0.0]]);
        assert_eq!(candidates(&logits, 3), array![[1.0, 2.0, 3.0], [0.0, 3.0, 1.0]]);
        assert_eq!(pick(&logits, None), array![1.0, 0.0]);
    }

    // Row 0 behind anchor 2, A[2] = (2, 0), g = (1, 10): candidates 1 and 3 get 2·1·5 = 10 and 2·1·1 = 2 on
    // top of 4 and 4.5: 14 and 6.5, so the walk takes 1, against the larger logit of 3.
    // Row 1 behind token 1, A[1] = (0, 1), g = (1, 10): candidates 2 and 0 get 1·10·7 and 1·10·3.
    // Behind the anchor instead they would have got nothing; with the codebooks swapped row 0 would read
    // S[2] = (0, 7) and A[1] = (0, 1): 70.
    #[test]
    fn the_walk_reads_the_token_it_took() {
        let logits = tensor(array![[0.0, 4.0, 0.0, 4.5], [1.0, 0.0, 2.0, 0.0]]);
        let ids = tensor(array![[3.0, 1.0], [2.0, 0.0]]);
        let hidden = tensor(array![[1.0, 10.0], [1.0, 10.0]]);
        let scores = path_scores(&logits, &ids, &hidden, &selector(), 2).unwrap();
        assert_eq!(scores, array![[6.5, 14.0], [72.0, 31.0]]);
        let scores = tensor(scores.mapv(|v| v as f32));
        assert_eq!(pick(&scores, Some(&ids)), array![1.0, 2.0]);
    }

    #[test]
    fn equal_scores_go_to_the_lower_id() {
        let scores = tensor(array![[5.0, 5.0, 1.0]]);
        assert_eq!(pick(&scores, Some(&tensor(array![[9.0, 4.0, 2.0]]))), array![4.0]);
    }
}
