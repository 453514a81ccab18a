//! What one layer receives of the per-layer embeddings.

use super::{Tensor, rows};
use ndarray::Array2;
use std::f64::consts::FRAC_1_SQRT_2;

/// Layer `layer`'s part of both halves, added and brought back to their size.
///
/// ```text
/// y[t, i] = (context[t, layer, i] + token[t, layer · width + i]) / √2
/// ```
///
/// `token` is `[tokens, layers · width]` and `context` `[tokens, layers, width]`: layer-major both, not
/// `[width, layers]`. The result is `[tokens, width]`.
pub fn per_layer_input(token: &Tensor, context: &Tensor, layer: usize, width: usize) -> Array2<f64> {
    let (token, context) = (rows(token), rows(context));
    assert_eq!(token.dim(), context.dim(), "per_layer_input: table rows against context rows");
    assert!((layer + 1) * width <= token.ncols(), "per_layer_input: layer against layers");
    Array2::from_shape_fn((token.nrows(), width), |(t, i)| {
        let at = [t, layer * width + i];
        (f64::from(context[at]) + f64::from(token[at])) * FRAC_1_SQRT_2
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use approx::assert_relative_eq;
    use ndarray::array;

    // Three layers of two: layer 1 holds columns 2 and 3. (30 + 3)/√2 = 23.334524, (40 + 4)/√2 = 31.112698.
    // Read as [width, layers], layer 1 would be columns 1 and 4.
    #[test]
    fn rows_are_layer_major() {
        let token = array![[1.0f32, 2.0, 3.0, 4.0, 5.0, 6.0]].into_dyn().into_shared();
        let context = array![[[10.0f32, 20.0], [30.0, 40.0], [50.0, 60.0]]].into_dyn().into_shared();
        let y = per_layer_input(&token, &context, 1, 2);
        assert_relative_eq!(y[[0, 0]], 23.334_524, max_relative = 1e-7);
        assert_relative_eq!(y[[0, 1]], 31.112_698, max_relative = 1e-7);
    }
}
