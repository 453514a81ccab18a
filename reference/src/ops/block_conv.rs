//! The grouped dynamic convolution of DFlash 2, along the rows of one block.

use super::{Tensor, rows};
use crate::sum::sum;
use ndarray::Array2;
use spec::families::draft::DraftConv;

/// Which of a sublayer's two convolutions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// Between the norm and the sublayer.
    Before,
    /// Between the sublayer and the residual.
    Behind,
}

/// Every channel mixed with the rows before it, by a kernel that is partly the row's own.
///
/// ```text
/// y[t, c] = Σ_{o < K} (base[side, o, c] + dynamic[t, ((side·K + o)·G) + ⌊c / g⌋]) · x[t - o, c]
/// ```
///
/// `x` is `[rows, hidden]`, the rows of one block with the anchor first; `x[t - o]` is 0 above it, so
/// nothing of the context or of an earlier block gets in. `dynamic` is `[rows, 2·K·G]` with `G = hidden / g`
/// groups of `g` neighbouring channels: the kernel projection of the *norm's* output, for both sides.
///
/// Source: the DFlash authors' package 0.1.0.
pub fn block_conv(x: &Tensor, dynamic: &Tensor, conv: &DraftConv, side: Side) -> Array2<f64> {
    let (x, dynamic) = (rows(x), rows(dynamic));
    let (tokens, hidden) = x.dim();
    let (kernel, groups) = (conv.kernel, hidden / conv.group);
    assert_eq!(dynamic.dim(), (tokens, 2 * kernel * groups), "block_conv: dynamic kernels against rows of x");
    assert_eq!(conv.base_kernel.len(), 2 * kernel * hidden, "block_conv: base kernel against columns of x");
    let first = if side == Side::Before { 0 } else { kernel };
    Array2::from_shape_fn((tokens, hidden), |(t, c)| {
        sum((0..kernel.min(t + 1)).map(|o| {
            let base = f64::from(conv.base_kernel[(first + o) * hidden + c]);
            let own = f64::from(dynamic[[t, (first + o) * groups + c / conv.group]]);
            (base + own) * f64::from(x[[t - o, c]])
        }))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use ndarray::array;
    use spec::families::Linear;
    use spec::{Matrix, Vector};

    /// Two taps over four channels in two groups; the projection is not read here.
    fn conv(base: [f32; 16]) -> DraftConv {
        let weight = Matrix::from_values("kernel_projection", 8, 4, vec![0.0; 32]);
        DraftConv {
            base_kernel: Vector::new("base_kernel", base.to_vec()),
            kernel_projection: Linear { weight, bias: None },
            kernel: 2,
            group: 2,
        }
    }

    fn tensor(values: ndarray::Array2<f32>) -> Tensor {
        values.into_dyn().into_shared()
    }

    // Side before: taps 1 and 10 for every channel. Dynamic columns 0 and 1 (tap 0 of groups 0 and 1) add 0
    // and 100, columns 2 and 3 (tap 1) add 0 and 1000, in the second row only.
    //   row 0: no row above it:         1·(1, 2, 3, 4)
    //   row 1: 1·5 + 10·1 = 15, 1·6 + 10·2 = 26, 101·7 + 1010·3 = 3737, 101·8 + 1010·4 = 4848
    // With the group taken as c mod 2, channels 1 and 3 would have got the additions instead of 2 and 3.
    #[test]
    fn neighbouring_channels_share_a_kernel() {
        let mut base = [0.0; 16];
        base[..4].fill(1.0);
        base[4..8].fill(10.0);
        let x = tensor(array![[1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0]]);
        let mut dynamic = ndarray::Array2::zeros((2, 8));
        (dynamic[[1, 1]], dynamic[[1, 3]]) = (100.0, 1000.0);
        let y = block_conv(&x, &tensor(dynamic), &conv(base), Side::Before);
        assert_eq!(y, array![[1.0, 2.0, 3.0, 4.0], [15.0, 26.0, 3737.0, 4848.0]]);
    }

    // The other side has the later half of both kernels: base 2 and 20, dynamic columns 4 to 7.
    #[test]
    fn the_sides_have_kernels_of_their_own() {
        let mut base = [0.0; 16];
        base[8..12].fill(2.0);
        base[12..].fill(20.0);
        let x = tensor(array![[1.0, 1.0, 1.0, 1.0], [3.0, 3.0, 3.0, 3.0]]);
        let mut dynamic = ndarray::Array2::zeros((2, 8));
        dynamic[[0, 4]] = 0.5;
        let y = block_conv(&x, &tensor(dynamic), &conv(base), Side::Behind);
        assert_eq!(y, array![[2.5, 2.5, 2.0, 2.0], [26.0, 26.0, 26.0, 26.0]]);
    }

    // Tap 0 of one and nothing else gives back what went in, to the bit.
    #[test]
    fn the_kernel_of_initialisation_changes_nothing() {
        let mut base = [0.0; 16];
        base[..4].fill(1.0);
        let x = tensor(array![[0.1, -0.2, 0.3, 0.4], [0.5, 0.6, -0.7, 0.8]]);
        let y = block_conv(&x, &tensor(ndarray::Array2::zeros((2, 8))), &conv(base), Side::Before);
        assert_eq!(y.mapv(|v| v as f32).into_dyn().into_shared(), x);
    }
}
