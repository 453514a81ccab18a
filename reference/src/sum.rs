//! The one sum, and the one dot product.

/// Adds strictly left to right in f64.
pub fn sum(values: impl IntoIterator<Item = f64>) -> f64 {
    let mut total = 0.0;
    for value in values {
        total += value;
    }
    total
}

/// `Σ_i a[i] · b[i]`, left to right. The product of two f32 is exact in f64.
pub fn dot<'a>(a: impl IntoIterator<Item = &'a f32>, b: impl IntoIterator<Item = &'a f32>) -> f64 {
    sum(a.into_iter().zip(b).map(|(&a, &b)| f64::from(a) * f64::from(b)))
}

#[cfg(test)]
mod tests {
    use super::*;

    // 2^53 + 1 rounds back to 2^53, so the order of adding decides: (2^53 + 1) + 1 = 2^53, but
    // (1 + 1) + 2^53 = 2^53 + 2.
    #[test]
    fn adds_left_to_right() {
        let big = 9_007_199_254_740_992.0;
        assert_eq!(sum([big, 1.0, 1.0]), big);
        assert_eq!(sum([1.0, 1.0, big]), big + 2.0);
    }
}
