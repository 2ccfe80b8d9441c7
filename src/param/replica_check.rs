//! Replica check: compares values that must be identical on several ranks, every few passes, to detect silent data
//! corruption.
//!
//! | values of a pass | identical on the ranks that | digests are computed |
//! |---|---|---|
//! | gathered weights | shard | when forward leaves the unit |
//! | averaged gradients | replicate | when they are reduced |
//! | gradients of parameters placed `Replicate`, averaged over the ranks that shard | shard | when they are averaged |
//! | on request, stored shards, and parameters placed `Replicate` | replicate | when its gradients are reduced |
//! | on request, parameters placed `Replicate` | shard | when its gradients are reduced |
//!
//! This crate computes the first three kinds: in one order, or by copies. Stored values are the optimizer's work. They may
//! differ in their last bits on processors of different kinds, so they are compared on request only.
//!
//! Digests are sent with the first reduction over these ranks: those of weights with the pass's own reduction,
//! those of gradients with the next reduction of any unit. So most of them are compared in the same backward. A
//! pass of a single parameter, read outside its unit, has its own counter.

use std::mem;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

use burn::backend::DispatchTensor;
use parking_lot::Mutex;

use super::unit::{DataParallelGroups, Unit, UnitParam};
use crate::comm::{Communicator, Digests, ReplicatedValue};
use crate::memory;

/// Returns true if the group has other ranks to compare with.
fn has_others(group: &Communicator) -> bool {
    group.group().size() > 1
}

/// Returns the group of the ranks that shard, if there are several.
fn sharding(data: &DataParallelGroups) -> Option<&Communicator> {
    Some(&data.shard).filter(|group| has_others(group))
}

impl Unit {
    /// Counts a pass that trains a parameter. `alone` is the parameter if the pass is of a single one, read outside
    /// its unit. Returns the state of the check if this pass is checked.
    pub(super) fn begin_pass(&self, alone: Option<usize>) -> Option<CheckedPass> {
        let data = self.data.as_ref().filter(|data| data.verify.every > 0 && data.ranks() > 1)?;
        let step = self.passed.0[alone.map_or(0, |param| param + 1)].fetch_add(1, Ordering::Relaxed) + 1;
        step.is_multiple_of(data.verify.every).then(|| CheckedPass { step, gathered: OnceLock::new() })
    }

    /// Computes the digests of the gathered weights with which forward computed.
    pub(super) fn look_at_gathered<'a>(
        &self,
        due: &CheckedPass,
        members: &[usize],
        unsharded: impl Iterator<Item = &'a DispatchTensor>,
    ) {
        if self.data.as_ref().and_then(sharding).is_some() {
            let sharded = members.iter().zip(unsharded).filter(|(member, _)| self.params[**member].sharding.is_some());
            let _ = due.gathered.set(memory::digests(sharded.map(|(_, full)| full)));
        }
    }

    /// Returns the digests that the reductions of a pass compare: those of earlier gradients, and, if this pass is
    /// checked, those of its weights. `shards` are this rank's shards of `members`.
    pub(super) fn carried(
        &self,
        due: Option<&CheckedPass>,
        members: &[usize],
        shards: &[DispatchTensor],
    ) -> PendingDigests {
        let Some(data) = &self.data else { return PendingDigests::default() };
        // Gradients first, because a gradient that differs makes weights differ.
        let mut carried = mem::take(&mut *data.verify.gradients.lock());
        if let Some(due) = due {
            carried.due = Some(due.step);
            if data.verify.stored {
                carried.replicate.extend(self.same_on_replicas(ReplicatedValue::Weight, due.step, members, shards));
                carried.shard.extend(self.same_on_shards(ReplicatedValue::Weight, due.step, members, shards));
            }
            carried.shard.extend(self.gathered(due, members));
        }
        carried
    }

    /// Computes digests of the `gradients` of the checked pass `step`, once they are averaged over the ranks that
    /// shard.
    pub(super) fn compare_sharded(&self, step: u64, members: &[usize], gradients: &[DispatchTensor]) {
        if let Some(data) = &self.data {
            let digests = self.same_on_shards(ReplicatedValue::Gradient, step, members, gradients);
            data.verify.gradients.lock().shard.extend(digests);
        }
    }

    /// Computes digests of the `gradients` of the checked pass `step`, once they are averaged over all ranks.
    pub(super) fn compare_replicated(&self, step: u64, members: &[usize], gradients: &[DispatchTensor]) {
        if let Some(data) = &self.data {
            let digests = self.same_on_replicas(ReplicatedValue::Gradient, step, members, gradients);
            data.verify.gradients.lock().replicate.extend(digests);
        }
    }

    /// Returns the digests of `tensors`, one for each of `members`, if other replicas hold the same values.
    fn same_on_replicas(
        &self,
        of: ReplicatedValue,
        step: u64,
        members: &[usize],
        tensors: &[DispatchTensor],
    ) -> Option<Digests> {
        self.data.as_ref()?.replicate.as_ref().filter(|group| has_others(group))?;
        let params = members.iter().map(|&member| &self.params[member]);
        digests(of, step, params, memory::digests(tensors.iter()))
    }

    /// Returns the digests of the tensors of replicated parameters, if several ranks shard the unit.
    fn same_on_shards(
        &self,
        of: ReplicatedValue,
        step: u64,
        members: &[usize],
        tensors: &[DispatchTensor],
    ) -> Option<Digests> {
        sharding(self.data.as_ref()?)?;
        let params = members.iter().map(|&member| &self.params[member]);
        let replicated = params.zip(tensors).filter(|(param, _)| param.sharding.is_none());
        let values = memory::digests(replicated.clone().map(|(_, tensor)| tensor));
        digests(of, step, replicated.map(|(param, _)| param), values)
    }

    /// Returns the digests of the gathered weights. They are unknown if forward has not left the unit on this rank.
    fn gathered(&self, due: &CheckedPass, members: &[usize]) -> Option<Digests> {
        sharding(self.data.as_ref()?)?;
        let sharded = members.iter().map(|&member| &self.params[member]).filter(|param| param.sharding.is_some());
        let values = due.gathered.get().cloned().unwrap_or_else(|| vec![None; sharded.clone().count()]);
        digests(ReplicatedValue::GatheredWeight, due.step, sharded, values)
    }
}

/// Combines the digests of these parameters; `None` if there are none.
fn digests<'a>(
    of: ReplicatedValue,
    step: u64,
    params: impl Iterator<Item = &'a UnitParam>,
    values: Vec<Option<u64>>,
) -> Option<Digests> {
    let names = params.map(|param| param.path.clone()).collect();
    (!values.is_empty()).then(|| Digests { of, step, names, values: values.into() })
}

/// Interval and extent of the replica check, and the digests that wait for the next reduction.
#[derive(Debug)]
pub(crate) struct ReplicaCheck {
    pub(super) every: u64,
    /// True if stored weights are compared too.
    pub(super) stored: bool,
    pub(super) gradients: Mutex<PendingDigests>,
}

/// Digests that the reductions of a pass compare.
#[derive(Debug, Default)]
pub(super) struct PendingDigests {
    /// Number of the pass if its reduced gradients are compared next; `None` otherwise.
    pub(super) due: Option<u64>,
    /// Digests to compare over the ranks that shard.
    pub(super) shard: Vec<Digests>,
    /// Digests to compare over the replicas.
    pub(super) replicate: Vec<Digests>,
}

impl ReplicaCheck {
    /// Checks every n-th pass of a unit, where n is `passes`; 0 disables the check. It includes the stored weights if
    /// `stored` is true.
    pub(crate) fn every(passes: u64, stored: bool) -> Self {
        Self { every: passes, stored, gradients: Mutex::default() }
    }

    pub(crate) fn passes(&self) -> u64 {
        self.every
    }

    pub(crate) fn includes_stored(&self) -> bool {
        self.stored
    }
}

/// Numbers of passes that trained a parameter: one count for the unit, then one for each parameter that was read
/// outside the unit.
#[derive(Debug)]
pub(crate) struct Passed(pub(super) Box<[AtomicU64]>);

impl Passed {
    /// Creates the counters of a unit with this number of parameters.
    pub(super) fn new(params: usize) -> Self {
        Self((0..=params).map(|_| AtomicU64::new(0)).collect())
    }
}

/// A pass whose replicated values are compared.
#[derive(Debug)]
pub(super) struct CheckedPass {
    /// Number of the pass, counted from 1.
    pub(super) step: u64,
    /// Digests of the gathered weights of sharded parameters.
    pub(super) gathered: OnceLock<Vec<Option<u64>>>,
}
