//! Reviewing goldens as a user does: look at what changed, give a reason, or keep the old values.

use assert_cmd::Command;
use golden::{Dump, DumpWriter};
use std::path::Path;
use tempfile::TempDir;

fn bundled() -> Dump {
    Dump::open(Path::new(env!("CARGO_MANIFEST_DIR")).join("../golden/data/llama/reference")).unwrap()
}

/// A repository with `count` goldens of the reference over llama, in each of which one value of
/// `prefill.layers.1.v_proj` is off by `by` from what this build computes.
fn repository(count: usize, by: f32) -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    let dump = bundled();
    for n in 0..count {
        let target = dir.path().join(format!("golden/data/llama/run{n}"));
        let mut writer = DumpWriter::create(&target, dump.manifest().clone()).unwrap();
        for tap in dump.taps() {
            let mut values = dump.f32(&tap.name).unwrap().unwrap().to_vec();
            if tap.name == "prefill.layers.1.v_proj" {
                values[5] += by;
            }
            let axes: Vec<&str> = tap.axes.iter().map(String::as_str).collect();
            writer.tap(&tap.name, &axes, &tap.shape, &values).unwrap();
            tap.sigma.into_iter().for_each(|sigma| writer.sigma(sigma));
        }
        writer.finish().unwrap();
    }
    dir
}

fn accept(dir: &TempDir, args: &[&str], stdin: &str) -> (i32, String, String) {
    let mut command = Command::cargo_bin("karat").unwrap();
    let output =
        command.current_dir(dir.path()).arg("accept").args(args).write_stdin(stdin).output().unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (output.status.code().unwrap(), text(&output.stdout), text(&output.stderr))
}

fn golden(dir: &TempDir, n: usize) -> Dump {
    Dump::open(dir.path().join(format!("golden/data/llama/run{n}"))).unwrap()
}

fn is_new(dump: &Dump) -> bool {
    let hash = |dump: &Dump| dump.tap("prefill.layers.1.v_proj").unwrap().sha256.clone();
    hash(dump) == hash(&bundled())
}

#[test]
fn one_is_taken_with_a_reason_and_one_is_kept() {
    let dir = repository(2, 0.5);
    let (code, shown, _) = accept(&dir, &[], "the value projection is computed again\n\n");
    assert_eq!(code, 0, "{shown}");
    assert!(shown.contains("prefill.layers.1.v_proj"), "the change is shown: {shown}");
    assert!(shown.contains("accepted 1 of 2 changed goldens"), "{shown}");
    let (taken, kept) = (golden(&dir, 0), golden(&dir, 1));
    assert_eq!(taken.manifest().reason.as_deref(), Some("the value projection is computed again"));
    assert!(is_new(&taken) && !is_new(&kept));
    assert_eq!(kept.manifest().reason, None);
    // A second look finds the one that was kept, and nothing else.
    let (_, shown, _) = accept(&dir, &[], "\n");
    assert!(shown.contains("accepted 0 of 1 changed goldens"), "{shown}");
}

#[test]
fn all_needs_a_reason_and_many_need_bulk() {
    let dir = repository(9, 0.5);
    let (code, _, error) = accept(&dir, &["--all"], "");
    assert_eq!(code, 2, "{error}");
    assert!(error.contains("--reason"), "{error}");
    let (code, _, error) = accept(&dir, &["--all", "--reason", "another order"], "");
    assert_eq!(code, 2, "{error}");
    assert!(error.contains("9 goldens changed, more than 8") && error.contains("--bulk"), "{error}");
    assert!((0..9).all(|n| !is_new(&golden(&dir, n))), "nothing was written");
    let (code, shown, _) = accept(&dir, &["--all", "--reason", "another order", "--bulk"], "");
    assert_eq!((code, shown.trim()), (0, "accepted 9 of 9 changed goldens"));
    assert!((0..9).all(|n| is_new(&golden(&dir, n))));
    let (code, shown, _) = accept(&dir, &[], "");
    assert_eq!((code, shown.trim()), (0, "every golden is byte-identical: nothing to accept"));
}

/// Forty-eight goldens changed, and the comment under a pull request still fits on a page.
#[test]
fn a_comment_has_at_most_sixty_lines() {
    let (old, new) = (repository(48, 0.0), repository(48, 0.5));
    let side = |dir: &TempDir| dir.path().join("golden/data").display().to_string();
    let output = Command::cargo_bin("karat")
        .unwrap()
        .args(["diff", &side(&old), &side(&new), "--format", "md"])
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(1));
    let comment = String::from_utf8(output.stdout).unwrap();
    assert!(comment.lines().count() <= 60, "{} lines:\n{comment}", comment.lines().count());
    for told in ["CHANGED", "prefill.layers.1.v_proj", "48 dumps"] {
        assert!(comment.contains(told), "{told}:\n{comment}");
    }
}
