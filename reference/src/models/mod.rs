//! Model programs: each is written once, over [`Ops`], and reads top to bottom.

mod decoder;
pub mod parts;
mod phi3;

pub use decoder::Decoder;
pub use parts::DecoderState;
pub use phi3::Phi3;

use crate::ops::Ops;
use spec::{Config, Weights};

/// A model of any family.
#[derive(Clone, Debug)]
pub enum Model {
    /// llama, mistral, qwen2, qwen3, smollm3, granite, minicpm.
    Decoder(Decoder),
    /// phi3.
    Phi3(Phi3),
}

/// The state that a model carries from pass to pass.
#[derive(Clone, Debug)]
pub enum ModelState<T> {
    /// Keys and values, and nothing else.
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
            (Config::Phi3(config), Weights::Phi3(weights)) => Model::Phi3(Phi3 { config, weights }),
            (config, _) => panic!("model: weights of another family than the {} config", config.family()),
        }
    }

    /// State before the first token.
    pub fn fresh<T>(&self) -> ModelState<T> {
        match self {
            Model::Decoder(model) => ModelState::Decoder(DecoderState::fresh(model.config.layers.len())),
            Model::Phi3(model) => ModelState::Decoder(DecoderState::fresh(model.config.layers.len())),
        }
    }

    /// Feeds `ids` behind what `state` holds; the logits of every fed token, `[tokens, vocab]`.
    ///
    /// Feeding a prompt at once, token by token or in any chunks gives the same values (but for LongRoPE
    /// beyond the original context, whose frequencies depend on the length reached).
    pub fn pass<O: Ops>(&self, ops: &mut O, state: &mut ModelState<O::Tensor>, ids: &[u32]) -> O::Tensor {
        match self {
            Model::Decoder(model) => model.pass(ops, state.decoder(), ids),
            Model::Phi3(model) => model.pass(ops, state.decoder(), ids),
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

    fn decoder(&mut self) -> &mut DecoderState<T> {
        match self {
            ModelState::Decoder(state) => state,
        }
    }
}
