//! The process that a library runs in.

use super::library::Library;
use super::shared::Shared;
use super::wire::{Reply, Request, receive, send};
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
        let reply = match Request::from_bytes(&frame, shared.as_mut()) {
            Some(Request::Call(call)) => library.call(&call),
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
