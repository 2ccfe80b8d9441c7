//! [`Capabilities`]: what a backend does with the tensors of a group.

/// Properties of how a backend moves and reduces the tensors of a group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Capabilities {
    /// True if reductions add neighbours in the fixed binary tree over the group's ranks, so that
    /// results are bit-identical on every backend. Otherwise they are only equal on all ranks.
    pub fixed_tree: bool,
    /// True if a result may be used before its elements are there, by work that is submitted to the
    /// device after the call: waiting for the request does not wait for the device.
    pub stream_ordered: bool,
    /// True if ranks of other processes receive the elements as bytes with the call. Otherwise the
    /// ranks exchange them over connections of their own, once all have agreed on the call.
    pub needs_remote_bytes: bool,
}

impl Default for Capabilities {
    /// Returns the capabilities of tensors in host memory.
    fn default() -> Self {
        Self {
            fixed_tree: true,
            stream_ordered: false,
            needs_remote_bytes: true,
        }
    }
}
