//! What a collective that is made again and again allocates beside its results.

use std::sync::Arc;

use burn::backend::DispatchTensor;
use burn::backend::flex::FlexTensor;
use burn::tensor::{DType, Shape, Tensor, TensorData};
use burn_dtensor::comm::{CollectivePlan, Communicator, ReduceOp, TensorMeta};
use burn_dtensor::placement::ShardSizes;
use burn_dtensor::prelude::*;

use super::live::{allocations, alone};

const FULL: [usize; 2] = [8, 8];

/// Of one call, posted and waited for, on a rank: what it allocates when the other has looked up
/// what both need, and what it does at least.
fn of_call(
    comm: &Communicator,
    plan: &Arc<CollectivePlan>,
    tensors: &[DispatchTensor],
) -> Result<usize> {
    let mut least = usize::MAX;
    for call in 0..8 {
        let tensors = tensors.to_vec();
        let is_second = (call + comm.group().rank()) % 2 == 1;
        let (work, posted) = allocations(|| comm.execute_plan("step".into(), plan, tensors));
        if is_second {
            comm.barrier("the other has its results".into()).wait()?;
        }
        let (results, waited) = allocations(|| work.wait());
        drop(results?);
        if !is_second {
            comm.barrier("the other has its results".into()).wait()?;
        }
        least = least.min(posted + waited);
    }
    Ok(least)
}

/// What a call on so many tensors allocates on the rank that allocates more.
fn of(
    tensors: usize,
    own: [usize; 2],
    plan: impl Fn(&Communicator, Vec<(TensorMeta, usize, ShardSizes)>) -> Result<Arc<CollectivePlan>>
    + Sync,
) -> usize {
    let counts = launch(Launch::threads(2), |world| {
        let comm = world.all();
        let full = (
            TensorMeta {
                shape: Shape::from(FULL),
                dtype: DType::F32,
            },
            0,
            ShardSizes::Chunked(FULL[0]),
        );
        let plan = plan(&comm, vec![full; tensors])?;
        let own: Vec<_> = (0..tensors)
            .map(|_| Tensor::<2>::ones(own, world.device()).into_dispatch())
            .collect();
        of_call(&comm, &plan, &own)
    });
    counts
        .unwrap()
        .into_iter()
        .map(|(_, count)| count)
        .max()
        .unwrap()
}

/// Tensors are what burn makes of elements that are there, and the elements; beside them there is a
/// handful, whatever their number.
#[test]
fn a_planned_collective_allocates_its_results_and_a_handful() {
    let _alone = alone();
    let (_tensor, of_result) =
        allocations(|| FlexTensor::from_data(TensorData::new(vec![1f32; 64], FULL)));
    let gather = |count| {
        of(count, [4, 8], |comm, full_tensors| {
            Ok(comm.plan_all_gather(full_tensors)?)
        })
    };
    let scatter = |count| {
        of(count, FULL, |comm, full_tensors| {
            Ok(comm.plan_reduce_scatter(full_tensors, ReduceOp::Avg)?)
        })
    };
    for (what, few, many) in [
        ("gather", gather(20), gather(60)),
        ("scatter", scatter(20), scatter(60)),
    ] {
        // Who comes when the other is not there may make one or two more, of any number of tensors.
        let more = (many - few).abs_diff(40 * of_result);
        assert!(more <= 4, "{what}: {few} of 20 tensors, {many} of 60");
        assert!(few - 20 * of_result <= 16, "{what}: {few} of 20 tensors");
        println!("{what}: {} beside the results", few - 20 * of_result);
    }
}
