//! Mistakes that were measured on another implementation: each was put into a numpy program (float64) that
//! shares no code with this one, and the first tap of the golden that moved was noted. The mutant of the same
//! mistake, free-running, must leave the golden at the same tap.

use conformance::contract::Contract;
use conformance::golden_gate::{GateError, Taps, compare_tap, passes_of};
use conformance::mutants::Selection;
use conformance::subject::{MutantSubject, Subject};
use fixtures::Package;
use golden::Dump;
use reference::Model;
use spec::{Config, Site, Weights};
use std::collections::BTreeMap;

/// Package, mutant, first tap that moves.
const MEASURED: &[(&str, &str, &str)] = &[
    ("deepseek_v3", "moe-bias-in-weights", "layers.1.experts_out"),
    ("deepseek_v3", "moe-choice-bias-ignored", "layers.1.experts_out"),
    ("deepseek_v3", "moe-group-select:ignored", "layers.1.experts_out"),
    ("deepseek_v3", "moe-group-select:max", "layers.1.experts_out"),
    ("deepseek_v3", "moe-scaling-factor", "layers.1.experts_out"),
    ("deepseek_v3", "rope-pairing", "layers.0.q_rope"),
    ("deepseek_v3", "mla-mscale", "layers.0.attn_probs"),
    ("deepseek_v3", "rope-yarn-magnitude", "rope.cos"),
    ("deepseek_v3", "rope-scaling-ignored", "rope.cos"),
    ("gemma2", "mask-window-off-by-one:wide", "layers.0.attn_probs"),
    ("gemma2", "mask-window-off-by-one:narrow", "layers.0.attn_probs"),
    ("gemma2", "mask-window-missing", "layers.0.attn_probs"),
    ("gemma2", "norm-plus-one-missing", "layers.0.attn_norm"),
    ("gemma2", "attn-softcap-missing", "layers.0.attn_probs"),
    ("gemma2", "attn-softcap-missing:scale-after", "layers.0.attn_probs"),
    ("gemma2", "head-softcap-missing", "logits"),
    ("gemma2", "attn-scale-wrong-dim:head-dim", "layers.0.attn_probs"),
    ("gemma2", "emb-scale-missing", "embed"),
    ("gemma2", "emb-scale-rounding", "embed"),
    ("gemma2", "mlp-act-variant:erf", "layers.0.mlp_act"),
    ("gemma3", "mask-window-off-by-one:wide", "layers.0.attn_probs"),
    ("gemma3", "mask-window-off-by-one:narrow", "layers.0.attn_probs"),
    ("gemma3", "mask-window-missing", "layers.0.attn_probs"),
    ("gemma3", "norm-plus-one-missing", "layers.0.attn_norm"),
    ("gemma3", "attn-scale-wrong-dim:head-dim", "layers.0.attn_probs"),
    ("gemma3", "emb-scale-missing", "embed"),
    ("gemma3", "emb-scale-rounding", "embed"),
    ("gemma3", "mlp-act-variant:erf", "layers.0.mlp_act"),
    ("gemma3", "rope-local-global-mixed@layers.0.*", "layers.0.q_rope"),
    ("gemma3", "rope-local-global-mixed@layers.1.*", "layers.1.q_rope"),
    ("gemma3", "rope-scaling-ignored", "rope.full_attention.cos"),
    ("gemma3n", "mlp-sparsity-std", "layers.0.mlp_act"),
    ("gemma3n", "altup-coefs-transposed", "layers.0.attn_norm"),
    ("gemma3n", "ple-branch-position:streams", "layers.0.out"),
    ("gemma4_dense", "head-softcap-missing", "logits"),
    ("gemma4_dense", "emb-scale-missing", "embed"),
    ("gemma4_dense", "rope-partial-convention:rotated", "rope.full_attention.cos"),
    ("gemma4_dense", "attn-scale-wrong-dim:head-dim", "layers.0.attn_probs"),
    ("gemma4_dense", "attn-v-norm-missing", "layers.0.attn_ctx"),
    ("gemma4_dense", "attn-keqv-stage", "layers.3.attn_ctx"),
    ("gemma4_dense", "layer-scalar-branch:missing", "layers.0.out"),
    ("gemma4_e", "mask-window-off-by-one:wide", "layers.0.attn_probs"),
    ("gemma4_e", "mask-window-off-by-one:narrow", "layers.0.attn_probs"),
    ("gemma4_e", "mask-window-missing", "layers.0.attn_probs"),
    ("gemma4_e", "norm-plus-one-extra@layers.*", "layers.0.attn_norm"),
    ("gemma4_e", "head-softcap-missing", "logits"),
    ("gemma4_e", "emb-scale-missing", "embed"),
    ("gemma4_e", "emb-scale-rounding", "embed"),
    ("gemma4_e", "mlp-act-variant:erf", "layers.0.mlp_act"),
    ("gemma4_e", "rope-partial-convention:rotated", "rope.full_attention.cos"),
    ("gemma4_e", "attn-scale-wrong-dim:head-dim", "layers.0.attn_probs"),
    ("gemma4_e", "attn-v-norm-missing", "layers.0.attn_ctx"),
    ("gemma4_e", "kvshare-donor", "layers.3.attn_probs"),
    ("gemma4_e", "ple-scale-missing:sum", "layers.0.out"),
    ("gemma4_e", "ple-scale-missing:token", "ple_token"),
    ("gemma4_e", "ple-scale-missing:context", "ple_ctx"),
    ("gemma4_e", "ple-scale-missing:norm", "ple_ctx"),
    ("gemma4_e", "ple-wrong-slice:transposed", "layers.0.out"),
    ("gemma4_e", "mlp-act-variant:identity@layers.*.ple_act", "layers.0.out"),
    ("gemma4_e", "ple-branch-position", "layers.0.out"),
    ("gemma4_e", "layer-scalar-branch:missing", "layers.0.out"),
    ("gemma4_moe", "moe-gate-up-layout:interleaved", "layers.0.experts_out"),
    ("gemma4_moe", "moe-gate-up-layout:swapped", "layers.0.experts_out"),
    ("gemma4_moe", "moe-router-input:experts", "layers.0.experts_out"),
    ("gemma4_moe", "moe-router-input", "layers.0.experts_out"),
    ("gemma4_moe", "moe-expert-scale:missing", "layers.0.experts_out"),
    ("glm4_moe", "moe-bias-in-weights", "layers.1.experts_out"),
    ("glm4_moe", "moe-choice-bias-ignored", "layers.1.experts_out"),
    ("glm4_moe", "moe-scaling-factor", "layers.1.experts_out"),
    ("gpt_oss", "attn-gqa-map:mod", "layers.0.attn_probs"),
    ("gpt_oss", "mask-window-off-by-one:wide", "layers.0.attn_probs"),
    ("gpt_oss", "mask-window-off-by-one:narrow", "layers.0.attn_probs"),
    ("gpt_oss", "mask-window-missing", "layers.0.attn_probs"),
    ("gpt_oss", "rope-scaling-ignored", "rope.cos"),
    ("gpt_oss", "attn-sink", "layers.0.attn_probs"),
    ("gpt_oss", "rope-scaling-ignored:truncate", "rope.cos"),
    ("gpt_oss", "moe-gate-up-layout:interleaved", "layers.0.experts_out"),
    ("gpt_oss", "mlp-special-form:no-clamp", "layers.0.experts_out"),
    ("gpt_oss", "mlp-special-form:clamp-below", "layers.0.experts_out"),
    ("gpt_oss", "mlp-special-form:no-plus-one", "layers.0.experts_out"),
    ("gpt_oss", "mlp-special-form:alpha", "layers.0.experts_out"),
    ("gpt_oss", "moe-softmax-after-topk:before", "layers.0.experts_out"),
    ("granite", "res-multiplier", "layers.0.mlp_act"),
    ("granite", "head-logit-scale:inverse", "logits"),
    ("lfm2", "gdn-split-sizes:next", "layers.0.conv_out"),
    ("lfm2", "gdn-conv-silu-missing", "layers.0.conv_out"),
    ("llama", "rope-pairing", "layers.0.q_rope"),
    ("llama", "rope-scaling-ignored", "rope.cos"),
    ("llama", "rope-scaling-ignored:no-blend", "rope.cos"),
    ("llama", "rope-position-offset", "rope.cos"),
    ("llama", "attn-gqa-map:mod", "layers.0.attn_probs"),
    ("llama", "norm-eps-value:1e-6", "layers.0.attn_norm"),
    ("llama", "norm-plus-one-extra", "layers.0.attn_norm"),
    ("mistral", "mask-window-off-by-one:wide", "layers.0.attn_probs"),
    ("mistral", "mask-window-off-by-one:narrow", "layers.0.attn_probs"),
    ("mistral", "mask-window-missing", "layers.0.attn_probs"),
    ("olmo2", "norm-qk-axis:per-head", "layers.0.q_rope"),
    ("phi3", "lin-fused-qkv-layout:halves", "layers.0.mlp_act"),
    ("qwen2", "lin-bias-dropped", "layers.0.q_proj"),
    ("qwen3", "rope-pairing", "layers.0.q_rope"),
    ("qwen3", "attn-gqa-map:mod", "layers.0.attn_probs"),
    ("qwen3", "norm-qk-rope-order", "layers.0.attn_probs"),
    ("qwen3", "attn-scale-wrong-dim:hidden", "layers.0.attn_probs"),
    ("qwen3_5", "rope-position-offset", "rope.cos"),
    ("qwen3_5", "norm-plus-one-missing", "layers.0.attn_norm"),
    ("qwen3_5", "attn-gate-missing", "layers.3.attn_out"),
    ("qwen3_5", "attn-gate-missing:silu", "layers.3.attn_gated"),
    ("qwen3_5", "attn-gate-split", "layers.3.q_norm"),
    ("qwen3_5", "gdn-gated-norm-order", "layers.0.gdn_norm"),
    ("qwen3_5", "gdn-gated-norm-order:sigmoid", "layers.0.gdn_norm"),
    ("qwen3_5", "norm-plus-one-extra@layers.*.gdn_core_norm", "layers.0.gdn_norm"),
    ("qwen3_5", "gdn-beta:exchanged", "layers.0.gdn_beta"),
    ("qwen3_5", "gdn-softplus:bias", "layers.0.gdn_g"),
    ("qwen3_5", "gdn-decay-form:raw", "layers.0.gdn_g"),
    ("qwen3_5", "gdn-head-map", "layers.0.gdn_core"),
    ("qwen3_5", "gdn-l2norm-missing", "layers.0.gdn_core"),
    ("qwen3_5", "gdn-query-scale-missing", "layers.0.gdn_core"),
    ("qwen3_5", "gdn-update-order:decay-last", "layers.0.gdn_core"),
    ("qwen3_5", "gdn-update-order:read-first", "layers.0.gdn_core"),
    ("qwen3_5", "gdn-delta-missing", "layers.0.gdn_core"),
    ("qwen3_5", "gdn-conv-taps:reversed", "layers.0.conv_out"),
    ("qwen3_5", "gdn-conv-silu-missing", "layers.0.conv_out"),
    ("qwen3_5", "gdn-split-sizes:next", "layers.0.gdn_q"),
    ("qwen3_5_moe", "gdn-l2norm-missing:eps", "layers.0.gdn_core"),
    ("qwen3_5_moe", "gdn-query-scale-missing", "layers.0.gdn_core"),
    ("qwen3_5_moe", "moe-renorm", "layers.0.experts_out"),
    ("qwen3_5_moe", "attn-gate-missing@layers.*.shared_gated", "layers.0.moe_out"),
    ("qwen3_5_moe", "moe-gate-up-layout:interleaved", "layers.0.experts_out"),
    ("qwen3_5_moe", "moe-gate-up-layout:swapped", "layers.0.experts_out"),
    ("qwen3_moe", "moe-renorm", "layers.0.experts_out"),
    ("qwen3_next", "norm-plus-one-missing", "layers.0.attn_norm"),
    ("qwen3_next", "attn-gate-missing@layers.3.*", "layers.3.attn_out"),
    ("qwen3_next", "attn-gate-missing:silu@layers.3.*", "layers.3.attn_gated"),
    ("qwen3_next", "attn-gate-split", "layers.3.q_norm"),
    ("qwen3_next", "gdn-gated-norm-order", "layers.0.gdn_norm"),
    ("qwen3_next", "gdn-gated-norm-order:sigmoid", "layers.0.gdn_norm"),
    ("qwen3_next", "norm-plus-one-extra@layers.*.gdn_core_norm", "layers.0.gdn_norm"),
    ("qwen3_next", "gdn-beta:exchanged", "layers.0.gdn_beta"),
    ("qwen3_next", "gdn-softplus:bias", "layers.0.gdn_g"),
    ("qwen3_next", "gdn-decay-form:raw", "layers.0.gdn_g"),
    ("qwen3_next", "gdn-head-map", "layers.0.gdn_core"),
    ("qwen3_next", "gdn-l2norm-missing", "layers.0.gdn_core"),
    ("qwen3_next", "gdn-query-scale-missing", "layers.0.gdn_core"),
    ("qwen3_next", "gdn-update-order:decay-last", "layers.0.gdn_core"),
    ("qwen3_next", "gdn-update-order:read-first", "layers.0.gdn_core"),
    ("qwen3_next", "gdn-delta-missing", "layers.0.gdn_core"),
    ("qwen3_next", "gdn-conv-taps:reversed", "layers.0.conv_out"),
    ("qwen3_next", "gdn-conv-silu-missing", "layers.0.conv_out"),
    ("qwen3_next", "gdn-split-sizes:flat", "layers.0.conv_out"),
    ("qwen3_next", "moe-renorm", "layers.0.experts_out"),
    ("qwen3_next", "attn-gate-missing@layers.*.shared_gated", "layers.0.moe_out"),
    ("smollm3", "rope-nope-layers", "layers.1.attn_probs"),
];

/// Package, mutant, and a tap before the measured one at which it shows already: the other program was not compared
/// there.
const SOONER: &[(&str, &str, &str)] = &[
    ("deepseek_v3", "moe-bias-in-weights", "layers.1.router_weights"),
    ("deepseek_v3", "moe-choice-bias-ignored", "layers.1.router_index"),
    ("deepseek_v3", "moe-group-select:ignored", "layers.1.router_index"),
    ("deepseek_v3", "moe-group-select:max", "layers.1.router_index"),
    ("deepseek_v3", "moe-scaling-factor", "layers.1.router_weights"),
    ("gemma4_dense", "attn-v-norm-missing", "layers.0.v_norm"),
    ("gemma4_dense", "attn-keqv-stage", "layers.3.v_norm"),
    ("gemma4_e", "attn-v-norm-missing", "layers.0.v_norm"),
    ("gemma4_e", "ple-scale-missing:sum", "layers.0.ple_in"),
    ("gemma4_e", "ple-wrong-slice:transposed", "layers.0.ple_in"),
    ("gemma4_e", "mlp-act-variant:identity@layers.*.ple_act", "layers.0.ple_proj"),
    ("gemma4_e", "ple-branch-position", "layers.0.ple_gate"),
    ("gemma4_moe", "moe-router-input:experts", "layers.0.router_probs"),
    ("gemma4_moe", "moe-router-input", "layers.0.router_probs"),
    ("gemma4_moe", "moe-expert-scale:missing", "layers.0.router_weights"),
    ("glm4_moe", "moe-bias-in-weights", "layers.1.router_weights"),
    ("glm4_moe", "moe-choice-bias-ignored", "layers.1.router_index"),
    ("glm4_moe", "moe-scaling-factor", "layers.1.router_weights"),
    ("gpt_oss", "moe-softmax-after-topk:before", "layers.0.router_weights"),
    ("granite", "res-multiplier", "layers.0.resid_mid"),
    ("olmo2", "norm-qk-axis:per-head", "layers.0.q_norm"),
    ("phi3", "lin-fused-qkv-layout:halves", "layers.0.mlp_gate_up"),
    ("qwen3", "norm-qk-rope-order", "layers.0.q_rope"),
    ("qwen3_5", "attn-gate-missing", "layers.3.attn_gated"),
    ("qwen3_5_moe", "moe-renorm", "layers.0.router_weights"),
    ("qwen3_moe", "moe-renorm", "layers.0.router_weights"),
    ("qwen3_next", "attn-gate-missing@layers.3.*", "layers.3.attn_gated"),
    ("qwen3_next", "moe-renorm", "layers.0.router_weights"),
];

struct Opened {
    golden: Dump,
    model: Model,
}

fn open(name: &str) -> Opened {
    let package = Package::open(name).unwrap();
    let golden = Dump::open(package.dir()).unwrap();
    let config = Config::parse(package.config(), &[]).unwrap().config;
    let weights = Weights::load(&config, package.tensors()).unwrap();
    Opened { golden, model: Model::new(config, weights) }
}

/// The taps of the golden's first pass, in the order of the data flow, at which the mutant's run is beyond the limit
/// that the reference keeps.
fn moved(package: &Opened, mutant: &str) -> Vec<String> {
    let (contract, selection) = (Contract::named("f32").unwrap(), Selection::parse(mutant).unwrap());
    let prefill = &passes_of(&package.golden)[..1];
    let mut subject = MutantSubject::new(&package.model, &contract, &selection);
    let values = subject.pass(&prefill[0]).unwrap();
    assert!(!subject.applied().is_empty(), "{mutant} applies nowhere");
    let tap = |site: &Site| Some((("prefill".to_string(), *site), values.get(site)?));
    let taps: Taps = values.sites().filter_map(tap).collect();
    let beyond =
        |site: &String| match compare_tap(&package.golden, prefill, &taps, &format!("prefill.{site}")) {
            Ok(compared) => compared.is_some_and(|tap| tap.ratio > 1.0),
            Err(GateError::Shape { .. }) => true,
            Err(error) => panic!("{mutant}: {error}"),
        };
    reference_order(package).filter(beyond).collect()
}

/// The sites of a pass in the order in which they are computed; an oracle may name the sum of experts twice.
fn reference_order(package: &Opened) -> impl Iterator<Item = String> {
    let mut record = conformance::record::Record::default();
    package.model.pass(&mut record, &mut package.model.fresh(), &package.golden.manifest().prompt);
    let sites: Vec<Site> = record.take().unwrap().into_iter().map(|(site, _)| site).collect();
    sites.into_iter().map(|site| site.to_string())
}

#[test]
fn mutants_leave_the_golden_where_the_same_mistake_was_measured() {
    let mut opened: BTreeMap<&str, Opened> = BTreeMap::new();
    let mut off = Vec::new();
    for (name, mutant, tap) in MEASURED {
        let package = opened.entry(name).or_insert_with(|| open(name));
        let sooner = SOONER.iter().find(|(of, by, _)| (of, by) == (name, mutant)).map(|(_, _, tap)| *tap);
        let moved = moved(package, mutant);
        let first = moved.first().map(String::as_str);
        if first != Some(sooner.unwrap_or(tap)) || !moved.iter().any(|moved| moved == tap) {
            off.push(format!("{name} {mutant}: first {}, measured {tap}", first.unwrap_or("no tap")));
        }
    }
    assert!(off.is_empty(), "{} of {}:\n{}", off.len(), MEASURED.len(), off.join("\n"));
}

/// Without a mutant no tap moves.
#[test]
fn an_honest_run_leaves_no_golden() {
    let package = open("llama");
    let mut record = conformance::record::Record::default();
    let prefill = &passes_of(&package.golden)[..1];
    package.model.pass(&mut record, &mut package.model.fresh(), &prefill[0].ids);
    let taps: Taps = record
        .take()
        .unwrap()
        .into_iter()
        .map(|(site, value)| (("prefill".to_string(), site), value))
        .collect();
    let mut compared = 0;
    for site in reference_order(&package) {
        let tap = compare_tap(&package.golden, prefill, &taps, &format!("prefill.{site}")).unwrap();
        assert!(tap.as_ref().is_none_or(|tap| tap.ratio <= 1.0), "{site}: {tap:?}");
        compared += usize::from(tap.is_some());
    }
    assert!(compared > 20, "{compared} taps");
}
