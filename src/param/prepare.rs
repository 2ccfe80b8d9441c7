//! [`PrepareModuleInputOutput`]: what a block takes and what it returns.

use crate::placement::Placement;

/// Where a plan brings the inputs and outputs of a module, whatever is inside: of a block of several layers, or of
/// one that has no [`Style`](super::Style) of its own.
///
/// Each input and output has a *declared* placement, which it must come with, and a *desired* one, which it is
/// brought to; `None` takes any, and leaves it. Placements are those on one mesh dimension. The module's forward is
/// called by [`prepared`](crate::nn::apply_io_layouts), which finds this with the parameters inside the module.
///
/// ```
/// use burn_dtensor::parallel::{Plan, PrepareModuleInputOutput};
/// use burn_dtensor::placement::Placement::{Replicate, Shard};
///
/// // Attention that comes as shards of the sequence, computes with the whole of it, and returns shards; its
/// // second input, a mask, stays as it is.
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

/// One input or output.
#[derive(Debug, Clone, Default)]
pub(crate) struct IoLayout<T> {
    pub(crate) declared: T,
    pub(crate) desired: T,
}

impl PrepareModuleInputOutput {
    /// Leaves all inputs and outputs as they are.
    pub fn new() -> Self {
        Self::default()
    }

    /// The next input: where it comes, and where the module wants it. Of a module that has any, as many as its
    /// forward is called with.
    #[must_use]
    pub fn with_input(mut self, declared: impl Into<Option<Placement>>, desired: impl Into<Option<Placement>>) -> Self {
        self.inputs.push(IoLayout { declared: declared.into(), desired: desired.into() });
        self
    }

    /// The next output: where the module leaves it, and where it is brought.
    #[must_use]
    pub fn with_output(
        mut self,
        declared: impl Into<Option<Placement>>,
        desired: impl Into<Option<Placement>>,
    ) -> Self {
        self.outputs.push(IoLayout { declared: declared.into(), desired: desired.into() });
        self
    }
}

/// A [`PrepareModuleInputOutput`] for each dimension of a mesh, of one module.
#[derive(Debug)]
pub(crate) struct ModuleIoLayouts {
    /// Path of the module in the model that was parallelized.
    pub(crate) path: String,
    /// Each with a placement, or none, per mesh dimension.
    pub(crate) inputs: Vec<IoLayout<Vec<Option<Placement>>>>,
    pub(crate) outputs: Vec<IoLayout<Vec<Option<Placement>>>>,
}

impl ModuleIoLayouts {
    /// Of the module at `path`, from what is said for each mesh dimension; `None` says nothing.
    pub(crate) fn new(path: String, dims: &[Option<&PrepareModuleInputOutput>]) -> Self {
        let edges = |of: fn(&PrepareModuleInputOutput) -> &[IoLayout<Option<Placement>>]| {
            let count = dims.iter().flatten().map(|dim| of(dim).len()).max().unwrap_or(0);
            let edge = |at: usize| {
                let said = |dim: &Option<&PrepareModuleInputOutput>| {
                    dim.and_then(|dim| of(dim).get(at)).cloned().unwrap_or_default()
                };
                let said: Vec<_> = dims.iter().map(said).collect();
                IoLayout {
                    declared: said.iter().map(|edge| edge.declared).collect(),
                    desired: said.iter().map(|edge| edge.desired).collect(),
                }
            };
            (0..count).map(edge).collect()
        };
        let (inputs, outputs) = (edges(|dim| &dim.inputs), edges(|dim| &dim.outputs));
        Self { path, inputs, outputs }
    }
}
