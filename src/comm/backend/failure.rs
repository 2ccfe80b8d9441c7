//! [`Failure`]: why a world has ended.

use crate::comm::{CollectiveId, CommError};

/// The first thing that went wrong in a world.
#[derive(Debug, Clone)]
pub enum Failure {
    /// A rank's program panicked.
    Panicked {
        /// Global rank.
        rank: usize,
        /// The panic's message.
        message: String,
    },
    /// A rank's program returned an error.
    Failed {
        /// Global rank.
        rank: usize,
        /// The error's text.
        message: String,
    },
    /// A collective.
    Collective(CommError),
}

impl Failure {
    /// The error that a rank sees during `during`.
    pub fn error(&self, during: Option<CollectiveId>) -> CommError {
        match self.clone() {
            Self::Panicked { rank, message } => CommError::RankPanicked { rank, message, during },
            Self::Failed { rank, message } => CommError::RankFailed { rank, message, during },
            Self::Collective(error) => error,
        }
    }
}
