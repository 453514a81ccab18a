//! Whether a draft and a target are a pair, and what the draft's embedding is scaled by.

use reference::Model;
use reference::models::{Draft, LastTap};
use spec::Config;

/// A target and its draft.
#[derive(Clone, Debug)]
pub struct Pair {
    /// The target's config.
    pub config: Config,
    /// The target.
    pub target: Model,
    /// The draft.
    pub draft: Draft,
    /// What stands for the output of the target's last layer.
    pub last_tap: LastTap,
    /// How many context rows the draft may see; nothing means all.
    pub window: Option<usize>,
    /// A scale that overrides what config and target say.
    pub scale: Option<f32>,
}

/// Why two packages are no pair.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum PairError {
    /// Draft and target have streams of different widths.
    #[error(
        "hidden width differs: not a pair; the draft has {draft}, the target {target}; take the draft that was trained for this target"
    )]
    Width {
        /// The draft's.
        draft: usize,
        /// The target's.
        target: usize,
    },
    /// A layer is tapped that the target does not have.
    #[error(
        "tapped layer does not exist: not a pair; target_layer_ids has {id}, but the target has layers 0 to {last}"
    )]
    Layer {
        /// The id.
        id: usize,
        /// The target's last layer.
        last: usize,
    },
    /// The draft was trained for a target of another depth.
    #[error(
        "number of layers differs: not a pair; num_target_layers is {draft}, but the target has {target}"
    )]
    Depth {
        /// What the draft says.
        draft: usize,
        /// What the target has.
        target: usize,
    },
    /// The mask token has no row in the target's table.
    #[error(
        "mask_token_id {id} is outside the target's table of {vocab} rows: not a pair; a tokenizer that adds the mask token needs a table with a row for it"
    )]
    Mask {
        /// The id.
        id: u32,
        /// Rows of the table.
        vocab: usize,
    },
    /// The draft counts other token ids than the target.
    #[error(
        "vocabulary differs: not a pair; the draft has {draft} ids, the target {target}; a reduced vocabulary is not supported"
    )]
    Vocabulary {
        /// The draft's.
        draft: usize,
        /// The target's.
        target: usize,
    },
    /// The target's layers hand on several streams.
    #[error(
        "{family} hands {streams} parallel streams from layer to layer, so no row of {hidden} values leaves a layer: not a pair; no draft says which stream, or which mean of them, its fc was trained on"
    )]
    Streams {
        /// The target's family.
        family: String,
        /// How many streams.
        streams: usize,
        /// Width of each.
        hidden: usize,
    },
}

impl Pair {
    /// Joins a target and a draft, or says why they are none.
    pub fn new(config: Config, target: Model, draft: Draft) -> Result<Pair, PairError> {
        let (c, layers) = (&draft.config, config.num_hidden_layers());
        let (width, vocab) = (config.hidden_size(), config.vocab_size());
        if let Config::Gemma3n(c) = &config {
            let (family, streams) = (config.family().to_string(), c.altup_num_inputs);
            return Err(PairError::Streams { family, streams, hidden: width });
        }
        if c.hidden_size != width {
            return Err(PairError::Width { draft: c.hidden_size, target: width });
        }
        if let Some(expected) = c.num_target_layers.filter(|&expected| expected != layers) {
            return Err(PairError::Depth { draft: expected, target: layers });
        }
        if let Some(&id) = c.target_layer_ids.iter().find(|&&id| id >= layers) {
            return Err(PairError::Layer { id, last: layers - 1 });
        }
        if c.mask_token_id as usize >= vocab {
            return Err(PairError::Mask { id: c.mask_token_id, vocab });
        }
        if let Some(ids) = c.vocab_size.filter(|&ids| ids != vocab) {
            return Err(PairError::Vocabulary { draft: ids, target: vocab });
        }
        Ok(Pair { config, target, draft, last_tap: LastTap::Raw, window: None, scale: None })
    }

    /// Whether the output of the target's last layer is tapped, so that raw or normed makes a difference.
    pub fn taps_the_last_layer(&self) -> bool {
        self.draft.config.target_layer_ids.contains(&(self.config.num_hidden_layers() - 1))
    }

    /// The scale of the draft's embedding, `own` being what the target multiplies its rows by.
    pub fn embedding_scale(&self, own: f32) -> Scale {
        let config = self.draft.config.input_embedding_scale;
        let (value, origin) = match (self.scale, config) {
            (Some(scale), _) => (scale, ScaleOrigin::Option),
            (None, Some(scale)) => (scale, ScaleOrigin::Config),
            (None, None) if own != 1.0 => (own, ScaleOrigin::Target),
            (None, None) => (1.0, ScaleOrigin::One),
        };
        Scale { value, origin }
    }
}

/// What a raw row of the target's table is multiplied by, and who says so.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Scale {
    /// The factor.
    pub value: f32,
    /// Its origin.
    pub origin: ScaleOrigin,
}

/// Where the scale of a draft's embedding comes from, the first that speaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ScaleOrigin {
    /// `--embedding-scale`.
    Option,
    /// `input_embedding_scale` of the draft's config.
    Config,
    /// The target's own multiplier: a guess, as it depends on who trained the draft.
    Target,
    /// Nobody scales.
    One,
}

impl std::fmt::Display for ScaleOrigin {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            ScaleOrigin::Option => "--embedding-scale",
            ScaleOrigin::Config => "input_embedding_scale of the draft",
            ScaleOrigin::Target => "the target's own multiplier, a guess",
            ScaleOrigin::One => "neither draft nor target scales",
        })
    }
}
