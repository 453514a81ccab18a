//! One figure: interleaved pairs of timings, their ratio, and the goal that it is held against.

use crate::ab::median;
use serde::Serialize;

/// The fewest pairs that a figure is made of.
pub const PAIRS: usize = 5;

/// What a ratio should be.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Goal {
    /// This or more.
    AtLeast(f64),
    /// This or less.
    AtMost(f64),
}

impl Goal {
    /// Whether a ratio keeps it; NaN keeps none.
    pub fn is_kept_by(self, ratio: f64) -> bool {
        match self {
            Goal::AtLeast(least) => ratio >= least,
            Goal::AtMost(most) => ratio <= most,
        }
    }
}

impl std::fmt::Display for Goal {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Goal::AtLeast(least) => write!(f, ">= {least}"),
            Goal::AtMost(most) => write!(f, "<= {most}"),
        }
    }
}

/// What a figure says.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "SCREAMING_SNAKE_CASE")]
pub enum Verdict {
    /// The stretch goal is kept as well.
    Stretch,
    /// The goal is kept.
    Met,
    /// Nothing was measured, or not often enough; `reason` says why.
    NotMeasured,
    /// The goal is missed, or the two arms did not do the same work.
    Missed,
}

/// What a figure is: its name, its ratio in words, and its goals.
#[derive(Clone, Copy, Debug)]
pub struct Spec {
    /// The name: `S1`, or `S1@16` for a second one of the same kind.
    pub id: &'static str,
    /// What is divided by what.
    pub what: &'static str,
    /// What `--check` asks for.
    pub goal: Goal,
    /// What would be better still.
    pub stretch: Option<Goal>,
}

/// Smallest, middle and largest ratio of the pairs.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[allow(missing_docs)]
pub struct Ratio {
    pub min: f64,
    pub median: f64,
    pub max: f64,
}

/// A figure, measured or not.
#[derive(Clone, Debug, Serialize)]
pub struct Figure {
    /// See [`Spec::id`].
    pub id: &'static str,
    /// See [`Spec::what`].
    pub what: &'static str,
    /// See [`Spec::goal`].
    pub goal: Goal,
    /// See [`Spec::stretch`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stretch: Option<Goal>,
    /// How many pairs were timed.
    pub pairs: usize,
    /// Over the pairs; absent where there are none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ratio: Option<Ratio>,
    /// By the median.
    pub verdict: Verdict,
    /// Rates of both sides, for a reader.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rates: Option<String>,
    /// Why it was not measured, or what else is wrong.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
}

/// Seconds of the two arms of one pair; the ratio is `over / under`.
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs)]
pub struct Pair {
    pub over: f64,
    pub under: f64,
}

/// What timing a figure gave.
#[derive(Clone, Debug)]
pub struct Timed {
    /// All pairs, in order.
    pub pairs: Vec<Pair>,
    /// Why the pairs prove nothing: the arms gave different results.
    pub fault: Option<String>,
}

impl Timed {
    /// Median seconds of the arm above the line, and of the one below.
    pub fn medians(&self) -> (f64, f64) {
        let of = |f: fn(&Pair) -> f64| median(&self.pairs.iter().map(f).collect::<Vec<_>>());
        (of(|pair| pair.over), of(|pair| pair.under))
    }
}

impl Spec {
    /// The figure that these timings make. Ratios are taken pair by pair, so that a change of the machine's
    /// speed between pairs drops out.
    pub fn judge(&self, timed: &Timed) -> Figure {
        let ratios: Vec<f64> = timed.pairs.iter().map(|pair| pair.over / pair.under).collect();
        let bound = |pick: fn(f64, f64) -> f64| ratios.iter().copied().reduce(pick);
        let ratio = bound(f64::min).zip(bound(f64::max)).map(|(min, max)| Ratio {
            min,
            median: median(&ratios),
            max,
        });
        let (mut verdict, mut reason) = match ratio {
            Some(_) if timed.pairs.len() < PAIRS => {
                (Verdict::NotMeasured, Some(format!("{} pairs instead of {PAIRS}", timed.pairs.len())))
            }
            None => (Verdict::NotMeasured, Some("no pair was timed".to_string())),
            Some(ratio) if self.stretch.is_some_and(|goal| goal.is_kept_by(ratio.median)) => {
                (Verdict::Stretch, None)
            }
            Some(ratio) if self.goal.is_kept_by(ratio.median) => (Verdict::Met, None),
            Some(_) => (Verdict::Missed, None),
        };
        if let Some(fault) = &timed.fault {
            (verdict, reason) = (Verdict::Missed, Some(fault.clone()));
        }
        Figure { pairs: timed.pairs.len(), ratio, verdict, reason, ..self.not_measured("") }
    }

    /// The figure where there was nothing to measure.
    pub fn not_measured(&self, reason: impl Into<String>) -> Figure {
        Figure {
            id: self.id,
            what: self.what,
            goal: self.goal,
            stretch: self.stretch,
            pairs: 0,
            ratio: None,
            verdict: Verdict::NotMeasured,
            rates: None,
            reason: Some(reason.into()),
        }
    }
}

/// Times two arms as interleaved pairs: A B, B A, A B, ...; one pair before them warms up and does not count.
pub fn interleaved<E>(
    pairs: usize,
    mut over: impl FnMut() -> Result<f64, E>,
    mut under: impl FnMut() -> Result<f64, E>,
) -> Result<Timed, E> {
    over()?;
    under()?;
    let mut pair = |n: usize| {
        if n.is_multiple_of(2) {
            let over = over()?;
            Ok(Pair { over, under: under()? })
        } else {
            let under = under()?;
            Ok(Pair { over: over()?, under })
        }
    };
    Ok(Timed { pairs: (0..pairs).map(&mut pair).collect::<Result<_, E>>()?, fault: None })
}

/// Seconds that `run` takes.
pub fn seconds<T>(run: impl FnOnce() -> T) -> f64 {
    let start = std::time::Instant::now();
    std::hint::black_box(run());
    start.elapsed().as_secs_f64()
}

#[cfg(test)]
mod tests {
    use super::*;

    const SPEED: Spec = Spec {
        id: "X1",
        what: "peer over ours",
        goal: Goal::AtLeast(1.5),
        stretch: Some(Goal::AtLeast(2.0)),
    };

    fn timed(pairs: &[(f64, f64)]) -> Timed {
        let pairs = pairs.iter().map(|&(over, under)| Pair { over, under }).collect();
        Timed { pairs, fault: None }
    }

    // Ratios 1, 1, 1.6, 9, 9: the middle one counts, not the mean.
    #[test]
    fn the_median_is_judged() {
        let pairs = [(1.0, 1.0), (9.0, 1.0), (1.6, 1.0), (2.0, 2.0), (9.0, 1.0)];
        let figure = SPEED.judge(&timed(&pairs));
        assert_eq!(figure.ratio, Some(Ratio { min: 1.0, median: 1.6, max: 9.0 }));
        assert_eq!(figure.verdict, Verdict::Met);
        assert_eq!(SPEED.judge(&timed(&[(2.0, 1.0); 5])).verdict, Verdict::Stretch);
        assert_eq!(SPEED.judge(&timed(&[(1.49, 1.0); 5])).verdict, Verdict::Missed);
    }

    // The machine halves its speed after the second pair: every pair still says 1.6.
    #[test]
    fn a_machine_that_slows_down_drops_out() {
        let figure = SPEED.judge(&timed(&[(1.6, 1.0), (1.6, 1.0), (3.2, 2.0), (3.2, 2.0), (3.2, 2.0)]));
        let ratio = figure.ratio.unwrap();
        assert_eq!((ratio.min, ratio.max), (1.6, 1.6));
    }

    #[test]
    fn an_upper_goal_is_missed_from_above() {
        let spec = Spec { goal: Goal::AtMost(8.0), stretch: Some(Goal::AtMost(6.0)), ..SPEED };
        assert_eq!(spec.judge(&timed(&[(8.1, 1.0); 5])).verdict, Verdict::Missed);
        assert_eq!(spec.judge(&timed(&[(7.0, 1.0); 5])).verdict, Verdict::Met);
        assert_eq!(spec.judge(&timed(&[(5.0, 1.0); 5])).verdict, Verdict::Stretch);
    }

    #[test]
    fn what_proves_nothing_is_not_met() {
        assert_eq!(SPEED.judge(&timed(&[(9.0, 1.0); 4])).verdict, Verdict::NotMeasured);
        assert_eq!(SPEED.judge(&timed(&[])).verdict, Verdict::NotMeasured);
        assert_eq!(SPEED.judge(&timed(&[(0.0, 0.0); 5])).verdict, Verdict::Missed, "0/0 keeps no goal");
        let faulty = Timed { fault: Some("hashes differ".into()), ..timed(&[(9.0, 1.0); 5]) };
        assert_eq!(SPEED.judge(&faulty).verdict, Verdict::Missed);
    }

    #[test]
    fn arms_take_turns() {
        let order = std::cell::RefCell::new(String::new());
        let arm = |letter: char| {
            let order = &order;
            move || {
                order.borrow_mut().push(letter);
                Ok::<_, ()>(1.0)
            }
        };
        let timed = interleaved(3, arm('a'), arm('b')).unwrap();
        assert_eq!(timed.pairs.len(), 3);
        assert_eq!(*order.borrow(), "ababbaab");
    }
}
