//! Digests of the values that the [replica check](super::replica_check) compares.

use std::mem;

use burn::backend::DispatchTensor;

use super::replica_check::{CheckedPass, ComparedRanks, PendingDigests};
use super::unit_spec::{DataParallelGroups, UnitParam, UnitSpec};
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

impl UnitSpec {
    /// Computes the digests of the gathered weights with which forward computed.
    pub(super) fn digest_gathered(
        &self,
        checked: &CheckedPass,
        members: &[usize],
        weights: &[DispatchTensor],
    ) {
        if self.data.as_ref().and_then(sharding).is_none() {
            return;
        }
        let sharded = members
            .iter()
            .zip(weights)
            .filter(|(member, _)| self.params[**member].is_sharded());
        let digests = memory::digests(sharded.map(|(_, weight)| weight));
        // A pass whose forward is left twice keeps the first digests.
        let _ = checked.gathered.set(digests);
    }

    /// Returns the digests that the reductions of a pass compare: those of earlier gradients, and,
    /// if this pass is checked, those of its weights. `shards` are this rank's shards of `members`.
    pub(super) fn pending_digests(
        &self,
        checked: Option<&CheckedPass>,
        members: &[usize],
        shards: &[DispatchTensor],
    ) -> PendingDigests {
        let Some(data) = &self.data else {
            return PendingDigests::default();
        };
        // Gradients first, because a gradient that differs makes weights differ.
        let mut pending = mem::take(&mut *data.verify.gradients.lock());
        if let Some(checked) = checked {
            pending.checked_step = Some(checked.step);
            if data.verify.stored {
                let stored = |ranks| {
                    self.same_on(
                        ranks,
                        ReplicatedValue::Weight,
                        checked.step,
                        members,
                        shards,
                    )
                };
                pending.replicate.extend(stored(ComparedRanks::Replicate));
                pending.shard.extend(stored(ComparedRanks::Shard));
            }
            pending.shard.extend(self.gathered(checked, members));
        }
        pending
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
    fn gathered(&self, checked: &CheckedPass, members: &[usize]) -> Option<Digests> {
        sharding(self.data.as_ref()?)?;
        let sharded = members
            .iter()
            .map(|&member| &self.params[member])
            .filter(|param| param.is_sharded());
        let values = checked
            .gathered
            .get()
            .cloned()
            .unwrap_or_else(|| vec![None; sharded.clone().count()]);
        digests(
            ReplicatedValue::GatheredWeight,
            checked.step,
            sharded,
            values,
        )
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
