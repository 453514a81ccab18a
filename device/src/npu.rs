//! The device as its users see it: passes, positions, taps and counters.

use crate::DeviceError;
use crate::counters::Counters;
use crate::design::Design;
use crate::engine::{Engine, PREFILL_ROWS};
use crate::fault::Fault;
use crate::forward::{self, Program, Shape, State};
use crate::launcher::{Launcher, Stage};
use crate::pack::{Image, Stored};
use crate::pass::Pass;
use crate::resident::{Key, ResidentCache, Role};
use crate::switches::Switches;
use crate::taps::{TapSink, Taps};
use rayon::prelude::*;
use spec::{Config, Matrix, Rows, Site, Weights};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

/// A model on the device, with the state of one request.
///
/// Every number of rows gives the same bits however it is cut into passes and launches, and on any
/// number of threads; but for LongRoPE, whose factors are chosen by the length that a pass reaches, as in the
/// frameworks.
pub struct Npu {
    program: Box<dyn Program>,
    shape: Shape,
    launcher: Launcher,
    position: usize,
    layer_taps: Vec<usize>,
    tapped: Vec<f32>,
    counted: Counters,
    all_counted: Counters,
    /// Which device this is, of all in the process: a snapshot belongs to one.
    id: u64,
}

/// A copy of the state of a request: keys and values, convolutions, recurrent states. As large as they are.
pub struct Snapshot {
    device: u64,
    position: usize,
    state: State,
}

impl Snapshot {
    /// Number of tokens fed when it was taken.
    pub fn position(&self) -> usize {
        self.position
    }
}

static DEVICES: AtomicU64 = AtomicU64::new(0);

impl Npu {
    /// Prepares a model for an engine. Nothing is packed before the first pass (or [`Npu::warm_up`]).
    ///
    /// # Errors
    /// A model or a product that the device does not run, by name.
    pub fn init(
        config: &Config,
        weights: &Weights,
        contract: Engine,
        switches: Switches,
    ) -> Result<Npu, DeviceError> {
        Self::init_with_fault(config, weights, contract, switches, None)
    }

    /// As [`Npu::init`], wrong on purpose where a fault is given.
    pub fn init_with_fault(
        config: &Config,
        weights: &Weights,
        contract: Engine,
        switches: Switches,
        fault: Option<Arc<dyn Fault>>,
    ) -> Result<Npu, DeviceError> {
        let program = forward::program(config, weights)?;
        let shape = program.shape();
        let launcher = Launcher::new(contract, switches, fault, shape.layers, program.sources())?;
        Ok(Npu {
            program,
            shape,
            launcher,
            position: 0,
            layer_taps: Vec::new(),
            tapped: Vec::new(),
            counted: Counters::new(shape.layers),
            all_counted: Counters::new(shape.layers),
            id: DEVICES.fetch_add(1, Ordering::Relaxed),
        })
    }

    /// Packs every image now instead of in the first pass.
    pub fn warm_up(&mut self) -> Result<(), DeviceError> {
        let layers = (0..self.shape.layers).map(Stage::Layer);
        for stage in [Stage::Begin].into_iter().chain(layers).chain([Stage::End]) {
            self.launcher.load(stage)?;
            self.launcher.leave();
        }
        self.count(0);
        Ok(())
    }

    /// Forgets the request: afterwards the device is as fresh, but for the images.
    pub fn reset(&mut self) {
        self.program.truncate(0);
        self.position = 0;
        self.tapped.clear();
    }

    /// Reserves memory for a context of `positions`.
    ///
    /// # Errors
    /// If the model does not allow so many.
    pub fn extend_context(&mut self, positions: usize) -> Result<(), DeviceError> {
        if positions > self.shape.max_positions {
            return Err(DeviceError::Extend { asked: positions, limit: self.shape.max_positions });
        }
        self.program.reserve(positions);
        Ok(())
    }

    /// Feeds one token; the logits `[vocab]` of its row.
    pub fn step(&mut self, token: u32) -> Result<Vec<f32>, DeviceError> {
        self.step_batch(&[token])
    }

    /// Feeds tokens at the current position; the logits `[rows, vocab]` of every row.
    pub fn step_batch(&mut self, tokens: &[u32]) -> Result<Vec<f32>, DeviceError> {
        self.run(tokens, None, 0)
    }

    /// As [`Npu::step_batch`], for a caller who keeps count: refuses any other position than the current.
    pub fn step_batch_at(&mut self, tokens: &[u32], start: usize) -> Result<Vec<f32>, DeviceError> {
        if start != self.position {
            return Err(DeviceError::Position { asked: start, held: self.position });
        }
        self.step_batch(tokens)
    }

    /// Feeds tokens; the logits `[vocab]` of the last row alone, so that a long prompt needs no more.
    pub fn prefill(&mut self, tokens: &[u32]) -> Result<Vec<f32>, DeviceError> {
        self.run(tokens, None, tokens.len().saturating_sub(1))
    }

    /// As [`Npu::step_batch`]; `sink` receives the value of every site, once, with all rows of the pass.
    ///
    /// A pass with a sink is one pass even under `batch=off`.
    pub fn step_batch_tapped(
        &mut self,
        tokens: &[u32],
        sink: &mut dyn TapSink,
    ) -> Result<Vec<f32>, DeviceError> {
        self.run(tokens, Some(sink), 0)
    }

    /// Takes back the rows from `position` on, as if they had never been fed.
    ///
    /// # Errors
    /// If the position lies ahead, or so far back that a recurrent state is no longer known there.
    pub fn rollback(&mut self, position: usize) -> Result<(), DeviceError> {
        let (held, oldest) = (self.position, self.program.oldest(self.position));
        if position > held || position < oldest {
            return Err(DeviceError::Rollback { asked: position, oldest, held });
        }
        self.program.truncate(position);
        self.position = position;
        Ok(())
    }

    /// Copies the state of the request. Unlike [`Npu::rollback`], [`Npu::restore`] goes back to it from any
    /// later state and from another request, as far back as one likes.
    pub fn snapshot(&self) -> Snapshot {
        Snapshot { device: self.id, position: self.position, state: self.program.save() }
    }

    /// Puts a snapshot back: afterwards all is as when it was taken.
    ///
    /// # Errors
    /// If it was taken from another device.
    pub fn restore(&mut self, snapshot: &Snapshot) -> Result<(), DeviceError> {
        if snapshot.device != self.id {
            return Err(DeviceError::Snapshot);
        }
        self.program.restore(&snapshot.state);
        self.position = snapshot.position;
        self.tapped.clear();
        Ok(())
    }

    /// Number of tokens fed.
    pub fn position(&self) -> usize {
        self.position
    }

    /// Rows that one launch takes. More are cut, not refused.
    pub fn max_batch_rows(&self) -> usize {
        PREFILL_ROWS
    }

    /// Number of layers.
    pub fn layer_count(&self) -> usize {
        self.shape.layers
    }

    /// Width of the residual stream.
    pub fn hidden_size(&self) -> usize {
        self.shape.hidden
    }

    /// Number of token ids.
    pub fn vocab_size(&self) -> usize {
        self.shape.vocab
    }

    /// The embedding of a token as layer 0 receives it, scaled where the model scales.
    pub fn embed_row(&self, token: u32) -> Result<Vec<f32>, DeviceError> {
        let mut row = self.embed_row_raw(token)?;
        let scale = self.program.embed_scale() * self.program.feed_scale();
        if scale != 1.0 {
            row.iter_mut().for_each(|v| *v *= scale);
        }
        Ok(row)
    }

    /// The row of the embedding table as stored; a draft applies a scale of its own.
    pub fn embed_row_raw(&self, token: u32) -> Result<Vec<f32>, DeviceError> {
        self.check_token(token, 0)?;
        let mut row = vec![0.0; self.shape.hidden];
        self.program.table().decode(token as usize, &mut row)?;
        Ok(row)
    }

    /// Logits of rows `[rows, hidden]` that went through the final norm already.
    pub fn lm_head_logits(&mut self, h: &[f32]) -> Result<Vec<f32>, DeviceError> {
        let hidden = self.shape.hidden;
        if h.is_empty() || !h.len().is_multiple_of(hidden) {
            return Err(DeviceError::Length { what: "a row for the head", expected: hidden, found: h.len() });
        }
        let mut h = h.to_vec();
        self.program.head_in(&mut h);
        self.launcher.load(Stage::End)?;
        let logits = self.launcher.product(Key::outside(Role::Head), &h, 0);
        self.launcher.leave();
        self.count(0);
        let mut logits = logits?;
        self.program.finish_logits(&mut logits);
        Ok(logits)
    }

    /// Keeps the outputs of these layers (from 0) in every pass, see [`Npu::layer_taps`].
    pub fn set_layer_taps(&mut self, layers: &[usize]) -> Result<(), DeviceError> {
        let count = self.shape.layers;
        if let Some(&layer) = layers.iter().find(|&&layer| layer >= count) {
            return Err(DeviceError::Layer { layer, layers: count });
        }
        self.layer_taps = layers.to_vec();
        self.tapped.clear();
        Ok(())
    }

    /// What the next layer received from each tapped layer in the last pass: `[rows, taps, width]`.
    pub fn layer_taps(&self) -> &[f32] {
        &self.tapped
    }

    /// Costs of the last call.
    pub fn counters(&self) -> &Counters {
        &self.counted
    }

    /// Costs of all calls since the device was made.
    pub fn total_counters(&self) -> &Counters {
        &self.all_counted
    }

    /// Every product of the model and the design that runs it.
    pub fn designs(&self) -> Vec<(Key, Design)> {
        self.launcher.designs().map(|(key, _, design)| (key, design)).collect()
    }

    /// The images that are resident.
    pub fn resident(&self) -> &ResidentCache {
        &self.launcher.cache
    }

    /// Drops resident images that `keep` refuses. They are packed again when they are needed.
    pub fn retain_resident(&mut self, keep: impl Fn(&Key) -> bool) {
        self.launcher.cache.retain(keep);
    }

    /// The weights that the device multiplies with to get `site`, decoded from its image.
    ///
    /// Nothing where the site is no matrix product of the device.
    pub fn device_weights(&mut self, site: Site) -> Result<Option<Matrix>, DeviceError> {
        self.projection(site, None)
    }

    /// As [`Npu::device_weights`], for one routed expert.
    pub fn expert_weights(&mut self, site: Site, expert: usize) -> Result<Option<Matrix>, DeviceError> {
        self.projection(site, Some(expert))
    }

    fn projection(&mut self, site: Site, expert: Option<usize>) -> Result<Option<Matrix>, DeviceError> {
        let found = self.launcher.image_of(site, expert)?;
        self.launcher.leave();
        Ok(found.map(|p| {
            let rows = Decoded { image: p.image, start: p.start, out: p.out };
            Matrix::new(site.to_string(), Arc::new(rows))
        }))
    }

    /// Code and scales of weight `[o, i]` behind `site`, as the image stores them.
    pub fn device_code(&mut self, site: Site, o: usize, i: usize) -> Result<Option<Stored>, DeviceError> {
        let found = self.launcher.image_of(site, None)?;
        Ok(found.and_then(|p| {
            assert!(o < p.out, "device_code: row {o} of {} at {site}", p.out);
            p.image.stored(p.start + o, i)
        }))
    }

    fn check_token(&self, token: u32, row: usize) -> Result<(), DeviceError> {
        if (token as usize) < self.shape.vocab {
            return Ok(());
        }
        Err(DeviceError::Token { token, row, vocab: self.shape.vocab })
    }

    fn run(
        &mut self,
        tokens: &[u32],
        sink: Option<&mut dyn TapSink>,
        first_logits: usize,
    ) -> Result<Vec<f32>, DeviceError> {
        if tokens.is_empty() {
            return Err(DeviceError::Empty);
        }
        tokens.iter().enumerate().try_for_each(|(row, &token)| self.check_token(token, row))?;
        let needed = self.position + tokens.len();
        if needed > self.shape.max_positions {
            return Err(DeviceError::Context { needed, limit: self.shape.max_positions });
        }
        self.tapped.clear();
        if self.launcher.switches.no_batch && sink.is_none() && tokens.len() > 1 {
            return self.row_by_row(tokens, first_logits);
        }
        let start = self.position;
        let logits = self.pass(tokens, Taps::new(sink), first_logits);
        match &logits {
            Ok(_) => self.position = needed,
            // A pass that failed half way leaves the state as it was.
            Err(_) => self.program.truncate(start),
        }
        self.count(tokens.len());
        logits
    }

    fn row_by_row(&mut self, tokens: &[u32], first_logits: usize) -> Result<Vec<f32>, DeviceError> {
        let (mut all, mut tapped) = (Vec::new(), Vec::new());
        let mut counted = Counters::new(self.shape.layers);
        for (row, token) in tokens.iter().enumerate() {
            let logits = self.run(&[*token], None, 0)?;
            if row >= first_logits {
                all.extend(logits);
            }
            tapped.append(&mut self.tapped);
            counted += &self.counted;
        }
        (self.tapped, self.counted) = (tapped, counted);
        Ok(all)
    }

    /// One pass: layer by layer, and inside a layer in chunks of a launch.
    fn pass(&mut self, tokens: &[u32], taps: Taps, first_logits: usize) -> Result<Vec<f32>, DeviceError> {
        let began = Instant::now();
        let total = tokens.len();
        let embedded = self.embed(tokens)?;
        let before = self.launcher.counters.outside;
        let layers = self.shape.layers;
        let width = self.shape.width;
        let mut pass = Pass {
            launcher: &mut self.launcher,
            taps,
            start: self.position,
            total,
            chunk: 0..total,
            layer: None,
        };
        pass.launcher.load(Stage::Begin)?;
        let mut embedded = embedded;
        pass.value("embed", &[self.shape.hidden], &mut embedded);
        let mut x = self.program.begin(tokens, embedded, &mut pass)?;
        pass.taps.flush();
        pass.launcher.leave();
        pass.launcher.counters.outside.close(before, began.elapsed());

        let mut tapped = vec![0.0; total * self.layer_taps.len() * width];
        for layer in 0..layers {
            let began = Instant::now();
            pass.enter(Some(layer));
            pass.launcher.load(Stage::Layer(layer))?;
            for from in (0..total).step_by(PREFILL_ROWS) {
                pass.chunk = from..total.min(from + PREFILL_ROWS);
                let rows = &mut x[pass.chunk.start * width..pass.chunk.end * width];
                self.program.layer(layer, rows, &mut pass)?;
            }
            pass.chunk = 0..total;
            self.program.state_taps(layer, &mut pass);
            keep(&self.layer_taps, layer, &x, width, &mut tapped);
            pass.taps.flush();
            pass.launcher.leave();
            pass.launcher.counters.layers[layer].close(Default::default(), began.elapsed());
        }

        let (began, before) = (Instant::now(), pass.launcher.counters.outside);
        pass.enter(None);
        pass.launcher.load(Stage::End)?;
        let x = self.program.gather(x, &mut pass)?;
        let hidden = self.shape.hidden;
        let first = if pass.taps.active() { 0 } else { first_logits };
        let mut h = self.program.final_norm(&x[first * hidden..]);
        pass.chunk = first..total;
        pass.value("final_norm", &[hidden], &mut h);
        if self.program.head_in(&mut h) {
            pass.value("head_in", &[hidden], &mut h);
        }
        pass.chunk = first_logits..total;
        let mut logits = pass.product(Role::Head, &h[(first_logits - first) * hidden..])?;
        if self.program.changes_logits() {
            pass.value("lm_head", &[self.shape.vocab], &mut logits);
            self.program.finish_logits(&mut logits);
        }
        pass.value("logits", &[self.shape.vocab], &mut logits);
        pass.taps.flush();
        pass.launcher.leave();
        pass.launcher.counters.outside.close(before, began.elapsed());
        self.tapped = tapped;
        Ok(logits)
    }

    /// Embedded rows `[rows, hidden]`, scaled.
    fn embed(&mut self, tokens: &[u32]) -> Result<Vec<f32>, DeviceError> {
        let hidden = self.shape.hidden;
        let mut x = vec![0.0; tokens.len() * hidden];
        let (table, scale) = (self.program.table(), self.program.embed_scale());
        x.par_chunks_exact_mut(hidden).zip(tokens).try_for_each(|(row, &token)| {
            table.decode(token as usize, row)?;
            if scale != 1.0 {
                row.iter_mut().for_each(|v| *v *= scale);
            }
            Ok::<(), DeviceError>(())
        })?;
        let cost = &mut self.launcher.counters.outside;
        cost.row_bytes += (x.len() * 4) as u64;
        cost.package_bytes += (table.row_bytes() * tokens.len()) as u64;
        Ok(x)
    }

    /// Moves what was counted to the counters of the last call.
    fn count(&mut self, rows: usize) {
        self.counted = std::mem::replace(&mut self.launcher.counters, Counters::new(self.shape.layers));
        self.counted.rows = rows as u64;
        self.all_counted += &self.counted;
    }
}

/// Copies the output of a tapped layer to its place in `[rows, taps, width]`.
fn keep(taps: &[usize], layer: usize, x: &[f32], width: usize, tapped: &mut [f32]) {
    for (n, _) in taps.iter().enumerate().filter(|(_, tap)| **tap == layer) {
        for (row, into) in x.chunks_exact(width).zip(tapped.chunks_exact_mut(taps.len() * width)) {
            into[n * width..][..width].copy_from_slice(row);
        }
    }
}

/// Rows of an image as a matrix, decoded when they are asked for.
struct Decoded {
    image: Arc<Image>,
    start: usize,
    out: usize,
}

impl Rows for Decoded {
    fn rows(&self) -> usize {
        self.out
    }

    fn inner(&self) -> usize {
        self.image.inner()
    }

    fn decode(&self, row: usize, into: &mut [f32]) {
        self.image.unpack_row(self.start + row, into);
    }

    fn format(&self) -> &str {
        self.image.engine().name()
    }

    fn row_bytes(&self) -> usize {
        self.image.bytes() / self.image.out()
    }
}
