//! [`ShardCodec`]: what an all-gather of parameters sends in place of shards, such as bytes.

use std::fmt;
use std::sync::Arc;

use burn::backend::ops::FloatTensorOps;
use burn::backend::{Dispatch, DispatchTensor, TensorMetadata};
use burn::tensor::{DType, Int, Shape, Tensor};

use super::ParamError;
use crate::autodiff;
use crate::comm::{Call, CollectivePlan, Communicator, Work};
use crate::error::OrUnwind;
use crate::{Error, Result};

/// A pair of functions before and after the all-gather of a unit's parameters, for example to send
/// them in 8 bits (FSDP2: `fsdp_pre_all_gather` and `fsdp_post_all_gather`).
///
/// Set it with [`FsdpModule::set_shard_codec`](crate::fsdp::FsdpModule::set_shard_codec). The unit
/// computes with the decoded parameters, forward and backward; the optimizer steps the shards as
/// they are. [`Quantized`](crate::replicate::Quantized) is one.
///
/// Encoding takes memory: all-gathers are posted before they are needed, those of backward when
/// forward ends, and each holds what it sends. Without a codec they send the shards themselves.
///
/// ```
/// use burn::nn::LinearConfig;
/// use burn::tensor::{DType, Tensor};
/// use burn_dtensor::fsdp::{EncodedShard, FsdpModule, ShardCodec};
/// use burn_dtensor::prelude::*;
///
/// /// Parameters that travel in bf16.
/// struct Bf16;
///
/// impl ShardCodec for Bf16 {
///     fn encode(&self, shard: Tensor<1>) -> Result<EncodedShard> {
///         Ok(EncodedShard { floats: vec![shard.cast(DType::BF16)], ints: Vec::new() })
///     }
///
///     fn decode(&self, mut encoded: EncodedShard, dtype: DType) -> Result<Tensor<1>> {
///         Ok(encoded.floats.remove(0).cast(dtype))
///     }
/// }
///
/// launch(Launch::threads(2), |world| {
///     let mesh = DeviceMesh::new(world, [2], ["shard"])?;
///     let device = world.device().clone().autodiff();
///     let model = fully_shard(LinearConfig::new(4, 3).init(&device), &mesh, FullyShard::new())?;
///     FsdpModule::of(&model)?.set_shard_codec(Bf16);
///     let x = Tensor::<2>::ones([1, 4], &device);
///     let y = unit(&model, x, |model, x| model.forward(x));
///     assert_eq!((y.dims(), y.dtype()), ([1, 3], DType::F32));
///     Ok(())
/// })?;
/// # Ok::<_, burn_dtensor::Error>(())
/// ```
pub trait ShardCodec: Send + Sync {
    /// Returns what is sent in place of a shard, which is flattened and, on ranks with fewer
    /// elements, padded by zeros to the length of the largest. Number, lengths and dtypes of the
    /// tensors must follow from the shard's length and dtype, so that they are the same on all
    /// ranks.
    ///
    /// It is called once for forward and once for backward, and must return the same both times.
    /// Local; it must not communicate.
    ///
    /// # Errors
    /// An error unwinds the rank.
    fn encode(&self, shard: Tensor<1>) -> Result<EncodedShard>;

    /// Returns the shard that a rank has encoded, in `dtype`. Elements after its length are ignored.
    /// The result must have the same bits on all ranks.
    ///
    /// Local; it must not communicate.
    ///
    /// # Errors
    /// An error unwinds the rank. A result of another dtype, or with fewer elements, is
    /// [`ParamError::CodecResult`].
    fn decode(&self, encoded: EncodedShard, dtype: DType) -> Result<Tensor<1>>;
}

impl fmt::Debug for dyn ShardCodec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ShardCodec")
    }
}

/// Tensors that an all-gather sends in place of a shard.
#[derive(Debug, Clone, Default)]
pub struct EncodedShard {
    /// Floating-point tensors.
    pub floats: Vec<Tensor<1>>,
    /// Integer tensors.
    pub ints: Vec<Tensor<1, Int>>,
}

/// A parameter whose encoded shards are gathered.
struct EncodedParam {
    /// This rank's shard.
    own: DispatchTensor,
    /// Shape of each rank's shard.
    shards: Vec<Shape>,
    /// The sharded dimension.
    dim: usize,
    /// Numbers of tensors that are sent.
    floats: usize,
    ints: usize,
}

/// Gathers full parameters of encoded shards. `plan` describes the all-gather without a codec.
///
/// # Collective
/// Every rank of the group.
///
/// # Panics
/// Unwinds with the error of the codec. The result's wait unwinds with it, and with
/// [`ParamError::CodecResult`].
pub(super) fn all_gather(
    codec: Arc<dyn ShardCodec>,
    group: &Communicator,
    call: Call,
    plan: &CollectivePlan,
    shards: Vec<DispatchTensor>,
) -> Work<Vec<DispatchTensor>> {
    let ranks = group.group().size();
    let mut sent = Vec::new();
    let mut params = Vec::new();
    let full = plan.tensors().iter().zip(plan.shardings());
    for (shard, (full, (dim, sizes))) in shards.into_iter().zip(full) {
        let shape = |rank| {
            let mut shape = full.shape.clone();
            shape[*dim] = sizes.range(ranks, rank).len();
            shape
        };
        let shapes: Vec<Shape> = (0..ranks).map(shape).collect();
        let longest = shapes.iter().map(Shape::num_elements).max();
        let encoded = match longest.unwrap_or(0) {
            0 => EncodedShard::default(),
            longest => codec.encode(padded(&shard, longest)).or_unwind(),
        };
        params.push(EncodedParam {
            own: shard,
            shards: shapes,
            dim: *dim,
            floats: encoded.floats.len(),
            ints: encoded.ints.len(),
        });
        let floats = encoded.floats.into_iter().map(Tensor::into_dispatch);
        sent.extend(floats.map(autodiff::plain));
        sent.extend(encoded.ints.into_iter().map(Tensor::into_dispatch));
    }
    let label = call.label.clone();
    let call = Call {
        names: None,
        ..call
    };
    group.all_gather_stacked(call, sent).then(move |gathered| {
        let mut gathered = gathered.into_iter();
        let params = params.into_iter();
        let full = params.map(|param| param.decoded(&*codec, &mut gathered));
        let wrong = |reason| ParamError::CodecResult {
            unit: label.to_string(),
            reason,
        };
        let full = full.collect::<Result<_, String>>();
        full.map_err(|reason| Error::from(wrong(reason)))
            .or_unwind()
    })
}

impl EncodedParam {
    /// Returns the full parameter of the tensors that all ranks have sent for it, stacked.
    fn decoded(
        self,
        codec: &dyn ShardCodec,
        gathered: &mut impl Iterator<Item = DispatchTensor>,
    ) -> Result<DispatchTensor, String> {
        if self.shards.iter().all(|shard| shard.num_elements() == 0) {
            let mut full = self.shards[0].clone();
            full[self.dim] = self.shards.iter().map(|shard| shard[self.dim]).sum();
            return Ok(Dispatch::float_reshape(self.own, full));
        }
        let dtype = self.own.dtype();
        let floats: Vec<_> = gathered.take(self.floats).collect();
        let ints: Vec<_> = gathered.take(self.ints).collect();
        let shard = |(rank, shape): (usize, Shape)| {
            let encoded = EncodedShard {
                floats: floats
                    .iter()
                    .map(|all| Tensor::<2>::from_dispatch(all.clone()))
                    .map(|all| all.slice_dim(0, rank..rank + 1).squeeze_dim(0))
                    .collect(),
                ints: ints
                    .iter()
                    .map(|all| Tensor::<2, Int>::from_dispatch(all.clone()))
                    .map(|all| all.slice_dim(0, rank..rank + 1).squeeze_dim(0))
                    .collect(),
            };
            let decoded = codec.decode(encoded, dtype).or_unwind();
            let (len, found, wanted) = (decoded.dims()[0], decoded.dtype(), shape.num_elements());
            if len < wanted || found != dtype {
                return Err(format!(
                    "it returned {len} elements of {found:?} for a shard of {wanted} of {dtype:?}"
                ));
            }
            let decoded = decoded.narrow(0, 0, wanted).into_dispatch();
            Ok(Dispatch::float_reshape(autodiff::plain(decoded), shape))
        };
        let shards = self.shards.into_iter().enumerate();
        let filled = shards.filter(|(_, shape)| shape.num_elements() > 0);
        let shards = filled.map(shard).collect::<Result<Vec<_>, _>>()?;
        Ok(Dispatch::float_cat(shards, self.dim))
    }
}

/// Returns `shard`, flattened, with zeros after it up to this length.
fn padded(shard: &DispatchTensor, len: usize) -> Tensor<1> {
    let (own, dtype) = (shard.shape().num_elements(), shard.dtype());
    let flat = Tensor::from_dispatch(Dispatch::float_reshape(shard.clone(), [own].into()));
    match len - own {
        0 => flat,
        more => {
            let zeros = Tensor::zeros([more], (&flat.device(), dtype));
            Tensor::cat(vec![flat, zeros], 0)
        }
    }
}
