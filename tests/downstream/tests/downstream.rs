//! Operators, layers and placements of a crate of its own compute what they do on one device,
//! wherever their inputs lie. Its backend and its transport carry the collectives of burn-dtensor.

mod backend;

use burn::module::{Module, Param};
use burn::nn::LinearConfig;
use burn::tensor::{Device, Distribution, Tensor, Tolerance};
use burn_dtensor::comm::{Op, Phase};
use burn_dtensor::fsdp::{ParamInfo, ParamPlacement};
use burn_dtensor::mesh_test;
use burn_dtensor::prelude::*;
use burn_dtensor::testing::prove::{case, prove};
use burn_dtensor::testing::{MeshTest, assert_full_close};
use downstream::{COLWISE, Moments, PairSums, Projection, QuickGelu, ROWWISE};

#[test]
fn the_prover_finds_nothing_wrong_with_its_operators() {
    let report = prove(&[
        case!("quick_gelu", (x: 2 = [3, 6]) => x.quick_gelu()),
        case!("moments", (x: 2 = [3, 6]) => x.moments()),
        case!("pair_sums", (x: 2 = [4, 3]) => x.pair_sums()),
        case!("pair_sums", (x: 2 = [6, 2]) => x.pair_sums()),
    ]);
    assert_eq!(report.wrong(), 0, "{report}");
}

mesh_test!(
    a_layer_of_its_own_goes_where_its_style_says,
    [2],
    ["tp"],
    |mesh| {
        let (x, weight) = mesh.world().run_seeded(7, || {
            let random = |shape: [usize; 2]| {
                Tensor::<2>::random(shape, Distribution::Default, mesh.device())
            };
            (random([4, 6]), random([8, 6]))
        })?;
        let model = Projection {
            weight: Param::from_tensor(weight),
        };
        let expected = model.forward(x.clone()).into_data();
        let model = parallelize(model, mesh, Plan::new().with_style("", COLWISE))?;
        let rows = DTensor::distribute_replicated(x, mesh, &[Placement::Shard(0)])?;
        let y = model.forward_dtensor(rows);
        assert_eq!(y.placements(), [Placement::Shard(1)]);
        assert_full_close(&y, expected, Tolerance::default());
        Ok(())
    }
);

#[test]
fn styles_of_its_own_make_a_pair_with_one_all_reduce_each_way() {
    let device = Device::flex();
    let random = |shape: [usize; 2]| Tensor::<2>::random(shape, Distribution::Default, &device);
    let layer = |shape| Projection {
        weight: Param::from_tensor(random(shape)),
    };
    let (x, model) = (random([4, 6]), vec![layer([8, 6]), layer([5, 8])]);
    let expected = model[1]
        .forward(model[0].forward(x.clone()).quick_gelu())
        .into_data();
    MeshTest::new([2], ["tp"]).run(|mesh| {
        let plan = Plan::new()
            .with_style("0", COLWISE)
            .with_style("1", ROWWISE);
        let device = mesh.device().clone().autodiff();
        let model = parallelize(model.clone().to_device(&device), mesh, plan)?;
        let x = Tensor::from_data(x.to_data(), &device);
        let x = DTensor::distribute_replicated(x, mesh, &[Placement::Replicate])?.require_grad();
        let ledger = mesh.world().ledger();
        ledger.reset();
        let y = model[1].forward_dtensor(model[0].forward_dtensor(x).quick_gelu());
        y.local().clone().sum().backward();
        assert_eq!(
            [Phase::Forward, Phase::Backward].map(|phase| ledger.calls_in(Op::AllReduce, phase)),
            [1, 1]
        );
        assert_eq!(ledger.total(|_| true).calls, 2);
        assert_full_close(&y, expected.clone(), Tolerance::default());
        // What it does not know it does not place.
        let error = parallelize(
            LinearConfig::new(4, 4).init(mesh.device()),
            mesh,
            Plan::new().with_style("", COLWISE),
        );
        let error = error.expect_err("a Linear is no Projection").to_string();
        assert!(
            error.contains("colwise") && error.contains("Style::custom"),
            "{error}"
        );
        Ok(())
    });
}

/// The rows of a weight by the ranks' shares of memory: 5, 1 and 2.
#[test]
fn its_placement_function_gives_ranks_different_lengths() {
    let device = Device::flex();
    let weight = Tensor::<2>::random([8, 6], Distribution::Default, &device);
    let x = Tensor::<2>::random([4, 6], Distribution::Default, &device);
    let model = Projection {
        weight: Param::from_tensor(weight.clone()),
    };
    let expected = model.forward(x.clone()).into_data();
    MeshTest::new([3], ["shard"]).run(|mesh| {
        let by_memory = |_: ParamInfo<'_>| Some(ParamPlacement::uneven(0, [5, 1, 2]));
        let sharded = fully_shard(
            model.clone(),
            mesh,
            FullyShard::new().with_shard_placement_fn(by_memory),
        )?;
        assert_eq!(
            sharded.weight.base().dims(),
            [[5, 6], [1, 6], [2, 6]][mesh.rank()]
        );
        let y = unit(&sharded, x.clone(), |model, x| model.forward(x));
        y.into_data()
            .assert_approx_eq::<f32>(&expected, Tolerance::default());
        assert_eq!(
            full_model(&sharded)?.weight.val().into_data(),
            weight.to_data()
        );
        Ok(())
    });
}
