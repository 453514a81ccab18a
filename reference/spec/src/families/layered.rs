//! What configs with sliding and full layers have in common (the Gemma families): the type of every
//! layer, a rotary embedding for each type, and logit caps.

use crate::config::{ConfigError, ConfigReader};
use crate::rope::{Pairing, Rope, Scaling};
use serde_json::Map;

/// What a layer's attention reaches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LayerType {
    /// The last `sliding_window` keys, the token's own included.
    Sliding,
    /// Every key up to the token's own.
    Full,
}

/// The type of every layer: `layer_types`, else every `pattern`-th layer is full.
///
/// Files spell the pattern `sliding_window_pattern` or `_sliding_window_pattern`.
pub fn layer_types(
    r: &mut ConfigReader,
    count: usize,
    pattern: usize,
) -> Result<Vec<LayerType>, ConfigError> {
    let mut every = pattern;
    for key in ["sliding_window_pattern", "_sliding_window_pattern"] {
        match r.usize_opt(key)? {
            Some(0) => return Err(r.wrong(key, "a positive number")),
            given => every = given.unwrap_or(every),
        }
    }
    let Some(types) = r.strs("layer_types")? else {
        let full = |i: usize| (i + 1).is_multiple_of(every);
        return Ok((0..count).map(|i| if full(i) { LayerType::Full } else { LayerType::Sliding }).collect());
    };
    if types.len() != count {
        return Err(r.wrong("layer_types", &format!("one entry for each of the {count} layers")));
    }
    let parse = |kind: &&str| match *kind {
        "sliding_attention" => Ok(LayerType::Sliding),
        "full_attention" => Ok(LayerType::Full),
        _ => Err(r.wrong("layer_types", "sliding_attention or full_attention")),
    };
    types.iter().map(parse).collect()
}

/// What a layer type's rotary embedding is where the config is silent.
pub struct RopeDefault {
    /// Width of a head in layers of this type.
    pub head_dim: usize,
    /// The base θ.
    pub theta: f64,
    /// The change of frequencies.
    pub scaling: Scaling,
}

/// The rotary embeddings of sliding and of full layers, in this order.
///
/// Newer files nest them in `rope_parameters`, one object a layer type. Older ones have
/// `rope_local_base_freq` for sliding layers, `rope_theta` and `rope_scaling` for full ones.
pub fn ropes(
    r: &mut ConfigReader,
    sliding: RopeDefault,
    full: RopeDefault,
    max: usize,
) -> Result<(Rope, Rope), ConfigError> {
    let newer = r.object("rope_parameters")?;
    let (local, theta) = (r.f64_opt("rope_local_base_freq")?, r.f64_opt("rope_theta")?);
    let scaling = r.object("rope_scaling")?;
    let one = |kind: &str, default: RopeDefault, older: (Option<f64>, Option<&Map<_, _>>)| {
        let (theta, scaling) = older;
        let head_dim = default.head_dim;
        let (map, path) = match newer {
            Some(newer) => {
                let mut nested = ConfigReader::new(newer, "rope_parameters.");
                nested.inert(&["sliding_attention", "full_attention"]);
                let map = nested.object(kind)?;
                nested.finish(&[])?;
                (map, format!("rope_parameters.{kind}."))
            }
            None => (scaling, "rope_scaling.".to_string()),
        };
        let theta = theta.unwrap_or(default.theta);
        match map {
            Some(map) => Rope::parse_object(map, &path, head_dim, Some(theta), 1.0, None, Some(max)),
            None if theta > 0.0 => Ok(Rope {
                theta,
                head_dim,
                rotary_dim: head_dim,
                pairing: Pairing::HalfSplit,
                scaling: default.scaling,
            }),
            None => {
                let key = format!("{path}rope_theta");
                let expected = "a positive number".into();
                Err(ConfigError::Value { key, found: theta.to_string(), expected })
            }
        }
    };
    Ok((one("sliding_attention", sliding, (local, None))?, one("full_attention", full, (theta, scaling))?))
}

/// A cap of logits: absent means the family's default, null means none.
pub fn softcap(r: &mut ConfigReader, key: &str, default: Option<f64>) -> Result<Option<f64>, ConfigError> {
    match r.f64_opt(key)? {
        Some(cap) if cap <= 0.0 => Err(r.wrong(key, "a positive number or null")),
        Some(cap) => Ok(Some(cap)),
        None if r.present(key) => Ok(None),
        None => Ok(default),
    }
}

/// Key and value heads, which query heads must be a multiple of.
pub fn kv_heads(r: &mut ConfigReader, key: &str, heads: usize, default: usize) -> Result<usize, ConfigError> {
    match r.usize_opt(key)?.unwrap_or(default) {
        n if n > 0 && heads.is_multiple_of(n) => Ok(n),
        _ => Err(r.wrong(key, &format!("a divisor of num_attention_heads {heads}"))),
    }
}

/// A size that the published class has a default for.
pub fn size_or(r: &mut ConfigReader, key: &str, default: usize) -> Result<usize, ConfigError> {
    if r.usize_opt(key)?.is_none() { Ok(default) } else { r.size(key) }
}

/// For every layer the one whose keys and values it attends to: itself, or, for the last `shared`
/// layers, the last layer before them *of the same type*.
pub fn kv_sources(
    r: &mut ConfigReader,
    types: &[LayerType],
    shared: usize,
) -> Result<Vec<usize>, ConfigError> {
    let own = types.len().saturating_sub(shared);
    let source = |i: usize| match i < own {
        true => Some(i),
        false => (0..own).rev().find(|&j| types[j] == types[i]),
    };
    let sources: Option<Vec<usize>> = (0..types.len()).map(source).collect();
    let expected = "few enough that a layer of every shared type keeps keys of its own";
    sources.ok_or_else(|| r.wrong("num_kv_shared_layers", expected))
}

#[cfg(test)]
mod tests {
    use super::LayerType::{Full, Sliding};
    use super::*;
    use serde_json::json;

    fn sources(types: &[LayerType], shared: usize) -> Result<Vec<usize>, ConfigError> {
        let map = json!({"num_kv_shared_layers": shared}).as_object().unwrap().clone();
        kv_sources(&mut ConfigReader::new(&map, ""), types, shared)
    }

    // Layers 3 and 4 slide, so they read layer 1, not their neighbour 2; layer 5 is full and reads 2.
    #[test]
    fn shared_layers_read_the_last_of_their_own_type() {
        let types = [Sliding, Sliding, Full, Sliding, Sliding, Full];
        assert_eq!(sources(&types, 3).unwrap(), [0, 1, 2, 1, 1, 2]);
        assert_eq!(sources(&types, 0).unwrap(), [0, 1, 2, 3, 4, 5]);
        assert!(sources(&types, 4).unwrap_err().to_string().contains("num_kv_shared_layers is 4"));
        assert!(sources(&types, 7).is_err());
    }

    #[test]
    fn the_pattern_counts_layers_from_one() {
        let parse = |value: serde_json::Value, count| {
            layer_types(&mut ConfigReader::new(value.as_object().unwrap(), ""), count, 2)
        };
        assert_eq!(parse(json!({}), 3).unwrap(), [Sliding, Full, Sliding]);
        assert_eq!(parse(json!({"sliding_window_pattern": 3}), 3).unwrap(), [Sliding, Sliding, Full]);
        assert!(parse(json!({"sliding_window_pattern": 0}), 3).is_err());
        assert!(parse(json!({"layer_types": ["full_attention"]}), 3).is_err());
    }
}
