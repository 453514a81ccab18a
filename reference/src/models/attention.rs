//! What every program with softmax attention carries along: its key and value caches, and the rotary
//! tables of a pass.

use crate::State;
use crate::ops::{Ops, Table};
use spec::Rope;
use spec::site::At;

/// The sites of the tables of full layers, where sliding ones have tables of their own.
pub const FULL: [&str; 2] = ["rope.full_attention.cos", "rope.full_attention.sin"];

/// The sites of the tables of sliding layers.
pub const SLIDING: [&str; 2] = ["rope.sliding_attention.cos", "rope.sliding_attention.sin"];

/// Keys and values of one layer: `[keys, kv_heads, head_dim]`, rotated and ready to attend to.
#[derive(Clone, Debug, Default)]
pub struct KvCache<T> {
    /// Keys.
    pub k: State<T>,
    /// Values.
    pub v: State<T>,
}

impl<T> KvCache<T> {
    /// A cache before the first token.
    pub fn empty() -> Self {
        KvCache { k: State(None), v: State(None) }
    }
}

/// Cosine and sine of a pass's positions, `[tokens, rotary_dim]`.
#[derive(Clone, Debug)]
pub struct Tables<T> {
    /// Cosines.
    pub cos: T,
    /// Sines.
    pub sin: T,
}

impl<T: Clone> Tables<T> {
    /// The tables of `tokens` positions from `first` on; `names` are the sites of cosine and sine.
    pub fn new<O: Ops<Tensor = T> + ?Sized>(
        ops: &mut O,
        [cos, sin]: [&'static str; 2],
        rope: &Rope,
        first: usize,
        tokens: usize,
    ) -> Self {
        let at = At::MODEL;
        let positions: Vec<u32> = (first..first + tokens).map(|p| p as u32).collect();
        Tables {
            cos: ops.rope_table(at.site(cos), &positions, rope, Table::Cos),
            sin: ops.rope_table(at.site(sin), &positions, rope, Table::Sin),
        }
    }
}
