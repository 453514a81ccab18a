//! The HTML report in a real browser: it draws what it should and says nothing on the console.
//!
//! Needs Chromium, on the path or named by `KARAT_BROWSER`: `cargo test --release -p karat --test browser -- --ignored`.

use conformance::report::html;
use conformance::verify::PackageResult;
use std::path::Path;
use std::process::Command;

fn browser() -> String {
    let named = std::env::var("KARAT_BROWSER").ok();
    let usual = ["chromium", "chromium-browser", "google-chrome"].map(String::from);
    let runs =
        |name: &String| Command::new(name).arg("--version").output().is_ok_and(|out| out.status.success());
    named.into_iter().chain(usual).find(runs).expect("Chromium on the path, or KARAT_BROWSER")
}

/// The page's elements after its scripts have run, and what they wrote to the console.
fn open(page: &Path) -> (String, Vec<String>) {
    let profile = tempfile::tempdir().unwrap();
    let output = Command::new(browser())
        .args([
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--enable-logging=stderr",
        ])
        .arg(format!("--user-data-dir={}", profile.path().display()))
        .args(["--dump-dom", &format!("file://{}", page.display())])
        .output()
        .unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let console =
        text(&output.stderr).lines().filter(|line| line.contains("CONSOLE")).map(String::from).collect();
    (text(&output.stdout), console)
}

/// The page that `karat verify ... --format html` writes.
fn report(args: &[&str]) -> (tempfile::TempDir, std::path::PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let page = dir.path().join("report.html");
    let mut command = assert_cmd::Command::cargo_bin("karat").unwrap();
    command.arg("verify").args(args).args(["--format", "html", "--output"]).arg(&page).output().unwrap();
    (dir, page)
}

#[test]
#[ignore = "needs Chromium"]
fn a_failure_is_drawn_with_its_site_and_explanation() {
    let (_dir, page) = report(&["llama", "qwen3", "--mutate", "lin-transpose-square@layers.1.q_proj"]);
    let (dom, console) = open(&page);
    assert_eq!(console, Vec::<String>::new());
    for shown in [
        "FAILED",
        "prefill.layers.1.q_proj",
        "y = x·W instead of x·Wᵀ",
        "runner-up",
        "own and inherited error",
    ] {
        assert!(dom.contains(shown), "{shown} is on the page");
    }
    let pictures = dom.matches("<svg").count() + dom.matches("<canvas").count();
    assert!(pictures >= 3, "a timeline, a histogram and margins: {pictures} pictures");
}

#[test]
#[ignore = "needs Chromium"]
fn a_passing_run_is_drawn_too() {
    let (_dir, page) = report(&["llama"]);
    let (dom, console) = open(&page);
    assert_eq!(console, Vec::<String>::new());
    assert!(dom.contains("PASSED") && dom.contains("logits"));
}

#[test]
#[ignore = "needs Chromium"]
fn the_budget_of_the_layers_is_drawn() {
    let (_dir, page) = report(&["llama", "--budget"]);
    let (dom, console) = open(&page);
    assert_eq!(console, Vec::<String>::new());
    for shown in ["Where the logit error comes from", "layers.2.out", "of it open"] {
        assert!(dom.contains(shown), "{shown} is on the page");
    }
}

/// What the console would say: the check above can fail.
#[test]
#[ignore = "needs Chromium"]
fn a_broken_script_is_heard() {
    let dir = tempfile::tempdir().unwrap();
    let page = dir.path().join("page.html");
    std::fs::write(&page, "<p>here</p><script>nothing.of.this.kind()</script>").unwrap();
    let (dom, console) = open(&page);
    assert!(dom.contains("here"));
    assert!(console.iter().any(|line| line.contains("nothing is not defined")), "{console:?}");
}

/// Sixty layers of a failing run, every site with its heat map, are less than 5 MB.
#[test]
fn sixty_layers_fit_in_five_megabytes() {
    let mut result = failing();
    let layers = (0..60).flat_map(|layer| {
        let own = result.sites.iter().filter(|site| site.site.contains(".layers.1."));
        own.map(move |site| {
            let mut site = site.clone();
            site.site = site.site.replace(".layers.1.", &format!(".layers.{layer}."));
            site
        })
    });
    result.sites = layers.collect();
    let page = html::verify(&[result.clone()]);
    let size = page.len();
    assert!(result.sites.len() > 1000 && size > 100_000, "{} sites in {size} bytes", result.sites.len());
    assert!(size < 5_000_000, "{size} bytes");
}

fn failing() -> PackageResult {
    use conformance::contract::Contract;
    use conformance::mutants::Selection;
    use conformance::verify::{Loaded, Options, verify};
    use spec::{Config, Weights};
    let package = fixtures::Package::open("llama").unwrap();
    let config = Config::parse(package.config(), &[]).unwrap().config;
    let weights = Weights::load(&config, package.tensors()).unwrap();
    let loaded = Loaded::new("llama", config, weights);
    let (subject, contract) = ("npu".parse().unwrap(), Contract::named("int8").unwrap());
    let mutate = Selection::parse("residual-wrong:doubled").unwrap();
    let options =
        Options { mutate: Some(&mutate), steps: 4, pictures: true, ..Options::new(&subject, &contract) };
    let prompt: Vec<u32> = (0..33).map(|n| n * 7 % 90).collect();
    verify(&loaded, &prompt, &options, "karat verify".into()).unwrap()
}
