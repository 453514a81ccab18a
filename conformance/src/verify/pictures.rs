//! What only pictures need.

use super::{Loaded, Position};
use crate::follow::PassTaps;
use crate::golden_gate::{argmax, kl};
use crate::passes::Pass;
use crate::record::Record;
use spec::{NonFinite, Site};

/// `rms(subject - reference) / rms(reference)` at every tap, the reference running free.
pub(super) fn inherited(
    loaded: &Loaded,
    passes: &[Pass],
    taps: &[PassTaps],
) -> Result<Vec<(String, f64)>, NonFinite> {
    let (mut ops, mut state) = (Record::default(), loaded.model.fresh());
    let mut drift = Vec::new();
    for (pass, taps) in passes.iter().zip(taps) {
        loaded.model.pass(&mut ops, &mut state, &pass.ids);
        for (site, reference) in ops.take()? {
            let Some(subject) = taps.get(&site).filter(|subject| subject.len() == reference.len()) else {
                continue;
            };
            let square = |v: f64| v * v;
            let (mut off, mut size) = (0.0, 0.0);
            for (&s, &r) in subject.iter().zip(reference.iter()) {
                off += square(f64::from(s) - f64::from(r));
                size += square(f64::from(r));
            }
            drift.push((format!("{}.{site}", pass.name), (off / size.max(f64::MIN_POSITIVE)).sqrt()));
        }
    }
    Ok(drift)
}

/// Margin, KL and agreement of every position.
pub(super) fn positions(
    loaded: &Loaded,
    passes: &[Pass],
    taps: &[PassTaps],
    reference: &[Vec<f32>],
) -> Vec<Position> {
    let vocab = loaded.config.vocab_size();
    let mut all = Vec::new();
    for ((pass, taps), reference) in passes.iter().zip(taps).zip(reference) {
        let Some(subject) = taps.get(&Site::model("logits")) else { continue };
        let subject: Vec<f32> = subject.iter().copied().collect();
        let first = (reference.len() / vocab).saturating_sub(subject.len() / vocab);
        for (row, found) in subject.chunks_exact(vocab).enumerate() {
            let expected = &reference[(first + row) * vocab..][..vocab];
            let best = argmax(expected);
            let others = expected.iter().enumerate().filter(|(i, _)| *i != best).map(|(_, &v)| v);
            let second = others.fold(f32::NEG_INFINITY, f32::max);
            all.push(Position {
                pass: pass.name.clone(),
                row: first + row,
                margin: f64::from(expected[best]) - f64::from(second),
                kl: kl(expected, found),
                equal: best == argmax(found),
            });
        }
    }
    all
}
