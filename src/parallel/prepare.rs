//! [`PrepareModuleInputOutput`]: layouts of the inputs and outputs of a module.

use crate::placement::Placement;

/// Placements of the inputs and outputs of a module, as part of a plan. Use it for a block of
/// several layers, or for a module that has no [`Style`](super::Style).
///
/// Each input and output has a *declared* placement, which it must have, and a *desired* one, to
/// which it is redistributed. `None` as declared placement accepts any; `None` as desired placement
/// leaves the tensor as it is. Placements are those on one mesh dimension. The module's forward is
/// called by [`apply_io_layouts`](crate::nn::apply_io_layouts), which finds these layouts through
/// the parameters inside the module.
///
/// ```
/// use burn_dtensor::parallel::{Plan, PrepareModuleInputOutput};
/// use burn_dtensor::placement::Placement::{Replicate, Shard};
///
/// // Attention whose input is sharded along the sequence. It computes with the full sequence and returns shards.
/// // Its second input, a mask, stays as it is.
/// let attention = PrepareModuleInputOutput::new()
///     .with_input(Shard(1), Replicate)
///     .with_input(None, None)
///     .with_output(None, Shard(1));
/// let plan = Plan::new().with_io("blocks.*.attention", attention);
/// ```
#[derive(Debug, Clone, Default)]
pub struct PrepareModuleInputOutput {
    pub(crate) inputs: Vec<IoLayout<Option<Placement>>>,
    pub(crate) outputs: Vec<IoLayout<Option<Placement>>>,
}

/// Layout of one input or output: the placement that it must have, and the one to which it is
/// redistributed.
#[derive(Debug, Clone, Default)]
pub(crate) struct IoLayout<T> {
    pub(crate) declared: T,
    pub(crate) desired: T,
}

impl PrepareModuleInputOutput {
    /// Creates a declaration that leaves all inputs and outputs as they are.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds the next input, with the placement that it has and the one that the module needs.
    /// Declare either no inputs or as many as the module's forward takes.
    #[must_use]
    pub fn with_input(
        mut self,
        declared: impl Into<Option<Placement>>,
        desired: impl Into<Option<Placement>>,
    ) -> Self {
        self.inputs.push(IoLayout {
            declared: declared.into(),
            desired: desired.into(),
        });
        self
    }

    /// Adds the next output, with the placement that the module returns and the one to which it is
    /// redistributed.
    #[must_use]
    pub fn with_output(
        mut self,
        declared: impl Into<Option<Placement>>,
        desired: impl Into<Option<Placement>>,
    ) -> Self {
        self.outputs.push(IoLayout {
            declared: declared.into(),
            desired: desired.into(),
        });
        self
    }
}

/// The layouts of one module for all dimensions of a mesh: one [`PrepareModuleInputOutput`] per
/// dimension, merged.
#[derive(Debug)]
pub(crate) struct ModuleIoLayouts {
    /// Path of the module in the model that was parallelized.
    pub(crate) path: String,
    /// The inputs, each with one optional placement per mesh dimension.
    pub(crate) inputs: Vec<IoLayout<Vec<Option<Placement>>>>,
    pub(crate) outputs: Vec<IoLayout<Vec<Option<Placement>>>>,
}

impl ModuleIoLayouts {
    /// Merges the layouts that the plan declares for the module at `path`, one per mesh dimension.
    /// `None` declares nothing for a dimension.
    pub(crate) fn new(path: String, dims: &[Option<&PrepareModuleInputOutput>]) -> Self {
        let edges = |of: fn(&PrepareModuleInputOutput) -> &[IoLayout<Option<Placement>>]| {
            let count = dims
                .iter()
                .flatten()
                .map(|dim| of(dim).len())
                .max()
                .unwrap_or(0);
            let edge = |at: usize| {
                let said = |dim: &Option<&PrepareModuleInputOutput>| {
                    dim.and_then(|dim| of(dim).get(at))
                        .cloned()
                        .unwrap_or_default()
                };
                let said: Vec<_> = dims.iter().map(said).collect();
                IoLayout {
                    declared: said.iter().map(|edge| edge.declared).collect(),
                    desired: said.iter().map(|edge| edge.desired).collect(),
                }
            };
            (0..count).map(edge).collect()
        };
        let inputs = edges(|dim| &dim.inputs);
        let outputs = edges(|dim| &dim.outputs);
        Self {
            path,
            inputs,
            outputs,
        }
    }
}
