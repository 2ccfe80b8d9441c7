//! [`JoinError`]: errors of ranks with different numbers of batches.

/// Reason why ranks with different numbers of batches cannot continue.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum JoinError {
    /// A rank has run out of batches, which the program refuses.
    #[error(
        "ranks {ended:?} have no batch after {batches}, others have. Give every rank the same number of batches, for \
         example by the padding of a `DistributedSampler`, or do not call `with_early_end_refused`"
    )]
    EarlyEnd {
        /// Global ranks that have run out.
        ended: Vec<usize>,
        /// Number of batches that every rank had.
        batches: usize,
    },
    /// A rank never had a batch, so it cannot take part in the steps of the others.
    #[error(
        "ranks {ranks:?} have no batch at all, others have. A rank that has run out computes on its last batch: give \
         every rank at least one"
    )]
    NoBatch {
        /// Global ranks without a batch.
        ranks: Vec<usize>,
    },
}
