//! The reference reproduces every bundled oracle at every site, prefill and steps, free-running.

use conformance::golden_gate::compare;
use fixtures::Package;
use golden::Dump;
use reference::Model;
use spec::{Config, Weights};

/// The names of all bundled packages with a golden of one model (a draft pair has tests of its own).
fn models() -> Vec<Package> {
    let packages = fixtures::bundled().into_iter().filter_map(|name| {
        let package = Package::open(&name);
        package.ok().filter(|package| package.golden_json().is_some() && !package.has_draft())
    });
    packages.collect()
}

#[test]
fn every_site_of_every_bundled_golden() {
    let only = std::env::var("KARAT_PACKAGE").ok();
    let mut seen = 0;
    for package in models() {
        if only.as_ref().is_some_and(|only| only != package.name()) {
            continue;
        }
        seen += 1;
        let config =
            Config::parse(package.config(), &[]).unwrap_or_else(|e| panic!("{}: {e}", package.name()));
        let weights = Weights::load(&config.config, package.tensors()).unwrap();
        let dump = Dump::open(package.dir()).unwrap();
        let gate = compare(&Model::new(config.config, weights), &dump).unwrap();
        let first = gate.sites.iter().find(|site| site.ratio > 1.0);
        println!(
            "{:14} {} taps, worst {:?}, kl {:.1e}",
            package.name(),
            gate.sites.len(),
            gate.worst(),
            gate.kl_max
        );
        assert!(gate.unmatched.is_empty(), "{}: taps without a site: {:?}", package.name(), gate.unmatched);
        assert_eq!(first, None, "{}: first site beyond its limit", package.name());
        assert_eq!(gate.argmax_equal.0, gate.argmax_equal.1, "{}: argmax", package.name());
        assert!(gate.kl_max <= 1e-9, "{}: KL {}", package.name(), gate.kl_max);
        assert!(gate.passes());
    }
    assert!(
        seen > 0,
        "no bundled package with a golden{}",
        only.map_or(String::new(), |o| format!(" called {o}"))
    );
}
