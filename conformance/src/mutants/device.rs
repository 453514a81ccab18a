//! Mistakes of a device: packing, keys, guards, launches. They are hooks in the NPU path, not in an op.

use super::{Eval, History, Mutant};
use device::{Fault, Group, Key, Role};
use reference::{Call, Tensor};
use spec::Site;
use std::sync::Arc;

/// A mutant that is realised in the NPU path.
pub struct DeviceMutant {
    /// Its entry in the catalogue.
    pub mutant: Mutant,
    /// The hook.
    pub fault: fn() -> Arc<dyn Fault>,
}

/// The device mutants that the NPU path has hooks for.
pub static MUTANTS: &[DeviceMutant] = &[
    device(
        "cache-key-no-layer",
        "",
        "every layer is served the image of layer 0",
        "two layers of one shape",
        || Arc::new(Lookup(|key| Key { layer: key.layer.map(|_| 0), ..key })),
    ),
    device(
        "cache-key-no-layer",
        "digits",
        "layer 13 is served the image of layer 3",
        "more than ten layers",
        || Arc::new(Lookup(|key| Key { layer: key.layer.map(|layer| layer % 10), ..key })),
    ),
    device(
        "cache-key-role-clash",
        "",
        "two roles of a layer share a key: the first packed is served for both",
        "a role that shares a key with another",
        || Arc::new(Lookup(clash)),
    ),
    device(
        "cache-key-role-clash",
        "expert",
        "every routed expert is served the image of expert 0",
        "routed experts",
        || Arc::new(Lookup(|key| Key { expert: key.expert.map(|_| 0), ..key })),
    ),
    device("pack-tile-order", "", "tiles of 16 inputs are packed in reverse", "more than 16 inputs", || {
        Arc::new(Pack(|_, _, w| {
            let tiles = w.len() / 16;
            let before = w.to_vec();
            (0..tiles).for_each(|t| w[t * 16..][..16].copy_from_slice(&before[(tiles - 1 - t) * 16..][..16]));
        }))
    }),
    device(
        "pack-microtile-order",
        "",
        "inputs are packed in reverse inside groups of 8",
        "eight inputs or more",
        || Arc::new(Pack(|_, _, w| w.chunks_exact_mut(8).for_each(|group| group.reverse()))),
    ),
    device(
        "pack-partial-image",
        "",
        "only the first 16 outputs of an image are packed",
        "more than 16 outputs",
        || {
            Arc::new(Pack(|_, o, w| {
                if o >= 16 {
                    w.fill(0.0)
                }
            }))
        },
    ),
    device(
        "pack-index-term-missing",
        "",
        "every group of 32 inputs is the first",
        "more than 32 inputs",
        || Arc::new(Pack(|_, _, w| (32..w.len()).for_each(|i| w[i] = w[i % 32]))),
    ),
    device("pack-tensor-zero-filled", "", "the down projections are zero", "a feed-forward", || {
        Arc::new(Pack(|key, _, w| {
            if [Role::Down, Role::ExpertDown].contains(&key.role) {
                w.fill(0.0)
            }
        }))
    }),
    device(
        "rows-partial-store",
        "",
        "rows from 10 on of a launch are not stored",
        "more than ten tokens",
        || Arc::new(Launched(|_, out, y| y.chunks_exact_mut(out).skip(10).for_each(|row| row.fill(0.0)))),
    ),
    device(
        "rows-m-dependent-order",
        "",
        "a launch of one row rounds its result to bf16",
        "a pass of one token",
        || {
            Arc::new(Launched(|_, out, y| {
                if y.len() == out {
                    y.iter_mut().for_each(|y| *y = crate::contract::bf16(*y))
                }
            }))
        },
    ),
    device("lin-k-pad-dirty", "", "a padding input of 1 meets the last weight", "two inputs or more", || {
        Arc::new(Launch(|inner, x| x.chunks_exact_mut(inner).for_each(|row| row[inner - 1] += 1.0)))
    }),
    device(
        "cache-half-resident",
        "",
        "the guard takes a layer for resident that is not",
        "a layer whose images are missing",
        || Arc::new(Guard),
    ),
    device("kv-advance", "device", "the device's position is one too far", "a pass behind others", || {
        Arc::new(Position)
    }),
];

const fn device(
    id: &'static str,
    variant: &'static str,
    formula: &'static str,
    needs: &'static str,
    fault: fn() -> Arc<dyn Fault>,
) -> DeviceMutant {
    DeviceMutant { mutant: Mutant { id, variant, formula, needs, apply: nowhere }, fault }
}

/// A device mutant is no wrong op.
fn nowhere(_: &Call<Tensor>, _: Site, _: &History, _: &mut Eval) -> Option<Tensor> {
    None
}

/// Roles whose keys fall together.
fn clash(key: Key) -> Key {
    let role = match key.role {
        Role::GateUp => Role::SharedGateUp,
        Role::PerLayerProject => Role::PerLayerGate,
        Role::AttentionOut => Role::Query,
        other => other,
    };
    Key { role, ..key }
}

struct Lookup(fn(Key) -> Key);

impl Fault for Lookup {
    fn lookup(&self, key: Key) -> Key {
        (self.0)(key)
    }
}

struct Pack(fn(Key, usize, &mut [f32]));

impl Fault for Pack {
    fn pack(&self, key: Key, o: usize, weights: &mut [f32]) {
        (self.0)(key, o, weights);
    }
}

struct Launch(fn(usize, &mut [f32]));

impl Fault for Launch {
    fn launch(&self, _: Key, _: usize, inner: usize, x: &mut [f32]) {
        (self.0)(inner, x);
    }
}

struct Launched(fn(usize, usize, &mut [f32]));

impl Fault for Launched {
    fn launched(&self, _: Key, row: usize, out: usize, y: &mut [f32]) {
        (self.0)(row, out, y);
    }
}

struct Guard;

impl Fault for Guard {
    fn guard(&self, _: Option<usize>, group: Group, resident: bool) -> bool {
        resident || group == Group::Attention
    }
}

struct Position;

impl Fault for Position {
    fn position(&self, _: usize, _: usize, position: usize) -> usize {
        if position > 0 { position + 1 } else { position }
    }
}
