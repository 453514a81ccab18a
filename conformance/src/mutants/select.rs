//! Reading `ID[:VARIANT][@SITE]`.

use super::{Mutant, all, device};
use crate::draft::{self, LoopMutant};
use crate::edits::{self, Edit};
use spec::Site;

/// One mutant and the sites it is applied at.
#[derive(Debug)]
pub struct Selection {
    /// The mutant.
    pub mutant: &'static Mutant,
    /// A glob over site names without the pass; nothing means every applicable site.
    pub site: Option<String>,
    /// The hook of a mutant that is realised in the NPU path.
    pub fault: Option<fn() -> std::sync::Arc<dyn ::device::Fault>>,
    /// The edit of a mutant that is realised in the package.
    pub edit: Option<&'static Edit>,
    /// The mistake of a mutant that is realised in the speculative loop.
    pub in_loop: Option<&'static LoopMutant>,
}

/// Why a selection is not one.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum SelectError {
    /// No such id.
    #[error("no mutant is called {0}; nearest: {1}")]
    Unknown(String, String),
    /// No such variant.
    #[error("mutant {0} has no variant {1}; it has {2}")]
    Variant(String, String, String),
    /// A site for a mutant that is not made at one.
    #[error("mutant {0} is made in {2} and not at a site; leave {1} out")]
    NoSite(String, String, &'static str),
    /// The site part matches nothing that a model could have.
    #[error("site {0} is no site name; nearest: {1}")]
    Site(String, String),
}

impl Selection {
    /// Reads `ID[:VARIANT][@SITE]`. Without a variant, the mutant's first.
    pub fn parse(text: &str) -> Result<Selection, SelectError> {
        let (name, site) = match text.split_once('@') {
            Some((name, site)) => (name, Some(site.to_string())),
            None => (text, None),
        };
        let (id, variant) = name.split_once(':').map_or((name, None), |(id, variant)| (id, Some(variant)));
        let elsewhere = || {
            let hooks = device::MUTANTS.iter().map(|hook| &hook.mutant);
            let loops = draft::MUTANTS.iter().map(|made| &made.mutant);
            hooks.chain(edits::all().map(|edit| &edit.mutant)).chain(loops)
        };
        let variants: Vec<&'static Mutant> = all().chain(elsewhere()).filter(|m| m.id == id).collect();
        if variants.is_empty() {
            let ids: Vec<&str> = all().chain(elsewhere()).map(|m| m.id).collect();
            return Err(SelectError::Unknown(id.to_string(), nearest(id, &ids)));
        }
        let mutant = match variant {
            None => variants[0],
            Some(variant) => variants.iter().find(|m| m.variant == variant).copied().ok_or_else(|| {
                let known: Vec<&str> = variants.iter().map(|m| m.variant).collect();
                SelectError::Variant(id.to_string(), variant.to_string(), known.join(", "))
            })?,
        };
        if let Some(site) = &site {
            check_site(site)?;
        }
        let hook = device::MUTANTS.iter().find(|m| std::ptr::eq(&m.mutant, mutant));
        let edit = edits::all().find(|edit| std::ptr::eq(&edit.mutant, mutant));
        let in_loop = draft::MUTANTS.iter().find(|made| std::ptr::eq(&made.mutant, mutant));
        let place = hook.map(|_| "the device").or(edit.map(|_| "the package"));
        let place = place.or(in_loop.map(|_| "the speculative loop"));
        if let (Some(place), Some(site)) = (place, &site) {
            return Err(SelectError::NoSite(mutant.name(), format!("@{site}"), place));
        }
        Ok(Selection { mutant, site, fault: hook.map(|m| m.fault), edit, in_loop })
    }

    /// Whether the mutant is made in an op, at a site.
    pub fn in_op(&self) -> bool {
        self.fault.is_none() && self.edit.is_none() && self.in_loop.is_none()
    }

    /// Whether the mutant is to be tried at `at`.
    pub fn covers(&self, at: Site) -> bool {
        self.site.as_ref().is_none_or(|glob| matches(glob, &at.to_string()))
    }
}

/// Refuses a site whose last part, without wildcards, is no name of the registry.
fn check_site(site: &str) -> Result<(), SelectError> {
    let known: Vec<&str> = spec::site::SITES.iter().map(|info| info.name).collect();
    let leaf = match site.strip_prefix("layers.") {
        Some(rest) => rest.split_once('.').map_or(rest, |(_, leaf)| leaf),
        None => site,
    };
    if leaf.contains('*') || leaf.contains('?') || known.contains(&leaf) {
        return Ok(());
    }
    Err(SelectError::Site(site.to_string(), nearest(leaf, &known)))
}

/// Shell globs: `*` for any run of characters, `?` for one.
pub fn matches(glob: &str, name: &str) -> bool {
    let (glob, name): (Vec<char>, Vec<char>) = (glob.chars().collect(), name.chars().collect());
    let mut reach = vec![false; name.len() + 1];
    reach[0] = true;
    for g in glob {
        let mut next = vec![false; name.len() + 1];
        let mut any = false;
        for n in 0..=name.len() {
            any |= reach[n];
            next[n] = match g {
                '*' => any,
                '?' => n > 0 && reach[n - 1],
                c => n > 0 && reach[n - 1] && name[n - 1] == c,
            };
        }
        reach = next;
    }
    reach[name.len()]
}

/// The three names that take the fewest edits from `wanted`.
pub fn nearest(wanted: &str, known: &[&str]) -> String {
    let mut sorted: Vec<&str> = known.to_vec();
    sorted.dedup();
    sorted.sort_by_key(|name| edits(wanted, name));
    sorted.dedup();
    sorted[..sorted.len().min(3)].join(", ")
}

/// Insertions, deletions and replacements between two names.
fn edits(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, ca) in a.chars().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for j in 0..b.len() {
            let replaced = diagonal + usize::from(ca != b[j]);
            diagonal = row[j + 1];
            row[j + 1] = replaced.min(row[j] + 1).min(diagonal + 1);
        }
    }
    row[b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_id_variant_and_site() {
        let s = Selection::parse("attn-gqa-map:mod@layers.*.attn_scores").unwrap();
        assert_eq!((s.mutant.id, s.mutant.variant), ("attn-gqa-map", "mod"));
        assert!(s.covers(Site::layer(12, "attn_scores")));
        assert!(!s.covers(Site::layer(1, "attn_probs")));
        assert!(Selection::parse("lin-transpose-square").unwrap().covers(Site::model("logits")));
    }

    #[test]
    fn unknown_names_get_the_nearest() {
        let error = Selection::parse("lin-transpose-sqare").unwrap_err().to_string();
        assert!(
            error.starts_with("no mutant is called lin-transpose-sqare; nearest: lin-transpose-square"),
            "{error}"
        );
        let error = Selection::parse("attn-gqa-map:modulo").unwrap_err().to_string();
        assert!(error.contains("has no variant modulo"), "{error}");
        let error = Selection::parse("lin-transpose-square@layers.1.q_prj").unwrap_err().to_string();
        assert!(error.contains("nearest: q_proj"), "{error}");
    }

    #[test]
    fn globs() {
        assert!(matches("layers.*.q_proj", "layers.10.q_proj"));
        assert!(matches("layers.?.q_proj", "layers.1.q_proj"));
        assert!(!matches("layers.?.q_proj", "layers.10.q_proj"));
        assert!(!matches("layers.1.q_proj", "layers.1.q_projx"));
    }
}
