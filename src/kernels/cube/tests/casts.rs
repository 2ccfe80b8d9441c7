//! Tests of conversions during copies, against the `half` crate and arithmetic in f32.

use burn::tensor::{DType, Shape};
use half::f16;
use itertools::Itertools;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use super::{device, download, upload};
use crate::kernels::cube::{CubeError, CubePlan};
use crate::kernels::{Convert, CopyPlan, StridedCopy};

/// Returns copies of two sources to two targets, with a gap, odd lengths and unaligned offsets.
fn copies() -> CopyPlan {
    let segments = vec![
        StridedCopy { source: 0, target: 0, from: 0, to: 0, rows: 9, run: 7, from_stride: 7, to_stride: 12 },
        StridedCopy { source: 1, target: 0, from: 3, to: 7, rows: 9, run: 3, from_stride: 5, to_stride: 12 },
        StridedCopy::run(1, 1, 0, 0, 43),
    ];
    CopyPlan::new(vec![Shape::new([63]), Shape::new([48])], vec![Shape::new([9, 12]), Shape::new([43])], segments)
}

fn to_bytes(values: &[f32], dtype: DType) -> Vec<u8> {
    match dtype {
        DType::F16 => values.iter().flat_map(|value| f16::from_f32(*value).to_le_bytes()).collect(),
        _ => values.iter().flat_map(|value| value.to_le_bytes()).collect(),
    }
}

fn to_values(bytes: &[u8], dtype: DType) -> Vec<f32> {
    match dtype {
        DType::F16 => bytes.chunks(2).map(|two| f16::from_le_bytes([two[0], two[1]]).to_f32()).collect(),
        _ => bytes.chunks(4).map(|four| f32::from_le_bytes(four.try_into().unwrap())).collect(),
    }
}

/// Returns the expected values in single precision; `None` for elements that are not written.
fn placed(copies: &CopyPlan, sources: &[Vec<f32>]) -> Vec<Vec<Option<f32>>> {
    let mut targets = copies.targets.iter().map(|shape| vec![None; shape.num_elements()]).collect_vec();
    for segment in &copies.segments {
        for (row, column) in (0..segment.rows).cartesian_product(0..segment.run) {
            let value = sources[segment.source][segment.from + row * segment.from_stride + column];
            targets[segment.target][segment.to + row * segment.to_stride + column] = Some(value);
        }
    }
    targets
}

#[test]
fn casts_scales_and_adds() {
    let (mut rng, copies) = (StdRng::seed_from_u64(5), copies());
    let lens = copies.sources.iter().map(|shape| shape.num_elements()).collect_vec();
    for (from, to, scale, onto) in [
        (DType::F32, DType::F32, 1.0 / 3.0, false),
        (DType::F32, DType::F32, 1.0, true),
        (DType::F32, DType::F32, 0.25, true),
        (DType::F32, DType::F16, 1.0, false),
        (DType::F16, DType::F32, 1.0, false),
        (DType::F16, DType::F32, 0.125, true),
        (DType::F32, DType::F16, 0.7, false),
        (DType::F16, DType::F16, 1.0, true),
    ] {
        let convert = Convert { dtype: to, scale };
        let plan = match CubePlan::new(&device(), &copies, from, convert, onto) {
            Ok(plan) => plan,
            Err(error) => {
                assert_eq!(error, CubeError::Dtype { dtype: DType::F16 });
                continue;
            }
        };
        let mut draw = |len: usize| (0..len).map(|_| rng.random_range(-8.0f32..8.0)).collect_vec();
        let values = lens.iter().map(|len| to_values(&to_bytes(&draw(*len), from), from)).collect_vec();
        let tensors = values.iter().zip(&copies.sources);
        let tensors = tensors.map(|(values, shape)| upload(&to_bytes(values, from), shape, from)).collect_vec();

        let before = onto.then(|| {
            let plan = CubePlan::new(&device(), &copies, from, convert, false).unwrap();
            plan.run(&tensors, None)
        });
        let there = before.as_ref().map(|block| block.tensors.iter().map(download).collect_vec());
        let block = plan.run(&tensors, before.as_ref());
        for (target, expected) in placed(&copies, &values).iter().enumerate() {
            let there = there.as_ref().map(|there| to_values(&there[target], to));
            let expected = expected.iter().enumerate().map(|(at, value)| {
                let sum = there.as_ref().map_or(0.0, |there| there[at]);
                (value.unwrap_or(0.0) * scale) + sum
            });
            let expected = to_values(&to_bytes(&expected.collect_vec(), to), to);
            let found = to_values(&download(&block.tensors[target]), to);
            assert_eq!(found, expected, "{from:?} to {to:?}, scale {scale}, onto {onto}, target {target}");
        }
    }
}

#[test]
fn integers_are_not_converted() {
    let plan = |from, to, scale| {
        let convert = Convert { dtype: to, scale };
        CubePlan::new(&device(), &copies(), from, convert, false).err().map(|error| error.to_string())
    };
    assert!(plan(DType::I32, DType::F32, 1.0).unwrap().contains("I32 cannot be cast to F32"));
    assert!(plan(DType::I32, DType::I32, 0.5).unwrap().contains("only floats"));
    assert_eq!(plan(DType::I32, DType::I32, 1.0), None);
}
