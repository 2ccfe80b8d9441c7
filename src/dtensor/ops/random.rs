//! Reproducible random numbers, and the seeds with which they are drawn.
//!
//! Element `i` (row-major, in the global tensor) of the values drawn with a seed is a function of
//! the seed and `i` alone. Replicas are therefore identical, shards differ, and a tensor has the
//! same bits on every mesh and under every placement.
//!
//! Operators that take no seed draw one from the calling thread's stream, which [`seed`] starts. A
//! program that is the same on all ranks draws the same seeds on all of them, without
//! communication. A rank's thread starts with seed 0. Every other thread of a rank that runs
//! operators gets a separate stream.
//!
//! In this sense, ranks along a data-parallel dimension are different programs if each makes
//! DTensors of its own shard of the batch. Their DTensors are on slices of one mesh, and the values
//! that operators draw depend on the [slice](crate::mesh::DeviceMesh::slice_index). Such ranks draw
//! different values, while ranks that share a DTensor draw the same. A mesh that was created
//! separately is not a slice: start its ranks with a separate seed.
//!
//! Plain tensors are private to each rank. [`tensor`] draws their values, and
//! [`nn::dropout`](crate::nn::dropout) their masks, from a stream of the rank, which [`seed`]
//! starts too: the numbers differ between ranks and are the same in every run. burn's own
//! `Tensor::random` and `Dropout` on the CPU use one state per process. If several ranks of a
//! process draw from it at the same time, the result depends on timing.
//!
//! # How a stream advances
//! A stream advances by one for every call that draws, whatever the tensor's shape, mesh and
//! placements: dropout, a `random_like`, a [`next_seed`]. A call that draws nothing, such as
//! dropout outside of training, does not advance it. Draws of [a rank's own tensors](tensor) are
//! counted separately, and burn's random state is never used, so that neither affects the others.
//! (PyTorch advances one offset by the number of elements drawn, and its values depend on the
//! placements.)
//!
//! A [`RngState`] is the seed and two counters. Save it with a checkpoint and
//! [resume](set_rng_state) on any mesh. Alternatively, start a new stream in every step, so that
//! there is nothing to save:
//!
//! ```
//! use burn_dtensor::dtensor::ops::random;
//! # let (step, model) = (3, 1);
//! random::seed(random::fold_in(random::fold_in(42, step), model));
//! ```

use std::cell::Cell;

use burn::serde::{Deserialize, Serialize};
use burn::tensor::{Distribution, Shape, Tensor, TensorCreationOptions, TensorData};

use crate::Error;
use crate::comm;
use crate::dtensor::factory::check_distribution;
use crate::dtensor::philox::philox4x32;
use crate::dtensor::random::{fill, float};
use crate::dtensor::{DTensor, DTensorError, DTensorSpec};
use crate::error::OrUnwind;
use crate::mesh::DeviceMesh;

thread_local! {
    static THREAD: Cell<ThreadRng> = const { Cell::new(ThreadRng { stream: None, begun: None, device_draws: 0 }) };
}

/// Random numbers of a thread.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ThreadRng {
    /// `None` before it is seeded.
    stream: Option<RngState>,
    /// The stream as an operator began it on a thread without one.
    begun: Option<RngState>,
    /// Number of seeds for devices that the thread has drawn without a stream.
    device_draws: u64,
}

/// State of a thread's random numbers, which a checkpoint saves: the seed and the number of draws.
///
/// [`rng_state`] returns that of the calling thread, and [`set_rng_state`] resumes from one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(crate = "burn::serde")]
pub struct RngState {
    seed: u64,
    /// Number of draws that all ranks share.
    shared: u64,
    /// Number of draws that are private to the rank. Ranks may differ in this.
    own: u64,
    /// True if the ranks of a mesh share the stream, so that it cannot give numbers private to a
    /// rank.
    common: bool,
}

impl RngState {
    fn new(seed: u64) -> Self {
        Self {
            seed,
            shared: 0,
            own: 0,
            common: false,
        }
    }
}

/// Use of a number derived from a seed. It is the last word in the Philox counter, where the
/// elements of tensors have 0.
#[derive(Debug, Clone, Copy)]
enum Purpose {
    Draw = 1,
    Fold = 2,
    Thread = 3,
    Own = 4,
    Device = 5,
}

/// Starts a new stream of seeds on the calling thread. Local.
///
/// All ranks of a mesh that share DTensors must call it with the same seed.
pub fn seed(seed: u64) {
    set_rng_state(RngState::new(seed));
}

/// Returns the state of the calling thread's stream.
///
/// It is the same on all ranks that have made the same shared draws. If ranks have also drawn
/// [tensors of their own](tensor), equally many on each, one state can resume all ranks. Otherwise
/// save the state of each rank.
///
/// ```
/// use burn_dtensor::dtensor::ops::random;
///
/// random::seed(3);
/// random::next_seed();
/// let saved = random::rng_state(); // with serde, in a checkpoint
/// let next = random::next_seed();
/// random::set_rng_state(saved);
/// assert_eq!(random::next_seed(), next);
/// ```
///
/// # Panics
/// As [`next_seed`] does.
#[track_caller]
pub fn rng_state() -> RngState {
    of_rank().unwrap_or_else(unseeded)
}

/// Resumes from `state` on the calling thread, as the thread from which it was [taken](rng_state)
/// would have continued. This works on any mesh and with any number of ranks.
///
/// As with [`seed`], all ranks of a mesh that share DTensors must pass the same state, except for
/// the number of private draws.
pub fn set_rng_state(state: RngState) {
    THREAD.set(ThreadRng {
        stream: Some(state),
        ..THREAD.get()
    });
}

impl ThreadRng {
    /// Returns the random numbers of the calling thread.
    pub(crate) fn of_thread() -> Self {
        Self {
            stream: of_rank(),
            ..THREAD.get()
        }
    }

    /// Makes these the random numbers of the calling thread.
    pub(crate) fn restore(self) {
        THREAD.set(self);
    }

    /// Returns these, of a thread on which an operator may have begun the stream since, with that
    /// stream.
    pub(crate) fn with_begun(self) -> Self {
        Self {
            stream: self.stream.or(THREAD.get().begun),
            ..self
        }
    }
}

/// Returns the next seed private to the rank, for the random state of a device.
pub(crate) fn next_device_seed() -> u64 {
    let (seed, number) = match of_rank() {
        Some(state) => {
            set_rng_state(RngState {
                own: state.own + 1,
                ..state
            });
            (state.seed, state.own)
        }
        // This begins no stream: an operator may begin the thread's later.
        None => {
            let thread = THREAD.get();
            THREAD.set(ThreadRng {
                device_draws: thread.device_draws + 1,
                ..thread
            });
            (0, thread.device_draws)
        }
    };
    fold_in(
        derived(seed, number, Purpose::Device),
        comm::rank_of_thread().unwrap_or(0) as u64,
    )
}

/// Returns the next seed of the calling thread's stream, for an operator or a factory that takes
/// one.
///
/// # Panics
/// Unwinds with [`DTensorError::Unseeded`] on a thread that is not a rank's main thread and has no
/// stream yet, from [`seed`] or from an operator.
pub fn next_seed() -> u64 {
    next(of_rank().unwrap_or_else(unseeded))
}

/// Returns a plain tensor of random values that are private to this rank: they differ between ranks
/// and are the same in every run.
///
/// They depend on the seed of the calling thread's [stream](self), the rank, and the number of such
/// tensors that the thread has drawn. Use it for noise, latent codes and random inputs of
/// data-parallel ranks. Tensor-parallel ranks that need one tensor draw a [`DTensor`] instead.
///
/// A thread that a rank's program has started does not know its rank. Start its stream with a seed
/// of the rank, `seed(fold_in(seed, rank))`, before it draws anything.
///
/// # Panics
/// Unwinds with [`DTensorError::Distribution`], and with [`DTensorError::Unseeded`] on a thread
/// that is not a rank's main thread and has no stream.
#[must_use]
#[track_caller]
pub fn tensor<const D: usize>(
    shape: impl Into<Shape>,
    distribution: Distribution,
    options: impl Into<TensorCreationOptions>,
) -> Tensor<D> {
    check_distribution(distribution).unwrap_or_else(|error| Error::from(error).unwind());
    drawn(next_own_seed(), shape.into(), distribution, options.into())
}

/// Returns a plain tensor of the values that `seed` gives.
pub(crate) fn drawn<const D: usize>(
    seed: u64,
    shape: Shape,
    distribution: Distribution,
    options: TensorCreationOptions,
) -> Tensor<D> {
    let full: Vec<_> = shape.iter().map(|&len| 0..len).collect();
    let values = fill(seed, &shape, &full, |words, lane| {
        float(distribution, words, lane)
    });
    Tensor::from_data(TensorData::new(values, shape), options)
}

/// Returns the next seed private to the rank.
fn next_own_seed() -> u64 {
    let state @ RngState { seed, own, .. } = of_rank()
        .filter(|state| !state.common)
        .unwrap_or_else(unseeded);
    set_rng_state(RngState {
        own: own + 1,
        ..state
    });
    // Outside of a launch, the rank is 0.
    let rank = comm::rank_of_thread().unwrap_or(0);
    fold_in(derived(seed, own, Purpose::Own), rank as u64)
}

fn unseeded() -> RngState {
    Error::from(DTensorError::Unseeded).unwind()
}

/// Returns the next seed for operators on tensors of `mesh`: like [`next_seed`], but different for
/// every [slice](DeviceMesh::slice_index) of a mesh.
///
/// # Panics
/// Unwinds with [`MeshError::NotAMember`](crate::mesh::MeshError::NotAMember) outside the mesh.
pub fn next_seed_on(mesh: &DeviceMesh) -> u64 {
    let seed = next(of_rank().unwrap_or_else(|| of_thread(mesh)));
    match mesh.slice_index() {
        0 => seed,
        index => fold_in(seed, index as u64),
    }
}

/// Returns the calling thread's stream, or the initial one if it is a rank's main thread.
fn of_rank() -> Option<RngState> {
    THREAD
        .get()
        .stream
        .or_else(|| comm::is_rank().then_some(RngState::new(0)))
}

/// Returns the stream of another thread of a rank. Its seed is derived from the ranks of the mesh
/// of its first operator, and from the number of such threads before it. These threads run the
/// mesh's operators in the same order, so that the seed is the same on all ranks.
fn of_thread(mesh: &DeviceMesh) -> RngState {
    let number = mesh
        .member("draw a seed on it")
        .map_err(Error::from)
        .and_then(|_| {
            let ranks = mesh.world().group(mesh.ranks())?;
            Ok(ranks
                .duplicate_private("burn_dtensor::threads")
                .next_forward_index())
        });
    let group = mesh
        .ranks()
        .iter()
        .fold(0, |seed, &rank| fold_in(seed, rank as u64));
    let begun = RngState {
        common: true,
        ..RngState::new(derived(group, number.or_unwind(), Purpose::Thread))
    };
    THREAD.set(ThreadRng {
        begun: Some(begun),
        ..THREAD.get()
    });
    begun
}

fn next(state: RngState) -> u64 {
    set_rng_state(RngState {
        shared: state.shared + 1,
        ..state
    });
    derived(state.seed, state.shared, Purpose::Draw)
}

/// Derives a seed from another and a number, such as a step, a layer or a replica.
pub fn fold_in(seed: u64, number: u64) -> u64 {
    derived(seed, number, Purpose::Fold)
}

fn derived(seed: u64, number: u64, purpose: Purpose) -> u64 {
    let halves = |number: u64| [number as u32, (number >> 32) as u32];
    let [low, high] = halves(number);
    let key = halves(seed);
    let [low, high, ..] = philox4x32([low, high, 0, purpose as u32], key);
    u64::from(low) | u64::from(high) << 32
}

/// Returns this rank's local tensor of the `distribution` drawn with `seed`, in the layout and type
/// of `spec`.
pub(super) fn part<const D: usize>(
    distribution: Distribution,
    seed: u64,
    spec: &DTensorSpec,
    like: &Tensor<D>,
    scale: f32,
) -> Tensor<D> {
    let slices = spec.layout().local_slices(spec.shape(), spec.coordinate());
    let values = fill(seed, spec.shape(), &slices, |words, lane| {
        scale * float(distribution, words, lane)
    });
    let shape = Shape::from(slices.iter().map(|slice| slice.len()).collect::<Vec<_>>());
    Tensor::from_data(
        TensorData::new(values, shape),
        (&like.device(), spec.dtype()),
    )
}

impl<const D: usize> DTensor<D> {
    /// Returns random values in the shape, type and layout of this tensor, as burn's
    /// [`random_like`](Tensor::random_like). They are drawn with the next seed of the thread's
    /// [stream](self). If this tensor is partial, the result is `R`.
    ///
    /// # Panics
    /// Unwinds with [`DTensorError::Distribution`](crate::dtensor::DTensorError::Distribution) if
    /// the distribution is invalid.
    #[must_use]
    #[track_caller]
    pub fn random_like(&self, distribution: Distribution) -> Self {
        check_distribution(distribution).unwrap_or_else(|error| Error::from(error).unwind());
        let spec = self.reduced_spec();
        Self::from_parts(
            part(
                distribution,
                next_seed_on(spec.mesh()),
                &spec,
                &self.local,
                1.0,
            ),
            spec,
        )
    }
}
