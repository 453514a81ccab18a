//! Model programs: the host side of a pass, one file a program.

mod attention;
mod blocks;
mod decoder;
mod deepseek;
mod feed_forward;
mod gemma;
mod gemma3n;
mod gemma4;
mod hybrid;
mod lfm2;
mod moe;
mod ple;

use crate::DeviceError;
use crate::launcher::Source;
use crate::pass::Pass;
use crate::resident::Key;
use spec::{Config, Matrix, Weights};
use std::any::Any;

/// A model as the device runs it: a row of the residual stream goes in, a row for the head comes out.
///
/// A program holds the model's norms and tables and the state of the request; matrix products are
/// asked of the pass.
pub(crate) trait Program: Send {
    /// Sizes.
    fn shape(&self) -> Shape;

    /// Every image that the model needs, and the weights that make it.
    fn sources(&self) -> Vec<(Key, Source)>;

    /// The embedding table `[vocab, hidden]`.
    fn table(&self) -> &Matrix;

    /// What the embedding module multiplies rows of the table by.
    fn embed_scale(&self) -> f32 {
        1.0
    }

    /// What [`Program::begin`] multiplies rows by beside that, before layer 0.
    fn feed_scale(&self) -> f32 {
        1.0
    }

    /// The rows that the first layer receives, from embedded rows `[rows, hidden]`.
    ///
    /// A program with inputs beside the residual stream computes them here, once a pass.
    fn begin(&mut self, tokens: &[u32], rows: Vec<f32>, pass: &mut Pass) -> Result<Vec<f32>, DeviceError> {
        let _ = (tokens, pass);
        Ok(rows)
    }

    /// Layer `i` on the chunk in hand: `x` is `[rows, width]`, changed in place.
    fn layer(&mut self, i: usize, x: &mut [f32], pass: &mut Pass) -> Result<(), DeviceError>;

    /// Hands out the state of layer `i` after its last chunk.
    fn state_taps(&self, i: usize, pass: &mut Pass);

    /// The row after the last layer that the final norm takes, from what the layer hands on.
    fn gather(&mut self, x: Vec<f32>, pass: &mut Pass) -> Result<Vec<f32>, DeviceError> {
        let _ = pass;
        Ok(x)
    }

    /// Final norm: `[rows, hidden]`.
    fn final_norm(&self, x: &[f32]) -> Vec<f32>;

    /// Changes rows between final norm and head; whether it does, so that they are a site of their own.
    fn head_in(&self, h: &mut [f32]) -> bool {
        let _ = h;
        false
    }

    /// Turns head products into logits.
    fn finish_logits(&self, logits: &mut [f32]) {
        let _ = logits;
    }

    /// Whether something follows the head product, so that it is a site of its own.
    fn changes_logits(&self) -> bool {
        false
    }

    /// The oldest position that [`Program::truncate`] can go back to, `held` being the present one.
    fn oldest(&self, held: usize) -> usize {
        let _ = held;
        0
    }

    /// Takes the state back to `positions`.
    fn truncate(&mut self, positions: usize);

    /// Reserves memory for `positions`.
    fn reserve(&mut self, positions: usize);

    /// A copy of the state of the request.
    fn save(&self) -> State;

    /// Puts back what [`Program::save`] of a program of this kind gave.
    fn restore(&mut self, state: &State);
}

/// The state of a request, of a kind that only its program knows.
pub(crate) type State = Box<dyn Any + Send + Sync>;

/// What a program saved, as itself.
pub(crate) fn saved<T: Any + Clone>(state: &State) -> T {
    state.downcast_ref::<T>().expect("a state goes back to the program that it is from").clone()
}

/// Sizes of a model.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shape {
    pub layers: usize,
    pub hidden: usize,
    /// Width of what layers hand on: `hidden`, or that of all parallel streams.
    pub width: usize,
    pub vocab: usize,
    pub max_positions: usize,
}

/// The program of a model.
pub(crate) fn program(config: &Config, weights: &Weights) -> Result<Box<dyn Program>, DeviceError> {
    match (config, weights) {
        (Config::Decoder(c), Weights::Decoder(w)) => Ok(Box::new(decoder::Decoder::new(c, w)?)),
        (Config::Phi3(c), Weights::Phi3(w)) => Ok(Box::new(decoder::Decoder::phi3(c, w)?)),
        (Config::Olmo2(c), Weights::Olmo2(w)) => Ok(Box::new(decoder::Decoder::olmo2(c, w)?)),
        (Config::MoeDecoder(c), Weights::MoeDecoder(w)) => Ok(Box::new(decoder::Decoder::moe(c, w)?)),
        (Config::GptOss(c), Weights::GptOss(w)) => Ok(Box::new(decoder::Decoder::gpt_oss(c, w)?)),
        (Config::Deepseek(c), Weights::Deepseek(w)) => Ok(Box::new(deepseek::Deepseek::new(c, w)?)),
        (Config::Hybrid(c), Weights::Hybrid(w)) => Ok(Box::new(hybrid::Hybrid::new(c, w)?)),
        (Config::Lfm2(c), Weights::Lfm2(w)) => Ok(Box::new(lfm2::Lfm2::new(c, w)?)),
        (Config::Gemma(c), Weights::Gemma(w)) => Ok(Box::new(gemma::Gemma::new(c, w)?)),
        (Config::Gemma3n(c), Weights::Gemma3n(w)) => Ok(Box::new(gemma3n::Gemma3n::new(c, w)?)),
        (Config::Gemma4(c), Weights::Gemma4(w)) => Ok(Box::new(gemma4::Gemma4::new(c, w)?)),
        _ => Err(DeviceError::Model { reason: format!("model_type {}", config.family()) }),
    }
}
