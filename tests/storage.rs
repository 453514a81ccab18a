//! A model stored in f32 and the same stored in bf16 are one model: both reproduce the golden, with the same bits.

use conformance::golden_gate::{GoldenGate, compare};
use fixtures::Package;
use golden::Dump;
use reference::Model;
use safetensors::tensor::{Dtype, SafeTensors, TensorView};
use spec::{Config, Weights};
use std::path::Path;

/// Every f32 or bf16 value of a package's weights as `dtype`; nothing where bf16 cannot hold one of them.
fn stored_as(package: &Path, dtype: Dtype, out: &Path) -> Option<()> {
    let bytes = std::fs::read(package.join("model.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let mut tensors = Vec::new();
    for (name, view) in file.iter() {
        let values: Vec<u32> = match view.dtype() {
            Dtype::F32 => view.data().as_chunks::<4>().0.iter().map(|b| u32::from_le_bytes(*b)).collect(),
            Dtype::BF16 => view
                .data()
                .as_chunks::<2>()
                .0
                .iter()
                .map(|b| u32::from(u16::from_le_bytes(*b)) << 16)
                .collect(),
            other => {
                tensors.push((name.to_string(), other, view.shape().to_vec(), view.data().to_vec()));
                continue;
            }
        };
        let data: Vec<u8> = match dtype {
            Dtype::F32 => values.iter().flat_map(|bits| bits.to_le_bytes()).collect(),
            _ if values.iter().any(|bits| bits & 0xffff != 0) => return None,
            _ => values.iter().flat_map(|bits| ((bits >> 16) as u16).to_le_bytes()).collect(),
        };
        tensors.push((name.to_string(), dtype, view.shape().to_vec(), data));
    }
    let views = tensors
        .iter()
        .map(|(name, dtype, shape, data)| (name, TensorView::new(*dtype, shape.clone(), data).unwrap()));
    std::fs::write(out.join("model.safetensors"), safetensors::serialize(views, None).unwrap()).unwrap();
    std::fs::copy(package.join("config.json"), out.join("config.json")).unwrap();
    Some(())
}

fn gate(package: &Package, golden: &Dump) -> GoldenGate {
    let config = Config::parse(package.config(), &[]).unwrap().config;
    let weights = Weights::load(&config, package.tensors()).unwrap();
    compare(&Model::new(config, weights), golden).unwrap()
}

#[test]
fn every_golden_holds_in_f32_and_in_bf16() {
    let (mut both, mut f32_only) = (0, Vec::new());
    for name in fixtures::bundled() {
        let Some(package) = Package::open(&name).ok().filter(|p| p.golden_json().is_some() && !p.has_draft())
        else {
            continue;
        };
        let golden = Dump::open(package.dir()).unwrap();
        let bundled = gate(&package, &golden);
        for dtype in [Dtype::F32, Dtype::BF16] {
            let dir = tempfile::tempdir().unwrap();
            if stored_as(package.dir(), dtype, dir.path()).is_none() {
                f32_only.push(name.clone());
                continue;
            }
            let stored = Package::open(dir.path().to_str().unwrap()).unwrap();
            let gate = gate(&stored, &golden);
            assert!(gate.passes(), "{name} as {dtype:?}: {:?}", gate.worst());
            assert_eq!(gate.sites, bundled.sites, "{name} as {dtype:?}: the same bits");
            both += 1;
        }
    }
    assert_eq!(f32_only, ["llama"], "the one package whose weights need all of f32");
    assert_eq!(both, 2 * 23 - 1);
}
