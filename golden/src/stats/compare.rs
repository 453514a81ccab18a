//! Two tensors against each other, streamed.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use super::part::{Part, part};

/// Distances in units of the last place are counted by their bit length, 0 to 32.
pub const ULP_BUCKETS: usize = 33;

/// Values per unit of work. Fixed, so that sums do not depend on the number of threads.
const PART: usize = 1 << 18;

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
        self.push_with(thread::available_parallelism().map_or(1, usize::from), a, b);
    }

    /// The same on so many threads. Parts have a fixed size and are added in their order, whoever walked them, so
    /// that the result has the same bits for any number of threads.
    fn push_with(&mut self, threads: usize, a: &[f32], b: &[f32]) {
        assert_eq!(a.len(), b.len(), "compare: lengths");
        let pairs: Vec<(&[f32], &[f32])> = a.chunks(PART).zip(b.chunks(PART)).collect();
        let threads = threads.min(pairs.len());
        if threads < 2 {
            pairs.into_iter().for_each(|(a, b)| self.sum.add(&part(a, b)));
            return;
        }
        // Whoever is free takes the next part: a processor that others use as well does less.
        let next = AtomicUsize::new(0);
        let work = || -> Vec<(usize, Part)> {
            let mut done = Vec::new();
            loop {
                let at = next.fetch_add(1, Ordering::Relaxed);
                let Some((a, b)) = pairs.get(at) else { return done };
                done.push((at, part(a, b)));
            }
        };
        let mut parts: Vec<(usize, Part)> = thread::scope(|scope| {
            let handles: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
            handles
                .into_iter()
                .flat_map(|handle| handle.join().expect("compare: no arithmetic panics"))
                .collect()
        });
        parts.sort_by_key(|(at, _)| *at);
        parts.iter().for_each(|(_, part)| self.sum.add(part));
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

    // One changed value in half a million and a bit, in every kind of place: block, part and tail.
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

    // Seven parts and a bit on one, two, three and eight threads; no sum is exact.
    #[test]
    fn threads_give_the_same_bits() {
        let value = |i: usize| 1.0 / (1 + i % 8191) as f32;
        let a: Vec<f32> = (0..7 * PART + 77).map(value).collect();
        let b: Vec<f32> = a.iter().enumerate().map(|(i, a)| a * (1.0 + value(i / 3) * 1e-3)).collect();
        let on = |threads| {
            let mut comparer = Comparer::new();
            comparer.push_with(threads, &a, &b);
            comparer.finish()
        };
        let one = on(1);
        let bits = |c: &Comparison| [c.rms_diff, c.cosine, c.max_abs, c.max_rel].map(f64::to_bits);
        for threads in [2, 3, 8] {
            let many = on(threads);
            assert_eq!(bits(&many), bits(&one), "{threads} threads");
            assert_eq!(many, one, "{threads} threads");
        }
    }

    proptest! {
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
