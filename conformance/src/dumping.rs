//! Writing the values of a run as a dump.

use crate::contract::Contract;
use crate::golden_gate::argmax;
use crate::mutants::matches;
use crate::passes::Pass;
use crate::subject::{SubjectError, SubjectSpec};
use crate::variance::{Bounded, Truth, Variance};
use crate::verify::Loaded;
use golden::{DumpError, DumpWriter, Manifest, Origin, Sigma};
use reference::{Model, ModelState};
use spec::site::SITES;
use spec::{NonFinite, Site};
use std::collections::BTreeMap;
use std::path::Path;

/// Which run to write.
pub struct Run<'a> {
    /// Whose values.
    pub subject: &'a SubjectSpec,
    /// The prompt.
    pub prompt: &'a [u32],
    /// Greedy steps behind it.
    pub steps: usize,
    /// Only taps that match.
    pub sites: Option<&'a str>,
    /// Why a reviewer accepts these values in place of others.
    pub reason: Option<&'a str>,
    /// Whether to work out what rounding alone does at every site, so that a diff can be told in sigmas.
    pub sigma: bool,
}

/// Why there is no dump.
#[derive(Debug, thiserror::Error)]
pub enum DumpingError {
    /// The subject gave no values.
    #[error("{package}: {source}")]
    Subject {
        /// The package.
        package: String,
        /// Why.
        source: SubjectError,
    },
    /// The dump could not be written.
    #[error(transparent)]
    Dump(#[from] DumpError),
    /// The glob matches nothing.
    #[error("no site matches {0}")]
    NoSite(String),
}

/// Runs one prompt, pass by pass, and writes its dump whole or not at all; the number of taps.
pub fn write(loaded: &Loaded, model_hash: &str, run: &Run, target: &Path) -> Result<usize, DumpingError> {
    let failed = |source| DumpingError::Subject { package: loaded.name.clone(), source };
    let subject = run.subject.build(&loaded.model, &loaded.config, &loaded.weights, run.sites);
    let mut subject = subject.map_err(failed)?;
    let mut manifest =
        Manifest::new(format!("karat {}", run.subject), Origin::RegressionLock, run.prompt.to_vec());
    manifest.model_hash = Some(model_hash.to_string());
    manifest.contract = Some(run.subject.contract_name().to_string());
    manifest.rounding = Some(match run.subject {
        SubjectSpec::Reference => "every site once, f64 to f32, to nearest even".to_string(),
        SubjectSpec::Npu(engine, _) => format!("as the {engine} engine declares; host ops in f32"),
        other => format!("as {other} does; ops that it does not have once, f64 to f32"),
    });
    manifest.reason = run.reason.map(str::to_string);
    let mut writer = DumpWriter::create(target, manifest)?;
    let mut pass = Pass { name: "prefill".into(), ids: run.prompt.to_vec() };
    let (mut greedy, mut count) = (Vec::new(), 0);
    let contract = Contract::named(run.subject.contract_name()).filter(|_| run.sigma);
    let mut state = loaded.model.fresh();
    for n in 0..=run.steps {
        let taps = subject.pass(&pass).map_err(failed)?;
        let sigmas = match &contract {
            Some(contract) => sigmas(&loaded.model, contract, &mut state, &pass),
            None => Ok(BTreeMap::new()),
        };
        let sigmas = sigmas.map_err(|error| failed(error.into()))?;
        let mut sites: Vec<_> = taps.sites().collect();
        sites.sort_by_key(|site| flow_order(site));
        for site in sites {
            let name = format!("{}.{site}", pass.name);
            if run.sites.is_none_or(|glob| matches(glob, &name))
                && let Some(tensor) = taps.get(site)
            {
                let values: Vec<f32> = tensor.iter().copied().collect();
                writer.tap(&name, site.info().axes, tensor.shape(), &values)?;
                sigmas.get(site).into_iter().for_each(|sigma| writer.sigma(*sigma));
                count += 1;
            }
        }
        let Some(logits) = taps.get(&Site::model("logits")) else {
            let why = format!("{} has no logits, and the next token comes from them", pass.name);
            return Err(failed(SubjectError::NotSupported(why)));
        };
        let vocab = loaded.config.vocab_size();
        let last: Vec<f32> = logits.iter().copied().skip(logits.len() - vocab).collect();
        let next = argmax(&last) as u32;
        greedy.push(next);
        pass = Pass { name: format!("step{}", n + 1), ids: vec![next] };
    }
    if count == 0 {
        return Err(DumpingError::NoSite(run.sites.unwrap_or("*").to_string()));
    }
    writer.manifest_mut().greedy = greedy;
    writer.finish()?;
    Ok(count)
}

/// The standard deviations of an honest run's values at every site of a pass, with all that has come down to it.
fn sigmas(
    model: &Model,
    contract: &Contract,
    state: &mut ModelState<Bounded>,
    pass: &Pass,
) -> Result<BTreeMap<Site, Sigma>, NonFinite> {
    let mut sigmas = BTreeMap::new();
    let mut ops = Variance::new(contract, Truth::Package, |site, expected| {
        sigmas.insert(site, Sigma::of(expected.variance.iter().map(|v| v.sqrt())));
    });
    model.pass(&mut ops, state, &pass.ids);
    ops.check()?;
    drop(ops);
    Ok(sigmas)
}

/// What is before the layers, the layers, what is behind them; inside, the order of the registry.
fn flow_order(site: &Site) -> (usize, usize) {
    let rank = |name: &str| SITES.iter().position(|info| info.name == name).unwrap_or(usize::MAX);
    let outer = if rank(site.name) >= rank("final_norm") { usize::MAX } else { 0 };
    (site.layer.map_or(outer, |layer| layer as usize + 1), rank(site.name))
}
