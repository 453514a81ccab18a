//! A safetensors file in memory: mapped, its header checked, its tensors borrowed.

use std::collections::HashMap;
use std::fs::File;
use std::path::{Path, PathBuf};

use memmap2::Mmap;
use safetensors::tensor::{Dtype as StDtype, Metadata};

use crate::DumpError;

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

    pub fn whole(&self) -> &[u8] {
        &self.map
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
fn map_file(file: &File) -> std::io::Result<Mmap> {
    // SAFETY: the mapping is read-only and private. Bytes that another process changes meanwhile are
    // seen as other bytes, which the hashes tell; a dump is never written in place (the writer renames a
    // whole directory), so nothing of ours shortens a file that is mapped.
    unsafe { Mmap::map(file) }
}
