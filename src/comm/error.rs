//! [`CommError`]: the error of a failed collective.

use std::fmt;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::{CollectiveId, Op};

/// Reason why a collective failed. Each variant names the rank at fault.
///
/// A failure is joint: after the first one, every collective of every group of the world that is
/// not complete ends with it, on every rank. `during` is the collective in which the reporting rank
/// received the failure; it is `None` if the error comes from the failing rank itself.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error, Serialize, Deserialize)]
#[non_exhaustive]
pub enum CommError {
    /// A rank panicked.
    #[error("rank {rank} panicked: {message}{}", noticed(.during))]
    RankPanicked {
        /// Global rank.
        rank: usize,
        /// The panic message.
        message: String,
        /// Collective in which the reporting rank received the failure.
        during: Option<CollectiveId>,
    },

    /// A rank's program returned an error.
    #[error("rank {rank} failed: {message}{}", noticed(.during))]
    RankFailed {
        /// Global rank.
        rank: usize,
        /// The error's message.
        message: String,
        /// Collective in which the reporting rank received the failure.
        during: Option<CollectiveId>,
    },

    /// A rank's program returned while other ranks were waiting for it.
    #[error(
        "rank {rank} has returned, but {during} still needs it. Make the same calls on every rank of a group"
    )]
    RankReturned {
        /// Global rank.
        rank: usize,
        /// First collective that needed it.
        during: CollectiveId,
    },

    /// Two ranks made different calls of the same collective.
    #[error(
        "rank {rank} and rank {other} disagree in {during}: {differs} (rank {rank} vs rank {other}). Make the same \
         calls in the same order on every rank of a group. Entering a unit, and reading a parameter outside its \
         unit, also count as calls"
    )]
    Mismatch {
        /// Global rank that differs; with three or more ranks present, the one outside the
        /// majority.
        rank: usize,
        /// Global rank that `rank` differs from.
        other: usize,
        /// The collective, as called by `other`.
        during: CollectiveId,
        /// Difference between the calls, with the value of `rank` first, such as `shape [4, 8] vs
        /// [4, 9]`.
        differs: String,
    },

    /// Two ranks hold different values of something that must be identical on all ranks of a group.
    /// A host has silently corrupted a parameter or a gradient, or the program has passed different
    /// [local tensors](ReplicatedValue::LocalTensor).
    ///
    /// The program of the rank at fault ends. The other ranks may [continue](super::World::shrink)
    /// without it.
    #[error(
        "rank {rank} and rank {other} hold different values of {} (found in {during}): {}. {}",
        held(of, param, step),
        blame(.rank, .other, .majority),
        remedy(of)
    )]
    Diverged {
        /// Global rank that differs; the one outside the majority, if there is a majority.
        rank: usize,
        /// Global rank that `rank` differs from.
        other: usize,
        /// Collective in which the difference was found.
        during: CollectiveId,
        /// Path of the parameter, or description of the local tensor, such as
        /// ``[4, 8] f32 on mesh dimension `tp` ``.
        param: String,
        /// Kind of value that differs.
        of: ReplicatedValue,
        /// Step of the value: the number of training passes of the parameter's unit up to and
        /// including this one. 0 for a local tensor.
        step: u64,
        /// True if most ranks of the group hold the value of `other`. Otherwise either rank may be
        /// wrong.
        majority: bool,
    },

    /// Ranks wait for each other in different collectives.
    #[error(
        "deadlock: {}. Make the calls in the same order on all ranks, or, if another thread of a rank would have made \
         the missing call, allow it with `Launch::with_multithreaded_ranks`",
        cycle(.waits)
    )]
    Deadlock {
        /// The ranks of the cycle. Each entry holds a rank, the collective in which it waits, and
        /// the rank for which it waits.
        waits: Vec<(usize, CollectiveId, usize)>,
    },

    /// A thread of a rank called a collective, or waited in one, while another thread of the rank
    /// was waiting.
    #[error(
        "rank {rank} called {called} while it waited in {during}. Call from one thread of a rank at a time, \
         or allow several threads of a rank to wait at the same time: `Launch::with_multithreaded_ranks`"
    )]
    ConcurrentCalls {
        /// Global rank.
        rank: usize,
        /// Collective called by the second thread.
        called: CollectiveId,
        /// Collective in which the first thread was waiting.
        during: CollectiveId,
    },

    /// A rank called a collective inside [`World::run_on`](super::World::run_on).
    #[error(
        "rank {rank} called {called} inside `World::run_on`, which the other ranks do not run. Communicate before \
         it or after it, on all ranks"
    )]
    CollectiveInRunOn {
        /// Global rank.
        rank: usize,
        /// Collective that it called.
        called: CollectiveId,
    },

    /// A rank passed an object of another rank to a collective, or waited for another rank's work.
    #[error(
        "rank {rank} called {op} `{label}` with a tensor, mesh, work or module that belongs to rank {owner}. \
         Pass plain data between ranks (`into_data`), and distribute it on a mesh of this rank"
    )]
    ForeignRankObject {
        /// Global rank of the calling thread.
        rank: usize,
        /// Global rank to which the object belongs.
        owner: usize,
        /// Operation that it called.
        op: Op,
        /// Label of the call.
        label: String,
    },

    /// Ranks did not join a collective before the deadline.
    #[error(
        "{during}: ranks {missing:?} did not join within {deadline:?} of rank {rank}'s wait. \
         If they are only slow, raise `Launch::with_deadline`, or `DeviceMesh::with_deadline` for one mesh dimension"
    )]
    DeadlineExceeded {
        /// Global rank whose wait timed out.
        rank: usize,
        /// Global ranks that had not joined.
        missing: Vec<usize>,
        /// The collective.
        during: CollectiveId,
        /// Maximum duration of the wait.
        deadline: Duration,
    },

    /// A rank called a collective with invalid arguments.
    #[error("rank {rank}: {op} `{label}`: {problem}. {remedy}")]
    InvalidArgument {
        /// Global rank.
        rank: usize,
        /// Operation that it called.
        op: Op,
        /// Label of the call.
        label: String,
        /// The invalid argument and its value.
        problem: String,
        /// Instruction for fixing it.
        remedy: String,
    },

    /// A group of ranks could not be created.
    #[error("rank {rank}: group {ranks:?}: {problem}")]
    InvalidGroup {
        /// Global rank.
        rank: usize,
        /// Ranks that were requested.
        ranks: Vec<usize>,
        /// Reason why they cannot form a group.
        problem: String,
    },

    /// A rank called `World::shrink`, which revokes this world.
    #[error(
        "rank {rank} called `World::shrink`, which revokes this world. Call `World::shrink` on this rank too, to join \
         the survivors"
    )]
    Revoked {
        /// Global rank.
        rank: usize,
    },

    /// The ranks that survive a failure continue without this one.
    #[error(
        "rank {rank} is not among the survivors: it had not called `World::shrink` when the deadline of the other \
         ranks expired. End its program, or raise `Launch::with_deadline` if it is only slow"
    )]
    ExcludedFromShrink {
        /// Global rank.
        rank: usize,
    },

    /// The backend of the launch does not support `World::shrink`.
    #[error(
        "rank {rank}: the backend of this launch does not support `World::shrink`. Restart the launch"
    )]
    CannotShrink {
        /// Global rank.
        rank: usize,
    },

    /// A data plane could not move the tensors of a call on which all ranks had agreed.
    #[error(
        "rank {rank}: the data plane `{plane}` failed: {problem}. Restart the launch from a checkpoint"
    )]
    DataPlane {
        /// Global rank.
        rank: usize,
        /// Name of the data plane.
        plane: String,
        /// Description of the failure.
        problem: String,
    },

    /// The program of a rank in another process did not end after a failure.
    #[error(
        "rank {rank} was still running {deadline:?} after the failure, so its process is left behind. Find out where its \
         program is stuck outside collectives, or raise `Launch::with_deadline` if it is only slow"
    )]
    StillRunning {
        /// Global rank.
        rank: usize,
        /// Time for which the other ranks waited.
        deadline: Duration,
    },

    /// A process sent a message that is not valid, or does not fit the calls of its ranks.
    #[error(
        "the process of rank {rank} sent an invalid message: {problem}. Run the same build of the same program in all \
         processes"
    )]
    Protocol {
        /// Lowest global rank of that process.
        rank: usize,
        /// Description of the message.
        problem: String,
    },

    /// A process cannot be reached any more.
    #[error(
        "lost the connection to the process of rank {rank}: {problem}. Read what it printed, and run the same build of \
         the same program in all processes"
    )]
    Disconnected {
        /// Lowest global rank of that process.
        rank: usize,
        /// Problem with the connection.
        problem: String,
    },

    /// Two processes have made the same launch with other numbers of ranks.
    #[error(
        "process {process} launches {ranks} ranks, and process {other} launches {other_ranks} in the same launch. Pass the \
         same number of ranks in every process, and make the same launches in the same order"
    )]
    UnequalRanks {
        /// Lowest global rank of the other process, as this process numbers the ranks.
        rank: usize,
        /// Index of this process.
        process: usize,
        /// Number of ranks of the launch, in all processes, according to this process.
        ranks: usize,
        /// Index of the other process.
        other: usize,
        /// Number of ranks of the launch according to the other process.
        other_ranks: usize,
    },
}

impl CommError {
    /// Returns the rank at fault. For a deadline it is the first missing rank, for a deadlock the
    /// first rank of the cycle.
    pub fn rank(&self) -> usize {
        match self {
            Self::RankPanicked { rank, .. }
            | Self::RankFailed { rank, .. }
            | Self::RankReturned { rank, .. }
            | Self::Mismatch { rank, .. }
            | Self::Diverged { rank, .. }
            | Self::ConcurrentCalls { rank, .. }
            | Self::CollectiveInRunOn { rank, .. }
            | Self::ForeignRankObject { rank, .. }
            | Self::InvalidArgument { rank, .. }
            | Self::InvalidGroup { rank, .. }
            | Self::Revoked { rank }
            | Self::ExcludedFromShrink { rank }
            | Self::CannotShrink { rank }
            | Self::DataPlane { rank, .. }
            | Self::StillRunning { rank, .. }
            | Self::Protocol { rank, .. }
            | Self::Disconnected { rank, .. }
            | Self::UnequalRanks { rank, .. } => *rank,
            Self::DeadlineExceeded { rank, missing, .. } => {
                missing.first().copied().unwrap_or(*rank)
            }
            Self::Deadlock { waits } => waits.first().map_or(0, |(rank, ..)| *rank),
        }
    }

    /// Returns true if the program of a single rank caused the failure, whatever the other ranks
    /// called.
    pub(super) fn is_of_program(&self) -> bool {
        matches!(
            self,
            Self::RankPanicked { .. }
                | Self::RankFailed { .. }
                | Self::ConcurrentCalls { .. }
                | Self::CollectiveInRunOn { .. }
                | Self::ForeignRankObject { .. }
                | Self::InvalidArgument { .. }
                | Self::InvalidGroup { .. }
        )
    }

    /// Returns the failure without the collective in which it was noticed.
    pub(super) fn without_notice(&self) -> Self {
        let mut failure = self.clone();
        if let Self::RankPanicked { during, .. } | Self::RankFailed { during, .. } = &mut failure {
            *during = None;
        }
        failure
    }
}

/// Kind of a value that must be identical on several ranks, which a replica check compares.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum ReplicatedValue {
    /// A parameter, or this rank's shard of it, as stored.
    Weight,
    /// An unsharded parameter, gathered from the shards.
    GatheredWeight,
    /// An averaged gradient.
    Gradient,
    /// A local tensor that the program passed for a DTensor
    /// ([`Launch::with_replica_checks`](super::Launch::with_replica_checks)).
    LocalTensor,
}

impl fmt::Display for ReplicatedValue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Weight => "weight",
            Self::GatheredWeight => "gathered weight",
            Self::Gradient => "gradient",
            Self::LocalTensor => "local tensor",
        })
    }
}

fn noticed(during: &Option<CollectiveId>) -> String {
    during
        .as_ref()
        .map(|id| format!(" (noticed in {id})"))
        .unwrap_or_default()
}

fn blame(rank: &usize, other: &usize, majority: &bool) -> String {
    match majority {
        true => format!("rank {rank} is wrong, as most ranks hold the value of rank {other}"),
        false => "either may be wrong".into(),
    }
}

fn held(of: &ReplicatedValue, param: &str, step: &u64) -> String {
    match of {
        ReplicatedValue::LocalTensor => format!("the {of} {param}"),
        _ => format!("{of} `{param}` in step {step}"),
    }
}

fn remedy(of: &ReplicatedValue) -> &'static str {
    match of {
        ReplicatedValue::LocalTensor => {
            "The tensor is replicated over that dimension, so its ranks must pass the same values, such as the same rows \
             of a batch. Choose rows by `mesh.data_shard(..)` of the dimensions whose ranks have rows of their own, not by the \
             rank"
        }
        _ => {
            "All ranks of that group must hold the same bits, so a host has silently corrupted data. Stop using that host, \
             and continue without it (`World::shrink`) or resume from a checkpoint"
        }
    }
}

fn cycle(waits: &[(usize, CollectiveId, usize)]) -> String {
    waits
        .iter()
        .map(|(rank, id, target)| format!("rank {rank} waits in {id} for rank {target}"))
        .collect::<Vec<_>>()
        .join(", ")
}
