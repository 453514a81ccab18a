//! Attention over cached keys and values, with a softmax that never holds a row of scores.

use super::cache::{Head, KEYS, KvCache};
use super::math::{exp, softcap};
use super::wide::{kernel, wide};
use super::{LANES, fold};
use crate::simd::lanes::Lanes;
use crate::simd::{Kernel, prefetch};
use rayon::prelude::*;
use std::ops::Range;

/// What distinguishes one layer's attention from another's.
#[derive(Clone, Copy, Debug)]
pub struct Attention<'a> {
    /// Number of query heads; head `j` reads key head `j / (heads / key heads)`.
    pub heads: usize,
    /// What scores are multiplied by.
    pub scale: f32,
    /// Keys that a row may attend to, its own included; nothing means all up to its own.
    pub window: Option<usize>,
    /// Scores become `cap · tanh(score / cap)` before the softmax.
    pub softcap: Option<f32>,
    /// One logit a query head that takes part in the softmax and has no value.
    pub sinks: Option<&'a [f32]>,
}

/// Keys that are weighed against each other before the running maximum is moved.
const BLOCK: usize = 4 * KEYS;

/// Queries that share the loading of keys and values.
const TILE: usize = 8;

/// Up to as many queries are bound by memory: while they meet the keys of a block its values are asked for, and the
/// keys of the next block while they meet the values.
const FEW: usize = 2;

/// One query: a head of a row, and the keys it sees.
#[derive(Clone, Copy)]
struct Query<'a> {
    values: &'a [f32],
    sink: Option<f32>,
    /// Keys `first..end`.
    first: usize,
    end: usize,
}

impl Attention<'_> {
    /// Context rows `[rows, heads, value_dim]` of queries `[rows, heads, key_dim]`.
    ///
    /// ```text
    /// s_k = scale · (q · k_k)      p_k = e^(s_k − m) / (Σ_j e^(s_j − m) + e^(sink − m))
    /// context = Σ_k p_k · v_k      k from position − window + 1 (or 0) to position
    /// ```
    ///
    /// Query row `r` stands at position `start + r`, whose key is already in the cache. Keys are
    /// visited in blocks of 64 counted from position 0; when a block raises the maximum `m`, what was
    /// summed before is multiplied by `e^(old − new)` (arXiv 1805.02867). A dot product adds from left
    /// to right, and so does a value over the keys of a row.
    pub fn run(&self, queries: &[f32], cache: &KvCache, start: usize) -> Vec<f32> {
        self.run_with(kernel(), queries, cache, start)
    }

    fn run_with(&self, kernel: Kernel, queries: &[f32], cache: &KvCache, start: usize) -> Vec<f32> {
        let keys = |r: usize| {
            let end = start + r + 1;
            self.window.map_or(0, |window| end.saturating_sub(window))..end
        };
        self.over(kernel, queries, cache, &keys)
    }

    /// The same where query row `r` sees the keys `keys(r)`, at least one, whatever the window: the rows of a
    /// draft's block see each other both ways.
    pub fn run_over(
        &self,
        queries: &[f32],
        cache: &KvCache,
        keys: impl Fn(usize) -> Range<usize>,
    ) -> Vec<f32> {
        self.over(kernel(), queries, cache, &keys)
    }

    fn over(
        &self,
        kernel: Kernel,
        queries: &[f32],
        cache: &KvCache,
        keys: &dyn Fn(usize) -> Range<usize>,
    ) -> Vec<f32> {
        let (key_dim, value_dim) = (cache.key_dim(), cache.value_dim());
        let rows = queries.len() / (self.heads * key_dim);
        let group = self.heads / cache.heads();
        let seen: Vec<Range<usize>> = (0..rows).map(keys).collect();
        let most = seen.iter().fold(0, |most, keys| most.max(keys.end));
        assert!(most <= cache.len() && seen.iter().all(|keys| !keys.is_empty()), "attention: keys of a row");
        // Per key head: the queries of its group, row after row.
        let order = |h: usize| (0..rows * group).map(move |n| (n / group, h * group + n % group));
        let mut grouped = vec![0.0; rows * self.heads * value_dim];
        let one = |(n, into): (usize, &mut [f32])| {
            let tiles = (rows * group).div_ceil(TILE);
            let (h, tile) = (n / tiles, n % tiles);
            let queries: Vec<Query> = order(h)
                .skip(tile * TILE)
                .take(TILE)
                .map(|(r, head)| Query {
                    values: &queries[(r * self.heads + head) * key_dim..][..key_dim],
                    sink: self.sinks.map(|sinks| sinks[head]),
                    first: seen[r].start,
                    end: seen[r].end,
                })
                .collect();
            self.tiles(kernel, &queries, cache.head(h), value_dim, into);
        };
        // Tiles do not reach over the end of a key head's queries.
        let per_head = rows * group * value_dim;
        let mut parts: Vec<(usize, &mut [f32])> = Vec::new();
        for head in grouped.chunks_exact_mut(per_head) {
            for part in head.chunks_mut(TILE * value_dim) {
                parts.push((parts.len(), part));
            }
        }
        if rows * most * self.heads * key_dim < super::GRAIN {
            parts.into_iter().for_each(one);
        } else {
            parts.into_par_iter().for_each(one);
        }
        if rows == 1 {
            return grouped; // already in the order of the heads
        }
        let mut context = vec![0.0; grouped.len()];
        for h in 0..cache.heads() {
            for ((r, head), from) in order(h).zip(grouped[h * per_head..].chunks_exact(value_dim)) {
                context[(r * self.heads + head) * value_dim..][..value_dim].copy_from_slice(from);
            }
        }
        context
    }

    /// Up to eight queries of one key head; `into` is `[queries, value_dim]`, zero.
    fn tiles(&self, kernel: Kernel, queries: &[Query], head: &Head, value_dim: usize, into: &mut [f32]) {
        let (mut queries, mut into) = (queries, into);
        while !queries.is_empty() {
            let count = [8, 4, 2, 1].into_iter().find(|n| *n <= queries.len()).unwrap_or(1);
            let (now, later) = queries.split_at(count);
            let (to, rest) = into.split_at_mut(count * value_dim);
            match count {
                8 => tile::<8>(kernel, self.scale, self.softcap, now, head, to),
                4 => tile::<4>(kernel, self.scale, self.softcap, now, head, to),
                2 => tile::<2>(kernel, self.scale, self.softcap, now, head, to),
                _ => tile::<1>(kernel, self.scale, self.softcap, now, head, to),
            }
            (queries, into) = (later, rest);
        }
    }
}

wide! {
    /// `Q` queries of one key head. The bits of a query do not depend on the others.
    fn tile[Q, lanes](scale: f32, cap: Option<f32>, queries: &[Query], head: &Head, into: &mut [f32]) {
        let value_dim = into.len() / Q;
        let first = queries.iter().fold(usize::MAX, |a, q| a.min(q.first));
        let end = queries.iter().fold(0, |a, q| a.max(q.end));
        let mut max: [f32; Q] = std::array::from_fn(|n| queries[n].sink.unwrap_or(f32::NEG_INFINITY));
        let mut sum: [f32; Q] = std::array::from_fn(|n| if queries[n].sink.is_some() { 1.0 } else { 0.0 });
        let mut weights = [[0.0f32; BLOCK]; Q];
        for block in first / BLOCK..end.div_ceil(BLOCK) {
            let start = block * BLOCK;
            let panels = (end.min(start + BLOCK) - start).div_ceil(KEYS);
            // As many sums at once as there are registers for, at most sixteen.
            let at_once = if Q > 4 { 2 } else { 4 };
            let together = panels / at_once * at_once;
            for panel in (0..together).step_by(at_once) {
                if Q > 4 {
                    products::<_, Q, 2>(lanes, queries, head, start, panel, &mut weights);
                } else {
                    products::<_, Q, 4>(lanes, queries, head, start, panel, &mut weights);
                }
            }
            for panel in together..panels {
                products::<_, Q, 1>(lanes, queries, head, start, panel, &mut weights);
            }
            // Keys of the block that each query sees, and those that all of them see.
            let seen: [(usize, usize); Q] = std::array::from_fn(|n| {
                let (first, end) = (queries[n].first, queries[n].end);
                (first.saturating_sub(start).min(BLOCK), end.saturating_sub(start).min(BLOCK))
            });
            let from = seen.iter().fold(0, |from, s| from.max(s.0));
            let to = seen.iter().fold(BLOCK, |to, s| to.min(s.1)).max(from);
            for n in 0..Q {
                if seen[n].0 < seen[n].1 {
                    let into = &mut into[n * value_dim..][..value_dim];
                    weigh(scale, cap, seen[n].0, seen[n].1, &mut weights[n], &mut max[n], &mut sum[n], into);
                }
            }
            // A value adds its keys in their order: those before the common ones, the common ones, those behind.
            for n in 0..Q {
                let into = &mut into[n * value_dim..][..value_dim];
                add_values::<_, 1>(lanes, head, start, (seen[n].0, seen[n].1.min(from)), &[weights[n]], into);
            }
            add_values::<_, Q>(lanes, head, start, (from, to), &weights, into);
            for n in 0..Q {
                let into = &mut into[n * value_dim..][..value_dim];
                add_values::<_, 1>(lanes, head, start, (seen[n].0.max(to), seen[n].1), &[weights[n]], into);
            }
        }
        for (into, sum) in into.chunks_exact_mut(value_dim).zip(sum) {
            into.iter_mut().for_each(|v| *v /= sum);
        }
    }
}

/// `q · k` for the `16 · S` keys from panel `panel` of the block at `start` on, all side by side.
#[inline(always)]
fn products<L: Lanes, const Q: usize, const S: usize>(
    lanes: L,
    queries: &[Query],
    head: &Head,
    start: usize,
    panel: usize,
    into: &mut [[f32; BLOCK]; Q],
) {
    let columns: [&[[f32; KEYS]]; S] = std::array::from_fn(|s| head.keys(start + (panel + s) * KEYS));
    let dim = columns[0].len();
    let columns = columns.map(|columns| &columns[..dim]);
    let queries: [&[f32]; Q] = std::array::from_fn(|n| &queries[n].values[..dim]);
    let ahead = head.values_ahead(start);
    let mut acc = [[lanes.splat(0.0); S]; Q];
    for i in 0..dim {
        let mut column = [lanes.splat(0.0); S];
        for s in 0..S {
            if Q <= FEW {
                prefetch(ahead, 4 * ((panel + s) * dim + i) * KEYS);
            }
            column[s] = lanes.load(&columns[s][i]);
        }
        for n in 0..Q {
            let q = lanes.splat(queries[n][i]);
            for s in 0..S {
                acc[n][s] = lanes.add_product(acc[n][s], q, column[s]);
            }
        }
    }
    for n in 0..Q {
        let into = into[n].as_chunks_mut().0;
        for s in 0..S {
            lanes.store(acc[n][s], &mut into[panel + s]);
        }
    }
}

/// Turns products into weights `e^(score − max)`, 0 outside `from..to`; moves `max` and `sum`, and fades
/// what was summed before.
#[inline(always)]
fn weigh(
    scale: f32,
    cap: Option<f32>,
    from: usize,
    to: usize,
    weights: &mut [f32; BLOCK],
    max: &mut f32,
    sum: &mut f32,
    into: &mut [f32],
) {
    weights.iter_mut().for_each(|w| *w *= scale);
    if let Some(cap) = cap {
        weights.iter_mut().for_each(|w| *w = softcap(*w, cap));
    }
    weights[..from].fill(f32::NEG_INFINITY);
    weights[to..].fill(f32::NEG_INFINITY);
    let mut tops = [f32::NEG_INFINITY; LANES];
    for scores in weights.as_chunks::<LANES>().0 {
        for l in 0..LANES {
            tops[l] = if scores[l] > tops[l] { scores[l] } else { tops[l] };
        }
    }
    let top = tops.iter().fold(*max, |a, &b| if b > a { b } else { a });
    if top > *max {
        let fade = exp(*max - top);
        *sum *= fade;
        into.iter_mut().for_each(|v| *v *= fade);
        *max = top;
    }
    let mut sums = [0.0; LANES];
    for weights in weights.as_chunks_mut::<LANES>().0 {
        for l in 0..LANES {
            weights[l] = exp(weights[l] - top);
            sums[l] += weights[l];
        }
    }
    *sum += fold(sums);
}

/// `into[n] += weights[n][k] · v_k` over the keys `from..to` of the block, if there are any.
#[inline(always)]
fn add_values<L: Lanes, const Q: usize>(
    lanes: L,
    head: &Head,
    start: usize,
    (from, to): (usize, usize),
    weights: &[[f32; BLOCK]; Q],
    into: &mut [f32],
) {
    if from >= to {
        return;
    }
    let rows = head.values(start + from, start + to);
    let weights: [&[f32]; Q] = std::array::from_fn(|n| &weights[n][from..to]);
    let value_dim = into.len() / Q;
    // As many sums at once as there are registers for: whole rows of values where the queries are few.
    let mut column = 0;
    let at_once = if Q > 4 {
        2
    } else if Q > 2 {
        4
    } else {
        8
    };
    while column + at_once * LANES <= value_dim {
        if Q > 4 {
            columns::<_, Q, 2>(lanes, head, start + BLOCK, rows, value_dim, column, &weights, into);
        } else if Q > 2 {
            columns::<_, Q, 4>(lanes, head, start + BLOCK, rows, value_dim, column, &weights, into);
        } else {
            columns::<_, Q, 8>(lanes, head, start + BLOCK, rows, value_dim, column, &weights, into);
        }
        column += at_once * LANES;
    }
    while column + LANES <= value_dim {
        columns::<_, Q, 1>(lanes, head, start + BLOCK, rows, value_dim, column, &weights, into);
        column += LANES;
    }
    for (k, row) in rows.chunks_exact(value_dim).enumerate() {
        for n in 0..Q {
            for column in column..value_dim {
                into[n * value_dim + column] += weights[n][k] * row[column];
            }
        }
    }
}

/// [`add_values`] for the `16 · C` columns from `column` on, all side by side.
#[inline(always)]
fn columns<L: Lanes, const Q: usize, const C: usize>(
    lanes: L,
    head: &Head,
    next: usize,
    rows: &[f32],
    value_dim: usize,
    column: usize,
    weights: &[&[f32]; Q],
    into: &mut [f32],
) {
    let ahead = head.keys_ahead(next);
    let mut acc = [[lanes.splat(0.0); C]; Q];
    for n in 0..Q {
        let into = into[n * value_dim + column..].as_chunks().0;
        for c in 0..C {
            acc[n][c] = lanes.load(&into[c]);
        }
    }
    for (k, row) in rows.chunks_exact(value_dim).enumerate() {
        let row: &[[f32; LANES]; C] = row[column..].as_chunks().0.first_chunk().expect("columns of a row");
        let mut v = [lanes.splat(0.0); C];
        for c in 0..C {
            if Q <= FEW {
                prefetch(ahead, 4 * (k * value_dim + column + c * LANES));
            }
            v[c] = lanes.load(&row[c]);
        }
        for n in 0..Q {
            let w = lanes.splat(weights[n][k]);
            for c in 0..C {
                acc[n][c] = lanes.add_product(acc[n][c], w, v[c]);
            }
        }
    }
    for n in 0..Q {
        let into = into[n * value_dim + column..].as_chunks_mut().0;
        for c in 0..C {
            lanes.store(acc[n][c], &mut into[c]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn plain(heads: usize) -> Attention<'static> {
        Attention { heads, scale: 1.0, window: None, softcap: None, sinks: None }
    }

    // Two keys with scores ln 1 and ln 3 (query 1): weights 1/4 and 3/4 of values 8 and 100.
    #[test]
    fn two_keys_by_hand() {
        let mut cache = KvCache::new(1, 1, 1);
        cache.append(&[0.0, 3.0f32.ln()], &[8.0, 100.0]);
        let context = plain(1).run(&[9.0, 1.0], &cache, 0);
        assert_eq!(context[0], 8.0); // row 0 sees key 0 alone, whatever its query
        assert!((context[1] - 77.0).abs() < 1e-4, "{context:?}");
        // A sink of ln 4 adds 4 to 1 + 3: weights 1/8 and 3/8.
        let sinks = [4.0f32.ln()];
        let context = Attention { sinks: Some(&sinks), ..plain(1) }.run(&[1.0], &cache, 1);
        assert!((context[0] - 38.5).abs() < 1e-4, "{context:?}");
    }

    // Four query heads on two key heads: 0 and 1 read the first, 2 and 3 the second; two rows of them.
    #[test]
    fn heads_share_in_order() {
        let mut cache = KvCache::new(2, 1, 1);
        cache.append(&[1.0, 1.0], &[5.0, 7.0]);
        assert_eq!(plain(4).run(&[1.0; 4], &cache, 0), [5.0, 5.0, 7.0, 7.0]);
        cache.append(&[1.0, 1.0], &[15.0, 27.0]);
        assert_eq!(plain(4).run(&[1.0; 8], &cache, 0), [5.0, 5.0, 7.0, 7.0, 10.0, 10.0, 17.0, 17.0]);
    }

    // All keys alike: the context is the mean of the values in the window, here the last 3 of 5.
    #[test]
    fn a_window_counts_its_own_key() {
        let mut cache = KvCache::new(1, 2, 1);
        cache.append(&[0.0; 10], &[1.0, 10.0, 100.0, 1000.0, 10_000.0]);
        let context = Attention { window: Some(3), ..plain(1) }.run(&[1.0; 2], &cache, 4);
        assert!((context[0] - 11_100.0 / 3.0).abs() < 1e-3, "{context:?}");
    }

    // All keys alike, so a row's context is the mean of the values it sees: row 0 of all four, row 1 of the
    // second and third, behind and before itself.
    #[test]
    fn rows_may_see_what_is_behind_them() {
        let mut cache = KvCache::new(1, 1, 1);
        cache.append(&[0.0; 4], &[1.0, 10.0, 100.0, 1000.0]);
        let context = plain(1).run_over(&[1.0; 2], &cache, |r| if r == 0 { 0..4 } else { 1..3 });
        assert!((context[0] - 1111.0 / 4.0).abs() < 1e-4 && (context[1] - 55.0).abs() < 1e-5, "{context:?}");
    }

    /// Softmax in two passes over a row of scores, in f64: one value of one head of one row.
    fn two_pass(
        a: &Attention,
        q: &[f32],
        key: impl Fn(usize, usize) -> f32,
        value: impl Fn(usize) -> f32,
        end: usize,
    ) -> f64 {
        let first = a.window.map_or(0, |w| end.saturating_sub(w));
        let scores: Vec<f64> = (first..end)
            .map(|k| {
                let product: f64 =
                    q.iter().enumerate().map(|(i, q)| f64::from(*q) * f64::from(key(k, i))).sum();
                let score = product * f64::from(a.scale);
                a.softcap.map_or(score, |cap| f64::from(cap) * (score / f64::from(cap)).tanh())
            })
            .collect();
        let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let sum: f64 = scores.iter().map(|s| (s - max).exp()).sum();
        (first..end).zip(&scores).map(|(k, s)| (s - max).exp() / sum * f64::from(value(k))).sum()
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

        // 2 key heads of 3 and 18 values, 6 query heads, so that tiles are mixed and columns have a tail.
        #[test]
        fn streaming_equals_two_passes_on_every_kernel(
            numbers in prop::collection::vec(-3.0f32..3.0, 64),
            positions in 1usize..200,
            rows in 1usize..20,
            window in prop::option::of(1usize..150),
            softcap in prop::option::of(1.0f32..20.0),
        ) {
            let rows = rows.min(positions);
            let number = |n: usize| numbers[(n * n + 7 * n) % 61] + numbers[n % 64] * 0.5;
            let (heads, kv, dim, width) = (6, 2, 3, 18);
            let keys: Vec<f32> = (0..positions * kv * dim).map(number).collect();
            let values: Vec<f32> = (0..positions * kv * width).map(|n| number(n + 1000)).collect();
            let queries: Vec<f32> = (0..rows * heads * dim).map(|n| number(n + 5000)).collect();
            let mut cache = KvCache::new(kv, dim, width);
            cache.append(&keys, &values);
            let attention = Attention { window, softcap, scale: 0.7, ..plain(heads) };
            let start = positions - rows;
            let found = attention.run_with(Kernel::Portable, &queries, &cache, start);
            for (n, found) in found.iter().enumerate() {
                let (r, head, column) = (n / (heads * width), n / width % heads, n % width);
                let h = head / 3;
                let expected = two_pass(
                    &attention,
                    &queries[(r * heads + head) * dim..][..dim],
                    |k, i| keys[(k * kv + h) * dim + i],
                    |k| values[(k * kv + h) * width + column],
                    start + r + 1,
                );
                prop_assert!((f64::from(*found) - expected).abs() < 2e-5, "{n}: {found} against {expected}");
            }
            for kernel in Kernel::ALL.into_iter().filter(|kernel| kernel.is_supported()) {
                let other = attention.run_with(kernel, &queries, &cache, start);
                prop_assert!(other.iter().zip(&found).all(|(a, b)| a.to_bits() == b.to_bits()), "{kernel}");
            }
            // The last row by itself, in a tile of its own.
            let last = attention.run(&queries[(rows - 1) * heads * dim..], &cache, positions - 1);
            prop_assert!(last.iter().zip(&found[(rows - 1) * heads * width..]).all(|(a, b)| a.to_bits() == b.to_bits()));
        }
    }
}
