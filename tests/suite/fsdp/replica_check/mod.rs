//! What a host has silently changed: the error names it.

mod no_false_alarm;

use burn::module::{Module, ModuleMapper, Param};
use burn::optim::{AdamWConfig, GradientsParams};
use burn::tensor::{Device, Tensor, TensorData};
use burn_dtensor::comm::{CommError, Launch, Op, ReplicatedValue, launch};
use burn_dtensor::fsdp::{FullyShard, fully_shard, remesh};
use burn_dtensor::mesh::DeviceMesh;
use burn_dtensor::mesh_test;
use burn_dtensor::placement::Placement;
use burn_dtensor::testing::MeshTest;
use burn_dtensor::{Error, Result};

use super::net::{Net, WIDTH, config, net, with_units};
use super::support::{on_device, tensor};

/// One bit of a parameter's first element, as this rank stores it.
pub struct Flip {
    param: &'static str,
    bit: u32,
    path: Vec<String>,
}

impl Flip {
    pub fn new(param: &'static str, bit: u32) -> Self {
        Self {
            param,
            bit,
            path: vec![],
        }
    }
}

impl ModuleMapper for Flip {
    fn enter_module(&mut self, name: &str, _: &str) {
        self.path.push(name.into());
    }

    fn exit_module(&mut self, _: &str, _: &str) {
        self.path.pop();
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        if self.path.join(".") != self.param {
            return param;
        }
        let device = Device::flex().autodiff();
        param.map(|base| {
            Tensor::from_data(flipped(base.inner().into_data(), self.bit), &device).require_grad()
        })
    }
}

/// Returns the same numbers, except for one bit of the first.
fn flipped(mut data: TensorData, bit: u32) -> TensorData {
    let first = &mut data.as_mut_slice::<f32>().expect("parameters are f32")[0];
    *first = f32::from_bits(first.to_bits() ^ (1 << bit));
    data
}

const STEPS: usize = 12;

/// Trains a net, which `between` gets before each step: how many steps were made, and why no more
/// were.
fn train(
    mesh: &DeviceMesh,
    config: FullyShard,
    between: impl Fn(usize, Net) -> Net,
) -> Result<(Net, usize, Option<Error>)> {
    let device = mesh.device().clone().autodiff();
    let mut net = fully_shard(on_device(&net(&Device::flex()), &device), mesh, config)?;
    let mut optim = AdamWConfig::new().init();
    for step in 1..=STEPS {
        net = between(step, net);
        let grads = Error::catch(|| Ok(gradients(&net, step, mesh)));
        match grads {
            Ok(grads) => net = optim.step(1e-2, net, grads),
            Err(error) => return Ok((net, step - 1, Some(error))),
        }
    }
    Ok((net, STEPS, None))
}

/// Of a batch of the step and the rank.
fn gradients(net: &Net, step: usize, mesh: &DeviceMesh) -> GradientsParams {
    let x = tensor(
        (10 * step + mesh.rank()) as u64,
        [4, WIDTH],
        &mesh.device().clone().autodiff(),
    );
    let loss = (with_units(net, x, 0) - 1.0).square().mean();
    GradientsParams::from_grads(loss.backward(), net)
}

/// Biases and the scale are whole on each rank.
fn replicated() -> FullyShard {
    config()
        .with_weight_check(true)
        .with_shard_placement_fn(|param| (param.shape.len() == 1).then_some(Placement::Replicate))
}

/// What is wrong, on a mesh, and how it is found.
struct Case {
    config: fn() -> FullyShard,
    param: &'static str,
    bit: u32,
    culprit: usize,
    /// Before this step the parameter changes on the culprit.
    in_step: usize,
    /// In which the ranks are told.
    told_in: usize,
    /// Who holds it, and in which collective this shows.
    group: fn(&DeviceMesh, usize) -> Vec<usize>,
    during: Op,
}

/// Found in the next step, of those that compare in every one.
const NEXT: Case = Case {
    config: || replicated().with_replica_check_every(1),
    param: "",
    bit: 0,
    culprit: 0,
    in_step: 3,
    told_in: 3,
    group: replicas,
    during: Op::AllReduce,
};

/// The ranks of one shard.
fn replicas(mesh: &DeviceMesh, rank: usize) -> Vec<usize> {
    let shards = mesh.shape()[mesh.ndim() - 1];
    mesh.ranks()
        .iter()
        .copied()
        .filter(|other| other % shards == rank % shards)
        .collect()
}

/// The ranks of one replica.
fn shards(mesh: &DeviceMesh, rank: usize) -> Vec<usize> {
    let shards = mesh.shape()[mesh.ndim() - 1];
    mesh.ranks()
        .iter()
        .copied()
        .filter(|other| other / shards == rank / shards)
        .collect()
}

/// Of a group of two both are named, of a larger one who is at fault, on all ranks.
fn is_told(mesh: &DeviceMesh, case: &Case) -> Result<()> {
    let flip = |step, net: Net| match mesh.rank() == case.culprit && step == case.in_step {
        true => net.map(&mut Flip::new(case.param, case.bit)),
        false => net,
    };
    let (_, made, error) = train(mesh, (case.config)(), flip)?;
    let error =
        error.unwrap_or_else(|| panic!("`{}` on rank {} was not found", case.param, case.culprit));
    let text = error.to_string();
    let Error::Comm(CommError::Diverged {
        rank,
        other,
        during,
        param,
        of,
        step,
        majority,
    }) = error
    else {
        panic!("{text}")
    };
    let group = (case.group)(mesh, case.culprit);
    assert_eq!(
        (&*param, of, during.op),
        (case.param, ReplicatedValue::Weight, case.during),
        "{text}"
    );
    assert_eq!(
        (step, &during.ranks[..]),
        (case.told_in as u64, &group[..]),
        "{text}"
    );
    // Word of it may reach others when they have ended the step.
    let prefetch = (made + 1).checked_sub(case.told_in);
    assert!(
        prefetch == Some(0) || prefetch == Some(1) && !group.contains(&mesh.rank()),
        "{text}, after step {made}"
    );
    match group.len() {
        2 => assert!(
            !majority && rank.min(other) == group[0] && rank.max(other) == group[1],
            "{text}"
        ),
        _ => assert!(
            majority && rank == case.culprit && rank != other && group.contains(&other),
            "{text}"
        ),
    }
    let remedy = if majority {
        "is wrong, as most ranks hold the value of"
    } else {
        "either may be wrong"
    };
    assert!(
        text.contains(remedy) && text.contains("World::shrink"),
        "{text}"
    );
    Ok(())
}

fn mesh_of(shape: [usize; 2]) -> MeshTest {
    MeshTest::new(shape, ["replicate", "shard"])
}

/// Uneven ones, too.
#[test]
fn a_bit_of_a_shard_is_told_between_replicas() {
    for shape in [[2, 2], [2, 3], [3, 1], [3, 2], [4, 1]] {
        for culprit in 0..shape[0] * shape[1] {
            mesh_of(shape).run(|mesh| {
                is_told(
                    mesh,
                    &Case {
                        param: "blocks.1.weight",
                        culprit,
                        ..NEXT
                    },
                )
            });
        }
    }
}

mesh_test!(
    a_bit_of_a_shard_of_one_of_two_replicas,
    [2, 2],
    ["replicate", "shard"],
    |mesh| {
        is_told(
            mesh,
            &Case {
                param: "first.weight",
                culprit: 1,
                ..NEXT
            },
        )
    }
);

mesh_test!(
    a_bit_of_a_shard_of_one_of_three_replicas,
    [3, 1],
    ["replicate", "shard"],
    |mesh| {
        is_told(
            mesh,
            &Case {
                param: "blocks.2.weight",
                culprit: 2,
                ..NEXT
            },
        )
    }
);

/// In a unit with other parameters that are cut, whose reduction comes first.
const REPLICATED: Case = Case {
    param: "blocks.0.bias",
    group: shards,
    during: Op::ReduceScatter,
    ..NEXT
};

/// In a unit of its own: all that is reduced is whole.
const ALONE: Case = Case {
    config: || {
        replicated()
            .with_units(["first"])
            .with_shard_placement_fn(|_| Some(Placement::Replicate))
            .with_replica_check_every(1)
    },
    param: "scale",
    during: Op::AllReduce,
    ..REPLICATED
};

#[test]
fn a_bit_of_a_replicated_parameter_is_found_between_shards() {
    for shape in [[1, 2], [1, 3], [1, 4], [2, 3]] {
        for case in [REPLICATED, ALONE] {
            for culprit in 0..shape[0] * shape[1] {
                mesh_of(shape).run(|mesh| is_told(mesh, &Case { culprit, ..case }));
            }
        }
    }
    for culprit in 0..3 {
        MeshTest::new([3], ["shard"]).run(|mesh| {
            is_told(
                mesh,
                &Case {
                    culprit,
                    ..REPLICATED
                },
            )
        });
    }
}

mesh_test!(
    a_bit_of_a_parameter_that_four_ranks_replicate,
    [4],
    ["shard"],
    |mesh| {
        is_told(
            mesh,
            &Case {
                culprit: 3,
                ..REPLICATED
            },
        )
    }
);

#[test]
fn without_a_number_it_is_told_by_the_tenth_step() {
    for (in_step, culprit) in [(1, 0), (3, 1), (10, 2)] {
        // A lesser bit may be rounded away until then, and is no harm any more.
        let case = Case {
            config: replicated,
            param: "blocks.1.weight",
            bit: 20,
            in_step,
            culprit,
            told_in: 10,
            ..NEXT
        };
        mesh_of([3, 1]).run(|mesh| is_told(mesh, &case));
    }
    // Of those that nobody compares nobody knows.
    mesh_of([2, 2]).run(|mesh| {
        let flip = |step, net: Net| match (mesh.rank(), step) {
            (1, 3) => net.map(&mut Flip::new("blocks.1.weight", 20)),
            _ => net,
        };
        let (_, made, error) = train(mesh, replicated().with_replica_check_every(0), flip)?;
        assert!(made == STEPS && error.is_none(), "{error:?}");
        Ok(())
    });
}

/// An optimizer may give replicas other bits on other processors: the run continues, by default. An
/// error in a gathered weight or an averaged gradient is found nevertheless (`tests/downstream`).
#[test]
fn weights_that_an_optimizer_makes_differ_are_no_failure_by_default() {
    for shape in [[3, 1], [2, 2], [1, 3]] {
        mesh_of(shape).run(|mesh| {
            let last_bits = |_, net: Net| match mesh.rank() {
                1 => ["blocks.1.weight", "blocks.0.bias"]
                    .into_iter()
                    .fold(net, |net, param| net.map(&mut Flip::new(param, 0))),
                _ => net,
            };
            // The biases are replicated between the ranks that shard.
            let config = || replicated().with_weight_check(false);
            let (_, made, error) = train(mesh, config(), last_bits)?;
            assert!(
                made == STEPS && error.is_none(),
                "after {made} steps: {error:?}"
            );
            let (_, made, error) = train(mesh, config().with_replica_check_every(1), last_bits)?;
            assert!(
                made == STEPS && error.is_none(),
                "after {made} steps: {error:?}"
            );
            Ok(())
        });
    }
}

/// Both are read in every step: were they counted together, one would never be compared in every
/// other step.
#[test]
fn parameters_that_are_read_outside_their_unit_are_compared_each() {
    for param in ["spare.weight", "spare.bias"] {
        mesh_of([2, 1]).run(|mesh| {
            let device = mesh.device().clone().autodiff();
            let mut net = fully_shard(
                on_device(&net(&Device::flex()), &device),
                mesh,
                config().with_weight_check(true).with_replica_check_every(2),
            )?;
            let step = |net: &Net| {
                let (weight, bias) = (
                    net.spare.weight.val(),
                    net.spare.bias.as_ref().expect("it has one").val(),
                );
                let _ = (weight.square().sum() + bias.square().sum()).backward();
                Ok(())
            };
            Error::catch(|| step(&net))?;
            Error::catch(|| step(&net))?;
            // Every rank maps what it runs, and one finds the parameter.
            net = net.map(&mut Flip::new(if mesh.rank() == 1 { param } else { "" }, 0));
            Error::catch(|| step(&net))?;
            let error = Error::catch(|| step(&net)).expect_err("it is told");
            let Error::Comm(CommError::Diverged {
                param: told,
                step: 4,
                ..
            }) = &error
            else {
                panic!("{error}")
            };
            assert_eq!(told, param, "{error}");
            Ok(())
        });
    }
}

/// What the broken host has made is in no weight of theirs.
#[test]
fn the_others_go_on_without_the_rank_that_is_named() {
    let ends = launch(Launch::threads(3), |world| {
        let mesh = DeviceMesh::new(world, [3, 1], ["replicate", "shard"])?;
        let flip = |step, net: Net| match (mesh.rank(), step) {
            (1, 5) => net.map(&mut Flip::new("blocks.1.weight", 0)),
            _ => net,
        };
        let (net, made, error) = train(
            &mesh,
            config().with_weight_check(true).with_replica_check_every(1),
            flip,
        )?;
        let error = error.expect("it is told");
        let Error::Comm(CommError::Diverged {
            rank,
            majority: true,
            ..
        }) = error
        else {
            panic!("{error}")
        };
        if rank == mesh.rank() {
            return Err(error);
        }
        let mesh = mesh.survivors(&mesh.world().shrink()?, 0)?;
        let mut net = remesh(net, &mesh)?;
        for step in made..STEPS {
            let grads = gradients(&net, step, &mesh);
            net = AdamWConfig::new().init().step(1e-2, net, grads);
        }
        // There, too, they compare in every step.
        let net = if mesh.rank() == 0 {
            net.map(&mut Flip::new("first.bias", 0))
        } else {
            net
        };
        let error = Error::catch(|| Ok(gradients(&net, 0, &mesh))).expect_err("it is told");
        let Error::Comm(CommError::Diverged {
            step,
            majority: false,
            ..
        }) = error
        else {
            panic!("{error}")
        };
        Ok((made, step))
    });
    // Counted anew.
    assert_eq!(ends.unwrap(), [(0, (4, 9)), (2, (4, 9))]);
}
