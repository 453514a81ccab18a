//! The multi-token-prediction head is loaded beside the model, wrapped or not, and changes nothing in it.

use conformance::draft::{Greedy, Limits, MtpHost, Tally, walk};
use fixtures::Package;
use ndarray::{Axis, Slice};
use reference::{Model, Plain, Tensor};
use spec::{Config, LoadError, Rows, Tensors, Weights};
use std::path::PathBuf;
use std::sync::Arc;

/// A package to which a prediction head is added: its layer is the model's last (softmax attention), its
/// norms are the final norm, and `fc` `[32, 64]` is that layer's output projection.
struct WithHead<'a>(&'a dyn Tensors);

fn source(name: &str) -> String {
    match name.strip_prefix("mtp.") {
        None => name.to_string(),
        Some("fc.weight") => "model.layers.3.self_attn.o_proj.weight".into(),
        Some(rest) => match rest.strip_prefix("layers.0.") {
            Some(leaf) => format!("model.layers.3.{leaf}"),
            None => "model.norm.weight".into(),
        },
    }
}

impl Tensors for WithHead<'_> {
    fn names(&self) -> Vec<String> {
        let names = self.0.names();
        let layer = names.iter().filter_map(|name| name.strip_prefix("model.layers.3."));
        let layer: Vec<String> = layer.map(|leaf| format!("mtp.layers.0.{leaf}")).collect();
        let around = ["fc", "norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"];
        names.into_iter().chain(layer).chain(around.map(|leaf| format!("mtp.{leaf}.weight"))).collect()
    }

    fn shape(&self, name: &str) -> Option<Vec<usize>> {
        self.0.shape(&source(name))
    }

    fn rows(&self, name: &str) -> Option<Result<Arc<dyn Rows>, LoadError>> {
        self.0.rows(&source(name))
    }

    fn file(&self, name: &str) -> PathBuf {
        self.0.file(&source(name))
    }
}

fn bits(x: &Tensor) -> Vec<u32> {
    x.iter().map(|v| v.to_bits()).collect()
}

#[test]
fn a_head_beside_the_model() {
    let package = Package::open("qwen3_5").unwrap();
    let config = Config::parse(package.config(), &[]).unwrap().config;
    let plain = Model::new(config.clone(), Weights::load(&config, package.tensors()).unwrap());
    let weights = Weights::load(&config, &WithHead(package.tensors())).unwrap();
    let with_head = Model::new(config, weights);
    let (Model::Hybrid(plain), Model::Hybrid(model)) = (plain, with_head) else { panic!("a hybrid") };
    assert!(plain.mtp().is_none());

    let (mut ops, ids) = (Plain::default(), [71, 60, 93, 71, 13]);
    let logits = plain.pass(&mut ops, &mut plain.fresh(), &ids);
    let hidden = model.hidden(&mut ops, &mut model.fresh(), &ids);
    assert_eq!(bits(&model.head(&mut ops, &hidden)), bits(&logits));

    // Tokens are shifted by one against their hidden states. Fed at once or row by row: the same bits.
    let next = [60, 93, 71, 13, 40];
    let mtp = model.mtp().unwrap();
    let whole = mtp.pass(&mut ops, &mut mtp.fresh(), 0, &hidden, &next);
    assert_eq!(whole.logits.shape(), [5, 97]);
    let (mut state, mut rows) = (mtp.fresh(), Vec::new());
    for (row, id) in hidden.axis_iter(ndarray::Axis(0)).zip(next) {
        let row = row.insert_axis(ndarray::Axis(0)).to_owned().into_shared();
        rows.extend(bits(&mtp.pass(&mut ops, &mut state, 0, &row, &[id]).logits));
    }
    assert_eq!(rows, bits(&whole.logits));
    assert_eq!(state.position, 5);
    ops.check().unwrap();
}

#[test]
fn a_head_that_is_incomplete_is_refused() {
    struct Without<'a>(WithHead<'a>);
    impl Tensors for Without<'_> {
        fn names(&self) -> Vec<String> {
            self.0.names().into_iter().filter(|name| name != "mtp.norm.weight").collect()
        }
        fn shape(&self, name: &str) -> Option<Vec<usize>> {
            self.0.shape(name).filter(|_| name != "mtp.norm.weight")
        }
        fn rows(&self, name: &str) -> Option<Result<Arc<dyn Rows>, LoadError>> {
            self.0.rows(name)
        }
        fn file(&self, name: &str) -> PathBuf {
            self.0.file(name)
        }
    }
    let package = Package::open("qwen3_5").unwrap();
    let config = Config::parse(package.config(), &[]).unwrap().config;
    let error = Weights::load(&config, &Without(WithHead(package.tensors()))).unwrap_err();
    assert!(matches!(error, LoadError::Missing { ref tensor, .. } if tensor == "mtp.norm.weight"), "{error}");
}

fn largest(logits: &Tensor, row: usize) -> u32 {
    let row = logits.index_axis(Axis(0), row);
    (0..row.len()).rev().max_by(|&a, &b| row[a].total_cmp(&row[b])).unwrap() as u32
}

// The loop keeps caches and takes rows back; here every pass is done again from nothing: hidden states of the
// whole text in one pass, a fresh head over all rows before the anchor, then its own chain.
#[test]
fn the_head_as_a_draft_keeps_the_text_and_counts_what_fits() {
    let package = Package::open("qwen3_5").unwrap();
    let config = Config::parse(package.config(), &[]).unwrap().config;
    let weights = Weights::load(&config, &WithHead(package.tensors())).unwrap();
    let model = Model::new(config.clone(), weights);
    let prompt = [71, 60, 93, 71, 13];
    let (mut ops, mut state) = (Plain::default(), model.fresh::<Tensor>());
    let mut logits = model.pass(&mut ops, &mut state, &prompt);
    let mut text = prompt.to_vec();
    while text.len() < prompt.len() + 14 {
        text.push(largest(&logits, logits.shape()[0] - 1));
        logits = model.pass(&mut ops, &mut state, &text[text.len() - 1..]);
    }
    let Model::Hybrid(hybrid) = &model else { panic!("a hybrid") };
    let hidden = hybrid.hidden(&mut ops, &mut hybrid.fresh(), &text);
    let rows = |x: &Tensor, rows: std::ops::Range<usize>| {
        x.slice_axis(Axis(0), Slice::from(rows)).to_owned().into_shared()
    };
    for block in [2, 4] {
        let mut host = MtpHost::new(&config, &model).unwrap();
        let limits = Limits { tokens: 14, block, stops: &[] };
        let walked = walk(&mut host, &mut Greedy, &prompt, limits).unwrap();
        assert_eq!(walked.tokens, text[prompt.len()..], "block {block}");
        let tally = Tally::of(&walked.passes, block, 14);
        assert_eq!((tally.generated, tally.emitted), (14, 13));
        for pass in &walked.passes {
            let (mtp, s) = (hybrid.mtp().unwrap(), pass.anchor);
            let mut state = mtp.fresh();
            let mut said = mtp.pass(&mut ops, &mut state, 0, &rows(&hidden, 0..s), &text[1..=s]);
            let mut proposals = Vec::new();
            for depth in 1..=pass.proposed {
                let last = said.logits.shape()[0] - 1;
                proposals.push(largest(&said.logits, last));
                let own = rows(&said.hidden, last..last + 1);
                said = mtp.pass(&mut ops, &mut state, depth, &own, &proposals[depth - 1..]);
            }
            let fits = proposals.iter().zip(&text[s + 1..]).take_while(|(d, t)| d == t).count();
            assert_eq!(pass.accepted, fits, "block {block}, anchor {s}: {proposals:?}");
        }
    }
}
