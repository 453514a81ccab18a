//! Contracts as files: TOML where the name ends in `.toml`, else JSON, with the same keys.
//!
//! ```json
//! {"schema": "karat/contract/1", "name": "my-npu",
//!  "linear": {"input": "bf16", "weight": "bf16", "accumulator": "f32", "tile": 64,
//!             "rounding": "nearest-even", "output": "bf16"},
//!  "host": {"ulps": 4}}
//! ```
//!
//! | key | values |
//! |---|---|
//! | `input` | `f32`, `bf16`, `int8` (a scale a row), `int8-block32` (a scale per 32 inputs), `bfp16` (8 values share an exponent) |
//! | `weight` | `f32`, `bf16`, `int8` (a scale an output), `q4` (4-bit codes, scale and zero per 32), `bfp16` |
//! | `accumulator` | `i32` (exact), `f32`, `bf16` |
//! | `tile` | inputs that are summed before the running sum is rounded; `"unknown"` is judged as 1; absent where the formats fix it |
//! | `rounding` | `nearest-even` (default) or `floor` |
//! | `output` | `f32` or `bf16`; default as the accumulator |
//! | `host.ulps` | units in the last place that an elementary function outside products may be off; default 2 |
//!
//! `"linear"` may also be the name of a built-in contract.

use super::{Contract, Declared, Float, Host, Product, Rounding};
use serde::Deserialize;

/// Why a file is no contract.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum ContractError {
    /// It cannot be read as one.
    #[error("contract {file}: {reason}")]
    Malformed {
        /// The file.
        file: String,
        /// What the reader says.
        reason: String,
    },
    /// Its parts do not fit each other.
    #[error("contract {file} contradicts itself: {reason}")]
    Contradiction {
        /// The file.
        file: String,
        /// Which parts, and what would fit.
        reason: String,
    },
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    #[serde(default)]
    schema: Option<String>,
    name: String,
    linear: Linear,
    #[serde(default)]
    host: HostPart,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct HostPart {
    ulps: f64,
}

impl Default for HostPart {
    fn default() -> Self {
        HostPart { ulps: 2.0 }
    }
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Linear {
    Named(String),
    Parts(Parts),
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Parts {
    input: String,
    weight: String,
    accumulator: String,
    tile: Option<Tile>,
    rounding: Option<Rounding>,
    output: Option<Float>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Tile {
    Known(usize),
    Word(String),
}

impl Contract {
    /// Reads a contract; `file` names it in errors.
    pub fn parse(text: &str, file: &str) -> Result<Contract, ContractError> {
        let malformed = |reason: String| ContractError::Malformed { file: file.to_string(), reason };
        let contradiction = |reason: String| ContractError::Contradiction { file: file.to_string(), reason };
        // The parts are read by themselves, so that an unknown key is named and not only "no variant fits".
        let value: serde_json::Value = match file.ends_with(".toml") {
            true => toml::from_str(text).map_err(|e| malformed(e.to_string()))?,
            false => serde_json::from_str(text).map_err(|e| malformed(e.to_string()))?,
        };
        if let Some(parts) = value.get("linear").filter(|linear| linear.is_object()) {
            serde_json::from_value::<Parts>(parts.clone()).map_err(|e| malformed(format!("linear: {e}")))?;
        }
        let read: File = serde_json::from_value(value).map_err(|e| malformed(e.to_string()))?;
        if read.schema.as_deref().is_some_and(|schema| schema != "karat/contract/1") {
            return Err(malformed("schema is not karat/contract/1".into()));
        }
        let linear = match &read.linear {
            Linear::Named(name) => {
                let known = Contract::NAMES.join(", ");
                let named = Contract::named(name);
                named.ok_or_else(|| malformed(format!("linear {name:?} is none of {known}")))?.linear
            }
            Linear::Parts(parts) => product(parts).map_err(contradiction)?,
        };
        if !(read.host.ulps > 0.0 && read.host.ulps <= 1e6) {
            let reason = format!(
                "host.ulps is {}; a function is off by more than 0 and at most a million units",
                read.host.ulps
            );
            return Err(contradiction(reason));
        }
        Ok(Contract { name: read.name, linear, host: Host { ulps: read.host.ulps } })
    }
}

/// The product that the parts declare together.
fn product(parts: &Parts) -> Result<Product, String> {
    let (input, weight, sum) = (&*parts.input, &*parts.weight, &*parts.accumulator);
    let tile = match &parts.tile {
        None => None,
        Some(Tile::Known(0)) => return Err("a tile of 0 inputs sums nothing".into()),
        Some(Tile::Known(tile)) => Some(*tile),
        Some(Tile::Word(word)) if word == "unknown" => Some(1),
        Some(Tile::Word(word)) => return Err(format!("tile {word:?} is neither a number nor \"unknown\"")),
    };
    let fixed = |product: Product, accumulator: &str, tiles: Option<usize>| {
        if sum != accumulator {
            return Err(format!("{input} times {weight} is summed in {accumulator}, not in {sum}"));
        }
        if tile.is_some() && tile != tiles {
            return Err(match tiles {
                Some(fixed) => format!("{input} times {weight} is summed in tiles of {fixed}"),
                None => format!("sums in {accumulator} are exact, so a tile means nothing"),
            });
        }
        if parts.rounding == Some(Rounding::Floor) || parts.output == Some(Float::Bf16) {
            return Err(format!("{input} times {weight} is rounded to nearest and given in f32"));
        }
        Ok(product)
    };
    match (input, weight) {
        ("int8", "int8") => fixed(Product::Int8, "i32", None),
        ("int8-block32", "q4") => fixed(Product::W4A8, "f32", Some(32)),
        ("bf16", "q4") => fixed(Product::W4A16, "f32", Some(32)),
        ("bfp16", "bfp16") => fixed(Product::Bfp16, "f32", Some(8)),
        ("f32" | "bf16", "f32" | "bf16") => {
            let float = |name: &str| if name == "f32" { Float::F32 } else { Float::Bf16 };
            let accumulator = match sum {
                "f32" | "bf16" => float(sum),
                _ => return Err(format!("{input} times {weight} leaves no whole numbers to sum in {sum}")),
            };
            let output = parts.output.unwrap_or(accumulator);
            if output > accumulator {
                return Err(format!("a sum held in {sum} has no bits to give out in f32"));
            }
            let rounding = parts.rounding.unwrap_or(Rounding::NearestEven);
            let tile = tile.unwrap_or(1);
            Ok(Product::Declared(Declared {
                input: float(input),
                weight: float(weight),
                accumulator,
                tile,
                rounding,
                output,
            }))
        }
        _ => Err(format!(
            "{input} activations do not meet {weight} weights; int8 meets int8, int8-block32 and bf16 meet q4, \
             bfp16 meets bfp16, f32 and bf16 meet f32 and bf16"
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(linear: &str) -> Result<Product, String> {
        let text = format!(r#"{{"name": "mine", "linear": {linear}}}"#);
        Contract::parse(&text, "c.json").map(|c| c.linear).map_err(|e| e.to_string())
    }

    #[test]
    fn formats_make_a_product() {
        assert_eq!(parse(r#""w4a8""#), Ok(Product::W4A8));
        let int8 = r#"{"input": "int8", "weight": "int8", "accumulator": "i32"}"#;
        assert_eq!(parse(int8), Ok(Product::Int8));
        let bf16 = r#"{"input": "bf16", "weight": "bf16", "accumulator": "f32", "tile": 64,
                       "rounding": "floor", "output": "bf16"}"#;
        let expected = Declared {
            input: Float::Bf16,
            weight: Float::Bf16,
            accumulator: Float::F32,
            tile: 64,
            rounding: Rounding::Floor,
            output: Float::Bf16,
        };
        assert_eq!(parse(bf16), Ok(Product::Declared(expected)));
    }

    // The documented example says what the table in its comments says.
    #[test]
    fn toml_means_what_json_means() {
        let example = Contract::parse(include_str!("../../examples/contract.toml"), "contract.toml").unwrap();
        let same = r#"{"schema": "karat/contract/1", "name": "my-npu", "host": {"ulps": 4},
                       "linear": {"input": "bf16", "weight": "bf16", "accumulator": "f32", "tile": 64,
                                  "rounding": "nearest-even", "output": "bf16"}}"#;
        let same = Contract::parse(same, "c.json").unwrap();
        assert_eq!((&example.name, example.linear), (&same.name, same.linear));
        assert_eq!(example.host.ulps, 4.0);
        let error = Contract::parse("name = \"x\"\nlinear = ", "x.toml").unwrap_err().to_string();
        assert!(error.starts_with("contract x.toml: TOML parse error at line 2"), "{error}");
    }

    #[test]
    fn contradictions_are_named() {
        let error = |linear: &str| parse(linear).unwrap_err();
        assert_eq!(
            error(r#"{"input": "int8", "weight": "int8", "accumulator": "bf16"}"#),
            "contract c.json contradicts itself: int8 times int8 is summed in i32, not in bf16"
        );
        assert_eq!(
            error(r#"{"input": "bf16", "weight": "bf16", "accumulator": "bf16", "output": "f32"}"#),
            "contract c.json contradicts itself: a sum held in bf16 has no bits to give out in f32"
        );
        assert!(
            error(r#"{"input": "int8", "weight": "int8", "accumulator": "i32", "tile": 4}"#)
                .contains("exact")
        );
        assert!(
            error(r#"{"input": "f32", "weight": "f32", "accumulator": "f32", "tile": 0}"#)
                .contains("tile of 0")
        );
        assert!(error(r#"{"input": "int8", "weight": "q4", "accumulator": "f32"}"#).contains("do not meet"));
        assert!(error(r#"{"input": "f32", "weight": "f32", "acumulator": "f32"}"#).contains("acumulator"));
    }
}
