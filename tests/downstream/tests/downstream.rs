//! They compute what they do on one device, wherever their inputs lie.

use burn::module::Param;
use burn::tensor::{Device, Distribution, Tensor, Tolerance};
use burn_dtensor::fsdp::{ParamInfo, ParamPlacement};
use burn_dtensor::prelude::*;
use burn_dtensor::testing::prove::{case, prove};
use burn_dtensor::testing::{MeshTest, assert_full_close};
use downstream::{Moments, Projection, QuickGelu};

#[test]
fn the_prover_finds_nothing_wrong_with_its_operators() {
    let report = prove(&[
        case!("quick_gelu", (x: 2 = [3, 6]) => x.quick_gelu()),
        case!("moments", (x: 2 = [3, 6]) => x.moments()),
    ]);
    assert_eq!(report.wrong(), 0, "{report}");
}

#[test]
fn a_layer_of_its_own_goes_where_its_style_says() {
    let device = Device::flex();
    let random = |shape: [usize; 2]| Tensor::<2>::random(shape, Distribution::Default, &device);
    let (x, weight) = (random([4, 6]), random([8, 6]));
    let model = Projection { weight: Param::from_tensor(weight) };
    let expected = model.forward(x.clone()).into_data();
    MeshTest::new([2], ["tp"]).run(|mesh| {
        let colwise = Style::placed(Placement::Shard(0)).with_input(Placement::Replicate);
        let model = parallelize(model.clone(), mesh, Plan::new().with("weight", colwise))?;
        let rows = DTensor::distribute_local(x.clone(), mesh, &[Placement::Shard(0)])?;
        let y = model.forward_dtensor(rows);
        assert_eq!(y.placements(), [Placement::Shard(1)]);
        assert_full_close(&y, expected.clone(), Tolerance::default());
        Ok(())
    });
}

/// The rows of a weight by the ranks' shares of memory: 5, 1 and 2.
#[test]
fn its_placement_function_gives_ranks_different_lengths() {
    let device = Device::flex();
    let weight = Tensor::<2>::random([8, 6], Distribution::Default, &device);
    let x = Tensor::<2>::random([4, 6], Distribution::Default, &device);
    let model = Projection { weight: Param::from_tensor(weight.clone()) };
    let expected = model.forward(x.clone()).into_data();
    MeshTest::new([3], ["shard"]).run(|mesh| {
        let by_memory = |_: ParamInfo<'_>| Some(ParamPlacement::ragged(0, [5, 1, 2]));
        let sharded = fully_shard(model.clone(), mesh, FullyShard::new().shard_placement_fn(by_memory))?;
        assert_eq!(sharded.weight.base().dims(), [[5, 6], [1, 6], [2, 6]][mesh.rank()]);
        let y = unit(&sharded, x.clone(), |model, x| model.forward(x));
        y.into_data().assert_approx_eq::<f32>(&expected, Tolerance::default());
        assert_eq!(full_model(&sharded)?.weight.val().into_data(), weight.to_data());
        Ok(())
    });
}
