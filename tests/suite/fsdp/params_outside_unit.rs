//! Weights that a program keeps, reads elsewhere or never uses.

use std::panic::{AssertUnwindSafe, catch_unwind};

use burn::backend::DispatchTensor;
use burn::module::{Module, Param};
use burn::nn::{Linear, LinearConfig};
use burn::optim::GradientsParams;
use burn::tensor::{Device, Tensor, TensorData};
use burn_dtensor::comm::{CommError, Launch, Op, Phase, World, launch};
use burn_dtensor::fsdp::ParamError;
use burn_dtensor::fsdp::{FullyShard, ReshardAfterForward, TensorTree, fully_shard, unit};
use burn_dtensor::mesh::DeviceMesh;
use burn_dtensor::parallel::{Plan, Style, parallelize};
use burn_dtensor::{Error, Result};

use super::support::{on_device, tensor, values};
use crate::launched;

#[derive(Module, Debug)]
pub struct Net {
    pub first: Linear,
    pub blocks: Vec<Linear>,
}

pub const WIDTH: usize = 6;

pub fn net(device: &Device) -> Net {
    device.seed(11);
    let linear = || LinearConfig::new(WIDTH, WIDTH).init(device);
    let net = Net {
        first: linear(),
        blocks: (0..2).map(|_| linear()).collect(),
    };
    let _ = values(&net, None);
    net
}

pub fn mesh(world: &World) -> Result<DeviceMesh> {
    DeviceMesh::new(world, [world.size()], ["shard"])
}

pub fn config() -> FullyShard {
    FullyShard::new().with_units(["blocks.*"])
}

/// Runs `program` on two ranks, with the model sharded and not; `prepare` comes before.
pub fn sharded<T: Send>(
    prepare: fn(Net) -> Net,
    config: fn() -> FullyShard,
    program: impl Fn(&World, &Net, &Net) -> Result<T> + Sync,
) -> Vec<T> {
    let model = net(&Device::flex());
    let ranks = launch(Launch::threads(2), |world| {
        let plain = prepare(on_device(&model, &world.device().clone().autodiff()));
        let sharded = fully_shard(plain.clone(), &mesh(world)?, config())?;
        program(world, &sharded, &plain)
    });
    ranks.map(launched::values).unwrap()
}

pub fn bias(linear: &Linear) -> Tensor<1> {
    linear.bias.as_ref().expect("made with a bias").val()
}

pub fn x(world: &World) -> Tensor<2> {
    tensor(
        world.rank() as u64 + 1,
        [3, WIDTH],
        &world.device().clone().autodiff(),
    )
}

#[test]
fn the_data_of_a_weight_kept_past_its_unit_outlives_backward() {
    sharded(
        |net| net,
        config,
        |world, net, plain| {
            let mut kept = None;
            let y = unit(&net.blocks[0], x(world), |block, x| {
                kept = Some(bias(block));
                block.forward(x)
            });
            let data: TensorData = kept.take().expect("set in forward").into_data();
            let slice = data.as_slice::<f32>().expect("f32");
            let _ = y.sum().backward();
            // Whoever gets the memory next.
            let _other: Vec<_> = (0..64).map(|_| vec![7.0f32; WIDTH]).collect();
            assert_eq!(
                slice,
                bias(&plain.blocks[0])
                    .into_data()
                    .as_slice::<f32>()
                    .expect("f32")
            );
            Ok(())
        },
    );
}

#[test]
fn a_weight_may_be_read_while_another_thread_runs_backward() {
    sharded(
        |net| net,
        || config().with_reshard_after_forward(ReshardAfterForward::Always),
        |world, net, plain| {
            let mut kept = None;
            let y = unit(&net.blocks[0], x(world), |block, x| {
                kept = Some(block.weight.val());
                block.forward(x)
            });
            let (kept, loss) = (kept.expect("set in forward").detach(), y.sum());
            let expected = (plain.blocks[0].weight.val() * 2.0).into_data();
            let grads = std::thread::scope(|scope| {
                let backward = scope.spawn(|| GradientsParams::from_grads(loss.backward(), net));
                for _ in 0..200 {
                    assert_eq!((kept.clone() * 2.0).into_data(), expected);
                }
                backward.join().expect("backward does not fail")
            });
            assert_eq!(grads.len(), 2);
            assert_eq!((kept * 2.0).into_data(), expected, "and after it");
            Ok(())
        },
    );
}

#[test]
fn one_rank_may_print_a_kept_weight() {
    sharded(
        |net| net,
        config,
        |world, net, plain| {
            let mut kept = None;
            let y = unit(&net.blocks[0], x(world), |block, x| {
                kept = Some(block.weight.val());
                block.forward(x)
            });
            if world.rank() == 0 {
                let kept = kept.expect("set in forward");
                assert_eq!(kept.into_data(), plain.blocks[0].weight.val().into_data());
            }
            let gathers = || world.ledger().calls_in(Op::AllGather, Phase::Backward);
            assert_eq!(gathers(), 1 - world.rank() as u64);
            let _ = y.sum().backward();
            assert_eq!(
                gathers(),
                1,
                "backward reads what was gathered for the print"
            );
            Ok(())
        },
    );
}

/// Tensors that cannot be mapped.
struct Broken(Tensor<2>);

impl TensorTree for Broken {
    fn map_tensors(self, _: &mut dyn FnMut(DispatchTensor) -> DispatchTensor) -> Self {
        panic!("no map of {:?}", self.0.dims())
    }
}

#[test]
fn a_unit_that_unwinds_closes_itself_and_no_other() {
    sharded(
        |net| net,
        config,
        |world, net, plain| {
            world.ledger().reset();
            let y = unit(net, x(world), |net, x| {
                let caught = catch_unwind(AssertUnwindSafe(|| {
                    unit(&net.blocks[0], (), |_, ()| Broken(x.clone()));
                }));
                assert!(caught.is_err());
                // Still the root's: gathered once.
                net.first.forward(net.first.forward(x))
            });
            assert_eq!(
                world.ledger().calls(Op::AllGather),
                2,
                "the root and the block"
            );
            let expected = plain.first.forward(plain.first.forward(x(world)));
            assert_eq!(y.clone().into_data(), expected.into_data());
            let grads = GradientsParams::from_grads(y.sum().backward(), net);
            assert_eq!(grads.len(), 2);
            Ok(())
        },
    );
}

#[test]
fn a_call_that_fails_leaves_units_as_they_were() {
    let model = net(&Device::flex());
    launch(Launch::threads(2), |world| {
        let inner = fully_shard(model.blocks[0].clone(), &mesh(world)?, FullyShard::new())?;
        // Parallelized on a mesh that has no root in common with the one to shard on.
        let other = DeviceMesh::new(world, [2], ["tp"])?;
        let first = parallelize(
            model.first.clone(),
            &other,
            Plan::new().with_style("", Style::colwise()),
        )?;
        let outer = |first| Net {
            first,
            blocks: vec![inner.clone()],
        };
        let failed = fully_shard(outer(first), &mesh(world)?, FullyShard::new());
        assert!(matches!(
            failed,
            Err(Error::Param(ParamError::Meshes { .. }))
        ));
        let again = |model: &Linear| {
            fully_shard(model.clone(), &mesh(world).unwrap(), FullyShard::new()).unwrap_err()
        };
        assert!(again(&inner).to_string().contains("unit `root`"));
        let _outer = fully_shard(outer(model.first.clone()), &mesh(world)?, FullyShard::new())?;
        assert!(again(&inner).to_string().contains("unit `blocks.0`"));
        Ok(())
    })
    .unwrap();
}

#[test]
fn parameters_read_alone_in_another_order_are_told_apart() {
    let error = launch(Launch::threads(2), |world| {
        let param = |value: f32| Param::from_tensor(Tensor::<1>::full([4], value, world.device()));
        let model = fully_shard(
            vec![param(1.0), param(10.0)],
            &mesh(world)?,
            FullyShard::new(),
        )?;
        for at in if world.rank() == 0 { [0, 1] } else { [1, 0] } {
            let _ = model[at].val();
        }
        Ok(())
    })
    .unwrap_err();
    assert!(
        matches!(&error.cause, Error::Comm(CommError::Mismatch { .. })),
        "{error}"
    );
    let text = error.to_string();
    assert!(
        ["`0 (outside its unit)`", "`1 (outside its unit)`"]
            .iter()
            .all(|label| text.contains(label)),
        "{text}"
    );
}
