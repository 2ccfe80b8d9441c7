//! Data of ranks on a device, for other processes.

use std::sync::Arc;

use burn::tensor::Tensor;

use crate::Error;
use crate::comm::data::payload::reads;
use crate::comm::transport::peer_processes::PayloadData;
use crate::comm::{Call, CommError, Launch, ShardedTensor, launch};
use crate::memory::gpu::gpu;
use crate::placement::ShardSizes;
use crate::testing::LoopbackJob as Job;

/// Data on a device is copied to the host once for all processes, when the call is due to be sent:
/// that of a deferred call when it is requested. The completion thread copies it, so that neither
/// the rank nor the transport waits for the device.
#[test]
fn data_on_a_device_is_read_once_and_not_before_it_is_needed() {
    // No other test sends tensors of so many elements.
    for (processes, each, elements) in [(3, 1, 1009), (2, 2, 2003)] {
        let job = Job::new(processes, 30);
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

struct Unreadable;

impl AsRef<[u8]> for Unreadable {
    fn as_ref(&self) -> &[u8] {
        panic!("the device is lost")
    }
}

#[test]
fn a_device_that_cannot_be_read_fails_its_rank() {
    let ends = Job::new(2, 31).run(|process, processes| {
        launch(Launch::on_backend(processes.backend(1)), |world| {
            world.barrier("both have begun")?;
            if process == 1 {
                let backend = processes
                    .state
                    .lock()
                    .backends()
                    .next()
                    .expect("the launch has one");
                let device_of = Some(world.rank());
                let data = PayloadData {
                    payloads: vec![Arc::new(Unreadable)],
                    device_of,
                    ..PayloadData::default()
                };
                backend.send_data(0, 0, 0, data);
            }
            (0..100_000).try_for_each(|_| world.barrier("until the device is lost"))
        })
    });
    for end in ends {
        let cause = end.expect_err("a rank has failed").cause;
        let Error::Comm(CommError::RankPanicked {
            rank: 1, message, ..
        }) = &cause
        else {
            panic!("{cause}")
        };
        assert_eq!(message, "the device is lost");
    }
}
