//! How much memory judging a dump takes:
//!
//! ```text
//! cargo run --release -p karat --example dump_memory [PACKAGE, llama] [TOKENS, 400] [STEPS, 4]
//! ```
//!
//! writes the reference's values of a seeded prompt as a dump, judges it as a subject, and prints how large the dump and
//! its largest tensor are, and how much memory became resident while it was judged. A value is read where it is looked
//! at: what is held is the state of the model and the values of one layer, however large the dump. (Linux tells; the
//! weights, which are mapped, count as far as they were touched before.)

use conformance::cli::load::load;
use conformance::contract::Contract;
use conformance::dumping::{Run, write};
use conformance::subject::{DumpSpec, SubjectSpec};
use conformance::verify::{Options, verify};
use fixtures::random::SplitMix64;
use golden::Dump;
use std::fs;

type Fallible<T> = Result<T, Box<dyn std::error::Error>>;

fn main() -> Fallible<()> {
    let argument = |n: usize| std::env::args().nth(n);
    let size = |n: usize, otherwise| argument(n).map_or(Ok(otherwise), |text| text.parse::<usize>());
    let package = argument(1).unwrap_or_else(|| "llama".to_string());
    let (tokens, steps) = (size(2, 400)?, size(3, 4)?);
    let loaded = load(&package, None, &[])?;
    let mut random = SplitMix64::new(1);
    let prompt: Vec<u32> = (0..tokens).map(|_| random.below(loaded.config.vocab_size()) as u32).collect();

    let dir = tempfile::tempdir()?;
    let path = dir.path().join("dump");
    let run = Run {
        subject: &SubjectSpec::Reference,
        prompt: &prompt,
        steps,
        sites: None,
        reason: None,
        sigma: false,
    };
    write(&loaded, "", &run, &path)?;
    let megabytes = |values: usize| values as f64 * 4e-6;
    let sizes: Vec<usize> = Dump::open(&path)?.taps().map(|tap| tap.elements()).collect();
    let (all, largest) = (sizes.iter().sum(), sizes.iter().copied().max().unwrap_or(0));
    println!(
        "{package}, {tokens} tokens and {steps} steps: a dump of {:.0} MB, its largest tensor {:.0} MB",
        megabytes(all),
        megabytes(largest)
    );

    let contract = Contract::named("f32").ok_or("no contract f32")?;
    let subject = SubjectSpec::Dump(DumpSpec { path, map: None });
    // From here on the peak is counted anew.
    fs::write("/proc/self/clear_refs", "5")?;
    let before = resident("VmRSS:")?;
    let result = verify(&loaded, &prompt, &Options::new(&subject, &contract), String::new())?;
    println!(
        "judged {} sites, {:?}: {:.0} MB resident at most, {:.0} MB more than before",
        result.sites.len(),
        result.verdict,
        resident("VmHWM:")?,
        resident("VmHWM:")? - before
    );
    Ok(())
}

/// A line of this process's status, in MB.
fn resident(what: &str) -> Fallible<f64> {
    let status = fs::read_to_string("/proc/self/status")?;
    let line = status.lines().find_map(|line| line.strip_prefix(what)).ok_or("this system does not say")?;
    Ok(line.trim().trim_end_matches("kB").trim().parse::<f64>()? * 1024e-6)
}
