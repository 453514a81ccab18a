//! One op call as plain arrays: what a kernel outside this program is handed.

/// A named input.
#[derive(Clone, Debug, PartialEq)]
pub struct Input {
    /// Its name in the formula.
    pub name: String,
    /// Length of each axis, slowest first.
    pub shape: Vec<usize>,
    /// The values, last axis fastest.
    pub values: Vec<f32>,
}

/// An op with its inputs and numbers.
#[derive(Clone, Debug, PartialEq)]
pub struct OpCall {
    /// `linear`, `rms_norm`, ...
    pub op: String,
    /// Its inputs; optional ones are absent.
    pub inputs: Vec<Input>,
    /// What else its formula reads, by name: `eps`, `scale`, ...
    pub numbers: Vec<(String, f64)>,
    /// The shape of its result.
    pub output: Vec<usize>,
}

impl OpCall {
    /// An input by name.
    pub fn input(&self, name: &str) -> Option<&Input> {
        self.inputs.iter().find(|input| input.name == name)
    }

    /// A number by name; 0 where it is absent.
    pub fn number(&self, name: &str) -> f64 {
        self.numbers.iter().find(|(known, _)| known == name).map_or(0.0, |(_, value)| *value)
    }

    /// How many values its result has.
    pub fn elements(&self) -> usize {
        self.output.iter().product()
    }
}
