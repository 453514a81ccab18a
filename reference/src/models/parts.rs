//! What several programs are made of.

use crate::State;
use crate::ops::{Ops, Table};
use spec::Rope;
use spec::families::Activation;
use spec::families::moe::Experts;
use spec::site::At;

/// Number of tokens fed, and keys and values of every layer.
#[derive(Clone, Debug)]
pub struct DecoderState<T> {
    /// Number of tokens fed.
    pub position: usize,
    /// One entry a layer.
    pub layers: Vec<KvCache<T>>,
}

/// Keys and values of one layer: `[keys, kv_heads, head_dim]`, rotated and ready to attend to.
#[derive(Clone, Debug)]
pub struct KvCache<T> {
    /// Keys.
    pub k: State<T>,
    /// Values.
    pub v: State<T>,
}

impl<T> DecoderState<T> {
    /// The state before the first token of a model of `layers` layers.
    pub fn fresh(layers: usize) -> Self {
        let layers = (0..layers).map(|_| KvCache { k: State(None), v: State(None) }).collect();
        Self { position: 0, layers }
    }
}

/// The positions of `count` tokens behind `first`.
pub fn positions(first: usize, count: usize) -> Vec<u32> {
    (first..first + count).map(|p| p as u32).collect()
}

/// Cosine and sine of the pass's positions.
pub struct Tables<T> {
    /// `[tokens, rotary]`
    pub cos: T,
    /// `[tokens, rotary]`
    pub sin: T,
}

impl<T: Clone> Tables<T> {
    /// The tables at sites `rope.cos` and `rope.sin`.
    pub fn new<O: Ops<Tensor = T>>(ops: &mut O, positions: &[u32], rope: &Rope) -> Self {
        Tables {
            cos: ops.rope_table(At::MODEL.site("rope.cos"), positions, rope, Table::Cos),
            sin: ops.rope_table(At::MODEL.site("rope.sin"), positions, rope, Table::Sin),
        }
    }
}

/// The routed experts of a block, at sites `expert_gate` to `experts_out`.
///
/// ```text
/// y[t] = Σ_j weights[t, j] · down_e(act(gate_e(x[t])) · up_e(x[t]))      e = index[t, j]
/// ```
pub fn routed_experts<O: Ops>(
    ops: &mut O,
    at: At,
    x: &O::Tensor,
    index: &O::Tensor,
    weights: &O::Tensor,
    experts: &Experts,
    activation: Activation,
) -> O::Tensor {
    let gate = ops.expert_linear(at.site("expert_gate"), x, index, &experts.gate_proj);
    let up = ops.expert_linear(at.site("expert_up"), x, index, &experts.up_proj);
    let act = ops.gated_act(at.site("expert_act"), &gate, &up, activation);
    let y = ops.expert_linear(at.site("expert_down"), &act, index, &experts.down_proj);
    ops.mixture(at.site("experts_out"), &y, weights)
}
