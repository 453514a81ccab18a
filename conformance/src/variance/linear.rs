//! What an honest matrix product gives, for each declared arithmetic.

use super::quantised;
use super::{Bounded, Expected, MEAN_ROUNDING, Truth, U, rounding, ulp};
use crate::contract::{Product, image_row, int8_dot, int8_row, int8_weights};
use multiversion::multiversion;
use ndarray::{Array2, ArrayD, Axis};
use rayon::prelude::*;
use reference::products::Blocks;
use spec::NonFinite;
use spec::families::Linear;

/// Expectation at a linear site.
///
/// - f32: `V = u²·0.18·(Σ p² + Σ s²) + ulp(R)²/12` over products p and partial sums s (the last of
///   which is the result): unfused, left to right.
/// - host: sums in any order, so a bound rather than a model. (Exact products are expected without any spread
///   before they come here.)
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
        Product::Host | Product::Exact => host_columns(&input, w)?,
        _ if truth == Truth::Package || x.variance.is_some() => spread_columns(&input, w, product, truth)?,
        Product::Int8 => int8_columns(&input, w)?,
        Product::W4A8 => quantised::w4a8_columns(&input, w)?,
        Product::W4A16 => quantised::w4a16_columns(&input, w)?,
        Product::Bfp16 => quantised::bfp16_columns(&input, w)?,
        Product::Declared(declared) => quantised::declared_columns(&input, w, declared)?,
    };
    let out = w.weight.out();
    let gather = |part: fn(&Element) -> f64| -> ArrayD<f64> {
        let mut all = Array2::<f64>::zeros((tokens, out));
        all.axis_iter_mut(Axis(0)).into_par_iter().enumerate().for_each(|(t, mut row)| {
            row.iter_mut().zip(&columns).for_each(|(value, column)| *value = part(&column[t]));
        });
        all.into_dyn()
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
///
/// `image` is what an element needs of the weight row: it is made of the stored row once for all tokens.
pub(super) fn columns<W>(
    input: &Input,
    w: &Linear,
    image: impl Fn(usize, &[f32]) -> Result<W, NonFinite> + Sync,
    element: impl Fn(usize, &W) -> Element + Sync,
) -> Result<Vec<Vec<Element>>, NonFinite> {
    (0..w.weight.out())
        .into_par_iter()
        .map_init(
            || vec![0f32; input.inner],
            |row, o| {
                w.weight.decode(o, row)?;
                let bias = w.bias.as_ref().map(|b| b[o]);
                let image = image(o, row)?;
                Ok((0..input.tokens)
                    .map(|t| element(t, &image).finish(bias, input.carried(t, row)))
                    .collect())
            },
        )
        .collect()
}

fn f32_columns(input: &Input, w: &Linear) -> Result<Vec<Vec<Element>>, NonFinite> {
    let side = |first: usize, i: usize| -> Side {
        std::array::from_fn(|t| match first + t {
            t if t < input.tokens => f64::from(input.row(t)[i]),
            _ => 0.0,
        })
    };
    let blocks: Vec<Vec<Side>> = (0..input.tokens)
        .step_by(SIDE_BY_SIDE)
        .map(|first| (0..input.inner).map(|i| side(first, i)).collect())
        .collect();
    let sums = |_, row: &[f32]| Ok(blocks.iter().map(|x| f32_sums(x, row)).collect::<Vec<_>>());
    columns(input, w, sums, |t, sums| {
        let [sum, squares, size, rounded] = sums[t / SIDE_BY_SIDE].map(|side| side[t % SIDE_BY_SIDE]);
        let last = if rounded > 0.0 { rounding(sum) - MEAN_ROUNDING * U * U * sum * sum } else { 0.0 };
        let variance = (MEAN_ROUNDING * U * U * squares + last).max(0.0);
        Element { r: sum, variance, bound: 1.5 * U * size + ulp(sum) }
    })
}

/// Token rows whose sums run side by side.
const SIDE_BY_SIDE: usize = 8;

/// A value of each of eight token rows.
type Side = [f64; SIDE_BY_SIDE];

/// Of eight token rows and a weight row: the sum of the products, left to right; the squares and the sizes of
/// all that f32 arithmetic rounds on the way; and 1 where a sum was rounded at all.
#[multiversion(targets("x86_64+avx512f+avx512bw+avx512dq+avx512vl+avx2", "x86_64+avx2"))]
fn f32_sums(x: &[Side], w: &[f32]) -> [Side; 4] {
    let [mut sum, mut squares, mut size, mut rounded] = [[0.0; SIDE_BY_SIDE]; 4];
    for (x, &w) in x.iter().zip(w) {
        let w = f64::from(w);
        for t in 0..SIDE_BY_SIDE {
            let product = x[t] * w;
            // A product that f32 holds is not rounded, nor is a sum that did not change.
            let off = if f64::from(product as f32) == product { 0.0 } else { product };
            let adds = (sum[t] != 0.0) & (product != 0.0);
            sum[t] += product;
            let partial = if adds { sum[t] } else { 0.0 };
            squares[t] = squares[t] + off * off + partial * partial;
            size[t] = size[t] + off.abs() + partial.abs();
            rounded[t] = if adds { 1.0 } else { rounded[t] };
        }
    }
    [sum, squares, size, rounded]
}

/// Sums in any order: off by at most `u · in · Σ |p|`.
fn host_columns(input: &Input, w: &Linear) -> Result<Vec<Vec<Element>>, NonFinite> {
    let stored = |_, row: &[f32]| Ok(row.to_vec());
    columns(input, w, stored, |t, w| {
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
    let mut codes = vec![0i8; input.flat.len()];
    let scales: Vec<f32> = (0..input.tokens)
        .map(|t| int8_row(input.row(t), &mut codes[t * input.inner..][..input.inner]))
        .collect();
    let image = |_, row: &[f32]| {
        let mut codes = vec![0i8; row.len()];
        let scale = int8_weights(row, &mut codes);
        Ok((codes, scale))
    };
    columns(input, w, image, |t, (image, scale)| {
        let count = int8_dot(&codes[t * input.inner..][..input.inner], image);
        let (sa, sw) = (f64::from(scales[t]), f64::from(*scale));
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

/// Outputs whose sums are made together, so that a thread holds few rows at a time.
const OUTPUTS_A_TASK: usize = 16;

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
    let (tokens, inner) = (input.tokens, input.inner);
    let rounding_of: Vec<Vec<f64>> =
        (0..tokens).map(|t| quantised::activation_variance(input.row(t), product)).collect();
    let values = Blocks::new(tokens, inner, |t, i| f64::from(input.row(t)[i]));
    let squares = Blocks::new(tokens, inner, |t, i| f64::from(input.row(t)[i]).powi(2));
    let rounded = Blocks::new(tokens, inner, |t, i| rounding_of[t][i]);
    let inherited = Blocks::new(tokens, inner, |t, i| input.x.variance_at(t * inner + i));
    let square = |row: &[f64]| row.iter().map(|w| w * w).collect::<Vec<f64>>();
    let starts: Vec<usize> = (0..w.weight.out()).step_by(OUTPUTS_A_TASK).collect();
    let tasks = starts.into_par_iter().map(|start| {
        let outputs = start..(start + OUTPUTS_A_TASK).min(w.weight.out());
        let (mut stored, mut image) = (Vec::new(), Vec::new());
        let mut row = vec![0f32; inner];
        for o in outputs.clone() {
            w.weight.decode(o, &mut row)?;
            stored.extend(row.iter().map(|&w| f64::from(w)));
            image.extend(image_row(&w.weight, o, &row, product)?.into_iter().map(f64::from));
        }
        let weights = if truth == Truth::Image { &image } else { &stored };
        let products = |x: &Blocks, w: &[f64]| {
            let mut y = vec![0f64; outputs.len() * tokens];
            x.products(w, &mut y);
            y
        };
        let r = products(&values, weights);
        let mut variance = products(&rounded, &square(weights));
        if truth == Truth::Package {
            let off: Vec<f64> = image.iter().zip(&stored).map(|(image, w)| image - w).collect();
            let of_weights = products(&squares, &square(&off));
            variance.iter_mut().zip(of_weights).for_each(|(v, of_weights)| *v += of_weights);
        }
        let carried = match input.x.variance {
            Some(_) => products(&inherited, &square(&stored)),
            None => vec![0.0; r.len()],
        };
        let element = |n: usize| {
            let variance = variance[n] + quantised::sum_variance(r[n], inner, product);
            Element { r: r[n], variance, bound: 12.0 * variance.sqrt() + ulp(r[n]) }
        };
        let column = |at: usize| {
            let bias = w.bias.as_ref().map(|b| b[start + at]);
            (at * tokens..(at + 1) * tokens).map(|n| element(n).finish(bias, carried[n])).collect()
        };
        Ok((0..outputs.len()).map(column).collect())
    });
    Ok(tasks.collect::<Result<Vec<Vec<Vec<Element>>>, NonFinite>>()?.concat())
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
