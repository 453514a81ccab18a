//! The forms of a probe.

use super::infer::{Contradiction, Inferred};
use super::{Axis, MapName, Probed, axes, name, svg, text as picture};
use crate::judge::Verdict;
use serde::Serialize;
use std::fmt::Write;

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
    /// The number formats, where asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    contract: Option<ContractPart>,
    picture: String,
    /// The picture as SVG.
    pub svg: String,
}

/// What a subject declares and what it shows.
#[derive(Serialize)]
struct ContractPart {
    name: String,
    found: Inferred,
    contradictions: Vec<Contradiction>,
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
            contract: None,
            right,
            elements,
            picture: picture(probed),
            svg: svg(probed),
        }
    }

    /// Adds the number formats; one that is not as declared fails.
    pub fn with_contract(mut self, name: &str, found: Inferred, declared: &Inferred) -> Report {
        let contradictions = found.against(declared);
        if !contradictions.is_empty() {
            self.verdict = Verdict::Failed;
        }
        self.contract = Some(ContractPart { name: name.to_string(), found, contradictions });
        self
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
        if self.right != self.elements {
            text.push_str(&self.picture);
        }
        if let Some(part) = &self.contract {
            for (fact, found) in part.found.facts() {
                let declared = part.contradictions.iter().find(|c| c.fact == fact);
                let declared = declared.map_or(String::new(), |c| format!("   DECLARED {}", c.declared));
                let _ = writeln!(text, "  {fact:<12} {found}{declared}");
            }
            let _ = match part.contradictions.len() {
                0 => writeln!(text, "  as the {} contract declares", part.name),
                n => writeln!(text, "  not as the {} contract declares, in {n} of 6", part.name),
            };
        }
        text
    }
}
