//! S10: decoding stored weights to f32 against the `gguf` Python package.

use super::BenchError;
use super::figure::{Figure, Goal, Spec, interleaved, seconds};
use super::peer::{Peer, PeerError};
use fixtures::formats::ggml::GgmlType;
use fixtures::formats::ggml_blocks::codes_q4_1;
use fixtures::q4nx::grid::{Grid, TiledRows};
use fixtures::q4nx::tiles::{Codes, Kind, ROWS};
use fixtures::random::SplitMix64;
use fixtures::{BlockRows, Bytes};
use sha2::{Digest, Sha256};
use spec::Rows;
use std::io::Write;

const GOAL: Goal = Goal::AtLeast(20.0);

/// The formats of S10, each with the type of the peer that it is held against.
pub const FORMATS: [(Spec, GgmlType, bool); 5] = [
    (spec("S10@q4_0", "decoding Q4_0: speed over that of the gguf package"), GgmlType::Q4_0, false),
    (spec("S10@q4_k", "decoding Q4_K: speed over that of the gguf package"), GgmlType::Q4_K, false),
    (spec("S10@q6_k", "decoding Q6_K: speed over that of the gguf package"), GgmlType::Q6_K, false),
    (spec("S10@q8_0", "decoding Q8_0: speed over that of the gguf package"), GgmlType::Q8_0, false),
    (
        spec("S10@q4nx", "decoding Q4NX (Q4_1 in tiles): speed over that of the gguf package on Q4_1"),
        GgmlType::Q4_1,
        true,
    ),
];

const fn spec(id: &'static str, what: &'static str) -> Spec {
    Spec { id, what, goal: GOAL, stretch: None }
}

/// A matrix as large as the projection of a model of 4 to 8 B.
const OUT: usize = 4096;
const INNER: usize = 4096;

/// S10 for one format, row by row as every reader of a package decodes it.
pub fn figure(
    spec: &Spec,
    ty: GgmlType,
    tiled: bool,
    python: &str,
    pairs: usize,
) -> Result<Figure, BenchError> {
    let stored = blocks(ty, OUT);
    let mut file = tempfile::NamedTempFile::new()?;
    file.write_all(&stored)?;
    let path = file.path().display().to_string();
    let arguments = [ty.name(), &path, &OUT.to_string()];
    let mut peer = match Peer::start(python, include_str!("decode_gguf.py"), &arguments) {
        Ok(peer) => peer,
        Err(error) => return Ok(spec.not_measured(error.to_string())),
    };
    let rows: Option<Box<dyn Rows>> = match tiled {
        true => tiles(&stored).map(|rows| Box::new(rows) as Box<dyn Rows>),
        false => BlockRows::new(stored.into(), ty, OUT, INNER).map(|rows| Box::new(rows) as Box<dyn Rows>),
    };
    let rows = rows.ok_or_else(|| BenchError::Usage(format!("{} has no decoder", ty.name())))?;
    let mut values = vec![0.0; OUT * INNER];
    values.chunks_exact_mut(INNER).enumerate().for_each(|(row, into)| rows.decode(row, into));
    let theirs = match peer.ask("hash") {
        Ok(hash) => hash,
        Err(error) => return Ok(spec.not_measured(error.to_string())),
    };
    // A row is decoded, used and dropped: that is how weights are read here, and never a whole matrix.
    let mut buffer = vec![0.0; INNER];
    let mut decode = || {
        for row in 0..OUT {
            rows.decode(row, &mut buffer);
            std::hint::black_box(&buffer);
        }
    };
    let timed = interleaved(pairs, || peer.seconds(), || Ok::<_, PeerError>(seconds(&mut decode)));
    let mut timed = match timed {
        Ok(timed) => timed,
        Err(error) => return Ok(spec.not_measured(error.to_string())),
    };
    // The tiles are quantised anew, with scales in bf16: their values are others.
    if !tiled && theirs != hash(&values) {
        timed.fault = Some("the gguf package decodes other values".into());
    }
    let (theirs, ours) = timed.medians();
    let gigabytes = 4.0 * (OUT * INNER) as f64 / 1e9;
    let rates = format!("{:.2} GB/s of f32, gguf {:.3} GB/s", gigabytes / ours, gigabytes / theirs);
    Ok(Figure { rates: Some(rates), ..spec.judge(&timed) })
}

fn hash(values: &[f32]) -> String {
    let mut hash = Sha256::new();
    values.iter().for_each(|v| hash.update(v.to_le_bytes()));
    hash.finalize().iter().map(|b| format!("{b:02x}")).collect()
}

/// Random blocks with scales of 2^-7: every byte of codes is as likely, no scale is NaN.
fn blocks(ty: GgmlType, out: usize) -> Vec<u8> {
    const SCALE: [u8; 2] = 0x2000u16.to_le_bytes();
    let mut random = SplitMix64::new(10);
    let count = out * INNER / ty.block_values();
    let mut bytes: Vec<u8> = (0..count * ty.block_bytes()).map(|_| random.below(256) as u8).collect();
    let scales: &[usize] = match ty {
        GgmlType::Q6_K => &[208],
        GgmlType::Q4_K | GgmlType::Q4_1 => &[0, 2],
        _ => &[0],
    };
    for block in bytes.chunks_exact_mut(ty.block_bytes()) {
        for &at in scales {
            block[at..at + 2].copy_from_slice(&SCALE);
        }
    }
    bytes
}

/// The codes of Q4_1 blocks, in tiles.
fn tiles(stored: &[u8]) -> Option<TiledRows> {
    let kind = Kind::Additive { columns: 256 };
    let rows = BlockRows::new(stored.to_vec().into(), GgmlType::Q4_1, OUT, INNER)?;
    let mut bytes = Vec::with_capacity(OUT * INNER * 5 / 8);
    let mut band = vec![0.0; ROWS * INNER];
    for first in (0..OUT).step_by(ROWS) {
        for (r, into) in band.chunks_exact_mut(INNER).enumerate() {
            rows.decode(first + r, into);
        }
        for column in (0..INNER).step_by(kind.columns()) {
            let mut codes = Codes { scales: vec![], mins: vec![], codes: vec![] };
            for r in 0..ROWS {
                for group in band[r * INNER + column..][..kind.columns()].chunks(32) {
                    let (scale, min, group) = codes_q4_1(group);
                    codes.scales.push(scale);
                    codes.mins.push(min);
                    codes.codes.extend(group.map(i16::from));
                }
            }
            bytes.extend(kind.encode(&codes)?);
        }
    }
    TiledRows::new(Bytes::from(bytes), kind, Grid::Rows, INNER / kind.columns(), OUT, INNER)
}

#[cfg(test)]
mod tests {
    use super::*;

    // Every format of the list has its scales where they were put: a value is at most scale · code + minimum,
    // far below what random scales would give.
    #[test]
    fn blocks_hold_small_finite_values() {
        for (spec, ty, _) in FORMATS {
            let rows = BlockRows::new(blocks(ty, 3).into(), ty, 3, INNER).unwrap();
            let mut row = vec![0.0; INNER];
            rows.decode(2, &mut row);
            assert!(row.iter().all(|v| v.abs() < 64.0), "{}", spec.id);
            assert!(row.iter().any(|v| *v != row[0]), "{}", spec.id);
        }
    }
}
