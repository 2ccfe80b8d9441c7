//! Weights in mixed precision: what is stored, what layers read, and what is sent for it.

use burn::module::{Module, Param};
use burn::nn::{Linear, LinearConfig};
use burn::optim::GradientsParams;
use burn::tensor::{DType, Device, Tensor};
use burn_dtensor::Error;
use burn_dtensor::comm::{Op, Phase};
use burn_dtensor::dtensor::DTensor;
use burn_dtensor::fsdp::ParamError;
use burn_dtensor::fsdp::{
    FsdpError, FullyShard, MixedPrecisionPolicy, ParamExt, ParamInfo, ReshardAfterForward,
    full_model, fully_shard, remesh, unit, unshard,
};
use burn_dtensor::mesh::DeviceMesh;
use burn_dtensor::parallel::{Plan, Style, parallelize};
use burn_dtensor::placement::Placement;
use burn_dtensor::testing::MeshTest;

use crate::fsdp::support::{Holder, on_device, tensor, values};

const WIDTH: usize = 5;
const ELEMENTS: u64 = (WIDTH * WIDTH + WIDTH) as u64;

fn layer() -> Linear {
    let device = Device::flex();
    device.seed(2);
    let layer = LinearConfig::new(WIDTH, WIDTH).init(&device);
    let _ = values(&layer, None);
    layer
}

fn half() -> MixedPrecisionPolicy {
    MixedPrecisionPolicy::new().with_param_dtype(DType::BF16)
}

fn run(layer: &Linear, x: Tensor<2>) -> Tensor<2> {
    unit(layer, x, |layer, x| layer.forward(x))
}

#[test]
fn shards_records_and_the_full_model_keep_what_is_stored() {
    let plain = layer();
    MeshTest::new([2], ["shard"]).run(|mesh| {
        let device = mesh.device().clone().autodiff();
        let sharded = fully_shard(
            on_device(&plain, &device),
            mesh,
            FullyShard::new().with_mixed_precision(half()),
        )?;
        let exact = |model: &Linear| {
            assert_eq!(
                values(&full_model(model).unwrap(), None),
                values(&plain, None)
            );
        };
        exact(&sharded);
        let loss = run(&sharded, tensor(1, [3, WIDTH], &device))
            .cast(DType::F32)
            .sum();
        exact(&sharded);
        let grads = GradientsParams::from_grads(loss.backward(), &sharded);
        assert_eq!(sharded.weight.base().dtype(), DType::F32);
        assert_eq!(
            sharded
                .weight
                .shard_grad(&grads)
                .expect("it is used")
                .dtype(),
            DType::F32
        );
        // What was gathered ahead is for a forward, and still there for it.
        unshard(&sharded)?.wait()?;
        exact(&sharded);
        mesh.world().ledger().reset();
        run(&sharded, tensor(1, [3, WIDTH], &device));
        assert_eq!(mesh.world().ledger().calls(Op::AllGather), 0);
        // Outside the unit, too, a weight is what layers compute with.
        let read = sharded.weight.val();
        assert_eq!(
            read.into_data(),
            plain.weight.val().cast(DType::BF16).into_data()
        );
        Ok(())
    });
}

#[test]
fn what_is_sent_has_the_types_of_the_policy() {
    let plain = layer();
    for (reduce, size) in [
        (None, 4),
        (Some(DType::BF16), 2),
        (Some(DType::F32), 4),
        (Some(DType::F64), 8),
    ] {
        MeshTest::new([2, 2], ["replicate", "shard"]).run(|mesh| {
            let device = mesh.device().clone().autodiff();
            let policy = reduce
                .into_iter()
                .fold(half(), MixedPrecisionPolicy::with_reduce_dtype);
            let config = FullyShard::new()
                .with_reshard_after_forward(ReshardAfterForward::Always)
                .with_mixed_precision(policy);
            let sharded = fully_shard(on_device(&plain, &device), mesh, config)?;
            let ledger = mesh.world().ledger();
            ledger.reset();
            run(&sharded, tensor(1, [3, WIDTH], &device))
                .cast(DType::F32)
                .sum()
                .backward();
            for phase in [Phase::Forward, Phase::Backward] {
                assert_eq!(ledger.calls_in(Op::AllGather, phase), 1);
                assert_eq!(ledger.bytes_in(Op::AllGather, phase), 2 * ELEMENTS);
            }
            // Beside the gradients a number for each parameter, and rank.
            let numbers = [
                ledger.bytes(Op::ReduceScatter) / size,
                ledger.bytes(Op::AllReduce) / size,
            ];
            let own: u64 = values(&sharded, None)
                .values()
                .map(|shard| shard.len() as u64)
                .sum();
            assert_eq!(numbers, [ELEMENTS + 2 * 2, own + 2]);
            assert_eq!(
                [ledger.calls(Op::ReduceScatter), ledger.calls(Op::AllReduce)],
                [1, 1]
            );
            Ok(())
        });
    }
}

/// A layer stored in single precision, one in half, and the casts between them.
#[derive(Module, Debug)]
struct Mixed {
    wide: Linear,
    narrow: Linear,
}

impl Mixed {
    fn new() -> Self {
        let mut narrow = layer();
        narrow.weight = narrow.weight.map(|weight| weight.cast(DType::F16));
        narrow.bias = narrow
            .bias
            .map(|bias| bias.map(|bias| bias.cast(DType::F16)));
        Self {
            wide: layer(),
            narrow,
        }
    }

    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        unit(self, x, |mixed, x| {
            let read =
                |layer: &Linear, x: Tensor<2>| layer.forward(x.cast(layer.weight.val().dtype()));
            read(&mixed.narrow, read(&mixed.wide, x).tanh())
        })
    }
}

fn grads_of(model: &Mixed, device: &Device) -> GradientsParams {
    let loss = model
        .forward(tensor(1, [3, WIDTH], device))
        .cast(DType::F32)
        .sum();
    GradientsParams::from_grads(loss.backward(), model)
}

/// Every rank has the same batch, so that averages are what each has. One reduce-scatter carries
/// all gradients, in `f32` of one layer and `f16` of the other unless the policy says otherwise.
#[test]
fn parameters_of_several_stored_types_are_one_unit() {
    let mixed = Mixed::new();
    for (policy, sizes, config) in [
        (None, [4, 2], FullyShard::new()),
        (
            Some(DType::BF16),
            [4, 2],
            FullyShard::new().with_mixed_precision(half()),
        ),
        (
            Some(DType::BF16),
            [4, 4],
            FullyShard::new().with_mixed_precision(half().with_reduce_dtype(DType::F32)),
        ),
    ] {
        MeshTest::new([2], ["shard"]).run(|mesh| {
            let device = mesh.device().clone().autodiff();
            let plain = on_device(&mixed, &device);
            let sharded = fully_shard(plain.clone(), mesh, config.clone())?;
            let ledger = mesh.world().ledger();
            ledger.reset();
            let mut grads = grads_of(&sharded, &device);
            assert_eq!(
                [ledger.calls(Op::AllGather), ledger.calls(Op::ReduceScatter)],
                [1, 1]
            );
            // The gradients, and a number for each of four parameters and each rank, in the type of
            // the first gradient.
            let [wide, narrow] = sizes;
            let sent = (wide + narrow) * ELEMENTS + wide * 4 * 2;
            assert_eq!(ledger.bytes(Op::ReduceScatter), sent, "{policy:?}");
            let of = |layer: &Linear| layer.weight.shard_grad(&grads).expect("it is used").dtype();
            assert_eq!(
                [of(&sharded.wide), of(&sharded.narrow)],
                [DType::F32, DType::F16]
            );
            let full = full_model(&sharded.clone().map(&mut Holder(&mut grads)))?;
            let by_hand = match policy {
                None => plain,
                Some(dtype) => super::reference::with_weights_in(plain, |_| Some(dtype)),
            };
            let expected = by_hand
                .clone()
                .map(&mut Holder(&mut grads_of(&by_hand, &device)));
            for (found, expected) in [
                (&full.wide, &expected.wide),
                (&full.narrow, &expected.narrow),
            ] {
                assert_eq!(
                    found.weight.base().into_data(),
                    expected.weight.base().into_data(),
                    "{policy:?}"
                );
            }
            Ok(())
        });
    }
}

/// Whole on every rank, but not as it is stored: a copy of the unit's own.
#[test]
fn a_replicated_weight_is_cast_too() {
    let plain = layer();
    MeshTest::new([2], ["shard"]).run(|mesh| {
        let device = mesh.device().clone().autodiff();
        let device = device.gradient_checkpointing();
        let config = FullyShard::new()
            .with_reshard_after_forward(ReshardAfterForward::Always)
            .with_mixed_precision(half());
        let replicated =
            |param: ParamInfo<'_>| (param.path == "weight").then_some(Placement::Replicate);
        let x = || tensor::<2>(1, [3, WIDTH], &device);
        let [full, sizes] =
            [config.clone().with_shard_placement_fn(replicated), config].map(|config| {
                let model = fully_shard(on_device(&plain, &device), mesh, config).unwrap();
                let output = run(&model, x());
                let grads = output.clone().cast(DType::F32).sum().backward();
                let grad = model.weight.full_grad(&grads).unwrap().expect("it is used");
                assert_eq!(grad.dtype(), DType::F32);
                (output.into_data(), grad.into_data())
            });
        assert_eq!(full, sizes);
        Ok(())
    });
}

/// It counts as zeros there, of the type that is reduced in.
#[test]
fn a_rank_may_leave_out_a_weight() {
    let plain = layer();
    for reduce in [None, Some(DType::BF16)] {
        MeshTest::new([2], ["shard"]).run(|mesh| {
            let device = mesh.device().clone().autodiff();
            let policy = reduce
                .into_iter()
                .fold(half(), MixedPrecisionPolicy::with_reduce_dtype);
            let model = fully_shard(
                on_device(&plain, &device),
                mesh,
                FullyShard::new().with_mixed_precision(policy),
            )?;
            let x = Tensor::<2>::ones([1, WIDTH], &device);
            let sum = unit(&model, x, |layer, x| match mesh.rank() {
                0 => layer.forward(x),
                _ => x + layer.bias.as_ref().expect("it has one").val().unsqueeze(),
            });
            let grads = sum.sum().backward();
            let [weight, bias] = [
                model
                    .weight
                    .full_grad(&grads)?
                    .expect("a rank uses it")
                    .into_data(),
                model
                    .bias
                    .as_ref()
                    .expect("it has one")
                    .full_grad(&grads)?
                    .expect("all use it")
                    .into_data(),
            ];
            assert_eq!(
                weight,
                Tensor::<2>::full([WIDTH, WIDTH], 0.5, mesh.device()).into_data()
            );
            assert_eq!(bias, Tensor::<1>::ones([WIDTH], mesh.device()).into_data());
            Ok(())
        });
    }
}

#[test]
fn tensor_parallel_parts_have_the_types_of_the_policy() {
    let plain = layer();
    MeshTest::new([2, 2], ["dp", "tp"]).run(|mesh| {
        let place = |layer: Linear| {
            let plan = Plan::new().with_style("weight", Style::placed(Placement::Shard(1)));
            parallelize(layer, &mesh.slice("tp")?, plan)
        };
        let shard = |layer: Linear| {
            fully_shard(
                layer,
                &mesh.slice("dp")?,
                FullyShard::new().with_mixed_precision(half()),
            )
        };
        for layer in [shard(place(plain.clone())?)?, place(shard(plain.clone())?)?] {
            let x = tensor::<2>(1, [3, WIDTH], mesh.device());
            let x = DTensor::distribute_replicated(x, &mesh.slice("tp")?, &[Placement::Replicate])?;
            unit(&layer, x, |_, x| {
                assert_eq!([x.dtype(), x.local().dtype()], [DType::BF16; 2])
            });
            let part = layer.weight.dtensor()?;
            assert_eq!([part.dtype(), part.local().dtype()], [DType::BF16; 2]);
            let full = layer.weight.val();
            assert_eq!(
                full.into_data(),
                plain.weight.val().cast(DType::BF16).into_data()
            );
            assert_eq!(
                layer.weight.shard().expect("it is sharded").dtype(),
                DType::F32
            );
            assert_eq!(values(&full_model(&layer)?, None), values(&plain, None));
        }
        Ok(())
    });
}

#[test]
fn a_model_on_another_mesh_keeps_its_policies() {
    let plain = layer();
    MeshTest::new([2], ["shard"]).run(|mesh| {
        let policy = half().with_output_dtype(DType::F64).with_excluded(["bias"]);
        let model = fully_shard(
            plain.clone(),
            mesh,
            FullyShard::new().with_mixed_precision(policy),
        )?;
        let model = remesh(model, &DeviceMesh::new(mesh.world(), [2], ["again"])?)?;
        let x = tensor::<2>(1, [3, WIDTH], mesh.device());
        let output = unit(&model, x, |model, x| {
            assert_eq!([x.dtype(), model.weight.val().dtype()], [DType::BF16; 2]);
            assert_eq!(
                model
                    .bias
                    .as_ref()
                    .map(Param::val)
                    .expect("it has one")
                    .dtype(),
                DType::F32
            );
            x
        });
        assert_eq!(output.dtype(), DType::F64);
        Ok(())
    });
}

#[test]
fn wrong_policies_are_typed_errors() {
    let plain = layer();
    MeshTest::new([2], ["shard"]).run(|mesh| {
        let refused =
            |config: FullyShard| fully_shard(plain.clone(), mesh, config).map(|_| ()).expect_err("it is wrong");
        let policy = |policy| refused(FullyShard::new().with_mixed_precision(policy));
        let new = MixedPrecisionPolicy::new;
        for (what, wrong) in [
            ("param_dtype", new().with_param_dtype(DType::I32)),
            ("reduce_dtype", new().with_reduce_dtype(DType::U8)),
            ("output_dtype", new().with_output_dtype(DType::Flex32)),
        ] {
            let error = policy(wrong.clone());
            assert!(matches!(error, Error::Fsdp(FsdpError::ElementType { what: found, .. }) if found == what));
            assert!(error.to_string().contains("F64, F32, F16 or BF16"), "{error}");
            let for_one = refused(FullyShard::new().with_mixed_precision_for(["head"], wrong));
            assert!(matches!(for_one, Error::Fsdp(FsdpError::ElementType { .. })));
        }
        let error = refused(FullyShard::new().with_mixed_precision_for(["weight"], new()));
        assert!(matches!(error, Error::Param(ParamError::NoMatch { what: "unit", .. })), "{error}");
        let error = policy(new().with_excluded(["wieght"]));
        let Error::Param(ParamError::NoMatch { what: "parameter", near_path, .. }) = error else { panic!("{error}") };
        assert_eq!(near_path.as_deref(), Some("weight"));
        Ok(())
    });
}
