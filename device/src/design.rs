//! Designs: the geometries that launches run, derived from the model's dimensions and nothing else.

use crate::engine::{DECODE_ROWS, Engine, PREFILL_ROWS};
use std::fmt;

/// Longest inner axis whose products of int8 codes cannot leave a 32-bit sum: `(2^31 - 1) / 127²`.
const INT8_LONGEST: usize = 133_144;

/// One product of a model: `[rows, inner] · [inner, out]`, on an engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Design {
    /// The engine.
    pub engine: Engine,
    /// Number of outputs N.
    pub out: usize,
    /// Number of inputs K.
    pub inner: usize,
}

/// Why no design runs a product.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum DesignError {
    /// A product without outputs or inputs.
    #[error("a product of {out} outputs and {inner} inputs is empty")]
    Empty {
        /// Number of outputs.
        out: usize,
        /// Number of inputs.
        inner: usize,
    },
    /// An inner axis on which sums of codes could overflow.
    #[error("{inner} inputs are more than the {longest} that a 32-bit sum of int8 products holds")]
    TooLong {
        /// Number of inputs.
        inner: usize,
        /// The limit.
        longest: usize,
    },
}

impl Design {
    /// The design of a product, or why there is none.
    pub fn new(engine: Engine, out: usize, inner: usize) -> Result<Design, DesignError> {
        if out == 0 || inner == 0 {
            return Err(DesignError::Empty { out, inner });
        }
        if engine == Engine::Int8 && inner > INT8_LONGEST {
            return Err(DesignError::TooLong { inner, longest: INT8_LONGEST });
        }
        Ok(Design { engine, out, inner })
    }

    /// Rows that one launch takes when `rows` are to be done: the decode twin where they fit.
    pub fn launch_rows(rows: usize) -> usize {
        if rows <= DECODE_ROWS { DECODE_ROWS } else { PREFILL_ROWS }
    }
}

impl fmt::Display for Design {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}×{}", self.engine, self.out, self.inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // 133144 · 127² = 2 147 479 576 fits in 2^31 - 1 = 2 147 483 647; one more product does not.
    #[test]
    fn the_longest_exact_sum() {
        assert!(Design::new(Engine::Int8, 1, 133_144).is_ok());
        assert!(Design::new(Engine::Int8, 1, 133_145).is_err());
        assert!(Design::new(Engine::F32, 1, 133_145).is_ok());
        assert!(Design::new(Engine::F32, 0, 3).is_err());
    }

    #[test]
    fn seventeen_rows_need_the_wide_design() {
        assert_eq!([1, 16, 17, 128].map(Design::launch_rows), [16, 16, 128, 128]);
    }
}
