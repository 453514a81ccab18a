//! Names for the map from what should be used to what is.

use super::{Probed, Used};
use serde::Serialize;

/// What a map is called.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct MapName {
    /// Its name; "irregular" where none fits.
    pub name: String,
    /// What else there is to say: dead or doubled elements, strides.
    pub detail: String,
    /// Share of the used elements that the name explains.
    pub share: f64,
}

/// A level of a loop nest over one axis: `size` steps of `stride` elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Axis {
    /// Steps.
    pub size: usize,
    /// Elements from one step to the next.
    pub stride: i64,
}

/// A known map: the place that output o uses for input i.
type Map = fn(usize, usize, usize, usize) -> usize;

/// `(name, map(o, i, out, in))`; places beyond the weight count as wrong.
const KNOWN: &[(&str, Map)] = &[
    ("identity", |o, i, _, k| o * k + i),
    ("transposed", |o, i, n, k| if n == k { i * k + o } else { usize::MAX }),
    ("[out, in] read as [in, out]", |o, i, n, _| i * n + o),
    ("off by one row, the next", |o, i, n, k| (o + 1) % n * k + i),
    ("off by one row, the one before", |o, i, n, k| (o + n - 1) % n * k + i),
    ("row o starts at o", |o, i, n, k| (o + i) % (n * k)),
    ("rows at a stride of out", |o, i, n, _| o * n + i),
    ("nibbles exchanged: inputs in pairs", |o, i, _, k| o * k + (i ^ 1)),
    ("outputs exchanged in pairs", |o, i, _, k| (o ^ 1) * k + i),
    ("lanes exchanged: inputs in fours", |o, i, _, k| o * k + (i ^ 2)),
    ("halves of 8 inputs exchanged", |o, i, _, k| o * k + (i ^ 4)),
    ("halves of 32 inputs exchanged", |o, i, _, k| o * k + (i ^ 16)),
    ("pairs read as halves of 32", |o, i, _, k| o * k + i / 32 * 32 + (i % 32 % 2) * 16 + i % 32 / 2),
    ("halves of 32 read as pairs", |o, i, _, k| o * k + i / 32 * 32 + i % 16 * 2 + i % 32 / 16),
    ("inputs reversed in groups of 8", |o, i, _, k| o * k + i / 8 * 8 + 7 - i % 8),
    ("inputs reversed", |o, i, _, k| o * k + k - 1 - i),
    ("outputs reversed in tiles of 16", |o, i, _, k| (o / 16 * 16 + 15 - o % 16) * k + i),
    ("micro-tiles of 4x4 transposed", |o, i, _, k| (o / 4 * 4 + i % 4) * k + i / 4 * 4 + o % 4),
    ("micro-tiles of 8x8 transposed", |o, i, _, k| (o / 8 * 8 + i % 8) * k + i / 8 * 8 + o % 8),
    ("tiles of 16x16 transposed", |o, i, _, k| (o / 16 * 16 + i % 16) * k + i / 16 * 16 + o % 16),
    ("order of tiles of 16x16", |o, i, n, k| tile_order(o, i, n, k, 16)),
    ("order of tiles of 32x32", |o, i, n, k| tile_order(o, i, n, k, 32)),
];

/// Tile (a, b) written at `a · across + b` and read at `b · down + a`.
fn tile_order(o: usize, i: usize, n: usize, k: usize, t: usize) -> usize {
    let (down, across) = (n / t, k / t);
    if down * t != n || across * t != k {
        return usize::MAX;
    }
    let tile = i / t * down + o / t;
    (tile / across * t + o % t) * k + tile % across * t + i % t
}

/// The place that was used, where one element was.
fn place(used: Used) -> Option<usize> {
    match used {
        Used::Element(place) | Used::Repeated(place, _) => Some(place),
        _ => None,
    }
}

/// Names the map.
pub fn name(probed: &Probed) -> MapName {
    let (n, k) = (probed.out, probed.inner);
    let alive: Vec<(usize, usize, usize)> =
        (0..n * k).filter_map(|at| place(probed.used[at]).map(|place| (at / k, at % k, place))).collect();
    let share = |map: Map| {
        let right = alive.iter().filter(|(o, i, place)| map(*o, *i, n, k) == *place).count();
        right as f64 / alive.len().max(1) as f64
    };
    let scored = KNOWN.iter().map(|(name, map)| (*name, share(*map)));
    // Of equally good names the first: the simplest stands first.
    let best = scored.fold(("irregular", 0.0), |best, next| if next.1 > best.1 { next } else { best });
    let losses = losses(probed);
    let strides = strides(probed);
    let (name, detail) = match best {
        _ if alive.is_empty() => ("nothing is used".to_string(), losses.clone()),
        (name, 1.0) if losses.is_empty() => {
            (name.to_string(), if name == "identity" { String::new() } else { strides })
        }
        (name, 1.0) => {
            let dead = probed.used.contains(&Used::Dead);
            (format!("{name} with {} elements", if dead { "dead" } else { "repeated" }), losses.clone())
        }
        (name, share) if share >= 0.9 => (format!("mostly {name}"), wrong_places(probed)),
        _ => ("irregular".to_string(), if losses.is_empty() { strides } else { losses.clone() }),
    };
    MapName { name, detail, share: if alive.is_empty() { 0.0 } else { best.1 } }
}

/// The loop nests along the outputs and along the inputs, as a descriptor of a transfer would have them.
pub fn axes(probed: &Probed) -> Option<(Vec<Axis>, Vec<Axis>)> {
    let along = |count: usize, at: &dyn Fn(usize) -> Used| {
        let places =
            (0..count).map(|n| place(at(n)).map(|place| place as i64)).collect::<Option<Vec<i64>>>()?;
        nest(&places)
    };
    Some((along(probed.out, &|o| probed.at(o, 0))?, along(probed.inner, &|i| probed.at(0, i))?))
}

/// A sequence of places as nested steps, the outermost first; nothing where it takes more than three levels.
fn nest(places: &[i64]) -> Option<Vec<Axis>> {
    fn levels(places: &[i64], left: usize) -> Option<Vec<Axis>> {
        if places.len() == 1 {
            return Some(vec![]);
        }
        let stride = places[1] - places[0];
        if places.windows(2).all(|w| w[1] - w[0] == stride) {
            return Some(vec![Axis { size: places.len(), stride }]);
        }
        if left == 0 {
            return None;
        }
        (2..places.len()).filter(|size| places.len().is_multiple_of(*size)).find_map(|size| {
            let inner = &places[..size];
            let alike = |chunk: &[i64]| chunk.iter().zip(inner).all(|(a, b)| a - chunk[0] == b - inner[0]);
            if !places.chunks(size).all(alike) {
                return None;
            }
            let firsts: Vec<i64> = places.iter().step_by(size).copied().collect();
            let mut all = levels(&firsts, left - 1)?;
            all.extend(levels(inner, left - 1)?);
            Some(all)
        })
    }
    levels(places, 2)
}

/// The strides of the transfer, and which of them is wrong.
fn strides(probed: &Probed) -> String {
    let Some((outputs, inputs)) = axes(probed) else { return String::new() };
    let show = |axes: &[Axis]| {
        let parts: Vec<String> = axes.iter().map(|a| format!("{} by {}", a.size, a.stride)).collect();
        if parts.is_empty() { "1".to_string() } else { parts.join(", ") }
    };
    let right =
        |axes: &[Axis], stride: usize| axes.is_empty() || axes.len() == 1 && axes[0].stride == stride as i64;
    let wrong = match (right(&outputs, probed.inner), right(&inputs, 1)) {
        (true, true) => return String::new(),
        (false, true) => format!("outputs should step by {}", probed.inner),
        (true, false) => "inputs should step by 1".to_string(),
        (false, false) => format!("outputs should step by {}, inputs by 1", probed.inner),
    };
    format!("outputs step {}; inputs step {}; {wrong}", show(&outputs), show(&inputs))
}

/// Which inputs or outputs are dead or used several times.
fn losses(probed: &Probed) -> String {
    let mut parts = Vec::new();
    let mut kinds: Vec<Used> = Vec::new();
    for used in &probed.used {
        let kind = match used {
            Used::Element(_) => continue,
            Used::Repeated(_, count) => Used::Repeated(0, *count),
            other => *other,
        };
        if !kinds.contains(&kind) {
            kinds.push(kind);
        }
    }
    for kind in kinds {
        let is = |used: Used| match (kind, used) {
            (Used::Repeated(_, a), Used::Repeated(_, b)) => a == b,
            (kind, used) => kind == used,
        };
        let what = match kind {
            Used::Dead => "are dead".to_string(),
            Used::Repeated(_, count) => format!("count {count} times"),
            Used::Several(count) => format!("mix {count} elements"),
            _ => "give no whole number of elements".to_string(),
        };
        parts.push(format!("{} {what}", where_(probed, is)));
    }
    parts.join("; ")
}

/// Where the map is not the identity.
fn wrong_places(probed: &Probed) -> String {
    let k = probed.inner;
    let wrong: Vec<usize> = (0..probed.used.len()).filter(|n| probed.used[*n] != Used::Element(*n)).collect();
    match wrong.first() {
        Some(first) => format!(
            "{} of {} wrong, first output {} input {}",
            wrong.len(),
            probed.used.len(),
            first / k,
            first % k
        ),
        None => String::new(),
    }
}

/// The places of a kind in words: whole inputs, whole outputs, or a count.
fn where_(probed: &Probed, is: impl Fn(Used) -> bool) -> String {
    let (n, k) = (probed.out, probed.inner);
    let count = probed.used.iter().filter(|used| is(**used)).count();
    let inputs: Vec<usize> = (0..k).filter(|&i| (0..n).all(|o| is(probed.at(o, i)))).collect();
    let outputs: Vec<usize> = (0..n).filter(|&o| (0..k).all(|i| is(probed.at(o, i)))).collect();
    if inputs.len() * n == count {
        range("inputs", &inputs)
    } else if outputs.len() * k == count {
        range("outputs", &outputs)
    } else {
        format!("{count} of {} elements", n * k)
    }
}

fn range(name: &str, all: &[usize]) -> String {
    match all {
        [one] => format!("{} {one}", &name[..name.len() - 1]),
        [first, .., last] if last - first + 1 == all.len() => format!("{name} {first} to {last}"),
        [first, ..] => format!("{} {name}, first {first},", all.len()),
        [] => name.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mapped(out: usize, inner: usize, map: impl Fn(usize, usize) -> usize) -> Probed {
        let used = (0..out * inner).map(|n| Used::Element(map(n / inner, n % inner))).collect();
        Probed { inner, out, used }
    }

    // Each name is recognised on 64 outputs of 96 inputs, by a map written out here once more.
    #[test]
    fn tiles_nibbles_and_rows() {
        let named = |map: &dyn Fn(usize, usize) -> usize| name(&mapped(64, 96, map)).name;
        assert_eq!(named(&|o, i| o * 96 + i), "identity");
        assert_eq!(
            named(&|o, i| o * 96 + if i % 2 == 0 { i + 1 } else { i - 1 }),
            "nibbles exchanged: inputs in pairs"
        );
        assert_eq!(named(&|o, i| ((o + 1) % 64) * 96 + i), "off by one row, the next");
        let micro = |o: usize, i: usize| ((o & !7) + (i & 7)) * 96 + (i & !7) + (o & 7);
        assert_eq!(named(&micro), "micro-tiles of 8x8 transposed");
    }

    // A transfer of 2 tiles of 3 inputs, the second 30 places behind the first: sizes 2 and 3, strides 30 and 1.
    #[test]
    fn a_descriptor_is_read_back() {
        let nest = nest(&[0, 1, 2, 30, 31, 32]).unwrap();
        assert_eq!(nest, [Axis { size: 2, stride: 30 }, Axis { size: 3, stride: 1 }]);
        let probed = mapped(4, 6, |o, i| o * 7 + i);
        assert_eq!(strides(&probed), "outputs step 4 by 7; inputs step 6 by 1; outputs should step by 6");
    }
}
