//! Names of op results. The names and axes are those of the oracle; one registry lists them all.

use std::fmt;

/// The name of one op's result in a model: `embed`, `layers.3.q_rope`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct Site {
    /// The layer, for results inside one.
    pub layer: Option<u32>,
    /// A name of the [`SITES`] registry.
    pub name: &'static str,
}

impl Site {
    /// A result outside the layers.
    pub fn model(name: &'static str) -> Site {
        Site { layer: None, name: registered(name) }
    }

    /// A result of layer `layer`.
    pub fn layer(layer: usize, name: &'static str) -> Site {
        Site { layer: Some(layer as u32), name: registered(name) }
    }

    /// The site called `name`, where the registry has it: `layers.3.q_rope`.
    pub fn parse(name: &str) -> Option<Site> {
        let (layer, leaf) = match name.strip_prefix("layers.") {
            None => (None, name),
            Some(rest) => {
                let (layer, leaf) = rest.split_once('.')?;
                (Some(layer.parse().ok()?), leaf)
            }
        };
        SITES.iter().find(|info| info.name == leaf).map(|info| Site { layer, name: info.name })
    }

    /// Its entry in the registry.
    pub fn info(&self) -> &'static SiteInfo {
        SITES.iter().find(|info| info.name == self.name).expect("a site is made from the registry")
    }
}

impl fmt::Display for Site {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.layer {
            Some(layer) => write!(f, "layers.{layer}.{}", self.name),
            None => f.write_str(self.name),
        }
    }
}

fn registered(name: &'static str) -> &'static str {
    assert!(SITES.iter().any(|info| info.name == name), "site {name} is not in the registry");
    name
}

/// Where a layer's sites are named from: `at.site("q_proj")`.
#[derive(Clone, Copy, Debug)]
pub struct At(pub Option<usize>);

impl At {
    /// Outside the layers.
    pub const MODEL: At = At(None);

    /// Inside layer `i`.
    pub fn layer(i: usize) -> At {
        At(Some(i))
    }

    /// The site `name` here.
    pub fn site(&self, name: &'static str) -> Site {
        match self.0 {
            Some(layer) => Site::layer(layer, name),
            None => Site::model(name),
        }
    }
}

/// What a site holds.
#[derive(Debug, PartialEq)]
pub struct SiteInfo {
    /// The name without pass and layer.
    pub name: &'static str,
    /// The axes, slowest first.
    pub axes: &'static [&'static str],
    /// What the value is.
    pub what: &'static str,
}

macro_rules! sites {
    ($($name:literal [$($axis:literal),*] $what:literal)*) => {
        /// Every site of every model, in the order of the data flow inside a pass.
        pub static SITES: &[SiteInfo] = &[$(SiteInfo { name: $name, axes: &[$($axis),*], what: $what }),*];
    };
}

sites! {
    "ctx_in" ["tokens", "taps*hidden"] "tapped layer outputs of the target side by side, new context rows only"
    "ctx_fc" ["tokens", "hidden"] "tapped layer outputs fused"
    "ctx" ["tokens", "hidden"] "context rows: the fused rows after their norm"
    "noise" ["tokens", "hidden"] "block rows: embedding of anchor and masks, scaled"
    "embed" ["tokens", "hidden"] "embedding rows, scaled where the embedding module scales"
    "embed_scaled" ["tokens", "hidden"] "embedding rows times a multiplier that stands outside the module"
    "ple_token" ["tokens", "layers*ple"] "scaled rows of the per-layer table, layer-major"
    "ple_ctx_proj" ["tokens", "layers*ple"] "projection of the embedding for every layer"
    "ple_ctx_scaled" ["tokens", "layers*ple"] "that projection over the root of hidden"
    "ple_ctx" ["tokens", "layers", "ple"] "that projection after the norm of each layer's part"
    "rope.cos" ["tokens", "rotary"] "cosine table as applied"
    "rope.sin" ["tokens", "rotary"] "sine table as applied"
    "rope.block.cos" ["tokens", "rotary"] "cosine table of a draft's block rows"
    "rope.block.sin" ["tokens", "rotary"] "sine table of a draft's block rows"
    "rope.sliding_attention.cos" ["tokens", "rotary"] "cosine table of sliding layers"
    "rope.sliding_attention.sin" ["tokens", "rotary"] "sine table of sliding layers"
    "rope.full_attention.cos" ["tokens", "rotary"] "cosine table of full layers"
    "rope.full_attention.sin" ["tokens", "rotary"] "sine table of full layers"
    "attn_norm" ["tokens", "hidden"] "input norm of the layer"
    "attn_conv_kernel" ["tokens", "2*kernel*groups"] "dynamic kernels of the convolutions around attention"
    "attn_conv_in" ["tokens", "hidden"] "norm after the convolution before attention"
    "kv_in" ["tokens", "hidden"] "what keys and values are projected from: new context rows, then block rows"
    "qkv_proj" ["tokens", "q+k+v"] "fused projection, query rows first"
    "q_proj" ["tokens", "q"] "query projection with bias; query and gate together in gated families"
    "k_proj" ["tokens", "k"] "key projection with bias"
    "v_proj" ["tokens", "v"] "value projection with bias"
    "q_split" ["tokens", "heads", "head_dim"] "query part of a projection that holds query and gate"
    "attn_gate" ["tokens", "heads*head_dim"] "gate part of that projection, before the sigmoid"
    "q_norm" ["tokens", "heads", "head_dim"] "query after its norm"
    "k_norm" ["tokens", "kv_heads", "head_dim"] "key after its norm"
    "v_norm" ["tokens", "kv_heads", "head_dim"] "value after its weightless norm"
    "q_rope" ["tokens", "heads", "head_dim"] "query after rotation"
    "k_rope" ["tokens", "kv_heads", "head_dim"] "key after rotation"
    "k_cache" ["keys", "kv_heads", "head_dim"] "all keys that the layer attends to, after the pass"
    "v_cache" ["keys", "kv_heads", "head_dim"] "all values that the layer attends to, after the pass"
    "k_seen" ["keys", "kv_heads", "head_dim"] "keys that a draft's block attends to: context, then block"
    "v_seen" ["keys", "kv_heads", "head_dim"] "values that a draft's block attends to: context, then block"
    "k_window" ["keys", "kv_heads", "head_dim"] "the last of the seen keys, where the context is cut"
    "v_window" ["keys", "kv_heads", "head_dim"] "the last of the seen values, where the context is cut"
    "attn_scores" ["heads", "tokens", "keys"] "scaled (and capped) scores before the mask"
    "attn_probs" ["heads", "tokens", "keys"] "softmax of the masked scores"
    "attn_ctx" ["tokens", "heads*head_dim"] "values weighted by the probabilities"
    "attn_gated" ["tokens", "heads*head_dim"] "context times its sigmoid gate"
    "gdn_qkvz" ["tokens", "q+k+v+z"] "delta rule: fused projection, interleaved by key head"
    "gdn_ba" ["tokens", "b+a"] "delta rule: fused scalars, interleaved by key head"
    "gdn_qkv" ["tokens", "q+k+v"] "delta rule: all queries, all keys, all values"
    "gdn_z" ["tokens", "value_heads*value_dim"] "delta rule: output gate before its activation"
    "gdn_b" ["tokens", "value_heads"] "delta rule: write strength before the sigmoid"
    "gdn_a" ["tokens", "value_heads"] "delta rule: input of the decay"
    "conv_bcx" ["tokens", "b+c+x"] "short convolution: input gate, output gate and values"
    "conv_b" ["tokens", "hidden"] "short convolution: input gate"
    "conv_c" ["tokens", "hidden"] "short convolution: output gate"
    "conv_x" ["tokens", "hidden"] "short convolution: values"
    "conv_in" ["tokens", "channels"] "short convolution: gated values, what the convolution reads"
    "conv_out" ["tokens", "channels"] "causal convolution, activated where the model activates it"
    "conv_state" ["channels", "kernel"] "the last rows that the convolution read, oldest first, 0 before the start"
    "conv_gated" ["tokens", "hidden"] "short convolution: convolution times the output gate"
    "gdn_q" ["tokens", "key_heads", "key_dim"] "queries of the delta rule"
    "gdn_k" ["tokens", "key_heads", "key_dim"] "keys of the delta rule"
    "gdn_v" ["tokens", "value_heads", "value_dim"] "values of the delta rule"
    "gdn_q_unit" ["tokens", "key_heads", "key_dim"] "queries of unit length, times key_dim^-1/2"
    "gdn_k_unit" ["tokens", "key_heads", "key_dim"] "keys of unit length"
    "gdn_g" ["tokens", "value_heads"] "log decay, never positive"
    "gdn_beta" ["tokens", "value_heads"] "write strength"
    "gdn_core" ["tokens", "value_heads", "value_dim"] "what the queries read from the updated state"
    "gdn_state" ["value_heads", "key_dim", "value_dim"] "recurrent state after the pass"
    "gdn_z_heads" ["tokens", "value_heads", "value_dim"] "output gate by heads"
    "gdn_core_norm" ["tokens", "value_heads", "value_dim"] "core after its norm, before the gate"
    "gdn_norm" ["tokens", "value_heads", "value_dim"] "normed core times the activated gate"
    "attn_out" ["tokens", "hidden"] "output projection of attention, delta rule or short convolution"
    "attn_conv_out" ["tokens", "hidden"] "attention branch after the convolution behind it"
    "post_attn_norm" ["tokens", "hidden"] "norm of the attention branch before the residual"
    "resid_mid" ["tokens", "hidden"] "residual stream between attention and feed-forward"
    "mlp_norm" ["tokens", "hidden"] "norm before the feed-forward"
    "mlp_conv_kernel" ["tokens", "2*kernel*groups"] "dynamic kernels of the convolutions around the feed-forward"
    "mlp_conv_in" ["tokens", "hidden"] "norm after the convolution before the feed-forward"
    "mlp_gate_up" ["tokens", "gate+up"] "fused projection, gate rows first"
    "mlp_gate" ["tokens", "intermediate"] "gate projection"
    "mlp_up" ["tokens", "intermediate"] "up projection"
    "mlp_act" ["tokens", "intermediate"] "activated gate times up: the input of the down projection"
    "mlp_out" ["tokens", "hidden"] "down projection"
    "mlp_conv_out" ["tokens", "hidden"] "feed-forward branch after the convolution behind it"
    "router_logits" ["tokens", "experts"] "router product, with its bias where it has one"
    "router_index" ["tokens", "choices"] "ids of the chosen experts; their order has no meaning"
    "router_weights" ["tokens", "choices"] "final weights of the chosen experts, in the order of the ids"
    "expert_gate" ["tokens", "choices", "intermediate"] "gate projection of every chosen expert"
    "expert_up" ["tokens", "choices", "intermediate"] "up projection of every chosen expert"
    "expert_act" ["tokens", "choices", "intermediate"] "activated gate times up of every chosen expert"
    "expert_down" ["tokens", "choices", "hidden"] "down projection of every chosen expert, not yet weighted"
    "experts_out" ["tokens", "hidden"] "weighted sum of the chosen experts"
    "shared_gate_proj" ["tokens", "intermediate"] "gate projection of the shared expert"
    "shared_up" ["tokens", "intermediate"] "up projection of the shared expert"
    "shared_act" ["tokens", "intermediate"] "activated gate times up of the shared expert"
    "shared_out" ["tokens", "hidden"] "shared expert, before its gate where it has one"
    "moe_out" ["tokens", "hidden"] "routed sum and shared expert: the output of the block"
    "post_mlp_norm" ["tokens", "hidden"] "norm of the feed-forward branch before the residual"
    "resid_mlp" ["tokens", "hidden"] "residual stream after the feed-forward, where more follows in the layer"
    "ple_in" ["tokens", "ple"] "what the layer receives of the per-layer embeddings"
    "ple_gate" ["tokens", "ple"] "gate of the per-layer input, before its activation"
    "ple_act" ["tokens", "ple"] "activated gate times per-layer input"
    "ple_proj" ["tokens", "hidden"] "per-layer input projected back"
    "ple_norm" ["tokens", "hidden"] "norm of that branch"
    "resid_ple" ["tokens", "hidden"] "residual stream after the per-layer embeddings"
    "out" ["tokens", "hidden"] "layer output: what the next layer receives"
    "final_norm" ["tokens", "hidden"] "norm before the head"
    "proposal_rows" ["tokens", "hidden"] "normed block rows without the anchor's"
    "head_in" ["tokens", "hidden"] "final norm divided, where the model divides before the head"
    "lm_head" ["tokens", "vocab"] "head product, where a scale or a cap follows"
    "logits_scaled" ["tokens", "vocab"] "head product times its multiplier, where a cap follows"
    "logits" ["tokens", "vocab"] "logits after any scaling or cap"
    "candidates" ["tokens", "candidates"] "ids of the largest logits of a draft's rows"
    "selector_hidden" ["tokens", "rank"] "projected row of a draft's path selector"
    "path_scores" ["tokens", "candidates"] "scores of the candidates along the walk"
    "proposals" ["tokens"] "ids that a draft proposes"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_unique_and_parse() {
        for (i, info) in SITES.iter().enumerate() {
            assert!(SITES[i + 1..].iter().all(|other| other.name != info.name), "{} twice", info.name);
            let site = Site::layer(3, info.name);
            assert_eq!(Site::parse(&site.to_string()), Some(site));
        }
        assert_eq!(Site::parse("layers.3.q_rop"), None);
        assert_eq!(Site::parse("layers.x.q_rope"), None);
        assert_eq!(Site::model("rope.cos").to_string(), "rope.cos");
    }
}
