//! How often does a clean subject fail a run? Limits are made for at most one run in a thousand.
//!
//!     cargo run --release -p karat --example false_alarms -- 10000
//!
//! Every run judges the NPU path on a prompt of 17 seeded ids and two steps, at every site, in one of the
//! engines and on one of the bundled models in turn; a second argument is the number of the first run. A run
//! is a false alarm where a site is FAILED, or less precise than declared. The last column is the rate that is
//! exceeded with a chance of 5 % at most, from the Poisson distribution of so few events.

use conformance::cli::load::load;
use conformance::contract::Contract;
use conformance::judge::FALSE_ALARM;
use conformance::subject::SubjectSpec;
use conformance::verify::{Loaded, Options, verify};
use device::Engine;
use fixtures::random::SplitMix64;
use rayon::prelude::*;
use std::collections::BTreeMap;

/// One model of each kind: dense, windows and caps, delta rule, experts.
const MODELS: [&str; 6] = ["llama", "qwen2", "gemma2", "qwen3_moe", "qwen3_next", "smollm3"];

/// Length of a prompt: past one launch of 16 rows.
const TOKENS: usize = 17;

fn main() {
    let argument = |n: usize| std::env::args().nth(n).and_then(|text| text.parse::<usize>().ok());
    let (runs, first) = (argument(1).unwrap_or(10_000), argument(2).unwrap_or(0));
    let models: Vec<Loaded> =
        MODELS.iter().map(|name| load(name, None, &[]).expect("a bundled package")).collect();
    let kinds: Vec<(Engine, &Loaded)> =
        Engine::ALL.iter().flat_map(|engine| models.iter().map(|model| (*engine, model))).collect();
    let alarms: Vec<(Engine, Option<String>)> = (first..first + runs)
        .into_par_iter()
        .map(|run| {
            let (engine, model) = kinds[run % kinds.len()];
            (engine, alarm(run as u64, engine, model))
        })
        .collect();
    for what in alarms.iter().filter_map(|(_, what)| what.as_ref()) {
        println!("alarm  {what}");
    }
    let mut by_engine: BTreeMap<&str, (usize, usize)> = BTreeMap::new();
    for (engine, what) in &alarms {
        let (all, false_ones) = by_engine.entry(engine.name()).or_default();
        *all += 1;
        *false_ones += usize::from(what.is_some());
    }
    for (engine, (all, false_ones)) in &by_engine {
        println!("{engine:<6} {false_ones} of {all} runs");
    }
    let count = alarms.iter().filter(|(_, what)| what.is_some()).count();
    let rate = count as f64 / runs as f64;
    let most = at_most(count) / runs as f64;
    println!(
        "all    {count} of {runs} runs: {rate:.1e} a run, at most {most:.1e}; made for {FALSE_ALARM:.0e}"
    );
}

/// What a clean run was blamed for.
fn alarm(run: u64, engine: Engine, model: &Loaded) -> Option<String> {
    let mut random = SplitMix64::new(run);
    let vocab = model.config.vocab_size();
    let prompt: Vec<u32> = (0..TOKENS).map(|_| random.below(vocab) as u32).collect();
    let (subject, contract) = (SubjectSpec::Npu(engine, Default::default()), Contract::named(engine.name())?);
    let options = Options { steps: 2, ..Options::new(&subject, &contract) };
    let result = verify(model, &prompt, &options, String::new()).expect("a package that loads");
    let blamed = result
        .sites
        .iter()
        .find(|site| site.verdict == conformance::judge::Verdict::Failed || site.less_precise())?;
    let pattern = blamed.pattern.as_deref().unwrap_or_default();
    Some(format!("{} {engine} run {run}: {} {pattern}", model.name, blamed.site))
}

/// The mean of a Poisson distribution under which `count` events or fewer have a chance of 5 %.
fn at_most(count: usize) -> f64 {
    let chance = |mean: f64| {
        let mut term = (-mean).exp();
        let mut sum = term;
        for n in 1..=count {
            term *= mean / n as f64;
            sum += term;
        }
        sum
    };
    let (mut low, mut high) = (count as f64, 10.0 + 3.0 * count as f64);
    for _ in 0..60 {
        let middle = 0.5 * (low + high);
        if chance(middle) > 0.05 { low = middle } else { high = middle }
    }
    high
}
