//! `karat ab`.

use super::load::{load, prompts, seeded_prompt};
use super::{CliError, Format, Outcome};
use crate::ab::{Arm, Comparison, compare};
use crate::subject::SubjectSpec;
use device::{Engine, Switches};
use serde_json::json;
use std::fmt::Write;
use std::path::PathBuf;

/// Arguments of `ab`.
#[derive(clap::Args)]
pub struct Args {
    /// A path or a bundled name.
    package: String,
    /// An arm: NAME=SWITCHES, for instance old=reload=all or new= ; two of them.
    #[arg(long = "arm", value_name = "NAME=SWITCHES", required = true)]
    arms: Vec<String>,
    /// In which order they run, as letters.
    #[arg(long, value_name = "ORDER", default_value = "ABBA")]
    order: String,
    /// The engine.
    #[arg(long, value_name = "SPEC", default_value = "npu")]
    subject: String,
    /// Prompts as token ids, one a line.
    #[arg(long, value_name = "FILE")]
    prompt_ids: Option<PathBuf>,
    /// Greedy steps behind each prompt.
    #[arg(long, value_name = "N", default_value_t = 8)]
    tokens: usize,
}

/// Runs the verb: 0 where all bytes are equal, 1 where they are not.
pub fn run(args: &Args, format: Format) -> Result<Outcome, CliError> {
    let engine = match args.subject.parse()? {
        SubjectSpec::Npu(engine, switches) if switches == Switches::default() => engine,
        _ => {
            return Err(CliError::Usage(format!(
                "{} cannot be compared; ab runs the NPU path, and its arms give the switches",
                args.subject
            )));
        }
    };
    let arms = args.arms.iter().map(|text| arm(text)).collect::<Result<Vec<_>, _>>()?;
    if arms.len() != 2 || arms[0].0.name == arms[1].0.name {
        return Err(CliError::Usage(
            "ab compares two arms of different names: --arm A=... --arm B=...".into(),
        ));
    }
    let letters_fit = args.order.bytes().all(|letter| matches!(letter, b'A' | b'B'));
    if !letters_fit || !args.order.contains('A') || !args.order.contains('B') {
        return Err(CliError::Usage(format!(
            "order {} names arms by A and B, both at least once",
            args.order
        )));
    }
    let loaded = load(&args.package, None, &[])?;
    let prompts = match (&args.prompt_ids, &loaded.golden) {
        (Some(file), _) => prompts(file, &loaded.config, args.tokens)?,
        (None, Some(golden)) => vec![golden.manifest().prompt.clone()],
        (None, None) => vec![seeded_prompt(&loaded.config)],
    };
    let steps = args.tokens.max(2);
    let result = compare(&loaded.config, &loaded.weights, engine, &arms, &args.order, &prompts, steps)
        .map_err(|error| CliError::Usage(format!("{}: {error}", loaded.name)))?;
    let same = result.byte_identical.0 == result.byte_identical.1 && result.tokens_equal;
    let report = match format {
        Format::Json => {
            let mut value = serde_json::to_value(&result).expect("names and numbers");
            value["schema"] = json!("karat/ab/1");
            value["package"] = json!(loaded.name);
            value["engine"] = json!(engine.name());
            serde_json::to_string_pretty(&value).expect("names and numbers") + "\n"
        }
        _ => text(&loaded.name, engine, &result),
    };
    Ok(Outcome { report, code: u8::from(!same) })
}

fn arm(text: &str) -> Result<(Arm, Switches), CliError> {
    let (name, switches) = text.split_once('=').ok_or_else(|| {
        CliError::Usage(format!("arm {text}: expected NAME=SWITCHES, for instance old=reload=all"))
    })?;
    let parsed =
        Switches::parse(switches).map_err(|error| CliError::Usage(format!("arm {name}: {error}")))?;
    Ok((Arm { name: name.to_string(), switches: switches.to_string() }, parsed))
}

fn text(package: &str, engine: Engine, c: &Comparison) -> String {
    let (same, all) = c.byte_identical;
    let tokens = if c.tokens_equal { "tokens equal" } else { "TOKENS DIFFER" };
    let mut text = format!("{package} · npu:{engine} · logits byte-identical {same} of {all} · {tokens}\n");
    let _ = writeln!(
        text,
        "  arm             prefill ms/token  decode ms/step   decoded B/token  streamed B/token  launches"
    );
    for run in &c.runs {
        let _ = writeln!(
            text,
            "  {:15} {:16.3} {:15.3} {:17} {:17} {:9}",
            run.arm,
            run.prefill_ms,
            run.decode_ms,
            run.dequantised_bytes_per_token,
            run.streamed_bytes_per_token,
            run.launches_per_token
        );
    }
    let claim = if c.separated { "the arms separate" } else { "the arms overlap: no claim about time" };
    let _ = writeln!(text, "  decode B over A {:.3}; {claim}", c.decode_ratio);
    if let Some((before, after)) = c.load {
        let _ = writeln!(text, "  machine load {before:.1} before, {after:.1} after");
    }
    text
}
