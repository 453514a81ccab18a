//! Values in memory as the rows of a tensor.

use spec::Rows;

/// Row length, and all values row after row.
pub struct Values(pub usize, pub Vec<f32>);

impl Rows for Values {
    fn rows(&self) -> usize {
        self.1.len() / self.0
    }
    fn inner(&self) -> usize {
        self.0
    }
    fn decode(&self, row: usize, into: &mut [f32]) {
        into.copy_from_slice(&self.1[row * self.0..][..self.0]);
    }
    fn format(&self) -> &str {
        "F32"
    }
    fn row_bytes(&self) -> usize {
        4 * self.0
    }
}
