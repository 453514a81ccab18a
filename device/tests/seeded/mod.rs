//! A model of any family with random weights, from nothing but its config.

#![allow(dead_code)]

use karat_device::TapSink;
use serde_json::Value;
use spec::{Config, LoadError, Matrix, Rows, Site, Tensors, Weights};
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

/// Tensors whose values follow from their name and a seed.
#[derive(Default)]
struct Seeded {
    seed: u64,
    shapes: BTreeMap<String, Vec<usize>>,
}

impl Tensors for Seeded {
    fn names(&self) -> Vec<String> {
        self.shapes.keys().cloned().collect()
    }

    fn shape(&self, name: &str) -> Option<Vec<usize>> {
        self.shapes.get(name).cloned()
    }

    fn rows(&self, name: &str) -> Option<Result<Arc<dyn Rows>, LoadError>> {
        let shape = self.shapes.get(name)?;
        let inner = *shape.last()?;
        let out = shape.iter().product::<usize>() / inner;
        Some(Ok(Arc::new(Stored(Matrix::from_values(name, out, inner, self.values(name, out, inner))))))
    }

    fn file(&self, _name: &str) -> PathBuf {
        PathBuf::from("seeded")
    }
}

impl Seeded {
    /// Norm weights around 0.7, decays and scales around 0.5, everything else around 0: matrices keep the
    /// size of what they multiply.
    fn values(&self, name: &str, out: usize, inner: usize) -> Vec<f32> {
        let (centre, size) = match name {
            _ if name.contains("norm") && !name.contains("proj") => (0.7, 0.3),
            _ if name.contains("layer_scalar") || name.contains("scale") || name.contains("A_log") => {
                (0.5, 0.3)
            }
            _ if out == 1 || name.ends_with("bias") => (0.0, 0.5),
            _ => (0.0, (3.0 / inner as f32).sqrt()),
        };
        // FNV-1a of the name, then xorshift64*.
        let hash = name
            .bytes()
            .fold(0xCBF2_9CE4_8422_2325u64, |h, b| (h ^ u64::from(b)).wrapping_mul(0x100_0000_01B3));
        let mut state = hash ^ self.seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
        let mut next = || {
            state ^= state >> 12;
            state ^= state << 25;
            state ^= state >> 27;
            (state.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 40) as f32 / (1u32 << 23) as f32 - 1.0
        };
        (0..out * inner).map(|_| centre + size * next()).collect()
    }
}

/// A matrix as stored rows.
struct Stored(Matrix);

impl Rows for Stored {
    fn rows(&self) -> usize {
        self.0.out()
    }

    fn inner(&self) -> usize {
        self.0.inner()
    }

    fn decode(&self, row: usize, into: &mut [f32]) {
        self.0.decode(row, into).unwrap();
    }

    fn format(&self) -> &str {
        "F32"
    }

    fn row_bytes(&self) -> usize {
        4 * self.0.inner()
    }
}

/// Config and weights of a `config.json` object: every tensor that it asks for, and no other.
pub fn model(config: &Value, seed: u64) -> (Config, Weights) {
    let config =
        Config::parse(config.as_object().unwrap(), &[]).unwrap_or_else(|e| panic!("{e}: {config}")).config;
    let mut tensors = Seeded { seed, ..Seeded::default() };
    loop {
        match Weights::load(&config, &tensors) {
            Ok(weights) => return (config, weights),
            Err(LoadError::Missing { tensor, shape, .. }) => tensors.shapes.insert(tensor, shape),
            Err(error) => panic!("{error}"),
        };
    }
}

pub fn tokens(seed: u64, count: usize, vocab: usize) -> Vec<u32> {
    let next = |n: usize| (n as u64 + 1).wrapping_mul(seed.wrapping_mul(2_654_435_761) + 40_503) >> 7;
    (0..count).map(|n| (next(n) % vocab as u64) as u32).collect()
}

pub fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| v.to_bits()).collect()
}

/// Everything that a pass hands out, in order.
#[derive(Default)]
pub struct Recorded(pub Vec<(Site, Vec<usize>, Vec<f32>)>);

impl TapSink for Recorded {
    fn tap(&mut self, site: Site, shape: &[usize], values: &[f32]) {
        assert_eq!(shape.iter().product::<usize>(), values.len(), "{site}: shape against values");
        // Norms of q and k span the heads of a row in olmo2, which the oracle has as rows; layers of parallel
        // streams hand out all of them.
        let rows = site.name.ends_with("_norm") && shape.len() == 2;
        let streams = site.name == "out" && shape.len() == 3;
        assert!(rows || streams || shape.len() == site.info().axes.len(), "{site}: axes {shape:?}");
        assert!(self.0.iter().all(|(seen, ..)| *seen != site), "{site} twice in a pass");
        self.0.push((site, shape.to_vec(), values.to_vec()));
    }
}
