//! [`Event`]: events of FSDP units, for profiling and tests. [`probe`]: what units return.

use std::cell::RefCell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Instant;
use std::{fmt, thread};

use burn::backend::ops::FloatTensorOps;
use burn::backend::{Dispatch, DispatchTensor, TensorMetadata};
use burn::tensor::{Tensor, TensorData};

use crate::autodiff;
use crate::comm::{Op, OpTiming, forget_panic};
use crate::tensor_tree::TensorTree;

/// An event of a unit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Event {
    /// Kind of the event.
    pub kind: EventKind,
    /// Path of the unit, `root` for the model itself.
    pub unit: Arc<str>,
    /// Phase of training in which the event happened.
    pub training_state: TrainingState,
    /// State of the unit's parameters on this rank after the event.
    pub state: ShardedState,
    /// Time of the event.
    pub at: Instant,
    /// Timing of the collective, for [`Done`](EventKind::Done) events. The data may have been
    /// transferred by another thread than the rank's.
    pub timing: Option<OpTiming>,
}

/// Kind of an [`Event`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum EventKind {
    /// The forward of the unit begins. Its parameters are gathered, and the all-gathers of
    /// prefetched units are in flight.
    PreForward,
    /// The forward of the unit has ended.
    PostForward,
    /// Backward has reached the unit: the gradient of one of its outputs is available.
    PreBackward,
    /// The backward of the unit has ended. The reduction of its gradients has been issued, or they
    /// are accumulated in the unit.
    PostBackward,
    /// The unit begins to gather its parameters.
    Unshard,
    /// The gathered parameters of the unit are freed.
    Reshard,
    /// The unit has issued a collective.
    Issued(Op),
    /// The result of a collective of the unit is available.
    Done(Op),
}

/// Phase of training on a rank, relative to one unit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum TrainingState {
    /// Between iterations.
    #[default]
    Idle,
    /// In forward.
    Forward,
    /// In backward, before all gradients of the unit are available.
    PreBackward,
    /// In backward, after all gradients of the unit are available.
    PostBackward,
}

/// State of a unit's parameters on one rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum ShardedState {
    /// The rank has only its shard.
    #[default]
    Sharded,
    /// The rank has a shard over fewer ranks:
    /// [`ReshardAfterForward::Ranks`](super::ReshardAfterForward::Ranks).
    ShardedPostForward,
    /// The rank has the full parameters, or their all-gather is in flight.
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

/// Records of the program that runs on a thread, if it is observed.
#[derive(Default)]
struct Observers {
    events: RefCell<Option<Vec<Event>>>,
    probe: RefCell<Option<Probe>>,
}

thread_local! {
    static OBSERVERS: Observers = Observers::default();
}

/// Runs `program` and returns the events of units on this thread, that is on this rank, in the
/// order in which they happened.
///
/// The events are also emitted through [`tracing`] at level `TRACE`, target `burn_dtensor::fsdp`.
/// If calls are nested, only the innermost one records an event.
///
/// Local: nothing additional is sent, and each rank may record or not.
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
    let around = OBSERVERS.with(|observers| observers.events.replace(Some(Vec::new())));
    let result = program();
    (
        result,
        OBSERVERS
            .with(|observers| observers.events.replace(around))
            .unwrap_or_default(),
    )
}

impl Event {
    /// Creates an event of the unit with this label that happens now.
    pub(super) fn of(
        unit: Arc<str>,
        kind: EventKind,
        training_state: TrainingState,
        state: ShardedState,
    ) -> Self {
        Self {
            kind,
            unit,
            training_state,
            state,
            at: Instant::now(),
            timing: None,
        }
    }
}

/// Records an event of a unit. `event` is called only while events are observed.
pub(super) fn record(event: impl FnOnce() -> Event) {
    let is_traced = tracing::enabled!(target: TARGET, tracing::Level::TRACE);
    let is_recorded = OBSERVERS.with(|observers| observers.events.borrow().is_some());
    if !is_traced && !is_recorded {
        return;
    }
    let event = event();
    if is_traced {
        let Event {
            kind,
            unit,
            training_state,
            state,
            ..
        } = &event;
        tracing::trace!(target: TARGET, %kind, unit = &**unit, ?training_state, ?state);
    }
    OBSERVERS.with(|observers| {
        observers
            .events
            .borrow_mut()
            .iter_mut()
            .for_each(|events| events.push(event.clone()))
    });
}

const TARGET: &str = "burn_dtensor::fsdp";

/// Record of a program that ran with a [`probe`].
#[derive(Debug, Default)]
pub(crate) struct Probe {
    /// The float tensors that each call of [`unit`](super::unit()) returned, with the unit's label.
    /// A unit inside another one returns first.
    pub(crate) outputs: Vec<(Arc<str>, Vec<HostTensor>)>,
    /// Label of the innermost unit in which the program panicked.
    pub(crate) panicked_in: Option<Arc<str>>,
}

/// The values of a float tensor, in host memory.
#[derive(Debug, Clone)]
pub(crate) struct HostTensor {
    pub(crate) shape: Vec<usize>,
    data: TensorData,
}

/// Runs `program` on this thread and returns its result, or the payload of its panic, with a record
/// of the units that it entered by [`unit`](super::unit()).
pub(crate) fn probe<T>(program: impl FnOnce() -> T) -> (thread::Result<T>, Probe) {
    let around = OBSERVERS.with(|observers| observers.probe.replace(Some(Probe::default())));
    let result = catch_unwind(AssertUnwindSafe(program));
    forget_panic();
    (
        result,
        OBSERVERS
            .with(|observers| observers.probe.replace(around))
            .unwrap_or_default(),
    )
}

impl HostTensor {
    /// Copies a float tensor.
    pub(crate) fn of(tensor: DispatchTensor) -> Self {
        let shape = tensor.shape();
        let flat = Dispatch::float_reshape(autodiff::plain(tensor), [shape.num_elements()].into());
        Self {
            shape: shape.to_vec(),
            data: Tensor::<1>::from_dispatch(flat).into_data(),
        }
    }

    /// Returns the values in row-major order.
    pub(crate) fn values(&self) -> Vec<f64> {
        self.data.iter::<f64>().collect()
    }
}

/// Guard of a unit whose forward runs with a probe.
pub(super) struct ProbedUnit(Arc<str>);

impl ProbedUnit {
    /// Records that the unit is entered. Returns `None` without a probe.
    pub(super) fn begin(label: &Arc<str>) -> Option<Self> {
        OBSERVERS
            .with(|observers| observers.probe.borrow().is_some())
            .then(|| Self(label.clone()))
    }

    /// Records what the unit returns.
    pub(super) fn leave<O: TensorTree>(self, output: O) -> O {
        let mut tensors = Vec::new();
        let output = output.map_floats(&mut |tensor| {
            // The elements of quantized tensors cannot be read as floats.
            tensors.extend(
                tensor
                    .dtype()
                    .is_float()
                    .then(|| HostTensor::of(tensor.clone())),
            );
            tensor
        });
        self.note(|probe, label| probe.outputs.push((label.clone(), tensors)));
        output
    }

    fn note(&self, note: impl FnOnce(&mut Probe, &Arc<str>)) {
        OBSERVERS.with(|observers| {
            observers
                .probe
                .borrow_mut()
                .as_mut()
                .map(|probe| note(probe, &self.0))
        });
    }
}

impl Drop for ProbedUnit {
    fn drop(&mut self) {
        if thread::panicking() {
            self.note(|probe, label| _ = probe.panicked_in.get_or_insert_with(|| label.clone()));
        }
    }
}
