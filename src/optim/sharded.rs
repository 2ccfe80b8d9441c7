//! [`sharded`]: burn's optimizers that are correct on a sharded model.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use burn::backend::TensorMetadata;
use burn::grad_clipping::GradientClipping;
use burn::lr_scheduler::module_lr_scheduler::ModuleLearningRate;
use burn::module::{Module, ModuleVisitor, Param, ParamGroup, ParamId};
use burn::optim::{GradientsParams, ModuleOptimizer, MuonConfig, OptimizerRecord};
use burn::tensor::Tensor;
use itertools::Itertools;

use super::clip::clip_each;
use super::exact::ExactOnShards;
use super::factor::{GradFactor, scaled_by};
use super::fused::in_lists;
use super::models::check_fields;
use super::muon::{MuonMatrix, Stages, orthogonalized};
use super::optimizer_kind::OptimizerKind;
use super::per_param::{ClippedGroup, MuonOnShards};
use super::realigned::Realigned;
use super::{OptimError, OptimizerState, load_optimizer_state, optimizer_state};
use crate::Result;
use crate::burn_compat::{ModulePath, TensorVisitor, visit_tensors};
use crate::dtensor::DTensorSpec;
use crate::param::{Unit, check_not_replaced, check_reduced, walk};

/// Builds a burn optimizer for a model that is sharded or parallelized. It steps every parameter as
/// one device would.
///
/// `optimizer` is a configuration, such as burn's `AdamWConfig`, or an optimizer. An optimizer that
/// does not work element by element does not compile here ([`ExactOnShards`]). Gradient clipping by
/// value is burn's own. Clipping by norm limits the norm of each parameter's gradient, computed
/// over all its shards. To clip by the norm of all gradients together, use
/// [`clip_grad_norm`](crate::fsdp::clip_grad_norm).
///
/// Local: no communication.
///
/// ```
/// use burn::module::ParamGroup;
/// use burn::nn::{Linear, LinearConfig};
/// use burn::optim::{AdamWConfig, GradientsParams, MuonConfig};
/// use burn::tensor::Tensor;
/// use burn_dtensor::optim::sharded;
/// use burn_dtensor::prelude::*;
///
/// launch(Launch::threads(2), |world| {
///     let mesh = DeviceMesh::new(world, [2], ["shard"])?;
///     let device = world.device().clone().autodiff();
///     let mut model: Linear = fully_shard(LinearConfig::new(8, 6).init(&device), &mesh, FullyShard::new())?;
///     let matrices = ParamGroup::from_predicate("weight");
///     let mut optim = sharded(AdamWConfig::new()).with_muon(matrices, MuonConfig::new());
///     for _ in 0..3 {
///         let loss = model.forward(Tensor::<2>::ones([1, 8], &device)).square().sum();
///         let grads = GradientsParams::from_grads(loss.backward(), &model);
///         model = optim.step(1e-3, model, grads)?;
///     }
///     let velocity = optim.state(&model)?.tensor::<2>("weight.momentum.velocity").expect("Muon has one");
///     assert_eq!(velocity.placements(), [Placement::Shard(0)]);
///     Ok(())
/// })?;
/// # Ok::<_, burn_dtensor::Error>(())
/// ```
pub fn sharded<O: ExactOnShards>(optimizer: O) -> ShardedOptimizer {
    let (optimizer, clipping) = optimizer.build();
    let kind = OptimizerKind::of(&optimizer);
    let optimizer = Realigned(optimizer);
    let optim = ModuleOptimizer::from(optimizer.clone());
    let (optim, clip) = match clipping {
        Some(GradientClipping::Norm(max_norm)) => {
            (optim, Some(ClippedGroup::new(optimizer, max_norm)))
        }
        Some(by_value) => (optim.with_grad_clipping(by_value), None),
        None => (optim, None),
    };
    let groups = vec![OptimizerGroup {
        params: ParamGroup::all(),
        kind,
        clip,
        muon: None,
    }];
    ShardedOptimizer {
        optim,
        groups,
        allows_empty_steps: false,
    }
}

/// burn's [`ModuleOptimizer`] for a distributed model, built by [`sharded`].
///
/// Groups work as in burn: a parameter in several groups is stepped by the last one.
#[derive(Clone)]
pub struct ShardedOptimizer {
    /// burn's optimizer. For a parameter of a Muon group it steps and stores only the momentum.
    pub(super) optim: ModuleOptimizer,
    /// Groups of `optim`, with the settings that burn does not handle.
    pub(super) groups: Vec<OptimizerGroup>,
    /// True if a step without a gradient of the model is not an error.
    pub(super) allows_empty_steps: bool,
}

#[derive(Clone)]
pub(super) struct OptimizerGroup {
    params: ParamGroup,
    pub(super) kind: OptimizerKind,
    /// Clipping of each parameter's gradient by norm.
    pub(super) clip: Option<ClippedGroup>,
    pub(super) muon: Option<Stages>,
}

impl OptimizerGroup {
    /// Returns the index of the group that steps a parameter: the last that contains it.
    pub(super) fn of(groups: &[Self], id: ParamId, path: &str) -> usize {
        groups
            .iter()
            .rposition(|group| group.params.matches(&id, Some(path)))
            .expect("the first group matches all parameters")
    }
}

impl ShardedOptimizer {
    /// Steps the parameters of a group with this optimizer, which must be one that [`sharded`]
    /// accepts.
    #[must_use]
    pub fn with_group<O: ExactOnShards>(mut self, params: ParamGroup, optimizer: O) -> Self {
        let (optimizer, clipping) = optimizer.build();
        let kind = OptimizerKind::of(&optimizer);
        let optimizer = Realigned(optimizer);
        let (by_value, clip) = match clipping {
            Some(GradientClipping::Norm(max_norm)) => {
                (None, Some(ClippedGroup::new(optimizer.clone(), max_norm)))
            }
            by_value => (by_value, None),
        };
        self.optim = self.optim.with_group(params.clone(), optimizer, by_value);
        self.groups.push(OptimizerGroup {
            params,
            kind,
            clip,
            muon: None,
        });
        self
    }

    /// Steps the matrices of a group with burn's Muon. Momentum works on shards. Each matrix is
    /// then gathered on one rank, which orthogonalizes it, so that the work is distributed over the
    /// ranks. Results and state equal burn's.
    ///
    /// Use another optimizer, such as AdamW, for embeddings, the last layer and parameters that are
    /// not matrices.
    ///
    /// In addition to its shards, a rank holds a few times the largest matrix in memory. Consider
    /// all matrices with the same layout: `matrices` of one size, each sharded over `ranks` ranks.
    /// A step then makes `2 * matrices.div_ceil(ranks)` all-to-alls along each mesh dimension that
    /// shards them, and sends each element twice: to the owner and back.
    #[must_use]
    pub fn with_muon(mut self, matrices: ParamGroup, config: MuonConfig) -> Self {
        let stages = Stages::of(&config);
        self.optim = self
            .optim
            .with_group(matrices.clone(), stages.velocity.clone(), None);
        self.groups.push(OptimizerGroup {
            params: matrices,
            kind: OptimizerKind::muon(),
            clip: None,
            muon: Some(stages),
        });
        self
    }

    /// Sets whether a step may have no gradient of any parameter of the model. Default: false,
    /// because such a step mostly gets the gradients of another model. With `true` it changes
    /// nothing, like burn's optimizer.
    #[must_use]
    pub fn with_empty_steps_allowed(mut self, allowed: bool) -> Self {
        self.allows_empty_steps = allowed;
        self
    }

    /// Steps the parameters that have gradients, like burn's [`ModuleOptimizer::step`]. `lr` is a
    /// number or the output of a burn scheduler.
    ///
    /// # Collective
    /// Local, except for Muon and clipping by norm. Then every rank of the model's meshes must call
    /// it, with gradients of the same parameters.
    ///
    /// # Errors
    /// [`OptimError::NotAMatrix`] for a parameter of Muon's group that is not a matrix,
    /// [`ParamError::StepWithoutGradients`](crate::param::ParamError::StepWithoutGradients) if
    /// gradients wait to be reduced and `grads` has none of a distributed parameter,
    /// [`OptimError::NoGradients`] if `grads` has none of any trained parameter ([unless
    /// allowed](Self::with_empty_steps_allowed)), and
    /// [`ParamError::Replaced`](crate::param::ParamError::Replaced) if a parameter was replaced
    /// after it was distributed, all before any parameter is stepped;
    /// [`Error::Comm`](crate::Error::Comm) if another rank fails.
    pub fn step<M: Module>(
        &mut self,
        lr: impl Into<ModuleLearningRate>,
        model: M,
        grads: GradientsParams,
    ) -> Result<M> {
        self.step_scaled(lr, model, grads, GradFactor::one())
    }

    /// Steps like [`step`](Self::step), with gradients that are multiplied by `factor`. Fused steps
    /// multiply as they read a gradient, which saves a pass over all of them. On the CPU the bits are
    /// those of a pass; kernels of GPUs multiply by the product. If a group clips its gradients or is Muon's, all are multiplied first.
    ///
    /// ```
    /// # use burn::nn::LinearConfig;
    /// # use burn::optim::{AdamWConfig, GradientsParams};
    /// # use burn::tensor::Tensor;
    /// use burn_dtensor::fsdp::ClipGradNorm;
    /// use burn_dtensor::optim::{GradFactor, sharded};
    /// # use burn_dtensor::prelude::*;
    /// # launch(Launch::threads(2), |world| {
    /// # let mesh = DeviceMesh::new(world, [2], ["shard"])?;
    /// # let device = world.device().clone().autodiff();
    /// # let mut model = fully_shard(LinearConfig::new(8, 6).init(&device), &mesh, FullyShard::new())?;
    /// # let mut optim = sharded(AdamWConfig::new());
    /// # let loss = model.forward(Tensor::<2>::ones([1, 8], &device)).square().sum();
    /// let grads = GradientsParams::from_grads(loss.backward(), &model);
    /// let (norm, factor) = ClipGradNorm::new(1.0).factor(&model, &grads, GradFactor::one())?;
    /// model = optim.step_scaled(1e-3, model, grads, factor)?;
    /// # let _ = (model, norm);
    /// # Ok(())
    /// # })?;
    /// # Ok::<_, burn_dtensor::Error>(())
    /// ```
    ///
    /// # Collective
    /// Like [`step`](Self::step).
    ///
    /// # Errors
    /// Those of [`step`](Self::step).
    pub fn step_scaled<M: Module>(
        &mut self,
        lr: impl Into<ModuleLearningRate>,
        model: M,
        mut grads: GradientsParams,
        factor: GradFactor,
    ) -> Result<M> {
        let lr = lr.into();
        let found = walk(&model);
        check_not_replaced(&model, &found)?;
        check_reduced(&model, &found, &grads)?;
        if !self.allows_empty_steps {
            check_any(&model, &grads)?;
        }
        if self
            .groups
            .iter()
            .all(|group| group.muon.is_none() && group.clip.is_none())
            && (factor == GradFactor::one() || !self.optim.has_gradient_clipping())
        {
            let step = || self.optim.step(lr, model, grads);
            return Ok(scaled_by(factor, || in_lists(step)));
        }
        factor.scale_all(&model, &mut grads);
        let (members, units) = self.members(&model, Some(&grads))?;
        clip_each(
            &model,
            &mut grads,
            &members
                .iter()
                .filter_map(|member| {
                    Some((
                        member.id,
                        (
                            self.groups[member.group].clip.as_ref()?.max_norm,
                            member.spec.clone(),
                        ),
                    ))
                })
                .collect(),
            &units,
        )?;
        let mut of_muon = GradientsParams::new();
        let steps = members
            .into_iter()
            .filter(|member| self.groups[member.group].muon.is_some());
        let steps: HashMap<_, _> = steps.map(|member| (member.id, member)).collect();
        for id in steps.keys() {
            let grad = grads
                .remove::<2>(*id)
                .expect("`members` contains only parameters with gradients");
            of_muon.register(*id, grad);
        }
        // The parameters of this copy become the output of momentum. The model itself is not
        // stepped.
        let moved = self.optim.step(lr.clone(), model.clone(), of_muon);
        let mut matrices = Matrices {
            groups: &self.groups,
            members: steps,
            lr: &lr,
            found: Vec::new(),
        };
        moved.visit(&mut matrices);
        let matrices = matrices.found;
        drop(moved);
        let (of_group, matrices): (Vec<_>, Vec<_>) = matrices.into_iter().unzip();
        let of_group: HashMap<_, _> = matrices
            .iter()
            .map(|matrix| matrix.id)
            .zip(of_group)
            .collect();
        let mut steps: BTreeMap<usize, GradientsParams> = BTreeMap::new();
        for (id, step) in orthogonalized(matrices, &units)? {
            steps.entry(of_group[&id]).or_default().register(id, step);
        }
        let mut model = in_lists(|| self.optim.step(lr.clone(), model, grads));
        for (group, steps) in steps {
            let Stages { apply, .. } = self.groups[group].muon.clone().expect("a group of Muon");
            model = ModuleOptimizer::from(apply).step(lr.clone(), model, steps);
        }
        Ok(model)
    }

    /// Returns burn's optimizer that makes the same steps of `model`, for code that takes no other,
    /// such as burn's `Learner`. Its state is that of this optimizer: [`optimizer_state`] returns
    /// it, and the records of either load into the other.
    ///
    /// It handles one parameter after the other. A matrix of Muon's group takes two all-to-alls
    /// along each mesh dimension that shards it, and is orthogonalized while the other ranks wait;
    /// [`step`](Self::step) distributes all matrices over the ranks. Clipping by norm takes one
    /// all-reduce for each parameter along each of these mesh dimensions. Without Muon and clipping
    /// by norm, the steps are local.
    ///
    /// Local. Steps of the result are collective like [`step`](Self::step). burn's optimizer cannot
    /// return an error, so a rank [unwinds](crate::Error::unwind) with the error of a failed
    /// collective.
    ///
    /// ```
    /// use burn::module::ParamGroup;
    /// use burn::nn::LinearConfig;
    /// use burn::optim::{AdamWConfig, GradientsParams, MuonConfig};
    /// use burn::tensor::Tensor;
    /// use burn_dtensor::optim::sharded;
    /// use burn_dtensor::prelude::*;
    ///
    /// launch(Launch::threads(2), |world| {
    ///     let mesh = DeviceMesh::new(world, [2], ["shard"])?;
    ///     let device = world.device().clone().autodiff();
    ///     let mut model = fully_shard(LinearConfig::new(8, 6).init(&device), &mesh, FullyShard::new())?;
    ///     let optim = sharded(AdamWConfig::new()).with_muon(ParamGroup::from_predicate("weight"), MuonConfig::new());
    ///     let mut optim = optim.into_module_optimizer(&model)?;
    ///     let loss = model.forward(Tensor::<2>::ones([1, 8], &device)).square().sum();
    ///     let grads = GradientsParams::from_grads(loss.backward(), &model);
    ///     model = optim.step(1e-3, model, grads);
    ///     # let _ = model;
    ///     Ok(())
    /// })?;
    /// # Ok::<_, burn_dtensor::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`OptimError::NotAMatrix`] for a parameter of Muon's group that is not a matrix, and
    /// [`ParamError::Replaced`](crate::param::ParamError::Replaced).
    pub fn into_module_optimizer<M: Module>(self, model: &M) -> Result<ModuleOptimizer> {
        let (members, _) = self.members(model, None)?;
        if members.is_empty() {
            return Ok(self.optim);
        }
        // A group that is added drops the state of its parameters.
        let record = self.optim.to_record();
        let mut optim = self.optim;
        for GroupParam {
            id,
            path,
            group,
            spec,
        } in members
        {
            let params = ParamGroup::from_path(path.clone());
            optim = match &self.groups[group] {
                OptimizerGroup {
                    muon: Some(stages), ..
                } => optim.with_group(
                    params,
                    MuonOnShards {
                        stages: stages.clone(),
                        id,
                        path: path.into(),
                        spec,
                    },
                    None,
                ),
                OptimizerGroup {
                    clip: Some(clip), ..
                } => clip.add(optim, params, spec),
                OptimizerGroup { .. } => optim,
            };
        }
        Ok(optim.load_record(record))
    }

    /// Returns the parameters that need more than burn's step, of those with gradients if `grads`
    /// is given, and the model's units.
    fn members<M: Module>(
        &self,
        model: &M,
        grads: Option<&GradientsParams>,
    ) -> Result<(Vec<GroupParam>, Vec<Arc<Unit>>)> {
        let walk = walk(model);
        check_not_replaced(model, &walk)?;
        let units = walk
            .distributed
            .iter()
            .map(|visited| visited.param.unit.clone())
            .unique_by(Arc::as_ptr)
            .collect();
        let specs = walk
            .distributed
            .into_iter()
            .map(|visited| (visited.id, visited.param.spec(visited.base.dtype())))
            .collect();
        let mut members = Members {
            groups: &self.groups,
            grads,
            specs,
            found: Vec::new(),
            fault: None,
        };
        visit_tensors(model, &mut members);
        match members.fault {
            Some(fault) => Err(fault.into()),
            None => Ok((members.found, units)),
        }
    }

    /// Returns the state of the parameters of `model`, by path, like [`optimizer_state`]. Local.
    ///
    /// # Errors
    /// Like [`optimizer_state`].
    pub fn state<M: Module>(&self, model: &M) -> Result<OptimizerState> {
        optimizer_state(&self.optim, model)
    }

    /// Returns the optimizer with `state` in place of its state of the parameters of `model`, like
    /// [`load_optimizer_state`]. Local.
    ///
    /// # Errors
    /// Like [`load_optimizer_state`]. It also finds state that this optimizer would not make, such
    /// as momentum for one without, or none for one with momentum.
    pub fn load_state<M: Module>(mut self, model: &M, state: OptimizerState) -> Result<Self> {
        check_fields(&self.optim, model, &state)?;
        self.optim = load_optimizer_state(self.optim, model, state)?;
        Ok(self)
    }

    /// Returns burn's record of this rank's state, by parameter id.
    pub fn to_record(&self) -> OptimizerRecord {
        self.optim.to_record()
    }

    /// Returns the optimizer with its state replaced by a record of this rank's state. Local.
    #[must_use]
    pub fn load_record(mut self, record: OptimizerRecord) -> Self {
        self.optim = self.optim.load_record(record);
        self
    }
}

/// A parameter with a gradient that Muon steps or whose gradient is clipped by norm.
struct GroupParam {
    id: ParamId,
    path: String,
    /// Index of its group.
    group: usize,
    /// Spec of the parameter; `None` if it is not distributed.
    spec: Option<Arc<DTensorSpec>>,
}

struct Members<'a> {
    groups: &'a [OptimizerGroup],
    grads: Option<&'a GradientsParams>,
    specs: HashMap<ParamId, Arc<DTensorSpec>>,
    found: Vec<GroupParam>,
    fault: Option<OptimError>,
}

impl TensorVisitor for Members<'_> {
    fn float<const D: usize>(&mut self, path: &ModulePath, param: &Param<Tensor<D>>) {
        if self
            .grads
            .is_some_and(|grads| grads.get::<D>(param.id).is_none())
        {
            return;
        }
        let id = param.id;
        let path = path.join();
        let group = OptimizerGroup::of(self.groups, id, &path);
        let OptimizerGroup { clip, muon, .. } = &self.groups[group];
        if muon.is_some() && D != 2 {
            self.fault
                .get_or_insert(OptimError::NotAMatrix { path, dims: D });
        } else if muon.is_some() || clip.is_some() {
            self.found.push(GroupParam {
                id,
                path,
                group,
                spec: self.specs.get(&id).cloned(),
            });
        }
    }
}

/// Checks that `grads` has the gradient of a parameter of `model`, if one of them is trained.
///
/// Local. A gradient of a shard is there on all ranks that reduce it, also for an empty shard.
///
/// # Errors
/// [`OptimError::NoGradients`].
fn check_any<M: Module>(model: &M, grads: &GradientsParams) -> Result<(), OptimError> {
    let mut search = TrainedParams {
        grads,
        first: None,
        trained: 0,
        has_grad: false,
    };
    visit_tensors(model, &mut search);
    match search {
        TrainedParams {
            first: Some(path),
            trained,
            has_grad: false,
            ..
        } => Err(OptimError::NoGradients {
            path,
            trained,
            grads: grads.len(),
        }),
        _ => Ok(()),
    }
}

/// Visitor that counts the trained parameters, and searches for a gradient of one.
struct TrainedParams<'a> {
    grads: &'a GradientsParams,
    first: Option<String>,
    trained: usize,
    has_grad: bool,
}

impl TensorVisitor for TrainedParams<'_> {
    fn float<const D: usize>(&mut self, path: &ModulePath, param: &Param<Tensor<D>>) {
        self.has_grad = self.has_grad || self.grads.get::<D>(param.id).is_some();
        if param.is_require_grad() {
            self.trained += 1;
            self.first.get_or_insert_with(|| path.join());
        }
    }
}

/// Visitor that collects the matrices for Muon to orthogonalize, each with the index of its group.
/// It visits a model whose parameters are the output of momentum.
struct Matrices<'a> {
    groups: &'a [OptimizerGroup],
    members: HashMap<ParamId, GroupParam>,
    lr: &'a ModuleLearningRate,
    found: Vec<(usize, MuonMatrix)>,
}

impl ModuleVisitor for Matrices<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let Some(GroupParam {
            id,
            path,
            group,
            spec,
        }) = self.members.remove(&param.id)
        else {
            return;
        };
        let lr = self.lr.lr_from_param(id, Some(&path));
        let Stages {
            orthogonal: muon, ..
        } = self.groups[group].muon.clone().expect("a group of Muon");
        let part = Tensor::<2>::from_dispatch(param.base().inner().into_dispatch());
        let spec = spec.map(|spec| spec.in_dtype(part.dtype()));
        self.found.push((
            group,
            MuonMatrix {
                id,
                path: path.into(),
                spec,
                part,
                lr,
                muon,
            },
        ));
    }
}
