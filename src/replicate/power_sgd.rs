//! [`PowerSgd`]: gradients approximated by matrices of low rank.

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;

use burn::backend::DispatchTensor;
use burn::tensor::{DType, Distribution, Shape, Tensor};
use parking_lot::Mutex;

use super::{GradientBucket, GradientHook};
use crate::Result;
use crate::comm::{Call, Communicator, ReduceOp, Work};
use crate::dtensor::ops::random;

/// Hook that sends gradients as products of two narrow matrices (PowerSGD, Vogels et al. 2019;
/// PyTorch's `powerSGD_hook`).
///
/// A gradient is a matrix `M` of `[shape[0], rest]`. With `rank` r, the ranks average `P = M Q` of
/// `[shape[0], r]`, make its columns orthonormal, average `Q = M' P` of `[rest, r]`, and use `P Q'`.
/// The error of that on a rank is added to its next gradient (error feedback), and `Q` is the start
/// of the next step (warm start). Vectors, and matrices that would hardly become smaller, are
/// all-reduced as they are.
///
/// The state is kept for each bucket of each model, by the parameters in it. It is not part of checkpoints: a run
/// that resumes begins with a new one. After a step whose gradients are not finite, such as one that
/// [`GradScaler`](crate::fsdp::GradScaler) skips, it begins with a new one, too.
///
/// ```
/// use burn_dtensor::replicate::{DataParallel, PowerSgd};
///
/// let hook = PowerSgd::new(2).with_plain_steps(1000);
/// let config = DataParallel::new().with_gradient_hook(hook);
/// ```
pub struct PowerSgd {
    rank: usize,
    plain_steps: u64,
    min_compression: f64,
    feedback: bool,
    warm_start: bool,
    first_q: Arc<FirstQ>,
    states: Arc<Mutex<BucketStates>>,
}

/// Function from the path of a parameter and a shape to the first `Q` of its gradient.
type FirstQ = dyn Fn(&str, [usize; 2]) -> Option<Tensor<2>> + Send + Sync;

type BucketStates = HashMap<BucketKey, BucketState>;

/// Identity of a bucket, also among those of several models and of several ranks of the process.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct BucketKey {
    /// Global ranks of the group, and this rank's place among them.
    ranks: Vec<usize>,
    rank: usize,
    /// Number of the model in the group.
    model: Option<u64>,
    params: Arc<[Arc<str>]>,
}

impl BucketKey {
    fn new(group: &Communicator, bucket: &GradientBucket) -> Self {
        let group = group.group();
        Self {
            ranks: group.ranks().to_vec(),
            rank: group.rank(),
            model: bucket.call.model.as_ref().map(|model| model.number),
            params: bucket.params.clone(),
        }
    }
}

/// State of a bucket between its steps.
#[derive(Debug, Default)]
struct BucketState {
    steps: u64,
    /// Per compressed gradient.
    errors: Vec<Option<Tensor<2>>>,
    qs: Vec<Option<Tensor<2>>>,
}

impl PowerSgd {
    /// Creates a hook with matrices of this rank, error feedback and warm start, which compresses
    /// from the first step whatever becomes at least twice as small.
    pub fn new(rank: usize) -> Self {
        Self {
            rank: rank.max(1),
            plain_steps: 0,
            min_compression: 2.0,
            feedback: true,
            warm_start: true,
            first_q: Arc::new(|_, _| None),
            states: Arc::default(),
        }
    }

    /// All-reduces the gradients of the first steps as they are, until the loss falls steadily.
    /// Default: 0 steps (PyTorch: 1000).
    #[must_use]
    pub fn with_plain_steps(self, steps: u64) -> Self {
        Self {
            plain_steps: steps,
            ..self
        }
    }

    /// Compresses only gradients that have more than `factor` times the elements of `P` and `Q`
    /// together. Default: 2.
    #[must_use]
    pub fn with_min_compression(self, factor: f64) -> Self {
        Self {
            min_compression: factor,
            ..self
        }
    }

    /// Sets whether the error of a step is added to the next gradient. Default: true.
    #[must_use]
    pub fn with_error_feedback(self, feedback: bool) -> Self {
        Self { feedback, ..self }
    }

    /// Sets whether a step begins with the `Q` of the step before. Default: true.
    #[must_use]
    pub fn with_warm_start(self, warm_start: bool) -> Self {
        Self { warm_start, ..self }
    }

    /// Sets the first `Q` of gradients, by the path of the parameter and the shape of `Q`. Where it
    /// is `None`, and without this call, `Q` is drawn from a normal distribution. It must be the same
    /// on all ranks.
    #[must_use]
    pub fn with_first_q(
        self,
        first_q: impl Fn(&str, [usize; 2]) -> Option<Tensor<2>> + Send + Sync + 'static,
    ) -> Self {
        Self {
            first_q: Arc::new(first_q),
            ..self
        }
    }

    /// Returns the shape of the matrix of a gradient, and the rank of its approximation, if it is
    /// compressed.
    fn compressed(&self, shape: &Shape) -> Option<([usize; 2], usize)> {
        let rows = *shape.first().filter(|_| shape.num_dims() > 1)?;
        let columns = shape.num_elements().checked_div(rows)?;
        let rank = self.rank.min(rows).min(columns);
        let sent = ((rows + columns) * rank) as f64;
        let is_smaller = shape.num_elements() as f64 > sent * self.min_compression;
        is_smaller.then_some(([rows, columns], rank))
    }

    fn first_q(&self, step: u64, path: &str, shape: [usize; 2], like: &Tensor<2>) -> Tensor<2> {
        let q = (self.first_q)(path, shape).unwrap_or_else(|| {
            let seed = path.bytes().fold(random::fold_in(0, step), |seed, byte| {
                random::fold_in(seed, u64::from(byte))
            });
            let normal = Distribution::Normal(0.0, 1.0);
            let options = (&like.device(), like.dtype()).into();
            random::drawn(seed, shape.into(), normal, options)
        });
        q.cast(like.dtype())
    }
}

impl GradientHook for PowerSgd {
    fn reduce(&self, group: &Communicator, bucket: GradientBucket) -> Result<Work<Vec<Tensor<1>>>> {
        let key = BucketKey::new(group, &bucket);
        let mut states = self.states.lock();
        let state = states.entry(key.clone()).or_default();
        state.steps += 1;
        let matrices: Vec<_> = bucket
            .shapes
            .iter()
            .map(|shape| self.compressed(shape))
            .collect();
        if state.steps <= self.plain_steps || matrices.iter().all(Option::is_none) {
            drop(states);
            return Ok(bucket.all_reduce(group));
        }
        let scale = bucket.times_average(group.group().size());
        let GradientBucket {
            call,
            params,
            shapes,
            grads,
            ..
        } = bucket;
        state.errors.resize(grads.len(), None);
        state.qs.resize(grads.len(), None);
        // This rank's matrices, each with its `Q`; the others as they are.
        let mut own = Vec::new();
        let mut sent = Vec::new();
        for (at, grad) in grads.into_iter().enumerate() {
            let Some((shape, rank)) = matrices[at] else {
                own.push(None);
                sent.push(grad.into_dispatch());
                continue;
            };
            let mut matrix = grad.reshape(shape);
            if let Some(error) = state.errors[at].take() {
                matrix = matrix + error;
            }
            let q = state.qs[at].take();
            let q = q.unwrap_or_else(|| {
                self.first_q(state.steps, &params[at], [shape[1], rank], &matrix)
            });
            let q = orthonormal(q);
            sent.push(matrix.clone().matmul(q).into_dispatch());
            own.push(Some(matrix));
        }
        drop(states);
        let averaged = all_reduce(group, &call, sent).wait()?;
        // The columns of `P` are orthonormal, so that `M' P` are the coefficients of `M` in them.
        let mut ps = Vec::new();
        let mut sent = Vec::new();
        let mut plain = Vec::new();
        for (tensor, own) in averaged.into_iter().zip(&own) {
            match own {
                None => {
                    plain.push(Some(Tensor::<1>::from_dispatch(tensor)));
                    ps.push(None);
                }
                Some(matrix) => {
                    plain.push(None);
                    let p = orthonormal(Tensor::<2>::from_dispatch(tensor));
                    sent.push(matrix.clone().transpose().matmul(p.clone()).into_dispatch());
                    ps.push(Some(p));
                }
            }
        }
        let (feedback, warm_start) = (self.feedback, self.warm_start);
        let states = self.states.clone();
        Ok(all_reduce(group, &call, sent).then(move |qs| {
            let mut states = states.lock();
            let state = states.entry(key).or_default();
            let mut qs = qs.into_iter().map(Tensor::<2>::from_dispatch);
            let parts = own.into_iter().zip(ps).zip(plain).zip(shapes).enumerate();
            let reduced = parts.map(|(at, (((own, p), plain), shape))| {
                let (Some(matrix), Some(p)) = (own, p) else {
                    return plain.expect("it was not compressed").mul_scalar(scale);
                };
                let q = qs.next().expect("each compressed gradient has one");
                let product = p.matmul(q.clone().transpose());
                // The same on all ranks.
                let norms = q.clone().cast(DType::F32).square().sum_dim(0).into_data();
                let is_finite = norms.iter::<f32>().all(f32::is_finite);
                // Nothing grows from a column of zeros, which a gradient of zeros leaves.
                let starts = is_finite && norms.iter::<f32>().all(|norm| norm > 0.0);
                let error = (feedback && is_finite).then(|| matrix - product.clone());
                state.errors[at] = error;
                state.qs[at] = (warm_start && starts).then_some(q);
                product.reshape([shape.num_elements()]).mul_scalar(scale)
            });
            reduced.collect()
        }))
    }
}

/// Averages tensors over the ranks.
fn all_reduce(
    group: &Communicator,
    call: &Call,
    tensors: Vec<DispatchTensor>,
) -> Work<Vec<DispatchTensor>> {
    group.all_reduce(call.clone(), tensors, ReduceOp::Avg)
}

/// Part of a column's length below which what remains of it is rounding.
const DEPENDENT: f64 = 1e-6;

/// Returns a matrix with orthonormal columns that span those of `matrix`, by Gram-Schmidt, each
/// column twice. A column that depends on those before it becomes zeros. Half precision is computed
/// in `F32`.
fn orthonormal(matrix: Tensor<2>) -> Tensor<2> {
    let dtype = matrix.dtype();
    let matrix = match dtype {
        DType::F16 | DType::BF16 => matrix.cast(DType::F32),
        _ => matrix,
    };
    let norm = |column: &Tensor<2>| column.clone().square().sum_dim(0).sqrt();
    let mut columns: Vec<Tensor<2>> = Vec::new();
    for at in 0..matrix.dims()[1] {
        let mut column = matrix.clone().narrow(1, at, 1);
        let smallest = norm(&column) * DEPENDENT;
        for _ in 0..2 {
            for other in &columns {
                let overlap = (column.clone() * other.clone()).sum_dim(0);
                column = column - other.clone() * overlap;
            }
        }
        let len = norm(&column);
        let is_dependent = len.clone().lower_equal(smallest);
        columns.push(column / len.mask_fill(is_dependent, f32::INFINITY));
    }
    Tensor::cat(columns, 1).cast(dtype)
}

impl fmt::Debug for PowerSgd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PowerSgd")
            .field("rank", &self.rank)
            .field("plain_steps", &self.plain_steps)
            .field("min_compression", &self.min_compression)
            .field("feedback", &self.feedback)
            .field("warm_start", &self.warm_start)
            .finish_non_exhaustive()
    }
}
