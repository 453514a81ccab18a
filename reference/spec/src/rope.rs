//! Parameters of rotary position embeddings. What they mean is computed elsewhere, twice.

use crate::config::{ConfigError, ConfigReader};
use serde_json::{Map, Value};

/// Which two values of a head turn together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pairing {
    /// `(i, i + rotary_dim / 2)`.
    HalfSplit,
    /// `(2i, 2i + 1)`, written half-split afterwards (evens first), as the framework does.
    Interleaved,
}

/// A rotary embedding: angle = position · inv_freq, then cosine and sine times a magnitude.
#[derive(Clone, Debug, PartialEq)]
pub struct Rope {
    /// The base θ.
    pub theta: f64,
    /// Width of a head.
    pub head_dim: usize,
    /// How many leading values of a head turn.
    pub rotary_dim: usize,
    /// Which values turn together.
    pub pairing: Pairing,
    /// How the inverse frequencies are changed for long contexts.
    pub scaling: Scaling,
}

/// Changes of `inv_freq[i] = θ^(-2i / rotary_dim)`.
#[derive(Clone, Debug, PartialEq)]
pub enum Scaling {
    /// None.
    Default,
    /// `inv / factor`.
    Linear {
        /// The divisor.
        factor: f64,
    },
    /// Long wavelengths divided by `factor`, short ones kept, a linear blend between (Llama 3.1).
    Llama3 {
        /// The divisor.
        factor: f64,
        /// Wavelengths above `original / low_freq_factor` are divided.
        low_freq_factor: f64,
        /// Wavelengths below `original / high_freq_factor` are kept.
        high_freq_factor: f64,
        /// The context length of pre-training.
        original_max_position_embeddings: usize,
    },
    /// YaRN (arXiv 2309.00071): a ramp over dimensions between kept and divided.
    Yarn {
        /// The divisor.
        factor: f64,
        /// Turns within the original context above which a dimension is kept.
        beta_fast: f64,
        /// Turns below which it is divided.
        beta_slow: f64,
        /// The context length of pre-training.
        original_max_position_embeddings: usize,
        /// Whether the ramp's ends are rounded to whole dimensions.
        truncate: bool,
        /// What cosine and sine are multiplied by.
        magnitude: f64,
    },
    /// LongRoPE (arXiv 2402.13753): a divisor for each dimension, chosen by the length in use.
    LongRope {
        /// Divisors up to the original context.
        short_factor: Vec<f64>,
        /// Divisors beyond it.
        long_factor: Vec<f64>,
        /// The context length of pre-training.
        original_max_position_embeddings: usize,
        /// What cosine and sine are multiplied by.
        magnitude: f64,
    },
    /// Only the first `rotating` pairs turn, but exponent and pairs span the whole head (Gemma 4).
    Proportional {
        /// Number of pairs that turn.
        rotating: usize,
        /// Divisor of the frequencies.
        factor: f64,
    },
}

impl Rope {
    /// Reads `rope_parameters`, or the older `rope_theta` with `rope_scaling`, from a config.
    pub fn parse(reader: &mut ConfigReader, head_dim: usize) -> Result<Rope, ConfigError> {
        Self::parse_with_partial(reader, head_dim, 1.0)
    }

    /// As [`Rope::parse`], with the family's own default of `partial_rotary_factor`.
    pub fn parse_with_partial(
        reader: &mut ConfigReader,
        head_dim: usize,
        default_partial: f64,
    ) -> Result<Rope, ConfigError> {
        Self::parse_with(reader, head_dim, default_partial, None)
    }

    /// As [`Rope::parse`], with the family's own default of `rope_theta`.
    pub fn parse_with_theta(
        reader: &mut ConfigReader,
        head_dim: usize,
        default_theta: f64,
    ) -> Result<Rope, ConfigError> {
        Self::parse_with(reader, head_dim, 1.0, Some(default_theta))
    }

    fn parse_with(
        reader: &mut ConfigReader,
        head_dim: usize,
        default_partial: f64,
        default_theta: Option<f64>,
    ) -> Result<Rope, ConfigError> {
        let partial = reader.f64_opt("partial_rotary_factor")?.unwrap_or(default_partial);
        let theta = reader.f64_opt("rope_theta")?.or(default_theta);
        let older = reader.object("rope_scaling")?;
        let newer = reader.object("rope_parameters")?;
        let max = reader.usize_opt("max_position_embeddings")?;
        let original = reader.usize_opt("original_max_position_embeddings")?.or(max);
        let empty = Map::new();
        let (map, path) = match (newer, older) {
            (Some(map), _) => (map, "rope_parameters."),
            (None, Some(map)) => (map, "rope_scaling."),
            (None, None) => (&empty, "rope_parameters."),
        };
        Self::parse_object(map, path, head_dim, theta, partial, original, max)
    }

    /// Reads one rope object. `theta`, `partial`, `original` and `max` hold where the object is silent.
    pub fn parse_object(
        map: &Map<String, Value>,
        path: &str,
        head_dim: usize,
        theta: Option<f64>,
        partial: f64,
        original: Option<usize>,
        max: Option<usize>,
    ) -> Result<Rope, ConfigError> {
        let mut r = ConfigReader::new(map, path);
        let kind = match r.str_opt("rope_type")? {
            Some(kind) => Some(kind),
            None => r.str_opt("type")?,
        };
        r.inert(&["type", "mrope_section", "mrope_interleaved"]);
        let theta = r.f64_opt("rope_theta")?.or(theta);
        let theta = theta.ok_or_else(|| ConfigError::Missing {
            key: format!("{path}rope_theta"),
            expected: "the base of the rotary frequencies".into(),
        })?;
        if theta <= 0.0 {
            return Err(r.wrong("rope_theta", "a positive number"));
        }
        let partial = r.f64_opt("partial_rotary_factor")?.unwrap_or(partial);
        if !(0.0..=1.0).contains(&partial) {
            return Err(r.wrong("partial_rotary_factor", "a number from 0 to 1"));
        }
        let mut rotary_dim = (head_dim as f64 * partial) as usize;
        let given = r.usize_opt("original_max_position_embeddings")?;
        let original_max = |r: &ConfigReader| {
            given.or(original).filter(|&n| n > 0).ok_or_else(|| {
                r.wrong("original_max_position_embeddings", "the context length of pre-training")
            })
        };
        let factor = |r: &mut ConfigReader| match r.f64("factor")? {
            f if f > 0.0 => Ok(f),
            _ => Err(r.wrong("factor", "a positive number")),
        };
        let scaling = match kind.unwrap_or("default") {
            "default" | "mrope" => Scaling::Default,
            "linear" => Scaling::Linear { factor: factor(&mut r)? },
            "llama3" => Scaling::Llama3 {
                factor: factor(&mut r)?,
                low_freq_factor: r.f64("low_freq_factor")?,
                high_freq_factor: r.f64("high_freq_factor")?,
                original_max_position_embeddings: original_max(&r)?,
            },
            "yarn" => {
                let factor = factor(&mut r)?;
                Scaling::Yarn {
                    factor,
                    beta_fast: r.f64_opt("beta_fast")?.unwrap_or(32.0),
                    beta_slow: r.f64_opt("beta_slow")?.unwrap_or(1.0),
                    original_max_position_embeddings: original_max(&r)?,
                    truncate: r.bool("truncate", true)?,
                    magnitude: yarn_magnitude(&mut r, factor)?,
                }
            }
            "longrope" | "su" => {
                let factors = |r: &mut ConfigReader, key: &str| match r.f64s(key)? {
                    Some(list) if list.len() == rotary_dim / 2 && list.iter().all(|&f| f > 0.0) => Ok(list),
                    _ => Err(r.wrong(key, &format!("a list of {} positive numbers", rotary_dim / 2))),
                };
                let (short_factor, long_factor) =
                    (factors(&mut r, "short_factor")?, factors(&mut r, "long_factor")?);
                let original = original_max(&r)?;
                let attention = r.f64_opt("attention_factor")?;
                let stated = r.f64_opt("factor")?;
                let stretch = stated.unwrap_or_else(|| max.map_or(1.0, |m| m as f64 / original as f64));
                let computed =
                    if stretch <= 1.0 { 1.0 } else { (1.0 + stretch.ln() / (original as f64).ln()).sqrt() };
                Scaling::LongRope {
                    short_factor,
                    long_factor,
                    original_max_position_embeddings: original,
                    magnitude: attention.unwrap_or(computed),
                }
            }
            "proportional" => {
                let rotating = (partial * head_dim as f64 / 2.0) as usize;
                rotary_dim = head_dim;
                Scaling::Proportional { rotating, factor: r.f64_opt("factor")?.unwrap_or(1.0) }
            }
            _ => {
                return Err(r.wrong(
                    if map.contains_key("rope_type") { "rope_type" } else { "type" },
                    "default, linear, llama3, yarn, longrope or proportional",
                ));
            }
        };
        r.finish(&[])?;
        if !rotary_dim.is_multiple_of(2) {
            return Err(ConfigError::Value {
                key: format!("{path}partial_rotary_factor"),
                found: partial.to_string(),
                expected: format!("a factor that makes an even rotary width of head_dim {head_dim}"),
            });
        }
        Ok(Rope { theta, head_dim, rotary_dim, pairing: Pairing::HalfSplit, scaling })
    }
}

/// The number that YaRN multiplies cosine and sine by.
///
/// ```text
/// m(s, k) = 0.1 · k · ln s + 1   (1 where s <= 1)
/// magnitude = attention_factor, else m(factor, mscale) / m(factor, mscale_all_dim), else m(factor, 1)
/// ```
fn yarn_magnitude(r: &mut ConfigReader, factor: f64) -> Result<f64, ConfigError> {
    let (mscale, all_dim) = (r.f64_opt("mscale")?, r.f64_opt("mscale_all_dim")?);
    if let Some(stated) = r.f64_opt("attention_factor")? {
        return Ok(stated);
    }
    let nonzero = |m: &f64| *m != 0.0;
    Ok(match (mscale.filter(nonzero), all_dim.filter(nonzero)) {
        (Some(mscale), Some(all_dim)) => yarn_mscale(factor, mscale) / yarn_mscale(factor, all_dim),
        _ => yarn_mscale(factor, 1.0),
    })
}

/// `0.1 · k · ln factor + 1`, and 1 where `factor <= 1`.
pub fn yarn_mscale(factor: f64, k: f64) -> f64 {
    if factor <= 1.0 { 1.0 } else { 0.1 * k * factor.ln() + 1.0 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn parse(value: Value) -> Result<Rope, ConfigError> {
        let map = value.as_object().unwrap().clone();
        Rope::parse(&mut ConfigReader::new(&map, ""), 64)
    }

    #[test]
    fn both_spellings_mean_the_same() {
        let older = json!({"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 8.0}});
        let newer = json!({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 8.0}});
        assert_eq!(parse(older), parse(newer));
    }

    #[test]
    fn unknown_types_and_keys_are_refused() {
        let error = parse(json!({"rope_theta": 1e4, "rope_scaling": {"type": "spiral"}})).unwrap_err();
        assert_eq!(
            error.to_string(),
            "config key rope_scaling.type is \"spiral\"; supported: default, linear, llama3, yarn, longrope or proportional"
        );
        let error = parse(json!({"rope_parameters": {"rope_theta": 1e4, "twist": 3}})).unwrap_err();
        assert!(matches!(error, ConfigError::Unknown { ref key, .. } if key == "rope_parameters.twist"));
        assert!(matches!(parse(json!({})), Err(ConfigError::Missing { .. })));
    }

    // 0.1 · 0.8 · ln 4 + 1 = 1.110904, over 0.1 · ln 4 + 1 = 1.138629: 0.975650
    #[test]
    fn yarn_magnitude_by_hand() {
        let rope = parse(json!({"rope_parameters": {"rope_type": "yarn", "rope_theta": 150.0, "factor": 4.0,
            "mscale": 0.8, "mscale_all_dim": 1.0, "original_max_position_embeddings": 256}}));
        let Scaling::Yarn { magnitude, truncate, .. } = rope.unwrap().scaling else { panic!() };
        assert!((magnitude - 0.975_650).abs() < 1e-6, "{magnitude}");
        assert!(truncate);
    }
}
