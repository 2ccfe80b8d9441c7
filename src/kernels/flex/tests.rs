//! Tests of copies of Flex tensors against loops over single elements, on one thread and on three.

use std::fmt::Debug;

use burn::backend::flex::{FlexTensor, Layout};
use burn::tensor::{BoolStore, Bytes, DType, Shape};
use bytemuck::Pod;
use half::{bf16, f16};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use super::{Sources, run};
use crate::kernels::tests::run as run_by_element;
use crate::kernels::{CopyPlan, FlatLayout, ShardedTensorSpec, StridedCopy};
use crate::placement::ShardSizes;

/// Origin of each element of the targets: its source and the position there; `None` in gaps.
type Origins = Vec<Vec<Option<(usize, usize)>>>;

/// Returns random copies, and the origins of their elements.
fn draw(rng: &mut StdRng, longest: usize) -> (CopyPlan, Origins) {
    let copies = if rng.random() {
        of_blocks(rng, longest)
    } else {
        of_layout(rng)
    };
    let names: Vec<Vec<(usize, usize)>> = copies
        .sources()
        .iter()
        .enumerate()
        .map(|(source, shape)| (0..shape.num_elements()).map(|at| (source, at)).collect())
        .collect();
    let origins = run_by_element(&copies, &names);
    (copies, origins)
}

/// Returns copies in which every target consists of rows of blocks. The blocks are in random order,
/// and some are missing.
fn of_blocks(rng: &mut StdRng, longest: usize) -> CopyPlan {
    let mut lens = vec![0; rng.random_range(1..4)];
    let mut segments = Vec::new();
    let mut targets = Vec::new();
    for target in 0..rng.random_range(1..4) {
        let rows = [0, 1, 1, 2, 7, 64][rng.random_range(0..6)];
        let mut start = 0;
        let widths: Vec<usize> = (0..rng.random_range(0..5))
            .map(|_| {
                let most = [1, 3, 9, 40, 70, longest][rng.random_range(0..6)];
                rng.random_range(0..=most)
            })
            .collect();
        let width: usize = widths.iter().sum();
        for run in widths {
            let source = rng.random_range(0..lens.len());
            let from = rng.random_range(0..5);
            let from_stride = run + [0, 0, 1, 5][rng.random_range(0..4)];
            if rng.random_range(0..4) > 0 {
                segments.push(StridedCopy {
                    source,
                    target,
                    from,
                    to: start,
                    rows,
                    run,
                    from_stride,
                    to_stride: width,
                });
                lens[source] = lens[source].max(from + rows * from_stride + rng.random_range(0..3));
            }
            start += run;
        }
        targets.push(Shape::new([rows, width]));
    }
    for place in (1..segments.len()).rev() {
        segments.swap(place, rng.random_range(0..=place));
    }
    CopyPlan::new(
        lens.iter().map(|len| Shape::new([*len])).collect(),
        targets,
        segments,
    )
}

/// Returns one of the copies of a random layout. With many ranks, runs are single elements.
fn of_layout(rng: &mut StdRng) -> CopyPlan {
    let ranks = [1, 2, 3, 8, 19][rng.random_range(0..5)];
    let tensors = (0..rng.random_range(1..4)).map(|_| {
        let each = [rng.random_range(0..3), 1, rng.random_range(0..9)][rng.random_range(0..3)];
        let dim = rng.random_range(0..3);
        let mut shape = [
            rng.random_range(1..40),
            rng.random_range(1..40),
            rng.random_range(1..3),
        ];
        shape[dim] = ranks * each + rng.random_range(0..2);
        ShardedTensorSpec {
            shape: Shape::new(shape),
            dim,
            sizes: ShardSizes::Chunked(shape[dim]),
        }
    });
    let layout = FlatLayout::new(ranks, tensors.collect(), [1, 4][rng.random_range(0..2)]);
    let rank = rng.random_range(0..ranks);
    match rng.random_range(0..6) {
        0 => layout.pack_parts(rank),
        1 => layout.unpack_parts(rank),
        2 => layout.pack_full(),
        3 => layout.unpack_full(),
        4 => layout.unpack_rows(),
        _ => layout.join_parts(),
    }
}

/// Returns a tensor of `values` as a view that begins `before` elements after the start of its
/// memory.
fn view<E: Pod + Send + Sync>(values: &[E], before: usize, dtype: DType) -> FlexTensor {
    let memory = [&vec![E::zeroed(); before][..], values].concat();
    let len = memory.len();
    let full = FlexTensor::new(
        Bytes::from_elems(memory),
        Layout::contiguous(Shape::new([len])),
        dtype,
    );
    full.narrow(0, before, values.len())
}

/// Calls `test` in a pool of one thread and in one of three, each time with its own seed.
fn on_one_thread_and_three(test: impl Fn(&mut StdRng, usize) + Sync) {
    for threads in [1, 3] {
        let pool = rayon::ThreadPoolBuilder::new()
            .num_threads(threads)
            .build()
            .unwrap();
        pool.install(|| {
            // `LONG_TESTS` runs more and longer ones.
            let (seeds, long) = if std::env::var_os("LONG_TESTS").is_some() {
                (48, 30_000)
            } else {
                (32, 12_000)
            };
            for seed in 0..seeds {
                // A few are long enough to be divided among the threads.
                let longest = if seed % 8 == 0 { long } else { 200 };
                test(&mut StdRng::seed_from_u64(seed), longest);
            }
        });
    }
}

fn filled<E>(rng: &mut StdRng, copies: &CopyPlan, value: impl Fn(&mut StdRng) -> E) -> Vec<Vec<E>> {
    copies
        .sources()
        .iter()
        .map(|shape| (0..shape.num_elements()).map(|_| value(rng)).collect())
        .collect()
}

fn views<E: Pod + Send + Sync>(
    rng: &mut StdRng,
    values: &[Vec<E>],
    dtype: DType,
) -> Vec<FlexTensor> {
    values
        .iter()
        .map(|values| view(values, rng.random_range(0..6), dtype))
        .collect()
}

/// Checks that each element of `targets` is bitwise equal to the value that `expected` returns.
fn assert_targets<E: Pod + Debug>(
    targets: &[FlexTensor],
    copies: &CopyPlan,
    origins: &Origins,
    dtype: DType,
    expected: impl Fn(usize, usize, Option<(usize, usize)>) -> E,
) {
    assert_eq!(targets.len(), origins.len());
    for (target, tensor) in targets.iter().enumerate() {
        assert_eq!(
            (tensor.dtype(), tensor.layout().shape()),
            (dtype, &copies.targets()[target])
        );
        let copied = elements::<E>(tensor);
        assert_eq!(copied.len(), origins[target].len());
        for (at, (copied, origin)) in copied.iter().zip(&origins[target]).enumerate() {
            let expected = expected(target, at, *origin);
            let same = bytemuck::bytes_of(copied) == bytemuck::bytes_of(&expected);
            assert!(
                same,
                "element {at} of target {target} is {copied:?}, not {expected:?}: {copies:?}"
            );
        }
    }
}

fn elements<E: Pod>(tensor: &FlexTensor) -> &[E] {
    let bytes = crate::memory::flex::elements(tensor).expect("targets are row-major");
    // An empty slice need not be aligned.
    if bytes.is_empty() {
        &[]
    } else {
        bytemuck::cast_slice(bytes)
    }
}

fn copies_elements<E: Pod + Send + Sync + Debug>(
    dtype: DType,
    value: impl Fn(&mut StdRng) -> E + Sync,
) {
    on_one_thread_and_three(|rng, longest| {
        let (copies, origins) = draw(rng, longest);
        let values = filled(rng, &copies, &value);
        let sources = views(rng, &values, dtype);
        let targets = run(&copies, &Sources::of(&sources));
        assert_targets(&targets, &copies, &origins, dtype, |_, _, origin| {
            origin.map_or(E::zeroed(), |(source, at)| values[source][at])
        });
        assert!(
            targets.iter().all(FlexTensor::is_unique),
            "each in separate memory"
        );
    });
}

#[test]
fn elements_of_every_dtype_arrive_where_the_segments_lead() {
    copies_elements(DType::F32, |rng| f32::from_bits(rng.random()));
    copies_elements(DType::F64, |rng| f64::from_bits(rng.random()));
    copies_elements(DType::F16, |rng| f16::from_bits(rng.random()));
    copies_elements(DType::BF16, |rng| bf16::from_bits(rng.random()));
    copies_elements(DType::I64, |rng| rng.random::<i64>());
    copies_elements(DType::I32, |rng| rng.random::<i32>());
    copies_elements(DType::U8, |rng| rng.random::<u8>());
    copies_elements(DType::Bool(BoolStore::Native), |rng| {
        rng.random_range(0..2_u8)
    });
}

#[test]
fn full_tensors_sharded_along_columns_are_packed_and_unpacked() {
    // Single elements, short runs, and long ones.
    for (rows, each, ranks) in [(9001, 1, 8), (2003, 25, 3), (701, 600, 2)] {
        let shape = Shape::new([rows, each * ranks]);
        let full: Vec<u16> = (0..shape.num_elements())
            .map(|at| (at * 7 + at / 65_521) as u16)
            .collect();
        let tensor = ShardedTensorSpec {
            shape: shape.clone(),
            dim: 1,
            sizes: ShardSizes::Chunked(each * ranks),
        };
        let layout = FlatLayout::new(ranks, vec![tensor], 1);

        let source = view(&full, 3, DType::F16).reshape(shape);
        let packed = run(&layout.pack_full(), &Sources::of([&source])).remove(0);
        let part = |rank: usize| {
            full.chunks(each * ranks)
                .flat_map(move |row| &row[rank * each..][..each])
        };
        assert!(
            elements::<u16>(&packed)
                .iter()
                .eq((0..ranks).flat_map(part)),
            "{rows} rows of {each} x {ranks}"
        );
        let unpacked = run(&layout.unpack_full(), &Sources::of([&packed])).remove(0);
        assert!(
            elements::<u16>(&unpacked) == full,
            "{rows} rows of {each} x {ranks}"
        );
    }
}
