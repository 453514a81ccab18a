//! The product of two rows, element by element.

use super::Tensor;
use ndarray::{ArrayD, Zip};

/// `y = a · b`, element by element. Exact in f64.
pub fn multiply(a: &Tensor, b: &Tensor) -> ArrayD<f64> {
    assert_eq!(a.shape(), b.shape(), "multiply: shape of a against shape of b");
    let mut y = ArrayD::zeros(a.raw_dim());
    Zip::from(&mut y).and(a).and(b).for_each(|y, &a, &b| *y = f64::from(a) * f64::from(b));
    y
}

#[cfg(test)]
mod tests {
    use super::*;
    use ndarray::array;

    #[test]
    fn element_by_element() {
        let a = array![[2.0f32, 3.0], [5.0, 7.0]].into_dyn().into_shared();
        let b = array![[10.0f32, 100.0], [-1.0, 0.5]].into_dyn().into_shared();
        assert_eq!(multiply(&a, &b), array![[20.0, 300.0], [-5.0, 3.5]].into_dyn());
    }
}
