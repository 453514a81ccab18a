//! `karat draft`.

use super::load::{load, load_draft, prompts};
use super::{CliError, Format, Outcome};
use crate::draft::{
    Greedy, Host, HostError, Limits, Mode, Pair, Report, Scored, Tally, every_position, json, markdown, text,
    walk,
};
use clap::ValueEnum;
use indicatif::{ProgressBar, ProgressStyle};
use reference::models::LastTap;
use std::path::PathBuf;
use std::time::Duration;

/// Arguments of `draft`.
#[derive(clap::Args)]
pub struct Args {
    /// The target: a path or a bundled name.
    #[arg(long, value_name = "DIR")]
    target: String,
    /// The draft: its folder, or the name or folder of a pair.
    #[arg(long, value_name = "DIR")]
    draft: String,
    /// Prompts as token ids, one a line.
    #[arg(long, value_name = "FILE")]
    prompt_ids: PathBuf,
    /// Tokens to generate behind each prompt.
    #[arg(long, value_name = "N", default_value_t = 32)]
    tokens: usize,
    /// Let the draft see only the last W context rows; 0 shows it all.
    #[arg(long, value_name = "W", default_value_t = 0)]
    window: usize,
    /// Score a block after every position instead of walking as a speculative loop does.
    #[arg(long)]
    all_positions: bool,
    /// What raw rows of the target's table are multiplied by for the draft.
    #[arg(long, value_name = "X")]
    embedding_scale: Option<f32>,
    /// What stands for the output of the target's last layer, where it is tapped.
    #[arg(long, value_enum, default_value = "raw")]
    last_tap: LastTapArg,
    /// Pass over this unknown config key, of target or draft.
    #[arg(long, value_name = "KEY")]
    allow_unknown: Vec<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum LastTapArg {
    /// The residual stream as it leaves the layer.
    Raw,
    /// The stream after the model's final norm, as hidden states in transformers have it.
    Normed,
}

/// Runs the verb.
pub fn run(args: &Args, format: Format) -> Result<Outcome, CliError> {
    let render = match format {
        Format::Text => text,
        Format::Json => json,
        Format::Md => markdown,
        _ => return Err(CliError::Usage("draft reports as text, json or md".into())),
    };
    if args.tokens < 2 {
        return Err(CliError::Usage(format!(
            "--tokens {} leaves nothing to propose; expected at least 2, as the first token is the target's alone",
            args.tokens
        )));
    }
    if args.embedding_scale.is_some_and(|scale| !scale.is_finite()) {
        return Err(CliError::Usage("--embedding-scale is no finite number".into()));
    }
    let target = load(&args.target, None, &args.allow_unknown)?;
    let (draft_name, draft) = load_draft(&args.draft, &args.allow_unknown)?;
    let prompts = prompts(&args.prompt_ids, &target.config, args.tokens)?;
    let pair = Pair::new(target.config.clone(), target.model, draft);
    let mut pair =
        pair.map_err(|error| CliError::Usage(format!("{} and {draft_name}: {error}", target.name)))?;
    pair.window = (args.window > 0).then_some(args.window);
    pair.scale = args.embedding_scale;
    pair.last_tap = match args.last_tap {
        LastTapArg::Raw => LastTap::Raw,
        LastTapArg::Normed => LastTap::Normed,
    };
    let mode = if args.all_positions { Mode::AllPositions } else { Mode::Walk };
    let report = score(&pair, &prompts, args.tokens, mode, target.name, draft_name)?;
    let code = if report.total.passes == 0 { 3 } else { 0 };
    Ok(Outcome { report: render(&report), code })
}

fn score(
    pair: &Pair,
    prompts: &[Vec<u32>],
    tokens: usize,
    mode: Mode,
    target: String,
    draft: String,
) -> Result<Report, CliError> {
    let block = pair.draft.config.block_size;
    let limits = Limits { tokens, block, stops: &[] };
    let bar = progress(prompts.len());
    let (mut scored, mut total) = (Vec::new(), Tally::default());
    let (mut scale, mut host) = (pair.embedding_scale(1.0), (Duration::ZERO, Duration::ZERO));
    let stopped = |error: HostError| CliError::Usage(format!("{target}: {error}"));
    for (n, prompt) in prompts.iter().enumerate() {
        bar.set_message(format!("prompt {}", n + 1));
        let mut run = Host::new(pair);
        let result = match mode {
            Mode::Walk => walk(&mut run, &mut Greedy, prompt, limits),
            Mode::AllPositions => every_position(&mut run, prompt, limits),
        };
        let result = result.map_err(stopped)?;
        let tally = Tally::of(&result.passes, block, result.tokens.len());
        total.add(&tally);
        scored.push(Scored { tokens: result.tokens, tally });
        scale = run.scale().unwrap_or(scale);
        (host.0, host.1) = (host.0 + run.seconds.target, host.1 + run.seconds.draft);
        bar.inc(1);
    }
    bar.finish_and_clear();
    let last_tap = pair.taps_the_last_layer().then_some(match pair.last_tap {
        LastTap::Raw => "raw",
        LastTap::Normed => "normed",
    });
    let window = pair.window;
    Ok(Report { target, draft, mode, block, window, scale, last_tap, prompts: scored, total, host })
}

/// A bar on a terminal, nothing elsewhere.
fn progress(length: usize) -> ProgressBar {
    let style = ProgressStyle::with_template("{bar:30} {pos}/{len} {msg}");
    ProgressBar::new(length as u64).with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()))
}
