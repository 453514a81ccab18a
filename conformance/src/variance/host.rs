//! What honest f32 code gives for every op that is no matrix product.
//!
//! These are limits rather than models: code may add in any order and its elementary functions may be
//! off by [`Host::ulps`] units, so the variance covers the worst honest choice.

use super::block::{conv_sizes, walk_sizes};
use super::{Bounded, U, delta, rounding, ulp};
use crate::contract::Host;
use ndarray::{ArrayD, Zip};
use rayon::prelude::*;
use reference::ops::evaluate;
use reference::{Call, Tensor};
use spec::NonFinite;

/// Own spread of an op: variance and hard bound of every element.
pub struct Own {
    pub variance: ArrayD<f64>,
    pub bound: ArrayD<f64>,
}

/// The spread that honest f32 code adds at this op, on exact inputs.
pub fn own(call: &Call<Bounded>, r: &ArrayD<f64>, host: Host) -> Own {
    match call {
        Call::Linear { .. } | Call::ExpertLinear { .. } => {
            unreachable!("matrix products have rules of their own")
        }
        // Moving values rounds nothing.
        Call::Append { .. } | Call::Truncate { .. } | Call::Slice { .. } | Call::Concat { .. } => exact(r),
        Call::StackRows { .. } | Call::Tail { .. } => exact(r),
        // A choice is right or wrong, never off by a rounding.
        Call::Candidates { .. } | Call::Pick { .. } => exact(r),
        Call::RouterIndex { .. } => exact(r),
        // The factor may be held in f32.
        Call::Scale { factor, .. } => {
            relative(r, if f64::from(*factor as f32) == *factor { 1.0 } else { 3.0 })
        }
        Call::Embed { scale, .. } if *scale == 1.0 => exact(r),
        Call::Embed { .. } => relative(r, 1.0),
        // One product and one sum.
        Call::Residual { multiplier, x, branch } => {
            let products = if *multiplier == 1.0 { 0.0 } else { 1.0 };
            let size = sum_of_sizes(&[(&x.value, 1.0), (&branch.value, f64::from(*multiplier))], r);
            spread(r, |n, r| ulp(r) / 2.0 + products * U * size[n])
        }
        // Squares, their sum in any order, mean, root, division, weight: the sum of n positive terms is
        // off by at most n·u/2 relative, and the root halves that.
        Call::RmsNorm { width, .. } => relative(r, 4.0 + host.ulps + *width as f64 / 2.0),
        // The angle is a rounded product of a position and a frequency that is itself off by a few
        // units: an error of 4·u·angle, times a derivative of at most the magnitude.
        Call::RopeTable { positions, rope, .. } => {
            let frequencies = reference::ops::inverse_frequencies(
                rope,
                positions.iter().max().map_or(0, |&p| p as usize + 1),
            );
            let (columns, pairs) = (rope.rotary_dim, rope.rotary_dim / 2);
            spread(r, |n, r| {
                let angle = f64::from(positions[n / columns]) * f64::from(frequencies[n % columns % pairs]);
                4.0 * U * angle + host.ulps * ulp(r.abs().max(0.5))
            })
        }
        // Two products and one difference.
        Call::Rotate { x, rope, .. } => {
            let d = rope.head_dim;
            let sizes: Vec<f64> = x.value.iter().map(|v| f64::from(*v).abs()).collect();
            let half = rope.rotary_dim / 2;
            let partner = |n: usize| match n % d {
                i if i < half => n + half,
                i if i < 2 * half => n - half,
                _ => n,
            };
            let interleaved = rope.pairing == spec::Pairing::Interleaved;
            let largest = |n: usize| sizes[n / d * d..][..d].iter().fold(0f64, |m, &v| m.max(v));
            spread(r, |n, _| match n % d {
                i if i >= 2 * half => 0.0,
                _ if interleaved => 4.0 * U * largest(n),
                _ => 2.0 * U * (sizes[n] + sizes[partner(n)]),
            })
        }
        // A dot product over head_dim in any order, the scale, perhaps the cap.
        Call::AttnScores { q, k, scale, softcap } => {
            let cap = if softcap.is_some() { 3.0 + host.ulps } else { 0.0 };
            let absolute = absolute_scores(q, k, *scale);
            let n = *q.value.shape().last().unwrap_or(&1) as f64;
            spread(r, |i, r| U * (n + 2.0) * absolute[i] + cap * ulp(r))
        }
        // exp of a difference (its rounding grows with the score), a sum over keys, a division.
        Call::AttnProbs { scores, .. } => {
            let keys = *scores.value.shape().last().unwrap_or(&1);
            let flat: Vec<f64> = scores.value.iter().map(|&s| f64::from(s)).collect();
            spread(r, |i, r| {
                let row = &flat[i / keys * keys..][..keys];
                let largest = row.iter().fold(0f64, |m, v| m.max(v.abs()));
                r * U * (2.0 * largest + keys as f64 + 4.0 + 2.0 * host.ulps) + f64::from(f32::MIN_POSITIVE)
            })
        }
        // A sum over keys in any order.
        Call::AttnCtx { probs, v } => {
            let absolute = v.value.mapv(f32::abs).into_shared();
            let sizes = reference::ops::attn_ctx(&probs.value, &absolute);
            let sizes: Vec<f64> = sizes.iter().copied().collect();
            let keys = *probs.value.shape().last().unwrap_or(&1) as f64;
            spread(r, |i, _| U * (keys + 2.0) * sizes[i])
        }
        // For every tap one sum, one product and one sum more.
        Call::BlockConv { x, dynamic, conv, side } => {
            let sizes = conv_sizes(&x.value, &dynamic.value, conv, *side);
            let steps = conv.kernel as f64 + 2.0;
            spread(r, |n, r| ulp(r) / 2.0 + steps * U * sizes[n])
        }
        // Two products for every column of the codebooks, their sum, and the logit.
        Call::PathScores { logits, candidates, hidden, selector, anchor } => {
            let operands = [&logits.value, &candidates.value, &hidden.value];
            let (sizes, rank) = (walk_sizes(operands, selector, *anchor, r), selector.predecessor.inner());
            spread(r, |n, r| ulp(r) / 2.0 + (rank as f64 + 3.0) * U * sizes[n])
        }
        // A sum and a product; the factor itself is rounded.
        Call::PerLayerInput { token, context, layer, width } => {
            let (token, context) = (&token.value, &context.value);
            let columns = token.len() / token.shape()[0].max(1);
            let (token, context): (Vec<f32>, Vec<f32>) =
                (token.iter().copied().collect(), context.iter().copied().collect());
            spread(r, |n, r| {
                let from = n / width * columns + layer * width + n % width;
                ulp(r) + U * f64::from(token[from].abs() + context[from].abs())
            })
        }
        // One product.
        Call::ScaleColumns { .. } => relative(r, 1.0),
        Call::ScaleChosen { .. } => relative(r, 1.0),
        // exp of a difference (its rounding grows with the logit), a sum, a division.
        Call::Softmax { x } => {
            let (largest, n) = (largest_of(&x.value), *x.value.shape().last().unwrap_or(&1) as f64);
            spread(r, |_, r| {
                r * U * (2.0 * largest + n + 4.0 + 2.0 * host.ulps) + f64::from(f32::MIN_POSITIVE)
            })
        }
        Call::Stack { .. } | Call::Stream { .. } => exact(r),
        Call::AddToStreams { .. } => relative(r, 1.0),
        // Sums over few streams: as many roundings as terms, each of the size of what is added.
        Call::StreamMean { x } => {
            let streams = x.value.shape()[0] as f64;
            let largest = largest_of(&x.value);
            spread(r, |_, r| ulp(r) + U * streams * largest)
        }
        Call::AltupPredict { x, coefs } => {
            let streams = x.value.shape()[0] as f64;
            let largest = largest_of(&x.value) * (1.0 + streams * largest_of(&coefs.value));
            spread(r, |_, r| ulp(r) + U * (streams + 2.0) * largest)
        }
        Call::AltupCorrect { pred, made, coefs, .. } => {
            let moved = largest_of(&made.value) + largest_of(&pred.value);
            let largest = largest_of(&pred.value) + moved * (1.0 + largest_of(&coefs.value));
            spread(r, |_, r| ulp(r) + 4.0 * U * largest)
        }
        // Two sums of squares of n terms, two roots, a division, a product.
        Call::MatchRms { x, .. } => {
            let n = *x.value.shape().last().unwrap_or(&1) as f64;
            relative(r, 6.0 + n)
        }
        // Mean and deviation of n terms in any order move the cut by about n roundings of the largest gate.
        Call::Sparsify { x, .. } => {
            let n = *x.value.shape().last().unwrap_or(&1) as f64;
            let largest = largest_of(&x.value);
            spread(r, |_, r| ulp(r) + U * (2.0 * n + 8.0) * largest)
        }
        // exp of a difference (its rounding grows with the logit), two sums over experts, two divisions
        // and a factor.
        Call::RouterWeights { logits, router, .. } => {
            let largest = logits.value.iter().fold(0f64, |m, &l| m.max(f64::from(l).abs()));
            let terms = (router.num_experts + router.num_experts_per_tok) as f64;
            spread(r, |_, r| r * U * (2.0 * largest + terms + 6.0 + 2.0 * host.ulps))
        }
        // A sum of products over the choices in any order.
        Call::Mixture { y, weights } => {
            let [y, weights] = [y, weights].map(|x| x.value.mapv(f32::abs).into_shared());
            let sizes: Vec<f64> = reference::ops::mixture(&y, &weights).into_iter().collect();
            let choices = weights.shape()[1] as f64;
            spread(r, |i, _| U * (choices + 1.0) * sizes[i])
        }
        // exp, a sum, a division, two products, and a sum that may cancel where up is near -1.
        Call::ClampedSwiglu { gate, up, .. } => {
            let parts = gate.value.iter().zip(&up.value);
            let size: Vec<f64> =
                parts.map(|(&g, &u)| f64::from(g).abs() * (f64::from(u).abs() + 1.0)).collect();
            spread(r, |i, _| (5.0 + 2.0 * host.ulps) * U * size[i])
        }
        // A division, tanh, a product.
        Call::Softcap { x, .. } => {
            let size: Vec<f64> = x.value.iter().map(|&v| f64::from(v).abs()).collect();
            spread(r, |i, r| (2.0 + host.ulps) * (ulp(r) / 2.0 + U * size[i]))
        }
        Call::Columns { .. } | Call::Join { .. } | Call::ConvState { .. } => exact(r),
        Call::Multiply { .. } => relative(r, 1.0),
        // exp, a sum, a division, perhaps a product.
        Call::Sigmoid { .. } | Call::SigmoidGate { .. } => relative(r, 6.0 + 2.0 * host.ulps),
        // As a norm over the mean, without the weight.
        Call::L2Norm { x, .. } => {
            relative(r, 4.0 + host.ulps + *x.value.shape().last().unwrap_or(&1) as f64 / 2.0)
        }
        // A product a tap and their sum in any order; silu's slope is at most 1.1.
        Call::CausalConv { u, state, conv, activation } => {
            let size = |x: &Bounded| x.value.mapv(f32::abs).into_shared();
            let vector =
                |v: &spec::Vector| spec::Vector::new(&v.name, v.iter().map(|v| v.abs()).collect::<Vec<_>>());
            let filters = spec::families::Conv {
                weight: vector(&conv.weight),
                bias: conv.bias.as_ref().map(vector),
                kernel: conv.kernel,
            };
            let sizes = reference::ops::causal_conv(&size(u), state.map(size).as_ref(), &filters, None);
            let sizes: Vec<f64> = sizes.into_iter().collect();
            let act = if activation.is_some() { 4.0 + 2.0 * host.ulps } else { 0.0 };
            spread(r, |i, _| U * (1.1 * (conv.kernel as f64 + 2.0) + act) * sizes[i])
        }
        // A sum whose rounding the slope of softplus, at most 1, and the rate carry on; three elementary
        // functions and a product.
        Call::GdnDecay { a, a_log, dt_bias } => {
            let heads = a_log.len();
            let a: Vec<f64> = a.value.iter().map(|&a| f64::from(a).abs()).collect();
            spread(r, |n, r| {
                let (h, rate) = (n % heads, f64::from(a_log[n % heads]).exp());
                U * rate * (a[n] + f64::from(dt_bias[h]).abs() + 1.0) + (3.0 + 3.0 * host.ulps) * ulp(r)
            })
        }
        Call::GdnCore(operands) => within(delta::bounds(operands, host).0),
        Call::GdnState(operands) => within(delta::bounds(operands, host).1),
        // exp or tanh, a sum, a division, two products. The gelu's 1 + tanh cancels for negative
        // gates, so its error is absolute in the size of gate · up.
        Call::GatedAct { gate, up, .. } => {
            let size: Vec<f64> = Zip::from(&gate.value)
                .and(&up.value)
                .map_collect(|&g, &u| (f64::from(g) * f64::from(u)).abs())
                .into_iter()
                .collect();
            spread(r, |i, _| (4.0 + 2.0 * host.ulps) * U * size[i])
        }
    }
}

/// The variance that errors of the inputs cause, by first derivatives; nothing where all inputs are exact.
pub fn carried(call: &Call<Bounded>, r: &ArrayD<f64>) -> Result<Option<ArrayD<f64>>, NonFinite> {
    if call.operands().iter().all(|o| o.variance.is_none()) {
        return Ok(None);
    }
    match call {
        Call::Embed { .. } | Call::RopeTable { .. } | Call::Linear { .. } => Ok(None),
        // A choice does not move a little.
        Call::RouterIndex { .. } | Call::Candidates { .. } | Call::Pick { .. } => Ok(None),
        Call::Residual { x, branch, multiplier } => {
            let m2 = f64::from(*multiplier).powi(2);
            Ok(Some(indexed(r, |n| x.variance_at(n) + m2 * branch.variance_at(n))))
        }
        Call::GatedAct { .. } | Call::ClampedSwiglu { .. } | Call::Multiply { .. } => {
            elementwise(call, r).map(Some)
        }
        Call::Sigmoid { .. } | Call::Softcap { .. } | Call::Scale { .. } | Call::ScaleColumns { .. } => {
            elementwise(call, r).map(Some)
        }
        _ => probed(call, r).map(Some),
    }
}

/// The same for ops whose every element depends on one element of each operand: both operands' slopes are measured
/// for all elements at once, on either side.
///
/// ```text
/// V = Σ_operands ((f(x + a·σ) - r)² + (f(x - a·σ) - r)²) / 2a²
/// ```
fn elementwise(call: &Call<Bounded>, r: &ArrayD<f64>) -> Result<ArrayD<f64>, NonFinite> {
    let mut total = ArrayD::<f64>::zeros(r.raw_dim());
    let operands = call.operands();
    for (o, operand) in operands.iter().enumerate() {
        for kind in [Errors::Small, Errors::Large].into_iter().filter(|kind| kind.occur_in(operand)) {
            for sign in [1.0, -1.0] {
                let mut moved: Vec<Tensor> = operands.iter().map(|operand| operand.value.clone()).collect();
                moved[o] = kind.moved(operand, || sign);
                add_squares(&mut total, &evaluate(&call.with(&moved))?, r, 0.5 / kind.enlarged().powi(2));
            }
        }
    }
    Ok(total)
}

/// `total += weight · (moved - r)²`
fn add_squares(total: &mut ArrayD<f64>, moved: &ArrayD<f64>, r: &ArrayD<f64>, weight: f64) {
    Zip::from(total).and(moved).and(r).for_each(|total, moved, r| {
        let difference = moved - r;
        *total += weight * difference * difference;
    });
}

/// Results of fewer elements are faster made than a thread is woken.
const WORTH_A_THREAD: usize = 1 << 13;

/// How many random perturbations stand for an input's errors where no formula is written down.
const PROBES: usize = 24;

/// `V ≈ mean over probes of (f(x + a·σ·ξ) - f(x))² / a²`, ξ = ±1 drawn anew for every element.
///
/// A measured first-order propagation: right for every op, covariances inside the op included. Inputs are
/// f32, so errors of a few units in their last place are enlarged, else they would be rounded away; larger
/// ones are not, so that formulas stay straight lines. Both kinds are independent, and their variances add.
fn probed(call: &Call<Bounded>, r: &ArrayD<f64>) -> Result<ArrayD<f64>, NonFinite> {
    let mut total = ArrayD::<f64>::zeros(r.raw_dim());
    let probes: Vec<usize> = (0..PROBES).collect();
    for kind in [Errors::Small, Errors::Large] {
        if !call.operands().iter().any(|operand| kind.occur_in(operand)) {
            continue;
        }
        let probe = |&probe: &usize| {
            let operands = call.operands().into_iter().enumerate();
            let operands: Vec<Tensor> =
                operands.map(|(o, operand)| kind.perturbed(operand, (probe * 16 + o) as u64)).collect();
            evaluate(&call.with(&operands))
        };
        let weight = 1.0 / (PROBES as f64 * kind.enlarged().powi(2));
        // No more results are held than threads make at a time.
        let at_once = if r.len() < WORTH_A_THREAD { 1 } else { rayon::current_num_threads() };
        for probes in probes.chunks(at_once) {
            let moved: Vec<ArrayD<f64>> = match probes {
                [one] => vec![probe(one)?],
                _ => probes.par_iter().map(probe).collect::<Result<_, _>>()?,
            };
            moved.iter().for_each(|moved| add_squares(&mut total, moved, r, weight));
        }
    }
    Ok(total)
}

/// Errors of inputs by size: whether their standard deviation is below eight units in the last place.
#[derive(Clone, Copy, PartialEq)]
enum Errors {
    Small,
    Large,
}

impl Errors {
    fn enlarged(self) -> f64 {
        if self == Errors::Small { 64.0 } else { 1.0 }
    }

    fn has(self, value: f32, variance: f64) -> bool {
        let small = variance < (8.0 * ulp(f64::from(value))).powi(2);
        variance > 0.0 && small == (self == Errors::Small)
    }

    fn occur_in(self, operand: &Bounded) -> bool {
        let Some(variance) = &operand.variance else { return false };
        operand.value.iter().zip(variance).any(|(&value, &variance)| self.has(value, variance))
    }

    /// The operand with every element that has errors of this kind moved by a standard deviation either way.
    fn perturbed(self, operand: &Bounded, seed: u64) -> Tensor {
        let mut signs = fixtures::random::SplitMix64::new(seed);
        self.moved(operand, || if signs.next() & 1 == 0 { 1.0 } else { -1.0 })
    }

    fn moved(self, operand: &Bounded, mut sign: impl FnMut() -> f64) -> Tensor {
        let Some(variance) = &operand.variance else { return operand.value.clone() };
        Zip::from(&operand.value)
            .and(variance)
            .map_collect(|&v, &variance| {
                let sign = sign();
                let step = if self.has(v, variance) { self.enlarged() * variance.sqrt() } else { 0.0 };
                (f64::from(v) + sign * step) as f32
            })
            .into_shared()
    }
}

fn exact(r: &ArrayD<f64>) -> Own {
    Own { variance: ArrayD::zeros(r.raw_dim()), bound: ArrayD::zeros(r.raw_dim()) }
}

/// `roundings` half units in the last place of the result.
fn relative(r: &ArrayD<f64>, roundings: f64) -> Own {
    if roundings == 1.0 {
        return Own { variance: r.mapv(rounding), bound: r.mapv(|r| ulp(r) / 2.0) };
    }
    spread(r, |_, r| roundings * ulp(r) / 2.0)
}

/// A hard bound per element, and the variance of an error that is uniform within it.
fn spread(r: &ArrayD<f64>, bound: impl Fn(usize, f64) -> f64) -> Own {
    let r_flat = r.as_standard_layout();
    let values: Vec<f64> = r_flat.iter().enumerate().map(|(n, &r)| bound(n, r)).collect();
    within(ArrayD::from_shape_vec(r.raw_dim(), values).expect("one bound an element"))
}

/// Errors that are uniform within a hard bound of each element.
fn within(bound: ArrayD<f64>) -> Own {
    Own { variance: bound.mapv(|b| b * b / 3.0), bound }
}

fn indexed(r: &ArrayD<f64>, value: impl Fn(usize) -> f64) -> ArrayD<f64> {
    ArrayD::from_shape_vec(r.raw_dim(), (0..r.len()).map(value).collect()).expect("one value an element")
}

fn largest_of(x: &Tensor) -> f64 {
    x.iter().fold(0f64, |m, &v| m.max(f64::from(v).abs()))
}

fn sum_of_sizes(parts: &[(&Tensor, f64)], r: &ArrayD<f64>) -> Vec<f64> {
    let mut sizes = vec![0.0; r.len()];
    for (part, factor) in parts {
        for (size, &v) in sizes.iter_mut().zip(part.iter()) {
            *size += (f64::from(v) * factor).abs();
        }
    }
    sizes
}

/// `scale · Σ_d |q · k|`, in the order of the scores.
fn absolute_scores(q: &Bounded, k: &Bounded, scale: f64) -> Vec<f64> {
    let (q, k) = (q.value.mapv(f32::abs).into_shared(), k.value.mapv(f32::abs).into_shared());
    reference::ops::attn_scores(&q, &k, scale.abs(), None).into_iter().collect()
}
