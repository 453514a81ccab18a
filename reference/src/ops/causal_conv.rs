//! A short causal convolution along the tokens, and the rows that it carries to the next pass.

use super::{Tensor, activate, rows};
use crate::sum::sum;
use ndarray::{Array2, ArrayView2};
use spec::families::{Activation, Conv};

/// Filters every channel over the last K tokens.
///
/// ```text
/// y[t, c] = act( Σ_{j<K} w[c, j] · u[t - K + 1 + j, c] + b[c] )
/// ```
///
/// `u` is `[tokens, channels]`; before its first row come the rows of `state`, `[channels, kernel]`, and
/// before the start of the text zeros. The last tap meets the current token. Channels do not mix. The
/// result is `[tokens, channels]`.
///
/// Source: arXiv 2312.00752, figure 3 (the convolution before the recurrence).
pub fn causal_conv(
    u: &Tensor,
    state: Option<&Tensor>,
    conv: &Conv,
    activation: Option<Activation>,
) -> Array2<f64> {
    let (u, kernel) = (rows(u), conv.kernel);
    let (tokens, channels) = u.dim();
    assert_eq!(channels, conv.channels(), "causal_conv: channels of u against filters");
    let state = state.map(|state| held(state, channels, kernel));
    Array2::from_shape_fn((tokens, channels), |(t, c)| {
        let taps =
            (0..kernel).map(|j| f64::from(conv.weight[c * kernel + j]) * row(u, state, t + j, kernel - 1, c));
        let y = sum(taps);
        let y = conv.bias.as_ref().map_or(y, |bias| y + f64::from(bias[c]));
        activation.map_or(y, |activation| activate(y, activation))
    })
}

/// The last K rows that the convolution has read, the newest last. Exact.
///
/// ```text
/// y[c, j] = u[tokens - K + j, c]
/// ```
///
/// `u`, `state` and what comes before them are as in [`causal_conv`]; the result is `[channels, kernel]`.
/// The next token reads the newest K - 1 of them.
pub fn conv_state(u: &Tensor, state: Option<&Tensor>, kernel: usize) -> Array2<f64> {
    let u = rows(u);
    let (tokens, channels) = u.dim();
    let state = state.map(|state| held(state, channels, kernel));
    Array2::from_shape_fn((channels, kernel), |(c, j)| row(u, state, tokens + j, kernel, c))
}

fn held(state: &Tensor, channels: usize, kernel: usize) -> ArrayView2<'_, f32> {
    let state = rows(state);
    assert_eq!(
        state.dim(),
        (channels, kernel),
        "causal_conv: shape of the state against channels and kernel"
    );
    state
}

/// `u[n - before, c]`: row n, counted from `before` rows before the pass.
fn row(u: ArrayView2<f32>, state: Option<ArrayView2<f32>>, n: usize, before: usize, c: usize) -> f64 {
    match (n.checked_sub(before), state) {
        (Some(t), _) => f64::from(u[[t, c]]),
        (None, Some(state)) => f64::from(state[[c, state.ncols() + n - before]]),
        (None, None) => 0.0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ndarray::{Axis, Slice, array, concatenate};
    use proptest::prelude::*;
    use spec::Vector;

    fn conv(kernel: usize, weight: Vec<f32>) -> Conv {
        Conv { weight: Vector::new("conv", weight), bias: None, kernel }
    }

    fn rounded(x: Array2<f64>) -> Tensor {
        x.mapv(|v| v as f32).into_dyn().into_shared()
    }

    // Taps 1, 10, 100 on the text 1 2 3: the current token meets 100. Reversed it would meet 1.
    // The second channel has taps of its own: 0, 0, 5.
    #[test]
    fn the_last_tap_meets_the_current_token() {
        let u = array![[1.0f32, 7.0], [2.0, 8.0], [3.0, 9.0]].into_dyn().into_shared();
        let conv = conv(3, vec![1.0, 10.0, 100.0, 0.0, 0.0, 5.0]);
        let y = causal_conv(&u, None, &conv, None);
        assert_eq!(y, array![[100.0, 35.0], [210.0, 40.0], [321.0, 45.0]]);
        let state = conv_state(&u, None, 3);
        assert_eq!(state, array![[1.0, 2.0, 3.0], [7.0, 8.0, 9.0]]);
        // One more token, 4: 2 + 30 + 400.
        let next = array![[4.0f32, 0.0]].into_dyn().into_shared();
        assert_eq!(causal_conv(&next, Some(&rounded(state)), &conv, None), array![[432.0, 0.0]]);
    }

    #[test]
    fn a_short_text_leaves_zeros_on_the_left() {
        let u = array![[5.0f32]].into_dyn().into_shared();
        assert_eq!(conv_state(&u, None, 3), array![[0.0, 0.0, 5.0]]);
    }

    // The bias comes before the activation: silu(-1 + 1) = 0.
    #[test]
    fn bias_then_activation() {
        let mut conv = conv(1, vec![-1.0]);
        conv.bias = Some(Vector::new("b", vec![1.0]));
        let u = array![[1.0f32]].into_dyn().into_shared();
        assert_eq!(causal_conv(&u, None, &conv, Some(Activation::Silu)), array![[0.0]]);
    }

    proptest! {
        // Cut anywhere, also into chunks shorter than the filter: the same values and the same state.
        #[test]
        fn the_state_is_carried_across_chunks(
            u in prop::collection::vec(-2.0f32..2.0, 9 * 2),
            weight in prop::collection::vec(-2.0f32..2.0, 2 * 4),
            cuts in prop::collection::vec(1usize..4, 9),
        ) {
            let conv = conv(4, weight);
            let u = Array2::from_shape_vec((9, 2), u).unwrap().into_dyn().into_shared();
            let whole = causal_conv(&u, None, &conv, Some(Activation::Silu));
            let (mut parts, mut state, mut from) = (vec![], None, 0);
            for cut in cuts {
                let to = (from + cut).min(9);
                let chunk = u.slice_axis(Axis(0), Slice::from(from..to)).to_owned().into_shared();
                parts.push(causal_conv(&chunk, state.as_ref(), &conv, Some(Activation::Silu)));
                state = Some(rounded(conv_state(&chunk, state.as_ref(), 4)));
                from = to;
                if from == 9 { break; }
            }
            let views: Vec<_> = parts.iter().map(|p| p.view()).collect();
            prop_assert_eq!(concatenate(Axis(0), &views).unwrap(), whole);
            prop_assert_eq!(state.unwrap(), rounded(conv_state(&u, None, 4)));
        }
    }
}
