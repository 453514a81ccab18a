//! `karat inspect`.

use super::{CliError, Format, Outcome};
use crate::inspect::{Inspection, Memory, Span, TensorLine, TensorUse, inspect};
use comfy_table::{CellAlignment, Table, presets};
use serde_json::{Value, json};
use std::fmt::Write;

/// Arguments of `inspect`.
#[derive(clap::Args)]
pub struct Args {
    /// A path or a bundled name.
    package: String,
    /// Pass over this unknown config key.
    #[arg(long, value_name = "KEY")]
    allow_unknown: Vec<String>,
    /// Do not read the weights: no value ranges.
    #[arg(long)]
    no_values: bool,
}

/// Runs the verb: what is in the package, and whether the reference would take it. What is refused is
/// listed first, then refused.
pub fn run(args: &Args, format: Format) -> Result<Outcome, CliError> {
    let found = inspect(&args.package, &args.allow_unknown, !args.no_values)?;
    let report = match format {
        Format::Json => {
            let mut value = found.first().map(as_json).unwrap_or_default();
            value["schema"] = json!("karat/inspect/1");
            if let Some(draft) = found.get(1) {
                value["draft"] = as_json(draft);
            }
            value.to_string() + "\n"
        }
        _ => found.iter().map(as_text).collect::<Vec<_>>().join("\n"),
    };
    let refused = found.iter().any(|one| !one.refusals.is_empty());
    Ok(Outcome { report, code: if refused { 2 } else { 0 } })
}

fn as_json(one: &Inspection) -> Value {
    let tensor = |t: &TensorLine| {
        let mut line = json!({
            "name": t.name, "shape": t.shape, "format": t.format, "bytes": t.bytes, "use": t.fate.word(),
        });
        if let Some(span) = &t.span {
            line["non_finite"] = json!(span.non_finite);
            if span.is_finite() {
                line["min"] = json!(span.min);
                line["max"] = json!(span.max);
            }
        }
        if let Some(reason) = &t.refused {
            line["refused"] = json!(reason);
        }
        line
    };
    let count = |fate: TensorUse| one.tensors.iter().filter(|t| t.fate == fate).count();
    let mut value = json!({
        "package": one.name,
        "container": one.container,
        "files": one.files,
        "family": one.family.unwrap_or("not understood"),
        "parameters": one.parameters(),
        "weight_bytes": one.bytes(),
        "refused": one.refusals.first(),
        "refusals": one.refusals,
        "passed_over": one.passed_over,
        "not_judged": one.not_judged,
        "config_keys": one.keys.iter().map(|k| json!({"key": k.key, "use": k.fate, "reason": k.reason})).collect::<Vec<_>>(),
        "tensors_read": count(TensorUse::Read),
        "tensors_left_over": count(TensorUse::LeftOver),
        "tensors": one.tensors.iter().map(tensor).collect::<Vec<_>>(),
    });
    if let Some(m) = &one.memory {
        value["memory"] = json!({
            "weights": m.weights, "int8_images": m.int8_images, "positions": m.positions, "kv_cache": m.kv_cache,
            "kv_cache_windowed": m.kv_cache_windowed, "fixed_state": m.fixed_state,
        });
    }
    value
}

fn as_text(one: &Inspection) -> String {
    let mut text = format!(
        "{} · {} · {} · {} parameters in {} bytes\n",
        one.name,
        one.container,
        one.family.unwrap_or("not understood"),
        one.parameters(),
        one.bytes()
    );
    if one.refusals.is_empty() {
        text.push_str("the reference takes it\n");
    }
    for reason in &one.refusals {
        let _ = writeln!(text, "refused: {reason}");
    }
    for (title, list) in [("passed over", &one.passed_over), ("not judged", &one.not_judged)] {
        if !list.is_empty() {
            let _ = writeln!(text, "{title}: {}", list.join(", "));
        }
    }
    if let Some(memory) = &one.memory {
        text.push_str(&memory_text(memory));
    }
    if !one.keys.is_empty() {
        text.push_str("\nconfig\n");
        for fate in ["refused", "read", "container", "inert", "off", "allowed", "unread"] {
            let of_kind: Vec<_> = one.keys.iter().filter(|key| key.fate == fate).collect();
            let mut reasons: Vec<_> = of_kind.iter().map(|key| &key.reason).collect();
            reasons.sort();
            reasons.dedup();
            for reason in reasons {
                let names: Vec<_> = of_kind.iter().filter(|k| k.reason == *reason).map(|k| &*k.key).collect();
                let _ = writeln!(text, "  {fate} ({reason}): {}", names.join(", "));
            }
        }
    }
    let _ = writeln!(text, "\n{}", tensor_table(&one.tensors));
    let mut counts = Vec::new();
    for fate in
        [TensorUse::Read, TensorUse::NotNeeded, TensorUse::Tower, TensorUse::LeftOver, TensorUse::NotReached]
    {
        match one.tensors.iter().filter(|t| t.fate == fate).count() {
            0 => {}
            n => counts.push(format!("{n} {}", fate.word())),
        }
    }
    let _ = writeln!(text, "tensors: {}", counts.join(", "));
    text
}

fn memory_text(m: &Memory) -> String {
    let mut state = format!("keys and values at {} positions {}", m.positions, m.kv_cache);
    if m.kv_cache_windowed < m.kv_cache {
        let _ = write!(state, " ({} where sliding layers keep only their window)", m.kv_cache_windowed);
    }
    if m.fixed_state > 0 {
        let _ = write!(state, ", recurrent state {}", m.fixed_state);
    }
    format!("memory in bytes: matrices as stored {}, int8 images {}, {state}\n", m.weights, m.int8_images)
}

fn tensor_table(tensors: &[TensorLine]) -> Table {
    let mut table = Table::new();
    table.load_style(presets::NOTHING).set_header(["tensor", "shape", "format", "bytes", "values", "use"]);
    for t in tensors {
        let values = match (&t.refused, &t.span) {
            (Some(reason), _) => reason.clone(),
            (None, Some(span)) => span_text(span),
            (None, None) => String::new(),
        };
        let shape = format!("{:?}", t.shape);
        let fate = t.fate.word().to_string();
        table.add_row([t.name.clone(), shape, t.format.clone(), t.bytes.to_string(), values, fate]);
    }
    if let Some(column) = table.column_mut(3) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table
}

fn span_text(span: &Span) -> String {
    let range = match span.is_finite() {
        true => format!("{} .. {}", span.min, span.max),
        false => "no finite value".to_string(),
    };
    match span.non_finite {
        0 if !span.is_finite() => "no value".to_string(),
        0 => range,
        n => format!("{range}, {n} NOT FINITE"),
    }
}
