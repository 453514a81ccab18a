//! Errors of the command line, each with its exit code.

use crate::dumping::DumpingError;
use crate::mutants::SelectError;
use crate::subject::UnknownSubject;
use crate::verify::VerifyError;
use fixtures::PackageError;
use golden::{DiffError, DumpError};
use spec::{ConfigError, LoadError};

/// Why a verb did not run.
#[derive(Debug, thiserror::Error)]
pub enum CliError {
    /// A package that cannot be opened.
    #[error(transparent)]
    Package(#[from] PackageError),
    /// A config that is refused.
    #[error("{package}: {source}")]
    Config {
        /// The package.
        package: String,
        /// Why.
        source: ConfigError,
    },
    /// Tensors that do not make the model.
    #[error(transparent)]
    Load(#[from] LoadError),
    /// A golden that cannot be read.
    #[error(transparent)]
    Golden(#[from] DumpError),
    /// A run that was not possible.
    #[error(transparent)]
    Verify(#[from] VerifyError),
    /// A mutant that does not exist.
    #[error(transparent)]
    Select(#[from] SelectError),
    /// A contract file that is none.
    #[error(transparent)]
    Contract(#[from] crate::contract::ContractError),
    /// A device file that is none.
    #[error(transparent)]
    DeviceFile(#[from] crate::cost::DeviceFileError),
    /// A subject that does not exist.
    #[error(transparent)]
    Subject(#[from] UnknownSubject),
    /// A file of known failures that is none.
    #[error(transparent)]
    Known(#[from] crate::known::KnownError),
    /// A run that could not be written.
    #[error(transparent)]
    Dumping(#[from] DumpingError),
    /// A golden that this model cannot have made.
    #[error("{0}")]
    GoldenAtFault(String),
    /// Dumps that cannot be compared.
    #[error(transparent)]
    Diff(#[from] DiffError),
    /// A measurement that was not possible.
    #[error(transparent)]
    Bench(#[from] crate::bench::BenchError),
    /// A file that cannot be read or written.
    #[error("{0}: {1}")]
    Io(String, std::io::Error),
    /// Anything else about the call.
    #[error("{0}")]
    Usage(String),
}

impl CliError {
    /// 4 where a golden is at fault, else 2.
    pub fn code(&self) -> u8 {
        match self {
            CliError::Golden(_) | CliError::GoldenAtFault(_) | CliError::Diff(DiffError::Dump(_)) => 4,
            _ => 2,
        }
    }
}
