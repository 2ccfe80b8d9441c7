//! What several ranks hold alike, compared every few passes: whatever a host has silently changed shows.
//!
//! | of a pass | alike on the ranks that | looked at |
//! |---|---|---|
//! | stored shards, and parameters placed `Replicate` | replicate | as its gradients are reduced |
//! | parameters placed `Replicate` | shard | the same |
//! | gathered weights | shard | as forward leaves the unit |
//! | gradients, averaged | replicate | when they are there |
//! | of parameters placed `Replicate`, averaged over those | shard | the same |
//!
//! Digests travel with a first reduction over these ranks: those of weights with the pass's own; those of gradients with
//! the next, of whatever unit, so that most are compared in the same backward. A pass of one parameter, read outside its
//! unit, is counted apart.

use std::mem;
use std::sync::OnceLock;
use std::sync::atomic::Ordering;

use burn::backend::DispatchTensor;

use super::replica_check::{CheckedPass, PendingDigests};
use super::unit::{DataParallelGroups, Unit, UnitParam};
use crate::comm::{Communicator, Digests, ReplicatedValue};
use crate::memory;

/// Whether there is anybody to compare with.
fn has_others(group: &Communicator) -> bool {
    group.group().size() > 1
}

/// The ranks that shard, if there are several.
fn sharding(data: &DataParallelGroups) -> Option<&Communicator> {
    Some(&data.shard).filter(|group| has_others(group))
}

impl Unit {
    /// A pass that trains a parameter begins, of the parameter `alone` if of one. Returns it if it is compared.
    pub(super) fn begin_pass(&self, alone: Option<usize>) -> Option<CheckedPass> {
        let data = self.data.as_ref().filter(|data| data.verify.every > 0 && data.ranks() > 1)?;
        let step = self.passed.0[alone.map_or(0, |param| param + 1)].fetch_add(1, Ordering::Relaxed) + 1;
        step.is_multiple_of(data.verify.every).then(|| CheckedPass { step, gathered: OnceLock::new() })
    }

    /// Forward has computed with these `wholes` of `members`.
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

    /// What the reductions of a pass compare, of this rank's `shards` of `members` if it is due.
    pub(super) fn carried(
        &self,
        due: Option<&CheckedPass>,
        members: &[usize],
        shards: &[DispatchTensor],
    ) -> PendingDigests {
        let Some(data) = &self.data else { return PendingDigests::default() };
        // First, for a gradient that differs makes weights differ.
        let mut carried = mem::take(&mut *data.verify.gradients.lock());
        if let Some(due) = due {
            carried.due = Some(due.step);
            carried.replicate.extend(self.same_on_replicas(ReplicatedValue::Weight, due.step, members, shards));
            carried.shard.extend(self.same_on_shards(ReplicatedValue::Weight, due.step, members, shards));
            carried.shard.extend(self.gathered(due, members));
        }
        carried
    }

    /// The `gradients` of the pass `step`, which is compared, are averaged over the ranks that shard.
    pub(super) fn compare_sharded(&self, step: u64, members: &[usize], gradients: &[DispatchTensor]) {
        if let Some(data) = &self.data {
            let digests = self.same_on_shards(ReplicatedValue::Gradient, step, members, gradients);
            data.verify.gradients.lock().shard.extend(digests);
        }
    }

    /// They are averaged over all ranks.
    pub(super) fn compare_replicated(&self, step: u64, members: &[usize], gradients: &[DispatchTensor]) {
        if let Some(data) = &self.data {
            let digests = self.same_on_replicas(ReplicatedValue::Gradient, step, members, gradients);
            data.verify.gradients.lock().replicate.extend(digests);
        }
    }

    /// Digests of `tensors`, one for each of `members`, if there are replicas that hold them alike.
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

    /// Of those that are not cut, if there are several ranks that shard.
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

    /// Of the gathered weights, which nobody knows who has left no forward.
    fn gathered(&self, due: &CheckedPass, members: &[usize]) -> Option<Digests> {
        sharding(self.data.as_ref()?)?;
        let sharded = members.iter().map(|&member| &self.params[member]).filter(|param| param.sharding.is_some());
        let values = due.gathered.get().cloned().unwrap_or_else(|| vec![None; sharded.clone().count()]);
        digests(ReplicatedValue::GatheredWeight, due.step, sharded, values)
    }
}

/// Those of these parameters; `None` if there are none.
fn digests<'a>(
    of: ReplicatedValue,
    step: u64,
    params: impl Iterator<Item = &'a UnitParam>,
    values: Vec<Option<u64>>,
) -> Option<Digests> {
    let names = params.map(|param| param.path.clone()).collect();
    (!values.is_empty()).then(|| Digests { of, step, names, values: values.into() })
}
