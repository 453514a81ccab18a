//! The multi-token-prediction head of the Qwen3.5 type: a second draft beside the model's own head.
//!
//! One small decoder layer reads a hidden state of the model and the token that follows it, and predicts
//! the token after that:
//!
//! ```text
//! e_t = norm_e(E[x_{t+1}])                  embedding of the token that follows
//! h_t = norm_h(hidden_t)                    hidden_t behind the model's final norm
//! u_t = W_fc [e_t | h_t]                    embedding first
//! y_t = norm(layer(u)_t)                    at position t, with keys and values of its own
//! logits for x_{t+2} = y_t · W_headᵀ        the model's own head
//! ```
//!
//! Tokens are shifted by one, hidden states and positions are not. For a prompt x_0 … x_n whose greedy next
//! token is x_{n+1}, the first pass is fed
//!
//! ```text
//! ids       x_1  x_2  …  x_n  x_{n+1}
//! hidden    h_0  h_1  …  h_{n-1}  h_n
//! position  0    1    …  n-1  n
//! ```
//!
//! and the last row predicts x_{n+2}. To go on without the model, feed the prediction with `y` of that row as
//! its hidden state, one position on. When the model has judged the predictions, take the rows of the
//! head's own hidden states back with [`Mtp::truncate`] and feed the accepted tokens with the model's.
//!
//! Sources: arXiv 2412.19437, section 2.2, for the idea; names and order of the inputs are those of the
//! Qwen3-Next and Qwen3.5 checkpoints (`mtp.*`) and the public serving code that runs them.

use super::hybrid::block;
use super::{Hybrid, KvCache, MixerState, Tables};
use crate::ops::Ops;
use spec::families::Linear;
use spec::families::hybrid::MtpWeights;
use spec::site::At;

/// The prediction head of a hybrid that has one.
#[derive(Clone, Copy, Debug)]
pub struct Mtp<'a> {
    model: &'a Hybrid,
    weights: &'a MtpWeights,
}

/// Keys and values of the prediction head.
#[derive(Clone, Debug)]
pub struct MtpState<T> {
    /// Number of rows fed.
    pub position: usize,
    /// One entry a layer.
    pub layers: Vec<KvCache<T>>,
}

/// What a pass of the prediction head gives for every row.
#[derive(Clone, Debug)]
pub struct Predicted<T> {
    /// Hidden states behind the head's norm, `[tokens, hidden]`.
    pub hidden: T,
    /// Logits of the token after the one that was fed, `[tokens, vocab]`.
    pub logits: T,
}

impl Hybrid {
    /// The multi-token-prediction head, where the checkpoint has one.
    pub fn mtp(&self) -> Option<Mtp<'_>> {
        self.weights.mtp.as_ref().map(|weights| Mtp { model: self, weights })
    }
}

impl Mtp<'_> {
    /// State before the first row.
    pub fn fresh<T>(&self) -> MtpState<T> {
        MtpState { position: 0, layers: self.weights.layers.iter().map(|_| KvCache::empty()).collect() }
    }

    /// Feeds `hidden` `[tokens, hidden]` with the `ids` that follow them, behind what `state` holds.
    ///
    /// `depth` counts predictions on top of the model's hidden states, from 0; a checkpoint with several
    /// layers has one for each depth, and begins anew behind the last.
    pub fn pass<O: Ops + ?Sized>(
        &self,
        ops: &mut O,
        state: &mut MtpState<O::Tensor>,
        depth: usize,
        hidden: &O::Tensor,
        ids: &[u32],
    ) -> Predicted<O::Tensor> {
        let (c, w, at) = (&self.model.config, self.weights, At::MODEL);
        let (width, eps) = (c.hidden_size, c.rms_norm_eps);
        let e = ops.embed(at.site("embed"), ids, &self.model.weights.embed_tokens, 1.0);
        let rope = Tables::new(ops, ["rope.cos", "rope.sin"], &c.rope, state.position, ids.len());
        let e = ops.rms_norm(at.site("mtp_embed_norm"), &e, Some(&w.pre_fc_norm_embedding), width, eps);
        let h = ops.rms_norm(at.site("mtp_hidden_norm"), hidden, Some(&w.pre_fc_norm_hidden), width, eps);
        let both = ops.join(at.site("mtp_in"), &[&e, &h]);
        let u = ops.linear(at.site("mtp_fc"), &both, &w.fc);

        let i = depth % w.layers.len();
        let mut cache = MixerState::Full(std::mem::replace(&mut state.layers[i], KvCache::empty()));
        let x = block(ops, At::layer(i), c, &w.layers[i], &u, state.position, &rope, &mut cache);
        if let MixerState::Full(cache) = cache {
            state.layers[i] = cache;
        }
        state.position += ids.len();
        let hidden = ops.rms_norm(at.site("final_norm"), &x, Some(&w.norm), width, eps);
        let head = Linear { weight: self.model.weights.lm_head.clone(), bias: None };
        let logits = ops.linear(at.site("logits"), &hidden, &head);
        Predicted { hidden, logits }
    }

    /// Keeps the first `keep` rows: takes back what was fed with hidden states of the head's own.
    pub fn truncate<O: Ops + ?Sized>(&self, ops: &mut O, state: &mut MtpState<O::Tensor>, keep: usize) {
        assert!(keep <= state.position, "mtp: rows to keep against rows fed");
        for (i, cache) in state.layers.iter_mut().enumerate() {
            ops.truncate(At::layer(i), "k_cache", &mut cache.k, keep);
            ops.truncate(At::layer(i), "v_cache", &mut cache.v, keep);
        }
        state.position = keep;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Call, Plain, Tensor};
    use approx::assert_relative_eq;
    use ndarray::array;
    use spec::families::Mlp;
    use spec::families::hybrid::{
        AttentionWeights, FeedForward, HybridConfig, HybridWeights, LayerWeights, MixerWeights,
    };
    use spec::{Config, Matrix, Site, Vector};
    use std::collections::BTreeMap;

    #[derive(Default)]
    struct Taps(BTreeMap<String, Tensor>);

    impl Ops for Taps {
        type Tensor = Tensor;

        fn run(&mut self, at: Site, call: Call<'_, Tensor>) -> Tensor {
            let value = Plain::default().value(&call);
            self.0.insert(at.to_string(), value.clone());
            value
        }
    }

    fn config() -> HybridConfig {
        let json = serde_json::json!({
            "model_type": "qwen3_5_text", "vocab_size": 3, "hidden_size": 2, "intermediate_size": 1,
            "num_hidden_layers": 1, "layer_types": ["full_attention"], "num_attention_heads": 1,
            "num_key_value_heads": 1, "head_dim": 4, "linear_num_key_heads": 1, "linear_num_value_heads": 1,
            "linear_key_head_dim": 1, "linear_value_head_dim": 1, "linear_conv_kernel_dim": 2,
            "rms_norm_eps": 1e-12, "max_position_embeddings": 8, "tie_word_embeddings": true,
            "rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5}
        });
        match Config::parse(json.as_object().unwrap(), &[]).unwrap().config {
            Config::Hybrid(config) => config,
            other => panic!("{other:?}"),
        }
    }

    fn matrix(out: usize, inner: usize, values: &[f32]) -> Matrix {
        Matrix::from_values("w", out, inner, values.to_vec())
    }

    fn linear(out: usize, inner: usize, values: &[f32]) -> Linear {
        Linear { weight: matrix(out, inner, values), bias: None }
    }

    fn ones(n: usize) -> Vector {
        Vector::new("norm", vec![1.0; n])
    }

    /// A model whose layer, and whose head's, attends evenly (all queries are 0) and adds half of `gain` times
    /// the first value (a gate of 0 lets half through).
    fn model(gain: f32) -> Hybrid {
        let zeros = |out, inner| linear(out, inner, &vec![0.0; out * inner]);
        let layer = LayerWeights {
            input_layernorm: ones(2),
            mixer: MixerWeights::Full(AttentionWeights {
                q_proj: zeros(8, 2),
                k_proj: linear(4, 2, &[1.0, 0.0, 0.0, 1.0, 1.0, 1.0, 0.0, 2.0]),
                v_proj: linear(4, 2, &[1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]),
                q_norm: ones(4),
                k_norm: ones(4),
                o_proj: linear(2, 4, &[gain, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]),
            }),
            post_attention_layernorm: ones(2),
            mlp: FeedForward::Dense(Mlp {
                gate_proj: zeros(1, 2),
                up_proj: zeros(1, 2),
                down_proj: zeros(2, 1),
            }),
        };
        let embed_tokens = matrix(3, 2, &[1.0, 1.0, 3.0, 4.0, 4.0, -3.0]);
        let mtp = MtpWeights {
            pre_fc_norm_embedding: Vector::new("e", vec![1.0, 10.0]),
            pre_fc_norm_hidden: Vector::new("h", vec![100.0, 1000.0]),
            // Reads e₁ and h₀.
            fc: linear(2, 4, &[0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0]),
            layers: vec![layer.clone()],
            norm: ones(2),
        };
        let lm_head = embed_tokens.clone();
        let weights =
            HybridWeights { embed_tokens, layers: vec![layer], norm: ones(2), lm_head, mtp: Some(mtp) };
        Hybrid { config: config(), weights }
    }

    // The token is 1, embedded as (3, 4): over its rms 5/√2 and times (1, 10) that is (0.6√2, 8√2). The hidden
    // state (-3, 4) becomes (-60√2, 800√2). fc reads e₁ = 11.313708 and h₀ = -84.852814. Halves exchanged it
    // would read 800√2 and 0.6√2; with one norm for both, other sizes. A layer that adds nothing hands (e₁, h₀)
    // to the norm: rms = √((128 + 7200) / 2) = 60.530984, so (0.186908, -1.401808), and token 2's logit is
    // 4 · 0.186908 + 3 · 1.401808 = 4.953056.
    #[test]
    fn one_row_by_hand() {
        let model = model(0.0);
        let (mtp, mut taps) = (model.mtp().unwrap(), Taps::default());
        let hidden = array![[-3.0f32, 4.0]].into_dyn().into_shared();
        let predicted = mtp.pass(&mut taps, &mut mtp.fresh(), 0, &hidden, &[1]);
        let u = &taps.0["mtp_fc"];
        assert_relative_eq!(u[[0, 0]], 11.313_708, max_relative = 1e-6);
        assert_relative_eq!(u[[0, 1]], -84.852_81, max_relative = 1e-6);
        assert_relative_eq!(predicted.hidden[[0, 0]], 0.186_908, max_relative = 1e-5);
        assert_relative_eq!(predicted.hidden[[0, 1]], -1.401_808, max_relative = 1e-5);
        assert_relative_eq!(predicted.logits[[0, 2]], 4.953_056, max_relative = 1e-5);
        // The first row stands at position 0, where nothing turns.
        assert_eq!(taps.0["rope.cos"][[0, 0]], 1.0);
    }

    // Row after row gives the bits of all at once, and rows that are taken back leave nothing behind.
    #[test]
    fn rows_one_by_one_and_taken_back() {
        let model = model(0.5);
        let mtp = model.mtp().unwrap();
        let hidden = array![[-3.0f32, 4.0], [1.0, 2.0], [5.0, -1.0]];
        let rows = |range: std::ops::Range<usize>| {
            let part = hidden.slice_axis(ndarray::Axis(0), ndarray::Slice::from(range));
            part.to_owned().into_dyn().into_shared()
        };
        let ids = [1, 0, 2];
        let whole = mtp.pass(&mut Plain::default(), &mut mtp.fresh(), 0, &rows(0..3), &ids).logits;
        let (mut ops, mut state) = (Plain::default(), mtp.fresh());
        mtp.pass(&mut ops, &mut state, 0, &rows(0..2), &ids[..2]);
        // A guess that is rejected: fed with the head's own hidden state, then taken back.
        let guess = mtp.pass(&mut ops, &mut state, 0, &rows(2..3), &[0]);
        let again = mtp.pass(&mut ops, &mut state, 1, &guess.hidden, &[1]);
        assert_ne!(again.logits, guess.logits);
        mtp.truncate(&mut ops, &mut state, 2);
        let last = mtp.pass(&mut ops, &mut state, 0, &rows(2..3), &ids[2..]).logits;
        assert_eq!(last.row_bits(0), whole.row_bits(2));
        // The row sees the keys before it: alone it would be another.
        let alone = mtp.pass(&mut ops, &mut mtp.fresh(), 0, &rows(2..3), &ids[2..]).logits;
        assert_ne!(alone.row_bits(0), whole.row_bits(2));
    }

    trait RowBits {
        fn row_bits(&self, row: usize) -> Vec<u32>;
    }

    impl RowBits for Tensor {
        fn row_bits(&self, row: usize) -> Vec<u32> {
            self.index_axis(ndarray::Axis(0), row).iter().map(|v| v.to_bits()).collect()
        }
    }
}
