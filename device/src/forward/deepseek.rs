//! deepseek_v3: latent attention, and experts chosen in groups.
//!
//! ```text
//! q = W_qb norm(W_qa h) (or W_q h), per head [nope | rope]
//! W_kva h = [latent | k_rope]      W_kvb norm(latent), per head [k_nope | v]      k = [k_nope | turned k_rope]
//! x ← x + O(attention(q, k, v))
//! x ← x + ffn(norm₂(x))
//! ```
//!
//! A row's latent is expanded once, when the row is fed, and its keys and values are kept: what a later
//! expansion would give is the same to the bit, since a launch computes a row from that row alone.

use super::feed_forward::FeedForward;
use super::{Program, Shape, State, blocks, saved};
use crate::DeviceError;
use crate::host::act::add;
use crate::host::attention::Attention;
use crate::host::cache::KvCache;
use crate::host::norm::rms_norm;
use crate::host::rope::RopeTable;
use crate::launcher::Source;
use crate::pass::Pass;
use crate::resident::{Group, Key, Role};
use spec::families::Activation;
use spec::families::deepseek::{DeepseekConfig, DeepseekWeights, LATENT_EPS, QueryWeights};
use spec::{Matrix, Rope};

/// Config, weights and request state.
pub(crate) struct Deepseek {
    c: DeepseekConfig,
    w: DeepseekWeights,
    rope: RopeTable,
    feed_forwards: Vec<FeedForward>,
    states: Vec<LatentState>,
}

/// What a layer remembers.
#[derive(Clone)]
struct LatentState {
    cache: KvCache,
    /// Normed latents `[positions, kv_lora_rank]`.
    latents: Vec<f32>,
}

impl Deepseek {
    pub fn new(c: &DeepseekConfig, w: &DeepseekWeights) -> Result<Self, DeviceError> {
        let rope = Rope { head_dim: c.qk_rope_head_dim, ..c.rope.clone() };
        blocks::check_heads(c.num_attention_heads, c.num_attention_heads, &rope)?;
        let feed_forwards = w.layers.iter().map(|w| FeedForward::new(&w.mlp, &c.router, Activation::Silu));
        let cache = KvCache::new(c.num_attention_heads, c.qk_head_dim(), c.v_head_dim);
        let state = LatentState { cache, latents: Vec::new() };
        Ok(Self {
            feed_forwards: feed_forwards.collect::<Result<_, _>>()?,
            states: vec![state; w.layers.len()],
            rope: RopeTable::new(&rope),
            c: c.clone(),
            w: w.clone(),
        })
    }

    /// From the normed rows `h` to `attn_out`.
    fn attention(&mut self, i: usize, h: &[f32], pass: &mut Pass) -> Result<Vec<f32>, DeviceError> {
        let (c, w) = (&self.c, &self.w.layers[i]);
        let (heads, nope, turned, latent) =
            (c.num_attention_heads, c.qk_nope_head_dim, c.qk_rope_head_dim, c.kv_lora_rank);
        let qk = nope + turned;
        let (turned_at, length) = (pass.rope_position(i), pass.length());
        let (q, kv_a) = match &w.q {
            QueryWeights::Direct(_) => {
                let [q, kv_a] = pass.parts(Role::QueryDown, h)?;
                (q, kv_a)
            }
            QueryWeights::Latent { q_a_layernorm, .. } => {
                let [a, kv_a] = pass.parts(Role::QueryDown, h)?;
                let mut a = rms_norm(&a, q_a_layernorm, LATENT_EPS);
                pass.value("q_a_norm", &[q_a_layernorm.len()], &mut a);
                let [q] = pass.parts(Role::QueryUp, &a)?;
                (q, kv_a)
            }
        };
        let (mut q_nope, mut q_rope) = split(&q, qk, nope);
        pass.value("q_nope", &[heads, nope], &mut q_nope);
        pass.value("q_pe", &[heads, turned], &mut q_rope);
        self.rope.turn_in(&mut q_rope, heads, turned_at, length);
        pass.value("q_rope", &[heads, turned], &mut q_rope);
        let mut q = join(&q_nope, nope, &q_rope, turned, 1);
        pass.value("attn_q", &[heads, qk], &mut q);

        let [new, mut k_rope] = {
            let (mut latents, mut k_rope) = split(&kv_a, latent + turned, latent);
            pass.value("kv_a_latent", &[latent], &mut latents);
            pass.value("k_pe", &[turned], &mut k_rope);
            [latents, k_rope]
        };
        let mut new = rms_norm(&new, &w.kv_a_layernorm, LATENT_EPS);
        pass.value("kv_a_norm", &[latent], &mut new);
        self.rope.turn_in(&mut k_rope, 1, turned_at, length);
        pass.value("k_rope", &[1, turned], &mut k_rope);
        let kv = pass.product(Role::KeyValueUp, &new)?;
        let (k_nope, v) = split(&kv, nope + c.v_head_dim, nope);
        let state = &mut self.states[i];
        state.cache.append(&join(&k_nope, nope, &k_rope, turned, heads), &v);
        state.latents.extend_from_slice(&new);

        let attention =
            Attention { heads, scale: c.attention_scale() as f32, window: None, softcap: None, sinks: None };
        let mut context = pass.attend(&attention, &q, &state.cache);
        pass.value("attn_ctx", &[heads * c.v_head_dim], &mut context);
        let [out] = pass.parts(Role::AttentionOut, &context)?;
        Ok(out)
    }
}

/// Rows of `width` as their first `first` values and the others.
fn split(rows: &[f32], width: usize, first: usize) -> (Vec<f32>, Vec<f32>) {
    let (mut a, mut b) = (Vec::new(), Vec::new());
    for row in rows.chunks_exact(width) {
        a.extend_from_slice(&row[..first]);
        b.extend_from_slice(&row[first..]);
    }
    (a, b)
}

/// Rows of `a` and `b` side by side; each row of `b` serves `shared` rows of `a`.
fn join(a: &[f32], a_width: usize, b: &[f32], b_width: usize, shared: usize) -> Vec<f32> {
    let rows = a.chunks_exact(a_width).enumerate();
    rows.flat_map(|(n, a)| a.iter().chain(&b[n / shared * b_width..][..b_width])).copied().collect()
}

impl Program for Deepseek {
    fn shape(&self) -> Shape {
        Shape {
            layers: self.w.layers.len(),
            hidden: self.c.hidden_size,
            width: self.c.hidden_size,
            vocab: self.c.vocab_size,
            max_positions: self.c.max_position_embeddings,
        }
    }

    fn sources(&self) -> Vec<(Key, Source)> {
        let mut sources = vec![blocks::head(&self.w.ends.lm_head, false)];
        for (i, w) in self.w.layers.iter().enumerate() {
            let mut add = |role, parts: &[_]| sources.push(blocks::image(i, role, Group::Attention, parts));
            let kv_a = ("kv_a", &w.kv_a_proj_with_mqa);
            match &w.q {
                QueryWeights::Direct(q_proj) => add(Role::QueryDown, &[("q_proj", q_proj), kv_a]),
                QueryWeights::Latent { q_a_proj, q_b_proj, .. } => {
                    add(Role::QueryDown, &[("q_a", q_a_proj), kv_a]);
                    add(Role::QueryUp, &[("q_b", q_b_proj)]);
                }
            }
            add(Role::KeyValueUp, &[("kv_b", &w.kv_b_proj)]);
            add(Role::AttentionOut, &[("attn_out", &w.o_proj)]);
            sources.extend(self.feed_forwards[i].images(i));
        }
        sources
    }

    fn table(&self) -> &Matrix {
        &self.w.ends.embed_tokens
    }

    fn layer(&mut self, i: usize, x: &mut [f32], pass: &mut Pass) -> Result<(), DeviceError> {
        let (hidden, eps) = ([self.c.hidden_size], self.c.rms_norm_eps);
        let mut h = rms_norm(x, &self.w.layers[i].input_layernorm, eps);
        pass.value("attn_norm", &hidden, &mut h);
        let attention = self.attention(i, &h, pass)?;
        add(x, &attention);
        pass.value("resid_mid", &hidden, x);
        let mut h = rms_norm(x, &self.w.layers[i].post_attention_layernorm, eps);
        pass.value("mlp_norm", &hidden, &mut h);
        let branch = self.feed_forwards[i].run(&h, Activation::Silu, pass)?;
        add(x, &branch);
        pass.value("out", &hidden, x);
        Ok(())
    }

    /// The sites of keys and values span the whole cache, as the oracle's do.
    fn state_taps(&self, i: usize, pass: &mut Pass) {
        let (c, LatentState { cache, latents }) = (&self.c, &self.states[i]);
        let (heads, nope, turned) = (c.num_attention_heads, c.qk_nope_head_dim, c.qk_rope_head_dim);
        let wanted = ["latent_cache", "k_rope_cache", "kv_b", "k_nope", "attn_k", "attn_v"];
        if !wanted.iter().any(|name| pass.taps.wants(name)) {
            return;
        }
        let (positions, keys, values) = (cache.len(), cache.keys(), cache.values());
        let (k_nope, k_rope) = split(&keys, nope + turned, nope);
        // Every head holds the same turned part; the first one's is handed out.
        let (k_rope, _) = split(&k_rope, heads * turned, turned);
        let kv_b = join(&k_nope, nope, &values, c.v_head_dim, 1);
        pass.taps.whole("latent_cache", &[positions, 1, c.kv_lora_rank], latents);
        pass.taps.whole("k_rope_cache", &[positions, 1, turned], &k_rope);
        pass.taps.whole("kv_b", &[positions, heads * (nope + c.v_head_dim)], &kv_b);
        pass.taps.whole("k_nope", &[positions, heads, nope], &k_nope);
        pass.taps.whole("attn_k", &[positions, heads, nope + turned], &keys);
        pass.taps.whole("attn_v", &[positions, heads, c.v_head_dim], &values);
    }

    fn final_norm(&self, x: &[f32]) -> Vec<f32> {
        rms_norm(x, &self.w.ends.norm, self.c.rms_norm_eps)
    }

    fn truncate(&mut self, positions: usize) {
        let rank = self.c.kv_lora_rank;
        for state in &mut self.states {
            state.cache.truncate(positions);
            state.latents.truncate(positions * rank);
        }
    }

    fn reserve(&mut self, positions: usize) {
        self.states.iter_mut().for_each(|state| state.cache.reserve(positions));
    }

    fn save(&self) -> State {
        Box::new(self.states.clone())
    }

    fn restore(&mut self, state: &State) {
        self.states = saved(state);
    }
}
