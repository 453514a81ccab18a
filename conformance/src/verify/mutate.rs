//! A mutant at one site at a time.

use super::run::planned;
use super::sites::draft_sites;
use super::{Loaded, Options, PackageResult, VerifyError, applies_nowhere, verify};
use crate::emulate::Emulate;
use crate::mutants::{History, Selection};
use reference::{Call, Ops, Tensor};
use spec::{NonFinite, Site};

/// Verifies the mutant of `options` at every site where it can be made and that its glob covers, one at a
/// time; `repro` is told the site. A mutant of the device is made in the path as a whole: one result.
pub fn one_at_a_time(
    loaded: &Loaded,
    prompt: &[u32],
    options: &Options,
    mut repro: impl FnMut(Option<&str>) -> String,
) -> Result<Vec<PackageResult>, VerifyError> {
    let Some(selection) = options.mutate.filter(|selection| selection.in_op()) else {
        return Ok(vec![verify(loaded, prompt, options, repro(None))?]);
    };
    let sites = applicable(loaded, prompt, options, selection)
        .map_err(|source| VerifyError::Weights { package: loaded.name.clone(), source })?;
    if sites.is_empty() {
        return Err(applies_nowhere(loaded, selection));
    }
    let one = |site: Site| {
        let name = site.to_string();
        let selection = Selection {
            mutant: selection.mutant,
            site: Some(name.clone()),
            fault: None,
            edit: None,
            in_loop: None,
        };
        let options = Options { mutate: Some(&selection), ..*options };
        let mut result = verify(loaded, prompt, &options, repro(Some(&name)))?;
        result.mutated = Some(name);
        Ok(result)
    };
    sites.into_iter().map(one).collect()
}

/// The sites at which a mutant can be made, in the order of the data flow: in the model, then in its draft.
fn applicable(
    loaded: &Loaded,
    prompt: &[u32],
    options: &Options,
    selection: &Selection,
) -> Result<Vec<Site>, NonFinite> {
    let (passes, _) = planned(loaded, prompt, options, None)?;
    let mut ops = Probe {
        honest: Emulate::new(options.contract),
        selection,
        history: History::new(),
        sites: Vec::new(),
    };
    let mut state = loaded.model.fresh();
    for pass in &passes {
        loaded.model.pass(&mut ops, &mut state, &pass.ids);
        ops.history.clear();
        ops.honest.check()?;
    }
    let mut sites = ops.sites;
    for site in draft_sites(loaded, prompt, options, &passes)? {
        if !sites.contains(&site) {
            sites.push(site);
        }
    }
    Ok(sites)
}

/// An honest subject that notes where a mutant could be made.
struct Probe<'a> {
    honest: Emulate<'a>,
    selection: &'a Selection,
    history: History,
    sites: Vec<Site>,
}

impl Ops for Probe<'_> {
    type Tensor = Tensor;

    fn run(&mut self, at: Site, call: Call<'_, Tensor>) -> Tensor {
        if self.selection.covers(at) && !self.sites.contains(&at) {
            let eval = &mut |call: &Call<Tensor>| self.honest.value(at, call);
            if (self.selection.mutant.apply)(&call, at, &self.history, eval).is_some() {
                self.sites.push(at);
            }
        }
        let value = self.honest.value(at, &call);
        self.history.note(at, &call, value.clone());
        value
    }
}
