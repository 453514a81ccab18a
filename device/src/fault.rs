//! Where a device that is wrong on purpose differs from the right one.

use crate::resident::{Group, Key};
use spec::Site;

/// Hooks at the places where devices of this kind go wrong. Each default does nothing.
///
/// A device made with faults is for testing the suite: it must be caught, and named, by the judge.
pub trait Fault: Send + Sync {
    /// The key under which the image of `key` is looked up and entered.
    fn lookup(&self, key: Key) -> Key {
        key
    }

    /// Whether the guard takes the weights of `group` in `layer` for resident; `resident` is the truth.
    fn guard(&self, layer: Option<usize>, group: Group, resident: bool) -> bool {
        let _ = (layer, group);
        resident
    }

    /// Changes the decoded weights of row `o` before they are packed.
    fn pack(&self, key: Key, o: usize, weights: &mut [f32]) {
        let _ = (key, o, weights);
    }

    /// Changes the rows that a launch reads: `x` is `[rows, inner]`, the first at `row` of the pass.
    fn launch(&self, key: Key, row: usize, inner: usize, x: &mut [f32]) {
        let _ = (key, row, inner, x);
    }

    /// Changes what a launch wrote, before the bias: `y` is `[rows, out]`, the first at `row` of the pass.
    fn launched(&self, key: Key, row: usize, out: usize, y: &mut [f32]) {
        let _ = (key, row, out, y);
    }

    /// The position that row `row` of the pass is taken to stand at; `position` is the truth.
    fn position(&self, layer: usize, row: usize, position: usize) -> usize {
        let _ = (layer, row);
        position
    }

    /// Changes the value of a site of the host side: `width` values for each row from `row` of the pass.
    fn host(&self, site: Site, row: usize, width: usize, values: &mut [f32]) {
        let _ = (site, row, width, values);
    }
}
