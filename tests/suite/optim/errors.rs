//! What an optimizer of DTensors refuses, on every rank and before anything is sent.

use std::collections::BTreeMap;

use burn::optim::momentum::MomentumConfig;
use burn::optim::{AdamConfig, AdamWConfig, SgdConfig};
use burn::tensor::{Bytes, DType, Tensor};
use burn_dtensor::optim::{DTensorOptimizer, FullOptimizerState, OptimError};
use burn_dtensor::prelude::*;
use burn_dtensor::testing::MeshTest;

use super::own::RowScaled;

use Placement::{Replicate as R, Shard as S};

fn ones(shape: [usize; 2], mesh: &DeviceMesh, placement: Placement) -> Result<DTensor<2>> {
    DTensor::ones(shape, mesh, &[placement], mesh.device())
}

fn adam() -> DTensorOptimizer {
    DTensorOptimizer::new(AdamConfig::new().build())
}

fn refused<T>(result: Result<T>) -> (OptimError, String) {
    match result.map(|_| ()).expect_err("it must be refused") {
        Error::Optim(error) => (error.clone(), error.to_string()),
        other => panic!("{other}"),
    }
}

#[test]
fn parameters_and_gradients_that_do_not_fit_are_typed_errors() {
    MeshTest::new([2], ["tp"]).run(|mesh| {
        let (param, grad) = (ones([4, 4], mesh, S(0))?, ones([4, 4], mesh, S(0))?);
        let pending = DTensor::from_local(
            param.local().clone(),
            mesh,
            &[Placement::Partial(PartialOp::Sum)],
        )?;
        let mut optim = adam();
        let (error, text) = refused(optim.step(0.1, "w", param.clone(), pending.clone()));
        assert!(
            matches!(
                error,
                OptimError::Partial {
                    what: "the gradient",
                    ..
                }
            ),
            "{text}"
        );
        assert!(
            text.contains("the gradient of `w` is [P(sum)]") && text.contains("`redistribute`"),
            "{text}"
        );
        let (error, text) = refused(optim.step(0.1, "w", pending, grad.clone()));
        assert!(
            matches!(
                error,
                OptimError::Partial {
                    what: "the value",
                    ..
                }
            ),
            "{text}"
        );
        for other in [
            ones([4, 4], mesh, R)?,
            ones([4, 4], mesh, S(1))?,
            ones([6, 4], mesh, S(0))?,
        ] {
            let (error, text) = refused(optim.step(0.1, "w", param.clone(), other));
            assert!(matches!(error, OptimError::Gradient { .. }), "{text}");
        }
        // Nothing of it was remembered.
        assert_eq!(optim.state()?.paths().count(), 0);

        optim.step(0.1, "w", param.clone(), grad.clone())?;
        let before = optim.state()?.full()?;
        let moved =
            [&param, &grad].map(|tensor| tensor.clone().redistribute(&[S(1)]).expect("it can be"));
        let [moved_param, moved_grad] = moved;
        let (error, text) = refused(optim.step(0.1, "w", moved_param, moved_grad));
        assert!(matches!(error, OptimError::Layout { .. }), "{text}");
        for word in ["`w`", "[S(0)]", "[S(1)]", "OptimizerState::redistribute"] {
            assert!(text.contains(word), "{text}");
        }
        assert_eq!(optim.state()?.full()?, before, "the state stays");
        optim.step(0.1, "w", param, grad)?;
        Ok(())
    });
}

#[test]
fn the_state_of_another_optimizer_is_refused() {
    MeshTest::new([2], ["tp"]).run(|mesh| {
        let (param, grad) = (ones([4, 4], mesh, S(0))?, ones([4, 4], mesh, S(0))?);
        let mut optim = adam();
        optim.step(0.1, "w", param.clone(), grad.clone())?;
        let state = optim.state()?;
        let missing = |optim: DTensorOptimizer| {
            let mut optim = optim;
            optim
                .step(0.1, "w", param.clone(), grad.clone())
                .expect("it steps");
            let before = optim
                .state()
                .and_then(|state| state.full())
                .expect("it has one");
            let (error, text) = refused(optim.load(state.clone()));
            let OptimError::Foreign { missing, extra, .. } = error else {
                panic!("{text}")
            };
            assert_eq!(
                optim
                    .state()
                    .and_then(|state| state.full())
                    .expect("it has one"),
                before,
                "it is as it was"
            );
            (missing, extra)
        };
        // burn's own records drop what they do not know without a word.
        let momentum = SgdConfig::new()
            .with_momentum(Some(MomentumConfig::new()))
            .build();
        let (_, extra) = missing(DTensorOptimizer::new(momentum));
        assert_eq!(
            extra,
            ["momentum.moment_1", "momentum.moment_2", "momentum.time"]
        );
        let (_, extra) = missing(DTensorOptimizer::new(RowScaled).with_full_parameters());
        assert_eq!(extra.len(), 3);
        // AdamW keeps what Adam keeps.
        let mut adam_w = DTensorOptimizer::new(AdamWConfig::new().build());
        adam_w.load(state.clone())?;
        assert_eq!(adam_w.state()?.full()?, state.full()?);
        Ok(())
    });
}

#[test]
fn a_state_of_no_parameter_is_refused() {
    MeshTest::new([2], ["tp"]).run(|mesh| {
        let param = ones([4, 4], mesh, S(0))?;
        let mut optim = adam();
        optim.step(0.1, "w", param.clone(), ones([4, 4], mesh, S(0))?)?;
        let state = optim.state()?;
        let specs = |path: &str, param: &DTensor<2>| {
            BTreeMap::from([(path.to_owned(), param.spec().clone())])
        };
        let (error, text) = refused(state.full()?.distribute(specs("v", &param)));
        assert!(
            matches!(&error, OptimError::NoParameter { name, .. } if name == "w.momentum.moment_1"),
            "{text}"
        );
        assert!(text.contains(r#"["v"]"#), "{text}");
        let (error, text) = refused(state.clone().redistribute(specs("v", &param)));
        assert!(
            matches!(&error, OptimError::NoParameter { name, .. } if name == "w"),
            "{text}"
        );
        let (error, text) = refused(state.redistribute(specs("w", &ones([6, 4], mesh, S(0))?)));
        assert!(matches!(error, OptimError::Layout { .. }), "{text}");
        assert!(FullOptimizerState::from_bytes(Bytes::from_bytes_vec(vec![1; 100])).is_err());
        Ok(())
    });
}

#[test]
fn a_state_that_is_no_shard_of_the_parameters_is_refused() {
    MeshTest::new([2], ["tp"]).run(|mesh| {
        // Told nothing: its state of a rank's columns says nothing of the rows.
        let mut optim = DTensorOptimizer::new(RowScaled);
        optim.step(
            0.1,
            "w",
            ones([4, 4], mesh, S(1))?,
            ones([4, 4], mesh, S(1))?,
        )?;
        let (error, text) = refused(optim.state());
        let expected = OptimError::Shape {
            name: "w.largest".into(),
            found: vec![4, 1],
            expected: vec![4, 2],
        };
        assert_eq!(format!("{error:?}"), format!("{expected:?}"));
        assert!(text.contains("with_full_parameters"), "{text}");
        let mut told = DTensorOptimizer::new(RowScaled).with_full_parameters();
        told.step(
            0.1,
            "w",
            ones([4, 4], mesh, S(1))?,
            ones([4, 4], mesh, S(1))?,
        )?;
        let (error, _) = refused(optim.load(told.state()?));
        assert!(matches!(error, OptimError::Shape { .. }));
        Ok(())
    });
}

/// burn makes the device's default type of what it loads.
#[test]
fn a_state_that_would_lose_its_precision_is_refused() {
    MeshTest::new([2], ["tp"]).run(|mesh| {
        let double = || {
            DTensor::from_local(
                Tensor::<2>::ones([2, 4], (mesh.device(), DType::F64)),
                mesh,
                &[S(0)],
            )
        };
        let mut optim = adam();
        optim.step(0.1, "w", double()?, double()?)?;
        let state = optim.state()?;
        assert_eq!(
            state
                .tensor::<2>("w.momentum.moment_1")
                .expect("there")
                .dtype(),
            DType::F64
        );
        let (error, text) = refused(adam().load(state));
        assert!(matches!(error, OptimError::ElementType { .. }), "{text}");
        assert!(text.contains("f64") && text.contains("f32"), "{text}");
        Ok(())
    });
}
