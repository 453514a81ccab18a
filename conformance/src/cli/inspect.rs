//! `karat inspect`.

use super::{CliError, Format, Outcome};
use comfy_table::{CellAlignment, Table, presets};
use fixtures::Package;
use serde_json::json;
use spec::{Config, Weights};

/// Arguments of `inspect`.
#[derive(clap::Args)]
pub struct Args {
    /// A path or a bundled name.
    package: String,
    /// Pass over this unknown config key.
    #[arg(long, value_name = "KEY")]
    allow_unknown: Vec<String>,
}

struct TensorLine {
    name: String,
    shape: Vec<usize>,
    format: String,
    bytes: usize,
}

/// Runs the verb: what is in the package, and whether the reference would take it.
pub fn run(args: &Args, format: Format) -> Result<Outcome, CliError> {
    let package = Package::open(&args.package)?;
    let tensors: Vec<TensorLine> = package.tensors().names().into_iter().map(|n| line(&package, n)).collect();
    let parsed = Config::parse(package.config(), &args.allow_unknown);
    let refusal = match &parsed {
        Err(error) => Some(error.to_string()),
        Ok(parsed) => Weights::load(&parsed.config, package.tensors()).err().map(|error| error.to_string()),
    };
    let parameters: usize = tensors.iter().map(|t| t.shape.iter().product::<usize>()).sum();
    let bytes: usize = tensors.iter().map(|t| t.bytes).sum();
    let family = parsed.as_ref().map_or("not understood", |parsed| parsed.config.family());
    let passed_over = parsed.as_ref().map_or(vec![], |parsed| parsed.passed_over.clone());
    let report = match format {
        Format::Json => {
            let lines: Vec<_> = tensors
                .iter()
                .map(|t| json!({"name": t.name, "shape": t.shape, "format": t.format, "bytes": t.bytes}))
                .collect();
            let value = json!({
                "schema": "karat/inspect/1", "package": package.name(), "family": family,
                "parameters": parameters, "weight_bytes": bytes, "refused": refusal,
                "passed_over": passed_over, "tensors": lines,
            });
            value.to_string() + "\n"
        }
        _ => {
            let mut table = Table::new();
            table.load_style(presets::NOTHING).set_header(["tensor", "shape", "format", "bytes"]);
            for t in &tensors {
                table.add_row([
                    t.name.clone(),
                    format!("{:?}", t.shape),
                    t.format.clone(),
                    t.bytes.to_string(),
                ]);
            }
            table.column_mut(3).expect("four columns").set_cell_alignment(CellAlignment::Right);
            let verdict = match &refusal {
                Some(reason) => format!("refused: {reason}"),
                None => "the reference takes it".to_string(),
            };
            let keys = if passed_over.is_empty() {
                String::new()
            } else {
                format!("\npassed over: {}", passed_over.join(", "))
            };
            format!(
                "{} · {family} · {parameters} parameters in {bytes} bytes\n{verdict}{keys}\n\n{table}\n",
                package.name()
            )
        }
    };
    Ok(Outcome { report, code: if refusal.is_some() { 2 } else { 0 } })
}

fn line(package: &Package, name: String) -> TensorLine {
    let tensors = package.tensors();
    let shape = tensors.shape(&name).unwrap_or_default();
    let (format, bytes) = match tensors.rows(&name) {
        Some(Ok(rows)) => (rows.format().to_string(), rows.rows() * rows.row_bytes()),
        Some(Err(error)) => (format!("refused: {error}"), 0),
        None => ("absent".to_string(), 0),
    };
    TensorLine { name, shape, format, bytes }
}
