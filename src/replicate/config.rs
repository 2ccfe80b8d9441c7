//! [`DataParallel`]: configuration of [`replicate`](super::replicate).

use std::fmt;
use std::sync::Arc;

use crate::fsdp::{FullyShard, MixedPrecisionPolicy, ParamInfo};
use crate::mesh::{DeviceMesh, DimNames};
use crate::param::{BufferSync, GradientHook};
use crate::placement::Placement;

const MIB: usize = 1 << 20;

/// Configuration of [`replicate`](super::replicate).
///
/// ```
/// # use burn_dtensor::replicate::DataParallel;
/// let config = DataParallel::new().with_units(["blocks.*"]).with_bucket_bytes(1 << 20, 50 << 20);
/// ```
#[derive(Clone)]
pub struct DataParallel {
    units: FullyShard,
    /// True if the program has named the units.
    has_units: bool,
    /// Names of the mesh dimensions; all if there are none.
    dims: Vec<String>,
    pub(super) hook: Option<Arc<dyn GradientHook>>,
}

impl Default for DataParallel {
    fn default() -> Self {
        let all = |_: ParamInfo<'_>| Some(Placement::Replicate);
        let mut units = FullyShard::new().with_shard_placement_fn(all);
        units.buckets = Some([MIB, 25 * MIB]);
        Self {
            units,
            has_units: false,
            dims: Vec::new(),
            hook: None,
        }
    }
}

impl DataParallel {
    /// Creates the default configuration: units by the top-level modules, buckets of 1 and 25 MiB,
    /// all dimensions of the mesh.
    pub fn new() -> Self {
        Self::default()
    }

    /// Makes a unit of every module whose path matches a pattern, with the syntax of
    /// [`FullyShard::with_units`]. Without this call, the model's top-level modules and the items of
    /// its top-level lists are units.
    #[must_use]
    pub fn with_units<S: Into<String>>(mut self, patterns: impl IntoIterator<Item = S>) -> Self {
        self.has_units = true;
        self.map(|config| config.with_units(patterns))
    }

    /// Makes the model one unit, in place of its top-level modules, for models in which ranks take
    /// different branches: every rank must enter the same units, but need not use all parameters of
    /// a unit. Open the model's forward with [`unit`](fn@crate::fsdp::unit). All gradients are then
    /// averaged at the end of backward. Units that [`with_units`](Self::with_units) names stay.
    #[must_use]
    pub fn with_one_unit(mut self) -> Self {
        self.has_units = true;
        self
    }

    /// Excludes the parameters whose path matches a pattern, as [`FullyShard::with_ignored`] does.
    #[must_use]
    pub fn with_ignored<S: Into<String>>(self, patterns: impl IntoIterator<Item = S>) -> Self {
        self.map(|config| config.with_ignored(patterns))
    }

    /// Replicates over these dimensions of the mesh, of which all ranks have rows of their own.
    /// Default: all. Use it for a mesh that has other dimensions as well, such as tensor-parallel
    /// ones.
    #[must_use]
    pub fn with_mesh_dims(mut self, dims: impl DimNames) -> Self {
        self.dims = dims.dim_names().into_iter().map(Into::into).collect();
        self
    }

    /// Sets the bytes of gradients in the first bucket of a backward, and in each further one.
    /// Default: 1 MiB, so that the first all-reduce begins early, and 25 MiB. A unit is never
    /// divided: a bucket ends with the unit that fills it. With 0, each unit is a bucket.
    #[must_use]
    pub fn with_bucket_bytes(mut self, first: usize, others: usize) -> Self {
        self.units.buckets = Some([first, others]);
        self
    }

    /// Sets whether it is an error that some rank does not use a parameter in a pass through its unit,
    /// also one of several before a backward: every rank
    /// then unwinds with [`ParamError::Unused`](crate::fsdp::ParamError::Unused), which names them by
    /// rank. Default: false, a parameter counts as zeros on the ranks that do not use it, and has no
    /// gradient if none does. With true, each reduction waits for the device, and the error names the
    /// parameters of the first unit of which some are not used. A unit that no rank enters is not
    /// looked at.
    #[must_use]
    pub fn with_unused_parameters_refused(mut self, refused: bool) -> Self {
        self.units.refuses_unused = refused;
        self
    }

    /// Sums gradients by `hook` in place of the all-reduces, as
    /// [`FsdpModule::set_gradient_hook`](crate::fsdp::FsdpModule::set_gradient_hook) does for all
    /// units of the model, also those that an earlier call has made inside it.
    #[must_use]
    pub fn with_gradient_hook(self, hook: impl GradientHook + 'static) -> Self {
        Self {
            hook: Some(Arc::new(hook)),
            ..self
        }
    }

    /// Sets whether each forward of the model makes its running statistics those of the mesh's first
    /// rank, or their average by [`with_buffer_sync`](Self::with_buffer_sync). Default: false. The
    /// forward must be opened by [`unit`](fn@crate::fsdp::unit), and then has one more collective; it
    /// is each outermost `unit`, also of evaluation.
    #[must_use]
    pub fn with_forward_sync_buffers(mut self, sync: bool) -> Self {
        self.units.forward_sync_buffers = sync;
        self
    }

    /// Sets the policy by which running statistics are made equal, as
    /// [`FullyShard::with_buffer_sync`] does.
    #[must_use]
    pub fn with_buffer_sync(self, buffers: BufferSync) -> Self {
        self.map(|config| config.with_buffer_sync(buffers))
    }

    /// Sets the element types in which units compute and reduce, as
    /// [`FullyShard::with_mixed_precision`] does. Inputs are cast where [`unit`](fn@crate::fsdp::unit)
    /// opens a unit: with one `unit` around the model, make the model a unit by
    /// [`with_one_unit`](Self::with_one_unit), or open the modules inside by `unit`, too.
    #[must_use]
    pub fn with_mixed_precision(self, policy: MixedPrecisionPolicy) -> Self {
        self.map(|config| config.with_mixed_precision(policy))
    }

    /// Sets the policy of some units, as [`FullyShard::with_mixed_precision_for`] does.
    #[must_use]
    pub fn with_mixed_precision_for<S: Into<String>>(
        self,
        patterns: impl IntoIterator<Item = S>,
        policy: MixedPrecisionPolicy,
    ) -> Self {
        self.map(|config| config.with_mixed_precision_for(patterns, policy))
    }

    /// Sets how often values that must be identical on all ranks are compared, as
    /// [`FullyShard::with_replica_check_every`] does.
    #[must_use]
    pub fn with_replica_check_every(self, steps: u64) -> Self {
        self.map(|config| config.with_replica_check_every(steps))
    }

    /// Sets whether the replica check also compares the weights, as
    /// [`FullyShard::with_weight_check`] does.
    #[must_use]
    pub fn with_weight_check(self, weights: bool) -> Self {
        self.map(|config| config.with_weight_check(weights))
    }

    /// Sets whether [`replicate`](super::replicate) warns about layers that compute something else
    /// on several ranks, as [`FullyShard::with_layer_warnings`] does.
    #[must_use]
    pub fn with_layer_warnings(self, warnings: bool) -> Self {
        self.map(|config| config.with_layer_warnings(warnings))
    }

    /// Sets whether [`replicate`](super::replicate) warns about burn's `Dropout`, as
    /// [`FullyShard::with_dropout_warning`] does.
    #[must_use]
    pub fn with_dropout_warning(self, warning: bool) -> Self {
        self.map(|config| config.with_dropout_warning(warning))
    }

    /// Returns the configuration of the units on a mesh. `modules` returns the default units.
    pub(super) fn of(self, mesh: &DeviceMesh, modules: impl FnOnce() -> Vec<String>) -> FullyShard {
        let units = match self.has_units {
            true => self.units,
            false => self.units.with_units(modules()),
        };
        match self.dims.is_empty() {
            true => {
                let mut units = units.with_shard_dims(mesh.names().to_vec());
                units.has_default_dims = true;
                units
            }
            false => units.with_shard_dims(self.dims),
        }
    }

    fn map(self, set: impl FnOnce(FullyShard) -> FullyShard) -> Self {
        Self {
            units: set(self.units),
            ..self
        }
    }
}

impl fmt::Debug for DataParallel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DataParallel")
            .field("units", &self.units)
            .field("dims", &self.dims)
            .field("hook", &self.hook)
            .finish()
    }
}
