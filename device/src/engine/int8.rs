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
