//! The header of a `.npy` file: a Python dictionary with three keys.

use std::io::Read;

/// How the bits of an element are read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Float,
    Signed,
    Unsigned,
}

pub(super) struct Header {
    pub dtype: String,
    pub kind: Kind,
    /// Bytes per element.
    pub size: usize,
    pub big_endian: bool,
    pub fortran: bool,
    pub shape: Vec<usize>,
}

/// numpy writes headers of a few hundred bytes.
const LIMIT: usize = 1 << 20;

/// Reads magic, version and header; `file` then stands at the data.
pub(super) fn read(file: &mut impl Read) -> Result<Header, String> {
    let magic: [u8; 8] = take(file)?;
    if !magic.starts_with(b"\x93NUMPY") {
        return Err("does not start with \\x93NUMPY: not an npy file".to_owned());
    }
    let length = match magic[6] {
        1 => usize::from(u16::from_le_bytes(take(file)?)),
        2 | 3 => u32::from_le_bytes(take(file)?) as usize,
        _ => return Err(format!("npy version {}.{}, this build reads 1 to 3", magic[6], magic[7])),
    };
    if length > LIMIT {
        return Err(format!("header of {length} bytes, over the limit of {LIMIT}"));
    }
    let mut text = vec![0; length];
    file.read_exact(&mut text).map_err(short)?;
    let text = String::from_utf8_lossy(&text);
    parse(&text).map_err(|what| format!("broken header: {what} in {}", text.trim_end()))?.typed()
}

fn take<const N: usize>(file: &mut impl Read) -> Result<[u8; N], String> {
    let mut bytes = [0; N];
    file.read_exact(&mut bytes).map_err(short)?;
    Ok(bytes)
}

fn short(error: std::io::Error) -> String {
    match error.kind() {
        std::io::ErrorKind::UnexpectedEof => "the file ends inside its header".to_owned(),
        _ => error.to_string(),
    }
}

/// The dictionary as it stands.
struct Raw {
    descr: String,
    fortran: bool,
    shape: Vec<usize>,
}

impl Raw {
    fn typed(self) -> Result<Header, String> {
        let unsupported =
            || format!("type {} is not supported; floats, integers and booleans are", self.descr);
        let (order, code) = self.descr.split_at_checked(1).ok_or_else(unsupported)?;
        let (kind, size) = match code {
            "f2" | "f4" | "f8" => (Kind::Float, &code[1..]),
            "i1" | "i2" | "i4" | "i8" => (Kind::Signed, &code[1..]),
            "u1" | "u2" | "u4" | "u8" | "b1" => (Kind::Unsigned, &code[1..]),
            // What numpy writes for a type of another library, such as bfloat16: the file does not say which.
            "V1" | "V2" => {
                return Err(format!("type {} does not say what it is; save it as float32", self.descr));
            }
            _ => return Err(unsupported()),
        };
        let big_endian = match order {
            "<" | "|" | "=" => false,
            ">" => true,
            _ => return Err(unsupported()),
        };
        let size = size.parse().map_err(|_| unsupported())?;
        Ok(Header { kind, size, big_endian, fortran: self.fortran, shape: self.shape, dtype: self.descr })
    }
}

/// Parses `{'descr': '<f4', 'fortran_order': False, 'shape': (3, 4), }`, keys in any order.
fn parse(text: &str) -> Result<Raw, String> {
    let mut rest = Cursor(text.trim());
    let (mut descr, mut fortran, mut shape) = (None, None, None);
    rest.expect("{")?;
    while !rest.eat("}") {
        let key = rest.string()?;
        rest.expect(":")?;
        match key {
            "descr" => descr = Some(rest.string()?.to_owned()),
            "fortran_order" => fortran = Some(rest.boolean()?),
            "shape" => shape = Some(rest.tuple()?),
            other => return Err(format!("unknown key {other}")),
        }
        if !rest.eat(",") {
            rest.expect("}")?;
            break;
        }
    }
    match (descr, fortran, shape) {
        (Some(descr), Some(fortran), Some(shape)) => Ok(Raw { descr, fortran, shape }),
        _ => Err("descr, fortran_order or shape is missing".to_owned()),
    }
}

/// What is left of the text.
struct Cursor<'a>(&'a str);

impl<'a> Cursor<'a> {
    fn eat(&mut self, token: &str) -> bool {
        let found = self.0.trim_start().strip_prefix(token);
        if let Some(rest) = found {
            self.0 = rest;
        }
        found.is_some()
    }

    fn expect(&mut self, token: &str) -> Result<(), String> {
        if self.eat(token) { Ok(()) } else { Err(format!("no {token} where one is due")) }
    }

    fn string(&mut self) -> Result<&'a str, String> {
        let quote = if self.eat("'") { '\'' } else { self.expect("\"").map(|()| '"')? };
        let (string, rest) = self.0.split_once(quote).ok_or("a string without an end")?;
        self.0 = rest;
        Ok(string)
    }

    fn boolean(&mut self) -> Result<bool, String> {
        if self.eat("True") {
            return Ok(true);
        }
        self.expect("False").map(|()| false)
    }

    fn tuple(&mut self) -> Result<Vec<usize>, String> {
        let mut lengths = Vec::new();
        self.expect("(")?;
        while !self.eat(")") {
            self.0 = self.0.trim_start();
            let digits = self.0.find(|c: char| !c.is_ascii_digit()).unwrap_or(self.0.len());
            let (number, rest) = self.0.split_at(digits);
            lengths.push(number.parse().map_err(|_| format!("no length where one is due, but {number:?}"))?);
            self.0 = rest;
            self.eat("L"); // Python 2 wrote 3L
            if !self.eat(",") {
                self.expect(")")?;
                break;
            }
        }
        Ok(lengths)
    }
}
