//! Tensors as they lie in memory: views come in, and nobody else's memory goes out.

use burn::backend::TensorMetadata;
use burn::tensor::{DType, Int, Shape, Tensor};
use burn_dtensor::comm::{ReduceOp, Sharded, TensorMeta};
use burn_dtensor::placement::Cut;

use super::{into_data, run};

#[test]
fn strided_inputs_are_read_as_they_look() {
    run(3, |world| {
        let (comm, device) = (world.all(), world.device());
        let base = |rank: usize| {
            Tensor::<1, Int>::arange(0..60, device).float().reshape([6, 10]).mul_scalar(rank as f32 + 1.0)
        };
        let view = |rank: usize| base(rank).transpose().slice([2..8, 1..4]);
        let expected: Vec<f32> = (view(0) + view(1) + view(2)).into_data().try_to_vec().unwrap();
        let tensor = view(world.rank()).into_dispatch();
        let sum = comm.all_reduce("sum".into(), vec![tensor.clone()], ReduceOp::Sum).wait()?.remove(0);
        assert_eq!(into_data(sum).try_to_vec::<f32>().unwrap(), expected);
        let gathered =
            comm.all_gather("gather".into(), vec![Sharded { tensor, dim: 0, cut: Cut::Chunks(18) }]).wait()?.remove(0);
        let expected = Tensor::cat(vec![view(0), view(1), view(2)], 0).into_data();
        assert_eq!(into_data(gathered), expected);
        Ok(())
    });
}

#[test]
fn results_do_not_share_memory_with_peers() {
    run(2, |world| {
        let comm = world.all();
        let tensor = Tensor::<1>::ones([8], world.device());
        let metas = vec![TensorMeta { shape: Shape::from([8]), dtype: DType::F32 }];
        let root = (world.rank() == 0).then(|| vec![tensor.clone().into_dispatch()]);
        let copy = comm.broadcast("b".into(), root, metas, 0).wait()?.remove(0);
        world.barrier("all have copied")?;
        assert!(copy.can_mut(), "the copy is the rank's own");
        Ok(())
    });
}
