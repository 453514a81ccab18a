//! Every engine of the NPU path on every bundled package, and what holds beside the sites: images of experts
//! follow their rule, a choice within rounding is followed, and the chunked delta rule is judged by tolerance.

use conformance::contract::Contract;
use conformance::follow::{Follow, Imaged, PassTaps, View, budget};
use conformance::judge::Verdict;
use conformance::record::Record;
use conformance::subject::SubjectSpec;
use conformance::variance::Bounded;
use conformance::verify::{Loaded, Options, PackageResult, verify};
use device::Engine;
use fixtures::{Package, bundled};
use golden::Dump;
use spec::families::moe_decoder::FeedForward;
use spec::{Config, Matrix, Site, Weights};

fn loaded(name: &str) -> (Loaded, Vec<u32>) {
    let package = Package::open(name).unwrap();
    let golden = Dump::open(package.dir()).unwrap();
    let prompt = golden.manifest().prompt.clone();
    let config = Config::parse(package.config(), &[]).unwrap().config;
    let weights = Weights::load(&config, package.tensors()).unwrap();
    (Loaded { golden: Some(golden), ..Loaded::new(name, config, weights) }, prompt)
}

fn run((package, prompt): &(Loaded, Vec<u32>), subject: &str) -> PackageResult {
    let subject: SubjectSpec = subject.parse().unwrap();
    let contract = Contract::named(subject.contract_name()).unwrap();
    let options = Options { steps: 2, ..Options::new(&subject, &contract) };
    verify(package, prompt, &options, "karat verify".into()).unwrap()
}

/// The verdict may be a near tie, or that a path is more precise than it declares; never a failure.
#[test]
fn every_engine_runs_every_package() {
    let mut followed = 0;
    for name in bundled() {
        if Package::open(&name).map_or(true, |package| package.has_draft()) {
            continue;
        }
        let package = loaded(&name);
        for engine in Engine::ALL {
            let result = run(&package, &format!("npu:{engine}"));
            let failed: Vec<&str> = result
                .sites
                .iter()
                .filter(|site| site.verdict == Verdict::Failed)
                .map(|site| &*site.site)
                .collect();
            assert!(failed.is_empty(), "{name} on {engine}: {failed:?}");
            let logits = result.logits.as_ref().unwrap();
            assert_eq!(
                result.exit_code(),
                0,
                "{name} on {engine}: {:?}, flips {:?}",
                result.reason,
                logits.flips
            );
            assert_eq!(result.cost.unwrap().dequantised_bytes_per_token, 0, "{name} on {engine}");
            followed += logits.swaps.len();
        }
    }
    assert!(followed > 0, "four bits swap an expert somewhere");
}

/// A prompt beyond the original context of a LongRoPE: both sides choose the factors by the length reached.
#[test]
fn a_long_rope_beyond_its_original_context() {
    let model = fixtures::seeded::long_rope(7);
    let config = Config::parse(&model.config, &[]).unwrap().config;
    let weights = Weights::load(&config, &model).unwrap();
    let prompt = model.prompt.clone();
    assert!(prompt.len() > 16);
    let package = Loaded::new(&model.name, config, weights);
    let result = run(&(package, prompt), "npu:int8");
    assert_eq!(result.exit_code(), 0, "{:?}", result.first_failure.map(|failure| failure.site));
}

/// Experts that stand one place too far in the device's memory are named, and no other image is.
#[test]
fn an_image_of_another_expert_is_named() {
    let (package, prompt) = loaded("qwen3_moe");
    let contract = Contract::named("f32").unwrap();
    let mut reference = Record::default();
    package.model.pass(&mut reference, &mut package.model.fresh(), &prompt);
    let taps: PassTaps = reference.take().unwrap().into_iter().collect();
    let Weights::MoeDecoder(weights) = &package.weights else { panic!("qwen3_moe has experts") };
    let sparse = weights.layers.iter().enumerate().find_map(|(n, layer)| match &layer.mlp {
        FeedForward::Sparse(moe) => Some((n, moe)),
        FeedForward::Dense(_) => None,
    });
    let (layer, moe) = sparse.expect("a layer with experts");
    let down: Vec<Matrix> = moe.experts.down_proj.iter().map(|linear| linear.weight.clone()).collect();
    let site = Site::layer(layer, "expert_down");
    let shifted = |by: usize| -> Vec<Imaged> {
        (0..down.len())
            .map(|n| Imaged { site, expert: Some(n), weights: down[(n + by) % down.len()].clone() })
            .collect()
    };
    let wrong = |images: &[Imaged]| -> Vec<String> {
        let all = |_: &str| true;
        let of = budget(taps.shapes());
        let mut follow = Follow::new(&contract, of, View::Own, "prefill", &taps, &all, false);
        follow.images = images;
        package.model.pass(&mut follow, &mut package.model.fresh::<Bounded>(), &prompt);
        let failed = follow.results.iter().filter(|result| result.verdict == Verdict::Failed);
        failed.map(|result| result.site.clone()).collect()
    };
    assert_eq!(wrong(&shifted(0)), Vec::<String>::new());
    let named: Vec<String> = (0..down.len()).map(|n| format!("image.{site}.{n}")).collect();
    assert_eq!(wrong(&shifted(1)), named);
}

/// Other sums than the recurrence's, and as close to the reference.
#[test]
fn the_chunked_delta_rule_is_right_and_not_the_same() {
    for name in ["qwen3_5", "qwen3_next"] {
        let package = loaded(name);
        let [recurrent, chunked] = ["npu:f32", "npu:f32,gdn=chunked"].map(|subject| run(&package, subject));
        for result in [&recurrent, &chunked] {
            assert_eq!(result.exit_code(), 0, "{name}: {:?}", result.first_failure.as_ref().map(|f| &f.site));
        }
        let of = |result: &PackageResult| -> Vec<f64> {
            let cores = result.sites.iter().filter(|site| site.site.ends_with("gdn_core"));
            cores.map(|site| site.max_abs).collect()
        };
        assert_ne!(of(&recurrent), of(&chunked), "{name}: the switch does something");
    }
}
