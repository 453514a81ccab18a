//! `bench`: how far the kernels, the comparer and the decoders are from what this machine allows.
//!
//! Every figure is a ratio of two arms that take turns in one process on one thread; absolute rates of a shared
//! machine change within minutes, such ratios hardly. The ceilings (reading memory, multiplying in registers)
//! are measured in the same run. What must be installed for a peer stands in `conformance/benches/PEERS.md`.

mod decoding;
pub mod figure;
mod kernels;
pub mod machine;
pub mod package;
mod peer;
mod resident;
mod statistics;

pub use figure::{Figure, Verdict};
pub use kernels::Probes;
pub use machine::Machine;

use device::DeviceError;
use device::engine::{Engine, LaunchError};
use device::pack::PackError;
use device::simd::{Kernel, KernelError, UnsupportedKernel};
use serde::Serialize;
use spec::{ConfigError, LoadError, NonFinite};

/// Version of the JSON form.
pub const SCHEMA: &str = "karat/bench/1";

/// Why nothing was measured.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum BenchError {
    #[error(transparent)]
    Kernel(#[from] KernelError),
    #[error(transparent)]
    Unsupported(#[from] UnsupportedKernel),
    #[error(transparent)]
    Pack(#[from] PackError),
    #[error(transparent)]
    Launch(#[from] LaunchError),
    #[error(transparent)]
    Device(#[from] DeviceError),
    #[error(transparent)]
    Config(#[from] ConfigError),
    #[error(transparent)]
    Load(#[from] LoadError),
    #[error(transparent)]
    Weights(#[from] NonFinite),
    #[error("a file for the peer: {0}")]
    Io(#[from] std::io::Error),
    #[error("{0}")]
    Usage(String),
}

/// Everything that one run measured.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// [`SCHEMA`]
    pub schema: &'static str,
    /// The instructions that launches use.
    pub kernel: &'static str,
    /// Threads of every arm.
    pub threads: usize,
    /// The machine during the run.
    pub machine: Machine,
    /// What it gives at most.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub probes: Option<Probes>,
    /// The figures.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub figures: Vec<Figure>,
    /// The package that was run.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub package: Option<String>,
    /// How it ran.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub runs: Vec<package::Run>,
}

impl Report {
    /// The figures that miss their goal.
    pub fn missed(&self) -> impl Iterator<Item = &Figure> {
        self.figures.iter().filter(|figure| figure.verdict == Verdict::Missed)
    }
}

/// What to measure.
pub struct Options {
    /// Names of figures: `S1` takes `S1@16` along. All where there are none.
    pub only: Vec<String>,
    /// Pairs of each figure.
    pub pairs: usize,
    /// The Python of the peers.
    pub python: String,
}

type Measure = Box<dyn Fn(&Options, Kernel) -> Result<Figure, BenchError> + Send + Sync>;

/// Every figure and how it is measured, in order.
fn figures() -> Vec<(&'static str, Measure)> {
    use kernels::{DECODE, FOUR_BIT, ONE_ROW, PREFILL, SIXTEEN, one_row, sixteen_rows, strict};
    let mut all: Vec<(&'static str, Measure)> = vec![
        (PREFILL.id, Box::new(|o, kernel| strict(&PREFILL, 128, kernel, o.pairs))),
        (DECODE.id, Box::new(|o, kernel| strict(&DECODE, 16, kernel, o.pairs))),
        (ONE_ROW.id, Box::new(|o, kernel| one_row(&ONE_ROW, Engine::F32, kernel, o.pairs))),
        (FOUR_BIT.id, Box::new(|o, kernel| one_row(&FOUR_BIT, Engine::W4A8, kernel, o.pairs))),
        (SIXTEEN.id, Box::new(|o, kernel| sixteen_rows(&SIXTEEN, kernel, o.pairs))),
        (statistics::PLAIN.id, Box::new(|o, _| Ok(statistics::against_plain(o.pairs)))),
        (statistics::NUMPY.id, Box::new(|o, _| Ok(statistics::against_numpy(&o.python, o.pairs)))),
    ];
    for (spec, ty, tiled) in decoding::FORMATS {
        let measure: Measure = Box::new(move |o, _| decoding::figure(&spec, ty, tiled, &o.python, o.pairs));
        all.push((spec.id, measure));
    }
    all.push((resident::RESIDENT.id, Box::new(|o, _| resident::figure(o.pairs))));
    all
}

/// The figures that `only` asks for.
fn chosen(only: &[String]) -> Result<Vec<(&'static str, Measure)>, BenchError> {
    let kind = |id: &str| id.split('@').next().unwrap_or_default().to_ascii_uppercase();
    let asks = |name: &str, id: &str| {
        if name.contains('@') { name.eq_ignore_ascii_case(id) } else { name.to_ascii_uppercase() == kind(id) }
    };
    let all = figures();
    let known: Vec<&str> = all.iter().map(|(id, _)| *id).collect();
    if let Some(name) = only.iter().find(|name| !known.iter().any(|id| asks(name, id))) {
        let known = known.join(", ");
        return Err(BenchError::Usage(format!("no figure is called {name}; there are {known}")));
    }
    let wanted = |id: &str| only.is_empty() || only.iter().any(|name| asks(name, id));
    Ok(all.into_iter().filter(|(id, _)| wanted(id)).collect())
}

/// Measures the figures; `begun` hears the name of each before it starts.
pub fn measure(options: &Options, mut begun: impl FnMut(&str)) -> Result<Report, BenchError> {
    let chosen = chosen(&options.only)?;
    let kernel = Kernel::chosen()?;
    let pool = rayon::ThreadPoolBuilder::new().num_threads(1).build();
    let pool = pool.map_err(|error| BenchError::Usage(format!("threads: {error}")))?;
    let watch = machine::Watch::begin();
    begun("probes");
    let probes = pool.install(|| kernels::probes(kernel, options.pairs))?;
    let mut figures = Vec::new();
    for (id, figure) in chosen {
        begun(id);
        figures.push(pool.install(|| figure(options, kernel))?);
    }
    Ok(Report {
        schema: SCHEMA,
        kernel: kernel.name(),
        threads: 1,
        machine: watch.end(),
        probes: Some(probes),
        figures,
        package: None,
        runs: vec![],
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ids(only: &[&str]) -> Result<Vec<&'static str>, BenchError> {
        let only: Vec<String> = only.iter().map(|name| name.to_string()).collect();
        Ok(chosen(&only)?.into_iter().map(|(id, _)| id).collect())
    }

    #[test]
    fn a_name_takes_its_kind_along() {
        assert_eq!(ids(&["s1", "S3"]).unwrap(), ["S1", "S1@16", "S3"]);
        assert_eq!(ids(&["S10@q4nx"]).unwrap(), ["S10@q4nx"]);
        assert_eq!(ids(&[]).unwrap().len(), 13);
        assert!(
            ids(&["S99"]).unwrap_err().to_string().starts_with("no figure is called S99; there are S1, ")
        );
    }
}
