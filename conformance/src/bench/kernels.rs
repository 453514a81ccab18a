//! S1 to S4: the kernels of the NPU path against a library and against the memory.

use super::BenchError;
use super::figure::{Figure, Goal, Spec, Timed, interleaved, seconds};
use device::engine::{Engine, Scratch};
use device::pack::{Image, PackError};
use device::simd::{Kernel, ceiling};
use serde::Serialize;

/// S1.
pub const PREFILL: Spec = Spec {
    id: "S1",
    what: "strict f32 sums, 128 rows, 4096x4096: speed over that of the gemm crate",
    goal: Goal::AtLeast(0.6),
    stretch: Some(Goal::AtLeast(0.9)),
};

/// S1 with the rows of a decode launch.
pub const DECODE: Spec = Spec {
    id: "S1@16",
    what: "strict f32 sums, 16 rows, 4096x4096: speed over that of the gemm crate",
    goal: Goal::AtLeast(1.5),
    stretch: Some(Goal::AtLeast(2.5)),
};

/// S2.
pub const ONE_ROW: Spec = Spec {
    id: "S2",
    what: "packed f32 product of one row: bytes a second over a read of the same image",
    goal: Goal::AtLeast(0.85),
    stretch: Some(Goal::AtLeast(0.95)),
};

/// S3.
pub const FOUR_BIT: Spec = Spec {
    id: "S3",
    what: "w4a8 product of one row: bytes a second over a read of the same image",
    goal: Goal::AtLeast(0.85),
    stretch: Some(Goal::AtLeast(1.0)),
};

/// S4.
pub const SIXTEEN: Spec = Spec {
    id: "S4",
    what: "w4a8 launch: time of 16 rows over time of one row",
    goal: Goal::AtMost(8.0),
    stretch: Some(Goal::AtMost(6.0)),
};

/// What the machine gives at most, on one thread.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Probes {
    /// Reading memory far larger than any cache, in 10^9 bytes a second.
    pub read_gb_s: f64,
    /// f32 multiply-add in registers, in 10^9 operations a second.
    pub fma_gflop_s: f64,
    /// int8 dot products in registers, in 10^9 operations a second.
    pub dot_gop_s: f64,
}

/// Measures the ceilings: medians of as many runs as a figure has pairs.
pub fn probes(kernel: Kernel, runs: usize) -> Result<Probes, BenchError> {
    // Long enough for the clock, short enough to be repeated: some 20 ms each.
    const ROUNDS: usize = 1 << 23;
    let image = image(Engine::F32, 32768, 4096)?;
    let bytes = image.bytes() as f64;
    let (mut read, mut fma, mut dot) = (Vec::new(), Vec::new(), Vec::new());
    let rate = |work: f64, run: &mut dyn FnMut()| work / seconds(run) / 1e9;
    for _ in 0..=runs {
        read.push(rate(bytes, &mut || {
            std::hint::black_box(image.probe());
        }));
        let (mut f, mut d) = (0, 0);
        let fma_seconds = seconds(|| f = ceiling::fma(ROUNDS));
        let dot_seconds = seconds(|| d = ceiling::dot(kernel, ROUNDS));
        fma.push(f as f64 / fma_seconds / 1e9);
        dot.push(d as f64 / dot_seconds / 1e9);
    }
    let middle = |rates: &[f64]| crate::ab::median(&rates[1..]);
    Ok(Probes { read_gb_s: middle(&read), fma_gflop_s: middle(&fma), dot_gop_s: middle(&dot) })
}

/// S1 for a number of rows.
pub fn strict(spec: &Spec, rows: usize, kernel: Kernel, pairs: usize) -> Result<Figure, BenchError> {
    const SIZE: usize = 4096;
    let mut weights = vec![0.0; SIZE * SIZE];
    for (o, row) in weights.chunks_exact_mut(SIZE).enumerate() {
        fill(o, row);
    }
    let image = Image::pack(Engine::F32, SIZE, SIZE, &mut |o, row: &mut [f32]| {
        row.copy_from_slice(&weights[o * SIZE..][..SIZE]);
        Ok::<_, PackError>(())
    })?;
    let x = activations(rows * SIZE);
    let (mut ours, mut theirs) = (vec![0.0; rows * SIZE], vec![0.0; rows * SIZE]);
    let mut scratch = Scratch::new(kernel)?;
    let mut timed = interleaved(
        pairs,
        || Ok::<_, BenchError>(seconds(|| peers::gemm_f32(&x, &weights, &mut theirs, rows, SIZE, SIZE))),
        || timed_launch(&image, &x, rows, &mut ours, &mut scratch),
    )?;
    timed.fault = differ(&ours, &theirs);
    let operations = 2.0 * (rows * SIZE * SIZE) as f64;
    let (over, under) = timed.medians();
    let rates =
        format!("{:.0} GFLOP/s, gemm {:.0} GFLOP/s", operations / under / 1e9, operations / over / 1e9);
    Ok(Figure { rates: Some(rates), ..spec.judge(&timed) })
}

/// The two sum in different orders: sums of 4096 products of at most 0.5 agree to 1e-2 by far.
fn differ(ours: &[f32], theirs: &[f32]) -> Option<String> {
    let worst = ours.iter().zip(theirs).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    (worst > 1e-2).then(|| format!("the two results differ by {worst}"))
}

/// S2 and S3: one row against a walk over the image.
pub fn one_row(spec: &Spec, engine: Engine, kernel: Kernel, pairs: usize) -> Result<Figure, BenchError> {
    let (out, inner) = tall(engine);
    let image = image(engine, out, inner)?;
    let x = activations(inner);
    let mut y = vec![0.0; out];
    let mut scratch = Scratch::new(kernel)?;
    let timed = interleaved(
        pairs,
        || Ok::<_, BenchError>(seconds(|| image.probe())),
        || timed_launch(&image, &x, 1, &mut y, &mut scratch),
    )?;
    let (read, product) = timed.medians();
    let gigabytes = image.bytes() as f64 / 1e9;
    let rates =
        format!("{:.1} GB/s, read {:.1} GB/s over {gigabytes:.2} GB", gigabytes / product, gigabytes / read);
    Ok(Figure { rates: Some(rates), ..spec.judge(&timed) })
}

/// S4: a full decode launch against one row.
pub fn sixteen_rows(spec: &Spec, kernel: Kernel, pairs: usize) -> Result<Figure, BenchError> {
    let (out, inner) = tall(Engine::W4A8);
    let image = image(Engine::W4A8, out, inner)?;
    let x = activations(16 * inner);
    let (mut y, mut first) = (vec![0.0; 16 * out], vec![0.0; out]);
    let (mut scratch, mut other) = (Scratch::new(kernel)?, Scratch::new(kernel)?);
    let mut timed: Timed = interleaved(
        pairs,
        || timed_launch(&image, &x, 16, &mut y, &mut scratch),
        || timed_launch(&image, &x[..inner], 1, &mut first, &mut other),
    )?;
    if y[..out] != first {
        timed.fault = Some("row 0 of 16 is not the row alone".into());
    }
    let (sixteen, one) = timed.medians();
    let rates = format!("{:.1} ms, one row {:.1} ms", sixteen * 1e3, one * 1e3);
    Ok(Figure { rates: Some(rates), ..spec.judge(&timed) })
}

fn timed_launch(
    image: &Image,
    x: &[f32],
    rows: usize,
    y: &mut [f32],
    scratch: &mut Scratch,
) -> Result<f64, BenchError> {
    let mut result = Ok(());
    let time = seconds(|| result = image.multiply(x, rows, y, image.out(), scratch));
    result?;
    Ok(time)
}

/// Shapes whose images are larger than any cache: 0.5 GB of f32, 0.3 GB of 4-bit codes and scales.
fn tall(engine: Engine) -> (usize, usize) {
    if engine == Engine::F32 { (32768, 4096) } else { (131_072, 4096) }
}

fn image(engine: Engine, out: usize, inner: usize) -> Result<Image, PackError> {
    Image::pack(engine, out, inner, &mut |o, row: &mut [f32]| {
        fill(o, row);
        Ok(())
    })
}

/// Weights in -0.5..0.5, from a congruential generator that starts anew in every row.
fn fill(o: usize, row: &mut [f32]) {
    let mut state = (o as u32).wrapping_mul(2_654_435_761).wrapping_add(1);
    for w in row {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        *w = (state >> 8) as f32 / (1 << 24) as f32 - 0.5;
    }
}

fn activations(count: usize) -> Vec<f32> {
    (0..count).map(|i| ((i * 37 % 101) as f32 - 50.0) / 50.0).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_that_differ_are_a_fault() {
        assert_eq!(differ(&[1.0, 2.0], &[1.0, 2.001]), None);
        assert!(differ(&[1.0, 2.0], &[1.0, 2.5]).is_some());
    }
}
