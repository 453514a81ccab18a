//! Loading, packing and launching: everything between a model program and the engines.

use crate::DeviceError;
use crate::counters::{Counters, Launch};
use crate::design::Design;
use crate::engine::{Engine, LaunchError, PREFILL_ROWS, Scratch};
use crate::fault::Fault;
use crate::pack::{CodeRow, GROUP, Image, PackError};
use crate::resident::{Group, Key, ResidentCache, Role};
use crate::simd::{Kernel, KernelError};
use crate::switches::Switches;
use rayon::prelude::*;
use spec::matrix::Codes4;
use spec::{Matrix, NonFinite, Site, Vector};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

/// One projection inside an image.
#[derive(Clone, Debug)]
pub(crate) struct Part {
    /// The site of its result.
    pub site: Site,
    /// Its weights `[out, inner]`.
    pub matrix: Matrix,
    /// Its bias `[out]`, added on the host side.
    pub bias: Option<Vector>,
}

impl Part {
    pub fn new(site: Site, linear: &spec::families::Linear) -> Part {
        Part { site, matrix: linear.weight.clone(), bias: linear.bias.clone() }
    }
}

/// Where an image comes from: the projections fused in it, one below the other.
#[derive(Clone, Debug)]
pub(crate) struct Source {
    pub group: Group,
    pub parts: Vec<Part>,
}

impl Source {
    pub fn new(group: Group, parts: Vec<Part>) -> Source {
        Source { group, parts }
    }

    fn out(&self) -> usize {
        self.parts.iter().map(|part| part.matrix.out()).sum()
    }

    fn inner(&self) -> usize {
        self.parts.first().map_or(0, |part| part.matrix.inner())
    }

    /// The projection that row `o` of the image belongs to, and its row there.
    fn locate(&self, mut o: usize) -> (&Matrix, usize) {
        for part in &self.parts {
            if o < part.matrix.out() {
                return (&part.matrix, o);
            }
            o -= part.matrix.out();
        }
        panic!("image row {o} beyond its projections");
    }

    /// Whether every projection comes with 4-bit codes that an engine can keep.
    fn has_codes(&self) -> bool {
        let mut codes = Codes4::default();
        self.parts.iter().all(|part| part.matrix.codes4(0, &mut codes))
    }

    /// Writes the 4-bit codes of image row `o`.
    ///
    /// A row whose every zero is `-8 · scale` is symmetric: code 8 stands for zero.
    fn codes(&self, o: usize, codes: &mut Codes4, into: &mut CodeRow) {
        let (matrix, o) = self.locate(o);
        matrix.codes4(o, codes);
        into.codes.copy_from_slice(&codes.codes);
        into.scale.copy_from_slice(&codes.scales);
        into.symmetric = codes.scales.iter().zip(&codes.zeros).all(|(scale, zero)| *zero == -8.0 * scale);
        if !into.symmetric {
            into.min.copy_from_slice(&codes.zeros);
        }
        debug_assert_eq!(codes.scales.len(), codes.codes.len().div_ceil(GROUP), "codes: groups of a row");
    }

    fn names(&self) -> String {
        let names: Vec<&str> = self.parts.iter().map(|part| part.matrix.name()).collect();
        names.join(" | ")
    }
}

/// Rows of decoded weights on their way into an image.
///
/// The buffer is used again and again; it knows whose rows it holds, and hands out no others.
#[derive(Default)]
struct DecodeScratch {
    owner: Option<(Key, usize)>,
    values: Vec<f32>,
}

/// Rows that are decoded together, on all threads.
const DECODE_TILE: usize = 128;

impl DecodeScratch {
    /// Decodes the tile of rows that starts at `first`.
    fn load(
        &mut self,
        key: Key,
        source: &Source,
        first: usize,
        fault: Option<&dyn Fault>,
    ) -> Result<(), NonFinite> {
        let inner = source.inner();
        let rows = DECODE_TILE.min(source.out() - first);
        self.owner = None;
        self.values.resize(rows * inner, 0.0);
        self.values.par_chunks_exact_mut(inner).enumerate().try_for_each(|(r, into)| {
            let (matrix, o) = source.locate(first + r);
            matrix.decode(o, into)?;
            if let Some(fault) = fault {
                fault.pack(key, first + r, into);
            }
            Ok::<(), NonFinite>(())
        })?;
        self.owner = Some((key, first));
        Ok(())
    }

    /// Row `o` of the image `key`, which must have been loaded for it.
    fn row(&self, key: Key, o: usize, inner: usize) -> &[f32] {
        let (owner, first) = self.owner.expect("scratch: read before a load");
        assert!(owner == key && o >= first, "scratch: row {o} of {key} read where {owner} was loaded");
        &self.values[(o - first) * inner..][..inner]
    }

    fn forget(&mut self, poison: bool) {
        self.owner = None;
        if poison {
            self.values.fill(f32::NAN);
        }
    }
}

/// The parts of a pass that load their images together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stage {
    /// What happens to embeddings before the first layer.
    Begin,
    /// One layer.
    Layer(usize),
    /// The head, and what happens before it.
    End,
}

impl Stage {
    fn of(key: &Key) -> Stage {
        match (key.layer, key.role) {
            (Some(layer), _) => Stage::Layer(layer as usize),
            (None, Role::Head | Role::StreamOut) => Stage::End,
            (None, _) => Stage::Begin,
        }
    }

    fn layer(self) -> Option<usize> {
        match self {
            Stage::Layer(layer) => Some(layer),
            Stage::Begin | Stage::End => None,
        }
    }
}

/// What stops packing.
enum PackFailure {
    Weight(NonFinite),
    Pack(PackError),
}

impl From<PackError> for PackFailure {
    fn from(error: PackError) -> Self {
        PackFailure::Pack(error)
    }
}

/// The device side of a model: sources, images, launches and what they cost.
pub(crate) struct Launcher {
    engine: Engine,
    pub switches: Switches,
    pub cache: ResidentCache,
    pub counters: Counters,
    pub fault: Option<Arc<dyn Fault>>,
    sources: BTreeMap<Key, (Source, Design)>,
    /// Images of the layer in hand when none may be resident.
    transient: BTreeMap<Key, Arc<Image>>,
    decode: DecodeScratch,
    launch: Scratch,
}

impl Launcher {
    /// Derives the designs of all sources; refuses a product that none runs.
    pub fn new(
        engine: Engine,
        switches: Switches,
        fault: Option<Arc<dyn Fault>>,
        layers: usize,
        sources: Vec<(Key, Source)>,
    ) -> Result<Launcher, DeviceError> {
        let launch = Scratch::new(Kernel::chosen()?).map_err(KernelError::from)?;
        let mut designed = BTreeMap::new();
        for (key, source) in sources {
            let refuse = |error| DeviceError::Design { name: source.names(), source: error };
            let design = Design::new(engine, source.out(), source.inner()).map_err(refuse)?;
            let twice = designed.insert(key, (source, design));
            assert!(twice.is_none(), "two products under the key {key}");
        }
        Ok(Launcher {
            engine,
            switches,
            cache: ResidentCache::default(),
            counters: Counters::new(layers),
            fault,
            sources: designed,
            transient: BTreeMap::new(),
            decode: DecodeScratch::default(),
            launch,
        })
    }

    /// Every product, its group and its design.
    pub fn designs(&self) -> impl Iterator<Item = (Key, Group, Design)> + '_ {
        self.sources.iter().map(|(key, (source, design))| (*key, source.group, *design))
    }

    /// Makes every image of `stage` available, decoding no more than the guard asks for.
    ///
    /// A group of weights is passed over when **all** its images are resident and no switch restores
    /// the reading. Images enter the cache together, after the last one was packed.
    pub fn load(&mut self, stage: Stage) -> Result<(), DeviceError> {
        let began = Instant::now();
        let layer = stage.layer();
        let keys: Vec<Key> = self.sources.keys().copied().filter(|key| Stage::of(key) == stage).collect();
        let mut packed = Vec::new();
        for group in [Group::Attention, Group::FeedForward, Group::PerLayer, Group::Outside] {
            let members: Vec<Key> =
                keys.iter().copied().filter(|key| self.sources[key].0.group == group).collect();
            if members.is_empty() || self.passes_over(layer, group, &members) {
                continue;
            }
            for key in members {
                let resident = !self.switches.no_cache && self.cache.holds(&self.lookup(key));
                if !resident {
                    packed.push((self.lookup(key), Arc::new(self.pack(layer, key)?)));
                } else if self.switches.reload.covers(group) {
                    self.read_again(layer, key)?;
                }
            }
        }
        if self.switches.no_cache {
            self.transient.extend(packed);
        } else {
            self.cache.commit(packed);
        }
        self.counters.of(layer).load_time += began.elapsed();
        Ok(())
    }

    /// Ends a stage: what may not outlive it goes.
    pub fn leave(&mut self) {
        self.transient.clear();
        self.decode.forget(self.switches.poison);
    }

    /// The guard.
    fn passes_over(&self, layer: Option<usize>, group: Group, members: &[Key]) -> bool {
        let resident = !self.switches.no_cache
            && !self.switches.reload.covers(group)
            && members.iter().all(|key| self.cache.holds(&self.lookup(*key)));
        self.fault.as_ref().map_or(resident, |fault| fault.guard(layer, group, resident))
    }

    fn lookup(&self, key: Key) -> Key {
        self.fault.as_ref().map_or(key, |fault| fault.lookup(key))
    }

    /// Decodes and packs the image of `key`.
    fn pack(&mut self, layer: Option<usize>, key: Key) -> Result<Image, DeviceError> {
        let (source, design) = &self.sources[&key];
        let (decode, fault) = (&mut self.decode, self.fault.as_deref());
        let image = if self.engine.is_four_bit() && source.has_codes() {
            let mut codes = Codes4::default();
            Image::pack_codes(self.engine, design.out, design.inner, &mut |o, into| {
                source.codes(o, &mut codes, into);
                Ok(())
            })
        } else {
            Image::pack(self.engine, design.out, design.inner, &mut |o, into| {
                if o % DECODE_TILE == 0 {
                    decode.load(key, source, o, fault).map_err(PackFailure::Weight)?;
                }
                into.copy_from_slice(decode.row(key, o, design.inner));
                Ok(())
            })
        };
        let image = image.map_err(|failure| match failure {
            PackFailure::Weight(error) => DeviceError::Weight(error),
            PackFailure::Pack(error) => DeviceError::Pack { key, source: error },
        })?;
        let read = package_bytes(source);
        let cost = self.counters.of(layer);
        cost.package_bytes += read;
        cost.dequantised_bytes += (design.out * design.inner * 4) as u64;
        cost.packed_bytes += image.bytes() as u64;
        Ok(image)
    }

    /// Decodes the weights of `key` for nothing, as before there was a guard.
    fn read_again(&mut self, layer: Option<usize>, key: Key) -> Result<(), DeviceError> {
        let (source, design) = &self.sources[&key];
        for first in (0..design.out).step_by(DECODE_TILE) {
            self.decode.load(key, source, first, self.fault.as_deref())?;
        }
        let read = package_bytes(source);
        let cost = self.counters.of(layer);
        cost.package_bytes += read;
        cost.dequantised_bytes += (design.out * design.inner * 4) as u64;
        Ok(())
    }

    /// The image of `key`, checked against its design.
    fn image(&self, key: Key, design: Design) -> Result<Arc<Image>, DeviceError> {
        let at = self.lookup(key);
        let image = self.transient.get(&at).or_else(|| self.cache.get(&at));
        let refuse = |found: String| DeviceError::Image { key, expected: design.to_string(), found };
        let image = image.ok_or_else(|| refuse("not resident".into()))?;
        let found = Design { engine: image.engine(), out: image.out(), inner: image.inner() };
        if found != design {
            return Err(refuse(found.to_string()));
        }
        Ok(image.clone())
    }

    /// The names and widths of the projections in an image.
    pub fn parts(&self, key: &Key) -> Vec<(&'static str, usize)> {
        self.sources[key].0.parts.iter().map(|part| (part.site.name, part.matrix.out())).collect()
    }

    /// `y[r, o] = Σ_i x[r, i] · w[o, i] + b[o]`, in launches of at most 128 rows.
    ///
    /// `x` is `[rows, inner]`, its first row stands at `first` in the pass; the result is `[rows, out]`.
    pub fn product(&mut self, key: Key, x: &[f32], first: usize) -> Result<Vec<f32>, DeviceError> {
        let began = Instant::now();
        let design = self.sources[&key].1;
        let image = self.image(key, design)?;
        let rows = x.len() / design.inner;
        let mut y = vec![0.0; rows * design.out];
        let mut launches = 0;
        for from in (0..rows).step_by(PREFILL_ROWS) {
            let count = PREFILL_ROWS.min(rows - from);
            let x = &x[from * design.inner..][..count * design.inner];
            let y = &mut y[from * design.out..][..count * design.out];
            self.one_launch(key, &image, x, first + from, y)?;
            launches += 1;
            let Design { out, inner, .. } = design;
            let launch = Launch { layer: key.layer, role: key.role, out, inner, rows: count };
            *self.counters.launched.entry(launch).or_default() += 1;
        }
        let (source, _) = &self.sources[&key];
        add_bias(&source.parts, design.out, &mut y);
        let cost = self.counters.of(key.layer.map(|layer| layer as usize));
        cost.launches += launches;
        cost.streamed_bytes += launches * image.bytes() as u64;
        cost.multiply_adds += (rows * design.out * design.inner) as u64;
        cost.device_time += began.elapsed();
        Ok(y)
    }

    fn one_launch(
        &mut self,
        key: Key,
        image: &Image,
        x: &[f32],
        first: usize,
        y: &mut [f32],
    ) -> Result<(), DeviceError> {
        let (inner, out) = (image.inner(), image.out());
        let rows = x.len() / inner;
        let launched = match self.fault.clone() {
            None => image.multiply_parallel(x, rows, y, out, &mut self.launch),
            Some(fault) => {
                let mut x = x.to_vec();
                fault.launch(key, first, inner, &mut x);
                let launched = image.multiply_parallel(&x, rows, y, out, &mut self.launch);
                fault.launched(key, first, out, y);
                launched
            }
        };
        launched.map_err(|error| match error {
            LaunchError::NotFinite { row, column, value } => {
                let site = self.sources[&key].0.parts[0].site;
                DeviceError::Activation { site, row: first + row, column, value }
            }
            LaunchError::TooManyRows { rows } => panic!("a launch was cut to {rows} rows"),
        })
    }

    /// The image and the rows in it that belong to the product whose result is `site`.
    pub fn image_of(&mut self, site: Site, expert: Option<usize>) -> Result<Option<Projection>, DeviceError> {
        let expert = expert.map(|expert| expert as u32);
        let found = self.sources.iter().find_map(|(key, (source, _))| {
            let mut start = 0;
            for part in &source.parts {
                if part.site == site && (key.expert == expert || key.layer.is_none()) {
                    return Some((*key, start, part.matrix.out()));
                }
                start += part.matrix.out();
            }
            None
        });
        let Some((key, start, out)) = found else { return Ok(None) };
        let image = match self.cache.get(&self.lookup(key)) {
            Some(image) => image.clone(),
            None => {
                let image = Arc::new(self.pack(key.layer.map(|layer| layer as usize), key)?);
                if !self.switches.no_cache {
                    self.cache.commit(vec![(self.lookup(key), image.clone())]);
                }
                image
            }
        };
        Ok(Some(Projection { image, start, out }))
    }
}

/// Some rows of an image: one projection out of a fused one.
pub(crate) struct Projection {
    pub image: Arc<Image>,
    pub start: usize,
    pub out: usize,
}

fn package_bytes(source: &Source) -> u64 {
    source.parts.iter().map(|part| (part.matrix.row_bytes() * part.matrix.out()) as u64).sum()
}

fn add_bias(parts: &[Part], stride: usize, y: &mut [f32]) {
    let mut from = 0;
    for part in parts {
        if let Some(bias) = &part.bias {
            for row in y.chunks_exact_mut(stride) {
                row[from..from + bias.len()].iter_mut().zip(bias.iter()).for_each(|(y, b)| *y += b);
            }
        }
        from += part.matrix.out();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn source() -> Source {
        let matrix = Matrix::from_values("w", 2, 3, vec![1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
        let part = Part { site: Site::layer(0, "mlp_out"), matrix, bias: None };
        Source::new(Group::FeedForward, vec![part])
    }

    #[test]
    fn scratch_hands_out_what_was_loaded() {
        let mut scratch = DecodeScratch::default();
        let key = Key::layer(0, Role::Down);
        scratch.load(key, &source(), 0, None).unwrap();
        assert_eq!(scratch.row(key, 1, 3), [4.0, 5.0, 6.0]);
        scratch.forget(true);
        assert!(scratch.values.iter().all(|v| v.is_nan()));
    }

    #[test]
    #[should_panic(expected = "read before a load")]
    fn scratch_is_not_read_after_its_layer() {
        let mut scratch = DecodeScratch::default();
        let key = Key::layer(0, Role::Down);
        scratch.load(key, &source(), 0, None).unwrap();
        scratch.forget(false);
        scratch.row(key, 0, 3);
    }

    #[test]
    #[should_panic(expected = "row 0 of layers.1.Down read where layers.0.Down was loaded")]
    fn scratch_is_not_read_for_another_layer() {
        let mut scratch = DecodeScratch::default();
        scratch.load(Key::layer(0, Role::Down), &source(), 0, None).unwrap();
        scratch.row(Key::layer(1, Role::Down), 0, 3);
    }

    // Rows 0 and 1 are the first projection, row 2 the second; each bias stands over its own columns.
    #[test]
    fn fused_rows_and_biases_keep_their_projection() {
        let mut source = source();
        let second = Matrix::from_values("u", 1, 3, vec![7.0, 8.0, 9.0]);
        let bias = Some(Vector::new("u.bias", vec![100.0]));
        source.parts.push(Part { site: Site::layer(0, "mlp_up"), matrix: second, bias });
        let (matrix, row) = source.locate(2);
        assert_eq!((matrix.name(), row), ("u", 0));
        let mut y = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0];
        add_bias(&source.parts, 3, &mut y);
        assert_eq!(y, [1.0, 2.0, 103.0, 4.0, 5.0, 106.0]);
    }
}
