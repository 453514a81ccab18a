//! What a pass costs, counted rather than measured, with the clocks beside it.

use crate::resident::Role;
use std::collections::BTreeMap;
use std::ops::AddAssign;
use std::time::Duration;

/// Costs of one layer in one pass, or of what lies outside the layers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cost {
    /// Bytes read from the package, in its own formats.
    pub package_bytes: u64,
    /// Bytes of f32 that matrix weights were decoded to. Zero once all images are resident.
    pub dequantised_bytes: u64,
    /// Bytes of f32 that rows of embedding tables were decoded to: a few rows a token, always.
    pub row_bytes: u64,
    /// Bytes of images packed.
    pub packed_bytes: u64,
    /// Bytes of images streamed: a launch streams its whole image, whatever its number of rows.
    pub streamed_bytes: u64,
    /// Number of launches.
    pub launches: u64,
    /// Multiply-adds of the launches, rows as given.
    pub multiply_adds: u64,
    /// Time in decoding and packing weights.
    pub load_time: Duration,
    /// Time in launches.
    pub device_time: Duration,
    /// Time in everything else.
    pub host_time: Duration,
    /// The part of it in attention over cached keys: the only part that grows with their number.
    pub attention_time: Duration,
}

impl AddAssign for Cost {
    fn add_assign(&mut self, other: Cost) {
        self.package_bytes += other.package_bytes;
        self.dequantised_bytes += other.dequantised_bytes;
        self.row_bytes += other.row_bytes;
        self.packed_bytes += other.packed_bytes;
        self.streamed_bytes += other.streamed_bytes;
        self.launches += other.launches;
        self.multiply_adds += other.multiply_adds;
        self.load_time += other.load_time;
        self.device_time += other.device_time;
        self.host_time += other.host_time;
        self.attention_time += other.attention_time;
    }
}

impl Cost {
    /// Books the part of `elapsed` that neither loading nor launches took, since `before`, as host time.
    pub(crate) fn close(&mut self, before: Cost, elapsed: Duration) {
        let busy = (self.load_time - before.load_time) + (self.device_time - before.device_time);
        self.host_time += elapsed.saturating_sub(busy);
    }
}

/// A kind of launch: what a cost model needs to know of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Launch {
    /// The layer, for products inside one.
    pub layer: Option<u32>,
    /// What the product is for.
    pub role: Role,
    /// Number of outputs.
    pub out: usize,
    /// Number of inputs.
    pub inner: usize,
    /// Rows that were sent.
    pub rows: usize,
}

/// Costs of one pass, or of several added up.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Rows (tokens) of the pass.
    pub rows: u64,
    /// One entry a layer.
    pub layers: Vec<Cost>,
    /// Embedding, final norm and head.
    pub outside: Cost,
    /// How many launches of each kind.
    pub launched: BTreeMap<Launch, u64>,
}

impl Counters {
    /// All zero, for `layers` layers.
    pub(crate) fn new(layers: usize) -> Self {
        Self { layers: vec![Cost::default(); layers], ..Self::default() }
    }

    /// The entry of a layer, or of what lies outside.
    pub(crate) fn of(&mut self, layer: Option<usize>) -> &mut Cost {
        match layer {
            Some(layer) => &mut self.layers[layer],
            None => &mut self.outside,
        }
    }

    /// The sum over layers and the rest.
    pub fn total(&self) -> Cost {
        let mut total = self.outside;
        self.layers.iter().for_each(|cost| total += *cost);
        total
    }
}

impl AddAssign<&Counters> for Counters {
    fn add_assign(&mut self, other: &Counters) {
        self.rows += other.rows;
        self.outside += other.outside;
        other.launched.iter().for_each(|(launch, count)| *self.launched.entry(*launch).or_default() += count);
        self.layers.iter_mut().zip(&other.layers).for_each(|(a, b)| *a += *b);
    }
}
