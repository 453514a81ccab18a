//! Subjects that compute single ops: each call of a model is handed over, and the model goes on with what
//! comes back.
//!
//! So every site of the subject gets the inputs that its own earlier results led to, and is judged by its
//! own error. Ops that it does not have are the reference's, to one rounding.

use super::{Remarks, Subject, SubjectError};
use crate::follow::PassTaps;
use crate::mutants::matches;
use crate::passes::Pass;
use device::plugin::{Input, OpCall};
use reference::ops::{Mask, Reach};
use reference::{Call, Model, ModelState, Ops, Plain, Tensor};
use spec::families::Activation;
use spec::{Pairing, Site, Vector};
use std::collections::BTreeSet;

/// What a kernel answers.
#[derive(Clone, Debug, PartialEq)]
pub enum Answer {
    /// The values of its output.
    Values(Vec<f32>),
    /// It has no such op, or not for these arguments.
    NotSupported,
    /// What it gave cannot be used: a wrong shape, a write outside its output.
    Unusable(String),
}

/// Something that computes one op at a time.
pub trait Kernel {
    /// Whether it may have the op; `false` saves the call.
    fn may_have(&self, op: &str) -> bool;

    /// The result of a call at a tap. An error ends the run: it crashed, or gave no answer in time.
    fn call(&mut self, tap: &str, call: &OpCall) -> Result<Answer, String>;

    /// What else there is to say about it.
    fn notes(&mut self) -> Vec<String> {
        Vec::new()
    }
}

/// A model whose ops are a kernel's, where it has them.
pub struct OpsSubject<'m> {
    model: &'m Model,
    state: ModelState<Tensor>,
    ops: Handing<'m>,
}

/// The interpretation that hands ops over.
struct Handing<'m> {
    kernel: Box<dyn Kernel + 'm>,
    plain: Plain,
    /// Only taps that match are handed over.
    sites: Option<String>,
    pass: String,
    taps: PassTaps,
    own: BTreeSet<String>,
    refused: BTreeSet<&'static str>,
    scores: Option<Scores>,
    mask: Option<(Mask, Option<Vector>)>,
    remarks: Remarks,
}

/// The first of the three steps of attention, kept for a kernel that does all of them at once.
struct Scores {
    q: Tensor,
    k: Tensor,
    scale: f64,
    softcap: Option<f64>,
}

impl<'m> OpsSubject<'m> {
    /// A model over a kernel; `sites` is a glob over the taps that are handed over.
    pub fn new(model: &'m Model, kernel: Box<dyn Kernel + 'm>, sites: Option<&str>) -> Self {
        let ops = Handing::new(kernel, sites);
        Self { model, state: model.fresh(), ops }
    }
}

/// A kernel that is asked for one op at a time, outside any model.
pub struct OneOp<'k>(Handing<'k>);

impl<'k> OneOp<'k> {
    /// Asks `kernel`.
    pub fn new(kernel: Box<dyn Kernel + 'k>) -> Self {
        Self(Handing::new(kernel, None))
    }

    /// Before ops that have nothing to do with those before them: steps of an attention are forgotten.
    pub fn begin(&mut self) {
        (self.0.scores, self.0.mask) = (None, None);
    }

    /// Its result; nothing where it has no such op. A result that cannot be used is NaN throughout.
    pub fn run(&mut self, at: Site, call: &Call<Tensor>) -> Result<Option<Tensor>, String> {
        self.0.own.clear();
        self.0.remarks.problems.clear();
        let value = self.0.run(at, call.clone());
        if let Some(reason) = self.0.remarks.crashed.take() {
            return Err(reason);
        }
        if !self.0.remarks.problems.is_empty() {
            return Ok(Some(value.mapv(|_| f32::NAN).into_shared()));
        }
        Ok((!self.0.own.is_empty()).then_some(value))
    }
}

impl Subject for OpsSubject<'_> {
    fn pass(&mut self, pass: &Pass) -> Result<PassTaps, SubjectError> {
        self.ops.pass.clone_from(&pass.name);
        self.model.pass(&mut self.ops, &mut self.state, &pass.ids);
        self.ops.plain.check()?;
        Ok(std::mem::take(&mut self.ops.taps))
    }

    fn own(&self) -> Option<&BTreeSet<String>> {
        Some(&self.ops.own)
    }

    fn remarks(&mut self) -> Remarks {
        let mut remarks = std::mem::take(&mut self.ops.remarks);
        remarks.notes.append(&mut self.ops.kernel.notes());
        if !self.ops.refused.is_empty() {
            let ops: Vec<&str> = self.ops.refused.iter().copied().collect();
            remarks.notes.push(format!("it does not compute {}: the reference does", ops.join(", ")));
        }
        remarks
    }
}

impl<'m> Handing<'m> {
    fn new(kernel: Box<dyn Kernel + 'm>, sites: Option<&str>) -> Self {
        Handing {
            kernel,
            plain: Plain::default(),
            sites: sites.map(str::to_string),
            pass: String::new(),
            taps: PassTaps::new(),
            own: BTreeSet::new(),
            refused: BTreeSet::new(),
            scores: None,
            mask: None,
            remarks: Remarks::default(),
        }
    }

    /// The kernel's result of an op; nothing where it has none, or stopped.
    fn handed(&mut self, op: &'static str, at: Site, call: &OpCall) -> Option<Tensor> {
        let tap = format!("{}.{at}", self.pass);
        let wanted = self.sites.as_ref().is_none_or(|glob| matches(glob, &tap));
        if !wanted || self.remarks.crashed.is_some() || self.refused.contains(op) {
            return None;
        }
        let answer =
            if self.kernel.may_have(op) { self.kernel.call(&tap, call) } else { Ok(Answer::NotSupported) };
        match answer {
            Ok(Answer::Values(values)) if values.len() == call.elements() => {
                self.own.insert(tap);
                Tensor::from_shape_vec(ndarray::IxDyn(&call.output), values).ok()
            }
            Ok(Answer::Values(values)) => {
                let (found, expected) = (values.len(), call.elements());
                let problem =
                    format!("{op} at {tap} gave {found} values, expected {expected} of {:?}", call.output);
                self.remarks.problems.push(problem);
                None
            }
            Ok(Answer::NotSupported) => {
                self.refused.insert(op);
                None
            }
            Ok(Answer::Unusable(reason)) => {
                self.remarks.problems.push(format!("{op} at {tap}: {reason}"));
                None
            }
            Err(reason) => {
                self.remarks.crashed = Some(reason);
                None
            }
        }
    }
}

impl Ops for Handing<'_> {
    type Tensor = Tensor;

    fn run(&mut self, at: Site, call: Call<'_, Tensor>) -> Tensor {
        match &call {
            Call::AttnScores { q, k, scale, softcap } => {
                self.scores =
                    Some(Scores { q: (*q).clone(), k: (*k).clone(), scale: *scale, softcap: *softcap });
            }
            Call::AttnProbs { mask, sinks, .. } => self.mask = Some((*mask, sinks.cloned())),
            _ => {}
        }
        let value = self.plain.value(&call);
        let fused = match &call {
            Call::AttnCtx { v, .. } => attention(self.scores.take(), self.mask.take(), v, value.shape()),
            _ => None,
        };
        if let Some(fused) = fused
            && let Some(value) = self.handed("attention", at, &fused)
        {
            // What lies inside is not exposed: its roundings are the kernel's own affair.
            for inside in ["attn_scores", "attn_probs"] {
                self.taps.remove(&Site { layer: at.layer, name: Site::model(inside).name });
            }
            self.taps.insert(at, value.clone());
            return value;
        }
        let own = plain_call(&call, value.shape()).and_then(|(op, plain)| self.handed(op, at, &plain));
        let value = own.unwrap_or(value);
        self.taps.insert(at, value.clone());
        value
    }
}

/// An op with its inputs, absent ones among them, and its numbers.
type Parts = (&'static str, Vec<Option<Input>>, Vec<(&'static str, f64)>);

/// A call as plain arrays, for the ops that kernels outside may have.
///
/// | op | inputs | numbers |
/// |---|---|---|
/// | `linear` | x [tokens, in], w [out, in], b [out]? | |
/// | `rms_norm` | x [rows, width], weight [width]? | eps |
/// | `rope` | x [tokens, heads, head_dim], cos, sin [tokens, rotary] | interleaved |
/// | `gated_act` | gate, up | gelu_tanh |
/// | `residual` | x, branch | multiplier |
/// | `embed` | ids [tokens], table [vocab, hidden] | scale |
/// | `softcap` | x | cap |
/// | `scale` | x | factor |
/// | `sigmoid_gate` | x, gate | |
/// | `gated_delta_rule` | q, k [tokens, key_heads, key_dim], v [tokens, value_heads, value_dim], g, beta [tokens, value_heads], state [value_heads, key_dim, value_dim]? | |
///
/// `attention` joins three calls and is made by [`attention`].
pub fn plain_call(call: &Call<Tensor>, output: &[usize]) -> Option<(&'static str, OpCall)> {
    let (op, inputs, numbers): Parts = match call {
        Call::Linear { x, w } => {
            let values = w.weight.to_values().ok()?;
            let weight = Input { name: "w".into(), shape: vec![w.weight.out(), w.weight.inner()], values };
            ("linear", vec![matrix("x", x), Some(weight), vector("b", w.bias.as_ref())], vec![])
        }
        Call::RmsNorm { x, weight, width, eps } => {
            let x = Input { name: "x".into(), shape: vec![x.len() / width, *width], values: flat(x) };
            ("rms_norm", vec![Some(x), vector("weight", *weight)], vec![("eps", f64::from(*eps))])
        }
        Call::Rotate { x, cos, sin, rope } => {
            let heads = output.get(1).copied()?;
            let x =
                Input { name: "x".into(), shape: vec![x.shape()[0], heads, rope.head_dim], values: flat(x) };
            let interleaved = f64::from(u8::from(rope.pairing == Pairing::Interleaved));
            (
                "rope",
                vec![Some(x), tensor("cos", cos), tensor("sin", sin)],
                vec![("interleaved", interleaved)],
            )
        }
        Call::GatedAct { gate, up, activation } => {
            let gelu = f64::from(u8::from(*activation == Activation::GeluTanh));
            ("gated_act", vec![tensor("gate", gate), tensor("up", up)], vec![("gelu_tanh", gelu)])
        }
        Call::Residual { x, branch, multiplier } => (
            "residual",
            vec![tensor("x", x), tensor("branch", branch)],
            vec![("multiplier", f64::from(*multiplier))],
        ),
        Call::Embed { ids, table, scale } => {
            let values = ids.iter().map(|&id| id as f32).collect();
            let ids = Input { name: "ids".into(), shape: vec![ids.len()], values };
            let shape = vec![table.out(), table.inner()];
            let table = Input { name: "table".into(), shape, values: table.to_values().ok()? };
            ("embed", vec![Some(ids), Some(table)], vec![("scale", f64::from(*scale))])
        }
        Call::Softcap { x, cap } => ("softcap", vec![tensor("x", x)], vec![("cap", *cap)]),
        Call::Scale { x, factor } => ("scale", vec![tensor("x", x)], vec![("factor", *factor)]),
        Call::SigmoidGate { x, gate } => ("sigmoid_gate", vec![tensor("x", x), tensor("gate", gate)], vec![]),
        Call::GdnCore(d) => {
            let state = d.state.and_then(|state| tensor("state", state));
            let inputs = vec![
                tensor("q", d.q),
                tensor("k", d.k),
                tensor("v", d.v),
                tensor("g", d.g),
                tensor("beta", d.beta),
                state,
            ];
            ("gated_delta_rule", inputs, vec![])
        }
        _ => return None,
    };
    Some((op, op_call(op, inputs, numbers, output)))
}

fn op_call(op: &str, inputs: Vec<Option<Input>>, numbers: Vec<(&str, f64)>, output: &[usize]) -> OpCall {
    OpCall {
        op: op.to_string(),
        inputs: inputs.into_iter().flatten().collect(),
        numbers: numbers.into_iter().map(|(name, value)| (name.to_string(), value)).collect(),
        output: output.to_vec(),
    }
}

/// The plain forms of one call after another: the three steps of an attention have one, at the last.
#[derive(Default)]
pub struct PlainForms {
    scores: Option<Scores>,
    mask: Option<(Mask, Option<Vector>)>,
}

impl PlainForms {
    /// The form of the next call; nothing where it is a step before the last, or kernels outside are not asked for it.
    pub fn next(&mut self, call: &Call<Tensor>, output: &[usize]) -> Option<OpCall> {
        match *call {
            Call::AttnScores { q, k, scale, softcap } => {
                self.scores = Some(Scores { q: q.clone(), k: k.clone(), scale, softcap });
                None
            }
            Call::AttnProbs { mask, sinks, .. } => {
                self.mask = Some((mask, sinks.cloned()));
                None
            }
            Call::AttnCtx { v, .. } => attention(self.scores.take(), self.mask.take(), v, output),
            _ => plain_call(call, output).map(|(_, form)| form),
        }
    }
}

/// Scores, probabilities and context as one call.
fn attention(
    scores: Option<Scores>,
    mask: Option<(Mask, Option<Vector>)>,
    v: &Tensor,
    output: &[usize],
) -> Option<OpCall> {
    let (Scores { q, k, scale, softcap }, (mask, sinks)) = (scores?, mask?);
    let window = match mask.reach {
        Reach::Causal => 0,
        Reach::Window(width) => width,
        // Reach beyond a token's own position: no kernel outside is asked for it.
        Reach::All | Reach::TwoSided(_) => return None,
    };
    // Without norm and rotation queries and keys come as rows; the cache says how wide a head is.
    let width = k.shape()[2];
    let shape = vec![q.shape()[0], q.len() / q.shape()[0].max(1) / width.max(1), width];
    let q = Input { name: "q".into(), shape, values: flat(&q) };
    let inputs = vec![Some(q), tensor("k", &k), tensor("v", v), vector("sinks", sinks.as_ref())];
    let numbers = vec![
        ("scale", scale),
        ("softcap", softcap.unwrap_or(0.0)),
        ("first", mask.first as f64),
        ("window", window as f64),
    ];
    Some(op_call("attention", inputs, numbers, output))
}

fn flat(x: &Tensor) -> Vec<f32> {
    x.iter().copied().collect()
}

fn tensor(name: &str, x: &Tensor) -> Option<Input> {
    Some(Input { name: name.to_string(), shape: x.shape().to_vec(), values: flat(x) })
}

/// A tensor as rows.
fn matrix(name: &str, x: &Tensor) -> Option<Input> {
    let rows = x.shape()[0];
    let columns = x.len().checked_div(rows).unwrap_or(0);
    Some(Input { name: name.to_string(), shape: vec![rows, columns], values: flat(x) })
}

fn vector(name: &str, x: Option<&Vector>) -> Option<Input> {
    let x = x?;
    Some(Input { name: name.to_string(), shape: vec![x.len()], values: x.to_vec() })
}
