//! A scored draft as text, JSON and Markdown.

use super::{Ratios, Scale, Tally};
use serde_json::{Value, json};
use std::fmt::Write;
use std::time::Duration;

/// What every number means, in the order in which they are printed.
pub const DEFINITIONS: &str = "\
pass       one draft block and one pass of the target over it
proposed   proposals that were checked: min(block, rest of the text) - 1 a pass
accepted   proposals that equal the target's own tokens, up to the first that does not;
           the target's own token behind them (the bonus) is never counted
emitted    accepted + 1 a pass, less where the text ends
generated  1 + emitted: the first token comes from the target alone
first hit  passes whose first proposal is the target's token
";

/// Which blocks were scored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// Those that a speculative loop asks for.
    Walk,
    /// One after every position of the target's greedy text.
    AllPositions,
}

impl Mode {
    /// The name in JSON.
    pub fn name(self) -> &'static str {
        match self {
            Mode::Walk => "walk",
            Mode::AllPositions => "all_positions",
        }
    }

    fn sentence(self, sampling: Option<Sampling>) -> &'static str {
        match (self, sampling) {
            (Mode::Walk, None) => "a speculative loop, greedy; its text is the target's own",
            (Mode::Walk, Some(_)) => "a speculative loop, drawn; its text has the target's own distribution",
            (Mode::AllPositions, _) => {
                "a block after every position of the target's greedy text; emitted is what each would give \
                 alone, generated the length of the text"
            }
        }
    }
}

/// What drafts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Kind {
    /// A block draft, with the scale of its embedding.
    Block(Scale),
    /// The target's own prediction head.
    Mtp,
}

/// How a text is drawn.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampling {
    /// Logits are divided by it.
    pub temperature: f64,
    /// Where its random numbers begin.
    pub seed: u64,
}

/// One prompt, scored.
#[derive(Clone, Debug)]
pub struct Scored {
    /// The generated tokens.
    pub tokens: Vec<u32>,
    /// The counts.
    pub tally: Tally,
}

/// A draft, scored.
#[derive(Clone, Debug)]
pub struct Report {
    /// The target's name.
    pub target: String,
    /// The draft's name.
    pub draft: String,
    /// Which blocks were scored.
    pub mode: Mode,
    /// An anchor and its proposals.
    pub block: usize,
    /// Context rows that the draft sees; nothing means all.
    pub window: Option<usize>,
    /// What drafts.
    pub kind: Kind,
    /// How the text is drawn; nothing where it is greedy.
    pub sampling: Option<Sampling>,
    /// Which output of the last layer was tapped, where it is tapped at all.
    pub last_tap: Option<&'static str>,
    /// One result a prompt.
    pub prompts: Vec<Scored>,
    /// Sum over prompts.
    pub total: Tally,
    /// Time on the host: target, draft.
    pub host: (Duration, Duration),
}

impl Report {
    /// Mean over prompts of a quotient; prompts without a pass do not take part.
    fn mean(&self, quotient: impl Fn(&Ratios) -> Option<f64>) -> Option<f64> {
        let all: Vec<f64> = self.prompts.iter().filter_map(|p| quotient(&p.tally.ratios())).collect();
        (!all.is_empty()).then(|| all.iter().sum::<f64>() / all.len() as f64)
    }

    /// What was assumed, one line each.
    fn assumptions(&self) -> Vec<String> {
        let mut lines = vec![
            format!("mode {}: {}", self.mode.name(), self.mode.sentence(self.sampling)),
            format!("block of {}: an anchor and {} proposals", self.block, self.block - 1),
        ];
        match self.kind {
            Kind::Block(scale) => lines.push(format!("embedding scale {}: {}", scale.value, scale.origin)),
            Kind::Mtp => lines.push(
                "prediction head: proposal 1 reads the target's hidden state behind its final norm and the \
                 anchor, each further one the head's own hidden state and the proposal before"
                    .to_string(),
            ),
        }
        if let Kind::Block(Scale { value: own, origin: super::ScaleOrigin::Target }) = self.kind {
            lines.push(format!(
                "warning: drafts trained on a plain copy of the table expect 1, others {own}; \
                 score both with --embedding-scale 1 and --embedding-scale {own}"
            ));
        }
        if let Some(Sampling { temperature, seed }) = self.sampling {
            lines.push(format!(
                "temperature {temperature}, seed {seed}, rejection sampling: accepted are the proposals that \
                 stay (u·q(d) < p(d)), up to the first that does not; counts depend on the seed"
            ));
        }
        if let Some(last) = self.last_tap {
            lines.push(format!("the target's last layer is tapped, {last} (--last-tap)"));
        }
        if let Some(window) = self.window {
            lines.push(format!("the draft sees the last {window} context rows only"));
        }
        let (target, draft) = (self.host.0.as_secs_f64(), self.host.1.as_secs_f64());
        lines.push(format!(
            "host time {target:.1} s target, {draft:.1} s draft: of a reference in plain code, no speed result"
        ));
        lines
    }
}

fn number(value: Option<f64>) -> String {
    value.map_or("-".into(), |value| format!("{value:.3}"))
}

const COLUMNS: [&str; 10] = [
    "prompt",
    "passes",
    "proposed",
    "accepted",
    "emitted",
    "generated",
    "accepted/pass",
    "tokens/pass",
    "first hit",
    "rate",
];

fn cells(name: String, tally: &Tally) -> [String; 10] {
    let ratios = tally.ratios();
    [
        name,
        tally.passes.to_string(),
        tally.proposed.to_string(),
        tally.accepted.to_string(),
        tally.emitted.to_string(),
        tally.generated.to_string(),
        number(ratios.accepted_per_pass),
        number(ratios.tokens_per_pass),
        format!("{}/{}", tally.first_hits, tally.first_proposals),
        number(ratios.acceptance_rate),
    ]
}

fn table(report: &Report) -> Vec<[String; 10]> {
    let prompts = report.prompts.iter().enumerate().map(|(n, p)| cells((n + 1).to_string(), &p.tally));
    [COLUMNS.map(String::from)]
        .into_iter()
        .chain(prompts)
        .chain([cells("total".into(), &report.total)])
        .collect()
}

/// The histogram as `a: passes`, and how many of them were cut short.
fn histogram(tally: &Tally) -> Vec<String> {
    let bins = tally.histogram.iter().zip(&tally.histogram_cut).enumerate();
    let line = |(accepted, (passes, cut)): (usize, (&usize, &usize))| {
        let short = if *cut > 0 { format!(" ({cut} cut short by the end)") } else { String::new() };
        format!("{accepted}: {passes}{short}")
    };
    bins.map(line).collect()
}

fn conventions(tally: &Tally) -> String {
    let ratios = tally.ratios();
    format!(
        "other tools: 1 + accepted/pass = {} (vLLM, llama.cpp; too many where the last pass is cut), \
         generated/passes = {} (SGLang; counts the prefill's token)",
        number(ratios.one_plus_accepted),
        number(ratios.generated_per_pass)
    )
}

/// For a terminal.
pub fn text(report: &Report) -> String {
    let mut out = format!("draft {} for target {}\n", report.draft, report.target);
    for line in report.assumptions() {
        let _ = writeln!(out, "{line}");
    }
    out.push('\n');
    let table = table(report);
    let width = |column: usize| table.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..COLUMNS.len()).map(width).collect();
    for row in &table {
        let line: Vec<String> =
            row.iter().zip(&widths).map(|(cell, width)| format!("{cell:>width$}")).collect();
        let _ = writeln!(out, "{}", line.join("  "));
    }
    let _ = writeln!(out, "\npasses by accepted proposals");
    for line in histogram(&report.total) {
        let _ = writeln!(out, "  {line}");
    }
    let (accepted, tokens) = (report.mean(|r| r.accepted_per_pass), report.mean(|r| r.tokens_per_pass));
    let _ = writeln!(
        out,
        "mean over prompts: accepted/pass {}, tokens/pass {} (the total above pools all passes)",
        number(accepted),
        number(tokens)
    );
    let _ = writeln!(out, "{}", conventions(&report.total));
    let _ = write!(out, "\n{DEFINITIONS}");
    out
}

/// For a pull request.
pub fn markdown(report: &Report) -> String {
    let mut out = format!("### Draft `{}` for target `{}`\n\n", report.draft, report.target);
    for line in report.assumptions() {
        let _ = writeln!(out, "- {line}");
    }
    out.push('\n');
    const MOST: usize = 24;
    let table = table(report);
    let hidden = table.len().saturating_sub(MOST + 2);
    for (n, row) in table.iter().enumerate() {
        if n > MOST && n + 1 < table.len() {
            continue;
        }
        let _ = writeln!(out, "| {} |", row.join(" | "));
        if n == 0 {
            let _ = writeln!(out, "|{}", " ---: |".repeat(COLUMNS.len()));
        }
    }
    if hidden > 0 {
        let _ = writeln!(out, "\n{hidden} more prompts are in the total.");
    }
    let _ = writeln!(out, "\nPasses by accepted proposals: {}\n", histogram(&report.total).join(", "));
    let _ = writeln!(out, "{}\n", conventions(&report.total));
    let _ = write!(out, "```text\n{DEFINITIONS}```\n");
    out
}

fn counts(tally: &Tally) -> Value {
    let ratios = tally.ratios();
    let rates = |of: &[usize]| -> Vec<Option<f64>> {
        let over = |(&kept, &of): (&usize, &usize)| (of > 0).then(|| kept as f64 / of as f64);
        tally.kept.iter().zip(of).map(over).collect()
    };
    json!({
        "passes": tally.passes,
        "proposed": tally.proposed,
        "accepted": tally.accepted,
        "emitted": tally.emitted,
        "generated": tally.generated,
        "accepted_each": tally.accepted_each,
        "accepted_per_pass": ratios.accepted_per_pass,
        "tokens_per_pass": ratios.tokens_per_pass,
        "acceptance_rate": ratios.acceptance_rate,
        "first_hits": tally.first_hits,
        "first_proposals": tally.first_proposals,
        "first_hit_rate": ratios.first_hit_rate,
        "histogram": tally.histogram,
        "histogram_cut": tally.histogram_cut,
        "rate_by_position": rates(&tally.reached),
        "one_plus_accepted_per_pass": ratios.one_plus_accepted,
        "generated_per_pass": ratios.generated_per_pass,
    })
}

/// For scripts.
pub fn json(report: &Report) -> String {
    let prompts: Vec<Value> = report
        .prompts
        .iter()
        .map(|prompt| {
            let mut value = counts(&prompt.tally);
            value["tokens"] = json!(prompt.tokens);
            value
        })
        .collect();
    let value = json!({
        "schema": "karat/draft/1",
        "target": report.target,
        "draft": report.draft,
        "mode": report.mode.name(),
        "block": report.block,
        "window": report.window,
        "kind": match report.kind {
            Kind::Block(_) => "block",
            Kind::Mtp => "mtp",
        },
        "embedding_scale": match report.kind {
            Kind::Block(scale) => json!({"value": scale.value, "origin": scale.origin.to_string()}),
            Kind::Mtp => Value::Null,
        },
        "sampling": report.sampling.map(|s| {
            json!({"temperature": s.temperature, "seed": s.seed, "verifier": "rejection"})
        }),
        "last_tap": report.last_tap,
        "definitions": DEFINITIONS,
        "prompts": prompts,
        "total": counts(&report.total),
        "mean_over_prompts": {
            "accepted_per_pass": report.mean(|r| r.accepted_per_pass),
            "tokens_per_pass": report.mean(|r| r.tokens_per_pass),
        },
        "host_seconds": {
            "target": report.host.0.as_secs_f64(),
            "draft": report.host.1.as_secs_f64(),
            "speed_result": false,
        },
    });
    value.to_string() + "\n"
}

#[cfg(test)]
mod tests {
    use super::super::{Pass, ScaleOrigin};
    use super::*;

    /// Two prompts of three tokens behind the first, block of 4: three proposals right, or none at all.
    fn report() -> Report {
        let scored = |passes: &[Pass]| Scored { tokens: vec![7, 8, 9, 10], tally: Tally::of(passes, 4, 4) };
        let pass =
            |anchor, proposed, accepted, emitted, bonus| Pass { anchor, proposed, accepted, emitted, bonus };
        let prompts = vec![
            scored(&[pass(2, 3, 3, 3, false)]),
            scored(&[pass(2, 3, 0, 1, true), pass(3, 2, 0, 1, true), pass(4, 1, 0, 1, true)]),
        ];
        let mut total = prompts[0].tally.clone();
        total.add(&prompts[1].tally);
        Report {
            target: "t".into(),
            draft: "d".into(),
            mode: Mode::Walk,
            block: 4,
            window: None,
            kind: Kind::Block(Scale { value: 1.0, origin: ScaleOrigin::One }),
            sampling: None,
            last_tap: None,
            prompts,
            total,
            host: (Duration::ZERO, Duration::ZERO),
        }
    }

    // 3 accepted in 4 passes pooled is 0.75; the mean of 3/1 and 0/3 is 1.5.
    #[test]
    fn pooled_and_mean_are_told_apart() {
        let value: Value = serde_json::from_str(&json(&report())).unwrap();
        assert_eq!(value["schema"], "karat/draft/1");
        assert_eq!(value["mode"], "walk");
        assert_eq!(value["total"]["accepted_per_pass"], 0.75);
        assert_eq!(value["mean_over_prompts"]["accepted_per_pass"], 1.5);
        assert_eq!(value["total"]["accepted_each"], json!([3, 0, 0, 0]));
        assert_eq!(value["prompts"][0]["tokens"], json!([7, 8, 9, 10]));
        assert_eq!(value["total"]["histogram"], json!([3, 0, 0, 1]));
        assert_eq!(value["total"]["histogram_cut"], json!([2, 0, 0, 0]));
        // Passes with a third proposal: the first of each prompt, and one of them kept it.
        assert_eq!(value["total"]["rate_by_position"], json!([0.25, 1.0 / 3.0, 0.5]));
        assert_eq!(value["host_seconds"]["speed_result"], false);
    }

    #[test]
    fn every_form_prints_the_definitions() {
        for form in [text(&report()), markdown(&report())] {
            assert!(
                form.contains("the target's own token behind them (the bonus) is never counted"),
                "{form}"
            );
            assert!(form.contains("no speed result"), "{form}");
        }
        let text = text(&report());
        let total = text.lines().find(|line| line.trim_start().starts_with("total")).unwrap();
        let cells: Vec<&str> = total.split_whitespace().collect();
        assert_eq!(cells, ["total", "4", "9", "3", "6", "8", "0.750", "1.500", "1/4", "0.333"]);
    }

    #[test]
    fn a_guessed_scale_warns() {
        let mut report = report();
        report.kind = Kind::Block(Scale { value: 8.0, origin: ScaleOrigin::Target });
        assert!(text(&report).contains("score both with --embedding-scale 1 and --embedding-scale 8"));
    }
}
