//! [`Quantized`]: gradients, and shards of parameters, that travel as bytes.

use burn::tensor::{DType, Int, IntDType, Tensor};

use super::{GradientBucket, GradientHook};
use crate::Result;
use crate::comm::{Communicator, Work};
use crate::fsdp::{EncodedShard, ShardCodec};

/// Hook that sends each gradient as 8-bit integers, with a scale and a zero point for each group of
/// elements (PyTorch's `quantization_pertensor_hook` and `quantization_perchannel_hook`).
///
/// Every rank gathers the integers of all ranks and averages what they stand for. An element x is
/// sent as `round(x / scale) + zero_point` in 0 to 255, where `scale = (max - min) / 255` over the
/// group and 0, and `zero_point = -round(min / scale)`. With n ranks, a rank receives n bytes for
/// an element, so it pays for few ranks, or slow links.
///
/// As a [`ShardCodec`] it sends the shards of parameters in all-gathers of `fully_shard` in the same
/// form. A rank then receives one byte for an element.
#[derive(Debug, Clone, Copy)]
pub struct Quantized {
    /// Elements that have one scale.
    group: Option<usize>,
}

/// The largest integer.
const LEVELS: f64 = 255.0;

/// The smallest scale.
const EPSILON: f64 = f32::EPSILON as f64;

impl Quantized {
    /// Creates a hook or codec with one scale for each gradient or shard.
    pub fn per_tensor() -> Self {
        Self { group: None }
    }

    /// Creates a hook or codec with one scale for each group of this many consecutive elements of a
    /// gradient or shard, whose length is padded to a multiple of it.
    pub fn per_group(elements: usize) -> Self {
        let group = Some(elements.max(1));
        Self { group }
    }

    /// Returns a gradient as integers of 8 bits in rows of one group each, the last padded by zeros,
    /// and the scale and zero point of each row.
    fn quantize(&self, grad: &Tensor<1>) -> (Tensor<2, Int>, Tensor<2>) {
        let len = grad.dims()[0];
        let group = self.group.unwrap_or(len).max(1);
        let rows = len.div_ceil(group);
        let padding = Tensor::zeros([rows * group - len], (&grad.device(), DType::F32));
        let x = Tensor::cat(vec![grad.clone().cast(DType::F32), padding], 0).reshape([rows, group]);
        let min = x.clone().min_dim(1).clamp_max(0.0);
        let max = x.clone().max_dim(1).clamp_min(0.0);
        let scale = ((max - min.clone()) / LEVELS).clamp_min(EPSILON);
        let zero = (-(min / scale.clone()).round()).clamp(0.0, LEVELS);
        let q = ((x / scale.clone()).round() + zero.clone()).clamp(0.0, LEVELS);
        (
            q.int().cast(IntDType::U8),
            Tensor::cat(vec![scale, zero], 1),
        )
    }
}

impl GradientHook for Quantized {
    fn reduce(&self, group: &Communicator, bucket: GradientBucket) -> Result<Work<Vec<Tensor<1>>>> {
        let times_average = bucket.times_average(group.group().size());
        let mut sent = Vec::new();
        let mut described = Vec::new();
        for grad in &bucket.grads {
            let len = grad.dims()[0];
            described.push((len, grad.dtype()));
            // A row has at least one element.
            if len > 0 {
                let (q, scales) = self.quantize(grad);
                sent.extend([q.into_dispatch(), scales.into_dispatch()]);
            }
        }
        let empty = bucket.grads.into_iter().find(|grad| grad.dims()[0] == 0);
        Ok(group
            .all_gather_stacked(bucket.call, sent)
            .then(move |gathered| {
                let mut gathered = gathered.into_iter();
                let mut next = || gathered.next().expect("each gradient has two tensors");
                let mut averaged = Vec::new();
                for (len, dtype) in described {
                    if let (0, Some(empty)) = (len, &empty) {
                        averaged.push(empty.clone());
                        continue;
                    }
                    let q = Tensor::<3, Int>::from_dispatch(next());
                    let scales = Tensor::<3>::from_dispatch(next());
                    let x = dequantized(q, scales);
                    let [_, rows, columns] = x.dims();
                    let mean = x.mean_dim(0).reshape([rows * columns]).narrow(0, 0, len);
                    averaged.push(mean.mul_scalar(times_average).cast(dtype));
                }
                averaged
            }))
    }
}

impl ShardCodec for Quantized {
    fn encode(&self, shard: Tensor<1>) -> Result<EncodedShard> {
        let (q, scales) = self.quantize(&shard);
        Ok(EncodedShard {
            floats: vec![scales.flatten(0, 1)],
            ints: vec![q.flatten(0, 1)],
        })
    }

    fn decode(&self, encoded: EncodedShard, dtype: DType) -> Result<Tensor<1>> {
        let (scales, q) = encoded
            .floats
            .into_iter()
            .zip(encoded.ints)
            .next()
            .expect("one of each");
        let rows = scales.dims()[0] / 2;
        let columns = q.dims()[0] / rows;
        let x = dequantized(q.reshape([rows, columns]), scales.reshape([rows, 2]));
        Ok(x.flatten(0, 1).cast(dtype))
    }
}

/// Returns the numbers that integers in rows stand for. `scales` has the scale and the zero point of
/// each row in its last dimension.
fn dequantized<const D: usize>(q: Tensor<D, Int>, scales: Tensor<D>) -> Tensor<D> {
    let (scale, zero) = (
        scales.clone().narrow(D - 1, 0, 1),
        scales.narrow(D - 1, 1, 1),
    );
    (q.float().cast(DType::F32) - zero) * scale
}
