//! Rotary position embeddings.

use super::{Table, Tensor, rows};
use ndarray::{Array2, Array3, ArrayView2};
use spec::{Pairing, Rope, rope::Scaling};
use std::f64::consts::PI;

/// `inv_freq[i]` for every pair of a head, rounded to f32 as the frameworks hold it.
///
/// ```text
/// inv_freq[i] = θ^(-2i / R)                      R the rotated width
/// linear:       inv / factor
/// llama3:       with wavelength λ = 2π / inv and L the original context:
///               λ < L / high → inv;  λ > L / low → inv / factor;
///               between: s = (L/λ - low) / (high - low), inv · (s + (1 - s) / factor)
/// yarn:         ramp[i] = clip((i - lo) / (hi - lo), 0, 1),
///               inv · (1 - ramp) + inv / factor · ramp
/// longrope:     inv / short[i] while the sequence fits the original context, else inv / long[i]
/// proportional: the first n pairs θ^(-2i / head_dim) / factor, the others 0
/// ```
///
/// `length` is the largest position in use plus one; only longrope depends on it.
///
/// Source: arXiv 2104.09864 (rope), 2309.00071 (yarn), 2402.13753 (longrope); Llama 3.1's model card.
pub fn inverse_frequencies(rope: &Rope, length: usize) -> Vec<f32> {
    let pairs = rope.rotary_dim / 2;
    let base = |i: usize| rope.theta.powf_portable(-2.0 * i as f64 / rope.rotary_dim as f64);
    let frequency = |i: usize| match &rope.scaling {
        Scaling::Default => base(i),
        Scaling::Linear { factor } => base(i) / factor,
        Scaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_max_position_embeddings } => {
            let (inv, original) = (base(i), *original_max_position_embeddings as f64);
            let wavelength = 2.0 * PI / inv;
            if wavelength < original / high_freq_factor {
                inv
            } else if wavelength > original / low_freq_factor {
                inv / factor
            } else {
                let s = (original / wavelength - low_freq_factor) / (high_freq_factor - low_freq_factor);
                inv * (s + (1.0 - s) / factor)
            }
        }
        Scaling::Yarn { factor, .. } => {
            let (lo, hi) = yarn_range(rope);
            let ramp = ((i as f64 - lo) / (hi - lo)).clamp(0.0, 1.0);
            base(i) * (1.0 - ramp) + base(i) / factor * ramp
        }
        Scaling::LongRope { short_factor, long_factor, original_max_position_embeddings, .. } => {
            let fits = length <= *original_max_position_embeddings;
            base(i) / if fits { short_factor[i] } else { long_factor[i] }
        }
        Scaling::Proportional { rotating, factor } if i < *rotating => base(i) / factor,
        Scaling::Proportional { .. } => 0.0,
    };
    (0..pairs).map(|i| frequency(i) as f32).collect()
}

/// The dimensions between which YaRN's ramp rises: where `beta_fast` and `beta_slow` turns fit into
/// the original context L.
///
/// ```text
/// dimension(β) = R · ln(L / (β · 2π)) / (2 · ln θ)
/// ```
///
/// Rounded down and up unless the config says otherwise, kept within 0..R-1, and never equal.
fn yarn_range(rope: &Rope) -> (f64, f64) {
    let Scaling::Yarn { beta_fast, beta_slow, original_max_position_embeddings, truncate, .. } = rope.scaling
    else {
        unreachable!("only yarn has a range")
    };
    let width = rope.rotary_dim as f64;
    let dimension = |turns: f64| {
        width * libm::log(original_max_position_embeddings as f64 / (turns * 2.0 * PI))
            / (2.0 * libm::log(rope.theta))
    };
    let (mut lo, mut hi) = (dimension(beta_fast), dimension(beta_slow));
    if truncate {
        (lo, hi) = (lo.floor(), hi.ceil());
    }
    (lo, hi) = (lo.max(0.0), hi.min(width - 1.0));
    if lo == hi {
        hi += 0.001;
    }
    (lo, hi)
}

trait PortablePower {
    fn powf_portable(self, exponent: f64) -> f64;
}

impl PortablePower for f64 {
    /// The same bits on every platform.
    fn powf_portable(self, exponent: f64) -> f64 {
        libm::pow(self, exponent)
    }
}

/// Cosine or sine of every token's angles, times the magnitude of the scaling.
///
/// ```text
/// angle[t, i] = f32(positions[t] · inv_freq[i])
/// y[t, i] = y[t, i + R/2] = cos(angle[t, i]) · magnitude
/// ```
///
/// The result is `[tokens, R]`. Inverse frequency and angle are rounded to f32, as the frameworks do;
/// cosine and sine are f64. Because both tables carry the magnitude, scores carry its square.
pub fn rope_table(positions: &[u32], rope: &Rope, table: Table) -> Array2<f64> {
    let length = positions.iter().max().map_or(0, |&p| p as usize + 1);
    let inv_freq = inverse_frequencies(rope, length);
    let magnitude = match rope.scaling {
        Scaling::Yarn { magnitude, .. } | Scaling::LongRope { magnitude, .. } => magnitude,
        _ => 1.0,
    };
    Array2::from_shape_fn((positions.len(), rope.rotary_dim), |(t, i)| {
        let angle = f64::from(positions[t] as f32 * inv_freq[i % (rope.rotary_dim / 2)]);
        magnitude
            * match table {
                Table::Cos => libm::cos(angle),
                Table::Sin => libm::sin(angle),
            }
    })
}

/// Turns pairs of values of every head.
///
/// ```text
/// half-split:   a = x[i], b = x[i + R/2];   interleaved: a = x[2i], b = x[2i + 1]
/// y[i]       = a · cos[i] - b · sin[i]
/// y[i + R/2] = b · cos[i] + a · sin[i]
/// y[i]       = x[i]                           for i >= R
/// ```
///
/// `x` is `[tokens, heads · head_dim]` in any shape, the tables are `[tokens, R]`, the result is
/// `[tokens, heads, head_dim]`. The interleaved form is *written* half-split (evens first), as the
/// framework does; queries and keys agree, so scores are the same.
///
/// Source: arXiv 2104.09864, equation 34.
pub fn rotate(
    x: &Tensor,
    cos: ArrayView2<f32>,
    sin: ArrayView2<f32>,
    head_dim: usize,
    pairing: Pairing,
) -> Array3<f64> {
    let flat = rows(x);
    let (tokens, all) = flat.dim();
    let half = cos.ncols() / 2;
    assert_eq!(all % head_dim, 0, "rotate: row length against head_dim");
    assert_eq!(cos.dim(), sin.dim(), "rotate: cosine table against sine table");
    assert!(cos.nrows() == tokens && cos.ncols() <= head_dim, "rotate: table against tokens and head_dim");
    let x = flat.into_shape_with_order((tokens, all / head_dim, head_dim)).expect("rotate: rows in order");
    let mut y = x.mapv(f64::from);
    for t in 0..tokens {
        for h in 0..all / head_dim {
            for i in 0..half {
                let (a, b) = match pairing {
                    Pairing::HalfSplit => (x[[t, h, i]], x[[t, h, i + half]]),
                    Pairing::Interleaved => (x[[t, h, 2 * i]], x[[t, h, 2 * i + 1]]),
                };
                let (a, b) = (f64::from(a), f64::from(b));
                let (cos, sin) = (f64::from(cos[[t, i]]), f64::from(sin[[t, i]]));
                y[[t, h, i]] = a * cos - b * sin;
                y[[t, h, i + half]] = b * cos + a * sin;
            }
        }
    }
    y
}

#[cfg(test)]
mod tests {
    use super::*;
    use approx::assert_relative_eq;
    use ndarray::array;
    use proptest::prelude::*;

    fn rope(theta: f64, head_dim: usize, rotary_dim: usize, scaling: Scaling) -> Rope {
        Rope { theta, head_dim, rotary_dim, pairing: Pairing::HalfSplit, scaling }
    }

    // θ = 100, R = 4: inv = 100^0 = 1 and 100^(-1/2) = 0.1. Halved by a linear factor of 2.
    #[test]
    fn frequencies_by_hand() {
        assert_eq!(inverse_frequencies(&rope(100.0, 4, 4, Scaling::Default), 1), [1.0, 0.1]);
        assert_eq!(inverse_frequencies(&rope(100.0, 4, 4, Scaling::Linear { factor: 2.0 }), 1), [0.5, 0.05]);
    }

    // Over a head of 8 at factor 1/2, two of four pairs turn: 10^4^(-0/8) = 1, 10^4^(-2/8) = 0.1, 0, 0.
    // Ordinary partial rope would divide the exponent by 4: 1, 0.01.
    #[test]
    fn proportional_spans_the_whole_head() {
        let scaling = Scaling::Proportional { rotating: 2, factor: 1.0 };
        assert_eq!(inverse_frequencies(&rope(1e4, 8, 8, scaling), 1), [1.0, 0.1, 0.0, 0.0]);
        let divided = Scaling::Proportional { rotating: 2, factor: 2.0 };
        assert_eq!(inverse_frequencies(&rope(1e4, 8, 8, divided), 1), [0.5, 0.05, 0.0, 0.0]);
    }

    // L = 64, low 1, high 4, factor 8. λ(1) = 6.283 < 16: kept. inv 0.1: λ = 62.83 lies between 16 and 64:
    // s = (64/62.83 - 1) / 3 = 0.0061971, 0.1 · (s + (1 - s)/8) = 0.0130422. inv 0.01: λ = 628 > 64: / 8.
    #[test]
    fn llama3_has_three_bands() {
        let scaling = Scaling::Llama3 {
            factor: 8.0,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_max_position_embeddings: 64,
        };
        let inv = inverse_frequencies(&rope(1000.0, 6, 6, scaling), 1);
        assert_eq!(inv[0], 1.0);
        assert_relative_eq!(inv[1], 0.013_042_2, max_relative = 1e-5);
        assert_relative_eq!(inv[2], 0.001_25, max_relative = 1e-6);
    }

    // The same three with low 2: what is longer than 64/2 = 32 is divided, so inv 0.1 too: 0.1/8.
    #[test]
    fn llama3_divides_from_the_low_factor_on() {
        let scaling = Scaling::Llama3 {
            factor: 8.0,
            low_freq_factor: 2.0,
            high_freq_factor: 4.0,
            original_max_position_embeddings: 64,
        };
        let inv = inverse_frequencies(&rope(1000.0, 6, 6, scaling), 1);
        assert_relative_eq!(inv[1], 0.012_5, max_relative = 1e-6);
    }

    // θ = 10, R = 8, L = 128, β 32 and 1: dimension(32) = 8 · ln(128/201.06)/(2·2.302585) = -0.785 → 0;
    // dimension(1) = 8 · ln(20.3718)/4.60517 = 5.2361 → 6. ramp(3) = 0.5, ramp(6) = 1: but there are only
    // four pairs. inv(3) = 10^-0.75 = 0.177828, half kept and half over 4: 0.111142.
    #[test]
    fn yarn_ramp_by_hand() {
        let scaling = Scaling::Yarn {
            factor: 4.0,
            beta_fast: 32.0,
            beta_slow: 1.0,
            original_max_position_embeddings: 128,
            truncate: true,
            magnitude: 1.0,
        };
        let inv = inverse_frequencies(&rope(10.0, 8, 8, scaling), 1);
        assert_eq!(inv[0], 1.0);
        assert_relative_eq!(inv[3], 0.111_142_5, max_relative = 1e-5);
    }

    fn yarn(beta_fast: f64, original_max_position_embeddings: usize) -> Scaling {
        let (factor, beta_slow, truncate, magnitude) = (4.0, 1.0, true, 1.0);
        Scaling::Yarn { factor, beta_fast, beta_slow, original_max_position_embeddings, truncate, magnitude }
    }

    // θ = 10, R = 4, L = 1000: dimension(100) = 4 · ln(1.59155)/4.60517 = 0.404 → 0; dimension(1) =
    // 4 · ln(159.155)/4.60517 = 4.404 → 5, but no further than R - 1 = 3. ramp(1) = 1/3:
    // 0.3162278 · (2/3 + 1/12) = 0.2371708.
    #[test]
    fn the_yarn_ramp_ends_within_the_head() {
        let inv = inverse_frequencies(&rope(10.0, 4, 4, yarn(100.0, 1000)), 1);
        assert_relative_eq!(inv[1], 0.237_170_8, max_relative = 1e-6);
    }

    // L = 6: dimension(32) = 4 · ln(0.02984)/4.60517 → -4, dimension(1) = 4 · ln(0.95493)/4.60517 = -0.04 → 0; both ends
    // are 0 and the ramp is a step: dimension 0 keeps 1, dimension 1 is divided by 4: 0.3162278/4 = 0.0790569.
    #[test]
    fn a_yarn_ramp_without_width_is_a_step() {
        let inv = inverse_frequencies(&rope(10.0, 4, 4, yarn(32.0, 6)), 1);
        assert_eq!(inv[0], 1.0);
        assert_relative_eq!(inv[1], 0.079_056_9, max_relative = 1e-5);
    }

    // θ = 10, R = 8, L = 84, β 6 and 1: L/2π = 13.369, dimension(6) = 8 · ln(2.22817)/4.60517 = 1.391793,
    // dimension(1) = 8 · ln(13.369)/4.60517 = 4.504398. Rounded outwards, the ramp goes from 1 to 5: ramp(3) = 2/4,
    // 0.1778279 · (1/2 + 1/8) = 0.1111425. Not rounded, ramp(3) = 1.608207/3.112605 = 0.5166757 and
    // 0.1778279 · (0.4833243 + 0.1291689) = 0.1089184.
    #[test]
    fn a_yarn_ramp_that_starts_behind_the_first_pair() {
        for (truncate, by_hand) in [(true, 0.111_142_5), (false, 0.108_918_4)] {
            let scaling = Scaling::Yarn {
                factor: 4.0,
                beta_fast: 6.0,
                beta_slow: 1.0,
                original_max_position_embeddings: 84,
                truncate,
                magnitude: 1.0,
            };
            let inv = inverse_frequencies(&rope(10.0, 8, 8, scaling), 1);
            assert_eq!(inv[..2], inverse_frequencies(&rope(10.0, 8, 8, Scaling::Default), 1)[..2]);
            assert_relative_eq!(inv[3], by_hand, max_relative = 1e-6);
        }
    }

    // Inverse frequencies 1 and 0.1 at position 3: cos 3 = -0.9899925, cos 0.3 = 0.9553365, sin 3 = 0.14112, sin 0.3 =
    // 0.2955202, each for both halves of the head.
    #[test]
    fn a_table_holds_both_halves() {
        let rope = rope(100.0, 4, 4, Scaling::Default);
        let cos = rope_table(&[0, 3], &rope, Table::Cos);
        assert_eq!(cos.row(0).to_vec(), [1.0; 4]);
        for (found, by_hand) in cos.row(1).iter().zip([-0.989_992_5, 0.955_336_5, -0.989_992_5, 0.955_336_5])
        {
            assert_relative_eq!(*found, by_hand, max_relative = 1e-6);
        }
        for (found, by_hand) in
            rope_table(&[3], &rope, Table::Sin).iter().zip([0.141_12, 0.295_520_2, 0.141_12, 0.295_520_2])
        {
            assert_relative_eq!(*found, by_hand, max_relative = 1e-6);
        }
    }

    // The last of the positions is what counts: 15 is within an original context of 16, 16 is not.
    // Position 1 turns by 1, or by 1/4: cos 1 = 0.5403023, cos 0.25 = 0.9689124.
    #[test]
    fn a_table_is_of_the_length_that_its_last_position_reaches() {
        let scaling = Scaling::LongRope {
            short_factor: vec![1.0, 2.0],
            long_factor: vec![4.0, 8.0],
            original_max_position_embeddings: 16,
            magnitude: 1.0,
        };
        let rope = rope(100.0, 4, 4, scaling);
        let first = |last: u32| rope_table(&[1, last], &rope, Table::Cos)[[0, 0]];
        assert_relative_eq!(first(15), 0.540_302_3, max_relative = 1e-6);
        assert_relative_eq!(first(16), 0.968_912_4, max_relative = 1e-6);
    }

    #[test]
    fn longrope_chooses_by_the_length_in_use() {
        let scaling = Scaling::LongRope {
            short_factor: vec![1.0, 2.0],
            long_factor: vec![4.0, 8.0],
            original_max_position_embeddings: 16,
            magnitude: 1.0,
        };
        let rope = rope(100.0, 4, 4, scaling);
        assert_eq!(inverse_frequencies(&rope, 16), [1.0, 0.05]);
        assert_eq!(inverse_frequencies(&rope, 17), [0.25, 0.0125]);
    }

    // A quarter turn moves a to the place of b and -b to the place of a; the tail beyond R stays.
    #[test]
    fn a_quarter_turn_by_hand() {
        let x = array![[1.0f32, 2.0, 3.0, 4.0, 9.0]].into_dyn().into_shared();
        let (cos, sin) = (array![[0.0f32, 0.0, 0.0, 0.0]], array![[1.0f32, 1.0, 1.0, 1.0]]);
        let y = rotate(&x, cos.view(), sin.view(), 5, Pairing::HalfSplit);
        assert_eq!(y, array![[[-3.0, -4.0, 1.0, 2.0, 9.0]]]);
        let y = rotate(&x, cos.view(), sin.view(), 5, Pairing::Interleaved);
        assert_eq!(y, array![[[-2.0, -4.0, 1.0, 3.0, 9.0]]]);
    }

    fn at(x: &[f32], position: u32, rope: &Rope) -> Vec<f64> {
        let table = |table| rope_table(&[position], rope, table).mapv(|v| v as f32);
        let x = Array2::from_shape_vec((1, x.len()), x.to_vec()).unwrap().into_dyn().into_shared();
        let y = rotate(&x, table(Table::Cos).view(), table(Table::Sin).view(), rope.head_dim, rope.pairing);
        y.into_iter().collect()
    }

    proptest! {
        // A rotation keeps lengths, and products of two vectors depend on the distance alone.
        #[test]
        fn keeps_norms_and_sees_only_distances(
            q in prop::collection::vec(-1.0f32..1.0, 8),
            k in prop::collection::vec(-1.0f32..1.0, 8),
            first in 0u32..40, distance in 0u32..40, shift in 0u32..40,
        ) {
            let rope = rope(100.0, 8, 8, Scaling::Default);
            let norm = |v: &[f64]| v.iter().map(|v| v * v).sum::<f64>();
            let before: Vec<f64> = q.iter().map(|&v| f64::from(v)).collect();
            prop_assert!((norm(&at(&q, first, &rope)) - norm(&before)).abs() < 1e-5);
            let product = |a: u32, b: u32| -> f64 {
                at(&q, a, &rope).iter().zip(at(&k, b, &rope)).map(|(a, b)| a * b).sum()
            };
            let here = product(first + distance, first);
            let there = product(first + distance + shift, first + shift);
            prop_assert!((here - there).abs() < 1e-4, "{} and {}", here, there);
        }
    }
}
