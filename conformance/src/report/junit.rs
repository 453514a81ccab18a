//! JUnit XML: a test suite a package, a test case a part and a failing site.

use crate::judge::Verdict;
use crate::verify::PackageResult;
use std::fmt::Write;

/// The report of `verify`.
pub fn verify(results: &[PackageResult]) -> String {
    let mut text =
        String::from("<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n<testsuites name=\"karat verify\">\n");
    for result in results {
        let cases = cases(result);
        let count = |kind: Kind| cases.iter().filter(|case| case.kind == kind).count();
        let _ = writeln!(
            text,
            "  <testsuite name=\"{}\" tests=\"{}\" failures=\"{}\" errors=\"{}\" skipped=\"{}\">",
            escaped(&result.package),
            cases.len(),
            count(Kind::Failure),
            count(Kind::Error),
            count(Kind::Skipped)
        );
        for case in &cases {
            let open = format!(
                "    <testcase classname=\"{}.{}\" name=\"{}\"",
                escaped(&result.package),
                escaped(&result.subject),
                escaped(&case.name)
            );
            let _ = match case.kind {
                Kind::Passed => writeln!(text, "{open}/>"),
                kind => writeln!(
                    text,
                    "{open}><{} message=\"{}\"/></testcase>",
                    kind.element(),
                    escaped(&case.message)
                ),
            };
        }
        text.push_str("  </testsuite>\n");
    }
    text + "</testsuites>\n"
}

#[derive(Clone, Copy, PartialEq)]
enum Kind {
    Passed,
    Failure,
    Error,
    Skipped,
}

impl Kind {
    fn of(verdict: Verdict, fails: bool) -> Kind {
        match verdict {
            Verdict::Skipped => Kind::Skipped,
            Verdict::NotSupported | Verdict::Crashed | Verdict::Broken | Verdict::Mistrusted => Kind::Error,
            _ if fails => Kind::Failure,
            _ => Kind::Passed,
        }
    }

    fn element(self) -> &'static str {
        match self {
            Kind::Failure => "failure",
            Kind::Error => "error",
            Kind::Skipped | Kind::Passed => "skipped",
        }
    }
}

struct Case {
    name: String,
    kind: Kind,
    message: String,
}

fn cases(result: &PackageResult) -> Vec<Case> {
    let case = |name: &str, verdict: Verdict, message: &str| Case {
        name: name.to_string(),
        kind: Kind::of(verdict, verdict >= Verdict::Failed),
        message: message.to_string(),
    };
    let reason = |text: &Option<String>| text.clone().unwrap_or_default();
    let computes = result.explanation.as_ref().and_then(|found| found.named.as_ref());
    let why: Vec<String> = [
        result.reason.clone(),
        computes.map(|named| format!("computes {}", named.formula)),
        result.as_if.as_ref().map(|as_if| format!("as if {}", as_if.says)),
    ]
    .into_iter()
    .flatten()
    .collect();
    let mut cases = vec![
        case("verdict", result.verdict, &why.join("; ")),
        case("reference", result.reference.verdict, &reason(&result.reference.reason)),
    ];
    if let Some(logits) = &result.logits {
        let (equal, all) = logits.argmax_equal;
        cases.push(case("logits", logits.verdict, &format!("argmax equal at {equal} of {all} positions")));
    }
    if let Some(walked) = &result.draft {
        cases.push(case("draft", walked.verdict, &walked.summary()));
    }
    for problem in &result.problems {
        cases.push(case("unusable", Verdict::Mistrusted, problem));
    }
    for name in &result.unmatched {
        cases.push(case("unmatched", Verdict::Skipped, &format!("{name}: no site was found for it")));
    }
    cases.extend(result.sites.iter().map(|site| Case {
        name: site.site.clone(),
        kind: Kind::of(site.verdict, site.verdict == Verdict::Failed || site.less_precise()),
        message: format!(
            "{}: {} of {} elements, rms z {:.3}, {}",
            site.verdict.name(),
            site.wrong,
            site.elements,
            site.z_rms,
            reason(&site.pattern)
        ),
    }));
    cases
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}
