//! [`FsdpModule`]: changes the options of units at run time. [`unshard`] and [`reshard`] gather and free one unit.

use std::sync::{Arc, Weak};

use burn::module::Module;
use burn::tensor::Tensor;
use smallvec::SmallVec;

use crate::Result;
use crate::comm::Communicator;
use crate::param::{
    AllReduceHook, GradientHook, ModuleUnits, ParamError, ReducedGradients, ReshardAfterForward,
    RuntimeOptions, ShardCodec, Unit, UnitCollectives, give_up_backward, is_backward_gathered,
    units_of, unshard_unit,
};
use crate::pattern::PathPattern;

/// Units of a module that [`fully_shard`](crate::fsdp::fully_shard) or
/// [`replicate`](crate::replicate::replicate) returned: those of the module itself, and those of the
/// modules inside it. Use it to change options of these units at
/// run time.
///
/// ```
/// # use burn::nn::LinearConfig;
/// # use burn::tensor::Tensor;
/// # use burn_dtensor::prelude::*;
/// # use burn_dtensor::fsdp::FsdpModule;
/// # launch(Launch::threads(2), |world| {
/// # let mesh = DeviceMesh::new(world, [2], ["shard"])?;
/// # let device = world.device().clone().autodiff();
/// # let batches = [0.0, 1.0].map(|x| Tensor::<2>::full([1, 4], x, &device));
/// let model = fully_shard(LinearConfig::new(4, 3).init(&device), &mesh, FullyShard::new())?;
/// for (at, x) in batches.into_iter().enumerate() {
///     // Gradients of all batches except the last are accumulated, and reduced with those of the last.
///     FsdpModule::of(&model)?.set_requires_gradient_sync(at == 1);
///     let grads = model.forward(x).sum().backward();
///     assert_eq!(model.weight.shard_grad(&grads).is_some(), at == 1);
/// }
/// # Ok(())
/// # })?;
/// # Ok::<_, burn_dtensor::Error>(())
/// ```
///
/// An option is stored in the units, so it applies to all clones of the module until it is set to
/// another value.
///
/// # Collective
/// Local, except for [`reshard`](Self::reshard): the setters do not communicate. However, every
/// rank of the units' mesh must set the same value, at the same position in its sequence of
/// forwards and backwards. Only [`set_gradient_weight`](Self::set_gradient_weight) may have other
/// values on other ranks.
#[derive(Debug, Clone)]
pub struct FsdpModule {
    units: Vec<Arc<Unit>>,
    /// Number of units of the module itself, which come first.
    own: usize,
}

impl FsdpModule {
    /// Returns the units of `module` and of the modules inside it.
    ///
    /// A program for one device, too, distributes the model over a mesh of one rank, where nothing
    /// is sent. Without units there is no handle, because its options would change nothing: each
    /// backward would return its gradients at once, without the weight, the factor and the hook,
    /// and a loop that steps with the gradients of the last backward would lose the others.
    ///
    /// # Errors
    /// [`ParamError::NotSharded`] if there is none, [`ParamError::Replaced`].
    pub fn of<M: Module>(module: &M) -> Result<Self> {
        let ModuleUnits { own, inside } = ModuleUnits::of(module)?.ok_or(ParamError::NotSharded)?;
        let own: Vec<_> = own
            .into_iter()
            .map(|(unit, _)| unit)
            .filter(|unit| unit.spec().data.is_some())
            .collect();
        let count = own.len();
        let mut units: Vec<Arc<Unit>> = Vec::new();
        for unit in own
            .into_iter()
            .chain(inside.into_iter().map(|(unit, _)| unit))
        {
            if !units.iter().any(|known| Arc::ptr_eq(known, &unit)) {
                units.push(unit);
            }
        }
        if units.is_empty() {
            Err(ParamError::NotSharded.into())
        } else {
            Ok(Self { units, own: count })
        }
    }

    /// Returns the unit of the module itself without those of modules inside it. The result is
    /// empty if the module is not a unit. It contains several units if the parameters of the module
    /// are on different meshes, as expert weights are.
    #[must_use]
    pub fn own(mut self) -> Self {
        self.units.truncate(self.own);
        self
    }

    /// Returns the units whose path matches a pattern, with the syntax of
    /// [`FullyShard::with_units`](crate::fsdp::FullyShard::with_units). A unit of several modules
    /// matches if the path of one of them does. Paths start at the outermost model that was
    /// sharded; `root` matches that model itself.
    ///
    /// # Errors
    /// [`ParamError::Pattern`], [`ParamError::NoMatch`].
    pub fn matching<S: Into<String>>(
        mut self,
        patterns: impl IntoIterator<Item = S>,
    ) -> Result<Self> {
        let texts: Vec<String> = patterns.into_iter().map(Into::into).collect();
        let patterns = PathPattern::parse_all(&texts)?;
        let paths = self.paths();
        if let Some(pattern) = patterns
            .iter()
            .find(|pattern| !self.units.iter().any(|unit| unit.comm.is_taken_by(pattern)))
        {
            let near_path = pattern.nearest(&paths).cloned();
            let pattern = pattern.text().to_string();
            let present = paths.join(", ");
            return Err(ParamError::NoMatch {
                pattern,
                what: "unit",
                near_path,
                present,
            }
            .into());
        }
        let is_taken = |unit: &Arc<Unit>| {
            patterns
                .iter()
                .any(|pattern| unit.comm.is_taken_by(pattern))
        };
        let own = self.units[..self.own]
            .iter()
            .filter(|unit| is_taken(unit))
            .count();
        self.units.retain(is_taken);
        Ok(Self { own, ..self })
    }

    /// Returns the path of each unit in the model. It is `root` for the model itself, and the list
    /// of all paths for a unit of several modules.
    pub fn paths(&self) -> Vec<String> {
        self.units
            .iter()
            .map(|unit| unit.label().to_string())
            .collect()
    }

    /// Returns true if all units are prefetched and their all-gathers are complete, so that the
    /// next pass would not block. A unit is prefetched for forward by [`unshard`](super::unshard)
    /// or by an earlier unit, and for backward by the backward of this thread.
    ///
    /// Local: no communication.
    pub fn is_prefetched(&self) -> bool {
        self.units
            .iter()
            .all(|unit| unit.copies.is_ready() || is_backward_gathered(unit))
    }

    fn set(&self, set: impl Fn(&mut RuntimeOptions)) {
        self.units
            .iter()
            .for_each(|unit| set(&mut unit.comm.options.lock()));
    }

    /// Sets when gathered parameters are freed, starting with the next forward.
    ///
    /// # Errors
    /// [`ParamError::ReshardRanks`] for a number of ranks that `fully_shard` was not given: it
    /// creates the groups.
    pub fn set_reshard_after_forward(&self, reshard: ReshardAfterForward) -> Result<()> {
        self.units
            .iter()
            .try_for_each(|unit| check_reshard(unit, reshard))?;
        self.set(|control| control.reshard = reshard);
        Ok(())
    }

    /// Sets whether unsharded parameters are freed after backward. Default: true. If they are kept,
    /// the next forward from the same shards uses them without an all-gather, for example while
    /// gradients of several batches are accumulated.
    pub fn set_reshard_after_backward(&self, reshard: bool) {
        self.set(|control| control.reshard_after_backward = reshard);
    }

    /// Sets whether backward gathers parameters that were freed after forward. Default: true. Use
    /// `false` for a unit whose backward reads no parameter, such as one of embeddings. If backward
    /// does read one, the rank fails with [`ParamError::NotUnsharded`]. Parameters that a
    /// [checkpointed](super::checkpoint_activations) block reads are gathered in any case, for its
    /// recomputation, also if nothing in the block is tracked on this rank.
    pub fn set_unshard_in_backward(&self, unshard: bool) {
        self.set(|control| control.unshard_in_backward = unshard);
    }

    /// Sets whether [`checkpoint_activations`](super::checkpoint_activations) recomputes the block
    /// in backward, starting with the next forward. Default: true. If `false`, it behaves like
    /// [`unit`](fn@super::unit).
    pub fn set_activation_checkpointing(&self, checkpoint: bool) {
        self.set(|control| control.checkpoint = checkpoint);
    }

    /// Sets whether backward reduces gradients. Default: true. If `false`, unsharded gradients are
    /// accumulated in the unit, where they take as much memory as its parameters, and the optimizer
    /// gets none. The next backward with synchronization reduces the sum.
    ///
    /// A backward that reduces one unit of a model also reduces, at its end, the accumulated
    /// gradients of all units of the model, even of those that it does not enter (for example an
    /// expert to which the last batch is not routed). If several backwards train parts of one model
    /// with separate optimizers, set the option on the units of each part before the last backward
    /// of that part.
    ///
    /// Call it before the optimizer steps. A step for which all gradients wait fails with
    /// [`ParamError::StepWithoutGradients`] (see
    /// [`ShardedOptimizer::step`](crate::optim::ShardedOptimizer::step)). If gradients belong to
    /// shards that a step has replaced, the unit's next forward fails with
    /// [`ParamError::PendingGradients`].
    pub fn set_requires_gradient_sync(&self, sync: bool) {
        self.set(|control| control.sync = sync);
    }

    /// Sets whether a backward that reduces gradients over the ranks that shard also reduces them
    /// over the replicas (HSDP). Default: true. If `false`, this rank's shard of the sum is
    /// accumulated in the unit until a backward reduces it.
    pub fn set_requires_all_reduce(&self, all_reduce: bool) {
        self.set(|control| control.all_reduce = all_reduce);
    }

    /// Sets the divisor of summed gradients. The default, `None`, is the number of data-parallel
    /// ranks. It counts all ranks with distinct data, even if fewer ranks reduce the unit, as with
    /// expert parallelism.
    ///
    /// # Errors
    /// [`ParamError::DivideFactor`] unless the factor is positive, and it and its reciprocal are
    /// normal numbers in `f32`.
    pub fn set_gradient_divide_factor(&self, factor: impl Into<Option<f64>>) -> Result<()> {
        let factor = factor.into();
        let is_valid = |factor: f64| {
            factor > 0.0 && (factor as f32).is_normal() && (factor.recip() as f32).is_normal()
        };
        if let Some(factor) = factor.filter(|factor| !is_valid(*factor)) {
            return Err(ParamError::DivideFactor { factor }.into());
        }
        self.change_averaging(|control| control.divide_factor = factor);
        Ok(())
    }

    /// Sets the weight by which this rank's gradients are multiplied before they are summed over the
    /// ranks. Default: 1. It may differ between data-parallel ranks. Ranks that compute the same rows
    /// together, as tensor-parallel ones do, set the same weight.
    ///
    /// If ranks have different numbers of rows, and each computes the mean loss of its own, the
    /// average of their gradients is that of the mean over all rows with the weight
    /// `rows of this rank * ranks / rows of all ranks`. `train::supervised` of the feature `train`
    /// sets it for each batch. With 0, the rank contributes zeros. The product is rounded to the dtype
    /// in which gradients are summed.
    ///
    /// The weight is that of all gradients that this rank's backward computes. If they contain other
    /// ranks' losses, because ranks exchange activations in forward (experts of
    /// [expert parallelism](crate::parallel), [`sync_batch_norm`](crate::nn::sync_batch_norm)),
    /// multiply each rank's loss by its weight instead.
    ///
    /// # Errors
    /// [`ParamError::GradientWeight`] unless the weight is finite and not negative.
    pub fn set_gradient_weight(&self, weight: f64) -> Result<()> {
        if !(weight.is_finite() && weight >= 0.0) {
            return Err(ParamError::GradientWeight { weight }.into());
        }
        self.set(|control| control.weight = weight);
        Ok(())
    }

    /// Returns true if gradients of a unit contain losses of ranks that do not reduce it, as those of
    /// experts do.
    #[cfg(feature = "train")]
    pub(crate) fn has_experts(&self) -> bool {
        let spec = |unit: &Arc<Unit>| {
            let data = unit.spec().data.as_ref()?;
            Some(data.ranks() < data.all.group().size())
        };
        self.units.iter().any(|unit| spec(unit) == Some(true))
    }

    /// Sets whether reductions compute only sums, which are divided afterwards, for a backend
    /// without averages. Default: false.
    pub fn set_force_sum_reduction(&self, force: bool) {
        self.change_averaging(|control| control.force_sum = force);
    }

    /// Registers a `hook` on a unit's averaged gradients. It runs after the reductions, including
    /// the one over replicas (HSDP), and before the optimizer gets the gradients. It returns the
    /// gradients to use, for example averages over more ranks, or clipped gradients. It runs on the
    /// rank's thread in backward, for one unit after another, in the same order on all ranks.
    /// Therefore it may call collectives.
    ///
    /// For a parameter that no rank has used, the hook receives zeros, and the parameter gets the
    /// gradient that the hook returns.
    ///
    /// ```
    /// # use burn::nn::LinearConfig;
    /// # use burn::tensor::Tensor;
    /// # use burn_dtensor::prelude::*;
    /// # use burn_dtensor::fsdp::FsdpModule;
    /// # launch(Launch::threads(2), |world| {
    /// # let mesh = DeviceMesh::new(world, [2], ["shard"])?;
    /// # let device = world.device().clone().autodiff();
    /// let model = fully_shard(LinearConfig::new(4, 3).init(&device), &mesh, FullyShard::new())?;
    /// FsdpModule::of(&model)?.set_all_reduce_hook(|grads| Ok(grads.shards.into_iter().map(|shard| shard.clamp(-1.0, 1.0)).collect()));
    /// # let grads = model.forward(Tensor::<2>::full([1, 4], 9.0, &device)).sum().backward();
    /// # assert!(model.weight.shard_grad(&grads).unwrap().local().clone().max().into_scalar::<f32>() == 1.0);
    /// # Ok(())
    /// # })?;
    /// # Ok::<_, burn_dtensor::Error>(())
    /// ```
    pub fn set_all_reduce_hook(
        &self,
        hook: impl Fn(ReducedGradients) -> Result<Vec<Tensor<1>>> + Send + Sync + 'static,
    ) {
        let hook = AllReduceHook::new(hook);
        self.set(|control| control.hook = Some(hook.clone()));
    }

    /// Removes the hook.
    pub fn remove_all_reduce_hook(&self) {
        self.set(|control| control.hook = None);
    }

    /// Makes these units run their collectives through `collectives` instead of their own groups.
    pub fn set_collectives(&self, collectives: impl UnitCollectives + 'static) {
        let collectives: Arc<dyn UnitCollectives> = Arc::new(collectives);
        self.set(|control| control.collectives = Some(collectives.clone()));
    }

    /// Makes these units run their collectives on their own groups again.
    pub fn remove_collectives(&self) {
        self.set(|control| control.collectives = None);
    }

    /// Sums gradients by `hook` in place of the all-reduces: those of the buckets of
    /// [`replicate`](crate::replicate::replicate), and those over replicas of reduced shards (HSDP).
    /// A reduce-scatter, and replicated parameters of a unit that also has sharded ones, have no
    /// hook. Flags of used parameters have an all-reduce of their own.
    pub fn set_gradient_hook(&self, hook: impl GradientHook + 'static) {
        let hook: Arc<dyn GradientHook> = Arc::new(hook);
        self.set(|control| control.gradient_hook = Some(hook.clone()));
    }

    /// Removes the hook.
    pub fn remove_gradient_hook(&self) {
        self.set(|control| control.gradient_hook = None);
    }

    /// Makes the all-gathers of these units send what `codec` makes of shards, for forward and for
    /// backward. It takes the place of [`UnitCollectives::all_gather`]. Every rank of the units' mesh
    /// must set an equal one. Parameters that are read as they are stored, as by
    /// [`full_model`](crate::fsdp::full_model) and by checkpoints, are not encoded; nor are the parts
    /// that [`ReshardAfterForward::Ranks`] gathers in backward, which are already decoded. A forward
    /// that has begun keeps its codec in backward.
    pub fn set_shard_codec(&self, codec: impl ShardCodec + 'static) {
        let codec: Arc<dyn ShardCodec> = Arc::new(codec);
        self.change_codec(|control| control.codec = Some(codec.clone()));
    }

    /// Makes the all-gathers of these units send the shards as they are.
    pub fn remove_shard_codec(&self) {
        self.change_codec(|control| control.codec = None);
    }

    fn change_codec(&self, set: impl Fn(&mut RuntimeOptions)) {
        self.set(set);
        self.units
            .iter()
            .for_each(|unit| unit.copies.change_encoding());
    }

    fn change_averaging(&self, set: impl Fn(&mut RuntimeOptions)) {
        self.set(set);
        // The cached plans contain the previous reduction operations.
        self.units.iter().for_each(|unit| unit.comm.forget_plans());
    }

    /// Disables gradient reduction, as
    /// [`set_requires_gradient_sync(false)`](Self::set_requires_gradient_sync) does, until the
    /// returned guard is dropped. The guard restores the previous setting of each unit.
    #[must_use = "dropping the guard re-enables gradient reduction"]
    pub fn no_sync(&self) -> NoSync {
        let before = self
            .units
            .iter()
            .map(|unit| (unit.clone(), unit.comm.options.lock().sync))
            .collect();
        self.set_requires_gradient_sync(false);
        NoSync(before)
    }

    /// Sets the units to prefetch when one of these units has been gathered for forward. They are
    /// gathered in the given order, before they are entered.
    ///
    /// Only units inside the outermost module whose forward is running are prefetched; others are
    /// skipped. A prefetched unit that is not entered before that forward ends is dropped.
    pub fn set_forward_prefetch(&self, next: impl Into<Prefetch>) {
        let next = next.into().units();
        self.units
            .iter()
            .for_each(|unit| unit.prefetch.lock().forward.clone_from(&next));
    }

    /// Sets the units to prefetch when backward reaches one of these units.
    pub fn set_backward_prefetch(&self, next: impl Into<Prefetch>) {
        let next = next.into().units();
        self.units
            .iter()
            .for_each(|unit| unit.prefetch.lock().backward.clone_from(&next));
    }

    /// Frees unsharded parameters: those that [`unshard`](super::unshard), a prefetch or an earlier
    /// backward has kept, and those that a forward keeps for its backward, which gathers them a
    /// second time.
    ///
    /// All forwards over the same parameters that wait for a backward share one all-gather; on a
    /// GPU, the weights of only one of them are freed. Not freed are weights that a running forward
    /// shares, and those of forwards before the unit ran with other values of its parameters, such
    /// as another clone's: they stay until their backward.
    ///
    /// # Collective
    /// Every rank must call it if a forward keeps parameters of these units for a later backward.
    pub fn reshard(&self) {
        self.units.iter().for_each(|unit| unit.copies.reshard());
    }

    /// Discards the state of an abandoned iteration, after the program has caught a panic:
    /// gradients that are accumulated or in reduction, and unsharded parameters, which a backward
    /// of that iteration could no longer read. Parameters, optimizers and the [options](FsdpModule)
    /// of the units do not change.
    ///
    /// Local: no communication. Every rank of the units' meshes must call it before the next
    /// forward.
    pub fn reset_iter_state(&self) {
        give_up_backward();
        for unit in &self.units {
            unit.copies.abandon();
            unit.counts.abandon();
            unit.accumulated.clear();
        }
    }
}

/// Checks that `unit` supports the policy `reshard`.
///
/// # Errors
/// [`ParamError::ReshardRanks`].
fn check_reshard(unit: &Unit, reshard: ReshardAfterForward) -> Result<(), ParamError> {
    let (Some(data), ReshardAfterForward::Ranks(ranks)) = (&unit.spec().data, reshard) else {
        return Ok(());
    };
    let is_made = |group: &Communicator| group.group().size() == ranks;
    match ranks == 1
        || is_made(&data.shard)
        || data.post_forward_group.as_ref().is_some_and(is_made)
    {
        true => Ok(()),
        false => Err(ParamError::ReshardRanks {
            unit: unit.label().to_string(),
            ranks,
        }),
    }
}

/// Selection of the units that are prefetched.
#[derive(Debug, Clone, Default)]
pub enum Prefetch {
    /// In backward, the unit that forward left immediately before. In forward, the unit that was
    /// entered next in the previous forward, if transfers overlap with computation (between
    /// processes, not between threads). The default.
    #[default]
    Auto,
    /// These units.
    Units(Vec<FsdpModule>),
}

impl<I: IntoIterator<Item = FsdpModule>> From<I> for Prefetch {
    fn from(units: I) -> Self {
        Self::Units(units.into_iter().collect())
    }
}

impl Prefetch {
    fn units(self) -> Option<Vec<Weak<Unit>>> {
        match self {
            Self::Auto => None,
            Self::Units(units) => Some(
                units
                    .iter()
                    .flat_map(|units| &units.units)
                    .map(Arc::downgrade)
                    .collect(),
            ),
        }
    }
}

/// A guard that disables gradient reduction in the backwards of some units. See
/// [`FsdpModule::no_sync`].
#[derive(Debug)]
pub struct NoSync(Vec<(Arc<Unit>, bool)>);

impl Drop for NoSync {
    fn drop(&mut self) {
        self.0
            .drain(..)
            .for_each(|(unit, sync)| unit.comm.options.lock().sync = sync);
    }
}

/// Handle of a unit whose parameters are being gathered before its forward; see [`unshard`].
#[must_use = "call `wait`, or let the unit's forward wait for the all-gather"]
#[derive(Debug)]
pub struct UnshardHandle(SmallVec<[Arc<Unit>; 1]>);

impl UnshardHandle {
    /// Waits until the parameters are gathered. Optional: the unit's forward waits as well.
    ///
    /// Local: [`unshard`] has posted the all-gather.
    ///
    /// # Errors
    /// [`Error::Comm`](crate::Error::Comm) if another rank fails.
    pub fn wait(self) -> Result<()> {
        Ok(self.0.iter().try_for_each(|unit| unit.copies.wait())?)
    }
}

/// Starts gathering the parameters of the unit `module` for its next forward.
///
/// Not recursive: inner units are not gathered. An optimizer step before that forward makes the
/// gathered values stale; the forward detects this and gathers once more. The gathered values,
/// stale or not, stay in memory until then, or until [`reshard`].
///
/// # Collective
/// Every rank of the unit's mesh must call it.
///
/// # Errors
/// [`ParamError`] if `module` is not an FSDP unit, if it is one of several modules of a group unit,
/// or if one of its parameters was replaced. [`wait`](UnshardHandle::wait) or the unit's forward
/// reports a failing collective.
pub fn unshard<M: Module>(module: &M) -> Result<UnshardHandle> {
    let units = units_of(module)?;
    if let Some((unit, _)) = units.iter().find(|(unit, _)| unit.comm.is_group()) {
        return Err(ParamError::UnshardOnGroupUnit {
            unit: unit.label().to_string(),
        }
        .into());
    }
    Ok(UnshardHandle(
        units
            .into_iter()
            .map(|(unit, shards)| {
                unshard_unit(&unit, &shards);
                unit
            })
            .collect(),
    ))
}

/// Frees the unsharded parameters of the unit `module`: those that [`unshard`] gathered and no
/// forward has used, and those that a forward keeps for its backward, which gathers them a second
/// time.
///
/// # Collective
/// Every rank must call it if a forward keeps parameters of the unit for a later backward.
/// Otherwise it is local.
///
/// # Errors
/// [`ParamError`] if `module` is not an FSDP unit, or if one of its parameters was replaced.
pub fn reshard<M: Module>(module: &M) -> Result<()> {
    units_of(module)?
        .iter()
        .for_each(|(unit, _)| unit.copies.reshard());
    Ok(())
}
