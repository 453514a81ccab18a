//! `Variance`: every value with the variance that declared number formats give it.
//!
//! ```text
//! z = (subject - R) / sqrt(V)
//! ```
//!
//! `R` is the exact result before its one rounding, `V` the variance of an honest subject around it,
//! from the formats of the contract and the data. A rounding to nearest is a uniform error of one
//! unit in the last place: `V = ulp² / 12`. Errors of inputs are carried by first derivatives.

mod block;
mod delta;
mod experts;
mod host;
mod linear;
mod quantised;

use crate::contract::{Contract, Product};
use ndarray::{ArcArray, ArrayD, IxDyn};
use reference::{Call, Ops, Tensor};
use spec::{NonFinite, Site};

/// Unit roundoff of f32: half a unit in the last place of 1.
pub const U: f64 = 5.960_464_477_539_063e-8;

/// `E[(ulp(x)² / 12) / x²] / u²` for a mantissa that is log-uniform: `4/12 · (3/8) / ln 2`.
pub const MEAN_ROUNDING: f64 = 0.180_336_880;

/// One unit in the last place of an f32 of the size of `x`.
pub fn ulp(x: f64) -> f64 {
    let x = x.abs().max(f64::from(f32::MIN_POSITIVE));
    // The exponent of x, read from its bits: exact, and the same on every platform.
    let exponent = ((x.to_bits() >> 52) & 0x7ff) as i32 - 1023;
    f64::from_bits(((exponent - 23 + 1023) as u64) << 52)
}

/// Variance of one rounding of `x` to the nearest f32.
pub fn rounding(x: f64) -> f64 {
    ulp(x).powi(2) / 12.0
}

/// A value and the variance it carries.
#[derive(Clone, Debug)]
pub struct Bounded {
    /// The value that the next op reads.
    pub value: Tensor,
    /// Its variance; nothing where it is exact.
    pub variance: Option<ArcArray<f64, IxDyn>>,
}

impl Bounded {
    /// A value without error.
    pub fn exact(value: Tensor) -> Bounded {
        Bounded { value, variance: None }
    }

    /// Variance of element `n` in storage order.
    pub fn variance_at(&self, n: usize) -> f64 {
        self.variance.as_ref().map_or(0.0, |v| v.as_slice().expect("variances are stored in order")[n])
    }
}

pub use experts::{Sent, sent};

/// What an honest subject computes at a site.
#[derive(Clone, Debug)]
pub struct Expected {
    /// The exact result.
    pub r: ArrayD<f64>,
    /// The variance of an honest subject around it.
    pub variance: ArrayD<f64>,
    /// What an honest subject's error never exceeds.
    pub bound: ArrayD<f64>,
    /// Whether the variance is a model of independent roundings, so that its square root is what the
    /// errors of many elements must show, or only a limit that they keep.
    pub calibrated: bool,
}

impl Expected {
    /// The same for rows from `first` on.
    pub fn from_row(&self, first: usize) -> Expected {
        let rows = |x: &ArrayD<f64>| x.slice_axis(ndarray::Axis(0), ndarray::Slice::from(first..)).to_owned();
        Expected {
            r: rows(&self.r),
            variance: rows(&self.variance),
            bound: rows(&self.bound),
            calibrated: self.calibrated,
        }
    }
}

/// Which truth a matrix product is judged with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Truth {
    /// The device image: the codes that the subject holds, and activation codes where the input is
    /// known exactly. For a site's own error.
    Image,
    /// The package's weights, with the rounding of weights and activations in the variance. For logits.
    Package,
}

/// The exact result of a call at a site on the values of its operands, and an honest subject's spread around it.
pub fn expect(
    at: Site,
    call: &Call<Bounded>,
    contract: &Contract,
    truth: Truth,
) -> Result<Expected, NonFinite> {
    match call {
        _ if contract.linear == Product::Exact => return exact(call),
        Call::Linear { x, w } => return linear::expect(x, w, contract.product_at(at), truth),
        Call::ExpertLinear { x, index, experts } => {
            return experts::expect(x, &index.value, experts, contract.product_at(at), truth);
        }
        _ => {}
    }
    let operands: Vec<&Bounded> = call.operands();
    let values: Vec<Tensor> = operands.iter().map(|o| o.value.clone()).collect();
    let r = reference::ops::evaluate(&call.with(&values))?;
    let own = host::own(call, &r, contract.host);
    let carried = host::carried(call, &r)?;
    let mut bound = own.bound;
    let mut variance = own.variance;
    if let Some(carried) = carried {
        // An inherited error has no hard limit; twelve of its standard deviations stand in for one.
        ndarray::Zip::from(&mut bound).and(&carried).for_each(|b, v| *b += 12.0 * v.sqrt());
        variance += &carried;
    }
    Ok(Expected { r, variance, bound, calibrated: false })
}

/// The reference's value and no spread at all.
fn exact(call: &Call<Bounded>) -> Result<Expected, NonFinite> {
    let values: Vec<Tensor> = call.operands().into_iter().map(|o| o.value.clone()).collect();
    let r = reference::ops::evaluate(&call.with(&values))?;
    let none = ArrayD::zeros(r.raw_dim());
    Ok(Expected { r, variance: none.clone(), bound: none, calibrated: false })
}

/// What is told of every site that [`Variance`] passes.
pub type AtSite<'a> = Box<dyn FnMut(Site, &Expected) + 'a>;

/// The reference under a contract, free-running: values are the reference's, variances add up.
pub struct Variance<'a> {
    contract: &'a Contract,
    truth: Truth,
    error: Option<NonFinite>,
    at_site: AtSite<'a>,
}

impl<'a> Variance<'a> {
    /// An interpretation that tells `at_site` what to expect at every site.
    pub fn new(contract: &'a Contract, truth: Truth, at_site: impl FnMut(Site, &Expected) + 'a) -> Self {
        Self { contract, truth, error: None, at_site: Box::new(at_site) }
    }

    /// The first weight found not to be finite.
    pub fn check(&mut self) -> Result<(), NonFinite> {
        self.error.take().map_or(Ok(()), Err)
    }
}

impl Ops for Variance<'_> {
    type Tensor = Bounded;

    fn run(&mut self, at: Site, call: Call<'_, Bounded>) -> Bounded {
        match expect(at, &call, self.contract, self.truth) {
            Ok(expected) => {
                (self.at_site)(at, &expected);
                let value = expected.r.mapv(|v| v as f32).into_shared();
                Bounded { value, variance: Some(expected.variance.into_shared()) }
            }
            Err(error) => {
                self.error.get_or_insert(error);
                poisoned(&call)
            }
        }
    }
}

/// What stands for the result of a call whose weights are not finite; the error is kept elsewhere.
pub(crate) fn poisoned(call: &Call<Bounded>) -> Bounded {
    let values: Vec<Tensor> = call.operands().iter().map(|o| o.value.clone()).collect();
    Bounded::exact(reference::Plain::default().value(&call.with(&values)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn units_in_the_last_place() {
        assert_eq!(ulp(1.0), 2.0 * U);
        assert_eq!(ulp(1.999), 2.0 * U);
        assert_eq!(ulp(-2.0), 4.0 * U);
        assert_eq!(ulp(0.0), 2f64.powi(-149));
    }

    // The mean over a log-uniform mantissa, summed over a fine grid of m = 2^(k/n).
    #[test]
    fn mean_rounding_is_the_mean() {
        let n = 100_000;
        let mean: f64 = (0..n)
            .map(|k| 2f64.powf((f64::from(k) + 0.5) / f64::from(n)))
            .map(|m| rounding(m) / (m * m) / (U * U))
            .sum::<f64>()
            / f64::from(n);
        assert!((mean - MEAN_ROUNDING).abs() < 1e-6, "{mean}");
    }

    // y = x / 2 quarters a variance, also one far below a unit in the last place of an f32, beside a large one.
    #[test]
    fn small_errors_are_carried() {
        let variances = [rounding(1.5), 1e-4];
        let variance = ArcArray::from_shape_fn(IxDyn(&[4, 8]), |at| variances[at[1] % 2]);
        let x = Bounded { value: Tensor::from_elem(IxDyn(&[4, 8]), 1.5), variance: Some(variance.clone()) };
        let r = ArrayD::from_elem(IxDyn(&[4, 8]), 0.75);
        let carried = host::carried(&Call::Scale { x: &x, factor: 0.5 }, &r).unwrap().unwrap();
        for (c, v) in carried.iter().zip(&variance) {
            assert!((c / (v / 4.0) - 1.0).abs() < 0.1, "{c} of {v}");
        }
    }
}
