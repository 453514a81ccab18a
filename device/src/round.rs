//! The roundings that the number engines share: bf16 to nearest even, int8 half away from zero.

/// The bits of the bf16 nearest to `x`, ties to even; a NaN stays a quiet NaN.
///
/// ```text
/// (bits + 0x7FFF + lsb) >> 16      lsb = bit 16 of x
/// ```
///
/// A finite value of at least 2^128 - 2^119 becomes infinite.
pub fn bf16_bits(x: f32) -> u16 {
    let bits = x.to_bits();
    if x.is_nan() {
        return (bits >> 16) as u16 | 0x40;
    }
    ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) as u16
}

/// `x` rounded to bf16 and widened again, see [`bf16_bits`].
pub fn bf16(x: f32) -> f32 {
    f32::from_bits(u32::from(bf16_bits(x)) << 16)
}

/// The int8 code of a value that was already divided by its scale: half away from zero, within -127..=127.
///
/// NaN, which appears only where an underflown scale meets a zero (0 · 1/0), gives 0.
#[inline(always)]
pub fn int8_code(scaled: f32) -> i8 {
    let code = scaled.round().clamp(-127.0, 127.0);
    whole_to_i8(if code.is_nan() { 0.0 } else { code })
}

/// A whole number of -128..=127 as an integer.
///
/// 1.5 · 2^23 has a unit of 1, so the sum holds the number in its low byte. The conversion of the language, which
/// saturates, is done one value at a time; this one is done in vectors.
#[inline(always)]
pub(crate) fn whole_to_i8(whole: f32) -> i8 {
    (whole + 12_582_912.0).to_bits() as i8
}

#[cfg(test)]
mod tests {
    use super::*;

    // 1.00390625 = 1 + 2^-8 lies half way between 0x3F80 (1) and 0x3F81 (1 + 2^-7): even is 0x3F80.
    // 1.01171875 = 1 + 3·2^-8 lies half way between 0x3F81 and 0x3F82: even is 0x3F82.
    #[test]
    fn ties_go_to_even() {
        assert_eq!(bf16_bits(1.0 + 1.0 / 256.0), 0x3F80);
        assert_eq!(bf16_bits(1.0 + 3.0 / 256.0), 0x3F82);
        assert_eq!(bf16_bits(-1.0 - 3.0 / 256.0), 0xBF82);
    }

    // One unit in the last place of f32 beyond the tie decides.
    #[test]
    fn beyond_a_tie_goes_to_the_nearer() {
        assert_eq!(bf16_bits(f32::from_bits(0x3F80_8001)), 0x3F81);
        assert_eq!(bf16_bits(f32::from_bits(0x3F81_7FFF)), 0x3F81);
    }

    #[test]
    fn the_ends_of_the_range() {
        assert_eq!(bf16(f32::MAX), f32::INFINITY);
        assert_eq!(bf16_bits(f32::from_bits(0x7F7F_7FFF)), 0x7F7F);
        assert_eq!(bf16_bits(f32::from_bits(0x0000_8000)), 0x0000, "half of the smallest subnormal is a tie");
        assert_eq!(bf16_bits(f32::from_bits(0x0000_8001)), 0x0001);
        assert_eq!(bf16_bits(-0.0), 0x8000);
    }

    // A signalling NaN whose payload lies in the lower half must not turn into an infinity.
    #[test]
    fn nan_stays_a_quiet_nan() {
        assert_eq!(bf16_bits(f32::from_bits(0x7F80_0001)), 0x7FC0);
        assert_eq!(bf16_bits(f32::from_bits(0xFFC1_0000)), 0xFFC1);
    }

    #[test]
    fn int8_rounds_half_away_from_zero() {
        let codes = [0.5, -0.5, 1.5, 2.5, -2.5, 0.499_999_97, 126.5, 128.0, -128.0].map(int8_code);
        assert_eq!(codes, [1, -1, 2, 3, -3, 0, 127, 127, -127]);
        assert_eq!(int8_code(f32::NAN), 0);
    }

    #[test]
    fn whole_numbers_become_integers() {
        for whole in -128i8..=127 {
            assert_eq!(whole_to_i8(f32::from(whole)), whole);
        }
        assert_eq!(whole_to_i8(-0.0), 0);
    }
}
