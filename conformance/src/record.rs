//! `Record`: the reference, with every site's value kept.

use reference::{Call, Ops, Plain, Tensor};
use spec::{NonFinite, Site};

/// Evaluates like [`Plain`] and keeps the value of every site of a pass, in the order of the data flow.
#[derive(Default)]
pub struct Record {
    plain: Plain,
    taps: Vec<(Site, Tensor)>,
}

impl Record {
    /// The values since the last call, or the weight that was not finite.
    pub fn take(&mut self) -> Result<Vec<(Site, Tensor)>, NonFinite> {
        let taps = std::mem::take(&mut self.taps);
        self.plain.check().map(|()| taps)
    }
}

impl Ops for Record {
    type Tensor = Tensor;

    fn run(&mut self, at: Site, call: Call<'_, Tensor>) -> Tensor {
        let value = self.plain.value(&call);
        self.taps.push((at, value.clone()));
        value
    }
}
