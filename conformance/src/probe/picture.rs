//! A map as a small picture: outputs downwards, inputs to the right, one mark a block.

use super::{Probed, Used};
use std::fmt::Write;

/// Most marks across and down.
const ACROSS: usize = 48;
const DOWN: usize = 24;

/// What is wrong in a block, the worst first.
#[derive(Clone, Copy, PartialEq)]
enum Mark {
    Dead,
    Repeated,
    Elsewhere,
    Right,
}

/// Marks row after row, and how many outputs and inputs a mark stands for.
fn marks(probed: &Probed) -> (Vec<Vec<Mark>>, usize, usize) {
    let (high, wide) = (probed.out.div_ceil(DOWN), probed.inner.div_ceil(ACROSS));
    let mark = |o: usize, i: usize| match probed.at(o, i) {
        Used::Element(place) if place == o * probed.inner + i => Mark::Right,
        Used::Element(_) => Mark::Elsewhere,
        Used::Dead | Used::Unreadable => Mark::Dead,
        Used::Repeated(..) | Used::Several(_) => Mark::Repeated,
    };
    let block = |row: usize, column: usize| {
        let outputs = row * high..((row + 1) * high).min(probed.out);
        let inputs = column * wide..((column + 1) * wide).min(probed.inner);
        let all: Vec<Mark> =
            outputs.flat_map(|o| inputs.clone().map(move |i| (o, i))).map(|(o, i)| mark(o, i)).collect();
        [Mark::Dead, Mark::Repeated, Mark::Elsewhere]
            .into_iter()
            .find(|m| all.contains(m))
            .unwrap_or(Mark::Right)
    };
    let rows = 0..probed.out.div_ceil(high);
    let columns = probed.inner.div_ceil(wide);
    (rows.map(|row| (0..columns).map(|column| block(row, column)).collect()).collect(), high, wide)
}

/// In characters: `.` right, `x` another element, `0` dead, `2` more than one.
pub fn text(probed: &Probed) -> String {
    let (rows, high, wide) = marks(probed);
    let mut out = format!(
        "one mark is {high} outputs by {wide} inputs; . right, x another element, 0 dead, 2 more than one\n"
    );
    for row in rows {
        let line: String = row
            .into_iter()
            .map(|mark| match mark {
                Mark::Right => '.',
                Mark::Elsewhere => 'x',
                Mark::Dead => '0',
                Mark::Repeated => '2',
            })
            .collect();
        let _ = writeln!(out, "  {line}");
    }
    out
}

/// As SVG, one square a mark.
pub fn svg(probed: &Probed) -> String {
    let (rows, high, wide) = marks(probed);
    let (width, height) = (rows.first().map_or(0, Vec::len) * 8, rows.len() * 8);
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" width=\"{width}\" height=\"{height}\">\
         <title>one square is {high} outputs by {wide} inputs</title>"
    );
    for (y, row) in rows.iter().enumerate() {
        for (x, mark) in row.iter().enumerate() {
            let colour = match mark {
                Mark::Right => "#d7e3d4",
                Mark::Elsewhere => "#d9822b",
                Mark::Dead => "#222222",
                Mark::Repeated => "#7b4fa3",
            };
            let _ = write!(
                out,
                "<rect x=\"{}\" y=\"{}\" width=\"7\" height=\"7\" fill=\"{colour}\"/>",
                x * 8,
                y * 8
            );
        }
    }
    out.push_str("</svg>");
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn marks_by_hand() {
        let used = vec![Used::Element(0), Used::Element(2), Used::Dead, Used::Repeated(3, 2)];
        let probed = Probed { inner: 2, out: 2, used };
        assert!(text(&probed).ends_with("\n  .x\n  02\n"));
        assert_eq!(svg(&probed).matches("<rect").count(), 4);
    }
}
