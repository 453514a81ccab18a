//! A failing op as a case that stands alone: inputs, numbers, expected result, limits, and two programs that
//! check a result against them without Karat.
//!
//! ```text
//! case.json                op, shapes, numbers, contract, limits, what it computes instead
//! inputs.safetensors       the subject's own inputs of the op, the weight among them (f32)
//! expected.safetensors     r, variance, bound (f64), and subject (f32): what it gave
//! check.py, check.c        judge y.f32, or the subject's own result where there is none
//! ```

mod arrays;

use crate::contract::Contract;
use crate::judge::{Budget, TILE, rows_and_columns};
use crate::mutants::explain::Explanation;
use crate::subject::ops::plain_call;
use crate::variance::{Bounded, Expected};
use arrays::write_tensors;
use device::plugin::{Input, OpCall};
use reference::{Call, Tensor};
use serde_json::{Value, json};
use std::fmt::Write;
use std::io;
use std::path::Path;

const PYTHON: &str = include_str!("check.py");
const C: &str = include_str!("check.c");

/// Most weights that a case holds: of a larger matrix only the rows around the first wrong column are kept.
const MOST_WEIGHTS: usize = 1 << 22;

/// Outputs that are kept of a matrix that is too large, from a multiple of it on.
const KEPT_OUTPUTS: usize = 64;

/// An op that failed, with all that it was judged on.
#[derive(Clone, Debug)]
pub struct FailedOp {
    /// Where: `prefill.layers.0.q_proj`.
    pub tap: String,
    /// The op on the subject's own inputs.
    pub call: OpCall,
    /// What the subject gave.
    pub subject: Tensor,
    /// What an honest subject gives.
    pub expected: Expected,
    /// The tests of the whole run, from which the limits come.
    pub budget: Budget,
}

/// What is written beside the arrays.
pub struct About<'a> {
    /// The contract that the op was judged under.
    pub contract: &'a Contract,
    /// What the subject computes instead.
    pub explanation: Option<&'a Explanation>,
    /// The command that shows the failure again.
    pub repro: &'a str,
}

/// A call as plain arrays. Ops that no kernel outside is asked for have their operands in the order of the
/// formula, as `operand0`, `operand1`, ...
pub fn described(call: &Call<Bounded>, output: &[usize]) -> OpCall {
    let values: Vec<Tensor> = call.operands().iter().map(|o| o.value.clone()).collect();
    let call = call.with(&values);
    if let Some((_, plain)) = plain_call(&call, output) {
        return plain;
    }
    let (names, numbers): (Vec<&str>, Vec<(&str, f64)>) = match &call {
        Call::AttnScores { scale, softcap, .. } => {
            (vec!["q", "k"], vec![("scale", *scale), ("softcap", softcap.unwrap_or(0.0))])
        }
        Call::AttnProbs { mask, .. } => (vec!["scores"], vec![("first", mask.first as f64)]),
        Call::AttnCtx { .. } => (vec!["probs", "v"], vec![]),
        Call::L2Norm { scale, .. } => (vec!["x"], vec![("scale", *scale)]),
        Call::Append { cache: Some(_), .. } => (vec!["cache", "rows"], vec![]),
        Call::Append { .. } => (vec!["rows"], vec![]),
        Call::Truncate { keep, .. } => (vec!["cache"], vec![("keep", *keep as f64)]),
        Call::Slice { width, start, end, .. } => {
            (vec!["x"], vec![("width", *width as f64), ("start", *start as f64), ("end", *end as f64)])
        }
        Call::Mixture { .. } => (vec!["y", "weights"], vec![]),
        Call::RouterIndex { .. } => (vec!["logits"], vec![]),
        Call::RouterWeights { .. } => (vec!["logits", "index"], vec![]),
        _ => (vec![], vec![]),
    };
    let name = |n: usize| names.get(n).map_or(format!("operand{n}"), |name| name.to_string());
    let inputs = values.iter().enumerate().map(|(n, value)| Input {
        name: name(n),
        shape: value.shape().to_vec(),
        values: value.iter().copied().collect(),
    });
    OpCall {
        op: call.op().to_string(),
        inputs: inputs.collect(),
        numbers: numbers.into_iter().map(|(name, value)| (name.to_string(), value)).collect(),
        output: output.to_vec(),
    }
}

impl FailedOp {
    /// The same with only those outputs of a large matrix around the first that is wrong: of `w` the rows, of
    /// the result the columns.
    fn slice(&self) -> (FailedOp, usize) {
        let large = |w: &&Input| w.values.len() > MOST_WEIGHTS;
        let Some(w) = self.call.input("w").filter(|_| self.call.op == "linear").filter(large) else {
            return (self.clone(), 0);
        };
        let [out, inner] = w.shape[..] else { return (self.clone(), 0) };
        let wrong = self.subject.iter().zip(&self.expected.r).position(|(y, r)| f64::from(*y) != *r);
        let first = wrong.unwrap_or(0) % out / KEPT_OUTPUTS * KEPT_OUTPUTS;
        let kept = first..(first + KEPT_OUTPUTS).min(out);
        let mut cut = self.clone();
        for input in &mut cut.call.inputs {
            match &*input.name {
                "w" => {
                    input.values = input.values[kept.start * inner..kept.end * inner].to_vec();
                    input.shape = vec![kept.len(), inner];
                }
                "b" => {
                    input.values = input.values[kept.clone()].to_vec();
                    input.shape = vec![kept.len()];
                }
                _ => {}
            }
        }
        let axis = ndarray::Axis(cut.call.output.len() - 1);
        let columns = ndarray::Slice::from(kept.clone());
        cut.subject = self.subject.slice_axis(axis, columns).to_owned().into_shared();
        for array in [&mut cut.expected.r, &mut cut.expected.variance, &mut cut.expected.bound] {
            *array = array.slice_axis(axis, columns).to_owned();
        }
        if let Some(last) = cut.call.output.last_mut() {
            *last = kept.len();
        }
        (cut, first)
    }

    /// Writes the case into `dir`, which is made if it is not there.
    pub fn write(&self, dir: &Path, about: &About) -> io::Result<()> {
        let (case, first_output) = self.slice();
        std::fs::create_dir_all(dir)?;
        let inputs = case.call.inputs.iter();
        let inputs = inputs.map(|input| (&*input.name, "F32", &*input.shape, f32_bytes(&input.values)));
        write_tensors(&dir.join("inputs.safetensors"), inputs.collect())?;
        let shape = &case.call.output[..];
        let f64_bytes =
            |x: &ndarray::ArrayD<f64>| x.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<u8>>();
        let subject: Vec<f32> = case.subject.iter().copied().collect();
        let expected = &case.expected;
        write_tensors(
            &dir.join("expected.safetensors"),
            vec![
                ("r", "F64", shape, f64_bytes(&expected.r)),
                ("variance", "F64", shape, f64_bytes(&expected.variance)),
                ("bound", "F64", shape, f64_bytes(&expected.bound)),
                ("subject", "F32", shape, f32_bytes(&subject)),
            ],
        )?;
        let text = format!("{:#}\n", case.json(first_output, about));
        std::fs::write(dir.join("case.json"), text)?;
        std::fs::write(dir.join("check.py"), PYTHON)?;
        std::fs::write(dir.join("check.c"), C.replacen("@CASE@", &case.c_table(), 1))
    }

    fn grid(&self) -> (usize, usize) {
        let site = self.tap.rsplit('.').next().unwrap_or(&self.tap);
        rows_and_columns(site, &self.call.output)
    }

    fn json(&self, first_output: usize, about: &About) -> Value {
        let shapes: serde_json::Map<String, Value> =
            self.call.inputs.iter().map(|input| (input.name.clone(), json!(input.shape))).collect();
        let numbers: serde_json::Map<String, Value> =
            self.call.numbers.iter().map(|(name, value)| (name.clone(), json!(value))).collect();
        let (rows, columns) = self.grid();
        let mut case = json!({
            "schema": "karat/case/1", "op": self.call.op, "tap": self.tap, "inputs": shapes,
            "numbers": numbers, "output": {"name": "y", "shape": self.call.output},
            "contract": about.contract.name,
            "limits": {
                "rows": rows, "columns": columns, "tile": [TILE.0, TILE.1],
                "z_max": self.budget.z_max(), "z_group": self.budget.group_limits().z(),
                "calibrated": self.expected.calibrated,
                "derivation": self.budget.derivation(),
            },
            "repro": about.repro,
        });
        if first_output > 0 || self.call.input("w").is_some_and(|w| w.values.len() > MOST_WEIGHTS) {
            case["first_output"] = json!(first_output);
        }
        if let Some(named) = about.explanation.and_then(|e| e.named.as_ref()) {
            case["computes"] =
                json!({"mutant": named.mutant, "formula": named.formula, "z_rms": named.z_rms});
        }
        case
    }

    /// Sizes, limits and the inputs' names and shapes as C.
    fn c_table(&self) -> String {
        let (rows, columns) = self.grid();
        let mut text = format!(
            "#define OP \"{}\"\n#define TAP \"{}\"\n#define ROWS {rows}\n#define COLUMNS {columns}\n\
             #define Z_MAX {:e}\n#define Z_GROUP {:e}\n#define CALIBRATED {}\n",
            self.call.op,
            self.tap,
            self.budget.z_max(),
            self.budget.group_limits().z(),
            u8::from(self.expected.calibrated)
        );
        let mut offset = 0;
        text.push_str("static const struct input INPUTS[] = {\n");
        for input in &self.call.inputs {
            let shape: Vec<String> = input.shape.iter().map(usize::to_string).collect();
            let count = input.values.len();
            let _ = writeln!(
                text,
                "    {{\"{}\", {}, {{{}}}, {count}, {offset}}},",
                input.name,
                input.shape.len(),
                shape.join(", ")
            );
            offset += 4 * count;
        }
        text.push_str("    {0, 0, {0}, 0, 0},\n};\n");
        text.push_str("static const struct number NUMBERS[] = {\n");
        for (name, value) in &self.call.numbers {
            let _ = writeln!(text, "    {{\"{name}\", {value:e}}},");
        }
        text + "    {0, 0.0},\n};\n"
    }
}

fn f32_bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|v| v.to_le_bytes()).collect()
}
