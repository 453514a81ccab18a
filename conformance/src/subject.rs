//! What is under test, and how to run it.

mod align;
pub mod command;
pub mod dump;
pub mod library;
mod map;
pub mod names;
pub mod ops;

pub use command::{CommandKernel, CommandSpec};
pub use dump::{DumpSpec, DumpSubject, OpenedDump, RunOfDump};
pub use library::{LibraryKernel, LibraryModel, LibrarySpec};
pub use map::{MapError, NameMap};
pub use ops::{Answer, Kernel, OneOp, OpsSubject};

use crate::contract::Contract;
use crate::cost::CostPerToken;
use crate::follow::PassTaps;
use crate::mutants::{MutantOps, Selection};
use crate::passes::Pass;
use crate::record::Record;
use device::{DeviceError, Engine, Npu, Switches, TapSink};
use reference::{Model, ModelState, Tensor};
use spec::{Config, Matrix, NonFinite, Site, Weights};
use std::collections::BTreeSet;
use std::path::PathBuf;

/// A subject as named on the command line.
#[derive(Clone, Debug, PartialEq)]
pub enum SubjectSpec {
    /// The built-in NPU path with one of its engines and its switches: `npu:int8`, `npu:f32,gdn=chunked`.
    Npu(Engine, Switches),
    /// The reference itself.
    Reference,
    /// Values that somebody else wrote.
    Dump(DumpSpec),
    /// A program that computes one op at a time.
    Command(CommandSpec),
    /// A shared library with ops, or with a whole model.
    Library(LibrarySpec),
}

/// A subject that is not known.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[error("subject {0} is not known; there are npu, {npu}, reference, dump:DIR, cmd:\"PROGRAM ARGS\" and lib:FILE", npu = Engine::ALL.map(|e| format!("npu:{e}")).join(", "))]
pub struct UnknownSubject(String);

impl std::str::FromStr for SubjectSpec {
    type Err = UnknownSubject;

    fn from_str(text: &str) -> Result<Self, UnknownSubject> {
        let unknown = || UnknownSubject(text.to_string());
        let (kind, rest) = text.split_once(':').unwrap_or((text, ""));
        Ok(match (kind, rest) {
            ("npu", "") => SubjectSpec::Npu(Engine::Int8, Switches::default()),
            ("npu", rest) => {
                let (engine, switches) = rest.split_once(',').unwrap_or((rest, ""));
                let switches = Switches::parse(switches).map_err(|_| unknown())?;
                SubjectSpec::Npu(engine.parse().map_err(|_| unknown())?, switches)
            }
            ("reference", "") => SubjectSpec::Reference,
            (_, "") => return Err(unknown()),
            ("dump", path) => SubjectSpec::Dump(DumpSpec { path: PathBuf::from(path), map: None }),
            ("cmd", line) => {
                SubjectSpec::Command(CommandSpec { line: line.to_string(), timeout: command::TIMEOUT })
            }
            ("lib", path) => SubjectSpec::Library(LibrarySpec {
                path: PathBuf::from(path),
                timeout: command::TIMEOUT,
                package: None,
            }),
            _ => return Err(unknown()),
        })
    }
}

impl std::fmt::Display for SubjectSpec {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            SubjectSpec::Npu(engine, switches) => match switches.to_string() {
                list if list.is_empty() => write!(f, "npu:{engine}"),
                list => write!(f, "npu:{engine},{list}"),
            },
            SubjectSpec::Reference => f.write_str("reference"),
            SubjectSpec::Dump(dump) => write!(f, "dump:{}", dump.path.display()),
            SubjectSpec::Command(command) => write!(f, "cmd:{}", command.line),
            SubjectSpec::Library(library) => write!(f, "lib:{}", library.path.display()),
        }
    }
}

impl SubjectSpec {
    /// The subject over a loaded package. Of one that computes single ops, those at taps that match `sites`
    /// are handed over. A dump is opened with [`DumpSpec::open`].
    pub fn build<'m>(
        &self,
        model: &'m Model,
        config: &Config,
        weights: &Weights,
        sites: Option<&str>,
    ) -> Result<Box<dyn Subject + 'm>, SubjectError> {
        Ok(match self {
            SubjectSpec::Npu(engine, switches) => {
                Box::new(NpuSubject::new(config, weights, *engine, *switches)?)
            }
            SubjectSpec::Reference => Box::new(ReferenceSubject::new(model)),
            SubjectSpec::Dump(dump) => {
                return Err(SubjectError::NotSupported(format!("{} computes nothing", dump.path.display())));
            }
            SubjectSpec::Command(spec) => {
                let kernel = CommandKernel::new(spec)
                    .map_err(|error| SubjectError::Stopped(format!("a directory for cases: {error}")))?;
                Box::new(OpsSubject::new(model, Box::new(kernel), sites))
            }
            SubjectSpec::Library(spec) => {
                let plugin = spec.start()?;
                match &spec.package {
                    Some(package) if plugin.info().model => {
                        let package = package.display().to_string();
                        Box::new(LibraryModel::new(plugin, &package, model, config.vocab_size())?)
                    }
                    _ => Box::new(OpsSubject::new(model, Box::new(LibraryKernel(plugin)), sites)),
                }
            }
        })
    }

    /// The name of the contract that the subject declares; a library's own is in its table.
    pub fn contract_name(&self) -> &'static str {
        match self {
            SubjectSpec::Npu(engine, _) => engine.name(),
            SubjectSpec::Reference | SubjectSpec::Dump(_) => "f32",
            SubjectSpec::Command(_) | SubjectSpec::Library(_) => "f32",
        }
    }
}

/// Why a subject gave no values.
#[derive(Debug, Clone, thiserror::Error)]
pub enum SubjectError {
    /// It cannot run this model.
    #[error("not supported: {0}")]
    NotSupported(String),
    /// It stopped.
    #[error("{0}")]
    Stopped(String),
    /// What was named as a subject is none: an unreadable file, a manifest that lies, a map with a mistake.
    #[error("{0}")]
    Unusable(String),
    /// The package's weights are at fault.
    #[error(transparent)]
    Weights(#[from] NonFinite),
}

impl From<DeviceError> for SubjectError {
    fn from(error: DeviceError) -> Self {
        match error {
            DeviceError::Weight(source) => SubjectError::Weights(source),
            DeviceError::Design { .. } | DeviceError::Model { .. } => {
                SubjectError::NotSupported(error.to_string())
            }
            other => SubjectError::Stopped(other.to_string()),
        }
    }
}

/// What a reader of the report should know about a subject beside its values.
#[derive(Clone, Debug, Default)]
pub struct Remarks {
    /// What it showed and no site could be found for: listed, not judged.
    pub unmatched: Vec<String>,
    /// What it showed and could not be used: a shape that does not fit, a value said twice. The run is
    /// inconclusive.
    pub problems: Vec<String>,
    /// Anything else.
    pub notes: Vec<String>,
    /// Why it stopped before its end; what it computed until then is judged.
    pub crashed: Option<String>,
    /// Its logits are judged by the tokens that they choose, and as no site.
    pub tokens_only: bool,
    /// Variance of every logit that comes from how they were stored.
    pub logit_variance: f64,
}

/// Something that computes a model's passes and shows what it computed.
///
/// A tensor may hold fewer rows than its pass has tokens: then they are the last ones.
pub trait Subject {
    /// Runs one pass behind the passes before it; the values of all sites that it exposes.
    fn pass(&mut self, pass: &Pass) -> Result<PassTaps, SubjectError>;

    /// The taps whose values are its own, where others are filled in for it.
    fn own(&self) -> Option<&BTreeSet<String>> {
        None
    }

    /// What it has to say after its last pass.
    fn remarks(&mut self) -> Remarks {
        Remarks::default()
    }

    /// The weights that it multiplies with to get `site`, decoded from its own image.
    fn image(&mut self, site: Site) -> Option<Matrix> {
        let _ = site;
        None
    }

    /// The same of a routed expert.
    fn expert_image(&mut self, site: Site, expert: usize) -> Option<Matrix> {
        let _ = (site, expert);
        None
    }

    /// Costs of the last pass, where it counts them.
    fn cost(&self) -> Option<CostPerToken> {
        None
    }
}

/// The built-in NPU path.
pub struct NpuSubject(Npu);

impl NpuSubject {
    /// The path on an engine.
    pub fn new(
        config: &Config,
        weights: &Weights,
        engine: Engine,
        switches: Switches,
    ) -> Result<Self, SubjectError> {
        Ok(Self(Npu::init(config, weights, engine, switches)?))
    }

    /// The path, wrong on purpose.
    pub fn with_fault(
        config: &Config,
        weights: &Weights,
        engine: Engine,
        fault: std::sync::Arc<dyn device::Fault>,
    ) -> Result<Self, SubjectError> {
        Ok(Self(Npu::init_with_fault(config, weights, engine, Switches::default(), Some(fault))?))
    }
}

struct Collect(PassTaps);

impl TapSink for Collect {
    fn tap(&mut self, site: Site, shape: &[usize], values: &[f32]) {
        let tensor = Tensor::from_shape_vec(ndarray::IxDyn(shape), values.to_vec());
        self.0.insert(site, tensor.expect("a tap has as many values as its shape says"));
    }
}

impl Subject for NpuSubject {
    fn pass(&mut self, pass: &Pass) -> Result<PassTaps, SubjectError> {
        let mut taps = Collect(PassTaps::new());
        self.0.step_batch_tapped(&pass.ids, &mut taps)?;
        Ok(taps.0)
    }

    fn image(&mut self, site: Site) -> Option<Matrix> {
        self.0.device_weights(site).ok().flatten()
    }

    fn expert_image(&mut self, site: Site, expert: usize) -> Option<Matrix> {
        self.0.expert_weights(site, expert).ok().flatten()
    }

    fn cost(&self) -> Option<CostPerToken> {
        let weights =
            self.0.designs().into_iter().map(|(_, design)| (design.out * design.inner * 4) as u64).sum();
        Some(CostPerToken::of(self.0.counters(), weights))
    }
}

/// The reference as a subject.
pub struct ReferenceSubject<'m> {
    model: &'m Model,
    ops: Record,
    state: ModelState<Tensor>,
}

impl<'m> ReferenceSubject<'m> {
    /// The reference over a model.
    pub fn new(model: &'m Model) -> Self {
        Self { model, ops: Record::default(), state: model.fresh() }
    }
}

impl Subject for ReferenceSubject<'_> {
    fn pass(&mut self, pass: &Pass) -> Result<PassTaps, SubjectError> {
        self.model.pass(&mut self.ops, &mut self.state, &pass.ids);
        Ok(self.ops.take()?.into_iter().collect())
    }
}

/// An honest subject of a contract, but for one mutant.
pub struct MutantSubject<'m> {
    model: &'m Model,
    ops: MutantOps<'m>,
    state: ModelState<Tensor>,
}

impl<'m> MutantSubject<'m> {
    /// A subject that is wrong as `selection` says.
    pub fn new(model: &'m Model, contract: &'m Contract, selection: &'m Selection) -> Self {
        Self { model, ops: MutantOps::new(contract, selection), state: model.fresh() }
    }

    /// The sites at which the mutant has been applied so far.
    pub fn applied(&self) -> &[Site] {
        &self.ops.applied
    }
}

impl Subject for MutantSubject<'_> {
    fn pass(&mut self, pass: &Pass) -> Result<PassTaps, SubjectError> {
        self.model.pass(&mut self.ops, &mut self.state, &pass.ids);
        Ok(self.ops.take()?.into_iter().collect())
    }
}
