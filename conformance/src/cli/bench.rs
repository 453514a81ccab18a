//! `karat bench`.

use super::load::{check_length, load};
use super::{CliError, Format, Outcome};
use crate::bench::figure::{Goal, PAIRS};
use crate::bench::package::{Arm, Run, run as run_package};
use crate::bench::{BenchError, Machine, Options, Report, SCHEMA, Verdict, machine, measure};
use crate::subject::SubjectSpec;
use device::simd::Kernel;
use fixtures::Package;
use fixtures::random::SplitMix64;
use indicatif::{ProgressBar, ProgressStyle};
use std::fmt::Write;
use std::process::Command;

/// Arguments of `bench`.
#[derive(clap::Args)]
pub struct Args {
    /// Run this package instead: tokens a second and memory of the reference and of the NPU path.
    package: Option<String>,
    /// Exit with 1 where a figure misses its goal.
    #[arg(long)]
    check: bool,
    /// Only these figures: S1,S3,S10@q4_0.
    #[arg(long, value_name = "FIGURES", value_delimiter = ',', conflicts_with = "package")]
    only: Vec<String>,
    /// Interleaved pairs of each figure, at least 5; rounds of a package, where fewer give no ratios.
    #[arg(long, value_name = "N", default_value_t = PAIRS)]
    pairs: usize,
    /// The Python that has numpy and gguf.
    #[arg(long, value_name = "PROGRAM", default_value = "python3")]
    python: String,
    /// What runs the package: reference, npu:ENGINE; may be given several times.
    #[arg(long, value_name = "SPEC", default_values = ["reference", "npu"])]
    subject: Vec<String>,
    /// Tokens of the prompt of a package.
    #[arg(long, value_name = "N", default_value_t = 32)]
    prompt: usize,
    /// Steps behind the prompt.
    #[arg(long, value_name = "N", default_value_t = 8)]
    tokens: usize,
    /// Hold a step behind this many tokens against one behind the prompt (of the NPU path, which can keep both states).
    #[arg(long, value_name = "N", requires = "package")]
    far: Option<usize>,
    /// Run the one subject in this process and print its run: a process of its own has a peak of its own.
    #[arg(long, hide = true)]
    here: bool,
}

/// Runs the verb: 0, or 1 with `--check` where a goal is missed.
pub fn run(args: &Args, format: Format) -> Result<Outcome, CliError> {
    if args.package.is_none() && args.pairs < PAIRS {
        return Err(CliError::Usage(format!("a figure needs at least {PAIRS} pairs, not {}", args.pairs)));
    }
    let report = match &args.package {
        Some(package) if args.here => return here(args, package),
        Some(package) => of_package(args, package)?,
        None => {
            let options = Options { only: args.only.clone(), pairs: args.pairs, python: args.python.clone() };
            let bar = ProgressBar::no_length();
            bar.set_style(ProgressStyle::with_template("{spinner} {msg}").expect("the template is valid"));
            let report = measure(&options, |id| {
                bar.set_message(id.to_string());
                bar.tick();
            })?;
            bar.finish_and_clear();
            report
        }
    };
    let missed = report.missed().count();
    let text = match format {
        Format::Json => serde_json::to_string_pretty(&report).expect("names and numbers") + "\n",
        _ => text(&report),
    };
    Ok(Outcome { report: text, code: u8::from(args.check && missed > 0) })
}

fn arm(subject: &str) -> Result<Arm, CliError> {
    match subject.parse()? {
        SubjectSpec::Reference => Ok(Arm::Reference),
        SubjectSpec::Npu(engine, switches) => Ok(Arm::Npu(engine, switches)),
        _ => Err(CliError::Usage(format!("bench runs reference and npu:ENGINE, not {subject}"))),
    }
}

/// Runs every subject in a process of its own, one after the other.
fn of_package(args: &Args, package: &str) -> Result<Report, CliError> {
    let io = |what: &str| {
        let what = what.to_string();
        move |error| CliError::Io(what, error)
    };
    args.subject.iter().try_for_each(|subject| arm(subject).map(|_| ()))?;
    let watch = machine::Watch::begin();
    let program = std::env::current_exe().map_err(io("this program"))?;
    let mut runs = Vec::new();
    for subject in &args.subject {
        let numbers = [args.prompt, args.tokens, args.pairs].map(|n| n.to_string());
        let [prompt, tokens, pairs] = &numbers;
        let far = args.far.map(|far| far.to_string());
        let output = Command::new(&program)
            .args(["bench", package, "--here", "--subject", subject])
            .args(far.iter().flat_map(|far| ["--far", far.as_str()]))
            .args(["--prompt", prompt, "--tokens", tokens, "--pairs", pairs])
            .output()
            .map_err(io("this program"))?;
        if !output.status.success() {
            let why = String::from_utf8_lossy(&output.stderr).trim().to_string();
            return Err(CliError::Usage(why.strip_prefix("karat: ").unwrap_or(&why).to_string()));
        }
        let run: Run = serde_json::from_slice(&output.stdout)
            .map_err(|error| CliError::Usage(format!("{subject} reported no run: {error}")))?;
        runs.push(run);
    }
    Ok(Report {
        schema: SCHEMA,
        kernel: Kernel::chosen().map_err(BenchError::from)?.name(),
        threads: 1,
        machine: watch.end(),
        probes: None,
        figures: vec![],
        package: Some(package.to_string()),
        runs,
    })
}

fn here(args: &Args, package: &str) -> Result<Outcome, CliError> {
    let [subject] = &args.subject[..] else {
        return Err(CliError::Usage("--here runs one subject".into()));
    };
    let arm = arm(subject)?;
    let loaded = load(package, None, &[])?;
    let weight_bytes = match Package::open(package) {
        Ok(opened) => opened
            .files()
            .iter()
            .filter(|(name, _)| !name.ends_with(".json"))
            .filter_map(|(_, path)| Some(std::fs::metadata(path).ok()?.len()))
            .sum(),
        // A seeded model has no file.
        Err(_) => 0,
    };
    let mut random = SplitMix64::new(17);
    let ids: Vec<u32> =
        (0..args.prompt.max(1)).map(|_| random.below(loaded.config.vocab_size()) as u32).collect();
    check_length(&ids, &loaded.config, args.tokens.max(args.far.map_or(0, |far| far + 2)), &loaded.name)?;
    let run = run_package(&loaded, arm, &ids, args.tokens.max(1), args.pairs, args.far, weight_bytes)?;
    Ok(Outcome { report: serde_json::to_string(&run).expect("names and numbers") + "\n", code: 0 })
}

fn text(report: &Report) -> String {
    let mut text = String::new();
    let m = &report.machine;
    let processor = m.processor.as_deref().unwrap_or("unknown processor");
    let _ = writeln!(text, "{processor}, {} processors · kernel {}", m.processors, report.kernel);
    if let Some(p) = &report.probes {
        let _ = writeln!(
            text,
            "one thread · read {:.1} GB/s · f32 multiply-add {:.0} GFLOP/s · int8 dot {:.0} GOP/s\n",
            p.read_gb_s, p.fma_gflop_s, p.dot_gop_s
        );
    }
    for f in &report.figures {
        let verdict = match f.verdict {
            Verdict::Stretch => "stretch",
            Verdict::Met => "met",
            Verdict::NotMeasured => "not measured",
            Verdict::Missed => "MISSED",
        };
        let ratio = f.ratio.map_or(String::new(), |r| {
            format!("{:.2} ({:.2} to {:.2}, {} pairs) ", r.median, r.min, r.max, f.pairs)
        });
        let stretch = f.stretch.map_or(String::new(), |stretch: Goal| format!(", stretch {stretch}"));
        let _ = writeln!(text, "{:9} {ratio}{verdict}; goal {}{stretch}", f.id, f.goal);
        let _ = writeln!(text, "          {}", f.what);
        for line in f.rates.iter().chain(&f.reason) {
            let _ = writeln!(text, "          {line}");
        }
    }
    for run in &report.runs {
        package_text(&mut text, report.package.as_deref().unwrap_or_default(), run);
    }
    machine_text(&mut text, m);
    text
}

fn package_text(text: &mut String, package: &str, run: &Run) {
    let _ =
        writeln!(text, "{package} · {} · prompt of {} tokens, {} steps", run.subject, run.prompt, run.steps);
    for speed in &run.speeds {
        let plural = if speed.threads == 1 { "" } else { "s" };
        let _ = writeln!(
            text,
            "  {} thread{plural:1} prefill {:9.2} tok/s   decode {:8.2} tok/s",
            speed.threads, speed.prefill_tok_s, speed.decode_tok_s
        );
    }
    if let Some([prefill, decode]) = run.thread_gain {
        let _ = writeln!(text, "  all threads over one: prefill {prefill:.2}, decode {decode:.2}");
    }
    if let Some(far) = &run.far {
        let [[near, far_step], [attention, far_attention]] = [far.step_ms, far.attention_ms];
        let [at, far_at] = far.positions;
        let _ = writeln!(
            text,
            "  step at position {at}: {near:.2} ms, {attention:.2} of them attention; at {far_at}: {far_step:.2} ms, \
             {far_attention:.2} of them attention; not explained by it {:+.1} % of the near step",
            100.0 * far.unexplained
        );
    }
    let mb = |bytes: u64| bytes as f64 / 1e6;
    if let (Some(peak), Some(private), Some(ratio)) = (run.peak_bytes, run.private_bytes, run.memory_ratio())
    {
        let _ = writeln!(
            text,
            "  memory {:.1} MB at most with mapped files, {:.1} MB without; {ratio:.2} x weights {:.1} MB + state {:.1} MB",
            mb(peak),
            mb(private),
            mb(run.weight_bytes),
            mb(run.state_bytes)
        );
    }
}

fn machine_text(text: &mut String, m: &Machine) {
    if let Some([before, after]) = m.load {
        let busy =
            m.others_busy.map_or(String::new(), |busy| format!(", others kept {busy:.2} processors busy"));
        let _ = writeln!(text, "machine load {before:.1} before, {after:.1} after{busy}");
    }
    if !m.quiet {
        let _ = writeln!(text, "warning: the machine was not quiet; repeat before quoting a figure");
    }
}
