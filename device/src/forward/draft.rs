//! Block drafts (DFlash, DFlash 2) on the device.
//!
//! ```text
//! c = norm_h(fc · taps)                       one packed product, new context rows only
//! x = scale · E[anchor, mask, …]
//! [q | k | v] = W_qkv · [c ; conv₀(norm₁(x))]  one launch streams the image for context and block
//! x ← x + conv₁(O(attention(q, K, V)))
//! x ← x + conv₁(down(silu(gate) · up)),        [gate | up] one image
//! z = head · norm(x), rows behind the anchor's
//! ```
//!
//! Keys and values of context rows are cached, turned once; those of the block leave behind every pass. A
//! launch streams its whole image whatever its rows, so context rows ride along with the block's: their
//! query columns are computed and not used.

use super::blocks::{self, image};
use crate::counters::Counters;
use crate::design::Design;
use crate::engine::Engine;
use crate::fault::Fault;
use crate::host::act::add;
use crate::host::attention::Attention;
use crate::host::cache::KvCache;
use crate::host::norm::rms_norm;
use crate::host::rope::RopeTable;
use crate::host::select;
use crate::launcher::{Launcher, Part, Source, Stage};
use crate::pass::Pass;
use crate::resident::{Group, Key, Role};
use crate::switches::Switches;
use crate::taps::{TapSink, Taps};
use crate::{DeviceError, npu};
use spec::families::draft::{DraftConfig, DraftConv, DraftReach, DraftWeights};
use spec::families::{Activation, Linear};
use spec::{Matrix, Site};
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

/// What a draft borrows from its target.
#[derive(Clone, Debug)]
pub struct Lent {
    /// The embedding table as it is stored, `[vocab, hidden]`.
    pub table: Matrix,
    /// What a raw row of it is multiplied by.
    pub scale: f32,
    /// The head, without the norm before it.
    pub head: Linear,
}

/// What a draft says about one block of `n` proposals.
#[derive(Clone, Debug, PartialEq)]
pub struct Block {
    /// Normed block rows, the anchor's first: `[n + 1, hidden]`.
    pub hidden: Vec<f32>,
    /// `[n, vocab]`
    pub logits: Vec<f32>,
    /// Candidate ids `[n, k]` and the projected rows that weigh them `[n, rank]`, in DFlash 2.
    pub candidates: Option<(Vec<u32>, Vec<f32>)>,
    /// The proposals, `[n]`.
    pub proposals: Vec<u32>,
}

/// A block draft on the device, with the context rows of one request.
///
/// Every portion in which context rows come gives the same bits.
pub struct NpuDraft {
    c: DraftConfig,
    w: DraftWeights,
    lent: Lent,
    window: Option<usize>,
    launcher: Launcher,
    rope: RopeTable,
    caches: Vec<KvCache>,
    counted: Counters,
}

impl NpuDraft {
    /// Prepares a draft for an engine. Nothing is packed before the first pass.
    ///
    /// # Errors
    /// A product that no design runs, by name; heads that do not divide.
    pub fn init(
        config: &DraftConfig,
        weights: &DraftWeights,
        lent: Lent,
        engine: Engine,
        switches: Switches,
    ) -> Result<NpuDraft, DeviceError> {
        Self::init_with_fault(config, weights, lent, engine, switches, None)
    }

    /// As [`NpuDraft::init`], wrong on purpose where a fault is given.
    pub fn init_with_fault(
        config: &DraftConfig,
        weights: &DraftWeights,
        lent: Lent,
        engine: Engine,
        switches: Switches,
        fault: Option<Arc<dyn Fault>>,
    ) -> Result<NpuDraft, DeviceError> {
        let (c, w) = (config.clone(), weights.clone());
        blocks::check_heads(c.num_attention_heads, c.num_key_value_heads, &c.rope)?;
        let layers = w.layers.len();
        let launcher = Launcher::new(engine, switches, fault, layers, sources(&c, &w, &lent))?;
        let cache = KvCache::new(c.num_key_value_heads, c.head_dim, c.head_dim);
        Ok(NpuDraft {
            rope: RopeTable::new(&c.rope),
            caches: vec![cache; layers],
            counted: Counters::new(layers),
            window: None,
            launcher,
            lent,
            c,
            w,
        })
    }

    /// Shows the block the last `window` context rows only; nothing shows all.
    pub fn set_window(&mut self, window: Option<usize>) {
        self.window = window;
    }

    /// Number of context rows held: the position of the next anchor.
    pub fn position(&self) -> usize {
        self.caches.first().map_or(0, KvCache::len)
    }

    /// Forgets the request; images stay.
    pub fn reset(&mut self) {
        self.caches.iter_mut().for_each(|cache| cache.truncate(0));
    }

    /// Costs of the last pass.
    pub fn counters(&self) -> &Counters {
        &self.counted
    }

    /// Every product of the draft and the design that runs it.
    pub fn designs(&self) -> Vec<(Key, Design)> {
        self.launcher.designs().map(|(key, _, design)| (key, design)).collect()
    }

    /// The weights that the device multiplies with to get `site`, decoded from its image.
    pub fn device_weights(&mut self, site: Site) -> Result<Option<Matrix>, DeviceError> {
        let found = self.launcher.image_of(site, None)?;
        self.launcher.leave();
        Ok(found.map(|p| npu::decoded(site, p)))
    }

    /// Takes new context rows in and proposes `proposals` tokens behind `anchor`, which stands at the position
    /// behind the last context row.
    ///
    /// `taps` is `[rows, taps, hidden]`, as the target's [`layer_taps`](crate::Npu::layer_taps) has it; it
    /// may be empty.
    ///
    /// # Errors
    /// Rows of another width, ids outside the table, weights or activations that are not finite. The context
    /// is as before then.
    pub fn pass(
        &mut self,
        taps: &[f32],
        anchor: u32,
        proposals: usize,
        sink: Option<&mut dyn TapSink>,
    ) -> Result<Block, DeviceError> {
        let (width, vocab) = (self.c.target_layer_ids.len() * self.c.hidden_size, self.table().out());
        if !taps.len().is_multiple_of(width) {
            return Err(DeviceError::Length { what: "a tapped row", expected: width, found: taps.len() });
        }
        if proposals == 0 {
            return Err(DeviceError::Empty);
        }
        if anchor as usize >= vocab {
            return Err(DeviceError::Token { token: anchor, row: 0, vocab });
        }
        let held = self.position();
        let block = self.run(taps, anchor, proposals, Taps::new(sink));
        let kept = if block.is_ok() { held + taps.len() / width } else { held };
        self.caches.iter_mut().for_each(|cache| cache.truncate(kept));
        self.launcher.leave();
        let layers = self.w.layers.len();
        self.counted = std::mem::replace(&mut self.launcher.counters, Counters::new(layers));
        self.counted.rows = (taps.len() / width + proposals + 1) as u64;
        block
    }

    fn table(&self) -> &Matrix {
        self.w.embed_tokens.as_ref().unwrap_or(&self.lent.table)
    }

    /// Embedded block rows `[proposals + 1, hidden]`.
    fn embed(&self, anchor: u32, proposals: usize) -> Result<Vec<f32>, DeviceError> {
        let hidden = self.c.hidden_size;
        let mut x = vec![0.0; (proposals + 1) * hidden];
        for (row, into) in x.chunks_exact_mut(hidden).enumerate() {
            let id = if row == 0 { anchor } else { self.c.mask_token_id };
            self.table().decode(id as usize, into)?;
            into.iter_mut().for_each(|v| *v *= self.lent.scale);
        }
        Ok(x)
    }

    fn run(&mut self, rows: &[f32], anchor: u32, proposals: usize, taps: Taps) -> Result<Block, DeviceError> {
        let (c, w) = (&self.c, &self.w);
        let (hidden, eps, block) = (c.hidden_size, c.rms_norm_eps, proposals + 1);
        let width = c.target_layer_ids.len() * hidden;
        let (first, context) = (self.position(), rows.len() / width);
        let mut x = self.embed(anchor, proposals)?;
        let outside = &mut self.launcher.counters.outside;
        outside.row_bytes += (x.len() * 4) as u64;
        let (began, before) = (Instant::now(), *outside);

        let launcher = &mut self.launcher;
        let mut pass = Pass { launcher, taps, start: first, total: context, chunk: 0..context, layer: None };
        pass.launcher.load(Stage::Begin)?;
        let mut ctx = Vec::new();
        if context > 0 {
            let mut joined = rows.to_vec();
            pass.value("ctx_in", &[width], &mut joined);
            let [fused] = pass.parts(Role::Fuse, &joined)?;
            ctx = rms_norm(&fused, &w.hidden_norm, eps);
            pass.value("ctx", &[hidden], &mut ctx);
        }
        pass.chunk = 0..block;
        pass.value("noise", &[hidden], &mut x);
        pass.taps.flush();
        pass.launcher.leave();
        pass.launcher.counters.outside.close(before, began.elapsed());

        let anchored = first + context;
        let seen = anchored - anchored.min(self.window.unwrap_or(anchored));
        for i in 0..w.layers.len() {
            let began = Instant::now();
            pass.enter(Some(i));
            pass.launcher.load(Stage::Layer(i))?;
            let keys = |r: usize| keys(c.layers[i], seen, anchored, block, r);
            layer(c, w, i, &mut x, &ctx, &mut self.caches[i], &mut self.rope, &keys, &mut pass)?;
            // The block's own rows leave: what is committed comes back as context.
            self.caches[i].truncate(anchored);
            blocks::cache_taps(&self.caches[i], &mut pass);
            pass.taps.flush();
            pass.launcher.leave();
            pass.launcher.counters.layers[i].close(Default::default(), began.elapsed());
        }

        let (began, before) = (Instant::now(), pass.launcher.counters.outside);
        pass.enter(None);
        pass.launcher.load(Stage::End)?;
        let mut y = rms_norm(&x, &w.norm, eps);
        pass.value("final_norm", &[hidden], &mut y);
        pass.chunk = 1..block;
        let mut tail = y[hidden..].to_vec();
        pass.value("proposal_rows", &[hidden], &mut tail);
        let block = propose(c, w, y, &tail, anchor, &mut pass)?;
        pass.taps.flush();
        pass.launcher.counters.outside.close(before, began.elapsed());
        Ok(block)
    }
}

/// The keys that block row `r` sees, of a block of `block` rows behind `anchored` context rows of which the
/// first `unseen` are hidden.
fn keys(reach: DraftReach, unseen: usize, anchored: usize, block: usize, r: usize) -> Range<usize> {
    let (own, end) = (anchored + r, anchored + block);
    let from = |width: usize| (own + 1).saturating_sub(width).max(unseen);
    match reach {
        DraftReach::All => unseen..end,
        DraftReach::Causal => unseen..own + 1,
        DraftReach::Window(width) => from(width)..own + 1,
        DraftReach::TwoSided(width) => from(width)..end.min(own + width),
    }
}

/// Every image of a draft.
fn sources(c: &DraftConfig, w: &DraftWeights, lent: &Lent) -> Vec<(Key, Source)> {
    let outside = |role, name, linear: &Linear| {
        (Key::outside(role), Source::new(Group::Outside, vec![Part::new(Site::model(name), linear)]))
    };
    let changed = c.output_multiplier != 1.0 || c.final_logit_softcapping.is_some();
    let own = w.lm_head.as_ref().map(|head| Linear { weight: head.clone(), bias: None });
    let head = own.as_ref().unwrap_or(&lent.head);
    let mut all = vec![
        outside(Role::Fuse, "ctx_fc", &w.fc),
        outside(Role::Head, if changed { "lm_head" } else { "logits" }, head),
    ];
    all.extend(w.selector.as_ref().map(|s| outside(Role::Selector, "selector_hidden", &s.hidden_projection)));
    for (i, l) in w.layers.iter().enumerate() {
        let qkv = [("q_proj", &l.q_proj), ("k_proj", &l.k_proj), ("v_proj", &l.v_proj)];
        all.push(image(i, Role::Qkv, Group::Attention, &qkv));
        all.push(image(i, Role::AttentionOut, Group::Attention, &[("attn_out", &l.o_proj)]));
        all.extend(blocks::feed_forward_images(i, &l.gate_proj, &l.up_proj, &l.down_proj));
        if let Some(conv) = &l.attention_conv {
            let part = [("attn_conv_kernel", &conv.kernel_projection)];
            all.push(image(i, Role::AttentionConv, Group::Attention, &part));
        }
        if let Some(conv) = &l.mlp_conv {
            let part = [("mlp_conv_kernel", &conv.kernel_projection)];
            all.push(image(i, Role::FeedForwardConv, Group::FeedForward, &part));
        }
    }
    all
}

/// Layer `i` on the block rows `x`; `ctx` are the new context rows before them.
#[allow(clippy::too_many_arguments)]
fn layer(
    c: &DraftConfig,
    w: &DraftWeights,
    i: usize,
    x: &mut [f32],
    ctx: &[f32],
    cache: &mut KvCache,
    rope: &mut RopeTable,
    keys: &dyn Fn(usize) -> Range<usize>,
    pass: &mut Pass,
) -> Result<(), DeviceError> {
    let (l, hidden, eps, dim) = (&w.layers[i], c.hidden_size, c.rms_norm_eps, c.head_dim);
    let (heads, kv_heads) = (c.num_attention_heads, c.num_key_value_heads);
    let (first, context, block) = (cache.len(), ctx.len() / hidden, x.len() / hidden);

    let mut h = rms_norm(x, &l.input_layernorm, eps);
    pass.value("attn_norm", &[hidden], &mut h);
    let around = Around::new(l.attention_conv.as_ref(), Role::AttentionConv, &h, pass)?;
    let h = around.apply(h, 0, "attn_conv_in", hidden, pass);
    let both = [ctx, &h].concat();
    pass.chunk = 0..context + block;
    let fused = pass.product(Role::Qkv, &both)?;
    let (wide, narrow) = (c.q_width(), c.kv_width());
    let columns = |from: usize, width: usize, skip: usize| -> Vec<f32> {
        let rows = fused.chunks_exact(wide + 2 * narrow).skip(skip);
        rows.flat_map(|row| &row[from..from + width]).copied().collect()
    };
    let (mut k, mut v) = (columns(wide, narrow, 0), columns(wide + narrow, narrow, 0));
    pass.value("k_proj", &[narrow], &mut k);
    pass.value("v_proj", &[narrow], &mut v);
    let mut k = rms_norm(&k, &l.k_norm, eps);
    pass.value("k_norm", &[kv_heads, dim], &mut k);
    rope.turn(&mut k, kv_heads, first);
    pass.value("k_rope", &[kv_heads, dim], &mut k);
    pass.chunk = 0..block;
    let mut q = columns(0, wide, context);
    pass.value("q_proj", &[wide], &mut q);
    let mut q = rms_norm(&q, &l.q_norm, eps);
    pass.value("q_norm", &[heads, dim], &mut q);
    rope.turn(&mut q, heads, first + context);
    pass.value("q_rope", &[heads, dim], &mut q);
    cache.append(&k, &v);
    let scale = c.attention_scale() as f32;
    let attention = Attention { heads, scale, window: None, softcap: None, sinks: None };
    let mut seen = attention.run_over(&q, cache, keys);
    pass.value("attn_ctx", &[wide], &mut seen);
    let [branch] = pass.parts(Role::AttentionOut, &seen)?;
    let branch = around.apply(branch, 1, "attn_conv_out", hidden, pass);
    add(x, &branch);
    pass.value("resid_mid", &[hidden], x);

    let mut h = rms_norm(x, &l.post_attention_layernorm, eps);
    pass.value("mlp_norm", &[hidden], &mut h);
    let around = Around::new(l.mlp_conv.as_ref(), Role::FeedForwardConv, &h, pass)?;
    let h = around.apply(h, 0, "mlp_conv_in", hidden, pass);
    let branch = blocks::feed_forward(&h, c.intermediate_size, Activation::Silu, pass)?;
    let branch = around.apply(branch, 1, "mlp_conv_out", hidden, pass);
    add(x, &branch);
    pass.value("out", &[hidden], x);
    Ok(())
}

/// The convolutions around a sublayer with their dynamic kernels, computed once for both sides.
struct Around<'w>(Option<(&'w DraftConv, Vec<f32>)>);

impl<'w> Around<'w> {
    /// Kernels from `h`, the norm's output, where the layer has convolutions.
    fn new(
        conv: Option<&'w DraftConv>,
        role: Role,
        h: &[f32],
        pass: &mut Pass,
    ) -> Result<Around<'w>, DeviceError> {
        let Some(conv) = conv else { return Ok(Around(None)) };
        let [kernels] = pass.parts(role, h)?;
        Ok(Around(Some((conv, kernels))))
    }

    /// `x` through the convolution of `side` (0 before the sublayer, 1 behind it), or `x` itself.
    fn apply(
        &self,
        x: Vec<f32>,
        side: usize,
        name: &'static str,
        hidden: usize,
        pass: &mut Pass,
    ) -> Vec<f32> {
        let Some((conv, kernels)) = &self.0 else { return x };
        let mut y = select::block_conv(&x, kernels, conv, side, hidden);
        pass.value(name, &[hidden], &mut y);
        y
    }
}

/// Logits and tokens of the rows behind the anchor's.
fn propose(
    c: &DraftConfig,
    w: &DraftWeights,
    hidden: Vec<f32>,
    rows: &[f32],
    anchor: u32,
    pass: &mut Pass,
) -> Result<Block, DeviceError> {
    let [mut logits] = pass.parts(Role::Head, rows)?;
    let vocab = logits.len() / pass.rows();
    if c.output_multiplier != 1.0 {
        logits.iter_mut().for_each(|z| *z *= c.output_multiplier as f32);
        let name = if c.final_logit_softcapping.is_some() { "logits_scaled" } else { "logits" };
        pass.value(name, &[vocab], &mut logits);
    }
    if c.final_logit_softcapping.is_some() {
        blocks::cap_logits(&mut logits, c.final_logit_softcapping);
        pass.value("logits", &[vocab], &mut logits);
    }
    let as_values = |ids: &[u32]| ids.iter().map(|id| *id as f32).collect::<Vec<f32>>();
    let (candidates, proposals) = match (&w.selector, c.version2) {
        (Some(selector), Some(v2)) => {
            let k = v2.selector_top_k;
            let ids = select::candidates(&logits, vocab, k);
            pass.value("candidates", &[k], &mut as_values(&ids));
            let [weights] = pass.parts(Role::Selector, rows)?;
            let (mut scores, picked) = select::walk(&logits, vocab, &ids, k, &weights, selector, anchor)?;
            let cost = &mut pass.launcher.counters.outside;
            cost.row_bytes += (picked.len() * (k + 1) * v2.selector_rank * 4) as u64;
            pass.value("path_scores", &[k], &mut scores);
            (Some((ids, weights)), picked)
        }
        _ => (None, logits.chunks_exact(vocab).map(select::largest).collect()),
    };
    pass.value("proposals", &[], &mut as_values(&proposals));
    Ok(Block { hidden, logits, candidates, proposals })
}

#[cfg(test)]
mod tests {
    use super::*;

    // Eight context rows, a block of four at positions 8 to 11; row 1 stands at 9. A window of 3 counts the
    // row itself: 7, 8, 9; on both sides: 7 to 11. A context cut to its last two rows starts at 6.
    #[test]
    fn who_sees_whom() {
        let row = |reach, unseen| keys(reach, unseen, 8, 4, 1);
        assert_eq!(row(DraftReach::All, 0), 0..12);
        assert_eq!(row(DraftReach::All, 6), 6..12);
        assert_eq!(row(DraftReach::Causal, 0), 0..10);
        assert_eq!(row(DraftReach::Window(3), 0), 7..10);
        assert_eq!(row(DraftReach::Window(5), 6), 6..10);
        assert_eq!(row(DraftReach::TwoSided(3), 0), 7..12);
        assert_eq!(row(DraftReach::TwoSided(2), 0), 8..11);
    }
}
