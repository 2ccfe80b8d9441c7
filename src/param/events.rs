//! [`Event`]: what units do, as they do it.

use std::cell::RefCell;
use std::fmt;
use std::sync::Arc;
use std::time::Instant;

use crate::comm::{Op, OpTiming};

/// What a unit has done.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Event {
    /// What happened.
    pub kind: EventKind,
    /// The unit's path, `root` of the model itself.
    pub unit: Arc<str>,
    /// Where the rank's training was.
    pub training_state: TrainingState,
    /// What the rank has of the unit's parameters from then on.
    pub state: ShardedState,
    /// When.
    pub at: Instant,
    /// Of a collective that is [done](EventKind::Done): when it was posted, moved and was wanted. Another thread than
    /// the rank's may have moved it.
    pub timing: Option<OpTiming>,
}

/// What happened to a unit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum EventKind {
    /// Its forward begins: its parameters are there, and others that are gathered ahead are on their way.
    PreForward,
    /// Its forward has ended.
    PostForward,
    /// The gradient of an output has come, and backward goes into it.
    PreBackward,
    /// Its gradients are on their way to the ranks' shards, or wait with it: backward is through.
    PostBackward,
    /// It begins to be gathered.
    Unshard,
    /// Its gathered parameters are freed.
    Reshard,
    /// It has issued a collective.
    Issued(Op),
    /// The result of a collective is there.
    Done(Op),
}

/// Where a rank's training is, as seen from a unit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum TrainingState {
    /// Between iterations.
    #[default]
    Idle,
    /// In forward.
    Forward,
    /// In backward, before the unit's gradients are all there.
    PreBackward,
    /// In backward, after that.
    PostBackward,
}

/// What a rank has of a unit's parameters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum ShardedState {
    /// Its shard.
    #[default]
    Sharded,
    /// A shard over fewer ranks: [`ReshardAfterForward::Ranks`](super::ReshardAfterForward::Ranks).
    ShardedPostForward,
    /// All of them, or they are on their way.
    Unsharded,
}

impl fmt::Display for EventKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::PreForward => f.pad("pre-forward"),
            Self::PostForward => f.pad("post-forward"),
            Self::PreBackward => f.pad("pre-backward"),
            Self::PostBackward => f.pad("post-backward"),
            Self::Unshard => f.pad("unshard"),
            Self::Reshard => f.pad("reshard"),
            Self::Issued(op) => write!(f, "{op} issued"),
            Self::Done(op) => write!(f, "{op} done"),
        }
    }
}

thread_local! {
    static RECORDED: RefCell<Option<Vec<Event>>> = const { RefCell::new(None) };
}

/// Runs `program`, and returns what units have done meanwhile on this thread, which is this rank, in that order.
///
/// The same events go to [`tracing`], at level `TRACE`, target `burn_dtensor::fsdp`. A recording inside another takes
/// its events.
///
/// ```
/// # use burn::nn::LinearConfig;
/// # use burn::tensor::Tensor;
/// # use burn_dtensor::prelude::*;
/// # use burn_dtensor::fsdp::{EventKind, record_events};
/// # launch(Launch::threads(2), |world| {
/// # let mesh = DeviceMesh::new(world, [2], ["shard"])?;
/// # let device = world.device().clone().autodiff();
/// # let x = Tensor::<2>::ones([1, 4], &device);
/// let model = fully_shard(LinearConfig::new(4, 3).init(&device), &mesh, FullyShard::new())?;
/// let (_, events) = record_events(|| unit(&model, x, |model, x| model.forward(x)).sum().backward());
/// let gathered = events.iter().filter(|event| event.kind == EventKind::Unshard);
/// assert_eq!(gathered.count(), 1);
/// # Ok(())
/// # })?;
/// # Ok::<_, burn_dtensor::Error>(())
/// ```
pub fn record_events<T>(program: impl FnOnce() -> T) -> (T, Vec<Event>) {
    let around = RECORDED.replace(Some(Vec::new()));
    let result = program();
    (result, RECORDED.replace(around).unwrap_or_default())
}

/// Says that something has happened to the unit of this path.
pub(super) fn happened(
    kind: EventKind,
    unit: impl FnOnce() -> Arc<str>,
    training_state: TrainingState,
    state: impl FnOnce() -> ShardedState,
) {
    tell(kind, unit, training_state, state, None);
}

/// Says that a collective of the unit is done, which went so.
pub(super) fn done(
    op: Op,
    unit: impl FnOnce() -> Arc<str>,
    during: TrainingState,
    state: ShardedState,
    timing: Option<OpTiming>,
) {
    tell(EventKind::Done(op), unit, during, || state, timing);
}

fn tell(
    kind: EventKind,
    unit: impl FnOnce() -> Arc<str>,
    training_state: TrainingState,
    state: impl FnOnce() -> ShardedState,
    timing: Option<OpTiming>,
) {
    let is_traced = tracing::enabled!(target: TARGET, tracing::Level::TRACE);
    let is_recorded = RECORDED.with_borrow(Option::is_some);
    if !is_traced && !is_recorded {
        return;
    }
    let event = Event { kind, unit: unit(), training_state, state: state(), at: Instant::now(), timing };
    if is_traced {
        let Event { unit, training_state, state, .. } = &event;
        tracing::trace!(target: TARGET, %kind, unit = &**unit, ?training_state, ?state);
    }
    RECORDED.with_borrow_mut(|recorded| {
        if let Some(recorded) = recorded {
            recorded.push(event);
        }
    });
}

const TARGET: &str = "burn_dtensor::fsdp";
