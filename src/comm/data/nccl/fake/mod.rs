//! [`FakeGpus`]: GPUs and NCCL in host memory. It records all calls, and checks what the real ones
//! require but would not report, or would answer with a hang or wrong values.
//!
//! | rule | found |
//! |---|---|
//! | what a stream reads was written before, and what it writes is not read or written any more | [`clocks`]: the event is missing that orders the streams |
//! | members of a communicator make the same calls in the same order | other arguments, or streams that wait for each other |
//! | one thread makes all calls for a GPU | another thread |
//! | no call on a communicator that was aborted or destroyed, or whose last call continues | such a call |
//! | groups of calls are closed | another call, or the end, with an open group |
//! | an operation's memory is registered with its communicator | other memory |
//! | memory, registrations, streams and communicators are freed once, after their last use | those left |
//!
//! Calls that NCCL refuses return errors, as there: types and operations that it lacks, and a second
//! rank on a GPU before 2.30.

mod calls;
mod clocks;
mod state;

use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::{Condvar, Mutex};

use super::NcclPlane;
use super::api::GpuApi;
pub(in crate::comm) use super::api::NcclVersion;
#[cfg(test)]
#[allow(
    unused_imports,
    reason = "tests of ranks that share a GPU are not always built"
)]
pub(in crate::comm) use clocks::{Accesses, Clock, StreamKey};
use state::FakeState;
#[cfg(test)]
pub(in crate::comm) use state::{NcclCall, Recorded};

/// All GPUs, of all processes of a test.
#[derive(Debug)]
pub(in crate::comm) struct FakeGpus {
    state: Mutex<FakeState>,
    /// Notified when an operation is issued, or ends.
    changed: Condvar,
    version: NcclVersion,
    /// GPU of each rank that does not have one of its own.
    gpus: HashMap<usize, usize>,
    /// Step that the GPUs forget.
    forgotten: Option<OrderingStep>,
    /// Rank whose tensors cannot be exported: its GPU is lost.
    lost: Option<usize>,
    /// Rank whose communicators fail after this number of operations, long after they were taken.
    fails_after: Option<(usize, usize)>,
}

/// A step that orders streams. Without it, values would be wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::comm) enum OrderingStep {
    /// Records when exported tensors have their values.
    RecordReady,
    /// Lets a communication stream wait: for exported tensors, or until results are read.
    Wait,
    /// Records when an operation is done.
    RecordDone,
    /// Lets the rank's stream wait for the operation.
    WaitDone,
    /// Records when the rank's stream has read a result.
    RecordRead,
}

#[cfg(test)]
impl OrderingStep {
    pub const ALL: [Self; 5] = [
        Self::RecordReady,
        Self::Wait,
        Self::RecordDone,
        Self::WaitDone,
        Self::RecordRead,
    ];
}

/// The GPUs as one process sees them.
#[derive(Debug)]
pub(super) struct FakeApi {
    gpus: Arc<FakeGpus>,
    process: usize,
}

impl FakeGpus {
    pub fn new() -> Self {
        Self {
            state: Mutex::default(),
            changed: Condvar::new(),
            version: NcclVersion(2, 28, 9),
            gpus: HashMap::new(),
            forgotten: None,
            lost: None,
            fails_after: None,
        }
    }

    /// Returns the plane of a process on these GPUs.
    pub fn plane(self: &Arc<Self>, process: usize, in_tree: bool) -> Arc<NcclPlane> {
        let api: Arc<dyn GpuApi> = Arc::new(FakeApi {
            gpus: self.clone(),
            process,
        });
        Arc::new(NcclPlane::new(api, Arc::default(), in_tree))
    }

    /// Returns the rules that were broken, and what is not freed.
    pub fn violations(&self) -> Vec<String> {
        self.state.lock().all_violations()
    }

    /// Returns how often a host thread waited for a GPU.
    pub fn host_waits(&self) -> usize {
        self.state.lock().host_waits
    }

    fn forgets(&self, step: OrderingStep) -> bool {
        self.forgotten == Some(step)
    }
}

/// Faults, and what tests look at.
#[cfg(test)]
impl FakeGpus {
    pub fn with_version(self, version: NcclVersion) -> Self {
        Self { version, ..self }
    }

    /// Gives `rank` the GPU of another rank.
    pub fn with_shared(mut self, rank: usize, gpu_of: usize) -> Self {
        self.gpus.insert(rank, gpu_of);
        self
    }

    pub fn with_forgotten(self, forgotten: Option<OrderingStep>) -> Self {
        Self { forgotten, ..self }
    }

    pub fn with_lost(self, rank: usize) -> Self {
        Self {
            lost: Some(rank),
            ..self
        }
    }

    /// Makes collective `number` of each communicator never end.
    pub fn with_hang(self, number: usize) -> Self {
        self.state.lock().hangs_in = Some(number);
        self
    }

    /// Makes the communicators of `rank` fail after `operations` operations.
    pub fn with_failure(self, rank: usize, operations: usize) -> Self {
        Self {
            fails_after: Some((rank, operations)),
            ..self
        }
    }

    /// Returns the rules that were broken so far.
    pub fn broken_rules(&self) -> Vec<String> {
        self.state.lock().violations.clone()
    }

    /// Returns the calls of all ranks, in the order in which they were made.
    pub fn calls(&self) -> Vec<Recorded> {
        self.state.lock().calls.clone()
    }
}
