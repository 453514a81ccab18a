//! Text for a terminal.

use crate::cost::CostPerToken;
use crate::judge::{SiteResult, Verdict};
use crate::verify::PackageResult;
use comfy_table::{CellAlignment, Table, presets};
use std::fmt::Write;

/// How many sites a table shows.
const WORST: usize = 5;

/// How many taps that change between runs are listed.
const CHANGES: usize = 4;

/// How many spans of sites a report shows.
const SPANS: usize = 4;

/// The report of `verify`: a paragraph and a table of the worst sites a package, then the verdict.
pub fn verify(results: &[PackageResult], cost: bool) -> String {
    let mut text = String::new();
    for result in results {
        package(&mut text, result, cost).expect("a string takes all writes");
        text.push('\n');
    }
    let worst = results.iter().map(|result| result.verdict).max().unwrap_or(Verdict::Skipped);
    let passed = results.iter().filter(|result| result.exit_code() == 0).count();
    let packages = if results.len() == 1 { "package" } else { "packages" };
    writeln!(text, "{}: {passed} of {} {packages} conformant", painted(worst), results.len())
        .expect("a string takes all writes");
    text
}

fn package(text: &mut String, result: &PackageResult, cost: bool) -> std::fmt::Result {
    let prompt = result.prompt.map_or(String::new(), |n| format!(" prompt {n}"));
    writeln!(text, "{}{prompt} · {} · {}", result.package, result.subject, painted(result.verdict))?;
    if let Some(reason) = &result.reason {
        writeln!(text, "  {reason}")?;
    }
    reference(text, result)?;
    if let Some(logits) = &result.logits {
        let (equal, all) = logits.argmax_equal;
        let ties =
            if logits.near_ties > 0 { format!(", {} near ties", logits.near_ties) } else { String::new() };
        writeln!(
            text,
            "  logits     {} · argmax equal at {equal} of {all} positions{ties} · KL at most {:.1e}",
            painted(logits.verdict),
            logits.kl_max
        )?;
        if let Some(swap) = logits.swaps.first() {
            writeln!(
                text,
                "  experts    {} swapped within rounding, and followed; first {}: {swap}",
                logits.swaps.len(),
                swap.site
            )?;
        }
        for flip in logits.flips.iter().filter(|flip| !flip.near_tie).take(3) {
            writeln!(
                text,
                "             {} row {}: token {} instead of {}, margin {:.4} is {:.1} sigma",
                flip.pass, flip.row, flip.found, flip.expected, flip.margin, flip.sigmas
            )?;
        }
    }
    if let Some(walked) = &result.draft {
        writeln!(text, "  draft      {} · {}", painted(walked.verdict), walked.summary())?;
    }
    beside(text, result)?;
    if result.sites.is_empty() {
        return writeln!(text, "  again      {}", result.repro);
    }
    let bad = result.sites.iter().filter(|site| site.verdict != Verdict::Passed).count();
    let exposed = match result.not_exposed.len() {
        0 => String::new(),
        n => format!(" · {n} sites not exposed: {}", names(&result.not_exposed)),
    };
    writeln!(
        text,
        "  sites      {} of {} taps within the {} contract{exposed}",
        result.sites.len() - bad,
        result.sites.len(),
        result.contract
    )?;
    if let Some(first) = &result.first_failure {
        write!(text, "  first      {}", first.site)?;
        if let Some(element) = &first.element {
            write!(
                text,
                " [row {}, col {}]: expected {}, found {}",
                element.row, element.col, element.expected as f32, element.found as f32
            )?;
        }
        writeln!(text)?;
        if let Some(pattern) = &first.pattern {
            writeln!(text, "  where      {pattern}")?;
        }
    }
    if let Some(explanation) = &result.explanation {
        match (&explanation.named, &explanation.next_best) {
            (Some(named), next) => {
                let next = next
                    .as_ref()
                    .map_or(String::new(), |n| format!("; next best {} at {}", n.mutant, rms(n.z_rms)));
                writeln!(
                    text,
                    "  computes   {} ({}): reproduces it with rms z {:.3}{next}",
                    named.formula, named.mutant, named.z_rms
                )?;
            }
            (None, Some(next)) => writeln!(
                text,
                "  computes   no mutant explains it; nearest {} with rms z {:.1}",
                next.mutant, next.z_rms
            )?,
            (None, None) => {}
        }
    }
    if let Some(as_if) = &result.as_if {
        writeln!(
            text,
            "  as if      {} ({}): reproduces it with rms z {:.3}",
            as_if.says, as_if.edit, as_if.z_rms
        )?;
    }
    measured(text, result)?;
    if result.verdict >= Verdict::Drift {
        writeln!(text, "  again      {}", result.repro)?;
    }
    writeln!(text, "{}", indented(&worst_sites(result)))?;
    if let (true, Some(counted)) = (cost, &result.cost) {
        costs(text, counted)?;
    }
    Ok(())
}

/// What a token costs, as a whole and by layer.
fn costs(text: &mut String, cost: &CostPerToken) -> std::fmt::Result {
    writeln!(
        text,
        "  cost       a token decodes {} bytes of weights, streams {} bytes of images in {} launches",
        cost.dequantised_bytes_per_token, cost.streamed_bytes_per_token, cost.launches_per_token
    )?;
    let Some(detail) = &cost.detail else { return Ok(()) };
    if let Some(predicted) = &detail.predicted {
        writeln!(
            text,
            "  predicted  {}: {:.3} ms a token in launches, {:.3} of it waiting for them to begin; decoding all \
             weights again would add {:.3} ms",
            predicted.device, predicted.ms_per_token, predicted.launch_ms, predicted.reread_ms
        )?;
    }
    let mut table = Table::new();
    table.load_style(presets::NOTHING);
    let mut header = vec!["layer", "decoded B", "streamed B", "launches", "device ms", "host ms"];
    header.extend(detail.predicted.as_ref().map(|_| "predicted ms"));
    table.set_header(header);
    for layer in &detail.layers {
        let name = layer.layer.map_or("outside".to_string(), |n| n.to_string());
        let counts = [layer.dequantised_bytes, layer.streamed_bytes, layer.launches].map(|n| n.to_string());
        let times = [layer.device_ms, layer.host_ms].map(|ms| format!("{ms:.3}"));
        let predicted = detail.predicted.as_ref().map(|predicted| {
            let of = predicted.layers.iter().find(|of| of.layer == layer.layer);
            format!("{:.3}", of.map_or(0.0, |of| of.ms))
        });
        table.add_row([name].into_iter().chain(counts).chain(times).chain(predicted));
    }
    writeln!(text, "{}", indented(&table.to_string()))
}

/// What further runs, another subject and the layers' own errors say.
fn measured(text: &mut String, result: &PackageResult) -> std::fmt::Result {
    if let Some(repeat) = &result.repeat {
        writeln!(
            text,
            "  repeat     {} of {} taps change between {} runs",
            repeat.changed.len(),
            repeat.taps,
            repeat.runs
        )?;
        for changed in repeat.changed.iter().take(CHANGES) {
            let tile = changed.tiles.first().map_or(String::new(), |tile| {
                format!(", {} tiles, first at [{}, {}]", changed.tiles.len(), tile.row, tile.col)
            });
            writeln!(
                text,
                "             {}: {} of {} elements, by up to {:.1e}{tile}",
                changed.site, changed.elements, changed.of, changed.max_abs
            )?;
        }
    }
    for pieces in &result.pieces {
        let bytes = match &pieces.changed[..] {
            [] => "the same bytes".to_string(),
            [first, ..] => format!("other bytes at {} of them, {first} for one", pieces.changed.len()),
        };
        writeln!(
            text,
            "  in pieces  of {}: {} · {} sites of the prompt compared, {bytes}",
            pieces.tokens,
            painted(pieces.verdict),
            pieces.compared
        )?;
    }
    if let Some(baseline) = &result.baseline {
        writeln!(
            text,
            "  baseline   {} ({}): of {} taps {} got worse, {} better",
            baseline.subject,
            painted(baseline.verdict),
            baseline.compared,
            baseline.worse,
            baseline.better
        )?;
        if let Some(worse) = &baseline.first_worse {
            writeln!(
                text,
                "             first worse {}: {} instead of {}, rms error {:.2e} instead of {:.2e}",
                worse.site,
                worse.verdict.name(),
                worse.baseline_verdict.name(),
                worse.rms_abs,
                worse.baseline_rms_abs
            )?;
        }
    }
    if let Some(budget) = &result.budget {
        writeln!(
            text,
            "  budget     logit error {:.2e} in {}; its parts leave {:.1} % open",
            budget.rms,
            budget.pass,
            100.0 * budget.closure
        )?;
        for part in &budget.parts {
            writeln!(
                text,
                "             {:5.1} %  {:<14} own error {:.2e}, makes {:.2e} of the logits",
                100.0 * part.share,
                part.site,
                part.own_rms,
                part.logit_rms
            )?;
        }
    }
    Ok(())
}

/// What the subject showed beside its sites: notes, what could not be matched, what was judged as one.
fn beside(text: &mut String, result: &PackageResult) -> std::fmt::Result {
    for note in &result.notes {
        writeln!(text, "  note       {note}")?;
    }
    for problem in &result.problems {
        writeln!(text, "  unusable   {problem}")?;
    }
    if !result.unmatched.is_empty() {
        writeln!(
            text,
            "  unmatched  {} of its names: {}",
            result.unmatched.len(),
            result.unmatched.join(", ")
        )?;
    }
    for span in result.spans.iter().take(SPANS) {
        let from = span.from.as_deref().unwrap_or("the tokens");
        writeln!(text, "  span       judged from {from} to {}", span.to)?;
    }
    if result.spans.len() > SPANS {
        writeln!(text, "             and {} more spans", result.spans.len() - SPANS)?;
    }
    Ok(())
}

fn reference(text: &mut String, result: &PackageResult) -> std::fmt::Result {
    let part = &result.reference;
    write!(text, "  reference  {} · golden {}", painted(part.verdict), part.golden)?;
    if let (Some((equal, all)), Some(worst), Some(taps)) = (part.argmax_equal, &part.worst, part.taps) {
        let what = if part.kl_max.is_some() { "taps" } else { "logits" };
        write!(
            text,
            " · {taps} {what}, worst {} at {:.2} of its limit · argmax equal at {equal} of {all} positions",
            worst.site, worst.ratio
        )?;
    }
    if let Some(kl) = part.kl_max {
        write!(text, " · KL at most {kl:.1e}")?;
    }
    writeln!(text)
}

/// The sites that are furthest from passing.
fn worst_sites(result: &PackageResult) -> String {
    let mut sites: Vec<&SiteResult> = result.sites.iter().collect();
    sites.sort_by(|a, b| b.verdict.cmp(&a.verdict).then(b.z_max.total_cmp(&a.z_max)));
    let mut table = Table::new();
    table.load_style(presets::NOTHING).set_header([
        "worst sites",
        "verdict",
        "elements",
        "wrong",
        "max |z|",
        "rms z",
        "mean z",
        "max abs",
        "at",
    ]);
    for site in sites.into_iter().take(WORST) {
        table.add_row([
            site.site.clone(),
            site.verdict.name().to_string(),
            site.elements.to_string(),
            site.wrong.to_string(),
            format!("{:.2}", site.z_max),
            format!("{:.3}", site.z_rms),
            format!("{:+.3}", site.z_bias),
            format!("{:.1e}", site.max_abs),
            format!("[{}, {}]", site.worst.row, site.worst.col),
        ]);
    }
    for column in 2..8 {
        table.column_mut(column).expect("nine columns").set_cell_alignment(CellAlignment::Right);
    }
    table.to_string()
}

fn names(sites: &[String]) -> String {
    let mut leaves: Vec<&str> = Vec::new();
    for site in sites {
        let leaf = site.splitn(3, '.').nth(2).filter(|_| site.starts_with("layers.")).unwrap_or(site);
        if !leaves.contains(&leaf) {
            leaves.push(leaf);
        }
    }
    leaves.join(", ")
}

fn indented(text: &str) -> String {
    text.lines().map(|line| format!("  {}", line.trim_end())).collect::<Vec<_>>().join("\n")
}

/// A verdict in its colour; the colour is taken out where it is not wanted.
fn painted(verdict: Verdict) -> String {
    use anstyle::{AnsiColor, Style};
    let colour = match verdict {
        Verdict::Passed => AnsiColor::Green,
        Verdict::Skipped | Verdict::NearTie | Verdict::Drift => AnsiColor::Yellow,
        Verdict::NotSupported | Verdict::Mistrusted => AnsiColor::Magenta,
        Verdict::Failed | Verdict::Crashed | Verdict::Broken => AnsiColor::Red,
    };
    let style = Style::new().bold().fg_color(Some(colour.into()));
    format!("{style}{}{style:#}", verdict.name())
}

/// A root mean square of z; where the limit is zero it can be of any size.
fn rms(z: f64) -> String {
    if z < 1e6 { format!("{z:.3}") } else { format!("{z:.1e}") }
}
