//! A mesh over a part of the world: all ranks make it, its own ranks use it, the others are told
//! so.

use burn::nn::{Linear, LinearConfig};
use burn::tensor::{Distribution, Int, Tensor};
use burn_dtensor::comm::ReduceOp;
use burn_dtensor::dtensor::DTensor;
use burn_dtensor::fsdp::{FullyShard, fully_shard};
use burn_dtensor::mesh::{DeviceMesh, MeshError};
use burn_dtensor::parallel::{Plan, parallelize};
use burn_dtensor::placement::Placement::{Replicate as R, Shard as S};
use burn_dtensor::placement::{Layout, StridedPlacement};
use burn_dtensor::{Error, Result};

use super::{error_of, on, tensor, values};

/// Whatever takes a mesh, by name: what it returns on a rank of the mesh is checked elsewhere.
fn everything(mesh: &DeviceMesh) -> Vec<(&'static str, Result<()>)> {
    let device = mesh.device();
    let x = || Tensor::<2>::ones([4, 2], device);
    let layout = || Layout::new(&[2, 2], &[R, S(0)]).unwrap();
    let (plain, strided) = ([R, S(0)], [R, S(0)].map(StridedPlacement::from));
    let part = || Tensor::<2>::ones([2, 2], device);
    let autodiff = device.clone().autodiff();
    let linear = || -> Linear { LinearConfig::new(4, 4).init(&autodiff) };
    macro_rules! calls {
        ($($name:literal: $call:expr),+ $(,)?) => { vec![$(($name, $call.map(drop))),+] };
    }
    calls![
        "slice": mesh.slice("tp"),
        "flatten": mesh.flatten(["dp", "tp"]),
        "communicator": mesh.communicator(0),
        "all_reduce": mesh.all_reduce(1.0, ReduceOp::Sum),
        "broadcast": mesh.broadcast(x(), 0),
        "scatter": mesh.scatter(x(), 0, 0),
        "all_gather": mesh.all_gather(x(), 0),
        "reduce_scatter": mesh.reduce_scatter(x(), 0, ReduceOp::Sum),
        "all_to_all": mesh.all_to_all(x(), 0, 1),
        "from_local": DTensor::from_local(x(), mesh, &plain),
        "from_local_checked": DTensor::from_local_checked(x(), mesh, &plain),
        "from_local_with_shape": DTensor::from_local_with_shape(part(), mesh, &plain, [4, 2]),
        "from_local_with_layout": DTensor::from_local_with_layout(part(), mesh, layout(), [4, 2]),
        "from_strided": DTensor::from_strided(part(), mesh, &strided, [4, 2]),
        "distribute_tensor": DTensor::distribute_tensor(x(), mesh, &plain),
        "distribute_tensor_to": DTensor::distribute_tensor_to(x(), mesh, layout()),
        "distribute_tensor_from": DTensor::distribute_tensor_from(x(), mesh, layout(), 3),
        "distribute_replicated": DTensor::distribute_replicated(x(), mesh, &plain),
        "distribute_replicated_to": DTensor::distribute_replicated_to(x(), mesh, layout()),
        "zeros": DTensor::<2>::zeros([4, 2], mesh, &plain, device),
        "ones": DTensor::<2>::ones([4, 2], mesh, &plain, device),
        "empty": DTensor::<2>::empty([4, 2], mesh, &plain, device),
        "full": DTensor::<2>::full([4, 2], 1.5, mesh, &plain, device),
        "random": DTensor::<2>::random([4, 2], Distribution::Default, 1, mesh, &plain, device),
        "random_range": DTensor::<1, Int>::random_range([4], 0..9, 1, mesh, &plain, device),
        "arange": DTensor::<1, Int>::arange(0..4, mesh, &plain, device),
        "parallelize": mesh.slice("tp").and_then(|tp| parallelize(linear(), &tp, Plan::new())),
        "fully_shard": fully_shard(linear(), mesh, FullyShard::new()),
    ]
}

#[test]
fn all_ranks_make_the_mesh_and_its_own_ranks_compute_on_it() {
    let outside = on(6, |world| {
        let mesh = DeviceMesh::from_ranks(world, [5, 1, 2, 4], [2, 2], ["dp", "tp"])?;
        let member = [5, 1, 2, 4].contains(&world.rank());
        assert_eq!(mesh.coordinate().is_some(), member);
        assert_eq!((mesh.rank(), mesh.size()), (world.rank(), 4));
        if member {
            let full = tensor([5, 2], (0..10).map(|x| x as f32).collect(), world);
            let x = DTensor::distribute_tensor(full.clone(), &mesh, &[R, S(0)])?;
            let y = x.clone().matmul(x.transpose());
            assert_eq!(
                values(y.full_tensor()?),
                values(full.clone().matmul(full.transpose()))
            );
            for (name, result) in everything(&mesh) {
                assert!(result.is_ok(), "{name}: {:?}", result.err());
            }
        } else {
            for (name, result) in everything(&mesh) {
                let error = error_of(result);
                assert!(
                    matches!(error, Error::Mesh(MeshError::NotAMember { .. })),
                    "{name}: {error:?}"
                );
                let told = format!(
                    "rank {} is not in DeviceMesh(dp=2, tp=2; ranks [5, 1, 2, 4])",
                    world.rank()
                );
                assert!(error.to_string().contains(&told), "{name}: {error}");
            }
        }
        // What concerns the world goes on.
        world.barrier("together")?;
        Ok(!member)
    });
    assert_eq!(outside, [true, false, false, true, false, false]);
}
