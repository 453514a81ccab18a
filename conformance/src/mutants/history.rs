//! What a pass has computed so far, for mutants that read the wrong operand.

use reference::ops::Mask;
use reference::{Call, Tensor};
use spec::families::Linear;
use spec::{Matrix, Rope, Site, Vector};
use std::collections::BTreeMap;

/// The values and the parameters of the ops of a pass, up to the one in question.
#[derive(Clone, Default)]
pub struct History {
    values: BTreeMap<Site, Tensor>,
    /// The layer of the last op in one.
    layer: Option<u32>,
    weights: BTreeMap<Site, Linear>,
    experts: BTreeMap<Site, Vec<Linear>>,
    norms: BTreeMap<Site, Norm>,
    masks: BTreeMap<Site, Mask>,
    ropes: BTreeMap<Site, Rope>,
    choice_bias: BTreeMap<Site, Vector>,
    table: Option<Matrix>,
}

/// The sites whose values are looked for in lower layers.
const OF_LAYERS_BELOW: [&str; 3] = ["k_cache", "v_cache", "out"];

/// The parameters of a norm.
#[derive(Clone)]
pub struct Norm {
    /// Its weight, where it has one.
    pub weight: Option<Vector>,
    /// Values that are normed together.
    pub width: usize,
    /// What is added under the root.
    pub eps: f32,
}

impl History {
    /// Before the first op.
    pub fn new() -> Self {
        Self::default()
    }

    /// Forgets the pass.
    pub fn clear(&mut self) {
        *self = Self::default();
    }

    /// Remembers an op and what it gave. Of the layers before, only what [`History::below`] is asked for stays: the values
    /// of all sites would be a dump held in memory.
    pub fn note<T>(&mut self, at: Site, call: &Call<T>, value: Tensor) {
        if at.layer.is_some() && at.layer != self.layer {
            self.values.retain(|site, _| site.layer.is_none() || OF_LAYERS_BELOW.contains(&site.name));
            self.layer = at.layer;
        }
        self.values.insert(at, value);
        match call {
            Call::Linear { w, .. } => drop(self.weights.insert(at, (*w).clone())),
            Call::ExpertLinear { experts, .. } => drop(self.experts.insert(at, experts.to_vec())),
            Call::RmsNorm { weight, width, eps, .. } => {
                self.norms.insert(at, Norm { weight: weight.cloned(), width: *width, eps: *eps });
            }
            Call::AttnProbs { mask, .. } => drop(self.masks.insert(at, *mask)),
            Call::Rotate { rope, .. } => drop(self.ropes.insert(at, (*rope).clone())),
            Call::RouterIndex { bias: Some(bias), .. } => {
                self.choice_bias.insert(at, (*bias).clone());
            }
            Call::Embed { table, .. } => {
                self.table.get_or_insert((*table).clone());
            }
            _ => {}
        }
    }

    /// The value of `name` in the layer of `at`, or outside the layers where it stands outside.
    pub fn value(&self, at: Site, name: &str) -> Option<&Tensor> {
        self.values
            .iter()
            .find(|(site, _)| site.layer == at.layer && site.name == name)
            .map(|(_, value)| value)
    }

    /// The value of `name` outside the layers.
    pub fn outside(&self, name: &str) -> Option<&Tensor> {
        self.value(Site { layer: None, name: "" }, name)
    }

    /// The value of `name`, one of [`OF_LAYERS_BELOW`], in the nearest layer below that of `at` which has it.
    pub fn below(&self, at: Site, name: &str) -> Option<&Tensor> {
        let below = |site: &Site| site.name == name && site.layer.is_some() && site.layer < at.layer;
        self.values.iter().filter(|(site, _)| below(site)).max_by_key(|(site, _)| site.layer).map(|(_, v)| v)
    }

    /// The values of `name`, one of [`OF_LAYERS_BELOW`], in the layers below that of `at`, the lowest first.
    pub fn all_below(&self, at: Site, name: &str) -> Vec<&Tensor> {
        let below = |site: &Site| site.name == name && site.layer.is_some() && site.layer < at.layer;
        self.values.iter().filter(|(site, _)| below(site)).map(|(_, value)| value).collect()
    }

    /// The weight of the product `name` in the layer of `at`.
    pub fn weight(&self, at: Site, name: &str) -> Option<&Linear> {
        self.weights.iter().find(|(site, _)| site.layer == at.layer && site.name == name).map(|(_, w)| w)
    }

    /// The experts of the product `name` in the layer of `at`.
    pub fn experts(&self, at: Site, name: &str) -> Option<&[Linear]> {
        let mut found = self.experts.iter().filter(|(site, _)| site.layer == at.layer && site.name == name);
        found.next().map(|(_, experts)| &experts[..])
    }

    /// The norm `name` in the layer of `at`.
    pub fn norm(&self, at: Site, name: &str) -> Option<&Norm> {
        self.norms.iter().find(|(site, _)| site.layer == at.layer && site.name == name).map(|(_, norm)| norm)
    }

    /// The norms of the layer of `at`, in the order of their names.
    pub fn norms(&self, at: Site) -> impl Iterator<Item = &Norm> {
        self.norms
            .iter()
            .filter(move |(site, _)| site.layer == at.layer && **site != at)
            .map(|(_, norm)| norm)
    }

    /// The masks of the layers so far.
    pub fn masks(&self) -> impl Iterator<Item = &Mask> {
        self.masks.values()
    }

    /// The rotation `name` in the layer of `at`, or of any layer where that has none.
    pub fn rope(&self, at: Site, name: &str) -> Option<&Rope> {
        let here = self.ropes.iter().find(|(site, _)| site.layer == at.layer && site.name == name);
        here.map(|(_, rope)| rope)
    }

    /// A rotation of any layer so far.
    pub fn any_rope(&self) -> Option<&Rope> {
        self.ropes.values().next()
    }

    /// The bias that joins the scores for the choice of experts in the layer of `at`.
    pub fn choice_bias(&self, at: Site) -> Option<&Vector> {
        self.choice_bias.iter().find(|(site, _)| site.layer == at.layer).map(|(_, bias)| bias)
    }

    /// The embedding table.
    pub fn table(&self) -> Option<&Matrix> {
        self.table.as_ref()
    }
}
