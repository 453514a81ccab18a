//! Parts of a fused projection.

use super::{Tensor, rows};
use ndarray::{ArrayD, IxDyn};

/// `groups` runs of `width` columns each; run g begins at column `start + g · stride`.
///
/// Parts that lie side by side are one run. Parts that are interleaved per head are many:
///
/// ```text
/// query and gate, head by head      q₀ q₀ z₀ z₀ q₁ q₁ z₁ z₁ …
/// the queries                       start 0, width 2, stride 4
/// the gates                         start 2, width 2, stride 4
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// First column of the first run.
    pub start: usize,
    /// Columns of a run.
    pub width: usize,
    /// Number of runs.
    pub groups: usize,
    /// Columns from the begin of one run to the begin of the next.
    pub stride: usize,
}

impl Run {
    /// One run: columns `start .. start + width`.
    pub fn one(start: usize, width: usize) -> Run {
        Run { start, width, groups: 1, stride: width }
    }

    /// The columns in the order in which they are taken.
    pub fn columns(self) -> impl Iterator<Item = usize> {
        (0..self.groups).flat_map(move |g| (0..self.width).map(move |i| self.start + g * self.stride + i))
    }
}

/// The columns of `runs`, one run after the other. Exact.
///
/// ```text
/// y[t, n] = x[t, column(n)]
/// ```
///
/// `x` is `[tokens, columns]` in any shape. The result is `[tokens, n]`, or with a `width`
/// `[tokens, n / width, width]`: heads.
pub fn columns(x: &Tensor, runs: &[Run], width: Option<usize>) -> ArrayD<f64> {
    let x = rows(x);
    let order: Vec<usize> = runs.iter().flat_map(|run| run.columns()).collect();
    let (tokens, taken) = (x.nrows(), order.len());
    assert!(order.iter().all(|&c| c < x.ncols()), "columns: last column of the runs against the row length");
    let y = x.rows().into_iter().flat_map(|row| order.iter().map(move |&c| f64::from(row[c]))).collect();
    let shape = match width {
        None => IxDyn(&[tokens, taken]),
        Some(width) => {
            assert_eq!(taken % width, 0, "columns: number of columns against head width");
            IxDyn(&[tokens, taken / width, width])
        }
    };
    ArrayD::from_shape_vec(shape, y).expect("columns: one value a column taken")
}

#[cfg(test)]
mod tests {
    use super::*;
    use ndarray::array;

    // Two heads of query and gate, two wide each. Cut in two halves, the queries would be 0 1 2 3.
    #[test]
    fn parts_interleaved_per_head_by_hand() {
        let x = array![[0.0f32, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]].into_dyn().into_shared();
        let query = Run { start: 0, width: 2, groups: 2, stride: 4 };
        let gate = Run { start: 2, ..query };
        assert_eq!(columns(&x, &[query], Some(2)), array![[[0.0, 1.0], [4.0, 5.0]]].into_dyn());
        assert_eq!(columns(&x, &[gate], None), array![[2.0, 3.0, 6.0, 7.0]].into_dyn());
        assert_eq!(columns(&x, &[Run::one(5, 2), Run::one(0, 1)], None), array![[5.0, 6.0, 0.0]].into_dyn());
    }
}
