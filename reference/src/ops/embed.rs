//! Rows of the embedding table.

use ndarray::{Array2, ArrayViewMut1};
use spec::{Matrix, NonFinite};

/// Row `ids[t]` of the table for every token, times `scale`.
///
/// ```text
/// y[t, i] = table[ids[t], i] · scale
/// ```
///
/// `table` is `[vocab, hidden]`, the result `[tokens, hidden]`. `scale` is 1 for most models, the
/// f32 root of hidden for the Gemma families, `embedding_multiplier` for Granite.
pub fn embed(ids: &[u32], table: &Matrix, scale: f32) -> Result<Array2<f64>, NonFinite> {
    let mut y = Array2::zeros((ids.len(), table.inner()));
    let mut row = vec![0.0; table.inner()];
    for (&id, mut y) in ids.iter().zip(y.rows_mut()) {
        assert!((id as usize) < table.out(), "embed: token id against vocabulary");
        table.decode(id as usize, &mut row)?;
        write(&row, scale, &mut y);
    }
    Ok(y)
}

fn write(row: &[f32], scale: f32, y: &mut ArrayViewMut1<f64>) {
    for (y, &v) in y.iter_mut().zip(row) {
        *y = f64::from(v) * f64::from(scale);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ndarray::array;

    #[test]
    fn picks_rows_and_scales_once() {
        let table = Matrix::from_values("e", 3, 2, vec![1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
        assert_eq!(embed(&[2, 0], &table, 1.5).unwrap(), array![[7.5, 9.0], [1.5, 3.0]]);
    }
}
