//! Block drafts: DFlash and DFlash 2.
//!
//! ```text
//! c_p = norm_h(fc · taps_p)                               context rows, for every layer alike
//! x   = scale · E[anchor, mask, …]                         block rows at positions s, s + 1, …
//! u   = conv₀(norm₁(x))                                    conv: DFlash 2 only
//! Q from u;  K, V from [c ; u];  Q, K: per-head norm, rope
//! x  ← x + conv₁(O(attention(Q, K, V)))
//! x  ← x + conv₁(down(silu(gate(v)) · up(v))),  v = conv₀(norm₂(x))
//! z_j = head · norm(x_j)                                   j ≥ 1: the row of the position it predicts
//! ```
//!
//! Keys and values of context rows stay from pass to pass; those of block rows never do.
//!
//! Sources: arXiv 2602.06036 and the authors' package 0.1.0; transformers' MuseGlimmerAssistantModel.

use super::KvCache;
use crate::ops::{Mask, Ops, Reach, Side, Table};
use spec::Matrix;
use spec::families::draft::{DraftConfig, DraftConv, DraftReach, DraftWeights};
use spec::families::{Activation, Linear};
use spec::site::At;

/// A block draft.
#[derive(Clone, Debug)]
pub struct Draft {
    /// Its config.
    pub config: DraftConfig,
    /// Its weights.
    pub weights: DraftWeights,
}

/// Keys and values of the context rows, of every layer.
#[derive(Clone, Debug)]
pub struct DraftState<T> {
    /// Number of context rows held: the position of the next anchor.
    pub position: usize,
    /// One entry a layer.
    pub layers: Vec<KvCache<T>>,
}

/// What a draft borrows from its target.
#[derive(Clone, Debug)]
pub struct Borrowed {
    /// The target's embedding table as it is stored, `[vocab, hidden]`.
    pub table: Matrix,
    /// What a raw row of it is multiplied by.
    pub scale: f32,
    /// The target's head as it is, without the norm before it.
    pub head: Linear,
}

/// Context rows that a draft has not seen yet.
#[derive(Clone, Copy, Debug)]
pub struct Context<'a, T> {
    /// One tensor a tapped layer, `[rows, hidden]`, in the order of the config.
    pub taps: &'a [T],
    /// How many rows each of them has.
    pub rows: usize,
    /// How many context rows the block may see, the last ones; nothing means all.
    pub window: Option<usize>,
}

/// Rotary tables of a pass: of the new context rows with the block rows, and of the block rows alone.
#[derive(Clone, Debug)]
pub struct DraftTables<T> {
    /// Cosines for keys.
    pub cos: T,
    /// Sines for keys.
    pub sin: T,
    /// Cosines for queries.
    pub block_cos: T,
    /// Sines for queries.
    pub block_sin: T,
}

/// What a draft says about one block.
#[derive(Clone, Debug)]
pub struct DraftOutput<T> {
    /// Normed block rows, the anchor's first; `[n + 1, hidden]`.
    pub hidden: T,
    /// Logits of the proposals, `[n, vocab]`.
    pub logits: T,
    /// Candidate ids and the projected rows that weigh them, in DFlash 2: `[n, k]` and `[n, rank]`.
    pub candidates: Option<(T, T)>,
    /// The proposals, `[n]`.
    pub proposals: T,
}

impl Draft {
    /// State before the first context row.
    pub fn fresh<T>(&self) -> DraftState<T> {
        DraftState { position: 0, layers: self.weights.layers.iter().map(|_| KvCache::empty()).collect() }
    }

    /// Takes `context` in and proposes `proposals` tokens behind `anchor`, which stands at the position
    /// behind the last context row.
    ///
    /// Context rows may come in any portions; the last portion before a block may be empty.
    pub fn pass<O: Ops>(
        &self,
        ops: &mut O,
        state: &mut DraftState<O::Tensor>,
        borrowed: &Borrowed,
        context: Context<O::Tensor>,
        anchor: u32,
        proposals: usize,
    ) -> DraftOutput<O::Tensor> {
        assert!(proposals > 0, "draft: a block holds an anchor and at least one proposal");
        let (c, w, at) = (&self.config, &self.weights, At::MODEL);
        let (hidden, eps, block) = (c.hidden_size, c.rms_norm_eps, proposals + 1);
        let ctx = (context.rows > 0).then(|| self.context(ops, context.taps));
        let mut ids = vec![c.mask_token_id; block];
        ids[0] = anchor;
        let table = w.embed_tokens.as_ref().unwrap_or(&borrowed.table);
        let mut x = ops.embed(at.site("noise"), &ids, table, borrowed.scale);
        let rope = self.tables(ops, state.position, context.rows, block);
        state.position += context.rows;
        for (i, cache) in state.layers.iter_mut().enumerate() {
            x = self.layer(ops, i, &x, ctx.as_ref(), state.position, block, context.window, &rope, cache);
        }
        let y = ops.rms_norm(at.site("final_norm"), &x, Some(&w.norm), hidden, eps);
        let rows = ops.tail(at.site("proposal_rows"), &y, proposals);
        let logits = self.logits(ops, borrowed, &rows);
        let (candidates, proposals) = self.propose(ops, &rows, &logits, anchor);
        DraftOutput { hidden: y, logits, candidates, proposals }
    }

    /// Context rows `[rows, hidden]` of tapped rows, one tensor a tap.
    pub fn context<O: Ops>(&self, ops: &mut O, taps: &[O::Tensor]) -> O::Tensor {
        let (c, w, at) = (&self.config, &self.weights, At::MODEL);
        assert_eq!(taps.len(), c.target_layer_ids.len(), "draft: tapped layers against target_layer_ids");
        let fused = ops.join(at.site("ctx_in"), &taps.iter().collect::<Vec<_>>());
        let fused = ops.linear(at.site("ctx_fc"), &fused, &w.fc);
        ops.rms_norm(at.site("ctx"), &fused, Some(&w.hidden_norm), c.hidden_size, c.rms_norm_eps)
    }

    /// The rotary tables of `rows` new context rows from position `first` on, and of the block behind.
    pub fn tables<O: Ops>(
        &self,
        ops: &mut O,
        first: usize,
        rows: usize,
        block: usize,
    ) -> DraftTables<O::Tensor> {
        let (at, rope) = (At::MODEL, &self.config.rope);
        let positions: Vec<u32> = (first..first + rows + block).map(|p| p as u32).collect();
        let cos = ops.rope_table(at.site("rope.cos"), &positions, rope, Table::Cos);
        let sin = ops.rope_table(at.site("rope.sin"), &positions, rope, Table::Sin);
        let block_cos = ops.tail(at.site("rope.block.cos"), &cos, block);
        let block_sin = ops.tail(at.site("rope.block.sin"), &sin, block);
        DraftTables { cos, sin, block_cos, block_sin }
    }

    /// Layer `i` alone: `x` is `[block, hidden]` and stands at positions `first..`, `ctx` are the new
    /// context rows right before it.
    pub fn layer<O: Ops>(
        &self,
        ops: &mut O,
        i: usize,
        x: &O::Tensor,
        ctx: Option<&O::Tensor>,
        first: usize,
        block: usize,
        window: Option<usize>,
        rope: &DraftTables<O::Tensor>,
        cache: &mut KvCache<O::Tensor>,
    ) -> O::Tensor {
        let (c, w, at) = (&self.config, &self.weights.layers[i], At::layer(i));
        let (hidden, head_dim, eps) = (c.hidden_size, c.head_dim, c.rms_norm_eps);

        let h = ops.rms_norm(at.site("attn_norm"), x, Some(&w.input_layernorm), hidden, eps);
        let (h, kernels) =
            before(ops, at, ["attn_conv_kernel", "attn_conv_in"], h, w.attention_conv.as_ref());
        let q = ops.linear(at.site("q_proj"), &h, &w.q_proj);
        let rows = ctx.map_or(h.clone(), |ctx| ops.stack_rows(at.site("kv_in"), ctx, &h));
        let k = ops.linear(at.site("k_proj"), &rows, &w.k_proj);
        let v = ops.linear(at.site("v_proj"), &rows, &w.v_proj);
        let q = ops.rms_norm(at.site("q_norm"), &q, Some(&w.q_norm), head_dim, eps);
        let k = ops.rms_norm(at.site("k_norm"), &k, Some(&w.k_norm), head_dim, eps);
        let q = ops.rotate(at.site("q_rope"), &q, &rope.block_cos, &rope.block_sin, &c.rope);
        let k = ops.rotate(at.site("k_rope"), &k, &rope.cos, &rope.sin, &c.rope);
        ops.append(at, "k_seen", &mut cache.k, &k, head_dim);
        ops.append(at, "v_seen", &mut cache.v, &v, head_dim);
        let (mut keys, mut values) = (cache.k.get().clone(), cache.v.get().clone());
        let seen = first.min(window.unwrap_or(first));
        if seen < first {
            keys = ops.tail(at.site("k_window"), &keys, seen + block);
            values = ops.tail(at.site("v_window"), &values, seen + block);
        }
        let scores = ops.attn_scores(at.site("attn_scores"), &q, &keys, c.attention_scale(), None);
        // Masks depend on distances only, so positions may count from the first row that is seen.
        let mask = Mask { first: seen, reach: reach(c.layers[i]) };
        let probs = ops.attn_probs(at.site("attn_probs"), &scores, mask, None);
        let ctx = ops.attn_ctx(at.site("attn_ctx"), &probs, &values);
        // The block's own rows leave: what is committed comes back as context.
        ops.truncate(at, "k_cache", &mut cache.k, first);
        ops.truncate(at, "v_cache", &mut cache.v, first);
        let branch = ops.linear(at.site("attn_out"), &ctx, &w.o_proj);
        let branch = behind(ops, at, "attn_conv_out", branch, w.attention_conv.as_ref().zip(kernels));
        let x = ops.residual(at.site("resid_mid"), x, &branch, 1.0);

        let h = ops.rms_norm(at.site("mlp_norm"), &x, Some(&w.post_attention_layernorm), hidden, eps);
        let (h, kernels) = before(ops, at, ["mlp_conv_kernel", "mlp_conv_in"], h, w.mlp_conv.as_ref());
        let gate = ops.linear(at.site("mlp_gate"), &h, &w.gate_proj);
        let up = ops.linear(at.site("mlp_up"), &h, &w.up_proj);
        let act = ops.gated_act(at.site("mlp_act"), &gate, &up, Activation::Silu);
        let branch = ops.linear(at.site("mlp_out"), &act, &w.down_proj);
        let branch = behind(ops, at, "mlp_conv_out", branch, w.mlp_conv.as_ref().zip(kernels));
        ops.residual(at.site("out"), &x, &branch, 1.0)
    }

    /// `z = cap · tanh(multiplier · (head · y) / cap)`, multiplier and cap where the config has them.
    fn logits<O: Ops>(&self, ops: &mut O, borrowed: &Borrowed, rows: &O::Tensor) -> O::Tensor {
        let (c, at) = (&self.config, At::MODEL);
        let own = self.weights.lm_head.as_ref().map(|head| Linear { weight: head.clone(), bias: None });
        let head = own.as_ref().unwrap_or(&borrowed.head);
        let (scaled, capped) = (c.output_multiplier != 1.0, c.final_logit_softcapping);
        if !scaled && capped.is_none() {
            return ops.linear(at.site("logits"), rows, head);
        }
        let mut z = ops.linear(at.site("lm_head"), rows, head);
        if scaled {
            let site = if capped.is_some() { "logits_scaled" } else { "logits" };
            z = ops.scale(at.site(site), &z, c.output_multiplier);
        }
        capped.map_or(z.clone(), |cap| ops.softcap(at.site("logits"), &z, cap))
    }

    /// The token of every row: the largest logit, or the selector's walk.
    #[allow(clippy::type_complexity)]
    fn propose<O: Ops>(
        &self,
        ops: &mut O,
        rows: &O::Tensor,
        logits: &O::Tensor,
        anchor: u32,
    ) -> (Option<(O::Tensor, O::Tensor)>, O::Tensor) {
        let at = At::MODEL;
        let (Some(selector), Some(v2)) = (&self.weights.selector, self.config.version2) else {
            return (None, ops.pick(at.site("proposals"), logits, None));
        };
        let ids = ops.candidates(at.site("candidates"), logits, v2.selector_top_k);
        let hidden = ops.linear(at.site("selector_hidden"), rows, &selector.hidden_projection);
        let scores = ops.path_scores(at.site("path_scores"), logits, &ids, &hidden, selector, anchor);
        let picked = ops.pick(at.site("proposals"), &scores, Some(&ids));
        (Some((ids, hidden)), picked)
    }
}

/// A layer's reach as the mask of an op.
fn reach(layer: DraftReach) -> Reach {
    match layer {
        DraftReach::All => Reach::All,
        DraftReach::Causal => Reach::Causal,
        DraftReach::Window(width) => Reach::Window(width),
        DraftReach::TwoSided(width) => Reach::TwoSided(width),
    }
}

/// The convolution before a sublayer, and the dynamic kernels for both sides: computed once, from the
/// norm's output.
fn before<O: Ops>(
    ops: &mut O,
    at: At,
    [kernel, input]: [&'static str; 2],
    h: O::Tensor,
    conv: Option<&DraftConv>,
) -> (O::Tensor, Option<O::Tensor>) {
    let Some(conv) = conv else { return (h, None) };
    let kernels = ops.linear(at.site(kernel), &h, &conv.kernel_projection);
    let h = ops.block_conv(at.site(input), &h, &kernels, conv, Side::Before);
    (h, Some(kernels))
}

/// The convolution behind a sublayer.
fn behind<O: Ops>(
    ops: &mut O,
    at: At,
    output: &'static str,
    branch: O::Tensor,
    conv: Option<(&DraftConv, O::Tensor)>,
) -> O::Tensor {
    let Some((conv, kernels)) = conv else { return branch };
    ops.block_conv(at.site(output), &branch, &kernels, conv, Side::Behind)
}
