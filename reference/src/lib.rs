//! The plain f32 reference of every op and model.
