//! [`Unit`]: an FSDP unit, whose parameters are gathered and reduced together.

use std::num::NonZeroUsize;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};

use lru::LruCache;
use parking_lot::Mutex;

use super::counts::ProgramCounts;
use super::reduction::gradients::AccumulatedGrads;
use super::replica_check::CheckedPass;
use super::shards::LocalShards;
use super::storage::UnshardedCopies;
use super::unit_comm::UnitComm;
use super::unit_name::UnitName;
use super::unit_spec::{DataParallelGroups, UnitParam, UnitSpec};
use crate::Result;
use crate::burn_compat::is_about_dtypes;
use crate::comm::{Communicator, ShardedModel};

/// An FSDP unit: its spec and its collectives, which are in [`UnitComm`], and the state that
/// forward and backward change.
#[derive(Debug)]
pub(crate) struct Unit {
    pub(crate) comm: Arc<UnitComm>,
    /// Modules that have already passed `check_not_replaced`, each as (depth of its first
    /// distributed parameter, that parameter's index, number of distributed parameters, number of
    /// other float tensors).
    checked_modules: Mutex<LruCache<[usize; 4], ()>>,
    /// Numbers of passes that trained a parameter: one count for the unit, then one for each
    /// parameter that was read outside the unit.
    passed: Box<[AtomicU64]>,
    /// Gradients that are accumulated without reduction.
    pub(crate) accumulated: AccumulatedGrads,
    /// The unsharded copies of its parameters.
    pub(crate) copies: UnshardedCopies,
    /// Numbers of its forwards and backwards.
    pub(crate) counts: Arc<ProgramCounts>,
    /// The unit that was entered after this one in the most recent forward.
    pub(crate) follower: Mutex<Option<Weak<Unit>>>,
    /// The units to prefetch next, if the program has named them.
    pub(crate) prefetch: Mutex<Prefetches>,
    /// The parameter that was first read outside the unit.
    pub(crate) first_outside: OnceLock<usize>,
    /// True if the program was warned about reads outside the unit.
    pub(crate) warned: AtomicBool,
}

/// The units that are prefetched when another one is gathered, if the program has named them.
#[derive(Debug, Clone, Default)]
pub(crate) struct Prefetches {
    pub(crate) forward: Option<Vec<Weak<Unit>>>,
    pub(crate) backward: Option<Vec<Weak<Unit>>>,
}

/// Maximum number of modules that a unit remembers to have passed `check_not_replaced`.
const MAX_CHECKED_MODULES: NonZeroUsize = NonZeroUsize::new(16).unwrap();

impl Unit {
    /// Creates the unit of the modules at `path`.
    ///
    /// # Errors
    /// [`ParamError::TensorMeshes`](super::ParamError::TensorMeshes) for parameters parallelized
    /// over different meshes.
    pub(crate) fn new(
        path: UnitName,
        params: Vec<UnitParam>,
        data: Option<DataParallelGroups>,
    ) -> Result<Self> {
        let passed = (0..=params.len()).map(|_| AtomicU64::new(0)).collect();
        let spec = UnitSpec::new(params, data)?;
        Ok(Self {
            comm: Arc::new(UnitComm::new(path, spec)),
            checked_modules: Mutex::new(LruCache::new(MAX_CHECKED_MODULES)),
            passed,
            accumulated: AccumulatedGrads::default(),
            copies: UnshardedCopies::default(),
            counts: Arc::default(),
            follower: Mutex::default(),
            prefetch: Mutex::default(),
            first_outside: OnceLock::new(),
            warned: AtomicBool::new(false),
        })
    }

    pub(crate) fn spec(&self) -> &UnitSpec {
        &self.comm.spec
    }

    pub(crate) fn label(&self) -> Arc<str> {
        self.comm.label()
    }

    /// Runs `check`, unless a module with these properties has passed it.
    pub(crate) fn check_once<E>(
        &self,
        key: [usize; 4],
        check: impl FnOnce() -> Result<(), E>,
    ) -> Result<(), E> {
        if self.checked_modules.lock().get(&key).is_none() {
            check()?;
            self.checked_modules.lock().put(key, ());
        }
        Ok(())
    }

    /// Counts a pass that trains a parameter. `alone` is the parameter if the pass is of a single
    /// one, read outside its unit. Returns the state of the replica check if this pass is checked.
    pub(super) fn next_checked_pass(&self, alone: Option<usize>) -> Option<CheckedPass> {
        let data = self.spec().data.as_ref()?;
        let every = data.verify.every;
        if every == 0 || data.ranks() == 1 {
            return None;
        }
        let count = &self.passed[alone.map_or(0, |param| param + 1)];
        let step = count.fetch_add(1, Ordering::Relaxed) + 1;
        step.is_multiple_of(every).then(|| CheckedPass::new(step))
    }

    /// Returns true if a backward may now leave gradients to be reduced later.
    pub(crate) fn puts_off(&self) -> bool {
        self.comm.puts_off()
    }

    /// Records that an optimizer step, or another operation, replaces the unit's parameters. If the
    /// unit's backwards reduce gradients, accumulated gradients that are not reduced yet have
    /// missed the step.
    pub(crate) fn note_step(&self) {
        if self.accumulated.is_any() && !self.comm.puts_off() {
            self.accumulated.miss_step();
        }
    }

    /// Returns the signature that ranks of `group` must agree on for a collective of the model of
    /// these units. Returns `None` if they are not the ranks that shard one of them.
    pub(crate) fn model_over<'a>(
        mut units: impl Iterator<Item = &'a Self>,
        group: &Communicator,
    ) -> Option<ShardedModel> {
        units.find_map(|unit| unit.spec().data.as_ref()?.model_over(group))
    }

    /// Describes what decides the next all-gather of these shards. In debug builds it is part of
    /// the call, so that ranks that decide by different inputs fail at the decision.
    pub(crate) fn decision(&self, shards: &LocalShards) -> Option<Arc<str>> {
        cfg!(debug_assertions).then(|| {
            let waiting = self.counts.waiting();
            let swept = self.counts.sweeps();
            let copies = self.copies.describe(shards);
            format!("{copies}; {waiting} forwards wait for a backward, swept {swept} times").into()
        })
    }

    /// Returns a clause about the element type that the unit's policy sets, if it sets one, with the
    /// remedy for a panic whose `text` is about element types. `inside` are units inside this one,
    /// whose outputs it may have computed with.
    pub(super) fn precision_note(&self, text: &str, inside: &[(Arc<Self>, LocalShards)]) -> String {
        let Some(dtype) = self
            .spec()
            .precision()
            .inputs
            .or_else(|| self.spec().params.iter().find_map(|param| param.compute))
        else {
            return String::new();
        };
        let note = format!(", which computes in {}", dtype.name());
        if !is_about_dtypes(text) {
            return note;
        }
        let returns_other = |(unit, _): &(Arc<Self>, _)| {
            Some((
                unit.label(),
                unit.spec()
                    .precision()
                    .outputs
                    .filter(|&out| out != dtype)?,
            ))
        };
        let inner = inside.iter().find_map(returns_other).map(|(label, out)| {
        format!(
            ". Unit `{label}` inside it returns {}: set `with_output_dtype` for the outermost unit only, and a policy \
             without it for the others (`with_mixed_precision_for`)",
            out.name()
        )
    });
        let constants = ". Tensors of one operation must have the same dtype: inside the unit, create constants in the \
                     dtype of its input (`x.dtype()`), or create them before and pass them in its input, which is \
                     cast";
        note + inner.as_deref().unwrap_or(constants)
    }
}
