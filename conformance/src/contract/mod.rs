//! What number formats a subject declares, and the exact rules that follow.

mod file;
mod formats;

pub use file::ContractError;
pub use formats::{
    BLOCK, Float, GROUP, Q4Row, Rounding, bf16, block, code, f32_of_block, int8_dot, int8_row, int8_weights,
    q4_row,
};

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
    /// 4-bit codes with scale and zero per 32 inputs; int8 activations with a scale per 32 inputs; exact
    /// i32 sums in a block, f32 over blocks, left to right.
    W4A8,
    /// 4-bit codes decoded to bf16, bf16 activations; f32 sums over tiles of 32, then over tiles.
    W4A16,
    /// Blocks of 8 that share an exponent on both sides; exact sums in a block, f32 over blocks.
    Bfp16,
    /// f32 operands and sums, added in any order: small products that never leave the host.
    Host,
    /// Whatever the formats, nothing rounds: only the reference's own value passes. For models of whole numbers
    /// ([`fixtures::integers`]).
    Exact,
    /// Floating-point formats as a contract file declares them.
    Declared(Declared),
}

/// A matrix product in floating point: exact inside a tile, the running sum rounded behind each.
///
/// ```text
/// acc ← round(acc + Σ_tile input(x) · weight(w))      y = output(acc + bias)
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Declared {
    /// What activations are rounded to.
    pub input: Float,
    /// What weights are rounded to.
    pub weight: Float,
    /// What the running sum is held in.
    pub accumulator: Float,
    /// Inputs of a tile.
    pub tile: usize,
    /// How the running sum and the output are rounded.
    pub rounding: Rounding,
    /// What the result is rounded to.
    pub output: Float,
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
            "w4a8" => Product::W4A8,
            "w4a16" => Product::W4A16,
            "bfp16" => Product::Bfp16,
            _ => return None,
        };
        Some(Contract { name: name.to_string(), linear, host: Host { ulps: 2.0 } })
    }

    /// The contract of a model on which no format rounds anything: the limit is 0 at every site.
    pub fn exact() -> Contract {
        Contract { name: "exact".to_string(), linear: Product::Exact, host: Host { ulps: 0.0 } }
    }

    /// The arithmetic of the matrix product at a site.
    pub fn product_at(&self, at: Site) -> Product {
        let on_host = HOST_PRODUCTS.contains(&at.name) && self.linear != Product::Exact;
        if on_host { Product::Host } else { self.linear }
    }

    /// The names of the built-in contracts.
    pub const NAMES: &'static [&'static str] = &["f32", "int8", "w4a8", "w4a16", "bfp16"];
}

/// Row `o` of the weights that a subject of this contract multiplies with, as f32 values.
///
/// ```text
/// int8     f32(code) · scale                     w4a8    d · (q - offset) + m
/// w4a16    bf16(d · (q - offset) + m)            bfp16   m · 2^(E-133)
/// ```
///
/// Every operation is rounded to f32, as an image decodes it. `stored` is the package's own row.
pub fn image_row(weight: &Matrix, o: usize, stored: &[f32], product: Product) -> Result<Vec<f32>, NonFinite> {
    Ok(match product {
        Product::F32 | Product::Host | Product::Exact => stored.to_vec(),
        Product::Int8 => {
            let mut codes = vec![0i8; stored.len()];
            let scale = int8_weights(stored, &mut codes);
            codes.into_iter().map(|code| f32::from(code) * scale).collect()
        }
        Product::W4A8 | Product::W4A16 => {
            let row = q4_row(weight, o, product == Product::W4A16)?;
            (0..stored.len()).map(|i| row.value(i)).collect()
        }
        Product::Bfp16 => {
            let decoded = |values: &[f32]| {
                let (mantissas, exponent) = block(values);
                mantissas.into_iter().take(values.len()).map(move |m| f32_of_block(m, exponent))
            };
            stored.chunks(BLOCK).flat_map(decoded).collect()
        }
        Product::Declared(declared) => {
            stored.iter().map(|&w| declared.weight.round(w, Rounding::NearestEven)).collect()
        }
    })
}

/// The rows of [`image_row`], one after the other.
pub fn decoded_image(weight: &Matrix, product: Product) -> Result<Vec<f32>, NonFinite> {
    let (out, inner) = (weight.out(), weight.inner());
    let (mut values, mut stored) = (Vec::with_capacity(out * inner), vec![0f32; inner]);
    for o in 0..out {
        weight.decode(o, &mut stored)?;
        values.extend(image_row(weight, o, &stored, product)?);
    }
    Ok(values)
}
