//! [`Unit`]: the parameters that are gathered and reduced together.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use burn::backend::ops::FloatTensorOps;
use burn::backend::{Dispatch, DispatchTensor, TensorMetadata};
use burn::tensor::Slice;
use parking_lot::{Mutex, RwLock};

use super::config::ReshardAfterForward;
use super::shards::Shards;
use crate::comm::{Call, CommError, Communicator, Phase, ReduceOp, Sharded, Work};
use crate::dtensor::own;
use crate::mesh::DeviceMesh;
use crate::placement::{Layout, chunk};

/// One parameter of a unit.
#[derive(Debug)]
pub(super) struct UnitParam {
    /// Path in the model it was sharded with.
    pub(super) path: String,
    /// Path parts from the unit's module down to the parameter.
    pub(super) depth: usize,
    /// Global shape.
    pub(super) shape: Vec<usize>,
    /// The cut dimension; `None` for a parameter every rank holds whole.
    pub(super) dim: Option<usize>,
    /// Placements on the unit's mesh.
    pub(super) layout: Layout,
}

/// What remains of a unit's gathered parameters between forward and backward.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kept {
    /// The whole parameters.
    Whole,
    /// A shard over a few neighbouring ranks.
    Part,
    /// Nothing beyond this rank's own shard.
    Shard,
}

/// The parameters that one all-gather and one reduce-scatter move, and their groups.
#[derive(Debug)]
pub(super) struct Unit {
    pub(super) mesh: DeviceMesh,
    pub(super) params: Vec<UnitParam>,
    pub(super) reshard: ReshardAfterForward,
    /// Group of the mesh dimension that shards.
    pub(super) shard: Arc<dyn Communicator>,
    /// Group of the mesh dimension that replicates (HSDP).
    replicate: Option<Arc<dyn Communicator>>,
    /// Group of [`ReshardAfterForward::Ranks`].
    neighbours: Option<Arc<dyn Communicator>>,
    /// The unit's module path: its name in the ledger, in fingerprints and in errors.
    label: RwLock<Arc<str>>,
    root: AtomicBool,
    unsharded: Mutex<Option<Unsharded>>,
}

/// Parameters gathered ahead of the forward that will use them.
#[derive(Debug)]
pub(super) struct Unsharded {
    /// What they were gathered from: an optimizer step makes new shards.
    shards: Shards,
    wholes: Gathering,
}

/// The result of an all-gather, there or on its way.
#[derive(Debug)]
pub(super) enum Gathering {
    UnderWay(Work<Vec<DispatchTensor>>),
    Done(Vec<DispatchTensor>),
}

impl Unit {
    pub(super) fn new(
        path: &str,
        mesh: DeviceMesh,
        params: Vec<UnitParam>,
        reshard: ReshardAfterForward,
        shard: Arc<dyn Communicator>,
        replicate: Option<Arc<dyn Communicator>>,
        neighbours: Option<Arc<dyn Communicator>>,
    ) -> Self {
        Self {
            mesh,
            params,
            reshard,
            shard,
            replicate,
            neighbours,
            label: RwLock::new(label(path)),
            root: AtomicBool::new(path.is_empty()),
            unsharded: Mutex::new(None),
        }
    }

    /// Gives the unit its path in an enclosing model; it is a root no longer.
    pub(super) fn adopt(&self, path: &str) {
        *self.label.write() = label(path);
        self.root.store(path.is_empty(), Ordering::Relaxed);
    }

    pub(super) fn label(&self) -> Arc<str> {
        self.label.read().clone()
    }

    /// What is left of the gathered parameters after forward.
    pub(super) fn kept(&self) -> Kept {
        let root = self.root.load(Ordering::Relaxed);
        // A group of one holds the wholes: there is nothing to free.
        if self.shard.group().size() == 1 {
            return Kept::Whole;
        }
        match self.reshard {
            ReshardAfterForward::Always => Kept::Shard,
            ReshardAfterForward::Never => Kept::Whole,
            ReshardAfterForward::Auto => {
                if root {
                    Kept::Whole
                } else {
                    Kept::Shard
                }
            }
            ReshardAfterForward::Ranks(1) => Kept::Whole,
            ReshardAfterForward::Ranks(n) if n == self.shard.group().size() => Kept::Shard,
            ReshardAfterForward::Ranks(_) => Kept::Part,
        }
    }

    fn call(&self, phase: Phase) -> Call {
        Call::new(self.label()).in_phase(phase)
    }

    /// Gathers the parameters at `members` from this rank's shards.
    ///
    /// The result is in the order of `members` without those every rank holds whole.
    pub(super) fn all_gather(&self, members: &[usize], shards: Vec<DispatchTensor>, phase: Phase) -> Gathering {
        self.gather_over(&self.shard, self.sharded(members, shards), phase)
    }

    /// Gathers them again from the parts [`split`](Self::split) left.
    pub(super) fn all_gather_parts(&self, members: &[usize], parts: Vec<DispatchTensor>) -> Gathering {
        self.gather_over(self.neighbours(), self.sharded(members, parts), Phase::Backward)
    }

    fn gather_over(&self, group: &Arc<dyn Communicator>, shards: Vec<Sharded>, phase: Phase) -> Gathering {
        match shards.is_empty() {
            true => Gathering::Done(Vec::new()),
            false => Gathering::UnderWay(group.all_gather(self.call(phase), shards)),
        }
    }

    /// This rank's part of every whole, over the group of neighbours.
    pub(super) fn split(&self, members: &[usize], wholes: &[DispatchTensor]) -> Vec<DispatchTensor> {
        let group = self.neighbours().group();
        let part = |(&member, whole): (&usize, &DispatchTensor)| match self.params[member].dim {
            None => whole.clone(),
            Some(dim) => {
                let len = self.params[member].shape[dim];
                copy_range(whole, dim, chunk(len, group.size(), group.rank()))
            }
        };
        members.iter().zip(wholes).map(part).collect()
    }

    fn neighbours(&self) -> &Arc<dyn Communicator> {
        self.neighbours.as_ref().expect("parts are kept only with a group of neighbours")
    }

    /// Averages whole gradients over the data-parallel ranks; returns what this rank's optimizer
    /// steps: shards, and wholes of the parameters every rank holds whole.
    pub(super) fn reduce(
        &self,
        members: &[usize],
        wholes: Vec<DispatchTensor>,
    ) -> Result<Vec<DispatchTensor>, CommError> {
        let call = self.call(Phase::Backward);
        let cut = self.sharded(members, wholes.clone());
        let shards = match cut.is_empty() {
            true => Vec::new(),
            false => self.shard.reduce_scatter(call.clone(), cut, ReduceOp::Avg).wait()?,
        };
        let uncut = self.uncut(members, wholes);
        let uncut = match uncut.is_empty() {
            true => uncut,
            false => self.shard.all_reduce(call.clone(), uncut, ReduceOp::Avg).wait()?,
        };
        let reduced = self.merge(members, shards, uncut);
        match &self.replicate {
            None => Ok(reduced),
            Some(group) => group.all_reduce(call, reduced, ReduceOp::Avg).wait(),
        }
    }

    /// The tensors of the cut parameters, with their cuts.
    fn sharded(&self, members: &[usize], tensors: Vec<DispatchTensor>) -> Vec<Sharded> {
        let sharded = |(&member, tensor): (&usize, DispatchTensor)| {
            let param = &self.params[member];
            param.dim.map(|dim| Sharded { tensor, dim, len: param.shape[dim] })
        };
        members.iter().zip(tensors).filter_map(sharded).collect()
    }

    /// The tensors of the parameters every rank holds whole.
    fn uncut(&self, members: &[usize], tensors: Vec<DispatchTensor>) -> Vec<DispatchTensor> {
        let uncut = |(&member, tensor): (&usize, DispatchTensor)| self.params[member].dim.is_none().then_some(tensor);
        members.iter().zip(tensors).filter_map(uncut).collect()
    }

    /// Puts tensors of the cut parameters and of the others back into the order of `members`.
    fn merge(&self, members: &[usize], cut: Vec<DispatchTensor>, uncut: Vec<DispatchTensor>) -> Vec<DispatchTensor> {
        let (mut cut, mut uncut) = (cut.into_iter(), uncut.into_iter());
        let next = |&member: &usize| match self.params[member].dim {
            Some(_) => cut.next(),
            None => uncut.next(),
        };
        members.iter().filter_map(next).collect()
    }

    /// Every whole: those gathered, and the shards that are whole already.
    pub(super) fn wholes(
        &self,
        members: &[usize],
        gathered: Vec<DispatchTensor>,
        shards: &[DispatchTensor],
    ) -> Vec<DispatchTensor> {
        self.merge(members, gathered, self.uncut(members, shards.to_vec()))
    }

    /// Starts gathering parameters ahead of their use.
    pub(super) fn unshard(&self, shards: Shards) {
        let wholes = self.all_gather(&shards.members, shards.plain(), Phase::Other);
        *self.unsharded.lock() = Some(Unsharded { shards, wholes });
    }

    /// Waits for [`unshard`](Self::unshard), if one is under way.
    pub(super) fn wait_unsharded(&self) -> Result<(), CommError> {
        let taken = self.unsharded.lock().take();
        if let Some(Unsharded { shards, wholes }) = taken {
            let wholes = Gathering::Done(wholes.wait()?);
            *self.unsharded.lock() = Some(Unsharded { shards, wholes });
        }
        Ok(())
    }

    /// The parameters gathered ahead, if they were gathered from these shards.
    pub(super) fn take_unsharded(&self, shards: &Shards) -> Result<Option<Vec<DispatchTensor>>, CommError> {
        let taken = self.unsharded.lock().take();
        match taken {
            Some(unsharded) if unsharded.shards.same(shards) => unsharded.wholes.wait().map(Some),
            _ => Ok(None),
        }
    }

    /// Drops the parameters gathered ahead.
    pub(super) fn reshard(&self) {
        self.unsharded.lock().take();
    }
}

impl Gathering {
    pub(super) fn wait(self) -> Result<Vec<DispatchTensor>, CommError> {
        match self {
            Self::UnderWay(work) => work.wait(),
            Self::Done(wholes) => Ok(wholes),
        }
    }
}

/// A copy of `range` of `dim`.
fn copy_range(tensor: &DispatchTensor, dim: usize, range: Range<usize>) -> DispatchTensor {
    let mut slices: Vec<_> = tensor.shape().iter().map(|&len| Slice::from(0..len)).collect();
    slices[dim] = Slice::from(range);
    own(Dispatch::float_slice(tensor.clone(), &slices))
}

/// A zero gradient for a parameter that took no part in the loss.
pub(super) fn zeros_like_whole(shape: &[usize], shard: &DispatchTensor) -> DispatchTensor {
    Dispatch::float_zeros(shape.to_vec().into(), &shard.device(), shard.dtype().into())
}

fn label(path: &str) -> Arc<str> {
    if path.is_empty() { "root".into() } else { path.into() }
}
