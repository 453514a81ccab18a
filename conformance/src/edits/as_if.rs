//! Which edit of the package a subject's first wrong site agrees with.

use super::{Program, Sources, all};
use crate::contract::Contract;
use crate::draft::Pair;
use crate::follow::PassTaps;
use crate::mutants::explain::{EXPLAINS, distance};
use crate::passes::Pass;
use rayon::prelude::*;
use reference::Tensor;
use serde::Serialize;
use spec::Site;

/// The first wrong site of a subject.
#[derive(Clone)]
pub struct Wrong {
    /// Where, without the pass.
    pub at: Site,
    /// What the subject gave.
    pub subject: Tensor,
    /// What the reference gives on the subject's inputs.
    pub honest: Tensor,
    /// Variance of an honest subject, element by element.
    pub spread: Vec<f64>,
}

/// An edit of the package under which the reference gives what the subject gave.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct AsIf {
    /// `id` or `id:variant`.
    pub edit: String,
    /// What reads as if it were something else: `rope_theta were 10000.0 and not 500000.0`.
    pub says: String,
    /// Root mean square of (subject - edited) over the declared spread.
    pub z_rms: f64,
    /// Other edits that give the very same values here.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub same_here: Vec<String>,
}

impl AsIf {
    /// Whether the subject is explained by `edit`, or by one that this site cannot tell from it.
    pub fn names(&self, edit: &str) -> bool {
        self.edit == edit || self.same_here.iter().any(|same| same == edit)
    }

    /// Of a model that ran `passes` and first went wrong in the last of them. Every edited model goes on from
    /// the subject's own values, so that only its first wrong op is asked for.
    pub fn of_model(
        sources: &Sources,
        passes: &[Pass],
        taps: &[PassTaps],
        wrong: &Wrong,
        contract: &Contract,
    ) -> Option<AsIf> {
        if !sources.target.is_small() {
            return None;
        }
        let tried = all().collect::<Vec<_>>().into_par_iter().filter_map(|edit| {
            let (_, model, says) = sources.edited_model(edit)?;
            let value = value(&Program::Model(&model, passes), taps, wrong.at, contract)?;
            Some((edit.mutant.name(), says, value))
        });
        rank(tried.collect(), wrong)
    }

    /// Of the blocks of a draft.
    pub fn of_draft(
        sources: &Sources,
        pair: &Pair,
        (text, anchors): (&[u32], &[usize]),
        taps: &[PassTaps],
        wrong: &Wrong,
        contract: &Contract,
    ) -> Option<AsIf> {
        if !sources.draft.as_ref()?.is_small() || !sources.target.is_small() {
            return None;
        }
        let tried = all().collect::<Vec<_>>().into_par_iter().filter_map(|edit| {
            let (edited, says) = sources.edited_pair(edit, pair)?;
            let blocks = Program::blocks(&edited, text, anchors).ok()?;
            let value = value(&blocks, taps, wrong.at, contract)?;
            Some((edit.mutant.name(), says, value))
        });
        rank(tried.collect(), wrong)
    }
}

/// What a program gives at a site of its last pass on the inputs that `taps` give.
fn value(program: &Program, taps: &[PassTaps], wanted: Site, contract: &Contract) -> Option<Tensor> {
    let (mut found, last) = (None, taps.len().checked_sub(1)?);
    let mut look =
        |pass: usize, at: Site, _: &reference::Call<Tensor>, value: &Tensor, _: Option<&Tensor>| {
            if pass == last && at == wanted {
                found.get_or_insert(value.clone());
            }
        };
    program.beside(contract, taps, &mut look).ok()?;
    found
}

fn rank(tried: Vec<(String, String, Tensor)>, wrong: &Wrong) -> Option<AsIf> {
    let z = |value: &Tensor| distance(&wrong.subject, value, &wrong.spread);
    let fits = tried.into_iter().filter(|(_, _, value)| value.shape() == wrong.subject.shape());
    let mut fits: Vec<AsIf> = fits
        .map(|(edit, says, value)| AsIf { edit, says, z_rms: z(&value), same_here: vec![] })
        // One wrong element of many leaves the whole near the honest values: that explains nothing.
        .filter(|as_if| as_if.z_rms <= EXPLAINS && as_if.z_rms < 0.5 * z(&wrong.honest))
        .collect();
    fits.sort_by(|a, b| a.z_rms.total_cmp(&b.z_rms));
    let mut fits = fits.into_iter();
    let mut best = fits.next()?;
    best.same_here = fits.take_while(|other| other.z_rms == best.z_rms).map(|other| other.edit).collect();
    Some(best)
}
