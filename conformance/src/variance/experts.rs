//! Matrix products of routed experts: the rows sent to an expert are a product like any other.

use super::{Bounded, Expected, Truth, linear};
use crate::contract::Product;
use ndarray::{ArrayD, IxDyn};
use reference::Tensor;
use spec::NonFinite;
use spec::families::Linear;

/// The rows that one expert receives.
pub struct Sent {
    /// The expert.
    pub expert: usize,
    /// Place `token · k + choice` of each row in the result.
    pub places: Vec<usize>,
    /// Place of each row in `x`, its axes but the last flattened.
    pub rows: Vec<usize>,
}

/// Who receives what: `index` is `[tokens, k]`; `x` is `[tokens, in]`, one row for all choices, or
/// `[tokens, k, in]`. Experts that nobody chose are left out; ids that name no expert are too.
pub fn sent(x: &Tensor, index: &Tensor, experts: usize) -> Vec<Sent> {
    let k = index.shape().get(1).copied().unwrap_or(1);
    let shared = x.ndim() == 2;
    (0..experts)
        .map(|expert| {
            let places: Vec<usize> =
                index.iter().enumerate().filter(|(_, id)| **id == expert as f32).map(|(n, _)| n).collect();
            let rows = places.iter().map(|n| if shared { n / k } else { *n }).collect();
            Sent { expert, places, rows }
        })
        .filter(|sent| !sent.places.is_empty())
        .collect()
}

/// Expectation at an expert's linear site, `[tokens, k, out]`.
pub fn expect(
    x: &Bounded,
    index: &Tensor,
    experts: &[Linear],
    product: Product,
    truth: Truth,
) -> Result<Expected, NonFinite> {
    let (inner, out) = (experts[0].weight.inner(), experts[0].weight.out());
    let shape = [index.shape()[0], index.shape()[1], out];
    let mut all = [(); 3].map(|()| ArrayD::<f64>::zeros(IxDyn(&shape)));
    let values: Vec<f32> = x.value.iter().copied().collect();
    for sent in sent(&x.value, index, experts.len()) {
        let gather = |source: &dyn Fn(usize) -> f64| -> Vec<f64> {
            sent.rows.iter().flat_map(|row| (0..inner).map(move |i| row * inner + i)).map(source).collect()
        };
        let rows = gather(&|n| f64::from(values[n])).into_iter().map(|v| v as f32).collect();
        let shape = IxDyn(&[sent.rows.len(), inner]);
        let value = Tensor::from_shape_vec(shape.clone(), rows).expect("rows of one length");
        let variance = x.variance.as_ref().map(|_| {
            let rows = gather(&|n| x.variance_at(n));
            ArrayD::from_shape_vec(shape, rows).expect("rows of one length").into_shared()
        });
        let part = linear::expect(&Bounded { value, variance }, &experts[sent.expert], product, truth)?;
        for (all, part) in all.iter_mut().zip([&part.r, &part.variance, &part.bound]) {
            let all = all.as_slice_mut().expect("made in order");
            for (place, row) in sent.places.iter().zip(part.rows()) {
                for (into, v) in all[place * out..][..out].iter_mut().zip(row) {
                    *into = *v;
                }
            }
        }
    }
    let [r, variance, bound] = all;
    Ok(Expected { r, variance, bound, calibrated: true })
}
