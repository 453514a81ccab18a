//! From differences to a verdict: z statistics per tensor, row, column and tile, and their limits.
//!
//! Every limit comes from one number, the chance that a clean subject fails a run
//! ([`FALSE_ALARM`]), divided by the number of tests in the run.

use crate::variance::Expected;
use serde::Serialize;

/// The chance that a clean subject fails a whole run.
pub const FALSE_ALARM: f64 = 1e-3;

/// Rows and columns of a tile.
pub const TILE: (usize, usize) = (16, 32);

/// What was found, from best to worst.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "SCREAMING_SNAKE_CASE")]
pub enum Verdict {
    /// Within every limit.
    Passed,
    /// Not compared, and why.
    Skipped,
    /// A token flipped where the reference's margin is within the declared error.
    NearTie,
    /// Uniformly more or less precise than declared, no hard bound broken.
    Drift,
    /// The subject cannot run it.
    NotSupported,
    /// The fixture could not have failed.
    Mistrusted,
    /// Wrong.
    Failed,
    /// The subject stopped.
    Crashed,
    /// The reference or its golden is at fault.
    Broken,
}

impl Verdict {
    /// The name in reports.
    pub fn name(self) -> &'static str {
        match self {
            Verdict::Passed => "PASSED",
            Verdict::Skipped => "SKIPPED",
            Verdict::NearTie => "NEAR_TIE",
            Verdict::Drift => "DRIFT",
            Verdict::NotSupported => "NOT_SUPPORTED",
            Verdict::Mistrusted => "MISTRUSTED",
            Verdict::Failed => "FAILED",
            Verdict::Crashed => "CRASHED",
            Verdict::Broken => "BROKEN",
        }
    }
}

/// How many statistical tests a run makes: elements, and groups of elements.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Budget {
    /// Elements judged in the run.
    pub elements: usize,
    /// Tensors, rows, columns and tiles judged in the run.
    pub groups: usize,
}

impl Budget {
    /// Standard deviations that the largest of all elements keeps with a chance of 1 - α/3.
    ///
    /// `2 · (1 - Φ(z)) · elements = FALSE_ALARM / 3`
    pub fn z_max(&self) -> f64 {
        upper_quantile(FALSE_ALARM / 3.0 / (2.0 * self.elements.max(1) as f64))
    }

    /// The quantile for one of the groups' tests, two-sided, in each of two families.
    fn z_group(&self) -> f64 {
        upper_quantile(FALSE_ALARM / 3.0 / (2.0 * self.groups.max(1) as f64))
    }

    /// The limits of a group of elements.
    pub fn group_limits(&self) -> GroupLimits {
        GroupLimits { z: self.z_group() }
    }

    /// Where the limits come from, for the report.
    pub fn derivation(&self) -> String {
        format!(
            "a clean subject fails the run with probability <= {FALSE_ALARM}: {} elements, {} rows, columns and \
             tiles; largest |z| {:.2}; rms z of n elements 1.1·(1 - 2/9n + {:.2}·√(2/9n))^1.5; |mean z| \
             0.05 + {:.2}/√n",
            self.elements,
            self.groups,
            self.z_max(),
            self.z_group(),
            self.z_group()
        )
    }
}

/// Limits of a row, a column, a tile or a whole tensor, by its number of elements.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GroupLimits {
    z: f64,
}

impl GroupLimits {
    /// The quantile that the limits are made from.
    pub fn z(&self) -> f64 {
        self.z
    }

    /// Largest rms z of `n` elements: a tenth for the model, times the quantile of a mean of squares
    /// (Wilson and Hilferty's cube of a normal).
    pub fn rms_max(&self, n: usize) -> f64 {
        let k = 2.0 / (9.0 * n.max(1) as f64);
        1.1 * (1.0 - k + self.z * k.sqrt()).max(1.0).powf(1.5)
    }

    /// Smallest rms z of `n` elements of a calibrated product.
    pub fn rms_min(&self, n: usize) -> f64 {
        let k = 2.0 / (9.0 * n.max(1) as f64);
        0.9 * (1.0 - k - self.z * k.sqrt()).max(0.0).powf(1.5)
    }

    /// Largest |mean z| of `n` elements.
    pub fn bias_max(&self, n: usize) -> f64 {
        0.05 + self.z / (n.max(1) as f64).sqrt()
    }
}

/// `z` with `1 - Φ(z) = tail`, by bisection on the complementary error function.
pub fn upper_quantile(tail: f64) -> f64 {
    let (mut lo, mut hi) = (0.0, 40.0);
    for _ in 0..80 {
        let mid = (lo + hi) / 2.0;
        if 0.5 * libm::erfc(mid / std::f64::consts::SQRT_2) > tail { lo = mid } else { hi = mid }
    }
    hi
}

/// One site of one pass, judged.
#[derive(Clone, Debug, Serialize)]
pub struct SiteResult {
    /// `prefill.layers.0.q_proj`
    pub site: String,
    /// The verdict.
    pub verdict: Verdict,
    /// How many elements.
    pub elements: usize,
    /// How many of them an honest subject may round: the spread is taken over these, and over any other
    /// that differs.
    pub inexact: usize,
    /// How many of them are beyond their own limit.
    pub wrong: usize,
    /// Largest |z|.
    pub z_max: f64,
    /// Root mean square of z.
    pub z_rms: f64,
    /// Mean of z.
    pub z_bias: f64,
    /// Largest |subject - R|.
    pub max_abs: f64,
    /// Root mean square of subject - R.
    pub rms_abs: f64,
    /// The element with the largest |z|.
    pub worst: Place,
    /// The first wrong element in storage order.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub first_wrong: Option<Mismatch>,
    /// In words: what of the tensor is wrong.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pattern: Option<String>,
    /// How many z lie in each of 25 bins of half a unit around -6, -5.5, ..., 6; the outermost hold all
    /// beyond. For pictures.
    #[serde(skip)]
    pub histogram: Vec<u32>,
    /// Where the error sits, kept of sites that did not pass. For pictures.
    #[serde(skip)]
    pub heat: Option<Heat>,
}

/// Largest |z| over cells of a site.
#[derive(Clone, Debug, PartialEq)]
pub struct Heat {
    /// Cells down.
    pub rows: usize,
    /// Cells across.
    pub cols: usize,
    /// Elements that a cell is high.
    pub row_step: usize,
    /// Elements that a cell is wide.
    pub col_step: usize,
    /// Row after row.
    pub values: Vec<f32>,
}

/// Most cells along an axis of a heat map.
const CELLS: usize = 64;

impl Heat {
    fn of(z: &[f64], rows: usize, columns: usize) -> Heat {
        let (row_step, col_step) = (rows.div_ceil(CELLS).max(1), columns.div_ceil(CELLS).max(1));
        let (down, across) = (rows.div_ceil(row_step), columns.div_ceil(col_step));
        let mut values = vec![0f32; down * across];
        for (n, z) in z.iter().enumerate() {
            let cell = &mut values[n / columns / row_step * across + n % columns / col_step];
            *cell = cell.max(z.abs() as f32);
        }
        Heat { rows: down, cols: across, row_step, col_step, values }
    }
}

/// A place in a site's flattened axes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Place {
    /// Row: the token, or head · tokens + token for probabilities.
    pub row: usize,
    /// Column: everything behind it.
    pub col: usize,
}

/// A wrong element.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Mismatch {
    /// Row.
    pub row: usize,
    /// Column.
    pub col: usize,
    /// The reference's value.
    pub expected: f64,
    /// The subject's value.
    pub found: f64,
}

/// Rows and columns of a site: its axes as [tokens, rest]; scores and probabilities as
/// [heads · tokens, keys].
pub fn rows_and_columns(site: &str, shape: &[usize]) -> (usize, usize) {
    let all: usize = shape.iter().product();
    let columns = if site.ends_with("attn_probs") || site.ends_with("attn_scores") {
        shape.last().copied().unwrap_or(1)
    } else {
        all.checked_div(shape.first().copied().unwrap_or(1)).unwrap_or(0)
    };
    (all.checked_div(columns).unwrap_or(0), columns)
}

/// Sums over a group of elements, from which its rms and mean follow.
#[derive(Clone, Copy, Default)]
struct Group {
    n: usize,
    z: f64,
    z2: f64,
}

impl Group {
    fn add(&mut self, z: f64) {
        self.n += 1;
        self.z += z;
        self.z2 += z * z;
    }

    fn rms(&self) -> f64 {
        (self.z2 / self.n.max(1) as f64).sqrt()
    }

    fn mean(&self) -> f64 {
        self.z / self.n.max(1) as f64
    }
}

/// Standard score of one element. Equal values score 0; a difference without variance is infinite;
/// so is a pattern of non-finite values that differs.
fn score(subject: f32, r: f64, variance: f64) -> f64 {
    let subject_value = f64::from(subject);
    if subject_value == r || subject == r as f32 && variance == 0.0 {
        return 0.0;
    }
    if !subject.is_finite() || !r.is_finite() {
        let same = subject.is_nan() && r.is_nan();
        return if same { 0.0 } else { f64::INFINITY };
    }
    if variance == 0.0 {
        f64::INFINITY.copysign(subject_value - r)
    } else {
        (subject_value - r) / variance.sqrt()
    }
}

/// Compares a subject's values with what an honest subject gives.
pub fn judge(
    site: &str,
    shape: &[usize],
    subject: &[f32],
    expected: &Expected,
    budget: &Budget,
) -> SiteResult {
    let (rows, columns) = rows_and_columns(site, shape);
    let elements = subject.len();
    let (r, v, b) = (flat(&expected.r), flat(&expected.variance), flat(&expected.bound));
    let mut pooled = Group::default();
    let (mut by_row, mut by_column) = (vec![Group::default(); rows], vec![Group::default(); columns]);
    let tiles_across = columns.div_ceil(TILE.1);
    let mut by_tile = vec![Group::default(); rows.div_ceil(TILE.0) * tiles_across];
    let z_limit = budget.z_max();
    let mut result = SiteResult {
        site: site.to_string(),
        verdict: Verdict::Passed,
        elements,
        inexact: 0,
        wrong: 0,
        z_max: 0.0,
        z_rms: 0.0,
        z_bias: 0.0,
        max_abs: 0.0,
        rms_abs: 0.0,
        worst: Place { row: 0, col: 0 },
        first_wrong: None,
        pattern: None,
        histogram: vec![0; 25],
        heat: None,
    };
    let mut scores = Vec::with_capacity(elements);
    let mut wrong_at = Vec::new();
    for n in 0..elements {
        let z = score(subject[n], r[n], v[n]);
        let (row, col) = (n / columns, n % columns);
        scores.push(z);
        if z.abs() > result.z_max {
            result.z_max = z.abs();
            result.worst = Place { row, col };
        }
        let difference = (f64::from(subject[n]) - r[n]).abs();
        let difference = if z == 0.0 { 0.0 } else { difference };
        result.rms_abs += difference * difference;
        if difference > result.max_abs || difference.is_nan() {
            result.max_abs = difference;
        }
        // Written so that a score or a limit that is not a number counts as beyond.
        let within = z.abs() <= z_limit && difference <= b[n] * 1.000_001;
        if !within {
            result.wrong += 1;
            wrong_at.push(n);
            result.first_wrong.get_or_insert(Mismatch {
                row,
                col,
                expected: r[n],
                found: f64::from(subject[n]),
            });
        }
        // An element that must be exact, and is, says nothing about the spread of the others.
        if v[n] > 0.0 || z != 0.0 {
            pooled.add(z);
            result.histogram[((2.0 * z).round().clamp(-12.0, 12.0) + 12.0) as usize] += 1;
            by_row[row].add(z);
            by_column[col].add(z);
            by_tile[row / TILE.0 * tiles_across + col / TILE.1].add(z);
        }
    }
    result.rms_abs = (result.rms_abs / elements.max(1) as f64).sqrt();
    (result.inexact, result.z_rms, result.z_bias) = (pooled.n, pooled.rms(), pooled.mean());
    if result.wrong > 0 {
        result.verdict = Verdict::Failed;
        result.pattern = Some(pattern(&wrong_at, rows, columns));
    } else if pooled.n > 0 {
        judge_spread(&mut result, expected.calibrated, budget, pooled, [&by_row, &by_column, &by_tile]);
    }
    if result.verdict != Verdict::Passed && columns > 0 {
        result.heat = Some(Heat::of(&scores, rows, columns));
    }
    result
}

/// The rms and the mean of the whole tensor and of its rows, columns and tiles.
fn judge_spread(
    result: &mut SiteResult,
    calibrated: bool,
    budget: &Budget,
    pooled: Group,
    groups: [&Vec<Group>; 3],
) {
    let limits = budget.group_limits();
    let off = |g: &Group| {
        g.n > 0 && (g.rms() > limits.rms_max(g.n) || calibrated && g.mean().abs() > limits.bias_max(g.n))
    };
    let names = ["row", "column", "tile"];
    let bad: Vec<(&str, usize, usize)> = groups
        .iter()
        .zip(names)
        .map(|(groups, name)| (name, groups.iter().filter(|g| off(g)).count(), groups.len()))
        .collect();
    let first_bad = groups.iter().zip(names).find_map(|(groups, name)| {
        groups.iter().position(off).map(|i| (name, i, groups[i].rms(), groups[i].mean()))
    });
    let pooled_off = off(&pooled);
    if !pooled_off && first_bad.is_none() {
        if calibrated && pooled.rms() < limits.rms_min(pooled.n) {
            result.verdict = Verdict::Drift;
            result.pattern = Some(format!("more precise than declared: rms z {:.3}", pooled.rms()));
        }
        return;
    }
    // Uniform: every row is about as far off as the whole, so it is the format and not one channel.
    let uniform = pooled_off && bad.iter().all(|(_, bad, all)| *bad == 0 || *bad * 2 > *all);
    result.verdict = if uniform { Verdict::Drift } else { Verdict::Failed };
    result.pattern = Some(match first_bad {
        _ if uniform => {
            format!(
                "less precise than declared, everywhere: rms z {:.2}, mean z {:.2}",
                pooled.rms(),
                pooled.mean()
            )
        }
        Some((name, i, rms, mean)) => {
            format!("{name} {i} alone spreads too far: rms z {rms:.2}, mean z {mean:.2}")
        }
        None => format!("spreads too far as a whole: rms z {:.2}, mean z {:.2}", pooled.rms(), pooled.mean()),
    });
    if result.verdict == Verdict::Failed {
        result.first_wrong = None;
    }
}

impl SiteResult {
    /// A value that has not the shape of its site: nothing of it can be compared.
    pub fn misshapen(site: &str, found: &[usize], expected: &[usize]) -> SiteResult {
        let none = Expected {
            r: ndarray::ArrayD::zeros(ndarray::IxDyn(&[0])),
            variance: ndarray::ArrayD::zeros(ndarray::IxDyn(&[0])),
            bound: ndarray::ArrayD::zeros(ndarray::IxDyn(&[0])),
            calibrated: false,
        };
        let mut result = judge(site, &[0], &[], &none, &Budget { elements: 1, groups: 1 });
        result.verdict = Verdict::Failed;
        result.elements = expected.iter().product();
        result.wrong = result.elements.max(1);
        result.z_max = f64::INFINITY;
        result.pattern = Some(format!("shape {found:?}, expected {expected:?}"));
        result
    }

    /// Counts rows from the start of the pass, where only those from `first` on were shown.
    pub fn shift_rows(&mut self, first: usize) {
        if first > 0 {
            self.worst.row += first;
            if let Some(wrong) = &mut self.first_wrong {
                wrong.row += first;
            }
            if let Some(pattern) = &mut self.pattern {
                *pattern = format!("of the rows from {first} on: {pattern}");
            }
        }
    }

    /// Whether a DRIFT is towards less precision, which fails a run.
    pub fn less_precise(&self) -> bool {
        self.verdict == Verdict::Drift && self.z_rms > 1.0
    }
}

fn flat(x: &ndarray::ArrayD<f64>) -> Vec<f64> {
    x.iter().copied().collect()
}

/// Which rows and columns the wrong elements fill, in words.
fn pattern(wrong: &[usize], rows: usize, columns: usize) -> String {
    let mut row_hits = vec![0usize; rows];
    let mut column_hits = vec![0usize; columns];
    for &n in wrong {
        row_hits[n / columns] += 1;
        column_hits[n % columns] += 1;
    }
    let hit =
        |hits: &[usize]| hits.iter().enumerate().filter(|(_, h)| **h > 0).map(|(i, _)| i).collect::<Vec<_>>();
    let (r, c) = (hit(&row_hits), hit(&column_hits));
    let describe = |name: &str, hit: &[usize], all: usize| match hit {
        _ if hit.len() == all => format!("every {name}"),
        [one] => format!("{name} {one} alone, of {all}"),
        [first, .., last] if last - first + 1 == hit.len() => format!("{name}s {first} to {last}, of {all}"),
        _ => {
            let step = hit[1] - hit[0];
            let even = step > 1 && hit.windows(2).all(|w| w[1] - w[0] == step);
            if even {
                format!("every {step}. {name} from {}", hit[0])
            } else {
                format!("{} of {all} {name}s, first {}", hit.len(), hit[0])
            }
        }
    };
    format!("{} · {}", describe("row", &r, rows), describe("column", &c, columns))
}

#[cfg(test)]
mod tests {
    use super::*;
    use ndarray::{ArrayD, IxDyn};

    fn expected(shape: &[usize], r: f64, variance: f64) -> Expected {
        let filled = |v| ArrayD::from_elem(IxDyn(shape), v);
        Expected { r: filled(r), variance: filled(variance), bound: filled(100.0), calibrated: true }
    }

    const BUDGET: Budget = Budget { elements: 1000, groups: 100 };

    // 1 - Φ(1.959964) = 0.025, 1 - Φ(3.090232) = 0.001.
    #[test]
    fn quantiles_of_the_normal() {
        assert!((upper_quantile(0.025) - 1.959_964).abs() < 1e-6);
        assert!((upper_quantile(0.001) - 3.090_232).abs() < 1e-6);
    }

    #[test]
    fn without_variance_only_equal_passes() {
        let e = expected(&[1, 2], 0.5, 0.0);
        assert_eq!(judge("out", &[1, 2], &[0.5, 0.5], &e, &BUDGET).verdict, Verdict::Passed);
        let wrong = judge("out", &[1, 2], &[0.5, 0.500_001], &e, &BUDGET);
        assert_eq!(wrong.verdict, Verdict::Failed);
        assert_eq!(wrong.z_max, f64::INFINITY);
        assert_eq!(wrong.first_wrong.map(|m| (m.row, m.col)), Some((0, 1)));
    }

    #[test]
    fn nan_fails_and_is_placed() {
        let result = judge("out", &[2, 2], &[0.0, 0.0, f32::NAN, 0.0], &expected(&[2, 2], 0.0, 1.0), &BUDGET);
        assert_eq!((result.verdict, result.wrong), (Verdict::Failed, 1));
        assert_eq!(result.pattern.as_deref(), Some("row 1 alone, of 2 · column 0 alone, of 2"));
    }

    /// ±1 on a chequered board of 64 columns: every row and column has mean 0 and rms 1.
    fn checkered(n: usize) -> f32 {
        if (n / 64 + n % 64).is_multiple_of(2) { 1.0 } else { -1.0 }
    }

    // Column 3 of 64 is three standard deviations off in every row: the pooled rms is only 1.06.
    #[test]
    fn one_bad_column_does_not_drown() {
        let (rows, columns) = (64, 64);
        let value = |n: usize| {
            if n % columns == 3 { 3.0 * checkered(n) } else { checkered(n) }
        };
        let subject: Vec<f32> = (0..rows * columns).map(value).collect();
        let result = judge("out", &[rows, columns], &subject, &expected(&[rows, columns], 0.0, 1.0), &BUDGET);
        assert_eq!(result.verdict, Verdict::Failed);
        assert!(result.pattern.unwrap().starts_with("column 3 alone"), "{}", result.z_rms);
        assert!(result.z_rms < 1.1);
    }

    #[test]
    fn twice_as_rough_everywhere_is_drift() {
        let subject: Vec<f32> = (0..4096).map(|n| 2.0 * checkered(n)).collect();
        let result = judge("out", &[64, 64], &subject, &expected(&[64, 64], 0.0, 1.0), &BUDGET);
        assert_eq!(result.verdict, Verdict::Drift);
        assert!(result.less_precise());
        let subject: Vec<f32> = subject.iter().map(|v| v / 20.0).collect();
        let result = judge("out", &[64, 64], &subject, &expected(&[64, 64], 0.0, 1.0), &BUDGET);
        assert_eq!((result.verdict, result.less_precise()), (Verdict::Drift, false));
    }

    #[test]
    fn a_shifted_mean_is_seen_below_the_rms() {
        let subject: Vec<f32> = (0..4096).map(|n| checkered(n) + 0.2).collect();
        let result = judge("out", &[64, 64], &subject, &expected(&[64, 64], 0.0, 1.0), &BUDGET);
        assert_eq!(result.verdict, Verdict::Drift);
        assert!(result.pattern.unwrap().contains("mean z 0.20"));
    }
}
