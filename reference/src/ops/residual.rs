//! Adding a branch back to the residual stream.

use super::Tensor;
use ndarray::{ArrayD, Zip};

/// `y = x + multiplier · branch`, element by element.
///
/// `multiplier` is 1 but for the families that scale their branches (Granite, MiniCPM).
pub fn residual(x: &Tensor, branch: &Tensor, multiplier: f32) -> ArrayD<f64> {
    assert_eq!(x.shape(), branch.shape(), "residual: shape of the stream against shape of the branch");
    let mut y = ArrayD::zeros(x.raw_dim());
    Zip::from(&mut y).and(x).and(branch).for_each(|y, &x, &branch| {
        *y = f64::from(x) + f64::from(multiplier) * f64::from(branch);
    });
    y
}

#[cfg(test)]
mod tests {
    use super::*;
    use ndarray::array;

    #[test]
    fn the_multiplier_scales_the_branch_and_not_the_stream() {
        let x = array![[10.0f32, 20.0]].into_dyn().into_shared();
        let branch = array![[1.0f32, 2.0]].into_dyn().into_shared();
        assert_eq!(residual(&x, &branch, 0.5), array![[10.5, 21.0]].into_dyn());
    }
}
