//! The catalogue as a page, made from the tables in code.

use crate::mutants::FAMILIES;
use std::fmt::Write;

/// Mutants of the harness itself: what is broken, and the test that shows it.
pub const META: &[(&str, &str, &str)] = &[
    ("har-shared-oracle", "the oracle is the code under test", "a_golden_names_its_producer"),
    (
        "har-loose-metric",
        "a correlation or a share of matches in the place of bounds",
        "a_correlation_would_pass_what_the_judge_fails",
    ),
    ("har-position-zero", "only the first row, head or layer is compared", "the_last_element_is_compared"),
    ("har-flat-fixture", "zero, constant, diagonal or symmetric data", "flat_fixtures_are_mistrusted"),
    (
        "har-state-not-compared",
        "outputs are compared and caches are not",
        "a_wrong_cache_fails_although_logits_agree",
    ),
    ("har-nan-equal", "NaN, infinities or empty tensors count as equal", "not_a_number_is_never_equal"),
    (
        "har-prefix-compare",
        "the shorter of two tensors decides how much is compared",
        "short_and_long_tensors_fail",
    ),
    ("har-bound-scaled", "the limit follows the largest element", "a_quiet_channel_has_a_limit_of_its_own"),
    ("har-golden-overwritten", "a missing golden is made from the subject", "a_missing_golden_is_not_made"),
];

/// The page `MUTANTS.md`.
pub fn markdown() -> String {
    let mut page = String::from(
        "# Mutants\n\nEvery mistake that Karat can make on purpose, by id and variant, with what it computes \
         instead. `karat verify --mutate ID[:VARIANT][@SITE]` shows one, `karat audit` tries all of them, and a \
         failing `verify` is explained with them. This page is made by `karat audit --catalogue`.\n",
    );
    for (title, mutants) in FAMILIES {
        let _ = write!(page, "\n## {title}\n\n| mutant | computes | needs |\n|---|---|---|\n");
        for mutant in *mutants {
            let cell = |text: &str| text.replace('|', "\\|");
            let _ = writeln!(page, "| `{}` | {} | {} |", mutant.name(), cell(mutant.formula), mutant.needs);
        }
    }
    page.push_str(
        "\n## The harness itself\n\nA test breaks the harness's input in the named way and expects a failure.\n\n\
         | mutant | what is wrong | test |\n|---|---|---|\n",
    );
    for (id, what, test) in META {
        let _ = writeln!(page, "| `{id}` | {what} | `{test}` |");
    }
    page
}
