//! The forms of an audit.

use super::Audit;
use comfy_table::{Table, presets};
use serde::Serialize;
use std::fmt::Write;

/// The audits of a run.
#[derive(Serialize)]
struct Report<'a> {
    schema: &'static str,
    /// PASSED where every mutant that can be made is shown by some package, else MISTRUSTED.
    verdict: &'static str,
    mutants: usize,
    killed: usize,
    equivalent: usize,
    /// Mutants that can be made and that no package shows.
    unseen: Vec<&'a str>,
    /// How often the diagnosis was asked to name a mutant, and how often it ranked the right one first.
    explained: Explained,
    kills: Vec<&'a super::Kill>,
    survivors: Vec<&'a super::Survivor>,
    equivalents: Vec<&'a super::Same>,
    /// Every op of every package by shape, format and layer: judged, blind, not supported.
    coverage: Vec<&'a super::Covered>,
    packages: Vec<Package<'a>>,
}

#[derive(Serialize)]
struct Explained {
    asked: usize,
    first: usize,
}

#[derive(Serialize)]
struct Package<'a> {
    package: &'a str,
    mutants: usize,
    killed: usize,
    equivalent: usize,
    unseen: Vec<&'a str>,
    not_applicable: &'a [super::NotApplicable],
}

/// Mutants that can be made in one of the packages and that none of them shows.
pub fn unseen(audits: &[Audit]) -> Vec<&str> {
    let mut unseen: Vec<&str> = audits.iter().flat_map(Audit::unseen).collect();
    unseen.retain(|name| audits.iter().all(|a| a.kills.iter().all(|kill| kill.mutant != *name)));
    unseen.sort_unstable();
    unseen.dedup();
    unseen
}

/// As JSON, schema `karat/audit/1`.
pub fn json(audits: &[Audit]) -> String {
    let unseen = unseen(audits);
    let report = Report {
        schema: "karat/audit/1",
        verdict: if unseen.is_empty() { "PASSED" } else { "MISTRUSTED" },
        mutants: audits.iter().map(|a| a.mutants).sum(),
        killed: audits.iter().map(|a| a.killed).sum(),
        equivalent: audits.iter().map(|a| a.equivalent).sum(),
        unseen,
        explained: Explained {
            asked: audits.iter().map(|a| a.explained().0).sum(),
            first: audits.iter().map(|a| a.explained().1).sum(),
        },
        kills: audits.iter().flat_map(|a| &a.kills).collect(),
        survivors: audits.iter().flat_map(|a| &a.survivors).collect(),
        equivalents: audits.iter().flat_map(|a| &a.equivalents).collect(),
        coverage: audits.iter().flat_map(|a| &a.coverage).collect(),
        packages: audits
            .iter()
            .map(|a| Package {
                package: &a.package,
                mutants: a.mutants,
                killed: a.killed,
                equivalent: a.equivalent,
                unseen: a.unseen(),
                not_applicable: &a.not_applicable,
            })
            .collect(),
    };
    let mut text = serde_json::to_string(&report).unwrap_or_default();
    text.push('\n');
    text
}

/// What can be seen of every op, for a terminal.
pub fn coverage(audits: &[Audit]) -> String {
    let mut table = Table::new();
    let header = ["package", "op", "shape", "format", "layers", "sight", "mutants", "shown"];
    table.load_style(presets::NOTHING).set_header(header);
    for row in audits.iter().flat_map(|audit| &audit.coverage) {
        table.add_row([
            row.package.clone(),
            row.op.to_string(),
            row.shape.clone(),
            row.format.clone(),
            row.layers_in_words(),
            row.sight.name().to_string(),
            row.mutants.to_string(),
            row.shown.to_string(),
        ]);
    }
    let lines: Vec<String> = table.to_string().lines().map(|line| line.trim_end().to_string()).collect();
    lines.join("\n") + "\n"
}

/// For a terminal.
pub fn text(audits: &[Audit]) -> String {
    let mut out = String::new();
    for audit in audits {
        let sites = |sites: &[String]| match sites {
            [one] => one.clone(),
            [first, rest @ ..] => format!("{first} and {} more", rest.len()),
            [] => String::new(),
        };
        let survived = audit.mutants - audit.killed - audit.equivalent;
        let _ = writeln!(
            out,
            "{}: {} of {} mutants at sites shown, {} equivalent, {survived} survive; {} of {} named first",
            audit.package,
            audit.killed,
            audit.mutants,
            audit.equivalent,
            audit.explained().1,
            audit.explained().0
        );
        let unseen = audit.unseen();
        for survivor in &audit.survivors {
            let mark = if unseen.contains(&&*survivor.mutant) { "unseen" } else { "partly" };
            let _ = writeln!(out, "  {mark}  {} at {}", survivor.mutant, sites(&survivor.sites));
            let _ = writeln!(out, "          {}; would show with {}", survivor.why, survivor.change);
        }
        for same in &audit.equivalents {
            let _ = writeln!(out, "  same    {} at {}: {}", same.mutant, sites(&same.sites), same.reason);
        }
    }
    let unseen = unseen(audits);
    if unseen.is_empty() {
        let _ = writeln!(out, "PASSED: every mutant that can be made here is shown");
    } else {
        let _ = writeln!(out, "MISTRUSTED: nothing here shows {}", unseen.join(", "));
    }
    out
}
