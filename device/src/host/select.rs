//! What a block draft does beside products and attention: convolutions along the block, and tokens out of
//! logits.

use crate::DeviceError;
use spec::families::draft::{DraftConv, Selector};

/// Every channel mixed with the block rows before it, by a kernel that is partly the row's own.
///
/// ```text
/// y[t, c] = Σ_{o < K} (base[side, o, c] + dynamic[t, (side·K + o)·G + ⌊c / g⌋]) · x[t − o, c]
/// ```
///
/// `x` is `[rows, hidden]`, the anchor first, with nothing above it; `dynamic` is `[rows, 2·K·G]`. In f32,
/// from the row itself to the rows before it.
pub fn block_conv(x: &[f32], dynamic: &[f32], conv: &DraftConv, side: usize, hidden: usize) -> Vec<f32> {
    let (kernel, groups) = (conv.kernel, hidden / conv.group);
    let mut y = vec![0.0; x.len()];
    for (t, (y, own)) in y.chunks_exact_mut(hidden).zip(dynamic.chunks_exact(2 * kernel * groups)).enumerate()
    {
        for o in 0..kernel.min(t + 1) {
            let tap = side * kernel + o;
            let (base, own) = (&conv.base_kernel[tap * hidden..][..hidden], &own[tap * groups..][..groups]);
            let x = &x[(t - o) * hidden..][..hidden];
            for c in 0..hidden {
                y[c] += (base[c] + own[c / conv.group]) * x[c];
            }
        }
    }
    y
}

/// The id of the largest value, of equal ones the lowest.
pub fn largest(row: &[f32]) -> u32 {
    let mut best = 0;
    for (id, value) in row.iter().enumerate() {
        if *value > row[best] {
            best = id;
        }
    }
    best as u32
}

/// The ids of the `k` largest logits of every row, largest first, of equal ones the lowest: `[rows, k]`.
pub fn candidates(logits: &[f32], vocab: usize, k: usize) -> Vec<u32> {
    let mut all = Vec::new();
    for row in logits.chunks_exact(vocab) {
        let mut ids: Vec<u32> = (0..vocab as u32).collect();
        let order = |a: &u32, b: &u32| row[*b as usize].total_cmp(&row[*a as usize]).then(a.cmp(b));
        if k < vocab {
            ids.select_nth_unstable_by(k, order);
            ids.truncate(k);
        }
        ids.sort_unstable_by(order);
        all.extend(ids);
    }
    all
}

/// Scores along the greedy walk `[rows, k]`, and the token of every row.
///
/// ```text
/// score[j, i] = z_j[c_i] + Σ_r A[d_{j−1}, r] · g_j[r] · S[c_i, r]        d_j = c_i of the largest score
/// ```
///
/// `ids` is `[rows, k]`, `g` `[rows, rank]`; of equal scores the lowest id is taken.
pub fn walk(
    logits: &[f32],
    vocab: usize,
    ids: &[u32],
    k: usize,
    g: &[f32],
    selector: &Selector,
    anchor: u32,
) -> Result<(Vec<f32>, Vec<u32>), DeviceError> {
    let rank = selector.predecessor.inner();
    let (mut weights, mut successor) = (vec![0.0; rank], vec![0.0; rank]);
    let (mut scores, mut picked, mut before) = (Vec::with_capacity(ids.len()), Vec::new(), anchor);
    for ((z, ids), g) in logits.chunks_exact(vocab).zip(ids.chunks_exact(k)).zip(g.chunks_exact(rank)) {
        selector.predecessor.decode(before as usize, &mut weights)?;
        weights.iter_mut().zip(g).for_each(|(a, g)| *a *= g);
        let mut best: Option<(f32, u32)> = None;
        for &id in ids {
            selector.successor.decode(id as usize, &mut successor)?;
            let path = weights.iter().zip(&successor).fold(0.0f32, |sum, (w, s)| sum + w * s);
            let score = z[id as usize] + path;
            scores.push(score);
            if best.is_none_or(|(top, lowest)| score > top || (score == top && id < lowest)) {
                best = Some((score, id));
            }
        }
        before = best.map_or(before, |(_, id)| id);
        picked.push(before);
    }
    Ok((scores, picked))
}

#[cfg(test)]
mod tests {
    use super::*;
    use spec::families::Linear;
    use spec::{Matrix, Vector};

    // Two taps, four channels in two groups; the side behind has base kernels 2 and 20. The dynamic kernel of
    // row 1 adds 1 to its own tap in group 1: 3 · 5 + 20 · 1 in channels 2 and 3, 2 · 5 + 20 · 1 before them.
    #[test]
    fn a_block_conv_by_hand() {
        let mut base = vec![1.0; 16];
        base[8..12].fill(2.0);
        base[12..].fill(20.0);
        let weight = Matrix::from_values("kernel_projection", 8, 4, vec![0.0; 32]);
        let conv = DraftConv {
            base_kernel: Vector::new("base_kernel", base),
            kernel_projection: Linear { weight, bias: None },
            kernel: 2,
            group: 2,
        };
        let mut dynamic = [0.0; 16];
        dynamic[8 + 5] = 1.0;
        let x = [1.0, 1.0, 1.0, 1.0, 5.0, 5.0, 5.0, 5.0];
        let y = block_conv(&x, &dynamic, &conv, 1, 4);
        assert_eq!(y, [2.0, 2.0, 2.0, 2.0, 30.0, 30.0, 35.0, 35.0]);
    }

    #[test]
    fn largest_first_and_the_lowest_of_equal_ones() {
        let logits = [1.0, 4.0, 4.0, 2.0, 0.0, -1.0, -2.0, 0.0];
        assert_eq!(candidates(&logits, 4, 3), [1, 2, 3, 0, 3, 1]);
        assert_eq!((largest(&logits[..4]), largest(&logits[4..])), (1, 0));
    }

    // Behind anchor 2, A[2] = (2, 0), g = (1, 10): candidates 1 and 3 get 2 · 5 = 10 and 2 · 1 = 2 on top of 4
    // and 4.5, so the walk takes 1 against the larger logit; behind it A[1] = (0, 1) gives 10 · 7 and 10 · 3.
    #[test]
    fn the_walk_reads_the_token_it_took() {
        let matrix = |name, values: [f32; 8]| Matrix::from_values(name, 4, 2, values.to_vec());
        let weight = Matrix::from_values("hidden_projection", 2, 1, vec![0.0; 2]);
        let selector = Selector {
            predecessor: matrix("predecessor", [1.0, 0.0, 0.0, 1.0, 2.0, 0.0, 0.0, 0.0]),
            successor: matrix("successor", [0.0, 3.0, 5.0, 0.0, 0.0, 7.0, 1.0, 1.0]),
            hidden_projection: Linear { weight, bias: None },
        };
        let logits = [0.0, 4.0, 0.0, 4.5, 1.0, 0.0, 2.0, 0.0];
        let (scores, picked) =
            walk(&logits, 4, &[3, 1, 2, 0], 2, &[1.0, 10.0, 1.0, 10.0], &selector, 2).unwrap();
        assert_eq!(scores, [6.5, 14.0, 72.0, 31.0]);
        assert_eq!(picked, [1, 2]);
    }
}
