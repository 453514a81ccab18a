//! `karat check`.

use super::load::{contract, load};
use super::{CliError, Format, Outcome, quoted, vectors};
use crate::cases::{self, Case, Suite};
use crate::check::report::Report;
use crate::check::{NpuOps, OpSubject, Options, check};
use crate::contract::Contract;
use crate::emulate::Emulate;
use crate::judge::Verdict;
use crate::known::{Day, Known};
use crate::mutants::{MutantOps, Selection, nearest};
use crate::subject::{CommandKernel, LibraryKernel, OneOp, SubjectError, SubjectSpec};
use clap::ValueEnum;
use std::path::PathBuf;

/// Arguments of `check`.
#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    subject: OpSubjectArgs,
    /// Only cases of this op.
    #[arg(long, value_name = "NAME")]
    op: Option<String>,
    /// Only one of the two regimes.
    #[arg(long, value_enum)]
    suite: Option<SuiteName>,
    /// The matrix products of a package's shapes instead of the built-in cases.
    #[arg(long, value_name = "PACKAGE")]
    shapes_of: Option<String>,
    /// One case: NAME, or NAME:SIZE=N,... with other sizes.
    #[arg(long, value_name = "STRING")]
    case: Option<String>,
    /// Failures that are known, with reason and last day (JSON).
    #[arg(long, value_name = "FILE")]
    known_failures: Option<std::path::PathBuf>,
    /// The seed of the inputs.
    #[arg(long, value_name = "N", default_value_t = 7)]
    seed: u64,
    /// Write the cases with expected values, variances and bounds to this new directory, for a bench.
    #[arg(long, value_name = "DIR", conflicts_with = "from")]
    export: Option<PathBuf>,
    /// Judge the results that were brought back in this directory of an export.
    #[arg(long, value_name = "DIR")]
    from: Option<PathBuf>,
}

/// The arguments that name a subject of single ops.
#[derive(clap::Args)]
pub struct OpSubjectArgs {
    /// What is under test: npu, npu:f32, ..., reference, emulate:CONTRACT, cmd:"PROGRAM ARGS", lib:FILE.
    #[arg(long, value_name = "SPEC", default_value = "npu")]
    subject: String,
    /// The number formats to judge it under, instead of those that it declares.
    #[arg(long, value_name = "NAME|FILE")]
    contract: Option<String>,
    /// A subject that is wrong in the named way: ID[:VARIANT].
    #[arg(long, value_name = "MUTANT")]
    mutate: Option<String>,
}

/// A subject, its contract, and the mutant that takes its place.
pub struct Chosen {
    text: String,
    spec: SubjectSpec,
    emulated: bool,
    /// The contract that it is judged under.
    pub contract: Contract,
    /// The mutant.
    pub selection: Option<Selection>,
}

impl OpSubjectArgs {
    /// Reads the arguments.
    pub fn choose(&self) -> Result<Chosen, CliError> {
        let emulated = self.subject.strip_prefix("emulate:");
        let spec: SubjectSpec =
            if emulated.is_some() { SubjectSpec::Reference } else { self.subject.parse()? };
        let declared = emulated.unwrap_or(spec.contract_name());
        let contract = contract(self.contract.as_deref().unwrap_or(declared))?;
        let selection = self.mutate.as_deref().map(Selection::parse).transpose()?;
        Ok(Chosen { text: self.subject.clone(), spec, emulated: emulated.is_some(), contract, selection })
    }

    /// The arguments that a failure's command line repeats.
    fn again(&self) -> String {
        let mut line = String::new();
        let mut push = |flag: &str, value: &str| {
            line.push_str(&format!(" {flag} {}", quoted(value)));
        };
        if self.subject != "npu" {
            push("--subject", &self.subject);
        }
        self.contract.iter().for_each(|contract| push("--contract", contract));
        self.mutate.iter().for_each(|mutant| push("--mutate", mutant));
        line
    }
}

impl Chosen {
    /// The subject in reports.
    pub fn name(&self) -> String {
        match &self.selection {
            Some(selection) => format!("{} under {}", selection.mutant.name(), self.contract.name),
            None => self.text.clone(),
        }
    }
}

/// The regimes by name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum SuiteName {
    /// Whole numbers, tolerance zero.
    Structure,
    /// Realistic data, judged by number formats.
    Rounding,
}

/// Runs the verb.
pub fn run(args: &Args, format: Format) -> Result<Outcome, CliError> {
    if let Some(dir) = &args.from {
        return vectors::judge(dir, args.op.as_deref(), args.case.as_deref(), format);
    }
    let chosen = args.subject.choose()?;
    let known = args.known_failures.as_deref().map(|file| Known::open(file, Day::today())).transpose()?;
    let cases = selected(args)?;
    if let Some(dir) = &args.export {
        return vectors::export(dir, &cases, &chosen.contract, args.seed);
    }
    if let Some(selection) = &chosen.selection {
        let elsewhere = match (selection.edit, selection.in_loop) {
            (Some(_), _) => Some("the package: karat verify PACKAGE"),
            (_, Some(_)) => Some("the speculative loop: karat verify PAIR"),
            _ => None,
        };
        if let Some(place) = elsewhere {
            let mutant = selection.mutant.name();
            return Err(CliError::Usage(format!("{mutant} is made in {place} --mutate {mutant}")));
        }
    }
    let mut subject = subject(&chosen)?;
    let options = Options { contract: &chosen.contract, seed: args.seed, arguments: args.subject.again() };
    let results: Vec<_> = cases.iter().map(|case| check(case, &mut subject, &options)).collect();
    let mut report = Report::new(chosen.name(), chosen.contract.name.clone(), results);
    if let Some(known) = &known {
        report = report.excuse(known);
    }
    if let (Some(selection), OpSubject::Mutant(wrong)) = (&chosen.selection, &subject) {
        if wrong.applied.is_empty() {
            let (mutant, needs) = (selection.mutant.name(), selection.mutant.needs);
            return Err(CliError::Usage(format!("{mutant} applies to no case: it needs {needs}")));
        }
        if report.verdict < Verdict::Failed && report.code() == 0 && known.is_none() {
            report.verdict = Verdict::Mistrusted;
            report.reason = Some("the mutant changes nothing that these cases could see".into());
        }
    }
    let text = match format {
        Format::Json => report.json(),
        _ => report.text(),
    };
    Ok(Outcome { report: text, code: report.code() })
}

/// The chosen subject, ready.
pub fn subject(chosen: &Chosen) -> Result<OpSubject<'_>, CliError> {
    if let Some(selection) = &chosen.selection {
        return Ok(OpSubject::Mutant(MutantOps::new(&chosen.contract, selection)));
    }
    if chosen.emulated {
        return Ok(OpSubject::Emulated(Emulate::new(&chosen.contract)));
    }
    let usage = |reason: String| CliError::Usage(reason);
    Ok(match &chosen.spec {
        SubjectSpec::Reference => OpSubject::Reference(reference::Plain::default()),
        SubjectSpec::Npu(engine, _) => OpSubject::Npu(
            NpuOps::new(*engine)
                .ok_or_else(|| usage("no kernel of the NPU path runs on this machine".into()))?,
        ),
        SubjectSpec::Command(command) => {
            let kernel = CommandKernel::new(command).map_err(|error| CliError::Io("cases".into(), error))?;
            OpSubject::Outside(OneOp::new(Box::new(kernel)))
        }
        SubjectSpec::Library(library) => {
            let plugin = library.start().map_err(|error: SubjectError| usage(error.to_string()))?;
            OpSubject::Outside(OneOp::new(Box::new(LibraryKernel(plugin))))
        }
        SubjectSpec::Dump(_) => return Err(usage("a dump holds no ops to check; see karat verify".into())),
    })
}

/// The cases that the arguments ask for.
fn selected(args: &Args) -> Result<Vec<Case>, CliError> {
    let mut cases = cases::all();
    if let Some(package) = &args.shapes_of {
        let mut loaded = load(package, None, &[])?;
        let mut shapes: Vec<(usize, usize)> =
            loaded.weights.matrices().iter().map(|matrix| (matrix.inner(), matrix.out())).collect();
        shapes.sort_unstable();
        shapes.dedup();
        cases = shapes.into_iter().flat_map(|(inner, out)| cases::linear_of_shape(inner, out)).collect();
    }
    let ops: Vec<&str> = cases.iter().map(Case::op).collect();
    if let Some(op) = &args.op {
        if !ops.contains(&&**op) {
            return Err(CliError::Usage(format!("no case is of op {op}; nearest: {}", nearest(op, &ops))));
        }
        cases.retain(|case| case.op() == op);
    }
    if let Some(wanted) = args.suite {
        let wanted = if wanted == SuiteName::Structure { Suite::Structure } else { Suite::Rounding };
        cases.retain(|case| case.suite == wanted);
    }
    let Some(text) = &args.case else { return Ok(cases) };
    let (name, sizes) = text.split_once(':').map_or((&**text, None), |(name, sizes)| (name, Some(sizes)));
    // The cases of a package's shapes can be named too: that is how their failures are shown again.
    cases.extend(cases::linear_of_shape(64, 64));
    let names: Vec<&str> = cases.iter().map(|case| case.name).collect();
    let Some(mut case) = cases.iter().find(|case| case.name == name).cloned() else {
        return Err(CliError::Usage(format!("no case is called {name}; nearest: {}", nearest(name, &names))));
    };
    for size in sizes.into_iter().flat_map(|sizes| sizes.split(',')) {
        let known: Vec<&str> = case.dims.0.iter().map(|(name, _)| *name).collect();
        let expected =
            || CliError::Usage(format!("size {size:?} of {name}: expected {}=N", known.join("=N, ")));
        let (key, value) = size.split_once('=').ok_or_else(expected)?;
        let value: usize =
            value.parse().ok().filter(|value| (1..=1 << 20).contains(value)).ok_or_else(expected)?;
        let place = known.iter().position(|name| *name == key).ok_or_else(expected)?;
        case.dims.0[place].1 = value;
    }
    Ok(vec![case])
}
