//! Readers for what other tools write: arrays of numpy, tensor files, logits of llama.cpp, raw f32.
//!
//! They return names and values as they are; which site a name stands for is not decided here.

pub mod arrays;
pub mod llamacpp;
pub mod npy;

use std::fs;
use std::path::Path;

use crate::DumpError;

/// The values of a file of little-endian f32 and nothing else, as many engines write the logits of a position.
///
/// `expected` is the number of values, where it is known.
pub fn raw_f32(path: impl AsRef<Path>, expected: Option<usize>) -> Result<Vec<f32>, DumpError> {
    let path = path.as_ref();
    let bytes = fs::read(path).map_err(DumpError::io(path))?;
    let wrong = |reason: String| DumpError::Container { path: path.to_owned(), reason };
    let (words, rest) = bytes.as_chunks::<4>();
    if !rest.is_empty() {
        return Err(wrong(format!("{} bytes are not a whole number of f32", bytes.len())));
    }
    if let Some(expected) = expected.filter(|&n| n != words.len()) {
        return Err(wrong(format!("expected {expected} values of f32, found {}", words.len())));
    }
    Ok(words.iter().map(|&word| f32::from_le_bytes(word)).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn raw_values_and_their_number() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("logits.f32");
        fs::write(&path, [0x00, 0x00, 0x80, 0x3f, 0x00, 0x00, 0x00, 0xc0]).unwrap();
        assert_eq!(raw_f32(&path, Some(2)).unwrap(), [1.0, -2.0]);
        assert!(
            raw_f32(&path, Some(3)).unwrap_err().to_string().ends_with("expected 3 values of f32, found 2")
        );
        fs::write(&path, [0; 7]).unwrap();
        assert!(
            raw_f32(&path, None).unwrap_err().to_string().ends_with("7 bytes are not a whole number of f32")
        );
    }
}
