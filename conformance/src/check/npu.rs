//! The NPU path, op by op: products on images, and what the host side offers by itself.

use super::Given;
use device::engine::{Engine, Scratch};
use device::host::{act, norm};
use device::pack::{Image, PackError};
use device::simd::Kernel;
use reference::{Call, Tensor};
use spec::NonFinite;

/// Rows of one launch.
const LAUNCH: usize = 128;

/// The ops of an engine.
pub struct NpuOps {
    engine: Engine,
    scratch: Scratch,
}

enum Refused {
    Pack(PackError),
    Weight(NonFinite),
}

impl From<PackError> for Refused {
    fn from(error: PackError) -> Self {
        Refused::Pack(error)
    }
}

impl NpuOps {
    /// The engine on the fastest kernel of this machine.
    pub fn new(engine: Engine) -> Option<NpuOps> {
        Scratch::new(Kernel::best()).ok().map(|scratch| NpuOps { engine, scratch })
    }

    /// Its result of a call.
    pub fn run(&mut self, call: &Call<Tensor>) -> Given {
        match *call {
            Call::Linear { x, w } => match self.product(x, w) {
                Ok(value) => value.map_or_else(Given::Stopped, Given::Values),
                Err(Refused::Pack(error)) => Given::Stopped(error.to_string()),
                Err(Refused::Weight(error)) => Given::Stopped(error.to_string()),
            },
            Call::RmsNorm { x, weight, width, eps } => {
                let values: Vec<f32> = x.iter().copied().collect();
                let y = match weight {
                    Some(weight) => norm::rms_norm(&values, weight, eps),
                    None => norm::unit_norm(&values, width, eps),
                };
                let (tokens, groups) = (x.shape()[0], x.len() / x.shape()[0].max(1) / width);
                let shape = if groups > 1 || x.ndim() == 3 {
                    vec![tokens, groups, width]
                } else {
                    vec![tokens, width]
                };
                shaped(&shape, y)
            }
            Call::GatedAct { gate, up, activation } => {
                let (mut y, by): (Vec<f32>, Vec<f32>) =
                    (gate.iter().copied().collect(), up.iter().copied().collect());
                act::gate(&mut y, &by, activation);
                shaped(gate.shape(), y)
            }
            Call::Residual { x, branch, multiplier } => {
                let mut y: Vec<f32> = x.iter().copied().collect();
                let mut branch: Vec<f32> = branch.iter().copied().collect();
                if multiplier != 1.0 {
                    act::scale(&mut branch, multiplier);
                }
                act::add(&mut y, &branch);
                shaped(x.shape(), y)
            }
            Call::Scale { x, factor } => {
                let mut y: Vec<f32> = x.iter().copied().collect();
                act::scale(&mut y, factor as f32);
                shaped(x.shape(), y)
            }
            _ => Given::NotSupported,
        }
    }

    /// The weight packed, and launched on the rows; outputs start as NaN.
    fn product(&mut self, x: &Tensor, w: &spec::families::Linear) -> Result<Result<Tensor, String>, Refused> {
        let (out, inner) = (w.weight.out(), w.weight.inner());
        let image = Image::pack(self.engine, out, inner, &mut |o, row: &mut [f32]| {
            w.weight.decode(o, row).map_err(Refused::Weight)
        })?;
        let values: Vec<f32> = x.iter().copied().collect();
        let mut y = vec![f32::NAN; x.shape()[0] * out];
        for (x, y) in values.chunks(LAUNCH * inner).zip(y.chunks_mut(LAUNCH * out)) {
            if let Err(error) = image.multiply(x, x.len() / inner, y, out, &mut self.scratch) {
                return Ok(Err(error.to_string()));
            }
        }
        if let Some(bias) = &w.bias {
            y.chunks_exact_mut(out).for_each(|row| act::add(row, bias));
        }
        let shape = ndarray::IxDyn(&[x.shape()[0], out]);
        Ok(Tensor::from_shape_vec(shape, y).map_err(|error| error.to_string()))
    }
}

fn shaped(shape: &[usize], values: Vec<f32>) -> Given {
    match Tensor::from_shape_vec(ndarray::IxDyn(shape), values) {
        Ok(value) => Given::Values(value),
        Err(error) => Given::Stopped(error.to_string()),
    }
}
