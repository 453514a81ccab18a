//! Handing out what a pass computes, site by site.

use spec::Site;
use spec::site::At;

/// Receives the values of a pass under the oracle's site names.
pub trait TapSink {
    /// Whether the values of `site` are wanted; what is not wanted is not collected.
    fn wants(&self, site: Site) -> bool {
        let _ = site;
        true
    }

    /// The value of `site`, once a pass, with all rows of the pass.
    fn tap(&mut self, site: Site, shape: &[usize], values: &[f32]);
}

/// Collects the chunks of a layer until its rows are complete.
///
/// Without a sink nothing is stored, and no value is made only to be tapped.
pub(crate) struct Taps<'s> {
    sink: Option<&'s mut dyn TapSink>,
    at: At,
    pending: Vec<(Site, Vec<usize>, Vec<f32>)>,
    /// Sites whose first two axes change places before they are handed out.
    turned: Vec<Site>,
}

impl<'s> Taps<'s> {
    pub fn new(sink: Option<&'s mut dyn TapSink>) -> Self {
        Self { sink, at: At::MODEL, pending: Vec::new(), turned: Vec::new() }
    }

    /// Names sites from here on after layer `layer`, or after none.
    pub fn enter(&mut self, layer: Option<usize>) {
        self.at = At(layer);
    }

    /// Whether anybody listens.
    pub fn active(&self) -> bool {
        self.sink.is_some()
    }

    /// Whether `name` is wanted where the pass stands.
    pub fn wants(&self, name: &'static str) -> bool {
        self.sink.as_ref().is_some_and(|sink| sink.wants(self.at.site(name)))
    }

    /// Adds rows to site `name`; `row` are the axes behind the first, all of `values` the rows.
    pub fn rows(&mut self, name: &'static str, row: &[usize], values: &[f32]) {
        if !self.wants(name) {
            return;
        }
        let site = self.at.site(name);
        let rows = values.len() / row.iter().product::<usize>().max(1);
        match self.pending.iter_mut().find(|(pending, ..)| *pending == site) {
            Some((_, shape, all)) => {
                shape[0] += rows;
                all.extend_from_slice(values);
            }
            None => {
                let shape = [&[rows], row].concat();
                self.pending.push((site, shape, values.to_vec()));
            }
        }
    }

    /// Rows that hold all parallel streams, `[rows, streams, width]`, handed out as `[streams, rows, width]`.
    pub fn streams(&mut self, name: &'static str, values: &[f32], streams: usize, width: usize) {
        if self.wants(name) {
            self.rows(name, &[streams, width], values);
            self.turned.push(self.at.site(name));
        }
    }

    /// The value of site `name` as a whole, such as a state after the pass.
    pub fn whole(&mut self, name: &'static str, shape: &[usize], values: &[f32]) {
        if self.wants(name) {
            self.pending.push((self.at.site(name), shape.to_vec(), values.to_vec()));
        }
    }

    /// Columns `from..from + width` of rows that are `stride` wide, as rows of site `name`.
    pub fn columns(&mut self, name: &'static str, values: &[f32], stride: usize, from: usize, width: usize) {
        if self.wants(name) {
            let rows: Vec<f32> =
                values.chunks_exact(stride).flat_map(|row| &row[from..from + width]).copied().collect();
            self.rows(name, &[width], &rows);
        }
    }

    /// Hands out what was collected, in the order in which sites first appeared.
    pub fn flush(&mut self) {
        let (pending, turned) = (std::mem::take(&mut self.pending), std::mem::take(&mut self.turned));
        if let Some(sink) = &mut self.sink {
            for (site, shape, values) in pending {
                match (turned.contains(&site), &shape[..]) {
                    (true, &[rows, streams, width]) => {
                        let at = |s: usize, r: usize| &values[(r * streams + s) * width..][..width];
                        let by_stream: Vec<f32> = (0..streams)
                            .flat_map(|s| (0..rows).flat_map(move |r| at(s, r)))
                            .copied()
                            .collect();
                        sink.tap(site, &[streams, rows, width], &by_stream);
                    }
                    _ => sink.tap(site, &shape, &values),
                }
            }
        }
    }
}
