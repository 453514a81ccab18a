//! Mistakes of the speculative loop itself: what it accepts, counts, keeps and emits.
//!
//! Models and draft are right in all of them; the loop around them is not.

use super::passes::{self, LoopResult};
use super::walk::{Greedy, Limits, Proposals, Speculate, Verifier, Walk, every_position, walk};
use super::{Host, HostError, Pair};
use crate::audit::{Audit, Kill, NotApplicable, Survivor};
use crate::contract::Contract;
use crate::edits::nowhere;
use crate::golden_gate::argmax;
use crate::judge::{Place, Verdict};
use crate::mutants::{Mutant, mutant};

/// A mutant that is realised in the loop.
pub struct LoopMutant {
    /// Its entry in the catalogue.
    pub mutant: Mutant,
    mistake: Mistake,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Mistake {
    Unverified,
    Shifted,
    Matches,
    BonusCounted,
    StartsEarly,
    KeepsRejected,
    PastStop,
}

/// The mutants of the loop.
pub static MUTANTS: &[LoopMutant] = &[
    made("spec-accept", "", "the first proposal is accepted unverified", REJECTS, Mistake::Unverified),
    made(
        "spec-accept",
        "shifted",
        "proposal j is compared with the token behind its own",
        PAIR,
        Mistake::Shifted,
    ),
    made("spec-accept", "matches", "right proposals behind a wrong one are counted", LATE, Mistake::Matches),
    made(
        "spec-accept",
        "bonus",
        "the target's own token is counted as accepted",
        PAIR,
        Mistake::BonusCounted,
    ),
    made(
        "spec-accept",
        "index",
        "the next pass starts one row early",
        "an accepted proposal",
        Mistake::StartsEarly,
    ),
    made("spec-rollback", "", "rejected rows stay in the caches", REJECTS, Mistake::KeepsRejected),
    made(
        "spec-stop-token",
        "",
        "tokens behind a stop token of their pass are emitted",
        STOP,
        Mistake::PastStop,
    ),
];

const PAIR: &str = "a target with a draft";
const REJECTS: &str = "a pass that rejects";
const LATE: &str = "a pass with a right proposal behind a wrong one";
const STOP: &str = "a pass that accepts two proposals";

const fn made(
    id: &'static str,
    variant: &'static str,
    formula: &'static str,
    needs: &'static str,
    mistake: Mistake,
) -> LoopMutant {
    LoopMutant { mutant: mutant(id, variant, formula, needs, nowhere), mistake }
}

impl std::fmt::Debug for LoopMutant {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.mutant.fmt(f)
    }
}

impl LoopMutant {
    /// The walk of a loop with this mistake.
    pub fn walk<S: Speculate>(&self, pair: &mut S, prompt: &[u32], limits: Limits) -> Result<Walk, S::Error> {
        let mistake = self.mistake;
        let mut pair = Mistaken { pair, mistake, block: 0 };
        let stops = if mistake == Mistake::PastStop { &[] } else { limits.stops };
        let mut walk = walk(&mut pair, &mut Mistaking(mistake), prompt, Limits { stops, ..limits })?;
        match mistake {
            Mistake::BonusCounted => {
                walk.passes.iter_mut().for_each(|pass| pass.accepted += usize::from(pass.bonus))
            }
            Mistake::PastStop => cut_behind(&mut walk, limits.stops),
            _ => {}
        }
        Ok(walk)
    }

    /// The tokens that must end the text for the mistake to show: one that an honest walk accepts with others
    /// behind it. None for mistakes that have nothing to do with stops.
    fn stops(&self, honest: &Walk) -> Vec<u32> {
        if self.mistake != Mistake::PastStop {
            return Vec::new();
        }
        let mut at = 1;
        for pass in &honest.passes {
            let first_time = |n: &usize| !honest.tokens[..*n].contains(&honest.tokens[*n]);
            if let Some(stop) = (at..at + pass.emitted.saturating_sub(1)).find(first_time) {
                return vec![honest.tokens[stop]];
            }
            at += pass.emitted;
        }
        Vec::new()
    }

    /// Judges a loop with this mistake on the reference's own models, as any loop is judged.
    pub fn judge(
        &self,
        pair: &Pair,
        contract: &Contract,
        prompt: &[u32],
        tokens: usize,
    ) -> Result<LoopResult, HostError> {
        self.judge_over(pair, contract, prompt, tokens, &|| Host::new(pair))
    }

    /// The same over any models that `fresh` makes.
    fn judge_over<S: Speculate<Error = HostError>>(
        &self,
        pair: &Pair,
        contract: &Contract,
        prompt: &[u32],
        tokens: usize,
        fresh: &dyn Fn() -> S,
    ) -> Result<LoopResult, HostError> {
        let open = Limits { tokens, block: pair.draft.config.block_size, stops: &[] };
        let stops = self.stops(&walk(&mut fresh(), &mut Greedy, prompt, open)?);
        let limits = Limits { stops: &stops, ..open };
        let own = every_position(&mut fresh(), prompt, limits)?.tokens;
        let wrong = |models: &mut passes::Remembering<S>| self.walk(models, prompt, limits);
        passes::judged(pair, contract, prompt, limits, &own, &mut fresh(), fresh, wrong)
    }
}

/// Ends a walk behind the pass that emitted a stop token.
fn cut_behind(walk: &mut Walk, stops: &[u32]) {
    let Some(stop) = walk.tokens.iter().position(|id| stops.contains(id)) else { return };
    let (mut end, mut passes) = (1, 0);
    while end <= stop && passes < walk.passes.len() {
        end += walk.passes[passes].emitted;
        passes += 1;
    }
    walk.tokens.truncate(end);
    walk.passes.truncate(passes);
}

/// Decides as a mistake has it.
struct Mistaking(Mistake);

impl Verifier for Mistaking {
    fn choose(&mut self, row: &[f32]) -> u32 {
        Greedy.choose(row)
    }

    fn judge(&mut self, proposals: &Proposals, rows: &[Vec<f32>]) -> (usize, u32) {
        let own = |j: usize| argmax(&rows[j]) as u32;
        let right = |j: usize| match self.0 {
            Mistake::Unverified => j == 0 || proposals.ids[j] == own(j),
            Mistake::Shifted => proposals.ids[j] == own(j + 1),
            _ => proposals.ids[j] == own(j),
        };
        let all = 0..proposals.ids.len();
        let accepted = match self.0 {
            Mistake::Matches => all.filter(|&j| right(j)).count(),
            _ => all.take_while(|&j| right(j)).count(),
        };
        (accepted, own(accepted))
    }
}

/// Keeps rows as a mistake has it.
struct Mistaken<'p, S> {
    pair: &'p mut S,
    mistake: Mistake,
    block: usize,
}

impl<S: Speculate> Speculate for Mistaken<'_, S> {
    type Error = S::Error;

    fn prefill(&mut self, prompt: &[u32]) -> Result<Vec<f32>, S::Error> {
        self.pair.prefill(prompt)
    }

    fn propose(&mut self, anchor: u32, n: usize) -> Result<Proposals, S::Error> {
        self.pair.propose(anchor, n)
    }

    fn verify(&mut self, block: &[u32]) -> Result<Vec<Vec<f32>>, S::Error> {
        self.block = block.len();
        self.pair.verify(block)
    }

    fn commit(&mut self, rows: usize) -> Result<(), S::Error> {
        self.pair.commit(match self.mistake {
            Mistake::KeepsRejected => self.block,
            Mistake::StartsEarly => (rows - 1).max(1),
            _ => rows,
        })
    }
}

/// The reference's models with proposals that are right by a script: in pass p, proposal j is the target's own
/// token unless p + j leaves 1 when divided by 3. So passes reject at every depth, with right proposals behind.
struct Scripted<'a> {
    host: Host<'a>,
    /// The target's greedy text behind the prompt, past the end of the walk by a block.
    text: &'a [u32],
    /// Committed tokens behind the prompt, the anchor not among them.
    behind: usize,
    pass: usize,
}

impl Speculate for Scripted<'_> {
    type Error = HostError;

    fn prefill(&mut self, prompt: &[u32]) -> Result<Vec<f32>, HostError> {
        self.host.prefill(prompt)
    }

    fn propose(&mut self, anchor: u32, n: usize) -> Result<Proposals, HostError> {
        // The draft is asked all the same, so that its rows are those of the text.
        let asked = self.host.propose(anchor, n)?;
        let pass = self.pass;
        self.pass += 1;
        let told = asked.ids.iter().enumerate().map(|(j, &id)| {
            let own = self.text.get(self.behind + 1 + j).copied().unwrap_or(id);
            if (pass + j) % 3 == 1 { u32::from(own == 0) } else { own }
        });
        Ok(Proposals { ids: told.collect(), drawn_from: Vec::new() })
    }

    fn verify(&mut self, block: &[u32]) -> Result<Vec<Vec<f32>>, HostError> {
        self.host.verify(block)
    }

    fn commit(&mut self, rows: usize) -> Result<(), HostError> {
        self.behind += rows;
        self.host.commit(rows)
    }
}

/// Mutants of the loop whose walk over `fresh` models is exactly `found`.
pub(super) fn same_walk<S: Speculate<Error = HostError>>(
    prompt: &[u32],
    limits: Limits,
    found: &Walk,
    fresh: &dyn Fn() -> S,
) -> Result<Vec<&'static LoopMutant>, HostError> {
    let mut same = Vec::new();
    for mutant in MUTANTS {
        if mutant.walk(&mut fresh(), prompt, limits)? == *found {
            same.push(mutant);
        }
    }
    Ok(same)
}

/// Tries every mistake of the loop on a pair: `tokens` tokens behind `prompt`, with the draft's own proposals and,
/// where those show nothing, with scripted ones.
pub fn audit_loop(
    package: &str,
    pair: &Pair,
    contract: &Contract,
    prompt: &[u32],
    tokens: usize,
) -> Result<Audit, HostError> {
    let limits = Limits { tokens, block: pair.draft.config.block_size, stops: &[] };
    let honest = walk(&mut Host::new(pair), &mut Greedy, prompt, limits)?;
    let longer = Limits { tokens: tokens + limits.block, ..limits };
    let text = every_position(&mut Host::new(pair), prompt, longer)?.tokens;
    let scripted = || Scripted { host: Host::new(pair), text: &text, behind: 0, pass: 0 };
    let mut audit = Audit { package: package.to_string(), ..Audit::default() };
    for made in MUTANTS {
        let (package, mutant) = (package.to_string(), made.mutant.name());
        if made.mistake == Mistake::PastStop && made.stops(&honest).is_empty() {
            audit.not_applicable.push(NotApplicable { mutant, needs: made.mutant.needs });
            continue;
        }
        let mut result = made.judge(pair, contract, prompt, tokens)?;
        let mut place = "loop";
        if result.verdict != Verdict::Failed {
            result = made.judge_over(pair, contract, prompt, tokens, &scripted)?;
            place = "scripted.loop";
        }
        audit.mutants += 1;
        if result.verdict == Verdict::Failed {
            audit.killed += 1;
            let explained = Some(result.computes.contains(&mutant));
            let (site, verdict_site) = ("loop".to_string(), place.to_string());
            let row = result.first_wrong_pass.unwrap_or(0);
            audit.kills.push(Kill {
                package,
                mutant,
                site,
                verdict_site,
                at: Place { row, col: 0 },
                explained,
            });
        } else {
            let (why, change) = ("the walk stays the same".to_string(), made.mutant.needs.to_string());
            audit.survivors.push(Survivor { package, mutant, sites: vec!["loop".into()], why, change });
        }
    }
    Ok(audit)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::convert::Infallible;

    /// A target that counts up from the anchor, and a draft that proposes what it is told.
    struct Counting(Vec<u32>);

    impl Speculate for Counting {
        type Error = Infallible;

        fn prefill(&mut self, prompt: &[u32]) -> Result<Vec<f32>, Infallible> {
            Ok(one_hot(prompt[prompt.len() - 1] + 1))
        }

        fn propose(&mut self, _: u32, n: usize) -> Result<Proposals, Infallible> {
            Ok(Proposals { ids: self.0[..n].to_vec(), drawn_from: vec![] })
        }

        fn verify(&mut self, block: &[u32]) -> Result<Vec<Vec<f32>>, Infallible> {
            Ok(block.iter().map(|id| one_hot(id + 1)).collect())
        }

        fn commit(&mut self, _: usize) -> Result<(), Infallible> {
            Ok(())
        }
    }

    fn one_hot(id: u32) -> Vec<f32> {
        (0..20).map(|i| f32::from(u8::from(i == id))).collect()
    }

    /// Text and accepted proposals of the first pass: prompt 0, so anchor 1; four proposals of a block of 5.
    fn first(name: &str, proposals: [u32; 4], stops: &[u32]) -> (Vec<u32>, usize) {
        let made = MUTANTS.iter().find(|made| made.mutant.name() == name).unwrap();
        let limits = Limits { tokens: 6, block: 5, stops };
        let walk = made.walk(&mut Counting(proposals.to_vec()), &[0], limits).unwrap();
        let emitted = walk.passes[0].emitted;
        (walk.tokens[1..1 + emitted].to_vec(), walk.passes[0].accepted)
    }

    // Right would be 2 3 4 5 and the bonus 6; proposals 2 9 4 7 keep one, and the bonus is 3.
    #[test]
    fn mistakes_by_hand() {
        // 9 is wrong anyway, so what is unverified is only the first: of 8 3 9 9 nothing should stay, and 8 does;
        // behind 8 the target says 9, and 3 is not that.
        assert_eq!(first("spec-accept", [8, 3, 9, 9], &[]), (vec![8, 9], 1));
        // 3 is what the target says behind 2: compared with the token behind its own, 9 9 would have to be 4.
        assert_eq!(first("spec-accept:shifted", [2, 9, 4, 7], &[]), (vec![2], 0));
        // 2 is right, and 10 behind the wrong 9 is what the target says there.
        assert_eq!(first("spec-accept:matches", [2, 9, 10, 7], &[]), (vec![2, 9, 10], 2));
        assert_eq!(first("spec-accept:bonus", [2, 9, 4, 7], &[]), (vec![2, 3], 2));
        assert_eq!(first("spec-stop-token", [2, 3, 4, 5], &[3]), (vec![2, 3, 4, 5, 6], 4));
    }
}
