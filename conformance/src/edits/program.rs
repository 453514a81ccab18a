//! A model's passes or a draft's blocks, run by any interpretation over plain tensors.

use crate::draft::Pair;
use crate::draft::judge::Ground;
use crate::emulate::Emulate;
use crate::follow::PassTaps;
use crate::passes::Pass;
use reference::{Call, Model, Ops, Tensor};
use spec::{NonFinite, Site};

/// What is run.
pub(crate) enum Program<'a> {
    /// A model on a text.
    Model(&'a Model, &'a [Pass]),
    /// A draft's blocks behind `anchors`.
    Draft(&'a Pair, Box<Ground>, &'a [usize]),
}

impl<'a> Program<'a> {
    /// A draft's blocks; context rows are those of the pair's own target and tapped layers.
    pub fn blocks(pair: &'a Pair, text: &[u32], anchors: &'a [usize]) -> Result<Self, NonFinite> {
        Ok(Program::Draft(pair, Box::new(Ground::of(pair, text)?), anchors))
    }

    /// The names of the passes.
    pub fn passes(&self) -> Vec<String> {
        match self {
            Program::Model(_, passes) => passes.iter().map(|pass| pass.name.clone()).collect(),
            Program::Draft(_, _, anchors) => (0..anchors.len()).map(|n| format!("pass{n}")).collect(),
        }
    }

    /// The first `count` passes.
    pub fn first(&self, count: usize) -> Program<'_> {
        match self {
            Program::Model(model, passes) => Program::Model(model, &passes[..count]),
            Program::Draft(pair, ground, anchors) => Program::Draft(pair, ground.clone(), &anchors[..count]),
        }
    }

    /// Runs every pass; `before` is told its number.
    fn run<O: Ops<Tensor = Tensor>>(&self, ops: &mut O, before: impl Fn(&mut O, usize)) {
        match self {
            Program::Model(model, passes) => {
                let mut state = model.fresh();
                for (n, pass) in passes.iter().enumerate() {
                    before(ops, n);
                    model.pass(ops, &mut state, &pass.ids);
                }
            }
            Program::Draft(pair, ground, anchors) => {
                let mut state = pair.draft.fresh();
                for (n, &anchor) in anchors.iter().enumerate() {
                    before(ops, n);
                    ground.pass(pair, ops, &mut state, anchor, |rows| rows);
                }
            }
        }
    }

    /// What an honest subject of a contract gives, pass by pass.
    pub fn taps(&self, contract: &crate::contract::Contract) -> Result<Vec<PassTaps>, NonFinite> {
        let mut taps = vec![PassTaps::new(); self.passes().len()];
        let mut keep = |pass: usize, at: Site, _: &Call<Tensor>, value: &Tensor, _: Option<&Tensor>| {
            taps[pass].insert(at, value.clone());
        };
        self.beside(contract, &[], &mut keep)?;
        Ok(taps)
    }

    /// Runs an honest subject of a contract that goes on from `taps`, pass by pass, wherever they have a value
    /// of the right shape. `visit` sees every op with what the honest subject and what `taps` give.
    pub fn beside(
        &self,
        contract: &crate::contract::Contract,
        taps: &[PassTaps],
        visit: &mut Visit,
    ) -> Result<(), NonFinite> {
        let mut ops = Beside { honest: Emulate::new(contract), taps, pass: 0, visit };
        self.run(&mut ops, |ops, pass| ops.pass = pass);
        ops.honest.check()
    }
}

/// Sees pass, site, op, the honest value, and the value that is gone on from.
pub(crate) type Visit<'v> = dyn FnMut(usize, Site, &Call<Tensor>, &Tensor, Option<&Tensor>) + 'v;

struct Beside<'a, 'v> {
    honest: Emulate<'a>,
    taps: &'a [PassTaps],
    pass: usize,
    visit: &'a mut Visit<'v>,
}

impl Ops for Beside<'_, '_> {
    type Tensor = Tensor;

    fn run(&mut self, at: Site, call: Call<'_, Tensor>) -> Tensor {
        let value = self.honest.value(at, &call);
        let tap = self.taps.get(self.pass).and_then(|taps| taps.get(&at));
        (self.visit)(self.pass, at, &call, &value, tap.as_ref());
        tap.filter(|tap| tap.shape() == value.shape()).unwrap_or(value)
    }
}
