//! The speculative loop, over anything that can propose and verify.

use super::Pass;
use crate::golden_gate::argmax;

/// What a draft proposes for one block.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Proposals {
    /// The ids.
    pub ids: Vec<u32>,
    /// The distribution that each id was drawn from, over the vocabulary; empty where ids were not drawn
    /// but chosen, which is a distribution of one token.
    pub drawn_from: Vec<Vec<f64>>,
}

/// A target with its draft, in the middle of a text.
pub trait Speculate {
    /// Why it may stop.
    type Error;

    /// Feeds the prompt; the target's logits behind it.
    fn prefill(&mut self, prompt: &[u32]) -> Result<Vec<f32>, Self::Error>;

    /// The draft's `n` proposals behind `anchor`, from all committed rows.
    fn propose(&mut self, anchor: u32, n: usize) -> Result<Proposals, Self::Error>;

    /// Feeds `[anchor, d_1, …]` to the target in one pass; its logits behind each of them.
    fn verify(&mut self, block: &[u32]) -> Result<Vec<Vec<f32>>, Self::Error>;

    /// Keeps the first `rows` rows of the last block, for target and draft, and takes back the others.
    fn commit(&mut self, rows: usize) -> Result<(), Self::Error>;
}

/// Decides what is accepted.
pub trait Verifier {
    /// The token behind a row of the target's logits, without a draft.
    fn choose(&mut self, row: &[f32]) -> u32;

    /// How many proposals stay, and the target's own token behind them. `rows[j]` are the logits that
    /// proposal j is measured against; there is one row more than proposals.
    fn judge(&mut self, proposals: &Proposals, rows: &[Vec<f32>]) -> (usize, u32);
}

/// The largest logit, the lowest id of equal ones.
pub struct Greedy;

impl Verifier for Greedy {
    fn choose(&mut self, row: &[f32]) -> u32 {
        argmax(row) as u32
    }

    fn judge(&mut self, proposals: &Proposals, rows: &[Vec<f32>]) -> (usize, u32) {
        let own = |j: usize| argmax(&rows[j]) as u32;
        let accepted = proposals.ids.iter().enumerate().take_while(|(j, id)| own(*j) == **id).count();
        (accepted, own(accepted))
    }
}

/// How far a walk goes.
#[derive(Clone, Copy, Debug)]
pub struct Limits<'a> {
    /// Tokens to generate: `M`.
    pub tokens: usize,
    /// An anchor and its proposals: `B`.
    pub block: usize,
    /// Tokens behind which the text ends.
    pub stops: &'a [u32],
}

/// A text and the passes that made it.
#[derive(Clone, Debug, PartialEq)]
pub struct Walk {
    /// The generated tokens.
    pub tokens: Vec<u32>,
    /// The passes, in order.
    pub passes: Vec<Pass>,
}

/// Generates `limits.tokens` tokens behind `prompt`, block by block.
pub fn walk<S: Speculate>(
    pair: &mut S,
    verifier: &mut impl Verifier,
    prompt: &[u32],
    limits: Limits,
) -> Result<Walk, S::Error> {
    let mut anchor = verifier.choose(&pair.prefill(prompt)?);
    let mut walk = Walk { tokens: vec![anchor], passes: Vec::new() };
    while walk.tokens.len() < limits.tokens && !limits.stops.contains(&anchor) {
        let position = prompt.len() + walk.tokens.len() - 1;
        let left = limits.tokens - walk.tokens.len();
        let proposals = pair.propose(anchor, limits.block.min(left + 1) - 1)?;
        let block: Vec<u32> = [anchor].iter().chain(&proposals.ids).copied().collect();
        let rows = pair.verify(&block)?;
        let (accepted, bonus) = verifier.judge(&proposals, &rows);
        let mut new = proposals.ids[..accepted].to_vec();
        new.push(bonus);
        new.truncate(left);
        if let Some(stop) = new.iter().position(|id| limits.stops.contains(id)) {
            new.truncate(stop + 1);
        }
        walk.passes.push(Pass {
            anchor: position,
            proposed: proposals.ids.len(),
            accepted,
            emitted: new.len(),
            bonus: new.len() == accepted + 1,
        });
        pair.commit(new.len())?;
        anchor = new[new.len() - 1];
        walk.tokens.extend(new);
    }
    Ok(walk)
}

/// The target's greedy text, and a block after every position of it: what each of them would have
/// accepted and emitted, whether or not a loop would have stopped there.
pub fn every_position<S: Speculate>(pair: &mut S, prompt: &[u32], limits: Limits) -> Result<Walk, S::Error> {
    let mut anchor = Greedy.choose(&pair.prefill(prompt)?);
    let (mut tokens, mut asked) = (vec![anchor], Vec::new());
    while tokens.len() < limits.tokens && !limits.stops.contains(&anchor) {
        let left = limits.tokens - tokens.len();
        asked.push(pair.propose(anchor, limits.block.min(left + 1) - 1)?);
        let rows = pair.verify(&[anchor])?;
        pair.commit(1)?;
        anchor = Greedy.choose(&rows[0]);
        tokens.push(anchor);
    }
    let passes = asked.iter().enumerate().map(|(i, proposals)| {
        let known = &tokens[i + 1..];
        let accepted = proposals.ids.iter().zip(known).take_while(|(d, t)| d == t).count();
        let emitted = (accepted + 1).min(known.len());
        let (anchor, proposed) = (prompt.len() + i, proposals.ids.len());
        Pass { anchor, proposed, accepted, emitted, bonus: emitted == accepted + 1 }
    });
    let passes = passes.collect();
    Ok(Walk { tokens, passes })
}
