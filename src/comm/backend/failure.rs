//! [`Failure`]: the reason why a world ended.

use serde::{Deserialize, Serialize};

use crate::comm::{CollectiveId, CommError};

/// The first failure of a world.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub enum Failure {
    /// A rank's program panicked.
    Panicked {
        /// Global rank.
        rank: usize,
        /// Message of the panic.
        message: String,
    },
    /// A rank's program returned an error.
    Failed {
        /// Global rank.
        rank: usize,
        /// Text of the error.
        message: String,
    },
    /// A collective failed.
    Collective(CommError),
}

impl Failure {
    /// Returns the error that a rank receives in the collective `during`.
    pub fn error(&self, during: Option<CollectiveId>) -> CommError {
        match self.clone() {
            Self::Panicked { rank, message } => CommError::RankPanicked {
                rank,
                message,
                during,
            },
            Self::Failed { rank, message } => CommError::RankFailed {
                rank,
                message,
                during,
            },
            Self::Collective(error) => error,
        }
    }
}
