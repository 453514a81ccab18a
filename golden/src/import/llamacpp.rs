//! The base file of llama.cpp's KL divergence: log-probabilities of a text, in 16 bits each.
//!
//! ```text
//! "_logits_"   i32 n_ctx   i32 n_vocab   i32 n_chunk   i32 token[n_chunk][n_ctx]
//! then, chunk by chunk, one row for each of the positions n_ctx/2 … n_ctx-2:
//!   f32 scale   f32 lowest   u16 code[n_vocab]   (one more u16 where n_vocab is odd)
//! ```
//!
//! All little-endian. `ln p(token) = lowest + scale · code`. What the writer found more than 16 below the
//! largest logit has code 0, so there the stored value is an upper bound.
//!
//! Source: `tools/perplexity/perplexity.cpp` of ggml-org/llama.cpp (`log_softmax` and
//! `kl_divergence`). The tokens are those of the text: a model that wants a first token of its own saw
//! that in place of the first one of every chunk.

use std::fs::File;
use std::path::{Path, PathBuf};

use memmap2::Mmap;

use crate::DumpError;
use crate::container::map_file;

const MAGIC: &[u8; 8] = b"_logits_";
const FIXED: usize = 20;
/// Bytes of scale and lowest value.
const ROW_HEAD: usize = 8;

/// An opened base file.
#[derive(Debug)]
pub struct KlBase {
    path: PathBuf,
    map: Mmap,
    /// Tokens per chunk.
    pub n_ctx: usize,
    /// Tokens in the vocabulary.
    pub n_vocab: usize,
    /// Number of chunks.
    pub n_chunk: usize,
}

/// The log-probabilities after one position.
#[derive(Clone, Debug, PartialEq)]
pub struct LogProbs {
    /// Position in the chunk of the last token that was read.
    pub position: usize,
    /// `ln p` of every token of the vocabulary.
    pub values: Vec<f32>,
    /// Distance between two neighbouring codes: values are right to half of it.
    pub step: f32,
    /// The smallest value that can be stored; a token that has it may be less likely.
    pub lowest: f32,
}

impl KlBase {
    /// Opens a file and checks its length against its header.
    pub fn open(path: impl AsRef<Path>) -> Result<KlBase, DumpError> {
        let path = path.as_ref();
        let file = File::open(path).map_err(DumpError::io(path))?;
        let map = map_file(&file).map_err(DumpError::io(path))?;
        let wrong = |reason: String| DumpError::Container { path: path.to_owned(), reason };
        if !map.starts_with(MAGIC) {
            return Err(wrong("does not start with _logits_: not a base file of llama.cpp".to_owned()));
        }
        let Some(counts) = map.get(MAGIC.len()..FIXED) else {
            return Err(wrong(format!("the header takes {FIXED} bytes, but the file holds {}", map.len())));
        };
        let counts: Vec<i32> = ints(counts).collect();
        let [n_ctx, n_vocab, n_chunk] = counts[..] else {
            return Err(wrong("the header does not hold three counts".to_owned()));
        };
        if n_ctx < 2 || n_vocab < 1 || n_chunk < 1 {
            return Err(wrong(format!(
                "n_ctx {n_ctx}, n_vocab {n_vocab}, n_chunk {n_chunk}: expected at least 2, 1 and 1"
            )));
        }
        let base = KlBase {
            path: path.to_owned(),
            map,
            n_ctx: n_ctx as usize,
            n_vocab: n_vocab as usize,
            n_chunk: n_chunk as usize,
        };
        // In 128 bits, where three counts of 31 bits cannot overflow.
        let rows = base.n_chunk as u128 * base.rows_per_chunk() as u128;
        let tokens = 4 * base.n_chunk as u128 * base.n_ctx as u128;
        let expected = FIXED as u128 + tokens + rows * base.row_bytes() as u128;
        if expected != base.map.len() as u128 {
            let found = base.map.len();
            return Err(wrong(format!(
                "{n_chunk} chunks of {n_ctx} tokens and a vocabulary of {n_vocab} take {expected} bytes, but the file holds {found}"
            )));
        }
        Ok(base)
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// How many positions of each chunk are stored: `n_ctx - 1 - n_ctx / 2`.
    pub fn rows_per_chunk(&self) -> usize {
        self.n_ctx - 1 - self.n_ctx / 2
    }

    fn row_bytes(&self) -> usize {
        ROW_HEAD + 2 * self.n_vocab.next_multiple_of(2)
    }

    /// Token ids of a chunk as in the text; nothing if there is no such chunk.
    pub fn tokens(&self, chunk: usize) -> Option<Vec<i32>> {
        let start = FIXED + 4 * self.n_ctx * chunk;
        (chunk < self.n_chunk).then(|| ints(&self.map[start..start + 4 * self.n_ctx]).collect())
    }

    /// Row `row` of a chunk; nothing if there is no such row.
    pub fn log_probs(&self, chunk: usize, row: usize) -> Option<LogProbs> {
        if chunk >= self.n_chunk || row >= self.rows_per_chunk() {
            return None;
        }
        let rows = FIXED + 4 * self.n_ctx * self.n_chunk;
        let start = rows + (chunk * self.rows_per_chunk() + row) * self.row_bytes();
        let bytes = &self.map[start..start + self.row_bytes()];
        let (head, codes) = bytes.split_at(ROW_HEAD);
        let (scale, lowest) = (float(&head[..4]), float(&head[4..]));
        let codes = codes.as_chunks::<2>().0.iter().map(|&code| f32::from(u16::from_le_bytes(code)));
        let values = codes.take(self.n_vocab).map(|code| lowest + scale * code).collect();
        Some(LogProbs { position: self.n_ctx / 2 + row, values, step: scale, lowest })
    }
}

fn ints(bytes: &[u8]) -> impl Iterator<Item = i32> + '_ {
    bytes.as_chunks::<4>().0.iter().map(|&word| i32::from_le_bytes(word))
}

fn float(bytes: &[u8]) -> f32 {
    bytes.first_chunk().map_or(0.0, |&word| f32::from_le_bytes(word))
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    /// Two chunks of 5 tokens, 3 in the vocabulary: positions 2 and 3 of each are stored.
    fn file() -> Vec<u8> {
        let mut bytes = MAGIC.to_vec();
        let mut int = |n: i32| bytes.extend(n.to_le_bytes());
        [5, 3, 2].into_iter().for_each(&mut int);
        (10..20).for_each(&mut int);
        for row in 0..4u16 {
            bytes.extend(0.5f32.to_le_bytes());
            bytes.extend((-4.0f32).to_le_bytes());
            for code in [row, 7, 0, 0xffff] {
                bytes.extend(code.to_le_bytes()); // the fourth fills up an odd vocabulary
            }
        }
        bytes
    }

    fn open(bytes: &[u8]) -> Result<KlBase, DumpError> {
        let file = tempfile::NamedTempFile::new().unwrap();
        fs::write(file.path(), bytes).unwrap();
        KlBase::open(file.path())
    }

    #[test]
    fn rows_by_hand() {
        let base = open(&file()).unwrap();
        assert_eq!((base.n_ctx, base.n_vocab, base.n_chunk, base.rows_per_chunk()), (5, 3, 2, 2));
        assert_eq!(base.tokens(1).unwrap(), [15, 16, 17, 18, 19]);
        // The last row has codes 3, 7, 0: -4 + 0.5 · 3 = -2.5, -4 + 3.5 = -0.5, -4.
        let row = base.log_probs(1, 1).unwrap();
        assert_eq!((row.position, row.step, row.lowest), (3, 0.5, -4.0));
        assert_eq!(row.values, [-2.5, -0.5, -4.0]);
        assert!(base.tokens(2).is_none() && base.log_probs(2, 0).is_none() && base.log_probs(0, 2).is_none());
    }

    #[test]
    fn broken_files() {
        let whole = file();
        let huge = [&MAGIC[..], &[0xff, 0xff, 0xff, 0x7f].repeat(3)].concat();
        let cases: [(&[u8], &str); 5] = [
            (
                &whole[..whole.len() - 1],
                "2 chunks of 5 tokens and a vocabulary of 3 take 124 bytes, but the file holds 123",
            ),
            (&whole[..12], "the header takes 20 bytes, but the file holds 12"),
            (b"GGUF", "does not start with _logits_"),
            (&[&MAGIC[..], &[0; 12]].concat(), "n_ctx 0, n_vocab 0, n_chunk 0: expected at least"),
            (&huge, "but the file holds 20"),
        ];
        for (bytes, expected) in cases {
            let error = open(bytes).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        }
    }
}
