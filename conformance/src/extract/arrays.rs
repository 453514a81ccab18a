//! Writing a safetensors file.

use serde_json::json;
use std::fs::File;
use std::io::{self, Write};
use std::path::Path;

/// A tensor to write: name, type as safetensors calls it, shape, little-endian bytes.
pub type Array<'a> = (&'a str, &'a str, &'a [usize], Vec<u8>);

/// Writes tensors one behind the other, in this order.
pub fn write_tensors(path: &Path, arrays: Vec<Array>) -> io::Result<()> {
    let mut header = serde_json::Map::new();
    let mut end = 0;
    for (name, dtype, shape, bytes) in &arrays {
        let start = end;
        end += bytes.len();
        header
            .insert(name.to_string(), json!({"dtype": dtype, "shape": shape, "data_offsets": [start, end]}));
    }
    let mut header = serde_json::Value::Object(header).to_string();
    // Spaces are allowed behind the header, and let the data start where an f64 may.
    header += &" ".repeat(header.len().next_multiple_of(8) - header.len());
    let mut file = io::BufWriter::new(File::create(path)?);
    file.write_all(&(header.len() as u64).to_le_bytes())?;
    file.write_all(header.as_bytes())?;
    for (_, _, _, bytes) in &arrays {
        file.write_all(bytes)?;
    }
    file.flush()
}
