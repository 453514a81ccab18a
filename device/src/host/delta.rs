//! The gated delta rule as a recurrence, heads side by side on threads and values side by side in registers.

use super::math::{exp, softplus};
use super::wide::{kernel, wide};
use crate::simd::Kernel;
use rayon::prelude::*;

/// Sizes of a delta rule.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Heads {
    /// Number of key (and query) heads.
    pub keys: usize,
    /// Number of value heads; value head `j` reads key head `j / (values / keys)`.
    pub values: usize,
    /// Width of a key.
    pub key_dim: usize,
    /// Width of a value.
    pub value_dim: usize,
}

/// What one run of rows writes into the state.
#[derive(Clone, Debug, Default)]
pub struct Writes {
    /// Keys of unit length `[rows, keys, key_dim]`.
    pub k: Vec<f32>,
    /// Values `[rows, values, value_dim]`.
    pub v: Vec<f32>,
    /// Log decay `[rows, values]`.
    pub g: Vec<f32>,
    /// Write strength `[rows, values]`.
    pub beta: Vec<f32>,
}

impl Writes {
    fn rows(&self, heads: &Heads) -> usize {
        self.g.len() / heads.values
    }

    fn append(&mut self, other: &Writes) {
        self.k.extend_from_slice(&other.k);
        self.v.extend_from_slice(&other.v);
        self.g.extend_from_slice(&other.g);
        self.beta.extend_from_slice(&other.beta);
    }

    fn truncate(&mut self, rows: usize, heads: &Heads) {
        self.k.truncate(rows * heads.keys * heads.key_dim);
        self.v.truncate(rows * heads.values * heads.value_dim);
        self.g.truncate(rows * heads.values);
        self.beta.truncate(rows * heads.values);
    }
}

/// The recurrent state of one layer, with what is needed to take rows back.
///
/// `before` is the state at the last opening; `writes` are the rows since then. Taking back rows runs the
/// rest of the writes again on `before`: the same operations, hence the same bits.
#[derive(Clone, Debug)]
pub struct DeltaState {
    heads: Heads,
    /// Position of `before`.
    base: usize,
    before: Vec<f32>,
    writes: Writes,
    /// The state after `writes`; without any, `before` is.
    now: Vec<f32>,
    /// Where the pass began, where that lies before `base`.
    pass_start: Option<(usize, Vec<f32>)>,
}

impl DeltaState {
    /// Zero, before the first row.
    pub fn new(heads: Heads) -> Self {
        let zero = vec![0.0; heads.values * heads.key_dim * heads.value_dim];
        let (before, now) = (zero.clone(), zero);
        Self { heads, base: 0, before, writes: Writes::default(), now, pass_start: None }
    }

    /// Position of the first row that can be taken back.
    pub fn base(&self) -> usize {
        self.base
    }

    /// The state, `[values, key_dim, value_dim]`.
    pub fn state(&self) -> &[f32] {
        if self.writes.g.is_empty() { &self.before } else { &self.now }
    }

    /// Begins a run of rows that can be taken back; `first` in a pass.
    pub fn open(&mut self, first: bool) {
        if first {
            self.pass_start = None;
        } else if self.pass_start.is_none() {
            self.pass_start = Some((self.base, self.before.clone()));
        }
        self.base += self.writes.rows(&self.heads);
        if !self.writes.g.is_empty() {
            // What was the state now becomes the state before; its memory is written anew.
            std::mem::swap(&mut self.before, &mut self.now);
            self.writes = Writes::default();
        }
    }

    /// Feeds rows; what the queries `q` `[rows, keys, key_dim]` read, `[rows, values, value_dim]`.
    ///
    /// ```text
    /// S ← e^g · S      δ = β · (v − Sᵀk)      S ← S + k δᵀ      core = Sᵀq
    /// ```
    ///
    /// for each row and value head, `S` being `[key_dim, value_dim]`. Sums over `key_dim` add from left to
    /// right. Source: arXiv 2412.06464, equation 10.
    pub fn feed(&mut self, q: &[f32], writes: Writes) -> Vec<f32> {
        self.feed_with(kernel(), q, writes)
    }

    fn feed_with(&mut self, kernel: Kernel, q: &[f32], writes: Writes) -> Vec<f32> {
        let core = self.apply(kernel, Some(q), &writes);
        self.writes.append(&writes);
        core
    }

    /// As [`DeltaState::feed`], in chunks of up to [`CHUNK`] rows: inside one the state is read and written once.
    ///
    /// With `G[t] = Σ_{i ≤ t} g[i]` from the chunk's first row, and `S₀` the state before it:
    ///
    /// ```text
    /// δ[t] = β[t] · (v[t] − e^G[t] · S₀ᵀk[t] − Σ_{i<t} e^(G[t]−G[i]) · (k[i]·k[t]) · δ[i])
    /// core[t] = e^G[t] · S₀ᵀq[t] + Σ_{i≤t} e^(G[t]−G[i]) · (k[i]·q[t]) · δ[i]
    /// S = e^G[last] · S₀ + Σ_i e^(G[last]−G[i]) · k[i] δ[i]ᵀ
    /// ```
    ///
    /// The same sums as the recurrence's in another order: equal to it within rounding, not to the bit. Rows that are
    /// taken back are replayed as the recurrence. Source: arXiv 2412.06464, section 3.3.
    pub fn feed_chunked(&mut self, q: &[f32], writes: Writes) -> Vec<f32> {
        let h = self.heads;
        let rows = writes.rows(&h);
        let (size, group) = (h.key_dim * h.value_dim, h.values / h.keys);
        if self.writes.g.is_empty() {
            self.now.copy_from_slice(&self.before);
        }
        let one = |(head, state): (usize, &mut [f32])| -> Vec<f32> {
            let key = |of: &[f32], t: usize| -> Vec<f32> {
                of[(t * h.keys + head / group) * h.key_dim..][..h.key_dim].to_vec()
            };
            let mut core = Vec::with_capacity(rows * h.value_dim);
            for from in (0..rows).step_by(CHUNK) {
                let chunk: Vec<ChunkRow> = (from..rows.min(from + CHUNK))
                    .map(|t| ChunkRow {
                        q: key(q, t),
                        k: key(&writes.k, t),
                        v: writes.v[(t * h.values + head) * h.value_dim..][..h.value_dim].to_vec(),
                        g: writes.g[t * h.values + head],
                        beta: writes.beta[t * h.values + head],
                    })
                    .collect();
                core.extend(one_chunk(&chunk, state));
            }
            core
        };
        let by_head: Vec<Vec<f32>> = self.now.par_chunks_exact_mut(size).enumerate().map(one).collect();
        self.writes.append(&writes);
        let row = |t: usize| by_head.iter().flat_map(move |core| &core[t * h.value_dim..][..h.value_dim]);
        (0..rows).flat_map(row).copied().collect()
    }

    /// Runs `writes` on the present state; `now` holds the result.
    fn apply(&mut self, kernel: Kernel, q: Option<&[f32]>, writes: &Writes) -> Vec<f32> {
        let h = self.heads;
        let rows = writes.rows(&h);
        let size = h.key_dim * h.value_dim;
        let group = h.values / h.keys;
        let fresh = self.writes.g.is_empty();
        let before = &self.before;
        // By head, so that threads share nothing; put in order afterwards.
        let mut by_head = vec![0.0; rows * h.values * h.value_dim];
        let heads = self
            .now
            .par_chunks_exact_mut(size)
            .zip(by_head.par_chunks_exact_mut((rows * h.value_dim).max(1)));
        let one = |(head, (state, core)): (usize, (&mut [f32], &mut [f32]))| {
            if fresh {
                state.copy_from_slice(&before[head * size..][..size]);
            }
            let mut delta = vec![0.0; h.value_dim];
            for (r, core) in core.chunks_exact_mut(h.value_dim).enumerate() {
                let key = (r * h.keys + head / group) * h.key_dim;
                let at = r * h.values + head;
                let k = &writes.k[key..][..h.key_dim];
                let v = &writes.v[at * h.value_dim..][..h.value_dim];
                let q = q.map_or(k, |q| &q[key..][..h.key_dim]);
                row(kernel, exp(writes.g[at]), writes.beta[at], q, k, v, state, &mut delta, core);
            }
        };
        if rows > 0 {
            heads.enumerate().for_each(one);
        }
        let mut core = vec![0.0; by_head.len()];
        for (head, from) in by_head.chunks_exact((rows * h.value_dim).max(1)).enumerate() {
            for (r, from) in from.chunks_exact(h.value_dim).enumerate() {
                core[(r * h.values + head) * h.value_dim..][..h.value_dim].copy_from_slice(from);
            }
        }
        core
    }

    /// Takes back the rows from `position` on: a row since the last opening, the start of the pass, or all.
    pub fn truncate(&mut self, position: usize) {
        let fed = self.writes.rows(&self.heads);
        match &self.pass_start {
            _ if position >= self.base + fed => {}
            _ if position >= self.base => {
                let mut kept = std::mem::take(&mut self.writes);
                kept.truncate(position - self.base, &self.heads);
                if !kept.g.is_empty() {
                    self.apply(kernel(), None, &kept);
                }
                self.writes = kept;
            }
            Some((start, state)) if position == *start => {
                (self.base, self.before) = (*start, state.clone());
                (self.writes, self.pass_start) = (Writes::default(), None);
            }
            _ => {
                assert_eq!(position, 0, "delta: rollback to {position} behind {}", self.base);
                *self = Self::new(self.heads);
            }
        }
    }
}

wide! {
    /// One row of one value head: `state` is `[key_dim, value_dim]`, `delta` scratch, `core` the result.
    fn row(
        decay: f32,
        beta: f32,
        q: &[f32],
        k: &[f32],
        v: &[f32],
        state: &mut [f32],
        delta: &mut [f32],
        core: &mut [f32],
    ) {
        let width = v.len();
        delta.fill(0.0);
        for (s, k) in state.chunks_exact_mut(width).zip(k) {
            for (s, d) in s.iter_mut().zip(delta.iter_mut()) {
                *s *= decay;
                *d += *s * k;
            }
        }
        for (d, v) in delta.iter_mut().zip(v) {
            *d = beta * (v - *d);
        }
        core.fill(0.0);
        for ((s, k), q) in state.chunks_exact_mut(width).zip(k).zip(q) {
            for ((s, d), core) in s.iter_mut().zip(delta.iter()).zip(core.iter_mut()) {
                *s += k * d;
                *core += *s * q;
            }
        }
    }
}

/// Rows that the chunked form takes at a time.
const CHUNK: usize = 64;

/// One row of one value head.
struct ChunkRow {
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    g: f32,
    beta: f32,
}

/// One chunk of one value head; see [`DeltaState::feed_chunked`]. `state` is `[key_dim, value_dim]`, the result
/// `[rows, value_dim]`.
fn one_chunk(chunk: &[ChunkRow], state: &mut [f32]) -> Vec<f32> {
    let width = chunk[0].v.len();
    let add = |into: &mut [f32], factor: f32, from: &[f32]| {
        into.iter_mut().zip(from).for_each(|(into, from)| *into += factor * from);
    };
    // factor · Sᵀx
    let read = |state: &[f32], x: &[f32], factor: f32| {
        let mut sum = vec![0.0; width];
        state.chunks_exact(width).zip(x).for_each(|(s, x)| add(&mut sum, factor * x, s));
        sum
    };
    let mut total = 0.0;
    let decay: Vec<f32> = chunk
        .iter()
        .map(|row| {
            total += row.g;
            total
        })
        .collect();
    let mut deltas: Vec<Vec<f32>> = Vec::with_capacity(chunk.len());
    let mut core = Vec::with_capacity(chunk.len() * width);
    for (t, row) in chunk.iter().enumerate() {
        let from_state = exp(decay[t]);
        let mut known = read(state, &row.k, from_state);
        for (i, delta) in deltas.iter().enumerate() {
            add(&mut known, exp(decay[t] - decay[i]) * super::dot(&chunk[i].k, &row.k), delta);
        }
        deltas.push(row.v.iter().zip(&known).map(|(v, known)| row.beta * (v - known)).collect());
        let mut out = read(state, &row.q, from_state);
        for (i, delta) in deltas.iter().enumerate() {
            add(&mut out, exp(decay[t] - decay[i]) * super::dot(&chunk[i].k, &row.q), delta);
        }
        core.extend(out);
    }
    let last = decay[chunk.len() - 1];
    state.iter_mut().for_each(|s| *s *= exp(last));
    for (i, delta) in deltas.iter().enumerate() {
        let factor = exp(last - decay[i]);
        for (s, k) in state.chunks_exact_mut(width).zip(&chunk[i].k) {
            add(s, factor * k, delta);
        }
    }
    core
}

/// Logarithms of decays, `[rows, heads]` like `a`: `g = -e^a_log · softplus(a + dt_bias)` with numbers of the head.
pub fn log_decay(a: &[f32], a_log: &[f32], dt_bias: &[f32]) -> Vec<f32> {
    let heads = a_log.len();
    let one = |(n, a): (usize, &f32)| -exp(a_log[n % heads]) * softplus(a + dt_bias[n % heads]);
    a.iter().enumerate().map(one).collect()
}

/// `x / √(Σ x² + 1e-6) · scale` for every head of `dim` values.
pub fn unit_length(x: &mut [f32], dim: usize, scale: f32) {
    for head in x.chunks_exact_mut(dim) {
        let factor = 1.0 / (super::dot(head, head) + 1e-6).sqrt() * scale;
        head.iter_mut().for_each(|v| *v *= factor);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const ONE: Heads = Heads { keys: 1, values: 1, key_dim: 2, value_dim: 1 };

    // e^g = 1/2, β = 1/2. Row 1 writes k (1, 0), v 8: δ = ½·8 = 4, S = (4, 0); q (1, 10) reads 4.
    // Row 2 writes k (1, 1), v 10: S = (2, 0), δ = ½·(10 − 2) = 4, S = (6, 4); q (1, 10) reads 46.
    #[test]
    fn two_rows_by_hand() {
        let mut state = DeltaState::new(ONE);
        let g = vec![0.5f32.ln(); 2];
        let writes = Writes { k: vec![1.0, 0.0, 1.0, 1.0], v: vec![8.0, 10.0], g, beta: vec![0.5; 2] };
        let core = state.feed(&[1.0, 10.0, 1.0, 10.0], writes);
        assert_eq!(core, [4.0, 46.0]);
        assert_eq!(state.state(), [6.0, 4.0]);
    }

    // The same two rows in one chunk: G = ln ½, 2 ln ½.
    // δ₂ = ½·(10 − ½·(k₁·k₂)·4) = ½·(10 − 2) = 4; core₂ = ½·(k₁·q)·4 + (k₂·q)·4 = 2 + 44 = 46; S as before.
    #[test]
    fn two_rows_in_one_chunk_by_hand() {
        let mut state = DeltaState::new(ONE);
        let g = vec![0.5f32.ln(); 2];
        let writes = Writes { k: vec![1.0, 0.0, 1.0, 1.0], v: vec![8.0, 10.0], g, beta: vec![0.5; 2] };
        let core = state.feed_chunked(&[1.0, 10.0, 1.0, 10.0], writes);
        core.iter().zip([4.0, 46.0]).for_each(|(c, e)| assert!((c - e).abs() < 1e-5, "{core:?}"));
        state.state().iter().zip([6.0, 4.0]).for_each(|(s, e)| assert!((s - e).abs() < 1e-5));
    }

    // Two value heads share the first key head, two the second.
    #[test]
    fn value_heads_share_in_order() {
        let heads = Heads { keys: 2, values: 4, key_dim: 1, value_dim: 1 };
        let mut state = DeltaState::new(heads);
        let writes = Writes { k: vec![1.0, 10.0], v: vec![1.0; 4], g: vec![0.0; 4], beta: vec![1.0; 4] };
        assert_eq!(state.feed(&[1.0, 1.0], writes), [1.0, 1.0, 10.0, 10.0]);
    }

    // 3² + 4² = 25: (0.6, 0.8) times 10.
    #[test]
    fn unit_length_by_hand() {
        let mut x = [3.0, 4.0];
        unit_length(&mut x, 2, 10.0);
        assert!((x[0] - 6.0).abs() < 1e-5 && (x[1] - 8.0).abs() < 1e-5);
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 32, ..ProptestConfig::default() })]

        // Kernels, cuts and rollbacks give the bits of one run.
        #[test]
        fn any_cut_and_rollback_gives_the_same_bits(
            numbers in prop::collection::vec(-1.0f32..1.0, 97),
            rows in 1usize..12,
            cut in 0usize..12,
            kept in 0usize..12,
        ) {
            let heads = Heads { keys: 2, values: 6, key_dim: 5, value_dim: 19 };
            let number = |n: usize| numbers[(n * 31 + n / 97) % 97];
            let make = |from: usize, to: usize| {
                let list = |width: usize, salt: usize| (from * width..to * width).map(|n| number(n + salt)).collect::<Vec<f32>>();
                let writes = Writes {
                    k: list(10, 1),
                    v: list(114, 2),
                    g: list(6, 3).iter().map(|g| -g.abs()).collect(),
                    beta: list(6, 4).iter().map(|b| b.abs()).collect(),
                };
                (list(10, 5), writes)
            };
            let feed = |state: &mut DeltaState, kernel, from, to| {
                let (q, writes) = make(from, to);
                state.feed_with(kernel, &q, writes)
            };
            let bits = |values: &[f32]| values.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
            let mut whole = DeltaState::new(heads);
            whole.open(true);
            let expected = feed(&mut whole, Kernel::Portable, 0, rows);
            for kernel in Kernel::ALL.into_iter().filter(|k| k.is_supported()) {
                let (cut, mut state) = (cut.min(rows), DeltaState::new(heads));
                state.open(true);
                let mut pieces = feed(&mut state, kernel, 0, cut);
                state.open(true);
                let draft = feed(&mut state, kernel, cut, rows);
                let kept = (cut + kept).min(rows);
                state.truncate(kept);
                pieces.extend_from_slice(&draft[..(kept - cut) * 114]);
                state.open(true);
                pieces.extend(feed(&mut state, kernel, kept, rows));
                prop_assert_eq!(bits(&pieces), bits(&expected), "{}", kernel);
                prop_assert_eq!(bits(state.state()), bits(whole.state()));
            }
        }
    }
}
