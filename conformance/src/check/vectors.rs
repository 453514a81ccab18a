//! Vectors for a bench that has no link to this program: cases go out as files, results come back as files.
//!
//! ```text
//! DIR/manifest.json               schema karat/vectors/1: seed, contract, and a line a case
//! DIR/linear-row_17/case.json     the op, its numbers, names and shapes, as a program under test gets them
//!                   inputs.safetensors     f32
//!                   expected.safetensors   f64: r, the exact result; variance, of an honest subject of the
//!                                          contract; bound, which its error never exceeds
//!                   outputs.safetensors    with a tensor y, or y.npy, or y.f32: to be brought back
//! ```
//!
//! What is brought back is judged against cases made anew from the seed; the files must be those cases still,
//! or the vectors are broken.

use super::forms::Forms;
use super::{CaseResult, Given, Inside, OpSubject, Options, check, exact};
use crate::cases::{self, Case, Dims, Setting, Suite};
use crate::contract::Contract;
use crate::judge::Verdict;
use crate::subject::Answer;
use crate::subject::command::{outputs, write_case};
use crate::variance::{Expected, Truth, expect};
use device::plugin::OpCall;
use fixtures::random::SplitMix64;
use golden::sha256_file;
use reference::{Call, Plain, Tensor};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use spec::Site;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::{fs, io};

const SCHEMA: &str = "karat/vectors/1";
const FILES: [&str; 3] = ["case.json", "inputs.safetensors", "expected.safetensors"];

/// Why vectors cannot be written or judged.
#[derive(Debug, thiserror::Error)]
pub enum VectorsError {
    /// A file that cannot be written or read.
    #[error("{path}: {source}")]
    Io {
        /// The file.
        path: String,
        /// Why.
        source: io::Error,
    },
    /// The directory holds something already.
    #[error("{path} is not empty; vectors are written to a new directory")]
    NotEmpty {
        /// The directory.
        path: String,
    },
    /// The manifest, or a file that it vouches for, is not what was exported.
    #[error("{path}: {reason}; export the vectors again")]
    Broken {
        /// The file.
        path: String,
        /// What is wrong.
        reason: String,
    },
}

/// `manifest.json`
#[derive(Debug, Serialize, Deserialize)]
struct Manifest {
    schema: String,
    seed: u64,
    contract: Contract,
    cases: Vec<Entry>,
}

/// One case of it.
#[derive(Debug, Serialize, Deserialize)]
struct Entry {
    case: String,
    dims: String,
    suite: String,
    catches: String,
    dir: String,
    op: String,
    output: Vec<usize>,
    /// sha256 by file.
    files: BTreeMap<String, String>,
}

/// What came of an export.
#[derive(Debug)]
pub struct Exported {
    /// How many cases were written.
    pub written: usize,
    /// Cases whose op has no form in plain arrays.
    pub passed_over: Vec<&'static str>,
}

/// A case as plain arrays, with what an honest subject gives.
struct Vector {
    at: Site,
    call: OpCall,
    expected: Expected,
}

fn vector(case: &Case, contract: &Contract, seed: u64) -> Option<Vector> {
    let setting = Setting { suite: case.suite, product: contract.linear };
    let mut made = None;
    let (mut forms, mut inside) = (Forms::default(), Inside::default());
    (case.build)(&case.dims, setting, &mut SplitMix64::new(seed), &mut |at, call| {
        let operands = inside.operands(call);
        let expected = match case.suite {
            Suite::Structure => exact(call),
            Suite::Rounding => expect(at, &call.with(&operands), contract, Truth::Image).ok(),
        };
        made = expected.and_then(|expected| {
            inside.add(&expected);
            // Of an attention's steps the last is the vector.
            let call = forms.next(call, expected.r.shape())?;
            Some(Vector { at, call, expected })
        });
    });
    made
}

fn failed(path: &Path) -> impl Fn(io::Error) -> VectorsError {
    let path = path.display().to_string();
    move |source| VectorsError::Io { path: path.clone(), source }
}

/// Writes `cases` to a new directory.
pub fn export(dir: &Path, cases: &[Case], contract: &Contract, seed: u64) -> Result<Exported, VectorsError> {
    fs::create_dir_all(dir).map_err(failed(dir))?;
    if fs::read_dir(dir).map_err(failed(dir))?.next().is_some() {
        return Err(VectorsError::NotEmpty { path: dir.display().to_string() });
    }
    let mut manifest =
        Manifest { schema: SCHEMA.into(), seed, contract: contract.clone(), cases: Vec::new() };
    let mut passed_over = Vec::new();
    for case in cases {
        let Some(vector) = vector(case, contract, seed) else {
            passed_over.push(case.name);
            continue;
        };
        let same = |name: &str| manifest.cases.iter().filter(|entry| entry.case == name).count();
        let folder = match same(case.name) {
            0 => case.name.replace('/', "-"),
            n => format!("{}-{n}", case.name.replace('/', "-")),
        };
        let to = dir.join(&folder);
        write_case(&to, &vector.at.to_string(), &vector.call).map_err(failed(&to))?;
        let file = to.join(FILES[2]);
        fs::write(&file, expected_file(&vector.expected)).map_err(failed(&file))?;
        let mut files = BTreeMap::new();
        for file in FILES {
            files.insert(file.to_string(), hash(&to.join(file))?);
        }
        manifest.cases.push(Entry {
            case: case.name.into(),
            dims: case.dims.to_string(),
            suite: format!("{:?}", case.suite).to_lowercase(),
            catches: case.catches.into(),
            dir: folder,
            op: vector.call.op,
            output: vector.call.output,
            files,
        });
    }
    let file = dir.join("manifest.json");
    let text = serde_json::to_string_pretty(&manifest).map_err(io::Error::from).map_err(failed(&file))?;
    fs::write(&file, text + "\n").map_err(failed(&file))?;
    Ok(Exported { written: manifest.cases.len(), passed_over })
}

fn hash(file: &Path) -> Result<String, VectorsError> {
    sha256_file(file)
        .map_err(|error| VectorsError::Broken { path: file.display().to_string(), reason: error.to_string() })
}

/// `r`, `variance` and `bound` as f64, one behind another.
fn expected_file(expected: &Expected) -> Vec<u8> {
    let tensors = [("r", &expected.r), ("variance", &expected.variance), ("bound", &expected.bound)];
    let (mut header, mut bytes) = (serde_json::Map::new(), Vec::new());
    header.insert("__metadata__".into(), json!({"calibrated": expected.calibrated.to_string()}));
    for (name, values) in tensors {
        let begin = bytes.len();
        values.iter().for_each(|v| bytes.extend(v.to_le_bytes()));
        let entry = json!({"dtype": "F64", "shape": values.shape(), "data_offsets": [begin, bytes.len()]});
        header.insert(name.into(), entry);
    }
    let mut header = Value::Object(header).to_string();
    header += &" ".repeat(header.len().next_multiple_of(8) - header.len());
    let mut file = Vec::with_capacity(8 + header.len() + bytes.len());
    file.extend((header.len() as u64).to_le_bytes());
    file.extend(header.as_bytes());
    file.append(&mut bytes);
    file
}

/// One result that was brought back, in the place of a subject.
pub struct Brought {
    call: OpCall,
    answer: Answer,
    forms: Forms,
}

impl Brought {
    /// Before the case.
    pub(super) fn begin(&mut self) {
        self.forms = Forms::default();
    }

    /// The result, for the call that it is of and no other.
    pub(super) fn run(&mut self, call: &Call<Tensor>) -> Given {
        let value = Plain::default().value(call);
        if self.forms.next(call, value.shape()).is_none_or(|call| call != self.call) {
            return Given::NotSupported;
        }
        match &self.answer {
            Answer::Values(values) => match Tensor::from_shape_vec(value.raw_dim(), values.clone()) {
                Ok(value) => Given::Values(value),
                Err(error) => Given::Stopped(error.to_string()),
            },
            Answer::NotSupported => Given::NotSupported,
            Answer::Unusable(_) => Given::Values(value.mapv(|_| f32::NAN).into_shared()),
        }
    }
}

/// Vectors whose results were brought back.
pub struct Vectors {
    dir: PathBuf,
    manifest: Manifest,
}

impl Vectors {
    /// Opens a directory.
    pub fn open(dir: &Path) -> Result<Vectors, VectorsError> {
        let file = dir.join("manifest.json");
        let text = fs::read_to_string(&file).map_err(failed(&file))?;
        let broken = |reason: String| VectorsError::Broken { path: file.display().to_string(), reason };
        let schema: Value = serde_json::from_str(&text).map_err(|error| broken(error.to_string()))?;
        if schema["schema"] != SCHEMA {
            return Err(broken(format!("its schema is {}, expected {SCHEMA}", schema["schema"])));
        }
        let manifest = serde_json::from_value(schema).map_err(|error| broken(error.to_string()))?;
        Ok(Vectors { dir: dir.to_path_buf(), manifest })
    }

    /// The contract that they were exported for.
    pub fn contract(&self) -> &Contract {
        &self.manifest.contract
    }

    /// Judges the results of all cases that `wanted` lets through, by name.
    pub fn judge(&self, wanted: impl Fn(&str) -> bool) -> Result<Vec<CaseResult>, VectorsError> {
        let entries = self.manifest.cases.iter().filter(|entry| wanted(&entry.case));
        entries.map(|entry| self.one(entry)).collect()
    }

    fn one(&self, entry: &Entry) -> Result<CaseResult, VectorsError> {
        let dir = self.dir.join(&entry.dir);
        let broken = |path: &Path, reason: &str| VectorsError::Broken {
            path: path.display().to_string(),
            reason: reason.to_string(),
        };
        let manifest = self.dir.join("manifest.json");
        let plain_name = entry.dir.chars().all(|c| c.is_ascii_alphanumeric() || c == '-' || c == '_');
        if !plain_name || entry.dir.is_empty() {
            return Err(broken(&manifest, &format!("{:?} is no directory of a case", entry.dir)));
        }
        let (contract, seed) = (&self.manifest.contract, self.manifest.seed);
        let case = named(&entry.case, &entry.dims);
        let made = case.as_ref().and_then(|case| vector(case, contract, seed));
        let (Some(case), Some(made)) = (case, made) else {
            let reason = format!("no case of this build is {} with {}", entry.case, entry.dims);
            return Err(broken(&manifest, &reason));
        };
        if entry.output != made.call.output || entry.op != made.call.op {
            let (said, is) = ((&entry.op, &entry.output), (&made.call.op, &made.call.output));
            let reason = format!("{} is said to give {said:?}, but gives {is:?}", entry.case);
            return Err(broken(&manifest, &reason));
        }
        for file in FILES {
            let path = dir.join(file);
            if entry.files.get(file) != Some(&hash(&path)?) {
                return Err(broken(&path, "its sha256 is not the manifest's"));
            }
        }
        let again = tempfile::tempdir().map_err(failed(&dir))?;
        write_case(again.path(), &made.at.to_string(), &made.call).map_err(failed(&dir))?;
        if entry.files.get(FILES[1]) != Some(&hash(&again.path().join(FILES[1]))?) {
            return Err(broken(
                &dir.join(FILES[1]),
                "they are not the inputs that this build makes of its seed",
            ));
        }
        let missing = !["outputs.safetensors", "y.npy", "y.f32"].iter().any(|file| dir.join(file).is_file());
        let answer = if missing { Answer::NotSupported } else { outputs(&dir, &made.call) };
        let reason = match &answer {
            Answer::Unusable(reason) => Some(format!("{}: {reason}", entry.dir)),
            Answer::NotSupported => Some(format!(
                "no result was brought back: {} has neither outputs.safetensors nor y.npy nor y.f32",
                entry.dir
            )),
            Answer::Values(_) => None,
        };
        let arguments = format!(" --from {}", crate::cli::quoted(&self.dir.display().to_string()));
        let options = Options { contract, seed, arguments };
        let mut subject = OpSubject::Brought(Brought { call: made.call, answer, forms: Forms::default() });
        let mut result = check(&case, &mut subject, &options);
        result.shrunk = None;
        if result.repro.is_some() {
            result.repro = Some(format!("karat check --case {}{}", case.name, options.arguments));
        }
        if let Some(reason) = reason {
            (result.pattern, result.first_wrong, result.explanation) = (Some(reason), None, None);
        }
        Ok(result)
    }
}

/// Cases without a result among `results`.
pub fn missing(results: &[CaseResult]) -> usize {
    results.iter().filter(|case| case.verdict == Verdict::NotSupported).count()
}

/// A case by its name and sizes.
fn named(name: &str, dims: &str) -> Option<Case> {
    let shapes = cases::linear_of_shape(64, 64);
    let mut case = cases::all().into_iter().chain(shapes).find(|case| case.name == name)?;
    let sizes: Vec<(&str, &str)> = dims.split(',').filter_map(|size| size.split_once('=')).collect();
    if sizes.len() != case.dims.0.len() {
        return None;
    }
    let mut known = Dims(Vec::new());
    for ((name, _), (said, size)) in case.dims.0.iter().zip(sizes) {
        let size = size.parse().ok().filter(|size| (1..=1 << 20).contains(size))?;
        (*name == said).then(|| known.0.push((name, size)))?;
    }
    // What a manifest asks for must fit into memory: no two sizes span more than a large head.
    let mut sizes: Vec<usize> = known.0.iter().map(|(_, size)| *size).collect();
    sizes.sort_unstable();
    let widest: usize = sizes.iter().rev().take(2).product();
    (widest <= 1 << 31).then_some(())?;
    case.dims = known;
    Some(case)
}
