//! Compares the kernel's reduction with burn's own operations on the same device, to the bit.

use burn::backend::cubecl::dtype_to_storage_type;
use burn::tensor::{DType, Distribution, Tensor};
use itertools::Itertools;

use super::*;
use crate::comm::backend::ProcessOptions;
use crate::comm::backend::ranges::slice;
use crate::comm::data::nccl::fake::FakeGpus;
use crate::comm::host_backend::HostBackend;
use crate::comm::{Call, Launch, ShardedTensor, TensorMeta, backend, launch};
use crate::memory::gpu::gpu;
use crate::placement::ShardSizes;
use crate::testing::LoopbackJob;

const OPS: [ReduceOp; 5] = [
    ReduceOp::Sum,
    ReduceOp::Avg,
    ReduceOp::Min,
    ReduceOp::Max,
    ReduceOp::Product,
];

/// Returns flat buffers of `ranks` ranks, each with one row per rank.
fn flats(ranks: usize, row: usize, dtype: DType) -> Vec<DispatchTensor> {
    let flat = |rank: usize| {
        let values = Tensor::<1>::random([ranks * row], Distribution::Uniform(-4.0, 4.0), &gpu());
        (values * (1.0 + rank as f32)).cast(dtype).into_dispatch()
    };
    (0..ranks).map(flat).collect()
}

fn bits(tensor: DispatchTensor) -> Vec<u32> {
    Tensor::<1>::from_dispatch(tensor)
        .into_data()
        .iter::<f32>()
        .map(f32::to_bits)
        .collect()
}

fn dtypes() -> Vec<DType> {
    let Some(CubeTensor { client, .. }) = primitive(&flats(1, 1, DType::F32)[0]).cloned() else {
        unreachable!()
    };
    [DType::F32, DType::F16, DType::BF16]
        .into_iter()
        .filter(|dtype| {
            client
                .properties()
                .supports_type(dtype_to_storage_type(*dtype))
        })
        .collect()
}

#[test]
fn reduces_like_burns_operations() {
    for (dtype, ranks) in dtypes().into_iter().cartesian_product([2, 3, 4, 5, 7]) {
        let row = 128 * ranks;
        let rank = ranks - 1 - ranks / 3;
        let flats = flats(ranks, row, dtype);
        let primitives = flats
            .iter()
            .map(|flat| primitive(flat).unwrap().clone())
            .collect_vec();
        for op in OPS {
            let ranges = slice(&[ranks * row], 0, rank * row..(rank + 1) * row);
            let expected = backend::reduce(&flats.iter().collect_vec(), &ranges, op, &gpu());
            let found = wrap(reduce::reduce_row(&primitives, rank, op));
            assert_eq!(
                bits(found),
                bits(expected),
                "{dtype:?} {ranks} ranks {op:?}"
            );
        }
    }
}

/// Checks that the minimum and the maximum are NaN whichever rank has it, as on the CPU, and that
/// infinities are values like others.
#[test]
fn nan_and_infinities_are_reduced_as_on_the_cpu() {
    for (dtype, ranks) in dtypes().into_iter().cartesian_product([2, 3, 5]) {
        let row = 128;
        let rank = ranks - 1;
        // In each element one rank has a special value, and the others have numbers.
        let value = |of: usize, at: usize| match (at / ranks) % 3 {
            _ if at % ranks != of => (of + at % 7) as f32 - 3.0,
            0 => f32::NAN,
            1 => f32::INFINITY,
            _ => f32::NEG_INFINITY,
        };
        let flat = |of: usize| {
            let values = (0..ranks * row).map(|at| value(of, at % row)).collect_vec();
            Tensor::<1>::from_floats(&values[..], &gpu())
                .cast(dtype)
                .into_dispatch()
        };
        let flats = (0..ranks).map(flat).collect_vec();
        let primitives = flats
            .iter()
            .map(|flat| primitive(flat).unwrap().clone())
            .collect_vec();
        let ranges = slice(&[ranks * row], 0, rank * row..(rank + 1) * row);
        for (op, best) in [
            (ReduceOp::Min, f32::min as fn(f32, f32) -> f32),
            (ReduceOp::Max, f32::max as fn(f32, f32) -> f32),
        ] {
            let expected = (0..row).map(|at| {
                let values = (0..ranks).map(|of| value(of, at)).collect_vec();
                let nan = values.iter().any(|value| value.is_nan());
                (!nan).then(|| values.into_iter().reduce(best).unwrap())
            });
            let expected = expected.collect_vec();
            let found = |tensor: DispatchTensor| {
                let values = Tensor::<1>::from_dispatch(tensor).into_data();
                values
                    .iter::<f32>()
                    .map(|value| Some(value).filter(|value| !value.is_nan()))
                    .collect_vec()
            };
            let kernel = wrap(reduce::reduce_row(&primitives, rank, op));
            assert_eq!(found(kernel), expected, "{dtype:?} {ranks} ranks {op:?}");
            let generic = backend::reduce(&flats.iter().collect_vec(), &ranges, op, &gpu());
            assert_eq!(
                found(generic),
                expected,
                "burn's operations, {dtype:?} {ranks} ranks {op:?}"
            );
        }
    }
}

/// Data on a device is copied to the host once for all processes, when the call is due to be sent:
/// that of a deferred call when it is requested. The completion thread copies it, so that neither
/// the rank nor the transport waits for the device.
#[expect(clippy::result_large_err, reason = "made once per test")]
#[test]
fn data_on_a_device_is_read_once_and_not_before_it_is_needed() {
    // No other test sends tensors of so many elements.
    for (processes, each, elements) in [(3, 1, 1009), (2, 2, 2003)] {
        let job = LoopbackJob::new(processes, 30);
        let device = gpu();
        let ends = job.run(|_, processes| {
            launch(
                Launch::on_backend(processes.backend(each)).with_device(device.clone()),
                |world| {
                    let gather = |call: Call, len: usize| {
                        let tensor = Tensor::<1>::full([len], world.rank() as f32, world.device())
                            .into_dispatch();
                        let shard = ShardedTensor {
                            tensor,
                            dim: 0,
                            sizes: ShardSizes::Chunked(world.size() * len),
                        };
                        world.all().all_gather(call, vec![shard])
                    };
                    let deferred = || Call::new("deferred").with_deferred();
                    let dropped = gather(deferred(), elements);
                    let waited_for = gather(deferred(), elements + 1);
                    world.barrier("all have posted")?;
                    let before = [0, 1].map(|at| reads::threads(elements + at).len());
                    world.barrier("all have counted")?;
                    let mut got = waited_for.wait()?;
                    got.extend(gather("eager".into(), elements + 2).wait()?);
                    drop(dropped);
                    world.barrier("all have their results")?;
                    let got = got
                        .into_iter()
                        .map(|tensor| Tensor::<1>::from_dispatch(tensor).into_data());
                    let values = got
                        .map(|data| data.iter::<f32>().collect::<Vec<_>>())
                        .collect::<Vec<_>>();
                    Ok((
                        before,
                        values,
                        [0, 1, 2].map(|at| reads::threads(elements + at)),
                    ))
                },
            )
        });
        let ranks = processes * each;
        let expected = [1, 2].map(|at| {
            (0..ranks)
                .flat_map(|rank| vec![rank as f32; elements + at])
                .collect::<Vec<_>>()
        });
        for (_, (before, values, after)) in ends
            .into_iter()
            .flat_map(|end| end.unwrap_or_else(|error| panic!("{error}")))
        {
            assert_eq!((before, values), ([0, 0], expected.to_vec()));
            let once = vec![Some("completion".to_string()); ranks];
            assert_eq!(
                after,
                [vec![], once.clone(), once],
                "{processes} processes of {each}"
            );
        }
    }
}

/// Ranks that pass no tensors use the same plane as those that pass some, wherever these are.
#[test]
fn tensors_of_the_host_and_of_a_device_are_told_apart_by_all_ranks() {
    let gpus = Arc::new(FakeGpus::new());
    let backend = HostBackend::new(2, ProcessOptions::default());
    backend.use_nccl(gpus.plane(0, true));
    let launched = Launch::on_backend(backend).with_device(gpu());
    let values = launch(launched, |world| {
        let mut values = Vec::new();
        for device in [crate::memory::host(), world.device().clone()] {
            let own = Tensor::<1>::full([3], 1.0 + world.rank() as f32, &device).into_dispatch();
            let comm = world.all();
            let sum = comm.all_reduce("sum".into(), vec![own.clone()], ReduceOp::Sum);
            values.extend(sum.wait()?);
            let metas = vec![TensorMeta {
                shape: [3].into(),
                dtype: DType::F32,
            }];
            let of_root = (world.rank() == 0).then_some(vec![own]);
            values.extend(comm.broadcast("root".into(), of_root, metas, 0).wait()?);
        }
        let values = values
            .into_iter()
            .map(|tensor| Tensor::<1>::from_dispatch(tensor).into_data());
        Ok(values
            .map(|data| data.iter::<f32>().next())
            .collect::<Vec<_>>())
    })
    .unwrap();
    for (_, values) in values {
        assert_eq!(values, [3.0, 1.0, 3.0, 1.0].map(Some));
    }
    assert_eq!(gpus.violations(), Vec::<String>::new());
}
