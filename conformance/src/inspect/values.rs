//! The span of a tensor's values.

use rayon::prelude::*;
use spec::Rows;

/// Smallest and largest finite value, and how many are not finite.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Span {
    /// The smallest finite value; infinity where there is none.
    pub min: f32,
    /// The largest finite value; minus infinity where there is none.
    pub max: f32,
    /// Values that are NaN or infinite.
    pub non_finite: usize,
}

impl Span {
    const NOTHING: Span = Span { min: f32::INFINITY, max: f32::NEG_INFINITY, non_finite: 0 };

    fn with(self, values: &[f32]) -> Span {
        values.iter().fold(self, |span, &v| match v.is_finite() {
            true => Span { min: span.min.min(v), max: span.max.max(v), ..span },
            false => Span { non_finite: span.non_finite + 1, ..span },
        })
    }

    fn and(self, other: Span) -> Span {
        Span {
            min: self.min.min(other.min),
            max: self.max.max(other.max),
            non_finite: self.non_finite + other.non_finite,
        }
    }

    /// Whether there is a finite value at all.
    pub fn is_finite(&self) -> bool {
        self.min <= self.max
    }
}

/// Decodes every row once, some of them at a time.
pub fn span(rows: &dyn Rows) -> Span {
    let inner = rows.inner();
    // Enough values a task that starting it costs little.
    let at_least = (1 << 16) / inner.max(1) + 1;
    let row = |buffer: &mut Vec<f32>, r| {
        rows.decode(r, buffer);
        Span::NOTHING.with(buffer)
    };
    (0..rows.rows())
        .into_par_iter()
        .with_min_len(at_least)
        .map_init(|| vec![0.0; inner], row)
        .reduce(|| Span::NOTHING, Span::and)
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Values(Vec<Vec<f32>>);

    impl Rows for Values {
        fn rows(&self) -> usize {
            self.0.len()
        }

        fn inner(&self) -> usize {
            self.0[0].len()
        }

        fn decode(&self, row: usize, into: &mut [f32]) {
            into.copy_from_slice(&self.0[row]);
        }

        fn format(&self) -> &str {
            "F32"
        }

        fn row_bytes(&self) -> usize {
            8
        }
    }

    #[test]
    fn the_ends_of_the_finite_values() {
        let rows = Values(vec![vec![1.0, f32::NAN], vec![-3.0, 2.0], vec![f32::INFINITY, 0.0]]);
        assert_eq!(span(&rows), Span { min: -3.0, max: 2.0, non_finite: 2 });
        assert!(!span(&Values(vec![vec![f32::NAN]])).is_finite());
    }
}
