//! Dot products of many rows, each added left to right.
//!
//! Speed comes from many sums side by side; every sum still adds in its own order. Where the operands are f32,
//! a fused multiply-add changes no bit either: their product is exact in f64.

use multiversion::multiversion;
use multiversion::target::target_cfg_f;

/// Rows of `x` whose sums run side by side; of a single one, rows of `w`.
const SIDE_BY_SIDE: usize = 8;

/// The values of eight rows in one column, or their sums.
type Side = [f64; SIDE_BY_SIDE];

/// Rows `[rows, inner]` in blocks of eight, each stored column after column; the last block is filled up
/// with 0.
pub struct Blocks {
    rows: usize,
    blocks: Vec<Vec<Side>>,
}

impl Blocks {
    /// The rows whose values are `value(row, column)`.
    pub fn new(rows: usize, inner: usize, value: impl Fn(usize, usize) -> f64) -> Blocks {
        let block = |first: usize| {
            let mut block = vec![[0.0; SIDE_BY_SIDE]; inner];
            for row in first..rows.min(first + SIDE_BY_SIDE) {
                for (i, column) in block.iter_mut().enumerate() {
                    column[row - first] = value(row, i);
                }
            }
            block
        };
        Blocks { rows, blocks: (0..rows).step_by(SIDE_BY_SIDE).map(block).collect() }
    }

    /// `y[o, t] = Σ_k x[t, k] · w[o, k]`, k from 0 upwards; `w` is `[out, inner]`, `y` is `[out, rows]`.
    ///
    /// # Panics
    /// If `w` is not as many rows as `y`.
    pub fn products(&self, w: &[f64], y: &mut [f64]) {
        let (out, inner) = (y.len() / self.rows.max(1), self.blocks.first().map_or(0, Vec::len));
        assert_eq!(w.len(), out * inner, "products: values of w against {out} rows of {inner}");
        let mut sums = vec![[0.0; SIDE_BY_SIDE]; self.blocks.len() * out];
        products(&self.blocks, w, &mut sums);
        for (block, sums) in sums.chunks_exact(out.max(1)).enumerate() {
            for (y, sums) in y.chunks_exact_mut(self.rows).zip(sums) {
                y[block * SIDE_BY_SIDE..].iter_mut().zip(sums).for_each(|(y, sum)| *y = *sum);
            }
        }
    }
}

/// Columns that are walked for many rows before the next: what eight rows hold of them stays in the first-level cache.
const DEPTH: usize = 128;

/// `sums[block, o][t] = Σ_k x[8·block + t, k] · w[o, k]`, two blocks at a time.
#[multiversion(targets("x86_64+avx512f+avx512bw+avx512dq+avx512vl+avx2+fma", "x86_64+avx2+fma"))]
fn products(blocks: &[Vec<Side>], w: &[f64], sums: &mut [Side]) {
    const FUSED: bool = target_cfg_f!(target_feature = "fma");
    // As many rows of w as there are registers for.
    const ROWS: usize = if target_cfg_f!(target_feature = "avx512f") { 8 } else { 2 };
    let out = (sums.len() / blocks.len().max(1)).max(1);
    for (x, sums) in blocks.chunks(2).zip(sums.chunks_mut(2 * out)) {
        match (x, sums.split_at_mut(out)) {
            ([x, y], (of_x, of_y)) => some_blocks::<ROWS, 2, FUSED>([x, y], w, [of_x, of_y]),
            (x, (of_x, _)) => some_blocks::<ROWS, 1, FUSED>([&x[0]], w, [of_x]),
        }
    }
}

/// [`products`] of B blocks: R rows of `w` meet them at a time.
#[inline(always)]
fn some_blocks<const R: usize, const B: usize, const FUSED: bool>(
    x: [&[Side]; B],
    w: &[f64],
    mut sums: [&mut [Side]; B],
) {
    let (inner, out) = (x[0].len(), sums[0].len());
    for start in (0..inner).step_by(DEPTH) {
        let x = x.map(|x| &x[start..inner.min(start + DEPTH)]);
        let mut row = 0;
        while row + R <= out {
            panel::<R, B, FUSED>(x, &w[row * inner + start..], inner, &mut sums, row);
            row += R;
        }
        for row in row..out {
            panel::<1, B, FUSED>(x, &w[row * inner + start..], inner, &mut sums, row);
        }
    }
}

/// Adds the products of R rows of `w`, `inner` apart, to the sums of row `row` and those behind it. They are stored
/// all at once: a loop that ends otherwise is not turned into vectors, and takes twenty times as long.
#[inline(always)]
fn panel<const R: usize, const B: usize, const FUSED: bool>(
    x: [&[Side]; B],
    w: &[f64],
    inner: usize,
    into: &mut [&mut [Side]; B],
    row: usize,
) {
    let count = x[0].len();
    let x = x.map(|x| &x[..count]);
    let w: [&[f64]; R] = std::array::from_fn(|r| &w[r * inner..][..count]);
    let mut sums = [[[0.0; SIDE_BY_SIDE]; R]; B];
    for b in 0..B {
        sums[b].copy_from_slice(&into[b][row..row + R]);
    }
    for k in 0..count {
        for r in 0..R {
            for b in 0..B {
                for t in 0..SIDE_BY_SIDE {
                    sums[b][r][t] = add_product::<FUSED>(sums[b][r][t], x[b][k][t], w[r][k]);
                }
            }
        }
    }
    for b in 0..B {
        into[b][row..row + R].copy_from_slice(&sums[b]);
    }
}

/// `sum + x · w`; where the product is exact both ways give the same bits.
#[inline(always)]
fn add_product<const FUSED: bool>(sum: f64, x: f64, w: f64) -> f64 {
    if FUSED { x.mul_add(w, sum) } else { sum + x * w }
}

/// `y[o] = Σ_k x[k] · w[o · stride + k]`: one row meets eight rows of `w` at a time.
///
/// Both hold values of f32, so that the products are exact.
#[multiversion(targets("x86_64+avx2+fma"))]
pub(crate) fn dots(x: &[f64], w: &[f32], stride: usize, y: &mut [f64]) {
    const FUSED: bool = target_cfg_f!(target_feature = "fma");
    let (panels, rest) = y.as_chunks_mut::<SIDE_BY_SIDE>();
    let first_of_rest = panels.len() * SIDE_BY_SIDE;
    for (n, y) in panels.iter_mut().enumerate() {
        dot_rows::<SIDE_BY_SIDE, FUSED>(x, &w[n * SIDE_BY_SIDE * stride..], stride, y);
    }
    for (n, y) in rest.iter_mut().enumerate() {
        dot_rows::<1, FUSED>(x, &w[(first_of_rest + n) * stride..], stride, std::array::from_mut(y));
    }
}

/// `y[i] += factor · x[i]`, where both are values of f32.
#[multiversion(targets("x86_64+avx2+fma"))]
pub(crate) fn add_scaled(y: &mut [f64], factor: f64, x: &[f32]) {
    const FUSED: bool = target_cfg_f!(target_feature = "fma");
    for (y, &x) in y.iter_mut().zip(x) {
        *y = add_product::<FUSED>(*y, factor, f64::from(x));
    }
}

/// The sums of R rows of `w`, `stride` apart, with one row.
#[inline(always)]
fn dot_rows<const R: usize, const FUSED: bool>(x: &[f64], w: &[f32], stride: usize, y: &mut [f64; R]) {
    /// Columns that are turned over at a time, so that the values of R rows stand side by side.
    const TURNED: usize = 8;
    let w: [&[f32]; R] = std::array::from_fn(|r| &w[r * stride..][..x.len()]);
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
