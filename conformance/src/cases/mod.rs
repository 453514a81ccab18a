//! Op cases: one line, one mistake.
//!
//! *Structure* cases hold whole numbers on which no declared format rounds: tolerance zero. *Rounding* cases
//! hold realistic data, judged under the contract. The two never mix.

mod attention;
mod delta;
mod elementwise;
mod experts;
mod linear;
mod norm;
mod rope;

use crate::contract::Product;
use fixtures::random::SplitMix64;
use reference::{Call, Tensor};
use spec::Site;

pub use linear::of_shape as linear_of_shape;

/// Which of the two regimes a case belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Suite {
    /// Whole numbers, tolerance zero.
    Structure,
    /// Realistic data, judged by number formats.
    Rounding,
}

/// The named sizes of a case.
#[derive(Clone, Debug, PartialEq)]
pub struct Dims(pub Vec<(&'static str, usize)>);

impl Dims {
    /// The size called `name`.
    ///
    /// # Panics
    ///
    /// Where the case has no such size: a case names its own.
    pub fn get(&self, name: &str) -> usize {
        let found = self.0.iter().find(|(n, _)| *n == name);
        found.unwrap_or_else(|| panic!("case: no size is called {name}")).1
    }
}

impl std::fmt::Display for Dims {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let parts: Vec<String> = self.0.iter().map(|(name, size)| format!("{name}={size}")).collect();
        f.write_str(&parts.join(","))
    }
}

/// What a case hands to whoever runs it.
pub type With<'w> = dyn FnMut(Site, &Call<Tensor>) + 'w;

/// Builds the inputs of a case and hands the call over.
pub type Build = fn(&Dims, Setting, &mut SplitMix64, &mut With);

/// What the inputs depend on besides sizes and seed.
#[derive(Clone, Copy, Debug)]
pub struct Setting {
    /// Whole numbers or realistic data.
    pub suite: Suite,
    /// The formats of products: whole numbers must be exact in them.
    pub product: Product,
}

/// An op with inputs that show one mistake.
#[derive(Clone, Debug)]
pub struct Case {
    /// `op/what_is_special`
    pub name: &'static str,
    /// The mistake that it catches.
    pub catches: &'static str,
    /// Its regime.
    pub suite: Suite,
    /// Its sizes.
    pub dims: Dims,
    /// Its inputs.
    pub build: Build,
}

impl Case {
    /// The op.
    pub fn op(&self) -> &'static str {
        self.name.split('/').next().unwrap_or(self.name)
    }
}

const fn line(
    name: &'static str,
    catches: &'static str,
    suite: Suite,
    dims: &'static [(&'static str, usize)],
    build: Build,
) -> Line {
    Line { name, catches, suite, dims, build }
}

/// A case as the tables hold it.
struct Line {
    name: &'static str,
    catches: &'static str,
    suite: Suite,
    dims: &'static [(&'static str, usize)],
    build: Build,
}

/// Every case, op after op.
pub fn all() -> Vec<Case> {
    let tables = [
        linear::CASES,
        norm::CASES,
        rope::CASES,
        attention::CASES,
        elementwise::CASES,
        experts::CASES,
        delta::CASES,
    ];
    let lines = tables.into_iter().flatten();
    lines
        .map(|line| Case {
            name: line.name,
            catches: line.catches,
            suite: line.suite,
            dims: Dims(line.dims.to_vec()),
            build: line.build,
        })
        .collect()
}

fn tensor(shape: &[usize], value: impl FnMut(usize) -> f32) -> Tensor {
    let count = shape.iter().product();
    let values: Vec<f32> = (0..count).map(value).collect();
    Tensor::from_shape_vec(ndarray::IxDyn(shape), values).expect("one value a place")
}

/// Whole numbers from -most to most.
fn whole(shape: &[usize], most: usize, random: &mut SplitMix64) -> Tensor {
    tensor(shape, |_| random.below(2 * most + 1) as f32 - most as f32)
}

/// Normal values, one in sixteen eight times as large.
fn normal(shape: &[usize], size: f64, random: &mut SplitMix64) -> Tensor {
    tensor(shape, |_| {
        let outlier = if random.below(16) == 0 { 8.0 } else { 1.0 };
        (random.normal() * size * outlier) as f32
    })
}

/// Whole numbers in a structure case, normal values in a rounding case.
fn fill(shape: &[usize], setting: Setting, random: &mut SplitMix64) -> Tensor {
    match setting.suite {
        Suite::Structure => whole(shape, 7, random),
        Suite::Rounding => normal(shape, 1.0, random),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::contract::Contract;

    /// Whole numbers are whole: the reference's exact result of every structure case is an f32, and every
    /// honest contract gives it to the bit.
    #[test]
    fn structure_cases_round_nowhere() {
        for name in Contract::NAMES {
            let contract = Contract::named(name).unwrap();
            for case in all().into_iter().filter(|case| case.suite == Suite::Structure) {
                let setting = Setting { suite: case.suite, product: contract.linear };
                (case.build)(&case.dims, setting, &mut SplitMix64::new(3), &mut |at, call| {
                    let exact = reference::ops::evaluate(call).unwrap();
                    let honest = crate::emulate::Emulate::new(&contract).value(at, call);
                    for (n, (&r, &y)) in exact.iter().zip(&honest).enumerate() {
                        assert_eq!(f64::from(y), r, "{} under {name}, element {n}", case.name);
                    }
                });
            }
        }
    }

    #[test]
    fn names_are_unique() {
        let names: Vec<&str> = all().iter().map(|case| case.name).collect();
        for (i, name) in names.iter().enumerate() {
            assert!(!names[i + 1..].contains(name), "{name} twice");
        }
    }
}
