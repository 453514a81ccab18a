//! Two dumps larger than the memory they may take, compared:
//!
//! ```text
//! cargo run --release -p karat-golden --example large_dumps [GIGABYTES, 4 where nothing is said]
//! ```
//!
//! prints how fast the diff went against the memory bandwidth of the same machine in the same run (at least half
//! of it), and the most memory that was resident (under one gigabyte). The dumps go to the temporary directory
//! (TMPDIR) and are removed; writing them takes longer than comparing them.

use karat_golden::diff::{DiffOptions, diff};
use karat_golden::{Dump, DumpWriter, Manifest, Origin};
use std::hint::black_box;
use std::path::Path;
use std::time::Instant;

/// Values of a tap: 64 MB.
const VALUES: usize = 16 << 20;
const WIDTH: usize = 4096;

type Fallible<T> = Result<T, Box<dyn std::error::Error>>;

fn main() -> Fallible<()> {
    let gigabytes: f64 = std::env::args().nth(1).map_or(Ok(4.0), |text| text.parse())?;
    let dir = tempfile::tempdir()?;
    let taps = ((gigabytes * 1e9 / (4 * VALUES) as f64).round() as usize).max(1);
    let bytes = 2 * taps * 4 * VALUES;
    println!("two dumps of {taps} taps, {:.2} GB each", bytes as f64 / 2e9);
    let (old, new) = (dir.path().join("old"), dir.path().join("new"));
    write(&old, taps, 0.0)?;
    write(&new, taps, 1e-7)?;
    forget_peak();

    let (old, new) = (Dump::open(&old)?, Dump::open(&new)?);
    let mut best = f64::INFINITY;
    let mut verdict = String::new();
    for _ in 0..3 {
        let started = Instant::now();
        let diff = diff(&old, &new, &DiffOptions::default())?;
        best = best.min(started.elapsed().as_secs_f64());
        verdict = format!("{:?}, {} sites with the same bytes", diff.verdict, diff.byte_identical);
    }
    let peak = peak();
    let (rate, bandwidth) = (bytes as f64 / best / 1e9, bandwidth() / 1e9);
    println!("diff: {verdict}; best of three {best:.2} s, {rate:.2} GB/s");
    println!("memory: {bandwidth:.2} GB/s read by all threads; ratio {:.2} (at least 0.5)", rate / bandwidth);
    match peak {
        Some(kilobytes) => {
            println!("most resident memory: {:.2} GB (under 1)", kilobytes as f64 * 1024.0 / 1e9)
        }
        None => println!("most resident memory: this system does not say"),
    }
    Ok(())
}

/// Values that no two taps share; `change` moves every one of them by about so much of itself.
fn write(dir: &Path, taps: usize, change: f32) -> Fallible<()> {
    let mut writer =
        DumpWriter::create(dir, Manifest::new("large_dumps", Origin::RegressionLock, vec![1, 2, 3]))?;
    let mut values = vec![0f32; VALUES];
    for tap in 0..taps {
        let mut state = tap as u32 + 1;
        for value in &mut values {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            let plain = (state >> 8) as f32 / (1 << 23) as f32 - 1.0;
            *value = plain + plain * change;
        }
        let name = format!("prefill.layers.{tap}.out");
        writer.tap(&name, &["tokens", "hidden"], &[VALUES / WIDTH, WIDTH], &values)?;
    }
    Ok(writer.finish()?)
}

/// Bytes a second that all threads together read from memory larger than any cache, best of five.
fn bandwidth() -> f64 {
    let memory = vec![1u64; 64 << 20];
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let mut best = 0f64;
    for _ in 0..5 {
        let started = Instant::now();
        std::thread::scope(|scope| {
            for part in memory.chunks(memory.len().div_ceil(threads)) {
                scope.spawn(move || {
                    let mut sums = [0u64; 16];
                    for row in part.as_chunks::<16>().0 {
                        for lane in 0..16 {
                            sums[lane] = sums[lane].wrapping_add(row[lane]);
                        }
                    }
                    black_box(sums)
                });
            }
        });
        best = best.max((8 * memory.len()) as f64 / started.elapsed().as_secs_f64());
    }
    best
}

/// From here on the peak is counted anew, where the system has that (Linux).
fn forget_peak() {
    let _ = std::fs::write("/proc/self/clear_refs", "5");
}

/// The most resident memory so far, in kB.
fn peak() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    line.trim().trim_end_matches("kB").trim().parse().ok()
}
