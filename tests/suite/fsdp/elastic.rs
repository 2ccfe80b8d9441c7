//! Ranks that go on after a failure in the middle of a step: to the bit as those that begin there.

use std::panic::{AssertUnwindSafe, catch_unwind};

use burn::optim::{AdamWConfig, GradientsParams, ModuleOptimizer};
use burn::tensor::{Device, Tensor};
use burn_dtensor::comm::{CommError, Launch, ReduceOp, World, launch};
use burn_dtensor::fsdp::{
    FsdpError, FullyShard, NamedParameter, full_model, fully_shard, named_parameters, remesh,
};
use burn_dtensor::mesh::{DeviceMesh, MeshError};
use burn_dtensor::placement::Placement;
use burn_dtensor::{Error, Result};

use super::net::{Net, WIDTH, config, net, with_units};
use super::support::{on_device, tensor, values};

const STEPS: usize = 5;

/// The step in which a rank is lost.
const LOST_IN: usize = 2;

/// Where the rank is lost.
#[derive(Debug, Clone, Copy)]
enum In {
    Forward,
    Backward,
}

/// A training that a rank takes part in.
struct Training {
    mesh: DeviceMesh,
    net: Net,
    optim: ModuleOptimizer,
    step: usize,
    losses: Vec<u32>,
}

fn optim() -> ModuleOptimizer {
    AdamWConfig::new().init()
}

impl Training {
    fn step(&mut self, fail: impl Fn(In)) -> Result<()> {
        let device = self.mesh.device().clone().autodiff();
        let place = self
            .mesh
            .ranks()
            .iter()
            .position(|rank| *rank == self.mesh.rank())
            .unwrap();
        let x = tensor((10 * self.step + place) as u64, [4, WIDTH], &device);
        let (loss, grads) = Error::catch(|| {
            let y = with_units(&self.net, x.clone(), 0);
            fail(In::Forward);
            let loss = (y + with_units(&self.net, x, 0) - 1.0).square().mean();
            let grads = loss.clone();
            fail(In::Backward);
            Ok((
                loss.into_scalar::<f32>(),
                GradientsParams::from_grads(grads.backward(), &self.net),
            ))
        })?;
        self.net = self.optim.step(1e-2, self.net.clone(), grads);
        self.losses.push(loss.to_bits());
        self.step += 1;
        Ok(())
    }

    /// Losses, and the bits of all weights at the end.
    fn end(self) -> Result<(Vec<u32>, Vec<u32>)> {
        let weights = values(&full_model(&self.net)?, None);
        Ok((
            self.losses,
            weights.into_values().flatten().map(f32::to_bits).collect(),
        ))
    }
}

/// How a rank is lost.
struct Loss {
    rank: usize,
    place: In,
    /// Ends the rank's program.
    end: fn(),
}

/// What ranks begin with that go on.
struct Begin {
    net: Net,
    optim: ModuleOptimizer,
}

/// What a training ends with: losses, and the bits of all weights.
type End = (Vec<u32>, Vec<u32>);

/// Trains on a mesh of this shape, the first dimension of which replicates, and goes on without the
/// rank that is lost, on what is left of the mesh: `None` for a rank that is no part of that.
fn train_through(
    world: &World,
    model: &Net,
    shape: [usize; 2],
    loss: &Loss,
    config: impl Fn() -> FullyShard,
) -> Result<Option<(Begin, End)>> {
    let mesh = DeviceMesh::new(world, shape, ["replicate", "shard"])?;
    let net = fully_shard(
        on_device(model, &world.device().clone().autodiff()),
        &mesh,
        config(),
    )?;
    let (mut training, mut begin) = (
        Training {
            mesh,
            net,
            optim: optim(),
            step: 0,
            losses: vec![],
        },
        None,
    );
    while training.step < STEPS {
        let is_lost = begin.is_none() && world.rank() == loss.rank && training.step == LOST_IN;
        let fail = |now: In| {
            if is_lost && now as u8 == loss.place as u8 {
                (loss.end)();
            }
        };
        if training.step(fail).is_ok() {
            continue;
        }
        let world = training.mesh.world().shrink()?;
        training.mesh = training.mesh.survivors(&world, 0)?;
        if training.mesh.coordinate().is_none() {
            return Ok(None);
        }
        training.net = remesh(training.net, &training.mesh)?;
        let is_on = |param: &NamedParameter| *param.spec.mesh() == training.mesh;
        assert!(
            named_parameters(&training.net)?.iter().all(is_on),
            "laid out on the mesh that is left"
        );
        training.losses.clear();
        assert_eq!(training.step, LOST_IN, "an abandoned step is no step");
        begin = Some(Begin {
            net: full_model(&training.net)?,
            optim: training.optim.clone(),
        });
    }
    Ok(Some((begin.expect("a rank was lost"), training.end()?)))
}

/// Loses a rank among threads. The survivors are to train on as ranks do that begin with the
/// weights and the optimizers of that step. Returns what they end with.
fn goes_on(
    shape: [usize; 2],
    lost: usize,
    place: In,
    left: [usize; 2],
    config: impl Fn() -> FullyShard + Sync,
) -> Vec<(usize, End)> {
    let (model, loss) = (
        net(&Device::flex()),
        Loss {
            rank: lost,
            place,
            end: || panic!("this rank is lost"),
        },
    );
    let config_of = &config;
    let ends = launch(Launch::threads(shape[0] * shape[1]), |world| {
        train_through(world, &model, shape, &loss, config_of)
    });
    let ends = ends.unwrap_or_else(|error| panic!("{shape:?} without {lost}, {place:?}: {error}"));
    assert_eq!(ends.len(), shape[0] * shape[1] - 1, "all but the lost one");
    let ends = ends
        .into_iter()
        .filter_map(|(rank, end)| Some((rank, end?)));
    let (begins, ends): (Vec<_>, Vec<_>) = ends
        .map(|(rank, (begin, end))| (begin, (rank, end)))
        .unzip();
    assert_eq!(begins.len(), left[0] * left[1]);
    let expected = launch(Launch::threads(begins.len()), |world| {
        let mesh = DeviceMesh::new(world, left, ["replicate", "shard"])?;
        let Begin { net, optim } = &begins[world.rank()];
        let net = fully_shard(
            on_device(net, &world.device().clone().autodiff()),
            &mesh,
            config(),
        )?;
        let mut training = Training {
            mesh,
            net,
            optim: optim.clone(),
            step: LOST_IN,
            losses: vec![],
        };
        while training.step < STEPS {
            training.step(|_| ())?;
        }
        training.end()
    });
    let expected = expected.unwrap();
    for ((rank, end), (_, expected)) in ends.iter().zip(&expected) {
        assert_eq!(
            end, expected,
            "{shape:?} without {lost}, {place:?}: rank {rank}"
        );
    }
    ends
}

/// Processes that are killed, or stopped, where MPI goes on without them.
#[cfg(feature = "mpi")]
mod processes {
    use std::process::{self, Command};

    use burn_dtensor::testing::ProcessTest;

    use super::*;

    /// What a rank says it ends with.
    fn end_of(text: &str, rank: usize) -> Option<&str> {
        text.lines().find_map(|line| {
            line.split_once(&format!("rank {rank} ends with "))
                .map(|(_, end)| end)
        })
    }

    fn park() {
        loop {
            std::thread::park();
        }
    }

    fn kill() {
        drop(
            Command::new("kill")
                .args(["-KILL", &process::id().to_string()])
                .status(),
        );
        park();
    }

    /// A process that is stopped is in the way of the launcher's end: it is killed long after the
    /// others miss it.
    fn stop() {
        let stop = format!("(sleep 10; kill -KILL {0}) & kill -STOP {0}", process::id());
        drop(Command::new("sh").args(["-c", &stop]).status());
        park();
    }

    /// Ends a process by this signal, of several that have a rank each: those that are left end as
    /// threads do.
    fn without(
        test: Option<ProcessTest>,
        shape: [usize; 2],
        lost: usize,
        place: In,
        left: [usize; 2],
        end: fn(),
    ) {
        let Some(test) = test else { return };
        let text = test.run(|| {
            let (model, loss) = (
                net(&Device::flex()),
                Loss {
                    rank: lost,
                    place,
                    end,
                },
            );
            let ranks = Launch::from_env(shape[0] * shape[1]).unwrap();
            let ends = launch(ranks, |world| {
                train_through(world, &model, shape, &loss, config)
            })
            .unwrap();
            for (rank, (_, end)) in ends
                .into_iter()
                .filter_map(|(rank, end)| Some((rank, end?)))
            {
                println!("rank {rank} ends with {end:?}");
            }
        });
        let Some(text) = text else { return };
        let expected = goes_on(shape, lost, place, left, config);
        for (rank, end) in &expected {
            assert_eq!(
                end_of(&text, *rank),
                Some(&*format!("{end:?}")),
                "rank {rank}: {text}"
            );
        }
        assert_eq!(
            text.matches(" ends with (").count(),
            expected.len(),
            "{text}"
        );
    }

    #[test]
    fn replicas_go_on_without_a_process_that_is_killed() {
        without(
            ProcessTest::new(4).with_fault_tolerance(),
            [4, 1],
            2,
            In::Backward,
            [3, 1],
            kill,
        );
    }

    #[test]
    fn replicas_go_on_without_the_first_process() {
        without(
            ProcessTest::new(4).with_fault_tolerance(),
            [4, 1],
            0,
            In::Forward,
            [3, 1],
            kill,
        );
    }

    #[test]
    fn replicas_go_on_without_a_process_that_is_stopped() {
        without(
            ProcessTest::new(3).with_failure_detection(),
            [3, 1],
            1,
            In::Backward,
            [2, 1],
            stop,
        );
    }

    #[test]
    fn the_complete_shard_group_goes_on_without_a_process() {
        without(
            ProcessTest::new(4).with_fault_tolerance(),
            [2, 2],
            3,
            In::Forward,
            [1, 2],
            kill,
        );
    }
}

#[test]
fn replicas_go_on_without_one() {
    for lost in [0, 2, 3] {
        for place in [In::Forward, In::Backward] {
            goes_on([4, 1], lost, place, [3, 1], config);
        }
    }
}

#[test]
fn the_complete_shard_group_goes_on() {
    for (lost, place) in [(3, In::Forward), (0, In::Backward)] {
        goes_on([2, 2], lost, place, [1, 2], config);
    }
    let uneven = || {
        config().with_shard_placement_fn(|param| {
            (param.shape.len() == 1).then_some(Placement::Replicate)
        })
    };
    goes_on([3, 2], 1, In::Backward, [2, 2], uneven);
}

#[test]
fn a_mesh_is_left_where_an_index_is_complete() {
    launch(Launch::threads(4), |world| {
        let mesh = DeviceMesh::new(world, [2, 2], ["replicate", "shard"])?;
        let other = DeviceMesh::new(world, [4], ["dp"])?;
        if world.rank() == 2 {
            return Ok(());
        }
        let left = world.shrink()?;
        assert_eq!(
            (left.ranks_before(), left.size()),
            (Some(&[0, 1, 3][..]), 3)
        );
        let shards = mesh.survivors(&left, 0)?;
        assert_eq!(
            (shards.ranks(), shards.shape(), shards.names()),
            (&[0, 1][..], &[1, 2][..], mesh.names())
        );
        let replicas = mesh.survivors(&left, 1)?;
        assert_eq!(
            (replicas.ranks(), replicas.shape()),
            (&[1, 2][..], &[2, 1][..])
        );
        assert_eq!(other.survivors(&left, 0)?.ranks(), [0, 1, 2]);
        let told = mesh.survivors(&left, 2).unwrap_err();
        assert!(
            matches!(told, Error::Mesh(MeshError::DimOutOfRange { .. })),
            "{told}"
        );
        let told = shards.survivors(&left, 0).unwrap_err();
        assert!(
            matches!(told, Error::Mesh(MeshError::OtherWorld { .. })),
            "{told}"
        );
        Ok(())
    })
    .unwrap();
}

#[test]
fn no_mesh_is_left_where_no_index_is_complete() {
    launch(Launch::threads(4), |world| {
        let mesh = DeviceMesh::new(world, [2, 2], ["replicate", "shard"])?;
        if [0, 3].contains(&world.rank()) {
            return Ok(());
        }
        let told = mesh.survivors(&world.shrink()?, 0).unwrap_err();
        assert!(
            matches!(&told, Error::Mesh(MeshError::NoSurvivors { dim, .. }) if dim == "replicate"),
            "{told}"
        );
        Ok(())
    })
    .unwrap();
}

/// Steps with and without one that panics, which the program takes for what it is: nothing has
/// changed.
#[test]
fn a_step_that_panics_on_all_ranks_leaves_nothing() {
    let model = net(&Device::flex());
    for ranks in [1, 2, 3] {
        let train = |fails: Option<In>| {
            let ends = launch(Launch::threads(ranks), |world| {
                let mesh = DeviceMesh::new(world, [1, ranks], ["replicate", "shard"])?;
                let net = fully_shard(
                    on_device(&model, &world.device().clone().autodiff()),
                    &mesh,
                    config(),
                )?;
                let mut training = Training {
                    mesh,
                    net,
                    optim: optim(),
                    step: 0,
                    losses: vec![],
                };
                let mut left = fails;
                while training.step < STEPS {
                    let fails = left.take_if(|_| training.step == LOST_IN);
                    let fail = |now: In| {
                        assert!(
                            fails.is_none_or(|fails| fails as u8 != now as u8),
                            "a bad batch"
                        )
                    };
                    let caught = catch_unwind(AssertUnwindSafe(|| training.step(fail)));
                    assert_eq!(caught.is_err(), fails.is_some());
                }
                training.end()
            });
            ends.unwrap()
        };
        let expected = train(None);
        for place in [In::Forward, In::Backward] {
            assert_eq!(train(Some(place)), expected, "{place:?} on {ranks}");
        }
    }
}

/// Ranks reduce until they can, in whatever world is left.
fn persists(world: &World) -> Result<(usize, f32)> {
    let mut world = world.clone();
    loop {
        let mesh = DeviceMesh::new(&world, [world.size()], ["all"])?;
        match mesh.all_reduce(Tensor::<1>::ones([1], world.device()), ReduceOp::Sum) {
            Ok(sum) => return Ok((world.size(), sum.into_scalar())),
            Err(_) => world = world.shrink()?,
        }
    }
}

#[test]
fn ranks_go_on_again_and_again() {
    let ends = launch(Launch::threads(5), |world| {
        let mut world = world.clone();
        for left in (2..=5).rev() {
            assert_eq!(world.size(), left);
            if world.rank() == left / 2 {
                panic!("the one in the middle of {left}");
            }
            let failed = world.barrier("all").unwrap_err();
            assert!(
                matches!(failed, Error::Comm(CommError::RankPanicked { rank, .. }) if rank == left / 2),
                "{failed}"
            );
            world = world.shrink()?;
        }
        persists(&world)
    });
    assert_eq!(ends.unwrap(), [(0, (1, 1.0))]);
}

#[test]
fn who_is_late_is_left_behind() {
    let (go, wait) = std::sync::mpsc::channel();
    let wait = std::sync::Mutex::new(wait);
    let ends = launch(
        Launch::threads(3).with_deadline(std::time::Duration::from_millis(50)),
        |world| {
            if world.rank() == 1 {
                // Until the others have gone on.
                wait.lock().unwrap().recv().unwrap();
                let told = world.shrink().unwrap_err();
                assert!(
                    matches!(told, Error::Comm(CommError::ExcludedFromShrink { rank: 1 })),
                    "{told}"
                );
                return Err(told);
            }
            let told = world.barrier("all").unwrap_err();
            assert!(
                matches!(&told, Error::Comm(CommError::DeadlineExceeded { missing, .. }) if *missing == [1]),
                "{told}"
            );
            let left = world.shrink()?;
            let sum = persists(&left)?;
            world.run_on(0, || go.send(()).unwrap());
            Ok(sum)
        },
    );
    assert_eq!(ends.unwrap(), [(0, (2, 2.0)), (2, (2, 2.0))]);
}

#[test]
fn a_failure_among_those_that_go_on_is_the_launchs() {
    let error = launch(Launch::threads(3), |world| {
        if world.rank() == 0 {
            return Err(Error::other("the first"));
        }
        assert!(world.barrier("all").is_err());
        let left = world.shrink()?;
        if left.rank() == 1 {
            return Err(Error::other("the second"));
        }
        left.barrier("those that are left")
    });
    let error = error.unwrap_err();
    assert_eq!(
        (
            error.rank,
            error.cause.to_string().as_str(),
            error.others.len()
        ),
        (1, "the second", 1),
        "{error}"
    );
}

#[test]
fn other_shards_are_refused() {
    let model = net(&Device::flex());
    launch(Launch::threads(4), |world| {
        let mesh = DeviceMesh::new(world, [2, 2], ["replicate", "shard"])?;
        let net = fully_shard(on_device(&model, &world.device().clone().autodiff()), &mesh, config())?;
        let full = DeviceMesh::new(world, [4], ["shard"])?;
        let told = remesh(net.clone(), &full).unwrap_err();
        assert!(
            matches!(&told, Error::Fsdp(FsdpError::IncompatibleMesh { was, is, .. })
            if *was == format!("{} of 2", world.rank() % 2) && *is == format!("{} of 4", world.rank())),
            "{told}"
        );
        let told = remesh(net, &DeviceMesh::new(world, [1, 2, 2], ["a", "b", "c"])?).unwrap_err();
        assert!(matches!(told, Error::Fsdp(FsdpError::MeshDims { .. })), "{told}");
        Ok(())
    })
    .unwrap();
}
