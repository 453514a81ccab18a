//! The gated delta rule: linear attention over a state that forgets and corrects itself.

use super::Tensor;
use crate::sum::sum;
use ndarray::{Array2, Array3, ArrayView2, ArrayView3, Axis};
use rayon::prelude::*;

/// What one pass of the gated delta rule reads.
///
/// Value head j uses key head `⌊j / r⌋` with `r = value_heads / key_heads`: consecutive value heads
/// share a key head.
#[derive(Debug)]
pub struct Delta<'a, T> {
    /// Queries `[tokens, key_heads, key_dim]`, normed and scaled.
    pub q: &'a T,
    /// Keys `[tokens, key_heads, key_dim]`, normed.
    pub k: &'a T,
    /// Values `[tokens, value_heads, value_dim]`.
    pub v: &'a T,
    /// Log decay `[tokens, value_heads]`, at most 0.
    pub g: &'a T,
    /// Write strength `[tokens, value_heads]`, from 0 to 1.
    pub beta: &'a T,
    /// State before the first token, `[value_heads, key_dim, value_dim]`; zeros where there is none.
    pub state: Option<&'a T>,
}

// References are copied whatever they refer to; a derive would ask for `T: Copy`.
impl<T> Clone for Delta<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Delta<'_, T> {}

impl<'a, T> Delta<'a, T> {
    /// The tensors in the order of the fields.
    pub fn operands(&self) -> Vec<&T> {
        [self.q, self.k, self.v, self.g, self.beta].into_iter().chain(self.state).collect()
    }

    /// The same on other tensors, in the order of [`Delta::operands`].
    pub fn with<U>(&self, o: &'a [U]) -> Delta<'a, U> {
        let state = self.state.map(|_| &o[5]);
        Delta { q: &o[0], k: &o[1], v: &o[2], g: &o[3], beta: &o[4], state }
    }
}

/// What each query reads: `[tokens, value_heads, value_dim]`.
///
/// Token by token, for every value head, with its state `S [key_dim, value_dim]`:
///
/// ```text
/// S ← e^g · S                       forget
/// δ = β · (v - Sᵀ k)                what the state would not have answered for k
/// S ← S + k δᵀ                      write the correction
/// y = Sᵀ q                          read the updated state
/// ```
///
/// Between two tokens the state is held in f32, as a pass leaves it behind: so a prompt fed at once, token
/// by token or in chunks gives the same bits.
///
/// Source: arXiv 2412.06464, equation 10, with the decay inside the correction as in the authors' code.
pub fn gdn_core(delta: &Delta<Tensor>) -> Array3<f64> {
    recurrence(delta).0
}

/// The state after the last token, `[value_heads, key_dim, value_dim]`; see [`gdn_core`].
pub fn gdn_state(delta: &Delta<Tensor>) -> Array3<f64> {
    recurrence(delta).1
}

/// One head's share of the operands.
struct Head<'a> {
    q: ArrayView2<'a, f32>,
    k: ArrayView2<'a, f32>,
    v: ArrayView2<'a, f32>,
    g: Vec<f64>,
    beta: Vec<f64>,
    /// `[key_dim, value_dim]`
    state: Array2<f64>,
}

fn heads<'a>(delta: &Delta<'a, Tensor>) -> Vec<Head<'a>> {
    fn three(x: &Tensor) -> ArrayView3<'_, f32> {
        x.view().into_dimensionality().expect("gated_delta_rule: q, k, v and state have three axes")
    }
    fn two(x: &Tensor) -> ArrayView2<'_, f32> {
        x.view().into_dimensionality().expect("gated_delta_rule: g and beta have two axes")
    }
    let (q, k, v) = (three(delta.q), three(delta.k), three(delta.v));
    let (g, beta) = (two(delta.g), two(delta.beta));
    let (tokens, key_heads, key_dim) = k.dim();
    let (_, value_heads, value_dim) = v.dim();
    assert_eq!(q.dim(), k.dim(), "gated_delta_rule: shape of q against shape of k");
    assert_eq!(v.dim().0, tokens, "gated_delta_rule: tokens of v against tokens of k");
    assert_eq!(value_heads % key_heads, 0, "gated_delta_rule: value heads against key heads");
    assert_eq!(g.dim(), (tokens, value_heads), "gated_delta_rule: shape of g against tokens and heads");
    assert_eq!(beta.dim(), (tokens, value_heads), "gated_delta_rule: shape of beta against tokens and heads");
    let shared = value_heads / key_heads;
    (0..value_heads)
        .map(|j| Head {
            q: q.index_axis_move(Axis(1), j / shared),
            k: k.index_axis_move(Axis(1), j / shared),
            v: v.index_axis_move(Axis(1), j),
            g: g.column(j).iter().map(|&g| f64::from(g)).collect(),
            beta: beta.column(j).iter().map(|&beta| f64::from(beta)).collect(),
            state: match delta.state {
                None => Array2::zeros((key_dim, value_dim)),
                Some(state) => three(state).index_axis_move(Axis(0), j).mapv(f64::from),
            },
        })
        .collect()
}

/// `[tokens, value_heads, value_dim]` and `[value_heads, key_dim, value_dim]` out of one pair a head.
fn together(heads: &[(Array2<f64>, Array2<f64>)]) -> (Array3<f64>, Array3<f64>) {
    let cores: Vec<_> = heads.iter().map(|(core, _)| core.view()).collect();
    let states: Vec<_> = heads.iter().map(|(_, state)| state.view()).collect();
    let stack = |axis, parts: &[ArrayView2<f64>]| {
        ndarray::stack(axis, parts)
            .expect("gated_delta_rule: heads of one shape")
            .as_standard_layout()
            .into_owned()
    };
    (stack(Axis(1), &cores), stack(Axis(0), &states))
}

fn recurrence(delta: &Delta<Tensor>) -> (Array3<f64>, Array3<f64>) {
    let heads: Vec<_> = heads(delta).into_par_iter().map(one_head).collect();
    together(&heads)
}

fn one_head(head: Head) -> (Array2<f64>, Array2<f64>) {
    let Head { q, k, v, g, beta, state: mut s } = head;
    let (tokens, value_dim) = v.dim();
    let mut core = Array2::zeros((tokens, value_dim));
    for t in 0..tokens {
        // The state as the previous token left it behind.
        s.mapv_inplace(|v| f64::from(v as f32));
        s *= libm::exp(g[t]);
        let answer = read(&s, k.row(t));
        for i in 0..s.nrows() {
            for j in 0..value_dim {
                let correction = beta[t] * (f64::from(v[[t, j]]) - answer[j]);
                s[[i, j]] += f64::from(k[[t, i]]) * correction;
            }
        }
        core.row_mut(t).assign(&read(&s, q.row(t)));
    }
    (core, s)
}

/// `y[j] = Σ_i s[i, j] · x[i]`, for every j from i = 0 upwards.
fn read(s: &Array2<f64>, x: ndarray::ArrayView1<f32>) -> ndarray::Array1<f64> {
    let mut y = ndarray::Array1::zeros(s.ncols());
    for (s, &x) in s.rows().into_iter().zip(x) {
        y.zip_mut_with(&s, |y, &s| *y += s * f64::from(x));
    }
    y
}

/// The chunked form: the same mathematics with products over whole chunks, as fast kernels do it.
///
/// For a chunk that starts from state `S₀`, with `G_t = g_1 + … + g_t` counted inside the chunk, unrolling
/// the recurrence gives one lower triangular system for the corrections, and everything else is a product:
///
/// ```text
/// δ_t = β_t · (v_t - e^G_t · S₀ᵀ k_t - Σ_{s<t} e^(G_t - G_s) · (k_s·k_t) · δ_s)
/// y_t = e^G_t · S₀ᵀ q_t + Σ_{s<=t} e^(G_t - G_s) · (k_s·q_t) · δ_s
/// S_C = e^G_C · S₀ + Σ_s e^(G_C - G_s) · k_s δ_sᵀ
/// ```
///
/// Only differences `G_t - G_s <= 0` are exponentiated, so that a strong decay cannot overflow. Returns
/// what [`gdn_core`] and [`gdn_state`] return, equal but for rounding: here the state stays in f64 inside
/// a chunk. The last chunk may be short.
///
/// Source: arXiv 2412.06464, section 3.3 (the extended WY form), solved for δ instead of inverted.
pub fn gated_delta_rule_chunked(delta: &Delta<Tensor>, chunk: usize) -> (Array3<f64>, Array3<f64>) {
    assert!(chunk > 0, "gated_delta_rule: length of a chunk");
    let heads: Vec<_> = heads(delta).into_par_iter().map(|head| one_head_chunked(head, chunk)).collect();
    together(&heads)
}

fn one_head_chunked(head: Head, chunk: usize) -> (Array2<f64>, Array2<f64>) {
    let Head { q, k, v, g, beta, state: mut s } = head;
    let (tokens, value_dim) = v.dim();
    let mut core = Array2::zeros((tokens, value_dim));
    for first in (0..tokens).step_by(chunk) {
        let here = first..(first + chunk).min(tokens);
        // decay[t] is e^G_t; between(t, s) is e^(G_t - G_s), summed from s to t only.
        let decay = |t: usize| libm::exp(sum(g[first..=t].iter().copied()));
        let between = |t: usize, from: usize| libm::exp(sum(g[from + 1..=t].iter().copied()));
        let mut corrections = Array2::<f64>::zeros((here.len(), value_dim));
        for t in here.clone() {
            let (answer, read_before) = (read(&s, k.row(t)), read(&s, q.row(t)));
            for j in 0..value_dim {
                let earlier = (first..t).map(|e| {
                    between(t, e) * crate::sum::dot(k.row(e), k.row(t)) * corrections[[e - first, j]]
                });
                let rest = f64::from(v[[t, j]]) - decay(t) * answer[j] - sum(earlier);
                corrections[[t - first, j]] = beta[t] * rest;
            }
            for j in 0..value_dim {
                let written = (first..=t).map(|e| {
                    between(t, e) * crate::sum::dot(k.row(e), q.row(t)) * corrections[[e - first, j]]
                });
                core[[t, j]] = decay(t) * read_before[j] + sum(written);
            }
        }
        let last = here.end - 1;
        s = Array2::from_shape_fn(s.dim(), |(i, j)| {
            let written =
                here.clone().map(|e| between(last, e) * f64::from(k[[e, i]]) * corrections[[e - first, j]]);
            decay(last) * s[[i, j]] + sum(written)
        });
    }
    (core, s)
}

#[cfg(test)]
mod tests {
    use super::*;
    use approx::assert_relative_eq;
    use ndarray::{Array, Slice, array};
    use proptest::prelude::*;

    fn tensor<D: ndarray::Dimension>(x: Array<f32, D>) -> Tensor {
        x.into_dyn().into_shared()
    }

    // key_dim 2, value_dim 1, decay 1/2 and β = 1/2 throughout, starting from S = (8, 0).
    //   token 1: k = (1, 0), v = 6: S → (4, 0); δ = ½·(6 - 4) = 1; S = (5, 0). q = (1, 10) reads 5.
    //   token 2: k = (1, 1), v = 3.5: S → (2.5, 0); δ = ½·(3.5 - 2.5) = ½; S = (3, ½). q = (1, 10) reads 8.
    // Decay after the write, reading before it, or no correction all give other numbers.
    #[test]
    fn two_tokens_by_hand() {
        let (q, k) = (array![[[1.0, 10.0]], [[1.0, 10.0]]], array![[[1.0, 0.0]], [[1.0, 1.0]]]);
        let (q, k, v) = (tensor(q), tensor(k), tensor(array![[[6.0]], [[3.5]]]));
        let (g, beta) = (tensor(array![[-(2f32.ln())], [-(2f32.ln())]]), tensor(array![[0.5], [0.5]]));
        let state = tensor(array![[[8.0], [0.0]]]);
        let delta = Delta { q: &q, k: &k, v: &v, g: &g, beta: &beta, state: Some(&state) };
        let (core, state) = (gdn_core(&delta), gdn_state(&delta));
        assert_relative_eq!(core[[0, 0, 0]], 5.0, max_relative = 1e-6);
        assert_relative_eq!(core[[1, 0, 0]], 8.0, max_relative = 1e-6);
        assert_relative_eq!(state[[0, 0, 0]], 3.0, max_relative = 1e-6);
        assert_relative_eq!(state[[0, 1, 0]], 0.5, max_relative = 1e-6);
    }

    // Four value heads over two key heads: heads 0 and 1 write with key head 0 (1), heads 2 and 3 with key
    // head 1 (10). With β = 1 and an empty state, S = k·v. Tiled, head 1 would be 20 and head 2 would be 3.
    // They read with the query of the same head, 1 and 100.
    #[test]
    fn consecutive_value_heads_share_a_key() {
        let (q, k) = (tensor(array![[[1.0], [100.0]]]), tensor(array![[[1.0], [10.0]]]));
        let v = tensor(array![[[1.0], [2.0], [3.0], [4.0]]]);
        let (g, beta) = (tensor(Array2::zeros((1, 4))), tensor(Array2::ones((1, 4))));
        let delta = Delta { q: &q, k: &k, v: &v, g: &g, beta: &beta, state: None };
        assert_eq!(gdn_state(&delta).into_raw_vec_and_offset().0, [1.0, 2.0, 30.0, 40.0]);
        assert_eq!(gdn_core(&delta).into_raw_vec_and_offset().0, [1.0, 2.0, 3000.0, 4000.0]);
    }

    // In the order of the formula, and back into the same places.
    #[test]
    fn operands_go_out_and_in() {
        let o: Vec<Tensor> = (0..6).map(|n| tensor(array![[[n as f32]]])).collect();
        let delta = of(&o);
        assert_eq!(delta.operands(), o.iter().collect::<Vec<_>>());
        let again = delta.with(&o);
        assert_eq!((again.q, again.beta, again.state), (&o[0], &o[4], Some(&o[5])));
        assert_eq!(of(&o[..5]).operands().len(), 5);
    }

    /// Random operands: 11 tokens, 2 key heads of 3, 4 value heads of 5.
    fn operands() -> impl Strategy<Value = Vec<Tensor>> {
        let values = |n: usize, low: f32, high: f32| prop::collection::vec(low..high, n);
        let keys =
            (values(11 * 2 * 3, -0.6, 0.6), values(11 * 2 * 3, -0.6, 0.6), values(11 * 4 * 5, -2.0, 2.0));
        // Decays from none at all to nearly everything.
        let gates = (values(11 * 4, -6.0, 0.0), values(11 * 4, 0.0, 1.0), values(4 * 3 * 5, -2.0, 2.0));
        (keys, gates).prop_map(|((q, k, v), (g, beta, state))| {
            let three = |n, h, d, x| tensor(Array::from_shape_vec((n, h, d), x).unwrap());
            let two = |x| tensor(Array::from_shape_vec((11, 4), x).unwrap());
            vec![
                three(11, 2, 3, q),
                three(11, 2, 3, k),
                three(11, 4, 5, v),
                two(g),
                two(beta),
                three(4, 3, 5, state),
            ]
        })
    }

    fn of(o: &[Tensor]) -> Delta<'_, Tensor> {
        Delta { q: &o[0], k: &o[1], v: &o[2], g: &o[3], beta: &o[4], state: o.get(5) }
    }

    proptest! {
        // Chunks of any length, also with a short last one, equal the recurrence. The state is f32 between
        // the tokens of one and f64 inside the chunks of the other: 11 roundings of values below 10.
        #[test]
        fn chunked_equals_step(o in operands(), chunk in 1usize..13, fresh in any::<bool>()) {
            let delta = of(if fresh { &o[..5] } else { &o });
            let (core, state) = gated_delta_rule_chunked(&delta, chunk);
            prop_assert_eq!((core.dim(), state.dim()), ((11, 4, 5), (4, 3, 5)));
            for (chunked, step) in core.iter().zip(&gdn_core(&delta)).chain(state.iter().zip(&gdn_state(&delta))) {
                prop_assert!((chunked - step).abs() < 2e-5, "{} and {}", chunked, step);
            }
        }

        // Two passes with the state carried between them: the bits of one pass.
        #[test]
        fn cut_anywhere_to_the_bit(o in operands(), cut in 1usize..11) {
            let part = |range: Slice| -> Vec<Tensor> {
                o[..5].iter().map(|x| x.slice_axis(Axis(0), range).to_owned().into_shared()).collect()
            };
            let mut head = part(Slice::from(..cut));
            head.push(o[5].clone());
            let mut tail = part(Slice::from(cut..));
            tail.push(tensor(gdn_state(&of(&head)).mapv(|v| v as f32)));
            let whole = of(&o);
            let parts = [gdn_core(&of(&head)), gdn_core(&of(&tail))];
            let parts = ndarray::concatenate(Axis(0), &[parts[0].view(), parts[1].view()]).unwrap();
            prop_assert_eq!(parts, gdn_core(&whole));
            prop_assert_eq!(gdn_state(&of(&tail)), gdn_state(&whole));
        }

        // A later token changes nothing that an earlier one read.
        #[test]
        fn a_later_token_changes_no_earlier_row(o in operands(), at in 1usize..11) {
            let before = gdn_core(&of(&o));
            let mut changed = o.clone();
            changed[2].index_axis_mut(Axis(0), at).fill(9.0);
            let after = gdn_core(&of(&changed));
            let head = Slice::from(..at);
            prop_assert_eq!(before.slice_axis(Axis(0), head), after.slice_axis(Axis(0), head));
        }
    }
}
