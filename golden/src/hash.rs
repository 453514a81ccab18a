//! sha256 of bytes, of files, and of a model.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use sha2::{Digest, Sha256};

use crate::DumpError;

/// sha256 as 64 lower-case hexadecimal digits.
pub fn sha256_hex(bytes: &[u8]) -> String {
    hex(&Sha256::digest(bytes))
}

pub(crate) fn hex(digest: &[u8]) -> String {
    digest.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// sha256 of a file, read in blocks.
pub fn sha256_file(path: &Path) -> Result<String, DumpError> {
    let mut file = File::open(path).map_err(DumpError::io(path))?;
    let mut block = vec![0u8; 1 << 20];
    let mut sha = Sha256::new();
    loop {
        match file.read(&mut block).map_err(DumpError::io(path))? {
            0 => return Ok(hex(&sha.finalize())),
            n => sha.update(&block[..n]),
        }
    }
}

/// The hash that names a model: sha256 over one line `name sha256\n` per file, sorted by name.
///
/// `files` are (name in the package, path) of config and weights. All of them are read.
pub fn model_hash<N: AsRef<str>, P: AsRef<Path>>(files: &[(N, P)]) -> Result<String, DumpError> {
    let hashed = files
        .iter()
        .map(|(name, path)| Ok((name.as_ref().to_owned(), sha256_file(path.as_ref())?)))
        .collect::<Result<Vec<_>, DumpError>>()?;
    Ok(model_hash_of(hashed))
}

/// [`model_hash`] where the sha256 of each file is known already: (name in the package, sha256).
pub fn model_hash_of(files: impl IntoIterator<Item = (String, String)>) -> String {
    let mut lines: Vec<String> = files.into_iter().map(|(name, sha)| format!("{name} {sha}\n")).collect();
    lines.sort();
    sha256_hex(lines.concat().as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    // FIPS 180-2, appendix B.1.
    #[test]
    fn abc() {
        assert_eq!(sha256_hex(b"abc"), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
    }

    // printf 'a.json 00\nb.safetensors 11\n' | sha256sum
    #[test]
    fn model_hash_sorts_its_files() {
        let a = ("a.json".to_owned(), "00".to_owned());
        let b = ("b.safetensors".to_owned(), "11".to_owned());
        let expected = "a5a28ec2027d87ebfbc685e0ca3febb40af13f4a8c7944ba03775363d48f2779";
        assert_eq!(model_hash_of([a.clone(), b.clone()]), expected);
        assert_eq!(model_hash_of([b, a]), expected);
    }

    #[test]
    fn model_hash_reads_files() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("config.json");
        std::fs::write(&path, "abc").unwrap();
        let by_file = model_hash(&[("config.json", &path)]).unwrap();
        assert_eq!(by_file, model_hash_of([("config.json".to_owned(), sha256_hex(b"abc"))]));
        assert!(matches!(model_hash(&[("gone", dir.path().join("gone"))]), Err(DumpError::Io { .. })));
    }
}
