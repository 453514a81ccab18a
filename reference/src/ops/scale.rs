//! Multiplication by a number of the config.

use super::Tensor;
use ndarray::ArrayD;

/// `y = x · factor`, element by element.
///
/// Granite and MiniCPM scale the embedding so; Granite divides its logits (factor 1 / divisor), MiniCPM the
/// row before the head. The factor is f64: a divisor's reciprocal costs no accuracy that f32 could show.
pub fn scale(x: &Tensor, factor: f64) -> ArrayD<f64> {
    x.mapv(|v| f64::from(v) * factor)
}

#[cfg(test)]
mod tests {
    use super::*;
    use ndarray::array;

    #[test]
    fn every_element_is_multiplied() {
        let x = array![[5.0f32, -10.0]].into_dyn().into_shared();
        assert_eq!(scale(&x, 0.5), array![[2.5, -5.0]].into_dyn());
    }
}
