//! The process that a library runs in.

use super::call::OpCall;
use super::library::Library;
use super::shared::Shared;
use super::wire::{GUARD, Placed, Reply, Request, receive, send};
use std::borrow::Cow;
use std::fs::File;
use std::path::Path;

/// Loads a library and answers requests from standard input until it is closed. The exit code of the process.
///
/// Values go through the file `shared` where there is one.
pub fn serve(path: &Path, shared: Option<&Path>) -> u8 {
    let Ok(mut out) = claim_stdout() else { return 70 };
    let Ok(mut shared) = shared.map(Shared::open).transpose() else { return 70 };
    let mut library = match Library::open(path) {
        Ok(library) => library,
        Err(reason) => {
            let _ = send(&mut out, &Reply::Refused(reason).to_bytes(None));
            return 2;
        }
    };
    if send(&mut out, &Reply::Ready(library.info()).to_bytes(None)).is_err() {
        return 70;
    }
    let mut requests = std::io::stdin().lock();
    while let Ok(Some(frame)) = receive(&mut requests) {
        if let (Some((call, Some(room))), Some(shared)) = (Request::placed(&frame), &mut shared) {
            if send(&mut out, &in_place(&library, call, room, shared)).is_err() {
                return 70;
            }
            continue;
        }
        let reply = match Request::from_bytes(&frame, shared.as_mut()) {
            Some(Request::Call(call)) => by_value(&library, call),
            Some(Request::Load(package)) => library.load(&package),
            Some(Request::Reset) => library.reset(),
            Some(Request::Step { ids, vocab }) => library.step(&ids, vocab),
            Some(Request::State) => library.state(),
            Some(Request::SetState(tap)) => library.set_state(&tap),
            None => Reply::Failed("a request of another version of this program".into()),
        };
        if send(&mut out, &reply.to_bytes(shared.as_mut())).is_err() {
            return 70;
        }
    }
    0
}

/// Runs a call on values that stay in the shared memory, as its result does; the frame of the reply.
fn in_place(library: &Library, call: OpCall<Placed>, room: u64, shared: &mut Shared) -> Vec<u8> {
    let elements = call.elements();
    let length = elements.checked_add(2 * GUARD).and_then(|n| n.checked_mul(4));
    let reply = length.and_then(|length| shared.split(room, length)).and_then(|(inputs, output)| {
        let lend = |placed: Placed| match placed {
            Placed::Here(values) => Some(Cow::Owned(values)),
            Placed::At(place, elements) => {
                let start = usize::try_from(place).ok()?;
                let bytes = inputs.get(start..start.checked_add(elements.checked_mul(4)?)?)?;
                bytemuck::try_cast_slice(bytes).ok().map(Cow::Borrowed)
            }
        };
        let call = call.with_values(lend)?;
        Some(library.call(&call, bytemuck::try_cast_slice_mut(output).ok()?))
    });
    match reply {
        Some(Reply::Done) => Reply::values_at(room + 4 * GUARD as u64, elements),
        Some(other) => other.to_bytes(None),
        None => Reply::Failed("the places of its values are not in the shared memory".into()).to_bytes(None),
    }
}

/// Runs a call on values of its own.
fn by_value(library: &Library, call: OpCall) -> Reply {
    let elements = call.elements();
    let Some(call) = call.with_values(|values| Some(Cow::Owned(values))) else { return Reply::NotSupported };
    let mut room = vec![0.0; elements + 2 * GUARD];
    match library.call(&call, &mut room) {
        Reply::Done => Reply::Values(room[GUARD..GUARD + elements].to_vec()),
        other => other,
    }
}

/// Standard output for replies alone: what the library prints goes to standard error.
#[cfg(unix)]
fn claim_stdout() -> std::io::Result<File> {
    use std::os::fd::FromRawFd;
    // SAFETY: both calls take and give descriptors of this process by number.
    let (kept, moved) =
        unsafe { (libc::dup(libc::STDOUT_FILENO), libc::dup2(libc::STDERR_FILENO, libc::STDOUT_FILENO)) };
    if kept < 0 || moved < 0 {
        return Err(std::io::Error::last_os_error());
    }
    // SAFETY: the descriptor was made above and nobody else has it.
    Ok(unsafe { File::from_raw_fd(kept) })
}

/// Other systems have no such call here: libraries are not served there.
#[cfg(not(unix))]
fn claim_stdout() -> std::io::Result<File> {
    Err(std::io::ErrorKind::Unsupported.into())
}
