//! [`GradScaler`]: loss scaling for models that compute in `f16`.

use burn::module::{Module, ModuleVisitor, Param, ParamId, list_param_ids};
use burn::optim::GradientsParams;
use burn::tensor::Tensor;
use itertools::Itertools;
use serde::{Deserialize, Serialize};

use super::FsdpError;
use crate::Result;
use crate::comm::ReduceOp;
use crate::optim::{GradFactor, note_scaled};
use crate::param::{check_not_replaced, walk};

/// Scales the loss of a model that computes in `f16`, so that small gradients do not vanish, and
/// scales the gradients back. Skips steps in which a gradient is infinite or NaN. Like PyTorch's
/// [`GradScaler`](https://docs.pytorch.org/docs/stable/amp.html#torch.amp.GradScaler).
///
/// The scale grows after a number of consecutive good steps, and shrinks at each skipped step.
/// Ranks agree on the steps to skip, so the scale is the same on all of them. The scaler is
/// serializable; save it with the optimizer's state.
///
/// ```
/// # use burn::nn::LinearConfig;
/// # use burn::optim::{AdamWConfig, GradientsParams};
/// # use burn::tensor::{DType, Tensor};
/// # use burn_dtensor::{optim::sharded, prelude::*};
/// launch(Launch::threads(2), |world| {
///     let mesh = DeviceMesh::new(world, [2], ["shard"])?;
///     let device = world.device().clone().autodiff();
///     let half = MixedPrecisionPolicy::new().with_param_dtype(DType::F16);
///     let half = half.with_reduce_dtype(DType::F32).with_output_dtype(DType::F32);
///     let config = FullyShard::new().with_mixed_precision(half);
///     let mut layer = fully_shard(LinearConfig::new(4, 1).init(&device), &mesh, config)?;
///     let (mut optim, mut scaler) = (sharded(AdamWConfig::new()), GradScaler::new());
///     for _ in 0..2 {
///         let x = Tensor::<2>::ones([8, 4], &device);
///         let loss = unit(&layer, x, |layer, x| layer.forward(x)).square().mean();
///         let mut grads = GradientsParams::from_grads(scaler.scale(loss).backward(), &layer);
///         scaler.unscale(&layer, &mut grads)?;
///         clip_grad_norm(&layer, &mut grads, 1.0, NormType::L2)?;
///         layer = scaler.step(layer, grads, |layer, grads| optim.step(1e-2, layer, grads))?;
///         scaler.update()?;
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
    /// Number of good steps since the last change of the scale.
    good_steps: usize,
    /// The models whose gradients were unscaled since the last update.
    #[serde(skip)]
    unscaled: Vec<Unscaled>,
}

#[derive(Debug, Clone, PartialEq)]
struct Unscaled {
    /// First parameter of the model, which identifies the model; `None` if it has none.
    model: Option<ParamId>,
    is_finite: bool,
    is_stepped: bool,
}

impl Default for GradScaler {
    fn default() -> Self {
        Self {
            scale: 65536.0,
            growth_factor: 2.0,
            backoff_factor: 0.5,
            growth_interval: 2000,
            good_steps: 0,
            unscaled: Vec::new(),
        }
    }
}

impl GradScaler {
    /// Creates a scaler with scale 65536, which doubles after 2000 consecutive good steps and
    /// halves at each skipped one. The configuration must be equal on all ranks.
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets the initial scale.
    pub fn with_init_scale(mut self, scale: f32) -> Self {
        self.scale = scale;
        self
    }

    /// Sets the factor by which the scale is multiplied after
    /// [`with_growth_interval`](Self::with_growth_interval) consecutive good steps. A scale that
    /// would become infinite does not grow.
    pub fn with_growth_factor(mut self, factor: f32) -> Self {
        self.growth_factor = factor;
        self
    }

    /// Sets the factor by which the scale is multiplied when a step is skipped.
    pub fn with_backoff_factor(mut self, factor: f32) -> Self {
        self.backoff_factor = factor;
        self
    }

    /// Sets the number of consecutive good steps after which the scale grows.
    pub fn with_growth_interval(mut self, steps: usize) -> Self {
        self.growth_interval = steps;
        self
    }

    /// Returns the factor by which the next loss is multiplied.
    pub fn current_scale(&self) -> f32 {
        self.scale
    }

    /// Returns the scaled loss, on which to call `backward`. Local. The loss should be `f32`
    /// ([`output_dtype`](super::MixedPrecisionPolicy::with_output_dtype)): in `f16`, the initial
    /// scale is infinite.
    pub fn scale<const D: usize>(&self, loss: Tensor<D>) -> Tensor<D> {
        let scaled = loss * self.scale;
        note_scaled(&scaled);
        scaled
    }

    /// Divides `grads`, in place, by the scale, and returns true if all their elements are finite
    /// on all ranks. Otherwise [`step`](Self::step) skips the step on all ranks.
    ///
    /// Call it before gradients are read, for example to clip them; otherwise `step` does. If one
    /// step follows several backwards, add up their gradients first. Gradients have the dtype of
    /// the stored shards: small ones vanish here if parameters are stored in `f16`.
    ///
    /// # Collective
    /// On every rank of the model's meshes: one all-reduce of one number for each mesh that has
    /// parameters.
    ///
    /// # Errors
    /// [`FsdpError::UnscaledTwice`] if it was called for this model since the last
    /// [`update`](Self::update); [`ParamError::Replaced`](crate::param::ParamError::Replaced) if a
    /// parameter was replaced after it was distributed; [`Error::Comm`](crate::Error::Comm) if
    /// another rank fails.
    pub fn unscale<M: Module>(&mut self, model: &M, grads: &mut GradientsParams) -> Result<bool> {
        let factor = self.factor(model, grads)?;
        factor.scale_all(model, grads);
        let unscaled = self.unscaled.last().expect("`factor` adds it");
        Ok(unscaled.is_finite)
    }

    /// Checks the gradients like [`unscale`](Self::unscale), and returns the factor for a
    /// [step](crate::optim::ShardedOptimizer::step_scaled) that unscales them, in place of
    /// `unscale`. The gradients stay as they are. If they are not finite, the factor is 1, and
    /// [`step`](Self::step) skips the step.
    ///
    /// ```
    /// # use burn::nn::LinearConfig;
    /// # use burn::optim::{AdamWConfig, GradientsParams};
    /// # use burn::tensor::Tensor;
    /// # use burn_dtensor::{fsdp::ClipGradNorm, optim::sharded, prelude::*};
    /// # launch(Launch::threads(2), |world| {
    /// # let mesh = DeviceMesh::new(world, [2], ["shard"])?;
    /// # let device = world.device().clone().autodiff();
    /// # let mut model = fully_shard(LinearConfig::new(4, 1).init(&device), &mesh, FullyShard::new())?;
    /// # let (mut optim, mut scaler) = (sharded(AdamWConfig::new()), GradScaler::new());
    /// # let loss = model.forward(Tensor::<2>::ones([8, 4], &device)).square().mean();
    /// let grads = GradientsParams::from_grads(scaler.scale(loss).backward(), &model);
    /// let unscale = scaler.factor(&model, &grads)?;
    /// let (norm, factor) = ClipGradNorm::new(1.0).factor(&model, &grads, unscale)?;
    /// model = scaler.step(model, grads, |model, grads| optim.step_scaled(1e-2, model, grads, factor))?;
    /// scaler.update()?;
    /// # let _ = (model, norm);
    /// # Ok(())
    /// # })?;
    /// # Ok::<_, burn_dtensor::Error>(())
    /// ```
    ///
    /// # Collective
    /// Like [`unscale`](Self::unscale).
    ///
    /// # Errors
    /// Those of [`unscale`](Self::unscale).
    pub fn factor<M: Module>(&mut self, model: &M, grads: &GradientsParams) -> Result<GradFactor> {
        let walk = walk(model);
        check_not_replaced(model, &walk)?;
        let model_id = first_param(model);
        if self.of_model(model_id).is_some() {
            return Err(FsdpError::UnscaledTwice.into());
        }
        let mut finite = Finite {
            grads,
            counts: Vec::new(),
        };
        model.visit(&mut finite);
        let mut bad = finite.bad();
        let meshes = walk
            .distributed
            .iter()
            .map(|visited| visited.param.info().spec.mesh());
        // From the smallest mesh to the largest: a larger mesh that contains a smaller one includes
        // its result.
        for mesh in meshes.unique().sorted_by_key(|mesh| mesh.size()) {
            bad = mesh.all_reduce(bad, ReduceOp::Max)?;
        }
        let is_finite = bad == 0.0;
        self.unscaled.push(Unscaled {
            model: model_id,
            is_finite,
            is_stepped: false,
        });
        Ok(match is_finite {
            true => GradFactor::one().then(f64::from(self.scale).recip()),
            false => GradFactor::one(),
        })
    }

    /// Returns the result of `step(model, grads)`, or `model` if gradients had overflowed on any
    /// rank. [Unscales](Self::unscale) them first, unless that was done since the last
    /// [`update`](Self::update).
    ///
    /// # Collective
    /// If it unscales: on every rank of the model's meshes.
    ///
    /// # Errors
    /// [`FsdpError::SteppedTwice`] if it was called for this model since the last `update`; those
    /// of `unscale` and of `step`.
    pub fn step<M: Module>(
        &mut self,
        model: M,
        mut grads: GradientsParams,
        step: impl FnOnce(M, GradientsParams) -> Result<M>,
    ) -> Result<M> {
        let model_id = first_param(&model);
        if self.of_model(model_id).is_none() {
            self.unscale(&model, &mut grads)?;
        }
        let unscaled = self.of_model(model_id).expect("unscaled above");
        if std::mem::replace(&mut unscaled.is_stepped, true) {
            return Err(FsdpError::SteppedTwice.into());
        }
        if unscaled.is_finite {
            step(model, grads)
        } else {
            Ok(model)
        }
    }

    /// Adapts the scale. It shrinks if gradients of any model overflowed since the last call, and
    /// grows after [enough](Self::with_growth_interval) consecutive calls without overflow. Call it
    /// once at the end of each step.
    ///
    /// Local: the ranks have agreed in [`unscale`](Self::unscale). Every rank must call it.
    ///
    /// # Errors
    /// [`FsdpError::NothingUnscaled`] if neither [`unscale`](Self::unscale) nor
    /// [`step`](Self::step) was called since the last call.
    pub fn update(&mut self) -> Result<()> {
        let unscaled = std::mem::take(&mut self.unscaled);
        if unscaled.is_empty() {
            return Err(FsdpError::NothingUnscaled.into());
        }
        if unscaled.iter().any(|unscaled| !unscaled.is_finite) {
            // A scale of 0 would hide every overflow.
            let shrunk = self.scale * self.backoff_factor;
            (self.scale, self.good_steps) = (
                if shrunk.is_normal() {
                    shrunk
                } else {
                    self.scale
                },
                0,
            );
            return Ok(());
        }
        self.good_steps += 1;
        if self.good_steps >= self.growth_interval {
            let grown = self.scale * self.growth_factor;
            (self.scale, self.good_steps) = (if grown.is_finite() { grown } else { self.scale }, 0);
        }
        Ok(())
    }

    fn of_model(&mut self, model: Option<ParamId>) -> Option<&mut Unscaled> {
        self.unscaled
            .iter_mut()
            .find(|unscaled| unscaled.model == model)
    }
}

fn first_param<M: Module>(model: &M) -> Option<ParamId> {
    list_param_ids(model).first().copied()
}

/// Visitor that detects infinite and NaN elements of gradients.
struct Finite<'a> {
    grads: &'a GradientsParams,
    /// One number per gradient: 1 if it has such elements, otherwise 0.
    counts: Vec<Tensor<1>>,
}

impl Finite<'_> {
    /// Returns a value greater than 0 if any gradient has such elements. Waits for each device
    /// once: gradients of shards in host memory are there.
    fn bad(self) -> f32 {
        let mut bad = 0_f32;
        let mut counts = self.counts;
        while let Some(device) = counts.first().map(Tensor::device) {
            let (here, elsewhere) = counts
                .into_iter()
                .partition(|count| count.device() == device);
            bad = bad.max(Tensor::cat(here, 0).max().into_scalar());
            counts = elsewhere;
        }
        bad
    }
}

impl ModuleVisitor for Finite<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let grad = self
            .grads
            .get::<D>(param.id)
            .filter(|grad| grad.shape().num_elements() > 0);
        self.counts
            .extend(grad.map(|grad| grad.is_finite().bool_not().int().max().float()));
    }
}
