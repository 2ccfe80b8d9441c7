//! Options of a unit: [`RuntimeOptions`], [`ReshardAfterForward`] and [`Precision`].

use std::sync::Arc;

use burn::backend::ops::FloatTensorOps;
use burn::backend::{Dispatch, DispatchTensor, TensorMetadata};
use burn::tensor::DType;

use super::custom::{AllReduceHook, UnitCollectives};
use super::gradient_hook::GradientHook;
use super::shard_codec::ShardCodec;
use crate::comm::ReduceOp;

/// Options that [`FsdpModule`](crate::fsdp::FsdpModule) sets. Each pass reads an option when it
/// needs it.
#[derive(Debug, Clone)]
pub(crate) struct RuntimeOptions {
    /// Read when a pass begins.
    pub(crate) reshard: ReshardAfterForward,
    /// Read when a pass begins, and when its backward ends.
    pub(crate) reshard_after_backward: bool,
    /// Read when a checkpointed block begins, after its units' passes.
    pub(crate) checkpoint: bool,
    /// Read when forward leaves the unit.
    pub(crate) unshard_in_backward: bool,
    /// Factor of this rank's own gradients, which may differ between ranks. This option and the next
    /// five are read when all gradients of a pass are complete.
    pub(crate) weight: f64,
    pub(crate) sync: bool,
    pub(crate) all_reduce: bool,
    pub(crate) divide_factor: Option<f64>,
    pub(crate) force_sum: bool,
    pub(crate) hook: Option<AllReduceHook>,
    /// Read when the unit's gradients are summed by an all-reduce.
    pub(crate) gradient_hook: Option<Arc<dyn GradientHook>>,
    /// Read when a pass begins, and when its weights are gathered.
    pub(crate) codec: Option<Arc<dyn ShardCodec>>,
    /// Read when the unit issues a collective.
    pub(crate) collectives: Option<Arc<dyn UnitCollectives>>,
}

/// Divisors of a unit's gradients: the reduce operations and the final factor that turn sums into
/// averages, or into what the program configured.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct GradientDivideFactors {
    /// Operation over the ranks that shard.
    pub(crate) shard: ReduceOp,
    /// Operation over the replicas.
    pub(crate) replicate: ReduceOp,
    /// Factor by which the reduced sums are finally multiplied.
    pub(crate) scale: Option<f64>,
}

impl RuntimeOptions {
    /// Returns the options of a new unit.
    pub(crate) fn new(reshard: ReshardAfterForward) -> Self {
        Self {
            reshard,
            unshard_in_backward: true,
            reshard_after_backward: true,
            checkpoint: true,
            weight: 1.0,
            sync: true,
            all_reduce: true,
            divide_factor: None,
            force_sum: false,
            hook: None,
            gradient_hook: None,
            codec: None,
            collectives: None,
        }
    }

    /// Returns the divisors of a unit's gradients. `sharding` ranks shard the unit, `ranks`
    /// participate in its reduction, and `averaged` have distinct data. With expert parallelism
    /// `averaged` is larger than `ranks`: the backward of the token all-to-all has already summed
    /// the contributions of the other ranks, so the divisor is `averaged`.
    pub(crate) fn averaging(
        &self,
        sharding: usize,
        ranks: usize,
        averaged: usize,
    ) -> GradientDivideFactors {
        let divisor = self.divide_factor.unwrap_or(averaged as f64);
        if self.force_sum || sharding == 1 && ranks == 1 {
            let scale = (divisor != 1.0).then_some(1.0 / divisor);
            return GradientDivideFactors {
                shard: ReduceOp::Sum,
                replicate: ReduceOp::Sum,
                scale,
            };
        }
        match self
            .divide_factor
            .or((averaged != ranks).then_some(divisor))
        {
            None => GradientDivideFactors {
                shard: ReduceOp::Avg,
                replicate: ReduceOp::Avg,
                scale: None,
            },
            Some(factor) if factor == sharding as f64 => GradientDivideFactors {
                shard: ReduceOp::Avg,
                replicate: ReduceOp::Sum,
                scale: None,
            },
            Some(factor) => {
                let shard = ReduceOp::premul_sum(1.0 / factor);
                GradientDivideFactors {
                    shard,
                    replicate: ReduceOp::Sum,
                    scale: None,
                }
            }
        }
    }
}

/// Time at which a unit's gathered parameters are freed between forward and backward.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ReshardAfterForward {
    /// Frees the parameters after forward and gathers them a second time in backward. Needs the
    /// least memory.
    Always,
    /// Keeps the parameters until backward, which then needs no all-gather. After a forward without
    /// a backward, as in evaluation, they are kept for the next forward with the same shards.
    Never,
    /// [`Never`](Self::Never) for the root unit, whose backward follows at once, and
    /// [`Always`](Self::Always) for all others.
    #[default]
    Auto,
    /// Keeps a shard over this many neighbouring ranks after forward, and gathers over these in
    /// backward. The number must divide the shard dimension of the mesh; 1 is
    /// [`Never`](Self::Never), the size of the dimension is [`Always`](Self::Always).
    Ranks(usize),
}

/// Element types of a unit, except those of its weights. `None` keeps the type of each value.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Precision {
    /// Element type of the float inputs of its forward.
    pub(crate) inputs: Option<DType>,
    /// Element type of the float outputs of its forward.
    pub(crate) outputs: Option<DType>,
    /// Element type in which gradients are summed, over the tensor-parallel and over the
    /// data-parallel ranks. `None` uses the type in which each parameter is stored.
    pub(crate) reduce: Option<DType>,
}

/// Casts `tensor` to `dtype`. Returns it unchanged if it already has that type, or if it is not a
/// float tensor (quantized tensors, for example).
pub(crate) fn cast(tensor: DispatchTensor, dtype: Option<DType>) -> DispatchTensor {
    match dtype {
        Some(dtype) if tensor.dtype() != dtype && tensor.dtype().is_float() => {
            Dispatch::float_cast(tensor, dtype.into())
        }
        _ => tensor,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn averaging(
        divide_factor: Option<f64>,
        force_sum: bool,
        sharding: usize,
        ranks: usize,
    ) -> GradientDivideFactors {
        averaging_of(divide_factor, force_sum, sharding, ranks, ranks)
    }

    fn averaging_of(
        divide_factor: Option<f64>,
        force_sum: bool,
        sharding: usize,
        ranks: usize,
        averaged: usize,
    ) -> GradientDivideFactors {
        let control = RuntimeOptions {
            divide_factor,
            force_sum,
            ..RuntimeOptions::new(ReshardAfterForward::Auto)
        };
        control.averaging(sharding, ranks, averaged)
    }

    /// Returns the reduced gradient if each of `ranks` ranks has a gradient of 1.
    fn of_ones(
        GradientDivideFactors {
            shard,
            replicate,
            scale,
        }: GradientDivideFactors,
        sharding: usize,
        ranks: usize,
    ) -> f64 {
        let reduced = |op, value: f64, ranks: usize| match op {
            ReduceOp::Sum => value * ranks as f64,
            ReduceOp::Avg => value,
            ReduceOp::PremulSum(factor) => factor.value() * value * ranks as f64,
            other => panic!("{other:?}"),
        };
        reduced(replicate, reduced(shard, 1.0, sharding), ranks / sharding) * scale.unwrap_or(1.0)
    }

    #[test]
    fn gradients_are_divided_by_the_factor_or_the_number_of_ranks() {
        for (sharding, ranks) in [(1, 1), (2, 2), (3, 3), (2, 4), (2, 6), (1, 4)] {
            for force_sum in [false, true] {
                for factor in [None, Some(1.0), Some(2.0), Some(3.0), Some(8.0)] {
                    let result = of_ones(
                        averaging(factor, force_sum, sharding, ranks),
                        sharding,
                        ranks,
                    );
                    let expected = ranks as f64 / factor.unwrap_or(ranks as f64);
                    assert!(
                        (result - expected).abs() < 1e-12,
                        "{sharding} of {ranks} by {factor:?}: {result}"
                    );
                }
            }
        }
    }

    /// Expert parallelism: `averaged / ranks` groups have different expert weights.
    #[test]
    fn gradients_are_divided_by_all_ranks_that_have_data() {
        for (sharding, ranks, averaged) in [(1, 1, 4), (2, 2, 4), (2, 4, 8), (3, 3, 6), (1, 2, 6)] {
            for force_sum in [false, true] {
                for factor in [None, Some(1.0), Some(6.0)] {
                    let averaging = averaging_of(factor, force_sum, sharding, ranks, averaged);
                    let expected = ranks as f64 / factor.unwrap_or(averaged as f64);
                    let result = of_ones(averaging, sharding, ranks);
                    assert!(
                        (result - expected).abs() < 1e-12,
                        "{sharding} of {ranks} of {averaged}: {result}"
                    );
                }
            }
        }
    }

    #[test]
    fn sums_alone_where_they_are_forced() {
        let GradientDivideFactors {
            shard, replicate, ..
        } = averaging(Some(3.0), true, 2, 4);
        assert_eq!([shard, replicate], [ReduceOp::Sum; 2]);
        assert_eq!(
            averaging(Some(2.0), false, 2, 4).shard,
            ReduceOp::Avg,
            "the factor is the number of shard ranks"
        );
        assert_eq!(
            averaging(None, false, 1, 1).shard,
            ReduceOp::Sum,
            "a single rank"
        );
    }
}

/// Policy by which [`sync_buffers`](super::sync_buffers) and
/// [`full_model`](crate::fsdp::full_model) make running statistics equal on all ranks.
///
/// In training, every rank normalizes by its own batch, and its running statistics follow that
/// batch.
///
/// This policy does not provide synchronized batch normalization, in which statistics are those of
/// one batch over all ranks. burn's `BatchNorm` computes the mean and variance of a batch inside
/// its forward, where this crate cannot intervene. For a batch that is a
/// [`DTensor`](crate::dtensor::DTensor), its second forward `forward_dtensor` computes statistics
/// that are the same on all ranks of the batch. The documentation of the layer in `nn` describes
/// how to shard a batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum BufferSync {
    /// The statistics of the mesh's first rank, which has seen only its own batches.
    #[default]
    FirstRank,
    /// The mean of the statistics over all ranks. For a batch norm's mean, this is the mean of all
    /// batches. For its variance, it is the mean of the variances within each rank's batch, without
    /// the variance between the ranks' means.
    Average,
}

/// Form in which a unit's gathered parameters remain between forward and backward.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kept {
    /// The unsharded parameters.
    Full,
    /// A shard over a group of neighbouring ranks.
    Part,
    /// Only this rank's own shard.
    Shard,
}
