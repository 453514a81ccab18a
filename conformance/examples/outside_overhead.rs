//! What it costs to keep a kernel under test in a process of its own:
//!
//! ```text
//! cargo run --release -p karat --example outside_overhead
//! ```
//!
//! prints the time of a call of a library through its child process, split: copying the values into shared memory and the
//! result out of it; the library's own work; marking the output and comparing the inputs, so that what is left unwritten
//! and what is written into an input is seen; and the rest, which is the way to the other process and back (under 50 us).
//! The first three are measured in this process on memory of the same sizes. Then the time of a case of a program beyond
//! starting that program (under 5 ms). It needs `cc`.

use conformance::subject::{CommandKernel, CommandSpec, Kernel};
use device::plugin::{Input, OpCall, Plugin, Reply};
use std::hint::black_box;
use std::path::Path;
use std::process::{Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

const LIBRARY: &str = r#"
#include "karat.h"
#include <string.h>
static int32_t residual(const float *x, const float *branch, float *y, uint64_t n, float multiplier) {
    memcpy(y, x, n * sizeof(float));
    return KARAT_OK;
}
static const karat_plugin table = {.abi = KARAT_ABI, .size = sizeof table, .residual = residual};
const karat_plugin *karat_plugin_get(uint32_t abi) { return &table; }
"#;

const TIMEOUT: Duration = Duration::from_secs(60);

type Fallible<T> = Result<T, Box<dyn std::error::Error>>;

fn main() -> ExitCode {
    // This program is its own child: the process of the library, and the program of the cases.
    let arguments: Vec<String> = std::env::args().collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let done = match words[1..] {
        ["serve", library, "--shared", file] => {
            return ExitCode::from(device::plugin::serve(Path::new(library), Some(Path::new(file))));
        }
        ["serve", library] => return ExitCode::from(device::plugin::serve(Path::new(library), None)),
        ["program", case] => std::fs::write(Path::new(case).join("y.f32"), [0; 64]).map_err(Into::into),
        _ => library().and_then(|()| program()),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

fn call(values: usize) -> OpCall {
    let input = |name: &str| Input { name: name.into(), shape: vec![values], values: vec![1.0; values] };
    OpCall {
        op: "residual".into(),
        inputs: vec![input("x"), input("branch")],
        numbers: vec![("multiplier".into(), 1.0)],
        output: vec![values],
    }
}

/// The middle one of the times that `f` takes, in seconds.
fn median(times: usize, mut f: impl FnMut() -> Fallible<()>) -> Fallible<f64> {
    let mut all = Vec::with_capacity(times);
    for _ in 0..times {
        let started = Instant::now();
        f()?;
        all.push(started.elapsed().as_secs_f64());
    }
    all.sort_by(f64::total_cmp);
    Ok(all[times / 2])
}

fn library() -> Fallible<()> {
    let dir = tempfile::tempdir()?;
    let (source, library) = (dir.path().join("copy.c"), dir.path().join("copy.so"));
    std::fs::write(&source, LIBRARY)?;
    let include = Path::new(env!("CARGO_MANIFEST_DIR")).join("../device/include");
    let mut cc = Command::new("cc");
    cc.args(["-O2", "-shared", "-fPIC", "-I"]).arg(include).arg(&source).arg("-o").arg(&library);
    if !cc.status()?.success() {
        return Err("cc did not build the library".into());
    }
    let mut server = Command::new(std::env::current_exe()?);
    server.arg("serve").arg(&library);
    let mut plugin = Plugin::start(server, TIMEOUT)?;
    for (values, times) in [(16, 4000), (1 << 20, 60)] {
        let call = call(values);
        let once = median(times, || match plugin.call(&call, "residual")? {
            Reply::Values(_) => Ok(()),
            other => Err(format!("answered {other:?}").into()),
        })?;
        let (input, mut place) = (vec![1u8; 8 * values], vec![0u8; 8 * values]);
        let (own, mut room) = (vec![1u8; 4 * values], vec![0u8; 4 * values]);
        let copying = median(times, || {
            place.copy_from_slice(&input);
            drop(black_box(room.clone()));
            Ok(())
        })?;
        let working = median(times, || {
            room.copy_from_slice(black_box(&own));
            Ok(())
        })?;
        let watching = median(times, || {
            room.fill(black_box(0x7f));
            if black_box(&place) == &input { Ok(()) } else { Err("the copy is none".into()) }
        })?;
        let rest = once - copying - working - watching;
        println!(
            "library: {:.1} us a call of {values} values: copying {:.1}, the library itself {:.1}, marking and comparing {:.1}, \
             the rest {:.1} (under 50)",
            once * 1e6,
            copying * 1e6,
            working * 1e6,
            watching * 1e6,
            rest.max(0.0) * 1e6
        );
    }
    Ok(())
}

fn program() -> Fallible<()> {
    let me = std::env::current_exe()?;
    let line = format!("'{}' program", me.display());
    let mut kernel = CommandKernel::new(&CommandSpec { line, timeout: TIMEOUT })?;
    let (call, dir) = (call(16), tempfile::tempdir()?);
    let case = median(200, || kernel.call("residual", &call).map(drop).map_err(Into::into))?;
    let alone = median(200, || {
        let mut program = Command::new(&me);
        let status = program.arg("program").arg(dir.path()).stdin(Stdio::null()).status()?;
        if status.success() { Ok(()) } else { Err("the program failed".into()) }
    })?;
    println!(
        "program: {:.2} ms a case, the process itself {:.2} ms: {:.2} ms beyond it (under 5)",
        case * 1e3,
        alone * 1e3,
        (case - alone).max(0.0) * 1e3
    );
    Ok(())
}
