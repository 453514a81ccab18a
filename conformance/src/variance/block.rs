//! Sizes of the sums in a block draft's ops: what each result would be if nothing cancelled.

use ndarray::{ArrayD, Axis};
use reference::Tensor;
use reference::ops::{Side, block_conv, pick};
use spec::families::draft::{DraftConv, Selector};
use spec::{Matrix, Vector};

/// `Σ_o (|base| + |dynamic|) · |x|` of every element of a block convolution.
pub fn conv_sizes(x: &Tensor, dynamic: &Tensor, conv: &DraftConv, side: Side) -> Vec<f64> {
    let absolute = |x: &Tensor| x.mapv(f32::abs).into_shared();
    let base: Vec<f32> = conv.base_kernel.iter().map(|v| v.abs()).collect();
    let conv = DraftConv { base_kernel: Vector::new("absolute base kernel", base), ..conv.clone() };
    block_conv(&absolute(x), &absolute(dynamic), &conv, side).into_iter().collect()
}

/// `|z| + Σ_r |A · g · S|` of every candidate along the walk whose scores are `r`. Operands are logits,
/// candidates and projected rows.
pub fn walk_sizes(
    [logits, candidates, hidden]: [&Tensor; 3],
    selector: &Selector,
    anchor: u32,
    r: &ArrayD<f64>,
) -> Vec<f64> {
    let walk = pick(&r.mapv(|v| v as f32).into_shared(), Some(candidates));
    let row = |matrix: &Matrix, id: f32| {
        let mut row = vec![0.0; matrix.inner()];
        // A value that is not finite has stopped the op itself before.
        let _ = matrix.decode(id as usize, &mut row);
        row
    };
    let mut sizes = Vec::with_capacity(r.len());
    let mut before = anchor as f32;
    for j in 0..candidates.shape()[0] {
        let (z, ids, g) =
            (logits.index_axis(Axis(0), j), candidates.index_axis(Axis(0), j), hidden.index_axis(Axis(0), j));
        let a = row(&selector.predecessor, before);
        for &id in ids {
            let s = row(&selector.successor, id);
            let terms = a.iter().zip(g.iter()).zip(&s);
            let sum: f64 =
                terms.map(|((a, g), s)| (f64::from(*a) * f64::from(*g) * f64::from(*s)).abs()).sum();
            sizes.push(f64::from(z[id as usize]).abs() + sum);
        }
        before = walk[j] as f32;
    }
    sizes
}

#[cfg(test)]
mod tests {
    use super::*;
    use ndarray::array;
    use spec::families::Linear;

    // Row 0 behind anchor 1: |2| + |3·-1·4| = 14. Its one candidate is 0, so row 1 is behind 0:
    // |-5| + |-2·10·4| = 85.
    #[test]
    fn the_walk_by_hand() {
        let codebook = |name, values: [f32; 2]| Matrix::from_values(name, 2, 1, values.to_vec());
        let selector = Selector {
            predecessor: codebook("predecessor", [-2.0, 3.0]),
            successor: codebook("successor", [4.0, 0.0]),
            hidden_projection: Linear { weight: codebook("projection", [0.0, 0.0]), bias: None },
        };
        let tensor = |x: ndarray::Array2<f32>| x.into_dyn().into_shared();
        let (logits, ids) = (tensor(array![[2.0, 9.0], [-5.0, 9.0]]), tensor(array![[0.0], [0.0]]));
        let hidden = tensor(array![[-1.0], [10.0]]);
        let r = reference::ops::path_scores(&logits, &ids, &hidden, &selector, 1).unwrap().into_dyn();
        assert_eq!(r, array![[-10.0], [-85.0]].into_dyn());
        assert_eq!(walk_sizes([&logits, &ids, &hidden], &selector, 1, &r), [14.0, 85.0]);
    }
}
