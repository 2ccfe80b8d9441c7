//! Integers of few bits: they wrap around, and do not hold every length.

use burn::tensor::{
    FloatDType, IndexingUpdateOp, Int, IntDType, Tensor, TensorData, module as plain,
};
use burn_dtensor::dtensor::DTensor;
use burn_dtensor::dtensor::ops::loss::CrossEntropyLossConfig;
use burn_dtensor::dtensor::ops::module;
use burn_dtensor::mesh::DeviceMesh;

use super::*;

fn ints<const D: usize>(
    values: &[i64],
    shape: [usize; D],
    dtype: IntDType,
    device: &Device,
) -> Tensor<D, Int> {
    Tensor::<D, Int>::from_data(TensorData::new(values.to_vec(), shape), device).cast(dtype)
}

fn integers<const D: usize>(tensor: Tensor<D, Int>) -> Vec<i64> {
    tensor.into_data().iter::<i64>().collect()
}

/// What every rank of a mesh of 2 holds: `parts` by rank, a partial value.
fn pending(
    parts: [i64; 2],
    by: Placement,
    dtype: IntDType,
    mesh: &DeviceMesh,
) -> Result<DTensor<1, Int>> {
    let own = parts[mesh.coordinate().expect("a member")[0]];
    DTensor::from_local(ints(&[own], [1], dtype, mesh.device()), mesh, &[by])
}

/// Byte tokens of a vocabulary of all bytes, and of one that is longer than bytes go.
#[test]
fn bytes_find_their_rows_in_every_half_of_a_vocabulary() {
    for vocabulary in [256, 600] {
        on_mesh(&[2], |_, mesh| {
            let device = mesh.device();
            let weights = ramp([vocabulary, 2], 1.0, device);
            let tokens = [0, 127, 128, 255, 200, 3];
            for dtype in [IntDType::U8, IntDType::U16, IntDType::I16, IntDType::I64] {
                let tokens = ints(&tokens, [2, 3], dtype, device);
                let expected = values(plain::embedding(weights.clone(), tokens.clone()));
                let sizes = DTensor::distribute_replicated(weights.clone(), mesh, &[S(0)])?;
                let tokens = DTensor::distribute_replicated(tokens, mesh, &[R])?;
                assert_eq!(
                    values(module::embedding(sizes, tokens).full_tensor()?),
                    expected,
                    "{dtype:?}"
                );
            }
            Ok(())
        });
    }
}

#[test]
fn bytes_index_every_shard_of_a_dimension() {
    on_mesh(&[2], |_, mesh| {
        let device = mesh.device();
        let x = ramp([300], 1.0, device);
        let sizes = || DTensor::distribute_replicated(x.clone(), mesh, &[S(0)]);
        for (at, dtype) in [
            ([0, 151, 255], IntDType::U8),
            ([0, 100, 127], IntDType::I8),
            ([9, 299, 150], IntDType::U16),
        ] {
            let plain = ints(&at, [3], dtype, device);
            let indices = || DTensor::distribute_replicated(plain.clone(), mesh, &[R]);
            let expected = values(x.clone().select(0, plain.clone()));
            assert_eq!(
                values(sizes()?.select(0, indices()?).full_tensor()?),
                expected,
                "select by {dtype:?}"
            );
            assert_eq!(
                values(sizes()?.gather(0, indices()?).full_tensor()?),
                expected,
                "gather by {dtype:?}"
            );
            assert_eq!(
                values(sizes()?.take::<1, 1>(0, indices()?).full_tensor()?),
                expected,
                "take by {dtype:?}"
            );
            let (add, tens) = (IndexingUpdateOp::Add, Tensor::full([3], 10.0, device));
            let values_of = || DTensor::distribute_replicated(tens.clone(), mesh, &[R]);
            let expected = values(x.clone().select_assign(0, plain.clone(), tens.clone(), add));
            let found = sizes()?.select_assign(0, indices()?, values_of()?, add);
            assert_eq!(
                values(found.full_tensor()?),
                expected,
                "select_assign by {dtype:?}"
            );
            let found = sizes()?.scatter(0, indices()?, values_of()?, add);
            assert_eq!(
                values(found.full_tensor()?),
                expected,
                "scatter by {dtype:?}"
            );
        }
        Ok(())
    });
}

#[test]
fn unsigned_targets_of_as_many_classes_as_bytes_are_valid() {
    let on_device = Device::flex();
    let scores = || ramp([3, 256], 0.0, &Device::flex()).div_scalar(100.0);
    let targets = [0, 130, 255];
    let expected = values(
        burn::nn::loss::CrossEntropyLossConfig::new()
            .init(&on_device)
            .forward(scores(), ints(&targets, [3], IntDType::I64, &on_device)),
    )[0];
    let types = [IntDType::U8, IntDType::U32, IntDType::U64];
    for (placements, dtype) in [[R], [S(1)], [S(0)]].into_iter().cartesian_product(types) {
        on_mesh(&[2], |_, mesh| {
            let targets = DTensor::distribute_replicated(
                ints(&targets, [3], dtype, mesh.device()),
                mesh,
                &[R],
            )?;
            let scores = DTensor::distribute_replicated(scores(), mesh, &placements)?;
            // No index is -100, which wraps around to 156 as a byte.
            let loss = CrossEntropyLossConfig::new()
                .with_ignore_index(-100)
                .init(mesh.device());
            let loss = values(loss.forward(scores, targets).full_tensor()?)[0];
            assert!(
                (loss - expected).abs() < 1e-5,
                "{placements:?}, {dtype:?}: {loss}, must be {expected}"
            );
            Ok(())
        });
    }
}

/// 5 - 1 is not what 0 - 1 and 5 - 1 have as their maximum, if 0 - 1 is 255.
#[test]
fn no_pending_extremum_goes_through_what_wraps_around() {
    on_mesh(&[2], |_, mesh| {
        let labels = ints(&[0, 0, 2, 5], [4], IntDType::U8, mesh.device());
        let greatest = DTensor::distribute_replicated(labels, mesh, &[S(0)])?.max_dim(0);
        assert_eq!(greatest.placements(), [MAX]);
        assert_eq!(integers((greatest.clone() - 1).full_tensor()?), [4]);
        assert_eq!(integers((greatest.clone() + 250).full_tensor()?), [255]);
        let one = DTensor::distribute_replicated(
            ints(&[1], [1], IntDType::U8, mesh.device()),
            mesh,
            &[R],
        )?;
        assert_eq!(integers((greatest - one).full_tensor()?), [4]);
        let bytes = |parts| pending(parts, MAX, IntDType::U8, mesh);
        assert_eq!(integers(bytes([0, 5])?.neg().full_tensor()?), [251]);
        let signed = pending([127, -5], MAX, IntDType::I8, mesh)?;
        assert_eq!(integers(signed.neg().full_tensor()?), [-127]);
        Ok(())
    });
}

/// 254 + 4 is 2 in eight bits.
#[test]
fn a_pending_sum_of_integers_is_added_up_before_it_is_a_float() {
    on_mesh(&[2], |_, mesh| {
        let bytes = || pending([254, 4], SUM, IntDType::U8, mesh);
        assert_eq!(values(bytes()?.float().full_tensor()?), [2.0]);
        assert_eq!(values(bytes()?.cast(FloatDType::F64).full_tensor()?), [2.0]);
        // 257 is no number of eight significant bits.
        let wide = pending([257, -1], SUM, IntDType::I64, mesh)?;
        let sum: Vec<f32> = wide
            .cast(FloatDType::BF16)
            .full_tensor()?
            .into_data()
            .iter::<f32>()
            .collect();
        assert_eq!(sum, [256.0]);
        Ok(())
    });
}

/// On a tensor that is cut as on one that is not, whichever rank would have been next to it.
#[test]
fn an_index_that_no_row_has_is_refused_under_every_layout() {
    type Operator = fn(DTensor<1>, DTensor<1, Int>) -> DTensor<1>;
    let operators: [(&str, Operator); 7] = [
        ("select", |x, at| x.select(0, at)),
        ("gather", |x, at| x.gather(0, at)),
        ("take", |x, at| x.take(0, at)),
        ("gather_nd", |x, at| x.gather_nd(at.unsqueeze_dim::<2>(1))),
        ("scatter_nd", |x, at| {
            x.clone().scatter_nd(
                at.unsqueeze_dim::<2>(1),
                x.narrow(0, 0, 1),
                IndexingUpdateOp::Add,
            )
        }),
        ("select_assign", |x, at| {
            x.clone()
                .select_assign(0, at, x.narrow(0, 0, 1), IndexingUpdateOp::Add)
        }),
        ("scatter", |x, at| {
            x.clone()
                .scatter(0, at, x.narrow(0, 0, 1), IndexingUpdateOp::Add)
        }),
    ];
    let refused = |index: i64,
                   dtype,
                   placement,
                   operator: &(dyn Fn(DTensor<1>, DTensor<1, Int>) + Sync)| {
        launch(Launch::threads(2), |world| {
            let mesh = DeviceMesh::new(world, [2], ["a"])?;
            let at = DTensor::distribute_replicated(
                ints(&[index], [1], dtype, mesh.device()),
                &mesh,
                &[R],
            )?;
            operator(
                DTensor::distribute_replicated(ramp([5], 1.0, mesh.device()), &mesh, &[placement])?,
                at,
            );
            Ok(())
        })
        .expect_err(&format!("index {index} of 5"))
        .to_string()
    };
    for placement in [R, S(0)] {
        for (index, dtype) in [
            (5, IntDType::I64),
            (-1, IntDType::I64),
            (-1, IntDType::I8),
            (200, IntDType::U8),
        ] {
            for (name, operator) in operators {
                let error = refused(index, dtype, placement, &|x, at| drop(operator(x, at)));
                assert!(
                    error.contains("out of bounds"),
                    "{name} of {index} by {placement}: {error}"
                );
            }
            let error = refused(index, dtype, placement, &|x, at| {
                drop(module::embedding(x.unsqueeze_dim(1), at.unsqueeze_dim(0)));
            });
            assert!(
                error.contains("out of bounds"),
                "embedding of {index} by {placement}: {error}"
            );
        }
    }
}
