//! A mixture of experts in place of a feed-forward.
//!
//! ```text
//! y = Σ_e weight_e · down_e(act(gate_e(h)) · up_e(h))     over the experts that the router chooses
//! y ← y + σ(h · w_s) · shared(h)                          where there is a shared expert (and its gate)
//! ```
//!
//! Every expert has images of its own. A pass launches an expert once on all rows that are sent to it.

use super::blocks::image;
use crate::DeviceError;
use crate::host::act::{add, clamped_swiglu, gate_times_up, scale};
use crate::host::math::sigmoid;
use crate::host::router::{linear, route};
use crate::launcher::{Part, Source};
use crate::pass::Pass;
use crate::resident::{Group, Key, Role};
use spec::families::moe::{Experts, Router};
use spec::families::{Activation, Linear, Mlp};
use spec::{Matrix, NonFinite, Site};

/// The routed experts of a layer.
#[derive(Clone, Debug)]
pub(super) struct Routed {
    pub router: Router,
    /// `[experts, hidden]`, decoded: routing runs on the host side.
    weight: Vec<f32>,
    /// `[experts]`: added to the scores that choose.
    correction: Option<Vec<f32>>,
    /// `[experts]`: added to the logits.
    bias: Option<Vec<f32>>,
    experts: Experts,
    activation: ExpertActivation,
}

/// How an expert's gate and up meet.
#[derive(Clone, Copy, Debug)]
pub(super) enum ExpertActivation {
    /// `act(gate) · up`
    Gated(Activation),
    /// `g = min(gate, limit)`, `u = clamp(up, ±limit)`: `(u + 1) · g · σ(alpha · g)`
    Clamped { alpha: f32, limit: f32 },
}

impl From<Activation> for ExpertActivation {
    fn from(activation: Activation) -> Self {
        ExpertActivation::Gated(activation)
    }
}

impl ExpertActivation {
    /// `fused` is `[rows, 2 · inner]`, gates first.
    fn apply(self, fused: &[f32], inner: usize) -> Vec<f32> {
        match self {
            ExpertActivation::Gated(activation) => gate_times_up(fused, inner, activation),
            ExpertActivation::Clamped { alpha, limit } => clamped_swiglu(fused, inner, alpha, limit),
        }
    }
}

/// What a layer's rows are sent to.
pub(super) struct Choice {
    /// Ids `[rows, choices]`.
    pub experts: Vec<usize>,
    /// `[rows, choices]`
    pub weights: Vec<f32>,
}

impl Routed {
    pub fn new(
        router: &Router,
        weight: &Linear,
        correction: Option<&[f32]>,
        experts: &Experts,
        activation: ExpertActivation,
    ) -> Result<Self, NonFinite> {
        Ok(Self {
            router: *router,
            weight: weight.weight.to_values()?,
            bias: weight.bias.as_ref().map(|bias| bias.to_vec()),
            correction: correction.map(<[f32]>::to_vec),
            experts: experts.clone(),
            activation,
        })
    }

    /// Two images an expert.
    pub fn images(&self, i: usize) -> Vec<(Key, Source)> {
        let part = |name, linear: &Linear| Part::new(Site::layer(i, name), linear);
        let experts = self.experts.gate_proj.iter().zip(&self.experts.up_proj).zip(&self.experts.down_proj);
        let images = experts.enumerate().flat_map(|(e, ((gate, up), down))| {
            let fused = vec![part("expert_gate", gate), part("expert_up", up)];
            [
                (Key::expert(i, Role::ExpertGateUp, e), Source::new(Group::FeedForward, fused)),
                (
                    Key::expert(i, Role::ExpertDown, e),
                    Source::new(Group::FeedForward, vec![part("expert_down", down)]),
                ),
            ]
        });
        images.collect()
    }

    /// `router_logits` of the rows `h`, `[rows, experts]`.
    pub fn logits(&self, h: &[f32], pass: &mut Pass) -> Vec<f32> {
        let hidden = self.weight.len() / self.router.num_experts;
        let mut logits = linear(h, &self.weight, hidden);
        if let Some(bias) = &self.bias {
            logits.chunks_exact_mut(bias.len()).for_each(|row| add(row, bias));
        }
        pass.value("router_logits", &[self.router.num_experts], &mut logits);
        logits
    }

    /// `router_index`, and the weights under the name `weights`, from scores `[rows, experts]`.
    pub fn choose(&self, scores: &[f32], weights: &'static str, pass: &mut Pass) -> Choice {
        let mut choice = Choice { experts: Vec::new(), weights: Vec::new() };
        for scores in scores.chunks_exact(self.router.num_experts) {
            let (chosen, weight) = route(scores, self.correction.as_deref(), &self.router);
            choice.experts.extend(chosen);
            choice.weights.extend(weight);
        }
        let choices = [self.router.num_experts_per_tok];
        if pass.taps.wants("router_index") {
            let ids: Vec<f32> = choice.experts.iter().map(|&e| e as f32).collect();
            pass.taps.rows("router_index", &choices, &ids);
        }
        pass.value(weights, &choices, &mut choice.weights);
        choice
    }

    /// `expert_gate` to `experts_out`: the weighted sum `[rows, hidden]`, added in the order of the choices.
    pub fn run(&self, h: &[f32], choice: &Choice, pass: &mut Pass) -> Result<Vec<f32>, DeviceError> {
        let choices = self.router.num_experts_per_tok;
        let hidden = h.len() / pass.rows();
        let inner = self.experts.gate_proj[0].weight.out();
        let slots = choice.experts.len();
        let tapped = ["expert_gate", "expert_up", "expert_act"].map(|name| pass.taps.wants(name));
        let mut taps = tapped.map(|wanted| vec![0.0; if wanted { slots * inner } else { 0 }]);
        let mut outs = vec![0.0; slots * hidden];
        for e in 0..self.router.num_experts {
            let sent: Vec<usize> = (0..slots).filter(|&slot| choice.experts[slot] == e).collect();
            if sent.is_empty() {
                continue;
            }
            let rows: Vec<f32> =
                sent.iter().flat_map(|slot| &h[slot / choices * hidden..][..hidden]).copied().collect();
            let mut launch = |role, x: &[f32]| {
                let key = Key::expert(pass.layer.unwrap_or_default(), role, e);
                let chunk = pass.chunk.start;
                // Rows of an expert's launch are those of the slots sent to it.
                pass.launcher.product(key, x, 0).map_err(|error| match error {
                    DeviceError::Activation { site, row, column, value } => {
                        let row = chunk + sent[row] / choices;
                        DeviceError::Activation { site, row, column, value }
                    }
                    other => other,
                })
            };
            let fused = launch(Role::ExpertGateUp, &rows)?;
            let act = self.activation.apply(&fused, inner);
            let out = launch(Role::ExpertDown, &act)?;
            for (n, &slot) in sent.iter().enumerate() {
                outs[slot * hidden..][..hidden].copy_from_slice(&out[n * hidden..][..hidden]);
                let row = &fused[n * 2 * inner..][..2 * inner];
                let parts = [&row[..inner], &row[inner..], &act[n * inner..][..inner]];
                for (tap, part) in taps.iter_mut().zip(parts).filter(|(tap, _)| !tap.is_empty()) {
                    tap[slot * inner..][..inner].copy_from_slice(part);
                }
            }
        }
        for (name, tap) in ["expert_gate", "expert_up", "expert_act"].into_iter().zip(&taps) {
            pass.taps.rows(name, &[choices, inner], tap);
        }
        pass.value("expert_down", &[choices, hidden], &mut outs);
        let mut sum = vec![0.0; h.len()];
        for (r, sum) in sum.chunks_exact_mut(hidden).enumerate() {
            for slot in r * choices..(r + 1) * choices {
                let weight = choice.weights[slot];
                let out = &outs[slot * hidden..][..hidden];
                sum.iter_mut().zip(out).for_each(|(sum, out)| *sum += weight * out);
            }
        }
        pass.value("experts_out", &[hidden], &mut sum);
        Ok(sum)
    }
}

/// An expert that every row is sent to.
#[derive(Clone, Debug)]
pub(super) struct Shared {
    mlp: Mlp,
    /// `[hidden]`: its own gate, where it has one.
    gate: Option<Vec<f32>>,
    activation: Activation,
}

impl Shared {
    pub fn new(mlp: &Mlp, gate: Option<&Matrix>, activation: Activation) -> Result<Self, NonFinite> {
        let gate = gate.map(Matrix::to_values).transpose()?;
        Ok(Self { mlp: mlp.clone(), gate, activation })
    }

    pub fn images(&self, i: usize) -> [(Key, Source); 2] {
        let fused = [("shared_gate_proj", &self.mlp.gate_proj), ("shared_up", &self.mlp.up_proj)];
        [
            image(i, Role::SharedGateUp, Group::FeedForward, &fused),
            image(i, Role::SharedDown, Group::FeedForward, &[("shared_out", &self.mlp.down_proj)]),
        ]
    }

    /// Adds the shared expert of the rows `h` to `sum`; the result is `moe_out`.
    pub fn add(&self, h: &[f32], sum: &mut [f32], pass: &mut Pass) -> Result<(), DeviceError> {
        let hidden = h.len() / pass.rows();
        let inner = self.mlp.gate_proj.weight.out();
        let fused = pass.fused(Role::SharedGateUp, h)?;
        let mut act = gate_times_up(&fused, inner, self.activation);
        pass.value("shared_act", &[inner], &mut act);
        let [out] = pass.parts(Role::SharedDown, &act)?;
        let mut out = out;
        if let Some(gate) = &self.gate {
            let mut logits = linear(h, gate, hidden);
            pass.value("shared_gate", &[1], &mut logits);
            for (out, logit) in out.chunks_exact_mut(hidden).zip(logits) {
                scale(out, sigmoid(logit));
            }
            pass.value("shared_gated", &[hidden], &mut out);
        }
        add(sum, &out);
        Ok(())
    }
}
