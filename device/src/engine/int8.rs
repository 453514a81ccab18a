//! The `int8` engine: int8 rows times int8 columns, exact sums.

use std::ops::Range;

use super::launch::{Activations, LaunchError};
use crate::pack::{Int8Image, WIDE};
use crate::round::int8_code;

/// Gives `values` int8 codes with one scale; returns the scale and the sum of the codes.
///
/// ```text
/// s = amax/127 (1 where amax = 0)     code = clamp(round_half_away(x · (1/s)), -127, 127)
/// ```
///
/// # Errors
/// The place of the first value that is not finite.
#[inline(always)]
pub(crate) fn quantise(values: &[f32], codes: &mut [i8]) -> Result<(f32, i32), usize> {
    assert_eq!(values.len(), codes.len(), "quantise: values against codes");
    const INFINITE: u32 = 0x7F80_0000;
    // Magnitudes order like their bits, and everything that is not finite lies above all finite values.
    let largest = values.iter().fold(0, |most, x| most.max(x.to_bits() & 0x7FFF_FFFF));
    if largest >= INFINITE {
        return Err(values.iter().position(|x| !x.is_finite()).unwrap_or(0));
    }
    let scale = if largest == 0 { 1.0 } else { f32::from_bits(largest) / 127.0 };
    let inverse = 1.0 / scale;
    for (code, &x) in codes.iter_mut().zip(values) {
        *code = int8_code(x * inverse);
    }
    Ok((scale, codes.iter().map(|&c| i32::from(c)).sum()))
}

/// Codes of a block: the four of a dot product.
const QUAD: usize = 4;

/// Fills `codes` (rows padded to 128 with zeros, blocks of four), and `scale`, indexed by row.
#[inline(always)]
pub(crate) fn prepare(
    inner: usize,
    x: &[f32],
    rows: usize,
    into: &mut Activations,
) -> Result<(), LaunchError> {
    let depth = inner.next_multiple_of(128);
    into.begin(rows, depth / QUAD);
    into.codes.resize(rows * depth, 0);
    let mut row = vec![0; depth];
    for r in 0..rows {
        let values = &x[r * inner..(r + 1) * inner];
        let (scale, _) = quantise(values, &mut row[..inner]).map_err(|column| LaunchError::NotFinite {
            row: r,
            column,
            value: values[column],
        })?;
        let (first, step) = (into.place(r, 0), into.grouped(r));
        into.scale[r] = scale;
        let quads = into.codes.as_chunks_mut::<QUAD>().0;
        for (b, quad) in row.as_chunks::<QUAD>().0.iter().enumerate() {
            quads[first + b * step] = *quad;
        }
    }
    Ok(())
}

/// The definition.
///
/// ```text
/// C[r, n] = sum_k a[r, k] · B[k, n]  in i32, exact      y[r, n] = (f32(C) · sA[r]) · sW[n]
/// ```
///
/// `y` is `[tile, row, 128]`. Scaling by sA·sW at once would change the last bits of about a third of all
/// outputs.
#[inline(always)]
pub(crate) fn portable(image: &Int8Image, a: &Activations, tiles: Range<usize>, y: &mut [f32]) {
    let outputs = y.as_chunks_mut::<WIDE>().0;
    for (tile, outputs) in tiles.zip(outputs.chunks_mut(a.rows)) {
        let scale = image.tile_scale(tile);
        for (r, output) in outputs.iter_mut().enumerate() {
            let mut sums = [0i32; WIDE];
            for (b, w) in image.tile(tile).iter().enumerate() {
                let quad = a.codes.as_chunks::<QUAD>().0[a.place(r, b)];
                for n in 0..WIDE {
                    for k in 0..QUAD {
                        sums[n] += i32::from(quad[k]) * i32::from(w[n][k]);
                    }
                }
            }
            for n in 0..WIDE {
                output[n] = (sums[n] as f32 * a.scale[r]) * scale[n];
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::Engine;
    use crate::engine::tests::{pack, product};

    #[test]
    fn codes_by_hand() {
        let mut codes = [0; 5];
        // amax 127: scale 1, so the codes are the values, rounded half away from zero.
        assert_eq!(quantise(&[127.0, 0.5, -0.5, 2.5, -126.5], &mut codes), Ok((1.0, 3)));
        assert_eq!(codes, [127, 1, -1, 3, -127]);
        // amax 2: scale 2/127, whose inverse is 63.5 in f32 too; 63.5 goes to 64.
        assert_eq!(quantise(&[-2.0, 1.0, 0.0], &mut codes[..3]), Ok((2.0 / 127.0, -63)));
        assert_eq!(codes[..3], [-127, 64, 0]);
        assert_eq!(quantise(&[0.0, -0.0], &mut codes[..2]), Ok((1.0, 0)));
        assert_eq!(quantise(&[1.0, f32::NEG_INFINITY], &mut codes[..2]), Err(1));
    }

    // With s = 1 + 2^-12 on both sides: C = 3, C · s = 3 + 3·2^-12 exactly, and times s again
    // 3 + 3·2^-11 + 3·2^-24. A unit of f32 is 2^-22 here, so the last term, 3/4 of it, rounds up.
    // s · s first is 1 + 2^-11 + 2^-24, a tie that goes down to 1 + 2^-11, and 3 · that is 3 + 3·2^-11.
    // Codes: x is (127, 0, 3), w is (0, 127, 1), so C = 3.
    #[test]
    fn scales_by_the_row_and_then_by_the_column() {
        let s = 1.0 + 0.5f32.powi(12);
        let image = pack(Engine::Int8, &[&[0.0, 127.0 * s, s]]);
        let up = 3.0 + 3.0 * 0.5f32.powi(11) + 0.5f32.powi(22);
        assert_eq!(product(&image, &[127.0 * s, 0.0, 3.0 * s]), [up]);
        assert_eq!(3.0 * (s * s), 3.0 + 3.0 * 0.5f32.powi(11), "the other order");
    }

    // 300 products of 127 · 127 need more than 16 bits, and the inner axis ends inside of a tile.
    #[test]
    fn sums_are_exact() {
        let image = pack(Engine::Int8, &[&[127.0; 300]]);
        assert_eq!(product(&image, &[-127.0; 300]), [-300.0 * 127.0 * 127.0]);
    }
}
