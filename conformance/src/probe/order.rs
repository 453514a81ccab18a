//! Orders in which the terms of a sum may be added, and what each makes of terms of very different sizes.

/// What absorbs all ones, in f32 and in narrower sums, and leaves room for sums of it.
pub(super) const MASS: f64 = 1_099_511_627_776.0;

/// An order in which terms may be added.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Order {
    /// Without any rounding.
    Exact,
    /// Left to right over tiles of so many terms that are exact inside; 1 is plain left to right.
    Tiles(usize),
    /// Left to right in each tile, then over tiles.
    Nested(usize),
    /// Term i in lane i mod n, then the lanes left to right.
    Lanes(usize),
    /// Term i in lane i mod n, then the lanes by halves.
    LaneTree(usize),
    /// The two halves, each by its halves.
    Tree,
    /// Right to left.
    Backwards,
}

/// The orders that are known, the plainest first.
pub(super) const ORDERS: [Order; 21] = [
    Order::Exact,
    Order::Tiles(1),
    Order::Tiles(2),
    Order::Tiles(4),
    Order::Tiles(8),
    Order::Tiles(16),
    Order::Tiles(32),
    Order::Nested(2),
    Order::Nested(4),
    Order::Nested(8),
    Order::Nested(16),
    Order::Nested(32),
    Order::Lanes(4),
    Order::Lanes(8),
    Order::Lanes(16),
    Order::Lanes(32),
    Order::LaneTree(4),
    Order::LaneTree(8),
    Order::LaneTree(16),
    Order::Tree,
    Order::Backwards,
];

impl Order {
    /// The sum in this order, each addition rounded to f32.
    pub(super) fn sum(self, terms: &[f64]) -> f64 {
        let left = |terms: &[f64]| terms.iter().fold(0f32, |acc, t| (f64::from(acc) + t) as f32);
        let each =
            |groups: Vec<Vec<f64>>| -> Vec<f64> { groups.iter().map(|g| f64::from(left(g))).collect() };
        let lanes = |n: usize| (0..n).map(|l| terms.iter().skip(l).step_by(n).copied().collect()).collect();
        match self {
            Order::Exact => terms.iter().sum(),
            Order::Tiles(t) => {
                f64::from(left(&terms.chunks(t).map(|tile| tile.iter().sum()).collect::<Vec<f64>>()))
            }
            Order::Nested(t) => f64::from(left(&each(terms.chunks(t).map(<[f64]>::to_vec).collect()))),
            Order::Lanes(n) => f64::from(left(&each(lanes(n)))),
            Order::LaneTree(n) => Order::Tree.sum(&each(lanes(n))),
            Order::Tree => match terms {
                [] => 0.0,
                [one] => *one,
                _ => {
                    let (a, b) = terms.split_at(terms.len() / 2);
                    f64::from((Order::Tree.sum(a) + Order::Tree.sum(b)) as f32)
                }
            },
            Order::Backwards => f64::from(left(&terms.iter().rev().copied().collect::<Vec<f64>>())),
        }
    }

    /// In words, where every term is a block of so many inputs.
    pub(super) fn words(self, block: usize) -> String {
        let inside = if block > 1 { format!("blocks of {block}, exact inside; ") } else { String::new() };
        let order = match self {
            Order::Exact => "no sum is rounded".to_string(),
            Order::Tiles(1) => "left to right".to_string(),
            Order::Tiles(t) => format!("left to right over tiles of {}, exact inside", t * block),
            Order::Nested(t) => format!("left to right in tiles of {}, then over tiles", t * block),
            Order::Lanes(n) => format!("{n} lanes, then lane by lane"),
            Order::LaneTree(n) => format!("{n} lanes, then by halves"),
            Order::Tree => "by halves".to_string(),
            Order::Backwards => "right to left".to_string(),
        };
        inside + &order
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // Sums of 64 terms written out: M first, -M last, 62 ones between; then -M right behind M.
    #[test]
    fn orders_by_hand() {
        let mut terms = vec![1.0; 64];
        (terms[0], terms[63]) = (MASS, -MASS);
        assert_eq!(Order::Exact.sum(&terms), 62.0);
        assert_eq!(Order::Tiles(1).sum(&terms), 0.0);
        // The ones of the last tile are added to -M exactly: 15 of 16.
        assert_eq!(Order::Tiles(16).sum(&terms), 15.0);
        assert_eq!(Order::Backwards.sum(&terms), 0.0);
        // M takes the ones of its half, -M those of the other.
        assert_eq!(Order::Tree.sum(&terms), 0.0);
        (terms[1], terms[63]) = (-MASS, 1.0);
        assert_eq!(Order::Tiles(1).sum(&terms), 62.0);
        assert_eq!(Order::Backwards.sum(&terms), 0.0);
        // Of four lanes M and -M take one each; the others hold 16 ones.
        assert_eq!(Order::Lanes(4).sum(&terms), 32.0);
    }
}
