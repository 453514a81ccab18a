//! What is counted, and what is divided by what.

/// One pass: one draft block and one verification.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pass {
    /// Position of the anchor.
    pub anchor: usize,
    /// Proposals that were checked: `n`, fewer than `block - 1` near the end.
    pub proposed: usize,
    /// Length of the matching prefix: `a`. The bonus is not in it, and neither end nor stop token
    /// shortens it.
    pub accepted: usize,
    /// Tokens that the pass adds to the text: `e`.
    pub emitted: usize,
    /// Whether the target's own token behind the accepted ones is among the emitted.
    pub bonus: bool,
}

/// Sums over passes, integers first.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    /// Passes.
    pub passes: usize,
    /// `Σ n`
    pub proposed: usize,
    /// `Σ a`
    pub accepted: usize,
    /// `Σ e`
    pub emitted: usize,
    /// Tokens of the text: in a walk `1 + Σ e` for every prompt.
    pub generated: usize,
    /// `a` of every pass.
    pub accepted_each: Vec<usize>,
    /// Passes whose first proposal was the target's token.
    pub first_hits: usize,
    /// Passes with a first proposal.
    pub first_proposals: usize,
    /// Passes by `a`, from 0 to `block - 1`.
    pub histogram: Vec<usize>,
    /// Those of them whose block was cut short by the end.
    pub histogram_cut: Vec<usize>,
    /// `[j - 1]`: passes with `n >= j`.
    pub reached: Vec<usize>,
    /// `[j - 1]`: passes with `a >= j`.
    pub kept: Vec<usize>,
}

/// Quotients of a [`Tally`]; nothing where the divisor is 0.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Ratios {
    /// `accepted / passes`
    pub accepted_per_pass: Option<f64>,
    /// `emitted / passes`
    pub tokens_per_pass: Option<f64>,
    /// `accepted / proposed`
    pub acceptance_rate: Option<f64>,
    /// `first_hits / first_proposals`
    pub first_hit_rate: Option<f64>,
    /// `1 + accepted / passes`: as vLLM and llama.cpp count, too many where the last pass is cut.
    pub one_plus_accepted: Option<f64>,
    /// `generated / passes`: as SGLang counts, the prefill's token included.
    pub generated_per_pass: Option<f64>,
}

impl Tally {
    /// Counts passes of blocks of `block`, of a text of `generated` tokens.
    pub fn of(passes: &[Pass], block: usize, generated: usize) -> Tally {
        let mut tally = Tally {
            generated,
            histogram: vec![0; block],
            histogram_cut: vec![0; block],
            reached: vec![0; block - 1],
            kept: vec![0; block - 1],
            ..Tally::default()
        };
        for pass in passes {
            tally.passes += 1;
            tally.proposed += pass.proposed;
            tally.accepted += pass.accepted;
            tally.emitted += pass.emitted;
            tally.accepted_each.push(pass.accepted);
            tally.first_proposals += usize::from(pass.proposed >= 1);
            tally.first_hits += usize::from(pass.accepted >= 1);
            tally.histogram[pass.accepted] += 1;
            tally.histogram_cut[pass.accepted] += usize::from(pass.proposed < block - 1);
            tally.reached[..pass.proposed].iter_mut().for_each(|count| *count += 1);
            tally.kept[..pass.accepted].iter_mut().for_each(|count| *count += 1);
        }
        tally
    }

    /// Adds the counts of another prompt.
    pub fn add(&mut self, other: &Tally) {
        fn grow(mine: &mut Vec<usize>, other: &[usize]) {
            mine.resize(mine.len().max(other.len()), 0);
            mine.iter_mut().zip(other).for_each(|(mine, other)| *mine += other);
        }
        self.passes += other.passes;
        self.proposed += other.proposed;
        self.accepted += other.accepted;
        self.emitted += other.emitted;
        self.generated += other.generated;
        self.accepted_each.extend(&other.accepted_each);
        self.first_hits += other.first_hits;
        self.first_proposals += other.first_proposals;
        grow(&mut self.histogram, &other.histogram);
        grow(&mut self.histogram_cut, &other.histogram_cut);
        grow(&mut self.reached, &other.reached);
        grow(&mut self.kept, &other.kept);
    }

    /// The quotients of these counts.
    pub fn ratios(&self) -> Ratios {
        let over = |a: usize, b: usize| (b > 0).then(|| a as f64 / b as f64);
        let accepted_per_pass = over(self.accepted, self.passes);
        Ratios {
            accepted_per_pass,
            tokens_per_pass: over(self.emitted, self.passes),
            acceptance_rate: over(self.accepted, self.proposed),
            first_hit_rate: over(self.first_hits, self.first_proposals),
            one_plus_accepted: accepted_per_pass.map(|accepted| 1.0 + accepted),
            generated_per_pass: over(self.generated, self.passes),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A full pass that accepts everything, one that accepts nothing, and a last one of two proposals of
    /// which both are right, so that the bonus falls behind the end. Block of 4.
    fn passes() -> [Pass; 3] {
        [
            Pass { anchor: 9, proposed: 3, accepted: 3, emitted: 4, bonus: true },
            Pass { anchor: 13, proposed: 3, accepted: 0, emitted: 1, bonus: true },
            Pass { anchor: 14, proposed: 2, accepted: 2, emitted: 2, bonus: false },
        ]
    }

    // 3 + 0 + 2 = 5 of 8 proposals; 4 + 1 + 2 = 7 tokens emitted, 8 generated.
    #[test]
    fn three_passes_by_hand() {
        let tally = Tally::of(&passes(), 4, 8);
        assert_eq!((tally.passes, tally.proposed, tally.accepted, tally.emitted), (3, 8, 5, 7));
        assert_eq!(tally.accepted_each, [3, 0, 2]);
        assert_eq!((tally.first_hits, tally.first_proposals), (2, 3));
        assert_eq!(tally.histogram, [1, 0, 1, 1]);
        assert_eq!(tally.histogram_cut, [0, 0, 1, 0]);
        assert_eq!((&tally.reached[..], &tally.kept[..]), (&[3, 3, 2][..], &[2, 2, 1][..]));
        let ratios = tally.ratios();
        assert_eq!(ratios.accepted_per_pass, Some(5.0 / 3.0));
        assert_eq!(ratios.tokens_per_pass, Some(7.0 / 3.0));
        assert_eq!(ratios.one_plus_accepted, Some(1.0 + 5.0 / 3.0), "counts the bonus that fell off");
        assert_eq!(ratios.generated_per_pass, Some(8.0 / 3.0), "counts the prefill's token");
        assert_eq!(ratios.acceptance_rate, Some(5.0 / 8.0));
    }

    #[test]
    fn a_total_is_the_sum_and_nothing_is_divided_by_nothing() {
        let mut total = Tally::of(&passes()[..1], 4, 5);
        total.add(&Tally::of(&passes()[1..], 4, 4));
        assert_eq!(total, Tally { generated: 9, ..Tally::of(&passes(), 4, 8) });
        assert_eq!(Tally::of(&[], 4, 1).ratios(), Ratios::default());
    }
}
