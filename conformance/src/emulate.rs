//! `Emulate`: an honest subject that rounds where its contract says.

use crate::contract::{Contract, Product, int8_image, int8_row};
use crate::variance::sent;
use ndarray::Array2;
use rayon::prelude::*;
use reference::{Call, Ops, Tensor};
use spec::families::Linear;
use spec::{NonFinite, Site};

/// Computes matrix products in the declared arithmetic, to the bit; everything else as the reference.
pub struct Emulate<'a> {
    contract: &'a Contract,
    error: Option<NonFinite>,
}

impl<'a> Emulate<'a> {
    /// An honest subject of this contract.
    pub fn new(contract: &'a Contract) -> Self {
        Self { contract, error: None }
    }

    /// The first weight found not to be finite.
    pub fn check(&mut self) -> Result<(), NonFinite> {
        self.error.take().map_or(Ok(()), Err)
    }

    /// The value of a call at a site in this arithmetic.
    pub fn value(&mut self, at: Site, call: &Call<Tensor>) -> Tensor {
        let formats = self.contract.product_at(at);
        let product = match call {
            Call::Linear { x, w } => Some(product(x, w, formats)),
            Call::ExpertLinear { x, index, experts } => Some(expert_products(x, index, experts, formats)),
            _ => None,
        };
        match product {
            Some(Ok(value)) => return value,
            Some(Err(error)) => {
                self.error.get_or_insert(error);
            }
            None => {}
        }
        let mut plain = reference::Plain::default();
        let value = plain.value(call);
        if let Err(error) = plain.check() {
            self.error.get_or_insert(error);
        }
        value
    }
}

impl Ops for Emulate<'_> {
    type Tensor = Tensor;

    fn run(&mut self, at: Site, call: Call<'_, Tensor>) -> Tensor {
        self.value(at, &call)
    }
}

/// A matrix product in a declared arithmetic.
///
/// - f32: `acc ← f32(acc + f32(x · w))`, left to right.
/// - int8: `(f32(Σ ca · cw) · sA) · sW`.
///
/// A bias is added last, in f32.
pub fn product(x: &Tensor, w: &Linear, product: Product) -> Result<Tensor, NonFinite> {
    let (tokens, inner, out) = (x.shape()[0], w.weight.inner(), w.weight.out());
    let flat: Vec<f32> = x.iter().copied().collect();
    let biased = |o: usize, y: f32| w.bias.as_ref().map_or(y, |b| y + b[o]);
    let columns: Vec<Vec<f32>> = match product {
        Product::F32 | Product::Host => (0..out)
            .into_par_iter()
            .map(|o| {
                let mut row = vec![0f32; inner];
                w.weight.decode(o, &mut row)?;
                let sum = |x: &[f32]| x.iter().zip(&row).fold(0f32, |sum, (x, w)| sum + x * w);
                Ok((0..tokens).map(|t| biased(o, sum(&flat[t * inner..][..inner]))).collect())
            })
            .collect::<Result<_, NonFinite>>()?,
        Product::Int8 => {
            let image = int8_image(&w.weight)?;
            let mut codes = vec![0i8; flat.len()];
            let scales: Vec<f32> = (0..tokens)
                .map(|t| int8_row(&flat[t * inner..][..inner], &mut codes[t * inner..][..inner]))
                .collect();
            let count = |t: usize, o: usize| -> i32 {
                let (a, w) = (&codes[t * inner..][..inner], &image.codes[o * inner..][..inner]);
                a.iter().zip(w).map(|(&a, &w)| i32::from(a) * i32::from(w)).sum()
            };
            let y = |t: usize, o: usize| biased(o, (count(t, o) as f32 * scales[t]) * image.scales[o]);
            (0..out).into_par_iter().map(|o| (0..tokens).map(|t| y(t, o)).collect()).collect()
        }
    };
    Ok(Array2::from_shape_fn((tokens, out), |(t, o)| columns[o][t]).into_dyn().into_shared())
}

/// The products of routed experts, each on the rows that it receives.
fn expert_products(
    x: &Tensor,
    index: &Tensor,
    experts: &[Linear],
    formats: Product,
) -> Result<Tensor, NonFinite> {
    let (inner, out) = (experts[0].weight.inner(), experts[0].weight.out());
    let values: Vec<f32> = x.iter().copied().collect();
    let mut y = vec![0f32; index.len() * out];
    for sent in sent(x, index, experts.len()) {
        let rows: Vec<f32> =
            sent.rows.iter().flat_map(|row| values[row * inner..][..inner].to_vec()).collect();
        let rows = Tensor::from_shape_vec(ndarray::IxDyn(&[sent.rows.len(), inner]), rows);
        let part = product(&rows.expect("rows of one length"), &experts[sent.expert], formats)?;
        for (place, row) in sent.places.iter().zip(part.rows()) {
            y[place * out..][..out].copy_from_slice(&row.to_vec());
        }
    }
    let shape = ndarray::IxDyn(&[index.shape()[0], index.shape()[1], out]);
    Ok(Tensor::from_shape_vec(shape, y).expect("one row a choice"))
}
