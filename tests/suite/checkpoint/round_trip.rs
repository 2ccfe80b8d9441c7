//! Random models and tensors, saved on one mesh and loaded on another: they must be equal to the
//! bit.
//!
//! Floats of four dtypes, integers and booleans, with 1 to 4 dimensions, uneven and often smaller
//! than the number of ranks; meshes of 1 to 3 dimensions with `fully_shard`, `parallelize`, both in
//! both orders, replicas, experts, explicit and balanced shard sizes, ignored and offloaded
//! parameters, and ordinary models; several optimizers. Next to models, DTensors in any layout,
//! also with other shard orders, and with several mesh dimensions that shard one dimension.
//!
//! What is loaded is compared with full values that were gathered before the save, by collectives:
//! the full model, each rank's shard of it, and the full state of the optimizer.
//!
//! `ROUND_TRIPS` says how many to run, `ROUND_TRIPS_FROM` the first seed. A failing case is
//! printed.

use std::collections::BTreeMap;
use std::fs;
use std::ops::Range;
use std::path::Path;
use std::time::Duration;

use burn::module::Module;
use burn::nn::BatchNormConfig;
use burn::optim::momentum::MomentumConfig;
use burn::optim::{AdaGradConfig, AdamWConfig, AdanConfig, LionConfig, RmsPropConfig, SgdConfig};
use burn::tensor::{Bool, BoolStore, DType, Device, Float, Int, Tensor, TensorData};
use burn_dtensor::checkpoint::{self, Checkpoint, LoadOptions, ReadOptions, State, StateDict};
use burn_dtensor::dtensor::DynDTensor;
use burn_dtensor::optim::{FullOptimizerState, ShardedOptimizer, sharded};
use burn_dtensor::prelude::*;
use burn_dtensor::testing::MeshTest;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use super::folder::Folder;
use super::net::values;
use super::random_net::{INTS, NetPlan, data, grads};
use super::sharding::Sharding;
use crate::effort::{is_smoke, setting};
use crate::layouts;

/// Number of cases where the environment does not say.
const ROUND_TRIPS: u64 = 40;

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
        let (save, load) = (
            Sharding::draw(&mut rng, ranks),
            Sharding::draw(&mut rng, ranks),
        );
        // The optimizer of an ordinary model has no state by path.
        let has_optimizer = rng.random_bool(0.6) && !save.is_ordinary() && !load.is_ordinary();
        let tensors = (0..rng.random_range(0..=2))
            .map(|_| TensorPlan::draw(&mut rng, &save.sizes, &load.sizes))
            .collect();
        Self {
            seed,
            net: NetPlan::draw(&mut rng),
            optimizer: has_optimizer.then(|| {
                (
                    rng.random_range(0..OPTIMIZERS.len()),
                    rng.random_range(1..=2),
                )
            }),
            tensors,
            save,
            load,
            has_autodiff: has_optimizer || rng.random(),
            memory: if rng.random() { 1 << 30 } else { 1 },
        }
    }

    fn device(&self, world: &World) -> Device {
        if self.has_autodiff {
            world.device().clone().autodiff()
        } else {
            world.device().clone()
        }
    }

    fn optimizer(&self) -> ShardedOptimizer {
        OPTIMIZERS[self.optimizer.map_or(0, |(index, _)| index)]()
    }

    fn tensor(&self, index: usize) -> TensorData {
        let TensorPlan { shape, dtype, .. } = &self.tensors[index];
        data(
            &mut StdRng::seed_from_u64(self.seed ^ (index as u64 + 1)),
            shape,
            *dtype,
            true,
        )
    }

    /// Saves on every rank of the first mesh.
    fn save(&self, world: &World, folder: &Path) -> Result<Expected> {
        let mesh = self.save.mesh(world)?;
        // Optimizers may make other bits of NaNs on one rank than on another.
        let net = self
            .net
            .build(self.seed, self.optimizer.is_none(), &self.device(world));
        // Steps in which no parameter has a gradient are drawn, too.
        let mut optimizer = self.optimizer().with_empty_steps_allowed(true);
        let mut net = self.save.distribute(net, &mesh)?;
        for step in 0..self.optimizer.map_or(0, |(_, steps)| steps) {
            let grads = grads(&net, step);
            net = optimizer.step(0.05, net, grads)?;
        }
        let optimizer = optimizer.state(&net)?;
        let expected = Expected {
            model: values(&full_model(&net)?),
            optimizer: optimizer.full()?,
        };
        let mut state = State::new(&mesh).with_step(self.seed);
        state = state
            .with_model("model", &net)?
            .with_optimizer("optimizer", &optimizer)?;
        for (index, plan) in self.tensors.iter().enumerate() {
            state = state.with_tensor(
                &format!("tensor{index}"),
                distributed(self.tensor(index), &mesh, &plan.save)?,
            )?;
        }
        checkpoint::save(folder, &state)?;
        mesh.world().barrier("all have saved")?;
        let tensors = (0..self.tensors.len()).map(|index| self.tensor(index));
        let all = expected
            .model
            .values()
            .chain(expected.optimizer.tensors.values())
            .cloned()
            .chain(tensors);
        assert_eq!(
            stored(folder),
            all.map(|data| data.as_bytes().len()).sum::<usize>(),
            "each element is written once"
        );
        Ok(expected)
    }

    /// Loads on every rank of the second mesh, and compares.
    fn load(&self, world: &World, folder: &Path, expected: &Expected) -> Result<()> {
        let mesh = self.load.mesh(world)?;
        let checkpoint = Checkpoint::open(folder, &mesh)?;
        let checkpoint = checkpoint.with_read_options(ReadOptions::new().with_memory(self.memory));
        assert_eq!(checkpoint.step(), Some(self.seed));

        let net = self
            .load
            .distribute(self.net.build(!self.seed, true, &self.device(world)), &mesh)?;
        let (net, report) = checkpoint.load_model("model", net, &LoadOptions::new())?;
        assert!(report.loaded.iter().eq(expected.model.keys()), "{report:?}");
        for (path, tensor) in StateDict::of_model(&net, &mesh)?.tensors() {
            assert_eq!(
                tensor.local_data(),
                shard(&expected.model[path], tensor),
                "shard of `{path}`"
            );
        }
        assert_eq!(values(&full_model(&net)?), expected.model);

        // Of an ordinary model, no parameters are known by their paths.
        let options = LoadOptions::new().with_partial(self.save.is_ordinary());
        let (state, _) = checkpoint.load_optimizer("optimizer", &net, &options)?;
        assert_eq!(state.full()?, expected.optimizer);
        // burn loads an optimizer's state in one dtype.
        if expected
            .optimizer
            .tensors
            .values()
            .all(|data| data.dtype() == DType::F32)
        {
            let optimizer = self.optimizer().load_state(&net, state)?;
            assert_eq!(optimizer.state(&net)?.full()?, expected.optimizer);
        }

        for (index, plan) in self.tensors.iter().enumerate() {
            let zeros = TensorData::from_bytes_vec(
                vec![0; self.tensor(index).as_bytes().len()],
                plan.shape.clone(),
                plan.dtype,
            );
            let loaded = load_tensor(
                &checkpoint,
                &format!("tensor{index}"),
                &distributed(zeros, &mesh, &plan.load)?,
            )?;
            assert_eq!(loaded.spec().layout(), &plan.load);
            assert_eq!(
                loaded.local_data(),
                shard(&self.tensor(index), &loaded),
                "shard of tensor {index}"
            );
            assert_eq!(loaded.full_data()?, self.tensor(index));
        }
        Ok(())
    }

    /// Describes what is wrong, if anything is.
    fn fails(&self, folder: &Path) -> Option<String> {
        let threads =
            |sharding: &Sharding| Launch::threads(sharding.ranks()).with_deadline(DEADLINE);
        let saved = match launch(threads(&self.save), |world| self.save(world, folder)) {
            Ok(saved) => saved,
            Err(error) => return Some(error.to_string()),
        };
        let expected = &saved[0].1;
        launch(threads(&self.load), |world| {
            self.load(world, folder, expected)
        })
        .err()
        .map(|error| error.to_string())
    }
}

impl TensorPlan {
    fn draw(rng: &mut StdRng, save: &[usize], load: &[usize]) -> Self {
        let shape: Vec<_> = (0..rng.random_range(1..=4))
            .map(|_| rng.random_range(1..=9))
            .collect();
        let dtypes = [
            DType::F32,
            DType::F64,
            DType::F16,
            DType::BF16,
            DType::Bool(BoolStore::Native),
        ];
        let dtypes = [&dtypes[..], &INTS].concat();
        let mut layout = |mesh: &[usize]| {
            let layout = layouts::draw(rng, mesh, shape.len(), 0.0, |_| Placement::Replicate);
            layouts::uneven(layout, &shape, rng.random())
        };
        let (save, load) = (layout(save), layout(load));
        Self {
            dtype: dtypes[rng.random_range(0..dtypes.len())],
            shape,
            save,
            load,
        }
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

/// Returns the number of bytes of all tensors in safetensors files.
fn stored(folder: &Path) -> usize {
    let paths = fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().path());
    let files = paths.filter(|path| {
        path.extension()
            .is_some_and(|extension| extension == "safetensors")
    });
    let stored = files.map(|path| {
        let file = fs::read(path).unwrap();
        let (len, rest) = file.split_at(8);
        rest.len() - u64::from_le_bytes(len.try_into().unwrap()) as usize
    });
    stored.sum()
}

/// Distributes a full tensor that every rank has.
fn distributed(full: TensorData, mesh: &DeviceMesh, layout: &Layout) -> Result<DynDTensor> {
    let full = StateDict::from_full([("tensor".into(), full)], mesh)?;
    let (_, tensor) = full.tensors().next().expect("it has one");
    tensor.clone().redistribute_to(layout)
}

fn load_tensor(checkpoint: &Checkpoint, key: &str, like: &DynDTensor) -> Result<DynDTensor> {
    fn load<const D: usize>(
        checkpoint: &Checkpoint,
        key: &str,
        like: &DynDTensor,
    ) -> Result<DynDTensor> {
        if let Some(like) = like.dtensor::<D, Float>() {
            return Ok(checkpoint.load_tensor(key, &like)?.into());
        }
        if let Some(like) = like.dtensor::<D, Int>() {
            return Ok(checkpoint.load_tensor(key, &like)?.into());
        }
        Ok(checkpoint
            .load_tensor(key, &like.dtensor::<D, Bool>().expect("one of three kinds"))?
            .into())
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
    let slices: Vec<Range<usize>> = (0..full.shape().num_dims())
        .map(|dim| spec.local_range(dim))
        .collect();
    let positions = slices
        .iter()
        .zip(full.shape().iter())
        .fold(vec![0], |outer, (slice, len)| {
            outer
                .iter()
                .flat_map(|&outer| slice.clone().map(move |at| outer * len + at))
                .collect()
        });
    let size = full.dtype().size();
    let bytes = positions
        .into_iter()
        .flat_map(|at: usize| &full.as_bytes()[at * size..(at + 1) * size]);
    let shape: Vec<_> = slices.iter().map(ExactSizeIterator::len).collect();
    TensorData::from_bytes_vec(bytes.copied().collect(), shape, full.dtype())
}

#[test]
fn what_is_saved_on_one_mesh_is_loaded_on_another_to_the_bit() {
    let default = if is_smoke() {
        ROUND_TRIPS / 10
    } else {
        ROUND_TRIPS
    };
    let (first, count) = (
        setting("ROUND_TRIPS_FROM", 0),
        setting("ROUND_TRIPS", default),
    );
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
        let _ = fs::remove_dir_all(folder);
    }
    assert!(
        failures.is_empty(),
        "round trips of seeds {failures:?} failed"
    );
}

/// The bytes of a replicated tensor are divided among the ranks, 16 MiB at a time.
#[test]
fn what_all_ranks_hold_is_written_by_all() {
    let folder = Folder::new("even");
    let path = folder.join("checkpoint");
    let full = data(&mut StdRng::seed_from_u64(1), &[3 << 22], DType::F32, true);
    let reports = MeshTest::new([3], ["dp"]).run(|mesh| {
        let tensor = distributed(full.clone(), mesh, &Layout::replicate(mesh.shape())?)?;
        checkpoint::save(&path, &State::new(mesh).with_tensor("tensor", tensor)?)
    });
    assert!(
        reports[0]
            .bytes
            .iter()
            .all(|&bytes| bytes > 16 << 20 && bytes < 17 << 20),
        "{}",
        reports[0]
    );
    MeshTest::new([2], ["dp"]).run(|mesh| {
        let like = distributed(
            TensorData::zeros::<f32, _>([3 << 22]),
            mesh,
            &Layout::new(mesh.shape(), &[Placement::Shard(0)])?,
        )?;
        let loaded = load_tensor(&Checkpoint::open(&path, mesh)?, "tensor", &like)?;
        assert!(loaded.local_data() == shard(&full, &loaded));
        Ok(())
    });
}

/// Each rank loads half of each row, of 32 KiB, from two files of four rows. With what lies between,
/// it reads 7 halves of each file for 4.
#[test]
fn runs_are_read_together_as_far_as_the_options_allow() {
    const HALF: u64 = 32 << 10;
    let folder = Folder::new("over-read");
    let path = folder.join("checkpoint");
    MeshTest::new([2], ["dp"]).run(|mesh| {
        let full = || Tensor::<2>::ones([8, 16 << 10], mesh.device());
        let rows = DTensor::distribute_replicated(full(), mesh, &[Placement::Shard(0)])?;
        let columns = DTensor::distribute_replicated(full(), mesh, &[Placement::Shard(1)])?;
        checkpoint::save(&path, &State::new(mesh).with_tensor("tensor", rows)?)?;
        for (most, read) in [(1.7, 8 * HALF), (1.8, 14 * HALF)] {
            let options = ReadOptions::new().with_max_over_read(most);
            let saved = Checkpoint::open(&path, mesh)?.with_read_options(options);
            saved.load_tensor("tensor", &columns)?;
            let stats = saved.read_stats();
            assert_eq!((stats.needed, stats.read), (8 * HALF, read), "{most}");
        }
        Ok(())
    });
}

/// A layer of [`BatchNorm`] has seen another batch on each rank.
#[test]
fn running_statistics_are_saved_as_all_ranks_agree_on_them() {
    let folder = Folder::new("running");
    let path = folder.join("checkpoint");
    let distributed = |mesh: &DeviceMesh| {
        let norm = BatchNormConfig::new(3).init(&mesh.device().clone().autodiff());
        fully_shard(
            norm,
            mesh,
            FullyShard::new()
                .with_buffer_sync(BufferSync::Average)
                .with_layer_warnings(false),
        )
    };
    MeshTest::new([2], ["dp"]).run(|mesh| {
        let norm = distributed(mesh)?;
        norm.forward(Tensor::<2>::full(
            [4, 3],
            mesh.rank() as f32,
            &mesh.device().clone().autodiff(),
        ));
        checkpoint::save(&path, &State::new(mesh).with_model("norm", &norm)?)
    });
    MeshTest::new([3], ["dp"]).run(|mesh| {
        let (norm, _) = Checkpoint::open(&path, mesh)?.load_model(
            "norm",
            distributed(mesh)?,
            &LoadOptions::new(),
        )?;
        let mean = norm.valid().running_mean.value();
        assert_eq!(
            mean.into_data().try_to_vec::<f32>()?,
            [0.05; 3],
            "momentum 0.1, of means 0 and 1"
        );
        Ok(())
    });
}

/// Saves and loads in the same processes, on two meshes.
#[cfg(feature = "mpi")]
mod processes {
    use burn_dtensor::testing::ProcessTest;

    use super::*;

    const EACH: u64 = 5;

    fn round_trips(processes: usize, ranks: usize) {
        let text = ProcessTest::new(processes).run(|| {
            let folder = Folder::of_all("round-trips");
            let round_trips = |world: &World| {
                for seed in 0..EACH {
                    let case = Case::draw(seed, Some(ranks));
                    let folder = folder.join(seed.to_string());
                    case.load(world, &folder, &case.save(world, &folder)?)?;
                }
                Ok(())
            };
            let config = Launch::from_env(ranks).unwrap().with_deadline(DEADLINE);
            launch(config, round_trips).unwrap_or_else(|error| panic!("{error}"));
            println!("{EACH} round trips");
        });
        let Some(text) = text else { return };
        assert_eq!(
            text.matches(&format!("{EACH} round trips")).count(),
            processes,
            "{text}"
        );
    }

    #[test]
    fn two_processes_load_what_they_saved() {
        round_trips(2, 2);
    }

    #[test]
    fn three_processes_load_what_they_saved() {
        round_trips(3, 3);
    }

    #[test]
    fn four_processes_load_what_they_saved() {
        round_trips(4, 4);
    }

    #[test]
    fn two_processes_of_two_ranks_load_what_they_saved() {
        round_trips(2, 4);
    }
}
