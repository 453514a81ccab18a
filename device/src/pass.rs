//! What a model program sees of a pass: where it stands, products, and sites.

use crate::DeviceError;
use crate::host::attention::Attention;
use crate::host::cache::KvCache;
use crate::launcher::Launcher;
use crate::resident::{Key, Role};
use crate::taps::Taps;
use std::ops::Range;
use std::time::Instant;

/// A pass through the model, seen from the chunk of rows that is being computed in one layer.
///
/// A pass of any number of rows goes layer by layer, and inside a layer in chunks of at most as many
/// rows as a launch takes.
pub(crate) struct Pass<'a, 's> {
    pub launcher: &'a mut Launcher,
    pub taps: Taps<'s>,
    /// Position of the first row of the pass.
    pub start: usize,
    /// Rows of the pass.
    pub total: usize,
    /// Rows of the pass in hand.
    pub chunk: Range<usize>,
    /// Layer in hand.
    pub layer: Option<usize>,
}

impl Pass<'_, '_> {
    /// Goes on to `layer`, or to what follows the layers.
    pub fn enter(&mut self, layer: Option<usize>) {
        self.layer = layer;
        self.taps.enter(layer);
    }

    /// Position of the first row in hand.
    pub fn position(&self) -> usize {
        self.start + self.chunk.start
    }

    /// Length of the sequence when the pass is over.
    pub fn length(&self) -> usize {
        self.start + self.total
    }

    /// The position at which the first row in hand is turned in layer `layer`.
    pub fn rope_position(&self, layer: usize) -> usize {
        let position = self.position();
        let fault = self.launcher.fault.as_ref();
        fault.map_or(position, |fault| fault.position(layer, self.chunk.start, position))
    }

    /// Number of rows in hand.
    pub fn rows(&self) -> usize {
        self.chunk.len()
    }

    /// The product of `role` in the layer in hand: `[rows, inner]` to `[rows, out]`, bias included.
    pub fn product(&mut self, role: Role, x: &[f32]) -> Result<Vec<f32>, DeviceError> {
        let key = self.key(role);
        self.launcher.product(key, x, self.chunk.start)
    }

    /// The name of an image of the layer in hand.
    pub fn key(&self, role: Role) -> Key {
        match self.layer {
            Some(layer) => Key::layer(layer, role),
            None => Key::outside(role),
        }
    }

    /// The product of a fused image of `N` projections, cut apart, each the value of its own site.
    pub fn parts<const N: usize>(&mut self, role: Role, x: &[f32]) -> Result<[Vec<f32>; N], DeviceError> {
        let mut fused = self.product(role, x)?;
        let parts = self.launcher.parts(&self.key(role));
        assert_eq!(parts.len(), N, "parts: projections of {role:?}");
        if let [(name, width)] = parts[..] {
            self.value(name, &[width], &mut fused);
            return Ok(std::array::from_fn(|_| std::mem::take(&mut fused)));
        }
        let widths = std::array::from_fn(|n| parts[n]);
        Ok(self.cut(&fused, widths))
    }

    /// Rows cut into columns, each part the value of the site that it is named with.
    pub fn cut<const N: usize>(&mut self, rows: &[f32], parts: [(&'static str, usize); N]) -> [Vec<f32>; N] {
        let stride: usize = parts.iter().map(|(_, width)| width).sum();
        let mut from = 0;
        parts.map(|(name, width)| {
            let mut part = Vec::with_capacity(rows.len() / stride * width);
            rows.chunks_exact(stride).for_each(|row| part.extend_from_slice(&row[from..from + width]));
            self.value(name, &[width], &mut part);
            from += width;
            part
        })
    }

    /// The product of a fused image as it is, `[rows, all projections]`; each is named if it is tapped.
    pub fn fused(&mut self, role: Role, x: &[f32]) -> Result<Vec<f32>, DeviceError> {
        let fused = self.product(role, x)?;
        let parts = self.launcher.parts(&self.key(role));
        let stride: usize = parts.iter().map(|(_, width)| width).sum();
        let mut from = 0;
        for (name, width) in parts {
            self.taps.columns(name, &fused, stride, from, width);
            from += width;
        }
        Ok(fused)
    }

    /// The context of the queries of the rows in hand, whose keys are in the cache.
    pub fn attend(&mut self, attention: &Attention, queries: &[f32], cache: &KvCache) -> Vec<f32> {
        let began = Instant::now();
        let context = attention.run(queries, cache, self.position());
        self.launcher.counters.of(self.layer).attention_time += began.elapsed();
        context
    }

    /// Names a value: `values` are rows of shape `row` at site `name`.
    pub fn value(&mut self, name: &'static str, row: &[usize], values: &mut [f32]) {
        if let Some(fault) = &self.launcher.fault {
            let site = spec::site::At(self.layer).site(name);
            fault.host(site, self.chunk.start, row.iter().product(), values);
        }
        self.taps.rows(name, row, values);
    }
}
