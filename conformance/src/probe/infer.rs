//! `probe --infer-contract`: the number formats of a product, read back from its results.
//!
//! Every question is a product whose exact result says nothing and whose rounding says all:
//!
//! ```text
//! operands     0.7 beside 127, which meets a zero: comes back as 0.7 where values are rounded one by one, as 1
//!              or 0 where they share a scale with the 127; who shares it is asked by moving the 127
//! order        M + 1 + 1 + ... - M with M = 2^40 at i and -M at j: the ones that are left were added where M was
//!              not, so the numbers for all i and j tell the tree of sums (arXiv 2411.00442 asks the same way)
//! width        1 + 2^-p - 1, and 1 + 2^-p, for p = 1, 2, ...: how far the running sum and the result reach
//! rounding     1 + ¾ ulp, 1 + ½ ulp, -1 - ¼ ulp
//! ```
//!
//! What a contract declares is what its honest subject answers to the same questions.

use super::order::{MASS, ORDERS, Order};
use crate::check::{Given, OpSubject};
use crate::contract::Contract;
use crate::emulate::Emulate;
use ndarray::IxDyn;
use reference::{Call, Tensor};
use serde::Serialize;
use spec::families::Linear;
use spec::{Matrix, Site};

/// Inputs of the questions about operands: two groups of 32.
const INNER: usize = 64;

/// Elements, or blocks, whose order is asked for.
const TERMS: usize = 64;

/// The number formats that a subject shows.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Inferred {
    /// How activations are held.
    pub input: String,
    /// How weights are held.
    pub weight: String,
    /// How the running sum is held.
    pub accumulator: String,
    /// In which order terms are added.
    pub order: String,
    /// How the result is held.
    pub output: String,
    /// Which neighbour the result goes to.
    pub rounding: String,
}

/// A fact of which declaration and subject say different things.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Contradiction {
    /// `input`, `accumulator`, ...
    pub fact: &'static str,
    /// What the contract's honest subject shows.
    pub declared: String,
    /// What the subject shows.
    pub found: String,
}

impl Inferred {
    /// The facts by name.
    pub fn facts(&self) -> [(&'static str, &str); 6] {
        [
            ("input", &self.input),
            ("weight", &self.weight),
            ("accumulator", &self.accumulator),
            ("order", &self.order),
            ("output", &self.output),
            ("rounding", &self.rounding),
        ]
    }

    /// Where it is not what was declared.
    pub fn against(&self, declared: &Inferred) -> Vec<Contradiction> {
        let pairs = self.facts().into_iter().zip(declared.facts());
        pairs
            .filter(|(found, declared)| found.1 != declared.1)
            .map(|(found, declared)| Contradiction {
                fact: found.0,
                declared: declared.1.to_string(),
                found: found.1.to_string(),
            })
            .collect()
    }
}

/// What an honest subject of a contract shows.
pub fn declared(contract: &Contract) -> Result<Inferred, Given> {
    infer(&mut OpSubject::Emulated(Emulate::new(contract)))
}

/// Reads the formats of a subject's product.
pub fn infer(subject: &mut OpSubject) -> Result<Inferred, Given> {
    let mut asked = Asked { subject };
    let input = asked.operand(Side::Input)?;
    let weight = asked.operand(Side::Weight)?;
    let (accumulator, order, output, rounding) = match Place::of(&input, &weight) {
        Some(place) => {
            let order = asked.order(place)?;
            let (accumulator, output, bits) = asked.width(place)?;
            (accumulator, order, output, asked.rounding(place, bits)?)
        }
        None => {
            let exact = asked.integer_sum()?;
            let order = if exact { "any: no sum is rounded" } else { "not asked: operands share one scale" };
            (integer(exact), order.into(), "not asked".into(), "not asked".into())
        }
    };
    Ok(Inferred {
        input: input.to_string(),
        weight: weight.to_string(),
        accumulator,
        order,
        output,
        rounding,
    })
}

fn integer(exact: bool) -> String {
    if exact { "exact beyond 24 bits" } else { "24 bits or fewer" }.to_string()
}

#[derive(Clone, Copy, PartialEq)]
enum Side {
    Input,
    Weight,
}

/// How a side of a product is held.
#[derive(Clone, Copy, PartialEq)]
enum Operand {
    /// Value by value, with this many bits of mantissa.
    Float { bits: u32 },
    /// This many levels from 0 to the largest of a group.
    Scaled { levels: usize, share: Share },
    /// Nothing of the kind.
    Other,
}

#[derive(Clone, Copy, PartialEq)]
enum Share {
    Eight,
    ThirtyTwo,
    Row,
}

impl std::fmt::Display for Operand {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Operand::Float { bits: 24 } => f.write_str("f32"),
            Operand::Float { bits: 8 } => f.write_str("bf16"),
            Operand::Float { bits: 11 } => f.write_str("f16"),
            Operand::Float { bits } => write!(f, "floating point of {bits} bits"),
            Operand::Scaled { levels, share } => {
                let group = match share {
                    Share::Eight => "8 values",
                    Share::ThirtyTwo => "32 values",
                    Share::Row => "a row",
                };
                write!(f, "{levels} levels from 0 to the largest of {group}")
            }
            Operand::Other => f.write_str("no format that is known here"),
        }
    }
}

/// On which side terms of very different sizes can stand, and in what blocks.
#[derive(Clone, Copy)]
struct Place {
    side: Side,
    block: usize,
}

impl Place {
    /// The side with the smaller blocks; nothing where both sides have one scale a row.
    fn of(input: &Operand, weight: &Operand) -> Option<Place> {
        let block = |operand: &Operand| match operand {
            Operand::Float { .. } => Some(1),
            Operand::Scaled { share: Share::Eight, .. } => Some(8),
            Operand::Scaled { share: Share::ThirtyTwo, .. } => Some(32),
            Operand::Scaled { share: Share::Row, .. } | Operand::Other => None,
        };
        match (block(input), block(weight)) {
            (Some(a), Some(b)) if b < a => Some(Place { side: Side::Weight, block: b }),
            (Some(a), _) => Some(Place { side: Side::Input, block: a }),
            (None, Some(b)) => Some(Place { side: Side::Weight, block: b }),
            (None, None) => None,
        }
    }
}

struct Asked<'s, 'a> {
    subject: &'s mut OpSubject<'a>,
}

impl Asked<'_, '_> {
    /// `y[r, o]` of rows and outputs, flat.
    fn product(&mut self, x: &[Vec<f32>], w: &[Vec<f32>]) -> Result<Vec<f64>, Given> {
        let (rows, inner, out) = (x.len(), x[0].len(), w.len());
        let tensor = Tensor::from_shape_vec(IxDyn(&[rows, inner]), x.concat()).expect("rows of one length");
        let weight = Matrix::from_values("probe", out, inner, w.concat());
        let w = Linear { weight, bias: None };
        match self.subject.run(Site::layer(0, "mlp_out"), &Call::Linear { x: &tensor, w: &w }) {
            Given::Values(y) if y.len() == rows * out => Ok(y.iter().map(|y| f64::from(*y)).collect()),
            Given::Values(y) => {
                Err(Given::Stopped(format!("gave {:?}, expected [{rows}, {out}]", y.shape())))
            }
            other => Err(other),
        }
    }

    /// The results of vectors on one side against one vector on the other.
    fn many(&mut self, side: Side, vectors: &[Vec<f32>], against: &[f32]) -> Result<Vec<f64>, Given> {
        match side {
            Side::Input => self.product(vectors, &[against.to_vec()]),
            Side::Weight => self.product(&[against.to_vec()], vectors),
        }
    }

    /// How a side is held.
    fn operand(&mut self, side: Side) -> Result<Operand, Given> {
        let one_hot: Vec<f32> = (0..INNER).map(|i| f32::from(i == 0)).collect();
        let beside = |v: f32, j: usize| {
            let mut x = vec![0f32; INNER];
            (x[0], x[j]) = (v, 127.0);
            x
        };
        let near = self.many(side, &[beside(0.7, 1), beside(0.7, 8), beside(0.7, 32)], &one_hot)?;
        let kept: Vec<bool> = near.iter().map(|y| (y - 0.7).abs() < 0.007).collect();
        let share = match kept[..] {
            [true, true, true] => None,
            [false, true, true] => Some(Share::Eight),
            [false, false, true] => Some(Share::ThirtyTwo),
            [false, false, false] => Some(Share::Row),
            _ => return Ok(Operand::Other),
        };
        let Some(share) = share else {
            // Against 1 itself: the other side may hold its 1 a little off.
            let step = |p: i32| {
                let mut x = vec![0f32; INNER];
                x[0] = if p == 0 { 1.0 } else { 1.0 + libm::exp2f(-p as f32) };
                x
            };
            let seen = self.many(side, &(0..24).map(step).collect::<Vec<_>>(), &one_hot)?;
            // 1 + 2^-p is told from 1 by a mantissa of p + 1 bits.
            let told = |(p, y): (usize, &f64)| p > 0 && y / seen[0] - 1.0 > 0.5 * libm::exp2(-(p as f64));
            let bits = seen.iter().enumerate().rposition(told);
            return Ok(bits.map_or(Operand::Other, |p| Operand::Float { bits: p as u32 + 1 }));
        };
        let values: Vec<Vec<f32>> = (0..=127).map(|v| beside(v as f32, 1)).collect();
        let mut levels = self.many(side, &values, &one_hot)?;
        levels.sort_by(f64::total_cmp);
        levels.dedup_by(|a, b| (*a - *b).abs() < 0.25);
        Ok(Operand::Scaled { levels: levels.len(), share })
    }

    /// A vector of blocks, `first` of each block and `rest` for its other places.
    fn blocks(place: Place, blocks: &[(f64, f64)]) -> Vec<f32> {
        let one = |(first, rest): &(f64, f64)| {
            (0..place.block).map(|n| if n == 0 { *first as f32 } else { *rest as f32 }).collect::<Vec<f32>>()
        };
        blocks.iter().flat_map(one).collect()
    }

    /// The order of sums: of those that are known, the one that gives every result.
    fn order(&mut self, place: Place) -> Result<String, Given> {
        let ones = vec![1f32; TERMS * place.block];
        let (mut vectors, mut terms) = (Vec::new(), Vec::new());
        for i in 0..TERMS {
            for j in i + 1..TERMS {
                let block = |n: usize| match n {
                    n if n == i => (MASS, 0.0),
                    n if n == j => (-MASS, 0.0),
                    _ => (1.0, 1.0),
                };
                let blocks: Vec<(f64, f64)> = (0..TERMS).map(block).collect();
                vectors.push(Self::blocks(place, &blocks));
                let sum = |(first, rest): &(f64, f64)| first + rest * (place.block as f64 - 1.0);
                terms.push(blocks.iter().map(sum).collect::<Vec<f64>>());
            }
        }
        let found = self.many(place.side, &vectors, &ones)?;
        let fits =
            |order: &&Order| terms.iter().zip(&found).all(|(terms, y)| (order.sum(terms) - y).abs() < 0.5);
        Ok(match ORDERS.iter().find(fits) {
            Some(order) => order.words(place.block),
            None => {
                // M in the first term and -M in the last: what is left was added apart from both.
                let (left, all) = (found[TERMS - 2], (TERMS - 2) * place.block);
                format!(
                    "none that is known here; {left} of {all} ones are left between the first and the last"
                )
            }
        })
    }

    /// The bits of the running sum and of the result, in words, and those of the result.
    fn width(&mut self, place: Place) -> Result<(String, String, u32), Given> {
        let ones = vec![1f32; TERMS * place.block];
        let small = |p: usize| libm::exp2(-(p as f64));
        let terms = |p: usize, last: f64| {
            let mut blocks = vec![(0.0, 0.0); TERMS];
            (blocks[0].0, blocks[TERMS / 4].0, blocks[TERMS - 1].0) = (1.0, small(p), last);
            Self::blocks(place, &blocks)
        };
        let through: Vec<Vec<f32>> = (1..60).map(|p| terms(p, -1.0)).collect();
        let through = self.many(place.side, &through, &ones)?;
        let kept = through.iter().enumerate().rposition(|(n, y)| *y > 0.5 * small(n + 1));
        let result: Vec<Vec<f32>> = (1..24).map(|p| terms(p, 0.0)).collect();
        let result = self.many(place.side, &result, &ones)?;
        let shown = result.iter().enumerate().rposition(|(n, y)| y - 1.0 > 0.5 * small(n + 1));
        let bits = |n: Option<usize>| n.map_or(1, |n| n as u32 + 2);
        let words = |bits: u32| match bits {
            8 => "bf16".to_string(),
            11 => "f16".to_string(),
            24 => "f32".to_string(),
            53.. => "f64 or exact".to_string(),
            bits => format!("{bits} bits"),
        };
        Ok((words(bits(kept)), words(bits(shown)), bits(shown)))
    }

    /// Which neighbour a result of `bits` bits goes to.
    fn rounding(&mut self, place: Place, bits: u32) -> Result<String, Given> {
        let ones = vec![1f32; TERMS * place.block];
        let ulp = libm::exp2(1.0 - f64::from(bits));
        let pair = |a: f64, b: f64| {
            let mut blocks = vec![(0.0, 0.0); TERMS];
            (blocks[0].0, blocks[TERMS - 1].0) = (a, b);
            Self::blocks(place, &blocks)
        };
        let asked = [pair(1.0, 0.75 * ulp), pair(1.0, 0.5 * ulp), pair(-1.0, -0.25 * ulp)];
        let y = self.many(place.side, &asked, &ones)?;
        let up = |y: f64| ((y.abs() - 1.0) / ulp).round() as i64;
        Ok(match [up(y[0]), up(y[1]), up(y[2])] {
            [1, 0, 0] => "nearest, ties to even",
            [1, 1, 0] => "nearest, ties away from zero",
            [0, 0, 1] => "towards minus infinity",
            [0, 0, 0] => "towards zero",
            [1, 1, 1] => "away from zero",
            _ => "none that is known here",
        }
        .to_string())
    }

    /// Whether a sum of whole products keeps a 1 beside more than 24 bits.
    ///
    /// `1100 · 127² + 1 - 1100 · 127²`: in the middle 17741901 is odd and above 2^24. The first part alone must
    /// come out as 17741900: it is even, and f32 has it.
    fn integer_sum(&mut self) -> Result<bool, Given> {
        const HALF: usize = 1100;
        let x = |n: usize| match n {
            n if n < HALF => 127.0,
            HALF => 1.0,
            n if n <= 2 * HALF => -127.0,
            _ => 0.0,
        };
        let w = |n: usize| if n == HALF { 1.0 } else { 127.0 };
        let inner = (2 * HALF + 1).next_multiple_of(32);
        let row = |value: &dyn Fn(usize) -> f32| (0..inner).map(value).collect::<Vec<f32>>();
        let first = |n: usize| if n < HALF { 127.0 } else { 0.0 };
        let y = self.product(&[row(&x), row(&first)], &[row(&w)])?;
        let whole = HALF as f64 * 127.0 * 127.0;
        Ok((y[0] - 1.0).abs() < 1e-3 && (y[1] - whole).abs() < 1e-6 * whole)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mutants::{MutantOps, Selection};

    fn of(contract: &str) -> Inferred {
        declared(&Contract::named(contract).unwrap()).unwrap_or_else(|_| panic!("{contract} has products"))
    }

    // What the built-in contracts say in words: see the table of `contract/file.rs`.
    #[test]
    fn built_in_contracts_are_read_back() {
        let facts = |contract| {
            let found = of(contract);
            [found.input, found.weight, found.accumulator, found.order]
        };
        let blocks = |n: usize| format!("blocks of {n}, exact inside; left to right");
        assert_eq!(facts("f32"), ["f32", "f32", "f32", "left to right"]);
        let row = "128 levels from 0 to the largest of a row";
        assert_eq!(facts("int8"), [row, row, "exact beyond 24 bits", "any: no sum is rounded"]);
        let [group, nibbles] =
            ["128", "16"].map(|n| format!("{n} levels from 0 to the largest of 32 values"));
        assert_eq!(facts("w4a8"), [&*group, &*nibbles, "f32", &*blocks(32)]);
        let nested = "left to right in tiles of 32, then over tiles";
        assert_eq!(facts("w4a16"), ["bf16", &*nibbles, "f32", nested]);
        let eight = "128 levels from 0 to the largest of 8 values";
        assert_eq!(facts("bfp16"), [eight, eight, "f32", &*blocks(8)]);
    }

    #[test]
    fn a_declared_tile_width_and_rounding_are_read_back() {
        let text = r#"{"name": "mine", "linear": {"input": "bf16", "weight": "bf16", "accumulator": "bf16",
                       "tile": 16, "rounding": "floor", "output": "bf16"}}"#;
        let found = declared(&Contract::parse(text, "mine").unwrap()).ok().unwrap();
        assert_eq!(
            found.facts().map(|(_, fact)| fact),
            [
                "bf16",
                "bf16",
                "bf16",
                "left to right over tiles of 16, exact inside",
                "bf16",
                "towards minus infinity",
            ]
        );
    }

    #[test]
    fn what_is_not_as_declared_is_named() {
        for (mutant, contract, fact) in [
            ("num-rounding-mode:bf16-floor", "f32", "output"),
            ("num-low-accumulate:bf16", "f32", "accumulator"),
            ("q-act-clip", "int8", "input"),
            ("q-acc-width", "int8", "accumulator"),
        ] {
            let (contract, selection) =
                (Contract::named(contract).unwrap(), Selection::parse(mutant).unwrap());
            let mut wrong = OpSubject::Mutant(MutantOps::new(&contract, &selection));
            let found = infer(&mut wrong).ok().unwrap();
            let against = found.against(&declared(&contract).ok().unwrap());
            assert!(against.iter().any(|c| c.fact == fact), "{mutant}: {against:?}");
        }
    }
}
