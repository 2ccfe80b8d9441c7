//! Random trees of parameters on random meshes: steps of their shards have the bits of burn's steps
//! of the full parameters.
//!
//! A case draws a mesh, parameters (element types, shapes, placements, frozen or trained), one or
//! two optimizers with their settings and clipping by value, and some steps. A step draws learning
//! rates, full gradients of some parameters, and factors of the gradients. The reference is burn's
//! optimizer of one full parameter after the other, without a module and without this crate.
//!
//! All parameters are compared after every step, and the state after the last one. After half of
//! the steps, the state is saved and loaded into a new optimizer. In some steps, a clone of the
//! model and of the optimizer must not change.
//!
//! `RANDOM_OPTIMIZERS` says how many cases to run, `RANDOM_OPTIMIZERS_FROM` the first seed.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use burn::grad_clipping::{GradientClipping, GradientClippingConfig};
use burn::lr_scheduler::module_lr_scheduler::{ModuleLearningRate, ModuleLrScheduler};
use burn::module::{Module, Param, ParamGroup};
use burn::optim::decay::WeightDecayConfig;
use burn::optim::momentum::MomentumConfig;
use burn::optim::{
    AdaGradConfig, AdamConfig, AdamWConfig, AdanConfig, DynOptimizer, DynState, GradientsParams,
    LionConfig, RmsPropConfig, SgdConfig, StateSink,
};
use burn::tensor::{DType, Device, Slice, Tensor, TensorData};
use burn_dtensor::fsdp::ParamInfo;
use burn_dtensor::optim::{
    FullOptimizerState, GradFactor, OptimError, ShardedOptimizer, parameter_specs, sharded,
};
use burn_dtensor::prelude::*;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use crate::effort::{is_long, is_smoke, setting};

/// Shapes of meshes, and the names of their dimensions.
const MESHES: [(&[usize], &[&str]); 5] = [
    (&[1], &["shard"]),
    (&[2], &["shard"]),
    (&[3], &["shard"]),
    (&[4], &["shard"]),
    (&[2, 2], &["replicate", "shard"]),
];

const TYPES: [DType; 4] = [DType::F32, DType::F64, DType::F16, DType::BF16];

/// The fields of a [`Tree`]; that of parameters with `D` dimensions is at `D - 1`.
const FIELDS: [&str; 3] = ["vectors", "matrices", "cubes"];

/// Lengths of dimensions, which few numbers of ranks divide.
const LENGTHS: [usize; 7] = [1, 2, 3, 5, 7, 16, 33];

/// The greatest number of elements that one thread steps at a time.
const CHUNK: usize = 16 << 10;

/// The greatest number of values that are drawn for a tensor. A longer one repeats them, at other
/// places of each chunk.
const DRAWN: usize = 997;

const FACTORS: [f64; 3] = [1.0 / 1024.0, 0.37, 2.5];

const STEPS: usize = 10;

/// The number of steps before the state is saved and loaded.
const SAVED_AFTER: usize = 5;

const DEADLINE: Duration = Duration::from_secs(20);

#[test]
fn random_trees_of_parameters_step_as_with_burns_optimizers() {
    let default = match (is_long(), is_smoke()) {
        (true, _) => 2000,
        (false, true) => 20,
        (false, false) => 100,
    };
    let first = setting("RANDOM_OPTIMIZERS_FROM", 0);
    let count = setting("RANDOM_OPTIMIZERS", default);
    let mut idle = 0;
    for seed in first..first + count {
        let plan = Plan::draw(seed);
        let expected = plan.unsharded();
        if !plan.changes_values(&expected) {
            idle += 1;
        }
        for (rank, trained) in plan.sharded().iter().enumerate() {
            if let Some(difference) = plan.difference(trained, &expected) {
                panic!("{plan}, rank {rank}: {difference}");
            }
        }
    }
    assert!(
        idle <= count.div_ceil(4),
        "{idle} of {count} cases change no value, or have values that are not finite"
    );
}

/// A model that consists of parameters only.
#[derive(Module, Debug)]
struct Tree {
    vectors: Vec<Param<Tensor<1>>>,
    matrices: Vec<Param<Tensor<2>>>,
    cubes: Vec<Param<Tensor<3>>>,
}

impl Tree {
    /// Creates the parameters of a plan.
    fn new(params: &[PlannedParam], device: &Device) -> Self {
        fn created<const D: usize>(
            params: &[PlannedParam],
            device: &Device,
        ) -> Vec<Param<Tensor<D>>> {
            let of_field = params.iter().filter(|param| param.start.rank() == D);
            of_field
                .map(|param| {
                    let value = tensor(&param.start, device);
                    Param::from_tensor(value).set_require_grad(param.is_trained)
                })
                .collect()
        }
        Self {
            vectors: created(params, device),
            matrices: created(params, device),
            cubes: created(params, device),
        }
    }

    /// Returns copies of the stored values, in the order of the plan.
    fn values(&self) -> Vec<TensorData> {
        fn stored<const D: usize>(
            params: &[Param<Tensor<D>>],
        ) -> impl Iterator<Item = TensorData> + '_ {
            params.iter().map(|param| param.base().into_data())
        }
        stored(&self.vectors)
            .chain(stored(&self.matrices))
            .chain(stored(&self.cubes))
            .collect()
    }
}

/// Everything that a case does.
struct Plan {
    seed: u64,
    mesh: &'static [usize],
    mesh_names: &'static [&'static str],
    is_balanced: bool,
    /// The parameters in the order of the tree: vectors, matrices, cubes.
    params: Vec<PlannedParam>,
    optimizer: Configuration,
    /// A group of parameters with another optimizer.
    group: Option<(PlannedGroup, Configuration)>,
    /// A group of parameters with another learning rate.
    lr_group: Option<PlannedGroup>,
    steps: Vec<PlannedStep>,
}

struct PlannedParam {
    path: String,
    start: TensorData,
    is_trained: bool,
    /// The placement over the ranks that shard; `None` for the default.
    placement: Option<Placement>,
}

/// A group of parameters as burn selects it, and the paths of its members.
struct PlannedGroup {
    params: ParamGroup,
    paths: Vec<String>,
}

struct PlannedStep {
    lr: f64,
    /// The learning rate of the group that has another one.
    group_lr: f64,
    factors: Vec<f64>,
    /// The full gradient of each parameter, if the step has one.
    grads: Vec<Option<TensorData>>,
    /// True if a clone of the model and of the optimizer is held during the step.
    is_held: bool,
}

/// The results of training.
struct Trained {
    /// The full values of all parameters after each step.
    values: Vec<Vec<TensorData>>,
    state: FullOptimizerState,
}

impl Plan {
    fn draw(seed: u64) -> Self {
        let rng = &mut StdRng::seed_from_u64(seed);
        let (mesh, mesh_names) = one_of(rng, &MESHES);
        let params = draw_params(rng, mesh[mesh.len() - 1]);
        let has_f16 = params.iter().any(|param| param.start.dtype() == DType::F16);
        let optimizer = Configuration::draw(rng, has_f16);
        let group = rng.random_bool(0.4).then(|| {
            let group = PlannedGroup::draw(rng, &params);
            (group, Configuration::draw(rng, has_f16))
        });
        let lr_group = rng
            .random_bool(0.4)
            .then(|| PlannedGroup::draw(rng, &params));
        let steps = (0..STEPS)
            .map(|_| PlannedStep::draw(rng, &params))
            .collect();
        Self {
            seed,
            mesh,
            mesh_names,
            is_balanced: rng.random_bool(0.2),
            params,
            optimizer,
            group,
            lr_group,
            steps,
        }
    }

    fn optimizer_of(&self, path: &str) -> &Configuration {
        match &self.group {
            Some((group, optimizer)) if group.contains(path) => optimizer,
            _ => &self.optimizer,
        }
    }

    fn learning_rate_of(&self, path: &str, step: &PlannedStep) -> f64 {
        match &self.lr_group {
            Some(group) if group.contains(path) => step.group_lr,
            _ => step.lr,
        }
    }

    /// Steps each full parameter with burn's optimizer.
    fn unsharded(&self) -> Trained {
        let mut params: Vec<_> = self
            .params
            .iter()
            .map(|param| FullParameter::new(param, self.optimizer_of(&param.path)))
            .collect();
        let mut values = Vec::new();
        for step in &self.steps {
            for (param, grad) in params.iter_mut().zip(&step.grads) {
                if let Some(grad) = grad {
                    let lr = self.learning_rate_of(&param.path, step);
                    param.step(lr, grad, &step.factors);
                }
            }
            values.push(params.iter().map(|param| param.value.clone()).collect());
        }
        let mut sink = StateSink::default();
        for param in &params {
            if let Some(state) = &param.state {
                param.optimizer.state_flatten(&param.path, state, &mut sink);
            }
        }
        Trained {
            values,
            state: FullOptimizerState {
                tensors: sink.tensors.into_iter().collect(),
                scalars: sink.scalars.into_iter().collect(),
            },
        }
    }

    /// Steps shards on the ranks of the mesh. Returns the results in the order of ranks.
    fn sharded(&self) -> Vec<Trained> {
        let config = Launch::threads(self.mesh.iter().product()).with_deadline(DEADLINE);
        let ranks = launch(config, |world| {
            self.train(&DeviceMesh::new(world, self.mesh, self.mesh_names)?)
        });
        let ranks = ranks.unwrap_or_else(|error| panic!("{self}: {error}"));
        ranks.into_iter().map(|(_, trained)| trained).collect()
    }

    fn train(&self, mesh: &DeviceMesh) -> Result<Trained> {
        let device = mesh.device();
        let full = Tree::new(&self.params, &device.clone().autodiff());
        let mut model = fully_shard(full, mesh, self.sharding())?;
        let mut optim = self.sharded_optimizer();
        let mut values = Vec::new();
        for (at, step) in self.steps.iter().enumerate() {
            if at == SAVED_AFTER {
                optim = self.reloaded(optim, &model)?;
            }
            let held = step
                .is_held
                .then(|| Held::new(&model, &optim))
                .transpose()?;
            let grads = step.local_grads(&model, device);
            let lr = self.learning_rate(step);
            let factors = step.factors.iter().copied();
            model = match step.factors.is_empty() {
                true => optim.step(lr, model, grads)?,
                false => {
                    let factor = factors.fold(GradFactor::one(), GradFactor::then);
                    optim.step_scaled(lr, model, grads, factor)?
                }
            };
            if let Some(held) = held {
                held.check_unchanged(at + 1)?;
            }
            values.push(full_model(&model)?.values());
        }
        let state = optim.state(&model)?.full()?;
        Ok(Trained { values, state })
    }

    fn sharding(&self) -> FullyShard {
        let placed = self
            .params
            .iter()
            .filter_map(|param| Some((param.path.clone(), param.placement?)));
        let placements: BTreeMap<String, Placement> = placed.collect();
        let config = FullyShard::new()
            .with_shard_placement_fn(move |param: ParamInfo| placements.get(param.path).copied());
        match self.is_balanced {
            true => config.with_balanced_bytes(),
            false => config,
        }
    }

    fn sharded_optimizer(&self) -> ShardedOptimizer {
        let optim = self.optimizer.sharded();
        match &self.group {
            Some((group, other)) => other.add_to(optim, group.params.clone()),
            None => optim,
        }
    }

    fn learning_rate(&self, step: &PlannedStep) -> ModuleLearningRate {
        match &self.lr_group {
            Some(group) => ModuleLrScheduler::new(step.lr)
                .with_group(group.params.clone(), step.group_lr)
                .step(),
            None => step.lr.into(),
        }
    }

    /// Saves the state, and returns a new optimizer that has loaded it. burn loads only single
    /// precision: if there is a state of another type, the load must fail, and the optimizer itself
    /// is returned.
    fn reloaded(&self, optim: ShardedOptimizer, model: &Tree) -> Result<ShardedOptimizer> {
        let saved = optim.state(model)?.full()?;
        let mut types = saved.tensors.values().map(TensorData::dtype);
        let is_loaded = types.all(|dtype| dtype == DType::F32);
        let saved = FullOptimizerState::from_bytes(saved.into_bytes()?)?;
        let state = saved.distribute(parameter_specs(model)?)?;
        match self.sharded_optimizer().load_state(model, state) {
            Err(Error::Optim(OptimError::ElementType { .. })) if !is_loaded => Ok(optim),
            Ok(_) if !is_loaded => panic!("a state in another type than f32 was loaded"),
            loaded => loaded,
        }
    }

    /// Returns true if steps change a value, and all values stay finite: otherwise the case compares
    /// little.
    fn changes_values(&self, expected: &Trained) -> bool {
        let last = &expected.values[STEPS - 1];
        let starts = self.params.iter().map(|param| &param.start);
        let has_changed = starts
            .zip(last)
            .any(|(start, value)| start.as_bytes() != value.as_bytes());
        has_changed && last.iter().flat_map(elements).all(f64::is_finite)
    }

    /// Describes the first difference from the reference; `None` if there is none.
    fn difference(&self, found: &Trained, expected: &Trained) -> Option<String> {
        for (at, (found, expected)) in found.values.iter().zip(&expected.values).enumerate() {
            for ((param, found), expected) in self.params.iter().zip(found).zip(expected) {
                if let Some(difference) = differing(found, expected) {
                    let param = self.describe(param);
                    return Some(format!("after step {}, {param}: {difference}", at + 1));
                }
            }
        }
        let (found, expected) = (&found.state, &expected.state);
        let names =
            |state: &FullOptimizerState| -> Vec<String> { state.tensors.keys().cloned().collect() };
        if names(found) != names(expected) {
            let (found, expected) = (names(found), names(expected));
            return Some(format!(
                "the state has the tensors {found:?}, not {expected:?}"
            ));
        }
        for ((name, found), expected) in found.tensors.iter().zip(expected.tensors.values()) {
            if let Some(difference) = differing(found, expected) {
                let mut params = self.params.iter();
                let param = params.find(|param| name.starts_with(&format!("{}.", param.path)));
                let param = self.describe(param.expect("a state belongs to a parameter"));
                return Some(format!(
                    "after step {STEPS}, the state `{name}` of {param}: {difference}"
                ));
            }
        }
        let (found, expected) = (&found.scalars, &expected.scalars);
        (found != expected)
            .then(|| format!("the state has the numbers {found:?}, not {expected:?}"))
    }

    fn describe(&self, param: &PlannedParam) -> String {
        let PlannedParam {
            path,
            start,
            placement,
            ..
        } = param;
        let (shape, dtype) = (start.shape().to_vec(), start.dtype());
        let optimizer = self.optimizer_of(path);
        format!("`{path}` {shape:?} {dtype:?}, placed as {placement:?}, stepped by {optimizer:?}")
    }
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "seed {}, mesh {:?}, optimizer {:?}",
            self.seed, self.mesh, self.optimizer
        )?;
        if let Some((group, optimizer)) = &self.group {
            write!(f, ", optimizer of {:?} {optimizer:?}", group.paths)?;
        }
        Ok(())
    }
}

impl PlannedGroup {
    fn draw(rng: &mut StdRng, params: &[PlannedParam]) -> Self {
        let field = rng.random_bool(0.5).then(|| one_of(rng, &FIELDS));
        let paths = params.iter().map(|param| param.path.clone());
        let paths: Vec<_> = paths
            .filter(|path| match field {
                Some(field) => path.starts_with(field),
                None => rng.random_bool(0.5),
            })
            .collect();
        let params = match field {
            Some(field) => ParamGroup::from_predicate(field),
            None => ParamGroup::from_paths(paths.clone()),
        };
        Self { params, paths }
    }

    fn contains(&self, path: &str) -> bool {
        self.paths.iter().any(|member| member == path)
    }
}

impl PlannedStep {
    fn draw(rng: &mut StdRng, params: &[PlannedParam]) -> Self {
        let trained: Vec<_> = (0..params.len())
            .filter(|&at| params[at].is_trained)
            .collect();
        let stepped = one_of(rng, &trained);
        let mut grads = Vec::new();
        for (at, PlannedParam { start, .. }) in params.iter().enumerate() {
            let has_grad = at == stepped || trained.contains(&at) && rng.random_bool(0.7);
            grads.push(has_grad.then(|| draw_values(rng, start.shape().to_vec(), start.dtype())));
        }
        let factors = one_of(rng, &[0, 0, 0, 1, 2]);
        Self {
            lr: draw_learning_rate(rng),
            group_lr: draw_learning_rate(rng),
            factors: (0..factors).map(|_| one_of(rng, &FACTORS)).collect(),
            grads,
            is_held: rng.random_bool(0.25),
        }
    }

    /// Returns this rank's shards of the gradients.
    fn local_grads(&self, model: &Tree, device: &Device) -> GradientsParams {
        let mut grads = GradientsParams::new();
        let (vectors, others) = self.grads.split_at(model.vectors.len());
        let (matrices, cubes) = others.split_at(model.matrices.len());
        register(&model.vectors, vectors, device, &mut grads);
        register(&model.matrices, matrices, device, &mut grads);
        register(&model.cubes, cubes, device, &mut grads);
        grads
    }
}

/// Registers this rank's shards of full gradients.
fn register<const D: usize>(
    params: &[Param<Tensor<D>>],
    full: &[Option<TensorData>],
    device: &Device,
    grads: &mut GradientsParams,
) {
    for (param, full) in params.iter().zip(full) {
        let Some(full) = full else { continue };
        let shard = param.shard().expect("all parameters are distributed");
        let spec = shard.spec();
        let ranges: Vec<_> = (0..D)
            .map(|dim| Slice::from(spec.local_range(dim)))
            .collect();
        let local = spec.local_shape();
        let grad = match local.num_elements() {
            0 => Tensor::<D>::zeros(local, (device, full.dtype())),
            _ => tensor::<D>(full, device).slice(ranges.as_slice()),
        };
        grads.register(param.id, grad);
    }
}

/// Clones of a model and of its optimizer, which share memory with them, and copies of their
/// contents.
struct Held {
    model: Tree,
    optim: ShardedOptimizer,
    values: Vec<TensorData>,
    record: Vec<u8>,
}

impl Held {
    fn new(model: &Tree, optim: &ShardedOptimizer) -> Result<Self> {
        let (model, optim) = (model.clone(), optim.clone());
        let values = model.values();
        let record = optim.to_record().into_bytes()?.to_vec();
        Ok(Self {
            model,
            optim,
            values,
            record,
        })
    }

    fn check_unchanged(self, step: usize) -> Result<()> {
        for (at, (now, before)) in self.model.values().iter().zip(&self.values).enumerate() {
            if let Some(difference) = differing(now, before) {
                panic!("step {step} changes a clone of parameter {at}: {difference}");
            }
        }
        let record = self.optim.to_record().into_bytes()?.to_vec();
        assert!(
            record == self.record,
            "step {step} changes the state of a clone of the optimizer"
        );
        Ok(())
    }
}

/// The reference: a full parameter that burn's optimizer steps.
struct FullParameter {
    path: String,
    value: TensorData,
    optimizer: Arc<dyn DynOptimizer>,
    clipping: Option<GradientClipping>,
    state: Option<DynState>,
}

impl FullParameter {
    fn new(param: &PlannedParam, configuration: &Configuration) -> Self {
        Self {
            path: param.path.clone(),
            value: param.start.clone(),
            optimizer: configuration.optimizer.burns(),
            clipping: configuration.max_value.map(GradientClipping::Value),
            state: None,
        }
    }

    fn step(&mut self, lr: f64, grad: &TensorData, factors: &[f64]) {
        match grad.rank() {
            1 => self.step_tensor::<1>(lr, grad, factors),
            2 => self.step_tensor::<2>(lr, grad, factors),
            _ => self.step_tensor::<3>(lr, grad, factors),
        }
    }

    fn step_tensor<const D: usize>(&mut self, lr: f64, grad: &TensorData, factors: &[f64]) {
        let device = Device::flex();
        let mut grad = tensor::<D>(grad, &device);
        for &factor in factors {
            grad = grad.mul_scalar(factor);
        }
        if let Some(clipping) = &self.clipping {
            grad = clipping.clip_gradient(grad);
        }
        let value = tensor::<D>(&self.value, &device);
        let (value, state) = self.optimizer.step_dyn(
            D,
            lr,
            value.into_bridge(),
            grad.into_bridge(),
            self.state.take(),
        );
        self.value = Tensor::<D>::from_bridge(value).into_data();
        self.state = state;
    }
}

/// The configuration of an optimizer.
#[derive(Debug)]
struct Configuration {
    optimizer: OptimizerConfiguration,
    /// The value to which elements of gradients are clipped.
    max_value: Option<f32>,
}

#[derive(Debug)]
enum OptimizerConfiguration {
    AdamW(AdamWConfig),
    Adam(AdamConfig),
    Sgd(SgdConfig),
    Lion(LionConfig),
    RmsProp(RmsPropConfig),
    AdaGrad(AdaGradConfig),
    Adan(AdanConfig),
}

/// Evaluates an expression for the configuration of any optimizer.
macro_rules! with_config {
    ($optimizer:expr, |$config:ident| $run:expr) => {
        match $optimizer {
            OptimizerConfiguration::AdamW($config) => $run,
            OptimizerConfiguration::Adam($config) => $run,
            OptimizerConfiguration::Sgd($config) => $run,
            OptimizerConfiguration::Lion($config) => $run,
            OptimizerConfiguration::RmsProp($config) => $run,
            OptimizerConfiguration::AdaGrad($config) => $run,
            OptimizerConfiguration::Adan($config) => $run,
        }
    };
}

impl OptimizerConfiguration {
    /// Builds burn's optimizer of one tensor.
    fn burns(&self) -> Arc<dyn DynOptimizer> {
        with_config!(self, |config| Arc::new(config.build()))
    }
}

impl Configuration {
    /// Draws an optimizer and its settings. With `has_f16`, it steps a tensor of type `f16`, in
    /// which an epsilon that is too small is 0.
    fn draw(rng: &mut StdRng, has_f16: bool) -> Self {
        let max_value = rng.random_bool(0.2).then(|| one_of(rng, &[0.01, 0.5]));
        let clipping = max_value.map(GradientClippingConfig::Value);
        let epsilons: &[f32] = match has_f16 {
            true => &[1e-3, 1e-2],
            false => &[1e-8, 1e-5, 1e-2],
        };
        let epsilon = one_of(rng, epsilons);
        let [beta_1, beta_2] = [
            one_of(rng, &[0.0, 0.5, 0.9]),
            one_of(rng, &[0.9, 0.95, 0.999]),
        ];
        let decay = one_of(rng, &[0.0, 0.01, 0.3]);
        let penalty = one_of(rng, &[None, Some(0.01), Some(0.3)]).map(WeightDecayConfig::new);
        let optimizer = match rng.random_range(0..14) {
            0..4 => OptimizerConfiguration::AdamW(
                AdamWConfig::new()
                    .with_beta_1(beta_1)
                    .with_beta_2(beta_2)
                    .with_epsilon(epsilon)
                    .with_weight_decay(decay)
                    .with_cautious_weight_decay(rng.random_bool(0.2))
                    .with_amsgrad(rng.random_bool(0.2))
                    .with_grad_clipping(clipping),
            ),
            4..6 => OptimizerConfiguration::Adam(
                AdamConfig::new()
                    .with_beta_1(beta_1)
                    .with_beta_2(beta_2)
                    .with_epsilon(epsilon)
                    .with_amsgrad(rng.random_bool(0.2))
                    .with_weight_decay(penalty)
                    .with_grad_clipping(clipping),
            ),
            6..9 => OptimizerConfiguration::Sgd(
                SgdConfig::new()
                    .with_weight_decay(penalty)
                    .with_momentum(draw_momentum(rng))
                    .with_gradient_clipping(clipping),
            ),
            9..11 => OptimizerConfiguration::Lion(
                LionConfig::new()
                    .with_beta_1(beta_1)
                    .with_beta_2(beta_2)
                    .with_weight_decay(decay)
                    .with_grad_clipping(clipping),
            ),
            11 => OptimizerConfiguration::RmsProp(
                RmsPropConfig::new()
                    .with_alpha(one_of(rng, &[0.9, 0.99]))
                    .with_momentum(one_of(rng, &[0.0, 0.9]))
                    .with_epsilon(epsilon)
                    // Rounded to `f16`, the variance of small gradients may be negative.
                    .with_centered(!has_f16 && rng.random_bool(0.5))
                    .with_weight_decay(penalty)
                    .with_grad_clipping(clipping),
            ),
            12 => OptimizerConfiguration::AdaGrad(
                AdaGradConfig::new()
                    .with_lr_decay(one_of(rng, &[0.0, 0.1]))
                    .with_epsilon(epsilon)
                    .with_weight_decay(penalty)
                    .with_grad_clipping(clipping),
            ),
            _ => OptimizerConfiguration::Adan(
                AdanConfig::new()
                    .with_beta_3(one_of(rng, &[0.9, 0.99]))
                    .with_epsilon(epsilon)
                    .with_weight_decay(decay)
                    .with_no_prox(rng.random_bool(0.5))
                    .with_grad_clipping(clipping),
            ),
        };
        Self {
            optimizer,
            max_value,
        }
    }

    fn sharded(&self) -> ShardedOptimizer {
        with_config!(&self.optimizer, |config| sharded(config.clone()))
    }

    /// Adds the optimizer for a group of parameters.
    fn add_to(&self, optim: ShardedOptimizer, group: ParamGroup) -> ShardedOptimizer {
        with_config!(&self.optimizer, |config| optim
            .with_group(group, config.clone()))
    }
}

fn draw_momentum(rng: &mut StdRng) -> Option<MomentumConfig> {
    rng.random_bool(0.7).then(|| {
        MomentumConfig::new()
            .with_momentum(one_of(rng, &[0.5, 0.9, 0.99]))
            .with_dampening(one_of(rng, &[0.0, 0.1, 0.5]))
            .with_nesterov(rng.random_bool(0.5))
    })
}

/// Draws the parameters of a tree, at least one of which is trained. Now and then, one has several
/// chunks on each of the `ranks` that shard it by rows.
fn draw_params(rng: &mut StdRng, ranks: usize) -> Vec<PlannedParam> {
    let types = match rng.random_bool(0.2) {
        true => TYPES.to_vec(),
        // A loaded state is tested in single precision only.
        false => vec![one_of(rng, &[TYPES.as_slice(), &[DType::F32; 2]].concat())],
    };
    let count = rng.random_range(1..=6);
    let mut dims: Vec<usize> = (0..count).map(|_| rng.random_range(1..=3)).collect();
    dims.sort_unstable();
    let trained = rng.random_range(0..count);
    let long = rng.random_bool(0.125).then(|| rng.random_range(0..count));
    let mut params = Vec::new();
    for (at, &dims_of_param) in dims.iter().enumerate() {
        let before = dims[..at].iter();
        let index = before.filter(|dims| **dims == dims_of_param).count();
        let shape = match long == Some(at) {
            true => draw_long_shape(rng, dims_of_param, ranks),
            false => draw_shape(rng, dims_of_param),
        };
        let dtype = one_of(rng, &types);
        params.push(PlannedParam {
            path: format!("{}.{index}", FIELDS[dims_of_param - 1]),
            start: draw_values(rng, shape, dtype),
            is_trained: at == trained || rng.random_bool(0.85),
            placement: match rng.random_range(0..6) {
                0 => Some(Placement::Shard(dims_of_param - 1)),
                1 => Some(Placement::Replicate),
                _ => None,
            },
        });
    }
    params
}

/// Draws a shape of few elements, rarely of none.
fn draw_shape(rng: &mut StdRng, dims: usize) -> Vec<usize> {
    let lengths = match dims {
        3 => &LENGTHS[..5],
        _ => &LENGTHS[..],
    };
    let length = |_| match rng.random_bool(0.03) {
        true => 0,
        false => one_of(rng, lengths),
    };
    (0..dims).map(length).collect()
}

/// Draws a shape whose rows, shared by so many ranks, have more than one chunk on each.
fn draw_long_shape(rng: &mut StdRng, dims: usize, ranks: usize) -> Vec<usize> {
    let count = CHUNK * ranks + rng.random_range(100..2000);
    match dims {
        1 => vec![count],
        2 => vec![count.div_ceil(7), 7],
        _ => vec![count.div_ceil(6), 2, 3],
    }
}

/// Draws values of many magnitudes, and zeros. Their squares are finite in `f16`, too.
fn draw_values(rng: &mut StdRng, shape: Vec<usize>, dtype: DType) -> TensorData {
    let exponents = match dtype {
        DType::F16 => -3..1,
        _ => -6..3,
    };
    let value = |_| match rng.random_range(0..20) {
        0 => 0.0,
        _ => rng.random_range(-1.0..1.0) * 10f64.powi(rng.random_range(exponents.clone())),
    };
    let count = shape.iter().product();
    let drawn: Vec<f64> = (0..DRAWN.min(count)).map(value).collect();
    let values: Vec<f64> = drawn.iter().copied().cycle().take(count).collect();
    TensorData::new(values, shape).convert_dtype(dtype)
}

/// Draws a learning rate, sometimes 0.
fn draw_learning_rate(rng: &mut StdRng) -> f64 {
    match rng.random_bool(0.1) {
        true => 0.0,
        false => 10f64.powf(rng.random_range(-5.0..-0.3)),
    }
}

fn one_of<T: Clone>(rng: &mut StdRng, values: &[T]) -> T {
    values[rng.random_range(0..values.len())].clone()
}

/// Creates a tensor of the data's type. Without elements, the data may not be aligned for it.
fn tensor<const D: usize>(data: &TensorData, device: &Device) -> Tensor<D> {
    let options = (device, data.dtype());
    match data.num_elements() {
        0 => Tensor::zeros(data.shape().clone(), options),
        _ => Tensor::from_data(data.clone(), options),
    }
}

/// Returns the elements in double precision, which every element type converts to without a loss.
fn elements(data: &TensorData) -> Vec<f64> {
    match data.num_elements() {
        0 => Vec::new(),
        _ => data.iter::<f64>().collect(),
    }
}

/// Describes where the bits of two tensors differ; `None` if they are equal. Any NaN equals any
/// other: which one results is not defined.
fn differing(found: &TensorData, expected: &TensorData) -> Option<String> {
    let kinds = [found, expected].map(|data| (data.shape().to_vec(), data.dtype()));
    if kinds[0] != kinds[1] {
        return Some(format!("it is {:?}, not {:?}", kinds[0], kinds[1]));
    }
    if found.as_bytes() == expected.as_bytes() {
        return None;
    }
    let pairs = elements(found).into_iter().zip(elements(expected));
    let mut differing = pairs.enumerate().filter(|(_, (found, expected))| {
        found.to_bits() != expected.to_bits() && !(found.is_nan() && expected.is_nan())
    });
    let (at, (found, expected)) = differing.next()?;
    let more = differing.count();
    Some(format!(
        "element {at} is {found:e}, not {expected:e}, and {more} more differ"
    ))
}
