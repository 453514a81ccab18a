//! Growing and shrinking a cache.

use super::{Tensor, rows};
use ndarray::{Array3, ArrayD, Axis, Slice, concatenate};

/// `rows` behind `cache`.
///
/// ```text
/// y[j, h, i] = cache[j, h, i]               for j < cached
/// y[cached + t, h, i] = rows[t, h·width + i]
/// ```
///
/// `rows` is `[tokens, heads · width]` in any shape; the result is `[keys, heads, width]`. Exact.
pub fn append(cache: Option<&Tensor>, new: &Tensor, width: usize) -> Array3<f64> {
    let flat = rows(new);
    let (tokens, all) = flat.dim();
    assert_eq!(all % width, 0, "append: row length against head width");
    let new =
        flat.into_shape_with_order((tokens, all / width, width)).expect("append: rows are stored in order");
    let new = new.mapv(f64::from);
    match cache {
        None => new,
        Some(cache) => {
            let cache =
                cache.view().into_dimensionality().expect("append: a cache has three axes").mapv(f64::from);
            concatenate(Axis(0), &[cache.view(), new.view()]).expect("append: cache heads against row heads")
        }
    }
}

/// The first `keep` rows of `cache`. Exact.
pub fn truncate(cache: &Tensor, keep: usize) -> ArrayD<f64> {
    assert!(keep <= cache.shape()[0], "truncate: rows to keep against rows held");
    cache.slice_axis(Axis(0), Slice::from(..keep)).mapv(f64::from)
}

#[cfg(test)]
mod tests {
    use super::*;
    use ndarray::array;

    #[test]
    fn rows_land_behind_in_head_order() {
        let first = array![[1.0f32, 2.0, 3.0, 4.0]].into_dyn().into_shared();
        let cache = append(None, &first, 2).mapv(|v| v as f32).into_dyn().into_shared();
        let second = array![[5.0f32, 6.0, 7.0, 8.0]].into_dyn().into_shared();
        let both = append(Some(&cache), &second, 2);
        assert_eq!(both, array![[[1.0, 2.0], [3.0, 4.0]], [[5.0, 6.0], [7.0, 8.0]]]);
        let both = both.mapv(|v| v as f32).into_dyn().into_shared();
        assert_eq!(truncate(&both, 1), array![[[1.0, 2.0], [3.0, 4.0]]].into_dyn());
    }
}
