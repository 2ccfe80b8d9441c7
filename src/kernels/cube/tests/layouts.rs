//! Tests with the copies of layouts.

use burn::backend::cubecl::dtype_to_storage_type;
use burn::tensor::{BoolStore, DType, Shape};
use itertools::Itertools;
use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use rand::{Rng, SeedableRng};

use super::{assert_copies, device, plan_of};
use crate::kernels::cube::CubeError;
use crate::kernels::{CopyPlan, FlatLayout, ShardedTensorSpec};
use crate::placement::ShardSizes;

const DTYPES: [DType; 7] = [
    DType::F32,
    DType::I32,
    DType::I64,
    DType::Bool(BoolStore::U32),
    DType::F16,
    DType::BF16,
    DType::U8,
];

/// Checks copies, unless the device does not support the dtype and the copies cannot use words.
fn assert_copied(copies: &CopyPlan, dtype: DType, rng: &mut StdRng) {
    let has = device()
        .client()
        .properties()
        .supports_type(dtype_to_storage_type(dtype));
    match plan_of(copies, dtype) {
        Ok(plan) => assert_copies(&plan, copies, dtype, rng),
        Err(error) => {
            assert_eq!(error, CubeError::Dtype { dtype });
            assert!(!has && dtype.size() < 4, "{dtype:?} {copies:?}");
        }
    }
}

/// Returns a random tensor that is sharded evenly or unevenly along any dimension.
fn sharded_tensor(ranks: usize, rng: &mut StdRng) -> ShardedTensorSpec {
    let dims = rng.random_range(1..=3);
    let lengths = [0, 1, 2, 3, 4, 5, 8, 12, 16, 24, 33];
    let shape = (0..dims)
        .map(|_| *lengths.choose(rng).unwrap())
        .collect_vec();
    let dim = rng.random_range(0..dims);
    let sizes = if rng.random() {
        ShardSizes::Chunked(shape[dim])
    } else {
        let mut ends = (1..ranks)
            .map(|_| rng.random_range(0..=shape[dim]))
            .sorted()
            .collect_vec();
        ends.push(shape[dim]);
        let lengths = ends
            .iter()
            .scan(0, |last, end| Some(end - std::mem::replace(last, *end)));
        ShardSizes::Uneven(lengths.collect_vec().into())
    };
    ShardedTensorSpec {
        shape: Shape::from(shape),
        dim,
        sizes,
    }
}

#[test]
fn all_copies_of_random_layouts_in_every_dtype() {
    let mut rng = StdRng::seed_from_u64(12);
    for round in 0..28 {
        let ranks = rng.random_range(1..=4);
        let count = [1, 3, 6][round % 3];
        let tensors = (0..count)
            .map(|_| sharded_tensor(ranks, &mut rng))
            .collect_vec();
        let layout = FlatLayout::new(ranks, tensors, [1, 4, 64][rng.random_range(0..3)]);
        let rank = rng.random_range(0..ranks);
        let dtype = DTYPES[round % DTYPES.len()];
        for copies in [
            layout.pack_parts(rank),
            layout.unpack_parts(rank),
            layout.pack_full(),
            layout.unpack_full(),
            layout.unpack_rows(),
            layout.join_parts(),
        ] {
            assert_copied(&copies, dtype, &mut rng);
        }
    }
}

#[test]
fn long_and_short_segments_in_one_launch() {
    let mut rng = StdRng::seed_from_u64(56);
    let lens = [700_001, 1, 3, 64, 0, 250_000, 7, 4096, 5, 1, 1, 2];
    let tensors = lens.map(|len| ShardedTensorSpec {
        shape: Shape::new([len, 2]),
        dim: 0,
        sizes: ShardSizes::Chunked(len),
    });
    let layout = FlatLayout::new(3, tensors.to_vec(), 4);
    for copies in [
        layout.pack_parts(1),
        layout.unpack_rows(),
        layout.pack_full(),
    ] {
        let plan = plan_of(&copies, DType::F32).unwrap();
        assert_eq!(plan.launches(), 1);
        assert_copies(&plan, &copies, DType::F32, &mut rng);
    }
}

#[test]
fn a_matrix_of_odd_rows_sharded_along_its_columns() {
    let mut rng = StdRng::seed_from_u64(78);
    let tensor = |columns| ShardedTensorSpec {
        shape: Shape::new([257, columns]),
        dim: 1,
        sizes: ShardSizes::Chunked(columns),
    };
    let layout = FlatLayout::new(3, vec![tensor(101), tensor(96), tensor(5)], 4);
    for copies in [
        layout.pack_full(),
        layout.unpack_rows(),
        layout.unpack_full(),
    ] {
        for dtype in [DType::F32, DType::F16] {
            assert_copied(&copies, dtype, &mut rng);
        }
    }
}

#[test]
fn nothing_to_copy_launches_one_kernel_of_zeros() {
    let mut rng = StdRng::seed_from_u64(90);
    let empty = CopyPlan::new(
        vec![Shape::new([0])],
        vec![Shape::new([0]), Shape::new([5])],
        Vec::new(),
    );
    assert_copied(&empty, DType::F32, &mut rng);
}
