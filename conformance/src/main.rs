//! `karat`: judges an inference kernel against the reference, layer by layer.

use std::process::ExitCode;

fn main() -> ExitCode {
    conformance::cli::main()
}
