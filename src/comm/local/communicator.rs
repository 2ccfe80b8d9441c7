//! [`LocalCommunicator`]: the collectives of a group of threads.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use burn::backend::{DispatchTensor, TensorMetadata};
use burn::tensor::Device;
use parking_lot::Mutex;

use super::LocalWorld;
use super::arguments::{self, Problem};
use super::board::{Failure, GroupKey};
#[cfg(feature = "cube")]
use super::cube::Fused;
use super::data::{Deposit, Exchange};
use super::fingerprint::{Print, TensorPrint};
use super::pending::{Charge, Joined, Ready, Seat};
use crate::comm::{Call, CommError, Communicator, Group, Ledger, Op, ReduceOp, Sharded, TensorMeta, Work};
use crate::placement::Cut;

/// One thread rank's view of one group.
#[derive(Debug)]
pub(crate) struct LocalCommunicator {
    world: Arc<LocalWorld>,
    group: Group,
    key: GroupKey,
    ledger: Arc<Ledger>,
    device: Device,
    deadline: Duration,
    drawn: Arc<AtomicU64>,
    duplicates: Mutex<HashMap<&'static str, Arc<dyn Communicator>>>,
    by_deadline: Mutex<HashMap<Duration, Arc<dyn Communicator>>>,
}

impl LocalCommunicator {
    /// The communicator of `group` for its current rank.
    pub fn new(world: Arc<LocalWorld>, group: Group, ledger: Arc<Ledger>, device: Device) -> Self {
        let (key, deadline) = (world.rendezvous.group(group.ranks(), ""), world.deadline);
        let (drawn, duplicates, by_deadline) = (Arc::default(), Mutex::default(), Mutex::default());
        Self { world, group, key, ledger, device, deadline, drawn, duplicates, by_deadline }
    }

    /// Another view of the same ranks.
    fn view(&self, key: GroupKey, deadline: Duration, drawn: Arc<AtomicU64>) -> Arc<dyn Communicator> {
        let Self { world, group, ledger, device, .. } = self;
        let (world, group, ledger, device) = (world.clone(), group.clone(), ledger.clone(), device.clone());
        let (duplicates, by_deadline) = (Mutex::default(), Mutex::default());
        Arc::new(Self { world, group, key, ledger, device, deadline, drawn, duplicates, by_deadline })
    }

    fn rank(&self) -> usize {
        self.group.ranks()[self.group.rank()]
    }

    /// Fails the whole world: the other ranks would wait in vain for this call.
    fn refuse<T: Send + 'static>(&self, op: Op, call: &Call, problem: Problem) -> Work<T> {
        let Problem { problem, remedy } = problem;
        let error = CommError::InvalidArgument {
            rank: self.rank(),
            op,
            label: call.label.to_string(),
            problem,
            remedy: remedy.into(),
        };
        Work::new(Ready(Err(self.world.rendezvous.fail(Failure::Collective(error)))))
    }

    /// Joins the next collective of the group. `bytes` is what the ledger counts.
    fn join<T: Send + 'static>(
        &self,
        call: Call,
        print: Print,
        bytes: u64,
        tensors: Vec<DispatchTensor>,
        finish: impl FnOnce(Exchange) -> T + Send + 'static,
    ) -> Work<T> {
        if let Err(problem) = arguments::at_home(&tensors, &self.device) {
            return self.refuse(print.op, &call, problem);
        }
        self.join_with(call, print, bytes, Deposit::new(tensors), finish)
    }

    fn join_with<T: Send + 'static>(
        &self,
        call: Call,
        print: Print,
        bytes: u64,
        deposit: Deposit,
        finish: impl FnOnce(Exchange) -> T + Send + 'static,
    ) -> Work<T> {
        let (member, device, rank) = (self.group.rank(), self.device.clone(), self.rank());
        if let Err(error) = self.world.check_thread(rank, print.op, &call) {
            return Work::new(Ready(Err(error)));
        }
        if let Some(tensor) = deposit.tensors.first() {
            self.ledger.ran_on(tensor.device());
        }
        let charge = Charge { op: print.op, ranks: self.group.size(), bytes, call };
        if !charge.call.ahead {
            charge.record(&self.ledger);
        }
        let ticket = match self.world.rendezvous.join(self.key, member, print, deposit) {
            Ok(ticket) => ticket,
            Err(error) => return Work::new(Ready(Err(error))),
        };
        Work::new(Joined {
            seat: Seat { world: self.world.clone(), ticket: Some(ticket) },
            rank,
            deadline: self.deadline,
            ledger: self.ledger.clone(),
            charge,
            finish: move |deposits: &[Deposit]| finish(Exchange { deposits, member, device: &device }),
        })
    }

    fn alone(&self) -> bool {
        self.group.size() == 1
    }
}

fn print(op: Op, call: &Call, tensors: Vec<TensorPrint>) -> Print {
    let Call { label, drawn, whole, terms, names, .. } = call.clone();
    Print { op, label, reduce: None, root: None, drawn, whole, terms, names, tensors, pairs: None }
}

fn bytes(tensors: &[TensorPrint]) -> u64 {
    tensors.iter().map(TensorPrint::bytes).sum()
}

fn unpack(shards: Vec<Sharded>) -> (Vec<DispatchTensor>, Vec<(usize, Cut)>) {
    shards.into_iter().map(|Sharded { tensor, dim, cut }| (tensor, (dim, cut))).unzip()
}

fn done<T: Send + 'static>(value: T) -> Work<T> {
    Work::new(Ready(Ok(value)))
}

impl Communicator for LocalCommunicator {
    fn group(&self) -> &Group {
        &self.group
    }

    fn draw(&self) -> u64 {
        self.drawn.fetch_add(1, Ordering::Relaxed)
    }

    fn duplicate(&self, name: &'static str) -> Arc<dyn Communicator> {
        let key = || self.world.rendezvous.group(self.group.ranks(), name);
        let make = || self.view(key(), self.deadline, Arc::default());
        self.duplicates.lock().entry(name).or_insert_with(make).clone()
    }

    fn with_deadline(&self, deadline: Duration) -> Arc<dyn Communicator> {
        let make = || self.view(self.key, deadline, self.drawn.clone());
        self.by_deadline.lock().entry(deadline).or_insert_with(make).clone()
    }

    fn all_gather(&self, call: Call, shards: Vec<Sharded>) -> Work<Vec<DispatchTensor>> {
        let prints = match arguments::pieces(&shards, &self.group) {
            Ok(prints) => prints,
            Err(problem) => return self.refuse(Op::AllGather, &call, problem),
        };
        let (tensors, cuts) = unpack(shards);
        if self.alone() {
            return done(tensors);
        }
        if let Err(problem) = arguments::at_home(&tensors, &self.device) {
            return self.refuse(Op::AllGather, &call, problem);
        }
        let deposit = Deposit::new(tensors);
        #[cfg(feature = "cube")]
        let (fused, deposit) = Fused::pack_parts(call.ahead, deposit, &prints, &cuts, &self.group, &self.ledger);
        let (bytes, print) = (bytes(&prints), print(Op::AllGather, &call, prints));
        self.join_with(call, print, bytes, deposit, move |exchange| {
            #[cfg(feature = "cube")]
            if let Some(wholes) = fused.and_then(|fused| fused.gathered(exchange.deposits)) {
                return wholes;
            }
            exchange.gather(&cuts)
        })
    }

    fn reduce_scatter(&self, call: Call, wholes: Vec<Sharded>, op: ReduceOp) -> Work<Vec<DispatchTensor>> {
        let prints = match arguments::wholes(&wholes, op, &self.group) {
            Ok(prints) => prints,
            Err(problem) => return self.refuse(Op::ReduceScatter, &call, problem),
        };
        let (tensors, cuts) = unpack(wholes);
        if self.alone() {
            return done(tensors);
        }
        if let Err(problem) = arguments::at_home(&tensors, &self.device) {
            return self.refuse(Op::ReduceScatter, &call, problem);
        }
        let deposit = Deposit::new(tensors);
        #[cfg(feature = "cube")]
        let (fused, deposit) = Fused::pack_wholes(deposit, &prints, &cuts, &self.group, &self.ledger);
        let bytes = bytes(&prints);
        let print = Print { reduce: Some(op), ..print(Op::ReduceScatter, &call, prints) };
        self.join_with(call, print, bytes, deposit, move |exchange| {
            #[cfg(feature = "cube")]
            if let Some(parts) = fused.and_then(|fused| fused.reduced(exchange.deposits, op)) {
                return parts;
            }
            let part = |(index, (dim, cut)): (usize, &(usize, Cut))| exchange.reduce_part(index, *dim, cut, op);
            cuts.iter().enumerate().map(part).collect()
        })
    }

    fn all_reduce(&self, call: Call, tensors: Vec<DispatchTensor>, op: ReduceOp) -> Work<Vec<DispatchTensor>> {
        let prints = match arguments::reduced(&tensors, op) {
            Ok(prints) => prints,
            Err(problem) => return self.refuse(Op::AllReduce, &call, problem),
        };
        if self.alone() {
            return done(tensors);
        }
        let (bytes, count) = (bytes(&prints), prints.len());
        let print = Print { reduce: Some(op), ..print(Op::AllReduce, &call, prints) };
        self.join(call, print, bytes, tensors, move |exchange| {
            (0..count).map(|index| exchange.reduce_whole(index, op)).collect()
        })
    }

    fn all_to_all(&self, call: Call, shard: Sharded, to_dim: usize, to_cut: Cut) -> Work<DispatchTensor> {
        let whole = match arguments::recut(&shard, to_dim, &to_cut, &self.group) {
            Ok(whole) => whole,
            Err(problem) => return self.refuse(Op::AllToAll, &call, problem),
        };
        let Sharded { tensor, dim, .. } = shard;
        if self.alone() {
            return done(tensor);
        }
        let piece = (tensor.shape().num_elements() * tensor.dtype().size()) as u64;
        let print = print(Op::AllToAll, &call, vec![whole]);
        self.join(call, print, piece, vec![tensor], move |exchange| exchange.recut(dim, to_dim, &to_cut))
    }

    fn all_to_all_list(
        &self,
        call: Call,
        mut parts: Vec<Option<DispatchTensor>>,
        metas: Vec<Option<TensorMeta>>,
    ) -> Work<Vec<Option<DispatchTensor>>> {
        let at_home = arguments::at_home(parts.iter().flatten(), &self.device);
        let pairs = match at_home.and_then(|()| arguments::listed(&parts, metas, &self.group)) {
            Ok(pairs) => pairs,
            Err(problem) => return self.refuse(Op::AllToAllList, &call, problem),
        };
        if self.alone() {
            return done(parts);
        }
        let (bytes, own) = (pairs.bytes(), parts[self.group.rank()].take());
        let print = Print { pairs: Some(pairs.into()), ..print(Op::AllToAllList, &call, Vec::new()) };
        self.join_with(call, print, bytes, Deposit::addressed(parts), move |exchange| exchange.addressed(own))
    }

    fn broadcast(
        &self,
        call: Call,
        tensors: Option<Vec<DispatchTensor>>,
        metas: Vec<TensorMeta>,
        root: usize,
    ) -> Work<Vec<DispatchTensor>> {
        let prints = match arguments::rooted(tensors.as_deref(), &metas, root, &self.group) {
            Ok(prints) => prints,
            Err(problem) => return self.refuse(Op::Broadcast, &call, problem),
        };
        let tensors = tensors.filter(|_| self.group.rank() == root).unwrap_or_default();
        if self.alone() {
            return done(tensors);
        }
        let (bytes, count) = (bytes(&prints), prints.len());
        let print = Print { root: Some(root), ..print(Op::Broadcast, &call, prints) };
        self.join(call, print, bytes, tensors, move |exchange| {
            (0..count).map(|index| exchange.copy(index, root)).collect()
        })
    }

    fn scatter(
        &self,
        call: Call,
        tensors: Option<Vec<DispatchTensor>>,
        metas: Vec<TensorMeta>,
        cuts: Vec<(usize, Cut)>,
        root: usize,
    ) -> Work<Vec<DispatchTensor>> {
        let checked = arguments::rooted(tensors.as_deref(), &metas, root, &self.group).and_then(|mut prints| {
            arguments::scattered(&mut prints, &cuts, &self.group)?;
            Ok(prints)
        });
        let prints = match checked {
            Ok(prints) => prints,
            Err(problem) => return self.refuse(Op::Scatter, &call, problem),
        };
        let tensors = tensors.filter(|_| self.group.rank() == root).unwrap_or_default();
        if self.alone() {
            return done(tensors);
        }
        let bytes = bytes(&prints);
        let print = Print { root: Some(root), ..print(Op::Scatter, &call, prints) };
        self.join(call, print, bytes, tensors, move |exchange| {
            let part = |(index, (dim, cut)): (usize, &(usize, Cut))| exchange.part(index, root, *dim, cut);
            cuts.iter().enumerate().map(part).collect()
        })
    }

    fn barrier(&self, call: Call) -> Work<()> {
        if self.alone() {
            return done(());
        }
        let print = print(Op::Barrier, &call, Vec::new());
        self.join(call, print, 0, Vec::new(), |_| ())
    }
}
