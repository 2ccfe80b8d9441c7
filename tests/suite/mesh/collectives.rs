//! Plain tensors over a mesh, against values worked out from the ranks.

use burn::tensor::{Device, Int, Tensor};
use burn_dtensor::Error;
use burn_dtensor::comm::{CommError, Op, ReduceOp};
use burn_dtensor::mesh::DeviceMesh;
use burn_dtensor::testing::MeshTest;

use super::{on, tensor, values};

/// `rank * 100 + place`.
fn own(rank: usize, len: usize) -> Vec<f32> {
    (0..len).map(|place| (rank * 100 + place) as f32).collect()
}

#[test]
fn tensors_go_along_the_dimension_of_a_slice() {
    on(6, |world| {
        let mesh = DeviceMesh::new(world, [2, 3], ["dp", "tp"])?;
        let (tp, place) = (mesh.slice("tp")?, world.rank() % 3);
        let row: Vec<usize> = (0..3).map(|place| world.rank() / 3 * 3 + place).collect();
        let x = || tensor([5, 2], own(world.rank(), 10), world);
        for (source, &rank) in row.iter().enumerate() {
            assert_eq!(values(tp.broadcast(x(), source)?), own(rank, 10));
            // Five rows over three ranks: 2, 2 and 1.
            let rows = [0..4, 4..8, 8..10][place].clone();
            assert_eq!(values(tp.scatter(x(), 0, source)?), own(rank, 10)[rows]);
        }
        let all: Vec<f32> = row.iter().flat_map(|&rank| own(rank, 10)).collect();
        assert_eq!(values(tp.all_gather(x(), 0)?), all);
        let sum: Vec<f32> = (0..10)
            .map(|at| (row[0] + row[1] + row[2]) as f32 * 100.0 + 3.0 * at as f32)
            .collect();
        let rows = [0..4, 4..8, 8..10][place].clone();
        assert_eq!(values(tp.reduce_scatter(x(), 0, ReduceOp::Sum)?), sum[rows]);
        // Columns 0 and 1 fall on the first two ranks, the third has none.
        let turned = values(tp.all_to_all(x(), 0, 1)?);
        let column: Vec<f32> = if place < 2 {
            all.iter().skip(place).step_by(2).copied().collect()
        } else {
            vec![]
        };
        assert_eq!(turned, column);
        Ok(())
    });
}

#[test]
fn all_ranks_of_a_mesh_take_part_in_its_own_collectives() {
    on(4, |world| {
        // Ranks in an order of their own: sources and parts go by it.
        let mesh = DeviceMesh::from_ranks(world, [2, 0, 3, 1], [2, 2], ["dp", "tp"])?;
        let place = [1, 3, 0, 2][world.rank()];
        let x = || tensor([4], own(world.rank(), 4), world);
        assert_eq!(values(mesh.broadcast(x(), 2)?), own(3, 4));
        assert_eq!(values(mesh.scatter(x(), 0, 3)?), [100.0 + place as f32]);
        let first: Tensor<1, Int> = mesh.all_gather(x().int().slice(0..1), 0)?;
        assert_eq!(
            first.into_data().iter::<i64>().collect::<Vec<_>>(),
            [200, 0, 300, 100]
        );
        Ok(())
    });
}

#[test]
fn results_are_plain_and_are_counted_by_the_names_of_the_dimensions() {
    on(4, |world| {
        let mesh = DeviceMesh::new(world, [2, 2], ["dp", "tp"])?;
        let x = Tensor::<1>::ones([4], &Device::flex().autodiff()).require_grad();
        world.ledger().reset();
        assert!(
            !mesh
                .slice("tp")?
                .broadcast(x.clone() * 2.0, 0)?
                .device()
                .is_autodiff()
        );
        mesh.all_gather(x.clone(), 0)?;
        mesh.flatten_as(["dp", "tp"], "batch")?
            .all_reduce(x, ReduceOp::Avg)?;
        let counted = |op, label: &str| {
            world
                .ledger()
                .total(|key| key.op == op && &*key.label == label)
                .calls
        };
        assert_eq!(counted(Op::Broadcast, "mesh_tp"), 1);
        assert_eq!(counted(Op::AllGather, "mesh_dp_tp"), 1);
        assert_eq!(counted(Op::AllReduce, "mesh_batch"), 1);
        assert_eq!(world.ledger().total(|_| true).calls, 3);
        Ok(())
    });
}

#[test]
fn what_does_not_fit_is_an_error_on_every_rank() {
    type Wrong = fn(&DeviceMesh, Tensor<1>) -> burn_dtensor::Result<Tensor<1>>;
    let wrong: [(Wrong, &str); 5] = [
        (|mesh, x| mesh.broadcast(x, 2), "2"),
        (|mesh, x| mesh.scatter(x, 1, 0), "1"),
        (|mesh, x| mesh.all_gather(x, 1), "1"),
        (|mesh, x| mesh.reduce_scatter(x, 1, ReduceOp::Sum), "1"),
        (|mesh, x| mesh.all_to_all(x, 0, 0), "0"),
    ];
    for (wrong, part) in wrong {
        let error = MeshTest::new([2], ["tp"])
            .run_failing(|mesh| wrong(mesh, Tensor::ones([4], mesh.device())));
        let Error::Comm(CommError::InvalidArgument { label, problem, .. }) = &error.cause else {
            panic!("{error}")
        };
        assert_eq!(label, "mesh_tp");
        assert!(problem.contains(part), "{problem}");
    }
    let differ: [Wrong; 3] = [
        |mesh, x| mesh.broadcast(x, mesh.rank()),
        |mesh, x| mesh.broadcast(x.slice(0..4 - mesh.rank()), 0),
        |mesh, x| mesh.all_gather(x.slice(0..4 - mesh.rank()), 0),
    ];
    for wrong in differ {
        let error = MeshTest::new([2], ["tp"])
            .run_failing(|mesh| wrong(mesh, Tensor::ones([4], mesh.device())));
        assert!(
            matches!(error.cause, Error::Comm(CommError::Mismatch { .. })),
            "{error}"
        );
    }
}
