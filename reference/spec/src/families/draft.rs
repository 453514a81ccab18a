//! Block drafts: DFlash, DFlash 2 and their twin in transformers (Muse Glimmer).
//!
//! ```text
//! c_p = norm_h(fc · [h_p^(id_0) | h_p^(id_1) | …])      context, from layer outputs of the target
//! x   = E[anchor, mask, mask, …] · scale                block, from the target's own table
//! keys and values of every layer: from the context and from the block; queries from the block
//! logits = head(norm(x))                                 the target's own head
//! ```
//!
//! Sources: arXiv 2602.06036 and the authors' package 0.1.0; transformers' MuseGlimmerAssistantModel.

mod config;
mod weights;

pub use config::{Architecture, DraftConfig, DraftReach, Version2};
pub use weights::{DraftConv, DraftLayer, DraftWeights, Selector};
