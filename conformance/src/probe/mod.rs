//! `probe`: which weight element does a subject use for which output?
//!
//! Weights are ±1 by one bit of the number of their place, inputs are one-hot rows: launch b tells bit b of the
//! place that each output used. Every format holds ±1 at full scale, so the signs come back whatever is
//! permuted. One launch with all weights 1 tells how many elements an output used.

pub mod infer;
mod map;
mod order;
mod picture;
pub mod report;

pub use map::{Axis, MapName, axes, name};
pub use picture::{svg, text};

use crate::check::{Given, OpSubject};
use reference::{Call, Tensor};
use spec::families::Linear;
use spec::{Matrix, Site};

/// What an output used for an input.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Used {
    /// The element at this place of the flat `[out, in]` weight, once.
    Element(usize),
    /// Nothing.
    Dead,
    /// One element this many times.
    Repeated(usize, usize),
    /// This many elements, not all the same.
    Several(usize),
    /// A value that no whole number of elements gives.
    Unreadable,
}

/// What a subject used for every output and input.
#[derive(Clone, Debug)]
pub struct Probed {
    /// Inputs.
    pub inner: usize,
    /// Outputs.
    pub out: usize,
    /// `[out, in]`
    pub used: Vec<Used>,
}

impl Probed {
    /// What output `o` used for input `i`.
    pub fn at(&self, o: usize, i: usize) -> Used {
        self.used[o * self.inner + i]
    }

    /// How many places are as they should be.
    pub fn right(&self) -> usize {
        self.used.iter().enumerate().filter(|(n, used)| **used == Used::Element(*n)).count()
    }
}

/// Probes a subject's product of `inner` inputs and `out` outputs.
pub fn probe(subject: &mut OpSubject, inner: usize, out: usize) -> Result<Probed, Given> {
    let x = Tensor::from_shape_fn(ndarray::IxDyn(&[inner, inner]), |at| f32::from(at[0] == at[1]));
    let mut launch = |value: &dyn Fn(usize) -> f32| -> Result<Vec<f32>, Given> {
        let values = (0..out * inner).map(value).collect();
        let w = Linear { weight: Matrix::from_values("probe", out, inner, values), bias: None };
        match subject.run(Site::layer(0, "mlp_out"), &Call::Linear { x: &x, w: &w }) {
            Given::Values(y) if y.len() == out * inner => {
                // Row i of the result belongs to input i.
                let y: Vec<f32> = y.iter().copied().collect();
                Ok((0..out * inner).map(|n| y[n % inner * out + n / inner]).collect())
            }
            Given::Values(y) => {
                Err(Given::Stopped(format!("gave {:?}, expected [{inner}, {out}]", y.shape())))
            }
            other => Err(other),
        }
    };
    let whole = |y: f32| {
        let near = y.round();
        (y.is_finite() && (y - near).abs() < 0.1).then_some(near as i64)
    };
    let counts: Vec<Option<i64>> = launch(&|_| 1.0)?.into_iter().map(whole).collect();
    let bits = usize::BITS - (out * inner - 1).leading_zeros();
    let mut places = vec![0usize; out * inner];
    // Whether every bit came back with the full count: all elements that were used are one and the same.
    let mut same = vec![true; out * inner];
    for bit in 0..bits {
        let signs = launch(&|n| if n >> bit & 1 == 1 { 1.0 } else { -1.0 })?;
        for (n, y) in signs.into_iter().enumerate() {
            places[n] |= usize::from(y > 0.0) << bit;
            same[n] &= whole(y).map(i64::abs) == counts[n];
        }
    }
    let used = (0..out * inner).map(|n| match counts[n] {
        Some(0) => Used::Dead,
        Some(1) if same[n] && places[n] < out * inner => Used::Element(places[n]),
        Some(count) if count > 1 && same[n] => Used::Repeated(places[n], count as usize),
        Some(count) if count > 1 => Used::Several(count as usize),
        _ => Used::Unreadable,
    });
    Ok(Probed { inner, out, used: used.collect() })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::contract::Contract;
    use crate::emulate::Emulate;
    use crate::mutants::{MutantOps, Selection};

    #[test]
    fn every_honest_contract_uses_every_element_once() {
        for contract in Contract::NAMES {
            let contract = Contract::named(contract).unwrap();
            let probed = probe(&mut OpSubject::Emulated(Emulate::new(&contract)), 37, 21).unwrap();
            assert_eq!(probed.right(), 37 * 21, "{}", contract.name);
        }
    }

    fn wrong(mutant: &str, inner: usize, out: usize) -> Probed {
        let (contract, selection) = (Contract::named("int8").unwrap(), Selection::parse(mutant).unwrap());
        probe(&mut OpSubject::Mutant(MutantOps::new(&contract, &selection)), inner, out).unwrap()
    }

    #[test]
    fn maps_are_named() {
        let named = |mutant, inner, out| name(&wrong(mutant, inner, out)).name;
        assert_eq!(named("lin-transpose-square", 24, 24), "transposed");
        assert_eq!(named("lin-stride-reinterpret", 24, 40), "[out, in] read as [in, out]");
        assert_eq!(named("lin-row-offset", 24, 40), "row o starts at o");
        let tail = wrong("lin-k-tail:16", 40, 8);
        let named = name(&tail);
        assert_eq!(
            (&*named.name, &*named.detail),
            ("identity with dead elements", "inputs 32 to 39 are dead")
        );
        let twice = name(&wrong("lin-k-accumulate-overwrite:first-twice", 40, 8));
        assert_eq!(twice.detail, "inputs 0 to 15 count 2 times");
    }
}
