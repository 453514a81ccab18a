//! A draft's tensors: all of them, with their shapes, and none besides.

use super::{Architecture, DraftConfig};
use crate::families::Linear;
use crate::matrix::{Matrix, Vector};
use crate::tensors::{LoadError, Loader, Tensors};

/// Weights of a draft.
#[derive(Clone, Debug)]
pub struct DraftWeights {
    /// `[hidden, taps · hidden]`: fuses the tapped layer outputs of a position.
    pub fc: Linear,
    /// `[hidden]`: norm of the fused row.
    pub hidden_norm: Vector,
    /// The layers.
    pub layers: Vec<DraftLayer>,
    /// `[hidden]`: norm before the head.
    pub norm: Vector,
    /// `[vocab, hidden]`, where the draft has a table of its own; else the target's.
    pub embed_tokens: Option<Matrix>,
    /// `[vocab, hidden]`, where the draft has a head of its own; else the target's.
    pub lm_head: Option<Matrix>,
    /// The path selector of DFlash 2.
    pub selector: Option<Selector>,
}

/// Weights of one layer.
#[derive(Clone, Debug)]
pub struct DraftLayer {
    /// `[hidden]`
    pub input_layernorm: Vector,
    /// `[heads · head_dim, hidden]`
    pub q_proj: Linear,
    /// `[kv_heads · head_dim, hidden]`; reads context rows and block rows.
    pub k_proj: Linear,
    /// `[kv_heads · head_dim, hidden]`; reads context rows and block rows.
    pub v_proj: Linear,
    /// `[head_dim]`
    pub q_norm: Vector,
    /// `[head_dim]`
    pub k_norm: Vector,
    /// `[hidden, heads · head_dim]`
    pub o_proj: Linear,
    /// `[hidden]`: the norm before the feed-forward.
    pub post_attention_layernorm: Vector,
    /// `[intermediate, hidden]`
    pub gate_proj: Linear,
    /// `[intermediate, hidden]`
    pub up_proj: Linear,
    /// `[hidden, intermediate]`
    pub down_proj: Linear,
    /// The convolutions around attention, in DFlash 2.
    pub attention_conv: Option<DraftConv>,
    /// The convolutions around the feed-forward, in DFlash 2.
    pub mlp_conv: Option<DraftConv>,
}

/// Kernels of the two convolutions around a sublayer: side 0 before it, side 1 behind it.
#[derive(Clone, Debug)]
pub struct DraftConv {
    /// `[2, kernel, hidden]`: the part that is the same for every row.
    pub base_kernel: Vector,
    /// `[2 · kernel · groups, hidden]`: gives the part that depends on the row.
    pub kernel_projection: Linear,
    /// Taps in the block direction.
    pub kernel: usize,
    /// Channels that share a dynamic kernel.
    pub group: usize,
}

/// Weights of the path selector.
#[derive(Clone, Debug)]
pub struct Selector {
    /// `[vocab, rank]`: one row for the token before.
    pub predecessor: Matrix,
    /// `[vocab, rank]`: one row for the candidate.
    pub successor: Matrix,
    /// `[rank, hidden]`
    pub hidden_projection: Linear,
}

impl DraftWeights {
    /// Takes every tensor that `config` asks for and refuses any that is left over.
    ///
    /// Names stand as they are or below `model.`.
    pub fn load(config: &DraftConfig, tensors: &dyn Tensors) -> Result<DraftWeights, LoadError> {
        let mut loader = Loader::new(tensors);
        let (fc, hidden_norm) = match config.architecture {
            Architecture::Muse => ("encoder.fc", "encoder.output_norm_enc.weight"),
            _ => ("fc", "hidden_norm.weight"),
        };
        let prefix = if loader.has(&format!("model.{fc}.weight")) { "model." } else { "" };
        let name = |leaf: &str| format!("{prefix}{leaf}");
        let (hidden, taps) = (config.hidden_size, config.target_layer_ids.len());
        let fc = Linear::load(&mut loader, &name(fc), hidden, taps * hidden, false)?;
        let hidden_norm = loader.vector(&name(hidden_norm), hidden)?;
        let layers = (0..config.layers.len())
            .map(|i| DraftLayer::load(config, &name(&format!("layers.{i}.")), &mut loader))
            .collect::<Result<_, _>>()?;
        let norm = loader.vector(&name("norm.weight"), hidden)?;
        let embed_tokens = own(&mut loader, &name("embed_tokens.weight"), config)?;
        let lm_head = own(&mut loader, &name("lm_head.weight"), config)?;
        let selector = match (config.version2, config.vocab_size) {
            (Some(v2), Some(vocab)) => {
                let rank = v2.selector_rank;
                let (predecessor, successor) =
                    ("candidate_selector.predecessor_codebook", "candidate_selector.successor_codebook");
                let projection = name("candidate_selector.hidden_projection");
                Some(Selector {
                    predecessor: loader.matrix(&name(predecessor), vocab, rank)?,
                    successor: loader.matrix(&name(successor), vocab, rank)?,
                    hidden_projection: Linear::load(&mut loader, &projection, rank, hidden, false)?,
                })
            }
            _ => None,
        };
        loader.finish(|_| false)?;
        Ok(DraftWeights { fc, hidden_norm, layers, norm, embed_tokens, lm_head, selector })
    }

    /// Every matrix with the role it has, for edits and inventories: `fc`, `q_proj`, …
    pub fn matrices(&mut self) -> Vec<(&'static str, &mut Matrix)> {
        let mut all = vec![("fc", &mut self.fc.weight)];
        for layer in &mut self.layers {
            all.extend([
                ("q_proj", &mut layer.q_proj.weight),
                ("k_proj", &mut layer.k_proj.weight),
                ("v_proj", &mut layer.v_proj.weight),
                ("o_proj", &mut layer.o_proj.weight),
                ("gate_proj", &mut layer.gate_proj.weight),
                ("up_proj", &mut layer.up_proj.weight),
                ("down_proj", &mut layer.down_proj.weight),
            ]);
            let convs = [("attention_conv", &mut layer.attention_conv), ("mlp_conv", &mut layer.mlp_conv)];
            all.extend(convs.into_iter().filter_map(|(role, conv)| {
                conv.as_mut().map(|conv| (role, &mut conv.kernel_projection.weight))
            }));
        }
        if let Some(selector) = &mut self.selector {
            all.extend([
                ("predecessor", &mut selector.predecessor),
                ("successor", &mut selector.successor),
                ("selector_projection", &mut selector.hidden_projection.weight),
            ]);
        }
        all
    }
}

/// A table or a head of the draft's own, where the file has one.
fn own(loader: &mut Loader, name: &str, config: &DraftConfig) -> Result<Option<Matrix>, LoadError> {
    match config.vocab_size {
        Some(vocab) if loader.has(name) => loader.matrix(name, vocab, config.hidden_size).map(Some),
        _ => Ok(None),
    }
}

impl DraftLayer {
    fn load(c: &DraftConfig, prefix: &str, loader: &mut Loader) -> Result<Self, LoadError> {
        let name = |leaf: &str| format!("{prefix}{leaf}");
        let (q, kv, hidden, inner) = (c.q_width(), c.kv_width(), c.hidden_size, c.intermediate_size);
        let mut linear = |leaf: &str, out, inner, bias| Linear::load(loader, &name(leaf), out, inner, bias);
        let bias = c.attention_bias;
        let q_proj = linear("self_attn.q_proj", q, hidden, bias)?;
        let k_proj = linear("self_attn.k_proj", kv, hidden, bias)?;
        let v_proj = linear("self_attn.v_proj", kv, hidden, bias)?;
        let o_proj = linear("self_attn.o_proj", hidden, q, bias)?;
        let gate_proj = linear("mlp.gate_proj", inner, hidden, false)?;
        let up_proj = linear("mlp.up_proj", inner, hidden, false)?;
        let down_proj = linear("mlp.down_proj", hidden, inner, false)?;
        Ok(Self {
            input_layernorm: loader.vector(&name("input_layernorm.weight"), hidden)?,
            q_proj,
            k_proj,
            v_proj,
            q_norm: loader.vector(&name("self_attn.q_norm.weight"), c.head_dim)?,
            k_norm: loader.vector(&name("self_attn.k_norm.weight"), c.head_dim)?,
            o_proj,
            post_attention_layernorm: loader.vector(&name("post_attention_layernorm.weight"), hidden)?,
            gate_proj,
            up_proj,
            down_proj,
            attention_conv: DraftConv::load(c, &name("attention_conv"), loader)?,
            mlp_conv: DraftConv::load(c, &name("mlp_conv"), loader)?,
        })
    }
}

impl DraftConv {
    fn load(c: &DraftConfig, name: &str, loader: &mut Loader) -> Result<Option<Self>, LoadError> {
        let Some(v2) = c.version2 else { return Ok(None) };
        let (kernel, group, hidden) = (v2.conv_kernel_size, v2.conv_group_size, c.hidden_size);
        let base_kernel = loader.values(&format!("{name}.base_kernel"), &[2, kernel, hidden])?;
        let rows = 2 * kernel * (hidden / group);
        let projection = format!("{name}.kernel_projection");
        let kernel_projection = Linear::load(loader, &projection, rows, hidden, false)?;
        Ok(Some(Self { base_kernel, kernel_projection, kernel, group }))
    }
}
