//! What a report of `verify` says beside its results: sites of a mutant, known failures, an extracted case.

use super::text;
use crate::judge::Verdict;
use crate::known;
use crate::verify::PackageResult;
use serde::Serialize;
use std::fmt::Write;

/// What stands beside the results.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Beside {
    /// A mutant's sites, one result each.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mutation: Option<Mutation>,
    /// What became of the known failures.
    #[serde(rename = "known_failures", skip_serializing_if = "Option::is_none")]
    pub known: Option<known::Outcome>,
    /// Where a failing op was written, or that none was.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub extracted: Option<String>,
}

/// A mutant that was applied at one site at a time.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Mutation {
    /// `id` or `id:variant`.
    pub mutant: String,
    /// Sites at which it turns the verdict red.
    pub killed: usize,
    /// Sites at which it does not.
    pub survived: usize,
    /// Each of them.
    pub sites: Vec<MutatedSite>,
}

/// A site that a mutant was applied at.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct MutatedSite {
    /// The package.
    pub package: String,
    /// Where the mutant was applied, without the pass.
    pub site: String,
    /// FAILED, or what else came of it.
    pub verdict: Verdict,
    /// The first wrong tap.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub first_failure: Option<String>,
    /// Whether the diagnosis, which is not told, names the mutant or one with the same values there.
    pub named: bool,
}

impl Mutation {
    /// Sums up the results of a mutant.
    pub fn new(mutant: String, results: &[PackageResult]) -> Mutation {
        let site = |result: &PackageResult| {
            Some(MutatedSite {
                package: result.package.clone(),
                site: result.mutated.clone()?,
                verdict: result.verdict,
                first_failure: result.first_failure.as_ref().map(|first| first.site.clone()),
                named: result.explanation.as_ref().is_some_and(|e| e.names(&mutant)),
            })
        };
        let sites: Vec<MutatedSite> = results.iter().filter_map(site).collect();
        let killed = results.iter().filter(|r| r.mutated.is_some() && r.exit_code() == 1).count();
        Mutation { survived: sites.len() - killed, mutant, killed, sites }
    }

    fn text(&self) -> String {
        let mut text = format!("{}: shown at {} of {} sites\n", self.mutant, self.killed, self.sites.len());
        for site in &self.sites {
            let first = site.first_failure.as_ref().map_or(String::new(), |first| format!(" first {first}"));
            let named = if site.named { ", named" } else { "" };
            let verdict = site.verdict.name();
            let _ = writeln!(text, "  {verdict:<12} {} {}{first}{named}", site.package, site.site);
        }
        text
    }
}

impl Beside {
    /// For a terminal: the results, in short where a mutant was tried at many sites, and what stands beside.
    pub fn text(&self, results: &[PackageResult], cost: bool) -> String {
        let many = self.mutation.as_ref().filter(|mutation| mutation.sites.len() > 1);
        let mut report = match many {
            Some(mutation) => mutation.text(),
            None => text::verify(results, cost),
        };
        report.push_str(&self.lines());
        report
    }

    /// For a comment under a pull request.
    pub fn markdown(&self) -> String {
        let lines = self.lines();
        if lines.is_empty() { lines } else { format!("\n```text\n{lines}```\n") }
    }

    fn lines(&self) -> String {
        let mut lines = self.known.as_ref().map_or(String::new(), known::Outcome::text);
        if let Some(extracted) = &self.extracted {
            let _ = writeln!(lines, "extracted: {extracted}");
        }
        lines
    }
}
