//! The reference reproduces the oracle's draft passes at every site: context fusion, every layer, hidden
//! rows, logits, proposals and accept counts. Both drafts and targets run on values of their own.

use conformance::golden_gate::limit;
use conformance::record::Record;
use fixtures::Package;
use golden::Dump;
use reference::models::{Context, Draft, DraftOutput, DraftState, LastTap, Tapped};
use reference::{Model, Tensor};
use serde_json::Value;
use spec::families::draft::{DraftConfig, DraftWeights};
use spec::{Config, Site, Weights};
use std::collections::BTreeMap;

type Taps = BTreeMap<String, Tensor>;

struct Pair {
    target: Model,
    layers: usize,
    draft: Draft,
    dump: Dump,
}

fn pair(name: &str) -> Pair {
    let (target, draft) = Package::pair(name).unwrap();
    let config = Config::parse(target.config(), &[]).unwrap().config;
    let weights = Weights::load(&config, target.tensors()).unwrap();
    let (draft_config, _) = DraftConfig::parse(draft.config(), &[]).unwrap();
    let draft_weights = DraftWeights::load(&draft_config, draft.tensors()).unwrap();
    let dump = Dump::open(target.dir().parent().unwrap()).unwrap();
    for (file, path) in target.files().into_iter().chain(draft.files()) {
        // The oracle names the weights that it ran: `target/model.safetensors`.
        let folder = path.parent().unwrap().file_name().unwrap().to_string_lossy().into_owned();
        if let Some(expected) = dump.expected_files().get(&format!("{folder}/{file}")) {
            assert_eq!(golden::sha256_file(&path).unwrap(), *expected, "{name}: {folder}/{file}");
        }
    }
    Pair {
        layers: config.num_hidden_layers(),
        target: Model::new(config, weights),
        draft: Draft { config: draft_config, weights: draft_weights },
        dump,
    }
}

fn ids(value: &Value) -> Vec<u32> {
    value.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
}

fn number(value: &Value) -> usize {
    value.as_u64().unwrap() as usize
}

/// The whole greedy text of the golden.
fn text(dump: &Dump) -> Vec<u32> {
    [&dump.manifest().prompt[..], &dump.manifest().greedy[..]].concat()
}

fn rows(taps: &[Tensor], from: usize, to: usize) -> Vec<Tensor> {
    use ndarray::{Axis, Slice};
    let cut = |tap: &Tensor| tap.slice_axis(Axis(0), Slice::from(from..to)).to_owned().into_shared();
    taps.iter().map(cut).collect()
}

fn named(pass: &str, values: Vec<(Site, Tensor)>) -> impl Iterator<Item = (String, Tensor)> {
    values.into_iter().map(move |(site, value)| (format!("{pass}.{site}"), value))
}

fn numbers(proposals: &Tensor) -> Vec<u32> {
    proposals.iter().map(|&id| id as u32).collect()
}

/// The oracle's cache of a sliding layer keeps its last rows only: probabilities cover the last keys, and
/// those of the keys that it dropped must be 0.
fn last_keys(reference: &Tensor, shape: &[usize]) -> Tensor {
    use ndarray::{Axis, Slice};
    match (reference.shape(), shape) {
        (&[heads, rows, all], &[h, r, kept]) if (heads, rows) == (h, r) && kept < all => {
            let dropped = reference.slice_axis(Axis(2), Slice::from(..all - kept));
            assert!(dropped.iter().all(|&p| p == 0.0), "probability on a key beyond the window");
            reference.slice_axis(Axis(2), Slice::from(all - kept..)).as_standard_layout().into_owned().into()
        }
        _ => reference.clone(),
    }
}

/// Every tap of the golden within the limits of the design.
fn compare(name: &str, dump: &Dump, taps: &Taps) {
    let mut worst = (0.0, String::new());
    for info in dump.taps() {
        let reference = taps.get(&info.name).unwrap_or_else(|| panic!("{name}: {} has no site", info.name));
        let golden = dump.f32(&info.name).unwrap().unwrap();
        let reference = last_keys(reference, golden.shape);
        assert_eq!(reference.shape(), golden.shape, "{name}: {}", info.name);
        let noise = dump.noise(&info.name).map_or(0.0, |n| n.f64_diff.max(n.f32_diff));
        let golden = golden.to_vec();
        let largest = golden.iter().fold(0f64, |m, &v| m.max(f64::from(v).abs()));
        for (n, (&g, &r)) in golden.iter().zip(reference.iter()).enumerate() {
            let ratio = (f64::from(g) - f64::from(r)).abs() / limit(largest, noise);
            assert!(ratio <= 1.0, "{name}: {} value {n}: golden {g}, reference {r}", info.name);
            if ratio > worst.0 {
                worst = (ratio, info.name.clone());
            }
        }
    }
    println!("{name}: {} taps, worst {worst:?}", dump.taps().len());
}

#[test]
fn every_site_of_both_oracles() {
    for name in ["dflash", "dflash_muse"] {
        let Pair { target, layers, draft, dump } = pair(name);
        let text = text(&dump);
        let mut taps = Taps::new();
        let mut ops = Record::default();
        let mut tapped = Tapped::new(&mut ops, &draft.config.target_layer_ids, layers, LastTap::Raw);
        target.pass(&mut tapped, &mut target.fresh(), &text);
        let context = tapped.taps().unwrap();
        let (borrowed, own_scale) = tapped.borrowed(1.0).unwrap();
        assert_eq!(own_scale, 1.0);
        taps.extend(named("target", ops.take().unwrap()));

        let mut state = draft.fresh();
        let passes = dump.extra()["passes"].as_array().unwrap();
        assert!(passes.len() > 4);
        for (n, pass) in passes.iter().enumerate() {
            let (s, rows_new) = (number(&pass["anchor_pos"]), number(&pass["ctx_rows"]));
            assert_eq!(state.position + rows_new, s, "{name}: pass {n} starts where the last one ended");
            let new = rows(&context, state.position, s);
            let block = Context { taps: &new, rows: rows_new, window: None };
            let b = draft.config.block_size;
            let output = draft.pass(&mut ops, &mut state, &borrowed, block, text[s], b - 1);
            taps.extend(named(&format!("pass{n}"), ops.take().unwrap()));

            let proposed = numbers(&output.proposals);
            assert_eq!(proposed, ids(&pass["proposed"]), "{name}: proposals of pass {n}");
            let target = ids(&pass["target"]);
            assert_eq!(target, text[s + 1..s + b], "{name}: the target's own tokens of pass {n}");
            let accepted = proposed.iter().zip(&target).take_while(|(d, t)| d == t).count();
            assert_eq!(accepted, number(&pass["accepted"]), "{name}: accepted in pass {n}");

            let whole = uncached(&draft, &borrowed, &context, s, text[s], b - 1);
            assert_eq!(whole.hidden, output.hidden, "{name}: pass {n} without a cache, to the bit");
        }
        compare(name, &dump, &taps);
    }
}

/// The same block with the whole context taken in at once.
fn uncached(
    draft: &Draft,
    borrowed: &reference::models::Borrowed,
    context: &[Tensor],
    s: usize,
    anchor: u32,
    n: usize,
) -> DraftOutput<Tensor> {
    let mut state: DraftState<Tensor> = draft.fresh();
    let all = rows(context, 0, s);
    let block = Context { taps: &all, rows: s, window: None };
    draft.pass(&mut reference::Plain::default(), &mut state, borrowed, block, anchor, n)
}

/// A window over the context is the same as a context that starts there: distances are all that counts.
/// A window at least as long as the context is no window.
#[test]
fn a_cut_context_is_a_shorter_one() {
    let Pair { target, layers, draft, dump } = pair("dflash");
    let text = text(&dump);
    let mut plain = reference::Plain::default();
    let mut tapped = Tapped::new(&mut plain, &draft.config.target_layer_ids, layers, LastTap::Raw);
    target.pass(&mut tapped, &mut target.fresh(), &text);
    let (context, (borrowed, _)) = (tapped.taps().unwrap(), tapped.borrowed(1.0).unwrap());
    let s = 20;
    let run = |taps: &[Tensor], rows: usize, window: Option<usize>| {
        let mut state = draft.fresh();
        let block = Context { taps, rows, window };
        draft.pass(&mut reference::Plain::default(), &mut state, &borrowed, block, text[s], 3).hidden
    };
    let all = rows(&context, 0, s);
    let whole = run(&all, s, None);
    assert_eq!(run(&all, s, Some(s)), whole);
    let cut = run(&all, s, Some(6));
    assert_ne!(cut, whole);
    // Rotation by a position or by one that is 14 lower leaves the same products but for rounding.
    let short = run(&rows(&context, s - 6, s), 6, None);
    for (a, b) in cut.iter().zip(short.iter()) {
        assert!((a - b).abs() < 1e-5, "{a} against {b}");
    }
}
