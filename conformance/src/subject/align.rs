//! Bringing an array of a dump to the shape of its site.

use golden::import::npy::Array;
use reference::{Call, Ops};
use reference::{Model, Plain, Tensor};
use spec::Site;
use std::collections::BTreeMap;

/// The sites of a model in the order of the data flow, with their shapes in a pass of one token.
#[derive(Clone, Debug)]
pub struct Shapes(BTreeMap<Site, Vec<usize>>);

/// Computes like `Plain` and keeps the shapes only.
struct ShapesOf {
    plain: Plain,
    shapes: BTreeMap<Site, Vec<usize>>,
}

impl Ops for ShapesOf {
    type Tensor = Tensor;

    fn run(&mut self, at: Site, call: Call<'_, Tensor>) -> Tensor {
        let value = self.plain.value(&call);
        self.shapes.insert(at, value.shape().to_vec());
        value
    }
}

impl Shapes {
    /// The shapes of a model, from one token.
    pub fn of(model: &Model) -> Shapes {
        let mut ops = ShapesOf { plain: Plain::default(), shapes: BTreeMap::new() };
        model.pass(&mut ops, &mut model.fresh(), &[0]);
        Shapes(ops.shapes)
    }

    /// Whether the model has the site.
    pub fn has(&self, site: &Site) -> bool {
        self.0.contains_key(site)
    }

    /// The shape of a site in a pass of `tokens` tokens behind which `keys` positions are filled.
    pub fn at(&self, site: &Site, tokens: usize, keys: usize) -> Option<Vec<usize>> {
        let mut shape = self.0.get(site)?.clone();
        for (length, axis) in shape.iter_mut().zip(site.info().axes) {
            match *axis {
                "tokens" => *length = tokens,
                "keys" => *length = keys,
                _ => {}
            }
        }
        Some(shape)
    }

    /// Whether the rows of a site are the tokens of a pass.
    pub fn by_token(site: &Site) -> bool {
        site.info().axes.first() == Some(&"tokens")
    }
}

/// How an array fits a site.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Fit {
    /// The same axes, but for axes of length 1.
    Same,
    /// The same order of values, axes split or joined.
    Reshaped,
    /// The last `rows` rows of it only.
    LastRows(usize),
    /// All passes of the run one behind another, this pass's rows among them.
    AllPasses,
    /// Probabilities on the last keys only: what a sliding window kept.
    LastKeys(usize),
    /// A rotary table that holds every frequency once.
    HalfTable,
}

/// How an array of shape `found` fits a site of shape `expected`; `all` is the number of tokens of all
/// passes together, 0 where the array belongs to one pass.
pub fn fit(site: &Site, expected: &[usize], found: &[usize], all: usize) -> Option<Fit> {
    let (e, f) = (bare(expected), bare(found));
    if e == f {
        return Some(Fit::Same);
    }
    let count = |shape: &[usize]| shape.iter().product::<usize>();
    if count(expected) == count(found) && refines(&e, &f) {
        return Some(Fit::Reshaped);
    }
    let table = site.name.ends_with(".cos") || site.name.ends_with(".sin");
    if table && expected.len() == 2 && f == bare(&[expected[0], expected[1] / 2]) {
        return Some(Fit::HalfTable);
    }
    if Shapes::by_token(site) {
        let width = count(&expected[1..]);
        let rows = count(found).checked_div(width).filter(|rows| rows * width == count(found))?;
        let rows_stand_alone = rows == 1 || refines(&[&[rows][..], &expected[1..]].concat(), &f);
        if rows_stand_alone && all > expected[0] && rows == all {
            return Some(Fit::AllPasses);
        }
        return (rows_stand_alone && rows > 0 && rows < expected[0]).then_some(Fit::LastRows(rows));
    }
    let kept = *f.last()?;
    let windowed = site.name == "attn_probs"
        && expected.len() == 3
        && kept < expected[2]
        && bare(&[expected[0], expected[1], kept]) == f;
    windowed.then_some(Fit::LastKeys(kept))
}

/// A shape without axes of length 1.
fn bare(shape: &[usize]) -> Vec<usize> {
    shape.iter().copied().filter(|&n| n != 1).collect()
}

/// Whether one shape comes from the other by joining neighbouring axes.
fn refines(a: &[usize], b: &[usize]) -> bool {
    let ends = |shape: &[usize]| {
        let mut all = 1;
        bare(shape)
            .iter()
            .map(|n| {
                all *= n;
                all
            })
            .collect::<Vec<usize>>()
    };
    let (a, b) = (ends(a), ends(b));
    let within = |few: &[usize], many: &[usize]| few.iter().all(|end| many.contains(end));
    a.last() == b.last() && (within(&a, &b) || within(&b, &a))
}

/// The shape that [`align`] gives.
pub fn shown(fit: Fit, expected: &[usize]) -> Vec<usize> {
    match fit {
        Fit::LastRows(rows) => [&[rows], &expected[1..]].concat(),
        _ => expected.to_vec(),
    }
}

/// The values of `array` in the shape of the site, or of its last rows. `first` is where the pass begins
/// among all tokens.
pub fn align(fit: Fit, expected: &[usize], array: &Array, first: usize) -> Tensor {
    let shape = |values: Vec<f32>| {
        let shape = shown(fit, expected);
        Tensor::from_shape_vec(ndarray::IxDyn(&shape), values).expect("a shape that was found to fit")
    };
    let width: usize = expected.iter().skip(1).product();
    match fit {
        Fit::Same | Fit::Reshaped | Fit::LastRows(_) => shape(array.values.clone()),
        Fit::AllPasses => shape(array.values[first * width..][..expected[0] * width].to_vec()),
        Fit::HalfTable => {
            let rows = array.values.chunks_exact((width / 2).max(1));
            shape(rows.flat_map(|row| [row, row].concat()).collect())
        }
        Fit::LastKeys(kept) => {
            let (rows, keys) = (expected[0] * expected[1], expected[2]);
            let mut values = vec![0.0; rows * keys];
            for row in 0..rows {
                values[row * keys + keys - kept..][..kept]
                    .copy_from_slice(&array.values[row * kept..][..kept]);
            }
            shape(values)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shapes_that_fit_and_shapes_that_do_not() {
        let q = Site::layer(0, "q_rope");
        let fits = |found: &[usize]| fit(&q, &[5, 4, 8], found, 0);
        assert_eq!(fits(&[1, 5, 4, 8]), Some(Fit::Same), "a batch of one");
        assert_eq!(fits(&[5, 32]), Some(Fit::Reshaped), "heads joined");
        assert_eq!(fits(&[20, 8]), Some(Fit::Reshaped), "tokens and heads joined");
        assert_eq!(fits(&[4, 5, 8]), None, "heads first");
        assert_eq!(fits(&[2, 32]), Some(Fit::LastRows(2)));
        assert_eq!(fits(&[32]), Some(Fit::LastRows(1)));
        assert_eq!(fits(&[7, 4, 8]), None, "more rows than tokens");
        assert_eq!(fit(&q, &[5, 4, 8], &[7, 4, 8], 7), Some(Fit::AllPasses));
        assert_eq!(fit(&Site::layer(0, "attn_probs"), &[2, 3, 9], &[2, 3, 4], 0), Some(Fit::LastKeys(4)));
        assert_eq!(fit(&Site::layer(0, "attn_probs"), &[2, 3, 9], &[3, 2, 4], 0), None);
    }

    // Three tokens in all, two values each; the pass of one token behind the first two sees the third.
    #[test]
    fn rows_of_one_pass_among_all() {
        let array =
            Array { shape: vec![3, 2], values: vec![0., 1., 10., 11., 20., 21.], dtype: String::new() };
        let y = align(Fit::AllPasses, &[1, 2], &array, 2);
        assert_eq!((y.shape(), y.iter().copied().collect::<Vec<_>>()), (&[1, 2][..], vec![20., 21.]));
    }

    // A window that kept two of three keys: the first had no weight.
    #[test]
    fn dropped_keys_have_no_weight() {
        let array = Array { shape: vec![1, 2, 2], values: vec![1., 2., 3., 4.], dtype: String::new() };
        let y = align(Fit::LastKeys(2), &[1, 2, 3], &array, 0);
        assert_eq!(y.iter().copied().collect::<Vec<_>>(), [0., 1., 2., 0., 3., 4.]);
    }
}
