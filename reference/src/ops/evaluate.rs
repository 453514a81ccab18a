//! What a call gives: the free function of its op.

use super::*;
use ndarray::ArrayD;
use spec::NonFinite;

/// The value of a call, in f64, not yet rounded. The only failure is a weight that is not finite.
pub fn evaluate(call: &Call<Tensor>) -> Result<ArrayD<f64>, NonFinite> {
    Ok(match call {
        Call::Embed { ids, table, scale } => embed(ids, table, *scale)?.into_dyn(),
        Call::Linear { x, w } => linear(rows(x), w)?.into_dyn(),
        Call::RmsNorm { x, weight, width, eps } => rms_norm(x, weight.map(|w| &w[..]), *width, *eps),
        Call::RopeTable { positions, rope, table } => rope_table(positions, rope, *table).into_dyn(),
        Call::Rotate { x, cos, sin, rope } => {
            rotate(x, rows(cos), rows(sin), rope.head_dim, rope.pairing).into_dyn()
        }
        Call::Append { cache, rows, width } => append(cache.as_ref(), rows, *width).into_dyn(),
        Call::Truncate { cache, keep } => truncate(cache, *keep),
        Call::AttnScores { q, k, scale, softcap } => attn_scores(q, k, *scale, *softcap).into_dyn(),
        Call::AttnProbs { scores, mask, sinks } => {
            attn_probs(scores, *mask, sinks.map(|s| &s[..])).into_dyn()
        }
        Call::AttnCtx { probs, v } => attn_ctx(probs, v).into_dyn(),
        Call::GatedAct { gate, up, activation } => gated_act(gate, up, *activation),
        Call::Residual { x, branch, multiplier } => residual(x, branch, *multiplier),
        Call::Columns { x, runs, width } => columns(x, runs, *width),
        Call::Join { parts } => join(parts).into_dyn(),
        Call::Multiply { a, b } => multiply(a, b),
        Call::Sigmoid { x } => sigmoid(x),
        Call::SigmoidGate { x, gate } => sigmoid_gate(x, gate),
        Call::L2Norm { x, scale } => l2_norm(x, *scale).into_dyn(),
        Call::CausalConv { u, state, conv, activation } => {
            causal_conv(u, *state, conv, *activation).into_dyn()
        }
        Call::ConvState { u, state, kernel } => conv_state(u, *state, *kernel).into_dyn(),
        Call::GdnDecay { a, a_log, dt_bias } => gdn_decay(a, a_log, dt_bias).into_dyn(),
        Call::GdnCore(delta) => gdn_core(delta).into_dyn(),
        Call::GdnState(delta) => gdn_state(delta).into_dyn(),
        Call::Scale { x, factor } => scale(x, *factor),
        Call::Slice { x, width, start, end } => slice(x, *width, *start..*end),
        Call::Concat { a, b } => concat(a, b).into_dyn(),
        Call::RouterIndex { logits, router, bias } => {
            router_index(logits, router, bias.map(|b| &b[..])).into_dyn()
        }
        Call::RouterWeights { logits, index, router } => router_weights(logits, index, router).into_dyn(),
        Call::ExpertLinear { x, index, experts } => expert_linear(x, index, experts)?.into_dyn(),
        Call::Mixture { y, weights } => mixture(y, weights).into_dyn(),
        Call::ClampedSwiglu { gate, up, alpha, limit } => clamped_swiglu(gate, up, *alpha, *limit),
        Call::Softcap { x, cap } => softcap(x, *cap),
        Call::StackRows { above, below } => stack_rows(above, below).into_dyn(),
        Call::Tail { x, keep } => tail(x, *keep),
        Call::BlockConv { x, dynamic, conv, side } => block_conv(x, dynamic, conv, *side).into_dyn(),
        Call::Candidates { logits, k } => candidates(logits, *k).into_dyn(),
        Call::PathScores { logits, candidates, hidden, selector, anchor } => {
            path_scores(logits, candidates, hidden, selector, *anchor)?.into_dyn()
        }
        Call::Pick { scores, candidates } => pick(scores, *candidates).into_dyn(),
        Call::PerLayerInput { token, context, layer, width } => {
            per_layer_input(token, context, *layer, *width).into_dyn()
        }
        Call::Stack { parts } => stack(parts).into_dyn(),
        Call::Stream { x, index } => stream(x, *index).into_dyn(),
        Call::StreamMean { x } => stream_mean(x).into_dyn(),
        Call::AddToStreams { x, branch } => add_to_streams(x, branch).into_dyn(),
        Call::MatchRms { x, like } => match_rms(x, like).into_dyn(),
        Call::AltupPredict { x, coefs } => altup_predict(x, coefs).into_dyn(),
        Call::AltupCorrect { pred, made, coefs, active } => {
            altup_correct(pred, made, coefs, *active).into_dyn()
        }
        Call::Sparsify { x, sparsity } => sparsify(x, *sparsity).into_dyn(),
        Call::ScaleColumns { x, weight } => scale_columns(x, weight).into_dyn(),
        Call::Softmax { x } => softmax(x).into_dyn(),
        Call::ScaleChosen { weights, index, scale } => scale_chosen(weights, index, scale).into_dyn(),
    })
}
