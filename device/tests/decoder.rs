//! The dense decoder on the device: right, and the same however it is asked.

mod models;

use karat_device::{DeviceError, Engine, Npu, Switches};
use models::{Kind, Random, Recorded, bits, naive, tiny};
use proptest::prelude::*;
use spec::{Config, Site, Weights};

fn npu(kind: Kind, engine: Engine, switches: &str) -> Npu {
    let (config, weights) = tiny(kind);
    Npu::init(&config, &weights, engine, Switches::parse(switches).unwrap()).unwrap()
}

fn tokens(count: usize) -> Vec<u32> {
    Random::new(99).tokens(count, 131)
}

/// Largest difference over the largest value.
fn distance(found: &[f32], expected: &[Vec<f64>]) -> f64 {
    let expected: Vec<f64> = expected.concat();
    assert_eq!(found.len(), expected.len());
    let largest = expected.iter().fold(0.0f64, |a, b| a.max(b.abs()));
    found.iter().zip(&expected).fold(0.0f64, |a, (f, e)| a.max((f64::from(*f) - e).abs())) / largest
}

// f32 sums of at most 160 products: each layer adds a few units of 2^-24 of its largest value.
#[test]
fn f32_engine_against_a_naive_forward() {
    for kind in [Kind::plain(1), Kind::all(2), Kind { window: Some(1), ..Kind::plain(3) }] {
        let (config, weights) = tiny(kind);
        let tokens = tokens(21);
        let expected = naive::logits(&config, &weights, &tokens);
        let found = npu(kind, Engine::F32, "").step_batch(&tokens).unwrap();
        assert!(distance(&found, &expected) < 5e-6, "{kind:?}: {}", distance(&found, &expected));
    }
}

// Eight bits on both sides: about 1/127 of the largest value a product, two layers.
#[test]
fn int8_engine_is_close_and_not_equal() {
    let kind = Kind::all(2);
    let (config, weights) = tiny(kind);
    let expected = naive::logits(&config, &weights, &tokens(21));
    let found = npu(kind, Engine::Int8, "").step_batch(&tokens(21)).unwrap();
    let distance = distance(&found, &expected);
    assert!((1e-4..0.1).contains(&distance), "{distance}");
}

#[test]
fn the_naive_window_and_norms_matter() {
    // The comparison above can tell these kinds apart, so it does test them.
    let (config, weights) = tiny(Kind::all(2));
    let with = naive::logits(&config, &weights, &tokens(21));
    let Config::Decoder(mut c) = config else { panic!() };
    c.layers[1].window = None;
    let without = naive::logits(&Config::Decoder(c), &weights, &tokens(21));
    assert_eq!(with[4], without[4]); // position 4 still sees all 5 keys
    assert_ne!(with[5], without[5]);
}

#[test]
fn a_step_is_a_batch_of_one() {
    let tokens = tokens(9);
    let (mut steps, mut batch) = (npu(Kind::all(4), Engine::Int8, ""), npu(Kind::all(4), Engine::Int8, ""));
    for token in tokens {
        assert_eq!(bits(&steps.step(token).unwrap()), bits(&batch.step_batch(&[token]).unwrap()));
    }
}

#[test]
fn every_cut_gives_the_same_bits() {
    let tokens = tokens(150);
    for engine in Engine::ALL {
        let mut npu = npu(Kind::all(5), engine, "");
        let whole = bits(&npu.step_batch(&tokens).unwrap());
        for cut in [1, 3, 7, 16, 17, 128] {
            npu.reset();
            let pieces: Vec<f32> =
                tokens.chunks(cut).flat_map(|some| npu.step_batch(some).unwrap()).collect();
            assert_eq!(bits(&pieces), whole, "{engine}, cut into {cut}");
        }
        npu.reset();
        assert_eq!(bits(&npu.prefill(&tokens).unwrap()), whole[149 * 131..]);
    }
}

#[test]
fn requests_do_not_leak_into_each_other() {
    let (a, b) = (tokens(40), Random::new(7).tokens(23, 131));
    let mut npu = npu(Kind::all(6), Engine::Int8, "");
    let first = bits(&npu.step_batch(&a).unwrap());
    npu.reset();
    npu.step_batch(&b).unwrap();
    npu.reset();
    assert_eq!(bits(&npu.step_batch(&a).unwrap()), first);
}

#[test]
fn rollback_is_replay() {
    let (prompt, draft, rest) = (tokens(19), Random::new(3).tokens(5, 131), Random::new(4).tokens(4, 131));
    let mut npu = npu(Kind::all(7), Engine::Int8, "");
    npu.step_batch(&prompt).unwrap();
    npu.step_batch(&draft).unwrap();
    npu.rollback(21).unwrap(); // two rows of the draft stay
    let after = bits(&npu.step_batch(&rest).unwrap());
    npu.reset();
    npu.step_batch(&[&prompt[..], &draft[..2]].concat()).unwrap();
    assert_eq!(bits(&npu.step_batch(&rest).unwrap()), after);
    let error = npu.rollback(99).unwrap_err();
    assert_eq!(error, DeviceError::Rollback { asked: 99, oldest: 0, held: 25 });
}

#[test]
fn taps_carry_every_row_under_the_oracle_s_names() {
    let tokens = tokens(130); // two chunks
    let (config, _) = tiny(Kind::all(8));
    let mut npu = npu(Kind::all(8), Engine::Int8, "");
    let mut prefill = Recorded::default();
    let logits = npu.step_batch_tapped(&tokens, &mut prefill).unwrap();
    let names: Vec<String> = prefill.0.iter().map(|(site, ..)| site.to_string()).collect();
    let layer = |i: usize| {
        "attn_norm q_proj k_proj v_proj q_norm k_norm q_rope k_rope attn_ctx attn_out resid_mid mlp_norm \
         mlp_gate mlp_up mlp_act mlp_out out k_cache v_cache"
            .split_whitespace()
            .map(move |name| format!("layers.{i}.{name}"))
    };
    let expected: Vec<String> = ["embed".to_string()]
        .into_iter()
        .chain((0..2).flat_map(layer))
        .chain(["final_norm".to_string(), "logits".to_string()])
        .collect();
    assert_eq!(names, expected);
    for (site, shape, values) in &prefill.0 {
        assert_eq!(shape.len(), site.info().axes.len(), "{site}");
        assert_eq!(shape[0], 130, "{site}");
        assert!(values.iter().all(|v| v.is_finite()), "{site}");
    }
    assert_eq!(prefill.get("layers.1.q_rope").1, [130, 6, 10]);
    assert_eq!(prefill.get("layers.1.k_cache").1, [130, 2, 10]);
    assert_eq!(bits(&prefill.get("logits").2), bits(&logits));
    // The cache after a step is the cache before it and the row of the step.
    let mut step = Recorded::default();
    npu.step_batch_tapped(&[5], &mut step).unwrap();
    let keys = [&prefill.get("layers.0.k_cache").2[..], &step.get("layers.0.k_rope").2].concat();
    assert_eq!(step.get("layers.0.k_cache").2, keys);
    assert_eq!(step.get("layers.0.k_cache").1, [131, 2, 10]);
    let Config::Decoder(c) = config else { panic!() };
    assert_eq!(step.get("embed").1, [1, c.hidden_size]);
}

#[test]
fn a_sink_changes_nothing() {
    let tokens = tokens(20);
    let mut npu = npu(Kind::all(8), Engine::Int8, "");
    let plain = bits(&npu.step_batch(&tokens).unwrap());
    npu.reset();
    assert_eq!(bits(&npu.step_batch_tapped(&tokens, &mut Recorded::default()).unwrap()), plain);
}

#[test]
fn layer_taps_are_what_the_next_layer_receives() {
    let tokens = tokens(3);
    let mut npu = npu(Kind::plain(9), Engine::F32, "");
    npu.set_layer_taps(&[1, 0]).unwrap();
    let mut taps = Recorded::default();
    npu.step_batch_tapped(&tokens, &mut taps).unwrap();
    let (first, second) = (&taps.get("layers.0.out").2, &taps.get("layers.1.out").2);
    for row in 0..3 {
        let found = &npu.layer_taps()[row * 192..][..192];
        assert_eq!(found, [&second[row * 96..][..96], &first[row * 96..][..96]].concat());
    }
    assert!(matches!(npu.set_layer_taps(&[2]), Err(DeviceError::Layer { layer: 2, layers: 2 })));
}

#[test]
fn rows_and_heads_by_themselves() {
    let (_, weights) = tiny(Kind::plain(9));
    let Weights::Decoder(weights) = weights else { panic!() };
    let mut npu = npu(Kind::plain(9), Engine::F32, "");
    let mut row = vec![0.0; 96];
    weights.embed_tokens.decode(130, &mut row).unwrap();
    assert_eq!(npu.embed_row(130).unwrap(), row);
    assert_eq!(npu.embed_row_raw(130).unwrap(), row);
    let mut taps = Recorded::default();
    let logits = npu.step_batch_tapped(&tokens(4), &mut taps).unwrap();
    assert_eq!(npu.lm_head_logits(&taps.get("final_norm").2).unwrap(), logits);
    assert!(matches!(
        npu.lm_head_logits(&row[1..]),
        Err(DeviceError::Length { expected: 96, found: 95, .. })
    ));
}

#[test]
fn device_weights_are_the_projection_out_of_the_fused_image() {
    let (_, weights) = tiny(Kind::plain(9));
    let Weights::Decoder(weights) = weights else { panic!() };
    let v = &weights.layers[1].v_proj.weight;
    let site = Site::parse("layers.1.v_proj").unwrap();
    let exact = npu(Kind::plain(9), Engine::F32, "").device_weights(site).unwrap().unwrap();
    assert_eq!(exact.to_values().unwrap(), v.to_values().unwrap());
    // int8: code · (largest of the row / 127), so at most half a step away from the weight.
    let mut npu = npu(Kind::plain(9), Engine::Int8, "");
    let decoded = npu.device_weights(site).unwrap().unwrap().to_values().unwrap();
    for (o, (decoded, w)) in decoded.chunks(96).zip(v.to_values().unwrap().chunks(96)).enumerate() {
        let step = w.iter().fold(0.0f32, |a, b| a.max(b.abs())) / 127.0;
        for (i, (d, w)) in decoded.iter().zip(w).enumerate() {
            assert!((d - w).abs() <= 0.501 * step);
            let stored = npu.device_code(site, o, i).unwrap().unwrap();
            assert_eq!(f32::from(stored.code) * stored.scale, *d);
        }
    }
    assert!(npu.device_weights(Site::parse("layers.1.q_rope").unwrap()).unwrap().is_none());
}

#[test]
fn what_cannot_run_is_refused() {
    let mut npu = npu(Kind::plain(1), Engine::Int8, "");
    assert_eq!(npu.step_batch(&[]).unwrap_err(), DeviceError::Empty);
    let error = npu.step_batch(&[3, 131]).unwrap_err();
    assert_eq!(error.to_string(), "token id 131 at row 1 is outside the vocabulary of 131");
    assert!(matches!(npu.step_batch(&vec![0; 513]), Err(DeviceError::Context { needed: 513, limit: 512 })));
    assert!(matches!(npu.extend_context(513), Err(DeviceError::Extend { .. })));
    npu.extend_context(512).unwrap();
    npu.step_batch_at(&[1, 2], 0).unwrap();
    let error = npu.step_batch_at(&[3], 1).unwrap_err();
    assert_eq!(error, DeviceError::Position { asked: 1, held: 2 });

    let (mut config, weights) = tiny(Kind::plain(1));
    let Config::Decoder(c) = &mut config else { panic!() };
    c.num_key_value_heads = 4;
    let error = Npu::init(&config, &weights, Engine::F32, Switches::default()).err().unwrap();
    assert!(error.to_string().contains("4 key heads do not divide 6 query heads"), "{error}");
}

#[test]
fn a_value_that_is_not_finite_stops_with_its_place() {
    let (config, mut weights) = tiny(Kind::plain(1));
    let Weights::Decoder(w) = &mut weights else { panic!() };
    // A bias of infinity on up output 7 of layer 0 makes column 7 of the input of down infinite.
    let mut bias = vec![0.0; 160];
    bias[7] = f32::INFINITY;
    w.layers[0].up_proj.bias = Some(spec::Vector::new("up.bias", bias));
    for engine in Engine::ALL {
        let mut npu = Npu::init(&config, &weights, engine, Switches::default()).unwrap();
        let error = npu.step_batch(&tokens(5)).unwrap_err();
        let DeviceError::Activation { site, row: 0, column: 7, value } = error else { panic!("{error}") };
        assert_eq!((site.to_string().as_str(), value.is_finite()), ("layers.0.mlp_out", false));
        assert_eq!(npu.position(), 0);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    #[test]
    fn any_cut_and_any_threads_give_the_same_bits(
        seed in 0u64..1000,
        cuts in prop::collection::vec(1usize..40, 1..6),
        threads in 1usize..5,
        int8: bool,
        window in prop::option::of(1usize..30),
    ) {
        let engine = if int8 { Engine::Int8 } else { Engine::F32 };
        let kind = Kind { window, ..Kind::all(seed) };
        let tokens = Random::new(seed).tokens(cuts.iter().sum(), 131);
        let mut npu = npu(kind, engine, "");
        let whole = bits(&npu.step_batch(&tokens).unwrap());
        npu.reset();
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        let mut rest = &tokens[..];
        let mut pieces = Vec::new();
        for cut in cuts {
            let (now, later) = rest.split_at(cut);
            pieces.extend(pool.install(|| npu.step_batch(now)).unwrap());
            rest = later;
        }
        prop_assert_eq!(bits(&pieces), whole);
    }
}
