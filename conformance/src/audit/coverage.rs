//! Which ops of a model could be seen to be wrong: by op, shape, format and layer.

use super::{Audit, Kill};
use reference::{Call, Tensor};
use serde::Serialize;
use spec::{Matrix, Site};
use std::collections::{BTreeMap, BTreeSet};

/// Whether a mistake in an op would be seen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Sight {
    /// A mutant of it is shown, at every site of the row.
    Judged,
    /// No mutant of it is shown, or none is made of it.
    Blind,
    /// The subject does not expose it.
    NotSupported,
}

impl Sight {
    /// In words.
    pub fn name(self) -> &'static str {
        match self {
            Sight::Judged => "judged",
            Sight::Blind => "blind",
            Sight::NotSupported => "not supported",
        }
    }
}

/// An op of one shape and format, in the layers in which the same is to be said of it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Covered {
    /// The package.
    pub package: String,
    /// The op.
    pub op: &'static str,
    /// Inputs and outputs of a product, else the axes of a token's result: `32x40`, `4x8`.
    pub shape: String,
    /// How its weight is stored; nothing where it has none.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub format: String,
    /// What can be seen of it.
    pub sight: Sight,
    /// Its layers; those outside of layers are left out.
    pub layers: Vec<u32>,
    /// Its sites by name.
    pub sites: Vec<&'static str>,
    /// Mutants at these sites, equivalents not counted.
    pub mutants: usize,
    /// Those of them that are shown.
    pub shown: usize,
}

/// What is known of the op at a site.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Placed {
    op: &'static str,
    shape: String,
    format: String,
}

impl Placed {
    /// Of a call and its result.
    pub(super) fn of(call: &Call<Tensor>, value: &Tensor) -> Placed {
        let of_matrix = |w: &Matrix| (format!("{}x{}", w.inner(), w.out()), w.format().to_string());
        let (shape, format) = match call {
            Call::Linear { w, .. } => of_matrix(&w.weight),
            Call::ExpertLinear { experts, .. } => {
                let (shape, format) = experts.first().map_or_else(Default::default, |w| of_matrix(&w.weight));
                (format!("{} of {shape}", experts.len()), format)
            }
            Call::Embed { table, .. } => of_matrix(table),
            // Scores and probabilities are [heads, tokens, keys], which grow with the text.
            Call::AttnScores { .. } | Call::AttnProbs { .. } => {
                (value.shape().first().map_or(String::new(), |heads| format!("{heads} heads")), String::new())
            }
            _ => {
                let lengths: Vec<String> = value.shape().iter().skip(1).map(usize::to_string).collect();
                (lengths.join("x"), String::new())
            }
        };
        Placed { op: call.op(), shape, format }
    }
}

/// The table of a package from the places of its ops and what its audit found.
pub(super) fn table(package: &str, places: &BTreeMap<Site, Placed>, audit: &Audit) -> Vec<Covered> {
    let mut shown: BTreeMap<&str, usize> = BTreeMap::new();
    for Kill { site, .. } in &audit.kills {
        *shown.entry(site).or_default() += 1;
    }
    let mut survived: BTreeMap<&str, usize> = BTreeMap::new();
    for site in audit.survivors.iter().flat_map(|survivor| &survivor.sites) {
        *survived.entry(site).or_default() += 1;
    }
    let mut rows: BTreeMap<(&Placed, Sight), Covered> = BTreeMap::new();
    for (site, placed) in places {
        let name = site.to_string();
        let (seen, not) =
            (shown.get(&*name).copied().unwrap_or(0), survived.get(&*name).copied().unwrap_or(0));
        let sight = if seen > 0 { Sight::Judged } else { Sight::Blind };
        let row = rows.entry((placed, sight)).or_insert_with(|| Covered {
            package: package.to_string(),
            op: placed.op,
            shape: placed.shape.clone(),
            format: placed.format.clone(),
            sight,
            layers: Vec::new(),
            sites: Vec::new(),
            mutants: 0,
            shown: 0,
        });
        row.add(*site, seen, not);
    }
    rows.into_values().collect()
}

impl Covered {
    fn add(&mut self, site: Site, shown: usize, survived: usize) {
        if let Some(layer) = site.layer
            && !self.layers.contains(&layer)
        {
            self.layers.push(layer);
            self.layers.sort_unstable();
        }
        if !self.sites.contains(&site.name) {
            self.sites.push(site.name);
        }
        self.mutants += shown + survived;
        self.shown += shown;
    }

    /// Its layers in words: `0-2, 5`.
    pub fn layers_in_words(&self) -> String {
        let mut words: Vec<String> = Vec::new();
        let mut rest = &self.layers[..];
        while let Some(&first) = rest.first() {
            let run = rest.iter().enumerate().take_while(|(n, layer)| **layer == first + *n as u32).count();
            words.push(if run == 1 {
                first.to_string()
            } else {
                format!("{first}-{}", first + run as u32 - 1)
            });
            rest = &rest[run..];
        }
        if words.is_empty() { "outside".to_string() } else { words.join(", ") }
    }
}

impl Audit {
    /// Marks what a subject does not expose: `exposed` holds the sites of its run, without the pass. An op of
    /// which only some sites are exposed counts as what it is at those.
    pub fn expose(&mut self, exposed: &BTreeSet<String>) {
        for row in &mut self.coverage {
            let site = |name: &&'static str| {
                let layers = row.layers.iter().map(|layer| Site::layer(*layer as usize, name));
                layers.chain([Site::model(name)]).any(|site| exposed.contains(&site.to_string()))
            };
            if !row.sites.iter().any(site) {
                row.sight = Sight::NotSupported;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(layers: &[u32]) -> Covered {
        Covered {
            package: "p".into(),
            op: "linear",
            shape: "32x40".into(),
            format: "bf16".into(),
            sight: Sight::Judged,
            layers: layers.to_vec(),
            sites: vec!["q_proj"],
            mutants: 3,
            shown: 2,
        }
    }

    #[test]
    fn layers_are_joined_to_runs() {
        assert_eq!(row(&[0, 1, 2, 5, 7, 8]).layers_in_words(), "0-2, 5, 7-8");
        assert_eq!(row(&[]).layers_in_words(), "outside");
    }

    // Two products of one shape: a mutant is shown at that of layer 0, and survives at that of layer 1.
    #[test]
    fn a_layer_where_nothing_is_shown_is_blind() {
        let placed = Placed { op: "linear", shape: "32x40".into(), format: "bf16".into() };
        let places = [0, 1].map(|layer| (Site::layer(layer, "q_proj"), placed.clone()));
        let (package, mutant) = ("p".to_string(), "lin-transpose-square".to_string());
        let kill = Kill {
            package: package.clone(),
            mutant: mutant.clone(),
            site: "layers.0.q_proj".into(),
            verdict_site: "prefill.layers.0.q_proj".into(),
            at: crate::judge::Place { row: 0, col: 0 },
            explained: None,
        };
        let survivor = crate::audit::Survivor {
            package,
            mutant,
            sites: vec!["layers.1.q_proj".into()],
            why: "square and symmetric".into(),
            change: "asymmetric weights".into(),
        };
        let audit = Audit { kills: vec![kill], survivors: vec![survivor], ..Audit::default() };
        let rows = table("p", &BTreeMap::from(places), &audit);
        let told: Vec<(Sight, &[u32], usize, usize)> =
            rows.iter().map(|row| (row.sight, &row.layers[..], row.mutants, row.shown)).collect();
        assert_eq!(told, [(Sight::Judged, &[0][..], 1, 1), (Sight::Blind, &[1][..], 1, 0)]);
    }

    #[test]
    fn what_a_subject_hides_is_not_supported() {
        let mut audit = Audit { coverage: vec![row(&[0, 1]), row(&[3])], ..Audit::default() };
        audit.expose(&BTreeSet::from(["layers.1.q_proj".to_string()]));
        let sights: Vec<Sight> = audit.coverage.iter().map(|row| row.sight).collect();
        assert_eq!(sights, [Sight::Judged, Sight::NotSupported]);
    }
}
