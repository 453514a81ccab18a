//! Sampling with a draft, with exactly the target's own distribution.
//!
//! Two verifiers keep it, and a report names the one it used. Both are given numbers in [0, 1) and hold no
//! generator of their own.

use super::walk::{Proposals, Verifier};

/// What turns logits into the distribution that plain decoding would draw from.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Filter {
    /// Logits are divided by it.
    pub temperature: f64,
    /// Only so many of the largest stay; 0 keeps all.
    pub top_k: usize,
    /// The smallest set whose probability before its last token is below this; 1 keeps all.
    pub top_p: f64,
}

/// `p[i] = e^(z[i] / T) / Σ e^(z / T)`
pub fn softmax(z: &[f64], temperature: f64) -> Vec<f64> {
    let largest = z.iter().fold(f64::NEG_INFINITY, |m, &v| m.max(v));
    let e: Vec<f64> = z.iter().map(|v| libm::exp((v - largest) / temperature)).collect();
    let total: f64 = e.iter().sum();
    e.iter().map(|v| v / total).collect()
}

/// The distribution of a row of logits: temperature, top-k, softmax of what stays, top-p, renormalised.
///
/// Ties at the edge of top-k go to the lower id.
pub fn filtered(logits: &[f32], filter: Filter) -> Vec<f64> {
    let mut order: Vec<usize> = (0..logits.len()).collect();
    order.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]).then(a.cmp(&b)));
    if filter.top_k > 0 {
        order.truncate(filter.top_k);
    }
    let kept: Vec<f64> = order.iter().map(|&i| f64::from(logits[i])).collect();
    let kept = softmax(&kept, filter.temperature);
    let mut p = vec![0.0; logits.len()];
    let mut before = 0.0;
    for (&i, &probability) in order.iter().zip(&kept) {
        if before < filter.top_p || before == 0.0 {
            p[i] = probability;
        }
        before += probability;
    }
    let total: f64 = p.iter().sum();
    p.iter().map(|v| v / total).collect()
}

/// The token at `u` of the cumulative distribution: the first with `u · Σp < p_0 + … + p_i`. A token of
/// probability 0 is never drawn.
pub fn draw(p: &[f64], u: f64) -> u32 {
    let total: f64 = p.iter().sum();
    let mut cumulative = 0.0;
    let mut last = 0;
    for (i, &probability) in p.iter().enumerate().filter(|(_, p)| **p > 0.0) {
        cumulative += probability;
        last = i;
        if u * total < cumulative {
            break;
        }
    }
    last as u32
}

/// What is left for a rejected proposal: `max(p - q, 0)`, or `p` where that is nothing. Not normalised.
pub fn residual(p: &[f64], q: &[f64]) -> Vec<f64> {
    let rest: Vec<f64> = p.iter().zip(q).map(|(p, q)| (p - q).max(0.0)).collect();
    if rest.iter().all(|&v| v == 0.0) { p.to_vec() } else { rest }
}

/// Draws the target's tokens and accepts a proposal while it is the one drawn.
///
/// Exact for any proposal that does not look at the draws.
pub struct Matching<U> {
    /// How plain decoding draws.
    pub filter: Filter,
    /// Numbers in [0, 1).
    pub uniform: U,
}

impl<U: FnMut() -> f64> Verifier for Matching<U> {
    fn choose(&mut self, row: &[f32]) -> u32 {
        draw(&filtered(row, self.filter), (self.uniform)())
    }

    fn judge(&mut self, proposals: &Proposals, rows: &[Vec<f32>]) -> (usize, u32) {
        for (j, &id) in proposals.ids.iter().enumerate() {
            let own = self.choose(&rows[j]);
            if own != id {
                return (j, own);
            }
        }
        (proposals.ids.len(), self.choose(&rows[proposals.ids.len()]))
    }
}

/// Accepts a proposal d, drawn from q, where `u · q(d) < p(d)`; a rejected one is replaced by a draw from
/// `max(p - q, 0)`.
///
/// The comparison is strict: a token of probability 0 is never accepted.
///
/// Source: arXiv 2211.17192, 2302.01318.
pub struct Rejection<U> {
    /// How plain decoding draws.
    pub filter: Filter,
    /// Numbers in [0, 1); none of them may have drawn a proposal.
    pub uniform: U,
}

impl<U: FnMut() -> f64> Verifier for Rejection<U> {
    fn choose(&mut self, row: &[f32]) -> u32 {
        draw(&filtered(row, self.filter), (self.uniform)())
    }

    fn judge(&mut self, proposals: &Proposals, rows: &[Vec<f32>]) -> (usize, u32) {
        for (j, &id) in proposals.ids.iter().enumerate() {
            let p = filtered(&rows[j], self.filter);
            let chosen = || (0..p.len()).map(|i| f64::from(i == id as usize)).collect();
            let q: Vec<f64> = proposals.drawn_from.get(j).cloned().unwrap_or_else(chosen);
            if (self.uniform)() * q[id as usize] >= p[id as usize] {
                return (j, draw(&residual(&p, &q), (self.uniform)()));
            }
        }
        (proposals.ids.len(), self.choose(&rows[proposals.ids.len()]))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLAIN: Filter = Filter { temperature: 1.0, top_k: 0, top_p: 1.0 };

    fn logits(p: &[f64]) -> Vec<f32> {
        p.iter().map(|p| p.ln() as f32).collect()
    }

    // Probabilities 0.5, 0.3, 0.2: top-k 2 leaves 5/8 and 3/8. Of those, top-p 0.6 keeps the first alone
    // (before the second, 0.625 is not below 0.6); of all three, top-p 0.6 keeps two (0.5 is below 0.6).
    #[test]
    fn filters_in_order() {
        let z = logits(&[0.2, 0.5, 0.3]);
        let near = |p: Vec<f64>, expected: [f64; 3]| {
            assert!(p.iter().zip(expected).all(|(p, e)| (p - e).abs() < 1e-6), "{p:?}");
        };
        near(filtered(&z, PLAIN), [0.2, 0.5, 0.3]);
        near(filtered(&z, Filter { top_k: 2, ..PLAIN }), [0.0, 0.625, 0.375]);
        near(filtered(&z, Filter { top_p: 0.6, ..PLAIN }), [0.0, 0.625, 0.375]);
        near(filtered(&z, Filter { top_k: 2, top_p: 0.6, ..PLAIN }), [0.0, 1.0, 0.0]);
        // Squares at half the temperature: 0.04, 0.25, 0.09 over 0.38.
        let half = Filter { temperature: 0.5, ..PLAIN };
        near(filtered(&z, half), [0.04 / 0.38, 0.25 / 0.38, 0.09 / 0.38]);
    }

    #[test]
    fn a_draw_never_gives_what_has_no_probability() {
        let p = [0.0, 0.25, 0.0, 0.75, 0.0];
        assert_eq!([0.0, 0.249, 0.25, 0.999].map(|u| draw(&p, u)), [1, 1, 3, 3]);
    }

    // At u = 0 an inclusive comparison would accept a proposal that the target never gives.
    #[test]
    fn a_zero_draw_does_not_accept_the_impossible() {
        let rows = [vec![0.0, f32::NEG_INFINITY], vec![0.0, 0.0]];
        let proposals = Proposals { ids: vec![1], drawn_from: Vec::new() };
        let mut rejection = Rejection { filter: PLAIN, uniform: || 0.0 };
        assert_eq!(rejection.judge(&proposals, &rows), (0, 0));
    }

    /// Closed form: drawing d from q, accepting it with min(1, p/q), and drawing the residual otherwise
    /// gives p, whatever q is.
    #[test]
    fn rejection_gives_the_target_s_distribution() {
        let p = [0.1, 0.0, 0.6, 0.3];
        let full = [0.4, 0.1, 0.3, 0.2];
        let restricted = [0.0, 0.0, 0.9, 0.1];
        let chosen = [0.0, 1.0, 0.0, 0.0];
        for q in [full, restricted, chosen, p] {
            let accept: Vec<f64> = p.iter().zip(q).map(|(&p, q): (&f64, f64)| p.min(q)).collect();
            let rejected = 1.0 - accept.iter().sum::<f64>();
            let rest = residual(&p, &q);
            let total: f64 = rest.iter().sum();
            for i in 0..4 {
                let given = accept[i] + rejected * rest[i] / total;
                assert!((given - p[i]).abs() < 1e-15, "{i}: {given} against {}", p[i]);
            }
        }
    }
}
