//! Names of taps, and the order in which values flow through a run.

/// Splits a tap's name into its pass and its site.
///
/// `"prefill.layers.3.q_rope"` gives `("prefill", "layers.3.q_rope")`, `"step1.logits"` gives
/// `("step1", "logits")`. A name without a dot is a site without a pass: `("", name)`.
pub fn split_tap(name: &str) -> (&str, &str) {
    name.split_once('.').unwrap_or(("", name))
}

/// Where a pass stands in a run: `target`, `prefill`, `step1`, `step2`, …, `pass0`, `pass1`, …, others, `final`.
///
/// The second number counts inside the first. `target` rows of a draft oracle come first because the
/// draft passes read them.
pub fn pass_rank(pass: &str) -> (u8, u64) {
    let numbered = |prefix: &str| pass.strip_prefix(prefix).and_then(|n| n.parse::<u64>().ok());
    match pass {
        "target" => (0, 0),
        "prefill" => (1, 0),
        "final" => (5, 0),
        _ => match (numbered("step"), numbered("pass")) {
            (Some(n), _) => (2, n),
            (_, Some(n)) => (3, n),
            _ => (4, 0),
        },
    }
}

/// A tap's place in the data flow; smaller is earlier.
///
/// Ordered by pass, then by what comes before, in and after the layers, then by layer. Inside a layer the
/// order is the caller's (that of a manifest), so sort stably or add a rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct TapKey {
    pass: (u8, u64),
    stage: u8,
    layer: u64,
}

impl TapKey {
    /// The place of the tap called `name`.
    pub fn of(name: &str) -> TapKey {
        let (pass, site) = split_tap(name);
        let (stage, layer) = match site {
            "embed" | "noise" => (0, 0),
            "final_norm" => (3, 0),
            "logits" => (4, 0),
            // Tables of angles, per-layer embeddings and a draft's context are made before the layers read them.
            _ => match layer_of(site) {
                Some(layer) => (2, layer),
                None => (1, 0),
            },
        };
        TapKey { pass: pass_rank(pass), stage, layer }
    }
}

fn layer_of(site: &str) -> Option<u64> {
    site.strip_prefix("layers.")?.split('.').next()?.parse().ok()
}

/// Where the last part of a site usually stands inside its layer.
///
/// Needed for the oracle's files, which list taps by the alphabet. The order holds for every family
/// whose taps it names, since a block's own norm, projections and output follow one another in all of
/// them. A part that is not named here ranks between the mixer and the MLP.
pub(crate) fn usual_rank(name: &str) -> usize {
    let (_, site) = split_tap(name);
    let part = match layer_of(site) {
        Some(_) => site.splitn(3, '.').nth(2).unwrap_or(site),
        None => site,
    };
    let unknown = USUAL_ORDER.iter().position(|&p| p == "resid_mid").unwrap_or(0);
    USUAL_ORDER.iter().position(|&p| p == part).unwrap_or(unknown)
}

#[rustfmt::skip]
const USUAL_ORDER: &[&str] = &[
    "embed", "noise", "ctx_in", "ctx_fc", "ctx", "ple_token", "ple_ctx_proj", "ple_ctx",
    "attn_norm", "laurel",
    "qkv_proj", "q_proj", "k_proj", "v_proj", "q_a", "q_a_norm", "q_b", "kv_a", "kv_a_norm", "kv_b",
    "q_norm", "k_norm", "v_norm", "q_rope", "k_rope", "attn_q", "attn_k", "attn_v",
    "attn_probs", "attn_ctx", "attn_gated",
    "gdn_qkvz", "gdn_ba", "gdn_qkv", "gdn_z", "gdn_b", "gdn_a", "conv_out", "gdn_q", "gdn_k", "gdn_v",
    "gdn_g", "gdn_beta", "gdn_core", "gdn_state", "gdn_norm",
    "attn_out", "post_attn_norm", "resid_mid",
    "mlp_norm", "mlp_gate", "mlp_up", "mlp_act", "mlp_out",
    "router_logits", "router_probs", "router_index", "router_weights",
    "experts_out", "shared_out", "shared_gate", "moe_out", "post_mlp_norm",
    "ple_in", "ple_gate", "ple_proj", "ple_norm", "out",
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn splits_at_the_first_dot() {
        assert_eq!(split_tap("prefill.layers.3.q_rope"), ("prefill", "layers.3.q_rope"));
        assert_eq!(split_tap("step1.logits"), ("step1", "logits"));
        assert_eq!(split_tap("logits"), ("", "logits"));
    }

    // Layer 10 comes after layer 9 and step10 after step9, which the alphabet gets wrong.
    #[test]
    fn numbers_count_as_numbers() {
        let flow = [
            "target.layers.0.out",
            "prefill.embed",
            "prefill.rope.cos",
            "prefill.layers.9.out",
            "prefill.layers.10.attn_norm",
            "prefill.final_norm",
            "prefill.logits",
            "step9.logits",
            "step10.embed",
            "pass0.noise",
            "pass0.ctx",
            "pass0.layers.0.out",
            "final.layers.0.conv_state",
        ];
        for pair in flow.windows(2) {
            assert!(TapKey::of(pair[0]) < TapKey::of(pair[1]), "{} before {}", pair[0], pair[1]);
        }
    }

    #[test]
    fn inside_a_layer_by_flow() {
        let flow = [
            "attn_norm",
            "q_proj",
            "q_rope",
            "attn_probs",
            "attn_ctx",
            "attn_out",
            "resid_mid",
            "mlp_gate",
            "out",
        ];
        for pair in flow.windows(2) {
            let rank = |part: &str| usual_rank(&format!("prefill.layers.1.{part}"));
            assert!(rank(pair[0]) < rank(pair[1]), "{} before {}", pair[0], pair[1]);
        }
    }
}
