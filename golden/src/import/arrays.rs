//! Named arrays, wherever somebody left them: a dump, a safetensors file, an npz archive, or a folder of
//! `.npy`, `.npz`, `.safetensors` and raw f32 files.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use half::{bf16, f16};
use safetensors::tensor::Dtype as StDtype;

use super::npy::{Array, Npz, read_npy};
use super::raw_f32;
use crate::container::Container;
use crate::{Dump, DumpError};

/// File extensions that are read as little-endian f32 and nothing else.
const RAW: [&str; 3] = ["f32", "bin", "raw"];

/// Arrays by name. Nothing is read before it is asked for.
///
/// In a folder an array is called as its file without the extension, directories joined by dots:
/// `step1/layers.0.out.npy` is `step1.layers.0.out`.
pub struct Arrays {
    path: PathBuf,
    dump: Option<Dump>,
    tensors: Vec<Container>,
    archives: Vec<Npz>,
    entries: Vec<(String, Place)>,
    passed_over: Vec<String>,
}

#[derive(Clone)]
enum Place {
    Tap(String),
    Tensor(usize, String),
    Member(usize, String),
    Npy(PathBuf),
    Raw(PathBuf),
}

impl Arrays {
    /// Opens a directory or a file and lists what it holds.
    pub fn open(path: impl AsRef<Path>) -> Result<Arrays, DumpError> {
        let path = path.as_ref();
        let is_dir = fs::metadata(path).map_err(DumpError::io(path))?.is_dir();
        let mut arrays = Arrays {
            path: path.to_owned(),
            dump: None,
            tensors: Vec::new(),
            archives: Vec::new(),
            entries: Vec::new(),
            passed_over: Vec::new(),
        };
        let is_dump = ["manifest.json", "golden.json"].iter().any(|name| path.join(name).is_file());
        if is_dir && is_dump {
            let dump = Dump::open(path)?;
            let stored = dump.taps().filter(|tap| tap.stored);
            arrays.entries = stored.map(|tap| (tap.name.clone(), Place::Tap(tap.name.clone()))).collect();
            arrays.dump = Some(dump);
        } else if is_dir {
            arrays.folder(path, "")?;
        } else if !arrays.file(path, "")? {
            return Err(arrays.wrong(format!(
                "is neither a directory nor a file of arrays: expected .safetensors, .npz, .npy, .{}",
                RAW.join(", .")
            )));
        }
        let mut seen = BTreeSet::new();
        if let Some((twice, _)) = arrays.entries.iter().find(|(name, _)| !seen.insert(name.as_str())) {
            return Err(arrays.wrong(format!("two arrays are called {twice}; rename one")));
        }
        Ok(arrays)
    }

    /// The directory or file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The dump behind it, where it is one: with a prompt, greedy ids and hashes.
    pub fn dump(&self) -> Option<&Dump> {
        self.dump.as_ref()
    }

    /// All names: in the order of the dump, else of the alphabet with numbers as numbers.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.entries.iter().map(|(name, _)| name.as_str())
    }

    /// Files of a folder that hold no arrays.
    pub fn passed_over(&self) -> &[String] {
        &self.passed_over
    }

    /// Reads one array. Integers and wide floats become f32, which is refused where it would lose digits
    /// of an integer.
    pub fn read(&mut self, name: &str) -> Result<Array, DumpError> {
        let Some((_, place)) = self.entries.iter().find(|(entry, _)| entry == name) else {
            return Err(self.wrong(format!("holds no array {name}")));
        };
        match place.clone() {
            Place::Npy(file) => read_npy(file),
            Place::Raw(file) => {
                let values = raw_f32(file, None)?;
                Ok(Array { shape: vec![values.len()], values, dtype: "<f4".to_owned() })
            }
            Place::Member(archive, member) => self.archives[archive].read(&member),
            Place::Tensor(file, tensor) => decode(&self.tensors[file], &tensor),
            Place::Tap(tap) => {
                let values = self.dump.as_ref().map(|dump| dump.f32(&tap)).transpose()?.flatten();
                let Some(values) = values else {
                    return Err(self.wrong(format!("holds no values of {tap}")));
                };
                let (shape, values) = (values.shape.to_vec(), values.values.into_owned());
                if let Some(dump) = &self.dump {
                    dump.release(&tap, 0, values.len());
                }
                Ok(Array { shape, values, dtype: "<f4".to_owned() })
            }
        }
    }

    /// The bytes of an array whose file says nothing about them.
    pub fn bytes(&self, name: &str) -> Result<Option<Vec<u8>>, DumpError> {
        match self.entries.iter().find(|(entry, _)| entry == name) {
            Some((_, Place::Raw(file))) => fs::read(file).map_err(DumpError::io(file)).map(Some),
            _ => Ok(None),
        }
    }

    fn wrong(&self, reason: String) -> DumpError {
        DumpError::Container { path: self.path.clone(), reason }
    }

    fn folder(&mut self, dir: &Path, prefix: &str) -> Result<(), DumpError> {
        let listed = fs::read_dir(dir).map_err(DumpError::io(dir))?;
        let mut files = listed
            .map(|entry| entry.map(|entry| entry.path()))
            .collect::<Result<Vec<PathBuf>, _>>()
            .map_err(DumpError::io(dir))?;
        files.sort_by_cached_key(|file| natural(&file.to_string_lossy()));
        for file in files {
            let name = file.file_name().map_or_else(String::new, |name| name.to_string_lossy().into_owned());
            if file.is_dir() {
                self.folder(&file, &format!("{prefix}{name}."))?;
            } else if !self.file(&file, prefix)? {
                self.passed_over.push(format!("{prefix}{name}"));
            }
        }
        Ok(())
    }

    /// Adds the arrays of a file; whether it is one that holds arrays.
    fn file(&mut self, file: &Path, prefix: &str) -> Result<bool, DumpError> {
        let extension = file.extension().map_or_else(String::new, |e| e.to_string_lossy().to_lowercase());
        let stem = file.file_stem().map_or_else(String::new, |stem| stem.to_string_lossy().into_owned());
        match extension.as_str() {
            "npy" => self.entries.push((format!("{prefix}{stem}"), Place::Npy(file.to_owned()))),
            "npz" => {
                let (archive, index) = (Npz::open(file)?, self.archives.len());
                for member in archive.names()? {
                    let name = format!("{prefix}{}", member.replace('/', "."));
                    self.entries.push((name, Place::Member(index, member)));
                }
                self.archives.push(archive);
            }
            "safetensors" => {
                let (container, index) = (Container::open(file)?, self.tensors.len());
                let mut names: Vec<&String> = container.names().collect();
                names.sort_by_cached_key(|name| natural(name));
                let named = names.into_iter().map(|name| {
                    (format!("{prefix}{}", name.replace('/', ".")), Place::Tensor(index, name.clone()))
                });
                self.entries.extend(named.collect::<Vec<_>>());
                self.tensors.push(container);
            }
            raw if RAW.contains(&raw) => {
                self.entries.push((format!("{prefix}{stem}"), Place::Raw(file.to_owned())));
            }
            _ => return Ok(false),
        }
        Ok(true)
    }
}

/// A key under which `step10` comes after `step9`: runs of digits count as numbers.
fn natural(name: &str) -> Vec<(String, u64)> {
    let mut parts = Vec::new();
    let mut rest = name;
    while !rest.is_empty() {
        let digits = rest.find(|c: char| c.is_ascii_digit()).unwrap_or(rest.len());
        let (text, numbered) = rest.split_at(digits);
        let end = numbered.find(|c: char| !c.is_ascii_digit()).unwrap_or(numbered.len());
        parts.push((text.to_owned(), numbered[..end].parse().unwrap_or(0)));
        rest = &numbered[end..];
    }
    parts
}

/// The largest integer up to which every integer is an f32.
const EXACT: i64 = 1 << 24;

fn decode(container: &Container, tensor: &str) -> Result<Array, DumpError> {
    let wrong = |expected: &str, found: String| DumpError::Tensor {
        path: container.path.clone(),
        tensor: tensor.to_owned(),
        expected: expected.to_owned(),
        found,
    };
    let Some(slot) = container.get(tensor) else {
        return Err(wrong("a tensor of this name", "none".to_owned()));
    };
    let bytes = container.bytes(slot);
    let integers = |values: Vec<i64>| {
        let large = values.iter().find(|v| v.unsigned_abs() > EXACT as u64);
        match large {
            Some(v) => Err(wrong("integers of at most 16777216, which f32 holds exactly", v.to_string())),
            None => Ok(values.into_iter().map(|v| v as f32).collect()),
        }
    };
    let values: Vec<f32> = match slot.dtype {
        StDtype::F32 => words::<4>(bytes).map(f32::from_le_bytes).collect(),
        StDtype::F64 => words::<8>(bytes).map(|w| f64::from_le_bytes(w) as f32).collect(),
        StDtype::F16 => words::<2>(bytes).map(|w| f16::from_le_bytes(w).to_f32()).collect(),
        StDtype::BF16 => words::<2>(bytes).map(|w| bf16::from_le_bytes(w).to_f32()).collect(),
        StDtype::I64 => integers(words::<8>(bytes).map(i64::from_le_bytes).collect())?,
        StDtype::I32 => integers(words::<4>(bytes).map(|w| i64::from(i32::from_le_bytes(w))).collect())?,
        StDtype::I16 => words::<2>(bytes).map(|w| f32::from(i16::from_le_bytes(w))).collect(),
        StDtype::I8 => bytes.iter().map(|&b| f32::from(b as i8)).collect(),
        StDtype::U8 | StDtype::BOOL => bytes.iter().map(|&b| f32::from(b)).collect(),
        other => {
            return Err(wrong("f64, f32, f16, bf16, bool or an integer of 8 to 64 bits", other.to_string()));
        }
    };
    container.release(slot, 0, bytes.len());
    Ok(Array { shape: slot.shape.clone(), values, dtype: slot.dtype.to_string() })
}

fn words<const N: usize>(bytes: &[u8]) -> impl Iterator<Item = [u8; N]> + '_ {
    bytes.as_chunks::<N>().0.iter().copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A safetensors file of one tensor, written by hand: header length, header, data.
    fn tensor_file(dtype: &str, shape: &str, data: &[u8]) -> Vec<u8> {
        let header =
            format!(r#"{{"x":{{"dtype":"{dtype}","shape":{shape},"data_offsets":[0,{}]}}}}"#, data.len());
        [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), data].concat()
    }

    fn read(dtype: &str, data: &[u8]) -> Result<Vec<f32>, DumpError> {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("taps.safetensors");
        fs::write(&file, tensor_file(dtype, "[2]", data)).unwrap();
        Arrays::open(&file)?.read("x").map(|array| array.values)
    }

    // 1 is 0x3c00 in f16 and 0x3f80 in bf16; -2 is 0xc000 in both.
    #[test]
    fn every_type_becomes_f32() {
        assert_eq!(read("F16", &[0x00, 0x3c, 0x00, 0xc0]).unwrap(), [1.0, -2.0]);
        assert_eq!(read("BF16", &[0x80, 0x3f, 0x00, 0xc0]).unwrap(), [1.0, -2.0]);
        assert_eq!(read("I8", &[1, 0xfe]).unwrap(), [1.0, -2.0]);
        assert_eq!(
            read("I64", &[7, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff]).unwrap(),
            [7.0, -1.0]
        );
        let error = read("I32", &[1, 0, 0, 1, 0, 0, 0, 0]).unwrap_err().to_string();
        assert!(
            error.contains("tensor x: expected integers of at most 16777216") && error.ends_with("16777217")
        );
        assert!(read("F8_E4M3", &[0, 0]).unwrap_err().to_string().contains("found F8_E4M3"));
    }

    #[test]
    fn a_folder_lists_arrays_in_natural_order_and_what_it_passed_over() {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("step1")).unwrap();
        for name in ["logits_10.f32", "logits_9.f32", "step1/out.bin"] {
            fs::write(dir.path().join(name), 2f32.to_le_bytes()).unwrap();
        }
        fs::write(dir.path().join("notes.txt"), "by hand").unwrap();
        let mut arrays = Arrays::open(dir.path()).unwrap();
        assert_eq!(arrays.names().collect::<Vec<_>>(), ["logits_9", "logits_10", "step1.out"]);
        assert_eq!(arrays.passed_over(), ["notes.txt"]);
        assert_eq!(arrays.read("step1.out").unwrap().values, [2.0]);
        assert!(arrays.read("step2.out").unwrap_err().to_string().ends_with("holds no array step2.out"));
    }

    #[test]
    fn two_arrays_of_one_name_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        for name in ["x.f32", "x.bin"] {
            fs::write(dir.path().join(name), [0; 4]).unwrap();
        }
        let error = Arrays::open(dir.path()).err().unwrap().to_string();
        assert!(error.ends_with("two arrays are called x; rename one"), "{error}");
    }
}
