//! [`StagingPool`]: memory of a communicator from which NCCL sends and into which it receives.
//!
//! Memory of cubecl's tensors cannot be registered with a communicator: NCCL must have allocated it.
//! So tensors are copied to staging memory and back, and NCCL moves them without copies of its own.
//! A block is registered once, and used again by later calls of the communicator.
//!
//! Which of several free blocks a call uses depends on when results were taken, so ranks may use
//! different ones for the same call. That is correct, but multicast (NVLS) registers such a
//! combination of blocks again.

use std::sync::Arc;

use parking_lot::Mutex;

use super::api::{Comm, CommStream, GpuAddress, GpuApi, GpuEvent, Registration};
use crate::comm::data::plane::PlaneResult;

/// Number of bytes of which the sizes of blocks are multiples.
const GRANULE: usize = 64 << 10;

/// Memory of a communicator.
#[derive(Debug)]
pub(super) struct StagingBlock {
    pub memory: GpuAddress,
    bytes: usize,
    registration: Registration,
    /// Point after which the rank has read the results in the block.
    read: Option<GpuEvent>,
}

/// The blocks of a communicator that no call uses.
#[derive(Debug, Default)]
pub(super) struct StagingPool(Mutex<Vec<StagingBlock>>);

/// A block that a call uses, until this is dropped.
#[derive(Debug)]
pub(super) struct Lease {
    pool: Arc<StagingPool>,
    block: Option<StagingBlock>,
}

impl Lease {
    /// Takes a block of at least `bytes` bytes, which what is enqueued on `stream` from now on may
    /// use. Called by the submitter.
    pub fn take(
        pool: &Arc<StagingPool>,
        bytes: usize,
        api: &dyn GpuApi,
        comm: Comm,
        stream: CommStream,
    ) -> PlaneResult<Self> {
        let known = {
            let mut blocks = pool.0.lock();
            let fitting = blocks.iter().enumerate();
            let is_recorded = |read: &GpuEvent| api.is_recorded(read).unwrap_or(true);
            let fitting = fitting.filter(|(_, block)| {
                block.bytes >= bytes && block.read.as_ref().is_none_or(is_recorded)
            });
            let best = fitting.min_by_key(|(_, block)| block.bytes);
            best.map(|(index, _)| index)
                .map(|index| blocks.swap_remove(index))
        };
        let block = match known {
            Some(mut block) => {
                if let Some(read) = block.read.take() {
                    api.wait(stream, &read)?;
                }
                block
            }
            None => {
                let bytes = bytes.next_multiple_of(GRANULE);
                let memory = api.allocate(bytes)?;
                let registration = api
                    .register(comm, memory, bytes)
                    .inspect_err(|_| _ = api.free(memory))?;
                StagingBlock {
                    memory,
                    bytes,
                    registration,
                    read: None,
                }
            }
        };
        Ok(Self {
            pool: pool.clone(),
            block: Some(block),
        })
    }

    pub fn memory(&self) -> GpuAddress {
        self.block.as_ref().expect("it is leased").memory
    }

    /// Sets the point after which the block may be written again.
    pub fn set_read(&mut self, read: GpuEvent) {
        self.block.as_mut().expect("it is leased").read = Some(read);
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.pool.0.lock().extend(self.block.take());
    }
}

impl StagingPool {
    /// Frees all blocks. The communicator is alive if `comm` is given. Nothing that is enqueued may
    /// use the blocks any more, except copies of results, for which this waits.
    pub fn free(&self, api: &dyn GpuApi, comm: Option<Comm>) -> PlaneResult<()> {
        for block in std::mem::take(&mut *self.0.lock()) {
            if let Some(read) = &block.read {
                api.synchronize(read)?;
            }
            if let Some(comm) = comm {
                api.deregister(comm, block.registration)?;
            }
            api.free(block.memory)?;
        }
        Ok(())
    }
}
