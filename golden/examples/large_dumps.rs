//! Two dumps larger than the memory they may take, compared:
//!
//! ```text
//! cargo run --release -p karat-golden --example large_dumps [GIGABYTES, 4 where nothing is said]
//! ```
//!
//! prints how fast `diff` went, the bytes of both dumps counted, against the memory bandwidth of the same machine in
//! the same run (at least half of it), and the most memory that was resident meanwhile (under one gigabyte): once for
//! dumps that differ in every value, once for a dump and its copy. The bandwidth is what as many threads as `diff`
//! takes read from memory larger than the caches. The two are measured in turn, five times, and medians are
//! given, so that whatever else the machine does meets both.
//!
//! The dumps go to the temporary directory (TMPDIR) and are removed; writing them takes longer than comparing them,
//! and the files should fit into memory, or the disk is what is measured.

use karat_golden::diff::{DiffOptions, diff};
use karat_golden::{Dump, DumpWriter, Manifest, Origin};
use std::fs;
use std::hint::black_box;
use std::path::Path;
use std::time::Instant;

/// Values of a tap: 64 MB.
const VALUES: usize = 16 << 20;
const WIDTH: usize = 4096;
const ROUNDS: usize = 5;

type Fallible<T> = Result<T, Box<dyn std::error::Error>>;

fn main() -> Fallible<()> {
    let gigabytes: f64 = std::env::args().nth(1).map_or(Ok(4.0), |text| text.parse())?;
    let dir = tempfile::tempdir()?;
    let taps = ((gigabytes * 1e9 / (4 * VALUES) as f64).round() as usize).max(1);
    let bytes = (2 * taps * 4 * VALUES) as f64;
    println!("two dumps of {taps} taps, {:.2} GB each, {} threads", bytes / 2e9, threads());
    let (old, new) = (dir.path().join("old"), dir.path().join("new"));
    write(&old, taps, 0.0)?;
    write(&new, taps, 1e-7)?;
    measure("every value differs", &old, &new, bytes)?;
    fs::remove_dir_all(&new)?;
    write(&new, taps, 0.0)?;
    measure("a copy", &old, &new, bytes)
}

/// Compares in turn with reading memory, and prints the medians.
fn measure(what: &str, old: &Path, new: &Path, bytes: f64) -> Fallible<()> {
    let (old, new) = (Dump::open(old)?, Dump::open(new)?);
    let (mut rates, mut bandwidths, mut ratios) = (Vec::new(), Vec::new(), Vec::new());
    let mut most = None;
    let mut verdict = String::new();
    for _ in 0..ROUNDS {
        let bandwidth = bandwidth();
        forget_peak();
        let started = Instant::now();
        let diff = diff(&old, &new, &DiffOptions::default())?;
        let rate = bytes / started.elapsed().as_secs_f64() / 1e9;
        most = most.max(peak());
        verdict = format!("{:?}, {} sites with the same bytes", diff.verdict, diff.byte_identical);
        rates.push(rate);
        bandwidths.push(bandwidth);
        ratios.push(rate / bandwidth);
    }
    println!("{what}: {verdict}");
    println!(
        "  diff {:.2} GB/s, memory {:.2} GB/s, ratio {:.2} (at least 0.5)",
        median(&mut rates),
        median(&mut bandwidths),
        median(&mut ratios)
    );
    match most {
        Some(kilobytes) => {
            println!("  most resident memory {:.2} GB (under 1)", kilobytes as f64 * 1024.0 / 1e9)
        }
        None => println!("  most resident memory: this system does not say"),
    }
    Ok(())
}

fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn threads() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
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

/// GB a second that all threads together read from half a gigabyte, of one reading after a first one.
fn bandwidth() -> f64 {
    let memory = vec![1u64; 64 << 20];
    let mut seconds = 0.0;
    for _ in 0..2 {
        let started = Instant::now();
        std::thread::scope(|scope| {
            for part in memory.chunks(memory.len().div_ceil(threads())) {
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
        seconds = started.elapsed().as_secs_f64();
    }
    (8 * memory.len()) as f64 / seconds / 1e9
}

/// From here on the peak is counted anew, where the system has that (Linux).
fn forget_peak() {
    let _ = fs::write("/proc/self/clear_refs", "5");
}

/// The most resident memory so far, in kB.
fn peak() -> Option<u64> {
    let status = fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    line.trim().trim_end_matches("kB").trim().parse().ok()
}
