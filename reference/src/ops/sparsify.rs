//! Cutting all but the largest gates to 0.

use super::{Tensor, rows};
use crate::sum::sum;
use ndarray::Array2;
use std::f64::consts::SQRT_2;

/// Keeps what lies above a quantile of the row, were the row normally distributed.
///
/// ```text
/// y[t, i] = max(0, x[t, i] - (mean(x[t]) + std(x[t]) · Φ⁻¹(sparsity)))
/// ```
///
/// The deviation is that of the population (divided by n, not n - 1). `x` is `[tokens, intermediate]`,
/// `0 < sparsity < 1`: about that share of a row becomes 0.
///
/// Source: the Gemma 3n model code; the statistical top-k of arXiv 2506.06644.
pub fn sparsify(x: &Tensor, sparsity: f64) -> Array2<f64> {
    let quantile = normal_quantile(sparsity);
    let x = rows(x);
    let mut y = Array2::zeros(x.dim());
    for (mut y, x) in y.rows_mut().into_iter().zip(x.rows()) {
        let n = x.len() as f64;
        let mean = sum(x.iter().map(|&v| f64::from(v))) / n;
        let variance = sum(x.iter().map(|&v| (f64::from(v) - mean) * (f64::from(v) - mean))) / n;
        let cut = mean + variance.sqrt() * quantile;
        for (y, &x) in y.iter_mut().zip(x) {
            *y = (f64::from(x) - cut).max(0.0);
        }
    }
    y
}

/// `Φ⁻¹(p)`: where the standard normal distribution reaches `p`.
///
/// Halves an interval of `Φ(z) = erfc(-z / √2) / 2` until it is one f64 wide: slow, short, and the same
/// bits everywhere.
fn normal_quantile(p: f64) -> f64 {
    let (mut low, mut high) = (-40.0, 40.0);
    for _ in 0..120 {
        let middle = (low + high) / 2.0;
        if libm::erfc(-middle / SQRT_2) / 2.0 < p {
            low = middle;
        } else {
            high = middle;
        }
    }
    high
}

#[cfg(test)]
mod tests {
    use super::*;
    use approx::assert_relative_eq;
    use ndarray::array;

    // Tables of the normal distribution: Φ(1.281552) = 0.9, Φ(1.644854) = 0.95, Φ(-1.281552) = 0.1.
    #[test]
    fn quantiles_of_the_tables() {
        assert_relative_eq!(normal_quantile(0.9), 1.281_551_565_5, max_relative = 1e-9);
        assert_relative_eq!(normal_quantile(0.95), 1.644_853_626_95, max_relative = 1e-9);
        assert_relative_eq!(normal_quantile(0.1), -1.281_551_565_5, max_relative = 1e-9);
        // Where Φ first reaches 1/2: 0, or a last bit before it, but never behind.
        assert!((-1e-15..=0.0).contains(&normal_quantile(0.5)));
    }

    // Mean 2, squared deviations 4, 4, 0, 0: population deviation √2 (of a sample: 1.632993).
    // The cut at 0.6 (Φ⁻¹ = 0.253347) is 2.358287: of 0, 4, 2, 2 only 4 stays, as 1.641713.
    #[test]
    fn the_deviation_is_the_population_s() {
        let y = sparsify(&array![[0.0f32, 4.0, 2.0, 2.0]].into_dyn().into_shared(), 0.6);
        assert_relative_eq!(y[[0, 1]], 1.641_713, max_relative = 1e-6);
        assert_eq!([y[[0, 0]], y[[0, 2]], y[[0, 3]]], [0.0; 3]);
    }
}
