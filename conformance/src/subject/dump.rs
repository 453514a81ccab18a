//! A subject that somebody else ran: its values lie on disk.

use super::align::{Fit, Shapes, align, fit, shown};
use super::map::{Entry, NameMap};
use super::names::{Meaning, meaning, split_pass};
use super::{Remarks, Subject, SubjectError};
use crate::follow::PassTaps;
use crate::mutants::matches;
use crate::passes::{Pass, teacher_forced};
use crate::taps::ReadValue;
use golden::find_dumps;
use golden::import::arrays::Arrays;
use golden::import::llamacpp::KlBase;
use golden::import::npy::Array;
use reference::{Model, Tensor};
use spec::Site;
use std::collections::BTreeMap;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

/// A dump as named on the command line.
#[derive(Clone, Debug, PartialEq)]
pub struct DumpSpec {
    /// A dump, a directory of dumps, or what [`Arrays`] opens, or a base file of llama.cpp.
    pub path: PathBuf,
    /// A map file.
    pub map: Option<PathBuf>,
}

/// The run that a dump is of, as far as the dump says it.
#[derive(Clone, Debug, PartialEq)]
pub struct RunOfDump {
    /// The prompt.
    pub prompt: Option<Vec<u32>>,
    /// The ids that its steps were fed.
    pub greedy: Vec<u32>,
    /// How many steps it has.
    pub steps: usize,
}

impl RunOfDump {
    /// The passes, where the dump says all of their ids.
    pub fn passes(&self) -> Option<Vec<Pass>> {
        let prompt = self.prompt.as_ref()?;
        (self.greedy.len() >= self.steps).then(|| teacher_forced(prompt, &self.greedy, self.steps))
    }
}

enum Source {
    Arrays { arrays: Box<Arrays>, map: Box<NameMap> },
    Base { base: Box<KlBase>, chunk: usize },
}

/// One run of a dump, opened.
pub struct OpenedDump {
    source: Source,
    /// What the dump says about its run.
    pub run: RunOfDump,
}

fn unusable(error: impl std::fmt::Display) -> SubjectError {
    SubjectError::Unusable(error.to_string())
}

impl DumpSpec {
    /// Every run of it: one, or one a prompt.
    pub fn open(&self) -> Result<Vec<OpenedDump>, SubjectError> {
        let map = self.map.as_deref().map(NameMap::read).transpose().map_err(unusable)?.unwrap_or_default();
        if is_base(&self.path) {
            let chunks = KlBase::open(&self.path).map_err(unusable)?.n_chunk;
            return (0..chunks).map(|chunk| open_base(&self.path, chunk)).collect();
        }
        let inside = if self.path.is_dir() { find_dumps(&self.path).map_err(unusable)? } else { vec![] };
        let several = !inside.is_empty() && inside.iter().all(|name| !name.is_empty());
        if !several {
            return Ok(vec![open_arrays(&self.path, map)?]);
        }
        inside.iter().map(|name| open_arrays(&self.path.join(name), map.clone())).collect()
    }
}

fn is_base(path: &Path) -> bool {
    let mut magic = [0; 8];
    let read = std::fs::File::open(path).and_then(|mut file| file.read_exact(&mut magic));
    read.is_ok() && &magic == b"_logits_"
}

fn open_base(path: &Path, chunk: usize) -> Result<OpenedDump, SubjectError> {
    let base = KlBase::open(path).map_err(unusable)?;
    let tokens = base.tokens(chunk).unwrap_or_default();
    // Logits behind the last token of a chunk are not stored.
    let fed = tokens[..tokens.len().saturating_sub(1)]
        .iter()
        .map(|&id| u32::try_from(id).map_err(|_| unusable(format!("{}: token id {id}", path.display()))));
    let prompt = Some(fed.collect::<Result<Vec<u32>, _>>()?);
    let run = RunOfDump { prompt, greedy: vec![], steps: 0 };
    Ok(OpenedDump { source: Source::Base { base: Box::new(base), chunk }, run })
}

fn open_arrays(path: &Path, map: NameMap) -> Result<OpenedDump, SubjectError> {
    let arrays = Arrays::open(path).map_err(unusable)?;
    let mut run = RunOfDump { prompt: map.prompt.clone(), greedy: map.greedy.clone(), steps: 0 };
    if let Some(dump) = arrays.dump() {
        dump.verify_hashes().map_err(unusable)?;
        run.prompt = Some(dump.manifest().prompt.clone());
        run.greedy = dump.manifest().greedy.clone();
    }
    let mut logit_files = 0usize;
    for name in arrays.names() {
        let taps: Vec<String> = match map.find(name) {
            Some(entry) => entry.taps().into_iter().map(str::to_string).collect(),
            None => {
                logit_files += usize::from(matches!(meaning(name), Some(Meaning::Logits(_))));
                vec![name.to_string()]
            }
        };
        let step = |tap: &String| split_pass(tap).0?.strip_prefix("step")?.parse::<usize>().ok();
        run.steps = taps.iter().filter_map(step).chain([run.steps]).max().unwrap_or(0);
    }
    run.steps = run.steps.max(logit_files.saturating_sub(1));
    Ok(OpenedDump { source: Source::Arrays { arrays: Box::new(arrays), map: Box::new(map) }, run })
}

/// The values of a dump, matched to sites.
#[derive(Default)]
pub struct DumpSubject {
    taps: BTreeMap<String, PassTaps>,
    remarks: Remarks,
}

impl DumpSubject {
    /// Matches every array of a dump to a site of a pass; what does not match is remarked.
    pub fn new(opened: OpenedDump, model: &Model, passes: &[Pass]) -> Result<DumpSubject, SubjectError> {
        match opened.source {
            Source::Base { base, chunk } => Ok(Self::of_base(&base, chunk, passes)),
            Source::Arrays { arrays, map } => {
                let passed_over: Vec<String> =
                    arrays.passed_over().iter().map(|file| format!("{file} (no array)")).collect();
                let names: Vec<String> = arrays.names().map(str::to_string).collect();
                let mut matching = Matching {
                    arrays: Arc::new(Mutex::new(*arrays)),
                    shapes: Shapes::of(model),
                    passes,
                    from: BTreeMap::new(),
                    subject: DumpSubject::default(),
                };
                matching.subject.remarks.unmatched.extend(passed_over);
                matching.all(names, &map);
                Ok(matching.subject)
            }
        }
    }

    /// Log-probabilities are judged as logits, and as no site: they were stored in 16 bits.
    fn of_base(base: &KlBase, chunk: usize, passes: &[Pass]) -> DumpSubject {
        let rows: Vec<_> = (0..base.rows_per_chunk()).filter_map(|row| base.log_probs(chunk, row)).collect();
        let mut subject = DumpSubject::default();
        subject.remarks.tokens_only = true;
        let step = rows.iter().fold(0f32, |largest, row| largest.max(row.step));
        subject.remarks.logit_variance = f64::from(step).powi(2) / 12.0;
        subject.remarks.notes.push(format!(
            "log-probabilities of the last {} positions in steps of {step:.1e}: judged by token and KL only",
            rows.len()
        ));
        let values: Vec<f32> = rows.iter().flat_map(|row| row.values.iter().copied()).collect();
        if let (Some(pass), Ok(logits)) =
            (passes.first(), Tensor::from_shape_vec(ndarray::IxDyn(&[rows.len(), base.n_vocab]), values))
        {
            subject.taps.entry(pass.name.clone()).or_default().insert(Site::model("logits"), logits);
        }
        subject
    }
}

/// Where the values of one site or several come from.
#[derive(Clone)]
struct Origin {
    name: String,
    /// What the map file declares of it, and the axes of its site.
    declared: Option<(Entry, &'static [&'static str])>,
    /// Of all columns, those from one up to another.
    columns: Option<(usize, usize)>,
}

impl Origin {
    fn plain(name: &str) -> Origin {
        Origin { name: name.to_string(), declared: None, columns: None }
    }

    fn read(&self, arrays: &Mutex<Arrays>) -> Result<Array, String> {
        let mut arrays = arrays.lock().unwrap_or_else(PoisonError::into_inner);
        let array = match &self.declared {
            Some((entry, axes)) => entry.read(&mut arrays, &self.name, axes)?,
            None => arrays.read(&self.name).map_err(|error| error.to_string())?,
        };
        Ok(match self.columns {
            Some((start, end)) => some_columns(&array, start, end),
            None => array,
        })
    }

    /// The value as its site has it, of an array whose shape was found to fit.
    fn value(
        &self,
        arrays: &Mutex<Arrays>,
        fitted: &[usize],
        how: Fit,
        shape: &[usize],
        first: usize,
    ) -> Result<Tensor, String> {
        let array = self.read(arrays)?;
        match array.shape == fitted {
            true => Ok(align(how, shape, &array, first)),
            false => Err(format!("{} had shape {fitted:?} and now has {:?}", self.name, array.shape)),
        }
    }
}

/// Columns `start..end` of an array, rows over all its other axes.
fn some_columns(array: &Array, start: usize, end: usize) -> Array {
    let columns = array.shape.last().copied().unwrap_or(0).max(1);
    let rows = array.values.chunks_exact(columns);
    Array {
        shape: vec![array.values.len() / columns, end.min(columns) - start.min(columns)],
        values: rows.flat_map(|row| row[start.min(columns)..end.min(columns)].iter().copied()).collect(),
        dtype: array.dtype.clone(),
    }
}

/// Every array is read once, to see that it can be, one at a time; what is kept is where it lies.
struct Matching<'a> {
    arrays: Arc<Mutex<Arrays>>,
    shapes: Shapes,
    passes: &'a [Pass],
    /// Which array a tap came from.
    from: BTreeMap<(String, Site), String>,
    subject: DumpSubject,
}

impl Matching<'_> {
    fn all(&mut self, names: Vec<String>, map: &NameMap) {
        let mut logit_files: Vec<(u64, String)> = Vec::new();
        for name in names {
            if map.ignore.iter().any(|glob| matches(glob, &name)) || map.is_scales(&name) {
                continue;
            }
            if let Some(entry) = map.find(&name) {
                if let Err(reason) = self.declared(&name, &entry) {
                    self.subject.remarks.problems.push(reason);
                }
                continue;
            }
            match meaning(&name) {
                None => self.subject.remarks.unmatched.push(name),
                Some(Meaning::Logits(number)) => logit_files.push((number, name)),
                Some(Meaning::Site { pass, sites }) => {
                    let known: Vec<Site> =
                        sites.iter().copied().filter(|site| self.shapes.has(site)).collect();
                    if known.is_empty() {
                        let sites: Vec<String> = sites.iter().map(Site::to_string).collect();
                        let missing = format!("{name} (this model has no {})", sites.join(" or "));
                        self.subject.remarks.unmatched.push(missing);
                        continue;
                    }
                    let placed = self.place(&Origin::plain(&name), pass.as_deref(), &known);
                    if let Err(reason) = placed {
                        self.subject.remarks.problems.push(reason);
                    }
                }
            }
        }
        self.logits(logit_files);
    }

    /// One array of logits a generated token, in the order of their numbers.
    fn logits(&mut self, mut files: Vec<(u64, String)>) {
        files.sort();
        for (n, (_, name)) in files.into_iter().enumerate() {
            let Some(pass) = self.passes.get(n).map(|pass| pass.name.clone()) else {
                self.subject.remarks.unmatched.push(format!("{name} (no such step in the run)"));
                continue;
            };
            let placed = self.place(&Origin::plain(&name), Some(&pass), &[Site::model("logits")]);
            if let Err(reason) = placed {
                self.subject.remarks.problems.push(reason);
            }
        }
    }

    /// An array that the map file declares.
    fn declared(&mut self, name: &str, entry: &Entry) -> Result<(), String> {
        let taps = entry.taps();
        let mut targets = Vec::new();
        for tap in &taps {
            let (pass, site) = split_pass(tap);
            let site = Site::parse(site).filter(|site| self.shapes.has(site));
            let site =
                site.ok_or_else(|| format!("{name}: the map says {tap}, which this model does not have"))?;
            targets.push((pass, site));
        }
        let Some((pass, first)) = targets.first() else { return Ok(()) };
        let declared = Some((entry.clone(), first.info().axes));
        let origin = Origin { declared, ..Origin::plain(name) };
        if targets.len() == 1 {
            return self.place(&origin, *pass, &[*first]);
        }
        // Side by side along the last axis, each as wide as its site.
        let columns = origin.read(&self.arrays)?.shape.last().copied().unwrap_or(0);
        let widths: Vec<usize> = targets
            .iter()
            .map(|(_, site)| self.shapes.at(site, 1, 1).map_or(0, |shape| shape.iter().product()))
            .collect();
        if widths.iter().sum::<usize>() != columns || columns == 0 {
            return Err(format!("{name}: {columns} columns, but {} take {widths:?}", taps.join(", ")));
        }
        let mut start = 0;
        for ((pass, site), width) in targets.iter().zip(widths) {
            let part = Origin { columns: Some((start, start + width)), ..origin.clone() };
            self.place(&part, *pass, &[*site])?;
            start += width;
        }
        Ok(())
    }

    /// Puts an array to the candidate that it fits best.
    fn place(&mut self, origin: &Origin, pass: Option<&str>, sites: &[Site]) -> Result<(), String> {
        let (name, found) = (&origin.name, origin.read(&self.arrays)?.shape);
        let all: usize = self.passes.iter().map(|pass| pass.ids.len()).sum();
        let index = match pass {
            None => Some(0),
            Some("final") => self.passes.len().checked_sub(1),
            Some(pass) => self.passes.iter().position(|p| p.name == pass),
        };
        let Some(index) = index.filter(|&index| index < self.passes.len()) else {
            self.subject.remarks.unmatched.push(format!("{name} (no such pass in the run)"));
            return Ok(());
        };
        let expected = |site: &Site, index: usize| {
            let keys = self.passes[..=index].iter().map(|pass| pass.ids.len()).sum();
            self.shapes.at(site, self.passes[index].ids.len(), keys)
        };
        let all = if pass.is_none() { all } else { 0 };
        let fitting =
            sites.iter().filter_map(|site| Some((fit(site, &expected(site, index)?, &found, all)?, *site)));
        let Some((how, site)) = fitting.min_by_key(|(how, _)| *how) else {
            let takes: Vec<String> = sites
                .iter()
                .map(|site| format!("{site} {:?}", expected(site, index).unwrap_or_default()))
                .collect();
            return Err(format!(
                "{name} has shape {found:?}, but {} takes {}; declare its axes with --map",
                self.passes[index].name,
                takes.join(" or ")
            ));
        };
        let indices = if how == Fit::AllPasses { 0..self.passes.len() } else { index..index + 1 };
        let stored: Vec<(String, Vec<usize>, ReadValue)> = indices
            .map(|index| {
                let first = self.passes[..index].iter().map(|pass| pass.ids.len()).sum();
                let shape = expected(&site, index).unwrap_or_default();
                let (arrays, origin) = (self.arrays.clone(), origin.clone());
                let (fitted, whole) = (found.clone(), shape.clone());
                let read = move || origin.value(&arrays, &fitted, how, &whole, first);
                (self.passes[index].name.clone(), shown(how, &shape), Arc::new(read) as ReadValue)
            })
            .collect();
        stored.into_iter().try_for_each(|(pass, shape, read)| self.insert(name, pass, site, shape, read))
    }

    /// Two arrays for one tap must be equal, or neither is judged.
    fn insert(
        &mut self,
        name: &str,
        pass: String,
        site: Site,
        shape: Vec<usize>,
        read: ReadValue,
    ) -> Result<(), String> {
        let taps = self.subject.taps.entry(pass.clone()).or_default();
        let key = (pass, site);
        if let Some(other) = self.from.get(&key) {
            let bits = |t: &Tensor| t.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
            let value = read()?;
            let equal = taps
                .get(&site)
                .is_some_and(|before| before.shape() == value.shape() && bits(&before) == bits(&value));
            if equal {
                return Ok(());
            }
            taps.remove(&site);
            return Err(format!(
                "{other} and {name} both stand for {}.{site} and differ; say which with --map",
                key.0
            ));
        }
        taps.insert_stored(site, shape, read);
        self.from.insert(key, name.to_string());
        Ok(())
    }
}

impl Subject for DumpSubject {
    fn pass(&mut self, pass: &Pass) -> Result<PassTaps, SubjectError> {
        Ok(self.taps.remove(&pass.name).unwrap_or_default())
    }

    fn remarks(&mut self) -> Remarks {
        std::mem::take(&mut self.remarks)
    }
}
