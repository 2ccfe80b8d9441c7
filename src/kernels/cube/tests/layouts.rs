//! Tests with the copies of layouts, and with segments that no layout produces.

use burn::backend::cubecl::dtype_to_storage_type;
use burn::tensor::{BoolStore, DType, Shape};
use itertools::Itertools;
use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use rand::{Rng, SeedableRng};

use super::{assert_copies, device, plan_of};
use crate::kernels::cube::CubeError;
use crate::kernels::{CopyPlan, FlatLayout, ShardedTensorSpec, StridedCopy};
use crate::placement::ShardSizes;

const DTYPES: [DType; 7] =
    [DType::F32, DType::I32, DType::I64, DType::Bool(BoolStore::U32), DType::F16, DType::BF16, DType::U8];

/// Checks copies, unless the device does not support the dtype and the copies cannot use words.
fn assert_copied(copies: &CopyPlan, dtype: DType, rng: &mut StdRng) {
    let has = device().client().properties().supports_type(dtype_to_storage_type(dtype));
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
    let shape = (0..dims).map(|_| *lengths.choose(rng).unwrap()).collect_vec();
    let dim = rng.random_range(0..dims);
    let sizes = if rng.random() {
        ShardSizes::Chunked(shape[dim])
    } else {
        let mut ends = (1..ranks).map(|_| rng.random_range(0..=shape[dim])).sorted().collect_vec();
        ends.push(shape[dim]);
        let lengths = ends.iter().scan(0, |last, end| Some(end - std::mem::replace(last, *end)));
        ShardSizes::Uneven(lengths.collect_vec().into())
    };
    ShardedTensorSpec { shape: Shape::from(shape), dim, sizes }
}

#[test]
fn all_copies_of_random_layouts_in_every_dtype() {
    let mut rng = StdRng::seed_from_u64(12);
    for round in 0..28 {
        let ranks = rng.random_range(1..=4);
        let count = [1, 3, 6][round % 3];
        let tensors = (0..count).map(|_| sharded_tensor(ranks, &mut rng)).collect_vec();
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

/// Returns segments without overlap that no layout produces: interleaved rows of several lengths, gaps, any order.
fn scattered(rng: &mut StdRng) -> CopyPlan {
    let (sources, targets) = (rng.random_range(1..=3), rng.random_range(1..=3));
    let lens = (0..sources).map(|_| rng.random_range(300..600)).collect_vec();
    let mut segments = Vec::new();
    let mut ends = vec![0; targets];
    for _ in 0..rng.random_range(0..12) {
        let (source, target) = (rng.random_range(0..sources), rng.random_range(0..targets));
        let (rows, run) = (rng.random_range(1..6), rng.random_range(1..14));
        let (from_gap, to_gap) = (rng.random_range(0..9), rng.random_range(0..9));
        let (from_stride, to_stride) = (run + from_gap, run + to_gap);
        let from = rng.random_range(0..lens[source] - rows * from_stride);
        let to = ends[target] + rng.random_range(0..7);
        segments.push(StridedCopy { source, target, from, to, rows, run, from_stride, to_stride });
        ends[target] = to + (rows - 1) * to_stride + run;
        // In the gaps between its rows, other segments with as many rows, or fewer.
        if to_gap > 1 && rows > 1 {
            let rows = rng.random_range(1..rows);
            let (to, from) = (to + run, rng.random_range(0..200));
            segments.push(StridedCopy { source, target, from, to, rows, run: to_gap - 1, from_stride, to_stride });
        }
    }
    let targets = ends.iter().map(|end| Shape::new([end + rng.random_range(0..9)])).collect();
    CopyPlan::new(lens.iter().map(|len| Shape::new([*len])).collect(), targets, segments)
}

#[test]
fn segments_in_any_place_and_gaps_of_zeros() {
    let mut rng = StdRng::seed_from_u64(34);
    for round in 0..40 {
        let copies = scattered(&mut rng);
        assert_copied(&copies, [DType::F32, DType::I32, DType::F16][round % 3], &mut rng);
    }
}

#[test]
fn long_and_short_segments_in_one_launch() {
    let mut rng = StdRng::seed_from_u64(56);
    let lens = [700_001, 1, 3, 64, 0, 250_000, 7, 4096, 5, 1, 1, 2];
    let tensors =
        lens.map(|len| ShardedTensorSpec { shape: Shape::new([len, 2]), dim: 0, sizes: ShardSizes::Chunked(len) });
    let layout = FlatLayout::new(3, tensors.to_vec(), 4);
    for copies in [layout.pack_parts(1), layout.unpack_rows(), layout.pack_full()] {
        let plan = plan_of(&copies, DType::F32).unwrap();
        assert_eq!(plan.launches(), 1);
        assert_copies(&plan, &copies, DType::F32, &mut rng);
    }
}

#[test]
fn a_matrix_of_odd_rows_sharded_along_its_columns() {
    let mut rng = StdRng::seed_from_u64(78);
    let tensor =
        |columns| ShardedTensorSpec { shape: Shape::new([257, columns]), dim: 1, sizes: ShardSizes::Chunked(columns) };
    let layout = FlatLayout::new(3, vec![tensor(101), tensor(96), tensor(5)], 4);
    for copies in [layout.pack_full(), layout.unpack_rows(), layout.unpack_full()] {
        for dtype in [DType::F32, DType::F16] {
            assert_copied(&copies, dtype, &mut rng);
        }
    }
}

#[test]
fn nothing_to_copy_launches_one_kernel_of_zeros() {
    let mut rng = StdRng::seed_from_u64(90);
    let empty = CopyPlan::new(vec![Shape::new([0])], vec![Shape::new([0]), Shape::new([5])], Vec::new());
    assert_copied(&empty, DType::F32, &mut rng);
}
