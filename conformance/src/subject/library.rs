//! A shared library as a subject: its ops in the place of the reference's, or a whole model of its own.

use super::ops::{Answer, Kernel};
use super::{Remarks, Subject, SubjectError};
use crate::contract::Contract;
use crate::follow::PassTaps;
use crate::passes::Pass;
use device::plugin::{Info, OpCall, Plugin, PluginError, Reply, Tap};
use reference::{Model, Tensor};
use spec::Site;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

/// The hidden verb that serves a library.
pub const SERVE: &str = "serve-plugin";

/// A library as named on the command line.
#[derive(Clone, Debug, PartialEq)]
pub struct LibrarySpec {
    /// The file.
    pub path: PathBuf,
    /// How long one call may take.
    pub timeout: Duration,
    /// The package that a whole model is loaded from.
    pub package: Option<PathBuf>,
}

impl LibrarySpec {
    /// Starts its process.
    pub fn start(&self) -> Result<Plugin, SubjectError> {
        let karat = std::env::current_exe()
            .map_err(|error| SubjectError::Unusable(format!("the path of this program: {error}")))?;
        let mut command = Command::new(karat);
        command.arg(SERVE).arg(&self.path);
        Plugin::start(command, self.timeout).map_err(|error| match error {
            PluginError::Refused(reason) => SubjectError::Unusable(reason),
            other => SubjectError::Stopped(other.to_string()),
        })
    }
}

/// The contract that a library declares: a built-in one by name, or JSON; f32 where it says nothing.
pub fn declared(info: &Info) -> Result<Contract, String> {
    let text = info.contract.as_deref().unwrap_or("f32").trim();
    if let Some(contract) = Contract::named(text) {
        return Ok(contract);
    }
    Contract::parse(text, &info.name).map_err(|error| {
        let known = Contract::NAMES.join(", ");
        format!("the contract of {} is neither one of {known} nor a contract as JSON: {error}", info.name)
    })
}

/// The ops of a library.
pub struct LibraryKernel(pub Plugin);

impl Kernel for LibraryKernel {
    fn may_have(&self, op: &str) -> bool {
        self.0.info().ops.iter().any(|known| known == op)
    }

    fn call(&mut self, tap: &str, call: &OpCall) -> Result<Answer, String> {
        let during = format!("{} at {tap}", call.op);
        match self.0.call(call, &during).map_err(|error| error.to_string())? {
            Reply::Values(values) => Ok(Answer::Values(values)),
            Reply::NotSupported => Ok(Answer::NotSupported),
            // Memory that was written outside its bounds is not to be trusted any further.
            Reply::Wild(what) => Err(format!("{during}: {what}")),
            Reply::Failed(reason) => Ok(Answer::Unusable(reason)),
            other => Err(format!("{during}: the library's process answered {other:?}")),
        }
    }

    fn notes(&mut self) -> Vec<String> {
        let mut notes = notes(&self.0);
        if self.0.info().model {
            let not_loaded =
                "its whole model is loaded where one package is named; here its single ops were judged";
            notes.push(not_loaded.into());
        }
        notes
    }
}

fn notes(plugin: &Plugin) -> Vec<String> {
    let said = plugin.said();
    said.lines()
        .last()
        .map(|line| format!("the library wrote to standard error, last: {line}"))
        .into_iter()
        .collect()
}

/// A library that runs whole models.
pub struct LibraryModel {
    plugin: Plugin,
    vocab: usize,
    shapes: super::align::Shapes,
    keys: usize,
    /// The state behind the last pass, where the library shows it.
    state: Vec<Tap>,
    remarks: Remarks,
}

impl LibraryModel {
    /// Loads the package into the library.
    pub fn new(mut plugin: Plugin, package: &str, model: &Model, vocab: usize) -> Result<Self, SubjectError> {
        let stopped = |error: PluginError| SubjectError::Stopped(error.to_string());
        match plugin.load(package).map_err(stopped)? {
            Reply::Done => {}
            Reply::Failed(reason) | Reply::Wild(reason) => return Err(SubjectError::NotSupported(reason)),
            _ => return Err(SubjectError::NotSupported(format!("the library does not load {package}"))),
        }
        plugin.reset().map_err(stopped)?;
        let shapes = super::align::Shapes::of(model);
        let mut remarks = Remarks::default();
        if plugin.info().state {
            let how = "its state was read behind every pass, and put back after a reset before the next";
            remarks.notes.push(how.into());
        }
        Ok(Self { plugin, vocab, shapes, keys: 0, state: Vec::new(), remarks })
    }

    /// Puts the state behind the last pass into a model that has forgotten everything.
    fn put_back(&mut self, pass: &Pass) -> Result<(), SubjectError> {
        if self.state.is_empty() {
            return Ok(());
        }
        let stopped = |what: String| SubjectError::Stopped(format!("before {}: {what}", pass.name));
        let mut replies = vec![self.plugin.reset()];
        for tap in std::mem::take(&mut self.state) {
            replies.push(self.plugin.set_state(&tap));
        }
        for reply in replies {
            match reply.map_err(|error| stopped(error.to_string()))? {
                Reply::Done => {}
                Reply::Failed(reason) => return Err(stopped(reason)),
                other => return Err(stopped(format!("the state was put back and answered with {other:?}"))),
            }
        }
        Ok(())
    }

    /// Reads the state behind a pass; what of it has a site is judged there.
    fn read_state(&mut self, pass: &Pass, taps: &mut PassTaps) -> Result<(), SubjectError> {
        let stopped = |what: String| SubjectError::Stopped(format!("behind {}: {what}", pass.name));
        match self.plugin.state().map_err(|error| stopped(error.to_string()))? {
            Reply::Taps(shown) => {
                self.state.clone_from(&shown);
                let has_site = |tap: &Tap| Site::parse(&tap.site).is_some_and(|site| self.shapes.has(&site));
                let judged: Vec<Tap> = shown.into_iter().filter(has_site).collect();
                judged.into_iter().for_each(|tap| self.place(pass, tap, taps));
                Ok(())
            }
            Reply::NotSupported => Ok(()),
            Reply::Failed(reason) => Err(stopped(reason)),
            other => Err(stopped(format!("state_get answered {other:?}"))),
        }
    }

    fn place(&mut self, pass: &Pass, tap: Tap, taps: &mut PassTaps) {
        let site = Site::parse(&tap.site).filter(|site| self.shapes.has(site));
        let Some(site) = site else {
            if !self.remarks.unmatched.contains(&tap.site) {
                self.remarks.unmatched.push(tap.site);
            }
            return;
        };
        let expected = self.shapes.at(&site, pass.ids.len(), self.keys).unwrap_or_default();
        let same = expected.iter().product::<usize>() == tap.values.len();
        match Tensor::from_shape_vec(ndarray::IxDyn(&expected), tap.values) {
            Ok(value) if same => {
                taps.insert(site, value);
            }
            _ => self
                .remarks
                .problems
                .push(format!("{}.{site} has shape {:?}, expected {expected:?}", pass.name, tap.shape)),
        }
    }
}

impl Subject for LibraryModel {
    fn pass(&mut self, pass: &Pass) -> Result<PassTaps, SubjectError> {
        self.keys += pass.ids.len();
        self.put_back(pass)?;
        let reply = self.plugin.step(&pass.ids, self.vocab, &pass.name);
        let mut taps = PassTaps::new();
        match reply.map_err(|error| SubjectError::Stopped(error.to_string()))? {
            Reply::Taps(shown) => shown.into_iter().for_each(|tap| self.place(pass, tap, &mut taps)),
            Reply::NotSupported => {
                return Err(SubjectError::NotSupported(format!("{}: the library says so", pass.name)));
            }
            Reply::Failed(reason) | Reply::Wild(reason) => {
                return Err(SubjectError::Stopped(format!("{}: {reason}", pass.name)));
            }
            other => return Err(SubjectError::Stopped(format!("{}: answered {other:?}", pass.name))),
        }
        if self.plugin.info().state {
            self.read_state(pass, &mut taps)?;
        }
        Ok(taps)
    }

    fn remarks(&mut self) -> Remarks {
        let mut remarks = std::mem::take(&mut self.remarks);
        remarks.notes.append(&mut notes(&self.plugin));
        remarks
    }
}
