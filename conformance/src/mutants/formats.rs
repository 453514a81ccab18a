//! Mistakes of 4-bit codes: order, sign, zeros, scales.

use super::linear::operands;
use super::{Eval, History, Mutant, mutant};
use reference::{Call, Tensor};
use spec::families::Linear;
use spec::matrix::Codes4;
use spec::{Matrix, Rows, Site};
use std::sync::Arc;

/// The catalogue's mutants of 4-bit formats; all of them need a package with 4-bit codes.
pub static MUTANTS: &[Mutant] = &[
    mutant("q-nibble-order", "", "low and high nibble of every byte exchanged", CODES, nibbles),
    mutant(
        "q-nibble-order",
        "halves",
        "consecutive pairs read as halves of the group: code j from 2j mod 31",
        CODES,
        halves,
    ),
    mutant("q-code-signedness", "", "codes from 8 on are read as code - 16", CODES, signed),
    mutant("q-zp-dropped", "", "w = q · s", CODES, no_zero),
    mutant("q-zp-dropped", "form", "w = (q - z) · s for q · s + z", CODES, other_form),
    mutant("q-zp-off-by-one", "", "zeros are one code too low", CODES, zero_below),
    mutant("q-scale-shift", "next", "group g takes the scale of group g + 1", CODES, next_scale),
    mutant(
        "q-scale-shift",
        "wide",
        "groups of 64: every second group takes the scale before it",
        CODES,
        wide_groups,
    ),
    mutant(
        "pack-scale-axis",
        "",
        "scales are looked up along the other axis: scale n of the flat list for element n",
        CODES,
        other_axis,
    ),
];

const CODES: &str = "a weight with 4-bit codes";

/// Codes of a matrix, changed.
struct Coded {
    rows: Vec<(Codes4, bool)>,
    inner: usize,
}

impl Rows for Coded {
    fn rows(&self) -> usize {
        self.rows.len()
    }

    fn inner(&self) -> usize {
        self.inner
    }

    fn decode(&self, row: usize, into: &mut [f32]) {
        let (codes, signed) = &self.rows[row];
        for (i, value) in into.iter_mut().enumerate() {
            let code = f32::from(codes.codes[i]);
            let code = if *signed && code >= 8.0 { code - 16.0 } else { code };
            *value = codes.scales[i / 32] * code + codes.zeros[i / 32];
        }
    }

    fn format(&self) -> &str {
        "Q4"
    }

    fn row_bytes(&self) -> usize {
        self.inner / 2
    }

    fn codes4(&self, row: usize, into: &mut Codes4) -> bool {
        let (codes, signed) = &self.rows[row];
        if *signed {
            return false;
        }
        into.clone_from(codes);
        true
    }
}

/// The product with changed codes; `change` gets all rows.
fn with_codes(
    call: &Call<Tensor>,
    eval: &mut Eval,
    signed: bool,
    change: impl Fn(&mut [(Codes4, bool)]),
) -> Option<Tensor> {
    let (x, w) = operands(call)?;
    let (out, inner) = (w.weight.out(), w.weight.inner());
    let mut rows = Vec::with_capacity(out);
    for o in 0..out {
        let mut codes = Codes4::default();
        if !w.weight.codes4(o, &mut codes) {
            return None;
        }
        rows.push((codes, signed));
    }
    change(&mut rows);
    let weight = Matrix::new(w.weight.name(), Arc::new(Coded { rows, inner }));
    Some(eval(&Call::Linear { x, w: &Linear { weight, bias: w.bias.clone() } }))
}

fn each_row(call: &Call<Tensor>, eval: &mut Eval, change: impl Fn(&mut Codes4)) -> Option<Tensor> {
    with_codes(call, eval, false, |rows| rows.iter_mut().for_each(|(codes, _)| change(codes)))
}

/// Code `i` of a group of 32 from place `order(i)`; a group that is cut short stays.
fn in_order(codes: &mut Codes4, order: impl Fn(usize) -> usize) {
    for group in codes.codes.chunks_exact_mut(32) {
        let before = group.to_vec();
        (0..32).for_each(|i| group[i] = before[order(i)]);
    }
}

fn nibbles(call: &Call<Tensor>, _: Site, _: &History, eval: &mut Eval) -> Option<Tensor> {
    each_row(call, eval, |codes| in_order(codes, |i| i ^ 1))
}

fn halves(call: &Call<Tensor>, _: Site, _: &History, eval: &mut Eval) -> Option<Tensor> {
    each_row(call, eval, |codes| in_order(codes, |i| if i == 31 { 31 } else { 2 * i % 31 }))
}

fn signed(call: &Call<Tensor>, _: Site, _: &History, eval: &mut Eval) -> Option<Tensor> {
    with_codes(call, eval, true, |_| {})
}

fn no_zero(call: &Call<Tensor>, _: Site, _: &History, eval: &mut Eval) -> Option<Tensor> {
    each_row(call, eval, |codes| codes.zeros.fill(0.0))
}

fn other_form(call: &Call<Tensor>, _: Site, _: &History, eval: &mut Eval) -> Option<Tensor> {
    each_row(call, eval, |codes| {
        for (zero, scale) in codes.zeros.iter_mut().zip(&codes.scales) {
            *zero *= -scale;
        }
    })
}

fn zero_below(call: &Call<Tensor>, _: Site, _: &History, eval: &mut Eval) -> Option<Tensor> {
    each_row(call, eval, |codes| {
        for (zero, scale) in codes.zeros.iter_mut().zip(&codes.scales) {
            *zero -= scale;
        }
    })
}

fn next_scale(call: &Call<Tensor>, _: Site, _: &History, eval: &mut Eval) -> Option<Tensor> {
    if operands(call)?.1.weight.inner() <= 32 {
        return None;
    }
    each_row(call, eval, |codes| codes.scales.rotate_left(1))
}

fn wide_groups(call: &Call<Tensor>, _: Site, _: &History, eval: &mut Eval) -> Option<Tensor> {
    if operands(call)?.1.weight.inner() <= 32 {
        return None;
    }
    each_row(call, eval, |codes| {
        for g in (1..codes.scales.len()).step_by(2) {
            codes.scales[g] = codes.scales[g - 1];
        }
    })
}

fn other_axis(call: &Call<Tensor>, _: Site, _: &History, eval: &mut Eval) -> Option<Tensor> {
    let (_, w) = operands(call)?;
    let groups = w.weight.inner().div_ceil(32);
    if groups < 2 {
        return None;
    }
    with_codes(call, eval, false, |rows| {
        let out = rows.len();
        let all: Vec<f32> = rows.iter().flat_map(|(codes, _)| codes.scales.clone()).collect();
        for (o, (codes, _)) in rows.iter_mut().enumerate() {
            (0..groups).for_each(|g| codes.scales[g] = all[g * out + o]);
        }
    })
}
