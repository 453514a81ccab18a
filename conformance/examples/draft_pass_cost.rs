//! What a pass of the speculative loop costs behind prompts of different lengths:
//!
//! ```text
//! cargo run --release -p karat --example draft_pass_cost
//! ```
//!
//! One pass is one draft block and one target pass over it, whatever stands before: products do not grow with the
//! prompt, attention does. For the reference and for the NPU path it prints the best time of a pass against that behind
//! the shortest prompt, how far the multiply-adds of attention alone explain it, and what computing the whole
//! prompt again for every pass would cost.

use conformance::draft::{Host, HostError, NpuHost, Pair, Speculate};
use device::Engine;
use fixtures::Package;
use reference::Model;
use reference::models::Draft;
use spec::families::draft::{DraftConfig, DraftWeights};
use spec::{Config, Weights};
use std::time::Instant;

const PROMPTS: [usize; 5] = [64, 128, 256, 512, 1024];

type Fallible<T> = Result<T, Box<dyn std::error::Error>>;

fn main() -> Fallible<()> {
    let (target, draft) = Package::pair("dflash")?;
    // The bundled pair is made for 128 positions; nothing in it depends on how many there are.
    let mut longer = target.config().clone();
    longer.insert("max_position_embeddings".into(), 4096.into());
    let config = Config::parse(&longer, &[])?.config;
    let weights = Weights::load(&config, target.tensors())?;
    let (draft_config, _) = DraftConfig::parse(draft.config(), &[])?;
    let draft_weights = DraftWeights::load(&draft_config, draft.tensors())?;
    let draft = Draft { config: draft_config, weights: draft_weights };
    let pair = Pair::new(config.clone(), Model::new(config, weights.clone()), draft)?;

    println!(
        "multiply-adds of a pass: products {}, attention {} a position",
        products(&pair, &weights),
        keys(&pair)
    );
    report("reference", &pair, &weights, || Ok(Host::new(&pair)))?;
    report("npu:f32", &pair, &weights, || NpuHost::new(&pair, &weights, Engine::F32, None))?;
    report("npu:int8", &pair, &weights, || NpuHost::new(&pair, &weights, Engine::Int8, None))
}

/// Multiply-adds of all products that a pass runs over a block: every matrix once a row.
fn products(pair: &Pair, weights: &Weights) -> usize {
    let mut weights = weights.clone();
    let target: usize = weights.matrices().iter().map(|m| m.out() * m.inner()).sum();
    let c = &pair.draft.config;
    let layer = (2 * c.q_width() + 2 * c.kv_width() + 3 * c.intermediate_size) * c.hidden_size;
    let fuse = c.target_layer_ids.len() * c.hidden_size * c.hidden_size;
    c.block_size * (target + pair.draft.weights.layers.len() * layer + fuse)
}

/// Multiply-adds of attention that one more position costs a pass: scores and context, for every row and layer.
fn keys(pair: &Pair) -> usize {
    let Config::Decoder(target) = &pair.config else { return 0 };
    let c = &pair.draft.config;
    let width = target.num_attention_heads * target.head_dim;
    2 * c.block_size
        * (pair.config.num_hidden_layers() * width + pair.draft.weights.layers.len() * c.q_width())
}

fn report<S: Speculate<Error = HostError>>(
    name: &str,
    pair: &Pair,
    weights: &Weights,
    fresh: impl Fn() -> Result<S, HostError>,
) -> Fallible<()> {
    let block = pair.draft.config.block_size;
    let (products, a_key) = (products(pair, weights) as f64, keys(pair) as f64);
    let mut first = None;
    println!("{name}");
    for length in PROMPTS {
        let prompt: Vec<u32> = (0..length as u32).map(|n| (n * 37 + 11) % 96).collect();
        let mut host = fresh()?;
        let started = Instant::now();
        host.prefill(&prompt)?;
        let whole = started.elapsed().as_secs_f64();
        let mut times = Vec::new();
        for n in 0..21 {
            let started = Instant::now();
            let proposals = host.propose(n % 96, block - 1)?;
            host.verify(&[&[n % 96], &proposals.ids[..]].concat())?;
            host.commit(block)?;
            times.push(started.elapsed().as_secs_f64());
        }
        // The best of them: what other programs take away is not the pass's.
        let (pass, work) =
            (times.iter().copied().fold(f64::INFINITY, f64::min), products + a_key * length as f64);
        let (least, least_work) = *first.get_or_insert((pass, work));
        println!(
            "  {length:5} tokens: {:8.3} ms a pass, {:5.2} times the first; multiply-adds {:5.2} times; the prompt again {:8.1} ms",
            pass * 1e3,
            pass / least,
            work / least_work,
            whole * 1e3
        );
    }
    Ok(())
}
