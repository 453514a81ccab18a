//! `karat convert`.

use super::{CliError, Format, Outcome};
use clap::ValueEnum;
use fixtures::{Package, To, convert};
use serde_json::json;
use std::path::PathBuf;

/// The containers that can be written.
#[derive(Clone, Copy, Debug, ValueEnum)]
enum Container {
    /// 4-bit tiles for an NPU.
    Q4nx,
    /// One file with metadata.
    Gguf,
    /// config.json and model.safetensors.
    Safetensors,
}

/// Arguments of `convert`.
#[derive(clap::Args)]
pub struct Args {
    /// A path, a bundled name or the name of a seeded model.
    package: String,
    /// The container to write.
    #[arg(long, value_enum, value_name = "CONTAINER")]
    to: Container,
    /// A new or empty folder.
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
}

/// Runs the verb: the package appears whole in the folder, or not at all.
pub fn run(args: &Args, format: Format) -> Result<Outcome, CliError> {
    let to = match args.to {
        Container::Q4nx => To::Q4nx,
        Container::Gguf => To::Gguf,
        Container::Safetensors => To::Safetensors,
    };
    let seeded = fixtures::seeded::named(&args.package);
    let prompt = seeded.as_ref().map(|model| format!("the prompt that it is made for: {:?}", model.prompt));
    let package = match seeded {
        Some(model) => Package::seeded(model),
        None => Package::open(&args.package)?,
    };
    let mut report = convert(&package, to, &args.out)?;
    report.notes.extend(prompt);
    let files: Vec<String> = report.files.iter().map(|file| file.display().to_string()).collect();
    let report = match format {
        Format::Json => {
            let value = json!({
                "schema": "karat/convert/1", "files": files, "tensors": report.tensors,
                "bytes": report.bytes, "notes": report.notes,
            });
            value.to_string() + "\n"
        }
        _ => {
            let notes: String = report.notes.iter().map(|note| format!("  {note}\n")).collect();
            format!("{} tensors, {} bytes: {}\n{notes}", report.tensors, report.bytes, files.join(", "))
        }
    };
    Ok(Outcome { report, code: 0 })
}
