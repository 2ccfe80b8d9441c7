//! What several ranks hold alike, compared every few passes: whatever a host has silently changed shows.
//!
//! | of a pass | alike on the ranks that | looked at |
//! |---|---|---|
//! | stored shards, and parameters placed `Replicate` | replicate | as its gradients are reduced |
//! | parameters placed `Replicate` | shard | the same |
//! | gathered weights | shard | as forward leaves the unit |
//! | averaged gradients | replicate | when they are there |
//! | averaged gradients of parameters placed `Replicate` | shard | the same |
//!
//! Digests travel with the unit's first reduction over these ranks: those of weights with the pass's own, those of
//! gradients with the next, whatever pass that is of. A pass of one parameter, read outside its unit, is counted apart.

use std::mem;
use std::sync::OnceLock;
use std::sync::atomic::Ordering;

use burn::backend::DispatchTensor;
use itertools::izip;

use super::unit::{DataParallel, Unit, UnitParam};
use super::verifier::{Carried, Due};
use crate::comm::{Communicator, Digests, Replicated};
use crate::memory;

/// Whether there is anybody to compare with.
fn has_others(group: &Communicator) -> bool {
    group.group().size() > 1
}

fn replicates(data: &DataParallel) -> bool {
    data.replicate.as_ref().is_some_and(has_others)
}

impl Unit {
    /// A pass that trains a parameter begins, of the parameter `alone` if of one. Returns it if it is compared.
    pub(super) fn begin_pass(&self, alone: Option<usize>) -> Option<Due> {
        let data = self.data.as_ref().filter(|data| data.verify_every > 0 && data.ranks() > 1)?;
        let step = self.verifier.passes[alone.map_or(0, |param| param + 1)].fetch_add(1, Ordering::Relaxed) + 1;
        step.is_multiple_of(data.verify_every).then(|| Due { step, gathered: OnceLock::new() })
    }

    /// Forward has computed with these `wholes` of `members`.
    pub(super) fn look_at_gathered<'a>(
        &self,
        due: &Due,
        members: &[usize],
        wholes: impl Iterator<Item = &'a DispatchTensor>,
    ) {
        if self.data.as_ref().is_some_and(|data| has_others(&data.shard)) {
            let cut = members.iter().zip(wholes).filter(|(member, _)| self.params[**member].cut.is_some());
            let _ = due.gathered.set(memory::digests(cut.map(|(_, whole)| whole)));
        }
    }

    /// What the reductions of a pass carry, of this rank's `shards` of `members`, if it is compared.
    pub(super) fn carried(&self, due: Option<&Due>, members: &[usize], shards: &[DispatchTensor]) -> Carried {
        // First, for a gradient that differs makes weights differ.
        let mut carried = mem::take(&mut *self.verifier.gradients.lock());
        let Some(due) = due else { return carried };
        let weights = self.alike(Replicated::Weight, due.step, members, shards);
        carried.due = Some(due.step);
        carried.replicate.extend(weights.replicate);
        carried.shard.extend(weights.shard);
        if self.data.as_ref().is_some_and(|data| has_others(&data.shard)) {
            let cut = members.iter().map(|&member| &self.params[member]).filter(|param| param.cut.is_some());
            let unknown = || vec![None; cut.clone().count()];
            let values = due.gathered.get().cloned().unwrap_or_else(unknown);
            carried.shard.extend(digests(Replicated::GatheredWeight, due.step, cut.clone().zip(values)));
        }
        carried
    }

    /// The averaged `gradients` of the pass `step` are there, which is compared.
    pub(super) fn keep_gradients(&self, step: u64, members: &[usize], gradients: &[DispatchTensor]) {
        *self.verifier.gradients.lock() = self.alike(Replicated::Gradient, step, members, gradients);
    }

    /// Digests of those of these `tensors`, one for each of `members`, that other ranks hold alike.
    fn alike(&self, of: Replicated, step: u64, members: &[usize], tensors: &[DispatchTensor]) -> Carried {
        let Some(data) = &self.data else { return Carried::default() };
        let (replicates, shards) = (replicates(data), has_others(&data.shard));
        let params = || members.iter().map(|&member| &self.params[member]);
        let is_alike = |param: &UnitParam| replicates || shards && param.cut.is_none();
        let alike = izip!(params(), tensors).filter(|(param, _)| is_alike(param));
        let values = memory::digests(alike.clone().map(|(_, tensor)| tensor));
        let values = || alike.clone().map(|(param, _)| param).zip(values.iter().copied());
        let uncut = values().filter(|(param, _)| shards && param.cut.is_none());
        let all = values().filter(|_| replicates);
        let shard = digests(of, step, uncut).into_iter().collect();
        let replicate = digests(of, step, all).into_iter().collect();
        Carried { due: None, shard, replicate }
    }
}

/// Of these parameters; `None` if there are none.
fn digests<'a>(
    of: Replicated,
    step: u64,
    params: impl Iterator<Item = (&'a UnitParam, Option<u64>)>,
) -> Option<Digests> {
    let (names, values): (Vec<_>, Vec<_>) = params.map(|(param, value)| (param.path.clone(), value)).unzip();
    (!names.is_empty()).then(|| Digests { of, step, names: names.into(), values: values.into() })
}
