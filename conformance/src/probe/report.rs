//! The forms of a probe.

use super::{Axis, MapName, Probed, axes, name, svg, text as picture};
use crate::judge::Verdict;
use serde::Serialize;

/// What a probe found.
#[derive(Serialize)]
pub struct Report {
    schema: &'static str,
    /// PASSED where every element is used once, in its place.
    pub verdict: Verdict,
    subject: String,
    op: &'static str,
    /// Inputs and outputs.
    shape: [usize; 2],
    map: MapName,
    /// Loop nests along outputs and inputs, the outermost first.
    #[serde(skip_serializing_if = "Option::is_none")]
    descriptor: Option<(Vec<Axis>, Vec<Axis>)>,
    /// Elements in their place.
    right: usize,
    /// All elements.
    elements: usize,
    picture: String,
    svg: String,
}

impl Report {
    /// The report of a probed subject.
    pub fn new(subject: String, probed: &Probed) -> Report {
        let (right, elements) = (probed.right(), probed.used.len());
        Report {
            schema: "karat/probe/1",
            verdict: if right == elements { Verdict::Passed } else { Verdict::Failed },
            subject,
            op: "linear",
            shape: [probed.inner, probed.out],
            map: name(probed),
            descriptor: axes(probed),
            right,
            elements,
            picture: picture(probed),
            svg: svg(probed),
        }
    }

    /// The exit code.
    pub fn code(&self) -> u8 {
        u8::from(self.verdict != Verdict::Passed)
    }

    /// As JSON, schema `karat/probe/1`.
    pub fn json(&self) -> String {
        let mut text = serde_json::to_string(self).unwrap_or_default();
        text.push('\n');
        text
    }

    /// For a terminal.
    pub fn text(&self) -> String {
        let [inner, out] = self.shape;
        let detail =
            if self.map.detail.is_empty() { String::new() } else { format!("; {}", self.map.detail) };
        let mut text = format!(
            "{}: linear {inner}x{out} on {}: {}{detail}\n  {} of {} elements used once, in their place\n",
            self.verdict.name(),
            self.subject,
            self.map.name,
            self.right,
            self.elements
        );
        if self.verdict != Verdict::Passed {
            text.push_str(&self.picture);
        }
        text
    }
}
