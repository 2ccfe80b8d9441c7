//! [`PackStats`]: what kernels do around collectives.

/// What kernels have copied around a rank's collectives, where tensors of a list travel in one buffer.
///
/// Counted on Cube backends (wgpu, CUDA), for all-gathers and reduce-scatters of two and more float tensors of one
/// dtype: a copy or reduction before the ranks meet, and one after.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PackStats {
    /// Kernels launched.
    pub launches: u64,
    /// Bytes of tensors' elements that they have written.
    pub bytes: u64,
    /// Bytes of padding that they have written: between parts, and where a rank's part is smaller than the largest.
    pub padding: u64,
}

impl std::ops::AddAssign for PackStats {
    fn add_assign(&mut self, more: Self) {
        self.launches += more.launches;
        self.bytes += more.bytes;
        self.padding += more.padding;
    }
}
