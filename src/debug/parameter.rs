//! [`HeldParameter`]: where a parameter lies.

use std::sync::Arc;

use crate::dtensor::DTensorSpec;

/// A parameter of a model.
#[derive(Debug, Clone)]
pub(super) struct HeldParameter {
    pub path: String,
    pub place: Holders,
}

/// Which ranks hold it.
#[derive(Debug, Clone)]
pub(super) enum Holders {
    Distributed {
        spec: Arc<DTensorSpec>,
        unit: Arc<str>,
    },
    /// Not distributed: every rank has one of its own.
    Own {
        shape: Vec<usize>,
    },
}
