//! What other programs call a site: modules of Hugging Face models, tensors of llama.cpp.
//!
//! A name may stand for several sites, because a module of one name does different things in different
//! families (`post_attention_layernorm` is the norm before the feed-forward in llama, and of the attention
//! branch in gemma) and because llama.cpp calls a value the same before and after its rotation. The
//! candidates are listed in order; the first that the model has and whose shape fits is taken.

use spec::Site;
use spec::site::SITES;

/// What a name stands for.
#[derive(Clone, Debug, PartialEq)]
pub enum Meaning {
    /// A value of the pass that the name begins with, where it does; candidates in order.
    Site {
        /// `prefill`, `step1`, ..., `final`; nothing where the name says nothing.
        pass: Option<String>,
        /// Candidates.
        sites: Vec<Site>,
    },
    /// Logits of the last position, one array a generated token: this is the one numbered so.
    Logits(u64),
}

/// Modules inside a layer, as forward hooks name them.
const MODULES: &[(&str, &[&str])] = &[
    ("input_layernorm", &["attn_norm"]),
    ("operator_norm", &["attn_norm"]),
    ("self_attn.q_proj", &["q_proj"]),
    ("self_attn.k_proj", &["k_proj"]),
    ("self_attn.v_proj", &["v_proj"]),
    ("self_attn.qkv_proj", &["qkv_proj"]),
    ("self_attn.q_norm", &["q_norm"]),
    ("self_attn.k_norm", &["k_norm"]),
    ("self_attn.v_norm", &["v_norm"]),
    ("self_attn.q_layernorm", &["q_norm"]),
    ("self_attn.k_layernorm", &["k_norm"]),
    ("self_attn.o_proj", &["attn_out"]),
    ("self_attn.out_proj", &["attn_out"]),
    ("self_attn", &["attn_out"]),
    ("linear_attn.in_proj_qkvz", &["gdn_qkvz"]),
    ("linear_attn.in_proj_ba", &["gdn_ba"]),
    ("linear_attn.in_proj_qkv", &["gdn_qkv"]),
    ("linear_attn.in_proj_z", &["gdn_z"]),
    ("linear_attn.in_proj_b", &["gdn_b"]),
    ("linear_attn.in_proj_a", &["gdn_a"]),
    ("linear_attn.norm", &["gdn_norm"]),
    ("linear_attn.out_proj", &["attn_out"]),
    ("linear_attn", &["attn_out"]),
    ("conv.in_proj", &["conv_bcx"]),
    ("conv.out_proj", &["attn_out"]),
    ("conv", &["attn_out"]),
    ("post_attention_layernorm", &["post_attn_norm", "mlp_norm"]),
    ("pre_feedforward_layernorm", &["mlp_norm"]),
    ("ffn_norm", &["mlp_norm"]),
    ("post_feedforward_layernorm", &["post_mlp_norm"]),
    ("mlp.gate_proj", &["mlp_gate"]),
    ("mlp.up_proj", &["mlp_up"]),
    ("mlp.gate_up_proj", &["mlp_gate_up"]),
    ("mlp.down_proj", &["mlp_out"]),
    ("mlp.gate", &["router_logits"]),
    ("mlp.experts", &["experts_out"]),
    ("mlp.shared_expert", &["shared_out"]),
    ("mlp.shared_experts", &["shared_out"]),
    ("mlp", &["moe_out", "experts_out", "mlp_out"]),
    ("feed_forward.w1", &["mlp_gate"]),
    ("feed_forward.w3", &["mlp_up"]),
    ("feed_forward.w2", &["mlp_out"]),
    ("feed_forward", &["moe_out", "mlp_out"]),
    ("per_layer_input_gate", &["ple_gate"]),
    ("per_layer_projection", &["ple_proj"]),
    ("post_per_layer_input_norm", &["ple_norm"]),
];

/// Modules outside the layers.
const OUTER_MODULES: &[(&str, &[&str])] =
    &[("embed_tokens", &["embed"]), ("norm", &["final_norm"]), ("embedding_norm", &["final_norm"])];

/// Tensors of a layer as llama.cpp's evaluation callback names them, without `-LAYER`.
///
/// Scores (`kq`) are missing on purpose: llama.cpp scales them inside its softmax.
const TENSORS: &[(&str, &[&str])] = &[
    ("attn_norm", &["attn_norm"]),
    ("wqkv", &["qkv_proj"]),
    ("Qcur", &["q_rope", "q_proj"]),
    ("Kcur", &["k_rope", "k_proj"]),
    ("Vcur", &["v_proj"]),
    ("Qcur_normed", &["q_norm"]),
    ("Kcur_normed", &["k_norm"]),
    ("Vcur_normed", &["v_norm"]),
    ("kq_soft_max", &["attn_probs"]),
    ("kq_soft_max_ext", &["attn_probs"]),
    ("kqv_out", &["attn_ctx"]),
    ("attn_out", &["attn_out"]),
    ("attn_post_norm", &["post_attn_norm"]),
    ("sa_out", &["resid_mid"]),
    ("ffn_inp", &["resid_mid"]),
    ("ffn_norm", &["mlp_norm"]),
    ("ffn_gate", &["mlp_gate"]),
    ("ffn_up", &["mlp_up"]),
    ("ffn_gate_par", &["mlp_act"]),
    ("ffn_swiglu", &["mlp_act"]),
    ("ffn_geglu", &["mlp_act"]),
    ("ffn_out", &["mlp_out"]),
    ("ffn_post_norm", &["post_mlp_norm"]),
    ("ffn_moe_logits", &["router_logits"]),
    ("ffn_moe_topk", &["router_index"]),
    ("ffn_moe_weights", &["router_weights"]),
    ("ffn_moe_weights_norm", &["router_weights"]),
    ("ffn_moe_gate", &["expert_gate"]),
    ("ffn_moe_up", &["expert_up"]),
    ("ffn_moe_down", &["expert_down"]),
    ("ffn_moe_out", &["experts_out"]),
    ("ffn_shexp", &["shared_out"]),
    ("l_out", &["out"]),
];

/// Tensors of llama.cpp outside the layers.
const OUTER_TENSORS: &[(&str, &[&str])] = &[
    ("inp_embd", &["embed"]),
    ("inp_scaled", &["embed_scaled", "embed"]),
    ("result_norm", &["final_norm"]),
    ("result_output", &["logits"]),
];

/// Names that the independent oracle has and the registry calls otherwise, and sites that not every model
/// with a module of that name has.
const ORACLE: &[(&str, &[&str])] = &[
    ("recurrent_state", &["gdn_state"]),
    ("moe_out", &["moe_out", "experts_out"]),
    ("lm_head", &["lm_head", "logits"]),
];

/// In front of a number, these say that an array holds the logits of one position.
const LOGIT_FILES: &[&str] = &["", "logits", "logit", "step", "token", "tok", "pos"];

/// What the name of an array stands for, where that is known.
pub fn meaning(name: &str) -> Option<Meaning> {
    let (pass, rest) = split_pass(name);
    let sites = sites(rest);
    if !sites.is_empty() {
        return Some(Meaning::Site { pass: pass.map(str::to_string), sites });
    }
    let word = name.trim_end_matches(|c: char| c.is_ascii_digit());
    let number: u64 = name[word.len()..].parse().ok()?;
    let word = word.trim_end_matches(['_', '-', '.']).to_lowercase();
    LOGIT_FILES.contains(&&*word).then_some(Meaning::Logits(number))
}

/// The pass that a name begins with, and the rest.
pub fn split_pass(name: &str) -> (Option<&str>, &str) {
    match name.split_once('.') {
        Some((pass, rest)) if is_pass(pass) => (Some(pass), rest),
        _ => (None, name),
    }
}

fn is_pass(word: &str) -> bool {
    let numbered = |prefix: &str| word.strip_prefix(prefix).is_some_and(|n| n.parse::<u32>().is_ok());
    matches!(word, "prefill" | "final") || numbered("step")
}

/// The candidates for a name without its pass.
fn sites(name: &str) -> Vec<Site> {
    if let Some(site) = Site::parse(name) {
        return match find(ORACLE, site.name) {
            Some(names) => named(site.layer, names),
            None => vec![site],
        };
    }
    // llama.cpp: Qcur-0; result_output.
    if let Some(names) = find(OUTER_TENSORS, name) {
        return named(None, names);
    }
    if let Some((tensor, layer)) = name.rsplit_once('-')
        && let (Some(names), Ok(layer)) = (find(TENSORS, tensor), layer.parse())
    {
        return named(Some(layer), names);
    }
    // Modules: the wrappers around the stack, then the module, then how the hook's owner marked its output.
    let mut module = name;
    for wrapper in ["model.", "language_model.", "model.", "transformer."] {
        module = module.strip_prefix(wrapper).unwrap_or(module);
    }
    for mark in [".0", ".output"] {
        module = module.strip_suffix(mark).filter(|rest| *rest != "layers").unwrap_or(module);
    }
    if let Some(names) = find(OUTER_MODULES, module) {
        return named(None, names);
    }
    let Some(inside) = module.strip_prefix("layers.") else { return vec![] };
    let (layer, part) = inside.split_once('.').unwrap_or((inside, ""));
    let Ok(layer) = layer.parse() else { return vec![] };
    match part {
        "" => named(Some(layer), &["out"]),
        _ => find(MODULES, part).or(find(ORACLE, part)).map_or(vec![], |names| named(Some(layer), names)),
    }
}

fn find(table: &[(&str, &'static [&'static str])], name: &str) -> Option<&'static [&'static str]> {
    table.iter().find(|(known, _)| *known == name).map(|(_, names)| *names)
}

fn named(layer: Option<u32>, names: &[&'static str]) -> Vec<Site> {
    let site = |name: &&str| SITES.iter().find(|info| info.name == *name).map(|info| info.name);
    names.iter().filter_map(site).map(|name| Site { layer, name }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn says(name: &str) -> String {
        match meaning(name) {
            None => "nothing".into(),
            Some(Meaning::Logits(n)) => format!("logits {n}"),
            Some(Meaning::Site { pass, sites }) => {
                let sites: Vec<String> = sites.iter().map(Site::to_string).collect();
                format!("{}{}", pass.map_or(String::new(), |pass| pass + ": "), sites.join(" or "))
            }
        }
    }

    #[test]
    fn names_of_three_worlds() {
        for (name, expected) in [
            ("prefill.layers.3.q_rope", "prefill: layers.3.q_rope"),
            ("logits", "logits"),
            ("final.layers.1.recurrent_state", "final: layers.1.gdn_state"),
            ("model.embed_tokens", "embed"),
            ("model.layers.0.self_attn.q_proj", "layers.0.q_proj"),
            ("model.layers.12.self_attn.q_proj.output", "layers.12.q_proj"),
            ("model.language_model.layers.0.mlp.down_proj", "layers.0.mlp_out"),
            (
                "step2.model.layers.1.post_attention_layernorm",
                "step2: layers.1.post_attn_norm or layers.1.mlp_norm",
            ),
            ("model.layers.7", "layers.7.out"),
            ("model.layers.0.output.0", "layers.0.out"),
            ("lm_head", "lm_head or logits"),
            ("Qcur-0", "layers.0.q_rope or layers.0.q_proj"),
            ("ffn_out-3", "layers.3.mlp_out"),
            ("l_out-2", "layers.2.out"),
            ("result_output", "logits"),
            ("logits_0007", "logits 7"),
            ("step-3", "logits 3"),
            ("12", "logits 12"),
            ("kq-0", "nothing"),
            ("model.layers.0.self_attn.rotary", "nothing"),
            ("weights_3", "nothing"),
        ] {
            assert_eq!(says(name), expected, "{name}");
        }
    }

    #[test]
    fn every_name_in_the_tables_is_a_site() {
        for (name, sites) in [MODULES, OUTER_MODULES, TENSORS, OUTER_TENSORS, ORACLE].concat() {
            assert_eq!(named(None, sites).len(), sites.len(), "{name}");
        }
    }
}
