//! Layers given what they cannot take: typed errors that say what to do.

use burn::nn::{BatchNormConfig, EmbeddingConfig, LayerNormConfig, LinearConfig};
use burn::tensor::Int;
use burn_dtensor::dtensor::DTensorError;
use burn_dtensor::fsdp::ParamError;
use burn_dtensor::prelude::*;
use burn_dtensor::testing::MeshTest;

use super::Only;

use Placement::{Replicate as R, Shard as S};

/// The error with which `f` unwinds.
pub fn refused<T>(f: impl FnOnce() -> T) -> Error {
    let caught = std::panic::catch_unwind(std::panic::AssertUnwindSafe(f));
    let payload = caught.err().expect("an error was expected");
    *payload.downcast::<Error>().expect("a typed error")
}

/// On the mesh of all ranks, where layers compute on the slice that was given to `parallelize`.
#[test]
fn activations_on_another_mesh() {
    MeshTest::new([2, 2], ["dp", "tp"]).run(|mesh| {
        let (tp, device) = (mesh.slice("tp")?, mesh.device());
        let elsewhere = |error: Error| {
            assert!(
                matches!(error, Error::DTensor(DTensorError::MeshMismatch { .. })),
                "{error}"
            );
            let text = error.to_string();
            assert!(
                ["dp=2, tp=2", "(tp=2", "`parallelize`"]
                    .iter()
                    .all(|part| text.contains(part)),
                "{text}"
            );
        };
        let x = DTensor::<2>::ones([3, 8], mesh, &[R, R], device)?;
        let norm = Only {
            layer: LayerNormConfig::new(8).init(device),
        };
        let norm = parallelize(
            norm,
            &tp,
            Plan::new().with_style("layer", Style::sequence_parallel()),
        )?;
        elsewhere(refused(|| norm.layer.forward_dtensor(x.clone())));
        let training = device.clone().autodiff();
        let norm = Only {
            layer: BatchNormConfig::new(8).init(&training),
        };
        let norm = parallelize(
            norm,
            &tp,
            Plan::new().with_style("layer", Style::placed(R).with_input(S(0))),
        )?;
        let batch = DTensor::<2>::ones([3, 8], mesh, &[R, R], &training)?;
        elsewhere(refused(|| norm.layer.forward_dtensor(batch)));
        for style in [Style::colwise(), Style::rowwise()] {
            let linear = Only {
                layer: LinearConfig::new(8, 4).init(device),
            };
            let linear = parallelize(linear, &tp, Plan::new().with_style("layer", style))?;
            elsewhere(refused(|| linear.layer.forward_dtensor(x.clone())));
            let table = Only {
                layer: EmbeddingConfig::new(8, 4).init(device),
            };
            let table = parallelize(table, &tp, Plan::new().with_style("layer", style))?;
            let tokens = DTensor::<2, Int>::zeros([3, 8], mesh, &[R, R], device)?;
            elsewhere(refused(|| table.layer.forward_dtensor(tokens)));
        }
        Ok(())
    });
}

#[test]
fn a_layer_that_was_not_parallelized() {
    MeshTest::new([2], ["tp"]).run(|mesh| {
        let layer = LinearConfig::new(8, 4).init(mesh.device());
        let x = DTensor::<2>::ones([3, 8], mesh, &[R], mesh.device())?;
        let error = refused(|| layer.forward_dtensor(x));
        assert!(
            matches!(error, Error::Param(ParamError::NotParallelized { .. })),
            "{error}"
        );
        assert!(
            error
                .to_string()
                .contains("the parameter of shape [8, 4] was not parallelized"),
            "{error}"
        );
        Ok(())
    });
}

#[test]
fn a_style_for_an_input_of_more_dimensions() {
    MeshTest::new([2], ["tp"]).run(|mesh| {
        let model = Only {
            layer: LinearConfig::new(8, 4).init(mesh.device()),
        };
        let model = parallelize(
            model,
            mesh,
            Plan::new().with_style("layer", Style::colwise().with_input(S(2))),
        )?;
        let x = DTensor::<2>::ones([3, 8], mesh, &[R], mesh.device())?;
        let error = refused(|| model.layer.forward_dtensor(x));
        assert!(
            matches!(error, Error::DTensor(DTensorError::Operands { .. })),
            "{error}"
        );
        assert!(error.to_string().contains("style"), "{error}");
        Ok(())
    });
}
