//! Products of other libraries behind safe functions, for `karat bench` to be measured against.
//!
//! Nothing that judges depends on this crate: what a library computes here is timed and thrown away.

/// `y[r, o] = Σ_i x[r, i] · w[o, i]` by the `gemm` crate, on one thread, in an order of its own.
///
/// `x` is `[rows, inner]`, `w` `[out, inner]` as a linear layer stores it, `y` `[rows, out]`; all row after row.
///
/// # Panics
/// If a slice has another length than its shape says.
pub fn gemm_f32(x: &[f32], w: &[f32], y: &mut [f32], rows: usize, out: usize, inner: usize) {
    assert_eq!(x.len(), rows * inner, "gemm_f32: values of x against rows x inner");
    assert_eq!(w.len(), out * inner, "gemm_f32: values of w against out x inner");
    assert_eq!(y.len(), rows * out, "gemm_f32: values of y against rows x out");
    let stride = |n: usize| isize::try_from(n).expect("no slice is longer than isize::MAX");
    // SAFETY: by the assertions above every index `r · inner + i`, `o · inner + i` and `r · out + o` lies inside
    // its slice, and `y` is borrowed mutably, so it overlaps neither `x` nor `w`.
    unsafe {
        gemm::gemm(
            rows,
            out,
            inner,
            y.as_mut_ptr(),
            1,
            stride(out),
            false,
            x.as_ptr(),
            1,
            stride(inner),
            w.as_ptr(),
            stride(inner),
            1,
            0.0,
            1.0,
            false,
            false,
            false,
            gemm::Parallelism::None,
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // Row 0 of w: 1·1 + 10·2 + 100·3 = 321; row 1: 654. Transposed, w would be read as (1, 3, 5) and (2, 4, 6).
    #[test]
    fn reads_rows_of_w() {
        let (x, w) = ([1.0, 10.0, 100.0, 2.0, 20.0, 200.0], [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
        let mut y = [f32::NAN; 4];
        gemm_f32(&x, &w, &mut y, 2, 2, 3);
        assert_eq!(y, [321.0, 654.0, 642.0, 1308.0]);
    }
}
