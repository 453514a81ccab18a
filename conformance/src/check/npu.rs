//! The NPU path, op by op: products on images, and what the host side offers by itself.

use super::Given;
use super::host::HostOps;
use device::engine::{Engine, Scratch};
use device::host::act;
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
    host: HostOps,
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
        Scratch::new(Kernel::best()).ok().map(|scratch| NpuOps { engine, scratch, host: HostOps::default() })
    }

    /// Before a case.
    pub fn begin(&mut self) {
        self.host = HostOps::default();
    }

    /// Its result of a call.
    pub fn run(&mut self, call: &Call<Tensor>) -> Given {
        match *call {
            Call::Linear { x, w } => match self.product(x, w) {
                Ok(value) => value.map_or_else(Given::Stopped, Given::Values),
                Err(Refused::Pack(error)) => Given::Stopped(error.to_string()),
                Err(Refused::Weight(error)) => Given::Stopped(error.to_string()),
            },
            _ => self.host.run(call),
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
