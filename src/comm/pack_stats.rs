//! [`PackStats`]: copies by kernels around collectives.

use serde::Serialize;

/// Copies made by kernels around a rank's collectives, where a list of tensors is packed into one buffer.
///
/// They are counted on Cube backends (wgpu, CUDA), for all-gathers and reduce-scatters of at least two float
/// tensors of the same dtype: one copy or reduction before the collective, and one after it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
pub struct PackStats {
    /// Number of kernels launched.
    pub launches: u64,
    /// Bytes of tensor elements written by the kernels.
    pub bytes: u64,
    /// Bytes of padding written by the kernels: between shards, and where a rank's shard is smaller than the
    /// largest.
    pub padding: u64,
}

impl std::ops::AddAssign for PackStats {
    fn add_assign(&mut self, more: Self) {
        self.launches += more.launches;
        self.bytes += more.bytes;
        self.padding += more.padding;
    }
}
