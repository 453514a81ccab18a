//! Drafts on the NPU path: right at every site on every engine, for every family of targets, and the same
//! however their context comes.

mod noise;

use conformance::contract::Contract;
use conformance::draft::judge::{Judged, Runner, judge};
use conformance::draft::{Pair, passes};
use conformance::follow::View;
use conformance::judge::Verdict;
use device::{Engine, Fault, Lent, Npu, NpuDraft, Switches};
use fixtures::Package;
use fixtures::random::SplitMix64;
use noise::Noise;
use reference::Model;
use spec::{Config, Site, Weights};
use std::sync::Arc;

const TEXT: [u32; 20] = [5, 11, 3, 90, 41, 7, 66, 12, 29, 8, 77, 54, 2, 19, 33, 60, 21, 9, 45, 81];

/// A seeded draft over a bundled target, and the target's weights.
fn pair(name: &str, version: u8, block: usize) -> (Pair, Weights) {
    let package = Package::open(name).unwrap();
    let config = Config::parse(package.config(), &[]).unwrap().config;
    let weights = Weights::load(&config, package.tensors()).unwrap();
    let (layers, hidden, vocab) = (config.num_hidden_layers(), config.hidden_size(), config.vocab_size());
    let draft = Noise { hidden, vocab, taps: 3.min(layers), version }.draft(layers, block);
    let model = Model::new(config.clone(), weights.clone());
    (Pair::new(config, model, draft).unwrap(), weights)
}

fn judged(pair: &Pair, engine: Engine, fault: Option<Arc<dyn Fault>>) -> Judged {
    let contract = Contract::named(engine.name()).unwrap();
    let runner = Runner::Npu(engine, fault);
    judge(pair, (&TEXT, &[6, 7, 11, 12, 17]), runner, &contract, View::Own, false, &|_| true).unwrap()
}

fn failed(judged: &Judged) -> Vec<&str> {
    let failed = judged.sites.iter().filter(|site| site.verdict == Verdict::Failed);
    failed.map(|site| site.site.as_str()).collect()
}

#[test]
fn every_site_on_every_engine() {
    for version in [1, 2] {
        let (pair, _) = pair("qwen3", version, 5);
        for engine in Engine::ALL {
            let judged = judged(&pair, engine, None);
            assert_eq!(failed(&judged), Vec::<&str>::new(), "version {version}, {engine}");
            let has = |site: &str| judged.sites.iter().any(|s| s.site == site);
            for site in ["ctx_fc", "layers.1.k_rope", "layers.0.mlp_gate", "final_norm", "proposals"] {
                assert!(has(&format!("pass4.{site}")), "{site}");
            }
            for site in ["layers.0.attn_conv_kernel", "layers.1.mlp_conv_out", "path_scores"] {
                assert_eq!(has(&format!("pass2.{site}")), version == 2, "{site}");
            }
        }
    }
}

/// A value of the host side, off by a thousandth at one site.
struct Off(&'static str);

impl Fault for Off {
    fn host(&self, site: Site, _: usize, _: usize, values: &mut [f32]) {
        if site.to_string() == self.0 {
            values.iter_mut().for_each(|v| *v += 0.001);
        }
    }
}

/// The weights of one image row, stored one row further: what a fused image with a wrong offset gives.
struct Shifted(device::Role);

impl Fault for Shifted {
    fn pack(&self, key: device::Key, o: usize, weights: &mut [f32]) {
        if key.role == self.0 && key.layer != Some(0) && o % 2 == 1 {
            weights.rotate_left(1);
        }
    }
}

#[test]
fn what_is_wrong_is_named() {
    let (pair, _) = pair("qwen3", 2, 5);
    for site in ["ctx", "layers.1.attn_conv_in", "layers.0.k_rope", "layers.1.attn_ctx", "final_norm"] {
        let judged = judged(&pair, Engine::Int8, Some(Arc::new(Off(site))));
        assert_eq!(failed(&judged).first(), Some(&&*format!("pass0.{site}")));
    }
    for (role, site) in [
        (device::Role::Fuse, "ctx_fc"),
        (device::Role::Qkv, "layers.1.q_proj"),
        (device::Role::AttentionConv, "layers.1.attn_conv_kernel"),
        (device::Role::GateUp, "layers.1.mlp_gate"),
        (device::Role::Selector, "selector_hidden"),
    ] {
        let judged = judged(&pair, Engine::F32, Some(Arc::new(Shifted(role))));
        let failed = failed(&judged);
        assert!(failed.contains(&&*format!("pass0.{site}")), "{site}: {failed:?}");
        assert!(failed.contains(&&*format!("image.{site}")), "{site}: {failed:?}");
    }
}

/// The loop on the device gives the device's own greedy text for targets of every family.
#[test]
fn the_loop_keeps_every_target_s_own_text() {
    let mut seen = 0;
    for name in fixtures::bundled() {
        let Ok(package) = Package::open(&name) else { continue };
        if package.has_draft() || name == "gemma3n" {
            continue;
        }
        let (pair, weights) = pair(&name, 1 + seen % 2, 4);
        let engine = [Engine::Int8, Engine::F32][usize::from(seen % 2)];
        let contract = Contract::named(engine.name()).unwrap();
        let walked = passes::judge(&pair, &weights, engine, None, &contract, &TEXT[..7], 9).unwrap();
        assert!(walked.greedy_text && walked.verdict <= Verdict::NearTie, "{name}: {}", walked.summary());
        assert_eq!(walked.emitted, 8, "{name}");
        seen += 1;
    }
    assert!(seen > 15, "{seen} targets");
}

/// A device whose single rows are other bits than its batches leaves its own greedy text.
struct RowsDiffer;

impl Fault for RowsDiffer {
    fn launched(&self, key: device::Key, _: usize, out: usize, y: &mut [f32]) {
        if key.role == device::Role::Head && y.len() > out {
            y.chunks_exact_mut(out).skip(1).for_each(|row| row.rotate_left(1));
        }
    }
}

#[test]
fn a_loop_that_leaves_its_own_text_fails() {
    let (pair, weights) = pair("qwen3", 1, 4);
    let contract = Contract::named("f32").unwrap();
    let fault: Arc<dyn Fault> = Arc::new(RowsDiffer);
    let walk = |pair: &Pair| {
        passes::judge(pair, &weights, Engine::F32, Some(fault.clone()), &contract, &TEXT[..7], 9).unwrap()
    };
    // Behind the prompt of seven rows the first token is wrong already, and so is every verified row but the first.
    let walked = walk(&pair);
    assert_eq!(walked.verdict, Verdict::Failed, "{}", walked.summary());
}

fn lent(name: &str) -> (Npu, Lent) {
    let package = Package::open(name).unwrap();
    let config = Config::parse(package.config(), &[]).unwrap().config;
    let weights = Weights::load(&config, package.tensors()).unwrap();
    let npu = Npu::init(&config, &weights, Engine::Int8, Switches::default()).unwrap();
    let lent = npu.lent(1.0);
    (npu, lent)
}

/// Context rows one by one, in threes, or all at once; on images that stay or are packed anew: the same bits.
/// A window over the context sees no further; another request leaves nothing behind.
#[test]
fn portions_of_context_give_the_same_bits() {
    let (pair, _) = pair("qwen3", 2, 5);
    let (_, lent) = lent("qwen3");
    let width = 3 * pair.config.hidden_size();
    let mut random = SplitMix64::new(3);
    let rows: Vec<f32> = (0..12 * width).map(|_| random.normal() as f32).collect();
    let new = |switches: &str| {
        let (config, weights) = (&pair.draft.config, &pair.draft.weights);
        let switches = Switches::parse(switches).unwrap();
        NpuDraft::init(config, weights, lent.clone(), Engine::Int8, switches).unwrap()
    };
    let whole = new("").pass(&rows, 9, 4, None).unwrap();
    for (portion, switches) in [(1, ""), (3, "cache=off"), (3, "reload=all"), (5, "poison=on")] {
        let mut draft = new(switches);
        let mut last = None;
        for some in rows.chunks(portion * width) {
            last = Some(draft.pass(some, 9, 4, None).unwrap());
        }
        assert_eq!(last.as_ref(), Some(&whole), "portions of {portion}, {switches}");
        assert_eq!(draft.position(), 12);
        assert_eq!(
            draft.counters().total().dequantised_bytes == 0,
            switches != "cache=off" && switches != "reload=all"
        );
        draft.reset();
        assert_ne!(draft.pass(&rows[width..], 9, 4, None).unwrap(), whole);
        draft.reset();
        assert_eq!(draft.pass(&rows, 9, 4, None).unwrap(), whole);
    }
    let mut windowed = new("");
    windowed.set_window(Some(2));
    let cut = windowed.pass(&rows, 9, 4, None).unwrap();
    assert_ne!(cut, whole);
    let error = new("").pass(&rows[1..], 9, 4, None).unwrap_err();
    assert!(error.to_string().starts_with("a tapped row has"), "{error}");
}

// Once all is resident, a pass costs one launch for each image: fc, four a layer and two kernel projections,
// head and selector.
#[test]
fn a_pass_streams_every_image_once() {
    let (pair, _) = pair("qwen3", 2, 5);
    let (_, lent) = lent("qwen3");
    let (config, weights) = (&pair.draft.config, &pair.draft.weights);
    let mut draft = NpuDraft::init(config, weights, lent, Engine::Int8, Switches::default()).unwrap();
    let row = vec![0.5; 3 * pair.config.hidden_size()];
    draft.pass(&row, 9, 4, None).unwrap();
    draft.pass(&row, 9, 4, None).unwrap();
    let cost = draft.counters().total();
    assert_eq!(cost.launches, 1 + 2 * (4 + 2) + 2);
    assert_eq!((cost.dequantised_bytes, cost.packed_bytes), (0, 0));
    assert_eq!(draft.designs().len() as u64, cost.launches);
}
