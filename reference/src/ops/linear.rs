//! The linear projection: where transposed weights hide.
//!
//! Speed comes from many sums side by side and from threads over outputs; every sum still adds in its own
//! order, so neither changes a bit. A fused multiply-add does not either: the product of two f32 is exact.

use multiversion::multiversion;
use multiversion::target::target_cfg_f;
use ndarray::{Array2, ArrayView2, Axis};
use rayon::prelude::*;
use spec::NonFinite;
use spec::families::Linear;

/// Token rows whose sums run side by side; of a single token row, weight rows.
const SIDE_BY_SIDE: usize = 8;

/// Weight rows that one thread decodes and applies at a time.
const ROWS_A_TASK: usize = 16;

/// Multiplies every row of `x` by the transposed weight and adds the bias.
///
/// ```text
/// y[t, o] = Σ_i x[t, i] · w[o, i] + b[o]
/// ```
///
/// `x` is `[tokens, in]`, `w` is `[out, in]` as checkpoints store it, the result is `[tokens, out]`.
/// The sum runs over i from 0 upwards in f64; products of two f32 are exact there; the bias is
/// added last. A weight row is decoded, used for all tokens and dropped.
pub fn linear(x: ArrayView2<f32>, w: &Linear) -> Result<Array2<f64>, NonFinite> {
    let (tokens, inner) = x.dim();
    let (out, weight) = (w.weight.out(), &w.weight);
    assert_eq!(inner, weight.inner(), "linear: row length of x against row length of {}", weight.name());

    let x = Activations::new(x);
    let mut by_output = Array2::<f64>::zeros((out, tokens));
    let buffers = || (vec![0f32; ROWS_A_TASK * inner], Vec::new(), Vec::new());
    by_output.axis_chunks_iter_mut(Axis(0), ROWS_A_TASK).into_par_iter().enumerate().try_for_each_init(
        buffers,
        |(decoded, wide, sums), (task, mut y)| {
            let first = task * ROWS_A_TASK;
            let decoded = &mut decoded[..y.nrows() * inner];
            for (r, row) in decoded.chunks_exact_mut(inner.max(1)).enumerate() {
                weight.decode(first + r, row)?;
            }
            let y = y.as_slice_mut().expect("linear: outputs in order");
            match &x {
                Activations::One(x) => dots(x, decoded, y),
                Activations::Blocks(blocks) => {
                    let rows = y.len() / tokens.max(1);
                    sums.resize(blocks.len() * rows, [0.0; SIDE_BY_SIDE]);
                    products(blocks, decoded, wide, sums);
                    for (block, sums) in sums.chunks_exact(rows).enumerate() {
                        for (y, sums) in y.chunks_exact_mut(tokens).zip(sums) {
                            y[block * SIDE_BY_SIDE..].iter_mut().zip(sums).for_each(|(y, sum)| *y = *sum);
                        }
                    }
                }
            }
            if let Some(bias) = &w.bias {
                for (y, &bias) in y.chunks_exact_mut(tokens.max(1)).zip(&bias[first..]) {
                    y.iter_mut().for_each(|y| *y += f64::from(bias));
                }
            }
            Ok(())
        },
    )?;
    Ok(by_output.reversed_axes().as_standard_layout().into_owned())
}

/// The values of eight token rows in one column, or their sums.
type Side = [f64; SIDE_BY_SIDE];

/// Token rows in f64, as the loops below walk them.
enum Activations {
    /// The one row.
    One(Vec<f64>),
    /// Blocks of eight rows, each stored column after column; the last block is filled up with 0.
    Blocks(Vec<Vec<Side>>),
}

impl Activations {
    fn new(x: ArrayView2<f32>) -> Activations {
        if x.nrows() == 1 {
            return Activations::One(x.iter().map(|&v| f64::from(v)).collect());
        }
        let block = |rows: ArrayView2<f32>| {
            let mut block = vec![[0.0; SIDE_BY_SIDE]; rows.ncols()];
            for (r, row) in rows.rows().into_iter().enumerate() {
                for (column, &v) in block.iter_mut().zip(row) {
                    column[r] = f64::from(v);
                }
            }
            block
        };
        let blocks = x.axis_chunks_iter(Axis(0), SIDE_BY_SIDE).map(block).collect();
        Activations::Blocks(blocks)
    }
}

/// `sums[block, o][t] = Σ_k x[8·block + t, k] · w[o, k]` for some weight rows and all token rows.
///
/// `wide` is working memory. Four weight rows meet eight token rows at a time; eight do where the machine has
/// registers for them.
#[multiversion(targets("x86_64+avx512f+avx512bw+avx512dq+avx512vl+avx2+fma", "x86_64+avx2+fma"))]
fn products(blocks: &[Vec<Side>], w: &[f32], wide: &mut Vec<f64>, sums: &mut [Side]) {
    const FUSED: bool = target_cfg_f!(target_feature = "fma");
    const ROWS: usize = if target_cfg_f!(target_feature = "avx512f") { 8 } else { 4 };
    wide.clear();
    wide.extend(w.iter().map(|&w| f64::from(w)));
    for (x, sums) in blocks.iter().zip(sums.chunks_exact_mut((sums.len() / blocks.len().max(1)).max(1))) {
        let (panels, rest) = sums.as_chunks_mut::<ROWS>();
        let (w, w_rest) = wide.split_at(panels.len() * ROWS * x.len());
        for (w, sums) in w.chunks_exact((ROWS * x.len()).max(1)).zip(panels) {
            panel::<ROWS, FUSED>(x, w, sums);
        }
        for (w, sum) in w_rest.chunks_exact(x.len().max(1)).zip(rest) {
            panel::<1, FUSED>(x, w, std::array::from_mut(sum));
        }
    }
}

/// The sums of R weight rows with eight token rows. They are stored all at once: a loop that ends otherwise
/// is not turned into vectors, and takes twenty times as long.
#[inline(always)]
fn panel<const R: usize, const FUSED: bool>(x: &[Side], w: &[f64], into: &mut [Side; R]) {
    let w: [&[f64]; R] = std::array::from_fn(|r| &w[r * x.len()..][..x.len()]);
    let mut sums = [[0.0; SIDE_BY_SIDE]; R];
    for (k, x) in x.iter().enumerate() {
        for r in 0..R {
            for t in 0..SIDE_BY_SIDE {
                sums[r][t] = add_product::<FUSED>(sums[r][t], x[t], w[r][k]);
            }
        }
    }
    *into = sums;
}

/// `sum + x · w`; the product of two f32 is exact in f64, so both ways give the same bits.
#[inline(always)]
fn add_product<const FUSED: bool>(sum: f64, x: f64, w: f64) -> f64 {
    if FUSED { x.mul_add(w, sum) } else { sum + x * w }
}

/// `y[o] = Σ_k x[k] · w[o, k]`: one token row meets eight weight rows at a time.
#[multiversion(targets("x86_64+avx2+fma"))]
fn dots(x: &[f64], w: &[f32], y: &mut [f64]) {
    const FUSED: bool = target_cfg_f!(target_feature = "fma");
    let (panels, rest) = y.as_chunks_mut::<SIDE_BY_SIDE>();
    let (w, w_rest) = w.split_at(panels.len() * SIDE_BY_SIDE * x.len());
    for (w, y) in w.chunks_exact((SIDE_BY_SIDE * x.len()).max(1)).zip(panels) {
        dot_rows::<SIDE_BY_SIDE, FUSED>(x, w, y);
    }
    for (w, y) in w_rest.chunks_exact(x.len().max(1)).zip(rest) {
        dot_rows::<1, FUSED>(x, w, std::array::from_mut(y));
    }
}

/// The sums of R weight rows with one token row.
#[inline(always)]
fn dot_rows<const R: usize, const FUSED: bool>(x: &[f64], w: &[f32], y: &mut [f64; R]) {
    /// Columns that are turned over at a time, so that the values of R rows stand side by side.
    const TURNED: usize = 8;
    let w: [&[f32]; R] = std::array::from_fn(|r| &w[r * x.len()..][..x.len()]);
    let mut sums = [0.0; R];
    let (whole, rest) = x.as_chunks::<TURNED>();
    let parts = w.map(|w| &w.as_chunks::<TURNED>().0[..whole.len()]);
    for (k, x) in whole.iter().enumerate() {
        let mut turned = [[0f32; R]; TURNED];
        for r in 0..R {
            for i in 0..TURNED {
                turned[i][r] = parts[r][k][i];
            }
        }
        for i in 0..TURNED {
            for r in 0..R {
                sums[r] = add_product::<FUSED>(sums[r], x[i], f64::from(turned[i][r]));
            }
        }
    }
    *y = sums;
    for (k, &x) in (x.len() - rest.len()..).zip(rest) {
        for r in 0..R {
            y[r] = add_product::<FUSED>(y[r], x, f64::from(w[r][k]));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ndarray::array;
    use proptest::prelude::*;
    use spec::{Matrix, Vector};

    fn plain(out: usize, inner: usize, values: Vec<f32>) -> Linear {
        Linear { weight: Matrix::from_values("w", out, inner, values), bias: None }
    }

    // Each product lands in its own decimal place: 1·1 + 10·2 = 21, 1·3 + 10·4 = 43.
    // Transposed, the answer would be 31 and 42.
    #[test]
    fn reads_rows_of_w() {
        let y = linear(array![[1.0, 10.0]].view(), &plain(2, 2, vec![1.0, 2.0, 3.0, 4.0])).unwrap();
        assert_eq!(y, array![[21.0, 43.0]]);
    }

    #[test]
    fn the_bias_belongs_to_the_output() {
        let mut w = plain(2, 1, vec![1.0, 2.0]);
        w.bias = Some(Vector::new("b", vec![100.0, 200.0]));
        assert_eq!(linear(array![[1.0], [3.0]].view(), &w).unwrap(), array![[101.0, 202.0], [103.0, 206.0]]);
    }

    proptest! {
        // A one-hot row picks out one column of w, exactly; on every side of the blocks of 8 and 16.
        #[test]
        fn one_hot_picks_a_column(tokens in 1usize..20, out in 1usize..40, inner in 1usize..9, pick in 0usize..9) {
            let pick = pick % inner;
            let w = plain(out, inner, (0..out * inner).map(|n| (100 * (n / inner) + n % inner) as f32).collect());
            let x = Array2::from_shape_fn((tokens, inner), |(t, i)| if i == pick { (t + 1) as f32 } else { 0.0 });
            let y = linear(x.view(), &w).unwrap();
            for t in 0..tokens {
                for o in 0..out {
                    prop_assert_eq!(y[[t, o]], ((t + 1) * (100 * o + pick)) as f64);
                }
            }
        }

        // The blocks change no bit: every output is the plain left-to-right dot product. 21 outputs are a whole
        // task of sixteen, and a task of a panel and a rest.
        #[test]
        fn blocks_keep_the_order_of_the_sum(tokens in 1usize..19, inner in 1usize..30, seed in any::<u32>()) {
            const OUT: usize = 21;
            let value = |n: usize| {
                let mixed = (n as u32).wrapping_mul(2_654_435_761).wrapping_add(seed);
                (f64::from(mixed) * 1e-9 - 2.0) as f32
            };
            let w = plain(OUT, inner, (0..OUT * inner).map(value).collect());
            let x = Array2::from_shape_fn((tokens, inner), |(t, i)| value(1000 + t * inner + i));
            let y = linear(x.view(), &w).unwrap();
            let w = w.weight.to_values().unwrap();
            for t in 0..tokens {
                for o in 0..OUT {
                    prop_assert_eq!(y[[t, o]], crate::sum::dot(x.row(t), &w[o * inner..][..inner]));
                }
            }
        }
    }
}
