//! Why the device refuses a model, a request or a value.

use crate::design::DesignError;
use crate::pack::PackError;
use crate::resident::Key;
use crate::simd::KernelError;
use spec::{NonFinite, Site};

/// What can go wrong; a message names the thing, what it has and what it needs.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum DeviceError {
    /// No design runs a product of this model.
    #[error("{name}: {source}")]
    Design {
        /// The tensors of the product.
        name: String,
        /// What stands against it.
        source: DesignError,
    },
    /// A model that no program of the device runs.
    #[error("the device has no program for this model: {reason}")]
    Model {
        /// What is missing.
        reason: String,
    },
    /// A weight that is NaN or infinite.
    #[error(transparent)]
    Weight(#[from] NonFinite),
    /// A weight that cannot be packed.
    #[error("image {key}: {source}")]
    Pack {
        /// The image.
        key: Key,
        /// What the engine refused.
        source: PackError,
    },
    /// A kernel that was asked for and does not run here.
    #[error(transparent)]
    Kernel(#[from] KernelError),
    /// A resident image that is not the one that the launching design streams.
    #[error("image {key} is {found}, but its design launches {expected}")]
    Image {
        /// The image.
        key: Key,
        /// What the design expects, `engine out×inner`.
        expected: String,
        /// What is resident.
        found: String,
    },
    /// An activation that is NaN or infinite where a launch reads it.
    #[error("{site} receives {value} at row {row}, column {column}; activations must be finite")]
    Activation {
        /// The product that reads it.
        site: Site,
        /// Row of the pass.
        row: usize,
        /// Column of the product's input.
        column: usize,
        /// The value.
        value: f32,
    },
    /// A token id outside the vocabulary.
    #[error("token id {token} at row {row} is outside the vocabulary of {vocab}")]
    Token {
        /// The id.
        token: u32,
        /// Row of the pass.
        row: usize,
        /// Number of ids.
        vocab: usize,
    },
    /// A pass without rows.
    #[error("a pass needs at least one token")]
    Empty,
    /// A pass at another position than the one the caches stand at.
    #[error("a pass at position {asked} was asked for, but the caches hold {held} positions")]
    Position {
        /// The start that was asked for.
        asked: usize,
        /// Positions held.
        held: usize,
    },
    /// A pass beyond the context.
    #[error("{needed} positions are needed, but the context holds {limit}; extend it or send less")]
    Context {
        /// Positions after the pass.
        needed: usize,
        /// Positions allowed.
        limit: usize,
    },
    /// A context beyond what the model was made for.
    #[error("a context of {asked} positions was asked for, but the model allows {limit}")]
    Extend {
        /// Positions asked for.
        asked: usize,
        /// `max_position_embeddings` of the model.
        limit: usize,
    },
    /// A rollback to a position that the state can no longer be taken back to.
    #[error("rollback to position {asked} is not possible: the state reaches from {oldest} to {held}")]
    Rollback {
        /// The position asked for.
        asked: usize,
        /// The oldest position that can be restored.
        oldest: usize,
        /// Positions held.
        held: usize,
    },
    /// A snapshot that is another device's.
    #[error("the snapshot was taken from another device; one restores only its own")]
    Snapshot,
    /// A row of the wrong length.
    #[error("{what} has {found} values, but the model needs {expected}")]
    Length {
        /// What was handed over.
        what: &'static str,
        /// Values needed.
        expected: usize,
        /// Values found.
        found: usize,
    },
    /// A layer that the model does not have.
    #[error("layer {layer} was asked for, but the model has {layers}")]
    Layer {
        /// The layer.
        layer: usize,
        /// Number of layers.
        layers: usize,
    },
    /// A switch that is not known.
    #[error(
        "switch {found} is not known; switches: reload=attn|ffn|ple|all, cache=off, batch=off, poison=on"
    )]
    Switch {
        /// What was given.
        found: String,
    },
}
