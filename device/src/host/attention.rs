//! Attention over cached keys and values, with a softmax that never holds a row of scores.

use super::dot;
use super::math::{exp, softcap};
use rayon::prelude::*;

/// Keys and values of one layer, a list for each head so that a head's keys lie behind each other.
///
/// All positions are kept, also those that a sliding window has left, so that taking back rows is
/// cutting the lists.
#[derive(Clone, Debug)]
pub struct KvCache {
    key_dim: usize,
    value_dim: usize,
    keys: Vec<Vec<f32>>,
    values: Vec<Vec<f32>>,
}

impl KvCache {
    /// An empty cache of `heads` key heads.
    pub fn new(heads: usize, key_dim: usize, value_dim: usize) -> Self {
        let lists = vec![Vec::new(); heads];
        Self { key_dim, value_dim, keys: lists.clone(), values: lists }
    }

    /// Number of positions held.
    pub fn len(&self) -> usize {
        self.keys.first().map_or(0, |keys| keys.len() / self.key_dim)
    }

    /// Whether no position is held.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Number of key heads.
    pub fn heads(&self) -> usize {
        self.keys.len()
    }

    /// Width of a key.
    pub fn key_dim(&self) -> usize {
        self.key_dim
    }

    /// Width of a value.
    pub fn value_dim(&self) -> usize {
        self.value_dim
    }

    /// Reserves memory for `positions` in all.
    pub fn reserve(&mut self, positions: usize) {
        let more = positions.saturating_sub(self.len());
        self.keys.iter_mut().for_each(|list| list.reserve(more * self.key_dim));
        self.values.iter_mut().for_each(|list| list.reserve(more * self.value_dim));
    }

    /// Appends rows: `keys` `[rows, heads, key_dim]`, `values` `[rows, heads, value_dim]`.
    pub fn append(&mut self, keys: &[f32], values: &[f32]) {
        append(&mut self.keys, keys, self.key_dim);
        append(&mut self.values, values, self.value_dim);
    }

    /// Keeps the first `positions` positions.
    pub fn truncate(&mut self, positions: usize) {
        self.keys.iter_mut().for_each(|list| list.truncate(positions * self.key_dim));
        self.values.iter_mut().for_each(|list| list.truncate(positions * self.value_dim));
    }

    /// All keys, `[positions, heads, key_dim]`.
    pub fn keys(&self) -> Vec<f32> {
        gather(&self.keys, self.key_dim)
    }

    /// All values, `[positions, heads, value_dim]`.
    pub fn values(&self) -> Vec<f32> {
        gather(&self.values, self.value_dim)
    }
}

fn append(lists: &mut [Vec<f32>], rows: &[f32], dim: usize) {
    let heads = lists.len();
    for (h, list) in lists.iter_mut().enumerate() {
        for row in rows.chunks_exact(heads * dim) {
            list.extend_from_slice(&row[h * dim..][..dim]);
        }
    }
}

fn gather(lists: &[Vec<f32>], dim: usize) -> Vec<f32> {
    let positions = lists.first().map_or(0, |list| list.len() / dim);
    let mut all = Vec::with_capacity(positions * lists.len() * dim);
    for p in 0..positions {
        lists.iter().for_each(|list| all.extend_from_slice(&list[p * dim..][..dim]));
    }
    all
}

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
const BLOCK: usize = 32;

impl Attention<'_> {
    /// Context rows `[rows, heads, value_dim]` of queries `[rows, heads, key_dim]`.
    ///
    /// ```text
    /// s_k = scale · (q · k_k)      p_k = e^(s_k − m) / (Σ_j e^(s_j − m) + e^(sink − m))
    /// context = Σ_k p_k · v_k      k from position − window + 1 (or 0) to position
    /// ```
    ///
    /// Query row `r` stands at position `start + r`, whose key is already in the cache. Keys are
    /// visited in blocks of 32 counted from the first key of the row; when a block raises the maximum
    /// `m`, what was summed before is multiplied by `e^(old − new)` (arXiv 1805.02867).
    pub fn run(&self, queries: &[f32], cache: &KvCache, start: usize) -> Vec<f32> {
        let (key_dim, value_dim) = (cache.key_dim, cache.value_dim);
        let rows = queries.len() / (self.heads * key_dim);
        let group = self.heads / cache.heads();
        let mut context = vec![0.0; rows * self.heads * value_dim];
        let one = |(n, into): (usize, &mut [f32])| {
            let (r, head) = (n / self.heads, n % self.heads);
            let query = &queries[n * key_dim..][..key_dim];
            let end = start + r + 1;
            let first = self.window.map_or(0, |w| end.saturating_sub(w));
            let keys = &cache.keys[head / group][first * key_dim..end * key_dim];
            let values = &cache.values[head / group][first * value_dim..end * value_dim];
            self.head(head, query, keys, values, into);
        };
        if rows * (start + rows) * self.heads * key_dim < super::GRAIN {
            context.chunks_exact_mut(value_dim).enumerate().for_each(one);
        } else {
            context.par_chunks_exact_mut(value_dim).enumerate().for_each(one);
        }
        context
    }

    /// One head of one row. `into` starts at zero.
    fn head(&self, head: usize, query: &[f32], keys: &[f32], values: &[f32], into: &mut [f32]) {
        let (key_dim, value_dim) = (query.len(), into.len());
        let mut max = f32::NEG_INFINITY;
        let mut sum = 0.0;
        if let Some(sinks) = self.sinks {
            (max, sum) = (sinks[head], 1.0);
        }
        let mut scores = [0.0f32; BLOCK];
        for (keys, values) in keys.chunks(BLOCK * key_dim).zip(values.chunks(BLOCK * value_dim)) {
            let scores = &mut scores[..keys.len() / key_dim];
            for (score, key) in scores.iter_mut().zip(keys.chunks_exact(key_dim)) {
                *score = dot(query, key) * self.scale;
            }
            if let Some(cap) = self.softcap {
                scores.iter_mut().for_each(|score| *score = softcap(*score, cap));
            }
            let top = scores.iter().fold(max, |a, &b| a.max(b));
            if top > max {
                let fade = exp(max - top);
                sum *= fade;
                into.iter_mut().for_each(|v| *v *= fade);
                max = top;
            }
            scores.iter_mut().for_each(|score| *score = exp(*score - max));
            for (weight, value) in scores.iter().zip(values.chunks_exact(value_dim)) {
                sum += weight;
                into.iter_mut().zip(value).for_each(|(into, v)| *into += weight * v);
            }
        }
        into.iter_mut().for_each(|v| *v /= sum);
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

    // Four query heads on two key heads: 0 and 1 read the first, 2 and 3 the second.
    #[test]
    fn heads_share_in_order() {
        let mut cache = KvCache::new(2, 1, 1);
        cache.append(&[1.0, 1.0], &[5.0, 7.0]);
        assert_eq!(plain(4).run(&[1.0; 4], &cache, 0), [5.0, 5.0, 7.0, 7.0]);
    }

    // All keys alike: the context is the mean of the values in the window, here the last 3 of 5.
    #[test]
    fn a_window_counts_its_own_key() {
        let mut cache = KvCache::new(1, 2, 1);
        cache.append(&[0.0; 10], &[1.0, 10.0, 100.0, 1000.0, 10_000.0]);
        let context = Attention { window: Some(3), ..plain(1) }.run(&[1.0; 2], &cache, 4);
        assert!((context[0] - 11_100.0 / 3.0).abs() < 1e-3, "{context:?}");
    }

    #[test]
    fn caches_come_back_as_they_went_in() {
        let mut cache = KvCache::new(2, 2, 1);
        let (keys, values) = ([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0], [1.0, 2.0, 3.0, 4.0]);
        cache.append(&keys, &values);
        assert_eq!((cache.keys(), cache.values()), (keys.to_vec(), values.to_vec()));
        cache.truncate(1);
        assert_eq!((cache.len(), cache.keys()), (1, keys[..4].to_vec()));
    }

    /// Softmax in two passes over a row of scores, in f64.
    fn two_pass(a: &Attention, q: &[f32], keys: &[f32], values: &[f32], first: usize, end: usize) -> f64 {
        let scores: Vec<f64> = (first..end)
            .map(|k| {
                let product: f64 =
                    (0..q.len()).map(|i| f64::from(q[i]) * f64::from(keys[k * q.len() + i])).sum();
                let score = product * f64::from(a.scale);
                a.softcap.map_or(score, |cap| f64::from(cap) * (score / f64::from(cap)).tanh())
            })
            .collect();
        let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let sum: f64 = scores.iter().map(|s| (s - max).exp()).sum();
        (first..end).zip(&scores).map(|(k, s)| (s - max).exp() / sum * f64::from(values[k])).sum()
    }

    proptest! {
        #[test]
        fn streaming_equals_two_passes(
            numbers in prop::collection::vec(-3.0f32..3.0, 100 * 4 + 3),
            positions in 1usize..100,
            window in prop::option::of(1usize..100),
            softcap in prop::option::of(1.0f32..20.0),
        ) {
            let (query, rest) = numbers.split_at(3);
            let (keys, values) = (&rest[..positions * 3], &rest[300..][..positions]);
            let mut cache = KvCache::new(1, 3, 1);
            cache.append(keys, values);
            let attention = Attention { window, softcap, scale: 1.7, ..plain(1) };
            let found = attention.run(query, &cache, positions - 1)[0];
            let first = window.map_or(0, |w| positions.saturating_sub(w));
            let expected = two_pass(&attention, query, keys, values, first, positions);
            prop_assert!((f64::from(found) - expected).abs() < 1e-5, "{found} against {expected}");
        }
    }
}
