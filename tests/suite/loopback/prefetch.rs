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

/// Three ranks in a process. The units of some parameters are sharded over one dimension of the
/// mesh each, so that the processes divide some groups of a unit and not others. All ranks of a
/// group post its all-gather before the program's own collective, or all after it.
fn trains(processes: usize, dims: &[usize], sharded_over: &[(&'static str, &'static str)]) {
    let ends = LoopbackJob::new(processes, 19).run(|_, job| {
        launch(Launch::on_backend(job.backend(3)), |world| {
            let names = &["a", "b", "c"][..dims.len()];
            let mesh = DeviceMesh::new(world, dims, names)?;
            let device: Device = world.device().clone().autodiff();
            let layer = || LinearConfig::new(6, 6).with_bias(false).init(&device);
            let sharded_over = sharded_over.to_vec();
            let placed = move |param: ParamInfo<'_>| {
                let dim = sharded_over
                    .iter()
                    .find(|(unit, _)| param.path.starts_with(unit))?
                    .1;
                Some(ParamPlacement::from(Placement::Shard(0)).with_mesh_dims(dim))
            };
            let config = FullyShard::new()
                .with_units(["first", "expert", "last"])
                .with_shard_dims(names);
            let net = Net {
                first: layer(),
                expert: layer(),
                last: layer(),
            };
            let net = fully_shard(net, &mesh, config.with_shard_placement_fn(placed))?;
            for _ in 0..3 {
                let y = unit(&net, Tensor::<2>::ones([2, 6], &device), |net, x| {
                    let x = unit(&net.first, x, |layer, x| layer.forward(x));
                    let x = unit(&net.expert, x, |layer, x| {
                        let load = mesh
                            .all_reduce(1.0, ReduceOp::Sum)
                            .expect("all ranks call it");
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
    assert_eq!(ends, vec![Ok(()); processes]);
}

#[test]
fn ranks_prefetch_the_same_units_whichever_processes_divide_their_groups() {
    trains(2, &[3, 2], &[("expert", "b")]);
    // Whether a unit is prefetched does not depend on one before it, which is within a process on
    // some of its ranks.
    trains(4, &[3, 2, 2], &[("expert", "b"), ("last", "c")]);
}
