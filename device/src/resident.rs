//! The resident cache: which weight images stay on the device, and under which names.

use crate::pack::Image;
use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

/// What a product is for. Two products of a layer never share a role.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Role {
    /// Query, key and value in one image.
    Qkv,
    /// Output projection of attention.
    AttentionOut,
    /// Query of layers that share another layer's keys and values.
    Query,
    /// First query projection of latent attention.
    QueryDown,
    /// Second query projection of latent attention.
    QueryUp,
    /// Latent and rotary key of latent attention.
    KeyValueDown,
    /// Keys and values from the latent.
    KeyValueUp,
    /// All input projections of a linear-attention layer.
    LinearIn,
    /// Output projection of a linear-attention layer.
    LinearOut,
    /// Input projection of a short convolution.
    ConvIn,
    /// Output projection of a short convolution.
    ConvOut,
    /// Gate and up of a feed-forward in one image.
    GateUp,
    /// Down of a feed-forward.
    Down,
    /// Gate and up of the shared expert.
    SharedGateUp,
    /// Down of the shared expert.
    SharedDown,
    /// Gate and up of one routed expert.
    ExpertGateUp,
    /// Down of one routed expert.
    ExpertDown,
    /// The gate of a per-layer embedding.
    PerLayerGate,
    /// The projection of a per-layer embedding back to the residual stream.
    PerLayerProject,
    /// The context projection of all per-layer embeddings.
    PerLayerContext,
    /// The low-rank residual branch, inward.
    LaurelDown,
    /// The low-rank residual branch, outward.
    LaurelUp,
    /// Making one of the parallel streams from the embedding.
    StreamIn,
    /// Bringing one of the parallel streams back together.
    StreamOut,
    /// Fusing the tapped layer outputs of a target, in a draft.
    Fuse,
    /// Dynamic kernels of a draft's convolutions around attention.
    AttentionConv,
    /// Dynamic kernels of a draft's convolutions around the feed-forward.
    FeedForwardConv,
    /// What weighs the candidates of a draft's walk.
    Selector,
    /// The head over the vocabulary.
    Head,
}

/// Which weights the guard of a layer decides about together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Group {
    /// Attention, latent attention, linear attention, short convolution.
    Attention,
    /// Feed-forward, shared and routed experts.
    FeedForward,
    /// Per-layer embeddings.
    PerLayer,
    /// The head and what else lies outside the layers.
    Outside,
}

/// The name of an image. Every product of a model has one of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Key {
    /// The layer, for products inside one.
    pub layer: Option<u32>,
    /// What it is for.
    pub role: Role,
    /// The routed expert, or the number of the stream.
    pub expert: Option<u32>,
}

impl Key {
    /// A product of layer `layer`.
    pub fn layer(layer: usize, role: Role) -> Key {
        Key { layer: Some(layer as u32), role, expert: None }
    }

    /// A product of a routed expert.
    pub fn expert(layer: usize, role: Role, expert: usize) -> Key {
        Key { layer: Some(layer as u32), role, expert: Some(expert as u32) }
    }

    /// A product outside the layers.
    pub fn outside(role: Role) -> Key {
        Key { layer: None, role, expert: None }
    }
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(layer) = self.layer {
            write!(f, "layers.{layer}.")?;
        }
        write!(f, "{:?}", self.role)?;
        match self.expert {
            Some(expert) => write!(f, ".{expert}"),
            None => Ok(()),
        }
    }
}

/// Images that outlive the pass that packed them, keyed by (layer, role, expert).
///
/// An image is a function of the package's weights and of the engine alone. Both are fixed for the
/// life of a device, so **nothing makes an entry stale**: positions, requests and resets do not
/// touch it, and entries only ever grow in number (until [`ResidentCache::retain`] is asked to drop
/// some). The images of one layer enter together, after the last of them was packed: a layer whose
/// packing stopped half way is not resident.
#[derive(Default)]
pub struct ResidentCache {
    images: BTreeMap<Key, Arc<Image>>,
}

impl ResidentCache {
    /// The image under `key`, where resident.
    pub fn get(&self, key: &Key) -> Option<&Arc<Image>> {
        self.images.get(key)
    }

    /// Whether `key` is resident.
    pub fn holds(&self, key: &Key) -> bool {
        self.images.contains_key(key)
    }

    /// Enters all images of a layer that were missing, at once.
    pub(crate) fn commit(&mut self, packed: Vec<(Key, Arc<Image>)>) {
        self.images.extend(packed);
    }

    /// All resident keys, in order.
    pub fn keys(&self) -> Vec<Key> {
        self.images.keys().copied().collect()
    }

    /// Bytes of all images.
    pub fn bytes(&self) -> usize {
        self.images.values().map(|image| image.bytes()).sum()
    }

    /// Drops the images whose key `keep` refuses: they are packed again when they are next needed.
    pub fn retain(&mut self, keep: impl Fn(&Key) -> bool) {
        self.images.retain(|key, _| keep(key));
    }
}
