//! Tests of the number of launched kernels, and of the memory of results.

use burn::tensor::{DType, Shape};
use itertools::Itertools;
use rand::SeedableRng;
use rand::rngs::StdRng;

use super::{assert_copies, device, plan_of, upload};
use crate::kernels::cube::{CubeError, CubePlan, DeviceLimits, alignment};
use crate::kernels::{CopyPlan, FlatLayout, ShardedTensorSpec, StridedCopy};
use crate::placement::ShardSizes;

fn within(limits: DeviceLimits, copies: &CopyPlan) -> Result<CubePlan, CubeError> {
    CubePlan::within(limits, &device(), copies, DType::F32)
}

/// Returns a layout of many tensors with six columns over three ranks.
fn layout(dim: usize) -> FlatLayout {
    FlatLayout::new(
        3,
        [5, 9, 33, 1, 12, 70, 3]
            .map(|rows| ShardedTensorSpec {
                shape: Shape::new([rows, 6]),
                dim,
                sizes: ShardSizes::Chunked([rows, 6][dim]),
            })
            .to_vec(),
        1,
    )
}

#[test]
fn more_sources_than_a_kernel_binds_take_the_fewest_launches() {
    let mut rng = StdRng::seed_from_u64(1);
    // 4 of the 7 buffers are sources.
    let limits = DeviceLimits {
        bindings: 7,
        cubes: 1000,
    };
    for (copies, launches) in [
        (layout(0).pack_parts(0), 2),
        (layout(0).join_parts(), 6),
        (layout(1).join_parts(), 7),
        (layout(1).unpack_full(), 1),
    ] {
        let plan = within(limits, &copies).unwrap();
        assert_eq!(plan.launches(), launches);
        assert_copies(&plan, &copies, DType::F32, &mut rng);
    }
}

#[test]
fn as_many_sources_as_the_device_binds_are_one_launch() {
    let mut rng = StdRng::seed_from_u64(3);
    let most = device()
        .client()
        .properties()
        .hardware
        .max_bindings
        .min(200) as usize
        - 3;
    for (tensors, launches) in [(most, 1), (most + 1, 2)] {
        let tensor = ShardedTensorSpec {
            shape: Shape::new([6]),
            dim: 0,
            sizes: ShardSizes::Chunked(6),
        };
        let copies = FlatLayout::new(2, vec![tensor; tensors], 4).pack_parts(1);
        let limits = DeviceLimits {
            bindings: most + 3,
            cubes: 1000,
        };
        let plan = within(limits, &copies).unwrap();
        assert_eq!(plan.launches(), launches);
        assert_copies(&plan, &copies, DType::F32, &mut rng);
    }
}

#[test]
fn a_row_of_more_sources_than_a_kernel_binds_is_an_error() {
    let error = within(
        DeviceLimits {
            bindings: 5,
            cubes: 1000,
        },
        &layout(1).join_parts(),
    )
    .err()
    .unwrap();
    assert_eq!(
        error,
        CubeError::Bindings {
            needed: 3,
            limit: 2
        }
    );
}

#[test]
fn a_grid_wider_than_the_device_allows_has_rows() {
    let mut rng = StdRng::seed_from_u64(2);
    let tensor = ShardedTensorSpec {
        shape: Shape::new([4096 * 7 + 5]),
        dim: 0,
        sizes: ShardSizes::Chunked(4096 * 7 + 5),
    };
    let copies = FlatLayout::new(2, vec![tensor], 1).unpack_rows();
    let plan = within(
        DeviceLimits {
            bindings: 100,
            cubes: 3,
        },
        &copies,
    )
    .unwrap();
    assert_copies(&plan, &copies, DType::F32, &mut rng);
}

#[test]
fn results_are_views_of_one_block() {
    let copies = layout(0).unpack_full();
    let source = upload(
        &vec![1; copies.sources[0].num_elements() * 4],
        &copies.sources[0],
        DType::F32,
    );
    let plan = plan_of(&copies, DType::F32).unwrap();
    let block = plan.run(&[source]);
    let ids = block
        .tensors
        .iter()
        .map(|tensor| tensor.handle.clone().binding().memory.id())
        .unique()
        .count();
    assert_eq!(ids, 1);
    let align = alignment(&device().client()) as u64;
    assert!(block.tensors.iter().all(|tensor| {
        tensor
            .handle
            .offset_start
            .unwrap_or(0)
            .is_multiple_of(align)
    }));
    assert_eq!((plan.copied(), plan.padding()), (copies.copied() * 4, 0));
    let packed = layout(0).pack_full();
    assert_eq!(
        plan_of(&packed, DType::F32).unwrap().padding(),
        layout(0).padding() * 4
    );
}

#[test]
fn more_elements_than_32_bits_count_are_an_error() {
    let len = u32::MAX as usize + 8;
    let copies = CopyPlan::new(
        vec![Shape::new([len])],
        vec![Shape::new([1])],
        vec![StridedCopy::run(0, 0, len - 1, 0, 1)],
    );
    assert_eq!(
        plan_of(&copies, DType::F32).err(),
        Some(CubeError::TooLarge { len })
    );
}

/// Such a list is copied one tensor after the other.
#[test]
fn more_bytes_than_the_device_allocates_at_once_are_an_error() {
    let most = device().client().properties().memory.max_page_size;
    let len = most as usize / 4 + 1;
    let copies = CopyPlan::new(
        vec![Shape::new([1])],
        vec![Shape::new([len])],
        vec![StridedCopy::run(0, 0, 0, 0, 1)],
    );
    let error = plan_of(&copies, DType::F32).err();
    assert!(
        matches!(error, Some(CubeError::Allocation { bytes, most: limit }) if bytes > len && limit == most),
        "{error:?}"
    );
}

#[test]
#[should_panic(expected = "sources have [4] elements")]
fn other_sources_than_those_of_the_copies_are_refused() {
    let copies = CopyPlan::new(
        vec![Shape::new([4])],
        vec![Shape::new([4])],
        vec![StridedCopy::run(0, 0, 0, 0, 4)],
    );
    plan_of(&copies, DType::F32)
        .unwrap()
        .run(&[upload(&[0; 12], &Shape::new([3]), DType::F32)]);
}
