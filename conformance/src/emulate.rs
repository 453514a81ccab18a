//! `Emulate`: an honest subject that rounds where its contract says.

use crate::contract::{
    BLOCK, Contract, Declared, GROUP, Product, Q4Row, Rounding, bf16, block, int8_dot, int8_row,
    int8_weights, q4_row,
};
use crate::variance::sent;
use ndarray::Array2;
use rayon::prelude::*;
use reference::{Call, Ops, Tensor};
use spec::families::Linear;
use spec::{Matrix, NonFinite, Site};

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
            _ if formats == Product::Exact => None,
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
/// - the others: as at `WeightRow::dot`.
///
/// A bias is added last, in f32.
pub fn product(x: &Tensor, w: &Linear, product: Product) -> Result<Tensor, NonFinite> {
    let (tokens, inner, out) = (x.shape()[0], w.weight.inner(), w.weight.out());
    let flat: Vec<f32> = x.iter().copied().collect();
    let biased = |o: usize, y: f32| w.bias.as_ref().map_or(y, |b| y + b[o]);
    let columns: Vec<Vec<f32>> = match product {
        Product::F32 | Product::Host | Product::Exact => (0..out)
            .into_par_iter()
            .map(|o| {
                let mut row = vec![0f32; inner];
                w.weight.decode(o, &mut row)?;
                let sum = |x: &[f32]| x.iter().zip(&row).fold(0f32, |sum, (x, w)| sum + x * w);
                Ok((0..tokens).map(|t| biased(o, sum(&flat[t * inner..][..inner]))).collect())
            })
            .collect::<Result<_, NonFinite>>()?,
        Product::Int8 => {
            let mut codes = vec![0i8; flat.len()];
            let scales: Vec<f32> = (0..tokens)
                .map(|t| int8_row(&flat[t * inner..][..inner], &mut codes[t * inner..][..inner]))
                .collect();
            (0..out)
                .into_par_iter()
                .map_init(
                    || (vec![0f32; inner], vec![0i8; inner]),
                    |(row, image), o| {
                        w.weight.decode(o, row)?;
                        let scale = int8_weights(row, image);
                        let count = |t: usize| int8_dot(&codes[t * inner..][..inner], image) as f32;
                        Ok((0..tokens).map(|t| biased(o, (count(t) * scales[t]) * scale)).collect())
                    },
                )
                .collect::<Result<_, NonFinite>>()?
        }
        Product::W4A8 | Product::W4A16 | Product::Bfp16 | Product::Declared(_) => {
            let rows: Vec<Activation> =
                (0..tokens).map(|t| Activation::new(&flat[t * inner..][..inner], product)).collect();
            (0..out)
                .into_par_iter()
                .map(|o| {
                    let row = WeightRow::new(&w.weight, o, product)?;
                    Ok(rows.iter().map(|x| output(product, biased(o, row.dot(x)))).collect())
                })
                .collect::<Result<_, NonFinite>>()?
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

/// An activation row in the format of its product.
enum Activation {
    /// Codes and one scale a group of 32.
    Codes(Vec<i8>, Vec<f32>),
    /// Rounded values.
    Values(Vec<f32>),
    /// Mantissas and exponents of blocks of 8.
    Blocks(Vec<([i8; BLOCK], u8)>),
}

impl Activation {
    fn new(x: &[f32], product: Product) -> Activation {
        match product {
            Product::W4A8 => {
                let mut codes = vec![0i8; x.len()];
                let groups = x.chunks(GROUP).zip(codes.chunks_mut(GROUP));
                let scales = groups.map(|(x, codes)| int8_row(x, codes)).collect();
                Activation::Codes(codes, scales)
            }
            Product::W4A16 => Activation::Values(x.iter().map(|&x| bf16(x)).collect()),
            Product::Bfp16 => {
                let rounded: Vec<f32> = x.iter().map(|&x| bf16(x)).collect();
                Activation::Blocks(rounded.chunks(BLOCK).map(block).collect())
            }
            Product::Declared(d) => {
                Activation::Values(x.iter().map(|&x| d.input.round(x, Rounding::NearestEven)).collect())
            }
            Product::F32 | Product::Host | Product::Exact | Product::Int8 => Activation::Values(x.to_vec()),
        }
    }
}

/// One row of weights in the format of its product.
enum WeightRow {
    W4A8(Q4Row),
    W4A16(Vec<f32>),
    Bfp16(Vec<([i8; BLOCK], u8)>),
    Declared(Vec<f32>, Declared),
}

impl WeightRow {
    fn new(weight: &Matrix, o: usize, product: Product) -> Result<WeightRow, NonFinite> {
        let mut row = vec![0f32; weight.inner()];
        Ok(match product {
            Product::W4A8 => WeightRow::W4A8(q4_row(weight, o, false)?),
            Product::W4A16 => {
                let coded = q4_row(weight, o, true)?;
                WeightRow::W4A16((0..weight.inner()).map(|i| coded.value(i)).collect())
            }
            Product::Bfp16 => {
                weight.decode(o, &mut row)?;
                WeightRow::Bfp16(row.chunks(BLOCK).map(block).collect())
            }
            Product::Declared(d) => {
                weight.decode(o, &mut row)?;
                row.iter_mut().for_each(|w| *w = d.weight.round(*w, Rounding::NearestEven));
                WeightRow::Declared(row, d)
            }
            Product::F32 | Product::Host | Product::Exact | Product::Int8 => {
                unreachable!("products with kernels of their own")
            }
        })
    }

    /// The product with an activation row, in the declared order of sums.
    ///
    /// ```text
    /// w4a8      acc ← acc + s · (d · f32(Σ q a) + m · f32(Σ a))       blocks of 32
    /// w4a16     t ← t + a · w in tiles of 32; acc ← acc + t
    /// bfp16     acc ← acc + f32(Σ ma mw · 2^(EA+EW-266))             blocks of 8
    /// declared  acc ← round(acc + Σ_tile x · w)
    /// ```
    fn dot(&self, x: &Activation) -> f32 {
        match (self, x) {
            (WeightRow::W4A8(w), Activation::Codes(codes, scales)) => {
                let mut acc = 0f32;
                for (g, (a, q)) in codes.chunks(GROUP).zip(w.codes.chunks(GROUP)).enumerate() {
                    let (i1, i2) = block_sums(a, q, w.offset);
                    acc += scales[g] * (w.scales[g] * i1 as f32 + w.zeros[g] * i2 as f32);
                }
                acc
            }
            (WeightRow::W4A16(w), Activation::Values(x)) => x
                .chunks(GROUP)
                .zip(w.chunks(GROUP))
                .fold(0f32, |acc, (x, w)| acc + x.iter().zip(w).fold(0f32, |t, (x, w)| t + x * w)),
            (WeightRow::Bfp16(w), Activation::Blocks(x)) => {
                x.iter().zip(w).fold(0f32, |acc, ((ma, ea), (mw, ew))| {
                    let i: i32 = ma.iter().zip(mw).map(|(&a, &w)| i32::from(a) * i32::from(w)).sum();
                    let scale = libm::ldexp(1.0, i32::from(*ea) + i32::from(*ew) - 266);
                    acc + (f64::from(i) * scale) as f32
                })
            }
            (WeightRow::Declared(w, d), Activation::Values(x)) => {
                x.chunks(d.tile).zip(w.chunks(d.tile)).fold(0f32, |acc, (x, w)| {
                    let tile: f64 = x.iter().zip(w).map(|(&x, &w)| f64::from(x) * f64::from(w)).sum();
                    d.accumulator.round_exact(f64::from(acc) + tile, d.rounding)
                })
            }
            _ => unreachable!("activations and weights of one product"),
        }
    }
}

/// `(Σ (q - offset) · a, Σ a)` of a block.
pub(crate) fn block_sums(a: &[i8], q: &[u8], offset: u8) -> (i32, i32) {
    let i1 = a.iter().zip(q).map(|(&a, &q)| i32::from(a) * (i32::from(q) - i32::from(offset))).sum();
    (i1, a.iter().map(|&a| i32::from(a)).sum())
}

/// The result in the declared output format.
fn output(product: Product, y: f32) -> f32 {
    match product {
        Product::Declared(d) => d.output.round(y, d.rounding),
        _ => y,
    }
}
