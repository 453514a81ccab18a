//! What a dump says about itself, and the text of `manifest.json`.

use std::collections::HashSet;
use std::io::{self, Write};
use std::path::Path;

use serde::{Deserialize, Serialize};
use serde_json::ser::{Formatter, Serializer};

use crate::stats::{Tensor, tensor};
use crate::{DumpError, split_tap};

/// Name and version of the format.
pub const FORMAT: &str = "karat-dump/1";
/// The readable half of a dump.
pub const MANIFEST_FILE: &str = "manifest.json";
/// The tensors of a dump.
pub const TAPS_FILE: &str = "taps.safetensors";

/// How many leading values a line of the manifest shows.
const FIRST: usize = 4;

/// Whose opinion the values are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Origin {
    /// Another implementation computed them: they can show that ours is wrong.
    IndependentOracle,
    /// We computed them: they can only show that something changed.
    RegressionLock,
}

/// What a pass does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Phase {
    /// Several known tokens at once.
    Prefill,
    /// One token, with cache.
    Decode,
    /// A block proposed by a draft model.
    Draft,
}

/// One pass of a run and the positions that it feeds.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Pass {
    /// `prefill`, `step1`, …, `pass0`, …
    #[serde(rename = "pass")]
    pub name: String,
    /// What it does.
    pub phase: Phase,
    /// Positions `[first, end)` of its tokens.
    pub positions: [u64; 2],
}

/// What holds for a dump as a whole.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Manifest {
    /// `karat-dump/1`, or `llm-oracle/1` for an oracle directory.
    pub format: String,
    /// Who computed the values.
    pub producer: String,
    /// Whether that was somebody independent.
    pub origin: Origin,
    /// [`crate::model_hash`] of the package; absent where the producer did not record it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub model_hash: Option<String>,
    /// The number formats that the producer declares.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub contract: Option<String>,
    /// Where values are rounded, and to what.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rounding: Option<String>,
    /// Anything a reader should know.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub notes: Option<String>,
    /// Why a reviewer accepted these values in place of others.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// Token ids fed by the prefill.
    pub prompt: Vec<u32>,
    /// Token ids chosen greedily; `stepN` feeds id `N - 1` of them.
    pub greedy: Vec<u32>,
    /// The passes; the writer fills in those that follow from prompt and taps.
    #[serde(default)]
    pub passes: Vec<Pass>,
}

impl Manifest {
    /// A manifest of our own format with the three things every dump has.
    pub fn new(producer: impl Into<String>, origin: Origin, prompt: Vec<u32>) -> Manifest {
        Manifest {
            format: FORMAT.to_owned(),
            producer: producer.into(),
            origin,
            model_hash: None,
            contract: None,
            rounding: None,
            notes: None,
            reason: None,
            prompt,
            greedy: Vec::new(),
            passes: Vec::new(),
        }
    }

    /// Adds the passes among `names` whose positions follow from the prompt, where none are given.
    ///
    /// `prefill` feeds positions `[0, P)` for a prompt of `P` tokens, `stepN` feeds position `P + N - 1`.
    pub(crate) fn derive_passes<'a>(&mut self, names: impl Iterator<Item = &'a str>) {
        if !self.passes.is_empty() {
            return;
        }
        let prompt = self.prompt.len() as u64;
        for pass in passes_of(names) {
            let step = pass.strip_prefix("step").and_then(|n| n.parse::<u64>().ok());
            let known = match step {
                Some(n) if n > 0 && n < u64::from(u32::MAX) => {
                    Some((Phase::Decode, [prompt + n - 1, prompt + n]))
                }
                _ if pass == "prefill" => Some((Phase::Prefill, [0, prompt])),
                _ => None,
            };
            if let Some((phase, positions)) = known {
                self.passes.push(Pass { name: pass, phase, positions });
            }
        }
    }
}

/// The passes of `names`, each once, in order of first appearance.
pub(crate) fn passes_of<'a>(names: impl Iterator<Item = &'a str>) -> Vec<String> {
    let mut passes: Vec<String> = Vec::new();
    for name in names {
        let (pass, _) = split_tap(name);
        if !passes.iter().any(|p| p == pass) {
            passes.push(pass.to_owned());
        }
    }
    passes
}

/// How the values of a tap are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Dtype {
    /// IEEE 754 binary32.
    F32,
    /// Two's complement, 32 bits; read as f32.
    I32,
}

/// One tap of a dump: a line of the manifest.
#[derive(Clone, Debug, PartialEq)]
pub struct TapInfo {
    /// `prefill.layers.3.q_rope`
    pub name: String,
    /// Names of the axes, slowest first; empty where the producer gave none.
    pub axes: Vec<String>,
    /// Length of each axis.
    pub shape: Vec<usize>,
    /// How the values are stored.
    pub dtype: Dtype,
    /// sha256 of the little-endian bytes.
    pub sha256: String,
    /// False where the manifest holds this line only, and no tensor.
    pub stored: bool,
    /// The statistics in the manifest; an oracle directory has none ([`crate::Dump::summary`] computes them).
    pub summary: Option<TapSummary>,
    /// What rounding alone does here, where the producer worked it out.
    pub sigma: Option<Sigma>,
}

/// The standard deviations of an honest run's values around the exact ones, under the contract of the dump and with
/// all that has come down to the site.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sigma {
    /// Root mean square over the elements of the site.
    pub rms: f64,
    /// The largest of them.
    pub max: f64,
}

impl Sigma {
    /// Of standard deviations, to three significant digits.
    pub fn of(deviations: impl IntoIterator<Item = f64>) -> Sigma {
        let (mut n, mut squares, mut max) = (0usize, 0.0, 0f64);
        for deviation in deviations {
            n += 1;
            squares += deviation * deviation;
            max = max.max(deviation);
        }
        let three = |x: f64| format!("{x:.2e}").parse().unwrap_or(x);
        Sigma { rms: three((squares / n.max(1) as f64).sqrt()), max: three(max) }
    }
}

impl TapInfo {
    /// Number of elements.
    pub fn elements(&self) -> usize {
        self.shape.iter().product()
    }
}

/// The few numbers by which a reader recognises a tensor, rounded to 6 significant digits.
///
/// Root mean square, smallest and largest are those of the finite values, and 0 where there are none.
#[derive(Clone, Debug, PartialEq)]
pub struct TapSummary {
    /// `sqrt(mean(x²))`
    pub rms: f64,
    /// Smallest value.
    pub min: f32,
    /// Largest value.
    pub max: f32,
    /// How many values are NaN or infinite.
    pub non_finite: u64,
    /// The first values; one that is not finite reads back as NaN.
    pub first: Vec<f32>,
    /// Of logits only: index of the largest value in each row (the smaller of two equal ones).
    pub argmax: Vec<usize>,
}

impl TapSummary {
    /// Summarises `values` of the tap `name`, shaped `shape`.
    pub fn of(name: &str, shape: &[usize], values: &[f32]) -> TapSummary {
        let Tensor { rms, min, max, non_finite, .. } = tensor(values);
        let is_logits = split_tap(name).1 == "logits";
        let argmax = match shape.last() {
            Some(&width) if is_logits && width > 0 => {
                values.chunks_exact(width).map(crate::stats::argmax).collect()
            }
            _ => Vec::new(),
        };
        TapSummary {
            rms: six_digits(rms),
            min: six_digits(f64::from(min)) as f32,
            max: six_digits(f64::from(max)) as f32,
            non_finite,
            first: values.iter().take(FIRST).map(|&v| six_digits(f64::from(v)) as f32).collect(),
            argmax,
        }
    }
}

/// `x` to 6 significant decimal digits; what is not finite stays as it is.
fn six_digits(x: f64) -> f64 {
    format!("{x:.5e}").parse().unwrap_or(x)
}

/// A line under `taps`, with its fields in the order in which they are written.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct TapLine {
    site: String,
    axes: Vec<String>,
    shape: Vec<usize>,
    dtype: Dtype,
    rms: f64,
    min: f32,
    max: f32,
    #[serde(default, skip_serializing_if = "is_zero")]
    non_finite: u64,
    first: Vec<Option<f32>>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    argmax: Vec<usize>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    sigma: Option<[f64; 2]>,
    #[serde(default = "yes", skip_serializing_if = "is_true")]
    stored: bool,
    sha256: String,
}

fn is_zero(n: &u64) -> bool {
    *n == 0
}

fn yes() -> bool {
    true
}

fn is_true(b: &bool) -> bool {
    *b
}

impl TapLine {
    fn of(tap: &TapInfo, summary: &TapSummary) -> TapLine {
        TapLine {
            site: tap.name.clone(),
            axes: tap.axes.clone(),
            shape: tap.shape.clone(),
            dtype: tap.dtype,
            rms: summary.rms,
            min: summary.min,
            max: summary.max,
            non_finite: summary.non_finite,
            first: summary.first.iter().map(|&v| v.is_finite().then_some(v)).collect(),
            argmax: summary.argmax.clone(),
            sigma: tap.sigma.map(|sigma| [sigma.rms, sigma.max]),
            stored: tap.stored,
            sha256: tap.sha256.clone(),
        }
    }

    fn into_tap(self) -> TapInfo {
        let summary = TapSummary {
            rms: self.rms,
            min: self.min,
            max: self.max,
            non_finite: self.non_finite,
            first: self.first.into_iter().map(|v| v.unwrap_or(f32::NAN)).collect(),
            argmax: self.argmax,
        };
        TapInfo {
            name: self.site,
            axes: self.axes,
            shape: self.shape,
            dtype: self.dtype,
            sha256: self.sha256,
            stored: self.stored,
            summary: Some(summary),
            sigma: self.sigma.map(|[rms, max]| Sigma { rms, max }),
        }
    }
}

/// The text of `manifest.json`: one line a field, one line a pass, one line a tap.
pub(crate) fn to_text(manifest: &Manifest, taps: &[TapInfo]) -> String {
    let m = manifest;
    let mut fields =
        vec![field("format", &m.format), field("producer", &m.producer), field("origin", &m.origin)];
    let optional = [
        ("model_hash", &m.model_hash),
        ("contract", &m.contract),
        ("rounding", &m.rounding),
        ("notes", &m.notes),
        ("reason", &m.reason),
    ];
    fields.extend(optional.iter().filter_map(|(name, value)| value.as_ref().map(|value| field(name, value))));
    fields.push(field("prompt", &m.prompt));
    fields.push(field("greedy", &m.greedy));
    fields.push(rows("passes", m.passes.iter().map(one_line)));
    let empty =
        TapSummary { rms: 0.0, min: 0.0, max: 0.0, non_finite: 0, first: Vec::new(), argmax: Vec::new() };
    fields.push(rows("taps", taps.iter().map(|tap| line(tap, tap.summary.as_ref().unwrap_or(&empty)))));
    format!("{{\n{}\n}}\n", fields.join(",\n"))
}

fn field(name: &str, value: &impl Serialize) -> String {
    format!("\"{name}\": {}", one_line(value))
}

fn rows(name: &str, rows: impl Iterator<Item = String>) -> String {
    let rows: Vec<String> = rows.collect();
    match rows.is_empty() {
        true => format!("\"{name}\": []"),
        false => format!("\"{name}\": [\n{}\n]", rows.join(",\n")),
    }
}

/// The line of one tap.
pub(crate) fn line(tap: &TapInfo, summary: &TapSummary) -> String {
    one_line(&TapLine::of(tap, summary))
}

/// JSON on one line, with a space after each comma and colon.
fn one_line(value: &impl Serialize) -> String {
    struct Spaced;
    impl Formatter for Spaced {
        fn begin_array_value<W: ?Sized + Write>(&mut self, out: &mut W, first: bool) -> io::Result<()> {
            out.write_all(if first { b"" } else { b", " })
        }
        fn begin_object_key<W: ?Sized + Write>(&mut self, out: &mut W, first: bool) -> io::Result<()> {
            out.write_all(if first { b"" } else { b", " })
        }
        fn begin_object_value<W: ?Sized + Write>(&mut self, out: &mut W) -> io::Result<()> {
            out.write_all(b": ")
        }
    }
    let mut text = Vec::new();
    value
        .serialize(&mut Serializer::with_formatter(&mut text, Spaced))
        .expect("manifest: strings, numbers and lists always serialise");
    String::from_utf8_lossy(&text).into_owned()
}

/// Reads `manifest.json`: the manifest, its taps in order, and the JSON as it stands.
pub(crate) fn from_text(
    path: &Path,
    text: &[u8],
) -> Result<(Manifest, Vec<TapInfo>, serde_json::Value), DumpError> {
    #[derive(Deserialize)]
    struct File {
        #[serde(flatten)]
        manifest: Manifest,
        taps: Vec<TapLine>,
    }
    let wrong = |reason: String| DumpError::Manifest { path: path.to_owned(), reason };

    let raw: serde_json::Value = serde_json::from_slice(text).map_err(DumpError::json(path))?;
    let format = raw.get("format").and_then(|f| f.as_str()).unwrap_or("missing");
    if format != FORMAT {
        return Err(wrong(format!("format is {format}, this build reads {FORMAT}")));
    }
    let file: File = serde_json::from_slice(text).map_err(DumpError::json(path))?;
    let taps: Vec<TapInfo> = file.taps.into_iter().map(TapLine::into_tap).collect();
    let mut seen = HashSet::new();
    for tap in &taps {
        if !seen.insert(tap.name.as_str()) {
            return Err(wrong(format!("site {} is listed twice", tap.name)));
        }
        if !tap.axes.is_empty() && tap.axes.len() != tap.shape.len() {
            let (axes, lengths) = (tap.axes.len(), tap.shape.len());
            return Err(wrong(format!("site {} names {axes} axes, but its shape has {lengths}", tap.name)));
        }
        if tap.shape.iter().try_fold(1usize, |n, &d| n.checked_mul(d)).is_none() {
            return Err(wrong(format!("site {} has a shape {:?} too large to count", tap.name, tap.shape)));
        }
    }
    Ok((file.manifest, taps, raw))
}
