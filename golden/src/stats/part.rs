//! What one walk over a run of pairs finds: the sums and maxima that [`super::compare`] puts together.

use std::hint::black_box;

use multiversion::multiversion;
use multiversion::target::target_cfg_f;

use super::compare::ULP_BUCKETS;
use super::{BLOCK, INFINITY, MAGNITUDE, dot, largest_bits};

/// What is known about a run of values; positions count from its start.
pub(super) struct Part {
    pub n: usize,
    pub finite: u64,
    pub first: Option<usize>,
    pub worst: Option<usize>,
    pub max_abs: f64,
    pub max_rel: f64,
    pub largest: f64,
    pub squares_diff: f64,
    pub squares_a: f64,
    pub squares_b: f64,
    pub products: f64,
    pub ulps: [u64; ULP_BUCKETS],
    pub non_finite: [u64; 2],
    pub pattern_differs: bool,
}

/// Walks one part. Compiled for wider vectors as well; what it calls is inlined for that. The arithmetic is
/// the same, operation by operation, and so are the results.
#[multiversion(targets("x86_64+avx512f+avx512bw+avx512dq+avx512vl+avx2+fma", "x86_64+avx2+fma"))]
pub(super) fn part(a: &[f32], b: &[f32]) -> Part {
    const FUSED: bool = target_cfg_f!(target_feature = "fma");
    let mut part = Part::EMPTY;
    let (a_blocks, a_tail) = a.as_chunks::<BLOCK>();
    let (b_blocks, b_tail) = b.as_chunks::<BLOCK>();
    // Inlined twice: where the length is known, no loop has a remainder or looks at bounds.
    for (i, (a, b)) in a_blocks.iter().zip(b_blocks).enumerate() {
        let next = (i + 1).min(a_blocks.len() - 1);
        part.block::<FUSED>(a, b, Some([&a_blocks[next], &b_blocks[next]]));
        part.n += BLOCK;
    }
    part.block::<FUSED>(a_tail, b_tail, None);
    part.n += a_tail.len();
    part
}

impl Part {
    /// No values.
    pub const EMPTY: Part = Part {
        n: 0,
        finite: 0,
        first: None,
        worst: None,
        max_abs: 0.0,
        max_rel: 0.0,
        largest: 0.0,
        squares_diff: 0.0,
        squares_a: 0.0,
        squares_b: 0.0,
        products: 0.0,
        ulps: [0; ULP_BUCKETS],
        non_finite: [0; 2],
        pattern_differs: false,
    };

    /// Appends the run `next`.
    pub fn add(&mut self, next: &Part) {
        let shifted = |at: Option<usize>| at.map(|at| at + self.n);
        if self.first.is_none() {
            self.first = shifted(next.first);
        }
        if next.max_abs > self.max_abs {
            (self.max_abs, self.worst) = (next.max_abs, shifted(next.worst));
        }
        self.max_rel = self.max_rel.max(next.max_rel);
        self.largest = self.largest.max(next.largest);
        self.n += next.n;
        self.finite += next.finite;
        self.squares_diff += next.squares_diff;
        self.squares_a += next.squares_a;
        self.squares_b += next.squares_b;
        self.products += next.products;
        self.ulps.iter_mut().zip(next.ulps).for_each(|(sum, n)| *sum += n);
        self.non_finite.iter_mut().zip(next.non_finite).for_each(|(sum, n)| *sum += n);
        self.pattern_differs |= next.pattern_differs;
    }

    /// Appends one block: at most [`BLOCK`] pairs. Fused multiply-adds change no bit, because the product of two f32 is
    /// exact in f64. What is `next` is only asked for, see [`ask_for`].
    #[inline(always)]
    fn block<const FUSED: bool>(&mut self, a: &[f32], b: &[f32], next: Option<[&[f32; BLOCK]; 2]>) {
        let equal = bytemuck::cast_slice::<f32, u8>(a) == bytemuck::cast_slice::<f32, u8>(b);
        if equal {
            let largest = largest_bits(a);
            if largest >= INFINITY {
                return self.careful_block(a, b);
            }
            let squares = dot::<FUSED>(a, a);
            self.finite += a.len() as u64;
            self.largest = self.largest.max(f64::from(f32::from_bits(largest)));
            self.squares_a += squares;
            self.squares_b += squares;
            self.products += squares;
            self.ulps[0] += a.len() as u64;
            return;
        }
        if self.first.is_none() {
            self.first = a.iter().zip(b).position(|(a, b)| a.to_bits() != b.to_bits()).map(|i| self.n + i);
        }
        let mut diff = [0f32; BLOCK];
        let diff = &mut diff[..a.len()];
        let (mut largest_a, mut largest_diff) = (0i32, 0i32);
        for i in 0..a.len() {
            diff[i] = a[i] - b[i];
            largest_a = largest_a.max((a[i].to_bits() & MAGNITUDE) as i32);
            largest_diff = largest_diff.max((diff[i].to_bits() & MAGNITUDE) as i32);
        }
        // NaN and infinities in a or b do not vanish from the difference.
        if largest_diff as u32 >= INFINITY {
            return self.careful_block(a, b);
        }

        self.finite += a.len() as u64;
        self.largest = self.largest.max(f64::from(f32::from_bits(largest_a as u32)));
        ask_for(next, 0);
        self.squares_a += dot::<FUSED>(a, a);
        ask_for(next, 1);
        self.squares_b += dot::<FUSED>(b, b);
        ask_for(next, 2);
        self.products += dot::<FUSED>(a, b);
        ask_for(next, 3);
        self.squares_diff += dot::<FUSED>(diff, diff);
        let max_abs = f64::from(f32::from_bits(largest_diff as u32));
        if max_abs > self.max_abs {
            self.max_abs = max_abs;
            let worst = diff.iter().position(|d| d.to_bits() & MAGNITUDE == largest_diff as u32);
            self.worst = worst.map(|i| self.n + i);
        }
        ask_for(next, 4);
        if may_exceed(self.max_rel, a, b, diff) {
            for i in 0..a.len() {
                diff[i] /= larger(a[i].abs(), b[i].abs());
            }
            self.max_rel = self.max_rel.max(f64::from(f32::from_bits(largest_bits(diff))));
        }

        ask_for(next, 5);
        let mut lengths = [0u8; BLOCK];
        let lengths = &mut lengths[..a.len()];
        for i in 0..a.len() {
            lengths[i] = bit_length(ulps_apart(a[i], b[i])) as u8;
        }
        ask_for(next, 6);
        let lowest = lengths.iter().fold(u8::MAX, |lowest, &k| lowest.min(k));
        let highest = lengths.iter().fold(0, |highest, &k| highest.max(k));
        // Rounding leaves few different lengths, and a pass of comparisons for each of them is faster than adding
        // to a counter for each value.
        ask_for(next, 7);
        for k in lowest..=highest {
            self.ulps[usize::from(k)] += count(lengths, k);
        }
    }

    /// The same value by value, for a block that holds NaN, infinities or differences beyond f32.
    fn careful_block(&mut self, a: &[f32], b: &[f32]) {
        for (i, (&a, &b)) in a.iter().zip(b).enumerate() {
            self.non_finite[0] += u64::from(!a.is_finite());
            self.non_finite[1] += u64::from(!b.is_finite());
            if !a.is_finite() || !b.is_finite() {
                self.pattern_differs |= !(a == b || a.is_nan() && b.is_nan());
                continue;
            }
            self.finite += 1;
            self.ulps[bit_length(ulps_apart(a, b)) as usize] += 1;
            let (diff, divisor) = ((a - b).abs(), larger(a.abs(), b.abs()));
            let (a, b) = (f64::from(a), f64::from(b));
            let (diff, relative) = match diff.is_finite() {
                true => (f64::from(diff), f64::from(diff / divisor)),
                false => ((a - b).abs(), (a - b).abs() / f64::from(divisor)),
            };
            if diff > self.max_abs {
                (self.max_abs, self.worst) = (diff, Some(self.n + i));
            }
            self.max_rel = self.max_rel.max(relative);
            self.largest = self.largest.max(a.abs());
            self.squares_diff += diff * diff;
            self.squares_a += a * a;
            self.squares_b += b * b;
            self.products += a * b;
        }
    }
}

/// Reads one value of every cache line in an eighth of two blocks, so that memory works while the block before them is
/// computed: left alone it fetches a line or two ahead of what is used, and never past a page, which is a block.
#[inline(always)]
fn ask_for(blocks: Option<[&[f32; BLOCK]; 2]>, eighth: usize) {
    const LINE: usize = 64 / size_of::<f32>();
    const EIGHTH: usize = BLOCK / 8;
    for block in blocks.into_iter().flatten() {
        for line in 0..EIGHTH / LINE {
            black_box(block[eighth * EIGHTH + line * LINE]);
        }
    }
}

/// Whether a relative difference may be larger than `most`; divisions are slow, and few blocks have one.
///
/// `fl(d/l) > m` for the f32 `m <= most` implies `d > m·l`, and that `d >= fl(m·l)`, since rounding keeps the order.
#[inline(always)]
fn may_exceed(most: f64, a: &[f32], b: &[f32], diff: &[f32]) -> bool {
    let nearest = most as f32;
    let below = if f64::from(nearest) > most { nearest.next_down() } else { nearest };
    let mut beyond = 0u32;
    for i in 0..a.len() {
        beyond += u32::from(diff[i].abs() >= below * larger(a[i].abs(), b[i].abs()));
    }
    beyond > 0
}

/// How many of at most [`BLOCK`] bytes are `k`. A byte holds what one lane counts.
#[inline(always)]
fn count(bytes: &[u8], k: u8) -> u64 {
    const WIDE: usize = 64;
    const { assert!(BLOCK / WIDE <= u8::MAX as usize) };
    let mut lanes = [0u8; WIDE];
    let (rows, tail) = bytes.as_chunks::<WIDE>();
    for row in rows {
        for i in 0..WIDE {
            lanes[i] += u8::from(row[i] == k);
        }
    }
    lanes.iter().map(|&n| u64::from(n)).sum::<u64>() + tail.iter().filter(|&&byte| byte == k).count() as u64
}

#[inline(always)]
fn larger(a: f32, b: f32) -> f32 {
    let larger = if a > b { a } else { b };
    if larger > f32::MIN_POSITIVE { larger } else { f32::MIN_POSITIVE }
}

/// How many steps from one representable value to the next lie between `a` and `b`.
#[inline(always)]
fn ulps_apart(a: f32, b: f32) -> u32 {
    // Bits of positive values count upwards, those of negative ones away from zero.
    let place = |x: f32| {
        let bits = x.to_bits() as i32;
        if bits < 0 { i32::MIN.wrapping_sub(bits) } else { bits }
    };
    let (a, b) = (place(a), place(b));
    if a > b { a.wrapping_sub(b) as u32 } else { b.wrapping_sub(a) as u32 }
}

/// Number of binary digits, read off the exponent of a float: that vectorises where counting zeros does not.
/// Clearing each bit below another keeps the conversion from rounding up to the next power of two.
#[inline(always)]
fn bit_length(n: u32) -> u32 {
    let float = (n & !(n >> 1)) as f32;
    (float.to_bits() >> 23).saturating_sub(126)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn steps_between_values() {
        assert_eq!(ulps_apart(1.0, 1.0 + f32::EPSILON), 1);
        assert_eq!(ulps_apart(0.0, -0.0), 0);
        assert_eq!(ulps_apart(f32::from_bits(1), -f32::from_bits(1)), 2);
        assert_eq!(ulps_apart(f32::MAX, f32::MIN), 2 * 0x7f7f_ffff);
    }

    // This function is compiled for the baseline alone, `part` for what the machine has.
    #[test]
    fn wide_vectors_give_the_same_bits() {
        let noise = |seed: u32, i: u32| {
            (i.wrapping_mul(2_654_435_761) ^ seed).wrapping_mul(0x9e37_79b9) as f32 * 1e-9
        };
        let a: Vec<f32> = (0..5000).map(|i| noise(1, i)).collect();
        let b: Vec<f32> = (0..5000).map(|i| noise(2, i)).collect();
        let mut narrow = Part::EMPTY;
        for (a, b) in a.chunks(BLOCK).zip(b.chunks(BLOCK)) {
            narrow.block::<false>(a, b, None);
            narrow.n += a.len();
        }
        let wide = part(&a, &b);
        let sums = |p: &Part| {
            [p.squares_a, p.squares_b, p.products, p.squares_diff, p.max_abs, p.max_rel].map(f64::to_bits)
        };
        assert_eq!(sums(&wide), sums(&narrow));
        assert_eq!((wide.ulps, wide.first, wide.worst), (narrow.ulps, narrow.first, narrow.worst));
    }

    proptest! {
        #[test]
        fn bit_length_counts_digits(n in any::<u32>(), shift in 0u32..32) {
            let n = n >> shift;
            prop_assert_eq!(bit_length(n), 32 - n.leading_zeros());
        }
    }
}
