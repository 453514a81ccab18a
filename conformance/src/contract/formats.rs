//! The exact rules of number formats: bf16, int8 rows and columns, 4-bit groups, blocks with one exponent.

use half::f16;
use multiversion::multiversion;
use serde::{Deserialize, Serialize};
use spec::matrix::Codes4;
use spec::{Matrix, NonFinite};

/// Inputs that share a scale in the 4-bit formats and in their activations.
pub const GROUP: usize = 32;

/// Values that share an exponent in block floating point.
pub const BLOCK: usize = 8;

/// A floating-point format.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Float {
    /// 8 bits of mantissa, the leading one included.
    Bf16,
    /// 24 bits.
    F32,
}

/// Which neighbour a value goes to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Rounding {
    /// The nearest, ties to even.
    NearestEven,
    /// The lower.
    Floor,
}

impl Float {
    /// One unit in the last place of a value of the size of `x`.
    pub fn ulp(self, x: f64) -> f64 {
        let f32_ulp = crate::variance::ulp(x);
        if self == Float::Bf16 { f32_ulp * 65536.0 } else { f32_ulp }
    }

    /// `x` in this format.
    pub fn round(self, x: f32, rounding: Rounding) -> f32 {
        match (self, rounding) {
            (Float::F32, _) => x,
            (Float::Bf16, Rounding::NearestEven) => bf16(x),
            (Float::Bf16, Rounding::Floor) => {
                // Cutting bits off goes towards zero: a negative value that loses bits goes one step on.
                let cut = f32::from_bits(x.to_bits() & 0xFFFF_0000);
                if x < cut { f32::from_bits(cut.to_bits() + 0x1_0000) } else { cut }
            }
        }
    }

    /// An exact value in this format: to f32 first, without a double rounding towards the floor.
    pub fn round_exact(self, x: f64, rounding: Rounding) -> f32 {
        let near = x as f32;
        match rounding {
            Rounding::NearestEven => self.round(near, rounding),
            Rounding::Floor => {
                let below = if f64::from(near) > x { near.next_down() } else { near };
                self.round(below, rounding)
            }
        }
    }
}

/// Nearest whole number, halves away from zero, within ±127; a NaN gives 0.
///
/// ```text
/// code = clamp(round_half_away(v), -127, 127)
/// ```
///
/// Without a branch or a call, so that many are made at a time: adding the largest f32 below a half and cutting
/// off rounds halves away, and a whole number added to 1.5·2^23 stands in the lowest bits of the sum.
#[inline(always)]
pub fn code(v: f32) -> i8 {
    const WHOLE: f32 = 12_582_912.0;
    const BELOW_HALF: f32 = 0.499_999_97;
    let v = if v.is_nan() { 0.0 } else { v };
    let v = if v > 127.0 { 127.0 } else { v };
    let v = if v < -127.0 { -127.0 } else { v };
    let nearest = (v + BELOW_HALF.copysign(v)).trunc();
    (nearest + WHOLE).to_bits() as i8
}

/// `x` to the nearest bf16, ties to even; a NaN stays a NaN.
pub fn bf16(x: f32) -> f32 {
    if x.is_nan() {
        return x;
    }
    let bits = x.to_bits();
    let even = (bits >> 16) & 1;
    f32::from_bits((bits + 0x7FFF + even) & 0xFFFF_0000)
}

/// The int8 codes of an activation row and their scale.
///
/// ```text
/// sA = amax / 127   (1 where amax = 0);   code[i] = code(a[i] · (1 / sA))
/// ```
///
/// Every operation is rounded to f32, as declared.
#[multiversion(targets("x86_64+avx512f+avx512bw+avx512dq+avx512vl+avx2", "x86_64+avx2"))]
pub fn int8_row(row: &[f32], codes: &mut [i8]) -> f32 {
    let amax = row.iter().fold(0f32, |m, v| m.max(v.abs()));
    let scale = if amax == 0.0 { 1.0 } else { amax / 127.0 };
    let inverse = 1.0 / scale;
    for (code_, &v) in codes.iter_mut().zip(row) {
        *code_ = code(v * inverse);
    }
    scale
}

/// The int8 codes of a row of finite weights, and their scale: `w[i] = codes[i] · scale`.
///
/// ```text
/// cmax = max_i |w[i]|, below 1e-12 taken as 1;   sW = cmax / 127;   code = code(w · (127 / cmax))
/// ```
#[multiversion(targets("x86_64+avx512f+avx512bw+avx512dq+avx512vl+avx2", "x86_64+avx2"))]
pub fn int8_weights(row: &[f32], codes: &mut [i8]) -> f32 {
    // Magnitudes are ordered as their bits, and whole numbers are compared many at a time.
    let largest = row.iter().fold(0i32, |m, w| m.max(w.abs().to_bits() as i32));
    let cmax = f32::from_bits(largest as u32);
    let (scale, inverse) = if cmax < 1e-12 { (1.0, 127.0) } else { (cmax / 127.0, 127.0 / cmax) };
    for (code_, &w) in codes.iter_mut().zip(row) {
        *code_ = code(w * inverse);
    }
    scale
}

/// `Σ_i a[i] · w[i]`, exact: at most 133144 products of codes of 8 bits.
#[multiversion(targets("x86_64+avx512f+avx512bw+avx512dq+avx512vl+avx2", "x86_64+avx2"))]
pub fn int8_dot(a: &[i8], w: &[i8]) -> i32 {
    a.iter().zip(w).map(|(&a, &w)| i32::from(a) * i32::from(w)).sum()
}

/// One row of 4-bit codes: `w[i] = scales[i / 32] · (codes[i] - offset) + zeros[i / 32]`.
#[derive(Clone, Debug, PartialEq)]
pub struct Q4Row {
    /// One an input.
    pub codes: Vec<u8>,
    /// One a group.
    pub scales: Vec<f32>,
    /// One a group.
    pub zeros: Vec<f32>,
    /// 8 where code 8 stands for zero, else 0.
    pub offset: u8,
    bf16: bool,
}

impl Q4Row {
    /// The decoded weight, every operation rounded to f32; rounded to bf16 at last where scales are bf16.
    pub fn value(&self, i: usize) -> f32 {
        let q = f32::from(i16::from(self.codes[i]) - i16::from(self.offset));
        let value = self.scales[i / GROUP] * q + self.zeros[i / GROUP];
        if self.bf16 { bf16(value) } else { value }
    }
}

/// Row `o` in 4-bit codes: the package's own where it has them, else by the rule of Q4_1.
///
/// ```text
/// d = (max - min)/15     code = min(15, trunc((w - min) · (1/d) + 0.5))     1/0 := 0
/// ```
///
/// in f32, with d and min rounded to f16 afterwards. With `narrow` scales and zeros are then rounded to
/// bf16. A row of own codes whose zeros are all `-8 · scale` has the offset 8 and no zeros.
pub fn q4_row(weight: &Matrix, o: usize, narrow: bool) -> Result<Q4Row, NonFinite> {
    let mut row = Q4Row { codes: vec![], scales: vec![], zeros: vec![], offset: 0, bf16: narrow };
    let mut own = Codes4::default();
    if weight.codes4(o, &mut own) {
        row.codes = own.codes;
        if own.scales.iter().zip(&own.zeros).all(|(scale, zero)| *zero == -8.0 * scale) {
            row.offset = 8;
            row.zeros = vec![0.0; own.scales.len()];
        } else {
            row.zeros = own.zeros;
        }
        row.scales = own.scales;
    } else {
        let mut values = vec![0f32; weight.inner()];
        weight.decode(o, &mut values)?;
        for group in values.chunks(GROUP) {
            let min = group.iter().copied().fold(f32::INFINITY, f32::min);
            let max = group.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            let d = (max - min) / 15.0;
            let inverse = if d == 0.0 { 0.0 } else { 1.0 / d };
            row.codes.extend(group.iter().map(|w| (((w - min) * inverse + 0.5) as u8).min(15)));
            row.scales.push(f16::from_f32(d).to_f32());
            row.zeros.push(f16::from_f32(min).to_f32());
        }
    }
    if narrow {
        row.scales.iter_mut().chain(&mut row.zeros).for_each(|v| *v = bf16(*v));
    }
    Ok(row)
}

/// Eight values as mantissas and the exponent that they share; fewer are filled up with zeros.
///
/// ```text
/// E = biased exponent of the largest magnitude     m = clamp(RNE(x / 2^(E-133)), -127, 127)
/// ```
pub fn block(values: &[f32]) -> ([i8; BLOCK], u8) {
    let largest = values.iter().fold(0u32, |m, v| m.max(v.to_bits() & 0x7FFF_FFFF));
    let exponent = (largest >> 23) as u8;
    let unit = libm::ldexp(1.0, i32::from(exponent) - 133);
    let mut mantissas = [0i8; BLOCK];
    for (m, &x) in mantissas.iter_mut().zip(values) {
        *m = (f64::from(x) / unit).round_ties_even().clamp(-127.0, 127.0) as i8;
    }
    (mantissas, exponent)
}

/// `m · 2^(E-133)`, rounded to f32.
pub fn f32_of_block(mantissa: i8, exponent: u8) -> f32 {
    (f64::from(mantissa) * libm::ldexp(1.0, i32::from(exponent) - 133)) as f32
}

#[cfg(test)]
mod tests {
    use super::*;

    // amax 254, so sA = 2 and codes are halves: 1/2 = 0.5 rounds away from zero to 1, -1/2 to -1.
    #[test]
    fn halves_round_away_from_zero() {
        let mut codes = [0i8; 4];
        assert_eq!(int8_row(&[254.0, 1.0, -1.0, 0.9], &mut codes), 2.0);
        assert_eq!(codes, [127, 1, -1, 0]);
        assert_eq!(int8_row(&[0.0; 4], &mut codes), 1.0);
        assert_eq!(codes, [0; 4]);
    }

    // Every 4099th f32, and what lies next to every half, against the definition.
    #[test]
    fn codes_are_rounded_values() {
        let halves = (-260..=260).map(|n| n as f32 / 2.0);
        let around = halves.flat_map(|v| [v, v.next_up(), v.next_down()]);
        for v in around.chain((0..=u32::MAX).step_by(4099).map(f32::from_bits)) {
            assert_eq!(
                f32::from(code(v)),
                if v.is_nan() { 0.0 } else { v.round().clamp(-127.0, 127.0) },
                "{v}"
            );
        }
    }

    // 1 + 2^-8 and 1 + 3·2^-8 lie half way between neighbours: the even one is 1 and 1 + 2^-6.
    #[test]
    fn bf16_ties_go_to_even() {
        assert_eq!(bf16(1.0 + 1.0 / 256.0), 1.0);
        assert_eq!(bf16(-1.0 - 3.0 / 256.0), -1.015_625);
        assert_eq!(bf16(1.004), 1.007_812_5);
    }

    // cmax 127, scale 1; cmax 1.27, scale 0.01: 0.635 · (127/1.27) = 63.5 → 64.
    #[test]
    fn every_output_has_a_scale() {
        let coded = |row: [f32; 2]| {
            let mut codes = [0; 2];
            (int8_weights(&row, &mut codes), codes)
        };
        assert_eq!(coded([127.0, -3.0]), (1.0, [127, -3]));
        assert_eq!(coded([0.635, -1.27]), (0.01, [64, -127]));
        assert_eq!(coded([0.0, 0.0]), (1.0, [0, 0]));
    }

    // Every product stands in a decimal place of its own, and the widest sums are exact.
    #[test]
    fn codes_are_counted_exactly() {
        assert_eq!(int8_dot(&[1, 2, 3, -4], &[100, 10, 1, 0]), 123);
        assert_eq!(int8_dot(&[-127; 133_144], &[127; 133_144]), -127 * 127 * 133_144);
    }

    // (7 + 8)/15 = 1: codes are x + 8, halves up.
    #[test]
    fn four_bits_by_the_rule_of_q4_1() {
        let w = Matrix::from_values("w", 1, 4, vec![-8.0, 7.0, -7.5, 0.25]);
        let row = q4_row(&w, 0, false).unwrap();
        assert_eq!((&row.codes[..], row.scales[0], row.zeros[0]), (&[0, 15, 1, 8][..], 1.0, -8.0));
        assert_eq!(row.value(2), -7.0);
    }

    // The largest is 1, so the unit is 2^-6: 2.5 units go to 2, 3.5 to 4; 1.996 is held at 127 units.
    #[test]
    fn blocks_share_an_exponent() {
        let unit = 1.0 / 64.0;
        assert_eq!(block(&[1.0, 2.5 * unit, 3.5 * unit]).0[..3], [64, 2, 4]);
        assert_eq!(block(&[1.996]), ([127, 0, 0, 0, 0, 0, 0, 0], 127));
        assert_eq!(f32_of_block(64, 127), 1.0);
    }

    // 1 + 2^-8 lies between 1 and 1 + 2^-7; below zero the floor is further from zero.
    #[test]
    fn floors() {
        let x = 1.0 + 1.0 / 256.0;
        assert_eq!(Float::Bf16.round(x, Rounding::Floor), 1.0);
        assert_eq!(Float::Bf16.round(-x, Rounding::Floor), -1.007_812_5);
        assert_eq!(Float::F32.round_exact(1.0 - 1e-12, Rounding::Floor), 1.0f32.next_down());
    }
}
