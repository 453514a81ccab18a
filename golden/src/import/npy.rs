//! Arrays of numpy: `.npy` files and `.npz` archives.
//!
//! Source: the format description in numpy's own documentation (`numpy.lib.format`), versions 1.0 to 3.0.

mod header;

use std::fs::File;
use std::io::{BufReader, Read};
use std::path::{Path, PathBuf};

use half::f16;
use zip::ZipArchive;

use crate::DumpError;
use header::{Header, Kind};

/// The largest integer up to which every integer is an f32.
const EXACT: f64 = (1 << 24) as f64;

/// An array, its values as f32 with the last axis fastest, whatever the file has.
#[derive(Clone, Debug, PartialEq)]
pub struct Array {
    /// Length of each axis.
    pub shape: Vec<usize>,
    /// The values. f64 was rounded once; an integer that f32 cannot hold is refused.
    pub values: Vec<f32>,
    /// numpy's name of the type in the file, such as `<f4`.
    pub dtype: String,
}

/// Reads a `.npy` file.
pub fn read_npy(path: impl AsRef<Path>) -> Result<Array, DumpError> {
    let path = path.as_ref();
    let file = File::open(path).map_err(DumpError::io(path))?;
    parse(BufReader::new(file)).map_err(|reason| DumpError::Container { path: path.to_owned(), reason })
}

/// An opened `.npz` archive; arrays are read one at a time.
pub struct Npz {
    path: PathBuf,
    archive: ZipArchive<BufReader<File>>,
}

impl Npz {
    /// Opens an archive, plain or compressed.
    pub fn open(path: impl AsRef<Path>) -> Result<Npz, DumpError> {
        let path = path.as_ref();
        let file = File::open(path).map_err(DumpError::io(path))?;
        let archive = ZipArchive::new(BufReader::new(file));
        let broken = |error| DumpError::Container {
            path: path.to_owned(),
            reason: format!("not an npz archive: {error}"),
        };
        Ok(Npz { path: path.to_owned(), archive: archive.map_err(broken)? })
    }

    /// Names of the arrays, sorted, without `.npy`. A member that is no array is an error: what somebody put
    /// into an archive is never dropped in silence.
    pub fn names(&self) -> Result<Vec<String>, DumpError> {
        let broken = |reason: String| DumpError::Container { path: self.path.clone(), reason };
        let mut names = Vec::new();
        for member in self.archive.file_names() {
            let member = member.map_err(|error| broken(error.to_string()))?;
            match member.strip_suffix(".npy") {
                Some(name) => names.push(name.to_owned()),
                None => {
                    return Err(broken(format!(
                        "member {member} is not an array: its name does not end in .npy"
                    )));
                }
            }
        }
        names.sort();
        Ok(names)
    }

    /// Reads one array.
    pub fn read(&mut self, name: &str) -> Result<Array, DumpError> {
        let broken = |reason: String| DumpError::Container {
            path: self.path.clone(),
            reason: format!("array {name}: {reason}"),
        };
        let member =
            self.archive.by_name(&format!("{name}.npy")).map_err(|error| broken(error.to_string()))?;
        parse(BufReader::new(member)).map_err(broken)
    }
}

fn parse(mut file: impl Read) -> Result<Array, String> {
    let Header { dtype, kind, size, big_endian, fortran, shape } = header::read(&mut file)?;
    let elements = shape.iter().try_fold(1usize, |n, &d| n.checked_mul(d));
    let Some(bytes) = elements.and_then(|n| n.checked_mul(size)) else {
        return Err(format!("shape {shape:?} is too large to count"));
    };
    // Grows with what is really there: a header may claim anything.
    let mut data = Vec::new();
    file.take(bytes as u64 + 1).read_to_end(&mut data).map_err(|error| error.to_string())?;
    if data.len() != bytes {
        let found = if data.len() > bytes { "more".to_owned() } else { data.len().to_string() };
        return Err(format!("shape {shape:?} of {dtype} takes {bytes} bytes, but the file holds {found}"));
    }
    if big_endian {
        data.chunks_exact_mut(size).for_each(<[u8]>::reverse);
    }
    let mut values = decode(&data, kind, size)?;
    if fortran {
        values = to_c_order(&shape, &values);
    }
    Ok(Array { shape, values, dtype })
}

fn decode(data: &[u8], kind: Kind, size: usize) -> Result<Vec<f32>, String> {
    // The header admits these pairs of kind and size only.
    let value = |bytes: &[u8]| -> f64 {
        let mut wide = [0u8; 8];
        wide[..bytes.len()].copy_from_slice(bytes);
        let bits = u64::from_le_bytes(wide);
        let unused = 64 - 8 * bytes.len() as u32;
        match (kind, bytes.len()) {
            (Kind::Float, 2) => f16::from_bits(bits as u16).to_f64(),
            (Kind::Float, 4) => f64::from(f32::from_bits(bits as u32)),
            (Kind::Float, _) => f64::from_bits(bits),
            (Kind::Signed, _) => ((bits << unused) as i64 >> unused) as f64,
            (Kind::Unsigned, _) => bits as f64,
        }
    };
    let words = data.chunks_exact(size);
    if kind == Kind::Float {
        // f32 as it lies, so that the bits of a NaN stay.
        return Ok(match size {
            4 => words.map(|w| w.first_chunk().map_or(0.0, |&w| f32::from_le_bytes(w))).collect(),
            _ => words.map(|w| value(w) as f32).collect(),
        });
    }
    words
        .map(|word| match value(word) {
            v if v.abs() <= EXACT => Ok(v as f32),
            v => Err(format!("integer {v} does not fit f32, which holds those up to {EXACT}")),
        })
        .collect()
}

/// From first axis fastest to last axis fastest.
fn to_c_order(shape: &[usize], values: &[f32]) -> Vec<f32> {
    let mut at = vec![0; shape.len()];
    let mut c_order = Vec::with_capacity(values.len());
    for _ in 0..values.len() {
        let place = shape.iter().zip(&at).rev().fold(0, |place, (&length, &i)| place * length + i);
        c_order.push(values[place]);
        for axis in (0..shape.len()).rev() {
            at[axis] += 1;
            if at[axis] < shape[axis] {
                break;
            }
            at[axis] = 0;
        }
    }
    c_order
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use proptest::prelude::*;

    use super::*;

    fn npy(version: u8, descr: &str, fortran: &str, shape: &str, data: &[u8]) -> Vec<u8> {
        let header = format!("{{'descr': '{descr}', 'fortran_order': {fortran}, 'shape': {shape}, }}\n");
        let length = match version {
            1 => (header.len() as u16).to_le_bytes().to_vec(),
            _ => (header.len() as u32).to_le_bytes().to_vec(),
        };
        [b"\x93NUMPY", &[version, 0][..], &length, header.as_bytes(), data].concat()
    }

    fn bytes<const N: usize, T>(values: &[T], le: impl Fn(&T) -> [u8; N]) -> Vec<u8> {
        values.iter().flat_map(le).collect()
    }

    // Written by numpy.save(np.array([[1.5, -2.0], [0.25, 3.0]], dtype='<f4')), 128 bytes of header.
    #[test]
    fn a_file_of_numpy() {
        let mut file =
            b"\x93NUMPY\x01\x00v\x00{'descr': '<f4', 'fortran_order': False, 'shape': (2, 2), }".to_vec();
        file.resize(127, b' ');
        file.push(b'\n');
        file.extend([0, 0, 0xc0, 0x3f, 0, 0, 0, 0xc0, 0, 0, 0x80, 0x3e, 0, 0, 0x40, 0x40]);
        let array = parse(&file[..]).unwrap();
        assert_eq!(
            (array.shape, array.values, array.dtype.as_str()),
            (vec![2, 2], vec![1.5, -2.0, 0.25, 3.0], "<f4")
        );
    }

    #[test]
    fn every_version_and_type() {
        let cases = [
            (1, "<f8", bytes(&[1.0f64, -0.5], |v| v.to_le_bytes())),
            (2, "<f2", bytes(&[0x3c00u16, 0xb800], |v| v.to_le_bytes())),
            (3, ">f4", bytes(&[1.0f32, -0.5], |v| v.to_be_bytes())),
        ];
        for (version, descr, data) in cases {
            let array = parse(&npy(version, descr, "False", "(2,)", &data)[..]).unwrap();
            assert_eq!((array.shape, array.values), (vec![2], vec![1.0, -0.5]), "{descr}");
        }
        let integers = [
            ("<i4", bytes(&[7i32, -2], |v| v.to_le_bytes()), [7.0, -2.0]),
            ("<i8", bytes(&[7i64, -2], |v| v.to_le_bytes()), [7.0, -2.0]),
            (">i2", bytes(&[7i16, -2], |v| v.to_be_bytes()), [7.0, -2.0]),
            ("|u1", vec![7, 255], [7.0, 255.0]),
            ("|b1", vec![1, 0], [1.0, 0.0]),
        ];
        for (descr, data, expected) in integers {
            assert_eq!(
                parse(&npy(1, descr, "False", "(2,)", &data)[..]).unwrap().values,
                expected,
                "{descr}"
            );
        }
    }

    // Element [i, j, k] holds 100 i + 10 j + k; the first axis is the fastest in the file.
    #[test]
    fn fortran_order_is_undone() {
        let value = |i, j, k| (100 * i + 10 * j + k) as f32;
        let mut data = Vec::new();
        for k in 0..2 {
            for j in 0..3 {
                for i in 0..2 {
                    data.extend(value(i, j, k).to_le_bytes());
                }
            }
        }
        let array = parse(&npy(1, "<f4", "True", "(2, 3, 2)", &data)[..]).unwrap();
        let expected = [0.0, 1.0, 10.0, 11.0, 20.0, 21.0, 100.0, 101.0, 110.0, 111.0, 120.0, 121.0];
        assert_eq!(array.values, expected);
    }

    #[test]
    fn a_scalar_and_an_empty_array() {
        let scalar = parse(&npy(1, "<f4", "False", "()", &2f32.to_le_bytes())[..]).unwrap();
        assert_eq!((scalar.shape, scalar.values), (vec![], vec![2.0]));
        let empty = parse(&npy(1, "<f4", "False", "(3, 0)", &[])[..]).unwrap();
        assert_eq!((empty.shape, empty.values), (vec![3, 0], vec![]));
    }

    #[test]
    fn broken_files() {
        let cases = [
            (b"PK\x03\x04aaaaaa".to_vec(), "does not start with"),
            (npy(9, "<f4", "False", "(1,)", &[0; 4]), "version 9.0"),
            (npy(1, "<f4", "False", "(2,)", &[0; 4]), "shape [2] of <f4 takes 8 bytes, but the file holds 4"),
            (npy(1, "<f4", "False", "(1,)", &[0; 5]), "takes 4 bytes, but the file holds more"),
            (npy(1, "<c8", "False", "(1,)", &[0; 8]), "type <c8 is not supported"),
            (npy(1, "|V2", "False", "(1,)", &[0; 2]), "save it as float32"),
            (npy(1, "|O", "False", "(1,)", &[]), "type |O is not supported"),
            (npy(1, "<f4", "False", "(99999999999, 99999999999)", &[]), "too large to count"),
            (
                npy(1, "<f4", "False", "(1000000000000,)", &[0; 8]),
                "takes 4000000000000 bytes, but the file holds 8",
            ),
            (npy(1, "<f4", "Maybe", "(1,)", &[0; 4]), "broken header"),
            (
                npy(1, "<i4", "False", "(1,)", &((1 << 24) + 1i32).to_le_bytes()),
                "integer 16777217 does not fit f32",
            ),
            (npy(1, "<f4", "False", "(1,)", &[0; 4])[..20].to_vec(), "ends inside its header"),
        ];
        for (file, expected) in cases {
            let error = parse(&file[..]).unwrap_err();
            assert!(error.contains(expected), "{expected}: {error}");
        }
    }

    #[test]
    fn archives_plain_and_compressed() {
        use zip::CompressionMethod::{Deflated, Stored};
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("taps.npz");
        let mut archive = zip::ZipWriter::new(File::create(&path).unwrap());
        for (name, method, value) in [("b/x", Stored, 1f32), ("a", Deflated, 2f32)] {
            let options = zip::write::SimpleFileOptions::default().compression_method(method);
            archive.start_file(format!("{name}.npy"), options).unwrap();
            archive.write_all(&npy(1, "<f4", "False", "(1,)", &value.to_le_bytes())).unwrap();
        }
        archive.finish().unwrap();

        let mut npz = Npz::open(&path).unwrap();
        assert_eq!(npz.names().unwrap(), ["a", "b/x"]);
        assert_eq!(npz.read("a").unwrap().values, [2.0]);
        assert_eq!(npz.read("b/x").unwrap().values, [1.0]);
        assert!(npz.read("c").unwrap_err().to_string().contains("array c: "));

        std::fs::write(&path, "no archive").unwrap();
        assert!(Npz::open(&path).err().unwrap().to_string().contains("not an npz archive"));
    }

    proptest! {
        #[test]
        fn mutated_files_never_panic(flips in prop::collection::vec((0usize..80, any::<u8>()), 1..5)) {
            let mut file = npy(1, "<f4", "True", "(2, 1)", &[0; 8]);
            for (at, value) in flips {
                let at = at % file.len();
                file[at] = value;
            }
            if let Ok(array) = parse(&file[..]) {
                prop_assert_eq!(array.shape.iter().product::<usize>(), array.values.len());
            }
        }
    }
}
