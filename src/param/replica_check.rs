//! Replica check: compares values that must be identical on several ranks, every few passes, to
//! detect silent data corruption.
//!
//! | values of a pass | identical on the ranks that | digests are computed |
//! |---|---|---|
//! | gathered weights | shard | when forward leaves the unit |
//! | averaged gradients | replicate | when they are reduced |
//! | gradients of parameters placed `Replicate`, averaged over the ranks that shard | shard | when they are averaged |
//! | on request, stored shards, and parameters placed `Replicate` | replicate | when its gradients are reduced |
//! | on request, parameters placed `Replicate` | shard | when its gradients are reduced |
//!
//! This crate computes the first three kinds: in one order, or by copies. Stored values are the
//! optimizer's work. They may differ in their last bits on processors of different kinds, so they
//! are compared on request only.
//!
//! Digests are sent with the first reduction over these ranks: those of weights with the pass's own
//! reduction, those of gradients with the next reduction of any unit. So most of them are compared
//! in the same backward. A pass of a single parameter, read outside its unit, has its own counter.

use std::mem;
use std::sync::OnceLock;
use std::sync::atomic::Ordering;

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
    /// Counts a pass that trains a parameter. `alone` is the parameter if the pass is of a single
    /// one, read outside its unit. Returns the state of the check if this pass is checked.
    pub(super) fn begin_pass(&self, alone: Option<usize>) -> Option<CheckedPass> {
        let data = self
            .data
            .as_ref()
            .filter(|data| data.verify.every > 0 && data.ranks() > 1)?;
        let step =
            self.passed[alone.map_or(0, |param| param + 1)].fetch_add(1, Ordering::Relaxed) + 1;
        step.is_multiple_of(data.verify.every).then(|| CheckedPass {
            step,
            gathered: OnceLock::new(),
        })
    }

    /// Computes the digests of the gathered weights with which forward computed.
    pub(super) fn look_at_gathered<'a>(
        &self,
        due: &CheckedPass,
        members: &[usize],
        unsharded: impl Iterator<Item = &'a DispatchTensor>,
    ) {
        if self.data.as_ref().and_then(sharding).is_some() {
            let sharded = members
                .iter()
                .zip(unsharded)
                .filter(|(member, _)| self.params[**member].is_sharded());
            let _ = due
                .gathered
                .set(memory::digests(sharded.map(|(_, full)| full)));
        }
    }

    /// Returns the digests that the reductions of a pass compare: those of earlier gradients, and,
    /// if this pass is checked, those of its weights. `shards` are this rank's shards of `members`.
    pub(super) fn carried(
        &self,
        due: Option<&CheckedPass>,
        members: &[usize],
        shards: &[DispatchTensor],
    ) -> PendingDigests {
        let Some(data) = &self.data else {
            return PendingDigests::default();
        };
        // Gradients first, because a gradient that differs makes weights differ.
        let mut carried = mem::take(&mut *data.verify.gradients.lock());
        if let Some(due) = due {
            carried.due = Some(due.step);
            if data.verify.stored {
                let stored =
                    |ranks| self.same_on(ranks, ReplicatedValue::Weight, due.step, members, shards);
                carried.replicate.extend(stored(ComparedRanks::Replicate));
                carried.shard.extend(stored(ComparedRanks::Shard));
            }
            carried.shard.extend(self.gathered(due, members));
        }
        carried
    }

    /// Computes digests of the `gradients` of the checked pass `step`, once they are averaged over
    /// these ranks.
    pub(super) fn compare_gradients(
        &self,
        ranks: ComparedRanks,
        step: u64,
        members: &[usize],
        gradients: &[DispatchTensor],
    ) {
        if let Some(data) = &self.data {
            let digests = self.same_on(ranks, ReplicatedValue::Gradient, step, members, gradients);
            let mut pending = data.verify.gradients.lock();
            match ranks {
                ComparedRanks::Shard => pending.shard.extend(digests),
                ComparedRanks::Replicate => pending.replicate.extend(digests),
            }
        }
    }

    /// Returns the digests of those of `tensors`, one for each of `members`, that must be identical
    /// on several of these ranks.
    fn same_on(
        &self,
        ranks: ComparedRanks,
        of: ReplicatedValue,
        step: u64,
        members: &[usize],
        tensors: &[DispatchTensor],
    ) -> Option<Digests> {
        let data = self.data.as_ref()?;
        match ranks {
            ComparedRanks::Shard => sharding(data)?,
            ComparedRanks::Replicate => {
                data.replicate.as_ref().filter(|group| has_others(group))?
            }
        };
        let params = members
            .iter()
            .map(|&member| &self.params[member])
            .zip(tensors);
        let same =
            params.filter(|(param, _)| ranks == ComparedRanks::Replicate || !param.is_sharded());
        let values = memory::digests(same.clone().map(|(_, tensor)| tensor));
        digests(of, step, same.map(|(param, _)| param), values)
    }

    /// Returns the digests of the gathered weights. They are unknown if forward has not left the
    /// unit on this rank.
    fn gathered(&self, due: &CheckedPass, members: &[usize]) -> Option<Digests> {
        sharding(self.data.as_ref()?)?;
        let sharded = members
            .iter()
            .map(|&member| &self.params[member])
            .filter(|param| param.is_sharded());
        let values = due
            .gathered
            .get()
            .cloned()
            .unwrap_or_else(|| vec![None; sharded.clone().count()]);
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
    (!values.is_empty()).then(|| Digests {
        of,
        step,
        names,
        values: values.into(),
    })
}

/// Interval and extent of the replica check, and the digests that wait for the next reduction.
#[derive(Debug, Default)]
pub(crate) struct ReplicaCheck {
    /// Every n-th pass of a unit is checked, where n is this number; 0 disables the check.
    pub(crate) every: u64,
    /// True if stored weights are compared too.
    pub(crate) stored: bool,
    pub(crate) gradients: Mutex<PendingDigests>,
}

/// Ranks on which values are compared: those that shard, or the replicas.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ComparedRanks {
    Shard,
    Replicate,
}

/// Digests that the reductions of a pass compare.
#[derive(Debug, Default)]
pub(crate) struct PendingDigests {
    /// Number of the pass if its reduced gradients are compared next; `None` otherwise.
    pub(super) due: Option<u64>,
    /// Digests to compare over the ranks that shard.
    pub(super) shard: Vec<Digests>,
    /// Digests to compare over the replicas.
    pub(super) replicate: Vec<Digests>,
}

/// A pass whose replicated values are compared.
#[derive(Debug)]
pub(crate) struct CheckedPass {
    /// Number of the pass, counted from 1.
    pub(super) step: u64,
    /// Digests of the gathered weights of sharded parameters.
    pub(super) gathered: OnceLock<Vec<Option<u64>>>,
}
