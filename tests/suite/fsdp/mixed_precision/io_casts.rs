//! What goes in and out of a unit: the element types inside, outside, and of gradients.

use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::tensor::{Bool, DType, Device, Int, Tensor};
use burn_dtensor::Result;
use burn_dtensor::fsdp::{FullyShard, MixedPrecisionPolicy, fully_shard, unit};
use burn_dtensor::mesh::DeviceMesh;
use burn_dtensor::testing::MeshTest;

use super::reference::with_weights_in;
use crate::fsdp::support::{on_device, tensor};

const WIDTH: usize = 5;

fn layer() -> Linear {
    LinearConfig::new(WIDTH, WIDTH).init(&Device::flex())
}

fn shard(layer: &Linear, mesh: &DeviceMesh, policy: MixedPrecisionPolicy) -> Result<Linear> {
    let device = mesh.device().clone().autodiff();
    fully_shard(
        on_device(layer, &device),
        mesh,
        FullyShard::new().with_mixed_precision(policy),
    )
}

fn half() -> MixedPrecisionPolicy {
    MixedPrecisionPolicy::new().with_param_dtype(DType::BF16)
}

/// What a unit of these tests is given: float tensors of several types wherever they may be, and
/// others.
type Given = (
    (Tensor<2>, Vec<Option<Tensor<2>>>),
    [Tensor<2>; 2],
    Tensor<1, Int>,
    Tensor<1, Bool>,
);

/// A float tensor that is tracked, one that is not, one of another type, and one of the type that
/// it is cast to.
fn given(device: &Device) -> Given {
    let x = |seed| tensor::<2>(seed, [3, WIDTH], device);
    let untracked = x(2).cast(DType::F64);
    let floats = [
        x(3).cast(DType::F64).require_grad(),
        x(4).cast(DType::BF16).require_grad(),
    ];
    let ints = Tensor::from_data([1, 2, 3], (device, DType::I32));
    (
        (x(1).require_grad(), vec![Some(untracked), None]),
        floats,
        ints,
        Tensor::from_data([true, false], device),
    )
}

fn floats(((a, b), [c, d], ..): &Given) -> [Tensor<2>; 4] {
    [
        a.clone(),
        b[0].clone().expect("it was given"),
        c.clone(),
        d.clone(),
    ]
}

fn dtypes(given: &Given) -> ([DType; 4], DType) {
    (floats(given).map(|tensor| tensor.dtype()), given.2.dtype())
}

#[test]
fn float_inputs_are_cast_wherever_they_are_and_their_gradients_back() {
    let layer = layer();
    MeshTest::new([2], ["shard"]).run(|mesh| {
        let layer = shard(&layer, mesh, half())?;
        let given = given(&mesh.device().clone().autodiff());
        let own = dtypes(&given);
        let sum = unit(&layer, given.clone(), |layer, inside| {
            assert_eq!(dtypes(&inside), ([DType::BF16; 4], DType::I32));
            assert_eq!(inside.3.clone().into_data(), given.3.clone().into_data());
            layer.forward(
                floats(&inside)
                    .into_iter()
                    .reduce(|a, b| a + b)
                    .expect("there are four"),
            )
        });
        assert_eq!(sum.dtype(), DType::BF16);
        let grads = sum.cast(DType::F32).sum().backward();
        let [a, b, c, d] = floats(&given);
        let grad = |x: &Tensor<2>| x.grad(&grads).expect("it is tracked");
        assert_eq!([a.dtype(), b.dtype(), c.dtype(), d.dtype()], own.0);
        assert_eq!(
            [&a, &c, &d].map(|x| grad(x).dtype()),
            [DType::F32, DType::F64, DType::BF16]
        );
        let as_bf16 = |x: &Tensor<2>| grad(x).cast(DType::BF16).into_data();
        assert_eq!([as_bf16(&a), as_bf16(&c)], [as_bf16(&d), as_bf16(&d)]);
        Ok(())
    });
}

#[test]
fn inputs_stay_as_they_are_where_a_policy_says_so() {
    let layer = layer();
    MeshTest::new([2], ["shard"]).run(|mesh| {
        let layer = shard(&layer, mesh, half().with_cast_forward_inputs(false))?;
        let given = given(&mesh.device().clone().autodiff());
        unit(&layer, given.clone(), |layer, inside| {
            assert_eq!(dtypes(&inside), dtypes(&given));
            assert_eq!(layer.weight.val().dtype(), DType::BF16);
        });
        Ok(())
    });
}

#[test]
fn outputs_are_cast_wherever_they_are_tracked_or_not() {
    let layer = layer();
    MeshTest::new([2], ["shard"]).run(|mesh| {
        let layer = shard(&layer, mesh, half().with_output_dtype(DType::F64))?;
        let device = mesh.device().clone().autodiff();
        let x = tensor::<2>(1, [3, WIDTH], &device);
        let run = |layer: &Linear, x: Tensor<2>| {
            unit(layer, x, |layer, x| {
                let output = layer.forward(x);
                (
                    vec![Some(output.clone()), None],
                    output.clone().detach(),
                    output.argmax(1),
                )
            })
        };
        let (listed, detached, largest) = run(&layer, x.clone());
        let listed = listed[0].clone().expect("it was returned");
        assert_eq!([listed.dtype(), detached.dtype()], [DType::F64; 2]);
        assert_eq!(listed.clone().into_data(), detached.into_data());
        let untracked = run(&layer.valid(), x.inner());
        assert_eq!(
            untracked.0[0].clone().expect("it was returned").into_data(),
            listed.into_data()
        );
        assert_eq!(untracked.2.into_data(), largest.into_data());
        Ok(())
    });
}

/// The values are those of the stored weights, cast by hand.
#[test]
fn a_forward_without_autodiff_computes_in_the_same_types() {
    let layer = layer();
    MeshTest::new([2], ["shard"]).run(|mesh| {
        let x = tensor::<2>(1, [3, WIDTH], mesh.device());
        let by_hand = with_weights_in(layer.clone(), |_| Some(DType::BF16))
            .forward(x.clone().cast(DType::BF16));
        let sharded = shard(&layer, mesh, half())?.valid();
        let output = unit(&sharded, x, |layer, x| layer.forward(x));
        assert_eq!(output.into_data(), by_hand.into_data());
        Ok(())
    });
}
