//! A module distributed by a function, and its boundary, against the module on one device.

use std::collections::BTreeMap;

use burn::module::{Module, Param};
use burn::nn::{LayerNorm, LayerNormConfig, Linear, LinearConfig};
use burn::optim::GradientsParams;
use burn::tensor::{Device, Tensor};
use burn_dtensor::comm::Op;
use burn_dtensor::parallel::{InputOutputFns, ParallelError, distribute_module};
use burn_dtensor::prelude::*;
use burn_dtensor::testing::MeshTest;
use itertools::Itertools;

use super::support::full_grads;
use Placement::{Replicate as R, Shard as S};

#[derive(Module, Debug)]
struct Mlp {
    norm: LayerNorm,
    up: Linear,
    down: Linear,
}

/// Not divisible by the ranks.
const HIDDEN: usize = 7;

impl Mlp {
    fn new(device: &Device) -> Self {
        let ramp = |shape: [usize; 2]| {
            let len = (shape[0] * shape[1]) as i64;
            (Tensor::arange(0..len, device).float().reshape(shape) * 0.37).sin()
        };
        let mut mlp = Self {
            norm: LayerNormConfig::new(4).init(device),
            up: LinearConfig::new(4, HIDDEN).init(device),
            down: LinearConfig::new(HIDDEN, 4).init(device),
        };
        mlp.up.weight = mlp.up.weight.map(|_| ramp([4, HIDDEN]).require_grad());
        mlp.down.weight = mlp.down.weight.map(|_| ramp([HIDDEN, 4]).require_grad());
        let bias = |bias: Option<Param<Tensor<1>>>, len| {
            bias.map(|bias| bias.map(|_| ramp([1, len]).flatten::<1>(0, 1).require_grad()))
        };
        mlp.up.bias = bias(mlp.up.bias, HIDDEN);
        mlp.down.bias = bias(mlp.down.bias, 4);
        mlp
    }

    fn plain(&self, x: Tensor<2>) -> Tensor<2> {
        self.down
            .forward(self.up.forward(self.norm.forward(x)).tanh())
    }

    fn forward(&self, x: DTensor<2>) -> DTensor<2> {
        let h = self.up.forward_dtensor(self.norm.forward_dtensor(x)).tanh();
        self.down.forward_dtensor(h)
    }
}

fn input(device: &Device) -> Tensor<2> {
    Tensor::arange(0..20, device).float().reshape([5, 4]).cos()
}

fn by_features(_: &str, shape: &[usize]) -> Placement {
    shape.iter().position(|&len| len == HIDDEN).map_or(R, S)
}

fn close(left: &[f32], right: &[f32]) {
    assert_eq!(left.len(), right.len());
    let far = left
        .iter()
        .zip(right)
        .find(|(left, right)| (**left - **right).abs() > 1e-5);
    assert_eq!(far, None);
}

/// Of one device: the output, and the gradients of `up.weight` and `norm.gamma`.
fn alone() -> [Vec<f32>; 3] {
    let device = Device::flex().autodiff();
    let full = Mlp::new(&device);
    let y = full.plain(input(&device));
    let grads = GradientsParams::from_grads(y.clone().square().sum().backward(), &full);
    let weight = grads.get::<2>(full.up.weight.id).unwrap().into_data();
    let gamma = grads.get::<1>(full.norm.gamma.id).unwrap().into_data();
    [y.into_data(), weight, gamma].map(|data| data.iter::<f32>().collect())
}

#[test]
fn a_module_distributed_by_a_function_computes_as_on_one_device() {
    let [expected, weight, gamma] = alone();
    for ranks in [2, 3] {
        MeshTest::new([ranks], ["tp"]).run(|mesh| {
            let device = mesh.device().clone().autodiff();
            let mut asked = BTreeMap::new();
            let mlp = distribute_module(Mlp::new(&device), mesh, |path, shape| {
                assert_eq!(
                    asked.insert(path.to_string(), shape.to_vec()),
                    None,
                    "{path} once"
                );
                by_features(path, shape)
            })?;
            let paths = [
                "down.bias",
                "down.weight",
                "norm.beta",
                "norm.gamma",
                "up.bias",
                "up.weight",
            ];
            assert_eq!(asked.keys().collect_vec(), paths);
            assert_eq!(
                (&asked["up.weight"][..], &asked["norm.gamma"][..]),
                (&[4, HIDDEN][..], &[4][..])
            );
            assert_eq!(mlp.up.weight.dtensor()?.placements(), [S(1)]);
            assert_eq!(mlp.down.weight.dtensor()?.placements(), [S(0)]);
            assert_eq!(mlp.norm.gamma.dtensor()?.placements(), [R]);

            // A part of the rows goes in and comes out on each rank.
            let rows = S(0);
            let boundary = InputOutputFns::new(
                mesh,
                |x: Tensor<2>, mesh| {
                    DTensor::distribute_tensor(x, mesh, &[rows])?.redistribute(&[R])
                },
                |y: DTensor<2>, _| Ok(y.redistribute(&[rows])?.to_local()),
            );
            mesh.world().ledger().reset();
            let part = boundary.forward(&mlp, input(&device), Mlp::forward)?;
            let counted = |op| mesh.world().ledger().calls(op);
            assert_eq!(
                (
                    counted(Op::Scatter),
                    counted(Op::AllGather),
                    counted(Op::ReduceScatter)
                ),
                (1, 1, 1)
            );
            let range = burn_dtensor::placement::chunk(5, ranks, mesh.rank());
            let values: Vec<f32> = part.clone().into_data().iter::<f32>().collect();
            close(&values, &expected[range.start * 4..range.end * 4]);

            // Each rank's rows are their own part of the loss.
            let grads = GradientsParams::from_grads(part.square().sum().backward(), &mlp);
            let full = full_grads(&mlp, &grads)?;
            close(&full["up.weight"], &weight);
            close(&full["norm.gamma"], &gamma);
            Ok(())
        });
    }
}

#[test]
fn errors_of_the_functions_and_of_a_second_application_are_told() {
    MeshTest::new([2], ["tp"]).run(|mesh| {
        let device = mesh.device().clone().autodiff();
        let mlp = distribute_module(Mlp::new(&device), mesh, by_features)?;
        let boundary = InputOutputFns::new(
            mesh,
            |x: Tensor<2>, mesh| DTensor::from_local(x, mesh, &[R, R]),
            |y: DTensor<2>, _| y.full_tensor(),
        );
        let error = boundary
            .forward(&mlp, input(&device), Mlp::forward)
            .unwrap_err();
        assert!(matches!(error, Error::Placement(_)), "{error:?}");
        let error = distribute_module(mlp, mesh, by_features).unwrap_err();
        assert!(
            matches!(
                error,
                Error::Parallel(ParallelError::AlreadyParallelized { .. })
            ),
            "{error:?}"
        );
        let error = distribute_module(Mlp::new(&device), mesh, |_, _| S(2)).unwrap_err();
        assert!(
            matches!(error, Error::Parallel(ParallelError::Placement { .. })),
            "{error:?}"
        );
        Ok(())
    });
}

/// Features over `tp`, and over `cp` what they are features of.
#[test]
fn a_function_places_on_each_dimension_of_a_mesh() {
    let [expected, weight, gamma] = alone();
    for shape in [[2, 2], [2, 3]] {
        MeshTest::new(shape, ["cp", "tp"]).run(|mesh| {
            let device = mesh.device().clone().autodiff();
            let others = |shape: &[usize]| {
                shape
                    .iter()
                    .position(|&len| len != HIDDEN)
                    .filter(|_| shape.len() > 1)
            };
            let mlp = distribute_module(Mlp::new(&device), mesh, |path, shape| {
                [others(shape).map_or(R, S), by_features(path, shape)]
            })?;
            assert_eq!(mlp.up.weight.dtensor()?.placements(), [S(0), S(1)]);
            assert_eq!(mlp.down.weight.dtensor()?.placements(), [S(1), S(0)]);
            assert_eq!(
                mlp.up
                    .bias
                    .as_ref()
                    .expect("it has one")
                    .dtensor()?
                    .placements(),
                [R, S(0)]
            );
            assert_eq!(mlp.norm.gamma.dtensor()?.placements(), [R, R]);
            let x = DTensor::distribute_replicated(input(&device), mesh, &[R, R])?;
            let y = mlp.forward(x).full_tensor()?;
            let values: Vec<f32> = y.clone().into_data().iter::<f32>().collect();
            close(&values, &expected);
            let grads = GradientsParams::from_grads(y.square().sum().backward(), &mlp);
            let full = full_grads(&mlp, &grads)?;
            close(&full["up.weight"], &weight);
            close(&full["norm.gamma"], &gamma);

            for given in [vec![S(0)], vec![R, R, S(0)]] {
                let error =
                    distribute_module(Mlp::new(&device), mesh, |_, _| given.clone()).unwrap_err();
                let Error::Parallel(ParallelError::Styles { given: count, .. }) = &error else {
                    panic!("{error}")
                };
                assert_eq!(*count, given.len());
                assert!(
                    error
                        .to_string()
                        .contains(&format!("has {count} styles on {mesh}")),
                    "{error}"
                );
            }
            let error = distribute_module(Mlp::new(&device), mesh, |_, _| R).unwrap_err();
            assert!(
                matches!(
                    error,
                    Error::Parallel(ParallelError::Styles { given: 1, .. })
                ),
                "{error}"
            );
            Ok(())
        });
    }
}

/// Sharded before, it is asked by the shapes of whole parameters.
#[test]
fn a_fully_sharded_module_is_distributed_too() {
    MeshTest::new([2, 2], ["dp", "tp"]).run(|mesh| {
        let device = mesh.device().clone().autodiff();
        let mlp = fully_shard(Mlp::new(&device), &mesh.slice("dp")?, FullyShard::new())?;
        let mlp = distribute_module(mlp, &mesh.slice("tp")?, by_features)?;
        assert_eq!(
            mlp.up.weight.shard().expect("distributed").placements(),
            [S(0), S(1)]
        );
        assert_eq!(mlp.down.weight.dtensor()?.placements(), [S(0)]);
        Ok(())
    });
}
