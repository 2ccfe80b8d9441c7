//! Random numbers that repeat from run to run, and the seeds they are drawn with.
//!
//! Element `i` (row-major, in the global tensor) of what a seed draws is a function of the seed
//! and `i` alone. So replicas agree, shards differ, and a tensor has the same bits on every mesh
//! and under every placement.
//!
//! Operators that take no seed draw one from the calling thread's stream, which [`seed`] starts. A
//! program that is the same on all ranks draws the same seeds on all of them, without a word
//! between ranks. It starts at seed 0, and every other thread of a rank that runs operators at a
//! stream of its own.
//!
//! Ranks along a data-parallel dimension that each make DTensors of their own, of their own part
//! of the batch, are different programs in this sense. Their DTensors live on slices of one mesh,
//! and what operators draw depends on the [slice](crate::mesh::DeviceMesh::slice_index): such
//! ranks draw different values, and those that share a DTensor the same. A mesh that was made by
//! itself is no slice: give its ranks a seed of their own.
//!
//! Plain tensors are each rank's own. [`tensor`] draws their values, and [`nn::dropout`](crate::nn::dropout) their
//! masks, from a stream of the rank's own, which [`seed`] starts too: other numbers on every rank, the
//! same at every run. burn's own `Tensor::random` and `Dropout` take from one state of the process, on
//! the CPU, of which ranks that draw at once get what time will have it.
//!
//! # How a stream advances
//! By one for every call that draws, whatever the tensor's shape, mesh and placements: dropout, a `random_like`, a
//! [`next_seed`]. A call that draws nothing, such as dropout outside of training, leaves it where it is. What is
//! [a rank's own](tensor) is counted apart, and burn's random state is never touched: neither draws change the others.
//! (PyTorch advances one offset by the elements that were drawn, and its values depend on the placements.)
//!
//! A [`RngState`] is two numbers beside the seed, so it is saved with a checkpoint and [resumed](set_rng_state) on any
//! mesh. Or every step starts a stream of its own, and there is nothing to save:
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
    /// None before it is seeded.
    static STREAM: Cell<Option<RngState>> = const { Cell::new(None) };
}

/// A thread's stream of seeds, and how far it has come: what a checkpoint saves of random numbers.
///
/// [`rng_state`] is that of the calling thread, and [`set_rng_state`] goes on with one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(crate = "burn::serde")]
pub struct RngState {
    seed: u64,
    /// How many were drawn from it that all ranks have.
    shared: u64,
    /// How many were drawn from it that are the rank's own: ranks may draw as many as they like.
    own: u64,
    /// Whether ranks of a mesh have it in common: then it cannot give numbers of a rank's own.
    common: bool,
}

impl RngState {
    fn new(seed: u64) -> Self {
        Self { seed, shared: 0, own: 0, common: false }
    }
}

/// Numbers of one seed for different ends, by the last word of the counter. Elements have 0.
#[derive(Debug, Clone, Copy)]
enum Purpose {
    Draw = 1,
    Fold = 2,
    Thread = 3,
    Own = 4,
    Device = 5,
}

/// Starts the calling thread's stream of seeds anew.
///
/// Every rank that holds a part of one DTensor must do so with the same seed.
pub fn seed(seed: u64) {
    STREAM.set(Some(RngState::new(seed)));
}

/// The calling thread's stream: what it is to draw next.
///
/// All ranks that have drawn together have the same. Where ranks have also drawn tensors of their [own](tensor), as
/// many on each, one stream resumes all ranks, and of other numbers each rank's resumes that rank.
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
/// As [`next_seed`].
#[track_caller]
pub fn rng_state() -> RngState {
    of_rank().unwrap_or_else(unseeded)
}

/// Goes on with `state` on the calling thread, as the thread that it was [taken](rng_state) from would have: on any
/// mesh, of any number of ranks.
///
/// As with [`seed`], every rank that holds a part of one DTensor must do so with the same stream, but for what it has
/// counted of tensors of the ranks' own.
pub fn set_rng_state(state: RngState) {
    STREAM.set(Some(state));
}

/// The calling thread's stream, if it has been started.
pub(crate) fn started() -> Option<RngState> {
    STREAM.get()
}

/// Goes back to where the calling thread's stream was [`started`], or not started.
pub(crate) fn restart(state: Option<RngState>) {
    STREAM.set(state);
}

/// The next seed, of the rank's own, for the random state of a device.
pub(crate) fn next_device_seed() -> u64 {
    // A thread that is no rank's own has nothing else to draw from, and gives no tensors of a rank's own.
    let state = of_rank().unwrap_or(RngState { common: true, ..RngState::new(0) });
    STREAM.set(Some(RngState { own: state.own + 1, ..state }));
    fold_in(derived(state.seed, state.own, Purpose::Device), comm::rank_of_thread().unwrap_or(0) as u64)
}

/// The next seed of the calling thread's stream, for an operator or a factory that takes one.
///
/// # Panics
/// Unwinds with [`DTensorError::Unseeded`] on a thread that is no rank's own and that neither
/// [`seed`] nor an operator has given a stream.
pub fn next_seed() -> u64 {
    next(of_rank().unwrap_or_else(unseeded))
}

/// A plain tensor of values that are this rank's own: others on every rank, the same at every run.
///
/// They follow from the seed of the calling thread's [stream](self), the rank, and how many such tensors
/// the thread has drawn. Noise, latent codes and random inputs of data-parallel ranks are such values.
/// Tensor-parallel ranks that need one tensor draw a [`DTensor`].
///
/// A thread that a rank's program has started does not know its rank: start its stream with a seed of the
/// rank's, `seed(fold_in(seed, rank))`, before anything is drawn on it.
///
/// # Panics
/// Unwinds with [`DTensorError::Distribution`], and with [`DTensorError::Unseeded`] on a thread that is no
/// rank's own and has no stream.
#[must_use]
#[track_caller]
pub fn tensor<const D: usize>(
    shape: impl Into<Shape>,
    distribution: Distribution,
    options: impl Into<TensorCreationOptions>,
) -> Tensor<D> {
    check_distribution(distribution).unwrap_or_else(|error| Error::from(error).unwind());
    let shape = shape.into();
    let full: Vec<_> = shape.iter().map(|&len| 0..len).collect();
    let values = fill(next_own_seed(), &shape, &full, |words, lane| float(distribution, words, lane));
    Tensor::from_data(TensorData::new(values, shape), options)
}

/// The next seed that is the rank's own.
fn next_own_seed() -> u64 {
    let state @ RngState { seed, own, .. } = of_rank().filter(|state| !state.common).unwrap_or_else(unseeded);
    STREAM.set(Some(RngState { own: own + 1, ..state }));
    // Outside of a launch there is one rank.
    let rank = comm::rank_of_thread().unwrap_or(0);
    fold_in(derived(seed, own, Purpose::Own), rank as u64)
}

fn unseeded() -> RngState {
    Error::from(DTensorError::Unseeded).unwind()
}

/// [`next_seed`], as operators on tensors of `mesh` draw it: of its own for every
/// [slice](DeviceMesh::slice_index) of a mesh.
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

/// The stream that the calling thread has, or has as a rank's own.
fn of_rank() -> Option<RngState> {
    STREAM.get().or_else(|| comm::is_rank().then_some(RngState::new(0)))
}

/// The stream of another thread of a rank: by the ranks that run its first operator, and how many such
/// threads they had before. They run the mesh's operators in one order, so that is the same on all of them.
fn of_thread(mesh: &DeviceMesh) -> RngState {
    let number = mesh.member("draw a seed on it").map_err(Error::from).and_then(|_| {
        let ranks = mesh.world().group(mesh.ranks())?;
        Ok(ranks.duplicate("threads").next_forward_index())
    });
    let group = mesh.ranks().iter().fold(0, |seed, &rank| fold_in(seed, rank as u64));
    RngState { common: true, ..RngState::new(derived(group, number.or_unwind(), Purpose::Thread)) }
}

fn next(state: RngState) -> u64 {
    STREAM.set(Some(RngState { shared: state.shared + 1, ..state }));
    derived(state.seed, state.shared, Purpose::Draw)
}

/// A seed made of another and a number: a step, a layer, a replica.
pub fn fold_in(seed: u64, number: u64) -> u64 {
    derived(seed, number, Purpose::Fold)
}

fn derived(seed: u64, number: u64, purpose: Purpose) -> u64 {
    let halves = |number: u64| [number as u32, (number >> 32) as u32];
    let ([low, high], key) = (halves(number), halves(seed));
    let [low, high, ..] = philox4x32([low, high, 0, purpose as u32], key);
    u64::from(low) | u64::from(high) << 32
}

/// This rank's part of the `distribution` that `seed` draws, in the layout and type of `spec`.
pub(super) fn part<const D: usize>(
    distribution: Distribution,
    seed: u64,
    spec: &DTensorSpec,
    like: &Tensor<D>,
    scale: f32,
) -> Tensor<D> {
    let slices = spec.layout().local_slices(spec.shape(), spec.coordinate());
    let values = fill(seed, spec.shape(), &slices, |words, lane| scale * float(distribution, words, lane));
    let shape = Shape::from(slices.iter().map(|slice| slice.len()).collect::<Vec<_>>());
    Tensor::from_data(TensorData::new(values, shape), (&like.device(), spec.dtype()))
}

impl<const D: usize> DTensor<D> {
    /// Random values in the shape, type and layout of this tensor, as burn's
    /// [`random_like`](Tensor::random_like): drawn with the next seed of the thread's
    /// [stream](self). `R` where this tensor is partial.
    ///
    /// # Panics
    /// Unwinds with [`DTensorError::Distribution`](crate::dtensor::DTensorError::Distribution).
    #[must_use]
    #[track_caller]
    pub fn random_like(&self, distribution: Distribution) -> Self {
        check_distribution(distribution).unwrap_or_else(|error| Error::from(error).unwind());
        let spec = self.reduced_spec();
        Self::from_parts(part(distribution, next_seed_on(spec.mesh()), &spec, &self.local, 1.0), spec)
    }
}
