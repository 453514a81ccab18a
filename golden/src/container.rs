//! A safetensors file in memory: mapped, its header checked, its tensors borrowed.

use std::collections::HashMap;
use std::fs::File;
use std::path::{Path, PathBuf};

use memmap2::Mmap;
use safetensors::tensor::{Dtype as StDtype, Metadata};
use sha2::{Digest, Sha256};

use crate::DumpError;
use crate::hash::hex;

/// How much of a file is held at once when all of it is read.
pub(crate) const PIECE: usize = 64 << 20;

/// The longest header that is read, as in the format's own library.
const HEADER_LIMIT: u64 = 100_000_000;

/// A tensor file. Every range in it was checked against the length of the file.
pub(crate) struct Container {
    pub path: PathBuf,
    map: Mmap,
    data: usize,
    tensors: HashMap<String, Slot>,
}

pub(crate) struct Slot {
    pub dtype: StDtype,
    pub shape: Vec<usize>,
    range: (usize, usize),
}

impl Container {
    pub fn open(path: &Path) -> Result<Container, DumpError> {
        let file = File::open(path).map_err(DumpError::io(path))?;
        let map = map_file(&file).map_err(DumpError::io(path))?;
        let broken = |reason: String| DumpError::Container { path: path.to_owned(), reason };

        let (data, metadata) = header(&map).map_err(&broken)?;
        let held = map.len() - data;
        let mut tensors = HashMap::new();
        for (name, info) in metadata.tensors() {
            let (start, end) = info.data_offsets;
            if end > held {
                return Err(broken(format!(
                    "tensor {name} ends at byte {end} of the data, but the file holds {held} bytes of data: it is truncated"
                )));
            }
            tensors.insert(name, Slot { dtype: info.dtype, shape: info.shape.clone(), range: (start, end) });
        }
        if metadata.data_len() != held {
            let said = metadata.data_len();
            return Err(broken(format!(
                "the header describes {said} bytes of data, but the file holds {held}"
            )));
        }
        Ok(Container { path: path.to_owned(), map, data, tensors })
    }

    pub fn get(&self, name: &str) -> Option<&Slot> {
        self.tensors.get(name)
    }

    pub fn names(&self) -> impl Iterator<Item = &String> {
        self.tensors.keys()
    }

    /// The little-endian bytes of a tensor.
    pub fn bytes(&self, slot: &Slot) -> &[u8] {
        &self.map[self.data + slot.range.0..self.data + slot.range.1]
    }

    /// sha256 of a tensor, read in pieces that are given back.
    pub fn tensor_hash(&self, slot: &Slot) -> String {
        self.hash(self.data + slot.range.0, self.data + slot.range.1)
    }

    /// sha256 of the file.
    pub fn file_hash(&self) -> String {
        self.hash(0, self.map.len())
    }

    fn hash(&self, start: usize, end: usize) -> String {
        let mut sha = Sha256::new();
        for from in (start..end).step_by(PIECE) {
            let to = end.min(from + PIECE);
            sha.update(&self.map[from..to]);
            forget(&self.map, from, to);
        }
        hex(&sha.finalize())
    }

    /// Gives back the memory under bytes `from..to` of a tensor; they are read again when they are used.
    pub fn release(&self, slot: &Slot, from: usize, to: usize) {
        let (start, len) = (self.data + slot.range.0, slot.range.1 - slot.range.0);
        forget(&self.map, start + from.min(len), start + to.min(len));
    }
}

/// Where the data start, and what the header says about them.
fn header(file: &[u8]) -> Result<(usize, Metadata), String> {
    let len = file.len();
    let Some((prefix, rest)) = file.split_first_chunk::<8>() else {
        return Err(format!(
            "a safetensors file starts with 8 bytes of header length, but this one holds {len} bytes"
        ));
    };
    let size = u64::from_le_bytes(*prefix);
    if size > HEADER_LIMIT {
        return Err(format!(
            "header length {size} is over the limit of {HEADER_LIMIT}: not a safetensors file"
        ));
    }
    let size = size as usize;
    let Some(text) = rest.get(..size) else {
        let held = rest.len();
        return Err(format!(
            "the header is {size} bytes long, but the file ends after {held} of them: it is truncated"
        ));
    };
    let metadata = serde_json::from_slice(text).map_err(|error| format!("broken header: {error}"))?;
    Ok((8 + size, metadata))
}

/// Maps a file for reading.
#[allow(unsafe_code)]
pub(crate) fn map_file(file: &File) -> std::io::Result<Mmap> {
    // SAFETY: the mapping is read-only and private. Bytes that another process changes meanwhile are
    // seen as other bytes, which the hashes tell; a dump is never written in place (the writer renames a
    // whole directory), so nothing of ours shortens a file that is mapped.
    unsafe { Mmap::map(file) }
}

/// Drops the pages of a range from memory, so that a long file streams through a small window.
#[cfg(unix)]
#[allow(unsafe_code)]
fn forget(map: &Mmap, from: usize, to: usize) {
    if from >= to {
        return;
    }
    // SAFETY: the mapping is of a file and is never written through, so that a dropped page comes back
    // from the file with the same bytes. The range lies inside the mapping.
    // Refusal does no harm: the pages then stay until memory is short.
    let _ = unsafe { map.unchecked_advise_range(memmap2::UncheckedAdvice::DontNeed, from, to - from) };
}

/// Other systems drop pages of a file by themselves when memory is short.
#[cfg(not(unix))]
fn forget(_map: &Mmap, _from: usize, _to: usize) {}
