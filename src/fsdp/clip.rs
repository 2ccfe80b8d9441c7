//! [`clip_grad_norm`]: clips gradients by their joint norm.

use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicBool, Ordering};

use burn::backend::TensorMetadata;
use burn::module::{Module, ModuleVisitor, Param, ParamId};
use burn::optim::GradientsParams;
use burn::tensor::{DType, Device, Tensor};
use itertools::Itertools;
use smallvec::SmallVec;

use super::FsdpError;
use super::powers::PowerSum;
use crate::Result;
use crate::burn_compat::{ModulePath, TensorVisitor, visit_tensors};
use crate::comm::{Call, Communicator, ReduceOp};
use crate::optim::GradFactor;
use crate::param::{Unit, UnitShard, check_not_replaced, check_reduced, walk, warn};

/// Norm that [`clip_grad_norm`] computes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum NormType {
    /// The p-norm, for any finite p; p = 0 counts the nonzero elements.
    P(f64),
    /// The maximum magnitude.
    Inf,
}

impl NormType {
    /// The sum of magnitudes.
    pub const L1: Self = Self::P(1.0);
    /// The Euclidean norm.
    pub const L2: Self = Self::P(2.0);
}

/// Scales all gradients down so that their joint norm is at most `max_norm`. Returns the norm
/// before scaling. If the norm is NaN, all gradients become NaN, as in PyTorch. [`ClipGradNorm`]
/// can make that an error.
///
/// Norms are computed in single precision, those of double-precision gradients in double precision.
/// Sums of powers neither overflow nor underflow: the norms of gradients of 1e30 or 1e-30 are
/// correct.
///
/// The norm is that of the full gradients, whatever the parameters' placements. Each parameter is
/// summed over the mesh dimensions that shard it, data-parallel or tensor-parallel, and counted
/// once where ranks hold the same values. The norm is equal on every rank if replicated values are
/// equal bit for bit, as reduced gradients are. Gradients of ignored parameters are counted as this
/// rank holds them. Reduce them first, or norm and scale differ between ranks.
///
/// # Collective
/// Every rank of the model's meshes must call it. It runs one all-reduce of a few numbers for each
/// mesh dimension that shards parameters. For the L2 norm in single precision, these are 3 numbers
/// for each set of mesh dimensions that shard parameters.
///
/// # Errors
/// [`ParamError::Replaced`](crate::param::ParamError::Replaced) if a parameter was replaced after
/// it was distributed;
/// [`ParamError::StepWithoutGradients`](crate::param::ParamError::StepWithoutGradients) if
/// gradients wait to be reduced and `grads` has none of a distributed parameter, both before
/// anything is sent; [`Error::Comm`](crate::Error::Comm) if another rank fails.
pub fn clip_grad_norm<M: Module>(
    model: &M,
    grads: &mut GradientsParams,
    max_norm: f64,
    norm: NormType,
) -> Result<f64> {
    ClipGradNorm::new(max_norm)
        .with_norm_type(norm)
        .clip(model, grads)
}

/// Configuration of [`clip_grad_norm`].
///
/// ```
/// # use burn::nn::LinearConfig;
/// # use burn::optim::GradientsParams;
/// # use burn::tensor::Tensor;
/// # use burn_dtensor::prelude::*;
/// # use burn_dtensor::fsdp::{ClipGradNorm, FsdpError};
/// # launch(Launch::threads(2), |world| {
/// # let mesh = DeviceMesh::new(world, [2], ["shard"])?;
/// # let device = world.device().clone().autodiff();
/// let model = fully_shard(LinearConfig::new(4, 3).init(&device), &mesh, FullyShard::new())?;
/// let loss = model.forward(Tensor::<2>::full([1, 4], f32::NAN, &device)).sum();
/// let mut grads = GradientsParams::from_grads(loss.backward(), &model);
/// let clip = ClipGradNorm::new(1.0).with_error_if_nonfinite(true);
/// assert!(matches!(clip.clip(&model, &mut grads), Err(Error::Fsdp(FsdpError::NonFiniteNorm { .. }))));
/// # Ok(())
/// # })?;
/// # Ok::<_, burn_dtensor::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq)]
pub struct ClipGradNorm {
    max_norm: f64,
    norm_type: NormType,
    error_if_nonfinite: bool,
}

/// True if this process has warned that a norm is not finite.
static WARNED: AtomicBool = AtomicBool::new(false);

impl ClipGradNorm {
    /// Creates the configuration that clips the L2 norm to `max_norm`.
    pub fn new(max_norm: f64) -> Self {
        Self {
            max_norm,
            norm_type: NormType::L2,
            error_if_nonfinite: false,
        }
    }

    /// Sets the norm.
    #[must_use]
    pub fn with_norm_type(mut self, norm_type: NormType) -> Self {
        self.norm_type = norm_type;
        self
    }

    /// Sets whether an infinite or NaN norm is an error, which all ranks get, with unchanged
    /// gradients. Default: false, as in PyTorch, with one warning in each process. Then a NaN norm
    /// makes all gradients NaN, and an infinite one makes the finite gradients zero.
    #[must_use]
    pub fn with_error_if_nonfinite(mut self, error: bool) -> Self {
        self.error_if_nonfinite = error;
        self
    }

    /// Clips the gradients of `model`, and returns their norm before: see [`clip_grad_norm`].
    ///
    /// # Collective
    /// Like [`clip_grad_norm`].
    ///
    /// # Errors
    /// Those of [`clip_grad_norm`], and [`FsdpError::NonFiniteNorm`].
    pub fn clip<M: Module>(&self, model: &M, grads: &mut GradientsParams) -> Result<f64> {
        let (total, factor) = self.factor(model, grads, GradFactor::one())?;
        factor.scale_all(model, grads);
        Ok(total)
    }

    /// Returns the norm of the gradients of `model`, multiplied by `before`, and the factor for a
    /// [step](crate::optim::ShardedOptimizer::step_scaled) that multiplies them by `before` and
    /// clips them. The gradients stay as they are.
    ///
    /// # Collective
    /// Like [`clip_grad_norm`].
    ///
    /// # Errors
    /// Those of [`clip`](Self::clip).
    pub fn factor<M: Module>(
        &self,
        model: &M,
        grads: &GradientsParams,
        before: GradFactor,
    ) -> Result<(f64, GradFactor)> {
        let Self {
            max_norm,
            norm_type,
            error_if_nonfinite,
        } = *self;
        let total = total_norm(model, grads, norm_type, before)?;
        if !total.is_finite() {
            if error_if_nonfinite {
                let mut search = NonFiniteGrad { grads, first: None };
                visit_tensors(model, &mut search);
                return Err(FsdpError::NonFiniteNorm {
                    norm: total,
                    max_norm,
                    param: search.first,
                }
                .into());
            }
            if !WARNED.swap(true, Ordering::Relaxed) {
                warn(&format!(
                    "the norm of the gradients is {total}, and clipping makes them NaN or zero. A `GradScaler` skips such a \
                     step; otherwise use `ClipGradNorm::with_error_if_nonfinite(true)`, and skip the step or look for \
                     the cause"
                ));
            }
        }
        let scale = max_norm / (total + 1e-6);
        let clips = scale < 1.0 || scale.is_nan();
        Ok((total, if clips { before.then(scale) } else { before }))
    }
}

/// Visitor that finds the first gradient with an infinite or NaN element.
struct NonFiniteGrad<'a> {
    grads: &'a GradientsParams,
    first: Option<String>,
}

impl TensorVisitor for NonFiniteGrad<'_> {
    fn float<const D: usize>(&mut self, path: &ModulePath, param: &Param<Tensor<D>>) {
        if self.first.is_none()
            && let Some(grad) = self
                .grads
                .get::<D>(param.id)
                .filter(|grad| grad.shape().num_elements() > 0)
            && !grad.is_finite().all().into_scalar::<bool>()
        {
            self.first = Some(path.join());
        }
    }
}

/// Returns the joint norm of the gradients of a model, multiplied by `factor`.
fn total_norm<M: Module>(
    model: &M,
    grads: &GradientsParams,
    norm: NormType,
    factor: GradFactor,
) -> Result<f64> {
    let walk = walk(model);
    check_not_replaced(model, &walk)?;
    check_reduced(model, &walk, grads)?;
    let units = walk.unit_shards();
    let mut holders = HashMap::new();
    for UnitShard { id, spec, .. } in units.iter().flat_map(|unit| &unit.shards) {
        let mut groups = NormGroups::new();
        for dim in 0..spec.mesh().ndim() {
            if spec.placements()[dim].shard_dim().is_some() {
                groups.push(spec.mesh().communicator(dim)?.clone());
            }
        }
        holders.insert(*id, groups);
    }
    let mut measure = NormVisitor {
        norm,
        grads,
        factor,
        holders,
        seen: HashSet::new(),
        parts: Vec::new(),
        sums: Vec::new(),
    };
    model.visit(&mut measure);
    let mut parts = measure.read(model);
    // Sums are reduced on the device of the shards. Without distributed parameters no group is left.
    let device = match units.first() {
        Some(unit) => Device::new(unit.shards[0].shard.device()).inner(),
        None => Device::default(),
    };
    while let Some(group) = parts.iter().find_map(|part| part.groups.first().cloned()) {
        // All sums that this group still has to reduce are sent together.
        let mut shared: Vec<_> = parts
            .iter_mut()
            .filter_map(|part| Some((part.leave(&group)?, part)))
            .collect();
        let dtype = if shared.iter().any(|((), part)| part.double) {
            DType::F64
        } else {
            DType::F32
        };
        let (op, bins) = match norm {
            NormType::P(p) => (ReduceOp::Sum, PowerSum::bins(p, dtype)),
            NormType::Inf => (ReduceOp::Max, 1),
        };
        let numbers: Vec<f64> = shared
            .iter()
            .flat_map(|((), part)| part.sum.to_bins(bins))
            .collect();
        let numbers = Tensor::<1>::from_data(numbers.as_slice(), (&device, dtype)).into_dispatch();
        let call = Call {
            model: Unit::model_over(units.iter().map(|unit| &*unit.unit), &group),
            ..Call::new("clip_grad_norm")
        };
        let reduced = group.all_reduce(call, vec![numbers], op).wait()?;
        let reduced = reduced
            .into_iter()
            .next()
            .expect("an all-reduce returns every tensor");
        let reduced: Vec<f64> = Tensor::<1>::from_dispatch(reduced)
            .into_data()
            .iter::<f64>()
            .collect();
        for ((_, part), bins) in shared.iter_mut().zip(reduced.chunks(bins)) {
            part.sum = PowerSum::from_bins(bins);
        }
    }
    let mut all = PowerSum::default();
    parts.iter().for_each(|part| norm.join(&mut all, &part.sum));
    Ok(norm.finish(&all))
}

impl NormType {
    /// Returns the contribution of one tensor to the norm, before [`join`](Self::join) and
    /// [`finish`](Self::finish). The result is not read: reading waits for the device.
    fn of<const D: usize>(self, tensor: Tensor<D>) -> Tensor<1> {
        let magnitude = magnitude(tensor);
        match self {
            Self::P(0.0) => magnitude.not_equal_elem(0.0).float().sum(),
            Self::P(p) => sum_of_powers(magnitude, p),
            Self::Inf => magnitude.max(),
        }
    }

    /// Returns true if a sum of this many elements is as precise as its type allows.
    fn is_precise(self, sum: f64, elements: usize) -> bool {
        match self {
            Self::P(0.0) | Self::Inf => true,
            Self::P(_) => PowerSum::is_precise(sum, elements),
        }
    }

    fn join(self, all: &mut PowerSum, part: &PowerSum) {
        match self {
            Self::P(_) => all.add(part),
            Self::Inf => all.max(part),
        }
    }

    fn finish(self, all: &PowerSum) -> f64 {
        match self {
            Self::P(0.0) | Self::Inf => all.value(),
            Self::P(p) => all.root(p),
        }
    }
}

/// Returns the magnitudes in the precision in which norms are computed.
fn magnitude<const D: usize>(tensor: Tensor<D>) -> Tensor<D> {
    let double = tensor.dtype() == DType::F64;
    if double {
        tensor
    } else {
        tensor.cast(DType::F32)
    }
    .abs()
}

fn sum_of_powers<const D: usize>(magnitude: Tensor<D>, p: f64) -> Tensor<1> {
    let powers = match p {
        1.0 => magnitude,
        2.0 => magnitude.clone() * magnitude,
        _ => magnitude.powf_scalar(p),
    };
    powers.sum()
}

/// Returns the sum of powers of magnitudes that are scaled first. The scale is the magnitude with
/// the largest power: the maximum, or the minimum if `p` is negative. `sum` was computed without
/// scaling, and has overflowed or lost operands to underflow.
fn scaled<const D: usize>(magnitude: Tensor<D>, p: f64, sum: f64) -> PowerSum {
    let most = if p < 0.0 {
        magnitude.clone().min()
    } else {
        magnitude.clone().max()
    }
    .into_scalar::<f64>();
    if sum.is_nan() || most == 0.0 || !most.is_finite() {
        return PowerSum::new(sum);
    }
    // Multiplying by a power of two is exact. The limit keeps it a normal number, which no device
    // flushes to zero.
    let limit = if magnitude.dtype() == DType::F64 {
        1020.0
    } else {
        126.0
    };
    let exponent = most.log2().floor().clamp(-limit, limit);
    let magnitude = magnitude.mul_scalar((-exponent).exp2());
    if p == 2.0 {
        return PowerSum::scaled(
            sum_of_powers(magnitude, p).into_scalar::<f64>(),
            p * exponent,
        );
    }
    // The largest power is now 1, even if `p` is so large that powers of 2 overflow.
    let rest = most * (-exponent).exp2();
    let sum = sum_of_powers(magnitude.div_scalar(rest), p).into_scalar::<f64>();
    PowerSum::scaled(sum, p * (exponent + rest.log2()))
}

/// The groups of the mesh dimensions that shard a parameter. Together their ranks hold it exactly
/// once.
type NormGroups = SmallVec<[Communicator; 2]>;

/// This rank's contribution to the norm, for all parameters that the same groups shard.
struct LocalNorm {
    /// Groups over which the contribution is still to be summed.
    groups: NormGroups,
    /// Groups that shard the parameters.
    holders: NormGroups,
    /// True if at least one parameter has double precision.
    double: bool,
    sum: PowerSum,
}

impl LocalNorm {
    /// Removes `group` from the remaining groups; `None` if it is not one of them.
    fn leave(&mut self, group: &Communicator) -> Option<()> {
        let at = self.groups.iter().position(|other| other.is_same(group))?;
        self.groups.remove(at);
        Some(())
    }
}

struct NormVisitor<'a> {
    norm: NormType,
    grads: &'a GradientsParams,
    factor: GradFactor,
    /// Parameters that were visited: a clone in the model has the ids of the original.
    seen: HashSet<ParamId>,
    holders: HashMap<ParamId, NormGroups>,
    parts: Vec<LocalNorm>,
    sums: Vec<UnreadSum>,
}

/// The contribution of one gradient to a [`LocalNorm`], on the device.
struct UnreadSum {
    /// Index among the parts.
    part: usize,
    param: ParamId,
    /// Number of elements of the gradient.
    elements: usize,
    sum: Tensor<1>,
}

impl ModuleVisitor for NormVisitor<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if !self.seen.insert(param.id) {
            return;
        }
        let holders = self.holders.get(&param.id).cloned().unwrap_or_default();
        // A rank with an empty shard, or without a gradient, must still participate in the
        // reduction.
        let part = self
            .parts
            .iter()
            .position(|part| {
                part.holders.len() == holders.len()
                    && part.holders.iter().zip(&holders).all(|(a, b)| a.is_same(b))
            })
            .unwrap_or_else(|| {
                self.parts.push(LocalNorm {
                    groups: holders.clone(),
                    holders,
                    double: false,
                    sum: PowerSum::default(),
                });
                self.parts.len() - 1
            });
        self.parts[part].double |= param.base().dtype() == DType::F64;
        let Some(grad) = self
            .grads
            .get::<D>(param.id)
            .filter(|grad| grad.shape().num_elements() > 0)
        else {
            return;
        };
        let param = param.id;
        let elements = grad.shape().num_elements();
        self.sums.push(UnreadSum {
            part,
            param,
            elements,
            sum: self.norm.of(self.factor.scale(grad)),
        });
    }
}

impl NormVisitor<'_> {
    /// Reads the contributions, which waits for each device once, and adds them up. Contributions
    /// that have overflowed or lost operands to underflow are computed a second time.
    fn read<M: Module>(self, model: &M) -> Vec<LocalNorm> {
        let Self {
            norm,
            grads,
            factor,
            mut parts,
            sums,
            ..
        } = self;
        let place = |sum: &UnreadSum| (sum.sum.device(), sum.sum.dtype());
        let mut values = vec![0.0; sums.len()];
        for (device, dtype) in sums
            .iter()
            .map(place)
            .unique_by(|place| format!("{place:?}"))
        {
            let together = sums
                .iter()
                .positions(|sum| place(sum) == (device.clone(), dtype))
                .collect_vec();
            let read = Tensor::cat(together.iter().map(|&at| sums[at].sum.clone()).collect(), 0)
                .into_data();
            together
                .into_iter()
                .zip(read.iter::<f64>())
                .for_each(|(at, value)| values[at] = value);
        }
        let imprecise = sums
            .iter()
            .zip(&values)
            .filter(|(sum, value)| !norm.is_precise(**value, sum.elements));
        let sums_of = imprecise.map(|(sum, &value)| (sum.param, value)).collect();
        let mut rescale = RescaleVisitor {
            norm,
            grads,
            factor,
            sums: sums_of,
            scaled: HashMap::new(),
        };
        if !rescale.sums.is_empty() {
            model.visit(&mut rescale);
        }
        for (UnreadSum { part, param, .. }, value) in sums.into_iter().zip(values) {
            let sum = rescale
                .scaled
                .get(&param)
                .cloned()
                .unwrap_or_else(|| PowerSum::new(value));
            norm.join(&mut parts[part].sum, &sum);
        }
        parts
    }
}

/// Computes the contributions of gradients whose sums, without scaling, are imprecise.
struct RescaleVisitor<'a> {
    norm: NormType,
    grads: &'a GradientsParams,
    factor: GradFactor,
    sums: HashMap<ParamId, f64>,
    scaled: HashMap<ParamId, PowerSum>,
}

impl ModuleVisitor for RescaleVisitor<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if let (NormType::P(p), Some(&sum)) = (self.norm, self.sums.get(&param.id))
            && let Some(grad) = self.grads.get::<D>(param.id)
        {
            self.scaled
                .insert(param.id, scaled(magnitude(self.factor.scale(grad)), p, sum));
        }
    }
}
