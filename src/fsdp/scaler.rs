//! [`GradScaler`].

use burn::module::{Module, ModuleVisitor, Param};
use burn::optim::GradientsParams;
use burn::tensor::Tensor;
use itertools::Itertools;
use serde::{Deserialize, Serialize};

use crate::Result;
use crate::comm::ReduceOp;
use crate::param::{check_not_replaced, walk};

/// Scales the loss of a model that computes in `f16`, so that small gradients do not vanish, and the gradients back;
/// skips steps in which one has become infinite or no number. As PyTorch's
/// [`GradScaler`](https://docs.pytorch.org/docs/stable/amp.html#torch.amp.GradScaler).
///
/// The scale grows after so many good steps in a row, and shrinks at each that is skipped. Ranks agree on which are: the
/// scale is the same on all of them. It is serializable, to be saved with the optimizer's state.
///
/// ```
/// # use burn::nn::LinearConfig;
/// # use burn::optim::{AdamWConfig, GradientsParams};
/// # use burn::tensor::{DType, Tensor};
/// # use burn_dtensor::prelude::*;
/// launch(Launch::threads(2), |world| {
///     let mesh = DeviceMesh::new(world, [2], ["shard"])?;
///     let device = world.device().clone().autodiff();
///     let half = MixedPrecisionPolicy::new().with_param_dtype(DType::F16).with_reduce_dtype(DType::F32).with_output_dtype(DType::F32);
///     let config = FullyShard::new().with_mixed_precision(half);
///     let mut layer = fully_shard(LinearConfig::new(4, 1).init(&device), &mesh, config)?;
///     let (mut optim, mut scaler) = (AdamWConfig::new().init(), GradScaler::new());
///     for _ in 0..2 {
///         let x = Tensor::<2>::ones([8, 4], &device);
///         let loss = unit(&layer, x, |layer, x| layer.forward(x)).square().mean();
///         let grads = GradientsParams::from_grads(scaler.scale(loss).backward(), &layer);
///         if let Some(mut grads) = scaler.unscale(&layer, grads)? {
///             clip_grad_norm(&layer, &mut grads, 1.0, NormType::L2)?;
///             layer = optim.step(1e-2, layer, grads);
///         }
///     }
///     Ok(())
/// })?;
/// # Ok::<_, burn_dtensor::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct GradScaler {
    scale: f32,
    growth_factor: f32,
    backoff_factor: f32,
    growth_interval: usize,
    /// Good steps since the scale changed last.
    good_steps: usize,
}

impl Default for GradScaler {
    fn default() -> Self {
        Self { scale: 65536.0, growth_factor: 2.0, backoff_factor: 0.5, growth_interval: 2000, good_steps: 0 }
    }
}

impl GradScaler {
    /// A scale of 65536, doubled after 2000 good steps in a row and halved at each that is skipped. All of it must be
    /// equal on all ranks.
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets the scale to begin with.
    pub fn with_init_scale(mut self, scale: f32) -> Self {
        self.scale = scale;
        self
    }

    /// Sets by what the scale is multiplied after [`with_growth_interval`](Self::with_growth_interval) good steps in a row. One
    /// that would become infinite stays as it is.
    pub fn with_growth_factor(mut self, factor: f32) -> Self {
        self.growth_factor = factor;
        self
    }

    /// Sets by what the scale is multiplied when a step is skipped.
    pub fn with_backoff_factor(mut self, factor: f32) -> Self {
        self.backoff_factor = factor;
        self
    }

    /// Sets after how many good steps in a row the scale grows.
    pub fn with_growth_interval(mut self, steps: usize) -> Self {
        self.growth_interval = steps;
        self
    }

    /// What the next loss is multiplied by.
    pub fn current_scale(&self) -> f32 {
        self.scale
    }

    /// The loss to go backward from. It is best in `f32` ([`output_dtype`](super::MixedPrecisionPolicy::with_output_dtype)): in
    /// `f16` the scale to begin with is infinite.
    pub fn scale<const D: usize>(&self, loss: Tensor<D>) -> Tensor<D> {
        loss * self.scale
    }

    /// The gradients of the loss as it was before [`scale`](Self::scale), for the optimizer to step by; `None` if an
    /// element of one is infinite or no number, on whatever rank: then all ranks leave out the step. It ends one: the
    /// next scale is set.
    ///
    /// Of several backwards that one step follows on, add up the gradients and unscale them once. Gradients are in the
    /// element type of the stored shards: of parameters stored in `f16` the small ones vanish here.
    ///
    /// # Collective
    /// Every rank of the model's meshes must call it. One all-reduce of a number for each mesh on which parameters are.
    ///
    /// # Errors
    /// [`ParamError::Replaced`](crate::param::ParamError::Replaced) if a parameter was replaced after it was distributed;
    /// [`Error::Comm`](crate::Error::Comm) if another rank fails.
    pub fn unscale<M: Module>(&mut self, model: &M, mut grads: GradientsParams) -> Result<Option<GradientsParams>> {
        let walk = walk(model);
        check_not_replaced(model, &walk)?;
        let mut finite = Finite { grads: &grads, counts: Vec::new() };
        model.visit(&mut finite);
        let mut bad = finite.bad();
        let meshes = walk.distributed.iter().map(|visited| visited.param.info().spec.mesh());
        // What one mesh knows the larger ones around it are told.
        for mesh in meshes.unique().sorted_by_key(|mesh| mesh.size()) {
            bad = mesh.all_reduce(bad, ReduceOp::Max)?;
        }
        let is_good = bad == 0.0;
        if is_good {
            model.visit(&mut Unscale { grads: &mut grads, scale: self.scale });
        }
        self.update(is_good);
        Ok(is_good.then_some(grads))
    }

    fn update(&mut self, is_good: bool) {
        if !is_good {
            (self.scale, self.good_steps) = (self.scale * self.backoff_factor, 0);
            return;
        }
        self.good_steps += 1;
        if self.good_steps < self.growth_interval {
            return;
        }
        let grown = self.scale * self.growth_factor;
        (self.scale, self.good_steps) = (if grown.is_finite() { grown } else { self.scale }, 0);
    }
}

/// Looks for elements of gradients that are infinite or no numbers.
struct Finite<'a> {
    grads: &'a GradientsParams,
    /// Of each gradient, how many there are.
    counts: Vec<Tensor<1>>,
}

impl Finite<'_> {
    /// More than 0 if there are any. Waits for the device, once.
    fn bad(self) -> f32 {
        if self.counts.is_empty() {
            return 0.0;
        }
        Tensor::cat(self.counts, 0).max().into_scalar()
    }
}

impl ModuleVisitor for Finite<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let grad = self.grads.get::<D>(param.id).filter(|grad| grad.shape().num_elements() > 0);
        self.counts.extend(grad.map(|grad| grad.is_finite().bool_not().int().max().float()));
    }
}

struct Unscale<'a> {
    grads: &'a mut GradientsParams,
    scale: f32,
}

impl ModuleVisitor for Unscale<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if let Some(grad) = self.grads.remove::<D>(param.id) {
            self.grads.register(param.id, grad / self.scale);
        }
    }
}
