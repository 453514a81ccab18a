//! Causal depthwise convolution with the rows that it remembers.

use super::GRAIN;
use rayon::prelude::*;

/// The last rows that a convolution read, in the order of their positions.
///
/// Rows fed since the last opening stay apart from the `kernel` rows before it, so that any of them can
/// be taken back.
#[derive(Clone, Debug)]
pub struct ConvState {
    channels: usize,
    kernel: usize,
    /// Position of the first row that can be taken back.
    base: usize,
    /// `[kernel + rows since base, channels]`; zeros stand for rows before the start.
    rows: Vec<f32>,
    /// Where the pass began, where that lies before `base`.
    pass_start: Option<(usize, Vec<f32>)>,
}

impl ConvState {
    /// The state before the first row.
    pub fn new(channels: usize, kernel: usize) -> Self {
        Self { channels, kernel, base: 0, rows: vec![0.0; kernel * channels], pass_start: None }
    }

    /// Position of the next row.
    pub fn position(&self) -> usize {
        self.base + self.rows.len() / self.channels - self.kernel
    }

    /// Position of the first row that can be taken back.
    pub fn base(&self) -> usize {
        self.base
    }

    /// Begins a run of rows that can be taken back; `first` in a pass.
    pub fn open(&mut self, first: bool) {
        let position = self.position();
        if first {
            self.pass_start = None;
        } else if self.pass_start.is_none() {
            self.pass_start = Some((self.base, self.rows[..self.kernel * self.channels].to_vec()));
        }
        self.rows.drain(..(position - self.base) * self.channels);
        self.base = position;
    }

    /// Feeds rows `u` `[rows, channels]` through filters `w` `[channels, kernel]`.
    ///
    /// ```text
    /// y[t, c] = Σ_{j < kernel} w[c, j] · u[t − kernel + 1 + j, c] + b[c]      left to right from 0, b last
    /// ```
    ///
    /// The last tap meets the row itself; rows before the start are 0.
    pub fn feed(&mut self, u: &[f32], w: &[f32], b: Option<&[f32]>) -> Vec<f32> {
        let (channels, kernel) = (self.channels, self.kernel);
        let first = self.rows.len() / channels;
        self.rows.extend_from_slice(u);
        // Taps as rows, so that channels lie side by side.
        let mut taps = vec![0.0; w.len()];
        for c in 0..channels {
            (0..kernel).for_each(|j| taps[j * channels + c] = w[c * kernel + j]);
        }
        let rows = &self.rows;
        let mut y = vec![0.0; u.len()];
        let one = |(t, y): (usize, &mut [f32])| {
            for j in 0..kernel {
                let u = &rows[(first + t + 1 + j - kernel) * channels..][..channels];
                let w = &taps[j * channels..][..channels];
                y.iter_mut().zip(u).zip(w).for_each(|((y, u), w)| *y += w * u);
            }
            if let Some(b) = b {
                y.iter_mut().zip(b).for_each(|(y, b)| *y += b);
            }
        };
        if u.len() < GRAIN {
            y.chunks_exact_mut(channels).enumerate().for_each(one);
        } else {
            y.par_chunks_exact_mut(channels).enumerate().for_each(one);
        }
        y
    }

    /// Takes back the rows from `position` on: a row since the last opening, the start of the pass, or all.
    pub fn truncate(&mut self, position: usize) {
        let history = self.kernel * self.channels;
        match &self.pass_start {
            _ if position >= self.base => {
                let kept = (history + (position - self.base) * self.channels).min(self.rows.len());
                self.rows.truncate(kept);
            }
            Some((start, rows)) if position == *start => {
                (self.base, self.rows) = (*start, rows.clone());
                self.pass_start = None;
            }
            _ => {
                assert_eq!(position, 0, "conv: rollback to {position} behind {}", self.base);
                *self = Self::new(self.channels, self.kernel);
            }
        }
    }

    /// The last `kernel` rows, `[channels, kernel]`.
    pub fn last(&self) -> Vec<f32> {
        let (channels, kernel) = (self.channels, self.kernel);
        let from = self.rows.len() / channels - kernel;
        let at = |c: usize, j: usize| self.rows[(from + j) * channels + c];
        (0..channels).flat_map(|c| (0..kernel).map(move |j| at(c, j))).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // One channel, taps 1 10 100 (the last meets the row): rows 1 2 3 4 give
    // 100·1; 100·2 + 10·1; 100·3 + 10·2 + 1; 100·4 + 10·3 + 2. The second channel has half the values.
    const TAPS: [f32; 6] = [1.0, 10.0, 100.0, 1.0, 10.0, 100.0];

    fn rows(values: &[f32]) -> Vec<f32> {
        values.iter().flat_map(|v| [*v, v / 2.0]).collect()
    }

    #[test]
    fn the_last_tap_meets_the_row() {
        let mut state = ConvState::new(2, 3);
        let y = state.feed(&rows(&[1.0, 2.0, 3.0, 4.0]), &TAPS, None);
        assert_eq!(y, rows(&[100.0, 210.0, 321.0, 432.0]));
        assert_eq!(state.last(), [2.0, 3.0, 4.0, 1.0, 1.5, 2.0]);
        let y = ConvState::new(1, 3).feed(&[1.0], &TAPS[..3], Some(&[0.5]));
        assert_eq!(y, [100.5]);
    }

    #[test]
    fn rows_are_taken_back() {
        let mut state = ConvState::new(2, 3);
        state.open(true);
        state.feed(&rows(&[1.0, 2.0]), &TAPS, None);
        state.open(true);
        state.feed(&rows(&[3.0, 9.0, 9.0]), &TAPS, None);
        state.truncate(3);
        assert_eq!(state.feed(&rows(&[4.0]), &TAPS, None), rows(&[432.0]));
        // Two openings in one pass: its start can be restored, and so can the beginning of time.
        state.open(false);
        state.feed(&rows(&[7.0]), &TAPS, None);
        state.truncate(2);
        assert_eq!(state.position(), 2);
        assert_eq!(state.feed(&rows(&[3.0, 4.0]), &TAPS, None), rows(&[321.0, 432.0]));
        state.truncate(0);
        assert_eq!(state.feed(&rows(&[1.0]), &TAPS, None), rows(&[100.0]));
    }
}
