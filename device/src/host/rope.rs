//! Rotary position embeddings from a table that grows with the sequence.

use super::GRAIN;
use rayon::prelude::*;
use spec::{Pairing, Rope, Scaling};
use std::f64::consts::TAU;

/// Cosines and sines of every position used so far.
///
/// ```text
/// angle[p, i] = f32(p) · inv_freq[i]        rounded to f32, as the frameworks do
/// table[p, i] = magnitude · cos(angle), magnitude · sin(angle)
/// ```
///
/// Sources: arXiv 2104.09864 (rotation), arXiv 2309.00071 (YaRN), arXiv 2402.13753 (LongRoPE).
#[derive(Clone, Debug)]
pub struct RopeTable {
    rope: Rope,
    frequencies: Frequencies,
    magnitude: f64,
    /// `[positions, pairs]` of (cosine, sine).
    table: Vec<(f32, f32)>,
    /// The same of the frequencies for long sequences.
    far: Vec<(f32, f32)>,
}

#[derive(Clone, Debug)]
struct Frequencies {
    near: Vec<f32>,
    /// For LongRoPE: the length up to which `near` holds, and the frequencies of a longer sequence.
    far: Option<(usize, Vec<f32>)>,
}

impl RopeTable {
    /// A table that is still empty.
    pub fn new(rope: &Rope) -> Self {
        let (frequencies, magnitude) = frequencies(rope);
        Self { rope: rope.clone(), frequencies, magnitude, table: Vec::new(), far: Vec::new() }
    }

    /// A table of given cosines and sines, `[positions, pairs]` from position 0 on.
    pub fn of_turns(rope: &Rope, turns: Vec<(f32, f32)>) -> Self {
        Self { table: turns, ..Self::new(rope) }
    }

    fn pairs(&self) -> usize {
        self.rope.rotary_dim / 2
    }

    /// Computes the rows of positions below `positions` that are not there yet.
    pub fn extend(&mut self, positions: usize) {
        extend(&mut self.table, &self.frequencies.near, self.magnitude, positions);
    }

    /// The rows of positions below `positions` for a sequence of `length`.
    fn rows(&mut self, positions: usize, length: usize) -> &[(f32, f32)] {
        match &self.frequencies.far {
            Some((fits, far)) if length > *fits => {
                extend(&mut self.far, far, self.magnitude, positions);
                &self.far
            }
            _ => {
                self.extend(positions);
                &self.table
            }
        }
    }

    /// As [`RopeTable::turn_in`], the last row being the last of the sequence.
    pub fn turn(&mut self, x: &mut [f32], heads: usize, start: usize) {
        let rows = x.len() / (heads * self.rope.head_dim);
        self.turn_in(x, heads, start, start + rows);
    }

    /// Turns every head of `x` `[rows, heads, head_dim]`; row `r` stands at position `start + r` of a sequence that
    /// is `length` long when the pass is over. Only LongRoPE depends on the length: a pass that ends beyond the
    /// original context turns all its rows by the long factors.
    ///
    /// A pair `(a, b)` becomes `(a·cos − b·sin, b·cos + a·sin)`. Half-split pairs are
    /// `(i, i + pairs)`; interleaved pairs `(2i, 2i + 1)` are written back half-split.
    pub fn turn_in(&mut self, x: &mut [f32], heads: usize, start: usize, length: usize) {
        let (dim, pairs, pairing) = (self.rope.head_dim, self.pairs(), self.rope.pairing);
        if pairs == 0 {
            return;
        }
        let width = heads * dim;
        let table = self.rows(start + x.len() / width, length);
        let one = |(r, row): (usize, &mut [f32])| {
            let turns = &table[(start + r) * pairs..][..pairs];
            for head in row.chunks_exact_mut(dim) {
                match pairing {
                    Pairing::HalfSplit => half_split(head, turns),
                    Pairing::Interleaved => interleaved(head, turns),
                }
            }
        };
        if x.len() < GRAIN {
            x.chunks_exact_mut(width).enumerate().for_each(one);
        } else {
            x.par_chunks_exact_mut(width).enumerate().for_each(one);
        }
    }
}

/// Computes the rows of positions below `positions` that are not in `table` yet.
fn extend(table: &mut Vec<(f32, f32)>, frequencies: &[f32], magnitude: f64, positions: usize) {
    if frequencies.is_empty() {
        return;
    }
    for position in table.len() / frequencies.len()..positions {
        table.extend(frequencies.iter().map(|inv| {
            let (sin, cos) = libm::sincos(f64::from(position as f32 * inv));
            ((cos * magnitude) as f32, (sin * magnitude) as f32)
        }));
    }
}

fn half_split(head: &mut [f32], turns: &[(f32, f32)]) {
    let (low, high) = head.split_at_mut(turns.len());
    for ((a, b), (cos, sin)) in low.iter_mut().zip(high).zip(turns) {
        (*a, *b) = (*a * cos - *b * sin, *b * cos + *a * sin);
    }
}

fn interleaved(head: &mut [f32], turns: &[(f32, f32)]) {
    let pairs = turns.len();
    let source = head[..2 * pairs].to_vec();
    for (i, (cos, sin)) in turns.iter().enumerate() {
        let (a, b) = (source[2 * i], source[2 * i + 1]);
        head[i] = a * cos - b * sin;
        head[pairs + i] = b * cos + a * sin;
    }
}

/// Inverse frequencies, computed in f64 and rounded to f32 once, and the magnitude.
fn frequencies(rope: &Rope) -> (Frequencies, f64) {
    let pairs = rope.rotary_dim / 2;
    let width = rope.rotary_dim as f64;
    let plain: Vec<f64> = (0..pairs).map(|i| rope.theta.powf(-2.0 * i as f64 / width)).collect();
    let round = |list: Vec<f64>| list.into_iter().map(|v| v as f32).collect::<Vec<f32>>();
    let near = |list| Frequencies { near: round(list), far: None };
    match &rope.scaling {
        Scaling::Default => (near(plain), 1.0),
        Scaling::Linear { factor } => (near(plain.iter().map(|inv| inv / factor).collect()), 1.0),
        Scaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_max_position_embeddings } => {
            let original = *original_max_position_embeddings as f64;
            let blended = plain.iter().map(|&inv| {
                let wavelength = TAU / inv;
                if wavelength < original / high_freq_factor {
                    inv
                } else if wavelength > original / low_freq_factor {
                    inv / factor
                } else {
                    let kept =
                        (original / wavelength - low_freq_factor) / (high_freq_factor - low_freq_factor);
                    inv * kept + inv / factor * (1.0 - kept)
                }
            });
            (near(blended.collect()), 1.0)
        }
        Scaling::Yarn {
            factor,
            beta_fast,
            beta_slow,
            original_max_position_embeddings,
            truncate,
            magnitude,
        } => {
            // The dimension whose wave turns `turns` times within the original context.
            let dimension = |turns: f64| {
                let original = *original_max_position_embeddings as f64;
                width * (original / (turns * TAU)).ln() / (2.0 * rope.theta.ln())
            };
            let (mut low, mut high) = (dimension(*beta_fast), dimension(*beta_slow));
            if *truncate {
                (low, high) = (low.floor(), high.ceil());
            }
            (low, high) = (low.max(0.0), high.min(width - 1.0));
            if low == high {
                high += 0.001;
            }
            let blended = plain.iter().enumerate().map(|(i, &inv)| {
                let divided = ((i as f64 - low) / (high - low)).clamp(0.0, 1.0);
                inv * (1.0 - divided) + inv / factor * divided
            });
            (near(blended.collect()), *magnitude)
        }
        Scaling::LongRope { short_factor, long_factor, original_max_position_embeddings, magnitude } => {
            let divided = |by: &[f64]| round(plain.iter().zip(by).map(|(inv, f)| inv / f).collect());
            let far = (*original_max_position_embeddings, divided(long_factor));
            (Frequencies { near: divided(short_factor), far: Some(far) }, *magnitude)
        }
        Scaling::Proportional { rotating, factor } => {
            let some =
                plain.iter().enumerate().map(|(i, inv)| if i < *rotating { inv / factor } else { 0.0 });
            (near(some.collect()), 1.0)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rope(head_dim: usize, rotary_dim: usize, pairing: Pairing, scaling: Scaling) -> Rope {
        Rope { theta: 100.0, head_dim, rotary_dim, pairing, scaling }
    }

    fn close(found: &[f32], expected: &[f32]) {
        for (f, e) in found.iter().zip(expected) {
            assert!((f - e).abs() < 2e-6, "{found:?} against {expected:?}");
        }
    }

    // θ = 100, width 4: inverse frequencies 1 and 100^(-2/4) = 0.1. At position 2 the angles are 2 and 0.2:
    // cos 2 = -0.4161468, sin 2 = 0.9092974, cos 0.2 = 0.9800666, sin 0.2 = 0.1986693.
    // Half-split pairs of (1, 10, 100, 1000) are (1, 100) and (10, 1000); 5 does not turn.
    #[test]
    fn half_split_by_hand() {
        let mut table = RopeTable::new(&rope(5, 4, Pairing::HalfSplit, Scaling::Default));
        let mut x = [1.0, 10.0, 100.0, 1000.0, 5.0];
        table.turn(&mut x, 1, 2);
        close(&x.map(|v| v / 1000.0), &[-0.091_345_9, -0.188_868_6, -0.040_705_4, 0.982_053_3, 0.005]);
    }

    // The same angles; pairs (1, 10) and (100, 1000), results with the first halves in front:
    // 1·cos 2 − 10·sin 2, 100·cos .2 − 1000·sin .2, 10·cos 2 + 1·sin 2, 1000·cos .2 + 100·sin .2.
    #[test]
    fn interleaved_by_hand() {
        let mut table = RopeTable::new(&rope(4, 4, Pairing::Interleaved, Scaling::Default));
        let mut x = [1.0, 10.0, 100.0, 1000.0];
        table.turn(&mut x, 1, 2);
        close(&x.map(|v| v / 1000.0), &[-0.009_509_1, -0.100_662_6, -0.003_252_2, 0.999_933_5]);
    }

    // Llama 3, factor 8, bands 1 and 4, original 64: wavelengths below 16 are kept, above 64 divided.
    // θ = 100 and width 4 give wavelengths 6.28 (kept) and 62.8: 64 / 62.83 = 1.018592, kept
    // (1.018592 - 1) / 3 = 0.006197, so 0.1 · 0.006197 + 0.0125 · 0.993803 = 0.01304224.
    #[test]
    fn llama3_blends_between_the_bands() {
        let scaling = Scaling::Llama3 {
            factor: 8.0,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_max_position_embeddings: 64,
        };
        let (f, _) = frequencies(&rope(4, 4, Pairing::HalfSplit, scaling));
        close(&f.near, &[1.0, 0.013_042_24]);
    }

    // YaRN, width 8, θ = 100, original 64: the dimension of β is 8 · ln(64 / 2πβ) / (2 · ln 100).
    // β 4: 8 · 0.934712 / 9.210340 = 0.811882 → 0; β 1: 8 · 2.321006 / 9.210340 = 2.016001 → 3.
    // Ramp 0, 1/3, 2/3, 1 between inv and inv / 2, so inv times 1, 5/6, 2/3, 1/2.
    #[test]
    fn yarn_ramp_by_hand() {
        let yarn = |truncate| Scaling::Yarn {
            factor: 2.0,
            beta_fast: 4.0,
            beta_slow: 1.0,
            original_max_position_embeddings: 64,
            truncate,
            magnitude: 1.5,
        };
        let (f, magnitude) = frequencies(&rope(8, 8, Pairing::HalfSplit, yarn(true)));
        let inv = [1.0, 0.316_227_77, 0.1, 0.031_622_78];
        close(&f.near, &[inv[0], inv[1] * 5.0 / 6.0, inv[2] * 2.0 / 3.0, inv[3] * 0.5]);
        assert_eq!(magnitude, 1.5);
        // Without rounding the ends the ramp at dimension 1 is (1 - 0.811882) / 1.204119 = 0.156229.
        let (f, _) = frequencies(&rope(8, 8, Pairing::HalfSplit, yarn(false)));
        close(&f.near[1..2], &[inv[1] * (1.0 - 0.156_229 / 2.0)]);
    }

    // Inverse frequencies 1 and 0.1, divided by 1 and 2 up to a length of 16, by 4 and 8 beyond. The first pair of a
    // head at position 2 turns by 2 (cos -0.4161468, sin 0.9092974) or by 0.5 (cos 0.8775826, sin 0.4794255),
    // and the length decides, not the position.
    #[test]
    fn a_long_sequence_turns_all_its_rows_by_the_long_factors() {
        let scaling = Scaling::LongRope {
            short_factor: vec![1.0, 2.0],
            long_factor: vec![4.0, 8.0],
            original_max_position_embeddings: 16,
            magnitude: 1.0,
        };
        let mut table = RopeTable::new(&rope(4, 4, Pairing::HalfSplit, scaling));
        let mut first_pair = |length| {
            let mut x = [1.0, 0.0, 0.0, 0.0];
            table.turn_in(&mut x, 1, 2, length);
            [x[0], x[2]]
        };
        close(&first_pair(16), &[-0.416_146_8, 0.909_297_4]);
        close(&first_pair(17), &[0.877_582_6, 0.479_425_5]);
        close(&first_pair(16), &[-0.416_146_8, 0.909_297_4]);
    }

    #[test]
    fn proportional_pairs_span_the_head() {
        let scaling = Scaling::Proportional { rotating: 1, factor: 1.0 };
        let mut table = RopeTable::new(&rope(4, 4, Pairing::HalfSplit, scaling));
        let mut x = [1.0, 3.0, 0.0, 7.0];
        table.turn(&mut x, 1, 1);
        close(&x, &[0.540_302_3, 3.0, 0.841_471, 7.0]); // cos 1, sin 1; the second pair stays
    }

    #[test]
    fn a_table_grown_in_pieces_is_the_same() {
        let rope = rope(6, 6, Pairing::HalfSplit, Scaling::Linear { factor: 3.0 });
        let (mut whole, mut pieces) = (RopeTable::new(&rope), RopeTable::new(&rope));
        whole.extend(9);
        (1..=9).for_each(|n| pieces.extend(n));
        assert_eq!(whole.table, pieces.table);
    }
}
