//! Calls into a loaded library: every raw pointer of the plug-in interface is made here.

use super::abi::{ABI, Abi, Attention, ENTRY, NOT_SUPPORTED, OK};
use super::call::{Input, OpCall};
use super::wire::{GUARD, Info, Reply, Tap};
use std::borrow::Cow;
use std::ffi::{CStr, CString, c_char, c_void};
use std::path::Path;

/// A quiet NaN with bits of its own: no arithmetic gives it.
const GUARD_BITS: u32 = 0x7fe5_1a7e;

/// What an output holds before it is written.
const UNWRITTEN: f32 = f32::NAN;

/// A loaded library. It is never unloaded: its process ends with it.
pub(super) struct Library {
    abi: Abi,
    model: *mut c_void,
    _library: libloading::Library,
}

impl Library {
    pub(super) fn open(path: &Path) -> Result<Library, String> {
        // SAFETY: loading runs the library's initialisers, which is what the user asked for; this process
        // does nothing but serve it.
        let library = unsafe { libloading::Library::new(path) }
            .map_err(|error| format!("{} cannot be loaded: {error}", path.display()))?;
        // SAFETY: the header gives the exported function this type.
        let entry = unsafe { library.get::<unsafe extern "C" fn(u32) -> *const Abi>(ENTRY.as_bytes()) }
            .map_err(|_| format!("{} does not export {ENTRY}; see karat.h", path.display()))?;
        // SAFETY: as above; it takes a number by value.
        let table = unsafe { entry(ABI) };
        if table.is_null() {
            return Err(format!("{} gave no table for interface version {ABI}", path.display()));
        }
        // SAFETY: every version of the table begins with two words of 32 bits.
        let [abi, size] = unsafe { table.cast::<[u32; 2]>().read_unaligned() };
        if abi != ABI {
            return Err(format!(
                "{} was built for interface version {abi}, this build has version {ABI}; build it with this karat.h",
                path.display()
            ));
        }
        let (least, known) = (std::mem::offset_of!(Abi, linear), size_of::<Abi>());
        if (size as usize) < least || size as usize > 1 << 16 {
            return Err(format!(
                "{} says that its table takes {size} bytes, expected {known}",
                path.display()
            ));
        }
        let mut abi = Abi::default();
        // SAFETY: the library says that its table has `size` bytes; no more are read than that or than ours
        // has. Null pointers read as None, and fields that it does not have stay None.
        unsafe {
            let to = (&raw mut abi).cast::<u8>();
            std::ptr::copy_nonoverlapping(table.cast::<u8>(), to, known.min(size as usize));
        }
        Ok(Library { abi, model: std::ptr::null_mut(), _library: library })
    }

    pub(super) fn info(&self) -> Info {
        let a = &self.abi;
        let ops = [
            ("linear", a.linear.is_some()),
            ("rms_norm", a.rms_norm.is_some()),
            ("rope", a.rope.is_some()),
            ("attention", a.attention.is_some()),
            ("gated_act", a.gated_act.is_some()),
            ("residual", a.residual.is_some()),
            ("embed", a.embed.is_some()),
        ];
        let text = |s: Option<&'static c_char>| {
            // SAFETY: the header says that these are strings, which live as long as the library.
            s.map(|s| unsafe { CStr::from_ptr(s) }.to_string_lossy().into_owned())
        };
        Info {
            name: text(a.name).unwrap_or_else(|| "unnamed".into()),
            contract: text(a.contract),
            ops: ops.iter().filter(|(_, has)| *has).map(|(op, _)| op.to_string()).collect(),
            model: a.load.is_some() && a.reset.is_some() && a.step_batch.is_some(),
            state: a.state_get.is_some() && a.state_set.is_some(),
        }
    }

    /// Runs an op: its inputs are checked against its formula first, its output and its own inputs afterwards. (Inputs that are
    /// borrowed from the other process are compared there.) [`Reply::Done`] where the result is in `room`, behind a guard.
    pub(super) fn call(&self, call: &OpCall<Cow<[f32]>>, room: &mut [f32]) -> Reply {
        match self.run(call, room) {
            Some(reply) => reply,
            None => Reply::Failed(format!("{}: the shapes of its inputs do not make a call", call.op)),
        }
    }

    fn run(&self, call: &OpCall<Cow<[f32]>>, room: &mut [f32]) -> Option<Reply> {
        (room.len() == call.elements().checked_add(2 * GUARD)?).then_some(())?;
        let count = |name: &str, n: usize| call.input(name).is_none_or(|input| input.values.len() == n);
        let all = call.elements();
        let ptr = |name: &str| call.input(name).map_or(std::ptr::null(), |input| input.values.as_ptr());
        let number = |name: &str| call.number(name);
        let fits = call.inputs.iter().all(|i| i.shape.iter().product::<usize>() == i.values.len());
        fits.then_some(())?;
        Some(match call.op.as_str() {
            "linear" => {
                let Some(f) = self.abi.linear else { return Some(Reply::NotSupported) };
                let ([tokens, inner], [out, k]) = (lengths(call, "x")?, lengths(call, "w")?);
                (inner == k && all == tokens * out && count("b", out)).then_some(())?;
                // SAFETY: the pointers are to as many values as the sizes say, checked above; the output lies
                // between guards. What the library does beyond that is its own affair and its own process.
                guarded(call, room, |y| unsafe {
                    f(ptr("x"), ptr("w"), ptr("b"), y, tokens as u64, inner as u64, out as u64)
                })
            }
            "rms_norm" => {
                let Some(f) = self.abi.rms_norm else { return Some(Reply::NotSupported) };
                let [rows, width] = lengths(call, "x")?;
                (all == rows * width && count("weight", width)).then_some(())?;
                // SAFETY: as for linear.
                guarded(call, room, |y| unsafe {
                    f(ptr("x"), ptr("weight"), y, rows as u64, width as u64, number("eps") as f32)
                })
            }
            "rope" => {
                let Some(f) = self.abi.rope else { return Some(Reply::NotSupported) };
                let ([tokens, heads, dim], [rows, rotary]) = (lengths(call, "x")?, lengths(call, "cos")?);
                let tables = rows == tokens && rotary <= dim && lengths(call, "sin")? == [rows, rotary];
                (tables && all == tokens * heads * dim).then_some(())?;
                let (tokens, heads, dim, rotary) = (tokens as u64, heads as u64, dim as u64, rotary as u64);
                // SAFETY: as for linear.
                guarded(call, room, |y| unsafe {
                    let interleaved = number("interleaved") as i32;
                    f(ptr("x"), ptr("cos"), ptr("sin"), y, tokens, heads, dim, rotary, interleaved)
                })
            }
            "attention" => {
                let Some(f) = self.abi.attention else { return Some(Reply::NotSupported) };
                let [tokens, heads, head_dim] = lengths(call, "q")?;
                let [keys, kv_heads, key_dim] = lengths(call, "k")?;
                let [values, v_heads, value_dim] = lengths(call, "v")?;
                let agree = head_dim == key_dim && keys == values && kv_heads == v_heads;
                (agree && all == tokens * heads * value_dim && count("sinks", heads)).then_some(())?;
                let shape = Attention {
                    tokens: tokens as u64,
                    keys: keys as u64,
                    heads: heads as u64,
                    kv_heads: kv_heads as u64,
                    head_dim: head_dim as u64,
                    value_dim: value_dim as u64,
                    first: number("first") as u64,
                    window: number("window") as u64,
                    scale: number("scale"),
                    softcap: number("softcap"),
                };
                // SAFETY: as for linear; `shape` outlives the call.
                guarded(call, room, |y| unsafe {
                    f(ptr("q"), ptr("k"), ptr("v"), ptr("sinks"), y, &raw const shape)
                })
            }
            "gated_act" => {
                let Some(f) = self.abi.gated_act else { return Some(Reply::NotSupported) };
                (call.input("gate")?.values.len() == all && call.input("up")?.values.len() == all)
                    .then_some(())?;
                // SAFETY: as for linear.
                guarded(call, room, |y| unsafe {
                    f(ptr("gate"), ptr("up"), y, all as u64, number("gelu_tanh") as i32)
                })
            }
            "residual" => {
                let Some(f) = self.abi.residual else { return Some(Reply::NotSupported) };
                (call.input("x")?.values.len() == all && call.input("branch")?.values.len() == all)
                    .then_some(())?;
                // SAFETY: as for linear.
                guarded(call, room, |y| unsafe {
                    f(ptr("x"), ptr("branch"), y, all as u64, number("multiplier") as f32)
                })
            }
            "embed" => {
                let Some(f) = self.abi.embed else { return Some(Reply::NotSupported) };
                let [vocab, hidden] = lengths(call, "table")?;
                let ids: Vec<u32> = call.input("ids")?.values.iter().map(|&id| id as u32).collect();
                (all == ids.len() * hidden && ids.iter().all(|&id| (id as usize) < vocab)).then_some(())?;
                let tokens = ids.len() as u64;
                // SAFETY: as for linear; `ids` outlives the call.
                guarded(call, room, |y| unsafe {
                    let scale = number("scale") as f32;
                    f(ids.as_ptr(), ptr("table"), y, tokens, vocab as u64, hidden as u64, scale)
                })
            }
            _ => Reply::NotSupported,
        })
    }

    pub(super) fn load(&mut self, package: &str) -> Reply {
        let (Some(load), Ok(path)) = (self.abi.load, CString::new(package)) else {
            return Reply::NotSupported;
        };
        // SAFETY: the path is a string that outlives the call.
        let model = unsafe { load(path.as_ptr()) };
        if model.is_null() {
            return Reply::Failed(format!("load gave no model for {package}"));
        }
        if let (Some(unload), false) = (self.abi.unload, self.model.is_null()) {
            // SAFETY: the pointer came from `load` and is not used again.
            unsafe { unload(self.model) };
        }
        self.model = model;
        Reply::Done
    }

    pub(super) fn reset(&mut self) -> Reply {
        let Some(reset) = self.abi.reset.filter(|_| !self.model.is_null()) else {
            return Reply::NotSupported;
        };
        // SAFETY: the pointer came from `load`.
        match unsafe { reset(self.model) } {
            OK => Reply::Done,
            code => failed(code, "reset"),
        }
    }

    pub(super) fn step(&mut self, ids: &[u32], vocab: usize) -> Reply {
        let Some(step) = self.abi.step_batch.filter(|_| !self.model.is_null()) else {
            return Reply::NotSupported;
        };
        let mut taps: Vec<Tap> = Vec::new();
        let call = OpCall::<Cow<[f32]>> {
            op: "step_batch".into(),
            inputs: vec![],
            numbers: vec![],
            output: vec![ids.len(), vocab],
        };
        let context = (&raw mut taps).cast::<c_void>();
        let model = self.model;
        let mut room = vec![0.0; call.elements() + 2 * GUARD];
        // SAFETY: the model came from `load`, the ids are as many as said, the output lies between guards, and
        // `collect` gets `taps` back as what it is while nothing else touches it.
        let reply = guarded(&call, &mut room, |y| unsafe {
            step(model, ids.as_ptr(), ids.len() as u64, y, vocab as u64, collect, context)
        });
        match reply {
            Reply::Done => {
                let values = room[GUARD..GUARD + call.elements()].to_vec();
                taps.push(Tap { site: "logits".into(), shape: vec![ids.len(), vocab], values });
                Reply::Taps(taps)
            }
            other => other,
        }
    }

    /// Shows the state.
    pub(super) fn state(&mut self) -> Reply {
        let Some(get) = self.abi.state_get.filter(|_| !self.model.is_null()) else {
            return Reply::NotSupported;
        };
        let mut taps: Vec<Tap> = Vec::new();
        // SAFETY: the pointer came from `load`; `collect` gets `taps` back as what it is while nothing else
        // touches it.
        match unsafe { get(self.model, collect, (&raw mut taps).cast::<c_void>()) } {
            OK => Reply::Taps(taps),
            code => failed(code, "state_get"),
        }
    }

    /// Puts one tensor of a state in.
    pub(super) fn set_state(&mut self, tap: &Tap) -> Reply {
        let set = self.abi.state_set.filter(|_| !self.model.is_null());
        let (Some(set), Ok(site)) = (set, CString::new(tap.site.as_str())) else {
            return Reply::NotSupported;
        };
        let elements = tap.shape.iter().try_fold(1usize, |n, &d| n.checked_mul(d));
        if elements != Some(tap.values.len()) {
            return Reply::Failed(format!(
                "state_set of {}: shape {:?} does not hold its values",
                tap.site, tap.shape
            ));
        }
        let shape: Vec<u64> = tap.shape.iter().map(|&n| n as u64).collect();
        let rank = shape.len() as u32;
        // SAFETY: the pointer came from `load`; the values are as many as the shape says, checked above, and
        // all that is pointed to outlives the call.
        match unsafe { set(self.model, site.as_ptr(), tap.values.as_ptr(), shape.as_ptr(), rank) } {
            OK => Reply::Done,
            code => failed(code, &format!("state_set of {}", tap.site)),
        }
    }
}

/// The shape of an input, where it has as many axes as the op reads.
fn lengths<const N: usize>(call: &OpCall<Cow<[f32]>>, input: &str) -> Option<[usize; N]> {
    call.input(input)?.shape.as_slice().try_into().ok()
}

/// Takes what a model shows. Runs inside the library's call.
extern "C" fn collect(
    context: *mut c_void,
    site: *const c_char,
    values: *const f32,
    shape: *const u64,
    rank: u32,
) {
    if context.is_null() || site.is_null() || values.is_null() || shape.is_null() || rank > 16 {
        return;
    }
    // SAFETY: `context` is the list that `step` handed over, exclusively, for the time of the call.
    let taps = unsafe { &mut *context.cast::<Vec<Tap>>() };
    // SAFETY: the header says: a string, and `rank` lengths.
    let (site, shape) = unsafe { (CStr::from_ptr(site), std::slice::from_raw_parts(shape, rank as usize)) };
    let shape: Vec<usize> = shape.iter().map(|&n| n as usize).collect();
    let elements = shape.iter().try_fold(1usize, |n, &d| n.checked_mul(d)).filter(|&n| n < 1 << 40);
    let Some(elements) = elements else { return };
    // SAFETY: the header says: as many values as the shape has elements.
    let values = unsafe { std::slice::from_raw_parts(values, elements) }.to_vec();
    taps.push(Tap { site: site.to_string_lossy().into_owned(), shape, values });
}

/// Runs `f` on the output between the guards of `room`; afterwards the guards and the call's own inputs must be what they
/// were.
fn guarded(call: &OpCall<Cow<[f32]>>, room: &mut [f32], f: impl FnOnce(*mut f32) -> i32) -> Reply {
    let n = call.elements();
    let guard = f32::from_bits(GUARD_BITS);
    room[..GUARD].fill(guard);
    room[GUARD..GUARD + n].fill(UNWRITTEN);
    room[GUARD + n..].fill(guard);
    let own =
        |input: &Input<Cow<[f32]>>| matches!(input.values, Cow::Owned(_)).then(|| input.values.to_vec());
    let before: Vec<Option<Vec<f32>>> = call.inputs.iter().map(own).collect();
    let code = f(room[GUARD..].as_mut_ptr());
    let touched = |values: &[f32]| values.iter().filter(|v| v.to_bits() != GUARD_BITS).count();
    let (ahead, behind) = (touched(&room[..GUARD]), touched(&room[GUARD + n..]));
    if ahead + behind > 0 {
        return Reply::Wild(format!(
            "{} wrote outside its output of {n} values: {ahead} before it, {behind} behind it",
            call.op
        ));
    }
    let same = |a: &[f32], b: &[f32]| a.iter().zip(b).all(|(a, b)| a.to_bits() == b.to_bits());
    let changed = |(before, input): &(&Option<Vec<f32>>, &Input<Cow<[f32]>>)| {
        before.as_ref().is_some_and(|before| !same(before, &input.values))
    };
    if let Some((_, input)) = before.iter().zip(&call.inputs).find(changed) {
        return Reply::wrote_into(&call.op, &input.name);
    }
    match code {
        OK => Reply::Done,
        code => failed(code, &call.op),
    }
}

fn failed(code: i32, what: &str) -> Reply {
    match code {
        NOT_SUPPORTED => Reply::NotSupported,
        code => Reply::Failed(format!("{what} returned {code}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn call() -> OpCall<Cow<'static, [f32]>> {
        let x = Input { name: "x".into(), shape: vec![2], values: Cow::Owned(vec![1.0, 2.0]) };
        OpCall { op: "twice".into(), inputs: vec![x], numbers: vec![], output: vec![2] }
    }

    fn write(at: isize, room: &mut [f32]) -> Reply {
        // SAFETY: the places lie inside the guards of the buffer under test.
        guarded(&call(), room, |y| unsafe {
            y.offset(at).write(2.0);
            OK
        })
    }

    #[test]
    fn what_is_not_written_is_not_a_number() {
        // What a call before this one left there does not count.
        let mut room = [7.0; 2 + 2 * GUARD];
        assert_eq!(write(1, &mut room), Reply::Done);
        assert!(room[GUARD].is_nan());
        assert_eq!(room[GUARD + 1], 2.0);
    }

    #[test]
    fn writing_outside_is_seen() {
        let outside = |ahead: usize, behind: usize| {
            Reply::Wild(format!(
                "twice wrote outside its output of 2 values: {ahead} before it, {behind} behind it"
            ))
        };
        let mut room = [0.0; 2 + 2 * GUARD];
        assert_eq!(write(2, &mut room), outside(0, 1));
        assert_eq!(write(-1, &mut room), outside(1, 0));
    }

    #[test]
    fn writing_into_an_input_is_seen() {
        let call = call();
        let x = call.inputs[0].values.as_ptr().cast_mut();
        // SAFETY: the place is that of an input that nobody reads meanwhile; to write there is what is tested.
        let reply = guarded(&call, &mut [0.0; 2 + 2 * GUARD], |_| unsafe {
            x.write(3.0);
            OK
        });
        assert_eq!(reply, Reply::Wild("twice wrote into its input x".into()));
    }

    #[test]
    fn codes_of_the_header() {
        let room = &mut [0.0; 2 + 2 * GUARD];
        assert_eq!(guarded(&call(), room, |_| NOT_SUPPORTED), Reply::NotSupported);
        assert_eq!(guarded(&call(), room, |_| 2), Reply::Failed("twice returned 2".into()));
    }
}
