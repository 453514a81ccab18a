//! What a draft takes from its target: layer outputs, the embedding table, the head.

use super::Borrowed;
use crate::ops::{Call, Ops};
use spec::families::Linear;
use spec::{Matrix, Site};

/// What stands for the output of the target's last layer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LastTap {
    /// The residual stream that leaves the layer.
    #[default]
    Raw,
    /// That stream after the model's final norm: what the last entry of the hidden states holds in
    /// transformers.
    Normed,
}

/// Runs a model's program in another interpretation and keeps what a draft needs of it.
///
/// The tap of layer `id`, counted from 0, is the site `layers.{id}.out`: everything that the layer adds is
/// in it, and nothing behind it. So any family serves as a target.
pub struct Tapped<'a, O: Ops> {
    inner: &'a mut O,
    ids: &'a [usize],
    last: Option<usize>,
    taps: Vec<Option<O::Tensor>>,
    table: Option<(Matrix, f32)>,
    head: Option<Linear>,
}

impl<'a, O: Ops> Tapped<'a, O> {
    /// Taps the layers `ids` of a model with `layers` layers, in the order of `ids`.
    pub fn new(inner: &'a mut O, ids: &'a [usize], layers: usize, last: LastTap) -> Self {
        let normed = (last == LastTap::Normed).then(|| layers.wrapping_sub(1));
        let taps = ids.iter().map(|_| None).collect();
        Self { inner, ids, last: normed, taps, table: None, head: None }
    }

    /// The tapped rows of the pass, one tensor a tap; nothing where a tapped layer did not run.
    pub fn taps(&mut self) -> Option<Vec<O::Tensor>> {
        self.taps.iter_mut().map(Option::take).collect()
    }

    /// The target's table and head, with `scale` for raw rows of the table, and the multiplier that the
    /// target itself applies to them. Nothing before the first pass.
    pub fn borrowed(&self, scale: f32) -> Option<(Borrowed, f32)> {
        let ((table, own), head) = (self.table.clone()?, self.head.clone()?);
        Some((Borrowed { table, scale, head }, own))
    }
}

impl<O: Ops> Ops for Tapped<'_, O> {
    type Tensor = O::Tensor;

    fn run(&mut self, at: Site, call: Call<'_, O::Tensor>) -> O::Tensor {
        match (&call, at.layer, at.name) {
            (Call::Embed { table, scale, .. }, None, "embed") => {
                self.table = Some(((*table).clone(), *scale))
            }
            // A multiplier that stands outside the embedding module (Granite) is part of the model's own.
            (Call::Scale { factor, .. }, None, "embed_scaled") => {
                self.table = self.table.take().map(|(table, own)| (table, own * *factor as f32));
            }
            (Call::Linear { w, .. }, None, "lm_head" | "logits") => self.head = Some((*w).clone()),
            _ => {}
        }
        let value = self.inner.run(at, call);
        let tapped = match (at.layer, at.name) {
            (Some(layer), "out") => Some(layer as usize).filter(|layer| Some(*layer) != self.last),
            (None, "final_norm") => self.last,
            _ => None,
        };
        if let Some(n) = tapped.and_then(|layer| self.ids.iter().position(|&id| id == layer)) {
            self.taps[n] = Some(value.clone());
        }
        value
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Tensor;
    use ndarray::IxDyn;

    /// Layer i adds 10^i to its one value, so that a tap spells the layers below it.
    struct Powers;

    impl Ops for Powers {
        type Tensor = Tensor;

        fn run(&mut self, at: Site, call: Call<'_, Tensor>) -> Tensor {
            let x = call.operands()[0].clone();
            match at.layer {
                Some(layer) => x.mapv(|v| v + 10f32.powi(layer as i32)).into_shared(),
                None => x.mapv(|v| -v).into_shared(),
            }
        }
    }

    fn taps(ids: &[usize], last: LastTap) -> Vec<f32> {
        let mut powers = Powers;
        let mut ops = Tapped::new(&mut powers, ids, 4, last);
        let mut x = Tensor::zeros(IxDyn(&[1, 1]));
        for layer in 0..4 {
            x = ops.run(Site::layer(layer, "out"), Call::Tail { x: &x, keep: 1 });
        }
        ops.run(Site::model("final_norm"), Call::Tail { x: &x, keep: 1 });
        ops.taps().unwrap().iter().map(|tap| tap[[0, 0]]).collect()
    }

    // Layer 2's output holds 1 + 10 + 100; the order is the config's, not that of the layers.
    #[test]
    fn a_tap_spells_its_layers() {
        assert_eq!(taps(&[2, 0], LastTap::Raw), [111.0, 1.0]);
        assert_eq!(taps(&[3, 1], LastTap::Raw), [1111.0, 11.0]);
        assert_eq!(taps(&[3, 1], LastTap::Normed), [-1111.0, 11.0]);
    }
}
