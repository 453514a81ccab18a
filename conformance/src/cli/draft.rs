//! `karat draft`.

use super::load::{load, load_draft, prompts};
use super::{CliError, Format, Outcome};
use crate::draft::{
    Filter, Greedy, Host, HostError, Kind, Limits, Mode, MtpHost, Pair, Rejection, Report, Sampling, Scored,
    Seconds, Speculate, Tally, Walk, every_position, json, markdown, text, walk,
};
use crate::verify::Loaded;
use clap::ValueEnum;
use fixtures::random::SplitMix64;
use indicatif::{ProgressBar, ProgressStyle};
use reference::Model;
use reference::models::LastTap;
use spec::Config;
use std::path::PathBuf;

/// Arguments of `draft`.
#[derive(clap::Args)]
pub struct Args {
    /// The target: a path or a bundled name.
    #[arg(long, value_name = "DIR")]
    target: String,
    /// The draft: its folder, the name or folder of a pair, or mtp[:N] for N proposals of the target's own
    /// multi-token-prediction head.
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
    /// Draw at this temperature, by rejection sampling, instead of taking the largest logit; 0 is greedy.
    #[arg(long, value_name = "T", default_value_t = 0.0)]
    temperature: f64,
    /// Where the random numbers of --temperature begin.
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
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
    let mode = if args.all_positions { Mode::AllPositions } else { Mode::Walk };
    let sampling = sampling(args, mode)?;
    let target = load(&args.target, None, &args.allow_unknown)?;
    let run = Run { tokens: args.tokens, mode, sampling };
    let report = match head(&args.draft)? {
        Some(proposals) => {
            block_options_are_off(args)?;
            let prompts = prompts(&args.prompt_ids, &target.config, args.tokens)?;
            let at_fault = |error| CliError::Usage(format!("{}: {error}", target.name));
            MtpHost::new(&target.config, &target.model).map_err(at_fault)?;
            run.head(&target, proposals, &prompts)?
        }
        None => {
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
            run.pair(&pair, &prompts, target.name, draft_name)?
        }
    };
    let code = if report.total.passes == 0 { 3 } else { 0 };
    Ok(Outcome { report: render(&report), code })
}

/// How many proposals of the target's own head `--draft` asks for; nothing where it names a draft.
fn head(draft: &str) -> Result<Option<usize>, CliError> {
    let Some(rest) = draft.strip_prefix("mtp") else { return Ok(None) };
    match rest.strip_prefix(':') {
        None if rest.is_empty() => Ok(Some(1)),
        None => Ok(None),
        Some(n) => match n.parse() {
            Ok(n @ 1..=64) => Ok(Some(n)),
            _ => Err(CliError::Usage(format!("--draft {draft}: expected mtp:N with 1 to 64 proposals"))),
        },
    }
}

/// How the text is drawn; nothing at temperature 0.
fn sampling(args: &Args, mode: Mode) -> Result<Option<Sampling>, CliError> {
    let (temperature, seed) = (args.temperature, args.seed);
    if !temperature.is_finite() || temperature < 0.0 {
        return Err(CliError::Usage(format!("--temperature {temperature}: expected 0 or a positive number")));
    }
    if temperature > 0.0 && mode == Mode::AllPositions {
        return Err(CliError::Usage(
            "--all-positions compares with the target's greedy text; leave out --temperature".into(),
        ));
    }
    Ok((temperature > 0.0).then_some(Sampling { temperature, seed }))
}

/// Refuses what only a block draft has.
fn block_options_are_off(args: &Args) -> Result<(), CliError> {
    let given = [
        ("--window", args.window > 0),
        ("--embedding-scale", args.embedding_scale.is_some()),
        ("--last-tap", args.last_tap != LastTapArg::Raw),
    ];
    match given.iter().find(|(_, given)| *given) {
        Some((option, _)) => Err(CliError::Usage(format!(
            "{option} is for block drafts; a prediction head reads the target's hidden states as they are"
        ))),
        None => Ok(()),
    }
}

/// What is done with every prompt.
struct Run {
    tokens: usize,
    mode: Mode,
    sampling: Option<Sampling>,
}

/// The sums of a run.
struct Scores {
    prompts: Vec<Scored>,
    total: Tally,
    seconds: Seconds,
}

impl Run {
    /// Scores a block draft.
    fn pair(
        &self,
        pair: &Pair,
        prompts: &[Vec<u32>],
        target: String,
        draft: String,
    ) -> Result<Report, CliError> {
        let block = pair.draft.config.block_size;
        let mut scale = pair.embedding_scale(1.0);
        let scores = self.score(prompts, block, &target, |prompt, draws| {
            let mut host = Host::new(pair);
            if let Some((temperature, uniform)) = draws.proposing() {
                host = host.drawing(temperature, uniform);
            }
            let walked = self.walk(&mut host, prompt, block, draws)?;
            scale = host.scale().unwrap_or(scale);
            Ok((walked, host.seconds))
        })?;
        let last_tap = pair.taps_the_last_layer().then_some(match pair.last_tap {
            LastTap::Raw => "raw",
            LastTap::Normed => "normed",
        });
        let mut report = self.report(Kind::Block(scale), block, target, draft, scores);
        (report.window, report.last_tap) = (pair.window, last_tap);
        Ok(report)
    }

    /// Scores the target's own prediction head.
    fn head(&self, target: &Loaded, proposals: usize, prompts: &[Vec<u32>]) -> Result<Report, CliError> {
        let (block, config, model): (_, &Config, &Model) = (proposals + 1, &target.config, &target.model);
        let scores = self.score(prompts, block, &target.name, |prompt, draws| {
            let mut host = MtpHost::new(config, model).expect("it was made before");
            if let Some((temperature, uniform)) = draws.proposing() {
                host = host.drawing(temperature, uniform);
            }
            let walked = self.walk(&mut host, prompt, block, draws)?;
            Ok((walked, host.seconds))
        })?;
        let draft = format!("mtp:{proposals}");
        Ok(self.report(Kind::Mtp, block, target.name.clone(), draft, scores))
    }

    fn score(
        &self,
        prompts: &[Vec<u32>],
        block: usize,
        target: &str,
        mut one: impl FnMut(&[u32], Draws) -> Result<(Walk, Seconds), HostError>,
    ) -> Result<Scores, CliError> {
        let bar = progress(prompts.len());
        let (mut scored, mut total, mut seconds) = (Vec::new(), Tally::default(), Seconds::default());
        for (n, prompt) in prompts.iter().enumerate() {
            bar.set_message(format!("prompt {}", n + 1));
            let (walked, spent) = one(prompt, Draws::new(self.sampling, n))
                .map_err(|error| CliError::Usage(format!("{target}: {error}")))?;
            let tally = Tally::of(&walked.passes, block, walked.tokens.len());
            total.add(&tally);
            scored.push(Scored { tokens: walked.tokens, tally });
            seconds.target += spent.target;
            seconds.draft += spent.draft;
            bar.inc(1);
        }
        bar.finish_and_clear();
        Ok(Scores { prompts: scored, total, seconds })
    }

    fn walk<S: Speculate>(
        &self,
        host: &mut S,
        prompt: &[u32],
        block: usize,
        draws: Draws,
    ) -> Result<Walk, S::Error> {
        let limits = Limits { tokens: self.tokens, block, stops: &[] };
        match (self.mode, draws.verifying()) {
            (Mode::AllPositions, _) => every_position(host, prompt, limits),
            (Mode::Walk, None) => walk(host, &mut Greedy, prompt, limits),
            (Mode::Walk, Some((temperature, uniform))) => {
                let filter = Filter { temperature, top_k: 0, top_p: 1.0 };
                walk(host, &mut Rejection { filter, uniform }, prompt, limits)
            }
        }
    }

    fn report(&self, kind: Kind, block: usize, target: String, draft: String, scores: Scores) -> Report {
        Report {
            target,
            draft,
            mode: self.mode,
            block,
            window: None,
            kind,
            sampling: self.sampling,
            last_tap: None,
            prompts: scores.prompts,
            total: scores.total,
            host: (scores.seconds.target, scores.seconds.draft),
        }
    }
}

/// The random numbers of one prompt: proposals and verdicts have a generator each, as no number may decide
/// about a proposal that it has drawn.
#[derive(Clone, Copy)]
struct Draws(Option<(f64, u64, u64)>);

impl Draws {
    fn new(sampling: Option<Sampling>, prompt: usize) -> Draws {
        Draws(sampling.map(|s| {
            let mut seeds = SplitMix64::new(s.seed.wrapping_add(prompt as u64));
            (s.temperature, seeds.next(), seeds.next())
        }))
    }

    fn proposing(self) -> Option<(f64, impl FnMut() -> f64)> {
        self.0.map(|(temperature, seed, _)| (temperature, uniform(seed)))
    }

    fn verifying(self) -> Option<(f64, impl FnMut() -> f64)> {
        self.0.map(|(temperature, _, seed)| (temperature, uniform(seed)))
    }
}

fn uniform(seed: u64) -> impl FnMut() -> f64 {
    let mut random = SplitMix64::new(seed);
    move || random.uniform()
}

/// A bar on a terminal, nothing elsewhere.
fn progress(length: usize) -> ProgressBar {
    let style = ProgressStyle::with_template("{bar:30} {pos}/{len} {msg}");
    ProgressBar::new(length as u64).with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()))
}
