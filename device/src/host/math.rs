//! Elementary functions in f32, written so that a loop over them becomes vector code.
//!
//! They use no fused operation and no library, so they give the same bits on every CPU.

/// `e^x`, within 2 units in the last place; 0 below -104, infinite above 88.73.
///
/// `x = n·ln 2 + r` with `|r| <= ln 2 / 2`, a polynomial of degree 6 for `e^r`, and two factors of a
/// power of two, so that results below the normal range keep the bits they have.
#[inline]
pub fn exp(x: f32) -> f32 {
    const SHIFT: f32 = 12_582_912.0; // 1.5 · 2^23: adding it rounds to a whole number
    const LN2_HIGH: f32 = 0.693_359_4; // 355 / 512, so that n · LN2_HIGH is exact
    const LN2_LOW: f32 = -2.121_944_4e-4;
    let clamped = x.clamp(-105.0, 89.0);
    let shifted = clamped * std::f32::consts::LOG2_E + SHIFT;
    let n = shifted - SHIFT;
    let r = (clamped - n * LN2_HIGH) - n * LN2_LOW;
    let mut p = 1.987_569_1e-4;
    p = p * r + 1.398_199_9e-3;
    p = p * r + 8.333_452e-3;
    p = p * r + 4.166_579_6e-2;
    p = p * r + 1.666_666_6e-1;
    p = p * r + 0.5;
    let e = (p * (r * r) + r) + 1.0;
    let n = n as i32;
    let half = n >> 1;
    let power = |k: i32| f32::from_bits(((k + 127) << 23) as u32);
    let y = e * power(half) * power(n - half);
    if x.is_nan() { x } else { y }
}

/// `1 / (1 + e^-x)`, with `e` taken of a negative number only.
#[inline]
pub fn sigmoid(x: f32) -> f32 {
    let e = exp(-x.abs());
    (if x >= 0.0 { 1.0 } else { e }) / (1.0 + e)
}

/// `x · σ(x)`
#[inline]
pub fn silu(x: f32) -> f32 {
    x * sigmoid(x)
}

/// `0.5 · x · (1 + tanh(u)) = x · σ(2u)` with `u = √(2/π) · (x + 0.044715 · x³)`.
#[inline]
pub fn gelu_tanh(x: f32) -> f32 {
    const ROOT: f32 = 0.797_884_6; // √(2/π)
    let u = ROOT * (x + 0.044_715 * (x * x) * x);
    x * sigmoid(2.0 * u)
}

/// `tanh x`: a polynomial below 0.625, `1 - 2 / (e^2x + 1)` above.
#[inline]
pub fn tanh(x: f32) -> f32 {
    let size = x.abs();
    let s = x * x;
    let mut p = -5.704_988_7e-3;
    p = p * s + 2.063_909e-2;
    p = p * s - 5.373_971_6e-2;
    p = p * s + 1.333_144_2e-1;
    p = p * s - 3.333_328e-1;
    let small = p * s * x + x;
    let large = (1.0 - 2.0 / (exp(2.0 * size) + 1.0)).copysign(x);
    if size < 0.625 { small } else { large }
}

/// `cap · tanh(x / cap)`
#[inline]
pub fn softcap(x: f32, cap: f32) -> f32 {
    cap * tanh(x / cap)
}

/// `ln(1 + e^x) = max(x, 0) + ln(1 + e^-|x|)`
#[inline]
pub fn softplus(x: f32) -> f32 {
    x.max(0.0) + libm::log1pf(exp(-x.abs()))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Largest error over a grid, in units of the last place of the true value.
    fn worst(f: fn(f32) -> f32, truth: fn(f64) -> f64, from: f32, to: f32) -> f64 {
        let mut worst = 0.0f64;
        for n in 0..=200_000 {
            let x = from + (to - from) * (n as f32 / 200_000.0);
            let (found, true_value) = (f64::from(f(x)), truth(f64::from(x)));
            let last_place = f64::from(f32::EPSILON) * true_value.abs().max(f64::from(f32::MIN_POSITIVE));
            worst = worst.max((found - true_value).abs() / last_place);
        }
        worst
    }

    #[test]
    fn close_to_f64_over_their_range() {
        let sigma = |x: f64| 1.0 / (1.0 + (-x).exp());
        assert!(worst(exp, f64::exp, -100.0, 88.7) < 2.0);
        assert!(worst(sigmoid, sigma, -80.0, 80.0) < 3.0);
        assert!(worst(silu, |x| x / (1.0 + (-x).exp()), -80.0, 80.0) < 4.0);
        assert!(worst(tanh, f64::tanh, -12.0, 12.0) < 3.0);
        assert!(worst(softplus, |x| x.max(0.0) + (-x.abs()).exp().ln_1p(), -20.0, 20.0) < 3.0);
        // In u the rounding of x itself grows by the slope of the exponent, so the bound is on |x|.
        let gelu = |x: f64| {
            0.5 * x * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x.powi(3))).tanh())
        };
        for n in -4000..=4000 {
            let x = n as f32 / 500.0;
            assert!(
                (f64::from(gelu_tanh(x)) - gelu(f64::from(x))).abs() <= 3e-7 * f64::from(x.abs()).max(1.0)
            );
        }
    }

    #[test]
    fn ends_of_the_range() {
        assert_eq!(exp(0.0), 1.0);
        assert_eq!(exp(f32::NEG_INFINITY), 0.0);
        assert_eq!(exp(-200.0), 0.0);
        assert_eq!(exp(f32::INFINITY), f32::INFINITY);
        assert!(exp(f32::NAN).is_nan());
        // e^-100 = 3.72e-44 lies below the smallest normal number and is not lost.
        assert!((exp(-100.0) / 3.72e-44 - 1.0).abs() < 0.02);
        assert_eq!(tanh(-30.0), -1.0);
        assert_eq!(sigmoid(-200.0), 0.0);
    }
}
