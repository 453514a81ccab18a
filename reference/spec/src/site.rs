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
    "mtp_embed_norm" ["tokens", "hidden"] "prediction head: norm of the embedding of the token that follows"
    "mtp_hidden_norm" ["tokens", "hidden"] "prediction head: norm of the hidden state"
    "mtp_in" ["tokens", "2*hidden"] "prediction head: embedding beside hidden state"
    "mtp_fc" ["tokens", "hidden"] "prediction head: what its layer receives"
    "stream_1_proj" ["tokens", "hidden"] "embedding projected for stream 1"
    "stream_1" ["tokens", "hidden"] "stream 1 at the size of stream 0"
    "stream_2_proj" ["tokens", "hidden"] "embedding projected for stream 2"
    "stream_2" ["tokens", "hidden"] "stream 2 at the size of stream 0"
    "stream_3_proj" ["tokens", "hidden"] "embedding projected for stream 3"
    "stream_3" ["tokens", "hidden"] "stream 3 at the size of stream 0"
    "streams" ["streams", "tokens", "hidden"] "all streams before the first layer"
    "rope.cos" ["tokens", "rotary"] "cosine table as applied"
    "rope.sin" ["tokens", "rotary"] "sine table as applied"
    "rope.block.cos" ["tokens", "rotary"] "cosine table of a draft's block rows"
    "rope.block.sin" ["tokens", "rotary"] "sine table of a draft's block rows"
    "rope.sliding_attention.cos" ["tokens", "rotary"] "cosine table of sliding layers"
    "rope.sliding_attention.sin" ["tokens", "rotary"] "sine table of sliding layers"
    "rope.full_attention.cos" ["tokens", "rotary"] "cosine table of full layers"
    "rope.full_attention.sin" ["tokens", "rotary"] "sine table of full layers"
    "altup_active" ["tokens", "hidden"] "active stream before the layer"
    "altup_norm" ["tokens", "hidden"] "its router norm"
    "altup_in" ["tokens", "hidden"] "that norm over hidden"
    "altup_router" ["tokens", "streams"] "router product"
    "altup_modality" ["tokens", "streams"] "its hyperbolic tangent"
    "altup_coefs" ["tokens", "streams*streams"] "shares of streams in the predictions, a row a prediction"
    "altup_pred" ["streams", "tokens", "hidden"] "predicted streams"
    "altup_pred_active" ["tokens", "hidden"] "prediction of the active stream: what the layer computes with"
    "attn_norm" ["tokens", "hidden"] "input norm of the layer"
    "attn_conv_kernel" ["tokens", "2*kernel*groups"] "dynamic kernels of the convolutions around attention"
    "attn_conv_in" ["tokens", "hidden"] "norm after the convolution before attention"
    "kv_in" ["tokens", "hidden"] "what keys and values are projected from: new context rows, then block rows"
    "qkv_proj" ["tokens", "q+k+v"] "fused projection, query rows first"
    "laurel_left" ["tokens", "rank"] "low-rank branch, narrow"
    "laurel_right" ["tokens", "hidden"] "low-rank branch, wide again"
    "laurel_norm" ["tokens", "hidden"] "norm of the low-rank branch"
    "laurel" ["tokens", "hidden"] "normed input plus its low-rank branch"
    "q_proj" ["tokens", "q"] "query projection with bias; query and gate together in gated families"
    "k_proj" ["tokens", "k"] "key projection with bias"
    "v_proj" ["tokens", "v"] "value projection with bias"
    "q_a" ["tokens", "q_lora_rank"] "query latent"
    "q_a_norm" ["tokens", "q_lora_rank"] "query latent after its norm"
    "q_b" ["tokens", "heads*(nope+rope)"] "queries of all heads made from the latent"
    "q_nope" ["tokens", "heads", "nope"] "the part of a query that does not turn"
    "q_pe" ["tokens", "heads", "rope"] "the part of a query that turns, before it does"
    "kv_a" ["tokens", "kv_lora_rank+rope"] "latent of keys and values, then the shared key part that turns"
    "kv_a_latent" ["tokens", "kv_lora_rank"] "that latent alone"
    "kv_a_norm" ["tokens", "kv_lora_rank"] "that latent after its norm"
    "k_pe" ["tokens", "rope"] "the shared key part that turns, before it does"
    "q_split" ["tokens", "heads", "head_dim"] "query part of a projection that holds query and gate"
    "attn_gate" ["tokens", "heads", "head_dim"] "gate part of that projection, before the sigmoid"
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
    "attn_q" ["tokens", "heads", "nope+rope"] "queries, both parts"
    "latent_cache" ["keys", "1", "kv_lora_rank"] "normed latents of all tokens, after the pass"
    "k_rope_cache" ["keys", "1", "rope"] "turned key parts of all tokens, after the pass"
    "kv_b" ["keys", "heads*(nope+value)"] "keys and values expanded from all latents"
    "k_nope" ["keys", "heads", "nope"] "the part of a key that does not turn"
    "attn_k" ["keys", "heads", "nope+rope"] "keys, both parts"
    "attn_v" ["keys", "heads", "value"] "values"
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
    "resid_attn" ["tokens", "hidden"] "residual stream after attention, where a parallel branch follows"
    "resid_laurel" ["tokens", "hidden"] "that stream with the low-rank branch, not yet over the root of 2"
    "resid_mid" ["tokens", "hidden"] "residual stream between attention and feed-forward"
    "mlp_norm" ["tokens", "hidden"] "norm before the feed-forward"
    "mlp_conv_kernel" ["tokens", "2*kernel*groups"] "dynamic kernels of the convolutions around the feed-forward"
    "mlp_conv_in" ["tokens", "hidden"] "norm after the convolution before the feed-forward"
    "mlp_gate_up" ["tokens", "gate+up"] "fused projection, gate rows first"
    "mlp_gate" ["tokens", "intermediate"] "gate projection"
    "mlp_gate_sparse" ["tokens", "intermediate"] "gate above the quantile of its row, else 0"
    "mlp_up" ["tokens", "intermediate"] "up projection"
    "mlp_act" ["tokens", "intermediate"] "activated gate times up: the input of the down projection"
    "mlp_out" ["tokens", "hidden"] "down projection"
    "mlp_conv_out" ["tokens", "hidden"] "feed-forward branch after the convolution behind it"
    "post_mlp_norm_1" ["tokens", "hidden"] "norm of the dense feed-forward beside experts"
    "router_norm" ["tokens", "hidden"] "the router's own norm of the residual stream"
    "router_in" ["tokens", "hidden"] "that norm over the root of hidden"
    "router_logits" ["tokens", "experts"] "router product, with its bias where it has one"
    "router_probs" ["tokens", "experts"] "softmax of the router product"
    "router_index" ["tokens", "choices"] "ids of the chosen experts; their order has no meaning"
    "router_shares" ["tokens", "choices"] "renormalised probabilities of the chosen experts, where a factor follows"
    "router_weights" ["tokens", "choices"] "final weights of the chosen experts, in the order of the ids"
    "moe_norm" ["tokens", "hidden"] "norm before the experts"
    "expert_gate" ["tokens", "choices", "intermediate"] "gate projection of every chosen expert"
    "expert_up" ["tokens", "choices", "intermediate"] "up projection of every chosen expert"
    "expert_act" ["tokens", "choices", "intermediate"] "activated gate times up of every chosen expert"
    "expert_down" ["tokens", "choices", "hidden"] "down projection of every chosen expert, not yet weighted"
    "experts_out" ["tokens", "hidden"] "weighted sum of the chosen experts"
    "post_moe_norm_2" ["tokens", "hidden"] "norm of what the experts give"
    "shared_gate_proj" ["tokens", "intermediate"] "gate projection of the shared expert"
    "shared_up" ["tokens", "intermediate"] "up projection of the shared expert"
    "shared_act" ["tokens", "intermediate"] "activated gate times up of the shared expert"
    "shared_out" ["tokens", "hidden"] "shared expert, before its gate where it has one"
    "shared_gate" ["tokens", "1"] "how much of the shared expert a token takes, before the sigmoid"
    "shared_gated" ["tokens", "hidden"] "shared expert times its sigmoid gate"
    "moe_out" ["tokens", "hidden"] "routed sum and shared expert: the output of the block"
    "post_mlp_norm" ["tokens", "hidden"] "norm of the feed-forward branch before the residual"
    "resid_mlp" ["tokens", "hidden"] "residual stream after the feed-forward, where more follows in the layer"
    "altup_post_norm" ["tokens", "hidden"] "router norm of what the layer made"
    "altup_post_in" ["tokens", "hidden"] "that norm over hidden"
    "altup_post_router" ["tokens", "streams"] "router product"
    "altup_post_modality" ["tokens", "streams"] "its hyperbolic tangent"
    "altup_post_coefs" ["tokens", "streams"] "how far each stream follows the active one, less 1"
    "altup_corrected" ["streams", "tokens", "hidden"] "corrected streams"
    "altup_corrected_active" ["tokens", "hidden"] "active stream among them"
    "altup_corrected_scaled" ["tokens", "hidden"] "that stream times its scale"
    "ple_in" ["tokens", "ple"] "what the layer receives of the per-layer embeddings"
    "ple_gate" ["tokens", "ple"] "gate of the per-layer input, before its activation"
    "ple_act" ["tokens", "ple"] "activated gate times per-layer input"
    "ple_proj" ["tokens", "hidden"] "per-layer input projected back"
    "ple_norm" ["tokens", "hidden"] "norm of that branch"
    "resid_ple" ["tokens", "hidden"] "residual stream after the per-layer embeddings"
    "out" ["tokens", "hidden"] "layer output: what the next layer receives; [streams, tokens, hidden] where there are streams"
    "last_0" ["tokens", "hidden"] "stream 0 after the last layer"
    "last_1" ["tokens", "hidden"] "stream 1 after the last layer"
    "unembed_1_proj" ["tokens", "hidden"] "stream 1 projected back"
    "unembed_1" ["tokens", "hidden"] "that projection at the size of stream 0"
    "last_2" ["tokens", "hidden"] "stream 2 after the last layer"
    "unembed_2_proj" ["tokens", "hidden"] "stream 2 projected back"
    "unembed_2" ["tokens", "hidden"] "that projection at the size of stream 0"
    "last_3" ["tokens", "hidden"] "stream 3 after the last layer"
    "unembed_3_proj" ["tokens", "hidden"] "stream 3 projected back"
    "unembed_3" ["tokens", "hidden"] "that projection at the size of stream 0"
    "last_streams" ["streams", "tokens", "hidden"] "all streams, projected back"
    "stream_mean" ["tokens", "hidden"] "their mean: what the final norm reads"
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
