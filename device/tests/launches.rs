//! Cutting rows into launches and outputs into threads changes no bit.

mod common;

use common::{Random, image};
use karat_device::engine::{Engine, PREFILL_ROWS, Scratch};
use karat_device::pack::{Image, PackError};
use karat_device::simd::Kernel;
use proptest::prelude::*;

fn bits(y: &[f32]) -> Vec<u32> {
    // Extreme draws overflow to infinities of both signs; the payload of the NaN they make is nobody's.
    y.iter().map(|v| if v.is_nan() { f32::NAN.to_bits() } else { v.to_bits() }).collect()
}

/// All rows of `x`, `cut` of them at a time.
fn in_launches(image: &Image, x: &[f32], cut: usize) -> Vec<u32> {
    let mut scratch = Scratch::new(Kernel::best()).unwrap();
    let (inner, out) = (image.inner(), image.out());
    let mut y = vec![f32::NAN; x.len() / inner * out];
    for (x, y) in x.chunks(cut * inner).zip(y.chunks_mut(cut * out)) {
        image.multiply(x, x.len() / inner, y, out, &mut scratch).unwrap();
    }
    bits(&y)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 30, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_row_does_not_depend_on_its_launch(
        seed in any::<u64>(),
        engine in 0usize..5,
        out in 1usize..40,
        inner in 1usize..140,
        rows in 1usize..=PREFILL_ROWS,
    ) {
        let mut random = Random(seed);
        let image = image(Engine::ALL[engine], out, inner, &mut random);
        let mut x = vec![0.0; rows * inner];
        x.chunks_mut(inner).for_each(|row| random.row(row));
        let whole = in_launches(&image, &x, PREFILL_ROWS);
        for cut in [1, 3, 7, 16, 17] {
            prop_assert_eq!(&in_launches(&image, &x, cut), &whole, "{} rows at a time", cut);
        }
    }

    // Matrices on top of each other in one image give the outputs of each side by side.
    #[test]
    fn a_stack_of_matrices_gives_each_its_outputs(
        seed in any::<u64>(),
        engine in 0usize..5,
        upper in 1usize..40,
        lower in 1usize..40,
        inner in 1usize..100,
    ) {
        let engine = Engine::ALL[engine];
        let mut random = Random(seed);
        let w: Vec<f32> = (0..(upper + lower) * inner).map(|_| random.unit()).collect();
        let x: Vec<f32> = (0..inner).map(|_| random.unit()).collect();
        let pack = |first: usize, out: usize| {
            let packed: Result<_, PackError> = Image::pack(engine, out, inner, &mut |o, row: &mut [f32]| {
                row.copy_from_slice(&w[(first + o) * inner..][..inner]);
                Ok(())
            });
            in_launches(&packed.unwrap(), &x, 1)
        };
        prop_assert_eq!(pack(0, upper + lower), [pack(0, upper), pack(upper, lower)].concat());
    }
}

#[test]
fn any_number_of_threads_gives_the_same_bits() {
    for engine in Engine::ALL {
        let mut random = Random(5);
        let (out, inner, rows) = (1003, 333, 5);
        let image = image(engine, out, inner, &mut random);
        let x: Vec<f32> = (0..rows * inner).map(|_| random.unit()).collect();
        let expected = in_launches(&image, &x, rows);
        for threads in [1, 2, 3, 8] {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            let mut scratch = Scratch::new(Kernel::best()).unwrap();
            let mut y = vec![f32::NAN; rows * out];
            pool.install(|| image.multiply_parallel(&x, rows, &mut y, out, &mut scratch)).unwrap();
            assert!(bits(&y) == expected, "{engine} on {threads} threads");
        }
    }
}
