//! The soft cap of logits.

use super::Tensor;
use ndarray::ArrayD;

/// Bends every value smoothly into (-cap, cap).
///
/// ```text
/// y = cap · tanh(x / cap)
/// ```
///
/// Shaped like `x`; near 0 it changes nothing. The order of values stays, so the largest logit too.
///
/// Source: arXiv 2408.00118, section 2.
pub fn softcap(x: &Tensor, cap: f64) -> ArrayD<f64> {
    x.mapv(|x| cap * libm::tanh(f64::from(x) / cap))
}

#[cfg(test)]
mod tests {
    use super::*;
    use approx::assert_relative_eq;
    use ndarray::array;

    // 2 · tanh(3/2) = 1.810297, 2 · tanh(-1/2) = -0.924234; tanh(2·3)/2 would be 0.499994.
    #[test]
    fn divides_before_and_multiplies_after() {
        let y = softcap(&array![[3.0f32, -1.0]].into_dyn().into_shared(), 2.0);
        assert_relative_eq!(y[[0, 0]], 1.810_296_5, max_relative = 1e-6);
        assert_relative_eq!(y[[0, 1]], -0.924_234_3, max_relative = 1e-6);
    }

    #[test]
    fn the_largest_values_reach_the_cap_and_no_further() {
        let y = softcap(&array![[f32::MAX, 0.0]].into_dyn().into_shared(), 30.0);
        assert_eq!(y, array![[30.0, 0.0]].into_dyn());
    }
}
