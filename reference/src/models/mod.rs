//! Model programs: each is written once, over [`Ops`], and reads top to bottom.

mod decoder;

pub use decoder::{Decoder, DecoderState};

use crate::ops::Ops;
use spec::{Config, Weights};

/// A model of any family.
#[derive(Clone, Debug)]
pub enum Model {
    /// llama, mistral, qwen2, qwen3.
    Decoder(Decoder),
}

/// The state that a model carries from pass to pass.
#[derive(Clone, Debug)]
pub enum ModelState<T> {
    /// See [`Model::Decoder`].
    Decoder(DecoderState<T>),
}

impl Model {
    /// A model of a config and its weights.
    ///
    /// # Panics
    ///
    /// Where they are of different families: `Weights::load` with the same config makes that
    /// impossible.
    pub fn new(config: Config, weights: Weights) -> Model {
        match (config, weights) {
            (Config::Decoder(config), Weights::Decoder(weights)) => {
                Model::Decoder(Decoder { config, weights })
            }
        }
    }

    /// State before the first token.
    pub fn fresh<T>(&self) -> ModelState<T> {
        match self {
            Model::Decoder(model) => ModelState::Decoder(model.fresh()),
        }
    }

    /// Feeds `ids` behind what `state` holds; the logits of every fed token, `[tokens, vocab]`.
    ///
    /// Feeding a prompt at once, token by token or in any chunks gives the same values.
    pub fn pass<O: Ops>(&self, ops: &mut O, state: &mut ModelState<O::Tensor>, ids: &[u32]) -> O::Tensor {
        match (self, state) {
            (Model::Decoder(model), ModelState::Decoder(state)) => model.pass(ops, state, ids),
        }
    }
}

impl<T> ModelState<T> {
    /// How many tokens have been fed.
    pub fn position(&self) -> usize {
        match self {
            ModelState::Decoder(state) => state.position,
        }
    }
}
