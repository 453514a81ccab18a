//! One op call as plain arrays: what a kernel outside this program is handed.

/// A named input. Its values are its own, or lie where the other process put them.
#[derive(Clone, Debug, PartialEq)]
pub struct Input<V = Vec<f32>> {
    /// Its name in the formula.
    pub name: String,
    /// Length of each axis, slowest first.
    pub shape: Vec<usize>,
    /// The values, last axis fastest.
    pub values: V,
}

/// An op with its inputs and numbers.
#[derive(Clone, Debug, PartialEq)]
pub struct OpCall<V = Vec<f32>> {
    /// `linear`, `rms_norm`, ...
    pub op: String,
    /// Its inputs; optional ones are absent.
    pub inputs: Vec<Input<V>>,
    /// What else its formula reads, by name: `eps`, `scale`, ...
    pub numbers: Vec<(String, f64)>,
    /// The shape of its result.
    pub output: Vec<usize>,
}

impl<V> OpCall<V> {
    /// An input by name.
    pub fn input(&self, name: &str) -> Option<&Input<V>> {
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

    /// The same call with its values in another form; nothing where one has none.
    pub(super) fn with_values<W>(self, mut form: impl FnMut(V) -> Option<W>) -> Option<OpCall<W>> {
        let inputs = self
            .inputs
            .into_iter()
            .map(|input| Some(Input { name: input.name, shape: input.shape, values: form(input.values)? }));
        let inputs = inputs.collect::<Option<Vec<_>>>()?;
        Some(OpCall { op: self.op, inputs, numbers: self.numbers, output: self.output })
    }
}
