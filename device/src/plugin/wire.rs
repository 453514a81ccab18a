//! Frames between the two processes: a length of eight bytes, then fields one behind another, all
//! little-endian; strings and lists begin with their length. Values lie in shared memory where there is room:
//! then their place follows, else [`HERE`] and the values themselves.

use super::call::{Input, OpCall};
use super::shared::Shared;
use std::io::{self, Read, Write};

/// What a library says about itself.
#[derive(Clone, Debug, PartialEq)]
pub struct Info {
    /// Its name.
    pub name: String,
    /// Its contract: a name or JSON.
    pub contract: Option<String>,
    /// The ops that it has.
    pub ops: Vec<String>,
    /// Whether it runs whole models.
    pub model: bool,
    /// Whether it shows the state of a model and takes another one.
    pub state: bool,
}

/// A value that a model showed.
#[derive(Clone, Debug, PartialEq)]
pub struct Tap {
    /// The site's name.
    pub site: String,
    /// Its shape.
    pub shape: Vec<usize>,
    /// Its values.
    pub values: Vec<f32>,
}

/// What a process with a library is asked.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Request {
    Call(OpCall),
    Load(String),
    Reset,
    Step {
        ids: Vec<u32>,
        vocab: usize,
    },
    /// Show the state.
    State,
    /// Put one tensor of it in.
    SetState(Tap),
}

/// What it answers.
#[derive(Clone, Debug, PartialEq)]
pub enum Reply {
    /// Sent first: the library is loaded.
    Ready(Info),
    /// Sent first: it is not, and why.
    Refused(String),
    /// The result of an op.
    Values(Vec<f32>),
    /// The taps of a pass; logits are one of them.
    Taps(Vec<Tap>),
    /// It did as it was told.
    Done,
    /// It does not handle these arguments.
    NotSupported,
    /// It returned an error.
    Failed(String),
    /// It wrote where it must not.
    Wild(String),
}

/// Guard values before and behind every output.
pub(super) const GUARD: usize = 256;

/// In the place of a place: the values follow in the frame.
const HERE: u64 = u64::MAX;

/// The place of values, where two processes share memory.
pub(super) type Memory<'s> = Option<&'s mut Shared>;

/// Values of a frame: where they lie in the shared memory, and how many; or here.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Placed {
    At(u64, usize),
    Here(Vec<f32>),
}

struct Fields<'s>(Vec<u8>, Memory<'s>);

impl<'s> Fields<'s> {
    fn new(mut memory: Memory<'s>) -> Self {
        memory.iter_mut().for_each(|shared| shared.begin());
        Fields(Vec::new(), memory)
    }

    fn number(&mut self, n: u64) -> &mut Self {
        self.0.extend(n.to_le_bytes());
        self
    }

    fn text(&mut self, text: &str) -> &mut Self {
        self.number(text.len() as u64);
        self.0.extend(text.as_bytes());
        self
    }

    fn shape(&mut self, shape: &[usize]) -> &mut Self {
        self.number(shape.len() as u64);
        shape.iter().for_each(|&n| {
            self.number(n as u64);
        });
        self
    }

    fn values(&mut self, values: &[f32]) -> &mut Self {
        self.number(values.len() as u64);
        let bytes = bytemuck::cast_slice(values);
        let place = self.1.as_mut().and_then(|shared| shared.put(bytes));
        self.number(place.unwrap_or(HERE));
        if place.is_none() {
            self.0.extend_from_slice(bytes);
        }
        self
    }

    fn call(&mut self, call: &OpCall) -> &mut Self {
        self.text(&call.op).number(call.inputs.len() as u64);
        for input in &call.inputs {
            self.text(&input.name).shape(&input.shape).values(&input.values);
        }
        self.number(call.numbers.len() as u64);
        for (name, value) in &call.numbers {
            self.text(name).number(value.to_bits());
        }
        self.shape(&call.output);
        // Room for the result behind the inputs, so that it need not be copied there.
        let length = call.elements().checked_add(2 * GUARD).and_then(|n| n.checked_mul(4));
        let room = self.1.as_mut().zip(length).and_then(|(shared, length)| shared.room(length));
        self.number(room.unwrap_or(HERE))
    }

    fn tap(&mut self, tap: &Tap) -> &mut Self {
        self.text(&tap.site).shape(&tap.shape).values(&tap.values)
    }
}

/// What is left of a frame. Every read says whether the frame was long enough.
struct Rest<'a, 's>(&'a [u8], Memory<'s>);

impl Rest<'_, '_> {
    fn number(&mut self) -> Option<u64> {
        let (word, rest) = self.0.split_first_chunk::<8>()?;
        self.0 = rest;
        Some(u64::from_le_bytes(*word))
    }

    fn bytes(&mut self, length: usize) -> Option<&[u8]> {
        let (bytes, rest) = self.0.split_at_checked(length)?;
        self.0 = rest;
        Some(bytes)
    }

    fn text(&mut self) -> Option<String> {
        let length = self.number()? as usize;
        Some(String::from_utf8_lossy(self.bytes(length)?).into_owned())
    }

    fn list<T>(&mut self, mut item: impl FnMut(&mut Self) -> Option<T>) -> Option<Vec<T>> {
        let length = self.number()?;
        (0..length).map(|_| item(self)).collect()
    }

    fn shape(&mut self) -> Option<Vec<usize>> {
        self.list(|rest| Some(rest.number()? as usize))
    }

    fn values(&mut self) -> Option<Vec<f32>> {
        let placed = self.placed()?;
        read(placed, &mut self.1)
    }

    fn placed(&mut self) -> Option<Placed> {
        let elements = self.number()? as usize;
        Some(match self.number()? {
            HERE => Placed::Here(floats(self.bytes(elements.checked_mul(4)?)?)),
            place => Placed::At(place, elements),
        })
    }

    /// A call whose values stay where they are, and the room for its result.
    fn call(&mut self) -> Option<(OpCall<Placed>, Option<u64>)> {
        let call = OpCall {
            op: self.text()?,
            inputs: self.list(|r| Some(Input { name: r.text()?, shape: r.shape()?, values: r.placed()? }))?,
            numbers: self.list(|r| Some((r.text()?, f64::from_bits(r.number()?))))?,
            output: self.shape()?,
        };
        let room = Some(self.number()?).filter(|&room| room != HERE);
        Some((call, room))
    }

    fn tap(&mut self) -> Option<Tap> {
        Some(Tap { site: self.text()?, shape: self.shape()?, values: self.values()? })
    }
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.as_chunks::<4>().0.iter().map(|&word| f32::from_le_bytes(word)).collect()
}

/// A copy of values.
fn read(placed: Placed, memory: &mut Memory) -> Option<Vec<f32>> {
    match placed {
        Placed::Here(values) => Some(values),
        Placed::At(place, elements) => Some(floats(memory.as_mut()?.get(place, elements.checked_mul(4)?)?)),
    }
}

/// The name of an input whose values are no longer what [`Request::call`] put into the memory.
pub(super) fn overwritten<'c>(call: &'c OpCall, frame: &[u8], shared: &mut Shared) -> Option<&'c str> {
    let (placed, _) = Request::placed(frame)?;
    let changed = |(ours, theirs): &(&Input, Input<Placed>)| match theirs.values {
        Placed::At(place, elements) => {
            let bytes = bytemuck::cast_slice::<f32, u8>(&ours.values);
            elements.checked_mul(4).and_then(|length| shared.get(place, length)) != Some(bytes)
        }
        Placed::Here(_) => false,
    };
    call.inputs.iter().zip(placed.inputs).find(changed).map(|(input, _)| input.name.as_str())
}

impl Request {
    /// The frame of a call, without a copy of it.
    pub(super) fn call(call: &OpCall, memory: Memory) -> Vec<u8> {
        let mut f = Fields::new(memory);
        f.number(0).call(call);
        f.0
    }

    /// The call of a frame that is one, its values where they are; and the room for its result and the guards around.
    pub(super) fn placed(frame: &[u8]) -> Option<(OpCall<Placed>, Option<u64>)> {
        let mut rest = Rest(frame, None);
        (rest.number()? == 0).then(|| rest.call())?
    }

    pub(super) fn to_bytes(&self, memory: Memory) -> Vec<u8> {
        let mut f = Fields::new(memory);
        match self {
            Request::Call(call) => {
                f.number(0).call(call);
            }
            Request::Load(package) => {
                f.number(1).text(package);
            }
            Request::Reset => {
                f.number(2);
            }
            Request::Step { ids, vocab } => {
                f.number(3).number(*vocab as u64).number(ids.len() as u64);
                ids.iter().for_each(|&id| {
                    f.number(u64::from(id));
                });
            }
            Request::State => {
                f.number(4);
            }
            Request::SetState(tap) => {
                f.number(5).tap(tap);
            }
        }
        f.0
    }

    pub(super) fn from_bytes(bytes: &[u8], memory: Memory) -> Option<Request> {
        let mut rest = Rest(bytes, memory);
        Some(match rest.number()? {
            0 => {
                let (call, _) = rest.call()?;
                Request::Call(call.with_values(|values| read(values, &mut rest.1))?)
            }
            1 => Request::Load(rest.text()?),
            2 => Request::Reset,
            3 => {
                let vocab = rest.number()? as usize;
                Request::Step { vocab, ids: rest.list(|r| u32::try_from(r.number()?).ok())? }
            }
            4 => Request::State,
            5 => Request::SetState(rest.tap()?),
            _ => return None,
        })
    }
}

impl Reply {
    pub(super) fn wrote_into(op: &str, input: &str) -> Reply {
        Reply::Wild(format!("{op} wrote into its input {input}"))
    }

    /// The frame of a result that lies in the shared memory.
    pub(super) fn values_at(place: u64, elements: usize) -> Vec<u8> {
        let mut f = Fields(Vec::new(), None);
        f.number(2).number(elements as u64).number(place);
        f.0
    }

    pub(super) fn to_bytes(&self, memory: Memory) -> Vec<u8> {
        let mut f = Fields::new(memory);
        match self {
            Reply::Ready(info) => {
                f.number(0).text(&info.name).number(u64::from(info.contract.is_some()));
                f.text(info.contract.as_deref().unwrap_or("")).number(info.ops.len() as u64);
                info.ops.iter().for_each(|op| {
                    f.text(op);
                });
                f.number(u64::from(info.model)).number(u64::from(info.state));
            }
            Reply::Refused(reason) => {
                f.number(1).text(reason);
            }
            Reply::Values(values) => {
                f.number(2).values(values);
            }
            Reply::Taps(taps) => {
                f.number(3).number(taps.len() as u64);
                taps.iter().for_each(|tap| {
                    f.tap(tap);
                });
            }
            Reply::Done => {
                f.number(4);
            }
            Reply::NotSupported => {
                f.number(5);
            }
            Reply::Failed(reason) => {
                f.number(6).text(reason);
            }
            Reply::Wild(what) => {
                f.number(7).text(what);
            }
        }
        f.0
    }

    pub(super) fn from_bytes(bytes: &[u8], memory: Memory) -> Option<Reply> {
        let mut rest = Rest(bytes, memory);
        Some(match rest.number()? {
            0 => {
                let (name, declared) = (rest.text()?, rest.number()? == 1);
                let contract = Some(rest.text()?).filter(|_| declared);
                let ops = rest.list(Rest::text)?;
                let (model, state) = (rest.number()? == 1, rest.number()? == 1);
                Reply::Ready(Info { name, contract, ops, model, state })
            }
            1 => Reply::Refused(rest.text()?),
            2 => Reply::Values(rest.values()?),
            3 => Reply::Taps(rest.list(Rest::tap)?),
            4 => Reply::Done,
            5 => Reply::NotSupported,
            6 => Reply::Failed(rest.text()?),
            7 => Reply::Wild(rest.text()?),
            _ => return None,
        })
    }
}

/// Writes one frame.
pub(super) fn send(to: &mut impl Write, frame: &[u8]) -> io::Result<()> {
    to.write_all(&(frame.len() as u64).to_le_bytes())?;
    to.write_all(frame)?;
    to.flush()
}

/// Reads one frame; nothing where the other side has closed.
pub(super) fn receive(from: &mut impl Read) -> io::Result<Option<Vec<u8>>> {
    let mut length = [0; 8];
    match from.read_exact(&mut length) {
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(None),
        other => other?,
    }
    let length = u64::from_le_bytes(length);
    // Grows with what is really there: a library that wrote into our pipe may claim anything.
    let mut frame = Vec::new();
    from.take(length).read_to_end(&mut frame)?;
    Ok((frame.len() as u64 == length).then_some(frame))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_sent_is_received() {
        let x = Input { name: "x".into(), shape: vec![1, 2], values: vec![1.5, f32::INFINITY] };
        let call = OpCall {
            op: "linear".into(),
            inputs: vec![x],
            numbers: vec![("eps".into(), 1e-5)],
            output: vec![1, 3],
        };
        let tap = Tap { site: "out".into(), shape: vec![2], values: vec![0.0, -1.0] };
        let requests = [
            Request::Call(call),
            Request::Load("models/a".into()),
            Request::Reset,
            Request::Step { ids: vec![3, 1, 4], vocab: 7 },
            Request::State,
            Request::SetState(tap.clone()),
        ];
        let (mut ours, path) = Shared::create().unwrap();
        let mut theirs = Shared::open(&path).unwrap();
        std::fs::remove_file(path).unwrap();
        for request in requests {
            let bytes = request.to_bytes(None);
            // Cut anywhere, it is no request and no panic.
            (0..bytes.len()).for_each(|n| assert_eq!(Request::from_bytes(&bytes[..n], None), None));
            assert_eq!(Request::from_bytes(&bytes, None).as_ref(), Some(&request));
            let bytes = request.to_bytes(Some(&mut ours));
            assert_eq!(Request::from_bytes(&bytes, Some(&mut theirs)), Some(request));
        }
        let info = Info {
            name: "mine".into(),
            contract: None,
            ops: vec!["linear".into()],
            model: true,
            state: false,
        };
        for reply in
            [Reply::Ready(info), Reply::Taps(vec![tap]), Reply::Wild("y".into()), Reply::NotSupported]
        {
            let bytes = reply.to_bytes(Some(&mut theirs));
            assert_eq!(Reply::from_bytes(&bytes, Some(&mut ours)), Some(reply));
        }
    }

    #[test]
    fn frames_end_where_they_say() {
        let mut pipe = Vec::new();
        send(&mut pipe, b"one").unwrap();
        send(&mut pipe, b"").unwrap();
        let mut from = &pipe[..];
        assert_eq!(receive(&mut from).unwrap().as_deref(), Some(&b"one"[..]));
        assert_eq!(receive(&mut from).unwrap().as_deref(), Some(&b""[..]));
        assert_eq!(receive(&mut from).unwrap(), None);
    }
}
