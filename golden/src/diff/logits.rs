//! What a change of logits means for the tokens.

use std::thread;

use serde::Serialize;

use crate::stats::argmax;
use crate::{Manifest, split_tap};

/// A row whose largest logit moved to another token.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Flip {
    /// The tap.
    pub site: String,
    /// Row of the tap.
    pub row: usize,
    /// Position in the text, where the manifest gives it.
    pub position: Option<u64>,
    /// Token with the largest old logit.
    pub old_token: usize,
    /// Token with the largest new logit.
    pub new_token: usize,
    /// `old[old_token] - old[new_token]`
    pub margin: f64,
    /// `new[new_token] - new[old_token]`
    pub new_margin: f64,
    /// Both logits may move by the limit of an equivalent site: `margin <= 2 · limit`.
    pub near_tie: bool,
}

/// Figures over all rows of logits in both dumps.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct LogitsDiff {
    /// Rows whose largest logit is at the same token, and rows.
    pub argmax_equal: [usize; 2],
    /// Flips that are near ties.
    pub near_ties: usize,
    /// Largest `KL(old ‖ new) = Σ p · (ln p - ln q)` of the softmax of a row, in nats.
    pub kl_max: f64,
    /// Mean of it over the rows.
    pub kl_mean: f64,
    /// Tap and row of the largest; absent if no row differs.
    pub kl_max_at: Option<(String, usize)>,
    /// How many of the best tokens are compared.
    pub top_k: usize,
    /// Mean share of the best tokens that are the same, whatever their order.
    pub top_k_agreement: f64,
    /// Rows left out of the divergence because a logit is NaN or infinite.
    pub non_finite_rows: usize,
}

/// What one row gives.
pub(super) struct Row {
    old_token: usize,
    new_token: usize,
    margin: f64,
    new_margin: f64,
    kl: Option<f64>,
    agreement: f64,
}

pub(super) struct Collector {
    top_k: usize,
    flips: Vec<Flip>,
    rows: usize,
    kl_sum: f64,
    kl_rows: usize,
    kl_max: f64,
    kl_max_at: Option<(String, usize)>,
    agreement_sum: f64,
}

impl Collector {
    pub fn new(top_k: usize) -> Collector {
        let (flips, kl_max_at) = (Vec::new(), None);
        Collector {
            top_k,
            flips,
            rows: 0,
            kl_sum: 0.0,
            kl_rows: 0,
            kl_max: 0.0,
            kl_max_at,
            agreement_sum: 0.0,
        }
    }

    /// Looks at rows of `width` logits, on all processors.
    pub fn rows(&self, old: &[f32], new: &[f32], width: usize) -> Vec<Row> {
        let pairs: Vec<_> = old.chunks_exact(width).zip(new.chunks_exact(width)).collect();
        let look =
            |pairs: &[(&[f32], &[f32])]| pairs.iter().map(|(a, b)| row(a, b, self.top_k)).collect::<Vec<_>>();
        let threads = thread::available_parallelism().map_or(1, usize::from);
        if old.len() < 1 << 16 || threads < 2 {
            return look(&pairs);
        }
        thread::scope(|scope| {
            let shares = pairs.chunks(pairs.len().div_ceil(threads).max(1));
            let handles: Vec<_> = shares.map(|share| scope.spawn(move || look(share))).collect();
            handles
                .into_iter()
                .flat_map(|handle| handle.join().expect("diff: no arithmetic panics"))
                .collect()
        })
    }

    /// Takes the rows of one tap, in order.
    pub fn add(&mut self, site: &str, manifest: &Manifest, rows: Vec<Row>, limit: f64) {
        let pass = manifest.passes.iter().find(|pass| pass.name == split_tap(site).0);
        for (i, row) in rows.into_iter().enumerate() {
            self.rows += 1;
            self.agreement_sum += row.agreement;
            if let Some(kl) = row.kl {
                self.kl_rows += 1;
                self.kl_sum += kl;
                if kl > self.kl_max {
                    (self.kl_max, self.kl_max_at) = (kl, Some((site.to_owned(), i)));
                }
            }
            if row.old_token == row.new_token {
                continue;
            }
            let position = pass.and_then(|p| (p.positions[0]..p.positions[1]).nth(i));
            self.flips.push(Flip {
                site: site.to_owned(),
                row: i,
                position,
                old_token: row.old_token,
                new_token: row.new_token,
                margin: row.margin,
                new_margin: row.new_margin,
                near_tie: row.margin <= 2.0 * limit,
            });
        }
    }

    pub fn finish(self) -> (Vec<Flip>, Option<LogitsDiff>) {
        if self.rows == 0 {
            return (self.flips, None);
        }
        let logits = LogitsDiff {
            argmax_equal: [self.rows - self.flips.len(), self.rows],
            near_ties: self.flips.iter().filter(|flip| flip.near_tie).count(),
            kl_max: self.kl_max,
            kl_mean: if self.kl_rows == 0 { 0.0 } else { self.kl_sum / self.kl_rows as f64 },
            kl_max_at: self.kl_max_at,
            top_k: self.top_k,
            top_k_agreement: self.agreement_sum / self.rows as f64,
            non_finite_rows: self.rows - self.kl_rows,
        };
        (self.flips, Some(logits))
    }
}

fn row(old: &[f32], new: &[f32], top_k: usize) -> Row {
    let (old_token, new_token) = (argmax(old), argmax(new));
    let same = bytemuck::cast_slice::<f32, u8>(old) == bytemuck::cast_slice::<f32, u8>(new);
    let margin = |row: &[f32], a: usize, b: usize| f64::from(row[a]) - f64::from(row[b]);
    let finite = old.iter().chain(new).all(|v| v.is_finite());
    Row {
        old_token,
        new_token,
        margin: margin(old, old_token, new_token),
        new_margin: margin(new, new_token, old_token),
        kl: finite.then(|| if same { 0.0 } else { divergence(old, new) }),
        agreement: if same { 1.0 } else { agreement(old, new, top_k) },
    }
}

/// `KL(p ‖ q)` of the softmax of two rows.
///
/// With `P = Σ exp(a)` and `Q = Σ exp(b)`: `Σ exp(a)/P · (a - b) - ln P + ln Q`. Each row is shifted by its
/// largest value, and rounding below zero is cut off.
fn divergence(a: &[f32], b: &[f32]) -> f64 {
    let (top_a, top_b) = (f64::from(a[argmax(a)]), f64::from(b[argmax(b)]));
    let (mut p, mut q, mut weighted) = (0.0, 0.0, 0.0);
    for (&a, &b) in a.iter().zip(b) {
        let (a, b) = (f64::from(a) - top_a, f64::from(b) - top_b);
        let e = a.exp();
        p += e;
        q += b.exp();
        weighted += e * (a - b);
    }
    (weighted / p - p.ln() + q.ln()).max(0.0)
}

/// Share of the `k` best tokens of both rows that are the same.
fn agreement(a: &[f32], b: &[f32], k: usize) -> f64 {
    let k = k.min(a.len());
    if k == 0 {
        return 1.0;
    }
    let (best_a, best_b) = (best(a, k), best(b, k));
    best_a.iter().filter(|token| best_b.contains(token)).count() as f64 / k as f64
}

/// Indices of the `k` largest values, the smaller index first among equals; NaN is never among them.
fn best(row: &[f32], k: usize) -> Vec<usize> {
    let mut best: Vec<usize> = Vec::with_capacity(k + 1);
    for i in 0..row.len() {
        if row[i].is_nan() || best.len() == k && row[i] <= row[best[k - 1]] {
            continue;
        }
        let at = best.iter().position(|&j| row[i] > row[j]).unwrap_or(best.len());
        best.insert(at, i);
        best.truncate(k);
    }
    best
}

#[cfg(test)]
mod tests {
    use super::*;

    // p = (1/2, 1/2), q = (1/4, 3/4): KL = ln 2 - (ln 1 + ln 3) / 2 … = ½ ln(4/3).
    #[test]
    fn divergence_by_hand() {
        let kl = divergence(&[0.0, 0.0], &[0.0, 3f32.ln()]);
        assert!((kl - 0.5 * (4f64 / 3.0).ln()).abs() < 1e-7, "{kl}");
    }

    // Softmax does not see a shift, however large.
    #[test]
    fn divergence_of_a_shifted_row_is_zero() {
        assert!(divergence(&[1.0, 2.0, 4.0], &[9001.0, 9002.0, 9004.0]) < 1e-15);
    }

    #[test]
    fn best_tokens() {
        assert_eq!(best(&[1.0, 5.0, 3.0, 5.0], 3), [1, 3, 2]);
        assert_eq!(best(&[f32::NAN, 1.0, 2.0], 2), [2, 1]);
        // {1, 2} against {2, 3}: one of two.
        assert_eq!(agreement(&[0.0, 2.0, 3.0, 1.0], &[0.0, 1.0, 3.0, 2.0], 2), 0.5);
    }
}
