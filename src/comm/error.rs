//! [`CommError`]: why a collective failed.

use std::time::Duration;

use super::{CollectiveId, Op, ReplicatedValue};

/// Why a collective failed, naming the rank at fault.
///
/// A failure is joint: after the first one, every collective of every group of the world ends
/// with it, on every rank. `during` is the collective in which the reporting rank learned of it;
/// `None` where the error is the failing rank's own.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CommError {
    /// A rank panicked.
    #[error("rank {rank} panicked: {message}{}", noticed(.during))]
    RankPanicked {
        /// Global rank.
        rank: usize,
        /// The panic message.
        message: String,
        /// What the reporting rank was taking part in.
        during: Option<CollectiveId>,
    },

    /// A rank's program returned an error.
    #[error("rank {rank} failed: {message}{}", noticed(.during))]
    RankFailed {
        /// Global rank.
        rank: usize,
        /// The error's message.
        message: String,
        /// What the reporting rank was taking part in.
        during: Option<CollectiveId>,
    },

    /// A rank's program returned while others still waited for it.
    #[error("rank {rank} has returned, but {during} still needs it; every rank of a group must make the same calls")]
    RankReturned {
        /// Global rank.
        rank: usize,
        /// The first collective that missed it.
        during: CollectiveId,
    },

    /// Two ranks disagree about the same collective.
    #[error(
        "rank {rank} and rank {other} disagree in {during}: {differs} (rank {rank} vs rank {other}); every rank of a \
         group must make the same calls, enter the same units, and read the same parameters outside units, in one order"
    )]
    Mismatch {
        /// Global rank that differs; of three or more ranks present, the one outside the majority.
        rank: usize,
        /// A global rank it differs from.
        other: usize,
        /// The collective, as `other` called it.
        during: CollectiveId,
        /// What differs: `rank`'s value first, such as `shape [4, 8] vs [4, 9]`.
        differs: String,
    },

    /// Two ranks hold different values of what all ranks of a group must hold alike: a host has silently corrupted one.
    ///
    /// The program of a rank at fault ends, the others may [go on](super::World::shrink) without it.
    #[error(
        "rank {rank} and rank {other} hold different values of {of} `{param}` in step {step} (found in {during}): {}; all \
         ranks of that group must hold the same bits, so that a host has silently corrupted data: stop using it, and go on \
         without it (`World::shrink`), or from a checkpoint",
        blame(.rank, .other, .majority)
    )]
    Diverged {
        /// Global rank that differs: the one outside the majority, if there is one.
        rank: usize,
        /// A global rank it differs from.
        other: usize,
        /// The collective that brought it to light.
        during: CollectiveId,
        /// The parameter's path.
        param: String,
        /// What of it.
        of: ReplicatedValue,
        /// In which step it was: how many passes of the parameter's unit that trains there had been, with this one.
        step: u64,
        /// Whether most ranks of the group hold what `other` does. Else either may be wrong.
        majority: bool,
    },

    /// Ranks wait for each other in different collectives.
    #[error(
        "deadlock: {}; make the calls in one order on all ranks, or, if another thread of one of them would \
         have come, declare it: `Launch::with_multithreaded_ranks`",
        cycle(.waits)
    )]
    Deadlock {
        /// Each rank of the cycle, what it waits in, and the rank it waits for.
        waits: Vec<(usize, CollectiveId, usize)>,
    },

    /// A rank called a collective, or waited in one, while another of its threads waited.
    #[error(
        "rank {rank} called {called} while it waited in {during}; call from one thread of a rank at a time, \
         or declare that threads of a rank wait at the same time: `Launch::with_multithreaded_ranks`"
    )]
    ConcurrentCalls {
        /// Global rank.
        rank: usize,
        /// What the second thread called.
        called: CollectiveId,
        /// What the first thread waited in.
        during: CollectiveId,
    },

    /// A rank called a collective in what it runs alone.
    #[error(
        "rank {rank} called {called} inside `World::run_on`, which the other ranks do not run; communicate before \
         it or after it, on all ranks"
    )]
    CollectiveInRunOn {
        /// Global rank.
        rank: usize,
        /// What it called.
        called: CollectiveId,
    },

    /// A rank communicated with something of another rank's.
    #[error(
        "rank {rank} called {op} `{label}` with a tensor, mesh, work or module that belongs to rank {owner}; \
         ranks pass each other plain data (`into_data`), and distribute it on meshes of their own"
    )]
    ForeignRankObject {
        /// Global rank that called.
        rank: usize,
        /// Global rank for which it would have been.
        owner: usize,
        /// What it called.
        op: Op,
        /// The caller's label.
        label: String,
    },

    /// Ranks did not join a collective in time.
    #[error(
        "{during}: ranks {missing:?} did not join within {deadline:?} of rank {rank}'s wait; \
         raise `Launch::with_deadline`, or that of the mesh dimension (`DeviceMesh::with_deadline`), if they are only slow"
    )]
    DeadlineExceeded {
        /// Global rank whose wait ran out.
        rank: usize,
        /// Global ranks that had not joined.
        missing: Vec<usize>,
        /// The collective.
        during: CollectiveId,
        /// How long it waited.
        deadline: Duration,
    },

    /// A rank called a collective with arguments that cannot be right.
    #[error("rank {rank}: {op} `{label}`: {problem}; {remedy}")]
    InvalidArgument {
        /// Global rank.
        rank: usize,
        /// What it called.
        op: Op,
        /// The caller's label.
        label: String,
        /// The argument at fault and its value.
        problem: String,
        /// What to do instead.
        remedy: String,
    },

    /// A group of ranks cannot be made.
    #[error("rank {rank}: group {ranks:?}: {problem}")]
    InvalidGroup {
        /// Global rank.
        rank: usize,
        /// The ranks asked for.
        ranks: Vec<usize>,
        /// What is wrong with them.
        problem: String,
    },

    /// A rank has given the world up, for that of the ranks that go on.
    #[error("rank {rank} has given this world up, for that of the ranks that go on; go on there, too: `World::shrink`")]
    Revoked {
        /// Global rank.
        rank: usize,
    },

    /// The ranks that go on do so without this one.
    #[error(
        "rank {rank} is not among the ranks that go on: it was not in `World::shrink` when they had waited for their \
         deadline; end its program, or raise `Launch::with_deadline` if it is only slow"
    )]
    ExcludedFromShrink {
        /// Global rank.
        rank: usize,
    },

    /// What connects the ranks cannot connect fewer of them.
    #[error("rank {rank}: the engine of this launch does not support `World::shrink`; launch again")]
    CannotShrink {
        /// Global rank.
        rank: usize,
    },

    /// A process cannot be reached any more, or sends what cannot be right.
    #[error(
        "lost touch with the process of rank {rank}: {problem}; look at what it printed, and run one build of one program \
         in all processes"
    )]
    Disconnected {
        /// The first global rank of that process.
        rank: usize,
        /// What is wrong with the connection.
        problem: String,
    },
}

impl CommError {
    /// The rank at fault: for a deadline the first missing one, for a deadlock the first of the cycle.
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
            | Self::Disconnected { rank, .. } => *rank,
            Self::DeadlineExceeded { rank, missing, .. } => missing.first().copied().unwrap_or(*rank),
            Self::Deadlock { waits } => waits.first().map_or(0, |(rank, ..)| *rank),
        }
    }

    /// Whether a rank's program alone is wrong, whatever the others call.
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

    /// The failure itself, whoever noticed it.
    pub(super) fn without_notice(&self) -> Self {
        let mut failure = self.clone();
        if let Self::RankPanicked { during, .. } | Self::RankFailed { during, .. } = &mut failure {
            *during = None;
        }
        failure
    }
}

fn noticed(during: &Option<CollectiveId>) -> String {
    during.as_ref().map(|id| format!(" (noticed in {id})")).unwrap_or_default()
}

fn blame(rank: &usize, other: &usize, majority: &bool) -> String {
    match majority {
        true => format!("rank {rank} is wrong, as most hold what rank {other} does"),
        false => "either may be wrong".into(),
    }
}

fn cycle(waits: &[(usize, CollectiveId, usize)]) -> String {
    waits
        .iter()
        .map(|(rank, id, target)| format!("rank {rank} waits in {id} for rank {target}"))
        .collect::<Vec<_>>()
        .join(", ")
}
