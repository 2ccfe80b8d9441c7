//! [`GatherOutput`]: outputs of steps, gathered from all ranks.

use burn::tensor::{Tensor, kind};
use burn::train::{
    ClassificationOutput, MultiLabelClassificationOutput, RegressionOutput, SequenceOutput,
};

use super::TrainError;
use crate::Result;
use crate::comm::{Call, Communicator, ReduceOp, ShardedTensor};
use crate::placement::ShardSizes;

/// Output of a training or validation step that can be gathered from all ranks, so that burn's
/// metrics see the global batch.
///
/// Implemented for burn's `ClassificationOutput`, `MultiLabelClassificationOutput`,
/// `RegressionOutput` and `SequenceOutput`. For your own output, gather each tensor:
///
/// ```
/// use burn::tensor::{Int, Tensor};
/// use burn_dtensor::prelude::*;
/// use burn_dtensor::train::{GlobalBatch, GatherOutput};
///
/// struct TokenLoss {
///     /// `[batch, seq]`
///     losses: Tensor<2>,
///     /// `[batch, seq]`
///     targets: Tensor<2, Int>,
///     /// `[1]`, the mean over the rows
///     mean: Tensor<1>,
/// }
///
/// impl GatherOutput for TokenLoss {
///     fn rows(&self) -> usize {
///         self.losses.dims()[0]
///     }
///
///     fn gather(self, batch: &GlobalBatch) -> Result<Self> {
///         Ok(Self {
///             losses: batch.concat(self.losses)?,
///             targets: batch.concat(self.targets)?,
///             mean: batch.loss(self.mean)?,
///         })
///     }
/// }
/// ```
///
/// The gathered tensors are sent in every step, so let an output hold what the metrics need: for a
/// language model a loss per row rather than the logits.
#[diagnostic::on_unimplemented(
    message = "`{Self}` cannot be gathered from all ranks",
    label = "an output of a training or validation step",
    note = "implement `burn_dtensor::train::GatherOutput`: the number of rows, and `batch.concat(..)` or \
            `batch.loss(..)` for each tensor"
)]
pub trait GatherOutput: Sized {
    /// Returns the number of rows of this rank's batch.
    fn rows(&self) -> usize;

    /// Returns the output for the rows of all ranks, in the order of the ranks.
    ///
    /// # Collective
    /// Every rank of the mesh calls it once for each batch.
    ///
    /// # Errors
    /// Errors of [`GlobalBatch`].
    fn gather(self, batch: &GlobalBatch) -> Result<Self>;
}

/// The global batch of a step: the rows of all ranks together.
#[derive(Debug)]
pub struct GlobalBatch {
    comm: Communicator,
    /// Number of rows that each rank contributes. It is 0 for a rank whose own batches have ended.
    counts: Vec<usize>,
    /// Number of rows of this rank's output, of which it contributes all or none.
    local: usize,
}

impl GlobalBatch {
    /// Exchanges the numbers of rows. `counted` is false on a rank that computes only so that all
    /// ranks do.
    pub(super) fn exchange(comm: &Communicator, local: usize, counted: bool) -> Result<Self> {
        let counts =
            comm.all_gather_numbers(Call::new("train_rows"), &[if counted { local } else { 0 }])?;
        Ok(Self {
            comm: comm.clone(),
            counts,
            local,
        })
    }

    /// Concatenates the tensors of all ranks along dimension 0, which has one entry per row. The
    /// other dimensions are the same on all ranks.
    ///
    /// # Collective
    /// Every rank of the mesh.
    ///
    /// # Errors
    /// [`TrainError::OutputRows`]; [`CommError`](crate::comm::CommError) if another rank fails, or
    /// passes another shape or element type.
    pub fn concat<const D: usize, K: kind::Autodiff>(
        &self,
        tensor: Tensor<D, K>,
    ) -> Result<Tensor<D, K>> {
        let len = tensor.dims()[0];
        if len != self.local {
            return Err(TrainError::OutputRows {
                len,
                rows: self.local,
            }
            .into());
        }
        let own = tensor
            .inner()
            .slice(0..self.counts[self.comm.group().rank()]);
        let sizes = ShardSizes::Uneven(self.counts.clone().into());
        let shard = ShardedTensor {
            tensor: own.into_dispatch(),
            dim: 0,
            sizes,
        };
        Ok(self
            .comm
            .all_gather(Call::new("train_output"), vec![shard])
            .single()?)
    }

    /// Returns the loss of the global batch. A loss of shape `[1]` is the mean over the rank's
    /// rows, and the result is the mean over the rows of all ranks. A loss with one entry per row
    /// is [concatenated](Self::concat).
    ///
    /// # Collective
    /// Every rank of the mesh.
    ///
    /// # Errors
    /// As [`concat`](Self::concat).
    pub fn loss(&self, loss: Tensor<1>) -> Result<Tensor<1>> {
        let [len] = loss.dims();
        let lengths = self
            .comm
            .all_gather_numbers(Call::new("train_loss"), &[len])?;
        if lengths.iter().any(|&len| len != 1) {
            return self.concat(loss);
        }
        let weight = self.counts[self.comm.group().rank()] as f64 / self.total() as f64;
        // The loss of rows that do not count may be anything, also infinite.
        let loss = loss.inner();
        let part = if weight == 0.0 {
            loss.zeros_like()
        } else {
            loss.mul_scalar(weight)
        };
        Ok(self
            .comm
            .all_reduce(
                Call::new("train_loss"),
                vec![part.into_dispatch()],
                ReduceOp::Sum,
            )
            .single()?)
    }

    /// Returns the number of rows of the global batch.
    pub fn total(&self) -> usize {
        self.counts.iter().sum()
    }
}

/// Implements the trait for one of burn's outputs with a loss, whose other tensors have one entry
/// per row.
macro_rules! outputs {
    ($($output:ident { $first:ident $(, $tensor:ident)* $(; $optional:ident)? })*) => {$(
        impl GatherOutput for $output {
            fn rows(&self) -> usize {
                self.$first.dims()[0]
            }

            fn gather(self, batch: &GlobalBatch) -> Result<Self> {
                Ok(Self {
                    loss: batch.loss(self.loss)?,
                    $first: batch.concat(self.$first)?,
                    $($tensor: batch.concat(self.$tensor)?,)*
                    $($optional: self.$optional.map(|tensor| batch.concat(tensor)).transpose()?,)?
                })
            }
        }
    )*};
}

outputs! {
    ClassificationOutput { output, targets }
    MultiLabelClassificationOutput { output, targets }
    RegressionOutput { output, targets }
    SequenceOutput { logits, targets; predictions }
}
