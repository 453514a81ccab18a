//! S9: the comparer of dumps against one plain loop and against numpy.

use super::figure::{Figure, Goal, Spec, Timed, interleaved, seconds};
use super::peer::{Peer, PeerError};
use golden::stats::{Comparer, Comparison, ULP_BUCKETS};

/// Against a plain loop.
pub const PLAIN: Spec = Spec {
    id: "S9",
    what: "comparing two dumps with full statistics: speed over that of one plain loop",
    goal: Goal::AtLeast(1.8),
    stretch: None,
};

/// Against numpy.
pub const NUMPY: Spec = Spec {
    id: "S9@numpy",
    what: "comparing two dumps with full statistics: speed over that of numpy in chunks",
    goal: Goal::AtLeast(12.0),
    stretch: None,
};

/// Values of each array: 0.25 GB, beyond every cache.
const VALUES: usize = 1 << 26;

/// Values that are handed over at a time, so that the comparer stays on this thread.
const PIECE: usize = 1 << 20;

/// S9 against a plain loop in this process.
pub fn against_plain(pairs: usize) -> Figure {
    let (a, b) = arrays(VALUES);
    let (mut plain_result, mut own_result) = (None, None);
    let timed = interleaved(
        pairs,
        || Ok::<_, std::convert::Infallible>(seconds(|| plain_result = Some(plain(&a, &b)))),
        || Ok(seconds(|| own_result = Some(own(&a, &b)))),
    );
    let Ok(mut timed) = timed;
    if let (Some(plain), Some(own)) = (&plain_result, &own_result)
        && !same(plain, own)
    {
        timed.fault = Some("the plain loop finds other statistics".into());
    }
    rated(&PLAIN, &timed, "the loop")
}

/// S9 against numpy.
pub fn against_numpy(python: &str, pairs: usize) -> Figure {
    let (a, b) = arrays(VALUES);
    let mut peer = match Peer::start(python, include_str!("compare_numpy.py"), &[&VALUES.to_string()]) {
        Ok(peer) => peer,
        Err(error) => return NUMPY.not_measured(error.to_string()),
    };
    let timed = interleaved(pairs, || peer.seconds(), || Ok::<_, PeerError>(seconds(|| own(&a, &b))));
    timed.map_or_else(|e| NUMPY.not_measured(e.to_string()), |timed| rated(&NUMPY, &timed, "numpy"))
}

fn rated(spec: &Spec, timed: &Timed, peer: &str) -> Figure {
    let (theirs, ours) = timed.medians();
    let gigabytes = 8.0 * VALUES as f64 / 1e9;
    let rates = format!("{:.2} GB/s of both, {peer} {:.2} GB/s", gigabytes / ours, gigabytes / theirs);
    Figure { rates: Some(rates), ..spec.judge(timed) }
}

/// Two arrays that differ by a few units in the last place, nearly everywhere.
fn arrays(values: usize) -> (Vec<f32>, Vec<f32>) {
    let mut state = 1u32;
    let a: Vec<f32> = (0..values)
        .map(|_| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) as f32 / (1 << 22) as f32 - 2.0
        })
        .collect();
    let b = a.iter().enumerate().map(|(i, v)| f32::from_bits(v.to_bits() ^ (i as u32 % 5))).collect();
    (a, b)
}

fn own(a: &[f32], b: &[f32]) -> Comparison {
    let mut comparer = Comparer::new();
    a.chunks(PIECE).zip(b.chunks(PIECE)).for_each(|(a, b)| comparer.push(a, b));
    comparer.finish()
}

/// The same statistics in one loop over the values, as one would write it first.
fn plain(a: &[f32], b: &[f32]) -> Comparison {
    let mut c = Comparison {
        elements: a.len() as u64,
        bytes_equal: true,
        max_abs: 0.0,
        max_rel: 0.0,
        rms_diff: 0.0,
        cosine: 0.0,
        largest: 0.0,
        first: None,
        worst: None,
        ulp_histogram: [0; ULP_BUCKETS],
        non_finite_equal: true,
        non_finite: [0; 2],
    };
    let (mut finite, mut squares, mut aa, mut bb, mut ab) = (0u64, 0.0, 0.0, 0.0, 0.0);
    // Integers in the order of the values; -0 and 0 are both 0.
    let key = |v: f32| {
        let bits = i64::from(v.to_bits() & 0x7fff_ffff);
        if v.is_sign_negative() { -bits } else { bits }
    };
    for (i, (&x, &y)) in a.iter().zip(b).enumerate() {
        if x.to_bits() != y.to_bits() {
            c.bytes_equal = false;
            c.first = c.first.or(Some(i));
        }
        if !x.is_finite() || !y.is_finite() {
            c.non_finite[0] += u64::from(!x.is_finite());
            c.non_finite[1] += u64::from(!y.is_finite());
            c.non_finite_equal &= x == y || x.is_nan() && y.is_nan();
            continue;
        }
        finite += 1;
        let (wide_x, wide_y) = (f64::from(x), f64::from(y));
        let difference = (wide_x - wide_y).abs();
        if difference > c.max_abs {
            (c.max_abs, c.worst) = (difference, Some(i));
        }
        let size = wide_x.abs().max(wide_y.abs()).max(f64::from(f32::MIN_POSITIVE));
        c.max_rel = c.max_rel.max(difference / size);
        c.largest = c.largest.max(wide_x.abs());
        squares += difference * difference;
        aa += wide_x * wide_x;
        bb += wide_y * wide_y;
        ab += wide_x * wide_y;
        let apart = key(x).abs_diff(key(y));
        c.ulp_histogram[(64 - apart.leading_zeros()) as usize] += 1;
    }
    c.rms_diff = (squares / finite.max(1) as f64).sqrt();
    c.cosine = ab / (aa * bb).sqrt();
    c
}

/// Counts, places and maxima are equal; sums agree to the rounding of their orders.
fn same(a: &Comparison, b: &Comparison) -> bool {
    let near = |a: f64, b: f64| (a - b).abs() <= 1e-6 * a.abs().max(b.abs());
    (a.elements, a.bytes_equal, a.first, a.worst) == (b.elements, b.bytes_equal, b.first, b.worst)
        && (a.ulp_histogram, a.non_finite, a.non_finite_equal)
            == (b.ulp_histogram, b.non_finite, b.non_finite_equal)
        && (a.max_abs, a.largest) == (b.max_abs, b.largest)
        && near(a.max_rel, b.max_rel)
        && near(a.rms_diff, b.rms_diff)
        && near(a.cosine, b.cosine)
}

#[cfg(test)]
mod tests {
    use super::*;

    // Two independent programs for the same statistics.
    #[test]
    fn the_plain_loop_finds_the_same() {
        let (a, b) = arrays(5000);
        assert!(same(&plain(&a, &b), &own(&a, &b)));
        let mut c = b.clone();
        c[4000] += 1.0;
        assert!(!same(&plain(&a, &b), &own(&a, &c)));
        assert_eq!(plain(&a, &c).worst, Some(4000));
    }
}
