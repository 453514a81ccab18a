//! Model programs: each is written once, over [`Ops`], and reads top to bottom.

mod attention;
mod decoder;
mod deepseek;
mod draft;
mod gemma;
mod gemma3n;
mod gemma4;
mod gpt_oss;
mod hybrid;
mod lfm2;
mod moe;
mod moe_decoder;
mod mtp;
mod olmo2;
mod phi3;
mod ple;
mod tapped;

pub use attention::{KvCache, Tables};
pub use decoder::{Decoder, DecoderState};
pub use deepseek::{Deepseek, DeepseekState, LatentCache};
pub use draft::{Borrowed, Context, Draft, DraftOutput, DraftState, DraftTables};
pub use gemma::{Gemma, GemmaState, GemmaTables};
pub use gemma3n::{Gemma3n, Gemma3nInputs, Gemma3nState};
pub use gemma4::{Gemma4, Gemma4Inputs, Gemma4State};
pub use gpt_oss::GptOss;
pub use hybrid::{DeltaState, Hybrid, HybridState, MixerState};
pub use lfm2::{Lfm2, Lfm2LayerState, Lfm2State};
pub use moe_decoder::MoeDecoder;
pub use mtp::{Mtp, MtpState, Predicted};
pub use olmo2::Olmo2;
pub use phi3::Phi3;
pub use ple::PleInputs;
pub use tapped::{LastTap, Tapped};

use crate::ops::Ops;
use spec::{Config, Weights};

/// A model of any family.
#[derive(Clone, Debug)]
// There is one of them in a run, so the room that the largest family takes costs nothing.
#[allow(clippy::large_enum_variant)]
pub enum Model {
    /// llama, mistral, qwen2, qwen3, smollm3, granite, minicpm.
    Decoder(Decoder),
    /// phi3.
    Phi3(Phi3),
    /// olmo2.
    Olmo2(Olmo2),
    /// qwen3_moe, glm4_moe.
    MoeDecoder(MoeDecoder),
    /// deepseek_v3.
    Deepseek(Deepseek),
    /// gpt_oss.
    GptOss(GptOss),
    /// gemma2, gemma3.
    Gemma(Gemma),
    /// qwen3_next, qwen3_5, qwen3_5_moe.
    Hybrid(Hybrid),
    /// lfm2.
    Lfm2(Lfm2),
    /// gemma4.
    Gemma4(Gemma4),
    /// gemma3n.
    Gemma3n(Gemma3n),
}

/// The state that a model carries from pass to pass.
#[derive(Clone, Debug)]
pub enum ModelState<T> {
    /// Keys and values, and nothing else: decoders of every kind.
    Decoder(DecoderState<T>),
    /// See [`Model::Deepseek`].
    Deepseek(DeepseekState<T>),
    /// See [`Model::Gemma`].
    Gemma(GemmaState<T>),
    /// See [`Model::Hybrid`].
    Hybrid(HybridState<T>),
    /// See [`Model::Lfm2`].
    Lfm2(Lfm2State<T>),
    /// See [`Model::Gemma4`].
    Gemma4(Gemma4State<T>),
    /// See [`Model::Gemma3n`].
    Gemma3n(Gemma3nState<T>),
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
            (Config::Olmo2(config), Weights::Olmo2(weights)) => Model::Olmo2(Olmo2 { config, weights }),
            (Config::Deepseek(config), Weights::Deepseek(weights)) => {
                Model::Deepseek(Deepseek { config, weights })
            }
            (Config::GptOss(config), Weights::GptOss(weights)) => Model::GptOss(GptOss { config, weights }),
            (Config::MoeDecoder(config), Weights::MoeDecoder(weights)) => {
                Model::MoeDecoder(MoeDecoder { config, weights })
            }
            (Config::Gemma(config), Weights::Gemma(weights)) => Model::Gemma(Gemma { config, weights }),
            (Config::Hybrid(config), Weights::Hybrid(weights)) => Model::Hybrid(Hybrid { config, weights }),
            (Config::Lfm2(config), Weights::Lfm2(weights)) => Model::Lfm2(Lfm2 { config, weights }),
            (Config::Gemma4(config), Weights::Gemma4(weights)) => Model::Gemma4(Gemma4 { config, weights }),
            (Config::Gemma3n(config), Weights::Gemma3n(weights)) => {
                Model::Gemma3n(Gemma3n { config, weights })
            }
            (config, _) => panic!("weights of another family than {}", config.family()),
        }
    }

    /// State before the first token.
    pub fn fresh<T>(&self) -> ModelState<T> {
        match self {
            Model::Decoder(model) => ModelState::Decoder(model.fresh()),
            Model::Phi3(model) => ModelState::Decoder(model.fresh()),
            Model::Olmo2(model) => ModelState::Decoder(model.fresh()),
            Model::MoeDecoder(model) => ModelState::Decoder(model.fresh()),
            Model::Deepseek(model) => ModelState::Deepseek(model.fresh()),
            Model::GptOss(model) => ModelState::Decoder(model.fresh()),
            Model::Gemma(model) => ModelState::Gemma(model.fresh()),
            Model::Hybrid(model) => ModelState::Hybrid(model.fresh()),
            Model::Lfm2(model) => ModelState::Lfm2(model.fresh()),
            Model::Gemma4(model) => ModelState::Gemma4(model.fresh()),
            Model::Gemma3n(model) => ModelState::Gemma3n(model.fresh()),
        }
    }

    /// Feeds `ids` behind what `state` holds; the logits of every fed token, `[tokens, vocab]`.
    ///
    /// Feeding a prompt at once, token by token or in any chunks gives the same values (but for LongRoPE
    /// beyond the original context, whose frequencies depend on the length reached).
    ///
    /// # Panics
    ///
    /// Where `state` is of another family: [`Model::fresh`] of the same model makes that impossible.
    pub fn pass<O: Ops>(&self, ops: &mut O, state: &mut ModelState<O::Tensor>, ids: &[u32]) -> O::Tensor {
        // Behind a pointer the programs are compiled once for each kind of tensor, not for each
        // interpretation; the call is nothing beside the op.
        let ops: &mut dyn Ops<Tensor = O::Tensor> = ops;
        match (self, state) {
            (Model::Decoder(model), ModelState::Decoder(state)) => model.pass(ops, state, ids),
            (Model::Phi3(model), ModelState::Decoder(state)) => model.pass(ops, state, ids),
            (Model::Olmo2(model), ModelState::Decoder(state)) => model.pass(ops, state, ids),
            (Model::MoeDecoder(model), ModelState::Decoder(state)) => model.pass(ops, state, ids),
            (Model::Deepseek(model), ModelState::Deepseek(state)) => model.pass(ops, state, ids),
            (Model::GptOss(model), ModelState::Decoder(state)) => model.pass(ops, state, ids),
            (Model::Gemma(model), ModelState::Gemma(state)) => model.pass(ops, state, ids),
            (Model::Hybrid(model), ModelState::Hybrid(state)) => model.pass(ops, state, ids),
            (Model::Lfm2(model), ModelState::Lfm2(state)) => model.pass(ops, state, ids),
            (Model::Gemma4(model), ModelState::Gemma4(state)) => model.pass(ops, state, ids),
            (Model::Gemma3n(model), ModelState::Gemma3n(state)) => model.pass(ops, state, ids),
            _ => panic!("state of another family than the model's"),
        }
    }
}

impl<T> ModelState<T> {
    /// How many tokens have been fed.
    pub fn position(&self) -> usize {
        match self {
            ModelState::Decoder(state) => state.position,
            ModelState::Deepseek(state) => state.position,
            ModelState::Gemma(state) => state.position,
            ModelState::Hybrid(state) => state.position,
            ModelState::Lfm2(state) => state.position,
            ModelState::Gemma4(state) => state.position,
            ModelState::Gemma3n(state) => state.position,
        }
    }
}
