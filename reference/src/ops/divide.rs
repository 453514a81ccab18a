//! Division by a number of the config.

use super::Tensor;
use ndarray::ArrayD;

/// `y = x / divisor`, element by element.
///
/// Granite divides its logits so, MiniCPM the row before the head.
pub fn divide(x: &Tensor, divisor: f32) -> ArrayD<f64> {
    x.mapv(|v| f64::from(v) / f64::from(divisor)).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use ndarray::array;

    #[test]
    fn divides_and_does_not_multiply() {
        let x = array![[5.0f32, -10.0]].into_dyn().into_shared();
        assert_eq!(divide(&x, 2.5), array![[2.0, -4.0]].into_dyn());
    }
}
