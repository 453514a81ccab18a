//! Edits of packages: every one is shown by some fixture, and a subject that read a config wrongly is told so.

use assert_cmd::Command;
use conformance::audit::{Audit, report};
use conformance::contract::Contract;
use conformance::draft::Pair;
use conformance::draft::golden::text_and_anchors;
use conformance::edits::{self, Source, Sources, audit_draft_edits, audit_edits};
use fixtures::seeded;
use fixtures::{Package, bundled};
use golden::Dump;
use std::path::Path;
use std::sync::Arc;

fn source(package: Package) -> Source {
    Source { config: package.config().clone(), tensors: package.into_tensors(), allowed: vec![] }
}

fn of_seeded(name: &str) -> Audit {
    let seeded = seeded::named(name).unwrap();
    let (config, prompt) = (seeded.config.clone(), seeded.prompt.clone());
    let target = Source { config, tensors: Arc::new(seeded), allowed: vec![] };
    of_model(name, Sources { target, draft: None }, &prompt)
}

fn of_model(name: &str, sources: Sources, prompt: &[u32]) -> Audit {
    let (_, model) = sources.target.model().unwrap();
    audit_edits(name, &sources, &model, prompt, 2, &Contract::named("int8").unwrap()).unwrap()
}

fn of_bundled(name: &str) -> Audit {
    let package = Package::open(name).unwrap();
    let golden = package.golden_json().map(|_| Dump::open(package.dir()).unwrap()).unwrap();
    let prompt = golden.manifest().prompt.clone();
    if !package.has_draft() {
        return of_model(name, Sources { target: source(package), draft: None }, &prompt);
    }
    let (target, draft) = Package::pair(name).unwrap();
    let sources = Sources { target: source(target), draft: Some(source(draft)) };
    let (config, model) = sources.target.model().unwrap();
    let pair = Pair::new(config, model, sources.draft.as_ref().unwrap().draft().unwrap()).unwrap();
    let (text, anchors) = text_and_anchors(&golden).unwrap();
    let contract = Contract::named("int8").unwrap();
    audit_draft_edits(name, &sources, &pair, (&text, &anchors), &contract).unwrap()
}

/// Every edit can be made in some package and is shown by some.
#[test]
fn together_the_fixtures_show_every_edit() {
    let mut audits: Vec<Audit> = bundled().iter().map(|name| of_bundled(name)).collect();
    audits.extend(seeded::NAMES.iter().map(|name| of_seeded(name)));
    assert_eq!(report::unseen(&audits), Vec::<&str>::new());
    let nowhere: Vec<String> = edits::all()
        .map(|edit| edit.mutant.name())
        .filter(|name| audits.iter().all(|audit| audit.kills.iter().all(|kill| kill.mutant != *name)))
        .collect();
    assert!(nowhere.is_empty(), "no fixture can make {nowhere:?}");
}

fn karat(args: &[&str]) -> (Option<i32>, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_karat")).args(args).output().unwrap();
    (
        output.status.code(),
        String::from_utf8(output.stdout).unwrap() + &String::from_utf8_lossy(&output.stderr),
    )
}

/// The line of a report that says what a subject reads as if.
fn as_if(report: &str) -> &str {
    report.lines().find(|line| line.starts_with("  as if")).unwrap_or_else(|| panic!("{report}"))
}

/// The edited model stands in the subject's place; the report does not know which edit it was.
#[test]
fn an_edited_model_is_told_what_it_reads_as_if() {
    let (code, report) = karat(&["verify", "llama", "--mutate", "cfg-rope-theta:1e4"]);
    assert_eq!(code, Some(1), "{report}");
    let expected = "as if      rope_parameters.rope_theta were 10000.0 and not 500.0 (cfg-rope-theta:1e4)";
    assert!(as_if(&report).contains(expected), "{report}");
    let (code, report) = karat(&["verify", "granite", "--mutate", "cfg-factor-dropped:residual"]);
    assert_eq!(code, Some(1), "{report}");
    assert!(as_if(&report).contains("residual_multiplier were 1.0 and not 0.7"), "{report}");
    let (code, report) = karat(&["verify", "dflash", "--mutate", "spec-tap-off-by-one"]);
    assert_eq!(code, Some(1), "{report}");
    assert!(as_if(&report).contains("target_layer_ids were [1,3,4] and not [0,2,3]"), "{report}");
    let (code, report) = karat(&["verify", "llama", "--mutate", "cfg-swiglu:limit"]);
    assert_eq!(code, Some(2), "{report}");
    assert!(report.contains("it needs clamped experts"), "{report}");
    let (code, report) = karat(&["verify", "llama", "--mutate", "cfg-eps:1e-5@logits"]);
    assert_eq!(code, Some(2), "{report}");
    assert!(report.contains("is made in the package and not at a site"), "{report}");
}

/// A program that shares nothing with the edits: the same weights beside a config that somebody changed by hand.
#[test]
fn a_dump_from_a_changed_config_is_told_which_key() {
    let dir = tempfile::tempdir().unwrap();
    let package = Package::open("mistral").unwrap();
    let file = |name: &str| package.dir().join(name);
    let copy = dir.path().join("mistral");
    std::fs::create_dir(&copy).unwrap();
    std::fs::copy(file("model.safetensors"), copy.join("model.safetensors")).unwrap();
    let config = std::fs::read_to_string(file("config.json")).unwrap();
    let changed = config.replace("\"sliding_window\": 5", "\"sliding_window\": 2");
    assert_ne!(changed, config);
    std::fs::write(copy.join("config.json"), changed).unwrap();
    let ids = Dump::open(package.dir()).unwrap().manifest().prompt.clone();
    let ids = ids.iter().map(u32::to_string).collect::<Vec<_>>().join(" ");
    let prompt = dir.path().join("prompt.txt");
    std::fs::write(&prompt, ids).unwrap();
    let text = |path: &Path| path.display().to_string();
    let (copy, prompt, out) = (text(&copy), text(&prompt), text(&dir.path().join("out")));
    let (code, report) =
        karat(&["dump", &copy, "--subject", "reference", "--prompt-ids", &prompt, "--out", &out]);
    assert_eq!(code, Some(0), "{report}");
    let subject = format!("dump:{out}");
    let (code, report) = karat(&["verify", "mistral", "--subject", &subject, "--prompt-ids", &prompt]);
    assert_eq!(code, Some(1), "{report}");
    let expected = "as if      sliding_window were 2 and not 5 (cfg-window:half)";
    assert!(as_if(&report).contains(expected), "{report}");
}
