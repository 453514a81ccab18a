//! What a token costs: counted per layer, and foretold in milliseconds for a device that is described by a file.
//!
//! ```json
//! {"schema": "karat/device/1", "name": "my-npu", "source": "where the figures are from",
//!  "bandwidth_gb_per_s": 55, "launch_us": 60, "decode_gb_per_s": 4, "rows": [16, 128],
//!  "engines": {"int8": {"tops": 40, "bits_per_weight": 8, "tile": {"k": 64, "n": 128}}}}
//! ```
//!
//! | key | meaning |
//! |---|---|
//! | `bandwidth_gb_per_s` | 10⁹ bytes a second at which a launch streams its image from memory |
//! | `launch_us` | microseconds from asking for a launch to its first byte |
//! | `decode_gb_per_s` | 10⁹ bytes of f32 a second at which the host decodes weights: what a re-read costs |
//! | `rows` | the rows that a launch can be built for, ascending; a launch runs at the next larger number |
//! | `engines.NAME.tops` | 10¹² operations a second; a multiply-add is two |
//! | `engines.NAME.bits_per_weight` | bits of the image a weight, scales included |
//! | `engines.NAME.tile` | inputs `k` and outputs `n` that an image is padded to multiples of |
//!
//! ```text
//! bytes  = ⌈K/k⌉·k · ⌈N/n⌉·n · bits_per_weight / 8
//! launch = launch_us + max(bytes / bandwidth, 2 · rows · ⌈K/k⌉·k · ⌈N/n⌉·n / tops)
//! ```
//!
//! A launch streams its whole image whatever its number of rows: sixteen rows cost little more than one.

use device::{Counters, Engine, Launch};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::Path;

/// Counted costs of one token, as [`crate::subject::Subject::cost`] gives them.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct CostPerToken {
    /// f32 bytes that matrix weights were decoded to, in the last pass: 0 once all is resident.
    pub dequantised_bytes_per_token: u64,
    /// Image bytes streamed.
    pub streamed_bytes_per_token: u64,
    /// Launches.
    pub launches_per_token: u64,
    /// Layer by layer, where it was asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub detail: Option<Detail>,
}

/// Where the costs of a token arise.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Detail {
    /// f32 bytes that rows of embedding tables were decoded to.
    pub row_bytes_per_token: u64,
    /// Every layer, then what lies outside.
    pub layers: Vec<LayerCost>,
    /// What another device would take.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub predicted: Option<Prediction>,
    /// The launches of the pass.
    #[serde(skip)]
    pub launched: BTreeMap<Launch, u64>,
    /// Bytes of all matrix weights in f32: what decoding them again would write.
    #[serde(skip)]
    pub weight_bytes: u64,
    /// Rows of the pass.
    #[serde(skip)]
    pub rows: u64,
}

/// Costs of one layer, a token.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct LayerCost {
    /// The layer; nothing for embedding, final norm and head.
    pub layer: Option<usize>,
    /// f32 bytes that matrix weights were decoded to.
    pub dequantised_bytes: u64,
    /// Image bytes streamed.
    pub streamed_bytes: u64,
    /// Launches.
    pub launches: u64,
    /// Milliseconds in launches, on this machine.
    pub device_ms: f64,
    /// Milliseconds in everything else but loading, on this machine.
    pub host_ms: f64,
}

impl CostPerToken {
    /// The costs of a pass, a row of it. `weight_bytes` are those of all matrix weights in f32.
    pub fn of(counters: &Counters, weight_bytes: u64) -> CostPerToken {
        let rows = counters.rows.max(1);
        let total = counters.total();
        let layers = (0..counters.layers.len()).map(|n| (Some(n), &counters.layers[n]));
        let layers = layers.chain([(None, &counters.outside)]).map(|(layer, cost)| LayerCost {
            layer,
            dequantised_bytes: cost.dequantised_bytes / rows,
            streamed_bytes: cost.streamed_bytes / rows,
            launches: cost.launches / rows,
            device_ms: cost.device_time.as_secs_f64() * 1e3 / rows as f64,
            host_ms: cost.host_time.as_secs_f64() * 1e3 / rows as f64,
        });
        let detail = Detail {
            row_bytes_per_token: total.row_bytes / rows,
            layers: layers.collect(),
            predicted: None,
            launched: counters.launched.clone(),
            weight_bytes,
            rows,
        };
        CostPerToken {
            dequantised_bytes_per_token: total.dequantised_bytes / rows,
            streamed_bytes_per_token: total.streamed_bytes / rows,
            launches_per_token: total.launches / rows,
            detail: Some(detail),
        }
    }
}

/// A device that is not there.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DeviceFile {
    schema: String,
    /// Its name.
    pub name: String,
    /// Where the figures are from.
    pub source: String,
    bandwidth_gb_per_s: f64,
    launch_us: f64,
    decode_gb_per_s: f64,
    rows: Vec<usize>,
    engines: BTreeMap<String, EngineFile>,
}

#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
struct EngineFile {
    tops: f64,
    bits_per_weight: f64,
    tile: Tile,
}

#[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
struct Tile {
    k: usize,
    n: usize,
}

/// Why a file describes no device that an engine runs on.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum DeviceFileError {
    /// It cannot be read.
    #[error("device file {file}: {reason}")]
    Malformed {
        /// The file.
        file: String,
        /// What is wrong with it.
        reason: String,
    },
    /// It says nothing of the engine.
    #[error("device file {file} has no figures for engine {engine}; it has {has}")]
    Engine {
        /// The file.
        file: String,
        /// The engine asked for.
        engine: String,
        /// The engines that it has.
        has: String,
    },
}

/// What a token would take on a device.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Prediction {
    /// The device.
    pub device: String,
    /// Milliseconds a token in launches; what the host does in between is not in it.
    pub ms_per_token: f64,
    /// Of these, waiting for launches to begin.
    pub launch_ms: f64,
    /// Milliseconds a token that decoding all weights again in every pass would add.
    pub reread_ms: f64,
    /// Every layer, then what lies outside.
    pub layers: Vec<PredictedLayer>,
}

/// What a layer would take.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PredictedLayer {
    /// The layer; nothing for the head.
    pub layer: Option<usize>,
    /// Bytes streamed a token.
    pub streamed_bytes: f64,
    /// Milliseconds a token.
    pub ms: f64,
}

impl DeviceFile {
    /// Reads a file.
    pub fn read(path: &Path) -> Result<DeviceFile, DeviceFileError> {
        let file = path.display().to_string();
        let malformed = |reason: String| DeviceFileError::Malformed { file: file.clone(), reason };
        let text = std::fs::read_to_string(path).map_err(|error| malformed(error.to_string()))?;
        Self::parse(&text).map_err(malformed)
    }

    fn parse(text: &str) -> Result<DeviceFile, String> {
        let file: DeviceFile = serde_json::from_str(text).map_err(|error| error.to_string())?;
        if file.schema != "karat/device/1" {
            return Err(format!("schema {} is not known; this build reads karat/device/1", file.schema));
        }
        let engines = file.engines.iter().flat_map(|(name, engine)| {
            [
                (format!("engines.{name}.tops"), engine.tops),
                (format!("engines.{name}.bits_per_weight"), engine.bits_per_weight),
                (format!("engines.{name}.tile.k"), engine.tile.k as f64),
                (format!("engines.{name}.tile.n"), engine.tile.n as f64),
            ]
        });
        let figures = [
            ("bandwidth_gb_per_s".to_string(), file.bandwidth_gb_per_s),
            ("decode_gb_per_s".to_string(), file.decode_gb_per_s),
        ];
        if let Some((key, value)) =
            figures.into_iter().chain(engines).find(|(_, v)| !(v.is_finite() && *v > 0.0))
        {
            return Err(format!("{key} is {value}; expected more than 0"));
        }
        if !(file.launch_us.is_finite() && file.launch_us >= 0.0) {
            return Err(format!("launch_us is {}; expected 0 or more", file.launch_us));
        }
        let ascending = file.rows.windows(2).all(|pair| pair[0] < pair[1]);
        if file.rows.first().is_none_or(|rows| *rows == 0) || !ascending {
            return Err(format!("rows are {:?}; expected numbers from 1 on, ascending", file.rows));
        }
        Ok(file)
    }

    /// What a token of `detail` would take with `engine`; `file` is how the file is called.
    pub fn predict(
        &self,
        file: &str,
        engine: Engine,
        detail: &Detail,
    ) -> Result<Prediction, DeviceFileError> {
        let figures = self.engines.get(engine.name()).ok_or_else(|| DeviceFileError::Engine {
            file: file.to_string(),
            engine: engine.to_string(),
            has: self.engines.keys().cloned().collect::<Vec<_>>().join(", "),
        })?;
        let rows = detail.rows as f64;
        let mut layers: BTreeMap<Option<u32>, PredictedLayer> = BTreeMap::new();
        let mut launch_ms = 0.0;
        for (launch, count) in &detail.launched {
            let (bytes, ms, waits) = self.launch(figures, launch);
            let count = *count as f64;
            launch_ms += count * waits / rows;
            let none =
                PredictedLayer { layer: launch.layer.map(|l| l as usize), streamed_bytes: 0.0, ms: 0.0 };
            let layer = layers.entry(launch.layer).or_insert(none);
            layer.streamed_bytes += count * bytes / rows;
            layer.ms += count * ms / rows;
        }
        let mut layers: Vec<PredictedLayer> = layers.into_values().collect();
        layers.sort_by_key(|layer| layer.layer.unwrap_or(usize::MAX));
        Ok(Prediction {
            device: self.name.clone(),
            ms_per_token: layers.iter().map(|layer| layer.ms).sum(),
            launch_ms,
            reread_ms: detail.weight_bytes as f64 / (self.decode_gb_per_s * 1e6) / rows,
            layers,
        })
    }

    /// Bytes streamed, milliseconds, and milliseconds of waiting, of one launch of the pass.
    fn launch(&self, engine: &EngineFile, launch: &Launch) -> (f64, f64, f64) {
        let weights =
            launch.inner.next_multiple_of(engine.tile.k) * launch.out.next_multiple_of(engine.tile.n);
        let bytes = weights as f64 * engine.bits_per_weight / 8.0;
        let largest = *self.rows.last().expect("at least one");
        let mut left = launch.rows;
        let (mut streamed, mut ms, mut waits) = (0.0, 0.0, 0.0);
        while left > 0 {
            let rows = *self.rows.iter().find(|rows| **rows >= left).unwrap_or(&largest);
            let stream = bytes / (self.bandwidth_gb_per_s * 1e6);
            let compute = 2.0 * rows as f64 * weights as f64 / (engine.tops * 1e9);
            streamed += bytes;
            waits += self.launch_us / 1e3;
            ms += self.launch_us / 1e3 + stream.max(compute);
            left = left.saturating_sub(largest);
        }
        (streamed, ms, waits)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use device::Role;

    const FILE: &str = r#"{"schema": "karat/device/1", "name": "part", "source": "made up",
        "bandwidth_gb_per_s": 50, "launch_us": 100, "decode_gb_per_s": 4, "rows": [16, 128],
        "engines": {"int8": {"tops": 2, "bits_per_weight": 8, "tile": {"k": 64, "n": 128}}}}"#;

    fn detail(rows: usize) -> Detail {
        let launch = |layer, out, inner| Launch { layer, role: Role::Qkv, out, inner, rows };
        Detail {
            row_bytes_per_token: 0,
            layers: vec![],
            predicted: None,
            launched: [(launch(Some(0), 1000, 1000), 2), (launch(None, 128, 64), 1)].into(),
            weight_bytes: 8_000_000,
            rows: rows as u64,
        }
    }

    // 1000 × 1000 pads to 1024 outputs (8 · 128) and 1024 inputs (16 · 64): 1 048 576 bytes.
    // At 50 GB/s that is 0.020972 ms; 16 rows are 2 · 16 · 1 048 576 operations, at 2 · 10¹² a second
    // 0.016777 ms: the memory decides. Two launches: 2 · (0.1 + 0.020972) = 0.241943 ms.
    // The head, 128 × 64 without padding: 8192 bytes, 0.000164 ms, and 0.1 to launch.
    // 8 · 10⁶ bytes decoded at 4 GB/s: 2 ms.
    #[test]
    fn a_step_by_hand() {
        let file = DeviceFile::parse(FILE).unwrap();
        let predicted = file.predict("part.json", Engine::Int8, &detail(1)).unwrap();
        let near = |found: f64, by_hand: f64| {
            assert!((found / by_hand - 1.0).abs() < 1e-4, "{found} is not {by_hand}")
        };
        assert_eq!(predicted.layers.iter().map(|l| l.layer).collect::<Vec<_>>(), [Some(0), None]);
        near(predicted.layers[0].ms, 0.241_943);
        near(predicted.layers[0].streamed_bytes, 2_097_152.0);
        near(predicted.layers[1].ms, 0.100_164);
        near(predicted.ms_per_token, 0.342_107);
        near(predicted.launch_ms, 0.3);
        near(predicted.reread_ms, 2.0);
    }

    // 128 rows are 2 · 128 · 1 048 576 operations, 0.134218 ms: the arithmetic decides.
    // 2 · (0.1 + 0.134218) / 128 = 0.003660 ms a token. 130 rows need a second launch, at 16 rows.
    #[test]
    fn more_rows_than_a_launch_has_are_launched_again() {
        let file = DeviceFile::parse(FILE).unwrap();
        let ms =
            |rows| file.predict("part.json", Engine::Int8, &detail(rows)).unwrap().layers[0].ms * rows as f64;
        assert!((ms(128) - 2.0 * 0.234_218).abs() < 1e-4, "{}", ms(128));
        assert!((ms(130) - ms(128) - 2.0 * 0.120_972).abs() < 1e-4, "{}", ms(130));
    }

    #[test]
    fn what_is_wrong_is_named() {
        let wrong = |from: &str, to: &str| DeviceFile::parse(&FILE.replace(from, to)).unwrap_err();
        assert_eq!(wrong("\"tops\": 2", "\"tops\": 0"), "engines.int8.tops is 0; expected more than 0");
        assert!(wrong("[16, 128]", "[128, 16]").starts_with("rows are [128, 16]"));
        assert!(wrong("\"launch_us\": 100", "\"launch_us\": -1").starts_with("launch_us is -1"));
        assert!(wrong("karat/device/1", "karat/device/9").contains("karat/device/9 is not known"));
        assert!(wrong("\"name\"", "\"nam\"").contains("unknown field `nam`"));
        let error =
            DeviceFile::parse(FILE).unwrap().predict("part.json", Engine::W4A8, &detail(1)).unwrap_err();
        assert_eq!(error.to_string(), "device file part.json has no figures for engine w4a8; it has int8");
    }

    /// The example that comes along describes every engine.
    #[test]
    fn the_example_is_one() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../device/examples/devices/xdna2-class.json");
        let file = DeviceFile::read(&path).unwrap();
        for engine in Engine::ALL {
            file.predict("example", engine, &detail(1)).unwrap();
        }
    }
}
