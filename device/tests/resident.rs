//! The resident cache: its invariants, the switches that undo it, and what is counted.

mod models;

use karat_device::{DeviceError, Engine, Fault, Group, Key, Npu, Role, Switches};
use models::{Kind, Random, Recorded, bits, tiny};
use spec::{Matrix, Weights};
use std::collections::BTreeSet;
use std::sync::Arc;

fn npu(engine: Engine, switches: &str) -> Npu {
    let (config, weights) = tiny(Kind::all(11));
    Npu::init(&config, &weights, engine, Switches::parse(switches).unwrap()).unwrap()
}

fn tokens(count: usize) -> Vec<u32> {
    Random::new(5).tokens(count, 131)
}

/// Weights of attention and of the feed-forward of one tiny layer, in f32: q, k, v (100 rows) and o; gate, up, down.
const ATTENTION: u64 = 4 * (100 * 96 + 96 * 60);
const FEED_FORWARD: u64 = 4 * 3 * (160 * 96);
const HEAD: u64 = 4 * 131 * 96;

// I1: what was decoded for one layer is overwritten before the next; a stale read would be NaN or stop.
#[test]
fn scratch_poisoned_between_layers_reaches_nothing() {
    for engine in Engine::ALL {
        let expected = bits(&npu(engine, "").step_batch(&tokens(20)).unwrap());
        for switches in ["poison=on", "poison=on,cache=off", "poison=on,reload=all"] {
            let mut npu = npu(engine, switches);
            for _ in 0..2 {
                assert_eq!(bits(&npu.step_batch(&tokens(20)).unwrap()), expected, "{engine} {switches}");
                npu.reset();
            }
        }
    }
}

// I2
#[test]
fn residency_only_grows() {
    let mut npu = npu(Engine::Int8, "");
    assert!(npu.resident().keys().is_empty());
    npu.step_batch(&tokens(3)).unwrap();
    let all = npu.resident().keys();
    assert_eq!(all.len(), 9); // two layers of four, and the head
    npu.step(4).unwrap();
    npu.reset();
    npu.step(5).unwrap();
    assert_eq!(npu.resident().keys(), all);
}

// I3: as many keys as products, and no weight under two of them.
#[test]
fn keys_are_injective() {
    let npu = npu(Engine::Int8, "");
    let designs = npu.designs();
    let keys: BTreeSet<Key> = designs.iter().map(|(key, _)| *key).collect();
    let names: BTreeSet<String> = keys.iter().map(Key::to_string).collect();
    assert_eq!((keys.len(), names.len()), (designs.len(), designs.len()));
    assert!(names.contains("layers.1.GateUp") && names.contains("Head"));
    assert_ne!(Key::expert(0, Role::ExpertDown, 1), Key::expert(0, Role::ExpertDown, 2));
    assert_ne!(Key::layer(0, Role::LinearOut), Key::layer(0, Role::GateUp));
}

type Path = fn(&mut Npu) -> Result<Vec<f32>, DeviceError>;

const PATHS: [(&str, Path); 5] = [
    ("step", |npu| npu.step(7)),
    ("batch", |npu| npu.step_batch(&tokens(17))),
    ("taps", |npu| npu.step_batch_tapped(&tokens(17), &mut Recorded::default())),
    ("prefill", |npu| npu.prefill(&tokens(17))),
    ("verify after rollback", |npu| {
        npu.rollback(npu.position() / 2)?;
        npu.step_batch(&tokens(5))
    }),
];

// I4: whichever path warms the cache, no path decodes a weight afterwards; host-gemm included.
#[test]
fn no_path_decodes_a_resident_weight() {
    for engine in Engine::ALL {
        for (first, warm) in PATHS {
            let mut npu = npu(engine, "");
            warm(&mut npu).unwrap();
            assert_eq!(npu.counters().total().dequantised_bytes, 2 * (ATTENTION + FEED_FORWARD) + HEAD);
            for (name, path) in PATHS {
                path(&mut npu).unwrap();
                let cost = npu.counters().total();
                assert_eq!(
                    (cost.dequantised_bytes, cost.packed_bytes),
                    (0, 0),
                    "{engine}: {name} after {first}"
                );
            }
            npu.lm_head_logits(&[1.0; 96]).unwrap();
            assert_eq!(npu.counters().total().dequantised_bytes, 0);
        }
    }
}

// I5: with every image resident, rows of the embedding are still read for each token, and norms still act.
#[test]
fn only_matrix_weights_are_passed_over() {
    let (config, weights) = tiny(Kind::all(11));
    let fresh = |tokens: &[u32]| npu(Engine::Int8, "cache=off").step_batch(tokens).unwrap();
    let mut npu = Npu::init(&config, &weights, Engine::Int8, Switches::default()).unwrap();
    npu.warm_up().unwrap();
    for tokens in [vec![1, 2, 3], vec![3, 2, 1], vec![130]] {
        npu.reset();
        assert_eq!(bits(&npu.step_batch(&tokens).unwrap()), bits(&fresh(&tokens)));
        let cost = npu.counters().total();
        assert_eq!((cost.dequantised_bytes, cost.row_bytes), (0, 4 * 96 * tokens.len() as u64));
    }
}

/// Looks one image up under the key of another.
struct Alias(Key, Key);

impl Fault for Alias {
    fn lookup(&self, key: Key) -> Key {
        if key == self.0 { self.1 } else { key }
    }
}

// I6: an image of another shape is refused by name, not launched.
#[test]
fn an_image_that_does_not_fit_its_design_is_refused() {
    let (config, weights) = tiny(Kind::all(11));
    let alias = Alias(Key::layer(0, Role::Down), Key::layer(0, Role::AttentionOut));
    let faulty =
        Npu::init_with_fault(&config, &weights, Engine::Int8, Switches::default(), Some(Arc::new(alias)));
    let error = faulty.unwrap().step(3).unwrap_err();
    let DeviceError::Image { key, expected, found } = error else { panic!("{error}") };
    assert_eq!(key.to_string(), "layers.0.AttentionOut");
    assert_eq!((expected.as_str(), found.as_str()), ("int8 96×60", "int8 96×160"));
}

// I7: 2^9 subsets of the keys of two layers and the head.
#[test]
fn every_subset_of_resident_images_gives_the_uncached_bits() {
    for engine in [Engine::Int8, Engine::F32] {
        let expected = bits(&npu(engine, "cache=off").step_batch(&tokens(6)).unwrap());
        let mut npu = npu(engine, "poison=on");
        npu.warm_up().unwrap();
        let keys = npu.resident().keys();
        for subset in 0..1u32 << keys.len() {
            let kept = |key: &Key| keys.iter().position(|k| k == key).is_some_and(|n| subset >> n & 1 == 1);
            npu.retain_resident(kept);
            npu.reset();
            assert_eq!(bits(&npu.step_batch(&tokens(6)).unwrap()), expected, "{engine}: subset {subset:b}");
            assert_eq!(npu.resident().keys(), keys);
        }
    }
}

#[test]
fn a_layer_whose_packing_stopped_half_way_is_not_resident() {
    let (config, mut weights) = tiny(Kind::plain(11));
    let Weights::Decoder(w) = &mut weights else { panic!() };
    let mut values = w.layers[1].o_proj.weight.to_values().unwrap();
    values[3 * 60 + 8] = f32::NAN;
    w.layers[1].o_proj.weight = Matrix::from_values("layers.1.o_proj", 96, 60, values);
    let mut npu = Npu::init(&config, &weights, Engine::Int8, Switches::default()).unwrap();
    let error = npu.step_batch(&tokens(4)).unwrap_err();
    assert_eq!(error.to_string(), "layers.1.o_proj holds NaN at row 3, column 8, but weights must be finite");
    let resident = npu.resident().keys();
    assert!(resident.contains(&Key::layer(0, Role::Down)));
    assert!(resident.iter().all(|key| key.layer != Some(1)), "{resident:?}");
    assert_eq!(npu.position(), 0);
}

// The guard asks for every image of the group; one that asked for q|k|v alone would leave o unread.
#[test]
fn one_missing_image_is_packed_again_and_no_other() {
    let mut npu = npu(Engine::Int8, "");
    npu.warm_up().unwrap();
    npu.retain_resident(|key| *key != Key::layer(1, Role::AttentionOut));
    npu.step(1).unwrap();
    assert_eq!(npu.counters().total().dequantised_bytes, 4 * 96 * 60);
}

#[test]
fn switches_change_costs_and_no_bit() {
    let layers = 2 * (ATTENTION + FEED_FORWARD);
    // switches, bytes decoded in the second pass of one row
    let arms = [
        ("", 0),
        ("reload=attn", 2 * ATTENTION),
        ("reload=ffn", 2 * FEED_FORWARD),
        ("reload=ple", 0),
        ("reload=all", layers + HEAD),
        ("cache=off", layers + HEAD),
        ("batch=off", 0),
        ("reload=all,batch=off,poison=on", layers + HEAD),
    ];
    for engine in Engine::ALL {
        let mut plain = npu(engine, "");
        let expected = [bits(&plain.step_batch(&tokens(19)).unwrap()), bits(&plain.step(9).unwrap())];
        for (switches, decoded) in arms {
            let mut npu = npu(engine, switches);
            let found = [bits(&npu.step_batch(&tokens(19)).unwrap()), bits(&npu.step(9).unwrap())];
            assert_eq!(found, expected, "{engine} {switches}");
            assert_eq!(npu.counters().total().dequantised_bytes, decoded, "{engine} {switches}");
        }
    }
}

#[test]
fn launches_and_streamed_bytes_by_hand() {
    let mut npu = npu(Engine::F32, "");
    npu.warm_up().unwrap();
    // f32 images hold 16 outputs a tile: 112 and 96 rows of attention, 320 and 96 of the feed-forward, 144 of the head.
    let layer = 4 * (112 * 96 + 96 * 60 + 320 * 96 + 96 * 160);
    let head = 4 * 144 * 96;
    assert_eq!(npu.counters().total().packed_bytes, 2 * layer + head);
    npu.step_batch(&tokens(16)).unwrap();
    let cost = npu.counters().total();
    assert_eq!((cost.launches, cost.streamed_bytes), (9, 2 * layer + head));
    assert_eq!(npu.counters().layers[1].launches, 4);
    // 150 rows: 128 and 22, each a launch of every image.
    npu.step_batch(&tokens(150)).unwrap();
    let cost = npu.counters().total();
    assert_eq!((cost.launches, cost.streamed_bytes), (18, 2 * (2 * layer + head)));
    // Row by row, every row streams everything.
    let mut rows = self::npu(Engine::F32, "batch=off");
    rows.step_batch(&tokens(5)).unwrap();
    assert_eq!(rows.counters().total().launches, 45);
    assert_eq!(rows.counters().rows, 5);
}

/// Adds one to every row of the given image.
struct Shifted(Key);

impl Fault for Shifted {
    fn launched(&self, key: Key, _row: usize, _out: usize, y: &mut [f32]) {
        if key == self.0 {
            y.iter_mut().for_each(|v| *v += 1.0);
        }
    }

    fn guard(&self, _layer: Option<usize>, _group: Group, resident: bool) -> bool {
        resident
    }
}

#[test]
fn a_fault_reaches_the_site_it_is_aimed_at() {
    let (config, weights) = tiny(Kind::all(11));
    let fault = Arc::new(Shifted(Key::layer(1, Role::AttentionOut)));
    let mut faulty =
        Npu::init_with_fault(&config, &weights, Engine::F32, Switches::default(), Some(fault)).unwrap();
    let (mut wrong, mut right) = (Recorded::default(), Recorded::default());
    faulty.step_batch_tapped(&tokens(4), &mut wrong).unwrap();
    npu(Engine::F32, "").step_batch_tapped(&tokens(4), &mut right).unwrap();
    let differs: Vec<String> = wrong
        .0
        .iter()
        .zip(&right.0)
        .filter(|(w, r)| bits(&w.2) != bits(&r.2))
        .map(|(w, _)| w.0.to_string())
        .collect();
    assert_eq!(differs[..2], ["layers.1.attn_out", "layers.1.resid_mid"]);
}
