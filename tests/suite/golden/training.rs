//! Kind 4: training runs, sharded, against PyTorch's losses, checksums and collective counts.

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;

use burn::module::{Module, ModuleVisitor, Param};
use burn::optim::{AdamWConfig, GradientsParams};
use burn::tensor::{Device, Int, Tensor, TensorData};
use burn_dtensor::Result;
use burn_dtensor::comm::{Launch, Op, World, launch};
use burn_dtensor::fsdp::{
    FullyShard, NormType, ParamInfo, ReshardAfterForward, clip_grad_norm, full_model, fully_shard,
};
use burn_dtensor::mesh::DeviceMesh;
use burn_dtensor::parallel::{Plan, parallelize};
use burn_dtensor::placement::Placement;
use serde::Deserialize;
use serde_json::Value;

use crate::fsdp::support::furthest;
use crate::models::{Gpt, GptSize, Init, Mlp, plan};

#[derive(Deserialize)]
struct Golden {
    config: Config,
    mlp_dims: Vec<usize>,
    optimizer: AdamW,
    init: HashMap<String, HashMap<String, Array>>,
    gpt_inputs: Array,
    gpt_targets: Array,
    mlp_inputs: Array,
    mlp_targets: Array,
    runs: BTreeMap<String, Run>,
}

#[derive(Deserialize)]
struct Config {
    layers: usize,
    heads: usize,
}

#[derive(Deserialize)]
struct AdamW {
    lr: f64,
    betas: [f32; 2],
    eps: f32,
    weight_decay: f32,
}

#[derive(Deserialize, Clone)]
pub struct Array {
    pub shape: Vec<usize>,
    pub data: Vec<f64>,
}

impl Array {
    fn floats(&self) -> TensorData {
        TensorData::new(self.data.iter().map(|x| *x as f32).collect(), self.shape.clone())
    }

    /// Row block `rows` of step `step`; the leading dimension is the step.
    fn batch(&self, step: usize, rows: Range<usize>) -> (Vec<f64>, Vec<usize>) {
        let row: usize = self.shape[2..].iter().product();
        let start = step * self.shape[1] * row;
        let data = self.data[start + rows.start * row..start + rows.end * row].to_vec();
        let shape = [&[rows.len()], &self.shape[2..]].concat();
        (data, shape)
    }
}

#[derive(Deserialize, Clone)]
struct Run {
    ws: usize,
    par: String,
    model: String,
    mesh: Option<Vec<usize>>,
    #[serde(default)]
    losses: Vec<f64>,
    #[serde(default)]
    final_checksums: BTreeMap<String, [f64; 2]>,
    #[serde(default)]
    final_weights: BTreeMap<String, Array>,
    #[serde(default)]
    comm_step1: BTreeMap<String, u64>,
    #[serde(default)]
    local_shapes: Vec<BTreeMap<String, Vec<usize>>>,
    #[serde(default)]
    grad_norms: Vec<f64>,
    grad_local_step0: Option<Vec<BTreeMap<String, Array>>>,
    clip: Option<f64>,
    acc: Option<usize>,
    spf: Option<String>,
    raf: Option<Value>,
    #[serde(flatten)]
    rest: BTreeMap<String, Value>,
}

impl Init for HashMap<String, Array> {
    fn data(&self, path: &str) -> TensorData {
        self[path].floats()
    }
}

/// Key of the tied GPT's initial values.
const TIED: &str = "gpt_tied";

impl Golden {
    fn read() -> Self {
        let mut golden: Self = super::read("4_training.json");
        if let Some(tied) = super::tied::init(&golden.init["gpt"]) {
            golden.init.insert(TIED.into(), tied);
        }
        golden
    }
}

impl Run {
    fn is(&self, key: &str) -> bool {
        self.rest.get(key).and_then(Value::as_bool) == Some(true)
    }

    fn is_tied(&self) -> bool {
        self.is("tied")
    }

    /// The mesh dimensions.
    fn dims(&self) -> &'static [&'static str] {
        match self.par.as_str() {
            "none" => &[],
            "fsdp" => &["shard"],
            "hsdp" => &["replicate", "shard"],
            "tp" => &["tp"],
            "fsdp_tp" => &["shard", "tp"],
            "hsdp_tp" => &["replicate", "shard", "tp"],
            other => panic!("unknown parallelism {other}"),
        }
    }

    fn is_tensor_parallel(&self) -> bool {
        self.dims().contains(&"tp")
    }

    /// The same run without sharding. Recorded unless torch fails.
    fn baseline(&self) -> String {
        let model = if self.is_tied() { TIED } else { &self.model };
        let clip = self.clip.map_or(String::new(), |clip| format!("clip{clip}_"));
        let recorded = self.rest.get("baseline").and_then(Value::as_str).map(Into::into);
        recorded.unwrap_or_else(|| format!("{model}/{clip}unsharded"))
    }
}

/// What a run needs that this suite does not cover, if anything.
fn left_out(golden: &Golden, run: &Run) -> Option<&'static str> {
    let has = |key: &str| run.rest.get(key).is_some_and(|value| !value.is_null());
    if has("mp") {
        return Some("mixed precision");
    }
    if has("divf") || has("force_sum") {
        return Some("gradient divide factor");
    }
    if has("nosync") || has("noar") || has("norb") {
        return Some("accumulation without synchronization");
    }
    if run.is_tied() && !golden.init.contains_key(TIED) {
        return Some("tied weights: the initial values are not recorded");
    }
    if has("torch_error") && !golden.runs.contains_key(&run.baseline()) {
        return Some("torch has no values");
    }
    None
}

fn size(golden: &Golden, run: &Run) -> GptSize {
    GptSize { layers: golden.config.layers, heads: golden.config.heads, tied: run.is_tied() }
}

/// A model of the goldens, with its batches.
trait Task: Module + Sync + 'static {
    fn build(golden: &Golden, run: &Run, device: &Device) -> Self;
    /// The loss of some rows of a batch, on the tensor-parallel ranks together if there are any.
    fn loss(
        &self,
        golden: &Golden,
        step: usize,
        rows: Range<usize>,
        tensor: Option<&DeviceMesh>,
        device: &Device,
    ) -> Result<Tensor<1>>;
    fn plan(golden: &Golden, run: &Run) -> Plan;
    fn batch(golden: &Golden) -> usize;
}

impl Task for Gpt {
    fn build(golden: &Golden, run: &Run, device: &Device) -> Self {
        let size = size(golden, run);
        Gpt::new(&golden.init[if size.tied { TIED } else { "gpt" }], size, device)
    }

    fn loss(
        &self,
        golden: &Golden,
        step: usize,
        rows: Range<usize>,
        tensor: Option<&DeviceMesh>,
        device: &Device,
    ) -> Result<Tensor<1>> {
        let ints = |array: &Array| {
            let (data, shape) = array.batch(step, rows.clone());
            let data: Vec<i64> = data.into_iter().map(|x| x as i64).collect();
            Tensor::<2, Int>::from_data(TensorData::new(data, shape), device)
        };
        let (inputs, targets) = (ints(&golden.gpt_inputs), ints(&golden.gpt_targets));
        match tensor {
            Some(mesh) => self.loss_on(mesh, inputs, targets),
            None => Ok(Gpt::loss(self, inputs, targets)),
        }
    }

    fn plan(golden: &Golden, run: &Run) -> Plan {
        plan(size(golden, run), run.is("sp"), run.is("lossp"))
    }

    fn batch(golden: &Golden) -> usize {
        golden.gpt_inputs.shape[1]
    }
}

impl Task for Mlp {
    fn build(golden: &Golden, _: &Run, device: &Device) -> Self {
        Mlp::new(&golden.init["mlp"], golden.mlp_dims.len() - 1, device)
    }

    fn loss(
        &self,
        golden: &Golden,
        step: usize,
        rows: Range<usize>,
        _: Option<&DeviceMesh>,
        device: &Device,
    ) -> Result<Tensor<1>> {
        let floats = |array: &Array| {
            let (data, shape) = array.batch(step, rows.clone());
            let data: Vec<f32> = data.into_iter().map(|x| x as f32).collect();
            Tensor::<2>::from_data(TensorData::new(data, shape), device)
        };
        Ok(Mlp::loss(self, floats(&golden.mlp_inputs), floats(&golden.mlp_targets)))
    }

    fn plan(_: &Golden, run: &Run) -> Plan {
        panic!("no plan for an mlp, {}", run.par)
    }

    fn batch(golden: &Golden) -> usize {
        golden.mlp_inputs.shape[1]
    }
}

/// Flat values of every parameter (or gradient), by path.
#[derive(Default)]
struct Values<'a> {
    path: Vec<String>,
    grads: Option<&'a GradientsParams>,
    shapes: BTreeMap<String, Vec<usize>>,
    values: BTreeMap<String, Vec<f32>>,
}

impl ModuleVisitor for Values<'_> {
    fn enter_module(&mut self, name: &str, _: &str) {
        self.path.push(name.into());
    }

    fn exit_module(&mut self, _: &str, _: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let tensor = match self.grads {
            Some(grads) => grads.get::<D>(param.id).expect("every parameter has a gradient"),
            None => param.base(),
        };
        let path = self.path.join(".");
        self.shapes.insert(path.clone(), tensor.dims().to_vec());
        self.values.insert(path, tensor.into_data().try_to_vec().unwrap());
    }
}

fn values<M: Module>(
    module: &M,
    grads: Option<&GradientsParams>,
) -> (BTreeMap<String, Vec<usize>>, BTreeMap<String, Vec<f32>>) {
    let mut values = Values { grads, ..Default::default() };
    module.visit(&mut values);
    (values.shapes, values.values)
}

/// What one rank saw.
struct Trained {
    losses: Vec<f64>,
    norms: Vec<f64>,
    weights: BTreeMap<String, Vec<f32>>,
    local_shapes: BTreeMap<String, Vec<usize>>,
    first_grads: BTreeMap<String, Vec<f32>>,
    counts: BTreeMap<String, u64>,
}

/// The mesh dimensions that share the batch, and those that share the layers.
fn meshes(world: &World, run: &Run) -> Result<(Option<DeviceMesh>, Option<DeviceMesh>)> {
    let dims = run.dims();
    if dims.is_empty() {
        return Ok((None, None));
    }
    let shape = run.mesh.as_ref().expect("a parallel run has a mesh");
    let mesh = DeviceMesh::new(world, shape, dims)?;
    let data: Vec<&str> = dims.iter().copied().filter(|dim| *dim != "tp").collect();
    let data = if data.is_empty() { None } else { Some(mesh.slice(data)?) };
    Ok((data, if run.is_tensor_parallel() { Some(mesh.slice("tp")?) } else { None }))
}

/// PyTorch's `reshard_after_forward`.
pub fn reshard(raf: &Value) -> ReshardAfterForward {
    match raf {
        Value::Null => ReshardAfterForward::Auto,
        Value::Bool(true) => ReshardAfterForward::Always,
        Value::Bool(false) => ReshardAfterForward::Never,
        ranks => ReshardAfterForward::Ranks(ranks.as_u64().expect("a number of ranks") as usize),
    }
}

fn config(run: &Run) -> FullyShard {
    let reshard = run.raf.as_ref().map_or(ReshardAfterForward::Auto, reshard);
    let config = FullyShard::new().units(["layers.*"]).reshard_after_forward(reshard);
    let ranks = run.mesh.as_ref().and_then(|mesh| mesh.last().copied()).unwrap_or(1);
    match run.spf.as_deref() {
        None => config,
        Some("S1") => {
            config.shard_placement_fn(|param: ParamInfo| (param.shape.len() > 1).then_some(Placement::Shard(1)))
        }
        Some("S1even") => config.shard_placement_fn(move |param: ParamInfo| {
            (param.shape.len() > 1 && param.shape[1].is_multiple_of(ranks)).then_some(Placement::Shard(1))
        }),
        Some(other) => panic!("unknown shard-placement function {other}"),
    }
}

fn train<M: Task>(golden: &Golden, run: &Run, world: &World) -> Result<Trained> {
    let device = world.device().clone().autodiff();
    let mut model = M::build(golden, run, &device);
    let (data, tensor) = meshes(world, run)?;
    if let Some(mesh) = &tensor {
        model = parallelize(model, mesh, M::plan(golden, run))?;
    }
    if let Some(mesh) = &data {
        model = fully_shard(model, mesh, config(run))?;
    }
    let local_shapes = values(&model, None).0;
    let AdamW { lr, betas, eps, weight_decay } = golden.optimizer;
    let mut optim = AdamWConfig::new()
        .with_beta_1(betas[0])
        .with_beta_2(betas[1])
        .with_epsilon(eps)
        .with_weight_decay(weight_decay)
        .init();
    let steps = match run.losses.len() {
        0 => golden.gpt_inputs.shape[0],
        steps => steps,
    };
    let sharing = tensor.as_ref().map_or(1, DeviceMesh::size);
    let rows = M::batch(golden) * sharing / run.ws;
    let first = world.rank() / sharing * rows;
    let acc = run.acc.unwrap_or(1);
    let mut trained = Trained {
        losses: vec![],
        norms: vec![],
        weights: BTreeMap::new(),
        local_shapes,
        first_grads: BTreeMap::new(),
        counts: BTreeMap::new(),
    };
    for step in 0..steps {
        world.ledger().reset();
        let mut accumulator = burn::optim::GradientsAccumulator::new();
        let mut total = 0.0;
        for micro in 0..acc {
            let size = rows / acc;
            let start = first + micro * size;
            let loss = model.loss(golden, step, start..start + size, tensor.as_ref(), &device)? / acc as f64;
            total += loss.clone().into_scalar::<f32>() as f64;
            let grads = GradientsParams::from_grads(loss.backward(), &model);
            accumulator.accumulate(&model, grads);
        }
        let mut grads = accumulator.grads();
        if step == 0 {
            trained.first_grads = values(&model, Some(&grads)).1;
        }
        if step == 1 {
            let ledger = world.ledger();
            trained.counts = [
                ("_allgather_base_", Op::AllGather),
                ("_reduce_scatter_base_", Op::ReduceScatter),
                ("allreduce_", Op::AllReduce),
            ]
            .into_iter()
            .map(|(name, op)| (name.to_string(), ledger.calls(op)))
            .filter(|(_, calls)| *calls > 0)
            .collect();
        }
        if let Some(max_norm) = run.clip {
            trained.norms.push(clip_grad_norm(&model, &mut grads, max_norm, NormType::L2)?);
        }
        model = optim.step(lr, model, grads);
        trained.losses.push(total);
    }
    trained.weights = values(&full_model(&model)?, None).1;
    Ok(trained)
}

fn check(golden: &Golden, name: &str, run: &Run, trained: &[Trained]) {
    let baseline = golden.runs.get(&run.baseline());
    // A run that torch refuses is held to the one without sharding.
    let values = if run.rest.contains_key("torch_error") { baseline.expect("not left out") } else { run };
    for (step, expected) in values.losses.iter().enumerate() {
        let loss = trained.iter().map(|rank| rank.losses[step]).sum::<f64>() / trained.len() as f64;
        assert!((loss - expected).abs() < 2e-5, "{name}: loss of step {step} is {loss}, torch has {expected}");
    }
    for (step, expected) in values.grad_norms.iter().enumerate() {
        for rank in trained {
            let norm = rank.norms[step];
            assert!(
                (norm - expected).abs() < 1e-4 * expected,
                "{name}: norm of step {step} is {norm}, torch has {expected}"
            );
        }
    }
    for rank in trained {
        assert_eq!(rank.weights, trained[0].weights, "{name}: every rank gathers the same model");
    }
    for (path, [sum, squares]) in &values.final_checksums {
        // Torch's ranks have learned each a part of it.
        if run.is("sp") && path == "pos.weight" {
            continue;
        }
        let weights = &trained[0].weights[path];
        let got_sum: f64 = weights.iter().map(|x| *x as f64).sum();
        let got_squares: f64 = weights.iter().map(|x| (*x as f64).powi(2)).sum();
        let bound = 1e-5 * weights.len() as f64;
        assert!((got_sum - sum).abs() < bound, "{name}: sum of {path} is {got_sum}, torch has {sum}");
        assert!(
            (got_squares - squares).abs() < bound,
            "{name}: squares of {path} are {got_squares}, torch has {squares}"
        );
    }
    // Runs that only count collectives take fewer steps.
    let baseline = baseline.filter(|baseline| values.losses.len() == baseline.losses.len());
    for (path, expected) in [Some(run), baseline].into_iter().flatten().flat_map(|run| &run.final_weights) {
        let expected = expected.floats().try_to_vec::<f32>().unwrap();
        let diff = furthest(&trained[0].weights[path], &expected);
        assert!(diff < 1e-4, "{name}: {path} differs from torch by {diff}");
    }
    let calls = |counts: &BTreeMap<String, u64>| counts.values().sum::<u64>();
    if run.is_tensor_parallel() {
        let (ours, theirs) = (&trained[0].counts, &run.comm_step1);
        println!("{name}: {} collectives a step: {ours:?}; torch {}: {theirs:?}", calls(ours), calls(theirs));
        assert!(theirs.is_empty() || calls(ours) <= calls(theirs), "{name}: {ours:?}, torch {theirs:?}");
    } else if !run.comm_step1.is_empty() {
        assert_eq!(trained[0].counts, run.comm_step1, "{name}: collectives of one step");
    }
    for (rank, shapes) in run.local_shapes.iter().enumerate() {
        assert_eq!(&trained[rank].local_shapes, shapes, "{name}: shards of rank {rank}");
    }
    for (rank, grads) in run.grad_local_step0.iter().flatten().enumerate() {
        for (path, expected) in grads {
            let diff = furthest(&trained[rank].first_grads[path], &expected.floats().try_to_vec::<f32>().unwrap());
            assert!(diff < 1e-5, "{name}: first gradient of {path} on rank {rank} differs by {diff}");
        }
    }
}

/// Number of runs that passed, and those left out by reason.
type Totals = (usize, BTreeMap<&'static str, Vec<String>>);

fn run_all(wanted: impl Fn(&str, &Run) -> bool) -> Totals {
    run_these(&Golden::read(), wanted)
}

fn run_these(golden: &Golden, wanted: impl Fn(&str, &Run) -> bool) -> Totals {
    let mut passed = 0;
    let mut left = BTreeMap::<_, Vec<_>>::new();
    for (name, run) in &golden.runs {
        if !wanted(name, run) {
            continue;
        }
        if let Some(reason) = left_out(golden, run) {
            left.entry(reason).or_default().push(name.clone());
            continue;
        }
        let trained = launch(Launch::threads(run.ws), |world| match run.model.as_str() {
            "gpt" => train::<Gpt>(golden, run, world),
            "mlp" => train::<Mlp>(golden, run, world),
            other => panic!("unknown model {other}"),
        });
        check(golden, name, run, &trained.unwrap_or_else(|error| panic!("{name}: {error}")));
        passed += 1;
    }
    (passed, left)
}

#[test]
fn golden_training_unsharded() {
    let (passed, _) = run_all(|_, run| run.par == "none");
    assert!(passed > 0);
}

#[test]
fn golden_training_fully_shard() {
    let (passed, left) = run_all(|name, run| {
        run.par != "none" && !run.is_tensor_parallel() && !name.contains("/comm_") && run.clip.is_none()
    });
    println!("{passed} runs; left out: {left:#?}");
    assert!(passed > 0);
}

#[test]
fn golden_training_tensor_parallel() {
    let (passed, left) = run_all(|_, run| run.is_tensor_parallel() && run.clip.is_none());
    println!("{passed} runs; left out: {left:#?}");
    assert!(passed > 0);
}

/// Torch has no tied run that is tensor parallel: they are held to the tied run without sharding.
#[test]
fn golden_training_tensor_parallel_tied() {
    let mut golden = Golden::read();
    let recorded = golden.runs.iter().filter(|(_, run)| run.is_tensor_parallel() && left_out(&golden, run).is_none());
    let tie = |(name, run): (&String, &Run)| {
        let recorded = ["torch_error", "tied"].map(|key| (key.to_string(), Value::Bool(true)));
        let rest =
            run.rest.iter().filter(|(key, _)| *key != "baseline").map(|(key, value)| (key.clone(), value.clone()));
        let run = Run {
            losses: vec![],
            grad_norms: vec![],
            final_checksums: BTreeMap::new(),
            comm_step1: BTreeMap::new(),
            local_shapes: vec![],
            clip: None,
            rest: rest.chain(recorded).collect(),
            ..run.clone()
        };
        (format!("{name}, tied"), run)
    };
    let tied: Vec<_> = recorded.filter(|(_, run)| run.clip.is_none()).map(tie).collect();
    let names: Vec<_> = tied.iter().map(|(name, _)| name.clone()).collect();
    golden.runs.extend(tied);
    let (passed, left) = run_these(&golden, |name, _| names.iter().any(|tied| tied == name));
    println!("{passed} runs; left out: {left:#?}");
    assert_eq!(passed, if golden.init.contains_key(TIED) { names.len() } else { 0 });
}

#[test]
fn golden_training_clip_grad_norm() {
    let (passed, left) = run_all(|_, run| run.clip.is_some());
    println!("{passed} runs; left out: {left:#?}");
    assert!(passed > 0);
}

#[test]
fn golden_training_collective_counts() {
    let (passed, _) = run_all(|name, _| name.contains("/comm_"));
    println!("{passed} runs");
    assert!(passed > 0);
}
