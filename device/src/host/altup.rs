//! Parallel streams of the residual (AltUp), and the cut of sparse gates.
//!
//! Rows hold all streams one after the other: `[rows, streams, hidden]`. Source: arXiv 2301.13310.

use super::norm::inverse_rms;

/// `pred[o] = X[o] + Σ_i C[o, i] · X[i]`, the sum from left to right, for each row.
///
/// `x` and the result are `[rows, streams, hidden]`, `coefs` is `[rows, streams · streams]`.
pub fn predict(x: &[f32], coefs: &[f32], streams: usize, hidden: usize) -> Vec<f32> {
    let mut pred = Vec::with_capacity(x.len());
    for (row, coefs) in x.chunks_exact(streams * hidden).zip(coefs.chunks_exact(streams * streams)) {
        for (o, coefs) in coefs.chunks_exact(streams).enumerate() {
            let mut sum = vec![0.0; hidden];
            for (stream, c) in row.chunks_exact(hidden).zip(coefs) {
                sum.iter_mut().zip(stream).for_each(|(sum, x)| *sum += c * x);
            }
            pred.extend(row[o * hidden..][..hidden].iter().zip(&sum).map(|(x, sum)| x + sum));
        }
    }
    pred
}

/// `X[j] = pred[j] + (made − pred[active]) · (1 + c[j])` for each row; in place of `pred`.
///
/// `made` is `[rows, hidden]`, `coefs` is `[rows, streams]`.
pub fn correct(pred: &mut [f32], made: &[f32], coefs: &[f32], active: usize) {
    let streams = pred.len() / made.len();
    let hidden = made.len() * streams / coefs.len();
    for ((row, made), coefs) in pred
        .chunks_exact_mut(streams * hidden)
        .zip(made.chunks_exact(hidden))
        .zip(coefs.chunks_exact(streams))
    {
        let news: Vec<f32> =
            made.iter().zip(&row[active * hidden..][..hidden]).map(|(made, pred)| made - pred).collect();
        for (stream, c) in row.chunks_exact_mut(hidden).zip(coefs) {
            stream.iter_mut().zip(&news).for_each(|(x, new)| *x += new * (1.0 + c));
        }
    }
}

/// Stream `j` of rows with `streams` of them, `[rows, hidden]`.
pub fn stream(x: &[f32], j: usize, streams: usize, hidden: usize) -> Vec<f32> {
    x.chunks_exact(streams * hidden).flat_map(|row| &row[j * hidden..][..hidden]).copied().collect()
}

/// Brings each row of `y` to the root mean square of the same row of `like`:
/// `y · rms(like) / √max(mean y², 1e-5)`.
pub fn match_rms(y: &mut [f32], like: &[f32], hidden: usize) {
    for (y, like) in y.chunks_exact_mut(hidden).zip(like.chunks_exact(hidden)) {
        let target = 1.0 / inverse_rms(like, 0.0);
        let own = (super::dot(y, y) / hidden as f32).max(1e-5).sqrt();
        // A row of zeros has no inverse root; its size is 0.
        let factor = if target.is_finite() { target / own } else { 0.0 };
        y.iter_mut().for_each(|v| *v *= factor);
    }
}

/// `max(0, x − (mean + std · quantile))` with the mean and the population deviation of each row.
pub fn sparsify(x: &mut [f32], width: usize, quantile: f32) {
    for row in x.chunks_exact_mut(width) {
        let mean = row.iter().sum::<f32>() / width as f32;
        let deviations: Vec<f32> = row.iter().map(|v| v - mean).collect();
        let cut = mean + (super::dot(&deviations, &deviations) / width as f32).sqrt() * quantile;
        row.iter_mut().for_each(|v| *v = (*v - cut).max(0.0));
    }
}

/// `Φ⁻¹(p)` for `0 < p < 1`, by Newton's method from 0: beyond 0 the distribution is concave, so that every
/// step falls short of the root and none runs away.
pub fn normal_quantile(p: f64) -> f64 {
    if p < 0.5 {
        return -normal_quantile(1.0 - p);
    }
    let mut z = 0.0f64;
    for _ in 0..100 {
        let reached = 0.5 * libm::erfc(-z / std::f64::consts::SQRT_2);
        let density = libm::exp(-0.5 * z * z) / (2.0 * std::f64::consts::PI).sqrt();
        let step = (p - reached) / density;
        z += step;
        if step.abs() < 1e-14 {
            break;
        }
    }
    z
}

#[cfg(test)]
mod tests {
    use super::*;

    // Streams 1 and 10, one value each. C = [[2, 3], [5, 7]]: 1 + 2·1 + 3·10 = 33, 10 + 5·1 + 7·10 = 85.
    #[test]
    fn predictions_read_rows_of_the_coefficients() {
        assert_eq!(predict(&[1.0, 10.0], &[2.0, 3.0, 5.0, 7.0], 2, 1), [33.0, 85.0]);
    }

    // The layer made 14 of a prediction 4: the news is 10, taken over at 1 + 0.5 and 1 - 0.25.
    #[test]
    fn corrections_follow_the_active_stream() {
        let mut pred = [100.0, 4.0];
        correct(&mut pred, &[14.0], &[0.5, -0.25], 1);
        assert_eq!(pred, [115.0, 11.5]);
    }

    // rms(3, 4) = 5/√2 against rms(0, 2) = √2: the factor is 5/2.
    #[test]
    fn rows_are_brought_to_one_size() {
        let mut y = [0.0, 2.0];
        match_rms(&mut y, &[3.0, 4.0], 2);
        assert!((y[1] - 5.0).abs() < 1e-5, "{y:?}");
        assert_eq!(stream(&[1.0, 2.0, 3.0, 4.0], 1, 2, 1), [2.0, 4.0]);
    }

    // Mean 3, population deviation √((4 + 0 + 4)/3) = 1.632993; the cut at half a deviation is 3.816497.
    #[test]
    fn gates_below_the_cut_are_zero() {
        let mut x = [1.0, 3.0, 5.0];
        sparsify(&mut x, 3, 0.5);
        assert_eq!(x[..2], [0.0, 0.0]);
        assert!((x[2] - 1.183_503).abs() < 1e-5, "{x:?}");
    }

    // Tables: Φ⁻¹(0.95) = 1.6448536, Φ⁻¹(0.975) = 1.9599640, Φ⁻¹(0.5) = 0.
    #[test]
    fn quantiles_of_the_tables() {
        for (p, z) in [(0.95, 1.644_853_6), (0.975, 1.959_964_0), (0.5, 0.0), (0.05, -1.644_853_6)] {
            assert!((normal_quantile(p) - z).abs() < 1e-7, "{p}: {}", normal_quantile(p));
        }
    }
}
