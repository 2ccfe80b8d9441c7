//! [`Join`]: ranks with different numbers of batches.

use super::JoinError;
use crate::Result;
use crate::comm::{Call, Communicator};
use crate::mesh::DeviceMesh;

/// Trains until the last rank has no further batch, with ranks that have different numbers of
/// batches (PyTorch's `Join`, which divides by all ranks by default, as
/// [`with_divisor_of_all`](Self::with_divisor_of_all) does here).
///
/// A rank that has run out computes on its last batch again, with weight 0, so that it takes part in
/// the collectives of the others and steps with them: its gradients are zeros. This works for every
/// model, replicated or sharded. A layer that counts what it sees, such as burn's `BatchNorm` or
/// [`sync_batch_norm`](crate::nn::sync_batch_norm), counts that batch again; use
/// [`with_early_end_refused`](Self::with_early_end_refused) for such models, or pad the rows with a
/// [`DistributedSampler`](crate::data::DistributedSampler).
///
/// ```
/// use burn::nn::LinearConfig;
/// use burn::optim::{GradientsParams, SgdConfig};
/// use burn::tensor::Tensor;
/// use burn_dtensor::optim::sharded;
/// use burn_dtensor::prelude::*;
/// use burn_dtensor::replicate::{DataParallel, Join, JoinedBatch, replicate};
///
/// launch(Launch::threads(2), |world| {
///     let mesh = DeviceMesh::new(world, [2], ["dp"])?;
///     let device = world.device().clone().autodiff();
///     let mut model = replicate(LinearConfig::new(4, 3).init(&device), &mesh, DataParallel::new())?;
///     let mut optim = sharded(SgdConfig::new());
///     let mut batches = (0..1 + world.rank()).map(|_| Tensor::<2>::ones([2, 4], &device)); // one, and two
///     let mut join = Join::new(&mesh);
///     let mut steps = 0;
///     while let Some(JoinedBatch { batch, weight }) = join.next(batches.next())? {
///         let loss = unit(&model, batch, |model, x| model.forward(x)).square().mean() * weight;
///         let grads = GradientsParams::from_grads(loss.backward(), &model);
///         model = optim.step(1e-3, model, grads)?;
///         steps += 1;
///     }
///     assert_eq!(steps, 2);
///     Ok(())
/// })?;
/// # Ok::<_, burn_dtensor::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct Join<T> {
    mesh: DeviceMesh,
    divides_by_all: bool,
    refuses_early_end: bool,
    last: Option<T>,
    /// Number of batches that all ranks together have begun.
    steps: usize,
}

/// A batch of a rank, from [`Join::next`].
#[derive(Debug, Clone)]
pub struct JoinedBatch<T> {
    /// The batch, or the rank's last one if it has run out.
    pub batch: T,
    /// Factor of the loss: 0 for a rank that has run out. Gradients are averaged over all ranks, so
    /// that those of the others have the factor `ranks / ranks with a batch`, or 1 with
    /// [`Join::with_divisor_of_all`].
    pub weight: f64,
}

impl<T: Clone> Join<T> {
    /// Creates a loop over the batches of all ranks of `mesh`, which all have rows of their own.
    /// Gradients are averages over the ranks that have a batch. Local: no communication.
    pub fn new(mesh: &DeviceMesh) -> Self {
        Self {
            mesh: mesh.clone(),
            divides_by_all: false,
            refuses_early_end: false,
            last: None,
            steps: 0,
        }
    }

    /// Divides by the number of all ranks, also when some have run out (PyTorch's
    /// `divide_by_initial_world_size`), so that each row has the same weight until the end.
    #[must_use]
    pub fn with_divisor_of_all(self) -> Self {
        Self {
            divides_by_all: true,
            ..self
        }
    }

    /// Makes it an error if a rank runs out before the others (`throw_on_early_termination`).
    #[must_use]
    pub fn with_early_end_refused(self) -> Self {
        Self {
            refuses_early_end: true,
            ..self
        }
    }

    /// Returns the batch of the next step, and `None` once no rank has one. `own` is this rank's
    /// next batch, `None` if it has run out.
    ///
    /// # Collective
    /// Every rank of the mesh: one all-gather of a number.
    ///
    /// # Errors
    /// On every rank, [`JoinError::EarlyEnd`] if it is refused, and [`JoinError::NoBatch`] if a rank
    /// that has run out never had a batch. [`NotAMember`](crate::mesh::MeshError::NotAMember) outside
    /// the mesh, [`Error::Comm`](crate::Error::Comm) if another rank fails.
    pub fn next(&mut self, own: Option<T>) -> Result<Option<JoinedBatch<T>>> {
        self.mesh.member("join its ranks")?;
        let comm = self.mesh.all()?;
        let own_supply = match (&own, &self.last) {
            (Some(_), _) => Supply::Batch,
            (None, Some(_)) => Supply::RunOut,
            (None, None) => Supply::NoBatch,
        };
        let states = comm.all_gather_numbers(Call::new("join"), &[own_supply as usize])?;
        let of = |state: Supply| ranks_with(&comm, &states, state);
        let active = of(Supply::Batch).len();
        if active == 0 {
            return Ok(None);
        }
        let (run_out, without) = (of(Supply::RunOut), of(Supply::NoBatch));
        if !without.is_empty() {
            return Err(JoinError::NoBatch { ranks: without }.into());
        }
        if self.refuses_early_end && !run_out.is_empty() {
            let batches = self.steps;
            let ended = run_out;
            return Err(JoinError::EarlyEnd { ended, batches }.into());
        }
        self.steps += 1;
        let weight = match (&own, self.divides_by_all) {
            (None, _) => 0.0,
            (Some(_), true) => 1.0,
            (Some(_), false) => states.len() as f64 / active as f64,
        };
        if let Some(batch) = own {
            self.last = Some(batch);
        }
        let batch = self.last.clone();
        Ok(batch.map(|batch| JoinedBatch { batch, weight }))
    }
}

/// Supply of a rank for a step.
#[derive(Clone, Copy, PartialEq)]
enum Supply {
    Batch,
    RunOut,
    NoBatch,
}

/// Returns the global ranks in this state.
fn ranks_with(comm: &Communicator, states: &[usize], state: Supply) -> Vec<usize> {
    let ranks = comm.group().ranks().iter().zip(states);
    ranks
        .filter(|(_, found)| **found == state as usize)
        .map(|(rank, _)| *rank)
        .collect()
}
