//! What changed between two sets of dumps, as text, JSON and Markdown.

use crate::goldens::{Compared, Comparison, Survivors};
use golden::{Diff, DiffVerdict, SiteDiff};
use serde_json::json;
use std::fmt::Write;

/// How many sites and flips are listed.
const LISTED: usize = 5;

fn name(verdict: DiffVerdict) -> &'static str {
    match verdict {
        DiffVerdict::Identical => "IDENTICAL",
        DiffVerdict::Equivalent => "EQUIVALENT",
        DiffVerdict::Changed => "CHANGED",
    }
}

/// Identical taps and all taps over every pair.
fn identical(comparison: &Comparison) -> (usize, usize) {
    let sites = || comparison.pairs.iter().flat_map(|pair| &pair.diff.sites);
    (sites().filter(|site| site.verdict == DiffVerdict::Identical).count(), sites().count())
}

/// `karat/diff/1`. Two single dumps give their own fields; directories give one entry a pair.
pub fn json(comparison: &Comparison) -> String {
    let single = comparison.pairs.len() == 1 && comparison.pairs[0].dump.is_empty();
    let value = if single {
        serde_json::to_value(&comparison.pairs[0].diff)
    } else {
        let (same, all) = identical(comparison);
        Ok(json!({
            "schema": golden::DIFF_SCHEMA, "verdict": name(comparison.verdict()),
            "byte_identical": format!("{same}/{all}"), "dumps": comparison.pairs,
            "only_old": comparison.only_old, "only_new": comparison.only_new,
            "survivors": comparison.survivors, "repro": comparison.repro,
        }))
    };
    serde_json::to_string_pretty(&value.expect("names and numbers")).expect("names and numbers") + "\n"
}

/// For a terminal.
pub fn text(comparison: &Comparison) -> String {
    let (same, all) = identical(comparison);
    let dumps = comparison.pairs.len();
    let mut text =
        format!("{} · byte-identical {same} of {all} taps in {dumps} dumps\n", name(comparison.verdict()));
    for (what, names) in [("gone", &comparison.only_old), ("new", &comparison.only_new)] {
        for dump in names {
            let _ = writeln!(text, "  {what}: {dump}");
        }
    }
    for pair in comparison.pairs.iter().filter(|pair| pair.diff.verdict != DiffVerdict::Identical) {
        text.push_str(&pair_text(pair));
    }
    for line in survivors(comparison) {
        let _ = writeln!(text, "\n  unseen     {line}");
    }
    if comparison.verdict() == DiffVerdict::Changed {
        let _ = writeln!(text, "\n  again      {}", comparison.repro);
    }
    text
}

/// The mistakes that the goldens' fixtures would not notice, a line each.
fn survivors(comparison: &Comparison) -> Vec<String> {
    let line = |of: &Survivors| {
        let named = of.survived.iter().take(LISTED).cloned().collect::<Vec<_>>().join(", ");
        let more = if of.survived.len() > LISTED { ", ..." } else { "" };
        format!("{}: {} of {} mutants survive ({named}{more})", of.fixture, of.survived.len(), of.mutants)
    };
    comparison.survivors.iter().filter(|of| !of.survived.is_empty()).take(LISTED).map(line).collect()
}

/// One pair of dumps that differ.
pub fn pair_text(pair: &Compared) -> String {
    let d = &pair.diff;
    let title = if pair.dump.is_empty() { "dump" } else { &pair.dump };
    let mut text = format!("\n{title} · {} · byte-identical {}\n", name(d.verdict), d.byte_identical);
    if let Some(first) = &d.first_changed {
        let _ = writeln!(text, "  first      {}", described(d, first));
    }
    match &d.first_beyond_rounding {
        Some(first) if d.first_changed.as_ref() != Some(first) => {
            let _ = writeln!(text, "  beyond     {}", described(d, first));
        }
        _ => {}
    }
    for field in &d.metadata {
        let part = |value: &Option<String>| value.clone().unwrap_or_else(|| "nothing".into());
        let _ = writeln!(text, "  {:10} {} → {}", field.field, part(&field.old), part(&field.new));
    }
    if let Some(logits) = &d.logits {
        let _ = writeln!(
            text,
            "  logits     argmax equal at {} of {} positions, KL at most {:.1e}",
            logits.argmax_equal[0], logits.argmax_equal[1], logits.kl_max
        );
    }
    for flip in d.flips.iter().take(LISTED) {
        let _ = writeln!(text, "  flip       {}", flip_text(flip));
    }
    for site in worst(d) {
        let _ = writeln!(text, "  {}", site_text(site));
    }
    for (what, names) in [("gone", &d.only_old), ("new", &d.only_new)] {
        if let Some(first) = names.first() {
            let _ = writeln!(text, "  {what:10} {} taps, first {first}", names.len());
        }
    }
    text
}

fn flip_text(flip: &golden::Flip) -> String {
    let tie = if flip.near_tie { ", a near tie" } else { "" };
    format!(
        "{} row {}: token {} → {}, margin {:.2e}{tie}",
        flip.site, flip.row, flip.old_token, flip.new_token, flip.margin
    )
}

fn described(diff: &Diff, site: &str) -> String {
    diff.sites.iter().find(|s| s.site == site).map_or(site.to_string(), site_text)
}

fn site_text(site: &SiteDiff) -> String {
    match (&site.change, &site.note) {
        (Some(change), _) => {
            let at = change.worst.map_or(String::new(), |p| format!(" at [{}, {}]", p.row, p.col));
            let size = change.sigmas.map_or_else(
                || format!("{:.2} of the rounding limit", change.ratio),
                |sigmas| format!("{sigmas:.1} sigma"),
            );
            format!("{}: max abs {:.2e}{at}, {size}", site.site, change.max_abs)
        }
        (None, Some(note)) => format!("{}: {note}", site.site),
        (None, None) => format!("{}: identical", site.site),
    }
}

/// The sites that changed most.
fn worst(diff: &Diff) -> Vec<&SiteDiff> {
    let mut sites: Vec<&SiteDiff> =
        diff.sites.iter().filter(|s| s.verdict != DiffVerdict::Identical).collect();
    let ratio = |site: &SiteDiff| site.change.as_ref().map_or(f64::INFINITY, |change| change.ratio);
    sites.sort_by(|a, b| ratio(b).total_cmp(&ratio(a)));
    sites.truncate(LISTED);
    sites
}

/// A comment for a pull request: at most sixty lines.
pub fn markdown(comparison: &Comparison) -> String {
    let (same, all) = identical(comparison);
    let mut text = format!(
        "### Goldens: {}\n\nByte-identical: **{same} of {all}** taps in {} dumps.\n",
        name(comparison.verdict()),
        comparison.pairs.len()
    );
    for (what, names) in [("Gone", &comparison.only_old), ("New", &comparison.only_new)] {
        if !names.is_empty() {
            let _ = writeln!(text, "\n{what}: {}", names.join(", "));
        }
    }
    let changed: Vec<&Compared> =
        comparison.pairs.iter().filter(|pair| pair.diff.verdict != DiffVerdict::Identical).collect();
    if !changed.is_empty() {
        text.push_str(
            "\n| dump | verdict | first change | max abs | size | flips |\n|---|---|---|---|---|---|\n",
        );
    }
    for pair in changed.iter().take(20) {
        let d = &pair.diff;
        let first = d.first_beyond_rounding.as_ref().or(d.first_changed.as_ref());
        let site = first.and_then(|first| d.sites.iter().find(|s| s.site == *first));
        let change = site.and_then(|site| site.change.as_ref());
        let _ = writeln!(
            text,
            "| {} | {} | `{}` | {} | {} | {} |",
            pair.dump,
            name(d.verdict),
            first.map_or("", |first| first),
            change.map_or(String::new(), |c| format!("{:.1e}", c.max_abs)),
            change.map_or(String::new(), |c| match c.sigmas {
                Some(sigmas) => format!("{sigmas:.1} σ"),
                None => format!("{:.2} of the limit", c.ratio),
            }),
            d.flips.len()
        );
    }
    if changed.len() > 20 {
        let _ = writeln!(text, "\n... and {} more dumps", changed.len() - 20);
    }
    let moved = most_moved(&changed);
    if !moved.is_empty() {
        text.push_str("\nSites that moved most:\n\n");
        moved.iter().for_each(|line| text.push_str(&format!("- {line}\n")));
    }
    let flips: Vec<String> = changed.iter().flat_map(|pair| pair.diff.flips.iter().map(flip_text)).collect();
    if !flips.is_empty() {
        let _ = writeln!(text, "\nFlipped tokens ({}):\n", flips.len());
        for flip in flips.iter().take(LISTED) {
            let _ = writeln!(text, "- {flip}");
        }
    }
    let survivors = survivors(comparison);
    if !survivors.is_empty() {
        text.push_str("\nMistakes that these fixtures would not notice:\n\n");
        survivors.iter().for_each(|line| text.push_str(&format!("- {line}\n")));
    }
    let _ = writeln!(text, "\n`{}`", comparison.repro);
    text
}

/// The sites that changed most over all pairs.
fn most_moved(changed: &[&Compared]) -> Vec<String> {
    let mut sites: Vec<(&Compared, &SiteDiff)> = changed
        .iter()
        .flat_map(|pair| worst(&pair.diff).into_iter().map(move |site| (*pair, site)))
        .collect();
    let ratio = |site: &SiteDiff| site.change.as_ref().map_or(f64::INFINITY, |change| change.ratio);
    sites.sort_by(|a, b| ratio(b.1).total_cmp(&ratio(a.1)));
    let line = |(pair, site): &(&Compared, &SiteDiff)| match pair.dump.is_empty() {
        true => site_text(site),
        false => format!("{} {}", pair.dump, site_text(site)),
    };
    sites.iter().take(LISTED).map(line).collect()
}
