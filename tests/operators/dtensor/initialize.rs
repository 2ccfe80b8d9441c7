//! Parameters drawn by burn's initializers, part by part.

use burn::module::Initializer;
use burn::tensor::{Device, Tensor};
use burn_dtensor::dtensor::DTensorError;
use burn_dtensor::prelude::*;
use itertools::Itertools;

use super::random::{bits, same_everywhere};
use super::{R, S, on_mesh, values};

const FANS: [usize; 2] = [300, 200];

fn all() -> Vec<Initializer> {
    let mut all = vec![
        Initializer::Constant { value: 2.5 },
        Initializer::Ones,
        Initializer::Zeros,
        Initializer::Uniform {
            min: -0.5,
            max: 1.5,
        },
        Initializer::Normal {
            mean: 0.3,
            std: 0.02,
        },
        Initializer::XavierUniform { gain: 1.5 },
        Initializer::XavierNormal { gain: 1.5 },
        Initializer::Orthogonal { gain: 2.0 },
    ];
    for fan_out_only in [false, true] {
        all.push(Initializer::KaimingUniform {
            gain: 0.5,
            fan_out_only,
        });
        all.push(Initializer::KaimingNormal {
            gain: 0.5,
            fan_out_only,
        });
    }
    all
}

#[test]
fn parameters_are_the_same_on_every_mesh_and_nothing_is_sent_to_draw_them() {
    let bits = same_everywhere(|mesh, placements| {
        let draw = |(seed, init): (usize, &Initializer)| {
            let before = mesh.world().ledger().total(|_| true).calls;
            let device = mesh.device().clone().autodiff();
            let made = DTensor::<2>::from_initializer(
                init,
                [5, 6],
                FANS,
                seed as u64,
                mesh,
                placements,
                &device,
            )?;
            assert_eq!(mesh.world().ledger().total(|_| true).calls, before);
            assert_eq!(made.placements(), placements);
            assert!(made.clone().require_grad().local().is_require_grad());
            Ok(bits(made.full_tensor()?))
        };
        all().iter().enumerate().map(draw).collect()
    });
    assert!(bits.iter().all_unique());
}

/// Smallest, largest, mean and standard deviation.
fn moments(values: &[f32]) -> [f64; 4] {
    let n = values.len() as f64;
    let mean = values.iter().map(|&x| f64::from(x)).sum::<f64>() / n;
    let variance = values
        .iter()
        .map(|&x| (f64::from(x) - mean).powi(2))
        .sum::<f64>()
        / n;
    let (min, max) = values.iter().minmax().into_option().expect("values");
    [f64::from(*min), f64::from(*max), mean, variance.sqrt()]
}

/// Against burn's own values, which are others of the same distribution.
#[test]
fn values_are_distributed_as_burns() {
    let device = Device::flex();
    for init in all() {
        let [fan_in, fan_out] = FANS;
        let burns = init
            .init_with::<2, _>(FANS, Some(fan_in), Some(fan_out), &device)
            .val();
        let expected = moments(&values(burns));
        on_mesh(&[2], |_, mesh| {
            let made =
                DTensor::<2>::from_initializer(&init, FANS, FANS, 9, mesh, &[S(1)], mesh.device())?;
            let [min, max, mean, std] = moments(&values(made.full_tensor()?));
            // Of 60000 numbers: five standard errors of a mean and of a deviation.
            let error = 5.0 * expected[3] / (60000.0_f64 * 2.0).sqrt();
            assert!(
                (mean - expected[2]).abs() <= 2.0 * error,
                "{init:?}: {mean}, burn's {}",
                expected[2]
            );
            assert!(
                (std - expected[3]).abs() <= 2.0 * error,
                "{init:?}: {std}, burn's {}",
                expected[3]
            );
            if format!("{init:?}").contains("Uniform") {
                let near = |a: f64, b: f64| (a - b).abs() < 1e-3 * (expected[1] - expected[0]);
                assert!(
                    near(min, expected[0]) && near(max, expected[1]),
                    "{init:?}: {min}..{max}"
                );
            }
            Ok(())
        });
    }
}

#[test]
fn an_orthogonal_parameter_has_its_rows_or_columns_at_right_angles() {
    for shape in [[7, 4], [4, 7], [5, 5]] {
        let made = on_mesh(&[2], |_, mesh| {
            let init = Initializer::Orthogonal { gain: 2.0 };
            let made = DTensor::<2>::from_initializer(
                &init,
                shape,
                FANS,
                1,
                mesh,
                &[S(0)],
                mesh.device(),
            )?;
            let q: Tensor<2> = made.full_tensor()?;
            let square = if shape[0] < shape[1] {
                q.clone().matmul(q.transpose())
            } else {
                q.clone().transpose().matmul(q)
            };
            Ok(values(square))
        });
        let n = shape[0].min(shape[1]);
        for (at, value) in made[0].iter().enumerate() {
            let expected = if at / n == at % n { 4.0 } else { 0.0 };
            assert!(
                (value - expected).abs() < 1e-5,
                "{shape:?}: {value} at {at}"
            );
        }
    }
}

#[test]
fn an_initializer_of_no_distribution_is_refused() {
    on_mesh(&[2], |_, mesh| {
        for (init, fans) in [
            (Initializer::Uniform { min: 1.0, max: 1.0 }, FANS),
            (
                Initializer::Uniform {
                    min: f64::NEG_INFINITY,
                    max: 1.0,
                },
                FANS,
            ),
            (
                Initializer::Normal {
                    mean: 0.0,
                    std: -1.0,
                },
                FANS,
            ),
            (
                Initializer::Normal {
                    mean: f64::INFINITY,
                    std: 1.0,
                },
                FANS,
            ),
            (
                Initializer::KaimingUniform {
                    gain: 1.0,
                    fan_out_only: false,
                },
                [0, 2],
            ),
            (Initializer::XavierNormal { gain: 1.0 }, [0, 0]),
        ] {
            let made =
                DTensor::<2>::from_initializer(&init, [2, 2], fans, 0, mesh, &[R], mesh.device());
            assert!(
                matches!(made, Err(Error::DTensor(DTensorError::Distribution { .. }))),
                "{init:?}"
            );
        }
        let init = Initializer::Orthogonal { gain: 1.0 };
        let made = DTensor::<1>::from_initializer(&init, [4], FANS, 0, mesh, &[R], mesh.device());
        assert!(matches!(
            made,
            Err(Error::DTensor(DTensorError::Distribution { .. }))
        ));
        Ok(())
    });
}
