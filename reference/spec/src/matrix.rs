//! Weight matrices that are decoded row by row, and the small vectors that are held decoded.

use std::ops::Range;
use std::sync::Arc;

/// A stored matrix that can decode any of its rows to f32.
///
/// A container implements this over mapped bytes: opening costs nothing, and no more than a row
/// is ever held in f32.
pub trait Rows: Send + Sync {
    /// Number of rows.
    fn rows(&self) -> usize;

    /// Length of a row.
    fn inner(&self) -> usize;

    /// Writes row `row` as the format defines it. `into` is `inner` long.
    fn decode(&self, row: usize, into: &mut [f32]);

    /// Writes column `column`. `into` is `rows` long.
    ///
    /// The default decodes every row; containers of plain numbers read the elements.
    fn decode_column(&self, column: usize, into: &mut [f32]) {
        let mut row = vec![0.0; self.inner()];
        for (r, value) in into.iter_mut().enumerate() {
            self.decode(r, &mut row);
            *value = row[column];
        }
    }

    /// The stored number format: `F32`, `BF16`, `Q4_0`, ...
    fn format(&self) -> &str;

    /// Stored bytes of one row (of all its codes, scales and zeros).
    fn row_bytes(&self) -> usize;

    /// The 4-bit codes of a row, where the format has them in groups of 32.
    ///
    /// A value is `scale · code + zero` with the group's numbers. Returns false, and writes
    /// nothing, for any other format.
    fn codes4(&self, row: usize, into: &mut Codes4) -> bool {
        let _ = (row, into);
        false
    }
}

/// One row of 4-bit codes: `value[i] = scales[i / 32] · codes[i] + zeros[i / 32]`.
#[derive(Debug, Default, Clone, PartialEq)]
pub struct Codes4 {
    /// One code in 0..=15 a column.
    pub codes: Vec<u8>,
    /// One scale a group of 32 columns.
    pub scales: Vec<f32>,
    /// One offset a group of 32 columns, added after scaling.
    pub zeros: Vec<f32>,
}

/// A weight that is NaN or infinite, found when its row was decoded.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[error("{tensor} holds {value} at row {row}, column {column}, but weights must be finite")]
pub struct NonFinite {
    /// Name of the tensor.
    pub tensor: String,
    /// Row of the stored matrix.
    pub row: usize,
    /// Column of the stored matrix.
    pub column: usize,
    /// The value found.
    pub value: f32,
}

/// A weight matrix `[out, inner]`, or some rows of one, or a stored `[inner, out]` read by columns.
///
/// `y[r, o] = Σ_i x[r, i] · w[o, i]` is the product that every linear layer means.
#[derive(Clone)]
pub struct Matrix {
    name: Arc<str>,
    stored: Arc<dyn Rows>,
    view: View,
}

#[derive(Clone)]
enum View {
    /// Logical row `o` is stored row `start + o · step`.
    Rows { start: usize, step: usize, out: usize },
    /// Logical row `o` is stored row `order[o]`.
    Order(Arc<[u32]>),
    /// Logical row `o` is stored column `start + o · step`, of which `rows` are read.
    Columns { start: usize, step: usize, out: usize, rows: Range<usize> },
}

impl Matrix {
    /// All rows of `stored`.
    pub fn new(name: impl Into<Arc<str>>, stored: Arc<dyn Rows>) -> Self {
        let out = stored.rows();
        Self { name: name.into(), stored, view: View::Rows { start: 0, step: 1, out } }
    }

    /// A matrix of given values, row after row: for tests and for weights that a program makes.
    pub fn from_values(name: &str, out: usize, inner: usize, values: Vec<f32>) -> Self {
        assert_eq!(values.len(), out * inner, "matrix {name}: number of values against shape");
        Self::new(name, Arc::new(Values::new(inner, values)))
    }

    /// The tensor's name, for messages.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Number of outputs.
    pub fn out(&self) -> usize {
        match &self.view {
            View::Rows { out, .. } | View::Columns { out, .. } => *out,
            View::Order(order) => order.len(),
        }
    }

    /// Number of inputs.
    pub fn inner(&self) -> usize {
        match &self.view {
            View::Columns { rows, .. } => rows.len(),
            _ => self.stored.inner(),
        }
    }

    /// The stored number format.
    pub fn format(&self) -> &str {
        self.stored.format()
    }

    /// Stored bytes that one logical row takes.
    pub fn row_bytes(&self) -> usize {
        match &self.view {
            View::Columns { rows, .. } => self.stored.row_bytes() * rows.len() / self.stored.inner().max(1),
            _ => self.stored.row_bytes(),
        }
    }

    /// Logical rows `range`, as a matrix of their own: one projection out of a fused one.
    pub fn rows(&self, range: Range<usize>) -> Matrix {
        assert!(range.start <= range.end && range.end <= self.out(), "matrix {}: rows {range:?}", self.name);
        let view = match &self.view {
            View::Rows { start, step, .. } => {
                View::Rows { start: start + range.start * step, step: *step, out: range.len() }
            }
            View::Order(order) => View::Order(order[range].into()),
            View::Columns { start, step, rows, .. } => View::Columns {
                start: start + range.start * step,
                step: *step,
                out: range.len(),
                rows: rows.clone(),
            },
        };
        Self { view, ..self.clone() }
    }

    /// Every `step`-th logical row from `start` on: one half of rows that are stored interleaved.
    pub fn every(&self, start: usize, step: usize) -> Matrix {
        let out = (self.out().saturating_sub(start)).div_ceil(step);
        let view = match &self.view {
            View::Rows { start: s, step: t, .. } => View::Rows { start: s + start * t, step: t * step, out },
            View::Order(order) => View::Order((0..out).map(|o| order[start + o * step]).collect()),
            View::Columns { start: s, step: t, rows, .. } => {
                View::Columns { start: s + start * t, step: t * step, out, rows: rows.clone() }
            }
        };
        Self { view, ..self.clone() }
    }

    /// Logical row `o` becomes today's logical row `order[o]`: undoes a container's permutation.
    pub fn reordered(&self, order: &[usize]) -> Matrix {
        let order = order.iter().map(|&o| self.stored_row(o) as u32).collect();
        Self { view: View::Order(order), ..self.clone() }
    }

    /// The stored rows `rows` of an `[inner, out]` matrix as `[out, inner]`.
    ///
    /// For checkpoints that store a projection as `x · W` (the experts of gpt_oss).
    pub fn transposed(&self, rows: Range<usize>) -> Matrix {
        assert!(rows.end <= self.stored.rows(), "matrix {}: stored rows {rows:?}", self.name);
        let out = self.stored.inner();
        Self { view: View::Columns { start: 0, step: 1, out, rows }, ..self.clone() }
    }

    fn stored_row(&self, o: usize) -> usize {
        match &self.view {
            View::Rows { start, step, .. } => start + o * step,
            View::Order(order) => order[o] as usize,
            View::Columns { .. } => {
                panic!("matrix {}: rows of a transposed view cannot be reordered", self.name)
            }
        }
    }

    /// Writes logical row `o`; refuses a value that is not finite.
    pub fn decode(&self, o: usize, into: &mut [f32]) -> Result<(), NonFinite> {
        let transposed = match &self.view {
            View::Columns { start, step, rows, .. } => {
                let column = start + o * step;
                if rows.len() == self.stored.rows() {
                    self.stored.decode_column(column, into);
                } else {
                    let mut all = vec![0.0; self.stored.rows()];
                    self.stored.decode_column(column, &mut all);
                    into.copy_from_slice(&all[rows.clone()]);
                }
                true
            }
            _ => {
                self.stored.decode(self.stored_row(o), into);
                false
            }
        };
        match not_finite(into) {
            None => Ok(()),
            Some(i) => {
                let (row, column) = match &self.view {
                    View::Columns { start, step, rows, .. } if transposed => {
                        (rows.start + i, start + o * step)
                    }
                    _ => (self.stored_row(o), i),
                };
                Err(NonFinite { tensor: self.name.to_string(), row, column, value: into[i] })
            }
        }
    }

    /// The 4-bit codes of logical row `o`, where the format has them (see [`Rows::codes4`]).
    pub fn codes4(&self, o: usize, into: &mut Codes4) -> bool {
        !matches!(self.view, View::Columns { .. }) && self.stored.codes4(self.stored_row(o), into)
    }

    /// All values, row after row. For matrices of tests and for edits of small weights.
    pub fn to_values(&self) -> Result<Vec<f32>, NonFinite> {
        let inner = self.inner();
        let mut values = vec![0.0; self.out() * inner];
        for (o, row) in values.chunks_exact_mut(inner.max(1)).enumerate().take(self.out()) {
            self.decode(o, row)?;
        }
        Ok(values)
    }
}

/// The first value that is NaN or infinite. That there is none is found without a branch per value.
fn not_finite(values: &[f32]) -> Option<usize> {
    // 0 · v is ±0 for a finite v and NaN for any other, and NaN stays in a sum.
    let (whole, rest) = values.as_chunks::<16>();
    let mut sums = [0f32; 16];
    for values in whole {
        for (sum, v) in sums.iter_mut().zip(values) {
            *sum += 0.0 * v;
        }
    }
    let sum: f32 = sums.iter().sum::<f32>() + rest.iter().map(|v| 0.0 * v).sum::<f32>();
    if sum == 0.0 { None } else { values.iter().position(|v| !v.is_finite()) }
}

impl std::fmt::Debug for Matrix {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} [{}, {}] {}", self.name, self.out(), self.inner(), self.format())
    }
}

/// Values in f32, row after row: what a program makes instead of reading it.
pub struct Values {
    inner: usize,
    values: Vec<f32>,
}

impl Values {
    /// Rows of `inner` values.
    ///
    /// # Panics
    /// If the values are no whole number of rows.
    pub fn new(inner: usize, values: Vec<f32>) -> Values {
        assert!(values.len().is_multiple_of(inner.max(1)), "values: {} in rows of {inner}", values.len());
        Values { inner, values }
    }
}

impl Rows for Values {
    fn rows(&self) -> usize {
        self.values.len().checked_div(self.inner).unwrap_or(0)
    }

    fn inner(&self) -> usize {
        self.inner
    }

    fn decode(&self, row: usize, into: &mut [f32]) {
        into.copy_from_slice(&self.values[row * self.inner..][..self.inner]);
    }

    fn format(&self) -> &str {
        "F32"
    }

    fn row_bytes(&self) -> usize {
        4 * self.inner
    }
}

/// A small weight, decoded when the package is opened: a norm weight, a bias, a table of scalars.
#[derive(Clone, Debug, PartialEq)]
pub struct Vector {
    /// The tensor's name, for messages.
    pub name: Arc<str>,
    /// The values.
    pub values: Arc<[f32]>,
}

impl Vector {
    /// A vector of given values.
    pub fn new(name: &str, values: impl Into<Arc<[f32]>>) -> Self {
        Self { name: name.into(), values: values.into() }
    }

    /// Number of values.
    pub fn len(&self) -> usize {
        self.values.len()
    }

    /// Whether it holds nothing.
    pub fn is_empty(&self) -> bool {
        self.values.is_empty()
    }

    /// `1 + v` for every value: a checkpoint that stores `weight - 1`, brought to the one formula.
    pub fn plus_one(&self) -> Vector {
        Vector { name: self.name.clone(), values: self.values.iter().map(|v| 1.0 + v).collect() }
    }
}

impl std::ops::Deref for Vector {
    type Target = [f32];

    fn deref(&self) -> &[f32] {
        &self.values
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// w[o, i] = 10·o + i, four rows of three.
    fn counting() -> Matrix {
        let values = (0..12).map(|n| (10 * (n / 3) + n % 3) as f32).collect();
        Matrix::from_values("w", 4, 3, values)
    }

    fn row(m: &Matrix, o: usize) -> Vec<f32> {
        let mut into = vec![0.0; m.inner()];
        m.decode(o, &mut into).unwrap();
        into
    }

    #[test]
    fn views_by_hand() {
        let m = counting();
        assert_eq!(row(&m.rows(1..3), 1), [20.0, 21.0, 22.0]);
        assert_eq!(row(&m.every(1, 2), 1), [30.0, 31.0, 32.0]);
        assert_eq!(row(&m.reordered(&[3, 0]), 0), [30.0, 31.0, 32.0]);
        assert_eq!(row(&m.reordered(&[3, 0]).rows(1..2), 0), [0.0, 1.0, 2.0]);
        // stored rows 1..3 as [inner, out]: output 2 reads column 2
        let t = m.transposed(1..3);
        assert_eq!((t.out(), t.inner()), (3, 2));
        assert_eq!(row(&t, 2), [12.0, 22.0]);
        assert_eq!(row(&t.every(0, 2), 1), [12.0, 22.0]);
    }

    #[test]
    fn a_nan_is_named_where_it_is_stored() {
        let m = Matrix::from_values("w", 2, 2, vec![1.0, 2.0, 3.0, f32::NAN]);
        let mut into = [0.0; 2];
        let error = m.transposed(0..2).decode(1, &mut into).unwrap_err();
        assert_eq!((error.row, error.column), (1, 1));
        assert_eq!(
            m.rows(1..2).decode(0, &mut into).unwrap_err().to_string(),
            "w holds NaN at row 1, column 1, but weights must be finite"
        );
    }
}
