//! What can be wrong with a dump, each with the file, the tensor, and what was expected.

use std::path::PathBuf;

/// An error about a dump. Messages are lower case, name the file, and say what was expected and found.
#[derive(Debug, thiserror::Error)]
pub enum DumpError {
    /// The operating system refused to read or write.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file or directory.
        path: PathBuf,
        /// What the operating system said.
        source: std::io::Error,
    },
    /// The path is no dump of a known kind.
    #[error(
        "{} is not a dump: expected manifest.json and taps.safetensors, or golden.json and golden.safetensors",
        path.display()
    )]
    NotADump {
        /// The directory that was to be opened.
        path: PathBuf,
    },
    /// One half of a dump is there and the other is not: it was not written to its end, or not copied whole.
    #[error("{} is a half-written dump: {present} is there, but {missing} is missing", path.display())]
    HalfWritten {
        /// The dump's directory.
        path: PathBuf,
        /// The file that was found.
        present: String,
        /// The file that was not.
        missing: String,
    },
    /// A JSON file does not parse, or a field is missing or of another type.
    #[error("{}: line {line}, column {column}: {reason}", path.display())]
    Json {
        /// The file.
        path: PathBuf,
        /// Line, from 1.
        line: usize,
        /// Column, from 1.
        column: usize,
        /// What the parser says.
        reason: String,
    },
    /// A JSON file parses, but what it says cannot be.
    #[error("{}: {reason}", path.display())]
    Manifest {
        /// The file.
        path: PathBuf,
        /// What is wrong, with what was expected and found.
        reason: String,
    },
    /// The header of a safetensors file is broken, or its data end early.
    #[error("{}: {reason}", path.display())]
    Container {
        /// The file.
        path: PathBuf,
        /// What is wrong, with byte counts.
        reason: String,
    },
    /// Manifest and tensor file disagree about one tensor.
    #[error("{}: tensor {tensor}: expected {expected}, found {found}", path.display())]
    Tensor {
        /// The tensor file.
        path: PathBuf,
        /// The tap's name.
        tensor: String,
        /// What the manifest says.
        expected: String,
        /// What the tensor file says.
        found: String,
    },
    /// Content does not have the hash that the manifest gives for it: edited or damaged.
    #[error(
        "{}: {} has sha256 {found}, but the manifest says {expected}; restore the file or write the dump again",
        path.display(), tensor.as_deref().map_or("the file".to_owned(), |name| format!("tensor {name}"))
    )]
    HashMismatch {
        /// The file.
        path: PathBuf,
        /// The tap, or nothing when it is the file as a whole.
        tensor: Option<String>,
        /// Hash in the manifest, as hexadecimal digits.
        expected: String,
        /// Hash of what is there.
        found: String,
    },
    /// A line of the manifest gives other statistics than its tensor has: edited by hand.
    #[error("{}: {tensor}: {field} is {found} in the manifest, but {expected} in the tensor", path.display())]
    Summary {
        /// The manifest.
        path: PathBuf,
        /// The tap.
        tensor: String,
        /// Name of the field.
        field: &'static str,
        /// What follows from the tensor.
        expected: String,
        /// What the manifest says.
        found: String,
    },
    /// The place that a dump is to be written to holds something already.
    #[error("{} exists and is not an empty directory; nothing was written", path.display())]
    TargetExists {
        /// The place.
        path: PathBuf,
    },
    /// A tap handed to the writer does not fit its own description.
    #[error("tap {tensor}: {reason}")]
    BadTap {
        /// The tap.
        tensor: String,
        /// What does not fit.
        reason: String,
    },
}

impl DumpError {
    /// True where the dump itself is damaged or was edited, as against absent or unreadable.
    pub fn is_tampered(&self) -> bool {
        matches!(self, DumpError::HashMismatch { .. } | DumpError::Summary { .. })
    }

    pub(crate) fn io(path: &std::path::Path) -> impl FnOnce(std::io::Error) -> DumpError + '_ {
        move |source| DumpError::Io { path: path.to_owned(), source }
    }

    pub(crate) fn json(path: &std::path::Path) -> impl FnOnce(serde_json::Error) -> DumpError + '_ {
        move |error| {
            // The parser ends its message with the place, which stands in front of ours.
            let text = error.to_string();
            let reason = text.split(" at line ").next().unwrap_or(&text).to_owned();
            DumpError::Json { path: path.to_owned(), line: error.line(), column: error.column(), reason }
        }
    }
}
