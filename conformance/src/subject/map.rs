//! A map file: which tap an array of somebody's dump is, and how its axes lie.
//!
//! ```json
//! {
//!   "prompt": [29, 79, 93],
//!   "greedy": [39, 15],
//!   "names": {
//!     "h.{layer}.attn.c_proj": "layers.{layer}.attn_out",
//!     "step{n}/h.{layer}.out": "step{n}.layers.{layer}.out",
//!     "h.{layer}.attn.c_attn": {"taps": ["layers.{layer}.q_proj", "layers.{layer}.k_proj", "layers.{layer}.v_proj"]},
//!     "q_heads_{layer}": {"tap": "layers.{layer}.q_rope", "axes": ["batch", "heads", "tokens", "head_dim"]},
//!     "ffn_padded_{layer}": {"tap": "layers.{layer}.mlp_out", "rows": [0, 19]},
//!     "l1.codes": {"tap": "layers.1.out", "dtype": "i8", "shape": [32, 128], "blocks": [[16, 64], [8, 8]],
//!                  "scales": "l1.scales", "rows": [0, 19], "columns": [0, 96]}
//!   },
//!   "ignore": ["*.weight"]
//! }
//! ```
//!
//! All fields are optional. `{word}` in a name stands for a number, and may be used again in the tap. A tap
//! without a pass is of the prefill, or of all passes where its rows are as many as all tokens.
//!
//! | field | meaning |
//! |---|---|
//! | `tap` | the tap that the array is |
//! | `taps` | several taps side by side along the last axis, in this order; each as wide as its site |
//! | `axes` | the names of the array's axes, slowest first: those of the site, and `batch`, of which the first is taken |
//! | `transpose` | the last two axes are swapped: a state kept as `[value_dim, key_dim]` |
//! | `rows`, `columns` | only `[first, end)` of the first and the last axis are real, the rest is padding |
//! | `shape` | the shape of a file that does not say it; with `blocks`, padding included |
//! | `dtype` | of raw bytes: `f32`, `f16`, `bf16`, `i8` or `i32` |
//! | `bfp` | of raw bytes: block floating point, `{"block": 8, "bias": 133, "exponents": "l1.exponents"}`: a signed byte m a value, an unsigned byte E a block, value m · 2^(E - bias); the E of a block stands before its m where no array of them is named; block and bias are these where they are left out |
//! | `blocks` | a blocked matrix: from large to small, the rows and columns of blocks that lie one behind another, row by row |
//! | `scales` | an array of one factor a row, or one factor a column where it is as long as that |

use golden::import::arrays::Arrays;
use golden::import::npy::Array;
use serde::Deserialize;
use std::collections::BTreeMap;
use std::path::Path;

/// A map file.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NameMap {
    /// Token ids of the prompt.
    pub prompt: Option<Vec<u32>>,
    /// Token ids chosen behind it; `stepN` was fed number `N - 1`.
    #[serde(default)]
    pub greedy: Vec<u32>,
    /// By the name of the array.
    #[serde(default)]
    names: BTreeMap<String, serde_json::Value>,
    /// Globs over names that are none of the model's values.
    #[serde(default)]
    pub ignore: Vec<String>,
}

/// How an array becomes one or several taps.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Entry {
    tap: Option<String>,
    taps: Option<Vec<String>>,
    axes: Option<Vec<String>>,
    #[serde(default)]
    transpose: bool,
    rows: Option<[usize; 2]>,
    columns: Option<[usize; 2]>,
    shape: Option<Vec<usize>>,
    dtype: Option<Bytes>,
    blocks: Option<Vec<[usize; 2]>>,
    scales: Option<String>,
    bfp: Option<Bfp>,
}

/// Bytes in block floating point: `value = m · 2^(E - bias)`.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
struct Bfp {
    /// Values that share an exponent.
    #[serde(default = "bfp_block")]
    block: usize,
    /// What is taken from an exponent: 133 where mantissas have six bits behind the point.
    #[serde(default = "bfp_bias")]
    bias: i32,
    /// The array of exponents, a byte a block; without it each stands before its block.
    exponents: Option<String>,
}

fn bfp_block() -> usize {
    8
}

fn bfp_bias() -> i32 {
    133
}

/// Number formats of raw bytes, little-endian.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Bytes {
    F32,
    F16,
    Bf16,
    I8,
    I32,
}

/// Why a map file is refused.
#[derive(Debug, Clone, thiserror::Error)]
#[error("{path}: {reason}")]
pub struct MapError {
    path: String,
    reason: String,
}

impl NameMap {
    /// Reads a map file.
    pub fn read(path: &Path) -> Result<NameMap, MapError> {
        let wrong = |reason: String| MapError { path: path.display().to_string(), reason };
        let text = std::fs::read_to_string(path).map_err(|error| wrong(error.to_string()))?;
        let map: NameMap = serde_json::from_str(&text).map_err(|error| wrong(error.to_string()))?;
        for name in map.names.keys() {
            let entry = map.entry(name).map_err(&wrong)?;
            if entry.tap.is_some() == entry.taps.is_some() {
                return Err(wrong(format!("names: {name}: expected either tap or taps")));
            }
        }
        Ok(map)
    }

    fn entry(&self, name: &str) -> Result<Entry, String> {
        match &self.names[name] {
            serde_json::Value::String(tap) => Ok(Entry { tap: Some(tap.clone()), ..Entry::default() }),
            other => Entry::deserialize(other).map_err(|error| format!("names: {name}: {error}")),
        }
    }

    /// What the map says about an array: an entry of its name, or of a pattern that it matches.
    pub fn find(&self, name: &str) -> Option<Entry> {
        self.names.keys().find_map(|pattern| {
            let numbers = captures(pattern, name)?;
            let mut entry = self.entry(pattern).ok()?;
            let fill = |tap: &mut String| {
                for (word, number) in &numbers {
                    *tap = tap.replace(&format!("{{{word}}}"), number);
                }
            };
            entry.tap.iter_mut().for_each(fill);
            entry.taps.iter_mut().flatten().for_each(fill);
            entry.scales.iter_mut().for_each(fill);
            entry.bfp.iter_mut().flat_map(|bfp| &mut bfp.exponents).for_each(fill);
            Some(entry)
        })
    }

    /// Whether the name is a helper of another array: its scales or its exponents.
    pub fn is_scales(&self, name: &str) -> bool {
        self.names
            .keys()
            .filter_map(|pattern| self.entry(pattern).ok())
            .flat_map(|entry| [entry.scales, entry.bfp.and_then(|bfp| bfp.exponents)])
            .flatten()
            .any(|helper| captures(&helper, name).is_some())
    }
}

/// The numbers in `name` where `pattern` has `{word}`; nothing where they do not match.
fn captures(pattern: &str, name: &str) -> Option<Vec<(String, String)>> {
    let mut numbers = Vec::new();
    let (mut pattern, mut name) = (pattern, name);
    while let Some((text, rest)) = pattern.split_once('{') {
        let (word, rest) = rest.split_once('}')?;
        name = name.strip_prefix(text)?;
        let end = name.find(|c: char| !c.is_ascii_digit()).unwrap_or(name.len());
        let number = name[..end].to_string();
        // A number may be written with leading zeros; the tap's is not.
        let plain = number.parse::<u64>().ok()?.to_string();
        numbers.push((word.to_string(), plain));
        (pattern, name) = (rest, &name[end..]);
    }
    (pattern == name).then_some(numbers)
}

impl Entry {
    /// The taps, in the order in which they lie side by side.
    pub fn taps(&self) -> Vec<&str> {
        self.tap.iter().chain(self.taps.iter().flatten()).map(String::as_str).collect()
    }

    /// Reads the array as the entry declares it: bytes, blocks, scales, padding, order of axes. `axes` are
    /// the site's.
    pub fn read(&self, arrays: &mut Arrays, name: &str, axes: &[&str]) -> Result<Array, String> {
        let raw = |arrays: &Arrays, name: &str, field: &str| {
            let bytes = arrays.bytes(name).map_err(|error| error.to_string())?;
            bytes.ok_or_else(|| format!("{name}: {field} is for raw bytes, but its file says its own"))
        };
        let mut array = match (self.dtype, &self.bfp) {
            (Some(_), Some(_)) => return Err(format!("{name}: expected either dtype or bfp")),
            (None, None) => arrays.read(name).map_err(|error| error.to_string())?,
            (Some(dtype), None) => decode(&raw(arrays, name, "dtype")?, dtype),
            (None, Some(bfp)) => {
                let bytes = raw(arrays, name, "bfp")?;
                let exponents =
                    bfp.exponents.as_ref().map(|name| raw(arrays, name, "exponents")).transpose()?;
                bfp.decode(&bytes, exponents.as_deref()).map_err(|reason| format!("{name}: bfp: {reason}"))?
            }
        };
        if let Some(shape) = &self.shape {
            let (held, named) = (array.values.len(), shape.iter().try_fold(1usize, |n, &d| n.checked_mul(d)));
            if named != Some(held) {
                return Err(format!("{name}: shape {shape:?} does not hold its {held} values"));
            }
            array.shape = shape.clone();
        }
        if let Some(blocks) = &self.blocks {
            unblock(&mut array, blocks).map_err(|reason| format!("{name}: {reason}"))?;
        }
        if let Some(scales) = &self.scales {
            let factors = arrays.read(scales).map_err(|error| error.to_string())?;
            scale(&mut array, &factors.values).map_err(|reason| format!("{name}: {reason}"))?;
        }
        if self.transpose {
            let n = array.shape.len();
            if n < 2 {
                return Err(format!("{name}: transpose needs two axes, but its shape is {:?}", array.shape));
            }
            let mut order: Vec<usize> = (0..n).collect();
            order.swap(n - 2, n - 1);
            array = permuted(&array, &order);
        }
        if let Some([first, end]) = self.rows {
            array = part(&array, 0, first, end).map_err(|reason| format!("{name}: rows: {reason}"))?;
        }
        if let Some([first, end]) = self.columns {
            let last = array.shape.len().saturating_sub(1);
            array = part(&array, last, first, end).map_err(|reason| format!("{name}: columns: {reason}"))?;
        }
        match &self.axes {
            Some(own) => ordered(array, own, axes).map_err(|reason| format!("{name}: axes: {reason}")),
            None => Ok(array),
        }
    }
}

impl Bfp {
    fn decode(&self, bytes: &[u8], exponents: Option<&[u8]>) -> Result<Array, String> {
        let inline = usize::from(exponents.is_none());
        let stride =
            self.block.checked_add(inline).filter(|_| self.block > 0).ok_or("a block holds no values")?;
        let blocks = bytes.chunks_exact(stride);
        if !blocks.remainder().is_empty() {
            return Err(format!("{} bytes are no whole number of blocks of {stride}", bytes.len()));
        }
        if let Some(exponents) = exponents.filter(|exponents| exponents.len() != blocks.len()) {
            return Err(format!("{} exponents for {} blocks", exponents.len(), blocks.len()));
        }
        let unit = |n: usize, block: &[u8]| {
            let exponent = exponents.map_or(block[0], |exponents| exponents[n]);
            2f64.powi(i32::from(exponent).saturating_sub(self.bias))
        };
        let value = |m: &u8, unit: f64| (f64::from(*m as i8) * unit) as f32;
        let values = blocks.enumerate().flat_map(|(n, block)| {
            let unit = unit(n, block);
            block[inline..].iter().map(move |m| value(m, unit))
        });
        let values: Vec<f32> = values.collect();
        Ok(Array { shape: vec![values.len()], values, dtype: "bfp".into() })
    }
}

fn decode(bytes: &[u8], dtype: Bytes) -> Array {
    let float = |bits: u32| f32::from_bits(bits);
    let pairs = || bytes.as_chunks::<2>().0.iter().map(|&w| u16::from_le_bytes(w));
    let words = || bytes.as_chunks::<4>().0.iter().copied();
    let values: Vec<f32> = match dtype {
        Bytes::F32 => words().map(f32::from_le_bytes).collect(),
        Bytes::I32 => words().map(|w| i32::from_le_bytes(w) as f32).collect(),
        Bytes::Bf16 => pairs().map(|bits| float(u32::from(bits) << 16)).collect(),
        Bytes::F16 => pairs().map(half).collect(),
        Bytes::I8 => bytes.iter().map(|&b| f32::from(b as i8)).collect(),
    };
    Array { shape: vec![values.len()], values, dtype: format!("{dtype:?}").to_lowercase() }
}

/// An IEEE 754 binary16: `(-1)^s · 2^(e - 15) · (1 + m / 1024)`, below the smallest exponent `2^-14 · m / 1024`.
fn half(bits: u16) -> f32 {
    let (exponent, mantissa) = (i32::from(bits >> 10 & 31), f32::from(bits & 1023) / 1024.0);
    let size = match exponent {
        0 => mantissa * 2f32.powi(-14),
        31 if mantissa == 0.0 => f32::INFINITY,
        31 => f32::NAN,
        _ => (1.0 + mantissa) * 2f32.powi(exponent - 15),
    };
    if bits >> 15 == 1 { -size } else { size }
}

/// Puts a blocked matrix into rows. Blocks lie row by row, and so do smaller blocks inside them and the
/// values inside the smallest.
fn unblock(array: &mut Array, blocks: &[[usize; 2]]) -> Result<(), String> {
    let [rows, columns] = array.shape[..] else {
        return Err(format!("blocks need a shape of two axes, found {:?}", array.shape));
    };
    let mut outer = [rows, columns];
    for &[r, c] in blocks {
        if r == 0 || c == 0 || !outer[0].is_multiple_of(r) || !outer[1].is_multiple_of(c) {
            return Err(format!("blocks of {r} x {c} do not divide {} x {}", outer[0], outer[1]));
        }
        outer = [r, c];
    }
    let mut plain = vec![0.0; array.values.len()];
    for row in 0..rows {
        for column in 0..columns {
            plain[row * columns + column] = array.values[offset(row, column, columns, blocks)];
        }
    }
    array.values = plain;
    Ok(())
}

/// Where element `(row, column)` of a matrix of so many columns lies.
fn offset(row: usize, column: usize, columns: usize, blocks: &[[usize; 2]]) -> usize {
    match blocks {
        [] => row * columns + column,
        [[r, c], inner @ ..] => {
            let block = row / r * (columns / c) + column / c;
            block * r * c + offset(row % r, column % c, *c, inner)
        }
    }
}

/// Multiplies row by row, or column by column where there are as many factors as columns.
fn scale(array: &mut Array, factors: &[f32]) -> Result<(), String> {
    let columns = array.shape.last().copied().unwrap_or(1).max(1);
    let rows = array.values.len() / columns;
    let by_row = factors.len() == rows;
    if !by_row && factors.len() != columns {
        return Err(format!("{} scales for {rows} rows and {columns} columns", factors.len()));
    }
    for (n, value) in array.values.iter_mut().enumerate() {
        *value *= factors[if by_row { n / columns } else { n % columns }];
    }
    Ok(())
}

/// Indices `first..end` of an axis.
fn part(array: &Array, axis: usize, first: usize, end: usize) -> Result<Array, String> {
    let length = array.shape.get(axis).copied().unwrap_or(0);
    if first >= end || end > length {
        return Err(format!("{first} to {end} is no part of an axis of {length}"));
    }
    let view = view(array).slice_axis(ndarray::Axis(axis), ndarray::Slice::from(first..end)).to_owned();
    Ok(owned(view, &array.dtype))
}

/// Brings axes named `own` into the order of the site's; a site's axis may be a product such as
/// `heads*head_dim`.
fn ordered(array: Array, own: &[String], site: &[&str]) -> Result<Array, String> {
    if own.len() != array.shape.len() {
        return Err(format!("{} names for a shape of {:?}", own.len(), array.shape));
    }
    let wanted: Vec<&str> = site.iter().flat_map(|axis| axis.split('*')).collect();
    let (mut array, mut own) = (array, own.to_vec());
    while let Some(batch) = own.iter().position(|axis| axis == "batch") {
        array = part(&array, batch, 0, 1)?;
        array.shape.remove(batch);
        own.remove(batch);
    }
    // Joined axes of the site may stay joined in the array.
    let place = |axis: &String| {
        site.iter().position(|s| s == axis).map(|i| (i, 0)).or_else(|| {
            site.iter().enumerate().find_map(|(i, s)| s.split('*').position(|p| p == axis).map(|j| (i, j)))
        })
    };
    let places = own.iter().map(|axis| {
        place(axis).ok_or_else(|| format!("{axis} is none of the site's axes {}", wanted.join(", ")))
    });
    let places = places.collect::<Result<Vec<_>, _>>()?;
    let mut order: Vec<usize> = (0..own.len()).collect();
    order.sort_by_key(|&n| places[n]);
    Ok(permuted(&array, &order))
}

fn permuted(array: &Array, order: &[usize]) -> Array {
    let view = view(array).permuted_axes(order);
    owned(view.as_standard_layout().into_owned(), &array.dtype)
}

fn view(array: &Array) -> ndarray::ArrayViewD<'_, f32> {
    ndarray::ArrayViewD::from_shape(ndarray::IxDyn(&array.shape), &array.values)
        .expect("as many values as the shape says")
}

fn owned(view: ndarray::ArrayD<f32>, dtype: &str) -> Array {
    let view = view.as_standard_layout().into_owned();
    Array { shape: view.shape().to_vec(), values: view.iter().copied().collect(), dtype: dtype.to_string() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn array(shape: &[usize], values: &[f32]) -> Array {
        Array { shape: shape.to_vec(), values: values.to_vec(), dtype: "f32".into() }
    }

    #[test]
    fn numbers_in_names_are_used_again() {
        let map: NameMap = serde_json::from_str(
            r#"{"names": {"s{n}/h.{layer}.out": "step{n}.layers.{layer}.out", "q": {"taps": ["a", "b"]}}}"#,
        )
        .unwrap();
        assert_eq!(map.find("s1/h.012.out").unwrap().taps(), ["step1.layers.12.out"]);
        assert_eq!(map.find("q").unwrap().taps(), ["a", "b"]);
        assert_eq!(map.find("s1/h.x.out"), None);
        assert_eq!(map.find("s1/h.1.out2"), None);
    }

    // Element [h, t, d] holds 100 h + 10 t + d.
    #[test]
    fn heads_first_becomes_tokens_first() {
        let source = array(&[1, 2, 2, 1], &[0., 10., 100., 110.]);
        let own = ["batch", "heads", "tokens", "head_dim"].map(str::to_string);
        let y = ordered(source.clone(), &own, &["tokens", "heads*head_dim"]).unwrap();
        assert_eq!((y.shape, y.values), (vec![2, 2, 1], vec![0., 100., 10., 110.]));
        let wrong = ordered(source, &own, &["tokens", "hidden"]).unwrap_err();
        assert_eq!(wrong, "heads is none of the site's axes tokens, hidden");
    }

    // 2 x 4 in blocks of 2 x 2, inside which lie blocks of 1 x 2: block 0 holds columns 0 and 1.
    #[test]
    fn blocks_by_hand() {
        let mut a = array(&[2, 4], &[0., 1., 10., 11., 2., 3., 12., 13.]);
        unblock(&mut a, &[[2, 2], [1, 2]]).unwrap();
        assert_eq!(a.values, [0., 1., 2., 3., 10., 11., 12., 13.]);
        assert_eq!(unblock(&mut a, &[[2, 3]]).unwrap_err(), "blocks of 2 x 3 do not divide 2 x 4");
    }

    #[test]
    fn scales_padding_and_bytes() {
        let mut a = array(&[2, 3], &[1., 2., 3., 4., 5., 6.]);
        scale(&mut a, &[1., 10.]).unwrap();
        assert_eq!(a.values, [1., 2., 3., 40., 50., 60.]);
        scale(&mut a, &[1., 0., 1.]).unwrap();
        assert_eq!(part(&a, 1, 1, 3).unwrap().values, [0., 3., 0., 60.]);
        assert_eq!(scale(&mut a, &[1.]).unwrap_err(), "1 scales for 2 rows and 3 columns");
        // 0xbc00 is -1 in f16, 0x0001 its smallest value, 2^-24.
        assert_eq!(decode(&[0x00, 0xbc, 0x01, 0x00], Bytes::F16).values, [-1.0, 2f32.powi(-24)]);
        assert_eq!(decode(&[0x80, 0x3f, 0xff, 0x7f], Bytes::Bf16).values[0], 1.0);
    }

    // E = 130 and bias 133: units of 1/8. The same block with its exponent apart, and one of E = 134: units of 2.
    #[test]
    fn blocks_that_share_an_exponent() {
        let bfp: Bfp = serde_json::from_str(r#"{"block": 2}"#).unwrap();
        assert_eq!(bfp.decode(&[130, 4, 0xf8, 134, 1, 0xff], None).unwrap().values, [0.5, -1.0, 2.0, -2.0]);
        assert_eq!(
            bfp.decode(&[4, 0xf8, 1, 0xff], Some(&[130, 134])).unwrap().values,
            [0.5, -1.0, 2.0, -2.0]
        );
        let refused = |bytes: &[u8], exponents: Option<&[u8]>| bfp.decode(bytes, exponents).unwrap_err();
        assert_eq!(refused(&[130, 4, 8, 134], None), "4 bytes are no whole number of blocks of 3");
        assert_eq!(refused(&[4, 8], Some(&[1, 2])), "2 exponents for 1 blocks");
        let empty: Bfp = serde_json::from_str(r#"{"block": 0}"#).unwrap();
        assert_eq!(empty.decode(&[], None).unwrap_err(), "a block holds no values");
    }
}
