//! How much of its state the gated delta rule keeps.

use super::{Tensor, rows};
use ndarray::Array2;

/// The log decay of every token and value head.
///
/// ```text
/// g[t, h] = -e^a_log[h] · softplus(a[t, h] + dt_bias[h]),   softplus(x) = ln(1 + e^x)
/// ```
///
/// `a` is `[tokens, value_heads]`, `a_log` and `dt_bias` are `[value_heads]`, the result is
/// `[tokens, value_heads]` and never positive: the state is multiplied by e^g. A container that stores
/// `-e^a_log` converts it when it is read.
///
/// Source: arXiv 2412.06464, section 3.4, after arXiv 2405.21060.
pub fn gdn_decay(a: &Tensor, a_log: &[f32], dt_bias: &[f32]) -> Array2<f64> {
    let a = rows(a);
    assert_eq!(a.ncols(), a_log.len(), "gdn_decay: heads of a against a_log");
    assert_eq!(a.ncols(), dt_bias.len(), "gdn_decay: heads of a against dt_bias");
    Array2::from_shape_fn(a.dim(), |(t, h)| {
        let rate = libm::exp(f64::from(a_log[h]));
        -rate * softplus(f64::from(a[[t, h]]) + f64::from(dt_bias[h]))
    })
}

/// `ln(1 + e^x)`, written so that e^x cannot overflow.
fn softplus(x: f64) -> f64 {
    x.max(0.0) + libm::log1p(libm::exp(-x.abs()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use approx::assert_relative_eq;
    use ndarray::array;

    // Head 0: softplus(ln 3) = ln 4, times e^ln2 = 2: -2.772589. Head 1: a + bias = 1 - 1 = 0: -ln 2.
    #[test]
    fn by_hand() {
        let a = array![[3f32.ln(), 1.0]].into_dyn().into_shared();
        let g = gdn_decay(&a, &[2f32.ln(), 0.0], &[0.0, -1.0]);
        assert_relative_eq!(g[[0, 0]], -2.772_588_7, max_relative = 1e-6);
        assert_relative_eq!(g[[0, 1]], -std::f64::consts::LN_2, max_relative = 1e-6);
    }

    // softplus(1000) = 1000, softplus(-1000) = 0; softplus(-7) = ln(1 + e^-7) = 9.1146e-4.
    #[test]
    fn far_arguments_stay_finite() {
        let a = array![[1000.0f32, -1000.0, -7.0]].into_dyn().into_shared();
        let g = gdn_decay(&a, &[0.0; 3], &[0.0; 3]);
        assert_eq!((g[[0, 0]], g[[0, 1]]), (-1000.0, 0.0));
        assert_relative_eq!(g[[0, 2]], -9.114_664e-4, max_relative = 1e-6);
    }
}
