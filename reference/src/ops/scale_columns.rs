//! A factor for each column.

use super::{Tensor, rows};
use ndarray::Array2;

/// `y[t, i] = x[t, i] · weight[i]`; `x` is `[tokens, hidden]`, `weight` is `[hidden]`.
pub fn scale_columns(x: &Tensor, weight: &[f32]) -> Array2<f64> {
    let x = rows(x);
    assert_eq!(x.ncols(), weight.len(), "scale_columns: row length against weight length");
    Array2::from_shape_fn(x.dim(), |(t, i)| f64::from(x[[t, i]]) * f64::from(weight[i]))
}

#[cfg(test)]
mod tests {
    use super::*;
    use ndarray::array;

    #[test]
    fn weights_belong_to_columns() {
        let x = array![[1.0f32, 2.0], [3.0, 4.0]].into_dyn().into_shared();
        assert_eq!(scale_columns(&x, &[10.0, 100.0]), array![[10.0, 200.0], [30.0, 400.0]]);
    }
}
