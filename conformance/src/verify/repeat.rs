//! The same run again and again: what changes between runs, by site and tile.
//!
//! A subject is taken to be a function of its inputs: the verdict on one run is meant for the next one too.
//! Runs whose bytes differ from the first are judged as well; if all of them pass, the result is MISTRUSTED,
//! because no single run stands for the subject.

use super::run::{Ran, once};
use super::sites::judge_sites;
use super::{Loaded, Options, PackageResult};
use crate::judge::{Place, TILE, Verdict, rows_and_columns};
use crate::passes::Pass;
use reference::Tensor;
use serde::Serialize;
use spec::{NonFinite, Site};
use std::collections::BTreeMap;

/// What changed between runs.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Repeat {
    /// How often the subject was run.
    pub runs: usize,
    /// Runs that gave other bytes than the first somewhere.
    pub runs_changed: usize,
    /// Taps that were compared.
    pub taps: usize,
    /// Taps that changed, pass after pass.
    pub changed: Vec<Changed>,
}

/// A tap that is not the same in every run.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Changed {
    /// The tap.
    pub site: String,
    /// Runs, counted from 1, that differ from the first.
    pub runs: Vec<usize>,
    /// Elements that changed in some run; all of them where the shape did.
    pub elements: usize,
    /// All elements.
    pub of: usize,
    /// Largest difference from the first run.
    pub max_abs: f64,
    /// The first element that changed.
    pub first: Place,
    /// Tiles of 16 rows and 32 columns in which elements changed.
    pub tiles: Vec<Tile>,
}

/// A tile with changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Tile {
    /// Its first row.
    pub row: usize,
    /// Its first column.
    pub col: usize,
    /// Elements that changed.
    pub elements: usize,
}

/// Runs the subject `options.repeat - 1` times more and compares with `first`.
pub(super) fn again(
    loaded: &Loaded,
    options: &Options,
    passes: &[Pass],
    first: &Ran,
    result: &mut PackageResult,
) -> Result<(), NonFinite> {
    let mut runs: Vec<Ran> = Vec::new();
    for n in 2..=options.repeat {
        match once(loaded, options, None, None, passes) {
            Ok((ran, _)) => runs.push(ran),
            Err(error) => {
                result.verdict = result.verdict.max(Verdict::Crashed);
                result.reason = Some(format!("run {n} of {}: {error}", options.repeat));
                break;
            }
        }
    }
    let order: Vec<String> = result.sites.iter().map(|site| site.site.clone()).collect();
    let repeat = compared(passes, first, &runs, &order);
    for (n, ran) in runs.iter().enumerate() {
        if !repeat.changed.iter().any(|changed| changed.runs.contains(&(n + 2))) {
            continue;
        }
        let mut other = PackageResult::blank("", String::new(), options, String::new());
        judge_sites(loaded, options, passes, ran, &mut other)?;
        let worst = other.sites.iter().map(|site| site.verdict).max().unwrap_or(Verdict::Passed);
        if worst > result.verdict {
            result.verdict = worst;
            result.reason = Some(format!("run {} of {} is worse than the first", n + 2, options.repeat));
            (result.first_failure, result.explanation) = (other.first_failure, other.explanation);
            (result.sites, result.failed_op) = (other.sites, other.failed_op);
        }
    }
    if let Some(changed) = repeat.changed.first()
        && result.verdict <= Verdict::Mistrusted
    {
        result.verdict = Verdict::Mistrusted;
        result.reason = Some(format!(
            "the subject gives other bytes from run to run, first at {}: one run does not stand for the next",
            changed.site
        ));
    }
    result.repeat = Some(repeat);
    Ok(())
}

/// Compares every tap of `first` with further runs; `order` is that of the data flow.
fn compared(passes: &[Pass], first: &Ran, runs: &[Ran], order: &[String]) -> Repeat {
    let mut repeat = Repeat { runs: runs.len() + 1, runs_changed: 0, taps: 0, changed: Vec::new() };
    for (n, (pass, taps)) in passes.iter().zip(&first.taps).enumerate() {
        for site in taps.sites() {
            let Some(value) = taps.get(site) else { continue };
            repeat.taps += 1;
            let others: Vec<Option<Tensor>> =
                runs.iter().map(|run| run.taps.get(n).and_then(|taps| taps.get(site))).collect();
            repeat.changed.extend(changes(&format!("{}.{site}", pass.name), *site, &value, &others));
        }
    }
    let place =
        |changed: &Changed| order.iter().position(|site| *site == changed.site).unwrap_or(order.len());
    repeat.changed.sort_by_key(place);
    let differs = |n: &usize| repeat.changed.iter().any(|changed| changed.runs.contains(n));
    repeat.runs_changed = (2..=runs.len() + 1).filter(differs).count();
    repeat
}

/// How the values of a tap in further runs differ from the first.
fn changes(tap: &str, site: Site, first: &Tensor, others: &[Option<Tensor>]) -> Option<Changed> {
    let (rows, columns) = rows_and_columns(site.name, first.shape());
    let values: Vec<f32> = first.iter().copied().collect();
    let mut at = vec![false; values.len()];
    let (mut runs, mut max_abs) = (Vec::new(), 0f64);
    for (n, other) in others.iter().enumerate() {
        let same_shape = other.as_ref().filter(|other| other.shape() == first.shape());
        let Some(other) = same_shape else {
            runs.push(n + 2);
            at.fill(true);
            continue;
        };
        let mut differs = false;
        for (i, (a, b)) in values.iter().zip(other.iter()).enumerate() {
            if a.to_bits() != b.to_bits() {
                (at[i], differs) = (true, true);
                let difference = (f64::from(*a) - f64::from(*b)).abs();
                max_abs = if difference.is_nan() { f64::INFINITY } else { max_abs.max(difference) };
            }
        }
        if differs {
            runs.push(n + 2);
        }
    }
    if runs.is_empty() {
        return None;
    }
    let mut tiles: BTreeMap<(usize, usize), usize> = BTreeMap::new();
    for i in (0..at.len()).filter(|&i| at[i]) {
        let (row, col) = (i / columns, i % columns);
        *tiles.entry((row / TILE.0 * TILE.0, col / TILE.1 * TILE.1)).or_default() += 1;
    }
    let start = at.iter().position(|changed| *changed).unwrap_or(0);
    Some(Changed {
        site: tap.to_string(),
        runs,
        elements: at.iter().filter(|changed| **changed).count(),
        of: rows * columns,
        max_abs,
        first: Place { row: start / columns.max(1), col: start % columns.max(1) },
        tiles: tiles.into_iter().map(|((row, col), elements)| Tile { row, col, elements }).collect(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    // 20 rows of 40: element [17, 33] lies in the tile that starts at row 16 and column 32.
    #[test]
    fn a_change_is_placed_in_its_tile() {
        let first = Tensor::from_elem(ndarray::IxDyn(&[20, 40]), 1.5);
        let mut second = first.clone();
        second[[17, 33]] = 1.25;
        let site = Site::layer(0, "q_proj");
        let found =
            changes("prefill.layers.0.q_proj", site, &first, &[Some(first.clone()), Some(second)]).unwrap();
        assert_eq!((found.runs, found.elements, found.max_abs), (vec![3], 1, 0.25));
        assert_eq!(found.first, Place { row: 17, col: 33 });
        assert_eq!(found.tiles, [Tile { row: 16, col: 32, elements: 1 }]);
        assert_eq!(changes("", site, &first, &[Some(first.clone())]), None);
    }

    // -0 equals 0 and is another byte; a tap that is gone in the second run changed as a whole.
    #[test]
    fn bytes_are_compared_and_not_values() {
        let both = |v: f32| Tensor::from_elem(ndarray::IxDyn(&[1, 2]), v);
        let (zero, minus) = (both(0.0), both(-0.0));
        assert_eq!(changes("", Site::model("embed"), &zero, &[Some(minus)]).unwrap().elements, 2);
        assert_eq!(changes("", Site::model("embed"), &zero, &[None]).unwrap().elements, 2);
    }
}
