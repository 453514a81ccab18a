//! The reference interpretation: evaluate, round to f32 once.

use crate::ops::{Call, Ops, Tensor, evaluate};
use spec::{NonFinite, Site};

/// Evaluates every call with the free functions of [`crate::ops`] and rounds the result to f32.
///
/// A weight that is not finite stops nothing half way: the pass goes on with NaN and the error is
/// kept for whoever asked for the pass ([`Plain::check`]).
#[derive(Default)]
pub struct Plain {
    error: Option<NonFinite>,
}

impl Plain {
    /// The first weight found not to be finite, if any; forgets it.
    pub fn check(&mut self) -> Result<(), NonFinite> {
        self.error.take().map_or(Ok(()), Err)
    }

    /// The value of a call, rounded.
    pub fn value(&mut self, call: &Call<Tensor>) -> Tensor {
        match evaluate(call) {
            Ok(value) => value.mapv(|v| v as f32).into_shared(),
            Err(error) => {
                self.error.get_or_insert(error);
                // Whatever follows is not a number, and nobody sees it: `check` fails.
                Tensor::from_elem(ndarray::IxDyn(&shape(call)), f32::NAN)
            }
        }
    }
}

/// The shape of the result of the calls that read a matrix.
fn shape(call: &Call<Tensor>) -> Vec<usize> {
    match call {
        Call::Embed { ids, table, .. } => vec![ids.len(), table.inner()],
        Call::Linear { x, w } => vec![x.shape()[0], w.weight.out()],
        Call::ExpertLinear { index, experts, .. } => {
            vec![index.shape()[0], index.shape()[1], experts[0].weight.out()]
        }
        Call::PathScores { candidates, .. } => candidates.shape().to_vec(),
        other => unreachable!("{} reads no matrix", other.op()),
    }
}

impl Ops for Plain {
    type Tensor = Tensor;

    fn run(&mut self, _: Site, call: Call<'_, Tensor>) -> Tensor {
        self.value(&call)
    }
}
