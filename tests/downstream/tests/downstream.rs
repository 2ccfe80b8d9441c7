//! They compute what they do on one device, wherever their inputs lie.

use burn::module::Param;
use burn::tensor::{Device, Distribution, Tensor, Tolerance};
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
