//! The side of the judge: starts the process of a library and waits for its answers, but not for ever.

use super::call::OpCall;
use super::shared::Shared;
use super::wire::{Info, Reply, Request, Tap, overwritten, receive, send};
use std::io::Read;
use std::path::PathBuf;
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

/// How many of the last bytes of standard error are kept.
const LAST_WORDS: usize = 4096;

/// Why a library gave no answer.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum PluginError {
    /// It is no library that this build can use.
    #[error("{0}")]
    Refused(String),
    /// Its process ended.
    #[error("{during}: the library {how}{said}")]
    Crashed {
        /// What it was asked.
        during: String,
        /// The signal or the exit code.
        how: String,
        /// What it said on standard error.
        said: String,
    },
    /// It did not answer in time.
    #[error("{during}: no answer within {seconds} s")]
    TimedOut {
        /// What it was asked.
        during: String,
        /// The limit.
        seconds: f64,
    },
}

/// A library in a process of its own.
pub struct Plugin {
    child: Child,
    requests: Option<ChildStdin>,
    replies: Receiver<Vec<u8>>,
    said: Arc<Mutex<Vec<u8>>>,
    /// Reads what the library prints until it closes its end.
    listening: Option<JoinHandle<()>>,
    timeout: Duration,
    info: Info,
    /// Where values pass; nothing where the machine has no room for it: they go through the pipes then.
    shared: Option<Shared>,
}

impl Plugin {
    /// Starts `server`, a command that ends up in [`super::serve`], and waits until the library is loaded.
    /// It is given `--shared FILE` as its last arguments, for values to pass through.
    pub fn start(mut server: Command, timeout: Duration) -> Result<Plugin, PluginError> {
        let refused =
            |error: std::io::Error| PluginError::Refused(format!("the process of the library: {error}"));
        server.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let (shared, file) =
            Shared::create().map_or((None, None), |(shared, file)| (Some(shared), Some(file)));
        if let Some(file) = &file {
            server.arg("--shared").arg(file);
        }
        // Both sides have it open once the library is loaded; then nobody else needs its name.
        let _unnamed = file.map(Unnamed);
        let mut child = server.spawn().map_err(refused)?;
        let (requests, out, err) = (child.stdin.take(), child.stdout.take(), child.stderr.take());
        let (to, replies) = channel();
        let said = Arc::new(Mutex::new(Vec::new()));
        if let Some(mut out) = out {
            std::thread::spawn(move || {
                while let Ok(Some(frame)) = receive(&mut out) {
                    if to.send(frame).is_err() {
                        return;
                    }
                }
            });
        }
        let listening = err.map(|mut err| {
            let said = Arc::clone(&said);
            std::thread::spawn(move || {
                let mut piece = [0; 1024];
                while let Ok(n @ 1..) = err.read(&mut piece) {
                    let Ok(mut said) = said.lock() else { return };
                    said.extend_from_slice(&piece[..n]);
                    let surplus = said.len().saturating_sub(LAST_WORDS);
                    said.drain(..surplus);
                }
            })
        });
        let info = Info { name: String::new(), contract: None, ops: vec![], model: false, state: false };
        let mut plugin = Plugin { child, requests, replies, said, listening, timeout, info, shared };
        match plugin.reply("loading")? {
            Reply::Ready(info) => plugin.info = info,
            Reply::Refused(reason) => return Err(PluginError::Refused(reason)),
            other => {
                return Err(PluginError::Refused(format!("the process of the library began with {other:?}")));
            }
        }
        Ok(plugin)
    }

    /// What the library says about itself.
    pub fn info(&self) -> &Info {
        &self.info
    }

    /// What it printed on standard error, the last of it.
    pub fn said(&self) -> String {
        let said = self.said.lock().map(|said| said.clone()).unwrap_or_default();
        String::from_utf8_lossy(&said).trim().to_string()
    }

    /// Runs an op; `during` names it in errors.
    pub fn call(&mut self, call: &OpCall, during: &str) -> Result<Reply, PluginError> {
        let frame = Request::call(call, self.shared.as_mut());
        let reply = self.send(&frame, during)?;
        // The library saw these inputs where they were put, not a copy.
        let shared = self.shared.as_mut().filter(|_| !matches!(reply, Reply::Wild(_)));
        Ok(match shared.and_then(|shared| overwritten(call, &frame, shared)) {
            Some(input) => Reply::wrote_into(&call.op, input),
            None => reply,
        })
    }

    /// Loads a model.
    pub fn load(&mut self, package: &str) -> Result<Reply, PluginError> {
        self.ask(&Request::Load(package.to_string()), "load")
    }

    /// Forgets all tokens.
    pub fn reset(&mut self) -> Result<Reply, PluginError> {
        self.ask(&Request::Reset, "reset")
    }

    /// Feeds tokens to the model.
    pub fn step(&mut self, ids: &[u32], vocab: usize, during: &str) -> Result<Reply, PluginError> {
        self.ask(&Request::Step { ids: ids.to_vec(), vocab }, during)
    }

    /// Shows the state of the model, one tensor a tap.
    pub fn state(&mut self) -> Result<Reply, PluginError> {
        self.ask(&Request::State, "state_get")
    }

    /// Puts one tensor of a state into the model.
    pub fn set_state(&mut self, tap: &Tap) -> Result<Reply, PluginError> {
        self.ask(&Request::SetState(tap.clone()), "state_set")
    }

    fn ask(&mut self, request: &Request, during: &str) -> Result<Reply, PluginError> {
        let frame = request.to_bytes(self.shared.as_mut());
        self.send(&frame, during)
    }

    fn send(&mut self, frame: &[u8], during: &str) -> Result<Reply, PluginError> {
        let sent = self.requests.as_mut().is_some_and(|to| send(to, frame).is_ok());
        if !sent {
            return Err(self.ended(during));
        }
        self.reply(during)
    }

    fn reply(&mut self, during: &str) -> Result<Reply, PluginError> {
        match self.replies.recv_timeout(self.timeout) {
            Ok(frame) => match Reply::from_bytes(&frame, self.shared.as_mut()) {
                Some(reply) => Ok(reply),
                None => Err(self.ended(during)),
            },
            Err(RecvTimeoutError::Disconnected) => Err(self.ended(during)),
            Err(RecvTimeoutError::Timeout) => {
                self.stop();
                Err(PluginError::TimedOut { during: during.to_string(), seconds: self.timeout.as_secs_f64() })
            }
        }
    }

    /// How the process ended; it is ended where it has not.
    fn ended(&mut self, during: &str) -> PluginError {
        self.requests = None;
        // A process that closed its pipes is about to end.
        let mut status = None;
        for _ in 0..100 {
            status = self.child.try_wait().ok().flatten();
            if status.is_some() {
                break;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        if status.is_none() {
            self.stop();
        }
        // Its last words may still be on their way; a grandchild that holds the pipe is not waited for.
        for _ in 0..100 {
            if self.listening.as_ref().is_none_or(JoinHandle::is_finished) {
                break;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        let how = status.map_or_else(|| "closed its pipes".to_string(), |status| how(&status));
        let said = self.said();
        let last = said.lines().last().map_or_else(String::new, |line| format!(": {line}"));
        PluginError::Crashed { during: during.to_string(), how, said: last }
    }

    fn stop(&mut self) {
        self.requests = None;
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Takes a file's name away when it is dropped.
struct Unnamed(PathBuf);

impl Drop for Unnamed {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

impl Drop for Plugin {
    fn drop(&mut self) {
        // Closing its input ends a process that is well; one that is not is ended.
        self.requests = None;
        for _ in 0..20 {
            if matches!(self.child.try_wait(), Ok(Some(_)) | Err(_)) {
                return;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        self.stop();
    }
}

/// How a process ended, in words.
fn how(status: &ExitStatus) -> String {
    #[cfg(unix)]
    {
        use std::os::unix::process::ExitStatusExt;
        if let Some(signal) = status.signal() {
            let name = match signal {
                libc::SIGSEGV => " (segmentation fault)",
                libc::SIGABRT => " (abort)",
                libc::SIGFPE => " (arithmetic)",
                libc::SIGILL => " (illegal instruction)",
                libc::SIGBUS => " (bus error)",
                libc::SIGKILL => " (killed)",
                _ => "",
            };
            return format!("was stopped by signal {signal}{name}");
        }
    }
    status.code().map_or_else(|| "ended".to_string(), |code| format!("ended with exit code {code}"))
}
