//! Statistics of tensors, and of the difference of two.

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

/// Sums side by side, so that adding vectorises; always this many, so that the result is the same on
/// every machine.
const LANES: usize = 16;

/// Values that fit the first-level cache together with those they are compared with.
const BLOCK: usize = 1024;

/// Statistics of `values`.
pub fn tensor(values: &[f32]) -> Tensor {
    let mut squares = 0.0;
    let (mut min, mut max) = (f32::INFINITY, f32::NEG_INFINITY);
    let mut non_finite = 0;
    for block in values.chunks(BLOCK) {
        let bad = count_non_finite(block);
        let clean: Vec<f32>;
        let block = if bad == 0 {
            block
        } else {
            non_finite += bad;
            clean = block.iter().copied().filter(|v| v.is_finite()).collect();
            &clean
        };
        squares += dot(block, block);
        min = block.iter().fold(min, |m, &v| if v < m { v } else { m });
        max = block.iter().fold(max, |m, &v| if v > m { v } else { m });
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

fn count_non_finite(block: &[f32]) -> u64 {
    const EXPONENT: u32 = 0x7f80_0000;
    block.iter().map(|v| u32::from(v.to_bits() & EXPONENT == EXPONENT)).sum::<u32>().into()
}

/// `Σ a[i]·b[i]` in f64, in a fixed order.
fn dot(a: &[f32], b: &[f32]) -> f64 {
    let mut lanes = [0f64; LANES];
    let (a_blocks, a_tail) = a.as_chunks::<LANES>();
    let (b_blocks, b_tail) = b.as_chunks::<LANES>();
    for (a, b) in a_blocks.iter().zip(b_blocks) {
        for i in 0..LANES {
            lanes[i] += f64::from(a[i]) * f64::from(b[i]);
        }
    }
    let tail: f64 = a_tail.iter().zip(b_tail).map(|(&a, &b)| f64::from(a) * f64::from(b)).sum();
    lanes.iter().sum::<f64>() + tail
}
