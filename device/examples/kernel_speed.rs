//! How far the kernels are from what the memory and the arithmetic units of this machine allow.
//!
//! ```text
//! cargo run --release -p karat-device --example kernel_speed [KERNEL]
//! ```
//!
//! One thread, medians of interleaved rounds. "read" walks the same image and adds it up; a one-row product at
//! the ratio 1 is bound by memory alone.

use std::hint::black_box;
use std::time::Instant;

use karat_device::engine::{Engine, Scratch};
use karat_device::pack::{Image, PackError};
use karat_device::simd::Kernel;

const ROUNDS: usize = 9;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let kernel = match std::env::args().nth(1) {
        Some(name) => name.parse()?,
        None => Kernel::chosen()?,
    };
    println!("kernel {kernel}");
    // Larger than a second-level cache; as tall as a vocabulary is not needed.
    decode(Engine::F32, kernel, 32768, 4096)?;
    decode(Engine::W4A8, kernel, 131072, 4096)?;
    decode(Engine::Int8, kernel, 65536, 4096)?;
    decode(Engine::W4A16, kernel, 16384, 4096)?;
    decode(Engine::Bfp16, kernel, 16384, 4096)?;
    for engine in Engine::ALL {
        prefill(engine, kernel)?;
    }
    Ok(())
}

fn image(engine: Engine, out: usize, inner: usize) -> Result<Image, PackError> {
    let mut state = 1u32;
    Image::pack(engine, out, inner, &mut |_, row: &mut [f32]| {
        for w in row {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            *w = (state >> 8) as f32 / (1 << 24) as f32 - 0.5;
        }
        Ok(())
    })
}

fn activations(count: usize) -> Vec<f32> {
    (0..count).map(|i| ((i * 37 % 101) as f32 - 50.0) / 50.0).collect()
}

fn seconds(run: impl FnOnce()) -> f64 {
    let start = Instant::now();
    run();
    start.elapsed().as_secs_f64()
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// One row and sixteen rows against a walk over the same image.
fn decode(
    engine: Engine,
    kernel: Kernel,
    out: usize,
    inner: usize,
) -> Result<(), Box<dyn std::error::Error>> {
    let image = image(engine, out, inner)?;
    let mut scratch = Scratch::new(kernel)?;
    let x = activations(16 * inner);
    let mut y = vec![0.0; 16 * out];
    let (mut read, mut one, mut sixteen) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        read.push(seconds(|| {
            black_box(image.probe());
        }));
        let mut result = Ok(());
        one.push(seconds(|| result = image.multiply(&x[..inner], 1, &mut y, out, &mut scratch)));
        result?;
        let mut result = Ok(());
        sixteen.push(seconds(|| result = image.multiply(&x, 16, &mut y, out, &mut scratch)));
        result?;
        black_box(&y);
    }
    let gigabytes = image.bytes() as f64 / 1e9;
    let (read, one, sixteen) = (median(read), median(one), median(sixteen));
    println!(
        "{engine:<6} {out}x{inner} {gigabytes:.2} GB: read {:5.1} GB/s, one row {:5.1} GB/s ({:.2} of read), \
         16 rows {:.2} x one row, {:.0} GOP/s",
        gigabytes / read,
        gigabytes / one,
        read / one,
        sixteen / one,
        32.0 * (out * inner) as f64 / sixteen / 1e9,
    );
    Ok(())
}

/// A prefill launch of a square matrix.
fn prefill(engine: Engine, kernel: Kernel) -> Result<(), Box<dyn std::error::Error>> {
    let size = 4096;
    let image = image(engine, size, size)?;
    let mut scratch = Scratch::new(kernel)?;
    let mut y = vec![0.0; 128 * size];
    let mut line = format!("{engine:<6} {size}x{size}:");
    for rows in [16, 128] {
        let x = activations(rows * size);
        let mut times = Vec::new();
        for _ in 0..ROUNDS {
            let mut result = Ok(());
            times.push(seconds(|| result = image.multiply(&x, rows, &mut y, size, &mut scratch)));
            result?;
        }
        let operations = 2.0 * (rows * size * size) as f64;
        line += &format!(" {rows} rows {:.0} GOP/s", operations / median(times) / 1e9);
    }
    println!("{line}");
    Ok(())
}
