//! `karat dump`.

use super::load::{check_length, load, prompts};
use super::{CliError, Format, Outcome};
use crate::golden_gate::argmax;
use crate::mutants::matches;
use crate::passes::Pass;
use crate::subject::{NpuSubject, ReferenceSubject, Subject, SubjectError, SubjectSpec};
use crate::verify::Loaded;
use device::Switches;
use golden::{DumpWriter, Manifest, Origin};
use spec::Site;
use std::path::{Path, PathBuf};

/// Arguments of `dump`.
#[derive(clap::Args)]
pub struct Args {
    /// A path or a bundled name.
    package: String,
    /// Prompts as token ids, one a line.
    #[arg(long, value_name = "FILE")]
    prompt_ids: PathBuf,
    /// Where to write: one directory a prompt, `0/`, `1/`, ...
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
    /// Whose values.
    #[arg(long, value_name = "SPEC", default_value = "reference")]
    subject: String,
    /// Only taps that match.
    #[arg(long, value_name = "GLOB")]
    sites: Option<String>,
    /// Greedy steps behind the prompt.
    #[arg(long, value_name = "N", default_value_t = 4)]
    tokens: usize,
    /// Pass over this unknown config key.
    #[arg(long, value_name = "KEY")]
    allow_unknown: Vec<String>,
}

/// Runs the verb.
pub fn run(args: &Args, format: Format) -> Result<Outcome, CliError> {
    let subject: SubjectSpec = args.subject.parse()?;
    let loaded = load(&args.package, None, &args.allow_unknown)?;
    let prompts = prompts(&args.prompt_ids, &loaded.config, args.tokens)?;
    let files = fixtures::Package::open(&args.package)?.files();
    let model_hash = golden::model_hash(&files)?;
    let mut written = Vec::new();
    for (n, prompt) in prompts.iter().enumerate() {
        check_length(prompt, &loaded.config, args.tokens, "the prompt")?;
        let target = args.out.join(n.to_string());
        let mut manifest = Manifest::new(format!("karat {subject}"), Origin::RegressionLock, prompt.clone());
        manifest.model_hash = Some(model_hash.clone());
        manifest.contract = Some(subject.contract_name().to_string());
        manifest.rounding = Some(match subject {
            SubjectSpec::Reference => "every site once, f64 to f32, to nearest even".to_string(),
            SubjectSpec::Npu(engine) => format!("as the {engine} engine declares; host ops in f32"),
        });
        let taps = write(&loaded, &subject, prompt, args, &target, manifest)?;
        written.push((target.display().to_string(), taps));
    }
    let report = match format {
        Format::Text => written.iter().map(|(dir, taps)| format!("{dir}: {taps} taps\n")).collect(),
        Format::Json => {
            let dumps: Vec<_> =
                written.iter().map(|(dir, taps)| serde_json::json!({"dir": dir, "taps": taps})).collect();
            serde_json::json!({"schema": "karat/dump/1", "dumps": dumps}).to_string() + "\n"
        }
    };
    Ok(Outcome { report, code: 0 })
}

/// Runs one prompt, pass by pass, and writes its dump whole or not at all.
fn write(
    loaded: &Loaded,
    spec: &SubjectSpec,
    prompt: &[u32],
    args: &Args,
    target: &Path,
    manifest: Manifest,
) -> Result<usize, CliError> {
    let failed = |error: SubjectError| CliError::Usage(format!("{}: {error}", loaded.name));
    let mut subject: Box<dyn Subject + '_> = match spec {
        SubjectSpec::Reference => Box::new(ReferenceSubject::new(&loaded.model)),
        SubjectSpec::Npu(engine) => Box::new(
            NpuSubject::new(&loaded.config, &loaded.weights, *engine, Switches::default()).map_err(failed)?,
        ),
    };
    let mut writer = DumpWriter::create(target, manifest)?;
    let (mut pass, mut greedy, mut count) =
        (Pass { name: "prefill".into(), ids: prompt.to_vec() }, Vec::new(), 0);
    for n in 0..=args.tokens {
        let taps = subject.pass(&pass).map_err(failed)?;
        let order = |site: &Site| {
            (site.layer.map_or(outer_rank(site.name), |layer| layer as usize + 1), rank(site.name))
        };
        let mut sites: Vec<_> = taps.iter().collect();
        sites.sort_by_key(|(site, _)| order(site));
        for (site, tensor) in sites {
            let name = format!("{}.{site}", pass.name);
            if args.sites.as_ref().is_some_and(|glob| !matches(glob, &name)) {
                continue;
            }
            let values: Vec<f32> = tensor.iter().copied().collect();
            writer.tap(&name, site.info().axes, tensor.shape(), &values)?;
            count += 1;
        }
        let logits = &taps[&Site::model("logits")];
        let vocab = loaded.config.vocab_size();
        let last: Vec<f32> = logits.iter().copied().skip(logits.len() - vocab).collect();
        let next = argmax(&last) as u32;
        greedy.push(next);
        pass = Pass { name: format!("step{}", n + 1), ids: vec![next] };
    }
    if count == 0 {
        return Err(CliError::Usage(format!("no site matches {}", args.sites.as_deref().unwrap_or("*"))));
    }
    writer.manifest_mut().greedy = greedy;
    writer.finish()?;
    Ok(count)
}

/// Place of a site's name in the registry, which is in the order of the data flow.
fn rank(name: &str) -> usize {
    spec::site::SITES.iter().position(|info| info.name == name).unwrap_or(usize::MAX)
}

/// Sites outside the layers stand before them, but for the final ones.
fn outer_rank(name: &str) -> usize {
    if rank(name) >= rank("final_norm") { usize::MAX } else { 0 }
}
