//! What number formats a subject declares, and the exact rules that follow.

use serde::{Deserialize, Serialize};
use spec::{Matrix, NonFinite, Site};

/// The number formats of a subject.
///
/// Everything outside matrix products is declared as f32 with results within [`Host::ulps`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Contract {
    /// Its name in reports.
    pub name: String,
    /// Matrix products.
    pub linear: Product,
    /// All other ops.
    pub host: Host,
}

/// The formats and the order of sums of a matrix product.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Product {
    /// f32 operands; products and sums rounded to f32, strictly left to right, unfused.
    F32,
    /// int8 codes with one scale per activation row and one per output; exact i32 sums;
    /// `(f32(C) · sA) · sW`.
    Int8,
    /// f32 operands and sums, added in any order: small products that never leave the host.
    Host,
}

/// Products that the NPU path keeps on the host: a router's scores and a shared expert's gate, a few
/// outputs each, whose weights are no images.
pub const HOST_PRODUCTS: &[&str] =
    &["router_logits", "shared_gate", "altup_router", "altup_coefs", "altup_post_router", "altup_post_coefs"];

/// Ops that run beside the matrix unit.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Host {
    /// How many units in the last place an elementary function (exp, tanh, root, division) may be off.
    pub ulps: f64,
}

impl Contract {
    /// A built-in contract.
    pub fn named(name: &str) -> Option<Contract> {
        let linear = match name {
            "f32" => Product::F32,
            "int8" => Product::Int8,
            _ => return None,
        };
        Some(Contract { name: name.to_string(), linear, host: Host { ulps: 2.0 } })
    }

    /// The arithmetic of the matrix product at a site.
    pub fn product_at(&self, at: Site) -> Product {
        if HOST_PRODUCTS.contains(&at.name) { Product::Host } else { self.linear }
    }

    /// The names of the built-in contracts.
    pub const NAMES: &'static [&'static str] = &["f32", "int8"];
}

/// A matrix as a subject holds it: what its products are judged with.
///
/// `value[o, i] = codes[o, i] · scales[o]`, in f64, exactly.
#[derive(Clone, Debug)]
pub struct Int8Image {
    /// `[out, in]`
    pub codes: Vec<i8>,
    /// `[out]`
    pub scales: Vec<f32>,
}

/// Nearest whole number, halves away from zero, within ±127.
///
/// ```text
/// code = clamp(round_half_away(v), -127, 127)
/// ```
pub fn code(v: f32) -> i8 {
    v.round().clamp(-127.0, 127.0) as i8
}

/// The int8 codes of an activation row and their scale.
///
/// ```text
/// sA = amax / 127   (1 where amax = 0);   code[i] = code(a[i] · (1 / sA))
/// ```
///
/// Every operation is rounded to f32, as declared.
pub fn int8_row(row: &[f32], codes: &mut [i8]) -> f32 {
    let amax = row.iter().fold(0f32, |m, v| m.max(v.abs()));
    let scale = if amax == 0.0 { 1.0 } else { amax / 127.0 };
    let inverse = 1.0 / scale;
    for (code_, &v) in codes.iter_mut().zip(row) {
        *code_ = code(v * inverse);
    }
    scale
}

/// The int8 image of a weight matrix: one scale an output.
///
/// ```text
/// cmax = max_i |w[o, i]|, below 1e-12 taken as 1;   sW = cmax / 127;   code = code(w · (127 / cmax))
/// ```
pub fn int8_image(weight: &Matrix) -> Result<Int8Image, NonFinite> {
    let (out, inner) = (weight.out(), weight.inner());
    let (mut codes, mut scales) = (vec![0i8; out * inner], vec![0f32; out]);
    let mut row = vec![0f32; inner];
    for o in 0..out {
        weight.decode(o, &mut row)?;
        let cmax = row.iter().fold(0f32, |m, v| m.max(v.abs()));
        let (scale, inverse) = if cmax < 1e-12 { (1.0, 127.0) } else { (cmax / 127.0, 127.0 / cmax) };
        for (code_, &w) in codes[o * inner..][..inner].iter_mut().zip(&row) {
            *code_ = code(w * inverse);
        }
        scales[o] = scale;
    }
    Ok(Int8Image { codes, scales })
}

/// The weights that a subject of this contract multiplies with, as f32 values, row after row.
///
/// int8: `f32(code) · scale`, rounded to f32 as an image decodes it.
pub fn decoded_image(weight: &Matrix, product: Product) -> Result<Vec<f64>, NonFinite> {
    Ok(match product {
        Product::F32 | Product::Host => weight.to_values()?.into_iter().map(f64::from).collect(),
        Product::Int8 => {
            let (image, inner) = (int8_image(weight)?, weight.inner());
            let value = |(n, &code): (usize, &i8)| f64::from(f32::from(code) * image.scales[n / inner]);
            image.codes.iter().enumerate().map(value).collect()
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    // amax 254, so sA = 2 and codes are halves: 1/2 = 0.5 rounds away from zero to 1, -1/2 to -1.
    #[test]
    fn halves_round_away_from_zero() {
        let mut codes = [0i8; 4];
        assert_eq!(int8_row(&[254.0, 1.0, -1.0, 0.9], &mut codes), 2.0);
        assert_eq!(codes, [127, 1, -1, 0]);
        assert_eq!(int8_row(&[0.0; 4], &mut codes), 1.0);
        assert_eq!(codes, [0; 4]);
    }

    // Row 0: cmax 127, scale 1. Row 1: cmax 1.27, scale 0.01: 0.635 · (127/1.27) = 63.5 → 64.
    #[test]
    fn every_output_has_a_scale() {
        let w = Matrix::from_values("w", 3, 2, vec![127.0, -3.0, 0.635, 1.27, 0.0, 0.0]);
        let image = int8_image(&w).unwrap();
        assert_eq!(image.codes, [127, -3, 64, 127, 0, 0]);
        assert_eq!(image.scales, [1.0, 0.01, 1.0]);
    }
}
