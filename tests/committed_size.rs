//! Bundled packages and goldens stay small enough to live in the repository.

use std::path::Path;

/// What may be committed below `fixtures/data` and `golden/data` in all, and in any one file.
const ALL: u64 = 10 << 20;
const ONE: u64 = 1 << 20;

#[test]
fn bundled_data_stays_small() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut total = 0;
    let mut stack = vec![root.join("fixtures/data"), root.join("golden/data")];
    while let Some(dir) = stack.pop() {
        let Ok(entries) = std::fs::read_dir(&dir) else { continue };
        for entry in entries {
            let path = entry.unwrap().path();
            if path.is_dir() {
                stack.push(path);
                continue;
            }
            let bytes = std::fs::metadata(&path).unwrap().len();
            assert!(bytes <= ONE, "{} holds {bytes} bytes, more than {ONE}", path.display());
            total += bytes;
        }
    }
    assert!(total > 0, "no bundled data found below {}", root.display());
    assert!(total <= ALL, "bundled data holds {total} bytes, more than {ALL}");
}
