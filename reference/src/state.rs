//! State that a model carries from pass to pass.

/// A cache that only ops read and change: keys, values, a convolution's last rows, a recurrence.
///
/// Empty until the first pass has written it.
#[derive(Clone, Debug)]
pub struct State<T>(pub Option<T>);

impl<T> Default for State<T> {
    fn default() -> Self {
        State(None)
    }
}

impl<T> State<T> {
    /// What it holds after a pass.
    pub fn get(&self) -> &T {
        self.0.as_ref().expect("state: read before it was written")
    }
}
