//! The directories of the independent oracle: `golden.json`, `golden.safetensors`, `noise.json`.

use std::collections::BTreeMap;
use std::path::Path;

use serde::Deserialize;

use crate::manifest::{Dtype, Manifest, Origin, TapInfo};
use crate::name::usual_rank;
use crate::{DumpError, Noise, TapKey};

pub(crate) const FORMAT: &str = "llm-oracle/1";
pub(crate) const JSON: &str = "golden.json";
pub(crate) const TENSORS: &str = "golden.safetensors";
pub(crate) const NOISE: &str = "noise.json";

/// What is used of `golden.json`; the rest stays reachable as raw JSON.
#[derive(Deserialize)]
struct File {
    format: String,
    torch: Option<String>,
    transformers: Option<String>,
    compute: Option<String>,
    notes: Option<String>,
    prompt: Vec<u32>,
    greedy: Vec<u32>,
    files: BTreeMap<String, String>,
    /// dtype, shape, sha256
    tensors: BTreeMap<String, (String, Vec<usize>, String)>,
}

pub(crate) struct Oracle {
    pub manifest: Manifest,
    pub taps: Vec<TapInfo>,
    pub files: BTreeMap<String, String>,
    pub raw: serde_json::Value,
}

/// Reads `golden.json`. Its taps come in alphabetical order and are put into data-flow order.
pub(crate) fn read(path: &Path, text: &[u8]) -> Result<Oracle, DumpError> {
    let wrong = |reason: String| DumpError::Manifest { path: path.to_owned(), reason };
    let raw: serde_json::Value = serde_json::from_slice(text).map_err(DumpError::json(path))?;
    let file: File = serde_json::from_slice(text).map_err(DumpError::json(path))?;
    if file.format != FORMAT {
        return Err(wrong(format!("format is {}, this build reads {FORMAT}", file.format)));
    }

    let mut taps = Vec::new();
    for (name, (dtype, shape, sha256)) in file.tensors {
        let dtype = match dtype.as_str() {
            "float32" => Dtype::F32,
            "int32" => Dtype::I32,
            other => {
                return Err(wrong(format!("tensor {name} has dtype {other}, expected float32 or int32")));
            }
        };
        if shape.iter().try_fold(1usize, |n, &d| n.checked_mul(d)).is_none() {
            return Err(wrong(format!("tensor {name} has a shape {shape:?} too large to count")));
        }
        taps.push(TapInfo {
            name,
            axes: Vec::new(),
            shape,
            dtype,
            sha256,
            stored: true,
            summary: None,
            sigma: None,
        });
    }
    taps.sort_by_key(|tap| (TapKey::of(&tap.name), usual_rank(&tap.name)));

    let framework = match (&file.transformers, &file.torch) {
        (Some(transformers), Some(torch)) => format!("transformers {transformers}, torch {torch}"),
        _ => "unnamed oracle".to_owned(),
    };
    let mut manifest = Manifest::new(framework, Origin::IndependentOracle, file.prompt);
    manifest.format = file.format;
    manifest.greedy = file.greedy;
    manifest.notes = file.notes;
    manifest.rounding = file.compute.map(|format| format!("{format} throughout"));
    manifest.derive_passes(taps.iter().map(|tap| tap.name.as_str()));
    Ok(Oracle { manifest, taps, files: file.files, raw })
}

/// Reads `noise.json`: for each tap its largest value and how far two other implementations were off.
pub(crate) fn read_noise(path: &Path, text: &[u8]) -> Result<BTreeMap<String, Noise>, DumpError> {
    let all: BTreeMap<String, (f64, f64, f64)> =
        serde_json::from_slice(text).map_err(DumpError::json(path))?;
    let noise = |(max_abs, f64_diff, f32_diff)| Noise { max_abs, f64_diff, f32_diff };
    Ok(all.into_iter().map(|(name, three)| (name, noise(three))).collect())
}
