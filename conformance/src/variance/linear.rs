//! What an honest matrix product gives, for each declared arithmetic.

use super::quantised;
use super::{Bounded, Expected, MEAN_ROUNDING, Truth, U, rounding, ulp};
use crate::contract::{Product, decoded_image, int8_image, int8_row};
use ndarray::{Array2, ArrayD};
use rayon::prelude::*;
use spec::NonFinite;
use spec::families::Linear;

/// Expectation at a linear site.
///
/// - f32: `V = u²·0.18·(Σ p² + Σ s²) + ulp(R)²/12` over products p and partial sums s (the last of
///   which is the result): unfused, left to right.
/// - host: sums in any order, so a bound rather than a model.
/// - int8 with known input: `R = Σ ca·cw · sA · sW` on the codes, and only the two f32 roundings
///   remain. The other formats likewise: R on the codes, and the roundings of the declared sums.
/// - With an input that carries error, or judged with the package's weights, the rounding of the
///   activations and of the weights joins, see `spread_columns`.
///
/// The input's own variance joins as `Σ w² · V_x`. A bias adds one rounding.
pub fn expect(x: &Bounded, w: &Linear, product: Product, truth: Truth) -> Result<Expected, NonFinite> {
    let tokens = x.value.shape()[0];
    let inner = w.weight.inner();
    let flat: Vec<f32> = x.value.iter().copied().collect();
    assert_eq!(
        flat.len(),
        tokens * inner,
        "linear: row length of x against row length of {}",
        w.weight.name()
    );
    let input = Input { flat: &flat, tokens, inner, x };
    let columns = match product {
        Product::F32 => f32_columns(&input, w)?,
        Product::Host => host_columns(&input, w)?,
        _ if truth == Truth::Package || x.variance.is_some() => spread_columns(&input, w, product, truth)?,
        Product::Int8 => int8_columns(&input, w)?,
        Product::W4A8 => quantised::w4a8_columns(&input, w)?,
        Product::W4A16 => quantised::w4a16_columns(&input, w)?,
        Product::Bfp16 => quantised::bfp16_columns(&input, w)?,
        Product::Declared(declared) => quantised::declared_columns(&input, w, declared)?,
    };
    let out = w.weight.out();
    let gather = |part: fn(&Element) -> f64| -> ArrayD<f64> {
        Array2::from_shape_fn((tokens, out), |(t, o)| part(&columns[o][t])).into_dyn()
    };
    Ok(Expected {
        r: gather(|e| e.r),
        variance: gather(|e| e.variance),
        bound: gather(|e| e.bound),
        calibrated: product != Product::Host,
    })
}

pub(super) struct Input<'a> {
    pub flat: &'a [f32],
    pub tokens: usize,
    pub inner: usize,
    x: &'a Bounded,
}

impl Input<'_> {
    pub fn row(&self, t: usize) -> &[f32] {
        &self.flat[t * self.inner..][..self.inner]
    }

    /// `Σ_i w[i]² · V_x[t, i]`
    fn carried(&self, t: usize, w: &[f32]) -> f64 {
        if self.x.variance.is_none() {
            return 0.0;
        }
        (0..self.inner).map(|i| f64::from(w[i]).powi(2) * self.x.variance_at(t * self.inner + i)).sum()
    }
}

#[derive(Clone, Copy)]
pub(super) struct Element {
    pub r: f64,
    pub variance: f64,
    pub bound: f64,
}

impl Element {
    /// The same with a bias added in f32, and the input's error carried along.
    fn finish(mut self, bias: Option<f32>, carried: f64) -> Element {
        if let Some(bias) = bias {
            self.r += f64::from(bias);
            self.variance += rounding(self.r);
            self.bound += ulp(self.r);
        }
        self.variance += carried;
        self.bound += 12.0 * carried.sqrt();
        self
    }
}

/// One column of elements an output, computed in parallel over outputs.
pub(super) fn columns(
    input: &Input,
    w: &Linear,
    element: impl Fn(usize, usize, &[f32]) -> Element + Sync,
) -> Result<Vec<Vec<Element>>, NonFinite> {
    (0..w.weight.out())
        .into_par_iter()
        .map(|o| {
            let mut row = vec![0f32; input.inner];
            w.weight.decode(o, &mut row)?;
            let bias = w.bias.as_ref().map(|b| b[o]);
            Ok((0..input.tokens).map(|t| element(t, o, &row).finish(bias, input.carried(t, &row))).collect())
        })
        .collect()
}

fn f32_columns(input: &Input, w: &Linear) -> Result<Vec<Vec<Element>>, NonFinite> {
    columns(input, w, |t, _, w| {
        let (mut sum, mut squares, mut size, mut roundings) = (0f64, 0f64, 0f64, 0usize);
        for (&x, &w) in input.row(t).iter().zip(w) {
            let product = f64::from(x) * f64::from(w);
            // A product that f32 holds is not rounded, nor is a sum that did not change.
            if product as f32 as f64 != product {
                squares += product * product;
                size += product.abs();
            }
            let before = sum;
            sum += product;
            if before != 0.0 && product != 0.0 {
                squares += sum * sum;
                size += sum.abs();
                roundings += 1;
            }
        }
        let last = if roundings > 0 { rounding(sum) - MEAN_ROUNDING * U * U * sum * sum } else { 0.0 };
        let variance = (MEAN_ROUNDING * U * U * squares + last).max(0.0);
        Element { r: sum, variance, bound: 1.5 * U * size + ulp(sum) }
    })
}

/// Sums in any order: off by at most `u · in · Σ |p|`.
fn host_columns(input: &Input, w: &Linear) -> Result<Vec<Vec<Element>>, NonFinite> {
    columns(input, w, |t, _, w| {
        let (mut sum, mut size) = (0f64, 0f64);
        for (&x, &w) in input.row(t).iter().zip(w) {
            sum += f64::from(x) * f64::from(w);
            size += (f64::from(x) * f64::from(w)).abs();
        }
        let bound = U * (input.inner as f64 + 1.0) * size;
        Element { r: sum, variance: bound * bound / 3.0, bound }
    })
}

fn int8_columns(input: &Input, w: &Linear) -> Result<Vec<Vec<Element>>, NonFinite> {
    let image = int8_image(&w.weight)?;
    let mut codes = vec![0i8; input.flat.len()];
    let scales: Vec<f32> = (0..input.tokens)
        .map(|t| int8_row(input.row(t), &mut codes[t * input.inner..][..input.inner]))
        .collect();
    columns(input, w, |t, o, _| {
        let (a, w) =
            (&codes[t * input.inner..][..input.inner], &image.codes[o * input.inner..][..input.inner]);
        // Exact in i32 up to 133144 inputs, and summed in vectors.
        let count: i32 = a.iter().zip(w).map(|(&a, &w)| i32::from(a) * i32::from(w)).sum();
        let (sa, sw) = (f64::from(scales[t]), f64::from(image.scales[o]));
        let count = f64::from(count);
        let r = count * sa * sw;
        // f32(C), then · sA, then · sW; an integer below 2^24 is not rounded, nor is 0.
        let counted = if count as f32 as f64 == count { 0.0 } else { rounding(count) };
        let (variance, bound) = if count == 0.0 {
            (0.0, 0.0)
        } else {
            let variance = counted * (sa * sw).powi(2) + rounding(count * sa) * sw * sw + rounding(r);
            (variance, ulp(count * sa) * sw + ulp(r) + if counted > 0.0 { ulp(count) * sa * sw } else { 0.0 })
        };
        Element { r, variance, bound }
    })
}

/// Where the activations' codes are not known their rounding is part of the spread, and the weights'
/// where the truth is the package:
///
/// ```text
/// V = Σ w² · V_code(x) + Σ x² · (w_image - w)²
/// ```
fn spread_columns(
    input: &Input,
    w: &Linear,
    product: Product,
    truth: Truth,
) -> Result<Vec<Vec<Element>>, NonFinite> {
    let image = decoded_image(&w.weight, product)?;
    let rounding_of: Vec<Vec<f64>> =
        (0..input.tokens).map(|t| quantised::activation_variance(input.row(t), product)).collect();
    columns(input, w, |t, o, stored| {
        let image = &image[o * input.inner..][..input.inner];
        let (mut r, mut variance) = (0f64, 0f64);
        for i in 0..input.inner {
            let x = f64::from(input.row(t)[i]);
            let w = if truth == Truth::Image { image[i] } else { f64::from(stored[i]) };
            r += x * w;
            variance += w * w * rounding_of[t][i] + (x * (image[i] - w)).powi(2);
        }
        variance += quantised::sum_variance(r, input.inner, product);
        Element { r, variance, bound: 12.0 * variance.sqrt() + ulp(r) }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use ndarray::array;
    use spec::Matrix;

    fn exact(x: Array2<f32>) -> Bounded {
        Bounded::exact(x.into_dyn().into_shared())
    }

    // Codes: amax 127 → sA = 1, codes 127 and 2; weights row (127, 64): scale 1, codes the same.
    // C = 127·127 + 2·64 = 16257, R = 16257.
    #[test]
    fn int8_counts_codes() {
        let w = Linear { weight: Matrix::from_values("w", 1, 2, vec![127.0, 64.0]), bias: None };
        let e = expect(&exact(array![[127.0, 2.0]]), &w, Product::Int8, Truth::Image).unwrap();
        assert_eq!(e.r[[0, 0]], 16257.0);
        // two roundings at 16257, whose unit in the last place is 2^-10
        assert_eq!(e.variance[[0, 0]], 2.0 * 2f64.powi(-20) / 12.0);
    }

    // 3 · 5 is exact and nothing is added to it: an honest f32 subject is exact too.
    #[test]
    fn one_exact_product_has_no_variance() {
        let w = Linear { weight: Matrix::from_values("w", 1, 2, vec![5.0, 7.0]), bias: None };
        let e = expect(&exact(array![[3.0, 0.0]]), &w, Product::F32, Truth::Image).unwrap();
        assert_eq!((e.r[[0, 0]], e.variance[[0, 0]]), (15.0, 0.0));
    }

    // Variances 1 and 4 on the inputs, weights 2 and 3: 4·1 + 9·4 = 40.
    #[test]
    fn input_errors_are_carried() {
        let w = Linear { weight: Matrix::from_values("w", 1, 2, vec![2.0, 3.0]), bias: None };
        let mut x = exact(array![[1.0, 1.0]]);
        x.variance = Some(array![[1.0, 4.0]].into_dyn().into_shared());
        let e = expect(&x, &w, Product::F32, Truth::Image).unwrap();
        assert!((e.variance[[0, 0]] - 40.0).abs() < 1e-9);
    }
}
