//! Rows above rows, and the last of them. Both are exact.

use super::{Tensor, rows};
use ndarray::{Array2, ArrayD, Axis, Slice, concatenate};

/// The rows of `above`, then the rows of `below`.
///
/// ```text
/// y[t, i] = above[t, i]        for t < rows of above
/// y[above + t, i] = below[t, i]
/// ```
///
/// Both are `[tokens, columns]` with the same columns. A draft's keys and values read context rows and
/// block rows through one projection.
pub fn stack_rows(above: &Tensor, below: &Tensor) -> Array2<f64> {
    let (above, below) = (rows(above).mapv(f64::from), rows(below).mapv(f64::from));
    concatenate(Axis(0), &[above.view(), below.view()])
        .expect("stack_rows: columns of above against columns of below")
}

/// The last `keep` rows of `x`, along its first axis.
pub fn tail(x: &Tensor, keep: usize) -> ArrayD<f64> {
    let all = x.shape()[0];
    assert!(keep <= all, "tail: rows to keep against rows given");
    x.slice_axis(Axis(0), Slice::from(all - keep..)).mapv(f64::from)
}

#[cfg(test)]
mod tests {
    use super::*;
    use ndarray::array;

    #[test]
    fn context_above_block_and_the_block_again() {
        let context = array![[1.0f32, 2.0], [3.0, 4.0]].into_dyn().into_shared();
        let block = array![[5.0f32, 6.0]].into_dyn().into_shared();
        let both = stack_rows(&context, &block);
        assert_eq!(both, array![[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]);
        let both = both.mapv(|v| v as f32).into_dyn().into_shared();
        assert_eq!(tail(&both, 2), array![[3.0, 4.0], [5.0, 6.0]].into_dyn());
        assert_eq!(tail(&both, 1), array![[5.0, 6.0]].into_dyn());
    }
}
