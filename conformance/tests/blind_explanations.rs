//! Kernels with mistakes that were written by themselves, in Rust, C and Python: what does Karat say of them?
//!
//! None of them shares code with the mutants. Beside each stand the names that are right: the mistake's own,
//! and others that compute the same at that site. The table is printed by
//! `cargo test --release -p karat --test blind_explanations -- --nocapture`.

use assert_cmd::Command;
use conformance::kernel;
use conformance::mutants::explain::Explanation;
use device::plugin::OpCall;
use serde_json::Value;
use std::path::{Path, PathBuf};

/// A mistake, the names that are right, and what was said.
struct Answer {
    mistake: &'static str,
    right: &'static [&'static str],
    site: String,
    named: Option<String>,
    same_here: Vec<String>,
}

impl Answer {
    fn is_right(&self) -> bool {
        let said = self.named.iter().chain(&self.same_here);
        said.into_iter().any(|name| self.right.contains(&name.as_str()))
    }
}

/// Of a hundred mistakes at least so many have to be named: 18 of 20.
const PER_CENT: usize = 90;

#[test]
fn mistakes_that_karat_did_not_write_are_named() {
    let mut answers: Vec<Answer> = in_rust();
    answers.extend(in_c());
    answers.extend(in_python());
    for answer in &answers {
        let mark = if answer.is_right() { "right" } else { "WRONG" };
        let said = answer.named.as_deref().unwrap_or("no mutant");
        println!("{mark}  {:<58} {said:<34} {}", answer.mistake, answer.site);
    }
    let right = answers.iter().filter(|answer| answer.is_right()).count();
    println!("{right} of {} named right", answers.len());
    assert!(answers.len() >= 20, "{} mistakes", answers.len());
    assert!(right * 100 >= answers.len() * PER_CENT, "{right} of {}", answers.len());
}

/// A kernel in the place of one op of a package.
fn ask(
    mistake: &'static str,
    right: &'static [&'static str],
    (package, op): (&str, &str),
    kernel: impl FnMut(&OpCall) -> Vec<f32>,
) -> Answer {
    let result = kernel::check(package, op, "f32", kernel).unwrap();
    let failure = result.first_failure.unwrap_or_else(|| panic!("{mistake}: {op} of {package} passed"));
    let (named, same_here) = match result.explanation {
        Some(Explanation { named, same_here, .. }) => (named.map(|named| named.mutant), same_here),
        None => (None, vec![]),
    };
    Answer { mistake, right, site: format!("{package} {}", failure.site), named, same_here }
}

/// Inputs by name, and their lengths.
struct In<'c>(&'c OpCall);

impl In<'_> {
    fn values(&self, name: &str) -> &[f32] {
        &self.0.input(name).unwrap().values
    }

    fn shape(&self, name: &str) -> &[usize] {
        &self.0.input(name).unwrap().shape
    }
}

/// A projection whose weight elements and inputs are chosen by `read(o, i, in, out)`, nothing where it reads none.
fn projection(call: &OpCall, read: impl Fn(usize, usize, usize, usize) -> Option<usize>) -> Vec<f32> {
    let c = In(call);
    let (x, w) = (c.values("x"), c.values("w"));
    let ([tokens, inner], [out, _]) = (c.shape("x"), c.shape("w")) else { panic!("two axes") };
    let bias = call.input("b");
    let mut y = Vec::new();
    for t in 0..*tokens {
        for o in 0..*out {
            let mut sum = 0.0;
            for i in 0..*inner {
                if let Some(at) = read(o, i, *inner, *out) {
                    sum += x[t * inner + i] * w[at];
                }
            }
            y.push(bias.map_or(sum, |b| sum + b.values[o]));
        }
    }
    y
}

fn honest(o: usize, i: usize, inner: usize, _: usize) -> Option<usize> {
    Some(o * inner + i)
}

/// The rows of a norm, each with its weight.
fn normed(call: &OpCall, row: impl Fn(&[f32], &[f32], f32) -> Vec<f32>) -> Vec<f32> {
    let c = In(call);
    let width = c.shape("x")[1];
    let ones = vec![1.0; width];
    let weight = call.input("weight").map_or(&ones[..], |w| &w.values);
    c.values("x").chunks(width).flat_map(|x| row(x, weight, call.number("eps") as f32)).collect()
}

fn mean_square(x: &[f32]) -> f32 {
    x.iter().map(|v| v * v).sum::<f32>() / x.len() as f32
}

fn zipped(call: &OpCall, a: &str, b: &str, f: impl Fn(f32, f32) -> f32) -> Vec<f32> {
    let c = In(call);
    c.values(a).iter().zip(c.values(b)).map(|(a, b)| f(*a, *b)).collect()
}

fn silu(x: f32) -> f32 {
    x / (1.0 + (-x).exp())
}

fn rows(call: &OpCall, y: Vec<f32>, order: impl Fn(usize, usize) -> usize) -> Vec<f32> {
    let width = call.output[1];
    let count = y.len() / width;
    (0..count).flat_map(|r| y[order(r, count) * width..][..width].to_vec()).collect()
}

/// The delta rule token by token; `step(state, k, v, g, beta)` updates the state [key_dim, value_dim] of a head.
fn delta(call: &OpCall, step: impl Fn(&mut [f32], &[f32], &[f32], f32, f32)) -> Vec<f32> {
    let c = In(call);
    let ([tokens, key_heads, dk], [_, heads, dv]) = (c.shape("k"), c.shape("v")) else {
        panic!("three axes")
    };
    let group = heads / key_heads;
    let mut states = match call.input("state") {
        Some(state) => state.values.clone(),
        None => vec![0.0; heads * dk * dv],
    };
    let mut y = vec![0.0; tokens * heads * dv];
    for t in 0..*tokens {
        for h in 0..*heads {
            let state = &mut states[h * dk * dv..][..dk * dv];
            let key = (t * key_heads + h / group) * dk;
            let (k, q) = (&c.values("k")[key..][..*dk], &c.values("q")[key..][..*dk]);
            let v = &c.values("v")[(t * heads + h) * dv..][..*dv];
            step(state, k, v, c.values("g")[t * heads + h], c.values("beta")[t * heads + h]);
            for j in 0..*dv {
                y[(t * heads + h) * dv + j] = (0..*dk).map(|i| state[i * dv + j] * q[i]).sum();
            }
        }
    }
    y
}

fn in_rust() -> Vec<Answer> {
    let linear = |package| (package, "linear");
    let norm = |package| (package, "rms_norm");
    vec![
        ask("the weight is walked by columns", &["lin-transpose-square"], linear("llama"), |call| {
            projection(call, |o, i, inner, out| Some(if inner == out { i * out + o } else { o * inner + i }))
        }),
        ask("leading dimension of the wrong side", &["lin-stride-reinterpret"], linear("qwen3"), |call| {
            projection(call, |o, i, _, out| Some(i * out + o))
        }),
        ask("the bias pointer is not passed on", &["lin-bias-dropped"], linear("qwen2"), |call| {
            let mut call = call.clone();
            call.inputs.retain(|input| input.name != "b");
            projection(&call, honest)
        }),
        ask(
            "K is cut to whole vectors of 16",
            &["lin-k-tail:16", "lin-k-tail:32"],
            linear("llama"),
            |call| projection(call, |o, i, inner, _| (i < inner / 16 * 16).then_some(o * inner + i)),
        ),
        ask(
            "one launch of 16 rows, the rest never written",
            &["rows-beyond-tile"],
            linear("llama"),
            |call| {
                let mut y = projection(call, honest);
                y.iter_mut().skip(16 * call.output[1]).for_each(|y| *y = 0.0);
                y
            },
        ),
        ask("the row index is never advanced", &["rows-first-only:copies"], linear("llama"), |call| {
            rows(call, projection(call, honest), |_, _| 0)
        }),
        ask("double buffers are exchanged", &["rows-permuted"], linear("llama"), |call| {
            let swap = |r: usize, n: usize| if (r ^ 1) < n { r ^ 1 } else { r };
            rows(call, projection(call, honest), swap)
        }),
        ask("the output is cut to 16 bits", &["num-rounding-mode:bf16-floor"], linear("llama"), |call| {
            // The upper half of the bits is the value towards zero; below zero that is one step too high.
            let cut = |y: f32| {
                let kept = f32::from_bits(y.to_bits() & 0xffff_0000);
                if kept > y { f32::from_bits(kept.to_bits() + 0x1_0000) } else { kept }
            };
            projection(call, honest).into_iter().map(cut).collect()
        }),
        ask(
            "the first tile of K is added twice",
            &["lin-k-accumulate-overwrite:first-twice"],
            linear("llama"),
            |call| {
                let c = In(call);
                let (inner, out) = (c.shape("x")[1], c.shape("w")[0]);
                let once = projection(call, honest);
                let (x, w) = (c.values("x"), c.values("w"));
                let again =
                    |n: usize| (0..16).map(|i| x[n / out * inner + i] * w[n % out * inner + i]).sum::<f32>();
                once.iter().enumerate().map(|(n, y)| y + again(n)).collect()
            },
        ),
        ask("eps is added to the root", &["norm-eps-outside-sqrt"], norm("llama"), |call| {
            normed(call, |x, w, eps| {
                let scale = 1.0 / (mean_square(x).sqrt() + eps);
                x.iter().zip(w).map(|(x, w)| x * scale * w).collect()
            })
        }),
        ask("eps is a constant of the kernel", &["norm-eps-value:1e-5"], norm("llama"), |call| {
            normed(call, |x, w, _| {
                let scale = 1.0 / (mean_square(x) + 1e-5).sqrt();
                x.iter().zip(w).map(|(x, w)| x * scale * w).collect()
            })
        }),
        ask("1 is added to a weight that has it", &["norm-plus-one-extra"], norm("gemma2"), |call| {
            normed(call, |x, w, eps| {
                let scale = 1.0 / (mean_square(x) + eps).sqrt();
                x.iter().zip(w).map(|(x, w)| x * scale * (1.0 + w)).collect()
            })
        }),
        ask(
            "divides by the allocated width, of 64s",
            &["norm-wrong-divisor:padded"],
            norm("llama"),
            |call| {
                normed(call, |x, w, eps| {
                    let squares: f32 = x.iter().map(|v| v * v).sum();
                    let scale = 1.0 / (squares / x.len().next_multiple_of(64) as f32 + eps).sqrt();
                    x.iter().zip(w).map(|(x, w)| x * scale * w).collect()
                })
            },
        ),
        ask("gate and up in each other's place", &["mlp-gate-up-swap"], ("llama", "gated_act"), |call| {
            zipped(call, "gate", "up", |gate, up| silu(up) * gate)
        }),
        ask("gelu where silu is asked for", &["mlp-act-variant:other"], ("llama", "gated_act"), |call| {
            let gelu = |x: f32| 0.5 * x * (1.0 + (0.797_884_6 * (x + 0.044_715 * x * x * x)).tanh());
            zipped(call, "gate", "up", |gate, up| gelu(gate) * up)
        }),
        ask("the fast gelu", &["mlp-act-variant:quick"], ("gemma2", "gated_act"), |call| {
            zipped(call, "gate", "up", |gate, up| gate / (1.0 + (-1.702 * gate).exp()) * up)
        }),
        ask("the stream is overwritten", &["residual-wrong:missing"], ("llama", "residual"), |call| {
            zipped(call, "x", "branch", |_, branch| branch * call.number("multiplier") as f32)
        }),
        ask("the multiplier is not read", &["res-multiplier"], ("granite", "residual"), |call| {
            zipped(call, "x", "branch", |x, branch| x + branch)
        }),
        ask("ids count from 1", &["emb-row-offset"], ("llama", "embed"), |call| {
            let c = In(call);
            let width = call.output[1];
            let vocab = c.shape("table")[0];
            let row = |id: &f32| c.values("table")[(*id as usize + 1) % vocab * width..][..width].to_vec();
            c.values("ids").iter().flat_map(row).collect()
        }),
        ask("embeddings are not scaled", &["emb-scale-missing"], ("gemma2", "embed"), |call| {
            let c = In(call);
            let width = call.output[1];
            let row = |id: &f32| c.values("table")[*id as usize * width..][..width].to_vec();
            c.values("ids").iter().flat_map(row).collect()
        }),
        ask("logits are not capped", &["head-softcap-missing"], ("gemma2", "softcap"), |call| {
            In(call).values("x").to_vec()
        }),
        ask(
            "the gate is not squashed to 0..1",
            &["attn-gate-missing:silu"],
            ("qwen3_next", "sigmoid_gate"),
            |call| zipped(call, "x", "gate", |x, gate| x * silu(gate)),
        ),
        ask(
            "v is written, not what is new of it",
            &["gdn-delta-missing"],
            ("qwen3_next", "gated_delta_rule"),
            |call| {
                delta(call, |state, k, v, g, beta| {
                    for (i, row) in state.chunks_mut(v.len()).enumerate() {
                        row.iter_mut().zip(v).for_each(|(s, v)| *s = *s * g.exp() + k[i] * beta * v);
                    }
                })
            },
        ),
        ask(
            "forgets behind the write",
            &["gdn-update-order:decay-last"],
            ("qwen3_next", "gated_delta_rule"),
            |call| {
                delta(call, |state, k, v, g, beta| {
                    let width = v.len();
                    let held: Vec<f32> =
                        (0..width).map(|j| (0..k.len()).map(|i| state[i * width + j] * k[i]).sum()).collect();
                    for (n, s) in state.iter_mut().enumerate() {
                        let (i, j) = (n / width, n % width);
                        *s = (*s + k[i] * beta * (v[j] - held[j])) * g.exp();
                    }
                })
            },
        ),
    ]
}

fn bugs() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/bugs")
}

fn has(tool: &str) -> bool {
    let found =
        std::process::Command::new(tool).arg("--version").output().is_ok_and(|out| out.status.success());
    if !found {
        eprintln!("{tool} is not installed: its mistakes are not asked about");
    }
    found
}

/// What `karat verify` says of a subject.
fn verified(mistake: &'static str, right: &'static [&'static str], args: &[&str]) -> Answer {
    let args = [&["verify", "llama", "--format", "json"], args].concat();
    let output = Command::new(env!("CARGO_BIN_EXE_karat")).args(&args).output().unwrap();
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    let result = &report["results"][0];
    let text = |value: &Value| value.as_str().map(str::to_string);
    let same = result["explanation"]["same_here"].as_array().into_iter().flatten();
    Answer {
        mistake,
        right,
        site: text(&result["first_failure"]["site"]).unwrap_or_else(|| panic!("{mistake} passed: {result}")),
        named: text(&result["explanation"]["mutant"]),
        same_here: same.filter_map(text).collect(),
    }
}

fn in_c() -> Vec<Answer> {
    if !has("cc") {
        return vec![];
    }
    let dir = tempfile::tempdir().unwrap();
    let mistakes: [(&str, &[&str]); 8] = [
        ("C: heads share keys round robin", &["attn-gqa-map:mod"]),
        ("C: a query also sees the next token", &["mask-causal-off-by-one:next"]),
        ("C: the mask forgets the cache", &["mask-causal-topleft"]),
        ("C: the scale is left out", &["attn-scale-missing:one"]),
        ("C: the sum of squares for their mean", &["norm-wrong-divisor"]),
        ("C: the stream is added twice", &["residual-wrong:doubled"]),
        ("C: each tile of K overwrites the last", &["lin-k-accumulate-overwrite:last"]),
        ("C: rows behind the first launch are zero", &["rows-beyond-tile"]),
    ];
    let one = |(n, (mistake, right)): (usize, (&'static str, &'static [&'static str]))| {
        verified(mistake, right, &["--subject", &library(dir.path(), n + 1)])
    };
    mistakes.into_iter().enumerate().map(one).collect()
}

/// The C kernels with mistake `n`, as a subject.
fn library(dir: &Path, n: usize) -> String {
    let library = dir.join(format!("libbug{n}.so"));
    let built = std::process::Command::new("cc")
        .args(["-O1", "-ffp-contract=off", "-shared", "-fPIC", "-I"])
        .arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("../device/include"))
        .arg(format!("-DBUG={n}"))
        .arg(bugs().join("kernels.c"))
        .arg("-o")
        .arg(&library)
        .arg("-lm")
        .status();
    assert!(built.unwrap().success());
    format!("lib:{}", library.display())
}

/// A kernel that computes attention in one piece is explained by mistakes of its hidden steps, case by case too.
#[test]
fn a_case_of_attention_is_explained_by_its_hidden_steps() {
    if !has("cc") {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    for (n, mutant) in [(1, "attn-gqa-map:mod"), (2, "mask-causal-off-by-one:next")] {
        let subject = library(dir.path(), n);
        let args = ["check", "--case", "attention/realistic", "--subject", &subject, "--format", "json"];
        let output = Command::new(env!("CARGO_BIN_EXE_karat")).args(args).output().unwrap();
        let report: Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!(report["cases"][0]["explanation"]["mutant"], mutant, "{report}");
    }
}

fn in_python() -> Vec<Answer> {
    if !has("python3") {
        return vec![];
    }
    let mistakes: [(&str, &str, &[&str], &str); 3] = [
        ("Python: the mean is taken off", "centred", &["norm-mean-subtracted"], "*.attn_norm"),
        ("Python: neighbours are turned as pairs", "pairs", &["rope-pairing"], "*.q_rope"),
        ("Python: turned backwards", "backwards", &["rope-direction"], "*.q_rope"),
    ];
    let one = |(mistake, bug, right, sites): (&'static str, &str, &'static [&'static str], &str)| {
        let subject = format!("cmd:python3 '{}' {bug}", bugs().join("kernels.py").display());
        let sites = format!("prefill.layers.0{}", &sites[1..]);
        verified(mistake, right, &["--subject", &subject, "--sites", &sites])
    };
    mistakes.into_iter().map(one).collect()
}
