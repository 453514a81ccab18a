//! A peer in Python: a process that times one thing whenever it is asked.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

/// Why a peer gives no timings.
#[derive(Debug, thiserror::Error)]
pub enum PeerError {
    /// The interpreter, or a module that the peer is made of, is not there.
    #[error("peer not installed: {0}")]
    NotInstalled(String),
    /// It ended, or said something that is no number of seconds.
    #[error("the peer stopped: {0}")]
    Stopped(String),
}

/// A running peer. It answers `ready` or `missing MODULE` once, then a number of seconds to every line.
pub struct Peer {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Peer {
    /// Starts `script` under `python` on one thread and waits until its data stands ready.
    pub fn start(python: &str, script: &str, arguments: &[&str]) -> Result<Peer, PeerError> {
        let mut command = Command::new(python);
        command.arg("-c").arg(script).args(arguments).stdin(Stdio::piped()).stdout(Stdio::piped());
        for threads in ["OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"] {
            command.env(threads, "1");
        }
        let mut child =
            command.spawn().map_err(|error| PeerError::NotInstalled(format!("{python}: {error}")))?;
        let (Some(input), Some(output)) = (child.stdin.take(), child.stdout.take()) else {
            return Err(PeerError::Stopped("it has no pipes".into()));
        };
        let mut peer = Peer { child, input, output: BufReader::new(output) };
        match peer.line()?.split_once(' ') {
            Some(("missing", module)) => Err(PeerError::NotInstalled(format!(
                "{python} has no module {module}; pip install {module}, or name another Python with --python"
            ))),
            _ => Ok(peer),
        }
    }

    /// Asks for one run; its seconds.
    pub fn seconds(&mut self) -> Result<f64, PeerError> {
        writeln!(self.input, "run").map_err(|error| PeerError::Stopped(error.to_string()))?;
        let line = self.line()?;
        line.parse().map_err(|_| PeerError::Stopped(format!("it answered {line:?} instead of seconds")))
    }

    /// Asks for something else than a run; its answer.
    pub fn ask(&mut self, question: &str) -> Result<String, PeerError> {
        writeln!(self.input, "{question}").map_err(|error| PeerError::Stopped(error.to_string()))?;
        self.line()
    }

    fn line(&mut self) -> Result<String, PeerError> {
        let mut line = String::new();
        match self.output.read_line(&mut line) {
            Ok(0) => Err(PeerError::Stopped("it ended".into())),
            Ok(_) => Ok(line.trim().to_string()),
            Err(error) => Err(PeerError::Stopped(error.to_string())),
        }
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
