//! [`FsdpModule`]: what units do from now on.

use std::sync::{Arc, Weak};

use burn::module::Module;
use burn::tensor::Tensor;

use super::custom::{AllReduceHook, Collectives, ReducedGradients, UnitCollectives};
use super::enter::Scoped;
use super::runtime_options::RuntimeOptions;
use super::scope::{give_up_backward, is_gathered_again};
use super::unit::Unit;
use super::{ParamError, ReshardAfterForward};
use crate::Result;
use crate::comm::Communicator;
use crate::pattern::PathPattern;

/// The units of a module that `fully_shard` made: of the module itself, and of those inside.
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
///     // Gradients of all batches but the last stay with their rank, and are reduced with those of the last.
///     FsdpModule::of(&model)?.set_requires_gradient_sync(at == 1);
///     let grads = model.forward(x).sum().backward();
///     assert_eq!(model.weight.shard_grad(&grads).is_some(), at == 1);
/// }
/// # Ok(())
/// # })?;
/// # Ok::<_, burn_dtensor::Error>(())
/// ```
///
/// What is set holds for the units, so for all clones of the module, until it is set anew. Local: no communication; but
/// every rank of the units' mesh must set the same, at the same place among its forwards and backwards.
#[derive(Debug, Clone)]
pub struct FsdpModule {
    units: Vec<Arc<Unit>>,
    /// How many of them are of the module itself.
    own: usize,
}

impl FsdpModule {
    /// Returns the units of `module` and of the modules inside it.
    ///
    /// # Errors
    /// [`ParamError::NotSharded`] if there are none, [`ParamError::Replaced`].
    pub fn of<M: Module>(module: &M) -> Result<Self> {
        let Scoped { own, inside } = Scoped::of(module)?.ok_or(ParamError::NotSharded)?;
        let own: Vec<_> = own.into_iter().map(|(unit, _)| unit).filter(|unit| unit.is_data_parallel()).collect();
        let count = own.len();
        let mut units: Vec<Arc<Unit>> = Vec::new();
        for unit in own.into_iter().chain(inside.into_iter().map(|(unit, _)| unit)) {
            if !units.iter().any(|known| Arc::ptr_eq(known, &unit)) {
                units.push(unit);
            }
        }
        if units.is_empty() { Err(ParamError::NotSharded.into()) } else { Ok(Self { units, own: count }) }
    }

    /// That of the module itself, without those inside; empty if it is none. Of parameters on different meshes, such as
    /// experts beside others, it has one for each.
    #[must_use]
    pub fn own(mut self) -> Self {
        self.units.truncate(self.own);
        self
    }

    /// Those of modules whose path matches a pattern, as
    /// [`FullyShard::with_units`](crate::fsdp::FullyShard::with_units) has them; of a unit of several modules that of
    /// one. The path is that in the model that was sharded as a whole, `root` of that model itself.
    ///
    /// # Errors
    /// [`ParamError::Pattern`], [`ParamError::NoMatch`].
    pub fn matching<S: Into<String>>(mut self, patterns: impl IntoIterator<Item = S>) -> Result<Self> {
        let texts: Vec<String> = patterns.into_iter().map(Into::into).collect();
        let patterns = PathPattern::parse_all(&texts)?;
        let paths = self.paths();
        if let Some(pattern) = patterns.iter().find(|pattern| !self.units.iter().any(|unit| unit.is_taken_by(pattern)))
        {
            let near_path = pattern.nearest(&paths).cloned();
            let (pattern, present) = (pattern.text().to_string(), paths.join(", "));
            return Err(ParamError::NoMatch { pattern, what: "unit", near_path, present }.into());
        }
        let is_taken = |unit: &Arc<Unit>| patterns.iter().any(|pattern| unit.is_taken_by(pattern));
        let own = self.units[..self.own].iter().filter(|unit| is_taken(unit)).count();
        self.units.retain(is_taken);
        Ok(Self { own, ..self })
    }

    /// The path of each in the model, `root` of the model itself; of a unit of several modules all of them.
    pub fn paths(&self) -> Vec<String> {
        self.units.iter().map(|unit| unit.label().to_string()).collect()
    }

    /// Whether all of them are gathered ahead, and there: the pass would not wait for other ranks. For forward
    /// [`unshard`](super::unshard) or a unit before does so; for a backward of this thread the units that it has come to.
    ///
    /// Local: no communication.
    pub fn is_prefetched(&self) -> bool {
        let is_gathered = |unit: &Arc<Unit>| unit.is_unsharded() || is_gathered_again(unit);
        self.units.iter().all(is_gathered)
    }

    fn set(&self, set: impl Fn(&mut RuntimeOptions)) {
        self.units.iter().for_each(|unit| set(&mut unit.control.lock()));
    }

    /// When gathered parameters are freed, from the next forward on.
    ///
    /// # Errors
    /// [`ParamError::ReshardRanks`] for another number of ranks than `fully_shard` was given, which has made the groups.
    pub fn set_reshard_after_forward(&self, reshard: ReshardAfterForward) -> Result<()> {
        self.units.iter().try_for_each(|unit| check_reshard(unit, reshard))?;
        self.set(|control| control.reshard = reshard);
        Ok(())
    }

    /// Whether what backward has computed with is freed after it, which is the default. What is kept serves the next
    /// forward from the same shards: where gradients of several batches are accumulated, that gathers nothing.
    pub fn set_reshard_after_backward(&self, reshard: bool) {
        self.set(|control| control.reshard_after_backward = reshard);
    }

    /// Whether backward gathers what was freed after forward, which is the default. A unit whose backward reads no weight,
    /// such as one of embeddings, can do without; a weight that is read all the same is an error on the rank that does.
    /// Parameters that a [checkpointed](super::checkpoint_activations) block reads are gathered nevertheless: it
    /// recomputes.
    pub fn set_unshard_in_backward(&self, unshard: bool) {
        self.set(|control| control.unshard_in_backward = unshard);
    }

    /// Whether the program's [`checkpointed`](super::checkpoint_activations) blocks compute again in backward, which is
    /// the default; without, they are as if the program had written [`unit`](fn@super::unit). From the next forward on.
    pub fn set_activation_checkpointing(&self, checkpoint: bool) {
        self.set(|control| control.checkpoint = checkpoint);
    }

    /// Whether a backward reduces gradients, which is the default. One that does not leaves them whole with the unit, where
    /// they take the memory of its parameters, and there are none for the optimizer; the next that does reduces the sum.
    ///
    /// A backward that reduces a unit of the model reduces at its end what waits of all units of the model, also of those that
    /// it does not enter: an expert to which the last batch is not routed, for example. Where several backwards train parts of
    /// one model for optimizers of their own, set the units of each part before the last backward of that part.
    ///
    /// It must come before the optimizer steps: gradients that wait for shards that are gone are
    /// [`ParamError::PendingGradients`] in the unit's next forward.
    pub fn set_requires_gradient_sync(&self, sync: bool) {
        self.set(|control| control.sync = sync);
    }

    /// Whether a backward that reduces gradients over the ranks that shard does so over the replicas (HSDP) too, which is
    /// the default. One that does not leaves this rank's shards of the sum with the unit, until one does.
    pub fn set_requires_all_reduce(&self, all_reduce: bool) {
        self.set(|control| control.all_reduce = all_reduce);
    }

    /// What sums of gradients are divided by; `None`, the default, is the number of data-parallel ranks: of all that have
    /// data of their own, also where fewer of them reduce a unit, such as one of experts.
    ///
    /// # Errors
    /// [`ParamError::DivideFactor`] unless it is positive, and `f32` has it and its reciprocal in full precision.
    pub fn set_gradient_divide_factor(&self, factor: impl Into<Option<f64>>) -> Result<()> {
        let factor = factor.into();
        let is_valid = |factor: f64| factor > 0.0 && (factor as f32).is_normal() && (factor.recip() as f32).is_normal();
        if let Some(factor) = factor.filter(|factor| !is_valid(*factor)) {
            return Err(ParamError::DivideFactor { factor }.into());
        }
        self.change_averaging(|control| control.divide_factor = factor);
        Ok(())
    }

    /// Has reductions sum alone, and divides the sums after: for an engine without averages. Default: false.
    pub fn set_force_sum_reduction(&self, force: bool) {
        self.change_averaging(|control| control.force_sum = force);
    }

    /// Has `hook` run on a unit's gradients once they are averaged, over the replicas too (HSDP), before the optimizer has
    /// them. It returns what they are to be: averages over further ranks, for example, or
    /// gradients that are clipped. It runs on the rank's thread in backward, for one unit after another, in an order
    /// that is alike on all ranks, so it may be collective.
    ///
    /// It is given zeros for a parameter that no rank has used, which so has a gradient.
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

    /// Has no hook run.
    pub fn remove_all_reduce_hook(&self) {
        self.set(|control| control.hook = None);
    }

    /// Has these make the collectives of units, in the place of their groups.
    pub fn set_collectives(&self, collectives: impl UnitCollectives + 'static) {
        let collectives = Collectives::new(collectives);
        self.set(|control| control.collectives = Some(collectives.clone()));
    }

    /// Has the groups make the collectives again.
    pub fn remove_collectives(&self) {
        self.set(|control| control.collectives = None);
    }

    fn change_averaging(&self, set: impl Fn(&mut RuntimeOptions)) {
        self.set(set);
        // They are of the operations that they were made for.
        self.units.iter().for_each(|unit| unit.plans.forget());
    }

    /// Backwards reduce nothing as long as the guard lives: [`set_requires_gradient_sync`](Self::set_requires_gradient_sync)
    /// before and after.
    #[must_use = "gradients are reduced again once the guard is dropped"]
    pub fn no_sync(&self) -> NoSync {
        let before = self.units.iter().map(|unit| (unit.clone(), unit.control.lock().sync)).collect();
        self.set_requires_gradient_sync(false);
        NoSync(before)
    }

    /// The units to gather next, once one of these is gathered for forward: each in the order given, before it is entered.
    ///
    /// They are units inside the outermost module whose forward is under way; others are passed over. What was gathered
    /// and not entered when that is over, is dropped.
    pub fn set_forward_prefetch(&self, next: impl Into<Prefetch>) {
        let next = next.into().units();
        self.units.iter().for_each(|unit| unit.prefetch.lock().forward.clone_from(&next));
    }

    /// The units to gather next, once backward comes to one of these.
    pub fn set_backward_prefetch(&self, next: impl Into<Prefetch>) {
        let next = next.into().units();
        self.units.iter().for_each(|unit| unit.prefetch.lock().backward.clone_from(&next));
    }

    /// Frees gathered parameters: those that [`unshard`](super::unshard), a prefetch or an earlier backward has left,
    /// and those that a forward keeps for its backward, which gathers them again.
    ///
    /// # Collective
    /// Of units whose forward keeps its parameters for a backward to come.
    pub fn reshard(&self) {
        self.units.iter().for_each(|unit| unit.reshard());
    }

    /// Drops what an iteration has left that was given up, by a panic that the program has caught: gradients that wait to be
    /// reduced or are under way, parameters that are gathered. Parameters and optimizers are as before the iteration; what was
    /// [set](FsdpModule) stays.
    pub fn reset_iter_state(&self) {
        give_up_backward();
        for unit in &self.units {
            unit.reshard();
            unit.waiting.clear();
        }
    }
}

/// Whether parameters of `unit` can be kept so.
///
/// # Errors
/// [`ParamError::ReshardRanks`].
fn check_reshard(unit: &Unit, reshard: ReshardAfterForward) -> Result<(), ParamError> {
    let (Some(data), ReshardAfterForward::Ranks(ranks)) = (&unit.data, reshard) else { return Ok(()) };
    let is_made = |group: &Communicator| group.group().size() == ranks;
    match ranks == 1 || is_made(&data.shard) || data.post_forward_group.as_ref().is_some_and(is_made) {
        true => Ok(()),
        false => Err(ParamError::ReshardRanks { unit: unit.label().to_string(), ranks }),
    }
}

/// Which units are gathered before they are needed.
#[derive(Debug, Clone, Default)]
pub enum Prefetch {
    /// In backward the one that forward has left before. In forward the one that was entered next the last time, where
    /// data moves while ranks compute: between processes, and not between threads. The default.
    #[default]
    Auto,
    /// These.
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
            Self::Units(units) => Some(units.iter().flat_map(|units| &units.units).map(Arc::downgrade).collect()),
        }
    }
}

/// Keeps the backwards of some units from reducing gradients; see [`FsdpModule::no_sync`].
#[derive(Debug)]
pub struct NoSync(Vec<(Arc<Unit>, bool)>);

impl Drop for NoSync {
    fn drop(&mut self) {
        self.0.drain(..).for_each(|(unit, sync)| unit.control.lock().sync = sync);
    }
}
