//! Two tensors against each other, streamed.

use std::thread;

use multiversion::multiversion;

use super::{BLOCK, INFINITY, dot, largest_bits};

/// Distances in units of the last place are counted by their bit length, 0 to 32.
pub const ULP_BUCKETS: usize = 33;

/// Values per unit of work. Fixed, so that sums do not depend on the number of threads.
const PART: usize = 1 << 20;

/// How two tensors differ. Sums and maxima run over the positions where both values are finite.
///
/// A difference is rounded to f32, which is exact for values within a factor of two, and taken in f64
/// where f32 cannot hold it; sums are in f64.
#[derive(Clone, Debug, PartialEq)]
pub struct Comparison {
    /// Number of positions.
    pub elements: u64,
    /// Every bit is equal.
    pub bytes_equal: bool,
    /// `max |a - b|`
    pub max_abs: f64,
    /// `max |a - b| / max(|a|, |b|)`; the divisor is at least the smallest normal f32.
    pub max_rel: f64,
    /// `sqrt(mean((a - b)²))`
    pub rms_diff: f64,
    /// `Σ a·b / sqrt(Σ a² · Σ b²)`; 1 if both are zero everywhere, 0 if only one is.
    pub cosine: f64,
    /// `max |a|`, to judge `max_abs` by.
    pub largest: f64,
    /// First position whose bits differ.
    pub first: Option<usize>,
    /// First position with `|a - b| = max_abs`, unless that is 0.
    pub worst: Option<usize>,
    /// Entry `k` counts the pairs that are `2^(k-1)` to `2^k - 1` representable values apart; entry 0 the
    /// equal ones, with -0 equal to 0.
    pub ulp_histogram: [u64; ULP_BUCKETS],
    /// NaN stands against NaN and each infinity against the same infinity.
    pub non_finite_equal: bool,
    /// How many values of `a`, and of `b`, are NaN or infinite.
    pub non_finite: [u64; 2],
}

/// Compares `a` with `b`, which have the same length.
pub fn compare(a: &[f32], b: &[f32]) -> Comparison {
    let mut comparer = Comparer::new();
    comparer.push(a, b);
    comparer.finish()
}

/// A comparison of tensors that come in pieces.
pub struct Comparer {
    sum: Part,
}

impl Default for Comparer {
    fn default() -> Comparer {
        Comparer { sum: Part::EMPTY }
    }
}

impl Comparer {
    /// Nothing compared yet.
    pub fn new() -> Comparer {
        Comparer::default()
    }

    /// Goes on with the next values, on all processors where that is worth it.
    pub fn push(&mut self, a: &[f32], b: &[f32]) {
        assert_eq!(a.len(), b.len(), "compare: lengths");
        let pairs: Vec<(&[f32], &[f32])> = a.chunks(PART).zip(b.chunks(PART)).collect();
        let threads = thread::available_parallelism().map_or(1, usize::from).min(pairs.len());
        if threads < 2 {
            pairs.into_iter().for_each(|(a, b)| self.sum.add(&part(a, b)));
            return;
        }
        let share = pairs.len().div_ceil(threads);
        let parts: Vec<Vec<Part>> = thread::scope(|scope| {
            let work =
                |pairs: &'_ [(&[f32], &[f32])]| pairs.iter().map(|(a, b)| part(a, b)).collect::<Vec<_>>();
            let handles: Vec<_> = pairs.chunks(share).map(|pairs| scope.spawn(move || work(pairs))).collect();
            handles.into_iter().map(|handle| handle.join().expect("compare: no arithmetic panics")).collect()
        });
        parts.iter().flatten().for_each(|part| self.sum.add(part));
    }

    /// The result over everything pushed.
    pub fn finish(self) -> Comparison {
        let Part { n, finite, squares_a, squares_b, .. } = self.sum;
        let product = squares_a.sqrt() * squares_b.sqrt();
        let cosine = match (squares_a == 0.0, squares_b == 0.0) {
            (true, true) => 1.0,
            (false, false) => self.sum.products / product,
            _ => 0.0,
        };
        Comparison {
            elements: n as u64,
            bytes_equal: self.sum.first.is_none(),
            max_abs: self.sum.max_abs,
            max_rel: self.sum.max_rel,
            rms_diff: if finite == 0 { 0.0 } else { (self.sum.squares_diff / finite as f64).sqrt() },
            cosine,
            largest: self.sum.largest,
            first: self.sum.first,
            worst: self.sum.worst,
            ulp_histogram: self.sum.ulps,
            non_finite_equal: !self.sum.pattern_differs,
            non_finite: self.sum.non_finite,
        }
    }
}

/// What is known about a run of values; positions count from its start.
#[derive(Clone)]
struct Part {
    n: usize,
    finite: u64,
    first: Option<usize>,
    worst: Option<usize>,
    max_abs: f64,
    max_rel: f64,
    largest: f64,
    squares_diff: f64,
    squares_a: f64,
    squares_b: f64,
    products: f64,
    ulps: [u64; ULP_BUCKETS],
    non_finite: [u64; 2],
    pattern_differs: bool,
}

/// Walks one part. Compiled for wider vectors as well; what it calls is inlined for that. The arithmetic is
/// the same, operation by operation, and so are the results.
#[multiversion(targets("x86_64+avx512f+avx512bw+avx512dq+avx512vl", "x86_64+avx2"))]
fn part(a: &[f32], b: &[f32]) -> Part {
    let mut part = Part::EMPTY;
    for (a, b) in a.chunks(BLOCK).zip(b.chunks(BLOCK)) {
        part.block(a, b);
        part.n += a.len();
    }
    part
}

impl Part {
    const EMPTY: Part = Part {
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
    fn add(&mut self, next: &Part) {
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

    #[inline(always)]
    fn block(&mut self, a: &[f32], b: &[f32]) {
        let equal = bytemuck::cast_slice::<f32, u8>(a) == bytemuck::cast_slice::<f32, u8>(b);
        let largest_a = largest_bits(a);
        if equal && largest_a < INFINITY {
            let squares = dot(a, a);
            self.finite += a.len() as u64;
            self.largest = self.largest.max(f64::from(f32::from_bits(largest_a)));
            self.squares_a += squares;
            self.squares_b += squares;
            self.products += squares;
            self.ulps[0] += a.len() as u64;
            return;
        }
        if !equal && self.first.is_none() {
            self.first = a.iter().zip(b).position(|(a, b)| a.to_bits() != b.to_bits()).map(|i| self.n + i);
        }
        let mut diff = [0f32; BLOCK];
        let diff = &mut diff[..a.len()];
        for i in 0..a.len() {
            diff[i] = a[i] - b[i];
        }
        let largest_diff = largest_bits(diff);
        // NaN and infinities in a or b do not vanish from the difference.
        if largest_diff >= INFINITY {
            return self.careful_block(a, b);
        }

        self.finite += a.len() as u64;
        self.largest = self.largest.max(f64::from(f32::from_bits(largest_a)));
        self.squares_a += dot(a, a);
        self.squares_b += dot(b, b);
        self.products += dot(a, b);
        self.squares_diff += dot(diff, diff);
        let max_abs = f64::from(f32::from_bits(largest_diff));
        if max_abs > self.max_abs {
            self.max_abs = max_abs;
            let worst = diff.iter().position(|d| d.to_bits() & 0x7fff_ffff == largest_diff);
            self.worst = worst.map(|i| self.n + i);
        }
        for i in 0..a.len() {
            diff[i] /= larger(a[i].abs(), b[i].abs());
        }
        self.max_rel = self.max_rel.max(f64::from(f32::from_bits(largest_bits(diff))));

        let mut bucket = [0u32; BLOCK];
        let bucket = &mut bucket[..a.len()];
        for i in 0..a.len() {
            bucket[i] = bit_length(ulps_apart(a[i], b[i]));
        }
        // Four counters for each length: pairs next to each other often have the same one, and adding to
        // what was only just stored is slow.
        let mut counts = [[0u32; ULP_BUCKETS]; 4];
        let (fours, rest) = bucket.as_chunks::<4>();
        for four in fours {
            for lane in 0..4 {
                counts[lane][four[lane] as usize] += 1;
            }
        }
        for &k in rest {
            counts[0][k as usize] += 1;
        }
        for k in 0..ULP_BUCKETS {
            self.ulps[k] += u64::from(counts[0][k] + counts[1][k] + counts[2][k] + counts[3][k]);
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

    // Differences 0, 0.5, -2: max 2 at index 2, mean square (0.25 + 4) / 3, relative 0.5/2 and 2/6.
    // cosine (1 + 3 + 24) / sqrt((1 + 4 + 16) (1 + 2.25 + 36)) = 28 / sqrt(824.25)
    #[test]
    fn by_hand() {
        let c = compare(&[1.0, 2.0, 4.0], &[1.0, 1.5, 6.0]);
        assert_eq!((c.elements, c.max_abs, c.first, c.worst, c.largest), (3, 2.0, Some(1), Some(2), 4.0));
        assert_eq!(c.max_rel, f64::from(2.0f32 / 6.0));
        assert!((c.rms_diff - (4.25f64 / 3.0).sqrt()).abs() < 1e-15);
        assert!((c.cosine - 28.0 / 824.25f64.sqrt()).abs() < 1e-15);
        assert!(!c.bytes_equal && c.non_finite_equal);
        // 1.5 and 2 are 2^22 steps apart, a number of 23 digits; 4 and 6 the same.
        let mut expected = [0; ULP_BUCKETS];
        (expected[0], expected[23]) = (1, 2);
        assert_eq!(c.ulp_histogram, expected);
    }

    #[test]
    fn steps_between_values() {
        assert_eq!(ulps_apart(1.0, 1.0 + f32::EPSILON), 1);
        assert_eq!(ulps_apart(0.0, -0.0), 0);
        assert_eq!(ulps_apart(f32::from_bits(1), -f32::from_bits(1)), 2);
        assert_eq!(ulps_apart(f32::MAX, f32::MIN), 2 * 0x7f7f_ffff);
    }

    #[test]
    fn zeros_of_either_sign_are_equal_but_not_the_same_bytes() {
        let c = compare(&[0.0, 0.0], &[0.0, -0.0]);
        assert_eq!((c.bytes_equal, c.first, c.worst, c.max_abs, c.cosine), (false, Some(1), None, 0.0, 1.0));
        assert_eq!(c.ulp_histogram[0], 2);
        assert_eq!(compare(&[0.0], &[1.0]).cosine, 0.0);
    }

    #[test]
    fn patterns_of_what_is_not_finite() {
        let a = [f32::NAN, f32::INFINITY, 1.0];
        let same = compare(&a, &[-f32::NAN, f32::INFINITY, 1.5]);
        assert!(same.non_finite_equal);
        assert_eq!((same.non_finite, same.max_abs, same.worst, same.rms_diff), ([2, 2], 0.5, Some(2), 0.5));
        for b in
            [[f32::NAN, f32::NEG_INFINITY, 1.0], [f32::NAN, 7.0, 1.0], [f32::NAN, f32::INFINITY, f32::NAN]]
        {
            assert!(!compare(&a, &b).non_finite_equal, "{b:?}");
        }
        assert!(compare(&a, &a).bytes_equal);
    }

    // f32 cannot hold the difference; f64 can.
    #[test]
    fn a_difference_beyond_f32() {
        let c = compare(&[f32::MAX], &[f32::MIN]);
        assert_eq!((c.max_abs, c.max_rel), (2.0 * f64::from(f32::MAX), 2.0));
        assert_eq!(c.cosine, -1.0);
    }

    // One changed value in two and a bit million, in every kind of place: block, part and tail.
    #[test]
    fn positions_in_long_tensors() {
        let a: Vec<f32> = (0..2 * PART + 5).map(|i| (i % 97) as f32).collect();
        for at in [0, 1023, 1024, PART - 1, PART, 2 * PART, 2 * PART + 4] {
            let mut b = a.clone();
            b[at] += 1.0;
            let c = compare(&a, &b);
            assert_eq!((c.first, c.worst, c.max_abs), (Some(at), Some(at), 1.0));
            assert_eq!(c.ulp_histogram[0], a.len() as u64 - 1);
        }
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
            narrow.block(a, b);
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

        // Whatever the pieces, the same positions and maxima come out.
        #[test]
        fn pieces_make_the_whole(bits in prop::collection::vec((any::<u32>(), any::<u32>()), 0..3000), cut in 0usize..3000) {
            let a: Vec<f32> = bits.iter().map(|p| f32::from_bits(p.0)).collect();
            let b: Vec<f32> = bits.iter().map(|p| f32::from_bits(p.1 & p.0)).collect();
            let cut = cut.min(a.len());
            let mut pieces = Comparer::new();
            pieces.push(&a[..cut], &b[..cut]);
            pieces.push(&a[cut..], &b[cut..]);
            let (pieces, whole) = (pieces.finish(), compare(&a, &b));
            prop_assert_eq!(pieces.first, whole.first);
            prop_assert_eq!(pieces.worst, whole.worst);
            prop_assert_eq!((pieces.max_abs, pieces.max_rel), (whole.max_abs, whole.max_rel));
            prop_assert_eq!(pieces.ulp_histogram, whole.ulp_histogram);
            prop_assert_eq!(pieces.non_finite, whole.non_finite);
            prop_assert_eq!(pieces.non_finite_equal, whole.non_finite_equal);
        }
    }
}
