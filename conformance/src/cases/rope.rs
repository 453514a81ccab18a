//! Cases of rotations. In structure cases angles are quarter turns: cosine and sine are 0, 1 or -1.

use super::Suite::{Rounding, Structure};
use super::{Dims, Line, Setting, Suite, With, fill, line, tensor};
use fixtures::random::SplitMix64;
use reference::Call;
use reference::ops::Table;
use spec::{Pairing, Rope, Scaling, Site};

pub(super) const CASES: &[Line] = &[
    line(
        "rotate/half_split",
        "neighbours turned together",
        Structure,
        &[("tokens", 5), ("heads", 3), ("head_dim", 10), ("rotary", 10)],
        half_split,
    ),
    line(
        "rotate/interleaved",
        "halves turned together",
        Structure,
        &[("tokens", 5), ("heads", 3), ("head_dim", 10), ("rotary", 10)],
        interleaved,
    ),
    line(
        "rotate/partial",
        "the tail of a head turned too",
        Structure,
        &[("tokens", 5), ("heads", 3), ("head_dim", 12), ("rotary", 8)],
        half_split,
    ),
    line(
        "rotate/realistic",
        "tables or products in too few bits",
        Rounding,
        &[("tokens", 7), ("heads", 4), ("head_dim", 16), ("rotary", 16)],
        half_split,
    ),
    line(
        "rope_table/cos",
        "frequencies or positions off by one",
        Rounding,
        &[("tokens", 33), ("rotary", 16)],
        cosines,
    ),
    line(
        "rope_table/far",
        "positions in 16 bits, angles in too few",
        Rounding,
        &[("tokens", 4), ("rotary", 32)],
        far,
    ),
    line("rope_table/sin", "the sign of the angle", Rounding, &[("tokens", 33), ("rotary", 16)], sines),
];

fn half_split(dims: &Dims, setting: Setting, random: &mut SplitMix64, with: &mut With) {
    rotation(dims, setting, random, Pairing::HalfSplit, with);
}

fn interleaved(dims: &Dims, setting: Setting, random: &mut SplitMix64, with: &mut With) {
    rotation(dims, setting, random, Pairing::Interleaved, with);
}

fn rotation(dims: &Dims, setting: Setting, random: &mut SplitMix64, pairing: Pairing, with: &mut With) {
    let (tokens, heads, head_dim) =
        (dims.get("tokens"), dims.get("heads"), dims.get("head_dim").next_multiple_of(2));
    let rotary_dim = dims.get("rotary").min(head_dim).next_multiple_of(2);
    let pairs = rotary_dim / 2;
    let angle = |t: usize, i: usize| match setting.suite {
        Suite::Structure => (t + i) as f64 * std::f64::consts::FRAC_PI_2,
        Suite::Rounding => t as f64 * libm::exp2(-(i as f64)),
    };
    let round = |v: f64| if setting.suite == Suite::Structure { v.round() } else { v } as f32;
    let table = |f: fn(f64) -> f64| {
        tensor(&[tokens, rotary_dim], |n| round(f(angle(n / rotary_dim, n % rotary_dim % pairs))))
    };
    let (cos, sin) = (table(libm::cos), table(libm::sin));
    let x = fill(&[tokens, heads, head_dim], setting, random);
    let rope = Rope { theta: 1e4, head_dim, rotary_dim, pairing, scaling: Scaling::Default };
    with(Site::layer(0, "q_rope"), &Call::Rotate { x: &x, cos: &cos, sin: &sin, rope: &rope });
}

fn cosines(dims: &Dims, _: Setting, _: &mut SplitMix64, with: &mut With) {
    angles(dims, Table::Cos, "rope.cos", with);
}

fn sines(dims: &Dims, _: Setting, _: &mut SplitMix64, with: &mut With) {
    angles(dims, Table::Sin, "rope.sin", with);
}

/// The first position of a case that is far into a text.
const FAR: u32 = 100_000;

fn far(dims: &Dims, _: Setting, _: &mut SplitMix64, with: &mut With) {
    let positions: Vec<u32> = (0..dims.get("tokens") as u32).map(|t| FAR + t).collect();
    table_at(&positions, dims.get("rotary"), Table::Cos, "rope.cos", with);
}

fn angles(dims: &Dims, table: Table, site: &'static str, with: &mut With) {
    // Far apart, up to 64 times the number of rows.
    let positions: Vec<u32> = (0..dims.get("tokens")).map(|t| (t * t * 2) as u32).collect();
    table_at(&positions, dims.get("rotary"), table, site, with);
}

fn table_at(positions: &[u32], rotary: usize, table: Table, site: &'static str, with: &mut With) {
    let rotary_dim = rotary.next_multiple_of(2);
    let rope = Rope {
        theta: 5e5,
        head_dim: rotary_dim,
        rotary_dim,
        pairing: Pairing::HalfSplit,
        scaling: Scaling::Default,
    };
    with(Site::model(site), &Call::RopeTable { positions, rope: &rope, table });
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::contract::{Contract, Product};
    use crate::judge::{Budget, Verdict, judge};
    use crate::variance::{Truth, expect};

    /// What is said of a kernel that holds positions in 16 bits: 100000 = 65536 + 34464.
    fn sixteen_bits(build: super::super::Build, tokens: usize) -> Verdict {
        let contract = Contract::named("f32").unwrap();
        let setting = Setting { suite: Rounding, product: Product::F32 };
        let dims = Dims(vec![("tokens", tokens), ("rotary", 32)]);
        let mut verdict = Verdict::Skipped;
        build(&dims, setting, &mut SplitMix64::new(1), &mut |at, call| {
            let Call::RopeTable { positions, rope, table } = call else { panic!("a table") };
            let cut: Vec<u32> = positions.iter().map(|position| position & 0xffff).collect();
            let wrong = reference::ops::evaluate(&Call::RopeTable { positions: &cut, rope, table: *table });
            let values: Vec<f32> = wrong.unwrap().iter().map(|v| *v as f32).collect();
            let none: [crate::variance::Bounded; 0] = [];
            let expected = expect(at, &call.with(&none), &contract, Truth::Image).unwrap();
            let budget = Budget { elements: values.len(), groups: 1 };
            verdict = judge("rope.cos", expected.r.shape(), &values, &expected, &budget).verdict;
        });
        verdict
    }

    #[test]
    fn only_far_positions_show_sixteen_bits() {
        assert_eq!(sixteen_bits(cosines, 33), Verdict::Passed);
        assert_eq!(sixteen_bits(far, 4), Verdict::Failed);
    }
}
