//! The image of the `f32` engine: decoded weights, sixteen outputs side by side.

use super::{Buffer, TILE};

/// A weight matrix in f32, in the order in which a launch reads it.
///
/// Tiles hold sixteen outputs. Inside a tile the image walks along the inner axis, so that one vector load
/// feeds sixteen sums that each still add strictly left to right:
///
/// ```text
/// tile 0   w[0,0] w[1,0] … w[15,0]   w[0,1] w[1,1] … w[15,1]   …
/// tile 1   w[16,0] …
/// ```
///
/// The last tile is filled up with zero outputs.
pub(crate) struct StrictImage {
    pub inner: usize,
    values: Buffer,
}

impl StrictImage {
    pub fn zeroed(out: usize, inner: usize) -> StrictImage {
        StrictImage { inner, values: Buffer::zeroed(out.div_ceil(TILE) * TILE * inner * 4) }
    }

    /// Index of w[o, i] in the image.
    pub fn position(&self, o: usize, i: usize) -> usize {
        (o / TILE * self.inner + i) * TILE + o % TILE
    }

    pub fn put_row(&mut self, o: usize, row: &[f32]) {
        let start = self.position(o, 0);
        let values = self.values.as_mut_slice::<f32>();
        for (i, &w) in row.iter().enumerate() {
            values[start + i * TILE] = w;
        }
    }

    pub fn get(&self, o: usize, i: usize) -> f32 {
        self.values.as_slice::<f32>()[self.position(o, i)]
    }

    /// `[inner, 16]`: the columns of one tile.
    pub fn tile(&self, tile: usize) -> &[[f32; TILE]] {
        let columns = self.values.as_slice::<f32>().as_chunks().0;
        &columns[tile * self.inner..(tile + 1) * self.inner]
    }

    pub fn probe(&self) -> u64 {
        self.values.probe()
    }

    pub fn bytes(&self) -> usize {
        self.values.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // 17 outputs of 3: output 16 opens the second tile, behind 16 · 3 values.
    #[test]
    fn positions_by_hand() {
        let image = StrictImage::zeroed(17, 3);
        assert_eq!(image.position(1, 0), 1);
        assert_eq!(image.position(0, 1), 16);
        assert_eq!(image.position(16, 0), 48);
    }
}
