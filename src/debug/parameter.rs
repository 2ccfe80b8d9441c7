//! [`HeldParameter`]: a parameter and the ranks that hold it.

use std::sync::Arc;

use crate::dtensor::DTensorSpec;

/// A parameter of a model, with its path.
#[derive(Debug, Clone)]
pub(super) struct HeldParameter {
    pub path: String,
    pub place: Holders,
}

/// Ranks that hold a parameter, and how.
#[derive(Debug, Clone)]
pub(super) enum Holders {
    Distributed {
        spec: Arc<DTensorSpec>,
        unit: Arc<str>,
    },
    /// The parameter is not distributed: every rank has a separate one.
    Own { shape: Vec<usize> },
}
