//! A unit's reductions: gradients to what this rank's optimizer steps.

use burn::backend::{DispatchTensor, TensorMetadata};
use burn::tensor::{Device, Tensor, TensorData};

use super::plans::Exchange;
use super::unit::{DataParallel, Unit};
use super::verifier::Carried;
use crate::comm::{Call, CommError, Digests, ReduceOp};

/// Gradients of some of a unit's parameters, as this rank has them: `None` for a parameter that it
/// did not use.
///
/// Of a parameter that no rank used there is no gradient, as without sharding, and an optimizer
/// leaves it alone; one that some used is averaged over all, the others counting as zeros. So each
/// reduction carries, beside the gradients, one number per parameter: whether the rank has used it.
struct Own {
    grads: Vec<DispatchTensor>,
    used: Vec<bool>,
}

impl Own {
    fn new(grads: Vec<Option<DispatchTensor>>, zeros: impl Fn(usize) -> DispatchTensor) -> Self {
        let used = grads.iter().map(Option::is_some).collect();
        let grads = grads.into_iter().enumerate().map(|(at, grad)| grad.unwrap_or_else(|| zeros(at))).collect();
        Self { grads, used }
    }

    /// `[ranks, parameters]`: the same row for each rank, so that each gets a whole one.
    fn flags(&self, ranks: usize) -> DispatchTensor {
        let row = self.used.iter().map(|&used| f32::from(used));
        let rows: Vec<f32> = std::iter::repeat_with(|| row.clone()).take(ranks).flatten().collect();
        let device = Device::new(self.grads[0].device());
        Tensor::<2>::from_data(TensorData::new(rows, [ranks, self.used.len()]), &device).into_dispatch()
    }
}

/// The reduced gradients of what a rank has used. `flags` is read only where this one has not used
/// all: it waits for the device.
fn without_unused(reduced: Vec<DispatchTensor>, flags: DispatchTensor, used: &[bool]) -> Vec<Option<DispatchTensor>> {
    if used.iter().all(|&used| used) {
        return reduced.into_iter().map(Some).collect();
    }
    let flags: Vec<f32> = Tensor::<2>::from_dispatch(flags).into_data().try_to_vec().expect("flags are f32");
    reduced.into_iter().zip(flags).map(|(grad, flag)| (flag > 0.0).then_some(grad)).collect()
}

impl Unit {
    /// Averages whole gradients of `members` over the data-parallel ranks, and compares what is `carried`. Returns what
    /// this rank's optimizer steps: shards, and wholes of the parameters every rank holds whole.
    pub(super) fn reduce(
        &self,
        call: Call,
        members: &[usize],
        grads: Vec<Option<DispatchTensor>>,
        zeros: impl Fn(usize) -> DispatchTensor,
        carried: Carried,
    ) -> Result<Vec<Option<DispatchTensor>>, CommError> {
        let Some(data) = self.data.as_ref().filter(|data| !grads.is_empty() && data.ranks() > 1) else {
            return Ok(grads);
        };
        let own = Own::new(grads, zeros);
        let Carried { due, shard, replicate } = carried;
        let (mut reduced, flags) = self.average(data, &call, members, &own, shard)?;
        if let Some(step) = due {
            self.compare_sharded(step, members, &reduced);
        }
        let flags = match &data.replicate {
            None => flags,
            Some(group) => {
                reduced.push(flags);
                let call = call.comparing(replicate);
                reduced = self.exchange(Exchange::All, group, call, members, reduced).wait()?;
                let flags = reduced.pop().expect("the flags were sent last");
                if let Some(step) = due {
                    self.compare_replicated(step, members, &reduced);
                }
                flags
            }
        };
        Ok(without_unused(reduced, flags, &own.used))
    }

    /// The averages over the ranks that shard, and of the flags. The first reduction carries what is `compared`.
    fn average(
        &self,
        data: &DataParallel,
        call: &Call,
        members: &[usize],
        own: &Own,
        compared: Vec<Digests>,
    ) -> Result<(Vec<DispatchTensor>, DispatchTensor), CommError> {
        let group = &data.reduce;
        let (mut cut, mut uncut) = (self.cut(members, own.grads.clone()), self.uncut(members, own.grads.clone()));
        let first = call.clone().comparing(compared);
        let mut flags = None;
        let mut shards = Vec::new();
        if !cut.is_empty() {
            cut.push(own.flags(group.group().size()));
            shards = self.exchange(Exchange::Gradients, group, first.clone(), members, cut).wait()?;
            flags = shards.pop();
        }
        if !uncut.is_empty() {
            let alone = flags.is_none();
            if alone {
                uncut.push(own.flags(1));
            }
            let call = if alone { first } else { call.clone() };
            uncut = self.exchange(Exchange::Uncut, group, call, members, uncut).wait()?;
            if alone {
                flags = uncut.pop();
            }
        }
        let flags = flags.expect("a parameter is cut or uncut");
        Ok((self.merge(members, shards, uncut), flags))
    }

    /// Adds up gradients of `members`, of which each tensor-parallel rank along the mesh dimensions `dims` has a
    /// term.
    pub(super) fn sum_terms(
        &self,
        dims: &[usize],
        call: Call,
        members: impl IntoIterator<Item = usize>,
        terms: Vec<Option<DispatchTensor>>,
        zeros: impl Fn(usize) -> DispatchTensor,
    ) -> Result<Vec<Option<DispatchTensor>>, CommError> {
        let group = self.tensor.as_ref().expect("only parallelized parameters have partial gradients").along(dims);
        let own = Own::new(terms, zeros);
        let flags = own.flags(1);
        let mut sent = own.grads;
        sent.push(flags);
        let call = call.named(members.into_iter().map(|member| self.params[member].path.clone()));
        let mut sums = group.all_reduce(call, sent, ReduceOp::Sum).wait()?;
        let flags = sums.pop().expect("the flags were sent last");
        Ok(without_unused(sums, flags, &own.used))
    }
}
