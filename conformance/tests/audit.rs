//! The audit: every mistake is shown by some fixture, and a blind fixture says why it is blind.

use assert_cmd::Command;
use conformance::audit::{Audit, Sight, audit, audit_draft, catalogue, report};
use conformance::contract::Contract;
use conformance::draft::Pair;
use conformance::draft::golden::text_and_anchors;
use fixtures::seeded::{self, Seeded};
use fixtures::{Package, bundled};
use golden::Dump;
use reference::Model;
use reference::models::Draft;
use spec::families::draft::{DraftConfig, DraftWeights};
use spec::{Config, Tensors, Weights};
use std::path::Path;

fn model(config: &serde_json::Map<String, serde_json::Value>, tensors: &dyn Tensors) -> Model {
    let config = Config::parse(config, &[]).unwrap().config;
    let weights = Weights::load(&config, tensors).unwrap();
    Model::new(config, weights)
}

fn of_seeded(seeded: &Seeded, prompt: &[u32]) -> Audit {
    let contract = Contract::named("int8").unwrap();
    audit(&seeded.name, &model(&seeded.config, seeded), prompt, 2, &contract).unwrap()
}

fn of_bundled(name: &str) -> Option<Audit> {
    let package = Package::open(name).ok().filter(|p| !p.has_draft() && p.golden_json().is_some())?;
    let prompt = Dump::open(package.dir()).unwrap().manifest().prompt.clone();
    let contract = Contract::named("int8").unwrap();
    Some(audit(name, &model(package.config(), package.tensors()), &prompt, 2, &contract).unwrap())
}

/// The drafts of the bundled pairs, where their goldens have blocks.
fn of_draft(name: &str) -> Audit {
    let (target, draft) = Package::pair(name).unwrap();
    let config = Config::parse(target.config(), &[]).unwrap().config;
    let of_target = model(target.config(), target.tensors());
    let (draft_config, _) = DraftConfig::parse(draft.config(), &[]).unwrap();
    let weights = DraftWeights::load(&draft_config, draft.tensors()).unwrap();
    let pair = Pair::new(config, of_target, Draft { config: draft_config, weights }).unwrap();
    let dump = Dump::open(Package::open(name).unwrap().dir()).unwrap();
    let (text, anchors) = text_and_anchors(&dump).unwrap();
    audit_draft(name, &pair, &text, &anchors, &Contract::named("int8").unwrap()).unwrap()
}

/// The draft of the seeded pair, which has convolutions and a selector; blocks in the middle of the prompt and
/// at its end.
fn of_seeded_pair() -> Audit {
    let (target, draft) = seeded::pair("path-pair").unwrap();
    let config = Config::parse(&target.config, &[]).unwrap().config;
    let of_target = model(&target.config, &target);
    let (draft_config, _) = DraftConfig::parse(&draft.config, &[]).unwrap();
    let weights = DraftWeights::load(&draft_config, &draft).unwrap();
    let pair = Pair::new(config, of_target, Draft { config: draft_config, weights }).unwrap();
    let anchors = [target.prompt.len() / 2, target.prompt.len() - 1];
    audit_draft("path-pair", &pair, &target.prompt, &anchors, &Contract::named("int8").unwrap()).unwrap()
}

/// Every mutant that can be made is shown at a site of its own by some package, or computes the same for a
/// recorded reason; and the diagnosis, which is not told, ranks it first.
#[test]
fn together_the_fixtures_show_every_mutant() {
    let mut audits: Vec<Audit> = bundled().iter().filter_map(|name| of_bundled(name)).collect();
    audits.extend(seeded::NAMES.iter().map(|name| {
        let seeded = seeded::named(name).unwrap();
        of_seeded(&seeded, &seeded.prompt)
    }));
    audits.extend(["dflash", "dflash_muse"].map(of_draft));
    audits.push(of_seeded_pair());
    assert_eq!(report::unseen(&audits), Vec::<&str>::new());
    let nowhere: Vec<String> = conformance::mutants::all()
        .map(|mutant| mutant.name())
        .filter(|name| audits.iter().all(|a| a.not_applicable.iter().any(|n| n.mutant == *name)))
        .collect();
    assert!(nowhere.is_empty(), "no fixture can make {nowhere:?}");
    let (asked, first) = audits.iter().map(Audit::explained).fold((0, 0), |a, b| (a.0 + b.0, a.1 + b.1));
    println!("{first} of {asked} named first");
    assert!(first as f64 >= 0.98 * asked as f64, "{first} of {asked} named first");
}

#[test]
fn every_application_is_counted_once() {
    let found = of_bundled("llama").unwrap();
    let survived: usize = found.survivors.iter().map(|s| s.sites.len()).sum();
    assert_eq!(found.mutants, found.killed + found.equivalent + survived);
    assert_eq!(found.killed, found.kills.len());
    assert!(found.kills.iter().all(|kill| kill.verdict_site.ends_with(&kill.site)));
}

fn why<'a>(found: &'a Audit, mutant: &str) -> Vec<&'a str> {
    found.survivors.iter().filter(|s| s.mutant == mutant).map(|s| &*s.why).collect()
}

#[test]
fn one_token_hides_rows_masks_and_permutations() {
    let seeded = seeded::heads_6_2(1);
    let found = of_seeded(&seeded, &seeded.prompt[..1]);
    for mutant in ["rows-permuted", "rows-first-only:copies", "rows-stride"] {
        assert_eq!(why(&found, mutant), ["one token"], "{mutant}");
    }
    assert!(found.unseen().contains(&"rows-permuted"));
}

#[test]
fn a_prompt_within_the_window_hides_the_window() {
    let seeded = seeded::heads_8_2_windows(2);
    let found = of_seeded(&seeded, &seeded.prompt[..5]);
    // Five tokens and two steps: seven keys in a window of eight.
    let whys = why(&found, "mask-window-missing");
    assert!(whys.iter().all(|why| why.starts_with("the window of 8 is not shorter than")), "{whys:?}");
    assert!(found.unseen().contains(&"mask-window-missing"));
    let full = of_seeded(&seeded, &seeded.prompt);
    assert!(why(&full, "mask-window-missing").is_empty());
}

#[test]
fn as_many_key_heads_as_heads_hide_the_map() {
    let seeded = seeded::square(3);
    let found = of_seeded(&seeded, &seeded.prompt);
    assert_eq!(why(&found, "attn-gqa-map:mod"), ["no grouped heads"]);
    // The oracle's 4/2 heads hide one of the two maps.
    let llama = of_bundled("llama").unwrap();
    assert_eq!(why(&llama, "attn-gqa-map:div-kv"), ["with 4/2 heads both maps are the same"]);
    assert!(why(&llama, "attn-gqa-map:mod").is_empty());
}

#[test]
fn the_page_is_current() {
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("MUTANTS.md");
    let stored = std::fs::read_to_string(page).unwrap();
    assert!(
        stored == catalogue::markdown(),
        "MUTANTS.md is not what `karat audit --catalogue` prints; run it and review the difference"
    );
}

#[test]
fn the_command_reports_in_json_and_fails_a_blind_fixture() {
    let run = |args: &[&str]| {
        let output = Command::new(env!("CARGO_BIN_EXE_karat")).args(args).output().unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        (output.status.code(), text, String::from_utf8(output.stderr).unwrap())
    };
    let (code, text, _) = run(&["audit", "llama", "--format", "json"]);
    assert_eq!(code, Some(3));
    let json: serde_json::Value = serde_json::from_str(&text).unwrap();
    assert_eq!((&json["schema"], &json["verdict"]), (&"karat/audit/1".into(), &"MISTRUSTED".into()));
    let kills = json["kills"].as_array().unwrap();
    assert_eq!(json["killed"], kills.len());
    let transposed = |kill: &&serde_json::Value| {
        kill["mutant"] == "lin-transpose-square" && kill["site"] == "layers.1.q_proj"
    };
    assert_eq!(kills.iter().find(transposed).unwrap()["verdict_site"], "prefill.layers.1.q_proj");
    let (code, text, _) = run(&["audit", "heads-6-2", "heads-8-2-windows", "steep"]);
    assert_eq!(code, Some(0), "{text}");
    let (code, _, error) = run(&["audit", "llama", "--contract", "fp7"]);
    assert_eq!((code, error.lines().count()), (Some(2), 1), "{error}");
}

/// Every op stands in the table once, with all mutants that were tried at its sites.
#[test]
fn the_table_covers_every_op() {
    let found = of_bundled("llama").unwrap();
    let tried: usize = found.coverage.iter().map(|row| row.mutants).sum();
    assert_eq!(tried, found.mutants - found.equivalent);
    let q = found.coverage.iter().find(|row| row.sites.contains(&"q_proj")).unwrap();
    // Hidden 32, four heads of 8, three layers; the queries share their shape with the output projection.
    assert_eq!((q.op, &*q.shape, &q.layers[..], q.sight), ("linear", "32x32", &[0, 1, 2][..], Sight::Judged));
}
