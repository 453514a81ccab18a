//! The seeded micro-case of DFlash 1 and 2, within 1e-9 in f64, and what a diagonal fixture cannot see.
//!
//! The numbers are those of an independent implementation that agrees with the authors' package to 4e-15.
//! The program of the reference runs here in an f64 interpretation of its own, written from the formulas.

mod values;

use ndarray::{Array1, Array2, Array3, ArrayD, Axis, Ix2, Ix3, Slice, concatenate, s};
use reference::models::{Borrowed, Context, Draft, DraftOutput};
use reference::ops::{Call, Ops, Side, Table};
use reference::{Plain, Tensor};
use serde_json::{Value, json};
use spec::families::Linear;
use spec::families::draft::{DraftConfig, DraftWeights};
use spec::{LoadError, Matrix, Rows, Site, Tensors};
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use values::Values;

/// `x = FNV-1a-32(name)`; for every value `x ← 1664525·x + 1013904223 mod 2^32`, `v = (x >> 8) / 2^23 - 1`.
fn generate(name: &str, count: usize) -> Vec<f64> {
    let mut x = fnv(name);
    let mut next = || {
        x = x.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        f64::from(x >> 8) / f64::from(1 << 23) - 1.0
    };
    (0..count).map(|_| next()).collect()
}

fn fnv(name: &str) -> u32 {
    name.bytes().fold(0x811c_9dc5, |x, byte| (x ^ u32::from(byte)).wrapping_mul(0x0100_0193))
}

#[test]
fn the_generator_by_its_published_values() {
    assert_eq!(fnv("fc.weight"), 1_248_825_632);
    near(&generate("fc.weight", 3), &[0.281_618_237, -0.733_445_287, 0.519_765_615]);
    near(&generate("embed", 3), &[0.060_286_641, -0.840_668_44, 0.973_687_887]);
}

fn near(values: &[f64], expected: &[f64]) {
    assert_eq!(values.len(), expected.len());
    for (value, expected) in values.iter().zip(expected) {
        // The published values end at the ninth decimal.
        assert!((value - expected).abs() < 1e-9, "{value} against {expected}");
    }
}

/// Sizes of the case, or of its square twin in which every projection is 16 by 16.
#[derive(Clone, Copy)]
struct Sizes {
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    intermediate: usize,
}

const CASE: Sizes = Sizes { heads: 4, kv_heads: 2, head_dim: 6, intermediate: 20 };
const SQUARE: Sizes = Sizes { heads: 4, kv_heads: 4, head_dim: 4, intermediate: 16 };

fn config(sizes: Sizes, version: u8) -> DraftConfig {
    let mut config = json!({
        "architectures": ["DFlashDraftModel"], "hidden_size": 16, "intermediate_size": sizes.intermediate,
        "num_hidden_layers": 2, "num_attention_heads": sizes.heads, "num_key_value_heads": sizes.kv_heads,
        "head_dim": sizes.head_dim, "rms_norm_eps": 1e-6, "vocab_size": 11, "max_position_embeddings": 64,
        "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4, "rope_theta": 100.0,
        "dflash_config": {"target_layer_ids": [0, 1, 2], "mask_token_id": 9, "block_size": 5}
    });
    if version == 2 {
        config["architectures"] = json!(["DFlash2DraftModel"]);
        for (key, value) in
            [("conv_kernel_size", 2), ("conv_group_size", 4), ("selector_rank", 3), ("selector_top_k", 4)]
        {
            config["dflash_config"][key] = Value::from(value);
        }
    }
    DraftConfig::parse(config.as_object().unwrap(), &[]).unwrap().0
}

/// Tensors of the case under their published names.
struct Case {
    shapes: BTreeMap<String, Vec<usize>>,
    diagonal: bool,
}

impl Case {
    fn new(sizes: Sizes, version: u8, diagonal: bool) -> Case {
        let (h, q, kv) = (16, sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim);
        let mut shapes: BTreeMap<String, Vec<usize>> = BTreeMap::new();
        let mut put = |name: String, shape: &[usize]| shapes.insert(name, shape.to_vec());
        put("fc.weight".into(), &[h, 3 * h]);
        put("hidden_norm.weight".into(), &[h]);
        put("norm.weight".into(), &[h]);
        for i in 0..2 {
            let mut put = |leaf: &str, shape: &[usize]| put(format!("layers.{i}.{leaf}"), shape);
            put("input_layernorm.weight", &[h]);
            put("post_attention_layernorm.weight", &[h]);
            put("self_attn.q_proj.weight", &[q, h]);
            put("self_attn.k_proj.weight", &[kv, h]);
            put("self_attn.v_proj.weight", &[kv, h]);
            put("self_attn.o_proj.weight", &[h, q]);
            put("self_attn.q_norm.weight", &[sizes.head_dim]);
            put("self_attn.k_norm.weight", &[sizes.head_dim]);
            put("mlp.gate_proj.weight", &[sizes.intermediate, h]);
            put("mlp.up_proj.weight", &[sizes.intermediate, h]);
            put("mlp.down_proj.weight", &[h, sizes.intermediate]);
            if version == 2 {
                for conv in ["attention_conv", "mlp_conv"] {
                    put(&format!("{conv}.base_kernel"), &[2, 2, h]);
                    put(&format!("{conv}.kernel_projection.weight"), &[2 * 2 * (h / 4), h]);
                }
            }
        }
        if version == 2 {
            put("candidate_selector.predecessor_codebook".into(), &[11, 3]);
            put("candidate_selector.successor_codebook".into(), &[11, 3]);
            put("candidate_selector.hidden_projection.weight".into(), &[3, h]);
        }
        Case { shapes, diagonal }
    }

    fn values(&self, name: &str) -> Vec<f64> {
        let shape = &self.shapes[name];
        let values = generate(name, shape.iter().product());
        let scaled = |factor: f64| values.iter().map(|v| factor * v).collect::<Vec<_>>();
        if shape.len() == 1 {
            return values.iter().map(|v| 1.0 + 0.25 * v).collect();
        }
        let mut scaled = if name.ends_with("codebook") { scaled(2.0) } else { scaled(0.5) };
        if self.diagonal && shape.len() == 2 && name.ends_with("weight") {
            let columns = shape[1];
            let off = |n: usize| n / columns != n % columns;
            scaled.iter_mut().enumerate().filter(|(n, _)| off(*n)).for_each(|(_, v)| *v = 0.0);
        }
        scaled
    }

    /// The norm weights, which need more digits than f32 has.
    fn exact(&self) -> BTreeMap<String, Vec<f64>> {
        let norms = self.shapes.iter().filter(|(_, shape)| shape.len() == 1);
        norms.map(|(name, _)| (name.clone(), self.values(name))).collect()
    }
}

impl Tensors for Case {
    fn names(&self) -> Vec<String> {
        self.shapes.keys().cloned().collect()
    }
    fn shape(&self, name: &str) -> Option<Vec<usize>> {
        self.shapes.get(name).cloned()
    }
    fn rows(&self, name: &str) -> Option<Result<Arc<dyn Rows>, LoadError>> {
        let inner = *self.shapes.get(name)?.last()?;
        let values = self.values(name).iter().map(|&v| v as f32).collect();
        Some(Ok(Arc::new(Values(inner, values))))
    }
    fn file(&self, _: &str) -> PathBuf {
        PathBuf::from("micro-case")
    }
}

fn matrix(name: &str) -> Matrix {
    Matrix::from_values(name, 11, 16, generate(name, 11 * 16).iter().map(|&v| v as f32).collect())
}

fn borrowed() -> Borrowed {
    Borrowed { table: matrix("embed"), scale: 1.0, head: Linear { weight: matrix("head"), bias: None } }
}

/// The three taps of seven context rows, `[7, 16]` each.
fn taps() -> [Array2<f64>; 3] {
    let rows = Array2::from_shape_vec((7, 48), generate("taps", 7 * 48)).unwrap() * 3.0;
    [0, 1, 2].map(|tap| rows.slice(s![.., 16 * tap..16 * (tap + 1)]).to_owned())
}

fn draft(sizes: Sizes, version: u8, diagonal: bool) -> (Draft, Case) {
    let (config, case) = (config(sizes, version), Case::new(sizes, version, diagonal));
    let weights = DraftWeights::load(&config, &case).unwrap();
    (Draft { config, weights }, case)
}

/// Every op in f64 without a rounding at sites, written from its formula.
struct Wide {
    exact: BTreeMap<String, Vec<f64>>,
    sites: BTreeMap<Site, ArrayD<f64>>,
}

fn two(x: &ArrayD<f64>) -> Array2<f64> {
    let rows = x.shape()[0];
    x.to_shape((rows, x.len() / rows)).unwrap().into_owned()
}

fn three(x: &ArrayD<f64>) -> Array3<f64> {
    x.clone().into_dimensionality::<Ix3>().unwrap()
}

fn dense(m: &Matrix) -> Array2<f64> {
    let values = m.to_values().unwrap().iter().map(|&v| f64::from(v)).collect();
    Array2::from_shape_vec((m.out(), m.inner()), values).unwrap()
}

impl Wide {
    fn value(&self, call: &Call<ArrayD<f64>>) -> ArrayD<f64> {
        match call {
            Call::Embed { ids, table, scale } => {
                let rows: Vec<usize> = ids.iter().map(|&id| id as usize).collect();
                (dense(table).select(Axis(0), &rows) * f64::from(*scale)).into_dyn()
            }
            Call::Linear { x, w } => two(x).dot(&dense(&w.weight).t()).into_dyn(),
            Call::RmsNorm { x, weight, width, .. } => {
                let (x, w) = (two(x), &self.exact[&*weight.unwrap().name]);
                let (tokens, groups) = (x.nrows(), x.ncols() / width);
                let y = Array3::from_shape_fn((tokens, groups, *width), |(t, g, i)| {
                    let row = x.slice(s![t, g * width..(g + 1) * width]);
                    row[i] / (row.mapv(|v| v * v).sum() / *width as f64 + 1e-6).sqrt() * w[i]
                });
                if groups == 1 { y.index_axis(Axis(1), 0).to_owned().into_dyn() } else { y.into_dyn() }
            }
            Call::RopeTable { positions, rope, table } => {
                let d = rope.head_dim;
                let y = Array2::from_shape_fn((positions.len(), d), |(t, i)| {
                    let k = (i % (d / 2)) as f64;
                    let angle = f64::from(positions[t]) * rope.theta.powf(-2.0 * k / d as f64);
                    if *table == Table::Cos { angle.cos() } else { angle.sin() }
                });
                y.into_dyn()
            }
            Call::Rotate { x, cos, sin, rope } => {
                let (x, cos, sin, d) = (two(x), two(cos), two(sin), rope.head_dim);
                let y = Array3::from_shape_fn((x.nrows(), x.ncols() / d, d), |(t, h, i)| {
                    let turned =
                        if i < d / 2 { -x[[t, h * d + i + d / 2]] } else { x[[t, h * d + i - d / 2]] };
                    x[[t, h * d + i]] * cos[[t, i]] + turned * sin[[t, i]]
                });
                y.into_dyn()
            }
            Call::Append { cache, rows, width } => {
                let rows = two(rows);
                let shape = (rows.nrows(), rows.ncols() / width, *width);
                let new = rows.into_shape_with_order(shape).unwrap().into_dyn();
                match cache {
                    None => new,
                    Some(cache) => concatenate(Axis(0), &[cache.view(), new.view()]).unwrap(),
                }
            }
            Call::Truncate { cache, keep } => cache.slice_axis(Axis(0), Slice::from(..*keep)).to_owned(),
            Call::AttnScores { q, k, scale, .. } => {
                let (q, k) = (three(q), three(k));
                let share = q.dim().1 / k.dim().1;
                let shape = (q.dim().1, q.dim().0, k.dim().0);
                let dot = |h: usize, t: usize, j: usize| {
                    (0..q.dim().2).map(|i| q[[t, h, i]] * k[[j, h / share, i]]).sum::<f64>()
                };
                Array3::from_shape_fn(shape, |(h, t, j)| scale * dot(h, t, j)).into_dyn()
            }
            Call::AttnProbs { scores, mask, .. } => {
                let s = three(scores);
                let e =
                    Array3::from_shape_fn(
                        s.dim(),
                        |(h, t, j)| {
                            if mask.sees(t, j) { s[[h, t, j]].exp() } else { 0.0 }
                        },
                    );
                let total = e.sum_axis(Axis(2));
                Array3::from_shape_fn(s.dim(), |(h, t, j)| e[[h, t, j]] / total[[h, t]]).into_dyn()
            }
            Call::AttnCtx { probs, v } => {
                let (p, v) = (three(probs), three(v));
                let (share, d) = (p.dim().0 / v.dim().1, v.dim().2);
                let y = Array2::from_shape_fn((p.dim().1, p.dim().0 * d), |(t, c)| {
                    let (h, i) = (c / d, c % d);
                    (0..p.dim().2).map(|j| p[[h, t, j]] * v[[j, h / share, i]]).sum::<f64>()
                });
                y.into_dyn()
            }
            Call::GatedAct { gate, up, .. } => {
                ndarray::Zip::from(*gate).and(*up).map_collect(|g, u| g / (1.0 + (-g).exp()) * u)
            }
            Call::Residual { x, branch, multiplier } => *x + &(*branch * f64::from(*multiplier)),
            Call::Join { parts } => {
                let views: Vec<_> = parts.iter().map(|part| part.view()).collect();
                concatenate(Axis(1), &views).unwrap().as_standard_layout().to_owned()
            }
            Call::StackRows { above, below } => concatenate(Axis(0), &[above.view(), below.view()]).unwrap(),
            Call::Tail { x, keep } => x.slice_axis(Axis(0), Slice::from(x.shape()[0] - keep..)).to_owned(),
            Call::BlockConv { x, dynamic, conv, side } => {
                let (x, dynamic) = (two(x), two(dynamic));
                let (hidden, groups) = (x.ncols(), x.ncols() / conv.group);
                let first = if *side == Side::Before { 0 } else { conv.kernel };
                let y = Array2::from_shape_fn(x.dim(), |(t, c)| {
                    (0..conv.kernel.min(t + 1))
                        .map(|o| {
                            let base = f64::from(conv.base_kernel[(first + o) * hidden + c]);
                            (base + dynamic[[t, (first + o) * groups + c / conv.group]]) * x[[t - o, c]]
                        })
                        .sum::<f64>()
                });
                y.into_dyn()
            }
            Call::Candidates { logits, k } => {
                let z = two(logits);
                let mut ids = Array2::zeros((z.nrows(), *k));
                for (t, row) in z.rows().into_iter().enumerate() {
                    let mut order: Vec<usize> = (0..row.len()).collect();
                    order.sort_by(|&a, &b| row[b].total_cmp(&row[a]));
                    (0..*k).for_each(|i| ids[[t, i]] = order[i] as f64);
                }
                ids.into_dyn()
            }
            Call::PathScores { logits, candidates, hidden, selector, anchor } => {
                let (z, ids, g) = (two(logits), two(candidates), two(hidden));
                let (a, b) = (dense(&selector.predecessor), dense(&selector.successor));
                let mut scores = Array2::zeros(ids.dim());
                let mut before = *anchor as usize;
                for t in 0..ids.nrows() {
                    for i in 0..ids.ncols() {
                        let id = ids[[t, i]] as usize;
                        let edge: f64 = (0..g.ncols()).map(|r| a[[before, r]] * g[[t, r]] * b[[id, r]]).sum();
                        scores[[t, i]] = z[[t, id]] + edge;
                    }
                    before = ids[[t, largest(&scores.row(t).to_vec())]] as usize;
                }
                scores.into_dyn()
            }
            Call::Pick { scores, candidates } => {
                let (scores, ids) = (two(scores), candidates.map(two));
                let picked = scores.rows().into_iter().enumerate().map(|(t, row)| {
                    let i = largest(&row.to_vec());
                    ids.as_ref().map_or(i as f64, |ids| ids[[t, i]])
                });
                picked.collect::<Array1<f64>>().into_dyn()
            }
            other => unreachable!("{} is no op of this case", other.op()),
        }
    }
}

fn largest(row: &[f64]) -> usize {
    (0..row.len()).max_by(|&a, &b| row[a].total_cmp(&row[b])).unwrap()
}

impl Ops for Wide {
    type Tensor = ArrayD<f64>;

    fn run(&mut self, at: Site, call: Call<'_, ArrayD<f64>>) -> ArrayD<f64> {
        let value = self.value(&call);
        self.sites.insert(at, value.clone());
        value
    }
}

/// The pass of the case: seven context rows, anchor 5 at position 7, four proposals.
fn wide(version: u8) -> (DraftOutput<ArrayD<f64>>, Wide) {
    let (draft, case) = draft(CASE, version, false);
    let mut ops = Wide { exact: case.exact(), sites: BTreeMap::new() };
    let taps = taps().map(Array2::into_dyn);
    let context = Context { taps: &taps, rows: 7, window: None };
    let output = draft.pass(&mut ops, &mut draft.fresh(), &borrowed(), context, 5, 4);
    (output, ops)
}

/// First four values, sum and sum of sizes of every hidden row.
type RowChecks = [([f64; 4], f64, f64); 5];

const V1: RowChecks = [
    ([0.901_711_811, -1.954_435_956, 1.291_567_109, 1.172_163_780], -2.293_473_207, 12.423_494_526),
    ([1.511_790_413, -0.749_306_933, 1.987_163_752, -0.361_306_803], 3.353_939_298, 11.745_087_103),
    ([-0.716_510_875, -0.849_146_934, 1.519_064_819, -1.011_842_438], -0.680_561_385, 12.645_869_352),
    ([-1.822_441_873, -0.390_773_930, 1.448_728_902, -0.250_214_429], 0.144_287_689, 12.902_793_955),
    ([-1.803_330_218, 0.475_709_060, 0.228_074_246, -0.327_500_855], 4.849_586_967, 11.965_636_604),
];

const V2: RowChecks = [
    ([1.048_422_455, 0.305_374_856, 0.554_616_249, 1.096_611_850], 0.039_238_054, 13.958_388_566),
    ([0.279_114_217, -1.506_212_845, -0.320_480_132, -1.834_733_674], -3.727_525_187, 11.263_317_667),
    ([-0.149_377_923, 0.103_470_305, 0.517_241_705, 0.193_882_086], -0.831_530_567, 10.180_104_089),
    ([0.483_536_357, -0.563_887_464, 0.423_153_326, -0.291_137_003], -3.167_768_959, 11.225_741_000),
    ([-0.184_574_176, -0.188_814_595, 0.462_260_094, -0.056_098_575], -4.074_981_270, 11.292_623_415),
];

fn check_rows(hidden: &ArrayD<f64>, expected: &RowChecks) {
    for (row, (first, sum, size)) in two(hidden).rows().into_iter().zip(expected) {
        near(&row.to_vec()[..4], first);
        // Sums of sixteen values, published to the ninth decimal like them.
        near(&[row.sum(), row.mapv(f64::abs).sum()], &[*sum, *size]);
    }
}

#[test]
fn version_1_within_a_billionth() {
    let (output, ops) = wide(1);
    let ctx = &ops.sites[&Site::model("ctx")];
    near(&two(ctx).row(0).to_vec()[..4], &[-0.040_096_72, -1.111_188_928, 0.402_504_694, -1.021_014_097]);
    let key = three(&ops.sites[&Site::layer(0, "k_rope")]);
    let expected =
        [0.210_469_873, -1.445_983_331, 0.532_439_623, -0.998_233_786, 1.786_519_484, -0.353_585_023];
    near(&key.slice(s![6, 1, ..]).to_vec(), &expected);
    check_rows(&output.hidden, &V1);
    // The second proposal is the mask id: it is a token like any other.
    assert_eq!(output.proposals.iter().copied().collect::<Vec<_>>(), [2.0, 9.0, 4.0, 0.0]);
    let z = two(&output.logits);
    let largest: Vec<f64> = z.rows().into_iter().map(|row| row.fold(f64::MIN, |m, &v| m.max(v))).collect();
    near(&largest, &[3.199_027_265, 3.301_936_721, 2.750_197_594, 3.247_867_961]);
}

#[test]
fn version_2_within_a_billionth() {
    let (output, ops) = wide(2);
    check_rows(&output.hidden, &V2);
    let z = two(&output.logits);
    let best: Vec<usize> = z.rows().into_iter().map(|row| largest(&row.to_vec())).collect();
    assert_eq!(best, [1, 7, 9, 7], "the largest logits");
    assert_eq!(output.proposals.iter().copied().collect::<Vec<_>>(), [1.0, 7.0, 9.0, 6.0], "the walk");
    let (ids, scores) =
        (two(&ops.sites[&Site::model("candidates")]), two(&ops.sites[&Site::model("path_scores")]));
    assert_eq!(ids.row(3).to_vec(), [7.0, 9.0, 6.0, 8.0]);
    let unary: Vec<f64> = ids.row(3).iter().map(|&id| z[[3, id as usize]]).collect();
    near(&unary, &[2.851_909_554, 2.497_273_269, 2.227_788_570, 1.455_599_429]);
    near(&scores.row(3).to_vec(), &[5.255_887_676, 2.708_003_446, 6.669_935_341, 4.935_421_291]);
}

/// The reference proper on the same case: f32 at sites. A plain f32 evaluation stays within 3.3e-6.
fn plain(draft: &Draft) -> DraftOutput<Tensor> {
    let taps = taps().map(|tap| tap.mapv(|v| v as f32).into_dyn().into_shared());
    let context = Context { taps: &taps, rows: 7, window: None };
    let mut ops = Plain::default();
    let output = draft.pass(&mut ops, &mut draft.fresh(), &borrowed(), context, 5, 4);
    ops.check().unwrap();
    output
}

#[test]
fn the_reference_follows_its_f64_twin() {
    for (version, proposals) in [(1, [2.0, 9.0, 4.0, 0.0]), (2, [1.0, 7.0, 9.0, 6.0])] {
        let (exact, output) = (wide(version).0, plain(&draft(CASE, version, false).0));
        for (a, b) in exact.hidden.iter().zip(output.hidden.iter()) {
            assert!((a - f64::from(*b)).abs() < 5e-6, "version {version}: {a} against {b}");
        }
        assert_eq!(output.proposals.iter().copied().collect::<Vec<_>>(), proposals.map(|id| id as f32));
    }
}

fn largest_change(a: &Tensor, b: &Tensor) -> f32 {
    a.iter().zip(b.iter()).fold(0.0, |m, (a, b)| m.max((a - b).abs()))
}

/// The matrix as it reads where its memory is taken for `[in, out]`: the transpose, where it is square.
fn read_transposed(m: &Matrix) -> Matrix {
    let (out, inner, values) = (m.out(), m.inner(), m.to_values().unwrap());
    let swapped = (0..out * inner).map(|n| values[n % inner * out + n / inner]).collect();
    Matrix::from_values(m.name(), out, inner, swapped)
}

/// The largest change of hidden rows and scores when every matrix of a role is read transposed.
fn changes(sizes: Sizes, diagonal: bool) -> BTreeMap<&'static str, f32> {
    let (right, _) = draft(sizes, 2, diagonal);
    let before = plain(&right);
    let roles: Vec<&str> = right.clone().weights.matrices().iter().map(|(role, _)| *role).collect();
    let change = |role: &'static str| {
        let mut wrong = right.clone();
        let all = wrong.weights.matrices();
        all.into_iter().filter(|(r, _)| *r == role).for_each(|(_, m)| *m = read_transposed(m));
        let after = plain(&wrong);
        let scores = |o: &DraftOutput<Tensor>, d: &Draft| selector_scores(o, d);
        let hidden = largest_change(&before.hidden, &after.hidden);
        hidden.max(largest_change(&scores(&before, &right), &scores(&after, &wrong)))
    };
    roles.into_iter().map(|role| (role, change(role))).collect()
}

fn selector_scores(output: &DraftOutput<Tensor>, draft: &Draft) -> Tensor {
    let (ids, hidden) = output.candidates.as_ref().unwrap();
    let selector = draft.weights.selector.as_ref().unwrap();
    let scores = reference::ops::path_scores(&output.logits, ids, hidden, selector, 5).unwrap();
    scores.mapv(|v| v as f32).into_dyn().into_shared()
}

const SEVEN: [&str; 7] = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"];

#[test]
fn every_role_read_transposed_shows_in_the_dense_case() {
    let changes = changes(CASE, false);
    let others = ["fc", "attention_conv", "mlp_conv", "predecessor", "successor", "selector_projection"];
    for role in SEVEN.into_iter().chain(others) {
        assert!(changes[role] > 0.1, "{role}: {}", changes[role]);
    }
    assert_eq!(changes.len(), 13, "a role without a mutant: {changes:?}");
}

/// The exhibit: with every matrix cut to its diagonal, all seven square projections can be read transposed
/// and not one bit changes. Only what is not square still shows.
#[test]
fn a_diagonal_fixture_sees_no_transposed_projection() {
    let changes = changes(SQUARE, true);
    for role in SEVEN {
        assert_eq!(changes[role], 0.0, "{role}");
    }
    assert!(changes["fc"] > 0.1, "fc is 16 by 48: {}", changes["fc"]);
}

/// A convolution of tap 0 alone, as at initialisation, makes a second version of a first one, to the bit.
#[test]
fn the_kernel_of_initialisation_makes_version_1() {
    let first = plain(&draft(CASE, 1, false).0);
    let (mut second, _) = draft(CASE, 2, false);
    for layer in &mut second.weights.layers {
        for conv in [&mut layer.attention_conv, &mut layer.mlp_conv].into_iter().flatten() {
            let base: Vec<f32> = (0..64).map(|n| f32::from(n / 16 % 2 == 0)).collect();
            conv.base_kernel = spec::Vector::new("base", base);
            let (out, inner) = (conv.kernel_projection.weight.out(), 16);
            conv.kernel_projection.weight = Matrix::from_values("none", out, inner, vec![0.0; out * inner]);
        }
    }
    assert_eq!(plain(&second).hidden, first.hidden);
    // With one candidate, or with empty codebooks, the walk is the largest logit.
    assert_ne!(plain(&second).proposals, first.proposals);
    let mut one = second.clone();
    one.config.version2.as_mut().unwrap().selector_top_k = 1;
    assert_eq!(plain(&one).proposals, first.proposals);
    let codebook = &mut second.weights.selector.as_mut().unwrap().successor;
    *codebook = Matrix::from_values("none", 11, 3, vec![0.0; 33]);
    assert_eq!(plain(&second).proposals, first.proposals);
}

/// A token per position, in both versions, whatever is on the diagonal of Ix2 and Ix3 shapes.
#[test]
fn context_in_portions_is_context_at_once() {
    for version in [1, 2] {
        let (draft, _) = draft(CASE, version, false);
        let whole = plain(&draft);
        let taps = taps().map(|tap| tap.mapv(|v| v as f32).into_dyn().into_shared());
        let (mut state, mut ops) = (draft.fresh(), Plain::default());
        let mut last = None;
        for (from, to) in [(0, 3), (3, 4), (4, 7)] {
            let rows = taps.each_ref().map(|tap| {
                let cut: Tensor = tap.slice_axis(Axis(0), Slice::from(from..to)).to_owned().into_shared();
                cut
            });
            let context = Context { taps: &rows, rows: to - from, window: None };
            last = Some(draft.pass(&mut ops, &mut state, &borrowed(), context, 5, 4));
        }
        assert_eq!(last.unwrap().hidden, whole.hidden, "version {version}");
        // And again, with nothing new.
        let context = Context { taps: &[], rows: 0, window: None };
        let again = draft.pass(&mut ops, &mut state, &borrowed(), context, 5, 4);
        assert_eq!(again.hidden, whole.hidden, "version {version}");
        assert!(again.hidden.clone().into_dimensionality::<Ix2>().is_ok());
    }
}
