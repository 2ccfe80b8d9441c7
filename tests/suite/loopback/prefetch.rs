//! Units that are sharded within a process on some ranks, and over processes on others.

use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::tensor::{Device, Tensor};
use burn_dtensor::comm::{Launch, launch};
use burn_dtensor::fsdp::{ParamInfo, ParamPlacement};
use burn_dtensor::prelude::*;
use burn_dtensor::testing::LoopbackJob;

#[derive(Module, Debug)]
struct Net {
    first: Linear,
    expert: Linear,
    last: Linear,
}

/// The expert is sharded over pairs of ranks, of which the processes divide one. All ranks post the all-gather of the unit
/// that follows it before the program's own collective, or all after it.
#[test]
fn ranks_prefetch_the_same_units_whichever_processes_divide_their_groups() {
    let ends = LoopbackJob::new(2, 19).run(|_, processes| {
        launch(Launch::on_backend(processes.backend(3)), |world| {
            let mesh = DeviceMesh::new(world, [3, 2], ["a", "b"])?;
            let device: Device = world.device().clone().autodiff();
            let layer = || LinearConfig::new(6, 6).with_bias(false).init(&device);
            let expert = |param: ParamInfo<'_>| {
                let is_expert = param.path.starts_with("expert");
                is_expert.then(|| ParamPlacement::from(Placement::Shard(0)).with_mesh_dims("b"))
            };
            let config = FullyShard::new().with_units(["first", "expert", "last"]).with_shard_dims(["a", "b"]);
            let net = Net { first: layer(), expert: layer(), last: layer() };
            let net = fully_shard(net, &mesh, config.with_shard_placement_fn(expert))?;
            for _ in 0..3 {
                let y = unit(&net, Tensor::<2>::ones([2, 6], &device), |net, x| {
                    let x = unit(&net.first, x, |layer, x| layer.forward(x));
                    let x = unit(&net.expert, x, |layer, x| {
                        let load = mesh.all_reduce(1.0, ReduceOp::Sum).expect("all ranks call it");
                        layer.forward(x) / load
                    });
                    unit(&net.last, x, |layer, x| layer.forward(x))
                });
                drop(y.sum().backward());
            }
            Ok(())
        })
        .map(drop)
        .map_err(|error| error.to_string())
    });
    assert_eq!(ends, [Ok(()), Ok(())]);
}
