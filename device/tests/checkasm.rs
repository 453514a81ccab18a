//! Every kernel against the portable one, on random shapes and values, to the bit.
//!
//! `KARAT_CHECKASM_CASES` sets the number of cases per engine, `KARAT_CHECKASM_SEED` the first seed; a failure
//! names its seed.

mod common;

use common::{Random, image};
use karat_device::engine::{Engine, Scratch};
use karat_device::simd::Kernel;

/// What no kernel computes: marks memory that must stay untouched.
const GUARD: u32 = 0xFFC0_FFEE;

fn environment(name: &str, otherwise: u64) -> u64 {
    std::env::var(name).map_or(otherwise, |text| text.parse().expect("a number"))
}

/// Runs one case with `kernel`, between guard bands, and gives back the whole of y.
fn launch(case: &Case, scratch: &mut Scratch, parallel: bool) -> Vec<u32> {
    // Rows before and behind the launch are NaN: a kernel that reads them cannot hide it.
    let poison = vec![f32::NAN; 64 + case.image.inner()];
    let x = [&poison[..], &case.x, &poison].concat();
    let x = &x[poison.len()..poison.len() + case.x.len()];
    let band = 64;
    let mut y = vec![f32::from_bits(GUARD); band + case.rows * case.ld + band];
    let within = &mut y[band..band + case.rows * case.ld];
    if parallel {
        case.image.multiply_parallel(x, case.rows, within, case.ld, scratch).unwrap();
    } else {
        case.image.multiply(x, case.rows, within, case.ld, scratch).unwrap();
    }
    for (i, &v) in y.iter().enumerate() {
        let inside = i >= band && i < band + case.rows * case.ld;
        if !inside || (i - band) % case.ld >= case.image.out() {
            assert_eq!(v.to_bits(), GUARD, "{}: y was written at {i}, outside of the outputs", case.name);
        }
    }
    // The payload of a NaN that arithmetic makes is not defined by anyone.
    let bits = |v: f32| if v.is_nan() && v.to_bits() != GUARD { f32::NAN.to_bits() } else { v.to_bits() };
    y.into_iter().map(bits).collect()
}

struct Case {
    name: String,
    image: karat_device::pack::Image,
    x: Vec<f32>,
    rows: usize,
    ld: usize,
}

impl Case {
    fn random(engine: Engine, seed: u64) -> Case {
        let mut random = Random(seed);
        let mut size = |most: usize, rarely: usize| {
            let most = if random.below(8) == 0 { rarely } else { most };
            1 + random.below(most)
        };
        let (out, inner, rows) = (size(70, 300), size(150, 700), size(20, 128));
        let image = image(engine, out, inner, &mut random);
        let mut x = vec![0.0; rows * inner];
        x.chunks_mut(inner).for_each(|row| random.row(row));
        let ld = out + random.below(20);
        Case { name: format!("{engine} seed {seed}: {rows} rows, {out}x{inner}"), image, x, rows, ld }
    }
}

fn compare(engine: Engine) {
    let others: Vec<Kernel> =
        Kernel::ALL.into_iter().filter(|k| *k != Kernel::Portable && k.is_supported()).collect();
    let mut portable = Scratch::new(Kernel::Portable).unwrap();
    // One scratch for all cases: what an earlier, larger launch left behind must not matter.
    let mut scratches: Vec<Scratch> = others.iter().map(|&k| Scratch::new(k).unwrap()).collect();
    let first = environment("KARAT_CHECKASM_SEED", 1);
    for seed in first..first + environment("KARAT_CHECKASM_CASES", 200) {
        let case = Case::random(engine, seed);
        let expected = launch(&case, &mut portable, false);
        for scratch in &mut scratches {
            for parallel in [false, true] {
                let found = launch(&case, scratch, parallel);
                if let Some(i) = (0..found.len()).find(|&i| found[i] != expected[i]) {
                    let (row, output) = ((i - 64) / case.ld, (i - 64) % case.ld);
                    let value = f32::from_bits;
                    panic!(
                        "{}, {}: y[{row}, {output}] is {:e}, portable {:e}",
                        case.name,
                        scratch.kernel(),
                        value(found[i]),
                        value(expected[i])
                    );
                }
            }
        }
    }
}

#[test]
fn f32_kernels_give_the_same_bits() {
    compare(Engine::F32);
}

#[test]
fn int8_kernels_give_the_same_bits() {
    compare(Engine::Int8);
}

#[test]
fn w4a8_kernels_give_the_same_bits() {
    compare(Engine::W4A8);
}

#[test]
fn w4a16_kernels_give_the_same_bits() {
    compare(Engine::W4A16);
}

#[test]
fn bfp16_kernels_give_the_same_bits() {
    compare(Engine::Bfp16);
}
