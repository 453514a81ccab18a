//! Finds the dumps below a directory.

use std::fs;
use std::path::Path;

use crate::manifest::{MANIFEST_FILE, TAPS_FILE};
use crate::{DumpError, oracle};

/// True if `path` is a directory that holds at least half a dump, so that [`crate::Dump::open`] has
/// something to say about it.
pub fn is_dump(path: impl AsRef<Path>) -> bool {
    let files = [MANIFEST_FILE, TAPS_FILE, oracle::JSON, oracle::TENSORS];
    files.iter().any(|name| path.as_ref().join(name).is_file())
}

/// Every dump at or below `dir`, by its path relative to `dir` with `/` between parts (empty for `dir`
/// itself), sorted. A dump is not searched for more dumps; names that start with a dot are passed over.
pub fn find_dumps(dir: impl AsRef<Path>) -> Result<Vec<String>, DumpError> {
    fn walk(dir: &Path, name: String, found: &mut Vec<String>) -> Result<(), DumpError> {
        if is_dump(dir) {
            found.push(name);
            return Ok(());
        }
        for entry in fs::read_dir(dir).map_err(DumpError::io(dir))? {
            let entry = entry.map_err(DumpError::io(dir))?;
            let part = entry.file_name().to_string_lossy().into_owned();
            // The type of the entry, not of what it links to: a link upwards would never end.
            let is_dir = entry.file_type().map_err(DumpError::io(dir))?.is_dir();
            if is_dir && !part.starts_with('.') {
                let name = if name.is_empty() { part } else { format!("{name}/{part}") };
                walk(&entry.path(), name, found)?;
            }
        }
        Ok(())
    }
    let mut found = Vec::new();
    walk(dir.as_ref(), String::new(), &mut found)?;
    found.sort();
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_what_is_below() {
        let dir = tempfile::tempdir().unwrap();
        for (path, file) in [
            ("b/1", MANIFEST_FILE),
            ("b/0", TAPS_FILE),
            ("a", oracle::JSON),
            (".c", MANIFEST_FILE),
            ("d", "x"),
        ] {
            fs::create_dir_all(dir.path().join(path)).unwrap();
            fs::write(dir.path().join(path).join(file), "").unwrap();
        }
        assert_eq!(find_dumps(dir.path()).unwrap(), ["a", "b/0", "b/1"]);
        assert_eq!(find_dumps(dir.path().join("a")).unwrap(), [""]);
        assert!(matches!(find_dumps(dir.path().join("gone")), Err(DumpError::Io { .. })));
    }
}
