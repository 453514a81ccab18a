//! What an honest product gives in the 4-bit, block and declared floating-point formats.
//!
//! R is exact on the codes; the variance is that of the roundings that the declared order of sums makes.
//! A rounding of a value on a grid of `g` to units of `u > g` is not uniform but takes `u/g` equally likely
//! values, ties among them:
//!
//! ```text
//! V = u²/12 · (1 + 2 (g/u)²)        and 0 where g ≥ u: nothing is rounded
//! ```
//!
//! Where the value is known to be an odd multiple of g, as a sum is whose last term is the finest, the ties and
//! the exact ones among them are known too:
//!
//! ```text
//! V = u²/4  for g = u/2             V = u²/12 · (1 - 4 (g/u)²)  below
//! ```

use super::linear::{Element, Input, columns};
use super::{rounding, ulp};
use crate::contract::{
    BLOCK, Declared, Float, GROUP, Product, Rounding, bf16, block, image_row, int8_row, q4_row,
};
use crate::emulate::block_sums;
use spec::NonFinite;
use spec::families::Linear;

/// The largest power of two that divides `x`; infinite for 0.
fn grid(x: f64) -> f64 {
    if x == 0.0 {
        return f64::INFINITY;
    }
    let bits = x.to_bits();
    let exponent = ((bits >> 52) & 0x7ff) as i32 - 1075;
    libm::ldexp(1.0, exponent + (bits & ((1 << 52) - 1) | 1 << 52).trailing_zeros() as i32)
}

/// The variance of rounding a value of the size of `x` on a grid of `g` to units of `u`.
fn on_grid(u: f64, g: f64) -> f64 {
    if g >= u { 0.0 } else { u * u / 12.0 * (1.0 + 2.0 * (g / u).powi(2)) }
}

/// The variance of rounding an odd multiple of `g` to units of `u`.
fn off_grid(u: f64, g: f64) -> f64 {
    match g / u {
        ratio if ratio >= 1.0 => 0.0,
        0.5 => u * u / 4.0,
        ratio => u * u / 12.0 * (1.0 - 4.0 * ratio * ratio),
    }
}

/// The variance of rounding the exact `x` to f32.
fn once(x: f64) -> f64 {
    off_grid(ulp(x), grid(x))
}

/// A running sum in a format, and what its roundings add up to.
struct Sum {
    float: Float,
    rounding: Rounding,
    /// Exact, but for the mean of roundings that go down.
    value: f64,
    /// The grid that the rounded sum stands on.
    grid: f64,
    variance: f64,
    bound: f64,
}

impl Sum {
    fn new(float: Float, rounding: Rounding) -> Sum {
        Sum { float, rounding, value: 0.0, grid: f64::INFINITY, variance: 0.0, bound: 0.0 }
    }

    /// Adds an exact term, and rounds.
    fn add(&mut self, term: f64) {
        let g = grid(term);
        self.value += term;
        // The finest bit of the sum is the term's own, or one of those that the sum had.
        self.round(self.grid.min(g), g < self.grid);
    }

    /// Adds a term that was rounded before to units of its last place.
    fn add_rounded(&mut self, term: f64, variance: f64, bound: f64) {
        if variance == 0.0 {
            return self.add(term);
        }
        self.variance += variance;
        self.bound += bound;
        self.value += term;
        self.round(self.grid.min(self.float.ulp(term)), false);
    }

    /// Rounds a value on a grid of `g`; `odd` where it is known to be an odd multiple.
    fn round(&mut self, g: f64, odd: bool) {
        let u = self.float.ulp(self.value);
        if g >= u {
            self.grid = g;
            return;
        }
        self.grid = u;
        match self.rounding {
            Rounding::NearestEven => {
                self.variance += if odd { off_grid(u, g) } else { on_grid(u, g) };
                self.bound += u / 2.0;
            }
            Rounding::Floor => {
                // u/g equally likely steps from 0 to u - g.
                self.value -= (u - g) / 2.0;
                self.variance += (u * u - g * g) / 12.0;
                self.bound += u;
            }
        }
    }

    fn element(self) -> Element {
        // Errors of f32 products that become subnormal are far below; one unit covers them.
        Element {
            r: self.value,
            variance: self.variance,
            bound: self.bound * 1.000_001 + f64::from(f32::MIN_POSITIVE),
        }
    }
}

/// `acc ← acc + s · (d · i1 + m · i2)`, every operation rounded.
pub fn w4a8_columns(input: &Input, w: &Linear) -> Result<Vec<Vec<Element>>, NonFinite> {
    let rows: Vec<(Vec<i8>, Vec<f32>)> = (0..input.tokens)
        .map(|t| {
            let mut codes = vec![0i8; input.inner];
            let blocks = input.row(t).chunks(GROUP).zip(codes.chunks_mut(GROUP));
            let scales = blocks.map(|(x, codes)| int8_row(x, codes)).collect();
            (codes, scales)
        })
        .collect();
    let coded = |o: usize, _: &[f32]| q4_row(&w.weight, o, false);
    columns(input, w, coded, |t, row| {
        let mut sum = Sum::new(Float::F32, Rounding::NearestEven);
        let (codes, scales) = &rows[t];
        for (g, (a, q)) in codes.chunks(GROUP).zip(row.codes.chunks(GROUP)).enumerate() {
            let (i1, i2) = block_sums(a, q, row.offset);
            let [d, m, s] = [row.scales[g], row.zeros[g], scales[g]].map(f64::from);
            let (first, second) = (d * f64::from(i1), m * f64::from(i2));
            let inner = first + second;
            let roundings = [once(first), once(second)];
            let rounded = roundings.iter().any(|&v| v > 0.0);
            let inner_grid =
                if rounded { ulp(first).min(ulp(second)) } else { grid(first).min(grid(second)) };
            let joined = if first == 0.0 || second == 0.0 { 0.0 } else { on_grid(ulp(inner), inner_grid) };
            let scaled = if s == 1.0 || inner == 0.0 { 0.0 } else { rounding(s * inner) };
            let variance = s * s * (roundings[0] + roundings[1] + joined) + scaled;
            let bound = s * (ulp(first) + ulp(second) + ulp(inner)) / 2.0 + ulp(s * inner) / 2.0;
            sum.add_rounded(s * inner, variance, if variance > 0.0 { bound } else { 0.0 });
        }
        sum.element()
    })
}

/// `t ← t + a · w` in tiles of 32, then `acc ← acc + t`, every operation rounded.
pub fn w4a16_columns(input: &Input, w: &Linear) -> Result<Vec<Vec<Element>>, NonFinite> {
    let image = |o: usize, stored: &[f32]| image_row(&w.weight, o, stored, Product::W4A16);
    let rows: Vec<Vec<f64>> =
        (0..input.tokens).map(|t| input.row(t).iter().map(|&x| f64::from(bf16(x))).collect()).collect();
    columns(input, w, image, |t, w| {
        let mut sum = Sum::new(Float::F32, Rounding::NearestEven);
        for (x, w) in rows[t].chunks(GROUP).zip(w.chunks(GROUP)) {
            let mut tile = Sum::new(Float::F32, Rounding::NearestEven);
            x.iter().zip(w).for_each(|(x, &w)| tile.add(x * f64::from(w)));
            sum.add_rounded(tile.value, tile.variance, tile.bound);
        }
        sum.element()
    })
}

/// `acc ← acc + (exact sum of a block)`.
pub fn bfp16_columns(input: &Input, w: &Linear) -> Result<Vec<Vec<Element>>, NonFinite> {
    let blocks = |x: &[f32]| x.chunks(BLOCK).map(block).collect::<Vec<_>>();
    let rows: Vec<_> = (0..input.tokens)
        .map(|t| blocks(&input.row(t).iter().map(|&x| bf16(x)).collect::<Vec<_>>()))
        .collect();
    columns(
        input,
        w,
        |_, row: &[f32]| Ok(blocks(row)),
        |t, w| {
            let mut sum = Sum::new(Float::F32, Rounding::NearestEven);
            for ((ma, ea), (mw, ew)) in rows[t].iter().zip(w) {
                let i: i32 = ma.iter().zip(mw).map(|(&a, &w)| i32::from(a) * i32::from(w)).sum();
                let unit = libm::ldexp(1.0, i32::from(*ea) + i32::from(*ew) - 266);
                sum.add(f64::from(i) * unit);
            }
            sum.element()
        },
    )
}

/// `acc ← round(acc + Σ_tile x · w)`, then the output's rounding.
pub fn declared_columns(input: &Input, w: &Linear, d: Declared) -> Result<Vec<Vec<Element>>, NonFinite> {
    let nearest = |float: Float, x: f32| f64::from(float.round(x, Rounding::NearestEven));
    let rows: Vec<Vec<f64>> =
        (0..input.tokens).map(|t| input.row(t).iter().map(|&x| nearest(d.input, x)).collect()).collect();
    let image = |_, row: &[f32]| Ok(row.iter().map(|&w| nearest(d.weight, w)).collect::<Vec<f64>>());
    let mut all = columns(input, w, image, |t, w| {
        let mut sum = Sum::new(d.accumulator, d.rounding);
        for (x, w) in rows[t].chunks(d.tile).zip(w.chunks(d.tile)) {
            sum.add(x.iter().zip(w).map(|(x, w)| x * w).sum());
        }
        sum.element()
    })?;
    // The bias is added in f32, so the output is rounded once more wherever it is narrower than what it holds.
    if d.output < d.accumulator || d.output < Float::F32 && w.bias.is_some() {
        for element in all.iter_mut().flatten() {
            let mut output = Sum::new(d.output, d.rounding);
            output.value = element.r;
            output.round(ulp(element.r), false);
            element.r = output.value;
            element.variance += output.variance;
            element.bound += output.bound;
        }
    }
    Ok(all)
}

/// The variance of the rounding of every activation of a row.
pub fn activation_variance(row: &[f32], product: Product) -> Vec<f64> {
    let steps = |x: &[f32]| {
        let amax = x.iter().fold(0f32, |m, v| m.max(v.abs()));
        vec![(f64::from(amax) / 127.0).powi(2) / 12.0; x.len()]
    };
    let narrow = |float: Float| {
        let unit =
            move |&x: &f32| if float == Float::F32 { 0.0 } else { float.ulp(f64::from(x)).powi(2) / 12.0 };
        row.iter().map(unit).collect::<Vec<f64>>()
    };
    match product {
        Product::F32 | Product::Host | Product::Exact => vec![0.0; row.len()],
        Product::Int8 => steps(row),
        Product::W4A8 => row.chunks(GROUP).flat_map(steps).collect(),
        Product::W4A16 => narrow(Float::Bf16),
        Product::Bfp16 => row
            .chunks(BLOCK)
            .flat_map(|x| vec![libm::ldexp(1.0, i32::from(block(x).1) - 133).powi(2) / 12.0; x.len()])
            .collect(),
        Product::Declared(d) => narrow(d.input),
    }
}

/// About what the roundings of a sum of `inner` terms add to a result of `r`, where its terms are not known.
pub fn sum_variance(r: f64, inner: usize, product: Product) -> f64 {
    let roundings = |float: Float, count: usize| (float.ulp(r).powi(2) / 12.0) * count.max(1) as f64;
    match product {
        Product::F32 | Product::Host | Product::Exact => roundings(Float::F32, inner),
        Product::Int8 => roundings(Float::F32, 2),
        Product::W4A8 => roundings(Float::F32, 4 * inner.div_ceil(GROUP)),
        Product::W4A16 => roundings(Float::F32, inner),
        Product::Bfp16 => roundings(Float::F32, inner.div_ceil(BLOCK)),
        Product::Declared(d) => roundings(d.accumulator, inner.div_ceil(d.tile)) + roundings(d.output, 1),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn grids() {
        assert_eq!([1.0, 3.0, 0.75, -40.0].map(grid), [1.0, 1.0, 0.25, 8.0]);
        assert_eq!(grid(0.0), f64::INFINITY);
    }

    // Halves to whole numbers, ties to even: -1/2, 0, 1/2, 0 in equal shares: a mean square of 1/8.
    // Quarters: 0, ±1/4, ±1/2 with shares 1/4, 1/2, 1/4: (1/16 · 1/2 + 1/4 · 1/4) = 3/32.
    #[test]
    fn coarse_grids_round_further() {
        assert!((on_grid(1.0, 0.5) - 1.0 / 8.0).abs() < 1e-15);
        assert!((on_grid(1.0, 0.25) - 3.0 / 32.0).abs() < 1e-15);
        assert_eq!(on_grid(1.0, 1.0), 0.0);
    }

    // Odd halves are ties, half a unit off. Odd quarters are a quarter off: 1/16. Odd eighths are 1/8 or 3/8
    // off: (1/64 + 9/64)/2 = 5/64.
    #[test]
    fn odd_multiples_round_as_counted() {
        assert_eq!([0.5, 0.25].map(|g| off_grid(1.0, g)), [0.25, 1.0 / 16.0]);
        assert!((off_grid(1.0, 0.125) - 5.0 / 64.0).abs() < 1e-15);
    }

    // 2^24 + 1 is half way between two f32: it is off by 1 whichever way it goes. 3 + 4 rounds nothing.
    #[test]
    fn a_sum_rounds_only_what_does_not_fit() {
        let mut sum = Sum::new(Float::F32, Rounding::NearestEven);
        sum.add(3.0);
        sum.add(4.0);
        assert_eq!((sum.value, sum.variance), (7.0, 0.0));
        let mut sum = Sum::new(Float::F32, Rounding::NearestEven);
        sum.add(16_777_216.0);
        sum.add(1.0);
        assert_eq!(sum.variance, 1.0);
    }

    /// Rms and mean of z of honest products under a contract, on rows whose values span 28 powers of two.
    fn spread_of(product: Product) -> (f64, f64, usize) {
        let (tokens, inner, out) = (48, 320, if product == Product::Bfp16 { 5000 } else { 2100 });
        let mut random = fixtures::random::SplitMix64::new(11);
        let mut x = Vec::with_capacity(tokens * inner);
        for n in 0..tokens * inner {
            let size = if n % 3 == 0 { libm::exp2(28.0 * random.uniform() - 14.0) } else { 1.0 };
            x.push((random.normal() * size) as f32);
        }
        let w: Vec<f32> = (0..out * inner).map(|_| random.normal() as f32).collect();
        let x = reference::Tensor::from_shape_vec(ndarray::IxDyn(&[tokens, inner]), x).unwrap();
        let w = Linear { weight: spec::Matrix::from_values("w", out, inner, w), bias: None };
        let honest = crate::emulate::product(&x, &w, product).unwrap();
        let bounded = crate::variance::Bounded::exact(x);
        let expected =
            super::super::linear::expect(&bounded, &w, product, crate::variance::Truth::Image).unwrap();
        let (mut count, mut sum, mut squares) = (0, 0.0, 0.0);
        for ((&y, &r), (&v, &b)) in
            honest.iter().zip(&expected.r).zip(expected.variance.iter().zip(&expected.bound))
        {
            let difference = f64::from(y) - r;
            assert!(difference.abs() <= 1.000_001 * b, "{product:?}: {y} against {r} within {b}");
            if v > 0.0 {
                (count, sum, squares) =
                    (count + 1, sum + difference / v.sqrt(), squares + difference * difference / v);
            }
        }
        ((squares / count as f64).sqrt(), sum / count as f64, count)
    }

    #[test]
    fn honest_products_spread_as_declared() {
        let declared = |accumulator, rounding, tile| {
            let (input, weight, output) = (Float::Bf16, Float::Bf16, Float::Bf16);
            Product::Declared(Declared { input, weight, accumulator, tile, rounding, output })
        };
        let all = [
            Product::W4A8,
            Product::W4A16,
            Product::Bfp16,
            declared(Float::F32, Rounding::NearestEven, 64),
            declared(Float::Bf16, Rounding::NearestEven, 64),
            declared(Float::Bf16, Rounding::Floor, 64),
        ];
        let mut off = Vec::new();
        for product in all {
            let (rms, mean, count) = spread_of(product);
            println!("{product:?}: rms z {rms:.4}, mean z {mean:.4} over {count}");
            if count < 100_000 || !(0.95..=1.1).contains(&rms) || mean.abs() > 0.05 {
                off.push((product, rms, mean, count));
            }
        }
        assert!(off.is_empty(), "{off:?}");
    }
}
