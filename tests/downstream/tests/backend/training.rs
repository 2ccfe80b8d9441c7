//! FSDP on [`Naive`]: weights are those of ranks as threads, to the bit, and a bit error of a host
//! is found.

use burn::module::{Module, Param};
use burn::nn::Linear;
use burn::optim::{AdamConfig, GradientsParams};
use burn::tensor::{Device, Tensor, TensorData};
use burn_dtensor::comm::{CommError, Launch, Op, ReplicatedValue, launch};
use burn_dtensor::fsdp::{FullyShard, full_model, fully_shard, unit};
use burn_dtensor::mesh::DeviceMesh;
use burn_dtensor::placement::Placement;
use burn_dtensor::{Error, Result};
use downstream::naive::Naive;
use downstream::naive::broken::{Broken, Fault};

/// Three blocks, which are units, and a first layer in the root's unit.
#[derive(Module, Debug)]
struct Net {
    first: Linear,
    blocks: Vec<Linear>,
}

/// Ranks cannot share this many rows evenly.
const WIDTH: usize = 5;
const STEPS: usize = 6;

/// Returns values between -1 and 1 that `seed` determines.
fn tensor<const D: usize>(seed: usize, shape: [usize; D], device: &Device) -> Tensor<D> {
    let count: usize = shape.iter().product();
    let value = |i: usize| ((i * 7919 + seed * 104_729) % 1013) as f32 / 506.5 - 1.0;
    Tensor::from_data(
        TensorData::new((0..count).map(value).collect(), shape),
        device,
    )
}

impl Net {
    fn new(device: &Device) -> Self {
        let linear = |seed| Linear {
            weight: Param::from_tensor(tensor(seed, [WIDTH, WIDTH], device)),
            bias: Some(Param::from_tensor(tensor(seed + 1, [WIDTH], device))),
        };
        Self {
            first: linear(10),
            blocks: [20, 30, 40].map(linear).into(),
        }
    }

    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        unit(self, x, |net, x| {
            let x = net.first.forward(x);
            net.blocks.iter().fold(x, |x, block| {
                unit(block, x, |block, x| block.forward(x).tanh())
            })
        })
    }
}

/// The result of training: the losses, the model, and the error that ended the training, if one
/// did.
type Trained = (Vec<f64>, Net, Option<Error>);

/// Trains a net on a mesh, each rank on a batch of its own.
fn train(mesh: &DeviceMesh, config: FullyShard) -> Result<Trained> {
    let device = mesh.device().clone().autodiff();
    let mut net = fully_shard(Net::new(&device), mesh, config)?;
    let (mut optim, mut losses) = (AdamConfig::new().with_epsilon(1e-5).init(), Vec::new());
    for _ in 0..STEPS {
        let x = tensor(100 + mesh.rank(), [4, WIDTH], &device);
        let grads = Error::catch(|| {
            let loss = (net.forward(x) - 0.3).square().mean();
            Ok((
                loss.clone().into_scalar::<f64>(),
                GradientsParams::from_grads(loss.backward(), &net),
            ))
        });
        match grads {
            Ok((loss, grads)) => {
                losses.push(loss);
                net = optim.step(1e-2, net, grads);
            }
            Err(error) => return Ok((losses, net, Some(error))),
        }
    }
    Ok((losses, net, None))
}

/// Losses of a rank, and the full weights.
type LossesAndWeights = (Vec<f64>, Vec<Vec<f32>>);

/// Trains on ranks that shard everything. Returns what each rank of this process has.
fn trained(config: Launch) -> Vec<(usize, LossesAndWeights)> {
    let ranks = launch(config, |world| {
        let mesh = DeviceMesh::new(world, [world.size()], ["shard"])?;
        let (losses, net, error) = train(&mesh, FullyShard::new().with_units(["blocks.*"]))?;
        assert!(error.is_none(), "{error:?}");
        let net = full_model(&net)?;
        let layers = [&net.first].into_iter().chain(&net.blocks);
        let values = |layer: &Linear| {
            let bias = layer.bias.as_ref().expect("every layer has one").val();
            [layer.weight.val().into_data(), bias.into_data()]
                .map(|data| data.try_to_vec::<f32>().expect("f32"))
        };
        Ok((losses, layers.flat_map(values).collect()))
    });
    ranks.unwrap_or_else(|error| panic!("{error}"))
}

#[test]
fn training_on_another_backend_gives_the_same_bits() {
    let threads = trained(Launch::threads(3));
    assert!(
        threads
            .iter()
            .all(|(_, (losses, _))| losses[STEPS - 1] < losses[0]),
        "it has learned"
    );
    assert_eq!(trained(Launch::on_backend(Naive::new(3))), threads);
}

#[cfg(unix)]
#[test]
fn training_in_two_processes_of_another_backend_gives_the_same_bits() {
    let test =
        "backend::training::training_in_two_processes_of_another_backend_gives_the_same_bits";
    super::two_processes::in_two_processes(test, |transport| {
        let job = downstream::naive::NaiveJob::new(transport);
        let own = trained(Launch::on_backend(job.backend(2)));
        let threads = trained(Launch::threads(4))
            .into_iter()
            .filter(|(rank, _)| own.iter().any(|(own, _)| own == rank));
        assert_eq!(own, threads.collect::<Vec<_>>());
        assert_eq!(own.len(), 2);
    });
}

/// Trains on hosts of which one is broken. Returns the error of all ranks, and the number of steps
/// that the rank with the fault has made.
fn found_on_broken(shape: [usize; 2], fault: Fault) -> (CommError, usize) {
    let config = Launch::on_backend(Broken::new(shape[0] * shape[1], fault));
    let found = launch(config, |world| {
        let mesh = DeviceMesh::new(world, shape, ["replicate", "shard"])?;
        let replicated = FullyShard::new()
            .with_units(["blocks.*"])
            .with_shard_placement_fn(|param| {
                (param.shape.len() == 1).then_some(Placement::Replicate)
            });
        let (losses, _, error) = train(&mesh, replicated.with_replica_check_every(1))?;
        let Some(Error::Comm(error)) = error else {
            panic!("{error:?}, after {} steps", losses.len())
        };
        Ok((error, losses.len()))
    });
    let found = found.unwrap();
    assert!(
        found.iter().all(|(_, (error, _))| *error == found[0].1.0),
        "{found:?}"
    );
    found[fault.rank].1.clone()
}

/// An error in a gathered weight is found when its unit is reduced, one in a gradient with the next
/// unit. The root's unit is the last: it is found in the next step, where it has made weights
/// differ.
#[test]
fn a_bit_error_of_one_host_names_the_parameter_and_the_rank() {
    use ReplicatedValue::{GatheredWeight, Gradient};
    for (shape, op, label, of, param, during) in [
        (
            [1, 2],
            Op::AllGather,
            "blocks.1",
            GatheredWeight,
            "blocks.1.weight",
            Op::ReduceScatter,
        ),
        (
            [1, 3],
            Op::AllGather,
            "blocks.1",
            GatheredWeight,
            "blocks.1.weight",
            Op::ReduceScatter,
        ),
        (
            [2, 3],
            Op::AllGather,
            "root",
            GatheredWeight,
            "first.weight",
            Op::ReduceScatter,
        ),
        (
            [2, 1],
            Op::AllReduce,
            "blocks.2",
            Gradient,
            "blocks.2.weight",
            Op::AllReduce,
        ),
        (
            [3, 1],
            Op::AllReduce,
            "blocks.2",
            Gradient,
            "blocks.2.weight",
            Op::AllReduce,
        ),
        (
            [3, 2],
            Op::AllReduce,
            "blocks.2",
            Gradient,
            "blocks.2.bias",
            Op::ReduceScatter,
        ),
        (
            [3, 2],
            Op::AllReduce,
            "root",
            Gradient,
            "first.bias",
            Op::ReduceScatter,
        ),
        (
            [1, 3],
            Op::AllReduce,
            "root",
            Gradient,
            "first.bias",
            Op::ReduceScatter,
        ),
    ] {
        let fault = Fault {
            rank: 1,
            op,
            label,
            number: 4,
        };
        let (error, made) = found_on_broken(shape, fault);
        let text = error.to_string();
        let CommError::Diverged {
            rank,
            other,
            param: its,
            of: what,
            step,
            majority,
            during: found,
        } = error
        else {
            panic!("{shape:?} {label}: {text}")
        };
        assert_eq!(
            (what, &*its, found.op, step),
            (of, param, during, 4),
            "{shape:?} {label}: {text}"
        );
        assert_eq!(
            made,
            if of == Gradient && label == "root" {
                4
            } else {
                3
            },
            "{shape:?} {label}: {text}"
        );
        match found.ranks.len() {
            2 => assert!(
                !majority && [rank, other].contains(&1),
                "{shape:?} {label}: {text}"
            ),
            _ => assert!(majority && rank == 1, "{shape:?} {label}: {text}"),
        }
    }
}
