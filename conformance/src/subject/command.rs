//! A command as a subject: one case directory in, its outputs back.
//!
//! For every op the program is run with a directory as its last argument. The directory holds `case.json`
//! and `inputs.safetensors`; the program writes `outputs.safetensors` with a tensor `y`, or `y.npy`, or
//! `y.f32` (raw little-endian f32) into it and ends with exit code 0. Exit code 3 says that it does not
//! compute this op: it is not asked for it again. `device/examples` has complete programs.

use super::ops::{Answer, Kernel};
use device::plugin::OpCall;
use golden::import::arrays::Arrays;
use serde_json::json;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// The exit code by which a program says that it does not compute an op.
pub const NOT_SUPPORTED: i32 = 3;

/// How many lines of standard error are repeated.
const LAST_LINES: usize = 3;

/// A command as named on the command line.
#[derive(Clone, Debug, PartialEq)]
pub struct CommandSpec {
    /// The program and its arguments, as given.
    pub line: String,
    /// How long one call may take.
    pub timeout: Duration,
}

/// How long a call may take where nothing is said.
pub const TIMEOUT: Duration = Duration::from_secs(60);

impl CommandSpec {
    /// The program and its arguments: words between blanks; quotes hold words together.
    pub fn words(&self) -> Vec<String> {
        let (mut words, mut word, mut quote) = (Vec::new(), None::<String>, None);
        for c in self.line.chars() {
            match quote {
                Some(q) if c == q => quote = None,
                None if c == '"' || c == '\'' => {
                    quote = Some(c);
                    word.get_or_insert_default();
                }
                None if c.is_whitespace() => words.extend(word.take()),
                _ => word.get_or_insert_default().push(c),
            }
        }
        words.extend(word);
        words
    }
}

/// A program that computes ops.
pub struct CommandKernel {
    words: Vec<String>,
    timeout: Duration,
    cases: TempDir,
    count: usize,
    said: Option<String>,
}

impl CommandKernel {
    /// A program, not yet run.
    pub fn new(spec: &CommandSpec) -> io::Result<CommandKernel> {
        let cases = TempDir::with_prefix("karat-cases-")?;
        Ok(CommandKernel { words: spec.words(), timeout: spec.timeout, cases, count: 0, said: None })
    }

    fn run(&mut self, tap: &str, call: &OpCall) -> io::Result<Result<Answer, String>> {
        self.count += 1;
        let dir = self.cases.path().join(format!("{:05}-{}", self.count, call.op));
        write_case(&dir, tap, call)?;
        let [program, arguments @ ..] = &self.words[..] else {
            return Ok(Err("the command is empty".into()));
        };
        let (out, err) = (dir.join("stdout.txt"), dir.join("stderr.txt"));
        let mut command = Command::new(program);
        command.args(arguments).arg(&dir).stdin(Stdio::null());
        command.stdout(File::create(&out)?).stderr(File::create(&err)?);
        #[cfg(unix)]
        std::os::unix::process::CommandExt::process_group(&mut command, 0);
        let mut child = match command.spawn() {
            Ok(child) => child,
            Err(error) => return Ok(Err(format!("{program} cannot be run: {error}"))),
        };
        let status = wait(&mut child, self.timeout)?;
        let said = last_lines(&err);
        let what = format!("{} at {tap}", call.op);
        let answer = match status {
            None => Err(format!("{what}: no answer within {} s{said}", self.timeout.as_secs_f64())),
            Some(status) if status.code() == Some(NOT_SUPPORTED) => Ok(Answer::NotSupported),
            Some(status) if !status.success() => Err(format!("{what}: {program} ended with {status}{said}")),
            Some(_) => Ok(outputs(&dir, call)),
        };
        if self.said.is_none() && !said.is_empty() && answer.is_ok() {
            self.said = Some(format!("{what} wrote to standard error{said}"));
        }
        fs::remove_dir_all(&dir)?;
        Ok(answer)
    }
}

impl Kernel for CommandKernel {
    fn may_have(&self, _: &str) -> bool {
        true
    }

    fn call(&mut self, tap: &str, call: &OpCall) -> Result<Answer, String> {
        self.run(tap, call).unwrap_or_else(|error| Err(format!("{} at {tap}: its case: {error}", call.op)))
    }

    fn notes(&mut self) -> Vec<String> {
        self.said.take().into_iter().collect()
    }
}

/// Waits for the end of a process; nothing where it had to be ended, with all that it started.
fn wait(child: &mut Child, limit: Duration) -> io::Result<Option<ExitStatus>> {
    let start = Instant::now();
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(Some(status));
        }
        if start.elapsed() >= limit {
            let _ = Command::new("kill").args(["-KILL", "--", &format!("-{}", child.id())]).status();
            let _ = child.kill();
            child.wait()?;
            return Ok(None);
        }
        std::thread::sleep(Duration::from_micros(500));
    }
}

/// The last lines of a file of text, to stand behind a sentence.
fn last_lines(file: &Path) -> String {
    let text = fs::read(file).map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).unwrap_or_default();
    let lines: Vec<&str> = text.lines().filter(|line| !line.trim().is_empty()).collect();
    if lines.is_empty() {
        return String::new();
    }
    format!(": {}", lines[lines.len().saturating_sub(LAST_LINES)..].join(" | "))
}

/// Writes `case.json` and `inputs.safetensors`.
pub fn write_case(dir: &Path, tap: &str, call: &OpCall) -> io::Result<()> {
    fs::create_dir_all(dir)?;
    let shapes: serde_json::Map<String, serde_json::Value> =
        call.inputs.iter().map(|input| (input.name.clone(), json!(input.shape))).collect();
    let numbers: serde_json::Map<String, serde_json::Value> =
        call.numbers.iter().map(|(name, value)| (name.clone(), json!(value))).collect();
    let case = json!({
        "schema": "karat/case/1", "op": call.op, "tap": tap, "inputs": shapes, "numbers": numbers,
        "output": {"name": "y", "shape": call.output},
    });
    fs::write(dir.join("case.json"), format!("{case:#}\n"))?;
    let mut header = serde_json::Map::new();
    let mut end = 0;
    for input in &call.inputs {
        let start = end;
        end += 4 * input.values.len();
        let entry = json!({"dtype": "F32", "shape": input.shape, "data_offsets": [start, end]});
        header.insert(input.name.clone(), entry);
    }
    let mut header = serde_json::Value::Object(header).to_string();
    // Spaces are allowed behind the header, and let the data start where an f32 may.
    header += &" ".repeat(header.len().next_multiple_of(8) - header.len());
    let mut file = io::BufWriter::new(File::create(dir.join("inputs.safetensors"))?);
    file.write_all(&(header.len() as u64).to_le_bytes())?;
    file.write_all(header.as_bytes())?;
    for value in call.inputs.iter().flat_map(|input| &input.values) {
        file.write_all(&value.to_le_bytes())?;
    }
    file.flush()
}

/// Reads what a program wrote.
pub(crate) fn outputs(dir: &Path, call: &OpCall) -> Answer {
    let found: Option<PathBuf> = ["outputs.safetensors", "y.npy", "y.f32"]
        .iter()
        .map(|name| dir.join(name))
        .find(|file| file.is_file());
    let Some(file) = found else {
        return Answer::Unusable("it wrote neither outputs.safetensors nor y.npy nor y.f32".into());
    };
    // The place of the case is of no use to a reader: it is gone by then.
    let reason = |error: golden::DumpError| error.to_string().replace(&format!("{}/", dir.display()), "");
    match Arrays::open(&file).and_then(|mut arrays| arrays.read("y")) {
        Err(error) => Answer::Unusable(reason(error)),
        Ok(y) if y.shape != call.output && y.shape != [call.elements()] => {
            Answer::Unusable(format!("its output has shape {:?}, expected {:?}", y.shape, call.output))
        }
        Ok(y) => Answer::Values(y.values),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quotes_hold_words_together() {
        let words = |line: &str| CommandSpec { line: line.into(), timeout: TIMEOUT }.words();
        assert_eq!(words("python3 my.py --op  x"), ["python3", "my.py", "--op", "x"]);
        assert_eq!(words("'my program' \"a b\"c ''"), ["my program", "a bc", ""]);
        assert!(words("  ").is_empty());
    }
}
