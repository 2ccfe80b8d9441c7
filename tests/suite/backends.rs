//! The same on every backend: ranks as threads of one process, and as processes of their own.
//!
//! The backends' conformance suite holds collectives to brute force; these tests run what is built
//! from them.

use burn::optim::{AdamWConfig, GradientsParams};
use burn::tensor::{Device, Tensor, Tolerance};
use burn_dtensor::comm::CommError;
use burn_dtensor::fsdp::NormType;
use burn_dtensor::mesh_test;
use burn_dtensor::placement::Placement::{Partial, Replicate, Shard};
use burn_dtensor::prelude::*;
use burn_dtensor::testing::{assert_full_close, assert_full_eq};
use itertools::Itertools;

use crate::fsdp::support::{max_diff, on_device, values};
use crate::parallel::support::{Net, data_rank, distribute, plan};

/// `rank * 10 + place`.
fn own(mesh: &DeviceMesh) -> Tensor<1> {
    let first = 10 * mesh.rank() as i64;
    Tensor::from_data(
        [first as f32, first as f32 + 1.0, first as f32 + 2.0],
        mesh.device(),
    )
}

mesh_test!(
    a_tensor_moves_between_all_layouts,
    [2, 2],
    ["dp", "tp"],
    |mesh| {
        // Odd lengths, which leave ranks with other numbers of rows and columns.
        let full = Tensor::<2>::from_data(
            [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0], [6.0, 7.0, 8.0]],
            mesh.device(),
        );
        let layouts = || {
            [Replicate, Shard(0), Shard(1)]
                .into_iter()
                .cartesian_product([Replicate, Shard(0), Shard(1)])
        };
        for ((from_dp, from_tp), (to_dp, to_tp)) in layouts().cartesian_product(layouts()) {
            let tensor = DTensor::distribute_tensor(full.clone(), mesh, &[from_dp, from_tp])?;
            assert_full_eq(&tensor.redistribute(&[to_dp, to_tp])?, full.to_data());
        }
        let terms = DTensor::from_local(full.clone(), mesh, &[Partial(PartialOp::Sum), Replicate])?;
        assert_full_eq(
            &terms.redistribute(&[Shard(1), Shard(0)])?,
            (full * 2.0).to_data(),
        );
        Ok(())
    }
);

mesh_test!(
    products_and_their_gradients_are_those_of_one_device,
    [3],
    ["tp"],
    |mesh| {
        let device = mesh.device().clone().autodiff();
        let x = || {
            Tensor::<2>::from_data([[1.0, -2.0, 3.0, 0.5], [0.0, 4.0, -1.0, 2.0]], &device)
                .require_grad()
        };
        let (one, sizes) = (
            x(),
            DTensor::distribute_replicated(x(), mesh, &[Shard(1)])?.require_grad(),
        );
        let expected = one.clone().matmul(one.clone().transpose());
        let product = sizes.clone().matmul(sizes.clone().transpose());
        assert_full_close(&product, expected.to_data(), Tolerance::default());
        let expected = one
            .grad(&expected.square().sum().backward())
            .expect("a gradient");
        let grad = sizes
            .grad(&product.square().sum().full_tensor()?.backward())
            .expect("a gradient");
        assert_full_close(&grad, expected.into_data(), Tolerance::default());
        Ok(())
    }
);

mesh_test!(
    a_model_trains_as_on_one_device,
    [2, 2],
    ["shard", "tp"],
    |mesh| {
        let device = mesh.device().clone().autodiff();
        let model = mesh.world().run_seeded(5, || Net::new(mesh.device()))?;
        let (rank, ranks) = data_rank(mesh);
        let mut sharded = distribute(
            on_device(&model, &device),
            mesh,
            plan(),
            ReshardAfterForward::Auto,
        )?;
        let mut full = on_device(&model, &Device::flex().autodiff());
        let mut optims = [0, 1].map(|_| AdamWConfig::new().with_epsilon(1e-5).init());
        for step in 0..3 {
            let losses = (0..ranks)
                .map(|rank| full.loss_on(step, rank, &device))
                .reduce(|a, b| a + b)
                .expect("a rank");
            let grads = GradientsParams::from_grads((losses / ranks as f32).backward(), &full);
            full = optims[0].step(1e-2, full, grads);
            let mut grads = GradientsParams::from_grads(
                sharded.loss_on(step, rank, &device).backward(),
                &sharded,
            );
            clip_grad_norm(&sharded, &mut grads, 1e9, NormType::L2)?;
            sharded = optims[1].step(1e-2, sharded, grads);
        }
        let diff = max_diff(&values(&full_model(&sharded)?, None), &values(&full, None));
        assert!(diff < 1e-4, "weights part by {diff}");
        Ok(())
    }
);

mesh_test!(
    slices_reduce_gather_and_send_at_once,
    [2, 2],
    ["dp", "tp"],
    |mesh| {
        let (dp, tp) = (mesh.slice("dp")?, mesh.slice("tp")?);
        let (row, column) = (mesh.rank() / 2, mesh.rank() % 2);
        let (rows, columns) = (dp.communicator(0)?, tp.communicator(0)?);
        for round in 0..20 {
            // To the other rank of the column, and then of the row, which take the messages after
            // the collectives.
            let tensors = || vec![own(mesh).into_dispatch()];
            let sends = [(rows, 1 - row), (columns, 1 - column)]
                .map(|(group, to)| group.send("own".into(), tensors(), to, round));
            let sum = tp
                .all_reduce(own(mesh), ReduceOp::Sum)?
                .into_data()
                .try_to_vec::<f32>()?;
            assert_eq!(
                sum,
                [0, 1, 2].map(|place| (40 * row + 10 + 2 * place) as f32)
            );
            let all = dp
                .all_gather(own(mesh), 0)?
                .into_data()
                .try_to_vec::<f32>()?;
            assert_eq!(
                all[..3],
                [0, 1, 2].map(|place| (10 * column + place) as f32)
            );
            assert_eq!(
                all[3..],
                [0, 1, 2].map(|place| (10 * column + 20 + place) as f32)
            );
            for (group, from, sender) in [
                (rows, 1 - row, 2 * (1 - row) + column),
                (columns, 1 - column, 2 * row + 1 - column),
            ] {
                let mut message = group.receive("own".into(), None, from, round).wait()?;
                assert_eq!((message.from, message.tensors.len()), (from, 1));
                let got = Tensor::<1>::from_dispatch(message.tensors.remove(0))
                    .into_data()
                    .try_to_vec::<f32>()?;
                assert_eq!(got, [0, 1, 2].map(|place| (10 * sender + place) as f32));
            }
            sends.into_iter().try_for_each(|send| send.wait())?;
        }
        Ok(())
    }
);

mesh_test!(
    groups_are_checked_enumerated_and_split,
    [4],
    ["ranks"],
    |mesh| {
        let world = mesh.world();
        let refused = |ranks: &[usize]| {
            matches!(
                world.group(ranks),
                Err(Error::Comm(CommError::InvalidGroup { .. }))
            )
        };
        assert!(
            refused(&[0, 1, 2, 3, 4])
                && refused(&[mesh.rank(), mesh.rank()])
                && refused(&[(mesh.rank() + 1) % 4])
        );
        let named = world
            .subgroup([vec![2, 0], vec![3]])?
            .map(|group| group.group().ranks().to_vec());
        assert_eq!(
            named,
            [Some(vec![2, 0]), None, Some(vec![2, 0]), Some(vec![3])][mesh.rank()]
        );
        let split = world
            .split(&world.all(), Some(mesh.rank() % 2), 4 - mesh.rank())?
            .expect("every rank has a color");
        assert_eq!(split.group().ranks(), [[2, 0], [3, 1]][mesh.rank() % 2]);
        split.barrier("the ranks of a color".into()).wait()?;
        Ok(())
    }
);
