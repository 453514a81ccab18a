//! Taking a model's tensors out of a container, by the names of the published checkpoint.

use crate::matrix::{Matrix, NonFinite, Rows, Vector};
use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::Arc;

/// The tensors of a container under the names of the published checkpoint (`model.layers.0.…`).
///
/// A container with names or conventions of its own (GGUF, Q4NX) undoes them here, so that one
/// model program serves every container.
pub trait Tensors: Send + Sync {
    /// All names, sorted.
    fn names(&self) -> Vec<String>;

    /// The logical shape, slowest axis first.
    fn shape(&self, name: &str) -> Option<Vec<usize>>;

    /// The tensor as rows: all axes but the last flattened, the last one as the row.
    fn rows(&self, name: &str) -> Option<Result<Arc<dyn Rows>, LoadError>>;

    /// The file that holds the tensor, for messages.
    fn file(&self, name: &str) -> PathBuf;
}

/// Why a package's tensors do not make the model that its config describes.
#[derive(Debug, Clone, thiserror::Error)]
pub enum LoadError {
    /// A tensor that the config asks for is not there.
    #[error("{file}: tensor {tensor} is missing; the config asks for it with shape {shape:?}")]
    Missing {
        /// Where it was looked for.
        file: String,
        /// The name.
        tensor: String,
        /// The shape it should have.
        shape: Vec<usize>,
    },
    /// A tensor has another shape than the config asks for.
    #[error("{file}: tensor {tensor} has shape {found:?}, but the config asks for {expected:?}")]
    Shape {
        /// The file.
        file: String,
        /// The name.
        tensor: String,
        /// The shape of the config.
        expected: Vec<usize>,
        /// The shape in the file.
        found: Vec<usize>,
    },
    /// Tensors that the model does not read.
    #[error(
        "{file}: the model does not use {count} tensors, first {tensor}; a tensor that is left over means a config that says less than the weights"
    )]
    LeftOver {
        /// The file of the first.
        file: String,
        /// How many.
        count: usize,
        /// The first of them.
        tensor: String,
        /// All of them.
        tensors: Vec<String>,
    },
    /// A value that is not finite.
    #[error("{file}: {source}")]
    NonFinite {
        /// The file.
        file: String,
        /// Which value.
        source: NonFinite,
    },
    /// Bytes of a tensor that are not what their format says.
    #[error("{file}: tensor {tensor}: {reason}")]
    Format {
        /// The file.
        file: String,
        /// The name.
        tensor: String,
        /// What was expected and found.
        reason: String,
    },
}

/// Hands out tensors by name, checks their shapes, and remembers which were taken.
pub struct Loader<'a> {
    tensors: &'a dyn Tensors,
    prefix: String,
    used: BTreeSet<String>,
}

impl<'a> Loader<'a> {
    /// A loader over `tensors`. Wrapped text models (`model.language_model.…`, `llm.model.…`) are found by
    /// themselves: `model.x` is looked up under the longest prefix that exists.
    pub fn new(tensors: &'a dyn Tensors) -> Self {
        let names = tensors.names();
        let wrapped = ["model.language_model.", "language_model.model.", "llm.model."];
        let prefix = wrapped.iter().find(|p| names.iter().any(|n| n.starts_with(*p)));
        Self { tensors, prefix: prefix.map_or("model.", |p| p).to_string(), used: BTreeSet::new() }
    }

    /// The name under which the container has `name`.
    fn resolve(&self, name: &str) -> String {
        match name.strip_prefix("model.") {
            Some(rest) if self.prefix != "model." => format!("{}{rest}", self.prefix),
            None => match self.prefix.strip_suffix("model.") {
                Some(outer) if !outer.is_empty() && self.tensors.shape(name).is_none() => {
                    format!("{outer}{name}")
                }
                _ => name.to_string(),
            },
            Some(_) => name.to_string(),
        }
    }

    /// Whether the container has `name`.
    pub fn has(&self, name: &str) -> bool {
        self.tensors.shape(&self.resolve(name)).is_some()
    }

    /// Marks a tensor as known and not needed (a table that a layer does not own, an inverse
    /// frequency that some checkpoints carry).
    pub fn skip(&mut self, name: &str) {
        let name = self.resolve(name);
        self.used.insert(name);
    }

    /// Marks the tensors of `count` layers from `first` on as known and not needed: prediction layers
    /// behind the last.
    pub fn skip_layers(&mut self, first: usize, count: usize) {
        let layers = self.resolve("model.layers.");
        let of_layer = |name: &String| {
            let (number, _) = name.strip_prefix(&layers)?.split_once('.')?;
            number.parse::<usize>().ok()
        };
        let names = self.tensors.names().into_iter();
        let behind = |i: usize| i >= first && i - first < count;
        self.used.extend(names.filter(|name| of_layer(name).is_some_and(behind)));
    }

    fn stored(&mut self, name: &str, shape: &[usize]) -> Result<(String, Arc<dyn Rows>), LoadError> {
        let name = self.resolve(name);
        let file = || self.tensors.file(&name).display().to_string();
        let Some(found) = self.tensors.shape(&name) else {
            return Err(LoadError::Missing { file: file(), tensor: name.clone(), shape: shape.to_vec() });
        };
        if found != shape {
            let expected = shape.to_vec();
            return Err(LoadError::Shape { file: file(), tensor: name.clone(), expected, found });
        }
        let rows = self.tensors.rows(&name).ok_or_else(|| LoadError::Missing {
            file: file(),
            tensor: name.clone(),
            shape: shape.to_vec(),
        })??;
        self.used.insert(name.clone());
        Ok((name, rows))
    }

    /// A matrix `[out, inner]`.
    pub fn matrix(&mut self, name: &str, out: usize, inner: usize) -> Result<Matrix, LoadError> {
        let (name, rows) = self.stored(name, &[out, inner])?;
        Ok(Matrix::new(name, rows))
    }

    /// A stack `[count, out, inner]` as one matrix of `count · out` rows.
    pub fn stack(&mut self, name: &str, count: usize, out: usize, inner: usize) -> Result<Matrix, LoadError> {
        let (name, rows) = self.stored(name, &[count, out, inner])?;
        Ok(Matrix::new(name, rows))
    }

    /// A tensor of any shape as a flat vector, decoded.
    pub fn values(&mut self, name: &str, shape: &[usize]) -> Result<Vector, LoadError> {
        let (name, rows) = self.stored(name, shape)?;
        let matrix = Matrix::new(name.clone(), rows);
        let file = || self.tensors.file(&name).display().to_string();
        let values = matrix.to_values().map_err(|source| LoadError::NonFinite { file: file(), source })?;
        Ok(Vector::new(&name, values))
    }

    /// A vector of `len` values, decoded.
    pub fn vector(&mut self, name: &str, len: usize) -> Result<Vector, LoadError> {
        self.values(name, &[len])
    }

    /// A vector where `wanted`, else nothing: a bias that the config switches on.
    pub fn vector_if(&mut self, wanted: bool, name: &str, len: usize) -> Result<Option<Vector>, LoadError> {
        if wanted { self.vector(name, len).map(Some) } else { Ok(None) }
    }

    /// Refuses tensors that nobody took. `elsewhere` names what is known not to be judged (vision
    /// towers, extra heads); the names it accepts are returned.
    pub fn finish(self, elsewhere: impl Fn(&str) -> bool) -> Result<Vec<String>, LoadError> {
        let left: Vec<String> =
            self.tensors.names().into_iter().filter(|name| !self.used.contains(name)).collect();
        let unknown: Vec<&String> = left.iter().filter(|name| !elsewhere(name)).collect();
        match unknown.first() {
            None => Ok(left),
            Some(tensor) => Err(LoadError::LeftOver {
                file: self.tensors.file(tensor).display().to_string(),
                count: unknown.len(),
                tensor: tensor.to_string(),
                tensors: unknown.into_iter().cloned().collect(),
            }),
        }
    }
}
