//! Statistics of tensors, and of the difference of two.
//!
//! Values are walked in blocks that stay in the first-level cache, with one small loop per statistic:
//! the compiler vectorises each of them, which it does not do for one loop that computes them all. Sums
//! have a fixed number of lanes, so a result does not depend on the machine or on threads.

mod compare;
mod part;

use multiversion::multiversion;
use multiversion::target::target_cfg_f;

pub use compare::{Comparer, Comparison, ULP_BUCKETS, compare};

/// Statistics of one tensor.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Tensor {
    /// Number of values.
    pub elements: u64,
    /// `sqrt(mean(x²))` over the finite values, 0 where there are none.
    pub rms: f64,
    /// Smallest finite value, 0 where there is none.
    pub min: f32,
    /// Largest finite value, 0 where there is none.
    pub max: f32,
    /// How many values are NaN or infinite.
    pub non_finite: u64,
}

const LANES: usize = 16;

const BLOCK: usize = 1024;

/// Bits of an infinity. The magnitude of every finite value has smaller bits, that of NaN larger ones.
const INFINITY: u32 = 0x7f80_0000;

/// The bits of an f32 without its sign.
const MAGNITUDE: u32 = 0x7fff_ffff;

/// Statistics of `values`.
#[multiversion(targets("x86_64+avx512f+avx512bw+avx512dq+avx512vl+avx2+fma", "x86_64+avx2+fma"))]
pub fn tensor(values: &[f32]) -> Tensor {
    const FUSED: bool = target_cfg_f!(target_feature = "fma");
    let mut squares = 0.0;
    let (mut min, mut max) = (f32::INFINITY, f32::NEG_INFINITY);
    let mut non_finite = 0;
    let mut clean = Vec::new();
    for mut block in values.chunks(BLOCK) {
        if largest_bits(block) >= INFINITY {
            clean.clear();
            clean.extend(block.iter().copied().filter(|v| v.is_finite()));
            non_finite += (block.len() - clean.len()) as u64;
            block = &clean;
        }
        squares += dot::<FUSED>(block, block);
        min = min.min(fold(block, f32::INFINITY, |m, v| if v < m { v } else { m }));
        max = max.max(fold(block, f32::NEG_INFINITY, |m, v| if v > m { v } else { m }));
    }
    let elements = values.len() as u64;
    let finite = elements - non_finite;
    if finite == 0 {
        return Tensor { elements, rms: 0.0, min: 0.0, max: 0.0, non_finite };
    }
    Tensor { elements, rms: (squares / finite as f64).sqrt(), min, max, non_finite }
}

/// Index of the largest value, the smallest such index on a tie; NaN never wins. 0 for an empty row.
pub fn argmax(row: &[f32]) -> usize {
    let mut best = 0;
    for (i, v) in row.iter().enumerate() {
        if *v > row[best] || row[best].is_nan() && !v.is_nan() {
            best = i;
        }
    }
    best
}

/// The bits of the largest magnitude, 0 for an empty block. As integers, because that maximum vectorises
/// and lets NaN and infinity win.
#[inline(always)]
fn largest_bits(block: &[f32]) -> u32 {
    block.iter().map(|v| (v.to_bits() & MAGNITUDE) as i32).fold(0, i32::max) as u32
}

/// Folds with `pick`, which must not depend on the order.
#[inline(always)]
fn fold(block: &[f32], start: f32, pick: impl Fn(f32, f32) -> f32) -> f32 {
    let mut lanes = [start; LANES];
    let (rows, tail) = block.as_chunks::<LANES>();
    for row in rows {
        for i in 0..LANES {
            lanes[i] = pick(lanes[i], row[i]);
        }
    }
    lanes.iter().chain(tail).fold(start, |m, &v| pick(m, v))
}

/// `Σ a[i]·b[i]` in f64: sixteen sums side by side, then those and the rest from left to right.
#[inline(always)]
fn dot<const FUSED: bool>(a: &[f32], b: &[f32]) -> f64 {
    let mut lanes = [0f64; LANES];
    let (a_rows, a_tail) = a.as_chunks::<LANES>();
    let (b_rows, b_tail) = b.as_chunks::<LANES>();
    for (a, b) in a_rows.iter().zip(b_rows) {
        for i in 0..LANES {
            lanes[i] = add_product::<FUSED>(lanes[i], f64::from(a[i]), f64::from(b[i]));
        }
    }
    let tail: f64 = a_tail.iter().zip(b_tail).map(|(&a, &b)| f64::from(a) * f64::from(b)).sum();
    lanes.iter().sum::<f64>() + tail
}

/// `sum + a · b`; the product of two f32 is exact in f64, so that both ways give the same bits.
#[inline(always)]
fn add_product<const FUSED: bool>(sum: f64, a: f64, b: f64) -> f64 {
    if FUSED { a.mul_add(b, sum) } else { sum + a * b }
}

#[cfg(test)]
mod tests {
    use super::*;

    // 3² + 4² = 25, mean 12.5, root 3.5355339
    #[test]
    fn three_four_five() {
        let t = tensor(&[3.0, -4.0]);
        assert!((t.rms - 3.535_533_9).abs() < 1e-7);
        assert_eq!((t.min, t.max, t.elements, t.non_finite), (-4.0, 3.0, 2, 0));
    }

    // Every block, lane and tail counts: 2049 ones but for one value in each place of interest.
    #[test]
    fn no_value_is_skipped() {
        for at in [0, 15, 16, 1007, 1023, 1024, 2047, 2048] {
            let mut values = vec![1.0f32; 2049];
            values[at] = -3.0;
            let t = tensor(&values);
            assert_eq!((t.min, t.max), (-3.0, 1.0), "{at}");
            assert_eq!(t.rms, ((2048.0 + 9.0) / 2049f64).sqrt(), "{at}");
        }
    }

    #[test]
    fn what_is_not_finite_is_counted_and_left_out() {
        let t = tensor(&[f32::NAN, 2.0, f32::NEG_INFINITY, -2.0]);
        assert_eq!((t.rms, t.min, t.max, t.non_finite), (2.0, -2.0, 2.0, 2));
        let none = Tensor { elements: 1, rms: 0.0, min: 0.0, max: 0.0, non_finite: 1 };
        assert_eq!(tensor(&[f32::NAN]), none);
        assert_eq!(tensor(&[]), Tensor { elements: 0, non_finite: 0, ..none });
    }

    #[test]
    fn argmax_takes_the_first_and_never_nan() {
        assert_eq!(argmax(&[1.0, 3.0, 3.0]), 1);
        assert_eq!(argmax(&[f32::NAN, f32::NEG_INFINITY, -1.0]), 2);
        assert_eq!(argmax(&[]), 0);
    }
}
