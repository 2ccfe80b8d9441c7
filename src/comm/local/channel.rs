//! [`LocalChannel`]: the collectives of a group of threads.

use std::sync::Arc;

use burn::backend::{DispatchTensor, TensorMetadata};

use super::LocalEngine;
use super::board::{GroupKey, Letter};
#[cfg(feature = "cube")]
use super::cube::Fused;
#[cfg(feature = "cube")]
use super::data::has_kernel;
use super::data::{Deposit, Exchange};
use super::pending::{Awaited, Joined, Seat, Sent};
use crate::comm::engine::{Channel, Member, Message, Post, Posted, rows_for_each};
use crate::comm::{Plan, ReduceOp, Sharded, TensorMeta};
use crate::placement::Cut;

/// One thread rank's place in one group.
#[derive(Debug)]
pub(super) struct LocalChannel {
    engine: Arc<LocalEngine>,
    member: Member,
    key: GroupKey,
}

impl LocalChannel {
    pub fn new(engine: Arc<LocalEngine>, member: Member, name: &'static str) -> Self {
        let key = engine.rendezvous.group(member.group.ranks(), name);
        Self { engine, member, key }
    }

    /// Notes where a deposit is.
    fn note(&self, deposit: &Deposit) {
        if let Some(tensor) = deposit.tensors.first() {
            self.member.ledger.ran_on(tensor.device());
        }
    }

    /// Joins the next collective of the group.
    fn join<T: 'static>(
        &self,
        post: Post,
        deposit: Deposit,
        finish: impl FnOnce(Exchange) -> T + Send + 'static,
    ) -> Posted<T> {
        self.note(&deposit);
        let (place, device) = (self.member.group.rank(), self.member.device.clone());
        let ticket = self.engine.rendezvous.join(self.key, place, post.print, deposit)?;
        let finish = move |deposits: &[Deposit]| finish(Exchange { deposits, member: place, device: &device });
        Ok(Box::new(Joined { seat: Seat::new(self.engine.clone(), ticket), finish }))
    }
}

impl Channel for LocalChannel {
    fn member(&self) -> &Member {
        &self.member
    }

    fn all_gather(&self, post: Post, plan: Arc<Plan>, parts: Vec<DispatchTensor>) -> Posted<Vec<DispatchTensor>> {
        let deposit = Deposit::planned(parts, plan.clone());
        #[cfg(feature = "cube")]
        let (fused, deposit) = Fused::pack_parts(post.ahead, deposit, &plan, &self.member);
        self.join(post, deposit, move |exchange| {
            #[cfg(feature = "cube")]
            if let Some(wholes) = fused.and_then(|fused| fused.gathered(exchange.deposits)) {
                return wholes;
            }
            exchange.gather(&plan)
        })
    }

    fn reduce_scatter(
        &self,
        post: Post,
        plan: Arc<Plan>,
        wholes: Vec<DispatchTensor>,
        op: ReduceOp,
    ) -> Posted<Vec<DispatchTensor>> {
        let deposit = Deposit::new(wholes);
        #[cfg(feature = "cube")]
        let (fused, deposit) = Fused::pack_wholes(deposit, &plan, &self.member);
        self.join(post, deposit, move |exchange| {
            #[cfg(feature = "cube")]
            if let Some(parts) = fused.filter(|_| has_kernel(op)).and_then(|fused| fused.reduced(exchange.deposits, op))
            {
                return parts;
            }
            let part = |(index, (dim, cut)): (usize, &(usize, Cut))| exchange.reduce_part(index, *dim, cut, op);
            plan.cuts().iter().enumerate().map(part).collect()
        })
    }

    fn all_to_all(
        &self,
        post: Post,
        mut parts: Vec<Vec<DispatchTensor>>,
        _metas: Vec<Vec<TensorMeta>>,
    ) -> Posted<Vec<Vec<DispatchTensor>>> {
        let own = std::mem::take(&mut parts[self.member.group.rank()]);
        self.join(post, Deposit::addressed(parts), move |exchange| exchange.addressed(own))
    }

    fn broadcast(
        &self,
        post: Post,
        tensors: Vec<DispatchTensor>,
        _metas: Vec<TensorMeta>,
        root: usize,
    ) -> Posted<Vec<DispatchTensor>> {
        self.join(post, Deposit::new(tensors), move |exchange| exchange.copies(root))
    }

    fn barrier(&self, post: Post) -> Posted<()> {
        self.join(post, Deposit::new(Vec::new()), |_| ())
    }

    fn send(&self, post: Post, tensors: Vec<DispatchTensor>, to: usize, tag: u32) -> Posted<()> {
        let (from, part) = (self.member.group.rank(), Deposit::new(tensors));
        self.note(&part);
        self.engine.rendezvous.send(self.key, to, Letter { from, tag, print: post.print, part })?;
        Ok(Box::new(Sent))
    }

    fn receive(&self, post: Post, from: Option<usize>, tag: u32, _metas: Option<Vec<TensorMeta>>) -> Posted<Message> {
        let claim = self.engine.rendezvous.receive(self.key, self.member.group.rank(), from, tag, post.print)?;
        Ok(Box::new(Awaited::new(self.engine.clone(), claim, self.member.clone())))
    }

    /// Every rank reads the terms where they are; of large ones each reduces a share for all.
    fn all_reduce(&self, post: Post, tensors: Vec<DispatchTensor>, op: ReduceOp) -> Posted<Vec<DispatchTensor>> {
        let count = tensors.len();
        self.join(post, Deposit::new(tensors), move |exchange| {
            (0..count).map(|index| exchange.reduce_whole(index, op)).collect()
        })
    }

    /// In one pass.
    fn recut(&self, post: Post, shard: Sharded, to_dim: usize, to_cut: Cut) -> Posted<DispatchTensor> {
        let Sharded { tensor, dim, .. } = shard;
        self.join(post, Deposit::new(vec![tensor]), move |exchange| exchange.recut(dim, to_dim, &to_cut))
    }

    /// Every rank reads its rows where they are.
    fn exchange_rows(
        &self,
        post: Post,
        tensor: DispatchTensor,
        given: &[usize],
        _taken: &[usize],
    ) -> Posted<DispatchTensor> {
        self.join(post, Deposit::addressed(rows_for_each(&tensor, given)), |exchange| exchange.rows())
    }

    /// Every rank reads its parts where they are.
    fn scatter(
        &self,
        post: Post,
        tensors: Vec<DispatchTensor>,
        _metas: Vec<TensorMeta>,
        cuts: Vec<(usize, Cut)>,
        root: usize,
    ) -> Posted<Vec<DispatchTensor>> {
        self.join(post, Deposit::new(tensors), move |exchange| {
            let part = |(index, (dim, cut)): (usize, &(usize, Cut))| exchange.part(index, root, *dim, cut);
            cuts.iter().enumerate().map(part).collect()
        })
    }
}
