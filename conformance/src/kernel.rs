//! A kernel of this process, judged in the place of a model's ops: for a Rust test.

use crate::cli::CliError;
use crate::cli::load::{load, seeded_prompt};
use crate::contract::Contract;
use crate::subject::{Answer, Kernel, SubjectSpec};
use crate::verify::{Options, PackageResult, verify_kernel};
use device::plugin::OpCall;

/// Judges `kernel` at every place where the prefill of a package uses `op`; the report has the worst verdict,
/// every site, the first failure and what the kernel computes instead.
///
/// `package` is a path or a bundled name, `op` one of those of [`crate::subject::ops::plain_call`] or
/// `attention`, `contract` the number formats that the kernel declares. The kernel gets inputs and numbers by
/// name and returns as many values as `call.output` has.
pub fn check(
    package: &str,
    op: &str,
    contract: &str,
    kernel: impl FnMut(&OpCall) -> Vec<f32>,
) -> Result<PackageResult, CliError> {
    let contract = Contract::named(contract).ok_or_else(|| {
        CliError::Usage(format!("no contract is called {contract}; there are {}", Contract::NAMES.join(", ")))
    })?;
    let loaded = load(package, None, &[])?;
    let prompt = match &loaded.golden {
        Some(golden) => golden.manifest().prompt.clone(),
        None => seeded_prompt(&loaded.config),
    };
    let options =
        Options { sites: Some("prefill.*"), steps: 0, ..Options::new(&SubjectSpec::Reference, &contract) };
    let repro = format!("conformance::kernel::check({package:?}, {op:?}, {:?}, ...)", contract.name);
    Ok(verify_kernel(&loaded, &prompt, &options, Box::new(OneOp { op, kernel }), repro)?)
}

/// A function that computes one op.
struct OneOp<'a, F> {
    op: &'a str,
    kernel: F,
}

impl<F: FnMut(&OpCall) -> Vec<f32>> Kernel for OneOp<'_, F> {
    fn may_have(&self, op: &str) -> bool {
        op == self.op
    }

    fn call(&mut self, _: &str, call: &OpCall) -> Result<Answer, String> {
        Ok(Answer::Values((self.kernel)(call)))
    }
}
