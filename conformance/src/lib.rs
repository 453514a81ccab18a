//! Judges an inference kernel against the reference, layer by layer.
