//! Random models and tensors, saved on one mesh and loaded on another: they must be equal to the bit.
//!
//! Floats of four dtypes, integers and booleans, with 1 to 4 dimensions, uneven and often smaller than the number of ranks;
//! meshes of 1 to 3 dimensions with `fully_shard`, `parallelize`, both in both orders, replicas, experts, explicit and
//! balanced shard sizes, ignored and offloaded parameters, and ordinary models; several optimizers. Beside models, DTensors
//! in any layout, also with other shard orders, and with several mesh dimensions that shard one dimension.
//!
//! What is loaded is compared with full values that were gathered before the save, by collectives: the full model, each
//! rank's shard of it, and the full state of the optimizer.
//!
//! `ROUND_TRIPS` says how many to run, `ROUND_TRIPS_FROM` the first seed. A failing case is printed.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;
use std::time::Duration;

use burn::optim::momentum::MomentumConfig;
use burn::optim::{AdaGradConfig, AdamWConfig, AdanConfig, LionConfig, RmsPropConfig, SgdConfig};
use burn::tensor::{Bool, BoolStore, DType, Device, Float, Int, TensorData};
use burn_dtensor::checkpoint::{self, Checkpoint, LoadOptions, ReadOptions, State, StateDict};
use burn_dtensor::dtensor::DynDTensor;
use burn_dtensor::optim::{FullOptimizerState, ShardedOptimizer, sharded};
use burn_dtensor::prelude::*;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use super::folder::Folder;
use super::random_net::{INTS, NetPlan, data, grads, values};
use super::sharding::Sharding;
use crate::random_programs::{layouts, setting};

/// Number of cases where the environment does not say.
const ROUND_TRIPS: u64 = 300;

/// A round trip takes milliseconds.
const DEADLINE: Duration = Duration::from_secs(20);

/// A round trip.
#[derive(Debug, Clone)]
struct Case {
    seed: u64,
    net: NetPlan,
    /// The optimizer and its number of steps.
    optimizer: Option<(usize, u64)>,
    tensors: Vec<TensorPlan>,
    save: Sharding,
    load: Sharding,
    has_autodiff: bool,
    /// Memory for reads. At the least there is room for one tensor at a time.
    memory: usize,
}

/// A DTensor apart from the model.
#[derive(Debug, Clone)]
struct TensorPlan {
    shape: Vec<usize>,
    dtype: DType,
    save: Layout,
    load: Layout,
}

/// Full values, gathered before they are saved.
#[derive(Debug)]
struct Expected {
    model: BTreeMap<String, TensorData>,
    optimizer: FullOptimizerState,
}

impl Case {
    /// Draws a case, both meshes of which have `ranks` ranks if that is given.
    fn draw(seed: u64, ranks: Option<usize>) -> Self {
        let mut rng = StdRng::seed_from_u64(seed);
        let (save, load) = (Sharding::draw(&mut rng, ranks), Sharding::draw(&mut rng, ranks));
        // An optimizer has no state by path of parameters that are not distributed.
        let has_state = |sharding: &Sharding| !sharding.is_ordinary() && !sharding.ignores;
        let has_optimizer = rng.random_bool(0.6) && has_state(&save) && has_state(&load);
        let tensors =
            (0..rng.random_range(0..=2)).map(|_| TensorPlan::draw(&mut rng, &save.sizes, &load.sizes)).collect();
        Self {
            seed,
            net: NetPlan::draw(&mut rng),
            optimizer: has_optimizer.then(|| (rng.random_range(0..OPTIMIZERS.len()), rng.random_range(1..=2))),
            tensors,
            save,
            load,
            has_autodiff: has_optimizer || rng.random(),
            memory: if rng.random() { 1 << 30 } else { 1 },
        }
    }

    fn device(&self, world: &World) -> Device {
        if self.has_autodiff { world.device().clone().autodiff() } else { world.device().clone() }
    }

    fn optimizer(&self) -> ShardedOptimizer {
        OPTIMIZERS[self.optimizer.map_or(0, |(index, _)| index)]()
    }

    fn tensor(&self, index: usize) -> TensorData {
        let TensorPlan { shape, dtype, .. } = &self.tensors[index];
        data(&mut StdRng::seed_from_u64(self.seed ^ (index as u64 + 1)), shape, *dtype, true)
    }

    /// Saves on every rank of the first mesh.
    fn save(&self, world: &World, folder: &Path) -> Result<Expected> {
        let mesh = self.save.mesh(world)?;
        // Optimizers may make other bits of NaNs on one rank than on another.
        let net = self.net.build(self.seed, self.optimizer.is_none(), &self.device(world));
        let (mut net, mut optimizer) = (self.save.distribute(net, &mesh)?, self.optimizer());
        for step in 0..self.optimizer.map_or(0, |(_, steps)| steps) {
            let grads = grads(&net, step);
            net = optimizer.step(0.05, net, grads)?;
        }
        let optimizer = optimizer.state(&net)?;
        let expected = Expected { model: values(&full_model(&net)?), optimizer: optimizer.full()? };
        let mut state = State::new(&mesh).with_step(self.seed);
        state = state.with_model("model", &net)?.with_optimizer("optimizer", &optimizer)?;
        for (index, plan) in self.tensors.iter().enumerate() {
            state =
                state.with_tensor(&format!("tensor{index}"), distributed(self.tensor(index), &mesh, &plan.save)?)?;
        }
        checkpoint::save(folder, &state)?;
        Ok(expected)
    }

    /// Loads on every rank of the second mesh, and compares.
    fn load(&self, world: &World, folder: &Path, expected: &Expected) -> Result<()> {
        let mesh = self.load.mesh(world)?;
        let checkpoint = Checkpoint::open(folder, &mesh)?;
        let checkpoint = checkpoint.with_read_options(ReadOptions::new().with_memory(self.memory));
        assert_eq!(checkpoint.step(), Some(self.seed));

        let net = self.load.distribute(self.net.build(!self.seed, true, &self.device(world)), &mesh)?;
        let (net, report) = checkpoint.load_model("model", net, &LoadOptions::new())?;
        assert!(report.loaded.iter().eq(expected.model.keys()), "{report:?}");
        for (path, tensor) in StateDict::of_model(&net, &mesh)?.tensors() {
            assert_eq!(tensor.local_data(), shard(&expected.model[path], tensor), "shard of `{path}`");
        }
        assert_eq!(values(&full_model(&net)?), expected.model);

        let state = checkpoint.load_optimizer("optimizer", &net)?;
        assert_eq!(state.full()?, expected.optimizer);
        // burn loads an optimizer's state in one dtype.
        if expected.optimizer.tensors.values().all(|data| data.dtype() == DType::F32) {
            let optimizer = self.optimizer().load_state(&net, state)?;
            assert_eq!(optimizer.state(&net)?.full()?, expected.optimizer);
        }

        for (index, plan) in self.tensors.iter().enumerate() {
            let zeros = TensorData::from_bytes_vec(
                vec![0; self.tensor(index).as_bytes().len()],
                plan.shape.clone(),
                plan.dtype,
            );
            let loaded = load_tensor(&checkpoint, &format!("tensor{index}"), &distributed(zeros, &mesh, &plan.load)?)?;
            assert_eq!(loaded.spec().layout(), &plan.load);
            assert_eq!(loaded.local_data(), shard(&self.tensor(index), &loaded), "shard of tensor {index}");
            assert_eq!(loaded.full_data()?, self.tensor(index));
        }
        Ok(())
    }

    /// Describes what is wrong, if anything is.
    fn fails(&self, folder: &Path) -> Option<String> {
        let threads = |sharding: &Sharding| Launch::threads(sharding.ranks()).with_deadline(DEADLINE);
        let saved = match launch(threads(&self.save), |world| self.save(world, folder)) {
            Ok(saved) => saved,
            Err(error) => return Some(error.to_string()),
        };
        let expected = &saved[0].1;
        launch(threads(&self.load), |world| self.load(world, folder, expected)).err().map(|error| error.to_string())
    }
}

impl TensorPlan {
    fn draw(rng: &mut StdRng, save: &[usize], load: &[usize]) -> Self {
        let shape: Vec<_> = (0..rng.random_range(1..=4)).map(|_| rng.random_range(1..=9)).collect();
        let dtypes = [DType::F32, DType::F64, DType::F16, DType::BF16, DType::Bool(BoolStore::Native)];
        let dtypes = [&dtypes[..], &INTS].concat();
        let mut layout = |mesh: &[usize]| {
            let layout = layouts::unreduced(rng, mesh, shape.len());
            layouts::uneven(layout, &shape, rng.random())
        };
        let (save, load) = (layout(save), layout(load));
        Self { dtype: dtypes[rng.random_range(0..dtypes.len())], shape, save, load }
    }
}

const OPTIMIZERS: [fn() -> ShardedOptimizer; 7] = [
    || sharded(AdamWConfig::new()),
    || sharded(AdamWConfig::new().with_amsgrad(true)),
    || sharded(SgdConfig::new().with_momentum(Some(MomentumConfig::new()))),
    || sharded(RmsPropConfig::new().with_centered(true)),
    || sharded(AdanConfig::new()),
    || sharded(AdaGradConfig::new()),
    || sharded(LionConfig::new()),
];

/// Distributes a full tensor that every rank has.
fn distributed(full: TensorData, mesh: &DeviceMesh, layout: &Layout) -> Result<DynDTensor> {
    let full = StateDict::from_full([("tensor".into(), full)], mesh)?;
    let (_, tensor) = full.tensors().next().expect("it has one");
    tensor.clone().redistribute_to(layout)
}

fn load_tensor(checkpoint: &Checkpoint, key: &str, like: &DynDTensor) -> Result<DynDTensor> {
    fn load<const D: usize>(checkpoint: &Checkpoint, key: &str, like: &DynDTensor) -> Result<DynDTensor> {
        if let Some(like) = like.dtensor::<D, Float>() {
            return Ok(checkpoint.load_tensor(key, &like)?.into());
        }
        if let Some(like) = like.dtensor::<D, Int>() {
            return Ok(checkpoint.load_tensor(key, &like)?.into());
        }
        Ok(checkpoint.load_tensor(key, &like.dtensor::<D, Bool>().expect("one of three kinds"))?.into())
    }
    match like.spec().shape().num_dims() {
        1 => load::<1>(checkpoint, key, like),
        2 => load::<2>(checkpoint, key, like),
        3 => load::<3>(checkpoint, key, like),
        _ => load::<4>(checkpoint, key, like),
    }
}

/// Returns a rank's shard of the full data, element by element.
fn shard(full: &TensorData, tensor: &DynDTensor) -> TensorData {
    let spec = tensor.spec();
    let slices: Vec<Range<usize>> = (0..full.shape().num_dims()).map(|dim| spec.local_range(dim)).collect();
    let positions = slices.iter().zip(full.shape().iter()).fold(vec![0], |outer, (slice, len)| {
        outer.iter().flat_map(|&outer| slice.clone().map(move |at| outer * len + at)).collect()
    });
    let size = full.dtype().size();
    let bytes = positions.into_iter().flat_map(|at: usize| &full.as_bytes()[at * size..(at + 1) * size]);
    let shape: Vec<_> = slices.iter().map(ExactSizeIterator::len).collect();
    TensorData::from_bytes_vec(bytes.copied().collect(), shape, full.dtype())
}

#[test]
fn what_is_saved_on_one_mesh_is_loaded_on_another_to_the_bit() {
    let default = if crate::is_smoke() { ROUND_TRIPS / 10 } else { ROUND_TRIPS };
    let (first, count) = (setting("ROUND_TRIPS_FROM", 0), setting("ROUND_TRIPS", default));
    println!("round trips {first}..{}", first + count);
    let mut failures = Vec::new();
    let folder = Folder::new("round-trips");
    for seed in first..first + count {
        let case = Case::draw(seed, None);
        let folder = folder.join(seed.to_string());
        if let Some(how) = case.fails(&folder) {
            println!("{case:#?}\n// seed {seed}: {how}\n");
            failures.push(seed);
        }
        let _ = std::fs::remove_dir_all(folder);
    }
    assert!(failures.is_empty(), "round trips of seeds {failures:?} failed");
}

/// Saved and loaded by the same processes, on two meshes.
#[cfg(feature = "mpi")]
#[test]
fn processes_load_what_processes_saved_to_the_bit() {
    use burn_dtensor::testing::ProcessTest;

    for (processes, ranks) in [(2, 2), (2, 4), (3, 3), (4, 4)] {
        let text = ProcessTest::new(processes).run(|| {
            let folder = Folder::of_all("round-trips");
            let round_trips = |world: &World| {
                for seed in 0..5 {
                    let case = Case::draw(seed, Some(ranks));
                    let folder = folder.join(seed.to_string());
                    case.load(world, &folder, &case.save(world, &folder)?)?;
                }
                Ok(())
            };
            launch(Launch::from_env(ranks).unwrap().with_deadline(DEADLINE), round_trips)
                .unwrap_or_else(|error| panic!("{error}"));
            println!("5 round trips");
        });
        let Some(text) = text else { return };
        assert_eq!(text.matches("5 round trips").count(), processes, "{text}");
    }
}
