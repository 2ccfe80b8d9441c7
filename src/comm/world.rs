//! [`World`]: one rank's handle on all ranks.

use std::collections::HashMap;
use std::sync::Arc;

use burn::tensor::Device;
use parking_lot::Mutex;

use super::local::{LocalCommunicator, LocalWorld};
use super::{Call, CommError, Communicator, Group, Ledger};

/// One rank's handle on all ranks of a [`launch`](super::launch). Cheap to clone.
///
/// Collectives belong on the thread that runs the rank's program: the order of calls is part of
/// what ranks must agree on.
#[derive(Debug, Clone)]
pub struct World(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    rank: usize,
    device: Device,
    ledger: Arc<Ledger>,
    local: Arc<LocalWorld>,
    groups: Mutex<HashMap<Vec<usize>, Arc<dyn Communicator>>>,
}

impl World {
    pub(super) fn new(rank: usize, device: Device, local: Arc<LocalWorld>) -> Self {
        Self(Arc::new(Inner { rank, device, ledger: Arc::default(), local, groups: Mutex::default() }))
    }

    /// This rank, from 0.
    pub fn rank(&self) -> usize {
        self.0.rank
    }

    /// Number of ranks.
    pub fn size(&self) -> usize {
        self.0.local.size
    }

    /// The device of this rank's tensors, without autodiff.
    pub fn device(&self) -> &Device {
        &self.0.device
    }

    /// This rank's record of its collectives, over all groups.
    pub fn ledger(&self) -> &Ledger {
        &self.0.ledger
    }

    /// The group of `ranks`, in this order. Local: needs no other rank.
    ///
    /// The same ranks in the same order are the same group, however often it is asked for.
    ///
    /// # Errors
    /// [`CommError::InvalidGroup`] if `ranks` is empty, names a rank twice or one outside the
    /// world, or does not contain the caller.
    pub fn group(&self, ranks: &[usize]) -> Result<Arc<dyn Communicator>, CommError> {
        let mut groups = self.0.groups.lock();
        if let Some(group) = groups.get(ranks) {
            return Ok(group.clone());
        }
        let index = self.index_in(ranks).map_err(|problem| CommError::InvalidGroup {
            rank: self.rank(),
            ranks: ranks.to_vec(),
            problem,
        })?;
        let Inner { local, ledger, device, .. } = &*self.0;
        let group = Group::new(ranks, index);
        let communicator: Arc<dyn Communicator> =
            Arc::new(LocalCommunicator::new(local.clone(), group, ledger.clone(), device.clone()));
        groups.insert(ranks.to_vec(), communicator.clone());
        Ok(communicator)
    }

    /// The group of all ranks.
    pub fn all(&self) -> Arc<dyn Communicator> {
        let ranks: Vec<_> = (0..self.size()).collect();
        self.group(&ranks).expect("all ranks are a group")
    }

    /// Returns once every rank of the world has called it.
    ///
    /// # Collective
    /// Of all ranks.
    ///
    /// # Errors
    /// See [`Communicator`].
    pub fn barrier(&self, call: impl Into<Call>) -> Result<(), CommError> {
        self.all().barrier(call.into()).wait()
    }

    fn index_in(&self, ranks: &[usize]) -> Result<usize, String> {
        let size = self.size();
        if let Some(rank) = ranks.iter().find(|rank| **rank >= size) {
            return Err(format!("rank {rank} is outside a world of {size} ranks"));
        }
        let mut seen = vec![false; size];
        if let Some(rank) = ranks.iter().find(|rank| std::mem::replace(&mut seen[**rank], true)) {
            return Err(format!("rank {rank} is named twice"));
        }
        let index = ranks.iter().position(|rank| *rank == self.rank());
        index.ok_or_else(|| "only its members can use a group".into())
    }
}
