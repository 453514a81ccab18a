//! The catalogue as a page, made from the tables in code.

use crate::mutants::{FAMILIES, device};
use crate::{draft, edits};
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

/// Mistakes that are on the list and cannot be made yet.
pub const MISSING: &[(&str, &str)] = &[
    ("lin-delta-weight-dropped", "no family has adapters or shared blocks"),
    ("pack-metadata-off-by-one", "made in the package: `wgt-group-scale`"),
    ("pack-rope-permutation-skipped", "made in the package: `wgt-rope-permuted`"),
    ("cache-stale-content", "an image is a function of weights that never change under it"),
    ("q-kquant-scale-unpack", "the decoders of containers have tests of their own against published vectors"),
    ("q-kquant-lane-layout", "as `q-kquant-scale-unpack`"),
    ("q-bit-geometry", "as `q-kquant-scale-unpack`"),
    ("q-scale-type-confused", "as `q-kquant-scale-unpack`"),
    ("q-subnormal-flushed", "as `q-kquant-scale-unpack`"),
    ("rope-batch-positions", "one sequence at a time: no ragged batches"),
    ("rope-mrope-layout", "text alone: one position a token"),
    ("attn-softcap-after-mask", "the cap and the mask are ops of their own, in that order"),
    ("attn-splitkv-combine", "attention is not split over keys"),
    ("attn-config-factor-dropped", "made in the package: `cfg-factor-dropped`, `cfg-softcap`"),
    ("mask-window-prefill-cap", "no key is dropped before its pass is over"),
    ("mask-leftpad", "one sequence at a time: no padding"),
    ("mask-fully-masked-row", "a token always sees itself"),
    ("kv-ring", "caches are not rings"),
    ("kv-reuse-index", "no reuse of segments between requests"),
    ("kv-key-identity", "no cache of prefixes"),
    ("kv-reset-missing", "one sequence a run; the device's own tests run A, B, A"),
    ("kv-head-offset", "caches are not split over devices"),
    ("moe-shared-gate-missing", "made as `attn-gate-missing` at the shared expert's gate"),
    ("moe-expert-bias-unweighted", "made as `lin-bias-dropped` at the experts' sites"),
    ("gdn-chunk-tail", "the delta rule runs token by token"),
    ("gdn-chunk-algebra", "as `gdn-chunk-tail`"),
    ("gdn-pad-contaminates", "one sequence at a time: no padding"),
    ("gdn-gate-corner", "a matter of values: `check` has gates from -100 to 100"),
    ("gdn-axis-swap", "heads and tokens differ in number, so that every shape changes"),
    ("kvshare-offset", "the query of a sharing layer is turned like any other: see `rope-position-offset`"),
    ("head-vocab-rows", "no family has a head narrower than its table"),
    ("num-f16-overflow", "no contract has f16"),
    ("num-scale-late", "no contract has a rounding inside the score"),
    ("spec-draft-residual-dropped", "made as `residual-wrong:dropped` at the draft's sites"),
    ("spec-draft-kv-stale", "rows of a block leave the cache in every pass"),
    (
        "spec-draft-config-leak",
        "made in the package, one edit a key: `cfg-rope-theta`, `cfg-heads` and others change drafts too",
    ),
    ("spec-block-width-stale", "one block at a time, of any width"),
    ("spec-context-slot", "one sequence at a time"),
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
        "\n## The device\n\nHooks in the NPU path; `karat verify --subject npu --mutate ID[:VARIANT]` runs it with one.\n\n\
         | mutant | does | needs |\n|---|---|---|\n",
    );
    for mutant in device::MUTANTS.iter().map(|m| &m.mutant) {
        let _ = writeln!(page, "| `{}` | {} | {} |", mutant.name(), mutant.formula, mutant.needs);
    }
    page.push_str(
        "\n## The package\n\nEdits of config and weights; `karat verify --mutate ID[:VARIANT]` runs the edited model, and a \
         failing `verify` says which edit its first wrong site agrees with.\n\n\
         | mutant | computes | needs |\n|---|---|---|\n",
    );
    for mutant in edits::all().map(|edit| &edit.mutant) {
        let _ = writeln!(page, "| `{}` | {} | {} |", mutant.name(), mutant.formula, mutant.needs);
    }
    page.push_str(
        "\n## The speculative loop\n\nThe loop around a target and its draft; `karat verify PAIR --mutate ID[:VARIANT]` walks with the \
         mistake.\n\n| mutant | does | needs |\n|---|---|---|\n",
    );
    for mutant in draft::MUTANTS.iter().map(|made| &made.mutant) {
        let _ = writeln!(page, "| `{}` | {} | {} |", mutant.name(), mutant.formula, mutant.needs);
    }
    page.push_str(
        "\n## The harness itself\n\nA test breaks the harness's input in the named way and expects a failure.\n\n\
         | mutant | what is wrong | test |\n|---|---|---|\n",
    );
    for (id, what, test) in META {
        let _ = writeln!(page, "| `{id}` | {what} | `{test}` |");
    }
    page.push_str(
        "\n## Not made here\n\nRows of the published list of mistakes that have no entry of their own above, and why.\n\n\
         | mutant | why |\n|---|---|\n",
    );
    for (id, why) in MISSING {
        let _ = writeln!(page, "| `{id}` | {why} |");
    }
    page
}
