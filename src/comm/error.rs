//! [`CommError`]: why a collective failed.

/// Why a collective failed, naming the rank at fault.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum CommError {
    /// A rank panicked.
    #[error("rank {rank} panicked: {message}")]
    RankPanicked {
        /// Global rank.
        rank: usize,
        /// The panic message.
        message: String,
    },
}
