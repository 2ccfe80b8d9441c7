//! [`OptimizerKind`]: name of the optimizer of a group, for descriptions.

use std::any::{Any, type_name};

use burn::optim::Optimizer;

use super::fused::steps_in_one_pass;

/// Optimizer of a group of parameters, for descriptions.
#[derive(Debug, Clone)]
pub(super) struct OptimizerKind {
    /// Name of burn's optimizer.
    pub(super) name: String,
    /// True if it steps in one pass over host memory.
    pub(super) is_fused: bool,
}

impl OptimizerKind {
    pub(super) fn of<O: Optimizer>(optimizer: &O) -> Self {
        let name = type_name::<O>();
        let name = name.split(['<', '>']).next().unwrap_or(name);
        let name = name.rsplit("::").next().unwrap_or(name);
        Self {
            name: name.strip_prefix("Fused").unwrap_or(name).into(),
            is_fused: steps_in_one_pass(optimizer as &dyn Any),
        }
    }

    pub(super) fn muon() -> Self {
        Self {
            name: "Muon".into(),
            is_fused: false,
        }
    }
}
