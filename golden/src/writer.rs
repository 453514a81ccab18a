//! Writes a dump, whole or not at all.

use std::collections::HashSet;
use std::fs::{self, File};
use std::io::{self, BufWriter, Read, Seek, Write};
use std::path::{Path, PathBuf};

use tempfile::TempDir;

use crate::manifest::{self, Dtype, MANIFEST_FILE, Manifest, Sigma, TAPS_FILE, TapInfo, TapSummary};
use crate::{DumpError, sha256_hex};

/// Collects taps in a temporary directory next to the target; [`DumpWriter::finish`] moves it into place.
///
/// Values go to disk as they come, so that a dump may be larger than memory. A writer that is dropped
/// before it finished leaves nothing behind.
pub struct DumpWriter {
    target: PathBuf,
    dir: TempDir,
    manifest: Manifest,
    taps: Vec<TapInfo>,
    names: HashSet<String>,
    data_path: PathBuf,
    data: BufWriter<File>,
}

impl DumpWriter {
    /// Starts a dump that will be the directory `target`, which must not exist or be empty.
    pub fn create(target: impl AsRef<Path>, manifest: Manifest) -> Result<DumpWriter, DumpError> {
        let target = std::path::absolute(target.as_ref()).map_err(DumpError::io(target.as_ref()))?;
        refuse_occupied(&target)?;
        // On the same file system as the target, so that moving is renaming.
        let Some(base) = target.ancestors().skip(1).find(|dir| dir.is_dir()) else {
            return Err(DumpError::TargetExists { path: target });
        };
        let dir = temporary_dir(base).map_err(DumpError::io(base))?;
        let data_path = dir.path().join("data");
        let data = File::options().read(true).write(true).create_new(true).open(&data_path);
        let data = BufWriter::new(data.map_err(DumpError::io(&data_path))?);
        Ok(DumpWriter { target, dir, manifest, taps: Vec::new(), names: HashSet::new(), data_path, data })
    }

    /// Adds a tap: its line in the manifest and its values.
    ///
    /// `axes` names the axes, slowest first, or is empty; `shape` gives their lengths.
    pub fn tap(
        &mut self,
        name: &str,
        axes: &[&str],
        shape: &[usize],
        values: &[f32],
    ) -> Result<(), DumpError> {
        let bytes = bytemuck::cast_slice(values);
        self.line(name, axes, shape, values, true)?;
        self.data.write_all(bytes).map_err(DumpError::io(&self.data_path))
    }

    /// Adds a line to the manifest and stores no values: enough to see that they changed, in few bytes.
    pub fn tap_line(
        &mut self,
        name: &str,
        axes: &[&str],
        shape: &[usize],
        values: &[f32],
    ) -> Result<(), DumpError> {
        self.line(name, axes, shape, values, false)
    }

    /// Says what rounding alone does at the tap that was added last.
    pub fn sigma(&mut self, sigma: Sigma) {
        if let Some(tap) = self.taps.last_mut() {
            tap.sigma = Some(sigma);
        }
    }

    /// The manifest, to be completed before [`DumpWriter::finish`] (greedy ids are known only then).
    pub fn manifest_mut(&mut self) -> &mut Manifest {
        &mut self.manifest
    }

    fn line(
        &mut self,
        name: &str,
        axes: &[&str],
        shape: &[usize],
        values: &[f32],
        stored: bool,
    ) -> Result<(), DumpError> {
        let bad = |reason: String| DumpError::BadTap { tensor: name.to_owned(), reason };
        let elements = shape.iter().try_fold(1usize, |n, &d| n.checked_mul(d));
        if elements != Some(values.len()) {
            return Err(bad(format!("shape {shape:?} does not hold {} values", values.len())));
        }
        if !axes.is_empty() && axes.len() != shape.len() {
            return Err(bad(format!("{} axis names for {} axes", axes.len(), shape.len())));
        }
        if name.is_empty() || name == "__metadata__" {
            return Err(bad("is no name for a tap".to_owned()));
        }
        if !self.names.insert(name.to_owned()) {
            return Err(bad("was written before".to_owned()));
        }
        self.taps.push(TapInfo {
            name: name.to_owned(),
            axes: axes.iter().map(|&axis| axis.to_owned()).collect(),
            shape: shape.to_vec(),
            dtype: Dtype::F32,
            sha256: sha256_hex(bytemuck::cast_slice(values)),
            stored,
            summary: Some(TapSummary::of(name, shape, values)),
            sigma: None,
        });
        Ok(())
    }

    /// Completes the dump and moves it to its place.
    pub fn finish(self) -> Result<(), DumpError> {
        let DumpWriter { target, dir, mut manifest, taps, data_path, data, .. } = self;
        manifest.derive_passes(taps.iter().map(|tap| tap.name.as_str()));

        let taps_path = dir.path().join(TAPS_FILE);
        let mut data = data.into_inner().map_err(|e| DumpError::io(&data_path)(e.into_error()))?;
        assemble(&taps_path, &taps, &mut data).map_err(DumpError::io(&taps_path))?;
        drop(data);
        fs::remove_file(&data_path).map_err(DumpError::io(&data_path))?;
        let manifest_path = dir.path().join(MANIFEST_FILE);
        fs::write(&manifest_path, manifest::to_text(&manifest, &taps))
            .map_err(DumpError::io(&manifest_path))?;

        refuse_occupied(&target)?;
        if let Some(parent) = target.parent() {
            fs::create_dir_all(parent).map_err(DumpError::io(parent))?;
        }
        if target.is_dir() {
            fs::remove_dir(&target).map_err(DumpError::io(&target))?;
        }
        // The guard keeps its path and then finds nothing to remove there.
        fs::rename(dir.path(), &target).map_err(DumpError::io(&target))?;
        let _ = dir.keep();
        Ok(())
    }
}

/// Header, then the data of all stored taps, which lie in the data file in the order of `taps`.
fn assemble(path: &Path, taps: &[TapInfo], data: &mut File) -> io::Result<()> {
    let mut header = String::from("{");
    let mut start = 0;
    for tap in taps.iter().filter(|tap| tap.stored) {
        let end = start + 4 * tap.elements();
        let comma = if start == 0 && header.len() == 1 { "" } else { "," };
        let name = serde_json::to_string(&tap.name)?;
        let shape = serde_json::to_string(&tap.shape)?;
        header +=
            &format!(r#"{comma}{name}:{{"dtype":"F32","shape":{shape},"data_offsets":[{start},{end}]}}"#);
        start = end;
    }
    header.push('}');
    // Spaces behind the header are allowed, and make the data start where an f32 may.
    header += &" ".repeat(header.len().next_multiple_of(8) - header.len());

    let mut file = File::create_new(path)?;
    file.write_all(&(header.len() as u64).to_le_bytes())?;
    file.write_all(header.as_bytes())?;
    data.rewind()?;
    copy(data, &mut file)
}

/// Copies what is left of `from`, in pieces of megabytes. Linux keeps a file in memory in the pieces that it was written
/// in, and maps large ones several times faster; `io::copy` leaves the size to the system, which takes single pages.
fn copy(from: &mut File, to: &mut File) -> io::Result<()> {
    let mut piece = vec![0; 4 << 20];
    loop {
        match from.read(&mut piece) {
            Ok(0) => return Ok(()),
            Ok(read) => to.write_all(&piece[..read])?,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
}

fn refuse_occupied(target: &Path) -> Result<(), DumpError> {
    let occupied = match fs::read_dir(target) {
        Ok(mut entries) => entries.next().is_some(),
        Err(error) => error.kind() != io::ErrorKind::NotFound,
    };
    match occupied {
        true => Err(DumpError::TargetExists { path: target.to_owned() }),
        false => Ok(()),
    }
}

/// A temporary directory with the permissions of any other: it becomes the dump.
fn temporary_dir(base: &Path) -> io::Result<TempDir> {
    let mut builder = tempfile::Builder::new();
    builder.prefix(".karat-dump-");
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        builder.permissions(fs::Permissions::from_mode(0o777));
    }
    builder.tempdir_in(base)
}
