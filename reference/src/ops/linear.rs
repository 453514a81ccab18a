//! The linear projection: where transposed weights hide.

use crate::products::{Blocks, dots};
use ndarray::{Array2, ArrayView2, Axis};
use rayon::prelude::*;
use spec::NonFinite;
use spec::families::Linear;

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

    // A single row meets many weight rows side by side, many rows meet each other.
    let one: Option<Vec<f64>> = (tokens == 1).then(|| x.iter().map(|&v| f64::from(v)).collect());
    let blocks = Blocks::new(if tokens == 1 { 0 } else { tokens }, inner, |t, i| f64::from(x[[t, i]]));
    let mut by_output = Array2::<f64>::zeros((out, tokens));
    let buffers = || (vec![0f32; ROWS_A_TASK * inner], Vec::new());
    by_output.axis_chunks_iter_mut(Axis(0), ROWS_A_TASK).into_par_iter().enumerate().try_for_each_init(
        buffers,
        |(decoded, wide), (task, mut y)| {
            let first = task * ROWS_A_TASK;
            let decoded = &mut decoded[..y.nrows() * inner];
            for (r, row) in decoded.chunks_exact_mut(inner.max(1)).enumerate() {
                weight.decode(first + r, row)?;
            }
            let y = y.as_slice_mut().expect("linear: outputs in order");
            if let Some(x) = &one {
                dots(x, decoded, inner, y);
            } else {
                wide.clear();
                wide.extend(decoded.iter().map(|&w| f64::from(w)));
                blocks.products(wide, y);
            }
            if let Some(bias) = &w.bias {
                for (y, &bias) in y.chunks_exact_mut(tokens.max(1)).zip(&bias[first..]) {
                    y.iter_mut().for_each(|y| *y += f64::from(bias));
                }
            }
            Ok(())
        },
    )?;
    Ok(turned(&by_output))
}

/// `y[t, o] = by_output[o, t]`
fn turned(by_output: &Array2<f64>) -> Array2<f64> {
    /// Rows that are filled at a time: their lines stay in the first-level cache until they are full.
    const ROWS: usize = 8;
    let (out, tokens) = by_output.dim();
    let from = by_output.as_slice().expect("linear: outputs in order");
    let mut y = vec![0.0; tokens * out];
    let fill = |(part, y): (usize, &mut [f64])| {
        let count = y.len() / out;
        for (o, sums) in from.chunks_exact(tokens).enumerate() {
            for (t, sum) in sums[part * ROWS..][..count].iter().enumerate() {
                y[t * out + o] = *sum;
            }
        }
    };
    let rows = (ROWS * out).max(1);
    // Few outputs are faster turned than a thread is woken.
    if tokens * out < 1 << 13 {
        y.chunks_mut(rows).enumerate().for_each(fill);
    } else {
        y.par_chunks_mut(rows).enumerate().for_each(fill);
    }
    Array2::from_shape_vec((tokens, out), y).expect("linear: one value an output")
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
