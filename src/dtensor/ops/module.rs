//! Operators that burn has as functions of [`burn::tensor::module`], and their like.

pub use super::linear::{linear, linear_with_input};
