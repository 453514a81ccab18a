//! What a draft's `config.json` says, in every spelling that published files use.

use crate::config::{ConfigError, ConfigReader};
use crate::rope::{Pairing, Rope};
use serde_json::{Map, Value, json};

/// The classes that are understood.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Architecture {
    /// `DFlashDraftModel`.
    DFlash,
    /// `DFlash2DraftModel`: convolutions around every sublayer, a path selector behind the head.
    DFlash2,
    /// `MuseGlimmerAssistantModel`: DFlash under other names, with a window of its own.
    Muse,
}

impl Architecture {
    /// The class name in `architectures`.
    pub fn class(self) -> &'static str {
        match self {
            Architecture::DFlash => "DFlashDraftModel",
            Architecture::DFlash2 => "DFlash2DraftModel",
            Architecture::Muse => "MuseGlimmerAssistantModel",
        }
    }
}

/// Which keys the block rows of a layer see. `q` and `k` are positions of query and key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DraftReach {
    /// All context rows and the whole block.
    All,
    /// `k <= q`: all context rows, and the block up to the row itself.
    Causal,
    /// `k <= q` and `q - k < W`.
    Window(usize),
    /// `|q - k| < W`, on context and block.
    TwoSided(usize),
}

/// What DFlash 2 adds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Version2 {
    /// Taps of the convolution in the block direction, the row itself included.
    pub conv_kernel_size: usize,
    /// Channels that share a dynamic kernel; divides the hidden size.
    pub conv_group_size: usize,
    /// Width of the selector's codebooks.
    pub selector_rank: usize,
    /// Candidates of a row.
    pub selector_top_k: usize,
}

/// Config of a draft.
#[derive(Clone, Debug, PartialEq)]
pub struct DraftConfig {
    /// Its class.
    pub architecture: Architecture,
    /// Width of the residual stream, of draft and target.
    pub hidden_size: usize,
    /// Width of the feed-forward.
    pub intermediate_size: usize,
    /// Number of query heads.
    pub num_attention_heads: usize,
    /// Number of key and value heads.
    pub num_key_value_heads: usize,
    /// Width of a head; the heads together need not be as wide as the residual stream.
    pub head_dim: usize,
    /// ε of every norm.
    pub rms_norm_eps: f32,
    /// Number of token ids of the target; transformers' class does not say it.
    pub vocab_size: Option<usize>,
    /// Longest sequence, where the file says it.
    pub max_position_embeddings: Option<usize>,
    /// Whether q, k, v and o have a bias.
    pub attention_bias: bool,
    /// Rotary embedding of every layer; it turns all of `head_dim`.
    pub rope: Rope,
    /// What the block rows of each layer see.
    pub layers: Vec<DraftReach>,
    /// The target layers whose outputs are tapped, in the order of `fc`'s columns.
    pub target_layer_ids: Vec<usize>,
    /// Layers of the target, where the file says it.
    pub num_target_layers: Option<usize>,
    /// The id that stands for an unknown token of the block.
    pub mask_token_id: u32,
    /// The anchor and the proposals of a full block together.
    pub block_size: usize,
    /// What a raw row of the target's table is multiplied by, where the file says it.
    pub input_embedding_scale: Option<f32>,
    /// What logits are multiplied by.
    pub output_multiplier: f64,
    /// Cap of the logits, after the multiplier.
    pub final_logit_softcapping: Option<f64>,
    /// The additions of DFlash 2.
    pub version2: Option<Version2>,
}

/// Class names of relatives, and how each differs.
const RELATIVES: &[(&str, &str)] = &[
    ("DFlashLagunaForCausalLM", "a Laguna draft norms every tap and gates its heads"),
    ("DominoDraftModel", "a Domino draft has a sequential logits head"),
    ("DSparkDraftModel", "a DSpark draft has a sequential logits head and samples from the anchor"),
];

/// Keys that only relatives have, whatever their class is called.
const MARKS: &[(&str, &str)] = &[
    ("gating", "a Laguna draft gates its heads"),
    ("projector_type", "a Domino or DSpark draft has a sequential logits head"),
    ("speculators_model_type", "a speculators export nests its config and counts taps from 1"),
    ("transformer_layer_config", "a speculators export nests its config and counts taps from 1"),
    ("has_embed_tokens", "a Nemotron draft has a table and attention sinks of its own"),
    ("use_swa", "a MiMo draft has attention sinks and scaled values"),
    ("attention_sink_bias", "a MiMo draft has attention sinks and scaled values"),
    ("attention_value_scale", "a MiMo draft has attention sinks and scaled values"),
    ("sample_from_anchor", "a draft that samples from the anchor predicts one position further"),
    (
        "draft_vocab_size",
        "a reduced vocabulary renumbers the logits; export the draft with all rows of the head",
    ),
    ("quantization_config", "weights are quantised; dequantise them to BF16 or F32 first"),
];

/// A key that stands in `dflash_config` in newer files, at the top in older ones.
struct Both<'r, 'a> {
    inner: &'r mut ConfigReader<'a>,
    top: &'r mut ConfigReader<'a>,
}

impl<'a> Both<'_, 'a> {
    fn usize(&mut self, key: &str) -> Result<Option<usize>, ConfigError> {
        let top = self.top.usize_opt(key)?;
        Ok(self.inner.usize_opt(key)?.or(top))
    }

    fn f64(&mut self, key: &str) -> Result<Option<f64>, ConfigError> {
        let top = self.top.f64_opt(key)?;
        Ok(self.inner.f64_opt(key)?.or(top))
    }

    fn get(&mut self, key: &str) -> Option<&'a Value> {
        let top = self.top.get(key);
        self.inner.get(key).or(top)
    }

    /// The error that `key` holds something unsupported, named where it stands.
    fn wrong(&self, key: &str, expected: &str) -> ConfigError {
        let inner = self.inner.present(key);
        if inner { self.inner.wrong(key, expected) } else { self.top.wrong(key, expected) }
    }
}

fn missing(key: &str, expected: &str) -> ConfigError {
    ConfigError::Missing { key: key.into(), expected: expected.into() }
}

impl DraftConfig {
    /// Width of all query heads together.
    pub fn q_width(&self) -> usize {
        self.num_attention_heads * self.head_dim
    }

    /// Width of all key (or value) heads together.
    pub fn kv_width(&self) -> usize {
        self.num_key_value_heads * self.head_dim
    }

    /// What scores are multiplied by: `head_dim^-½`.
    pub fn attention_scale(&self) -> f64 {
        (self.head_dim as f64).powf(-0.5)
    }

    /// Reads a draft's `config.json`. Keys in `allowed` may be unknown; keys that were passed over are
    /// returned beside the config.
    pub fn parse(
        map: &Map<String, Value>,
        allowed: &[String],
    ) -> Result<(DraftConfig, Vec<String>), ConfigError> {
        let mut top = ConfigReader::new(map, "");
        let empty = Map::new();
        let nested = top.object("dflash_config")?.unwrap_or(&empty);
        let mut inner = ConfigReader::new(nested, "dflash_config.");
        let architecture = architecture(&mut top)?;
        refuse_relatives(&mut Both { inner: &mut inner, top: &mut top })?;
        let config = Self::read(architecture, &mut inner, &mut top)?;
        top.inert(&["model_type", "tie_word_embeddings", "use_sliding_window", "max_window_layers"]);
        inner.inert(&["mask_token"]);
        let mut passed = top.finish(allowed)?;
        passed.extend(inner.finish(allowed)?);
        Ok((config, passed))
    }

    fn read<'a>(
        architecture: Architecture,
        inner: &mut ConfigReader<'a>,
        top: &mut ConfigReader<'a>,
    ) -> Result<DraftConfig, ConfigError> {
        let hidden_size = top.size("hidden_size")?;
        let num_attention_heads = top.size("num_attention_heads")?;
        let num_key_value_heads = match top.size("num_key_value_heads")? {
            n if num_attention_heads.is_multiple_of(n) => n,
            _ => {
                let expected = format!("a divisor of num_attention_heads {num_attention_heads}");
                return Err(top.wrong("num_key_value_heads", &expected));
            }
        };
        let head_dim = match top.usize_opt("head_dim")? {
            Some(n) if n > 0 => n,
            Some(_) => return Err(top.wrong("head_dim", "a positive number")),
            None if hidden_size.is_multiple_of(num_attention_heads) => hidden_size / num_attention_heads,
            None => return Err(top.wrong("head_dim", "a number, as hidden_size is no multiple of the heads")),
        };
        if top.usize_opt("target_hidden_size")?.is_some_and(|width| width != hidden_size) {
            let expected = format!("hidden_size {hidden_size}: draft and target share one width");
            return Err(top.wrong("target_hidden_size", &expected));
        }
        top.only("hidden_act", &[json!("silu")])?;
        let attention_bias = top.bool("attention_bias", false)?;
        let rope = rope(inner, top, head_dim)?;
        let layers = reaches(architecture, inner, top)?;
        let max_position_embeddings = top.usize_opt("max_position_embeddings")?;
        let vocab_size = match architecture {
            Architecture::Muse => top.usize_opt("vocab_size")?,
            _ => Some(top.size("vocab_size")?),
        };
        let mut both = Both { inner, top };
        let num_target_layers = both.usize("num_target_layers")?;
        let target_layer_ids = target_layer_ids(&mut both, num_target_layers)?;
        let mask_token_id = both.usize("mask_token_id")?.ok_or_else(|| {
            missing(
                "mask_token_id",
                "the id that stands for unknown tokens, as the draft was trained with it",
            )
        })?;
        let mask_token_id = u32::try_from(mask_token_id).map_err(|_| both.wrong("mask_token_id", "an id"))?;
        let block_size = both.usize("block_size")?.unwrap_or(16);
        if !(2..=1 << 16).contains(&block_size) {
            return Err(both.wrong("block_size", "a number from 2 (an anchor and one proposal) to 65536"));
        }
        let input_embedding_scale = both.f64("input_embedding_scale")?.map(|scale| scale as f32);
        let output_multiplier = both.inner.f64_opt("output_multiplier")?.unwrap_or(1.0);
        let final_logit_softcapping = match both.f64("final_logit_softcapping")? {
            Some(cap) if cap < 0.0 => return Err(both.wrong("final_logit_softcapping", "a positive number")),
            cap => cap.filter(|&cap| cap != 0.0),
        };
        let version2 = match architecture {
            Architecture::DFlash2 => Some(version2(&mut both, hidden_size, vocab_size)?),
            _ => None,
        };
        Ok(DraftConfig {
            architecture,
            hidden_size,
            intermediate_size: top.size("intermediate_size")?,
            num_attention_heads,
            num_key_value_heads,
            head_dim,
            rms_norm_eps: top.f64("rms_norm_eps")? as f32,
            vocab_size,
            max_position_embeddings,
            attention_bias,
            rope,
            layers,
            target_layer_ids,
            num_target_layers,
            mask_token_id,
            block_size,
            input_embedding_scale,
            output_multiplier,
            final_logit_softcapping,
            version2,
        })
    }
}

const CLASSES: [Architecture; 3] = [Architecture::DFlash, Architecture::DFlash2, Architecture::Muse];

fn architecture(top: &mut ConfigReader) -> Result<Architecture, ConfigError> {
    let names = CLASSES.map(Architecture::class).join(", ");
    let Some(classes) = top.strs("architectures")? else {
        return Err(missing("architectures", &format!("the class of the draft: {names}")));
    };
    let known = |class: &&str| CLASSES.into_iter().find(|known| known.class() == *class);
    match classes.iter().find_map(known) {
        Some(architecture) if classes.len() == 1 => Ok(architecture),
        _ => {
            let relative = RELATIVES.iter().find(|(class, _)| classes.contains(class));
            let why =
                relative.map_or(String::new(), |(_, why)| format!(" ({why}, which is not implemented)"));
            Err(top.wrong("architectures", &format!("one of {names}{why}")))
        }
    }
}

fn refuse_relatives(both: &mut Both) -> Result<(), ConfigError> {
    for (key, why) in MARKS {
        match both.get(key) {
            None | Some(Value::Bool(false)) => {}
            Some(_) => return Err(both.wrong(key, &format!("a draft without it ({why})"))),
        }
    }
    Ok(())
}

/// The rotary embedding: as any model's, but all of `head_dim` turns.
fn rope<'a>(
    inner: &mut ConfigReader<'a>,
    top: &mut ConfigReader<'a>,
    head_dim: usize,
) -> Result<Rope, ConfigError> {
    const KEY: &str = "partial_rotary_factor";
    const LEAKED: &str = "1 or nothing: a draft turns all of head_dim, and another value has leaked in from \
                          the target's config; take it out";
    let check = |reader: &mut ConfigReader<'a>| match reader.f64_opt(KEY)? {
        Some(factor) if factor != 1.0 => Err(reader.wrong(KEY, LEAKED)),
        _ => Ok(()),
    };
    check(inner)?;
    check(top)?;
    for key in ["rope_parameters", "rope_scaling"] {
        if let Some(object) = top.object(key)? {
            check(&mut ConfigReader::new(object, &format!("{key}.")))?;
        }
    }
    if !head_dim.is_multiple_of(2) {
        return Err(top.wrong("head_dim", "an even number, as all of it turns"));
    }
    let mut rope = Rope::parse(top, head_dim)?;
    let mut pairing = None;
    for (key, half_split) in
        [("is_neox_style", true), ("rope_is_neox_style", true), ("rope_interleaved", false)]
    {
        if top.get(key).is_none() {
            continue;
        }
        let said = if top.bool(key, true)? == half_split { Pairing::HalfSplit } else { Pairing::Interleaved };
        if pairing.is_some_and(|earlier| earlier != said) {
            return Err(top.wrong(key, "what the other keys of the pairing say"));
        }
        pairing = Some(said);
    }
    rope.pairing = pairing.unwrap_or(rope.pairing);
    Ok(rope)
}

/// What every layer sees.
///
/// | layer | `is_causal` absent | true | false |
/// | --- | --- | --- | --- |
/// | full | all | `k <= q` | all |
/// | sliding | `k <= q`, `q - k < W` | the same | `|q - k| < W` |
///
/// transformers' class keeps `|q - k| <= W` in sliding layers.
fn reaches<'a>(
    architecture: Architecture,
    inner: &mut ConfigReader<'a>,
    top: &mut ConfigReader<'a>,
) -> Result<Vec<DraftReach>, ConfigError> {
    let count = top.size("num_hidden_layers")?;
    if count > 1 << 16 {
        return Err(top.wrong("num_hidden_layers", "at most 65536"));
    }
    let said = |reader: &mut ConfigReader, key| match reader.get(key) {
        None => Ok(None),
        Some(_) => reader.bool(key, false).map(Some),
    };
    let nested = [said(inner, "is_causal")?, said(inner, "causal")?];
    let causal = said(top, "is_causal")?.or(nested[0]).or(nested[1]);
    if architecture == Architecture::Muse && causal == Some(true) {
        let reader = if top.present("is_causal") { top } else { inner };
        let key = if reader.present("is_causal") { "is_causal" } else { "causal" };
        return Err(reader.wrong(key, "false or nothing in this class"));
    }
    let types = top.strs("layer_types")?.unwrap_or_else(|| vec!["full_attention"; count]);
    if types.len() != count {
        return Err(top.wrong("layer_types", &format!("one entry for each of the {count} layers")));
    }
    let window = top.usize_opt("sliding_window")?;
    let one = |kind: &&str| match *kind {
        "full_attention" if causal == Some(true) => Ok(DraftReach::Causal),
        "full_attention" => Ok(DraftReach::All),
        "sliding_attention" => {
            let expected = "a positive number, as layer_types has sliding layers";
            let width = window.filter(|&w| w > 0 && w < 1 << 31);
            let width = width.ok_or_else(|| top.wrong("sliding_window", expected))?;
            Ok(match (architecture, causal) {
                (Architecture::Muse, _) => DraftReach::TwoSided(width + 1),
                (_, Some(false)) => DraftReach::TwoSided(width),
                _ => DraftReach::Window(width),
            })
        }
        _ => Err(top.wrong("layer_types", "full_attention or sliding_attention")),
    };
    types.iter().map(one).collect()
}

fn target_layer_ids(both: &mut Both, num_target_layers: Option<usize>) -> Result<Vec<usize>, ConfigError> {
    const KEY: &str = "target_layer_ids";
    const EXPECTED: &str = "the tapped layers of the target, in the order of fc's columns; no formula gives \
                            them, take the list from the training config";
    let top = both.top.usizes(KEY)?;
    let ids = both.inner.usizes(KEY)?.or(top).ok_or_else(|| missing(KEY, EXPECTED))?;
    if ids.is_empty() || ids.len() > 1 << 12 {
        return Err(both.wrong(KEY, "1 to 4096 ids"));
    }
    if ids.iter().enumerate().any(|(n, id)| ids[..n].contains(id)) {
        return Err(both.wrong(KEY, "every layer once"));
    }
    if let Some(layers) = num_target_layers.filter(|&layers| ids.iter().any(|&id| id >= layers)) {
        return Err(both.wrong(KEY, &format!("ids below num_target_layers {layers}")));
    }
    const OTHER: &str = "eagle_aux_hidden_state_layer_ids";
    let other = both.top.usizes(OTHER)?;
    if other.is_some_and(|other| other != ids.iter().map(|id| id + 1).collect::<Vec<_>>()) {
        return Err(both.top.wrong(OTHER, "target_layer_ids plus 1, one by one"));
    }
    Ok(ids)
}

fn version2(both: &mut Both, hidden: usize, vocab: Option<usize>) -> Result<Version2, ConfigError> {
    let mut size = |key: &str| match both.usize(key)? {
        None => Err(missing(key, "a positive number, as the class is DFlash2DraftModel")),
        Some(n) if (1..=1 << 24).contains(&n) => Ok(n),
        Some(_) => Err(both.wrong(key, "a positive number")),
    };
    let version2 = Version2 {
        conv_kernel_size: size("conv_kernel_size")?,
        conv_group_size: size("conv_group_size")?,
        selector_rank: size("selector_rank")?,
        selector_top_k: size("selector_top_k")?,
    };
    if !hidden.is_multiple_of(version2.conv_group_size) {
        return Err(both.wrong("conv_group_size", &format!("a divisor of hidden_size {hidden}")));
    }
    if vocab.is_some_and(|vocab| version2.selector_top_k > vocab) {
        return Err(both.wrong("selector_top_k", "at most vocab_size"));
    }
    Ok(version2)
}

#[cfg(test)]
mod tests;
