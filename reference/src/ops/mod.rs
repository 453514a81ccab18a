//! The ops, and the seam: a model is a program over [`Ops`], and every op result has a site.
//!
//! Each op is a free function in a file of its own. It returns f64; [`crate::Plain`] rounds the
//! result to f32, once. [`Call`] is one op call as a value, so that it can be recorded, replayed,
//! mutated, bounded and counted without touching a model.

mod altup;
mod append;
mod attention;
mod block_conv;
mod call;
mod causal_conv;
mod clamped_swiglu;
mod columns;
mod embed;
mod evaluate;
mod experts;
mod gated_act;
mod gated_delta_rule;
mod gdn_decay;
mod join;
mod l2_norm;
mod linear;
mod match_rms;
mod multiply;
mod per_layer_input;
mod residual;
mod rms_norm;
mod rope;
mod router;
mod scale;
mod scale_chosen;
mod scale_columns;
mod seam;
mod selector;
mod sigmoid;
mod slice;
mod softcap;
mod softmax;
mod sparsify;
mod stack_rows;
mod streams;

pub use altup::{altup_correct, altup_predict};
pub use append::{append, truncate};
pub use attention::{Mask, Reach, attn_ctx, attn_probs, attn_scores};
pub use block_conv::{Side, block_conv};
pub use call::{Call, Table};
pub use causal_conv::{causal_conv, conv_state};
pub use clamped_swiglu::clamped_swiglu;
pub use columns::{Run, columns};
pub use embed::embed;
pub use evaluate::evaluate;
use experts::expert;
pub use experts::{expert_linear, mixture};
pub use gated_act::{activate, gated_act};
pub use gated_delta_rule::{Delta, gated_delta_rule_chunked, gdn_core, gdn_state};
pub use gdn_decay::gdn_decay;
pub use join::join;
pub use l2_norm::{L2_EPS, l2_norm};
pub use linear::linear;
pub use match_rms::match_rms;
pub use multiply::multiply;
pub use per_layer_input::per_layer_input;
pub use residual::residual;
pub use rms_norm::rms_norm;
pub use rope::{inverse_frequencies, rope_table, rotate};
pub use router::{router_index, router_weights};
pub use scale::scale;
pub use scale_chosen::scale_chosen;
pub use scale_columns::scale_columns;
pub use seam::Ops;
pub use selector::{candidates, path_scores, pick, step_scores};
pub use sigmoid::{sigmoid, sigmoid_gate};
pub use slice::{concat, slice};
pub use softcap::softcap;
pub use softmax::softmax;
pub use sparsify::sparsify;
pub use stack_rows::{stack_rows, tail};
pub use streams::{add_to_streams, stack, stream, stream_mean};

use ndarray::{ArcArray, IxDyn};

/// Values at a site: f32, axes as in the site registry; cheap to clone.
pub type Tensor = ArcArray<f32, IxDyn>;

/// A tensor as rows: its first axis, and all others flattened.
pub(crate) fn rows(x: &Tensor) -> ndarray::ArrayView2<'_, f32> {
    let first = x.shape()[0];
    let rest = x.len().checked_div(first).unwrap_or(0);
    x.view().into_shape_with_order((first, rest)).expect("tensors at sites are stored row after row")
}
