//! The speculative loop: the target's own text whatever the draft says, and counts that add up.

mod noise;

use conformance::draft::{
    Filter, Greedy, Host, Limits, Matching, Pair, Pass, Proposals, Rejection, Speculate, Tally, Verifier,
    Walk, every_position, filtered, walk,
};
use fixtures::Package;
use fixtures::random::SplitMix64;
use golden::Dump;
use noise::Noise;
use reference::models::Draft;
use reference::{Model, Plain};
use serde_json::Value;
use spec::families::draft::{DraftConfig, DraftWeights};
use spec::{Config, Weights};
use std::convert::Infallible;

fn model(package: &Package) -> (Config, Model) {
    let config = Config::parse(package.config(), &[]).unwrap().config;
    let weights = Weights::load(&config, package.tensors()).unwrap();
    (config.clone(), Model::new(config, weights))
}

/// The oracle's pair, and what it says about it.
fn oracle(name: &str) -> (Pair, Dump) {
    let (target, draft) = Package::pair(name).unwrap();
    let (config, _) = DraftConfig::parse(draft.config(), &[]).unwrap();
    let weights = DraftWeights::load(&config, draft.tensors()).unwrap();
    let dump = Dump::open(target.dir().parent().unwrap()).unwrap();
    let (target_config, target) = model(&target);
    (Pair::new(target_config, target, Draft { config, weights }).unwrap(), dump)
}

fn accepted(walk: &Walk) -> Vec<usize> {
    walk.passes.iter().map(|pass| pass.accepted).collect()
}

fn ids(value: &Value) -> Vec<u32> {
    value.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
}

// ---------------------------------------------------------------- against the oracle

#[test]
fn passes_of_the_oracle() {
    for name in ["dflash", "dflash_muse"] {
        let (pair, dump) = oracle(name);
        let (prompt, greedy) = (&dump.manifest().prompt, &dump.manifest().greedy);
        let block = pair.draft.config.block_size;
        let limits = Limits { tokens: greedy.len(), block, stops: &[] };
        let result = walk(&mut Host::new(&pair), &mut Greedy, prompt, limits).unwrap();
        assert_eq!(result.tokens, *greedy, "{name}");
        let expected = dump.extra()["passes"].as_array().unwrap();
        for (n, (pass, expected)) in result.passes.iter().zip(expected).enumerate() {
            assert_eq!(pass.anchor as u64, expected["anchor_pos"].as_u64().unwrap(), "{name}: pass {n}");
            assert_eq!(pass.accepted as u64, expected["accepted"].as_u64().unwrap(), "{name}: pass {n}");
            assert_eq!(pass.proposed, block - 1, "{name}: pass {n}");
        }
        assert!(result.passes.len() >= expected.len(), "{name}: fewer passes than the oracle");

        // transformers' own assisted generation of the same text, with another implementation of the loop.
        let assisted = ids(&dump.extra()["checks"]["assisted_accepts"]);
        let counts: Vec<u32> = accepted(&result).iter().map(|&a| a as u32).collect();
        assert_eq!(counts[..assisted.len()], assisted, "{name}");
    }
}

#[test]
fn every_position_agrees_with_the_loop_where_both_ask() {
    let (pair, dump) = oracle("dflash");
    let (prompt, block) = (&dump.manifest().prompt, pair.draft.config.block_size);
    let limits = Limits { tokens: 19, block, stops: &[] };
    let all = every_position(&mut Host::new(&pair), prompt, limits).unwrap();
    let some = walk(&mut Host::new(&pair), &mut Greedy, prompt, limits).unwrap();
    assert_eq!(all.tokens, some.tokens);
    assert_eq!(all.passes.len(), 18, "an anchor at every token but the last");
    for pass in &some.passes {
        assert!(all.passes.contains(pass), "{pass:?}");
    }
}

// ---------------------------------------------------------------- scripts instead of drafts

/// A draft that follows a script over a real pair: what it really proposes is asked for and thrown away.
struct Scripted<'a> {
    host: Host<'a>,
    /// The target's greedy text, prompt included.
    text: &'a [u32],
    /// How many right proposals the next passes get.
    depths: Vec<usize>,
    position: usize,
    pass: usize,
    vocab: u32,
}

impl Speculate for Scripted<'_> {
    type Error = conformance::draft::HostError;

    fn prefill(&mut self, prompt: &[u32]) -> Result<Vec<f32>, Self::Error> {
        self.position = prompt.len();
        self.host.prefill(prompt)
    }

    fn propose(&mut self, anchor: u32, n: usize) -> Result<Proposals, Self::Error> {
        let asked = self.host.propose(anchor, n)?;
        assert_eq!(asked.ids.len(), n);
        let right = self.depths[self.pass % self.depths.len()];
        self.pass += 1;
        let wrong = |id: u32| (id + 1) % self.vocab;
        let own = (0..n).map(|j| self.text[self.position + 1 + j]);
        let ids = own.enumerate().map(|(j, id)| if j < right { id } else { wrong(id) }).collect();
        Ok(Proposals { ids, drawn_from: Vec::new() })
    }

    fn verify(&mut self, block: &[u32]) -> Result<Vec<Vec<f32>>, Self::Error> {
        self.host.verify(block)
    }

    fn commit(&mut self, rows: usize) -> Result<(), Self::Error> {
        self.position += rows;
        self.host.commit(rows)
    }
}

/// Plain greedy decoding, one token a pass.
fn plain_greedy(target: &Model, prompt: &[u32], tokens: usize) -> Vec<u32> {
    let (mut ops, mut state) = (Plain::default(), target.fresh());
    let mut text = Vec::new();
    let mut feed = prompt.to_vec();
    while text.len() < tokens {
        let logits = target.pass(&mut ops, &mut state, &feed);
        let vocab = logits.shape()[1];
        let last: Vec<f32> = logits.iter().copied().skip(logits.len() - vocab).collect();
        feed = vec![conformance::golden_gate::argmax(&last) as u32];
        text.push(feed[0]);
    }
    ops.check().unwrap();
    text
}

#[test]
fn any_draft_and_any_target_give_the_target_s_own_text() {
    let mut seen = 0;
    for name in fixtures::bundled() {
        let Ok(package) = Package::open(&name) else { continue };
        let Some(golden) = package.golden_json() else { continue };
        let (config, target) = model(&package);
        let mut prompt = Dump::open(golden.parent().unwrap()).unwrap().manifest().prompt.clone();
        prompt.truncate(7);
        let (layers, hidden, vocab) = (config.num_hidden_layers(), config.hidden_size(), config.vocab_size());
        let tokens = 14;
        // Six tokens more, so that a script knows what a block past the end would hold.
        let greedy = plain_greedy(&target, &prompt, tokens + 6);
        let text: Vec<u32> = prompt.iter().chain(&greedy).copied().collect();
        for (block, version) in [(2, 1), (4, 2), (6, 1)] {
            let noise = Noise { hidden, vocab, taps: 3.min(layers), version };
            let pair = match Pair::new(config.clone(), target.clone(), noise.draft(layers, block)) {
                Ok(pair) => pair,
                // Streams of their own: said in a sentence, and nothing to walk.
                Err(error) => {
                    assert!(
                        error.to_string().starts_with("gemma3n_text hands 3 parallel streams"),
                        "{name}: {error}"
                    );
                    continue;
                }
            };
            let limits = Limits { tokens, block, stops: &[] };
            // The draft's own proposals: mostly wrong.
            let result = walk(&mut Host::new(&pair), &mut Greedy, &prompt, limits).unwrap();
            assert_eq!(result.tokens, greedy[..tokens], "{name}: block {block}");
            adds_up(&result, tokens);
            // Rejection at every depth, and a draft that is the target's own continuation.
            for depths in [(0..block).collect::<Vec<_>>(), vec![block - 1]] {
                for stops in [&[][..], &[greedy[9]]] {
                    let (host, depths) = (Host::new(&pair), depths.clone());
                    let vocab = vocab as u32;
                    let mut scripted =
                        Scripted { host, text: &text, depths: depths.clone(), position: 0, pass: 0, vocab };
                    let limits = Limits { stops, ..limits };
                    let result = walk(&mut scripted, &mut Greedy, &prompt, limits).unwrap();
                    let cut = greedy[..tokens].iter().position(|id| stops.contains(id));
                    let expected = &greedy[..cut.map_or(tokens, |stop| stop + 1)];
                    assert_eq!(
                        result.tokens, *expected,
                        "{name}: block {block}, depths {depths:?}, stops {stops:?}"
                    );
                    adds_up(&result, expected.len());
                    if depths.len() == 1 {
                        let full = |pass: &&Pass| pass.proposed == block - 1;
                        assert!(
                            result.passes.iter().filter(full).all(|pass| pass.accepted == block - 1),
                            "{name}"
                        );
                    }
                }
            }
        }
        seen += 1;
    }
    assert!(seen > 5, "{seen} targets");
}

/// generated = 1 + Σ e; e = a + 1 for every pass but the last; the next anchor is e further.
fn adds_up(walk: &Walk, generated: usize) {
    assert_eq!(walk.tokens.len(), generated);
    assert_eq!(1 + walk.passes.iter().map(|pass| pass.emitted).sum::<usize>(), generated);
    for pair in walk.passes.windows(2) {
        assert_eq!(pair[0].emitted, pair[0].accepted + 1);
        assert_eq!(pair[1].anchor, pair[0].anchor + pair[0].emitted);
    }
    for pass in &walk.passes {
        assert!(pass.accepted <= pass.proposed && pass.emitted <= pass.accepted + 1);
        assert_eq!(pass.bonus, pass.emitted == pass.accepted + 1);
    }
}

// ---------------------------------------------------------------- counts alone

/// A target whose next token is a fixed function of the last two, and a draft that is right by chance.
struct Toy {
    text: Vec<u32>,
    rng: SplitMix64,
    right: f64,
    fed: usize,
}

const TOY_VOCAB: u32 = 7;

fn toy_next(text: &[u32]) -> u32 {
    let (a, b) = (text[text.len() - 1], text.iter().rev().nth(1).copied().unwrap_or(3));
    (a * 5 + b * 3 + text.len() as u32 % 2 + 1) % TOY_VOCAB
}

fn one_hot(id: u32) -> Vec<f32> {
    (0..TOY_VOCAB).map(|i| f32::from(u8::from(i == id))).collect()
}

impl Speculate for Toy {
    type Error = Infallible;

    fn prefill(&mut self, prompt: &[u32]) -> Result<Vec<f32>, Infallible> {
        self.text = prompt.to_vec();
        Ok(one_hot(toy_next(&self.text)))
    }

    fn propose(&mut self, anchor: u32, n: usize) -> Result<Proposals, Infallible> {
        let mut text = self.text.clone();
        text.push(anchor);
        for _ in 0..n {
            let own = toy_next(&text);
            let right = self.rng.uniform() < self.right;
            text.push(if right { own } else { (own + 1 + self.rng.below(6) as u32) % TOY_VOCAB });
        }
        Ok(Proposals { ids: text[text.len() - n..].to_vec(), drawn_from: Vec::new() })
    }

    fn verify(&mut self, block: &[u32]) -> Result<Vec<Vec<f32>>, Infallible> {
        self.fed = self.text.len();
        let rows = block.iter().map(|&id| {
            self.text.push(id);
            one_hot(toy_next(&self.text))
        });
        Ok(rows.collect())
    }

    fn commit(&mut self, rows: usize) -> Result<(), Infallible> {
        self.text.truncate(self.fed + rows);
        Ok(())
    }
}

/// The counts again, from the finished text and the proposals alone: position by position, without a loop
/// that knows about blocks being fed, cut or committed.
fn derived(
    text: &[u32],
    prompt: usize,
    end: usize,
    block: usize,
    stops: &[u32],
    proposals: &[Vec<u32>],
) -> Vec<Pass> {
    let mut passes = Vec::new();
    let mut s = prompt;
    for d in proposals {
        assert_eq!(d.len() + 1, block.min(end - s), "a full block, or what is left");
        // The target's own tokens behind the anchor and behind every right proposal.
        let mut known = text[..=s].to_vec();
        let mut a = 0;
        while a < d.len() && d[a] == toy_next(&known) {
            known.push(d[a]);
            a += 1;
        }
        known.push(toy_next(&known));
        let room = end - s - 1;
        let behind = &known[s + 1..];
        let stop = behind.iter().position(|id| stops.contains(id)).map_or(usize::MAX, |at| at + 1);
        let e = behind.len().min(room).min(stop);
        passes.push(Pass { anchor: s, proposed: d.len(), accepted: a, emitted: e, bonus: e == a + 1 });
        s += e;
    }
    passes
}

/// Keeps what was proposed.
struct Noted<'a>(&'a mut Toy, Vec<Vec<u32>>);

impl Speculate for Noted<'_> {
    type Error = Infallible;
    fn prefill(&mut self, prompt: &[u32]) -> Result<Vec<f32>, Infallible> {
        self.0.prefill(prompt)
    }
    fn propose(&mut self, anchor: u32, n: usize) -> Result<Proposals, Infallible> {
        let proposals = self.0.propose(anchor, n)?;
        self.1.push(proposals.ids.clone());
        Ok(proposals)
    }
    fn verify(&mut self, block: &[u32]) -> Result<Vec<Vec<f32>>, Infallible> {
        self.0.verify(block)
    }
    fn commit(&mut self, rows: usize) -> Result<(), Infallible> {
        self.0.commit(rows)
    }
}

#[test]
fn ten_thousand_walks_agree_with_a_plain_derivation() {
    let mut rng = SplitMix64::new(20_260_206);
    let (mut cut_short, mut stopped, mut dropped_bonus) = (0, 0, 0);
    for case in 0..10_000 {
        let prompt: Vec<u32> = (0..1 + rng.below(4)).map(|_| rng.below(7) as u32).collect();
        let (tokens, block) = (1 + rng.below(24), 2 + rng.below(7));
        let stops: Vec<u32> = if rng.below(2) == 0 { vec![] } else { vec![rng.below(7) as u32] };
        let right = [0.0, 0.5, 0.8, 0.95, 1.0][rng.below(5)];
        let mut toy = Toy { text: vec![], rng: SplitMix64::new(case), right, fed: 0 };
        let mut noted = Noted(&mut toy, Vec::new());
        let result = walk(&mut noted, &mut Greedy, &prompt, Limits { tokens, block, stops: &stops }).unwrap();

        let mut text = prompt.clone();
        while text.len() < prompt.len() + tokens {
            text.push(toy_next(&text));
            if stops.contains(&text[text.len() - 1]) {
                break;
            }
        }
        assert_eq!(result.tokens, text[prompt.len()..], "case {case}");
        let end = prompt.len() + tokens;
        let expected = derived(&text, prompt.len(), end, block, &stops, &noted.1);
        assert_eq!(result.passes, expected, "case {case}");
        adds_up(&result, result.tokens.len());
        let tally = Tally::of(&result.passes, block, result.tokens.len());
        assert_eq!(tally.histogram.iter().sum::<usize>(), tally.passes);
        assert_eq!(tally.accepted + result.passes.iter().filter(|p| p.bonus).count(), {
            // Emitted are the accepted ones and the bonuses, but for accepted ones behind a stop or the end.
            let lost = |p: &Pass| p.accepted - (p.emitted - usize::from(p.bonus));
            tally.emitted + result.passes.iter().map(lost).sum::<usize>()
        });
        cut_short += usize::from(result.passes.last().is_some_and(|p| p.proposed + 1 < block));
        stopped += usize::from(result.tokens.len() < tokens);
        dropped_bonus += usize::from(result.passes.last().is_some_and(|p| !p.bonus));
    }
    for (what, count) in [("cut", cut_short), ("stopped", stopped), ("without a bonus", dropped_bonus)] {
        assert!(count > 500, "only {count} walks end {what}");
    }
}

// The specification's example: a block of 4 with three positions left behind the anchor's, so two
// proposals; the target says 7, 8, 9. Both right: the bonus 9 falls behind the end. (7, 5): one right, the
// bonus 8 stays. (5, 8): none right, although the second equals the target's second.
#[test]
fn the_worked_example() {
    struct Fixed([u32; 2]);
    impl Speculate for Fixed {
        type Error = Infallible;
        fn prefill(&mut self, _: &[u32]) -> Result<Vec<f32>, Infallible> {
            Ok(row(6))
        }
        fn propose(&mut self, _: u32, n: usize) -> Result<Proposals, Infallible> {
            let ids = if n == 2 { self.0.to_vec() } else { vec![1; n] };
            Ok(Proposals { ids, drawn_from: Vec::new() })
        }
        fn verify(&mut self, block: &[u32]) -> Result<Vec<Vec<f32>>, Infallible> {
            Ok([7, 8, 9][..block.len()].iter().map(|&id| row(id)).collect())
        }
        fn commit(&mut self, _: usize) -> Result<(), Infallible> {
            Ok(())
        }
    }
    fn row(id: usize) -> Vec<f32> {
        (0..10).map(|i| f32::from(u8::from(i == id))).collect()
    }
    let first = |d| {
        let limits = Limits { tokens: 3, block: 4, stops: &[] };
        let result = walk(&mut Fixed(d), &mut Greedy, &[0], limits).unwrap();
        let pass = result.passes[0];
        (pass.proposed, pass.accepted, pass.emitted, pass.bonus)
    };
    assert_eq!(first([7, 8]), (2, 2, 2, false));
    assert_eq!(first([7, 5]), (2, 1, 2, true));
    assert_eq!(first([5, 8]), (2, 0, 1, true));
}

// ---------------------------------------------------------------- sampling

const COLOURS: usize = 5;

/// A target and a draft that are tables: the distribution behind every token.
struct Tables {
    target: Vec<Vec<f32>>,
    draft: Vec<Vec<f64>>,
    rng: SplitMix64,
    /// Propose the draft's best token instead of a drawn one.
    best: bool,
    /// Say that proposals came from another distribution than they did: a bug.
    lying: bool,
}

fn tables(seed: u64, best: bool, lying: bool) -> Tables {
    let mut rng = SplitMix64::new(99);
    let target = (0..COLOURS).map(|_| (0..COLOURS).map(|_| rng.normal() as f32).collect()).collect();
    let row = |rng: &mut SplitMix64| -> Vec<f64> {
        let raw: Vec<f64> = (0..COLOURS).map(|_| rng.uniform().powi(2)).collect();
        let total: f64 = raw.iter().sum();
        raw.iter().map(|v| v / total).collect()
    };
    let draft = (0..COLOURS).map(|_| row(&mut rng)).collect();
    Tables { target, draft, rng: SplitMix64::new(seed), best, lying }
}

impl Speculate for Tables {
    type Error = Infallible;

    fn prefill(&mut self, prompt: &[u32]) -> Result<Vec<f32>, Infallible> {
        Ok(self.target[prompt[prompt.len() - 1] as usize].clone())
    }

    fn propose(&mut self, anchor: u32, n: usize) -> Result<Proposals, Infallible> {
        let mut proposals = Proposals::default();
        let mut before = anchor as usize;
        for _ in 0..n {
            let q = self.draft[before].clone();
            if self.best {
                before = (0..COLOURS).max_by(|&a, &b| q[a].total_cmp(&q[b])).unwrap();
            } else {
                before = conformance::draft::draw(&q, self.rng.uniform()) as usize;
                proposals.drawn_from.push(if self.lying { vec![1.0 / COLOURS as f64; COLOURS] } else { q });
            }
            proposals.ids.push(before as u32);
        }
        Ok(proposals)
    }

    fn verify(&mut self, block: &[u32]) -> Result<Vec<Vec<f32>>, Infallible> {
        Ok(block.iter().map(|&id| self.target[id as usize].clone()).collect())
    }

    fn commit(&mut self, _: usize) -> Result<(), Infallible> {
        Ok(())
    }
}

const FILTER: Filter = Filter { temperature: 0.8, top_k: 4, top_p: 0.95 };

/// `Σ (observed - expected)² / expected` over all texts of three tokens that the target can give, and the
/// degrees of freedom.
fn chi_square(draws: usize, pair: &mut Tables, verifier: &mut impl Verifier) -> (f64, f64) {
    let limits = Limits { tokens: 3, block: 3, stops: &[] };
    let mut counts = vec![0usize; COLOURS.pow(3)];
    for _ in 0..draws {
        let text = walk(pair, verifier, &[2], limits).unwrap().tokens;
        counts[text.iter().fold(0, |n, &id| n * COLOURS + id as usize)] += 1;
    }
    let p = |before: usize, id: usize| filtered(&pair.target[before], FILTER)[id];
    let (mut total, mut cells) = (0.0, 0);
    for (n, &count) in counts.iter().enumerate() {
        let (a, b, c) = (n / COLOURS / COLOURS, n / COLOURS % COLOURS, n % COLOURS);
        let expected = draws as f64 * p(2, a) * p(a, b) * p(b, c);
        if expected == 0.0 {
            assert_eq!(count, 0, "text {a} {b} {c} cannot be");
            continue;
        }
        total += (count as f64 - expected).powi(2) / expected;
        cells += 1;
    }
    (total, f64::from(cells - 1))
}

/// Mean k and variance 2k: five standard deviations above the mean is less likely than 10^-4.
fn limit(freedom: f64) -> f64 {
    freedom + 5.0 * (2.0 * freedom).sqrt()
}

#[test]
fn sampling_keeps_the_target_s_distribution() {
    const DRAWS: usize = 100_000;
    for best in [false, true] {
        let (mut a, mut b) = (SplitMix64::new(1), SplitMix64::new(2));
        let mut rejection = Rejection { filter: FILTER, uniform: || a.uniform() };
        let (chi, freedom) = chi_square(DRAWS, &mut tables(3, best, false), &mut rejection);
        assert!(chi < limit(freedom), "rejection, best {best}: {chi} with {freedom} degrees of freedom");
        let mut matching = Matching { filter: FILTER, uniform: || b.uniform() };
        let (chi, freedom) = chi_square(DRAWS, &mut tables(4, best, false), &mut matching);
        assert!(chi < limit(freedom), "matching, best {best}: {chi} with {freedom} degrees of freedom");
    }
}

/// The same test on a draft that lies about its distribution: the test can fail.
#[test]
fn a_wrong_distribution_shows() {
    let mut rng = SplitMix64::new(1);
    let mut rejection = Rejection { filter: FILTER, uniform: || rng.uniform() };
    let (chi, freedom) = chi_square(100_000, &mut tables(3, false, true), &mut rejection);
    assert!(chi > 10.0 * limit(freedom), "{chi} with {freedom} degrees of freedom");
}

/// A path selector's walk is drawn from what it says it is drawn from: candidates only, sums of 1.
#[test]
fn drawn_proposals_name_their_distribution() {
    let package = Package::open("qwen3").unwrap();
    let (config, target) = model(&package);
    let (layers, hidden, vocab) = (config.num_hidden_layers(), config.hidden_size(), config.vocab_size());
    let noise = Noise { hidden, vocab, taps: 2, version: 2 };
    let pair = Pair::new(config, target, noise.draft(layers, 6)).unwrap();
    let mut rng = SplitMix64::new(5);
    let mut host = Host::new(&pair).drawing(1.5, move || rng.uniform());
    host.prefill(&[3, 1, 4, 1, 5]).unwrap();
    let proposals = host.propose(9, 5).unwrap();
    assert_eq!((proposals.ids.len(), proposals.drawn_from.len()), (5, 5));
    for (id, q) in proposals.ids.iter().zip(&proposals.drawn_from) {
        assert!((q.iter().sum::<f64>() - 1.0).abs() < 1e-12);
        assert!(q.iter().filter(|p| **p > 0.0).count() <= 5, "five candidates");
        assert!(q[*id as usize] > 0.0);
    }
}

// ---------------------------------------------------------------- pairs that are none

#[test]
fn pairs_that_are_none() {
    let package = Package::open("qwen3").unwrap();
    let (config, target) = model(&package);
    let (layers, hidden, vocab) = (config.num_hidden_layers(), config.hidden_size(), config.vocab_size());
    let noise = Noise { hidden, vocab, taps: 2, version: 1 };
    let refusal = |edit: fn(&mut DraftConfig)| {
        let mut draft = noise.draft(layers, 4);
        edit(&mut draft.config);
        Pair::new(config.clone(), target.clone(), draft).unwrap_err().to_string()
    };
    assert_eq!(
        refusal(|c| c.hidden_size = 64),
        "hidden width differs: not a pair; the draft has 64, the target 40; take the draft that was trained for this target"
    );
    assert!(
        refusal(|c| c.target_layer_ids = vec![0, 3])
            .contains("target_layer_ids has 3, but the target has layers 0 to 2")
    );
    assert!(
        refusal(|c| c.num_target_layers = Some(36)).contains("num_target_layers is 36, but the target has 3")
    );
    assert!(
        refusal(|c| c.mask_token_id = 97)
            .starts_with("mask_token_id 97 is outside the target's table of 97 rows")
    );
    assert!(refusal(|c| c.vocab_size = Some(50)).starts_with("vocabulary differs: not a pair"));
}
