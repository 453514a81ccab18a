//! Taking rows of values apart and putting them together.

use super::{Tensor, rows};
use ndarray::{Array3, ArrayD, Axis, IxDyn, Slice};
use std::ops::Range;

/// The values `range` of every group of `width` values.
///
/// ```text
/// y[t, g, i] = x[t, g · width + range.start + i]
/// ```
///
/// `x` is `[tokens, groups · width]` in any shape. The result is `[tokens, len]` for one group of a flat
/// row, else `[tokens, groups, len]`: one group cuts a fused projection into its parts, several cut every
/// head. Exact.
pub fn slice(x: &Tensor, width: usize, range: Range<usize>) -> ArrayD<f64> {
    let flat = rows(x);
    let (tokens, all) = flat.dim();
    assert_eq!(all % width, 0, "slice: row length against width");
    assert!(range.start <= range.end && range.end <= width, "slice: range against width");
    let (groups, len) = (all / width, range.len());
    let grouped = flat.into_shape_with_order((tokens, groups, width)).expect("slice: rows in order");
    let y = grouped.slice_axis(Axis(2), Slice::from(range)).mapv(f64::from);
    let shape = if groups == 1 && x.ndim() == 2 { vec![tokens, len] } else { vec![tokens, groups, len] };
    let (y, _) = y.as_standard_layout().into_owned().into_raw_vec_and_offset();
    ArrayD::from_shape_vec(IxDyn(&shape), y).expect("slice: one result a value")
}

/// Every head of `a` followed by the same head of `b`, or by the only head of `b`.
///
/// ```text
/// y[t, h, i]         = a[t, h, i]
/// y[t, h, width + i] = b[t, h, i]      b[t, 0, i] where b has one head
/// ```
///
/// `a` is `[tokens, heads, width]`, `b` is `[tokens, heads or 1, extra]`. Exact.
pub fn concat(a: &Tensor, b: &Tensor) -> Array3<f64> {
    let [a, b] = [a, b].map(|x| x.view().into_dimensionality::<ndarray::Ix3>().expect("concat: three axes"));
    let (tokens, heads, width) = a.dim();
    let (others, extra_heads, extra) = b.dim();
    assert_eq!(tokens, others, "concat: tokens of a against tokens of b");
    assert!(extra_heads == heads || extra_heads == 1, "concat: heads of a against heads of b");
    Array3::from_shape_fn((tokens, heads, width + extra), |(t, h, i)| {
        f64::from(if i < width { a[[t, h, i]] } else { b[[t, h.min(extra_heads - 1), i - width]] })
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use ndarray::array;
    use proptest::prelude::*;

    #[test]
    fn one_group_stays_flat_and_heads_get_an_axis() {
        let x = array![[1.0f32, 2.0, 3.0, 4.0, 5.0, 6.0], [7.0, 8.0, 9.0, 10.0, 11.0, 12.0]];
        let x = x.into_dyn().into_shared();
        assert_eq!(slice(&x, 6, 2..5), array![[3.0, 4.0, 5.0], [9.0, 10.0, 11.0]].into_dyn());
        let y = slice(&x, 3, 1..3);
        assert_eq!(y, array![[[2.0, 3.0], [5.0, 6.0]], [[8.0, 9.0], [11.0, 12.0]]].into_dyn());
    }

    // The one rotated key part of latent attention stands behind the own part of every head.
    #[test]
    fn one_head_is_shared_by_all() {
        let a = array![[[1.0f32], [2.0]], [[3.0], [4.0]]].into_dyn().into_shared();
        let b = array![[[10.0f32]], [[20.0]]].into_dyn().into_shared();
        assert_eq!(concat(&a, &b), array![[[1.0, 10.0], [2.0, 10.0]], [[3.0, 20.0], [4.0, 20.0]]]);
    }

    proptest! {
        // What a cut takes apart, a join puts together.
        #[test]
        fn cutting_and_joining_gives_back(tokens in 1usize..4, heads in 1usize..4, width in 2usize..7, cut in 1usize..7) {
            let cut = 1 + cut % (width - 1);
            let x = ndarray::Array3::from_shape_fn((tokens, heads, width), |(t, h, i)| (100 * t + 10 * h + i) as f32);
            let x = x.into_dyn().into_shared();
            let part = |range| slice(&x, width, range).mapv(|v| v as f32).into_shared();
            prop_assert_eq!(concat(&part(0..cut), &part(cut..width)).into_dyn(), x.mapv(f64::from));
        }
    }
}
