//! Keys and values of a layer, laid out for the attention that reads them.

/// Keys that stand side by side.
pub(crate) const KEYS: usize = 16;

/// Keys and values of one layer, for each head apart.
///
/// All positions are kept, also those that a sliding window has left, so that taking back rows is
/// shortening the cache.
#[derive(Clone, Debug)]
pub struct KvCache {
    key_dim: usize,
    value_dim: usize,
    len: usize,
    heads: Vec<Head>,
}

/// One head's keys and values.
///
/// Keys stand in blocks of sixteen positions, and inside a block column by column, so that one vector
/// load feeds sixteen scores; values stand row by row:
///
/// ```text
/// keys     block 0: k[0,0] k[1,0] … k[15,0]   k[0,1] …     block 1: k[16,0] …
/// values   v[0,0] v[0,1] …   v[1,0] …
/// ```
///
/// Places behind the last position hold zeros, or what was there before rows were taken back: the
/// attention counts keys and reads no further.
#[derive(Clone, Debug, Default)]
pub(crate) struct Head {
    key_dim: usize,
    value_dim: usize,
    keys: Vec<f32>,
    values: Vec<f32>,
}

impl Head {
    fn position(&self, p: usize, i: usize) -> usize {
        (p / KEYS * self.key_dim + i) * KEYS + p % KEYS
    }

    /// `[key_dim, 16]`: the block of keys that starts at position `at`, a multiple of sixteen.
    #[inline(always)]
    pub fn keys(&self, at: usize) -> &[[f32; KEYS]] {
        let block = self.key_dim * KEYS;
        self.keys[at / KEYS * block..][..block].as_chunks().0
    }

    /// The values from position `from` on, to be asked for before they are needed.
    #[inline(always)]
    pub fn values_ahead(&self, from: usize) -> &[f32] {
        self.values.get(from * self.value_dim..).unwrap_or_default()
    }

    /// The same of the block of keys that starts at `at`.
    #[inline(always)]
    pub fn keys_ahead(&self, at: usize) -> &[f32] {
        self.keys.get(at * self.key_dim..).unwrap_or_default()
    }

    /// `[to - from, value_dim]`
    #[inline(always)]
    pub fn values(&self, from: usize, to: usize) -> &[f32] {
        &self.values[from * self.value_dim..to * self.value_dim]
    }
}

impl KvCache {
    /// An empty cache of `heads` key heads.
    pub fn new(heads: usize, key_dim: usize, value_dim: usize) -> Self {
        let head = Head { key_dim, value_dim, ..Head::default() };
        Self { key_dim, value_dim, len: 0, heads: vec![head; heads] }
    }

    /// Number of positions held.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether no position is held.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Number of key heads.
    pub fn heads(&self) -> usize {
        self.heads.len()
    }

    /// Width of a key.
    pub fn key_dim(&self) -> usize {
        self.key_dim
    }

    /// Width of a value.
    pub fn value_dim(&self) -> usize {
        self.value_dim
    }

    #[inline(always)]
    pub(crate) fn head(&self, h: usize) -> &Head {
        &self.heads[h]
    }

    /// Reserves memory for `positions` in all.
    pub fn reserve(&mut self, positions: usize) {
        for head in &mut self.heads {
            let keys = positions.next_multiple_of(KEYS) * self.key_dim;
            head.keys.reserve_exact(keys.saturating_sub(head.keys.len()));
            head.values.reserve_exact((positions * self.value_dim).saturating_sub(head.values.len()));
        }
    }

    /// Appends rows: `keys` `[rows, heads, key_dim]`, `values` `[rows, heads, value_dim]`.
    pub fn append(&mut self, keys: &[f32], values: &[f32]) {
        let (heads, key_dim, value_dim) = (self.heads.len(), self.key_dim, self.value_dim);
        let rows = keys.len() / (heads * key_dim);
        assert_eq!(values.len(), rows * heads * value_dim, "append: values against keys");
        for (h, head) in self.heads.iter_mut().enumerate() {
            head.keys.resize((self.len + rows).next_multiple_of(KEYS) * key_dim, 0.0);
            for r in 0..rows {
                let key = &keys[(r * heads + h) * key_dim..][..key_dim];
                for (i, k) in key.iter().enumerate() {
                    let at = head.position(self.len + r, i);
                    head.keys[at] = *k;
                }
                head.values.extend_from_slice(&values[(r * heads + h) * value_dim..][..value_dim]);
            }
        }
        self.len += rows;
    }

    /// Keeps the first `positions` positions.
    pub fn truncate(&mut self, positions: usize) {
        self.len = self.len.min(positions);
        for head in &mut self.heads {
            head.keys.truncate(self.len.next_multiple_of(KEYS) * self.key_dim);
            head.values.truncate(self.len * self.value_dim);
        }
    }

    /// All keys, `[positions, heads, key_dim]`.
    pub fn keys(&self) -> Vec<f32> {
        let mut all = Vec::with_capacity(self.len * self.heads.len() * self.key_dim);
        for p in 0..self.len {
            for head in &self.heads {
                all.extend((0..self.key_dim).map(|i| head.keys[head.position(p, i)]));
            }
        }
        all
    }

    /// All values, `[positions, heads, value_dim]`.
    pub fn values(&self) -> Vec<f32> {
        let mut all = Vec::with_capacity(self.len * self.heads.len() * self.value_dim);
        for p in 0..self.len {
            self.heads.iter().for_each(|head| all.extend_from_slice(head.values(p, p + 1)));
        }
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // 17 keys of 3: key 16 opens the second block, behind 16 · 3 values.
    #[test]
    fn positions_by_hand() {
        let head = Head { key_dim: 3, ..Head::default() };
        assert_eq!(head.position(1, 0), 1);
        assert_eq!(head.position(0, 1), 16);
        assert_eq!(head.position(16, 0), 48);
    }

    #[test]
    fn rows_come_back_as_they_went_in() {
        let rows = |from: usize, to: usize, width: usize| -> Vec<f32> {
            (from * width..to * width).map(|n| n as f32).collect()
        };
        // 2 heads of 3 and 2 values: 40 rows at once, 23 taken back, 20 others in two pieces.
        let mut cache = KvCache::new(2, 3, 2);
        cache.append(&rows(0, 40, 6), &rows(0, 40, 4));
        cache.truncate(17);
        cache.append(&rows(100, 101, 6), &rows(100, 101, 4));
        cache.append(&rows(101, 120, 6), &rows(101, 120, 4));
        assert_eq!(cache.len(), 37);
        assert_eq!(cache.keys(), [rows(0, 17, 6), rows(100, 120, 6)].concat());
        assert_eq!(cache.values(), [rows(0, 17, 4), rows(100, 120, 4)].concat());
    }
}
