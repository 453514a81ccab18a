//! Multiplication by one number.

use super::Tensor;
use ndarray::ArrayD;

/// `y = x · factor`, element by element.
pub fn scale(x: &Tensor, factor: f32) -> ArrayD<f64> {
    x.mapv(|x| f64::from(x) * f64::from(factor))
}

#[cfg(test)]
mod tests {
    use super::*;
    use ndarray::array;

    #[test]
    fn multiplies_and_does_not_divide() {
        let x = array![[5.0f32, -10.0]].into_dyn().into_shared();
        assert_eq!(scale(&x, 2.5), array![[12.5, -25.0]].into_dyn());
    }
}
