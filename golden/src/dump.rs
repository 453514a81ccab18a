//! An opened dump: manifest in memory, values mapped.

use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::ops::Deref;
use std::path::{Path, PathBuf};

use safetensors::tensor::Dtype as StDtype;

use crate::container::Container;
use crate::manifest::{self, Dtype, MANIFEST_FILE, Manifest, TAPS_FILE, TapInfo, TapSummary, passes_of};
use crate::{DumpError, oracle};

#[cfg(target_endian = "big")]
compile_error!("dumps are little-endian and are borrowed as they lie in the file");

/// The largest integer up to which every i32 is an f32.
const EXACT: i32 = 1 << 24;

/// The taps of one run, on disk.
pub struct Dump {
    path: PathBuf,
    manifest_file: PathBuf,
    manifest: Manifest,
    taps: Vec<TapInfo>,
    index: HashMap<String, usize>,
    container: Container,
    noise: BTreeMap<String, Noise>,
    files: BTreeMap<String, String>,
    raw: serde_json::Value,
}

/// How far other correct implementations were from the oracle at one tap.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Noise {
    /// Largest absolute value of the tap.
    pub max_abs: f64,
    /// Largest difference to an evaluation in float64.
    pub f64_diff: f64,
    /// Largest difference to an independent evaluation in float32.
    pub f32_diff: f64,
}

/// The values of one tap, borrowed from the file where its bytes lie as f32 should.
#[derive(Clone, Debug)]
pub struct TapValues<'a> {
    /// Length of each axis, slowest first.
    pub shape: &'a [usize],
    /// The values, last axis fastest.
    pub values: Cow<'a, [f32]>,
}

impl Deref for TapValues<'_> {
    type Target = [f32];

    fn deref(&self) -> &[f32] {
        &self.values
    }
}

impl Dump {
    /// Opens a directory with `manifest.json` and `taps.safetensors`, or one with `golden.json`,
    /// `golden.safetensors` and perhaps `noise.json`.
    ///
    /// Checks that both halves are there, that the tensor file is whole, and that it holds exactly the
    /// tensors of the manifest in their shapes. Reads no values: see [`Dump::verify_hashes`].
    pub fn open(path: impl AsRef<Path>) -> Result<Dump, DumpError> {
        let path = path.as_ref();
        fs::metadata(path).map_err(DumpError::io(path))?;
        let has = |name: &str| path.join(name).is_file();
        let pairs = [(MANIFEST_FILE, TAPS_FILE), (oracle::JSON, oracle::TENSORS)];
        for (json, tensors) in pairs {
            match (has(json), has(tensors)) {
                (true, true) if json == MANIFEST_FILE => return Dump::open_own(path),
                (true, true) => return Dump::open_oracle(path),
                (false, false) => {}
                (json_there, _) => {
                    let (present, missing) = if json_there { (json, tensors) } else { (tensors, json) };
                    let (present, missing) = (present.to_owned(), missing.to_owned());
                    return Err(DumpError::HalfWritten { path: path.to_owned(), present, missing });
                }
            }
        }
        Err(DumpError::NotADump { path: path.to_owned() })
    }

    fn open_own(path: &Path) -> Result<Dump, DumpError> {
        let manifest_file = path.join(MANIFEST_FILE);
        let text = fs::read(&manifest_file).map_err(DumpError::io(&manifest_file))?;
        let (manifest, taps, raw) = manifest::from_text(&manifest_file, &text)?;
        let container = Container::open(&path.join(TAPS_FILE))?;
        Dump::new(path, manifest_file, manifest, taps, container, raw)
    }

    fn open_oracle(path: &Path) -> Result<Dump, DumpError> {
        let manifest_file = path.join(oracle::JSON);
        let text = fs::read(&manifest_file).map_err(DumpError::io(&manifest_file))?;
        let oracle = oracle::read(&manifest_file, &text)?;
        let container = Container::open(&path.join(oracle::TENSORS))?;
        let mut dump = Dump::new(path, manifest_file, oracle.manifest, oracle.taps, container, oracle.raw)?;
        dump.files = oracle.files;
        let noise = path.join(oracle::NOISE);
        if noise.is_file() {
            let text = fs::read(&noise).map_err(DumpError::io(&noise))?;
            dump.noise = oracle::read_noise(&noise, &text)?;
        }
        Ok(dump)
    }

    fn new(
        path: &Path,
        manifest_file: PathBuf,
        manifest: Manifest,
        taps: Vec<TapInfo>,
        container: Container,
        raw: serde_json::Value,
    ) -> Result<Dump, DumpError> {
        let index: HashMap<String, usize> =
            taps.iter().enumerate().map(|(i, tap)| (tap.name.clone(), i)).collect();
        for tap in taps.iter().filter(|tap| tap.stored) {
            let mismatch = |expected: String, found: String| DumpError::Tensor {
                path: container.path.clone(),
                tensor: tap.name.clone(),
                expected,
                found,
            };
            let says =
                format!("{} {:?} as in {}", dtype_name(tap.dtype), tap.shape, file_name(&manifest_file));
            let Some(slot) = container.get(&tap.name) else {
                return Err(mismatch(says, "no such tensor".to_owned()));
            };
            if slot.dtype != stored_as(tap.dtype) || slot.shape != tap.shape {
                return Err(mismatch(says, format!("{} {:?}", slot.dtype, slot.shape)));
            }
        }
        for name in container.names() {
            if !index.get(name).is_some_and(|&i| taps[i].stored) {
                return Err(DumpError::Tensor {
                    path: container.path.clone(),
                    tensor: name.clone(),
                    expected: format!("a line in {}", file_name(&manifest_file)),
                    found: "none".to_owned(),
                });
            }
        }
        let (noise, files) = (BTreeMap::new(), BTreeMap::new());
        Ok(Dump { path: path.to_owned(), manifest_file, manifest, taps, index, container, noise, files, raw })
    }

    /// The directory.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// What the dump says about itself.
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// All taps: in the order of the manifest, or of data flow for an oracle directory.
    pub fn taps(&self) -> impl ExactSizeIterator<Item = &TapInfo> {
        self.taps.iter()
    }

    /// The tap called `name`.
    pub fn tap(&self, name: &str) -> Option<&TapInfo> {
        self.index.get(name).map(|&i| &self.taps[i])
    }

    /// The passes that have taps, each once, in order of appearance.
    pub fn pass_names(&self) -> Vec<String> {
        passes_of(self.taps.iter().map(|tap| tap.name.as_str()))
    }

    /// The values of a tap; nothing where the dump has no such tap, or only its line in the manifest.
    ///
    /// Integers become f32, which is refused where it would round.
    pub fn f32(&self, name: &str) -> Result<Option<TapValues<'_>>, DumpError> {
        let Some(tap) = self.tap(name) else { return Ok(None) };
        let Some(slot) = self.container.get(name) else { return Ok(None) };
        let bytes = self.container.bytes(slot);
        let values = match tap.dtype {
            Dtype::F32 => match bytemuck::try_cast_slice(bytes) {
                Ok(values) => Cow::Borrowed(values),
                Err(_) => Cow::Owned(words(bytes).map(f32::from_le_bytes).collect()),
            },
            Dtype::I32 => {
                let integers = words(bytes).map(i32::from_le_bytes);
                if let Some(large) = integers.clone().find(|i| !(-EXACT..=EXACT).contains(i)) {
                    return Err(DumpError::Tensor {
                        path: self.container.path.clone(),
                        tensor: name.to_owned(),
                        expected: format!("integers of at most {EXACT}, which f32 holds exactly"),
                        found: large.to_string(),
                    });
                }
                Cow::Owned(integers.map(|i| i as f32).collect())
            }
        };
        Ok(Some(TapValues { shape: &tap.shape, values }))
    }

    /// The statistics of a tap: those of the manifest, else computed from its values.
    pub fn summary(&self, name: &str) -> Result<Option<TapSummary>, DumpError> {
        match self.tap(name) {
            Some(TapInfo { summary: Some(summary), .. }) => Ok(Some(summary.clone())),
            _ => Ok(self.f32(name)?.map(|tap| TapSummary::of(name, tap.shape, &tap))),
        }
    }

    /// What `noise.json` gives for a tap.
    pub fn noise(&self, name: &str) -> Option<Noise> {
        self.noise.get(name).copied()
    }

    /// sha256 of the files that the run was made from, by name relative to the package, where the dump
    /// records them (an oracle directory does, for its weights).
    pub fn expected_files(&self) -> BTreeMap<String, String> {
        let own = |name: &&String| name.as_str() != oracle::TENSORS;
        self.files.keys().filter(own).map(|name| (name.clone(), self.files[name].clone())).collect()
    }

    /// `golden.json` or `manifest.json` as it stands, for fields that only some dumps carry.
    pub fn extra(&self) -> &serde_json::Value {
        &self.raw
    }

    /// Reads everything and compares: the sha256 of every tensor, the statistics in each line of a
    /// manifest, and the sha256 of an oracle's tensor file as a whole.
    pub fn verify_hashes(&self) -> Result<(), DumpError> {
        for tap in &self.taps {
            self.verify_tap(tap)?;
        }
        match self.files.get(oracle::TENSORS) {
            Some(expected) => self.same_hash(None, expected, self.container.file_hash()),
            None => Ok(()),
        }
    }

    fn verify_tap(&self, tap: &TapInfo) -> Result<(), DumpError> {
        let Some(slot) = self.container.get(&tap.name) else { return Ok(()) };
        self.same_hash(Some(&tap.name), &tap.sha256, self.container.tensor_hash(slot))?;
        let (Some(said), Some(values)) = (&tap.summary, self.f32(&tap.name)?) else { return Ok(()) };
        let is = TapSummary::of(&tap.name, &tap.shape, &values);
        self.release(&tap.name, 0, tap.elements());
        // NaN equals NaN in text, and infinities in `first` are null there.
        let (said_line, is_line) = (manifest::line(tap, said), manifest::line(tap, &is));
        if said_line == is_line {
            return Ok(());
        }
        let text = |summary: &TapSummary| {
            [
                ("rms", summary.rms.to_string()),
                ("min", summary.min.to_string()),
                ("max", summary.max.to_string()),
                ("non_finite", summary.non_finite.to_string()),
                ("first", format!("{:?}", summary.first)),
                ("argmax", format!("{:?}", summary.argmax)),
            ]
        };
        let differing = text(&is).into_iter().zip(text(said)).find(|(is, said)| is != said);
        let ((field, expected), (_, found)) = differing.unwrap_or((("line", is_line), ("line", said_line)));
        Err(DumpError::Summary {
            path: self.manifest_file.clone(),
            tensor: tap.name.clone(),
            field,
            expected,
            found,
        })
    }

    fn same_hash(&self, tensor: Option<&str>, expected: &str, found: String) -> Result<(), DumpError> {
        if found == expected {
            return Ok(());
        }
        Err(DumpError::HashMismatch {
            path: self.container.path.clone(),
            tensor: tensor.map(str::to_owned),
            expected: expected.to_owned(),
            found,
        })
    }

    /// Says that elements `from..to` of a tap will not be needed soon. Use it when walking through a tap that
    /// is larger than the memory it may take; the values stay valid and are read again on demand.
    pub fn release(&self, name: &str, from: usize, to: usize) {
        if let Some(slot) = self.container.get(name) {
            self.container.release(slot, from.saturating_mul(4), to.saturating_mul(4));
        }
    }
}

fn words(bytes: &[u8]) -> impl Iterator<Item = [u8; 4]> + Clone + '_ {
    bytes.chunks_exact(4).map(|word| [word[0], word[1], word[2], word[3]])
}

fn stored_as(dtype: Dtype) -> StDtype {
    match dtype {
        Dtype::F32 => StDtype::F32,
        Dtype::I32 => StDtype::I32,
    }
}

fn dtype_name(dtype: Dtype) -> String {
    stored_as(dtype).to_string()
}

fn file_name(path: &Path) -> String {
    path.file_name().map_or_else(String::new, |name| name.to_string_lossy().into_owned())
}
