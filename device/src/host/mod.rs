//! What runs on the host side, in f32: everything but the matrix products.
//!
//! Every kernel computes a row from that row alone and in a fixed order, so the bits depend neither
//! on the number of threads nor on how rows are cut into launches.

pub mod act;
pub mod altup;
pub mod attention;
pub mod cache;
pub mod conv;
pub mod delta;
pub mod math;
pub mod norm;
pub mod rope;
pub mod router;
pub mod select;
mod wide;

/// Work below this many values is not worth handing to other threads.
const GRAIN: usize = 16 * 1024;

/// Number of lanes that a sum over a row is split into, whatever the width of the CPU's registers.
const LANES: usize = 16;

/// `Σ_i a[i] · b[i]` in f32: sixteen lanes, lane `l` adds `i = l, l + 16, …` in order, then the lanes
/// are added in pairs.
#[inline]
pub fn dot(a: &[f32], b: &[f32]) -> f32 {
    debug_assert_eq!(a.len(), b.len(), "dot: lengths");
    let mut lanes = [0.0f32; LANES];
    let (a_chunks, b_chunks) = (a.chunks_exact(LANES), b.chunks_exact(LANES));
    let (a_tail, b_tail) = (a_chunks.remainder(), b_chunks.remainder());
    for (a, b) in a_chunks.zip(b_chunks) {
        for l in 0..LANES {
            lanes[l] += a[l] * b[l];
        }
    }
    for (l, (a, b)) in a_tail.iter().zip(b_tail).enumerate() {
        lanes[l] += a * b;
    }
    fold(lanes)
}

/// The sum of sixteen lanes: 16 → 8 → 4 → 2 → 1.
#[inline]
fn fold(mut lanes: [f32; LANES]) -> f32 {
    let mut width = LANES / 2;
    while width > 0 {
        for l in 0..width {
            lanes[l] += lanes[l + width];
        }
        width /= 2;
    }
    lanes[0]
}

#[cfg(test)]
mod tests {
    use super::*;

    // 17 products 1·1, 2·1, …, 17·1: 17 · 18 / 2 = 153, the last one in the tail.
    #[test]
    fn dot_reads_the_tail() {
        let a: Vec<f32> = (1..=17).map(|v| v as f32).collect();
        assert_eq!(dot(&a, &[1.0; 17]), 153.0);
        assert_eq!(dot(&[], &[]), 0.0);
    }
}
