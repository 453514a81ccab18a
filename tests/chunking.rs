//! Prefill = steps = any chunking, to the bit, in every bundled package; a later token changes no
//! earlier row.

use conformance::record::Record;
use fixtures::Package;
use golden::Dump;
use reference::{Model, Plain, Tensor};
use spec::{Config, Site, Weights};

fn bundled() -> Vec<(String, Model, Vec<u32>)> {
    let packages = fixtures::bundled().into_iter().filter_map(|name| {
        let package = Package::open(&name).ok().filter(|package| package.golden_json().is_some())?;
        let config = Config::parse(package.config(), &[]).unwrap().config;
        let weights = Weights::load(&config, package.tensors()).unwrap();
        let dump = Dump::open(package.dir()).unwrap();
        Some((name, Model::new(config, weights), dump.manifest().prompt.clone()))
    });
    packages.collect()
}

/// Logits of all tokens when the prompt is fed in chunks of `sizes`, the last one repeated.
fn logits(model: &Model, ids: &[u32], sizes: &[usize]) -> Vec<f32> {
    let (mut ops, mut state) = (Plain::default(), model.fresh());
    let (mut fed, mut all) = (0, Vec::new());
    for n in 0.. {
        if fed == ids.len() {
            break;
        }
        let size = sizes[n.min(sizes.len() - 1)].min(ids.len() - fed);
        all.extend(model.pass(&mut ops, &mut state, &ids[fed..fed + size]).iter());
        fed += size;
        assert_eq!(state.position(), fed);
    }
    ops.check().unwrap();
    all
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| v.to_bits()).collect()
}

#[test]
fn any_chunking_gives_the_same_bits() {
    for (name, model, ids) in bundled() {
        let whole = bits(&logits(&model, &ids, &[ids.len()]));
        for sizes in [&[1][..], &[3, 1, 4], &[5], &[7, 2], &[ids.len() - 1, 1]] {
            assert_eq!(bits(&logits(&model, &ids, sizes)), whole, "{name} in chunks of {sizes:?}");
        }
    }
}

/// State at the end: the last values of every site whose name says that it is kept.
fn kept(model: &Model, ids: &[u32], size: usize) -> Vec<(Site, Tensor)> {
    let (mut ops, mut state) = (Record::default(), model.fresh());
    let mut last: Vec<(Site, Tensor)> = Vec::new();
    for chunk in ids.chunks(size) {
        model.pass(&mut ops, &mut state, chunk);
        let taps = ops.take().unwrap();
        last = taps
            .into_iter()
            .filter(|(site, _)| site.name.ends_with("_cache") || site.name.ends_with("_state"))
            .collect();
    }
    last
}

#[test]
fn the_state_left_behind_is_the_same_bits() {
    for (name, model, ids) in bundled() {
        let whole = kept(&model, &ids, ids.len());
        assert!(!whole.is_empty(), "{name} keeps no state");
        for size in [1, 4] {
            let (sites, values): (Vec<_>, Vec<_>) = kept(&model, &ids, size).into_iter().unzip();
            assert_eq!(sites, whole.iter().map(|(site, _)| *site).collect::<Vec<_>>(), "{name}");
            for ((site, whole), value) in whole.iter().zip(values) {
                assert_eq!(*whole, value, "{name}: {site} in chunks of {size}");
            }
        }
    }
}

#[test]
fn a_later_token_changes_no_earlier_row() {
    for (name, model, mut ids) in bundled() {
        let before = logits(&model, &ids, &[ids.len()]);
        let (last, vocab) = (ids.len() - 1, before.len() / ids.len());
        ids[last] = (ids[last] + 1) % vocab as u32;
        let after = logits(&model, &ids, &[ids.len()]);
        assert_eq!(bits(&before[..last * vocab]), bits(&after[..last * vocab]), "{name}");
        assert_ne!(
            bits(&before[last * vocab..]),
            bits(&after[last * vocab..]),
            "{name}: the test sees nothing"
        );
    }
}
