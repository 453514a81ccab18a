//! Gemma 3n (text): parallel streams, a low-rank branch beside attention, sparse gates, per-layer embeddings.
//!
//! ```text
//! X₀ = √hidden · E[id]      X_j = P_j X₀ at the size of X₀
//! pred = X + C X            A = pred[active]
//! u = n₁(A)                 mid = (A + n₂(O(attention(u))) + u + n_l(R L u)) / √2
//! y = mid + n₄(mlp(n₃(mid)))
//! X_j = pred_j + (y − A) · (1 + c_j)
//! X_j ← X_j + per-layer branch of X[active], for j ≥ 1
//! logits = cap(norm_f(mean of X₀ and U_j X_j at the size of X₀) · W_headᵀ)
//! ```
//!
//! `C` and `c` follow from `tanh(W_m (norm(·) / hidden))`. Those small products run on the host side.

use super::ple::{self, Inputs};
use super::{Program, Shape, State, blocks, saved};
use crate::DeviceError;
use crate::host::act::{add, gate, scale};
use crate::host::altup::{correct, match_rms, normal_quantile, predict, sparsify, stream};
use crate::host::attention::Attention;
use crate::host::cache::KvCache;
use crate::host::math::tanh;
use crate::host::norm::{rms_norm, unit_norm};
use crate::host::rope::RopeTable;
use crate::host::router::linear;
use crate::launcher::{Part, Source};
use crate::pass::Pass;
use crate::resident::{Group, Key, Role};
use spec::families::gemma3n::{Gemma3nConfig, Gemma3nWeights};
use spec::families::layered::LayerType;
use spec::{Matrix, NonFinite, Site};

/// Sites of the streams 1, 2 and 3 before the first layer.
const START: [[&str; 2]; 3] =
    [["stream_1_proj", "stream_1"], ["stream_2_proj", "stream_2"], ["stream_3_proj", "stream_3"]];

/// Sites of the same streams after the last.
const END: [[&str; 3]; 3] = [
    ["last_1", "unembed_1_proj", "unembed_1"],
    ["last_2", "unembed_2_proj", "unembed_2"],
    ["last_3", "unembed_3_proj", "unembed_3"],
];

/// Sites of the streams' router, before and after the layer proper.
const BEFORE: [&str; 4] = ["altup_norm", "altup_in", "altup_router", "altup_modality"];
const AFTER: [&str; 4] = ["altup_post_norm", "altup_post_in", "altup_post_router", "altup_post_modality"];

/// Config, weights and request state.
pub(crate) struct Gemma3n {
    c: Gemma3nConfig,
    w: Gemma3nWeights,
    rope: RopeTable,
    rope_local: RopeTable,
    /// One a layer; those of layers that share another's stay empty.
    caches: Vec<KvCache>,
    inputs: Inputs,
    mixes: Vec<Mix>,
}

/// The decoded small matrices of one layer, and its cut.
struct Mix {
    router: Vec<f32>,
    prediction: Vec<f32>,
    correction: Vec<f32>,
    quantile: Option<f32>,
}

impl Gemma3n {
    pub fn new(c: &Gemma3nConfig, w: &Gemma3nWeights) -> Result<Self, DeviceError> {
        for i in 0..c.layers.len() {
            blocks::check_heads(c.num_attention_heads, c.num_key_value_heads, c.rope_of(i))?;
        }
        if !(2..=START.len() + 1).contains(&c.altup_num_inputs) {
            let reason = format!("{} parallel streams; 2 to 4 are known", c.altup_num_inputs);
            return Err(DeviceError::Model { reason });
        }
        let mixes = w.layers.iter().zip(&c.layers).map(|(w, layer)| {
            let sparse = layer.activation_sparsity > 0.0;
            Ok(Mix {
                router: w.altup.modality_router.weight.to_values()?,
                prediction: w.altup.prediction_coefs.weight.to_values()?,
                correction: w.altup.correction_coefs.weight.to_values()?,
                quantile: sparse.then(|| normal_quantile(layer.activation_sparsity) as f32),
            })
        });
        let cache = KvCache::new(c.num_key_value_heads, c.head_dim, c.head_dim);
        Ok(Self {
            mixes: mixes.collect::<Result<_, NonFinite>>()?,
            c: c.clone(),
            w: w.clone(),
            rope: RopeTable::new(&c.rope),
            rope_local: RopeTable::new(&c.rope_local),
            caches: vec![cache; c.layers.len()],
            inputs: Inputs::default(),
        })
    }

    /// `tanh(W_m (norm(x) / hidden))`, `[rows, streams]`.
    fn modality(&self, i: usize, x: &[f32], sites: [&'static str; 4], pass: &mut Pass) -> Vec<f32> {
        let (hidden, streams) = (self.c.hidden_size, self.c.altup_num_inputs);
        let [norm, scaled, routed, squashed] = sites;
        let mut h = rms_norm(x, &self.w.layers[i].altup.router_norm, self.c.rms_norm_eps);
        pass.value(norm, &[hidden], &mut h);
        scale(&mut h, 1.0 / hidden as f32);
        pass.value(scaled, &[hidden], &mut h);
        let mut m = linear(&h, &self.mixes[i].router, hidden);
        pass.value(routed, &[streams], &mut m);
        m.iter_mut().for_each(|m| *m = tanh(*m));
        pass.value(squashed, &[streams], &mut m);
        m
    }

    /// From the normed rows `u` to `post_attn_norm`.
    fn attention(&mut self, i: usize, u: &[f32], pass: &mut Pass) -> Result<Vec<f32>, DeviceError> {
        let (c, w) = (&self.c, &self.w.layers[i]);
        let (heads, kv_heads, dim, eps) =
            (c.num_attention_heads, c.num_key_value_heads, c.head_dim, c.rms_norm_eps);
        let (turned_at, length) = (pass.rope_position(i), pass.length());
        let rope = match c.layers[i].layer_type {
            LayerType::Sliding => &mut self.rope_local,
            LayerType::Full => &mut self.rope,
        };
        let (q, kv) = match &w.kv {
            None => {
                let [q] = pass.parts(Role::Query, u)?;
                (q, None)
            }
            Some(kv) => {
                let [q, k, v] = pass.parts(Role::Qkv, u)?;
                (q, Some((kv, k, v)))
            }
        };
        let mut q = rms_norm(&q, &w.q_norm, eps);
        pass.value("q_norm", &[heads, dim], &mut q);
        rope.turn_in(&mut q, heads, turned_at, length);
        pass.value("q_rope", &[heads, dim], &mut q);
        if let Some((kv, k, v)) = kv {
            let mut k = rms_norm(&k, &kv.k_norm, eps);
            pass.value("k_norm", &[kv_heads, dim], &mut k);
            rope.turn_in(&mut k, kv_heads, turned_at, length);
            pass.value("k_rope", &[kv_heads, dim], &mut k);
            let mut v = unit_norm(&v, dim, eps);
            pass.value("v_norm", &[kv_heads, dim], &mut v);
            self.caches[i].append(&k, &v);
        }
        let attention = Attention { heads, scale: 1.0, window: c.window(i), softcap: None, sinks: None };
        let mut context = pass.attend(&attention, &q, &self.caches[c.layers[i].kv_source]);
        pass.value("attn_ctx", &[heads * dim], &mut context);
        let [out] = pass.parts(Role::AttentionOut, &context)?;
        let mut branch = rms_norm(&out, &w.post_attention_layernorm, eps);
        pass.value("post_attn_norm", &[c.hidden_size], &mut branch);
        Ok(branch)
    }

    /// `laurel`: the normed rows and their low-rank branch.
    fn laurel(&self, i: usize, u: &[f32], pass: &mut Pass) -> Result<Vec<f32>, DeviceError> {
        let (c, w) = (&self.c, &self.w.layers[i]);
        let [low] = pass.parts(Role::LaurelDown, u)?;
        let [wide] = pass.parts(Role::LaurelUp, &low)?;
        let mut sum = rms_norm(&wide, &w.post_laurel_norm, c.rms_norm_eps);
        pass.value("laurel_norm", &[c.hidden_size], &mut sum);
        add(&mut sum, u);
        pass.value("laurel", &[c.hidden_size], &mut sum);
        Ok(sum)
    }

    /// `mlp_norm` to `post_mlp_norm`.
    fn feed_forward(&self, i: usize, x: &[f32], pass: &mut Pass) -> Result<Vec<f32>, DeviceError> {
        let (c, w) = (&self.c, &self.w.layers[i]);
        let inner = c.layers[i].intermediate_size;
        let mut h = rms_norm(x, &w.pre_feedforward_layernorm, c.rms_norm_eps);
        pass.value("mlp_norm", &[c.hidden_size], &mut h);
        let [mut act, up] = pass.parts(Role::GateUp, &h)?;
        if let Some(quantile) = self.mixes[i].quantile {
            sparsify(&mut act, inner, quantile);
            pass.value("mlp_gate_sparse", &[inner], &mut act);
        }
        gate(&mut act, &up, c.activation);
        pass.value("mlp_act", &[inner], &mut act);
        let [out] = pass.parts(Role::Down, &act)?;
        let mut branch = rms_norm(&out, &w.post_feedforward_layernorm, c.rms_norm_eps);
        pass.value("post_mlp_norm", &[c.hidden_size], &mut branch);
        Ok(branch)
    }

    /// One stream made of another by a projection outside the layers.
    fn project(role: Role, j: usize, x: &[f32], pass: &mut Pass) -> Result<Vec<f32>, DeviceError> {
        pass.launcher.product(stream_key(role, j), x, pass.chunk.start)
    }
}

/// The image of the projection of stream `j + 1`.
fn stream_key(role: Role, j: usize) -> Key {
    Key { layer: None, role, expert: Some(j as u32) }
}

impl Program for Gemma3n {
    fn shape(&self) -> Shape {
        Shape {
            layers: self.c.layers.len(),
            hidden: self.c.hidden_size,
            width: self.c.hidden_size * self.c.altup_num_inputs,
            vocab: self.c.vocab_size,
            max_positions: self.c.max_position_embeddings,
        }
    }

    fn sources(&self) -> Vec<(Key, Source)> {
        let mut sources = vec![blocks::head(&self.w.lm_head, self.changes_logits())];
        sources.push(ple::context_image(&self.w.ple));
        let outside = |site, linear| Source::new(Group::Outside, vec![Part::new(Site::model(site), linear)]);
        for (j, linear) in self.w.altup_projections.iter().enumerate() {
            sources.push((stream_key(Role::StreamIn, j), outside(START[j][0], linear)));
        }
        for (j, linear) in self.w.altup_unembed_projections.iter().enumerate() {
            sources.push((stream_key(Role::StreamOut, j), outside(END[j][1], linear)));
        }
        for (i, w) in self.w.layers.iter().enumerate() {
            let q = ("q_proj", &w.q_proj);
            let image = |role, parts: &[_]| blocks::image(i, role, Group::Attention, parts);
            sources.push(match &w.kv {
                None => image(Role::Query, &[q]),
                Some(kv) => {
                    let v = kv.v_proj.iter().map(|v| ("v_proj", v));
                    let parts: Vec<_> = [q, ("k_proj", &kv.k_proj)].into_iter().chain(v).collect();
                    image(Role::Qkv, &parts)
                }
            });
            sources.push(image(Role::AttentionOut, &[("attn_out", &w.o_proj)]));
            sources.push(image(Role::LaurelDown, &[("laurel_left", &w.laurel_left)]));
            sources.push(image(Role::LaurelUp, &[("laurel_right", &w.laurel_right)]));
            sources.extend(blocks::feed_forward_images(i, &w.gate_proj, &w.up_proj, &w.down_proj));
            sources.extend(ple::layer_images(i, &w.ple));
        }
        sources
    }

    fn table(&self) -> &Matrix {
        &self.w.embed_tokens
    }

    fn embed_scale(&self) -> f32 {
        self.c.embed_scale()
    }

    fn begin(&mut self, tokens: &[u32], rows: Vec<f32>, pass: &mut Pass) -> Result<Vec<f32>, DeviceError> {
        let (c, hidden, streams) = (&self.c, self.c.hidden_size, self.c.altup_num_inputs);
        // Ids beyond the table of per-layer embeddings read row 0.
        let in_table = |&id: &u32| if (id as usize) < c.ple.vocab_size { id } else { 0 };
        let table_rows: Vec<u32> = tokens.iter().map(in_table).collect();
        self.inputs = Inputs::new(&c.ple, &self.w.ple, &table_rows, &rows, c.rms_norm_eps, pass)?;
        let mut x = vec![0.0; rows.len() * streams];
        let place = |x: &mut [f32], j: usize, rows: &[f32]| {
            for (x, row) in x.chunks_exact_mut(streams * hidden).zip(rows.chunks_exact(hidden)) {
                x[j * hidden..][..hidden].copy_from_slice(row);
            }
        };
        place(&mut x, 0, &rows);
        for (j, [projected, matched]) in START.into_iter().enumerate().take(streams - 1) {
            let mut y = Self::project(Role::StreamIn, j, &rows, pass)?;
            pass.value(projected, &[hidden], &mut y);
            match_rms(&mut y, &rows, hidden);
            pass.value(matched, &[hidden], &mut y);
            place(&mut x, j + 1, &y);
        }
        pass.taps.streams("streams", &x, streams, hidden);
        Ok(x)
    }

    fn layer(&mut self, i: usize, x: &mut [f32], pass: &mut Pass) -> Result<(), DeviceError> {
        let (hidden, streams, active) =
            (self.c.hidden_size, self.c.altup_num_inputs, self.c.altup_active_idx);
        let row = [hidden];
        let mut before = stream(x, active, streams, hidden);
        pass.value("altup_active", &row, &mut before);
        let m = self.modality(i, &before, BEFORE, pass);
        let mut coefs = linear(&m, &self.mixes[i].prediction, streams);
        pass.value("altup_coefs", &[streams * streams], &mut coefs);
        let mut pred = predict(x, &coefs, streams, hidden);
        pass.taps.streams("altup_pred", &pred, streams, hidden);
        let mut a = stream(&pred, active, streams, hidden);
        pass.value("altup_pred_active", &row, &mut a);

        let mut u = rms_norm(&a, &self.w.layers[i].input_layernorm, self.c.rms_norm_eps);
        pass.value("attn_norm", &row, &mut u);
        let laurel = self.laurel(i, &u, pass)?;
        let branch = self.attention(i, &u, pass)?;
        let mut mid = a;
        add(&mut mid, &branch);
        pass.value("resid_attn", &row, &mut mid);
        add(&mut mid, &laurel);
        pass.value("resid_laurel", &row, &mut mid);
        scale(&mut mid, std::f32::consts::FRAC_1_SQRT_2);
        pass.value("resid_mid", &row, &mut mid);
        let branch = self.feed_forward(i, &mid, pass)?;
        let mut made = mid;
        add(&mut made, &branch);
        pass.value("resid_mlp", &row, &mut made);

        let m = self.modality(i, &made, AFTER, pass);
        let mut coefs = linear(&m, &self.mixes[i].correction, streams);
        pass.value("altup_post_coefs", &[streams], &mut coefs);
        correct(&mut pred, &made, &coefs, active);
        pass.taps.streams("altup_corrected", &pred, streams, hidden);
        let mut read = stream(&pred, active, streams, hidden);
        pass.value("altup_corrected_active", &row, &mut read);
        let w = &self.w.layers[i];
        if let Some(weight) = &w.altup.correct_output_scale {
            read.chunks_exact_mut(hidden)
                .for_each(|row| row.iter_mut().zip(weight.iter()).for_each(|(v, w)| *v *= w));
            pass.value("altup_corrected_scaled", &row, &mut read);
        }
        let branch = self.inputs.branch(
            &self.c.ple,
            i,
            &read,
            &w.ple,
            self.c.activation,
            self.c.rms_norm_eps,
            pass,
        )?;
        for (row, branch) in pred.chunks_exact_mut(streams * hidden).zip(branch.chunks_exact(hidden)) {
            row[hidden..].chunks_exact_mut(hidden).for_each(|stream| add(stream, branch));
        }
        x.copy_from_slice(&pred);
        pass.taps.streams("out", x, streams, hidden);
        Ok(())
    }

    fn state_taps(&self, i: usize, pass: &mut Pass) {
        if self.c.layers[i].kv_source == i {
            blocks::cache_taps(&self.caches[i], pass);
        }
    }

    fn gather(&mut self, x: Vec<f32>, pass: &mut Pass) -> Result<Vec<f32>, DeviceError> {
        let (hidden, streams) = (self.c.hidden_size, self.c.altup_num_inputs);
        let mut first = stream(&x, 0, streams, hidden);
        pass.value("last_0", &[hidden], &mut first);
        let mut all = vec![first.clone()];
        for (j, [last, projected, matched]) in END.into_iter().enumerate().take(streams - 1) {
            let mut y = stream(&x, j + 1, streams, hidden);
            pass.value(last, &[hidden], &mut y);
            let mut y = Self::project(Role::StreamOut, j, &y, pass)?;
            pass.value(projected, &[hidden], &mut y);
            match_rms(&mut y, &first, hidden);
            pass.value(matched, &[hidden], &mut y);
            all.push(y);
        }
        let rows = first.len() / hidden;
        let together: Vec<f32> = (0..rows)
            .flat_map(|r| all.iter().flat_map(move |s| &s[r * hidden..][..hidden]))
            .copied()
            .collect();
        pass.taps.streams("last_streams", &together, streams, hidden);
        let mut mean = vec![0.0; first.len()];
        all.iter().for_each(|stream| add(&mut mean, stream));
        mean.iter_mut().for_each(|v| *v /= streams as f32);
        pass.value("stream_mean", &[hidden], &mut mean);
        Ok(mean)
    }

    fn final_norm(&self, x: &[f32]) -> Vec<f32> {
        rms_norm(x, &self.w.norm, self.c.rms_norm_eps)
    }

    fn finish_logits(&self, logits: &mut [f32]) {
        blocks::cap_logits(logits, self.c.final_logit_softcapping);
    }

    fn changes_logits(&self) -> bool {
        self.c.final_logit_softcapping.is_some()
    }

    fn truncate(&mut self, positions: usize) {
        self.caches.iter_mut().for_each(|cache| cache.truncate(positions));
    }

    fn reserve(&mut self, positions: usize) {
        let layers = self.caches.iter_mut().zip(&self.c.layers).enumerate();
        layers.filter(|(i, (_, c))| c.kv_source == *i).for_each(|(_, (cache, _))| cache.reserve(positions));
    }

    fn save(&self) -> State {
        Box::new(self.caches.clone())
    }

    fn restore(&mut self, state: &State) {
        self.caches = saved(state);
    }
}
